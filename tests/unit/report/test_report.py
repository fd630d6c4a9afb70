"""The report shows what a run has, whole or in part; nothing that a model wrote becomes markup; metrics are right."""

import base64
import gzip
import json
import math
import random
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from statistics import fmean

import numpy as np
import pytest

from megatron_rl.commands.parser import build_parser
from megatron_rl.commands.report import run as report_command
from megatron_rl.config.schema import ConfigError, Run
from megatron_rl.report import curves
from megatron_rl.report import run_sections as report_tables
from megatron_rl.report.html_page import as_json, write_page
from megatron_rl.report.pages import write_report
from megatron_rl.report.reading import METRICS, Curve, read_run
from megatron_rl.report.shown_rollouts import opinion, pick
from megatron_rl.run.metrics import Tracker
from megatron_rl.run.run_directory import open_run
from megatron_rl.texts.text import Decoded
from megatron_rl.training.iteration import Collected, Iteration
from megatron_rl.training.store import IterationStore
from megatron_rl.types import STEP, Annotations, Author, Rollout, Stop, spans_of

CONFIG = """
run: {name: demo, seed: 7}
recipe: {target: "megatron_rl.recipes.tango:Tango", args: {alpha_start: 0.3}}
roles:
  generator: {model: {path: models/<tiny>}, optimizer: {lr: 1.5e-4}, layout: {tp: 2}}
  verifier: {model: {path: models/tiny}, optimizer: {lr: 1.0e-4}}
"""
WORDS = ["Q", "<think>", "<step>", "a&b", "</step>", "</think>", "</script><script>alert(1)</script>", "<answer>"]
SAYS_RIGHT = "<final_verification>\\boxed{CORRECT}</final_verification>"
SAYS_WRONG = "<final_verification>\\boxed{INCORRECT}</final_verification>"
VOID = {"meta", "br", "link", "img", "input", "polyline"}


class Page(HTMLParser):
    """Text and tags of a page; `problems` names what is not nested, `blocks` has the data by id."""

    def __init__(self, text):
        super().__init__()
        self.text, self.tags, self.open, self.problems, self.links, self.blocks = [], [], [], [], [], {}
        self._block = None
        self.feed(text)
        self.problems += self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.links += [value for name, value in attributes if name in ("src", "href", "xlink:href")]
        self._block = dict(attributes).get("id") if tag == "script" else None
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.links += [value for name, value in attributes if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}>")

    def handle_data(self, data):
        if self.open and self.open[-1] in ("script", "style"):
            if self._block:
                self.blocks[self._block] = self.blocks.get(self._block, "") + data
        else:
            self.text.append(data)

    def data(self, name):
        return json.loads(self.blocks[f"{name}-data"])

    def rollouts(self):
        packed = [value for name, value in self.blocks.items() if name.startswith("texts-")]
        return [row for chunk in packed for row in json.loads(gzip.decompress(base64.b64decode(chunk)))]


def decode(role, tokens):
    words = [WORDS[token].encode() for token in tokens]
    return Decoded(b"".join(words).decode(), b"".join(words), np.cumsum([*map(len, words)], dtype=np.int64))


def keep(directory, iteration, **rollouts):
    """The iteration as the run keeps it for the report. `rollouts`: by role."""
    iteration = Iteration(cycle=iteration, index=0, roles=tuple(rollouts), number=iteration)
    return IterationStore(directory.rollouts, decode=decode).put(
        iteration, Collected(rollouts=rollouts, metrics={}), {}
    )


def solution(draw, good, role="generator", question="last letters of <b>x</b>?"):
    verdicts = [1, 1 if good else -1]
    return Rollout(
        role=role,
        group="problem <1>",
        tokens=[0, 1, 2, 3, 4, 2, 6, 4, 5, 7],
        logprobs=[0.0] + [-0.5] * 9,
        spans=spans_of((1, Author.ENVIRONMENT, -1), (9, Author.POLICY, 3)),
        stop=Stop.EOS,
        payload={
            "question": question,
            "answer": "ab",
            "correct": good,
            "verdicts": verdicts,
            "review": SAYS_RIGHT if draw.random() < 0.7 else SAYS_WRONG,
        },
        annotations={STEP: Annotations([(2, 5), (5, 8)], [v / 2 for v in verdicts])},
        rewards={"outcome": float(good)},
        advantages=[0.0] + [draw.gauss(0, 1) for _ in range(9)],
    )


def make_run(tmp_path, iterations=24, rollouts=True, verifier=True, name="demo <run>", seed=0, config=CONFIG):
    """A run as the loop would leave it; returns its directory."""
    draw = random.Random(seed)
    directory = open_run(Run(dir=str(tmp_path), name=name), config)
    tracker = Tracker(directory.metrics)
    for iteration in range(iterations):
        share = (iteration + 1) / iterations
        role = "verifier" if verifier and iteration % 4 == 3 else "generator"
        metrics = {
            "loss": draw.gauss(0, 0.01),
            "kl_ref": 0.01 * share,
            "entropy": 1 - 0.5 * share,
            "length": 90 + 40 * draw.random(),
            "reward/outcome": share * 0.8,
            "reward/format": 0.9,
            "engine_gap": 1e-4,
            "clip_frac": 0.0,
            **{"seconds/rollout": 2.0, "seconds/train": 1.5, "seconds/refit": 0.1},
        }
        if role == "verifier":
            counts = {"tp": 10 * share, "fp": 3, "tn": 12, "fn": 4}
            metrics |= {f"confusion/{cell}": value for cell, value in counts.items()}
        tracker.log(iteration, role, metrics, iteration=iteration)
        if iteration % 6 == 0:
            metrics = {"generator/accuracy": share * 0.7, "verifier/outcome_f1": 0.5 + share / 4}
            tracker.log(iteration, "eval", metrics | {"generator/num_problems": 200.0}, iteration=iteration)
        if rollouts:
            keep(directory, iteration, **{role: [solution(draw, draw.random() < share, role) for _ in range(12)]})
    directory.update_summary({"generator_accuracy_start": 0.125, "generator_accuracy_end": 0.75, "planned": iterations})
    return directory.path


def test_a_whole_run_makes_one_page_that_needs_nothing_else(tmp_path):
    path = write_report(make_run(tmp_path))
    assert path.name == "report.html"
    text = path.read_text(encoding="utf-8")
    found = Page(text)
    assert found.problems == [] and all(link.startswith("#") for link in found.links), found.links
    assert "url(http" not in text and "@import" not in text and "default-src 'none'" in text
    shown = " ".join(found.text)
    for heading in (*METRICS["questions"].values(), "In short", "Rollouts", "Summary and config"):
        assert (heading in shown) == (heading != "Other metrics"), heading
    for words in (
        "18 generator updates",
        "1.5e-4",
        "200 problems",
        "verifier iterations: last iterations",
        "0.02917",
        "+0.525",
    ):
        assert words in shown, words
    titles = {chart["title"]: chart["question"] for chart in found.data("report")["charts"]}
    assert titles["generator: held out"] == "learn" and titles["verifier: held out"] == "verify"
    assert titles["kl_ref"] == "update" and titles["loss"] == "update" and titles["says_correct_of_correct"] == "verify"
    assert "engine_gap" not in titles and "generator, verifier: engine_gap = 0.0001" in shown, (
        "constants are told as text"
    )


def test_what_models_wrote_stays_text(tmp_path):
    text = write_report(make_run(tmp_path)).read_text(encoding="utf-8")
    found = Page(text)
    assert "b" in {tag for tag, _ in found.tags}  # our own bold; theirs is text:
    assert "alert(1)" not in text and "<b>x" not in text
    row = found.rollouts()[0]
    assert "&lt;/script&gt;&lt;script&gt;alert(1)&lt;/script&gt;" in row and "<script" not in row
    assert "<p><b>Question</b> last letters of &lt;b&gt;x&lt;/b&gt;?</p>" in row
    assert "demo <run>" in "".join(found.text) and "<run>" not in text.replace("demo &lt;run&gt;", "")
    assert as_json({"a": "</script>\u2028<!--"}) == '{"a":"\\u003c/script>\\u2028\\u003c!--"}'


def test_only_the_pages_own_scripts_may_run(tmp_path):
    """The policy names each script by its hash, and a page without scripts allows none."""
    text = write_report(make_run(tmp_path, iterations=2)).read_text(encoding="utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert policy.count("'sha256-") == 4 and "unsafe-inline'" in policy.split("style-src")[1].split(";")[0]
    values = {"title": "a", "subtitle": "b", "heads": ["c"], "rows": [["d"]]}
    write_page(tmp_path / "plain.html", "evaluation_comparison.html", values)
    assert "script-src" not in (tmp_path / "plain.html").read_text()


@pytest.mark.parametrize(
    ("iterations", "rollouts", "verifier"),
    [(1, True, True), (1, False, False), (24, False, True), (24, True, False), (0, False, False)],
)
def test_a_run_with_parts_missing_still_reports(tmp_path, iterations, rollouts, verifier):
    run = make_run(tmp_path, iterations, rollouts, verifier)
    found = Page(write_report(run).read_text(encoding="utf-8"))
    assert found.problems == []
    text = " ".join(found.text)
    assert ("rollouts-data" in found.blocks) == rollouts
    assert ("against the truth" in text) == (verifier and iterations > 3)


def test_sft_and_values_that_are_not_finite(tmp_path):
    directory = open_run(Run(dir=str(tmp_path), name="sft"), "model: {path: m}\n")
    tracker = Tracker(directory.metrics)
    for step in range(20):
        loss = math.nan if step == 3 else 5 / (step + 1)
        tracker.log(step, "sft", {"loss": loss, "lr": 1e-3, "seconds/train": 0.1}, iteration=step)
    found = Page(write_report(directory.path).read_text(encoding="utf-8"))
    assert found.problems == [] and "20 sft updates" in " ".join(found.text)
    [chart] = [chart for chart in found.data("report")["charts"] if chart["title"] == "loss"]
    assert chart["question"] == "learn" and chart["lines"][0]["x"] == [*range(3), *range(4, 20)]
    assert "1 values are not finite, the first at iteration 4" in chart["lines"][0]["broken"]


def test_the_report_is_a_function_of_the_run(tmp_path):
    run = make_run(tmp_path)
    assert write_report(run).read_bytes() == write_report(run).read_bytes()


def test_a_directory_without_a_run_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a run directory"):
        write_report(tmp_path)
    for words, message in (
        (["nowhere"], "no run directory"),
        ([str(tmp_path)], "is no run directory"),
        ([__file__, __file__], "eval --compare"),
    ):
        with pytest.raises(ConfigError, match=message):
            report_command(build_parser().parse_args(["report", *words]))


def test_numbers_beyond_all_measure_break_no_page(tmp_path):
    """Sums of values near the largest float are not finite, and JSON has no infinity."""
    run = make_run(tmp_path, iterations=8)
    huge = {"iteration": 9, "cycle": 1, "scope": "generator", "time": {"train": 1.7e308, "refit": "inf"}}
    lines = [
        huge | {"iteration": iteration, "metrics": {"loss": 1.7e308, "reward/outcome": -1.7e308}}
        for iteration in (9, 10)
    ]
    with (run / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
    found = Page(write_report(run).read_text(encoding="utf-8"))
    assert found.problems == [] and found.data("report")["charts"]


@pytest.mark.parametrize("count", [1, 37, 2000, 2001, 5000])
def test_long_curves_keep_their_extremes_and_means(count):
    draw = random.Random(count)
    curve = Curve()
    for iteration in range(count):
        curve.add(iteration, draw.gauss(0, 1) + 50 * (iteration == count // 3))
    chart = curves.Chart(question="learn", title="x", lines=[(0, "x", curve)])
    width = curves.bucket_width([chart])
    found = curves.thin(curve, width)
    if count <= curves.MAX_POINTS:
        assert width == 1 and found.keys() == {"x", "y"} and len(found["y"]) == count
        return
    assert len(found["low"]) + len(found["high"]) <= curves.MAX_POINTS and width > 1
    for x, y, low, high in zip(*(found[name] for name in ("x", "y", "low", "high")), strict=True):
        own = [curve.values[t] for t in range(x, min(x + width, count))]
        assert (low, high) == (pytest.approx(min(own), rel=1e-5), pytest.approx(max(own), rel=1e-5))
        assert y == pytest.approx(fmean(own), rel=1e-4, abs=1e-5)


def test_a_page_of_many_curves_has_fewer_points_of_each_at_the_same_iterations():
    whole, part = Curve(), Curve()
    for iteration in range(3000):
        whole.add(iteration, 1.0 * iteration)
        if iteration < 1000:
            part.add(iteration, 2.0 * iteration)
    charts = [curves.Chart(question="learn", title="x", lines=[(0, "x", whole), (1, "x", part)])] * 1000
    width = curves.bucket_width(charts)
    assert -(-3000 // width) <= curves.PAGE_POINTS // 2000 / 2
    assert set(curves.thin(part, width)["x"]) < set(curves.thin(whole, width)["x"])


@pytest.mark.parametrize(
    ("scope", "name", "question"),
    [
        ("eval", "generator/accuracy_greedy", "learn"),
        ("eval", "verifier/step_f1", "verify"),
        ("eval", "exploitability", "learn"),
        ("eval", "first/J check bet", "learn"),
        ("generator", "reward/trained", "learn"),
        ("generator", "predicted_positive", "verify"),
        ("generator", "grad_norm", "update"),
        ("generator", "loss", "update"),
        ("sft", "validation_loss", "learn"),
        ("generator", "packed_tokens", "time"),
        ("generator", "something_else", "rest"),
        ("preflight", "preflight/reward_correct", "update"),
    ],
)
def test_metrics_stand_under_the_question_that_they_answer(scope, name, question):
    assert curves.question_of(scope, name) == question


def test_a_change_within_chance_is_not_called_learning():
    """Two shares p and q of n problems differ by chance by up to 1.96 sqrt(p(1-p)/n + q(1-q)/n), in 95 of 100 cases."""
    far, near = (report_tables.Gain("generator/accuracy", 0.2, end, 100) for end in (0.5, 0.25))
    assert far.better is True and near.better is None
    assert far.error == pytest.approx(1.96 * math.sqrt(0.2 * 0.8 / 100 + 0.5 * 0.5 / 100))
    assert report_tables.Gain("exploitability", 0.4, 0.1).better is True
    assert report_tables.Gain("accuracy", 1.0, 1.0).better is None
    assert report_tables.Gain("answers", 1.0, 2.0).better is None, "nothing says that more answers are better"


def test_predicted_and_measured_rates_stand_beside_each_other(tmp_path):
    run = make_run(tmp_path, iterations=1, rollouts=False)
    tracker = Tracker(run / "metrics.jsonl")
    for iteration, (seconds, idle) in enumerate([(100.0, 0.9), (4.0, 0.25), (6.0, 0.35)]):
        speed = {"iteration_seconds": seconds, "trainer_idle": idle, "engines_idle": idle / 2}
        ages = {"staleness": 2.0, "trained_late/1": 0.5, "trained_late/2": 0.25} if iteration else {"staleness": 0.0}
        metrics = {**ages, **{f"speed/{name}": value for name, value in speed.items()}}
        tracker.log(iteration, "generator", metrics, iteration=iteration)
    one = {"max_staleness": 1, "iterations_per_hour": 700, "engines_idle": 0.1, "trainer_idle": 0.2}
    summary = {"schedule": {"cluster": "1x8xH100", "predicted": [{**one, "staleness": [0.5, 0.5]}]}}
    (run / "summary.json").write_text(json.dumps(summary))
    found = report_tables.schedules(read_run(run))
    # the first iteration waits for rollouts that nothing was generated beside
    assert [*found.values()] == [["700", "10%", "20%", "50%, 50%"], ["720", "15%", "30%", "50%, 33%, 17%"]]
    assert [*found] == ["predicted for max_staleness 1, 1x8xH100", "measured with max_staleness 0"]
    assert "Iterations in flight" in write_report(run).read_text()
    for damaged in ({"schedule": {"predicted": 7}}, {"schedule": [1]}, {"schedule": {"not_predicted": "why"}}):
        (run / "summary.json").write_text(json.dumps(damaged))
        assert [*report_tables.schedules(read_run(run))] == ["measured with max_staleness 0"]


def test_refits_are_summed_up_by_role_and_a_line_cut_short_is_left_out(tmp_path):
    run = open_run(Run(name="demo", dir=str(tmp_path)), CONFIG)
    names = ("seconds", "floor_seconds", "ratio_to_floor", "gigabytes", "local_gigabytes", "checked_slices")
    lines = [{"role": "generator", "version": v, **{f"refit/{name}": float(v) for name in names}} for v in (1, 2, 3)]
    run.refits.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"role": "gen')
    text = " ".join(Page(write_report(run.path).read_text()).text)
    assert "Refits" in text and re.search(r"generator\s+3\s+2\s+2", text) and "refits.jsonl: line 4 of 4" in text


def test_iterations_of_several_roles_and_iterations_that_are_not_kept(tmp_path):
    """The report shows each role's rows of an iteration; iterations without texts, and files that cannot be read, are
    left out."""
    run = open_run(Run(name="demo", dir=str(tmp_path)), CONFIG)
    draw = random.Random(0)
    for iteration in range(2):
        both = {role: [solution(draw, True, role)] for role in ("proposer", "solver")}
        keep(run, iteration, **both)
    IterationStore(run.rollouts).put(
        Iteration(cycle=2, index=0, roles=("judge",), number=2),
        Collected(rollouts={"judge": [solution(draw, True, "judge")]}, metrics={}), {},
    )  # fmt: skip
    (run.rollouts / "iteration_000003.parquet").write_bytes(b"half a file")
    text = write_report(run.path).read_text()
    index = Page(text).data("rollouts")
    assert index["roles"] == ["proposer", "solver"] and index["iteration"] == [0, 0, 1, 1]
    assert "iteration_000003.parquet cannot be read" in text and "from 2 of 4 iterations" in text


def test_rollouts_are_picked_evenly_in_whole_groups_and_the_page_says_which_part(tmp_path):
    run = open_run(Run(name="demo", dir=str(tmp_path)), CONFIG)
    draw = random.Random(0)
    for iteration in range(30):
        rows = [replace(solution(draw, True), group=str(group)) for group in range(4) for _ in range(4)]
        keep(run, iteration, generator=rows)
    picked = pick([read_run(run.path).record], 40)
    assert (
        picked.index.columns["iteration"][0] == 0
        and picked.index.columns["iteration"][-1] == 29
        and len(picked.index) <= 40
    )
    found = Page(write_report(run.path, rollouts=240).read_text())
    index = found.data("rollouts")
    assert "240 of 480 rollouts, from all 30 iterations that were kept" in " ".join(found.text)
    assert [index["iteration"].count(iteration) for iteration in range(30)] == [8] * 30, (
        "two whole groups of each iteration"
    )
    assert len(found.rollouts()) == 240 and max(len(found.blocks[f"texts-{i}"]) for i in range(4)) < 5000


def test_a_verdict_is_told_beside_the_truth():
    """A solution's verdict is that of its verification; a verification's own truth follows from whether it agrees."""
    row = {"review": SAYS_WRONG, "correct": True, "verdicts": [1], "text": "x", "rewards": {}}
    assert opinion(row, 0.5) == (0, True)
    assert opinion(row | {"review": "hm"}, 0.5) == (2, True)
    own = {"review": None, "correct": False, "verdicts": [1], "text": SAYS_RIGHT, "rewards": {}}
    assert opinion(own, 0.5) == (1, False) and opinion(own | {"correct": True}, 0.5) == (1, True)
    assert opinion(own | {"text": SAYS_WRONG}, 0.5) == (0, True)
    assert opinion(own | {"verdicts": None}, 0.5) == (-1, None)


@pytest.mark.parametrize("bounds, right", [("[-1.0, 1.0]", 1), ("[0.0, 1.0]", 0), ("[2, 1]", 0), ("half", 0)])
def test_right_is_above_the_middle_of_the_runs_range(tmp_path, bounds, right):
    """A reward of 0.25 is right from -1 to 1, and wrong from 0 to 1. A damaged range counts as none."""
    run = open_run(Run(name="demo", dir=str(tmp_path)), f"{CONFIG}\nreward: {{range: {bounds}}}\n")
    rollout = solution(random.Random(0), True)
    payload = {name: value for name, value in rollout.payload.items() if name != "correct"}
    keep(run, 0, generator=[replace(rollout, payload=payload, rewards={"outcome": 0.25})])
    assert Page(write_report(run.path).read_text()).data("rollouts")["outcome"] == [right]


def test_a_report_leaves_torch_out():
    """A table of evaluations brought it in: a page took 180 MB and 0.8 s more."""
    code = "import sys, megatron_rl.report.pages; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
