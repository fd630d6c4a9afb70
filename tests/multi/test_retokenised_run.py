"""Runs on 2 ranks in which models of two families, with different tokenizers, learn from each other's texts."""

from __future__ import annotations

from functools import partial

import cut_runs
import numpy as np
import pytest
from cut_runs import SMALL, config, role
from tiny_models import make_model
from toys import characters, merging

from megatron_rl.run.metrics import read_metrics
from megatron_rl.training.iteration import Iteration
from megatron_rl.training.store import IterationStore

pytestmark = pytest.mark.multi
ALPHABET = "abcdefghijklmnop? \n"
TOKENIZERS = {"llama": characters(ALPHABET), "qwen": merging(ALPHABET, "abcdefgh")}
LESSONS, ITERATIONS = 10, 2
ROLES = {"first": "llama", "second": "qwen"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Both runs, by one start of two ranks. -> the directory of the runs."""
    base = tmp_path_factory.mktemp("retokenised")
    for seed, (name, family) in enumerate((("llama", "llama"), ("qwen", "qwen2"))):
        size = len(TOKENIZERS[name])
        make_model(base / name, family, vocab_size=size + size % 2, num_hidden_layers=1, seed=seed, **SMALL)
        TOKENIZERS[name].save_pretrained(base / name)
    cut_runs.write_data(base, [])
    (base / "template.txt").write_text("{question}")
    args = {"template": f"{base}/template.txt"}
    teacher = role(base, model="llama", policy="none", sampling={"max_tokens": 14})
    distil = config(
        base, "distil", "megatron_rl.recipes.distil:Distil", prompts_per_iteration=16,
        roles={"student": role(base, model="qwen", lr=0.01, loss={"objective": "distilled"}), "teacher": teacher},
        args=args | {"updates": LESSONS, "retokenise": True},
    )  # fmt: skip
    loss = {"objective": "megatron_rl.contrib.hacpo:hacpo"}
    learner = partial(role, base, lr=0.002, loss=loss, sampling={"max_tokens": 14}, samples_per_optimizer_step=16)
    hacpo, cut = (
        config(
            base, name, "megatron_rl.contrib.hacpo:Hacpo", {name: learner(model=own) for name, own in ROLES.items()},
            args=args | {"updates": ITERATIONS, "group_size": 4, "samples_per_optimizer_step": 16},
        )
        for name in ("hacpo", "hacpo_cut")
    )  # fmt: skip
    cut_runs.run_all(base, [(distil, None), (hacpo, None), (cut, 1), (cut, None)])
    return base / "runs"


def series(run, scope, name):
    return [row.metrics[name] for row in read_metrics(run) if row.scope == scope and name in row.metrics]


@pytest.mark.matrix
def test_a_student_is_drawn_to_a_teacher_with_another_tokenizer(runs):
    gaps = series(runs / "distil", "student", "sampled_kl")
    assert len(gaps) == LESSONS and np.mean(gaps[-3:]) < 0.8 * np.mean(gaps[:3]), gaps
    assert series(runs / "distil", "student", "unaligned") == [0.0] * LESSONS
    assert max(series(runs / "distil", "student", "engine_gap")) < 1e-4


def test_two_families_learn_from_each_others_solutions(runs):
    for number in range(ITERATIONS):
        iteration = Iteration(cycle=number, index=0, roles=tuple(ROLES), number=number)
        rollouts = IterationStore(runs / "hacpo/rollouts").read(iteration)[0].rollouts
        texts = {}
        for name, own in rollouts.items():
            tokenizer = TOKENIZERS[ROLES[name]]
            for writer in ROLES:
                wrote = [r for r in own if r.payload.get("written_by", name) == writer]
                texts[name, writer] = [tokenizer.decode(r.response) for r in wrote]
            assert [r.payload.get("written_by", name) == name for r in own] == [True] * 16 + [False] * (len(own) - 16)
        for name in ROLES:
            assert {*texts[name, name]} >= {*texts["second" if name == "first" else "first", name]}
            assert len(texts["second" if name == "first" else "first", name]) >= 14
    for name in ROLES:
        assert series(runs / "hacpo", name, "optimizer_steps") == [2.0] * ITERATIONS
        assert all(ratio > 0 for ratio in series(runs / "hacpo", name, "cross_ratio"))
        assert series(runs / "hacpo", name, "capability")[0] > 0


def test_a_run_of_both_that_was_cut_goes_on_exactly(runs):
    cut_runs.assert_same(runs / "hacpo", runs / "hacpo_cut")
