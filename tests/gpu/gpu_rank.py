"""Fixtures of the tests on a CUDA device: one rank, and the sizes of the models.

MEGATRON_RL_GPU_TESTS=tiny makes the models of 0.5 and 1.5 B parameters tiny ones: so the tests run to their end on the
pretended device, where no GPU is (tests/emulated/test_kit.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from gpu_kit import subjects
from gpu_kit.findings import free_memory

TINY = os.environ.get("MEGATRON_RL_GPU_TESTS") == "tiny"
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="no CUDA device here: tests/emulated/test_kit.py runs this on a pretended one",
    ),
]


@pytest.fixture
def scale() -> subjects.Scale:
    """The sizes of what is tested."""
    return subjects.SMALL if TINY else subjects.FULL


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Makes this process the only rank. It has all cores: models are made on the host, and compared there."""
    threads = torch.get_num_threads()
    if not TINY:
        torch.set_num_threads(os.cpu_count() or 1)
    with subjects.one_rank():
        yield
    torch.set_num_threads(threads)
    free_memory()
