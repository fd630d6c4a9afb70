"""Memory that is free within malloc's heap goes back to the system."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from megatron_rl import allocator

BLOCK, COUNT, KEPT = 24_000, 4_000, 50  # 96 MB of blocks as malloc keeps them in its heap, each fiftieth of them stays


def anonymous_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1024


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps free pages so")
def test_free_pages_between_used_ones_go_back():
    blocks = [bytearray(b"x" * BLOCK) for _ in range(COUNT)]
    full = anonymous_mib()
    blocks = blocks[KEPT - 1 :: KEPT]  # the last one stays, so that the heap cannot shrink at its end
    held = full - anonymous_mib()
    allocator.return_free_pages()
    assert full - anonymous_mib() > held + 40, "most of 96 MB, which malloc had not returned"
    assert len(blocks) == COUNT // KEPT
