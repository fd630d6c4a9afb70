"""Stands for a library that takes long to import until something of it is used."""

from __future__ import annotations

import importlib
from typing import Any


class LazyModule:
    """A module that is imported when one of its names is first asked for.

    A module that names torch in its functions alone is so imported without it, and `megatron-rl check` stays quick:

        if TYPE_CHECKING:
            import torch
        else:
            torch = LazyModule("torch")
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        """Raises ImportError where the library is not installed, and AttributeError for an unknown name."""
        return getattr(importlib.import_module(self._name), name)
