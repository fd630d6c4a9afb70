"""Runs that draw their problems from three sources with weights, trained by `megatron-rl train`'s own code on 2 ranks:
shares of the draws, graders and metrics by source, and exact resumption, also with rollouts ahead of training.
"""

from __future__ import annotations

import json
from collections import Counter

import cut_runs
import pytest
from cut_runs import PLAYERS, config, role
from test_open_centre import iterations, series, weights

from megatron_rl.run.metrics import read_metrics
from megatron_rl.types import SOURCE

pytestmark = [pytest.mark.multi, pytest.mark.slow, pytest.mark.matrix]
WEIGHTS, DRAWS = {"openai/gsm8k": 5.0, "code": 3.0, "puzzles": 2.0}, 1000
STAGES = [
    {"until": 1, "overrides": {"roles.generator.sampling": {"max_tokens": 3, "temperature": 0.7}}},
    {
        "until": 3,
        "overrides": {
            "data.sources.code.weight": 0, "run.prompts_per_iteration": 8, "recipe.args.group_size": 6,
            "roles.generator.optimizer.lr": 1e-3, "roles.generator.loss.clip_high": 0.5,
            "roles.generator.loss.kl_coef": 0.1, "roles.generator.max_prompt_tokens": 2,
        },
    },
]  # fmt: skip
CUTS = {0: 2, 2: 1}  # {rollouts.max_staleness: iterations after which the run is cut}


def write(base):
    """Writes rows in the form of verl, with all sources but one in a single file."""
    rows = [
        {"data_source": name, "question": f"{letter}? {more}", "answer": letter}
        for name in ("openai/gsm8k", "puzzles", "unused")
        for letter, more in zip("abcdefghijkl", [""] * 6 + ["x"] * 6, strict=True)
    ]
    (base / "verl.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (base / "code.jsonl").write_text("".join(json.dumps({"question": f"{c}!", "answer": c}) + "\n" for c in "abcdefg"))
    (base / "other.txt").write_text("{question} b")


def mixed(base, name):
    args = {"updates": 4, "group_size": 2, "template": f"{base}/plain.txt"}
    roles = {"generator": role(base, model=PLAYERS[0], lr=0.002)}
    found = config(
        base, name, "megatron_rl.recipes.dapo:Dapo", roles, args=args, reward="begins_well",
        prompts_per_iteration=DRAWS // 4 if name.startswith("mixed_0") else 20,
    )  # fmt: skip
    own = {"openai/gsm8k": {}, "code": {"path": f"{base}/code.jsonl"}, "puzzles": {"template": f"{base}/other.txt"}}
    own["code"]["reward"] = found["reward"] | {"target": "open_centre_rewards:share_of_vowels"}
    sources = {name: settings | {"weight": WEIGHTS[name]} for name, settings in own.items()}
    return found | {"data": {"path": f"{base}/verl.jsonl", "sources": sources}}


def staged(base, name):
    found = mixed(base, name)
    found["recipe"]["args"] |= {"updates": 5}
    return found | {"stages": STAGES}


def reset(base, name, **run):
    """After every two iterations the weights become the reference. One checkpoint is kept, and the reference's."""
    found = mixed(base, name)
    found["roles"]["generator"]["loss"] |= {"kl_coef": 0.1, "reset_reference_every": 2}
    return found | {"run": found["run"] | {"keep": 1} | run}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    base = tmp_path_factory.mktemp("sources")
    cut_runs.write_players(base)
    write(base)
    servers = cut_runs.start_servers()
    try:
        every = cut_runs.cases(base, {f"mixed_{k}": (k, cut) for k, cut in CUTS.items()}, servers, mixed)
        every += cut_runs.cases(base, {f"staged_{k}": (k, k + 1) for k in (0, 1)}, servers, staged)
        every += cut_runs.cases(base, {"reset_0": (0, 3)}, servers, reset)
        every += [(reset(base, f"first_{count}", iterations=count), None) for count in (2, 3)]
        cut_runs.run_all(base, every)
    finally:
        for server in servers:
            server.close()
    return base / "runs"


def test_a_run_draws_by_weights_and_has_metrics_of_each_source(runs):
    found = iterations(runs / "mixed_0", "generator")
    drawn = [Counter(rollout.payload[SOURCE] for rollout in own) for own in found]
    whole = sum(drawn, Counter())
    for name, share in {"openai/gsm8k": 500, "code": 300, "puzzles": 200}.items():
        assert abs(whole[name] / 2 - share) <= 3, "each problem has two samples"
    for row, own, rollouts in zip(
        (row for row in read_metrics(runs / "mixed_0") if row.scope == "generator"),
        drawn,
        found,
        strict=True,
    ):
        for name in WEIGHTS:
            rewards = [rollout.rewards["outcome"] for rollout in rollouts if rollout.payload[SOURCE] == name]
            assert row.metrics[f"samples/{name}"] == own[name] == len(rewards)
            assert row.metrics[f"reward/outcome/{name}"] == pytest.approx(sum(rewards) / len(rewards))
            correct = sum(reward > 0.5 for reward in rewards)
            assert row.metrics[f"accuracy/{name}"] == pytest.approx(correct / len(rewards))
    prompts = {rollout.payload[SOURCE]: tuple(rollout.tokens[: rollout.start]) for rollout in found[0]}
    assert len({prompt[-1:] for prompt in prompts.values()}) == 2, "the puzzles have a template of their own"
    by_vowels = {rollout.rewards["outcome"] for rollout in found[0] if rollout.payload[SOURCE] == "code"}
    assert by_vowels - {0.0, 1.0}, "graded by its own function, with shares"


@pytest.mark.parametrize("staleness", CUTS)
def test_a_run_of_several_sources_that_was_cut_goes_on_exactly(runs, staleness):
    cut_runs.assert_same(runs / f"mixed_{staleness}", runs / f"mixed_{staleness}_cut")


@pytest.mark.parametrize("staleness", [0, 1])
def test_stages_change_weights_lengths_and_settings_and_are_resumed_exactly(runs, staleness):
    """The run is cut where the second stage begins, or in the middle of it; rollouts ahead of training are of the stage
    of their own iteration."""
    run = runs / f"staged_{staleness}"
    found = iterations(run, "generator")
    rows = [row.metrics for row in read_metrics(run) if row.scope == "generator"]
    assert [len(own) for own in found] == [40, 48, 48, 40, 40], "20 prompts with 2 samples, 8 with 6, and 20 with 2"
    assert [row["lr"] for row in rows] == pytest.approx([2e-3, 1e-3, 1e-3, 2e-3, 2e-3])
    for number, own in enumerate(found):
        middle = number in (1, 2)
        assert (max(rollout.length for rollout in own) <= 3) == (number == 0)
        assert ("code" in {rollout.payload[SOURCE] for rollout in own}) != middle
        assert (max(rollout.start for rollout in own) <= 2) == middle, "others have up to three tokens"
        assert ("kl_ref" in rows[number]) == middle, "the reference is there from the beginning"
    cut_runs.assert_same(run, runs / f"staged_{staleness}_cut")


def test_weights_become_the_reference_and_the_optimizer_begins_anew_and_both_are_resumed_exactly(runs):
    """ProRL, arXiv 2505.24864: the KL term is 0 again, and a first step of Adam moves every weight by its rate."""
    kl = series(runs / "reset_0", "generator", "kl_ref")
    assert kl[0] == kl[2] == pytest.approx(0, abs=1e-6) and min(kl[1], kl[3]) > 1e-5
    cut_runs.assert_same(runs / "reset_0", runs / "reset_0_cut")
    kept = {
        name: sorted(path.name for path in (runs / name / "checkpoints").iterdir()) for name in ("first_3", "reset_0")
    }
    assert kept["first_3"] == ["iteration_000002", "iteration_000003"], "one, and the one that holds its reference"
    assert kept["reset_0"] == ["iteration_000004"], "which holds its own reference"
    before, after = (weights(runs / f"first_{count}", "generator") for count in (2, 3))
    lr, decay = series(runs / "first_3", "generator", "lr")[2], 0.01
    for name in before:
        own = before[name] if before[name].ndim < 2 else before[name] * (1 - lr * decay)
        moved = (after[name] - own).abs()[after[name] != own]
        assert ((moved / lr - 1).abs() < 0.05).float().mean() > 0.9, name
