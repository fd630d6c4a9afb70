"""Every training example for GPUs fits the cluster that it asks for, by `megatron-rl plan`, and waits long enough."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_rl.commands.settings import load
from megatron_rl.config.schema import TrainConfig
from megatron_rl.main import main

EXAMPLES = Path(__file__).parents[3] / "examples"


def billions(file: Path) -> float:
    """Returns how many billions of parameters the largest model of a training example has by its name, else 0."""
    _, config = load([str(file)])
    if not isinstance(config, TrainConfig):
        return 0.0
    names = " ".join(role.model.path.replace("_", " ") for role in config.roles.values())
    return max(map(float, re.findall(r"(\d+(?:\.\d+)?)b\b", names.lower())), default=0.0)


OTHERS = [
    str(file.relative_to(EXAMPLES))
    for file in sorted((EXAMPLES / "published").glob("*.yaml"))
    if file.name.startswith(("sft_", "generate_", "eval_"))
]
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


@pytest.mark.parametrize("name", OTHERS)
def test_an_example_of_another_command_has_a_plan_and_totals(name, capsys):
    """`plan` refused every config but those of `train`."""
    status = main(["plan", str(EXAMPLES / name), "--json"])
    found = json.loads(capsys.readouterr().out)
    whole = found["totals"]
    assert status == 0, found["problems"]
    assert whole["count"] > 0 and whole["disk"] > 0
    assert whole["gpu_hours"] == pytest.approx(whole["hours"] * whole["gpus"])


def test_the_steps_and_hours_of_sft_are_those_of_its_settings(capsys):
    """800 steps of 64 pairs of 2,048 tokens, six operations a parameter and token, cannot be faster than the peak."""
    words = ["plan", str(EXAMPLES / "published/sft_qwen2.5_math_7b.yaml"), "--json"]
    assert main(words) == 0
    whole = json.loads(capsys.readouterr().out)["totals"]
    least = 800 * 6 * 7.6e9 * 64 * 2048 / (8 * 312e12) / 3600
    assert whole["count"] == 800 and least < whole["hours"] < 3 * least
    kept = 7.616e9 * (3 * 14 + 2)  # the newest two checkpoints and one that is being written, and the model
    assert whole["disk"] == pytest.approx(kept, rel=1e-3)
    assert main([*words, "steps=null", "epochs=2", "--rows", "6400"]) == 0
    assert json.loads(capsys.readouterr().out)["totals"]["count"] == 200


def test_answers_of_a_teacher_are_counted_in_parts(capsys):
    words = ["plan", str(EXAMPLES / "published/generate_sft_llama3.1_70b.yaml"), "--json"]
    assert main([*words, "--rows", "data=1100", "n=2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["times"] for one in found["iterations"]] == [2, 1] and found["totals"]["count"] == 2200
    assert found["totals"]["hours"] * 3600 == pytest.approx(
        sum(one["seconds"] * one["times"] for one in found["iterations"])
    )
    assert main(words) == 0 and "1,000 rows are assumed" in json.loads(capsys.readouterr().out)["notes"][0]
    assert main([*words, "--cluster=1x4xA100-80"]) == 2 and "lower engine.replicas" in capsys.readouterr().err


def test_an_evaluations_sets_have_their_published_sizes_or_those_of_files(tmp_path, capsys):
    (tmp_path / "mine.jsonl").write_text('{"question": "q", "answer": "1"}\n' * 7)
    words = ["plan", str(EXAMPLES / "published/eval_tango_qwen2.5_7b.yaml"), "--json"]
    sets = f"sets=[math500, {{name: mine, path: {tmp_path}/mine.jsonl, n: 3}}]"
    assert main([*words, sets]) == 0
    assert json.loads(capsys.readouterr().out)["totals"]["count"] == 500 + 21
    assert main([*words, sets, "--rows", "gsm8k=5"]) == 2 and "the sets are math500, mine" in capsys.readouterr().err
    assert main([*words, "--search"]) == 2 and "--search is for runs of `train`" in capsys.readouterr().err


def test_a_runs_totals_hold_its_evaluations(capsys):
    words = ["plan", str(EXAMPLES / "published/tango_qwen2.5_7b.yaml"), "--json"]
    assert main([*words, "evaluation.sets=[math500]", "evaluation.every=100"]) == 0
    found = json.loads(capsys.readouterr().out)
    whole, cycle = found["totals"], sum(one["times"] for one in found["iterations"])
    assert whole["count"] == 440 and whole["evaluations"] == 6, "before, after 100 to 400, and at the end"
    training = 440 / cycle * found["cycle_s"] / 3600
    assert whole["hours"] == pytest.approx(training + whole["evaluation_hours"]) and whole["evaluation_hours"] > 0


def test_the_engine_tables_and_the_simulation_say_the_same_of_iterations_in_flight(capsys):
    """The tables took the longer of generation and the rest, which lengths that differ never reach."""
    words = ["plan", str(EXAMPLES / "published/scalerl_qwen3_8b.yaml"), "--json", "rollouts.max_staleness=1"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    [rate] = [one["iterations_per_hour"] for one in found["schedules"] if one["max_staleness"] == 1]
    cycle = 3600 / rate * sum(one["times"] for one in found["iterations"])
    assert found["cycle_s"] == pytest.approx(cycle) and found["engines"][0]["cycle_s"] == pytest.approx(cycle)
