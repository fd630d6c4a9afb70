"""Pages that compare runs and sweeps: means over seeds, settings that differ."""

import json
import math
import re
from statistics import stdev

import pytest
from talks import CALLING, NINE, POLICY, keep_talks, talk
from test_report import CONFIG, Page, make_run

from megatron_rl.commands.parser import build_parser
from megatron_rl.commands.report import run as report_command
from megatron_rl.report.pages import write_comparison, write_report
from megatron_rl.report.run_comparison import arms, differences, interval, read_runs
from megatron_rl.run.metrics import Tracker


def sweep(tmp_path, ends, name="sweep"):
    """Writes a sweep of one run for each item of `ends`: its last evaluated metrics, or None where it has not begun."""
    own = tmp_path / name
    own.mkdir()
    changes = [{"run": f"run{i}", "changes": {"run.seed": i}} for i in range(len(ends))]
    (own / "sweep.json").write_text(json.dumps(changes))
    for i, metrics_of_run in enumerate(ends):
        (own / f"run{i}").mkdir()
        if metrics_of_run is not None:
            Tracker(own / f"run{i}" / "metrics.jsonl").log(4, "eval", metrics_of_run, iteration=9)
    return own


def means_of(text):
    return re.findall(r"<td>([^<]*)</td>", text[text.rindex("Means over seeds") : text.index("Student's t")])


def test_a_mean_over_seeds_counts_only_runs_that_have_the_figure(tmp_path):
    """Of five runs two have not begun, and one has not measured `b`."""
    own = sweep(tmp_path, [{"a": 0.25, "b": 1.0}, None, {"a": 0.75}, {"a": 0.5, "b": 2.0}, None])
    text = write_report(own).read_text()
    assert means_of(text) == ["all", "3 of 5", "0.5 ± 0.62", "1.5 ± 6.4 (2 runs)"]
    assert "not begun" in text and "0 of 5 runs are finished" in text


def test_a_sweep_without_a_begun_run_has_no_means(tmp_path):
    assert means_of(write_report(sweep(tmp_path, [None, None])).read_text()) == ["all", "0 of 2"]


@pytest.mark.parametrize(("values", "quantile"), [([1.0, 2.0], 12.706), ([3.0, 1.0, 4.0, 1.5], 3.182)])
def test_the_interval_of_a_mean_is_students(values, quantile):
    assert interval(values) == pytest.approx(quantile * stdev(values) / math.sqrt(len(values)))
    assert interval(values[:1]) is None and interval([0.0, 1.0] * 40) == pytest.approx(
        1.96 * stdev([0, 1] * 40) / 80**0.5
    )


def test_any_runs_are_compared_with_their_settings(tmp_path):
    other = CONFIG.replace("1.5e-4", "3e-4")
    runs = [
        make_run(tmp_path, 8, name=f"{lr}{seed}", seed=seed, config=text.replace("seed: 7", f"seed: {seed}"))
        for lr, text in (("low", CONFIG), ("high", other))
        for seed in (1, 2)
    ]
    read = read_runs(runs)
    assert differences(read) == {
        "roles.generator.optimizer.lr": [0.00015] * 2 + [0.0003] * 2,
        "run.seed": [1, 2, 1, 2],
    }
    assert [(arm.label, list(arm.runs)) for arm in arms(read)] == [("lr=0.00015", [0, 1]), ("lr=0.0003", [2, 3])]
    text = write_comparison(runs, tmp_path / "both.html", rollouts=80).read_text()
    found = Page(text)
    shown = " ".join(found.text)
    assert found.problems == [] and "Settings that differ" in shown and "Means over seeds" in shown
    report, index = found.data("report"), found.data("rollouts")
    assert [run["arm"] for run in report["runs"]] == [0, 0, 1, 1] and set(index["run"]) == {0, 1, 2, 3}
    [chart] = [c for c in report["charts"] if c["title"] == "generator: held out: accuracy"]
    assert [line["run"] for line in chart["lines"]] == [0, 1, 2, 3]
    assert "run.name" not in shown


def test_the_command_writes_a_page_of_one_or_of_several(tmp_path, capsys):
    runs = [make_run(tmp_path, 3, name=name, rollouts=False) for name in ("a", "b")]
    for words, wanted in (
        ([runs[0]], runs[0] / "report.html"),
        ([*runs, "--out", tmp_path / "c.html"], tmp_path / "c.html"),
        ([runs[0], "--out", tmp_path / "d.html"], tmp_path / "d.html"),
    ):
        assert report_command(build_parser().parse_args(["report", *map(str, words)])) == 0
        assert capsys.readouterr().out.strip() == str(wanted) and wanted.stat().st_size > 20_000


def test_conversations_are_kept_piece_by_piece(tmp_path):
    run = keep_talks(
        tmp_path, CONFIG, solver=[talk(*CALLING, agent="solver-1", episode="e7", rewards={"outcome": 1.0})]
    )
    found = Page(write_report(run.path).read_text())
    [row] = found.rollouts()
    index = found.data("rollouts")
    assert re.findall('class="who">(.*?)</p>', row) == [
        "answer 1 of 2 · 4 tokens", "environment · 3 tokens", "answer 2 of 2 · 2 tokens"
    ]  # fmt: skip
    assert "episode e7" in row and index["agents"] == ["solver-1"] and index["outcome"] == [1]


def test_a_conversation_with_an_advantage_for_each_token_is_small(tmp_path):
    """Each token had a style of its own: pages of long conversations took four times as long, and were larger."""
    credit = [0.0, *(place / 7 - 20 for place in range(300))]
    keep_talks(tmp_path, CONFIG, solver=[talk((POLICY, [NINE] * 300), advantages=credit)])
    [row] = Page(write_report(tmp_path / "talks").read_text()).rollouts()
    assert row.count("data-advantage") == 305 and len(row) < 300 * 60
