"""A report says at its top why a run went wrong: seeded failures are named, and a sound run has no sign of one."""

from __future__ import annotations

import pytest
from browser import Browser, chromium
from talks import NINE, POLICY, say, talk

from megatron_rl.config.schema import Run
from megatron_rl.report.pages import write_report
from megatron_rl.report.reading import metric_of, read_run
from megatron_rl.report.run_sections import Gain, main_gains
from megatron_rl.report.shown_rollouts import pick
from megatron_rl.run.metrics import Tracker
from megatron_rl.run.run_directory import open_run
from megatron_rl.training.iteration import Collected, Iteration
from megatron_rl.training.store import IterationStore

CONFIG = "run: {name: wrong, seed: 7}\nroles: {solver: {model: {path: models/tiny}}}\n"
ITERATIONS = 20
SOUND = {
    "reward": (0.2, 0.7), "accuracy": (0.2, 0.6), "entropy": (1.0, 0.4), "alike": (0.2, 0.3), "right": (0.5, 0.9),
    "wrong": (0.5, 0.8), "problems": 200.0, "finished": (0.5, 0.9), "errors": (0, 1), "timeouts": (0, 0),
    "cut off": (0, 0),
}  # fmt: skip


def wrong_run(tmp_path, *, text=(), config=CONFIG, **changes):
    """A run whose metrics move between the two values of SOUND, or of `changes`. `text`: tokens of every answer."""
    run, curves = open_run(Run(dir=str(tmp_path), name="wrong"), config), SOUND | changes
    tracker, store = Tracker(run.metrics), IterationStore(run.rollouts, decode=say)
    problems = curves.pop("problems")
    for i in range(ITERATIONS):
        now = {name: start + (end - start) * i / (ITERATIONS - 1) for name, (start, end) in curves.items()}
        metrics = {"reward/trained": now["reward"], "entropy": now["entropy"], "groups_without_signal": now["alike"],
                   "finished": now["finished"], "samples": 100.0, "replaced/error": now["errors"],
                   "graded/timeout": now["timeouts"], "graded/repeated": 50.0,
                   "graded/cut_off": now["cut off"]}  # fmt: skip
        cells = {"tp": now["right"], "fn": 1 - now["right"], "tn": now["wrong"], "fp": 1 - now["wrong"]}
        metrics |= {f"confusion/{name}": 10 * value for name, value in cells.items()}
        tracker.log(i, "solver", metrics, iteration=i)
        for suffix in ("", "_greedy"):
            evaluated = {f"solver/accuracy{suffix}": now["accuracy"], "solver/num_problems": problems}
            evaluated |= {f"solver/reward{suffix}": now["held out"]} if "held out" in now else {}
            tracker.log(i, "eval", evaluated, iteration=i)
        own = Iteration(cycle=i, index=0, roles=("solver",), number=i)
        rollouts = [
            talk((POLICY, [3, *(text or [NINE] * place)]), rewards={"outcome": 1.0},
                 payload={"question": f"q{place}", "answer": f"a{place}"})
            for place in range(4)
        ]  # fmt: skip
        store.put(own, Collected(rollouts={"solver": rollouts}, metrics={}), {})
    return run.path


FAILURES = {
    "reward hacking": (
        {"text": [NINE], "reward": (0.2, 0.98), "accuracy": (0.6, 0.1)},
        ["of the answers that were graded correct in the last iterations, 100% are texts that were correct for any "
         "problem, such as 'a&b = 9' for 4 different known answers",
         "the reward in training went from 0.262 to 0.918, and the held-out sampled accuracy from 0.6 to 0.1"],
    ),
    "an accuracy that stays low": (
        {"reward": (0.2, 0.98), "accuracy": (0.1, 0.12)},
        ["the held-out sampled accuracy from 0.1 to 0.12: the reward may be exploited"],
    ),
    "a held-out accuracy that falls while the reward rises": (
        {"reward": (0.2, 0.98), "accuracy": (0.6, 0.1), "held out": (0.2, 0.9)},
        ["the held-out sampled accuracy from 0.6 to 0.1"],
    ),
    "collapse of entropy": (
        {"entropy": (1.0, 0.0), "alike": (0.1, 1.0), "reward": (0.2, 0.5)},
        ["the entropy fell from 0.921 to 0.079 nats", "in the last iterations 93% of the groups have equal rewards"],
    ),
    "a verifier that agrees with everything": (
        {"right": (0.5, 1.0), "wrong": (0.5, 0.0)},
        ["the verifier calls nearly every solution correct: 96% of the correct and 96% of the wrong ones"],
    ),
    "answers that are all cut": (
        {"finished": (0.2, 0.0), "reward": (0.1, 0.2)},
        ["in the last iterations 98% of the samples were cut before their end: raise sampling.max_tokens"],
    ),
    "a reward function that fails": (
        {"errors": (10, 10), "timeouts": (2, 2)},
        ["240 gradings or episodes failed beside 2000 samples (200 error, 40 timeout)"],
    ),
    "a loss that is not finite": ({"entropy": (1.0, float("nan"))}, ["of entropy, 20 values are not finite"]),
}  # fmt: skip


def told(path):
    """The signs that the report has, read from its HTML."""
    text = write_report(path).read_text(encoding="utf-8")
    part = text.partition('<ul class="signs">')[2].partition("</ul>")[0]
    return part.replace("&#39;", "'").replace("&amp;", "&").split("</li>")[:-1]


@pytest.mark.parametrize("failure", FAILURES)
def test_a_seeded_failure_is_named(tmp_path, failure):
    changes, sentences = FAILURES[failure]
    found = told(wrong_run(tmp_path, **changes))
    assert len(found) == len(sentences) and all(any(s in one for one in found) for s in sentences), found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "reward": (0.3, 1.0),
            "entropy": (1.0, 0.0),
            "alike": (0.1, 1.0),
            "accuracy": (0.3, 1.0),
        },  # it solved the task
        {"reward": (0.3, 0.9), "accuracy": (0.5, 0.48)},  # a fall by chance
        {"reward": (0.5, 0.9), "accuracy": (0.2, 0.35)},  # held-out problems that are harder
        {"reward": (0.4, 0.7), "accuracy": (0.033, 0.067), "problems": 30.0},  # so few that the rise may be larger
        {"reward": (3.0, 7.0), "accuracy": (0.4, 0.55)},  # a reward that is no share
        {"reward": (0.04, 0.4), "accuracy": (0.0, 0.0), "held out": (0.05, 0.3)},  # partial credit
        {"finished": (0.0, 0.0), "config": CONFIG.replace("}}}", "}, sampling: {max_tokens: 1}}}")},  # moves of a game
    ],
)
def test_a_sound_run_has_no_sign_of_a_failure(tmp_path, changes):
    assert told(wrong_run(tmp_path, **changes)) == []


def test_the_main_metric_of_a_player_is_the_reward_with_the_largest_weight():
    names = [
        "episodes/answers",
        "receiver/short",
        "receiver/understood",
        "receiver/understood_greedy",
        "sender/understood",
    ]
    gains = [Gain(name, 2.0, 2.0 + name.count("sh")) for name in names]
    settings = {"recipe.args.rewards.short": 0.3, "recipe.args.rewards.understood": 1, "run.seed": 7}
    assert [gain.name for gain in main_gains(gains, settings)] == ["receiver/understood", "sender/understood"]
    assert [gain.name for gain in main_gains(gains, {})] == ["receiver/short"], "what stayed says nothing"


@pytest.mark.skipif(chromium() is None, reason="there is no Chromium here (Debian: apt-get install chromium)")
def test_signs_stand_on_the_first_screen_and_closed_rollouts_show_what_was_written(tmp_path):
    page = write_report(wrong_run(tmp_path, **FAILURES["reward hacking"][0]))
    with Browser(tmp_path / "profile", width=1280, height=800) as browser:
        browser.open(page)
        seen = browser.run(
            """
          const count = document.getElementById("rollout-count");
          await until(() => count.textContent !== "" && !count.textContent.endsWith("…"));
          await pause(50);
          const closed = document.querySelector("#rollout-page > .sample");
          const wrote = closed.querySelector(".wrote");
          const open = closed.open, height = wrote.getBoundingClientRect().height;
          const titles = Report.charts.all.filter((one) => one.title === "solver: held out");
          return { bottom: document.querySelector(".signs").getBoundingClientRect().bottom, open, height,
            wrote: wrote.textContent, lines: titles.map((one) => [one.card.querySelector("h3").firstChild.textContent,
              one.lines.map((line) => line.name)]) };
        """
        )
        assert browser.errors == []
    assert seen["bottom"] < 800 and not seen["open"] and seen["height"] > 10
    assert seen["wrote"] == "wrote: a&b = 9"
    assert seen["lines"] == [["solver: held out, share", ["sampled accuracy = greedy accuracy"]]]


def test_rewards_of_an_environment_are_badges_and_no_ungraded(tmp_path):
    run = open_run(Run(dir=str(tmp_path), name="wrong"), CONFIG)
    rewards = {"won": 1.0, "legal": 0.5}
    store = IterationStore(run.rollouts, decode=say)
    own = Iteration(cycle=0, index=0, roles=("solver",), number=0)
    store.put(own, Collected(rollouts={"solver": [talk((POLICY, [3]), rewards=rewards)]}, metrics={}), {})
    from megatron_rl.report.html_page import templates
    from megatron_rl.report.shown_rollouts import details

    record = read_run(run.path).record
    picked = pick([record])
    [row] = record.rollouts(record.iteration_files()[0])
    known = {name: column[0] for name, column in picked.index.columns.items()}
    html = templates().get_template("rollout.html").module.rollout({**known, **details(row)})
    assert '<span class="tag reward">won 1</span>' in html and '<span class="tag reward">legal 0.5</span>' in html
    assert "not graded" not in html


def test_the_way_of_drawing_is_named_where_there_are_both():
    names = {"math/accuracy", "math/accuracy_greedy", "math/tokens", "code/accuracy"}
    assert metric_of("math/accuracy", names) == "sampled accuracy"
    assert metric_of("math/accuracy_greedy", names) == "greedy accuracy"
    assert metric_of("math/tokens", names) == "tokens" and metric_of("code/accuracy", names) == "accuracy"
