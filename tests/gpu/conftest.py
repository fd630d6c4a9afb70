"""Fixtures of the tests on a CUDA device: one rank, and the sizes of the models.

MEGATRON_RL_GPU_TESTS=tiny makes the models of 0.5 and 1.5 B parameters tiny ones: so the tests run to their end on the
pretended device, where no GPU is (tests/emulated/test_kit.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks")]
NO_DEVICE = "no CUDA device here: tests/emulated runs these tests on a pretended one"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder, and skips them without a device."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason=NO_DEVICE))


TINY = os.environ.get("MEGATRON_RL_GPU_TESTS") == "tiny"


@pytest.fixture
def scale():
    """The sizes of what is tested."""
    from gpu_kit.subjects import FULL, SMALL

    return SMALL if TINY else FULL


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Makes this process the only rank. It has all cores: models are made on the host, and compared there."""
    from gpu_kit import subjects
    from gpu_kit.findings import free_memory

    threads = torch.get_num_threads()
    if not TINY:
        torch.set_num_threads(os.cpu_count() or 1)
    with subjects.one_rank():
        yield
    torch.set_num_threads(threads)
    free_memory()
