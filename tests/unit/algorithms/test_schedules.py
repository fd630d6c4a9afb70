"""The weight of the step advantages over a run: the paper's vectors, both ends, and what lies between."""

import math

import pytest

from megatron_rl.algorithms.schedules import step_weight
from megatron_rl.recipes.tango import Tango

SCHEDULES = ("exponential", "linear", "cosine")
PAPER = {"start": 0.1, "floor": 1e-3, "total": 300}


@pytest.mark.parametrize(("update", "alpha"), [(0, 0.1), (60, 0.0398), (150, 0.0100), (200, 0.0046), (300, 0.001)])
def test_vectors_exponential_alpha(update, alpha):
    assert step_weight("exponential", update, **PAPER) == pytest.approx(alpha, abs=5e-5)


@pytest.mark.parametrize("start", [0.1, 0.5])
def test_vectors_exponential_alpha_is_the_papers_formula_at_every_update(start):
    for update in range(0, 400, 7):
        formula = max(1e-3, start * math.exp(-update * math.log(start / 1e-3) / 300))
        assert step_weight("exponential", update, start=start, floor=1e-3, total=300) == pytest.approx(
            formula, rel=1e-12
        )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_falls_from_start_to_floor_and_stays_there(schedule):
    values = [step_weight(schedule, update, **PAPER) for update in range(400)]
    assert values[0] == 0.1 and all(a > b for a, b in zip(values[:300], values[1:301], strict=True))
    assert values[300:] == pytest.approx([1e-3] * 100) and min(values) >= 1e-3


def test_linear_and_cosine_pass_through_their_known_points():
    quarter, middle = (0.1 - 1e-3) * 0.75 + 1e-3, (0.1 + 1e-3) / 2
    assert step_weight("linear", 75, **PAPER) == pytest.approx(quarter) and step_weight(
        "linear", 150, **PAPER
    ) == pytest.approx(middle)
    assert step_weight("cosine", 150, **PAPER) == pytest.approx(middle)
    assert step_weight("cosine", 100, **PAPER) == pytest.approx(1e-3 + 0.099 * 0.75)  # (1 + cos 60 degrees) / 2


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("start", [0.0, 0.001])
def test_a_start_at_or_below_the_floor_is_constant(schedule, start):
    """alpha_start = 0 is how a user switches the step advantages off."""
    assert {step_weight(schedule, update, start=start, floor=1e-3, total=300) for update in (0, 150, 300)} == {start}


def test_linear_and_cosine_may_end_at_zero():
    assert [step_weight(s, 300, start=0.1, floor=0.0, total=300) for s in ("linear", "cosine")] == pytest.approx(
        [0.0, 0.0]
    )


def test_an_exponential_schedule_to_0_is_refused():
    """It was silently a line."""
    with pytest.raises(ValueError, match="floor"):
        step_weight("exponential", 0, **{**PAPER, "floor": 0.0})


def test_a_weight_that_starts_at_0_may_have_the_floor_0_with_any_schedule():
    assert [step_weight(s, 5, start=0.0, floor=0.0, total=10) for s in ("exponential", "linear", "cosine")] == [0.0] * 3


def test_alpha_ends_at_the_share_exp_target_frac_of_the_updates():
    """RL Tango's get_alpha: k = ln(alpha_0 / alpha_min) / (exp_target_frac * total)."""
    recipe = Tango(exp_target_frac=0.5, generator_updates=200)
    for update in (0, 30, 99):
        assert recipe._alpha(update) == pytest.approx(0.1 * math.exp(-math.log(100) / 100 * update), rel=1e-12)
    assert recipe._alpha(100) == recipe._alpha(150) == pytest.approx(1e-3)
