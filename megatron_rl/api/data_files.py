"""Converts the rows and reward functions that a program passes to a Trainer to files that a config can name."""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.api import by_value
from megatron_rl.api.by_value import DIGITS
from megatron_rl.api.config import Settings
from megatron_rl.config import plugins
from megatron_rl.config.base import ConfigError, refusing
from megatron_rl.config.evaluation import REWARD_FUNCTIONS
from megatron_rl.config.schema import PromptSet
from megatron_rl.data.conversations import ANSWER, MESSAGES, QUESTION, prompt_fields
from megatron_rl.data.rows import BadRow, rows_of
from megatron_rl.rewards.reward_functions import CalledFunction, name_of
from megatron_rl.run.atomic_files import write_text

# Columns of a problem set that are recognized without an entry in the setting data.fields
_FOUND = (MESSAGES, QUESTION, ANSWER, "prompt")
Rows = Iterable[Mapping[str, Any]]
Called = Callable[..., Any]
Reward = str | Called | Mapping[str, Any] | Sequence[str | Called | tuple[str | Called, float]]


def data_settings(source: Rows | str | Path, name: str, directory: Path) -> dict[str, Any]:
    """Returns the settings of a problem set that is given as rows (a list of mappings, or a datasets.Dataset), or as a
    path or name.

    Rows are written to a JSONL file in `directory`. The file name is `name` and a digest of the content. Raises
    ConfigError if there are no rows, a row is not a mapping, or a value cannot be converted to JSON.
    """
    if isinstance(source, (str, Path)):
        return {"path": str(source)}
    text = _jsonl(source, name)
    content = text.encode("utf-8", "surrogatepass")
    path = directory / f"{name}-{hashlib.sha256(content).hexdigest()[:DIGITS]}.jsonl"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    elif path.read_bytes() != content:
        raise ConfigError(f"{path} was changed after a Trainer wrote it: remove it, and the rows are written again")
    return {"path": str(path)}


def first_row(source: Settings) -> Mapping[str, Any] | None:
    """Returns the first readable row of a problem set. Returns None if the set is not on this machine, or if none of
    the first 100 rows is readable. Raises ConfigError if the path contains no data."""
    path = str(source.get("path", ""))
    if not Path(path).exists():
        return None
    rows = rows_of(path, source.get("split", "train"), source.get("subset"), source.get("file"))
    return next((row for _, row in itertools.islice(rows, 100) if not isinstance(row, BadRow)), None)


def prompt_columns(source: Settings, row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns {field of a prompt, such as QUESTION or MESSAGES: column of the set that has the field's value}. Returns
    {} if the row has no prompt."""
    return prompt_fields(PromptSet(path="", fields=dict(source.get("fields", {}))), row) or {}


def column_fields(functions: Sequence[CalledFunction], source: Settings, row: Mapping[str, Any] | None) -> Settings:
    """Returns {column: column} for the columns of a problem set that reward functions need, as a part of data.fields.

    These are the columns that the functions have as parameters, and all columns of `row` for a function with
    `**columns`. Columns that `source` already names in `fields` are left out. `row`: the first row of the set, or None
    if it is not known. Raises ConfigError if the row lacks a required column.
    """
    known_fields = {**dict(source.get("fields", {})), **dict.fromkeys(_FOUND)}
    needed_by = {name: function for function in functions for name in function.columns if name not in known_fields}
    for name, function in needed_by.items():
        if row is not None and name not in row:
            raise ConfigError(
                f"reward {function.name}: its parameter {name!r} is no column of {source.get('path')}, which has "
                f"{', '.join(map(str, row))}: rename one of them, or give the parameter a default"
            )
    # parameters of the functions that grade batches; None: the function takes all columns
    batched = [function.parameters for function in functions if function.batched]
    batch_columns = [
        str(name)
        for name in row or ()
        if name not in known_fields and any(parameters is None or name in parameters for parameters in batched)
    ]
    return {name: name for name in dict.fromkeys([*needed_by, *batch_columns])}


def reward_settings(reward: Reward, directory: Path) -> tuple[dict[str, Any], list[CalledFunction]]:
    """Returns the config section `reward` for reward functions, and the list of functions with their parsed signatures.

    `reward`: a name package.module:name, a function, a list of names, functions and pairs (function, weight), or the
    section itself. A function that the processes of the run can import is referred to by name. Any other function, such
    as one in a notebook, is pickled to `directory`. Raises ConfigError if a function cannot be called or pickled.
    """
    if isinstance(reward, Mapping):
        return dict(reward), []
    if isinstance(reward, str):
        return {"target": reward, "args": {}}, []
    functions = reward if isinstance(reward, (list, tuple)) else [reward]
    if not functions:
        raise ConfigError("reward is an empty list: give at least one function")
    if len(functions) == 2 and isinstance(reward, tuple) and isinstance(reward[1], (int, float)):
        raise ConfigError(f"reward = {reward!r}: put the pair of function and weight into a list")
    called, entries = list[CalledFunction](), []
    for entry in functions:
        function, grader = _called(entry, [earlier.name for earlier in called])
        called.append(grader)
        entries.append({"name": grader.name, "weight": grader.weight, **_place(function, directory, grader.name)})
    return {"target": REWARD_FUNCTIONS, "args": {"functions": entries}}, called


def _called(entry: Any, taken: Sequence[str]) -> tuple[Any, CalledFunction]:
    """Returns (function as it was given, function with its parsed signature, name and weight).

    `entry`: a function, a name package.module:name, or a pair of one of them and a weight. `taken`: names
    that other functions already have. Raises ConfigError for anything else, and for a function that cannot be called as
    a reward.
    """
    pair = list(entry) if isinstance(entry, (list, tuple)) else [entry, 1.0]
    if len(pair) != 2 or isinstance(pair[1], bool) or not isinstance(pair[1], (int, float)):
        raise ConfigError(f"reward {entry!r}: a pair is (function, weight)")
    function = plugins.find_function(pair[0]) if isinstance(pair[0], str) else pair[0]
    if not callable(function):
        raise ConfigError(
            f"reward {function!r} is a {type(function).__name__}: give a function, or package.module:name"
        )
    base_name = name_of(function)
    names = itertools.chain([base_name], (f"{base_name}_{number}" for number in itertools.count(2)))
    with refusing(lambda error: f"reward {base_name}: {error}", TypeError, ValueError):
        return pair[0], CalledFunction.of(function, next(n for n in names if n not in taken), weight=float(pair[1]))


def _place(function: Any, directory: Path, name: str) -> dict[str, str]:
    """Returns the setting with which the processes of the run load a function: {"target": package.module:name} if
    another process can import the function, otherwise {"pickled": file}. This call writes the file."""
    if isinstance(function, str):
        return {"target": function}
    if isinstance(function, types.FunctionType) and not function.__module__.startswith("__"):
        module, qualname = sys.modules.get(function.__module__), function.__qualname__
        if module is not None and vars(module).get(qualname) is function and by_value.findable(module):
            return {"target": f"{module.__name__}:{qualname}"}
    return {"pickled": str(by_value.write(function, directory, name))}


def _jsonl(rows: Any, name: str) -> str:
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        raise ConfigError(f"{name} is a {type(rows).__name__}: give a list of rows, one split of a data set, or a path")
    row_list = list(rows)
    for number, row in enumerate(row_list):
        if not isinstance(row, Mapping):
            raise ConfigError(f"{name}: row {number} is a {type(row).__name__}: a row is a mapping of columns")
    if not row_list:
        raise ConfigError(f"{name} has no rows")
    columns = dict.fromkeys(column for row in row_list for column in row)
    encode, lines = json.JSONEncoder(allow_nan=False, default=_plain, ensure_ascii=False).encode, list[str]()
    for number, row in enumerate(row_list):
        try:
            lines.append(encode({column: row.get(column) for column in columns}) + "\n")
        except (TypeError, ValueError):
            _refuse_column(row, f"{name}: row {number}", encode)
            raise
    return "".join(lines)


def _refuse_column(row: Mapping[str, Any], where: str, encode: Callable[[Any], str]) -> None:
    """Raises ConfigError with the name of the first column of a row whose value cannot be converted to JSON."""
    for column, value in row.items():
        try:
            encode({column: value})
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{where}, column {column!r} ({type(value).__name__}) has no form in JSON ({error}): take the column "
                "out, or make it text or numbers"
            ) from error


def _plain(value: Any) -> Any:
    """Converts a numpy value to a number or list, and a date or path to a text. Raises TypeError for other values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a {type(value).__name__} is no JSON value")
