"""Stands in for SGLang's kernels on a CPU; whatever is not needed there says so when it is called. See ../README.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__version__ = "0.4.10"  # that SGLang 0.5.23 asks for
WORD = 0xFFFFFFFF

_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("init_cpu_threads_env(str cores) -> str")
_library.impl(
    "init_cpu_threads_env", lambda cores: "stubbed kernels: threads are not bound", "CompositeExplicitAutograd"
)
_library.define("initialize(int size, int rank) -> ()")
_library.impl("initialize", lambda size, rank: None, "CompositeExplicitAutograd")


def _times(x: torch.Tensor, factor: int) -> torch.Tensor:
    return x * factor & WORD


def _rotated(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x << bits | x >> 32 - bits) & WORD


def _murmur_hash32(seeds: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """[N], [N], [M] -> [N, M] uint32: MurmurHash3 of the two halves of a seed, a position and a column."""
    seeds = seeds.view(torch.int64)
    h = torch.zeros(1, 1, dtype=torch.int64)
    for k in (seeds[:, None], seeds[:, None] >> 32, positions[:, None].long(), columns[None].long()):
        k = _times(_rotated(_times(k & WORD, 0xCC9E2D51), 15), 0x1B873593)
        h = (_times(_rotated(h ^ k, 13), 5) + 0xE6546B64) & WORD
    h = h ^ 16
    h = _times(h ^ h >> 16, 0x85EBCA6B)
    h = _times(h ^ h >> 13, 0xC2B2AE35)
    return (h ^ h >> 16).to(torch.uint32)


_library.define("murmur_hash32_cpu(Tensor seeds, Tensor positions, Tensor columns) -> Tensor")
_library.impl("murmur_hash32_cpu", _murmur_hash32, "CompositeImplicitAutograd")


def heed_seeds() -> None:
    """A plugin for SGLang: lets a server start with --enable-deterministic-inference on a CPU, so that it uses the
    seeds of requests. The server keeps torch's own operations; the last bits of their results may depend on the batch.
    """
    from sglang.srt.arg_groups import choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    HookRegistry.register(
        "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode", lambda enable_bmm=True: None, HookType.REPLACE
    )


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*arguments: Any, **options: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name}: these kernels are a stub for tests on a CPU")

    return missing
