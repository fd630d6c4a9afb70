"""Stands in for SGLang's kernels on a CPU; whatever is not needed there says so when it is called. See ../README.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__version__ = "0.4.10"  # that SGLang 0.5.23 asks for

_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("init_cpu_threads_env(str cores) -> str")
_library.impl(
    "init_cpu_threads_env", lambda cores: "stubbed kernels: threads are not bound", "CompositeExplicitAutograd"
)
_library.define("initialize(int size, int rank) -> ()")
_library.impl("initialize", lambda size, rank: None, "CompositeExplicitAutograd")


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*arguments: Any, **options: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name}: these kernels are a stub for tests on a CPU")

    return missing
