"""Writes Python functions and objects that no module holds to files, under names that say what is in them."""

from __future__ import annotations

import hashlib
import importlib.machinery
import inspect
import io
import re
import sys
import types
from pathlib import Path
from typing import Any

import cloudpickle

from megatron_rl.config.base import ConfigError

DIGITS = 12  # of a digest in a file's name
_PLAIN = (str, bytes, bool, int, float, complex, type(None))
_RANDOM_ID = re.compile("[0-9a-f]{32}")  # cloudpickle draws one for each class that it writes by value


def write(function: Any, directory: Path, name: str) -> Path:
    """Writes a function or callable object, with what it uses of its module, and returns the file's path.

    The file's name has a digest of the content, so that functions with another closure, default argument, global or
    attribute have another file. A file that is there already is left as it is. Raises ConfigError for what cannot be
    pickled.
    """
    module = sys.modules.get(inspect.unwrap(function).__module__) if hasattr(function, "__module__") else None
    by_value = module is not None and module.__name__ != "__main__" and not findable(module)
    try:
        if by_value:
            cloudpickle.register_pickle_by_value(module)
        content, stable = cloudpickle.dumps(function), digest(function)
    except Exception as error:  # pickling calls what users have written, and raises what that raises
        raise ConfigError(
            f"reward {name} cannot be handed to the processes that grade ({type(error).__name__}: {error}): let it "
            "open files, locks and connections when it is called, or put it into a module"
        ) from error
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)
    path = directory / f"reward-{name}-{stable[:DIGITS]}.pkl"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_bytes(content)
        partial.replace(path)
    return path


def findable(module: types.ModuleType) -> bool:
    """Returns whether another process that has this one's sys.path imports the same file by the module's name."""
    places: Any = None
    spec: importlib.machinery.ModuleSpec | None = None
    try:
        for count in range(1, module.__name__.count(".") + 2):
            full = ".".join(module.__name__.split(".")[:count])
            found = (finder.find_spec(full, places) for finder in sys.meta_path)
            spec = next((one for one in found if one is not None), None)
            if spec is None:
                return False
            places = spec.submodule_search_locations
    except (ImportError, ValueError, KeyError):
        return False
    own = module.__spec__.origin if module.__spec__ is not None else None
    return own is not None and spec is not None and spec.origin == own


def digest(value: Any) -> str:
    """Returns a digest of what cloudpickle writes of a value. The same program gives the same digest every time.

    The bytes of cloudpickle itself differ from process to process: sets come in any order, equal texts are one object
    or two, functions name their file and lines, and classes have random ids. These do not count here. Raises what
    pickling the value raises.
    """
    sink = io.BytesIO()
    _Canonical(sink).dump(value)
    return hashlib.sha256(sink.getvalue()).hexdigest()


class _Canonical(cloudpickle.Pickler):
    """A pickler whose stream nobody can load, but which is equal for equal values."""

    def persistent_id(self, obj: Any) -> Any:
        """Returns what is written in place of an object; None for the object itself."""
        kind = type(obj)
        if kind is str:
            return obj + "."  # a new object, which is written in full
        if kind is bytes:
            return obj + b"."
        if kind is tuple:
            return ("tuple", *obj)
        if kind in (set, frozenset) and all(map(_is_plain, obj)):
            return (kind.__name__, *sorted(map(repr, obj)))
        if kind is types.CodeType:
            counts = (obj.co_argcount, obj.co_posonlyargcount, obj.co_kwonlyargcount, obj.co_flags)
            names = (obj.co_name, obj.co_names, obj.co_varnames, obj.co_freevars, obj.co_cellvars)
            return ("code", counts, names, obj.co_code, obj.co_consts, obj.co_exceptiontable)
        torch: Any = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor):  # its own pickle has an address in it
            content = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            return (kind.__name__, str(obj.dtype), *obj.shape, content)
        return None

    def reducer_override(self, obj: Any) -> Any:
        """Returns what cloudpickle makes of a function or class, without its file and its random id."""
        found: Any = super().reducer_override(obj)
        if not isinstance(found, tuple):
            return found
        make, arguments, *rest = found
        if isinstance(obj, types.FunctionType):
            code, _, *others = arguments
            arguments = (code, {}, *others)
        elif isinstance(obj, type):
            arguments = tuple("" if isinstance(one, str) and _RANDOM_ID.fullmatch(one) else one for one in arguments)
        return make, arguments, *rest


def _is_plain(value: Any) -> bool:
    """Returns whether the text of a value tells all of it."""
    return all(map(_is_plain, value)) if type(value) is tuple else type(value) in _PLAIN
