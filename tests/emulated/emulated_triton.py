"""Lets Triton kernels work on the pretended device: by Triton's interpreter, on the numbers of its tensors."""

from __future__ import annotations

from typing import Any

from emulated_device import LEDGER, here
from torch import Tensor
from triton.runtime import interpreter


def install() -> None:
    """Makes a launch count as one kernel, and refuse what a GPU cannot reach."""
    run = interpreter.GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if any(not here(tensor) for tensor in tensors):  # as Triton's launcher says it
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        LEDGER.kernel(f"triton {self.fn.__name__}")
        run(self, *(_numbers(value) for value in args), **{name: _numbers(value) for name, value in kwargs.items()})

    interpreter.GridExecutor.__call__ = launch  # type: ignore[method-assign]


def _numbers(value: Any) -> Any:
    return value.raw.detach() if here(value) else value
