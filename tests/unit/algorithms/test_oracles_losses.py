"""Losses and estimators against TRL's numbers on fixed rollouts (tests/oracles; `make oracles` writes them anew)."""

from __future__ import annotations

from pathlib import Path

import oracles
import pytest

OFFERED = [name for name, ours in oracles.LOSSES.items() if ours.settings is not None]


@pytest.mark.parametrize("name", OFFERED)
def test_oracles_loss_and_gradient_are_trls(name):
    found = oracles.compare_loss(name)
    assert found.loss < oracles.BAR and found.gradient < oracles.BAR


@pytest.mark.parametrize("name", [name for name, ours in oracles.PREFERENCES.items() if ours.settings is not None])
def test_oracles_loss_gradient_and_metrics_on_preferences_are_trls(name):
    found, metrics = oracles.compare_preference(name)
    assert found.loss < oracles.BAR and found.gradient < oracles.BAR
    assert {"rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected"} <= metrics.keys()
    assert max(metrics.values()) < oracles.BAR, metrics


@pytest.mark.parametrize("name", oracles.ESTIMATED)
def test_oracles_advantages_are_trls_but_for_the_number_beside_the_deviation(name):
    same, as_it_is = oracles.compare_estimator(name)
    assert same < oracles.BAR and as_it_is < 1e-3


def test_oracles_every_row_is_compared_or_named_as_not_offered():
    found = oracles.trl()
    assert oracles.LOSSES.keys() == found["rows"].keys() and oracles.ESTIMATED.keys() == found["advantages"].keys()
    assert all(ours.differs for ours in oracles.LOSSES.values() if ours.settings is None)
    preferences = oracles.trl(oracles.FOLDER / "trl_preferences.json")["rows"]
    assert oracles.PREFERENCES.keys() == preferences.keys()
    assert len({row["loss"] for row in preferences.values()}) == len(preferences), "two rows give the same number"
    kinds = {row["settings"]["loss_type"] for row in found["rows"].values()}
    assert kinds == {"grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"}


def test_oracles_rows_tell_settings_apart():
    """A row that two settings give would not notice that a setting was read wrong."""
    kept: dict[float, str] = {}
    equal = {"grpo_2_micro_batches": "grpo", "dapo_4_micro_batches": "dapo", "dr_grpo_2_micro_batches": "dr_grpo"}
    for name, row in oracles.trl()["rows"].items():
        if name not in equal:
            twin = next((other for loss, other in kept.items() if loss == pytest.approx(row["loss"], rel=1e-6)), None)
            assert twin is None, f"{name} and {twin}"
            kept[row["loss"]] = name


def test_oracles_table_stands_in_the_docs():
    page = Path(__file__).parents[3] / "docs/reference/methods.md"
    assert oracles.table(measured=False) in page.read_text(), "put the output of tests/oracles/table.py into the page"
