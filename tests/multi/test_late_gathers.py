"""Weights that are gathered over replicas beside the next forward pass, against weights that are gathered at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks
from tiny_models import make_model

WORKER = Path(__file__).parents[1] / "helpers" / "late_worker.py"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("late")
    make_model(directory / "plain", "qwen2", vocab_size=97, num_hidden_layers=4)
    make_model(directory / "tied", "qwen2", vocab_size=97, tie_word_embeddings=True)
    make_model(directory / "experts", "qwen2_moe", vocab_size=97)
    make_model(directory / "latent", "deepseek_v3", vocab_size=97)
    return directory


@pytest.mark.multi
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.matrix)])
def test_late_gathers_give_the_same_weights(models, ranks, tmp_path):
    for answer in run_ranks(WORKER, ranks, tmp_path / "ranks", str(models)):
        for name, found in answer.items():
            assert found["steps"] > 2, name
            assert (found["weights"], found["logprobs"], found["losses"]) == (0.0, 0.0, 0.0), name
            plain, late = found["apart"]
            assert plain == 0.0, name
            assert found["waits_left"] == 0, name
            assert found["said"][0] == "" and "an update is under way" in found["said"][1], name
            if name != "cp":  # its ranks are no replicas of one another
                assert late > 0.0, f"{name}: between two steps each rank has its own part of the new weights alone"
