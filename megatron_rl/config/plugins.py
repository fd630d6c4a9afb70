"""Resolves names in a config, `package.module:name`, to Python objects.

Built-in components and a user's components are named in the same way.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import importlib
import importlib.util
import inspect
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic

from megatron_rl.config.schema import ConfigError, Use


def find(target: str) -> Any:
    """Imports the module and returns the object named by `package.module:name`.

    Installed modules have precedence over modules in the current directory. Raises ConfigError if the object is not
    found. Exceptions other than ImportError that the module raises during its import pass through.
    """
    module_name, _, name = target.partition(":")
    if not is_target(target):
        raise ConfigError(f"plug-in {target!r}: it has the form package.module:name, without .py or slashes")
    here = look_here()
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"plug-in {target!r}: cannot import {module_name} ({error}); is it in the current directory "
            f"({here}) or installed?"
        ) from error
    if name not in vars(module):
        close = difflib.get_close_matches(name, vars(module), n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"look at the names in {inspect.getfile(module)}"
        raise ConfigError(f"plug-in {target!r}: {module_name} has no {name!r}; {hint}")
    return vars(module)[name]


def find_function(target: str) -> Any:
    """Returns the function named by `package.module:name`. Raises ConfigError if it is not found or not callable."""
    found = find(target)
    if not callable(found):
        raise ConfigError(f"plug-in {target!r} is a {type(found).__name__}: name a function")
    return found


def look_at(use: Use) -> None:
    """Checks without an import that the file of `package.module:name` defines the name and accepts the arguments.

    The argument names are checked for plain functions only. A name that a star import may define is accepted. A module
    that is imported already, or has no .py file, is checked by `build`. Raises ConfigError if the name is not defined
    or an argument is not accepted.
    """
    if problems := [*_not_finite(use.args, "args")]:
        raise _refusal(use, problems)
    module_name, _, name = use.target.partition(":")
    if not is_target(use.target):
        raise ConfigError(f"plug-in {use.target!r}: it has the form package.module:name, without .py or slashes")
    here, file = look_here(), module_file(module_name)
    if file is None:
        raise ConfigError(
            f"plug-in {use.target!r}: cannot import {module_name} (there is no such module); is it in the current "
            f"directory ({here}) or installed?"
        )
    if module_name in sys.modules or file.suffix != ".py":
        build(use)
        return
    defined = _definitions(file)
    if name not in defined:
        if "*" in defined:
            return
        close = difflib.get_close_matches(name, defined, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"look at the names in {file}"
        raise ConfigError(f"plug-in {use.target!r}: {module_name} has no {name!r}; {hint}")
    found = defined[name]
    if isinstance(found, ast.FunctionDef) and not found.decorator_list and found.args.kwarg is None:
        taken = [argument.arg for argument in (*found.args.args, *found.args.kwonlyargs)]
        if problems := _unknown(use, taken):
            raise _refusal(use, problems)


def _definitions(file: Path) -> dict[str, ast.AST]:
    """Returns {name: AST node} of the names that a module defines outside of functions and classes.

    The key `*` means that there may be other names: the file has a star import or cannot be parsed. The import of the
    file reports the parse error.
    """
    try:
        waiting: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    except (OSError, ValueError, SyntaxError):
        return {"*": ast.Pass()}
    out: dict[str, ast.AST] = {}
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            out[node.name] = node
            continue
        if isinstance(node, ast.alias):
            out[node.asname or node.name.partition(".")[0]] = node
        elif isinstance(node, ast.Name):
            out.setdefault(node.id, node)
        waiting += ast.iter_child_nodes(node)
    return out


def is_target(text: str) -> bool:
    """Returns whether a text has the form package.module:name."""
    module, colon, name = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), name))


def look_here() -> str:
    """Appends the current directory to `sys.path`, so that its modules can be imported, and returns the directory."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # appended at the end, so that a local folder called `datasets` does not hide the library
    return here


def module_file(name: str) -> Path | None:
    """Returns the file of a module, or None if there is no such file. The module's parent packages are imported."""
    look_here()
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin else None


def build(use: Use) -> Any:
    """Builds a plug-in: an instance of a dataclass, with strictly validated arguments, or a function with the arguments
    bound by `functools.partial`.

    Raises ConfigError for an invalid target or invalid arguments. The message names all invalid arguments.
    """
    if problems := [*_not_finite(use.args, "args")]:
        raise _refusal(use, problems)
    found = find(use.target)
    if isinstance(found, type) and dataclasses.is_dataclass(found):
        return _validated(use, found)
    _check_function(use, found)
    return functools.partial(found, **use.args) if use.args else found


def _not_finite(value: Any, place: str) -> Iterator[str]:
    """Yields an error message for every number in the arguments that is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{place} = {value}: give a finite number"
    parts = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        yield from _not_finite(part, f"{place}.{name}")


def _validated(use: Use, found: Any) -> Any:
    known = [field.name for field in dataclasses.fields(found) if field.init]
    problems = _unknown(use, known)
    try:
        # Strict validation of JSON accepts lists for tuples; strict validation of Python objects does not.
        text = json.dumps({name: value for name, value in use.args.items() if name in known})
        made = pydantic.TypeAdapter(found).validate_json(text, strict=True)
    except pydantic.ValidationError as error:
        raise _refusal(use, problems + [_explain(problem) for problem in error.errors()]) from error
    except (TypeError, pydantic.PydanticSchemaGenerationError) as error:
        raise ConfigError(
            f"plug-in {use.target}: its settings cannot be read from a config ({error}); use numbers, text, lists, "
            "mappings and dataclasses"
        ) from error
    if problems:
        raise _refusal(use, problems)
    return made


def _check_function(use: Use, found: Any) -> None:
    """Raises ConfigError if `found` is not callable, is a class with arguments, or lacks a parameter that `use` names.

    Parameters that `use` does not set are passed by the function's caller.
    """
    if not callable(found):
        raise ConfigError(f"plug-in {use.target!r} is a {type(found).__name__}: name a function or a dataclass")
    if isinstance(found, type) and use.args:
        raise ConfigError(
            f"plug-in {use.target!r} is a class with arguments: make it a dataclass, whose fields say what it takes"
        )
    parameters = inspect.signature(found).parameters.values() if use.args else ()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    problems = _unknown(use, [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)])
    if problems:
        raise _refusal(use, problems)


def _unknown(use: Use, known: Sequence[str]) -> list[str]:
    problems = []
    for name in use.args:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(known) or 'none'}"
            problems.append(f"unknown argument {name!r}; {hint}")
    return problems


def _explain(problem: Any) -> str:
    name = ".".join(["args", *map(str, problem["loc"])])
    match problem["type"]:
        case "missing" | "missing_argument":
            return f"{name}: missing; it has no default"
        case "value_error":
            return problem["msg"].removeprefix("Value error, ")
    return f"{name} = {problem['input']!r}: {problem['msg']}"


def _refusal(use: Use, problems: Sequence[str]) -> ConfigError:
    return ConfigError(f"plug-in {use.target}: " + "\n  ".join(problems))
