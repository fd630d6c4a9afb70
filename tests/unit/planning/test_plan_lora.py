"""Plans of roles with adapters: frozen weights have no gradients, and servers that hold adapters get these alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.config.schema import Lora
from megatron_rl.main import main
from megatron_rl.models.shape import read_shape
from megatron_rl.planning import compute
from megatron_rl.planning.compute import SequenceBatch
from megatron_rl.weights import counting, flops
from megatron_rl.weights.counting import Parallel

FILE = str(Path(__file__).parents[3] / "examples/published/tango_lora_qwen2.5_7b.yaml")
LORA = Lora(rank=32)
WHOLE = ["engine.adapters=merged", "engine.replicas=1", "roles.generator.lora=null", "roles.verifier.lora=null"]


def planned(capsys, *settings: str) -> dict:
    main(["plan", FILE, *settings, "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", ["qwen2.5-7b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.parametrize("per_prompt", [1, 4])
def test_operations_are_those_that_an_update_logs(name, lora, per_prompt):
    shape = read_shape(name)
    batch = SequenceBatch(sequences=4, length=512.0, micro_tokens=4096, prompt=200.0, per_prompt=per_prompt)
    behind = np.array([0.0, *[200.0 * (per_prompt > 1)] * 3])
    logged = flops.count(shape, np.full(4, 512.0), shared=behind, labels=4 * 312.0, lora=lora)
    assert compute.train_flops(shape, batch, lora) == pytest.approx(logged.training, rel=1e-9)


def test_an_update_of_adapters_takes_two_thirds_of_the_time_and_little_for_the_optimizer(capsys):
    adapters, whole = (planned(capsys, *words)["iterations"][0] for words in ([], WHOLE))
    assert 0.6 < adapters["phases"]["forward and backward"] / whole["phases"]["forward and backward"] < 0.75
    assert adapters["phases"]["optimizer"] < 0.1 * whole["phases"]["optimizer"]
    assert adapters["phases"]["reference log-probs"] < whole["phases"]["reference log-probs"]


def test_servers_that_hold_adapters_get_these_alone_and_others_the_merged_weights(capsys):
    served, merged = (
        planned(capsys, f"engine.adapters={kind}")["iterations"][0]["sent"] for kind in ("served", "merged")
    )
    elements = counting.adapter_elements(read_shape("qwen2.5-7b"), Parallel(world=1), lora_of_the_example())
    assert served == 2 * 2 * elements and merged == 2 * 2 * counting.total(read_shape("qwen2.5-7b"))


def lora_of_the_example() -> Lora:
    from megatron_rl.config import files
    from megatron_rl.config.schema import TrainConfig

    found = files.load(TrainConfig, [Path(FILE)], []).roles["generator"].lora
    assert found is not None
    return found
