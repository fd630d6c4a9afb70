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
from megatron_rl.config.base import ConfigError
from megatron_rl.config.schema import PromptSet
from megatron_rl.data.conversations import ANSWER, MESSAGES, QUESTION, prompt_fields
from megatron_rl.data.rows import BadRow, rows_of
from megatron_rl.rewards.reward_functions import CalledFunction, name_of
from megatron_rl.run.checkpoint import write_text

FUNCTIONS = "megatron_rl.rewards.reward_functions:RewardFunctions"
# Columns of a problem set that are recognized without an entry in the setting data.fields
_FOUND = (MESSAGES, QUESTION, ANSWER, "prompt")
Rows = Iterable[Mapping[str, Any]]
Called = Callable[..., Any]
Reward = str | Called | Mapping[str, Any] | Sequence[str | Called | tuple[str | Called, float]]


def data_settings(given: Rows | str | Path, name: str, directory: Path) -> dict[str, Any]:
    """Returns the settings of a problem set that is given as rows (a list of mappings, or a datasets.Dataset), or as a
    path or name.

    Rows are written to a JSONL file in `directory`, whose name is `name` and a digest of the content. Raises
    ConfigError if there are no rows, a row is not a mapping, or a value cannot be converted to JSON.
    """
    if isinstance(given, (str, Path)):
        return {"path": str(given)}
    text = _jsonl(given, name)
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


def is_raw_text(source: Settings, row: Mapping[str, Any] | None) -> bool:
    """Returns whether a set's prompts are complete texts in a column `prompt`, which TRL passes to the model
    unchanged."""
    if row is None or source.get("settings") is not None or source.get("chat"):
        return False
    fields = dict(source.get("fields", {}))
    return (prompt_fields(PromptSet(path="", fields=fields), row) or {}).get(QUESTION) == "prompt"


def is_chat(source: Settings, row: Mapping[str, Any]) -> bool:
    """Returns whether a set's prompts are conversations."""
    fields = dict(source.get("fields", {}))
    return source.get("chat") is not False and MESSAGES in (prompt_fields(PromptSet(path="", fields=fields), row) or {})


def column_fields(functions: Sequence[CalledFunction], source: Settings, row: Mapping[str, Any] | None) -> Settings:
    """Returns {column: column} for the columns of a set that reward functions need.

    These are the columns that the functions have as parameters, and all columns of `row` for a function with
    `**columns`. Columns that `source` names in `fields` are left out. `row`: the first row, or None if it is not known.
    Raises ConfigError if the row lacks a required column.
    """
    known = {**dict(source.get("fields", {})), **dict.fromkeys(_FOUND)}
    wanted = {name: one for one in functions for name in one.columns if name not in known}
    for name, one in wanted.items():
        if row is not None and name not in row:
            raise ConfigError(
                f"reward {one.name}: its parameter {name!r} is no column of {source.get('path')}, which has "
                f"{', '.join(map(str, row))}: rename one of them, or give the parameter a default"
            )
    named = {name for one in functions if one.batched for name in one.parameters}
    takes_all = any(one.batched and one.takes_all for one in functions)
    found = [str(name) for name in row or () if name not in known and (takes_all or name in named)]
    return {name: name for name in dict.fromkeys([*wanted, *found])}


def reward_settings(given: Reward, directory: Path) -> tuple[dict[str, Any], list[CalledFunction]]:
    """Returns the config section `reward` for reward functions, and the list of functions with their parsed signatures.

    `given`: a name package.module:name, a function, a list of names, functions and pairs (function, weight), or the
    section itself. A function that ranks can import is referred to by name; any other function, such as one in a
    notebook, is pickled to `directory`. Raises ConfigError if a function cannot be called or pickled.
    """
    if isinstance(given, Mapping):
        return dict(given), []
    if isinstance(given, str):
        return {"target": given, "args": {}}, []
    pairs = [_weighed(one) for one in (given if isinstance(given, (list, tuple)) else [given])]
    if not pairs:
        raise ConfigError("reward is an empty list: give at least one function")
    if len(pairs) == 2 and isinstance(given, tuple) and isinstance(given[1], (int, float)):
        raise ConfigError(f"reward = {given!r}: put the pair of function and weight into a list")
    called, entries = [], []
    for function, weight in pairs:
        called.append(_called(_loaded(function), weight, [one.name for one in called]))
        entries.append({"name": called[-1].name, "weight": weight, **_place(function, directory, called[-1].name)})
    return {"target": FUNCTIONS, "args": {"functions": entries}}, called


def _weighed(one: Any) -> tuple[Any, float]:
    if isinstance(one, (list, tuple)):
        if len(one) != 2 or isinstance(one[1], bool) or not isinstance(one[1], (int, float)):
            raise ConfigError(f"reward {one!r}: a pair is (function, weight)")
        return one[0], float(one[1])
    return one, 1.0


def _loaded(function: Any) -> Called:
    """Returns a function; if it is given as package.module:name, imports it. Raises ConfigError for anything else."""
    if isinstance(function, str):
        from megatron_rl.config.plugins import find_function

        return find_function(function)
    if not callable(function):
        raise ConfigError(
            f"reward {function!r} is a {type(function).__name__}: give a function, or package.module:name"
        )
    return function


def _called(function: Called, weight: float, taken: Sequence[str]) -> CalledFunction:
    name = own = name_of(function)
    number = 1
    while name in taken:
        number += 1
        name = f"{own}_{number}"
    try:
        return CalledFunction.of(function, name, weight=weight)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward {own}: {error}") from error


def _place(function: Any, directory: Path, name: str) -> dict[str, str]:
    """Returns the setting by which ranks load a function: {"target": package.module:name}, or {"pickled": file}. The
    file is written by this call."""
    if isinstance(function, str):
        return {"target": function}
    if (target := _importable(function)) is not None:
        return {"target": target}
    return {"pickled": str(by_value.write(function, directory, name))}


def _importable(function: Any) -> str | None:
    """Returns package.module:name of a function if another process can import it, otherwise None."""
    if not isinstance(function, types.FunctionType):
        return None
    module, name = function.__module__, function.__qualname__
    here = sys.modules.get(module)
    if module.startswith("__") or here is None or vars(here).get(name) is not function:
        return None
    return f"{module}:{name}" if by_value.findable(here) else None


def _jsonl(rows: Any, name: str) -> str:
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        raise ConfigError(f"{name} is a {type(rows).__name__}: give a list of rows, one split of a data set, or a path")
    found = []
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ConfigError(f"{name}: row {number} is a {type(row).__name__}: a row is a mapping of columns")
        found.append(row)
    if not found:
        raise ConfigError(f"{name} has no rows")
    columns = dict.fromkeys(column for row in found for column in row)
    whole = ({column: row.get(column) for column in columns} for row in found)
    return "".join(_line(row, name, number) for number, row in enumerate(whole))


def _line(row: Mapping[str, Any], name: str, number: int) -> str:
    try:
        return json.dumps(row, allow_nan=False, default=_plain, ensure_ascii=False) + "\n"
    except (TypeError, ValueError):
        for column, value in row.items():
            try:
                json.dumps({column: value}, allow_nan=False, default=_plain)
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"{name}: row {number}, column {column!r} ({type(value).__name__}) has no form in JSON ({error}): "
                    "take the column out, or make it text or numbers"
                ) from error
        raise


def _plain(value: Any) -> Any:
    """Converts a numpy value to a number or list, and a date or path to a text. Raises TypeError for other values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a {type(value).__name__} is no JSON value")
