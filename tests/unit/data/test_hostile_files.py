"""Damaged run directories and full disks: readers leave out what is damaged and say so, and writers tear nothing."""

from __future__ import annotations

import io
import json
import os
import random
import resource
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
from damaged_runs import JOB, flip, look, make_run
from rich.console import Console

from megatron_rl.cluster import job_slices
from megatron_rl.config.schema import Run
from megatron_rl.evaluation.samples import Samples, read_samples
from megatron_rl.jobs import status
from megatron_rl.jobs.submit import jobs_of
from megatron_rl.report.pages import write_report
from megatron_rl.run import json_lines
from megatron_rl.run.checkpoint import Checkpoints
from megatron_rl.run.metrics import Tracker, read_metrics
from megatron_rl.run.run_directory import RunDirectory, RunError, open_run
from megatron_rl.session.run_record import RunRecord
from megatron_rl.training.iteration import Collected, Iteration
from megatron_rl.training.store import IterationStore


@contextmanager
def small_disk(limit: int):
    """No file of this process may grow beyond `limit` bytes, which gives the same kind of error as a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("whole"))


def test_hostile_torn_lines_are_left_out_counted_and_told(whole, tmp_path):
    """The report and the status broke on one torn line."""
    run = flip(whole, tmp_path / "run", {"metrics.jsonl": lambda data: data[:300] + b"\0\xff{[" + data[360:-20]})
    record = RunRecord(run)
    rows = record.metrics()
    assert 0 < len(rows) < len(RunRecord(whole).metrics())
    assert len(record.damage) == 1 and "metrics.jsonl" in record.damage[0] and "left out" in record.damage[0]
    assert "cannot be read" in write_report(run).read_text()
    assert status.read(run, look_s=0, jobs=[]).damage == record.damage


def test_hostile_a_start_at_an_impossible_time_is_shown_without_one(whole, tmp_path):
    """The status ended with an OverflowError; `make fuzz` found it in a damaged digit."""
    run = flip(whole, tmp_path / "run", {job_slices.FILE: lambda data: data.replace(b'"began": 1.0', b'"began": 9e18')})
    shown = io.StringIO()
    status.show(status.read(run, look_s=0, jobs=[]), Console(file=shown, width=120))
    [row] = [line for line in shown.getvalue().splitlines() if " 17 " in line]
    assert "?" in row and "n0" in row


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "refits.jsonl", "timeline.jsonl", "slices.jsonl", "summary.json", "config.yaml"]
)
@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 500, b"[" * 100_000, b"\xff\xfe", b"{}\n", b"[1]\n", b"null\n", b'"a"', b"9" * 5000],
)
def test_hostile_files_of_a_run_stop_no_reader(whole, tmp_path, name, content):
    look(flip(whole, tmp_path / "run", {name: lambda _: content}))


@pytest.mark.parametrize("key", ["iteration", "cycle", "scope", "time", "metrics"])
@pytest.mark.parametrize("value", [None, "x", [], {"a": []}, 1.5, True, 10**400])
def test_hostile_values_in_metrics_are_left_out(whole, tmp_path, key, value):
    row = {"iteration": 3, "cycle": 3, "scope": "solver", "time": {}, "metrics": {"loss": 1.0}} | {key: value}
    run = flip(whole, tmp_path / "run", {"metrics.jsonl": lambda data: data + json.dumps(row).encode() + b"\n"})
    look(run)


def test_hostile_damaged_summary_does_not_make_a_run_finished(whole, tmp_path):
    """slices.finished raised, and the batch script's chain ended."""
    run = flip(whole, tmp_path / "run", {"summary.json": lambda data: data[:-9]})
    assert not job_slices.finished(run)
    assert job_slices.begin(run, JOB, "n0", 3)[0] is job_slices.NextAction.GO
    assert RunDirectory(run).update_summary({"finished": True}) == {"finished": True}
    assert job_slices.finished(run)


def test_hostile_half_a_line_costs_only_itself(tmp_path):
    path = tmp_path / "some.jsonl"
    json_lines.append(path, b'{"a": 1}')
    path.write_bytes(path.read_bytes() + b'{"a": ')
    json_lines.append(path, b'{"a": 2}')
    found = json_lines.read(path, lambda raw: raw["a"])
    assert found.values == [1, 2] and found.damage is not None and "line 2 of 3" in found.damage


@pytest.mark.parametrize("room", range(0, 120, 7))
def test_hostile_full_disk_tears_no_line(tmp_path, room):
    """A full disk left half a line, and the next line was glued to it. There are two ways to no room: none for the
    line, and none for all of it."""
    tracker = Tracker(tmp_path / "metrics.jsonl")
    tracker.log(0, "solver", {"loss": 1.0}, iteration=0)
    before = tracker.path.read_bytes()
    with small_disk(len(before) + room):
        if room < len(before):
            with pytest.raises(json_lines.DiskError, match=r"metrics.jsonl cannot be written .*: free some space"):
                tracker.log(1, "solver", {"loss": 0.5}, iteration=1)
            assert tracker.path.read_bytes() == before
        else:
            tracker.log(1, "solver", {"loss": 0.5}, iteration=1)
    tracker.log(2, "solver", {"loss": 0.25}, iteration=2)
    assert [row.iteration for row in read_metrics(tmp_path)] == ([0, 2] if room < len(before) else [0, 1, 2])


def test_hostile_full_disk_leaves_no_part_of_an_iteration(tmp_path):
    store, iteration = IterationStore(tmp_path), Iteration(cycle=0, index=0, roles=("solver",), number=0)
    with small_disk(700), pytest.raises(json_lines.DiskError, match="iteration_000000.parquet cannot be written"):
        store.put(iteration, Collected(rollouts={"solver": []}, metrics={}), {"long": os.urandom(2000).hex()})
    assert not [*tmp_path.iterdir()]


def test_hostile_full_disk_leaves_no_half_start(tmp_path):
    job_slices.begin(tmp_path, JOB, "n0", 3)
    before = (tmp_path / job_slices.FILE).read_bytes()
    with small_disk(len(before) + 30), pytest.raises(json_lines.DiskError):
        job_slices.end(tmp_path, JOB, 1)
    assert (tmp_path / job_slices.FILE).read_bytes() == before


def test_hostile_samples_of_an_evaluation_are_left_out(tmp_path, caplog):
    """Comparing evaluations refused a file for one torn line."""
    row = {"set": "gsm8k", "measure": "solve", "id": 0, "sample": 0, "score": 1.0}
    good = json.dumps(row).encode() + b"\n"
    bad = [b"{\n", b"[]\n", b"null\n", b'{"set": 1, "measure": 2, "id": 3, "sample": 4}\n', good[:-9]]
    (tmp_path / "eval.jsonl").write_bytes(good + b"".join(bad))
    assert read_samples(tmp_path / "eval.jsonl") == [row] and "5 lines" in caplog.text
    head = b'{"evaluation": "same"}\n'
    parts = [json.dumps(row | change).encode() + b"\n" for change in ({"of": 1}, {"of": None}, {"set": []}, {"id": {}})]
    (tmp_path / "eval.jsonl.partial").write_bytes(head + b"".join([*parts, *bad]))
    assert Samples(tmp_path / "eval.jsonl", "same").resumed == 1


def test_hostile_list_of_jobs_is_read_as_far_as_it_goes(tmp_path):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/submitted.jsonl").write_bytes(b'{"job": "17"}\n\xff\n{"job": 3}\n[]\n{"job": "18"}\n{"jo')
    assert jobs_of(tmp_path) == ["17", "18"]


@pytest.mark.parametrize("damage", [b"a: [", b"\xff\xfe\0", b"&a [*a]", b"[" * 5000])
def test_hostile_config_of_a_run_is_not_trained_on_unseen(whole, tmp_path, damage):
    """A run whose config is damaged goes on where that is asked for, and is refused otherwise."""
    run = flip(whole, tmp_path / "run", {"config.yaml": lambda _: damage})
    Checkpoints(run / "checkpoints").write(1, lambda path: (path / "x").write_text("x"))
    with pytest.raises(RunError, match="config"):
        open_run(Run(dir=str(run.parent), name="run"), "seed: 1\n")


def test_hostile_bytes_in_random_places_stop_no_reader(whole, tmp_path):
    for seed in range(30):
        rng = random.Random(seed)
        look(flip(whole, tmp_path / str(seed), {}, rng=rng))
