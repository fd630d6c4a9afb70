"""Opens data sets of reasoning-gym (arXiv 2505.24760) by name, and grades answers with the library's scorers.

The library is optional. Without it, importing this module raises ConfigError.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rl.config.base import ConfigError, refuse
from megatron_rl.rewards.algebra_limits import NO_RESULT
from megatron_rl.rewards.math_cost_limit import too_costly_anywhere
from megatron_rl.texts.tags import block_texts, boxed

try:
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import DATASETS, create_dataset
except ImportError as error:
    raise ConfigError(
        f"reasoning-gym cannot be imported ({error}): run `pip install reasoning-gym`, or take another data.path and "
        "reward.target"
    ) from error

COMPOSITE = "composite"  # name of the library's data set that mixes other data sets by weight
GIVEN = ("size", "seed")  # settings of a data set that are set in data.generated and refused in data.generated.args
# Number of problems that a grading worker caches. A small cache is enough, because the answers to one problem are
# graded consecutively.
KEPT = 64
# reasoning-gym data sets whose scorer evaluates the answer as Python code, directly or through sympy's parse_expr.
EVALUATED = frozenset(
    {
        *("binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication"),
        *("puzzle24", "simple_integration", "spiral_matrix", "string_insertion"),
    }
)
# reasoning-gym data sets that iterate over sets of strings.
# They generate other problems in every process, unless PYTHONHASHSEED is 0.
HASHED = frozenset({"isomorphic_strings", "polynomial_multiplication", "ransom_note", "word_ladder"})
UNSEEDED = frozenset({"codeio", "knight_swap", "list_functions"})  # data sets that partly ignore the setting `seed`
_UNREADABLE = (*NO_RESULT, SyntaxError)  # errors of scorers for a malformed answer
_POWER = re.compile(r"\*\*|\^|!")
_BOX = re.compile(r"\\boxed\{(.*)\}", re.DOTALL)
# Matches an answer that could run code when a scorer evaluates the answer: an answer with attribute access,
# with a call of a function whose name is not in this pattern, or with characters that can hide a call.
_CODE = re.compile(
    r"__|\\|[^\x00-\x7f]|\.\s*[A-Za-z_]|[)\]}\"']\s*\(|"
    r"\b(?!(?:a?sin|a?cos|a?tan|sinh|cosh|tanh|sec|csc|cot|exp|log|ln|sqrt|[Aa]bs|Integral|erfi?|[SCE]i)\b)"
    r"[A-Za-z_]\w+\s*\("
)


def score(response: str, payload: Mapping[str, Any]) -> float:
    r"""Returns the score of the answer in a response, 0 to 1, computed by the scorer of the problem's reasoning-gym
    data set.

    The answer is the content of the last <answer> block; a \boxed{} around the whole content is removed. Without an
    <answer> block, the answer is the content of the last \boxed{}. The scorer gets None in place of the answer if the
    response has no answer, if the scorer fails on the answer, or if the scorer evaluates answers as code and this
    answer could run code. Raises ValueError if the installed library generates another problem than the data has.

    `payload`: the problem's fields. The field "entry" is the return value of `reference`.
    """
    entry = payload["entry"]
    settings = json.dumps(entry["args"], sort_keys=True)
    item = _item(entry["name"], settings, entry["index"])
    if digest(item["question"]) != entry["digest"]:
        raise ValueError(
            f"problem {entry['index']} of {entry['name']} is another one in the reasoning-gym that is installed here: "
            "install the version that the data was made with"
        )
    answer, dataset = stated(response), _opened(entry["name"], settings)
    if answer is not None and item["metadata"].get("source_dataset") in EVALUATED and _refused(answer):
        answer = None
    try:
        # copied because a scorer may modify the entry
        return float(dataset.score_answer(answer=answer, entry=copy.deepcopy(item)))
    except _UNREADABLE:
        return float(dataset.score_answer(answer=None, entry=copy.deepcopy(item)))


def _refused(answer: str) -> bool:
    """Returns whether an answer could run code, or would take too long, when a scorer evaluates it."""
    return bool(_CODE.search(answer)) or bool(_POWER.search(answer) and too_costly_anywhere(answer))


def stated(response: str) -> str | None:
    """Returns the part of a response that `score` grades as the answer; None if there is no answer."""
    blocks = block_texts(response, "answer")
    if not blocks:
        return boxed(response)
    answer = blocks[-1].strip()
    box = _BOX.fullmatch(answer)
    return box[1].strip() if box and boxed(answer) == box[1].strip() else answer


def reference(name: str, args: Mapping[str, Any], index: int, question: str) -> dict[str, Any]:
    """Returns a JSON-serializable mapping from which `score` regenerates problem `index` of the data set `name`.

    `args`: all settings of the data set, including size and seed. `question`: text of the problem; the mapping has only
    the digest of this text.
    """
    return {"name": name, "args": dict(args), "index": index, "digest": digest(question)}


def digest(question: str) -> str:
    """Returns the first 16 hexadecimal digits of the SHA-256 of a question."""
    return hashlib.sha256(question.encode()).hexdigest()[:16]


def open_dataset(name: str, args: Mapping[str, Any]) -> Any:
    """Returns reasoning-gym's data set `name`. `args`: all settings of the data set, including size and seed.

    The data set `composite` has the setting `datasets`, a list of {name, weight, config}. Raises ConfigError for an
    unknown name or setting, and for a value that the library refuses.
    """
    refuse(*_problems(name, args))
    settings = dict(args)
    if name == COMPOSITE:
        settings["datasets"] = [DatasetSpec(**{"weight": 1.0, "config": {}, **part}) for part in args["datasets"]]
    try:
        return create_dataset(name, **settings)
    except (AssertionError, ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f"reasoning_gym:{name} refuses data.generated = {dict(args)}: {type(error).__name__}: {error}"
        ) from error


def _problems(name: str, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yields error messages about a data set and, for `composite`, about the data sets that it mixes. Errors are an
    unknown name, an unknown setting, and a data set that would generate different problems in every process."""
    if name not in DATASETS:
        yield f"reasoning_gym:{name} is no data set of reasoning-gym; {_near(name, DATASETS)}"
        return
    names = [field.name for field in dataclasses.fields(DATASETS[name][1])]
    if wrong := [key for key in settings if key not in names]:
        taken = [key for key in names if key not in GIVEN]
        yield f"reasoning_gym:{name} has no setting {wrong[0]!r}; {_near(wrong[0], taken)}"
    if name in UNSEEDED:
        yield (
            f"reasoning_gym:{name} draws other problems every time, whatever its seed, and no run could be resumed: "
            "take another data set"
        )
    if name in HASHED and sys.flags.hash_randomization:
        yield (
            f"reasoning_gym:{name} draws other problems in every process, as Python hashes texts: start with "
            "PYTHONHASHSEED=0 in the environment, or take another data set"
        )
    parts = settings.get("datasets")
    if name != COMPOSITE:
        return
    if not isinstance(parts, list) or not parts or not all(isinstance(part, Mapping) for part in parts):
        yield f"data.generated.args.datasets = {parts!r}: give a list of {{name, weight, config}} to mix, at least one"
        return
    for part in parts:
        if "name" not in part or set(part) - {"name", "weight", "config"}:
            yield f"data.generated.args.datasets has {dict(part)}: each has a name, and weight and config"
        else:
            yield from _problems(part["name"], part.get("config", {}))


def _near(name: str, names: Any) -> str:
    close = difflib.get_close_matches(name, names, n=3)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else f"there are {', '.join(sorted(names))}"


@functools.lru_cache(maxsize=KEPT)
def _item(name: str, settings: str, index: int) -> Mapping[str, Any]:
    return _opened(name, settings)[index]


@functools.lru_cache(maxsize=8)
def _opened(name: str, settings: str) -> Any:
    return open_dataset(name, json.loads(settings))
