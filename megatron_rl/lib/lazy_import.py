"""A placeholder for a library that is slow to import. The library is imported on first use."""

from __future__ import annotations

import importlib
from typing import Any


class LazyModule:
    """A placeholder for a module. The module is imported when one of its attributes is accessed for the first time.

    A module that uses torch only inside functions can be imported without torch, which keeps `megatron-rl check` fast:

        if TYPE_CHECKING:
            import torch
        else:
            torch = LazyModule("torch")
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the module, which is imported if necessary. Raises ImportError if the module is not
        installed, and AttributeError for an unknown name.
        """
        return getattr(importlib.import_module(self._name), name)
