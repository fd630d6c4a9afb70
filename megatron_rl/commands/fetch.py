"""`megatron-rl fetch`: downloads models and data sets from the Hugging Face Hub to a shared folder."""

from __future__ import annotations

import argparse
import contextlib
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.commands.settings import load
from megatron_rl.config.schema import ConfigError, EvalConfig

HELP = "download models and data sets of the Hugging Face hub, or all that a config names, to a shared folder"
DESCRIPTION = """Downloads models and data sets of the Hugging Face hub, on a host that has a network:
  megatron-rl fetch Qwen/Qwen2.5-7B dataset:openai/gsm8k --to /shared/hub
  megatron-rl fetch my_run.yaml --to /shared/hub
For a config it prints the overrides with which a run reads from there. Benchmarks of an evaluation are fetched, too. A
name may have a branch, tag or commit behind it (Qwen/Qwen2.5-7B@main); without one, what was fetched before stays as it
is, and a download that was cut goes on. When a folder goes to another commit, fetched files that this one does not have
are removed. Each folder gets .fetched.json, with the commit and the SHA-256 of every file. Only safetensors, JSON and
the tokenizer's files of models are fetched."""


def add_parser(commands: Any) -> None:
    """Adds the argument parser of `megatron-rl fetch` to `commands`, the subparsers of the command line."""
    parser = commands.add_parser(
        "fetch", help=HELP, description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "what",
        nargs="+",
        metavar="OWNER/NAME | dataset:OWNER/NAME | CONFIG.yaml | a.b=c",
        help="names at the hub, with @REVISION or without; or a config, with overrides",
    )
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="the folder that gets them")


def run(args: argparse.Namespace) -> int:
    """Downloads the models and data sets, one after the other. Returns 0. Raises ConfigError if a download fails."""
    from megatron_rl.data import hub_fetch

    settings = [word for word in args.what if "=" in word or Path(word).suffix in (".yaml", ".yml")]
    wanted = [hub_fetch.parse(word) for word in args.what if word not in settings]
    config = load(settings)[1] if settings else None
    named = [] if config is None else hub_fetch.wanted_by(config)
    sets = _benchmark_sets(config.benchmarks, config.data_dir) if isinstance(config, EvalConfig) else []
    if settings and not (named or sets):
        print("the config names nothing of the hub: its models and data are files here")
    overrides = [f"data_dir={args.to.absolute() / hub_fetch.DATASETS}"] if sets else []
    for each in [*wanted, *named, *(hub_fetch.Wanted(name=name, kind="dataset") for name in sets)]:
        done = hub_fetch.fetch(each, args.to.absolute())
        verb = "fetched" if done.new else "is here already:"
        print(f"{done.wanted.name} {verb} {len(done.files)} files, {done.size / 1e9:.2f} GB, commit {done.commit[:12]}")
        print(f"  {done.folder}")
        overrides += [f"{key}={done.folder}" for key in each.keys]
    if overrides:
        print("with these overrides a run of this config reads from there:")
        print("  " + " \\\n  ".join(shlex.quote(override) for override in overrides))
    return 0


def _benchmark_sets(names: Sequence[str], data_dir: str | None) -> list[str]:
    """Returns the Hugging Face Hub names of the data sets of the benchmarks `names`, without duplicates.

    Returns an empty list if `data_dir` is set and has all of them. Raises ConfigError for an unknown benchmark.
    """
    from megatron_rl.evaluation.benchmarks import benchmark, source_of

    found = [benchmark(name) for name in names]
    if data_dir is not None:
        with contextlib.suppress(ConfigError):
            for one in found:
                source_of(one, data_dir)
            return []
    return [*dict.fromkeys(one.hub for one in found)]
