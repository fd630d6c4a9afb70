"""Every training example for GPUs fits the cluster that it asks for, by `megatron-rl plan`, and waits long enough."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_rl.commands.settings import load
from megatron_rl.config.schema import TrainConfig
from megatron_rl.main import main

EXAMPLES = Path(__file__).parents[2] / "examples"


def billions(file: Path) -> float:
    """Returns how many billions of parameters the largest model of a training example has by its name, else 0."""
    _, config = load([str(file)])
    if not isinstance(config, TrainConfig):
        return 0.0
    names = " ".join(role.model.path.replace("_", " ") for role in config.roles.values())
    return max(map(float, re.findall(r"(\d+(?:\.\d+)?)b\b", names.lower())), default=0.0)


FOR_GPUS = [str(file.relative_to(EXAMPLES)) for file in sorted(EXAMPLES.rglob("*.yaml")) if billions(file) >= 1]


def test_examples_for_gpus_are_found():
    assert {
        "published/dapo_qwen2.5_32b.yaml",
        "published/retool_qwen2.5_32b.yaml",
        "published/methods/gspo.yaml",
    } < set(FOR_GPUS)


@pytest.mark.parametrize("name", FOR_GPUS)
def test_an_example_fits_the_cluster_that_it_asks_for(name, capsys):
    """Servers of five examples had no room for one sequence, and ScaleRL's requests ended before its answers."""
    if "/search" in name:
        pytest.importorskip("bm25s")
    status = main(["plan", str(EXAMPLES / name), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert status == 0, found["problems"]
    assert not [line for line in found["advice"] if "request_timeout_s" in line]
