"""The memory of messages is used again."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.refit.buffers import Buffers

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [0, 60, 100])
def test_a_buffer_that_was_given_back_is_taken_for_a_message_that_fits_in(size):
    pool = Buffers()
    first = pool.take(100, CPU)
    place = first.data_ptr()
    pool.give_back(first[:10])
    again = pool.take(size, CPU)
    assert len(again) == size and again.untyped_storage().data_ptr() == place
    assert pool.take(size, CPU).untyped_storage().data_ptr() != place, "a buffer in use was taken"


@pytest.mark.parametrize(("size", "device"), [(10, "meta"), (5, "cpu")])
def test_a_buffer_that_is_too_small_or_on_another_device_is_replaced(size, device):
    pool = Buffers()
    pool.give_back(torch.empty(size, dtype=torch.uint8, device=device))
    taken = pool.take(10, CPU)
    assert (len(taken), taken.dtype, taken.device) == (10, torch.uint8, CPU) and not pool._free


def test_buffers_that_are_not_in_use_can_be_dropped():
    pool = Buffers()
    pool.give_back(torch.empty(5, dtype=torch.uint8))
    pool.clear()
    assert not pool._free
