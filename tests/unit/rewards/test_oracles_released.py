"""Rewards for length and repetitions, labels by votes and pass@k against released code (`make oracles`)."""

from __future__ import annotations

from pathlib import Path

import oracles_released
import pytest


@pytest.mark.parametrize("row", oracles_released.ROWS)
def test_rewards_labels_and_pass_at_k_are_those_of_released_code(row):
    assert oracles_released.ROWS[row][2]() < 1e-12


def test_the_table_of_released_code_stands_in_the_docs():
    page = Path(__file__).parents[3] / "docs/reference/methods.md"
    assert oracles_released.table(measured=False) in page.read_text(), "put the output of tests/oracles/table.py there"
