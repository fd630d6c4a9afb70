"""The timeline of a run's page: when each role works, what the plan predicts, and how long its ranks are idle."""

import json
import re

import pytest

from megatron_rl.config.schema import Run
from megatron_rl.report.pages import write_report
from megatron_rl.report.reading import read_run
from megatron_rl.report.timeline import SHOWN, timeline
from megatron_rl.run.run_directory import open_run

CONFIG = "run: {name: demo, seed: 7}\nroles: {generator: {model: {path: models/tiny}}}\n"
PREDICTED = {
    "cycle": 2,
    "ends": [2.0 * i for i in range(11)],
    "intervals": [[i, ("generator", "verifier")[i % 2], "training", 2.0 * i, 2 * i + 1.0] for i in range(10)],
}


def line(iteration, began, ended, busy, *intervals):
    """A line of two sets of ranks, of which the second is never busy."""
    sets = [{"ranks": "0-2", "roles": ["generator"], "busy": busy}, {"ranks": "3", "roles": ["verifier"], "busy": 0}]
    return {"iteration": iteration, "began": began, "ended": ended, "sets": sets, "intervals": intervals}


def shown(run):
    """Returns the values of the timeline of a run that has one."""
    values = timeline(read_run(run))
    assert values is not None
    return values


def run_with(tmp_path, *lines, schedule=None):
    run = open_run(Run(dir=str(tmp_path), name="demo"), CONFIG)
    run.timeline.write_text("".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in lines))
    run.update_summary({} if schedule is None else {"schedule": schedule})
    return run.path


def test_a_run_without_a_record_has_no_timeline(tmp_path):
    run = run_with(tmp_path)
    assert timeline(read_run(run)) is None and 'class="card timeline"' not in write_report(run).read_text()


def test_the_idle_shares_are_those_of_all_iterations_and_all_starts(tmp_path):
    lines = [line(i, 4.0 * i, 4.0 * i + 4, 3.0) for i in range(20)]
    found = shown(run_with(tmp_path, *lines, line(15, 0.0, 40.0, 10.0)))
    assert found["idle"] == (
        "The ranks of the generator (0-2) were idle for 42 % of the time, those of the verifier (3) for 100 %."
    )
    assert found["count"] == 1 and found["seconds"] == 40, "of the last start"
    shared = {**line(0, 0.0, 4.0, 0.0), "sets": [{"ranks": "0-1", "roles": ["generator", "verifier"], "busy": 1.0}]}
    idle = shown(run_with(tmp_path / "shared", shared))["idle"]
    assert idle == "The ranks of generator and verifier (0-1) were idle for 75 % of the time."


def test_measured_and_predicted_rows_have_the_same_axis_and_begin_at_the_same_place_of_the_cycle(tmp_path):
    training = lambda i: [i, ("generator", "verifier")[i % 2], "training", 4.0 * i + 1, 4.0 * i + 3]  # noqa: E731
    lines = [
        line(i, 4.0 * i, 4.0 * i + 4, 3.0, training(i), [i, "", "saving", 4.0 * i - 1, 4.0 * i]) for i in range(11)
    ]
    found = shown(run_with(tmp_path, *lines, schedule={"cluster": "1x8xH100", "timeline": PREDICTED}))
    assert found["count"] == SHOWN and found["seconds"] == 4 * SHOWN and found["missing"] == ""
    assert [*found["groups"]] == ["predicted", "measured"]
    for group, seconds in (("predicted", 2), ("measured", 4)):
        rows = dict(found["groups"][group])
        assert [*rows] == ["generator", "verifier"]
        assert found["marks"][group] == pytest.approx([1000 * (i + 1) * seconds / 32 for i in range(SHOWN)])
        [(phase, x, y, width, what), *_] = rows["verifier"]  # of iteration 3, the first of those that are drawn
        assert (phase, y) == ("training", 1) and what == f"iteration 4: training, {seconds / 2:g} s"
        assert x == pytest.approx(1000 / 32 if group == "measured" else 0) and width == pytest.approx(
            500 * seconds / 32
        )
        saved = [bar for bar in rows["generator"] if bar[0] == "saving"]
        assert len(saved) == (SHOWN - 1 if group == "measured" else 0), "the first one ends where the axis begins"


@pytest.mark.parametrize(
    ("schedule", "why"),
    [
        ({"not_predicted": "the run has no GPU"}, "the run has no GPU."),
        (None, "summary.json has none."),
        ([1], "summary.json has none."),
        ({"timeline": 7}, "it is damaged in summary.json."),
        ({"timeline": {**PREDICTED, "ends": [0.0]}}, "it is damaged in summary.json."),
        ({"timeline": {**PREDICTED, "cycle": "x"}}, "it is damaged in summary.json."),
        ({"timeline": {**PREDICTED, "intervals": [[0]]}}, "it is damaged in summary.json."),
    ],
)
def test_a_missing_prediction_is_explained(tmp_path, schedule, why):
    found = shown(run_with(tmp_path, line(0, 0.0, 4.0, 1.0), schedule=schedule))
    assert [*found["groups"]] == ["measured"]
    assert found["missing"] == f"There is no prediction to compare with: {why}"


def test_the_page_draws_what_can_be_read_and_names_what_cannot(tmp_path):
    hostile = line(0, 0.0, 4.0, 1.0, [0, "<i>role", "generating", 1.0, 3.0], [0, "generator", "dreaming", 1.0, 3.0])
    broken = [
        line(1, 4.0, float("nan"), 1.0),
        line(1, 4.0, 5.0, "x"),
        line(1, 4.0, 5.0, 1.0, 7),
        "[1]",
        '{"iteration": 1',
    ]
    text = write_report(run_with(tmp_path, hostile, *broken)).read_text()
    assert (
        "<i>role" not in text
        and "&lt;i&gt;role" in text
        and "timeline.jsonl: 5 lines, the first of them line 2" in text
    )
    [bar] = re.findall(r'<rect fill="#2f7ed8" x="250.0" y="0" width="500.0" height="1"><title>(.*?)</title>', text)
    assert bar == "iteration 1: generating, 2 s" and "dreaming" not in text
    assert "were idle for 75 % of the time" in text and "predicted</h4>" not in text
