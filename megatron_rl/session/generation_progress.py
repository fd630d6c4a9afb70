"""The progress files of `megatron-rl generate`: the responses so far, and a file that marks the output as complete.

Both contain digests of the inputs that determine the responses. Settings that only determine where and how responses
are computed (engine memory, GPUs, number of ranks) are not part of the digests. A run in which only these settings have
changed resumes from the existing files.
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

PARTS = "parts"  # directory of the responses generated so far; removed when the output files are complete
MARK = "finished.json"  # file in the output directory that marks the output as complete
_ELSEWHERE = ("output", "engine", "launch", "job")  # sections that change no response, except as `_deciding` says
# Settings that affect a response only through its prompt, or that affect only the processing after generation.
_BY_PROMPT = ("data", "template", "chat", "max_prompt_tokens")
_AFTERWARDS = ("validation_share", "keep_truncated", "reward")


def parts_digest(
    settings: Mapping[str, Any], inputs: Mapping[str, Any], prompts: Iterable[Sequence[int]], chunk: int
) -> str:
    """Returns a digest of everything that determines the responses to `prompts`.

    `settings`: the resolved config of `generate` as plain values. `inputs`: digests of all files that are read
    (run.input_digests); only the digests of model files are used. `chunk`: number of prompts that are sampled with one
    seed.
    """
    told = _deciding(settings, without=(*_ELSEWHERE, *_BY_PROMPT, *_AFTERWARDS))
    model = {name: own for name, own in inputs.items() if re.match(r"model\b", name)}
    return _digest([told, model, chunk, *([*map(int, prompt)] for prompt in prompts)])


def problems_digest(inputs: Mapping[str, Any], values: Iterable[Any], parts: str) -> str:
    """Returns a digest of everything that determines the output files: the responses, the problems' fields that are
    written with the responses, and the code of this package.

    `inputs`: digests of all files that are read. `values`: fields of each problem. `parts`: result of
    `parts_digest`."""
    code = {name: own for name, own in inputs.items() if is_code(name)}
    return _digest([parts, code, *values])


def mark_finished(settings: Mapping[str, Any], problems: str, files: Sequence[str]) -> None:
    """Marks the output as complete. `problems`: result of `problems_digest`. `files`: names of the output files."""
    told = {"settings": _settings_digest(settings), "problems": problems, "files": [*files]}
    write_json(Path(settings["output"]) / MARK, told)


def finished(settings: Mapping[str, Any], problems: str | None = None) -> bool:
    """Returns whether the output directory has all output files of a finished `generate` command with these settings.

    `problems`: `problems_digest` of the current problems; if None, only the settings are compared.
    """
    output = Path(settings["output"])
    try:
        found = read_json(output / MARK)
        same = found["settings"] == _settings_digest(settings) and problems in (None, found["problems"])
        return same and all((output / name).is_file() for name in found["files"])
    # raised if MARK, the file that marks the output as complete, is missing or damaged
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _settings_digest(settings: Mapping[str, Any]) -> str:
    return _digest([_deciding(settings, without=_ELSEWHERE)])


def _deciding(settings: Mapping[str, Any], *, without: Sequence[str]) -> dict[str, Any]:
    """Returns the settings that determine the responses: all sections of the config except the sections named in
    `without`, and the settings `max_model_len` and `args` of the engine."""
    told = {name: value for name, value in settings.items() if name not in without}
    return told | {"engine": [settings["engine"].get("max_model_len"), settings["engine"].get("args", [])]}


def _digest(values: Iterable[Any]) -> str:
    made = hashlib.sha256()
    for value in values:
        made.update(json.dumps(value, sort_keys=True, default=str).encode() + b"\0")
    return made.hexdigest()[:16]
