"""The report draws what a run has, whole or in part, and nothing that a model wrote becomes markup."""

import json
import math
import random
import re
from dataclasses import replace
from html import escape
from html.parser import HTMLParser

import numpy as np
import pytest
from talks import CALLING, ENVIRONMENT, LINE, LONG, NINE, PARTNER, POLICY, SUM, TOOL, WORDS, keep_talks, talk

from megatron_rl.config.schema import Run
from megatron_rl.run import report_figures as figures
from megatron_rl.run import report_samples
from megatron_rl.run.directory import open_run
from megatron_rl.run.metrics import MetricsRow, Tracker, read_metrics
from megatron_rl.run.report import confusion, pairs, write_figure, write_report
from megatron_rl.run.report_samples import split_steps
from megatron_rl.run.report_sweep import write_sweep_report
from megatron_rl.text import Decoded
from megatron_rl.training.store import TurnStore
from megatron_rl.training.turns import Played, Turn
from megatron_rl.types import STEP, Author, Marks, Rollout, Stop, spans_of

CONFIG = """
run: {name: demo, seed: 7}
recipe: {target: "megatron_rl.recipes.tango:Tango", args: {alpha_start: 0.3}}
roles:
  generator: {model: {path: models/<tiny>}, optimizer: {lr: 1.5e-4}, layout: {tp: 2}}
  verifier: {model: {path: models/tiny}, optimizer: {lr: 1.0e-4}}
"""
VOID = {"meta", "br", "link", "img"}


class Page(HTMLParser):
    """Text and tags of a page; `problems` names what is not nested."""

    def __init__(self, text):
        super().__init__()
        self.text, self.tags, self.open, self.problems, self.links = [], [], [], [], []
        self.feed(text)
        self.problems += self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.links += [value for name, value in attributes if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.links += [value for name, value in attributes if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}>")

    def handle_data(self, data):
        self.text.append(data)

    def classes(self, name):
        return [
            dict(attributes).get("class")
            for tag, attributes in self.tags
            if name in (attributes.get("class") or "").split()
        ]


def decode(role, tokens):
    words = [WORDS[token].encode() for token in tokens]
    return Decoded(b"".join(words).decode(), b"".join(words), np.cumsum([*map(len, words)], dtype=np.int64))


def keep(directory, turn, **rollouts):
    """The turn as the run keeps it for the report. `rollouts`: by role."""
    turn = Turn(step=turn, index=0, roles=tuple(rollouts), number=turn)
    return TurnStore(directory.rollouts, decode=decode).put(turn, Played(rollouts=rollouts, metrics={}), {})


def solution(draw, good, role="generator"):
    verdicts = [1, 1 if good else -1]
    return Rollout(
        role=role,
        group="problem <1>",
        tokens=[0, 1, 2, 3, 4, 2, 6, 4, 5, 7],
        logprobs=[0.0] + [-0.5] * 9,
        spans=spans_of((1, Author.ENVIRONMENT, -1), (9, Author.POLICY, 3)),
        stop=Stop.EOS,
        payload={
            "question": "last letters of <b>x</b>?",
            "answer": "ab",
            "correct": good,
            "verdicts": verdicts,
            "review": "ok </pre>",
        },
        marks={STEP: Marks([(2, 5), (5, 8)], [v / 2 for v in verdicts])},
        rewards={"outcome": float(good)},
        advantages=[0.0] + [draw.gauss(0, 1) for _ in range(9)],
    )


def make_run(tmp_path, turns=24, rollouts=True, verifier=True):
    """A run as the loop would leave it; returns its directory."""
    draw = random.Random(0)
    directory = open_run(Run(dir=str(tmp_path), name="demo <run>"), CONFIG)
    tracker = Tracker(directory.metrics)
    for turn in range(turns):
        share = (turn + 1) / turns
        role = "verifier" if verifier and turn % 4 == 3 else "generator"
        metrics = {
            "loss": draw.gauss(0, 0.01),
            "kl_ref": 0.01 * share,
            "entropy": 1 - 0.5 * share,
            "length": 90 + 40 * draw.random(),
        }
        metrics |= {
            "reward/outcome": share * 0.8,
            "reward/format": 0.9,
            "engine_gap": 1e-4,
            "clip_frac": 0.0,
            "seconds/rollout": 2.0,
        }
        metrics |= {"seconds/train": 1.5, "seconds/refit": 0.1}
        if role == "verifier":
            metrics |= {
                f"confusion/{cell}": value
                for cell, value in zip(("tp", "fp", "tn", "fn"), (10 * share, 3, 12, 4), strict=True)
            }
        tracker.log(turn, role, metrics, turn=turn)
        if turn % 6 == 0:
            tracker.log(
                turn,
                "eval",
                {"generator/accuracy_sampled": share * 0.7, "verifier/outcome_f1": 0.5 + share / 4},
                turn=turn,
            )
        if rollouts:
            keep(directory, turn, **{role: [solution(draw, draw.random() < share, role) for _ in range(12)]})
    directory.update_summary(
        {
            "generator_accuracy_start": 0.125,
            "generator_accuracy_end": 0.75,
            "seconds": {"train": 36.0},
            "updates": turns,
        }
    )
    return directory.path


def test_a_whole_run_makes_one_page_that_needs_nothing_else(tmp_path):
    path = write_report(make_run(tmp_path))
    assert path.name == "report.html"
    page = Page(path.read_text(encoding="utf-8"))
    assert page.problems == []
    assert all(link.startswith("#") for link in page.links), page.links
    assert "url(http" not in path.read_text() and "@import" not in path.read_text()
    text = " ".join(page.text)
    for heading in (
        "Before and after",
        "Held-out evaluation",
        "Training curves",
        "Verdicts against the truth",
        "Where the time went",
    ):
        assert heading in text
    for shown in (
        "generator accuracy",
        "0.125",
        "0.75",
        "+0.625",
        "engine_gap",
        "generator: reward",
        "18 generator updates",
        "1.5e-4",
    ):
        assert shown in text, shown


def test_what_models_wrote_stays_text(tmp_path):
    page = Page(write_report(make_run(tmp_path)).read_text(encoding="utf-8"))
    assert "script" not in {tag for tag, _ in page.tags}
    assert "b" in {tag for tag, _ in page.tags}  # our own bold; theirs is text:
    text = "".join(page.text)
    assert (
        "<script>alert(1)</script>" in text
        and "last letters of <b>x</b>?" in text
        and "ok </pre>" in text
        and "demo <run>" in text
    )


def test_steps_carry_the_colour_of_their_verdict_and_their_advantage(tmp_path):
    text = write_report(make_run(tmp_path)).read_text(encoding="utf-8")
    page = Page(text)
    right, wrong = page.classes("right").count("step right"), page.classes("wrong").count("step wrong")
    assert right > wrong > 0
    assert "✓ correct  A " in text and "✗ incorrect  A " in text
    for label in ("early generator", "late generator", "early verifier", "late verifier"):
        assert label in text


def test_verdicts_that_do_not_match_the_steps_colour_nothing(tmp_path):
    directory = open_run(Run(dir=str(tmp_path), name="r"), CONFIG)
    good = solution(random.Random(0), True)
    payload = {**good.payload, "verdicts": [1, -1, 1]}
    keep(directory, 0, generator=[replace(good, payload=payload, stop=Stop.LENGTH, advantages=None)])
    text = write_report(directory.path).read_text(encoding="utf-8")
    assert "step unread" in text and 'class="step right"' not in text
    assert "3 verdicts for 2 steps" in text


@pytest.mark.parametrize(
    ("turns", "rollouts", "verifier"),
    [(1, True, True), (1, False, False), (24, False, True), (24, True, False), (0, False, False)],
)
def test_a_run_with_parts_missing_still_reports(tmp_path, turns, rollouts, verifier):
    run = make_run(tmp_path, turns, rollouts, verifier)
    page = Page(write_report(run).read_text(encoding="utf-8"))
    assert page.problems == []
    text = " ".join(page.text)
    assert ("Sample rollouts" in text) == rollouts
    assert ("Verdicts against the truth" in text) == (verifier and turns > 3)
    assert write_figure(run, run / "curves.png").stat().st_size > 1000


def test_sft_and_values_that_are_not_finite(tmp_path):
    directory = open_run(Run(dir=str(tmp_path), name="sft"), "model: {path: m}\n")
    tracker = Tracker(directory.metrics)
    for step in range(20):
        tracker.log(
            step,
            "sft",
            {"loss": math.nan if step == 3 else 5 / (step + 1), "lr": 1e-3, "seconds/train": 0.1},
            turn=step,
        )
    page = Page(write_report(directory.path).read_text(encoding="utf-8"))
    assert page.problems == []
    assert "20 sft updates" in " ".join(page.text)
    assert figures.charts(read_metrics(directory.path))[0].lines["sft"][0] == [*range(3), *range(4, 20)]


def test_the_report_is_a_function_of_the_run(tmp_path):
    run = make_run(tmp_path)
    assert write_report(run).read_bytes() == write_report(run).read_bytes()


def test_a_directory_without_a_run_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a run directory"):
        write_report(tmp_path)


def test_pairs_and_confusion_sums():
    summary = {
        "a_start": 1,
        "a_end": 2.5,
        "b_start": 1,
        "eval": {"f1_start": 0.1, "f1_end": 0.2},
        "name_start": "x",
        "name_end": "y",
    }
    assert pairs(summary) == {"a": (1, 2.5), "eval.f1": (0.1, 0.2)}
    counts = {"confusion/tp": 1.0, "confusion/fp": 2.0, "confusion/tn": 3.0, "confusion/fn": 4.0}
    rows = [
        MetricsRow(turn=0, step=0, scope="verifier", time={}, metrics=metrics)
        for metrics in (counts, {"loss": 1.0}, counts)
    ]
    assert confusion(rows) == {"tp": 2.0, "fp": 4.0, "tn": 6.0, "fn": 8.0}
    assert confusion(rows[1:2]) == {}


def test_split_steps():
    assert split_steps("xaaybz", ["aa", "b"]) == [(None, "x"), (0, "aa"), (None, "y"), (1, "b"), (None, "z")]
    assert split_steps("aa", ["a", "a"]) == [(0, "a"), (1, "a")]
    assert split_steps("abc", ["?", "b"]) == [(0, "?"), (None, "a"), (1, "b"), (None, "c")]
    assert split_steps("abc", []) == [(None, "abc")]


def test_smoothing_shifts_nothing():
    line = [3.0 * x + 1 for x in range(60)]
    assert figures.smooth(line) == pytest.approx(line)
    spike = figures.smooth([0.0] * 30 + [1.0] + [0.0] * 29)
    assert max(spike) == spike[30] < 0.2
    assert figures.smooth([]) == []


def test_refits_are_summed_up_by_role_and_a_line_cut_short_is_left_out(tmp_path):
    run = open_run(Run(name="demo", dir=str(tmp_path)), CONFIG)
    names = (
        "seconds",
        "floor_seconds",
        "ratio_to_floor",
        "gigabytes",
        "local_gigabytes",
        "checked_slices",
        "failed_engines",
    )
    lines = [{"role": "generator", "version": v, **{f"refit/{name}": float(v) for name in names}} for v in (1, 2, 3)]
    run.refits.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"role": "gen')
    text = " ".join(Page(write_report(run.path).read_text()).text)
    assert "Refits" in text and re.search(r"generator\s+3\s+2\s+2", text)


def test_turns_of_several_roles_and_turns_that_are_not_kept(tmp_path):
    """The report reads each role's rows of a turn; turns without texts, and files that cannot be read, are left out."""
    run = open_run(Run(name="demo", dir=str(tmp_path)), CONFIG)
    draw = random.Random(0)
    for turn in range(2):
        both = {role: [solution(draw, True, role)] for role in ("proposer", "solver")}
        keep(run, turn, **both)
    TurnStore(run.rollouts).put(
        Turn(step=2, index=0, roles=("judge",), number=2),
        Played(rollouts={"judge": [solution(draw, True, "judge")]}, metrics={}), {},
    )  # fmt: skip
    (run.rollouts / "turn_000003.parquet").write_bytes(b"half a file")
    text = write_report(run.path).read_text()
    for shown in ("early proposer", "late proposer", "early solver", "late solver"):
        assert shown in text, shown
    assert "judge" not in text and "turn_000003.parquet cannot be read" in text


def sweep(tmp_path, ends):
    """Writes a sweep of one run for each item of `ends`: its last evaluated figures, or None where it has not begun."""
    changes = [{"run": f"run{i}", "changes": {"run.seed": i}} for i in range(len(ends))]
    (tmp_path / "sweep.json").write_text(json.dumps(changes))
    for i, figures_of_run in enumerate(ends):
        (tmp_path / f"run{i}").mkdir()
        if figures_of_run is not None:
            Tracker(tmp_path / f"run{i}" / "metrics.jsonl").log(4, "eval", figures_of_run, turn=9)
    text = write_sweep_report(tmp_path).read_text()
    return text[text.rindex("Means over seeds") : text.index("standard deviation over seeds")]


def test_a_mean_over_seeds_counts_only_runs_that_have_the_figure(tmp_path):
    """Of five runs two have not begun, and one has not measured `b`."""
    found = sweep(tmp_path, [{"a": 0.25, "b": 1.0}, None, {"a": 0.75}, {"a": 0.5, "b": 2.0}, None])
    cells = re.findall(r"<td>([^<]*)</td>", found)
    assert cells == ["all", "3 of 5", "0.5 ± 0.25", "1.5 ± 0.71 (2 runs)"]


def test_a_sweep_without_a_begun_run_has_no_means(tmp_path):
    assert re.findall(r"<td>([^<]*)</td>", sweep(tmp_path, [None, None])) == ["all", "0 of 2"]


def page_of(tmp_path, **rollouts):
    text = write_report(keep_talks(tmp_path, CONFIG, **rollouts).path).read_text()
    page = Page(text)
    assert page.problems == [] and "script" not in {tag for tag, _ in page.tags}
    return text[text.index("<h2>Sample rollouts</h2>") : text.index("<h2>Config</h2>")]


def test_an_episode_is_a_conversation_turn_by_turn(tmp_path):
    rewards = {"outcome": 1.0, "tool_calls": 0.25}
    text = page_of(tmp_path, solver=[talk(*CALLING, seat="solver-1", episode="e7", rewards=rewards)])
    assert "turn 1 · episode e7" in text and "how &lt;many&gt;?" in text
    assert '<h3>solver-1 <small>solver</small></h3><p class="meta">6 tokens · stop: eos · weights 3' in text
    assert "outcome 1  tool_calls 0.25 · advantage +0.50" in text
    turns = re.findall(
        r'<div class="said (\w+)"><p class="who">([^<]*)</p><div class="words">(.*?)</div></div>', text, re.S
    )
    assert turns == [
        ("answer", "answer 1 of 2 · 4 tokens",
         'a&amp;b<span class="call">&lt;tool_call&gt;4 &amp; 5&lt;/tool_call&gt;</span>'),
        ("environment", "environment · 3 tokens", "\n = 9\n"),
        ("answer", "answer 2 of 2 · 2 tokens", "&lt;script&gt;alert(1)&lt;/script&gt; = 9"),
    ]  # fmt: skip
    assert 'class="legend"' not in text, "one advantage needs no colours"


def test_seats_of_one_episode_stand_together_and_others_apart(tmp_path):
    def seats(episode, good):
        solver = talk(*CALLING, seat="a", episode=episode, rewards={"outcome": float(good)})
        judge = talk((POLICY, [3]), seat="b", episode=episode, role="judge", rewards={"form": 1.0, "kind": 0.0})
        return solver, judge

    pairs_of = [seats(str(number), number % 2) for number in range(6)]
    text = page_of(tmp_path, judge=[b for _, b in pairs_of], solver=[a for a, _ in pairs_of])
    found = [re.findall(r"· episode (\d)|<h3>(.)", part) for part in text.split('<details class="sample')[1:]]
    assert found == [[(number, ""), ("", "b"), ("", "a")] for number in ("1", "3", "0", "2")], "two of each outcome"
    assert text.count('<details class="sample episode" open>') == 2
    both = [talk(*CALLING, seat=s, episode="9", rewards={"outcome": r}) for s, r in (("x", 1.0), ("y", 0.0))]
    text = page_of(tmp_path / "game", solver=both)
    assert text.count('class="sample episode"') == 1 and "seats differ</span> early solver" in text


def test_credit_that_differs_is_coloured_by_its_value_with_a_legend(tmp_path):
    credit = [0.0, -1.0, -1.0, -1.0, 2.0, 0.0, 0.0, 0.0, 1.0, 1.0]  # a call of which the last token earned something
    text = page_of(tmp_path, solver=[talk(*CALLING, seat="a", advantages=credit)])
    colour = "background: color-mix(in srgb, var(--{}) {}%, transparent)"
    good, bad, half = colour.format("good", 60), colour.format("bad", 30), colour.format("good", 30)
    assert (
        f'<span style="{bad}" title="-1">a&amp;b</span><span class="call">'  # it was one piece, cut by the call's frame
        f'<span style="{bad}" title="-1">&lt;tool_call&gt;4 &amp; 5</span>'
        f'<span style="{good}" title="+2">&lt;/tool_call&gt;</span></span>'
    ) in text
    assert f'answer 2 of 2 · 2 tokens · advantage +1.00</p><div class="words"><span style="{half}"' in text
    assert "answer 1 of 2 · 4 tokens</p>" in text and "advantages from -1.00 to +2.00" in text
    shown = re.search(r'<p class="legend">(.*?)</p>', text)[1]
    assert re.sub("<[^>]*>", "|", shown) == "advantage of each token: |-2.00||-1.00||0||+1.00||+2.00|"


def test_credit_by_token_of_a_single_answer_is_coloured_where_no_steps_show_it(tmp_path):
    per_token = talk((POLICY, [3, SUM]), advantages=[0.0, 1.0, -1.0])
    text = page_of(tmp_path, solver=[per_token])
    assert 'class="sample episode"' not in text and 'class="legend"' in text
    assert 'title="+1">a&amp;b</span>' in text and 'title="-1">4 &amp; 5</span>' in text


def test_partners_are_set_apart_and_frames_of_a_template_are_left_out(tmp_path):
    text = page_of(tmp_path, solver=[talk((POLICY, [3]), (PARTNER, [SUM]), (ENVIRONMENT, [LINE]), (POLICY, [NINE]))])
    assert 'a&amp;b<span class="partner" title="written by a partner">4 &amp; 5</span>' in text
    assert "answer 1 of 2 · 2 tokens" in text and '<div class="said environment">' not in text
    assert "<h3>solver</h3>" in text, "no seat was named"


def test_long_turns_are_folded_and_longer_ones_cut_within_a_call(tmp_path, monkeypatch):
    few = -(-report_samples.MAX_OPEN // 80)
    text = page_of(tmp_path, solver=[talk((POLICY, [TOOL, *[LONG] * few]), (ENVIRONMENT, [SUM]), (POLICY, [3]))])
    start = escape("<tool_call>" + "w" * 109)
    assert f"<details><summary>{start} … ({11 + few * 80} characters)</summary>" in text
    monkeypatch.setattr(report_samples, "MAX_CHARACTERS", 20)
    text = page_of(tmp_path / "cut", solver=[talk((POLICY, [3, TOOL, LONG]), (ENVIRONMENT, [SUM]), (POLICY, [3]))])
    assert f'a&amp;b<span class="call">&lt;tool_call&gt;{"w" * 6}</span> … (74 more characters)' in text


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("a <tool_call>{}</tool_call> b <tool_call>x", ["<tool_call>{}</tool_call>", "<tool_call>x"]),
        ("<function=f><p=1>2</p></function>.", ["<function=f><p=1>2</p></function>"]),
        ("see ```py\n1\n``` and <search>who?</search>", ["```py\n1\n```", "<search>who?</search>"]),
        ("<toolbox>1</toolbox> x < tool > <code", []),
    ],
)
def test_calls_of_tools_are_found_in_the_forms_that_models_write(text, calls):
    assert [match[0] for match in report_samples._CALL.finditer(text)] == calls
