"""Resolves names in a config, `package.module:name`, to Python objects.

Built-in components and a user's components are named in the same way.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_rl.config import files
from megatron_rl.config.base import ConfigError, Use, hint, refuse, refusing


def find(target: str) -> Any:
    """Imports the module and returns the object named by `package.module:name`.

    Installed modules have precedence over modules in the current directory. Raises ConfigError if the object is not
    found. If the module raises an exception other than ImportError during its import, this function raises it, too.
    """
    module_name, name = _parts(target)
    cure = f"is it in the current directory ({look_here()}) or installed?"
    with refusing(lambda error: f"plug-in {target!r}: cannot import {module_name} ({error}); {cure}", ImportError):
        module = importlib.import_module(module_name)
    _refuse_hidden(target, vars(module).get("__file__"))
    _refuse_missing(target, vars(module), vars(module).get("__file__"))
    return vars(module)[name]


def find_function(target: str) -> Any:
    """Returns the function named by `package.module:name`. Raises ConfigError if it is not found or not callable."""
    function = find(target)
    if not callable(function):
        raise ConfigError(f"plug-in {target!r} is a {type(function).__name__}: name a function or a dataclass")
    return function


def look_at(use: Use) -> None:
    """Checks a plug-in without importing its module: the module's file must define the name in `package.module:name`,
    and the named object must accept the arguments of `use`.

    The argument names are checked for undecorated functions only. A name that a star import may define is accepted. If
    the module is imported already or has no .py file, the plug-in is built instead (`build`). Raises ConfigError if the
    name is not defined or an argument is not accepted.
    """
    module_name, name = _parts(use.target)
    file = module_file(module_name)
    if file is None or module_name in sys.modules or file.suffix != ".py":
        build(use)
        return
    _refuse_hidden(use.target, file)
    defined = _definitions(file)
    if name not in defined and "*" in defined:
        return
    _refuse_missing(use.target, defined, file)
    definition = defined[name]
    if isinstance(definition, ast.FunctionDef) and not definition.decorator_list and definition.args.kwarg is None:
        _refuse_unknown(use, [argument.arg for argument in (*definition.args.args, *definition.args.kwonlyargs)])


def _parts(target: str) -> tuple[str, str]:
    """Splits `package.module:name` into (module, name). Raises ConfigError if `target` does not have this form."""
    if not is_target(target):
        raise ConfigError(f"plug-in {target!r}: it has the form package.module:name, without .py or slashes")
    module, _, name = target.partition(":")
    return module, name


def _refuse_hidden(target: str, file: object) -> None:
    """Raises ConfigError if the module in `package.module:name` is an installed one, and the current directory has a
    module of the same name, which the user may have meant. `file`: the file of the module that was found."""
    module, _, _ = target.partition(":")
    if module.partition(".")[0] == __name__.partition(".")[0] or not isinstance(file, (str, Path)):
        return
    place = Path.cwd().joinpath(*module.split("."))
    for hidden in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
        if hidden.exists() and hidden.resolve() != Path(file).resolve():
            raise ConfigError(f"plug-in {target!r}: {hidden} is hidden by the installed {file}: rename it")


def _refuse_missing(target: str, names: Iterable[str], file: object) -> None:
    """Raises ConfigError if the name in `package.module:name` is not in `names`.

    `names`: the names that the module defines. `file`: the module's file, for the error message.
    """
    module, _, name = target.partition(":")
    if name not in names:
        cure = hint(name, names, f"look at the names in {file}")
        raise ConfigError(f"plug-in {target!r}: {module} has no {name!r}; {cure}")


def _refuse_unknown(use: Use, accepted: list[str]) -> None:
    """Raises ConfigError if `use` has arguments that are not in `accepted`."""
    cure = f"it takes {', '.join(accepted) or 'none'}"
    unknown = [name for name in use.args if name not in accepted]
    refuse(*(f"plug-in {use.target}: unknown argument {name!r}; {hint(name, accepted, cure)}" for name in unknown))


def _definitions(file: Path) -> dict[str, ast.AST]:
    """Returns {name: AST node} of the names that a module defines outside of functions and classes.

    The key `*` means that the module may define other names, because its file has a star import or cannot be parsed. A
    parse error is not reported here, but when the module is imported.
    """
    try:
        waiting: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    except (OSError, ValueError, SyntaxError):
        return {"*": ast.Pass()}
    definitions: dict[str, ast.AST] = {}
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            definitions[node.name] = node
            continue
        if isinstance(node, ast.alias):
            definitions[node.asname or node.name.partition(".")[0]] = node
        elif isinstance(node, ast.Name):
            definitions.setdefault(node.id, node)
        waiting += ast.iter_child_nodes(node)
    return definitions


def is_target(text: str) -> bool:
    """Returns whether a text has the form package.module:name."""
    module, colon, name = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), name))


def look_here() -> str:
    """Appends the current directory to `sys.path`, so that its modules can be imported, and returns the directory."""
    directory = str(Path.cwd())
    if directory not in sys.path and "" not in sys.path:
        # appended at the end, so that a local folder called `datasets` does not hide the library
        sys.path.append(directory)
    return directory


def module_file(name: str) -> Path | None:
    """Returns the file of a module, or None if there is no such file. The module's parent packages are imported."""
    look_here()
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin else None


def build(use: Use) -> Any:
    """Builds the plug-in that `use.target` names. For a dataclass, returns an instance with strictly validated
    arguments. For a function, returns the function with the arguments of `use` bound by `functools.partial`; its caller
    passes the other parameters.

    Raises ConfigError for an invalid target or invalid arguments. The message names all invalid arguments.
    """
    plugin = find_function(use.target)
    if isinstance(plugin, type) and dataclasses.is_dataclass(plugin):
        return files.load(plugin, trees=[(f"plug-in {use.target}", use.args)])
    if isinstance(plugin, type) and use.args:
        raise ConfigError(
            f"plug-in {use.target!r} is a class with arguments: make it a dataclass, whose fields say what it takes"
        )
    parameters = inspect.signature(plugin).parameters.values() if use.args else ()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        _refuse_unknown(use, [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)])
    return functools.partial(plugin, **use.args) if use.args else plugin
