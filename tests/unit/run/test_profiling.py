"""Traces of chosen iterations, and what an out-of-memory error says."""

from __future__ import annotations

import contextlib
import gzip
import json
from dataclasses import replace

import pytest
import torch
from loops import Log, make, train
from specs import problems as problems_of

from megatron_rl.config.run import Profile, Run
from megatron_rl.config.schema import Model, PromptSet, RoleConfig, TrainConfig, Use
from megatron_rl.lib.timing import Timer
from megatron_rl.run.metrics import Stopwatch
from megatron_rl.run.profiling import memory_explained, profiled
from megatron_rl.training import loop


def test_a_trace_has_the_stages_and_the_parts_of_updates_as_ranges_over_their_operations(tmp_path):
    settings, watch, timer = Profile(iterations=(1, 3), ranks=(0, 2)), Stopwatch(), Timer()
    for iteration in range(4):
        for rank in range(3):
            with profiled(settings, tmp_path, iteration=iteration, rank=rank), watch("train"), timer("forward"):
                torch.ones(64, 64) @ torch.ones(64, 64)
    names = [f"iteration_{number:06d}_rank_{rank}.json.gz" for number in (1, 3) for rank in (0, 2)]
    assert sorted(path.name for path in (tmp_path / "profiles").iterdir()) == names
    with gzip.open(tmp_path / "profiles" / names[0]) as file:
        events = {event["name"]: event for event in json.load(file)["traceEvents"] if "dur" in event}
    for outer, inner in (("train", "forward"), ("forward", "aten::mm")):
        a, b = events[outer], events[inner]
        assert a["ts"] <= b["ts"] and b["ts"] + b["dur"] <= a["ts"] + a["dur"]


def test_memory_that_runs_out_names_its_largest_owners_by_role(tmp_path):
    held = {
        "generator": lambda: {"weights": 2 << 30, "gradients": 4 << 30, "optimizer state": 8 << 30},
        "verifier": lambda: {"weights": 3 << 30, "gradients": 0, "optimizer state": 0},
    }
    with pytest.raises(torch.OutOfMemoryError) as caught, memory_explained(tmp_path, 1, held):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.\nSee the documentation")
    said = str(caught.value)
    assert said.startswith("rank 1 ran out of GPU memory: CUDA out of memory. Tried to allocate 3.00 GiB.;")
    assert (
        "generator's optimizer state 8.00 GiB, generator's gradients 4.00 GiB, verifier's weights 3.00 GiB, "
        "generator's weights 2.00 GiB;"
    ) in said
    assert "verifier's gradients" not in said and "micro_batch_tokens" in said


def test_other_errors_are_left_as_they_are(tmp_path):
    with pytest.raises(RuntimeError, match="^another$"), memory_explained(tmp_path, 0, {}):
        raise RuntimeError("another")


def test_an_iteration_runs_in_its_context_from_the_rollouts_to_the_refit(tmp_path):
    log, seen, done = Log(), [], []
    template = tmp_path / "template.txt"
    template.write_text("{question}")
    setup, progress = make(str(template), log, tmp_path / "store")

    @contextlib.contextmanager
    def around(number):
        seen.append((number, len(log.series("skipped")), setup.context.engines["generator"].version))
        yield
        seen.append((number, len(log.series("skipped")), setup.context.engines["generator"].version))

    train(replace(setup, around=around, iteration_done=done.append), loop.Plan(iterations=2), progress)
    assert done == [1, 2], "rank 0 tells what started the run, after every iteration"
    assert seen == [(0, 0, 0), (0, 1, 1), (1, 1, 1), (1, 2, 2)]


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        (Profile(iterations=(3,), ranks=(0, 4)), "run.profile.ranks = [0, 4]: the trainer has 4 ranks"),
        (Profile(iterations=(3,), ranks=()), "run.profile.ranks is empty"),
        (Profile(iterations=(2, 5)), "run.profile.iterations = [2, 5]: the run has 5 iterations, from 0 on"),
        (Profile(iterations=(2, 4), ranks=(3,)), None),
        (Profile(ranks=(7,)), None),
    ],
)
def test_check_refuses_traces_that_no_rank_would_write(profile, words):
    config = TrainConfig(
        roles={"generator": RoleConfig(model=Model(path="m"))},
        recipe=Use(target="megatron_rl.recipes.grpo:Grpo", args={"updates": 9}),
        data=PromptSet(path="data.jsonl"), run=Run(iterations=5, profile=profile),
    )  # fmt: skip
    found = [line for line in problems_of(config, 4, to_come=True) if "profile" in line]
    assert (not found) if words is None else (len(found) == 1 and found[0].startswith(words))
