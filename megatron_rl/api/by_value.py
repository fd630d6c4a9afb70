"""Pickles functions and objects that cannot be imported from a module. A digest of the content is in the file name."""

from __future__ import annotations

import hashlib
import importlib.machinery
import inspect
import io
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import cloudpickle

from megatron_rl.config.base import ConfigError
from megatron_rl.run.atomic_files import replacing

DIGITS = 12  # number of hexadecimal digits of a digest in a file name
_PLAIN = (str, bytes, bool, int, float, complex, type(None))
_RANDOM_ID = re.compile("[0-9a-f]{32}")  # the random id that cloudpickle gives to each class that it pickles by value


def write(function: Any, directory: Path, name: str) -> Path:
    """Pickles a function or callable object, with the parts of its module that it uses, and returns the file's path.

    The file name contains a digest of the content, so functions that differ in a closure, default argument, global or
    attribute have different files. An existing file is not overwritten. Raises ConfigError if `function` cannot be
    pickled. `name`: name of the function, for the file name and the error message.
    """
    module = sys.modules.get(inspect.unwrap(function).__module__) if hasattr(function, "__module__") else None
    by_value = module is not None and module.__name__ != "__main__" and not findable(module)
    try:
        if by_value:
            cloudpickle.register_pickle_by_value(module)
        content, stable = cloudpickle.dumps(function), digest(function)
    except Exception as error:  # pickling calls users' code, which may raise anything
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
        with replacing(path, writer=str(os.getpid())) as temporary:
            temporary.write_bytes(content)
    return path


def findable(module: types.ModuleType) -> bool:
    """Returns whether another process with the same sys.path would import the module from the same file."""
    places: Any = None
    spec: importlib.machinery.ModuleSpec | None = None
    try:
        for count in range(1, module.__name__.count(".") + 2):
            full = ".".join(module.__name__.split(".")[:count])
            specs = (finder.find_spec(full, places) for finder in sys.meta_path)
            spec = next((candidate for candidate in specs if candidate is not None), None)
            if spec is None:
                return False
            places = spec.submodule_search_locations
    except (ImportError, ValueError, KeyError):
        return False
    origin = module.__spec__.origin if module.__spec__ is not None else None
    return origin is not None and spec is not None and spec.origin == origin


def digest(value: Any) -> str:
    """Returns a reproducible digest of a value's pickle: the same program gives the same digest in every process.

    The output of cloudpickle differs between processes: sets have no fixed order, two equal texts may be one object or
    two objects, functions contain their file and line numbers, and classes have random ids. The digest ignores these
    differences. Exceptions that are raised during pickling are not caught.
    """
    sink = io.BytesIO()
    _Canonical(sink).dump(value)
    return hashlib.sha256(sink.getvalue()).hexdigest()


class _Canonical(cloudpickle.Pickler):
    """A pickler whose output is equal for equal values. The output is used for digests only and cannot be unpickled."""

    def persistent_id(self, obj: Any) -> Any:
        """Returns the value that is pickled instead of an object; None to pickle the object itself."""
        kind = type(obj)
        if kind is str:
            # A new object, because the pickler writes only a reference for an object that it has pickled before.
            return obj + "."
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
        # Tensors are converted here, because torch's pickle of a tensor contains an address.
        if torch is not None and isinstance(obj, torch.Tensor):
            content = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            return (kind.__name__, str(obj.dtype), *obj.shape, content)
        return None

    def reducer_override(self, obj: Any) -> Any:
        """Returns cloudpickle's reduction of a function or class without its file or its random id."""
        reduced: Any = super().reducer_override(obj)
        if not isinstance(reduced, tuple):
            return reduced
        make, arguments, *rest = reduced
        if isinstance(obj, types.FunctionType):
            code, _, *others = arguments
            arguments = (code, {}, *others)
        elif isinstance(obj, type):
            arguments = tuple("" if isinstance(arg, str) and _RANDOM_ID.fullmatch(arg) else arg for arg in arguments)
        return make, arguments, *rest


def _is_plain(value: Any) -> bool:
    """Returns whether `repr` of a value represents it completely."""
    return all(map(_is_plain, value)) if type(value) is tuple else type(value) in _PLAIN
