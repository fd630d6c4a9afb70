"""`megatron-rl init KIND FILE`: writes a commented starter config, or the profile of a Slurm cluster."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from megatron_rl.cluster.profile import SHIPPED
from megatron_rl.config.base import ConfigError

STARTS = Path(__file__).parent / "starts"
PROFILE = SHIPPED / "profiles" / "a100.yaml"
# Defaults for the model and the data: names on the Hugging Face Hub.
HUB = {"model": "Qwen/Qwen2.5-0.5B-Instruct", "data": "openai/gsm8k"}
PROBLEMS = {"train": 64, "test": 16}  # number of problems of each split with --tiny
_BLOCK = re.compile(r"^ *# if (\w+)\n(.*?)^ *# end\n", re.DOTALL | re.MULTILINE)


def run(args: argparse.Namespace) -> int:
    """Implements `megatron-rl init`: writes a starter config, and with `--tiny` a tiny model and problems. Returns 0.

    The config templates in the package have conditional blocks `# if WORD ... # end`. The words are `tiny` for the tiny
    model, `real` for any other model, `hub` for the default data on the hub, and `own` for data given by `--data`.
    Raises ConfigError if the file exists, unless `--force` is given.
    """
    target = Path(args.file)
    if target.exists() and not args.force:
        raise ConfigError(f"{target} is there already: give another name, or --force to write over it")
    if args.tiny and (args.model or args.data):
        raise ConfigError("--tiny makes a model and data of its own: leave --model and --data out")
    model, data, kinds = args.model or HUB["model"], args.data or HUB["data"], {"real", "own" if args.data else "hub"}
    if args.tiny:
        from megatron_rl.data.tiny import write_tiny_model, write_tiny_problems  # imports torch

        tiny = Path(args.tiny)
        model, data, kinds = str(write_tiny_model(tiny / "model")), str(tiny / "data"), {"tiny"}
        for seed, (split, count) in enumerate(PROBLEMS.items()):
            write_tiny_problems(tiny / "data" / f"{split}.jsonl", count, seed=seed)
    then = f"`megatron-rl check {target}` and `megatron-rl train {target}`"
    if args.kind == "profile":
        text, then = PROFILE.read_text(encoding="utf-8"), f"`megatron-rl submit CONFIG.yaml --profile {target}`"
    else:
        text = config_text(args.kind, model, data, kinds, name=target.stem, file=str(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    print(f"{target} is written: look at it, then {then}")
    return 0


def config_text(kind: str, model: str, data: str, kinds: set[str], *, name: str, file: str) -> str:
    """Returns the text of the config template `kind`.

    Of the template's conditional blocks `# if WORD ... # end`, only blocks whose WORD is in `kinds` are included.
    `model`, `data`, `name` and `file` replace the placeholders of the template."""
    text = (STARTS / f"{kind}.yaml").read_text(encoding="utf-8")
    text = _BLOCK.sub(lambda block: block[2] if block[1] in kinds else "", text)
    for mark, value in (("MODEL", model), ("DATA", data), ("NAME", name)):
        text = text.replace(f"__{mark}__", json.dumps(value))
    return text.replace("__FILE__", file)
