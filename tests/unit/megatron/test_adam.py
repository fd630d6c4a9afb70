"""FusedAdam computes what torch's Adam and AdamW compute, with `step` in the parameter group."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from megatron_rl.megatron.adam import FusedAdam

SETTINGS: dict[str, Any] = dict(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
SHAPES = (3,), (17, 5), (0,), (4096,), (2, 3, 7)


def after(kind: type[torch.optim.Optimizer], steps: int = 5, **settings: Any) -> list[torch.Tensor]:
    """Returns parameters, first moments and second moments after some steps on random gradients."""
    draw = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=draw)) for shape in SHAPES]
    groups = [{"params": params[:2], "lr": 1e-2}, {"params": params[2:], "weight_decay": 0.0}]
    optimizer = kind(groups, **SETTINGS, **settings)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=draw)
        optimizer.step()
    states = [optimizer.state[p] for p in params if p.numel()]
    return [*(p.detach() for p in params), *(one[name] for one in states for name in ("exp_avg", "exp_avg_sq"))]


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_steps_equal_those_of_torch(decoupled, fused):
    ours = after(FusedAdam, adam_w_mode=decoupled, fused=fused)
    ways = {"fused": True} if fused else {"foreach": True}
    theirs = after(torch.optim.AdamW if decoupled else torch.optim.Adam, **ways)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("decoupled", [True, False])
def test_the_fused_kernel_differs_by_rounding_alone(decoupled):
    fused, usual = (after(FusedAdam, adam_w_mode=decoupled, fused=way) for way in (True, None))
    for a, b in zip(fused, usual, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("fused", [True, False])
def test_the_step_is_an_int_of_the_group_from_which_a_restored_optimizer_goes_on(fused):
    param, other = (torch.nn.Parameter(torch.ones(8)) for _ in range(2))
    first, second = (FusedAdam([one], **SETTINGS, fused=fused) for one in (param, other))
    for number in range(1, 4):
        param.grad = torch.full((8,), float(number))
        first.step()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    other.data.copy_(param.data)
    assert second.param_groups[0]["step"] == 3 and type(second.param_groups[0]["step"]) is int
    assert {*second.state[other]} == {"exp_avg", "exp_avg_sq"}
    for one, optimizer in ((param, first), (other, second)):
        one.grad = torch.full((8,), 4.0)
        optimizer.step()
    assert torch.equal(param, other)
