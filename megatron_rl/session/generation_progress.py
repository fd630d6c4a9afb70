"""What a directory of SFT data keeps of its answers: the parts that are written, and the mark that all of them are.

Both are known by digests of what decides the answers: where and how they are computed (the engine's memory, its GPUs,
the number of ranks) decides nothing, so that another setting of it goes on from what is there.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.config.sources import is_code
from megatron_rl.run.checkpoint import read_json, write_json

PARTS = "parts"  # the directory of the answers that are written, until all are
MARK = "finished.json"  # stands in the output directory when its files are complete
_ELSEWHERE = ("output", "engine", "launch")  # settings that decide no answer
# Settings that decide an answer only by its prompt, or only what becomes of it.
_BY_PROMPT = ("data", "template", "chat", "max_prompt_tokens")
_AFTERWARDS = ("validation_share", "keep_truncated", "reward")


def parts_digest(
    settings: Mapping[str, Any], inputs: Mapping[str, Any], prompts: Iterable[Sequence[int]], chunk: int
) -> str:
    """Returns the digest of the answers to these prompts.

    `settings`: the resolved config of `generate` as plain values. `inputs`: all files that are read
    (run.input_digests), of which the model decides the answers. `chunk`: how many answers are drawn with one seed.
    """
    told = _deciding(settings, without=(*_ELSEWHERE, *_BY_PROMPT, *_AFTERWARDS))
    model = {name: own for name, own in inputs.items() if re.match(r"model\b", name)}
    return _digest([told, model, chunk, *([*map(int, prompt)] for prompt in prompts)])


def problems_digest(inputs: Mapping[str, Any], values: Iterable[Any], parts: str) -> str:
    """Returns the digest of the answers and of what is written beside them. `inputs`: all that is read; `values`: each
    problem's fields; `parts`: the digest of the parts."""
    code = {name: own for name, own in inputs.items() if is_code(name)}
    return _digest([parts, code, *values])


def mark_finished(settings: Mapping[str, Any], problems: str, files: Sequence[str]) -> None:
    """Marks the output as complete. `problems`: the digest of the problems; `files`: names of the files written."""
    told = {"settings": _settings_digest(settings), "problems": problems, "files": [*files]}
    write_json(Path(settings["output"]) / MARK, told)


def finished(settings: Mapping[str, Any], problems: str | None = None) -> bool:
    """Returns whether the output has all files of these settings.

    `problems`: the digest of the problems as they are now; None compares the settings alone.
    """
    output = Path(settings["output"])
    try:
        found = read_json(output / MARK)
        same = found["settings"] == _settings_digest(settings) and problems in (None, found["problems"])
        return same and all((output / name).is_file() for name in found["files"])
    except (OSError, ValueError, KeyError, TypeError):  # no mark, or one that is damaged
        return False


def _settings_digest(settings: Mapping[str, Any]) -> str:
    return _digest([_deciding(settings, without=_ELSEWHERE)])


def _deciding(settings: Mapping[str, Any], *, without: Sequence[str]) -> dict[str, Any]:
    """Returns the settings but for `without`, and those of the engine that shorten answers or change the model."""
    told = {name: value for name, value in settings.items() if name not in without}
    return told | {"engine": [settings["engine"].get("max_model_len"), settings["engine"].get("args", [])]}


def _digest(values: Iterable[Any]) -> str:
    made = hashlib.sha256()
    for value in values:
        made.update(json.dumps(value, sort_keys=True, default=str).encode() + b"\0")
    return made.hexdigest()[:16]
