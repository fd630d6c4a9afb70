"""Names in a config -> objects: `package.module:name` and its arguments. Built-ins are named exactly as a user's own."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import pydantic

from megatron_rl.config import ConfigError, Use


def find(target: str) -> Any:
    """The object named by `package.module:name`; modules in the current directory count. Raises ConfigError with the cure."""
    module_name, colon, name = target.partition(":")
    if not colon or not module_name or not name:
        raise ConfigError(f"plug-in {target!r}: it has the form package.module:name")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"plug-in {target!r}: cannot import {module_name} ({error}); is it in the current directory or installed?"
        ) from error
    if name not in vars(module):
        close = difflib.get_close_matches(name, vars(module), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"plug-in {target!r}: {module_name} has no {name!r}{hint}")
    return vars(module)[name]


def build(use: Use) -> Any:
    """A dataclass target is made from its arguments, checked strictly; a function target becomes one with them bound."""
    found = find(use.target)
    if dataclasses.is_dataclass(found) and isinstance(found, type):
        known = [f.name for f in dataclasses.fields(found) if f.init]
        _refuse_unknown(use, known)
        try:
            return pydantic.TypeAdapter(found, config=None).validate_json(json.dumps(use.args), strict=True)
        except pydantic.ValidationError as error:
            lines = [f"args.{'.'.join(map(str, p['loc']))} = {p['input']!r}: {p['msg']}" for p in error.errors()]
            raise ConfigError(f"plug-in {use.target}:\n  " + "\n  ".join(lines)) from error
    if not callable(found):
        raise ConfigError(f"plug-in {use.target!r} is a {type(found).__name__}: name a function or a dataclass")
    _refuse_unknown(use, list(inspect.signature(found).parameters))
    return functools.partial(found, **use.args) if use.args else found


def _refuse_unknown(use: Use, known: list[str]) -> None:
    for name in use.args:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(known) or 'none'}"
            raise ConfigError(f"plug-in {use.target}: unknown argument {name!r}; {hint}")
