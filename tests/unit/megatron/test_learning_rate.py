"""The learning rate over the steps: warm-up and every decay against their formulas."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from megatron_rl.megatron.optimizer import Schedule

LR, MIN_LR, WARMUP, STEPS = 1e-3, 1e-5, 4, 24


def rates(decay: str, *, warmup: int = WARMUP) -> list[float]:
    """The rate at steps 0, 1, ... of a run that goes on a little after the decay's end."""
    optimizer = SimpleNamespace(param_groups=[{}])
    schedule = Schedule(
        optimizer, init_lr=0.0, max_lr=LR, min_lr=MIN_LR, lr_warmup_steps=warmup, lr_decay_steps=STEPS,
        lr_decay_style=decay, start_wd=0.1, end_wd=0.1, wd_incr_steps=1, wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False, override_opt_param_scheduler=True,
    )  # fmt: skip
    found = []
    for _ in range(STEPS + 3):
        found.append(optimizer.param_groups[0]["lr"])
        schedule.step(increment=1)
    return found


SHAPES = {
    "exponential": lambda share: math.exp((1 - share) * math.log(LR) + share * math.log(MIN_LR)),
    "cosine": lambda share: MIN_LR + (LR - MIN_LR) * 0.5 * (1 + math.cos(math.pi * share)),
    "linear": lambda share: MIN_LR + (LR - MIN_LR) * (1 - share),
}


@pytest.mark.parametrize("warmup", [0, WARMUP])
@pytest.mark.parametrize("decay", SHAPES)
def test_the_rate_warms_up_falls_and_stays(decay, warmup):
    found = rates(decay, warmup=warmup)
    for step, rate in enumerate(found):
        if step < warmup:
            wanted = LR * step / warmup
        else:
            wanted = SHAPES[decay](min(1.0, (step - warmup) / (STEPS - warmup)))
        assert rate == pytest.approx(wanted, rel=1e-12), f"step {step}"


def test_an_exponential_decay_lowers_the_rate_by_one_factor():
    found = rates("exponential")[WARMUP : STEPS + 1]
    factors = {round(after / before, 12) for before, after in zip(found, found[1:], strict=False)}
    assert len(factors) == 1 and found[-1] == pytest.approx(MIN_LR)
