"""Deltas of refits: whatever share of the values changed, the receiver comes to the sender's values."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_rl.refit import delta
from megatron_rl.refit.trainer_side import TrainerSide


@pytest.mark.parametrize("changed", [0, 1, 40, 900, 960, 999, 1000])
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_a_delta_that_is_cheaper_whole_is_read_whole_though_some_values_are_as_they_were(changed, dtype):
    """With 960 of 1,000 changed the mask costs more than the values that it saves, and a whole message is sent."""
    old = torch.arange(1000, dtype=dtype)
    new = old.clone()
    new[torch.randperm(1000, generator=torch.Generator().manual_seed(0))[:changed]] += 7
    message = torch.zeros(delta.HEADER + new.numel() * new.element_size(), dtype=torch.uint8)
    length = delta.encode(new, old, message)
    assert torch.equal(delta.decode(message[:length], old.clone()), new)


@pytest.mark.parametrize(("changed", "size"), [(0, 0), (1, 4 + 2), (10, 10 * (4 + 2))])
def test_values_that_did_not_change_cost_nothing(changed, size):
    old = torch.zeros(1000, dtype=torch.int16)
    new, message = old.clone(), torch.zeros(delta.HEADER + 2000, dtype=torch.uint8)
    new[:changed] = 1
    assert delta.encode(new, old, message) == delta.HEADER + size


def test_bytes_are_copied_only_where_they_do_not_lie_at_a_multiple_of_their_width():
    data = torch.arange(16, dtype=torch.uint8)
    there = delta._as_numbers(data[4:12], torch.int32)
    assert there.data_ptr() == data[4:].data_ptr()
    moved = delta._as_numbers(data[3:11], torch.int32)
    assert moved.view(torch.uint8).tolist() == list(range(3, 11))


@pytest.mark.parametrize(
    "probe, seconds, pays",
    [
        ((10, 1.0), 0.5, True),  # 5 bytes less are half a second less
        ((10, 1.0), 0.6, False),
        ((0, 0.0), 0.6, False),  # nothing was sent to measure the link by: no time is known to be saved
    ],
)
def test_deltas_are_off_once_finding_them_takes_longer_than_they_save(probe, seconds, pays):
    side = SimpleNamespace(_probes=[probe], _delta_pays=True, _rank=1)
    outcome = SimpleNamespace(full=10, sent=5, delta_seconds=seconds)
    TrainerSide._weigh_delta(side, SimpleNamespace(outcomes=[outcome]))
    assert side._delta_pays is pays
