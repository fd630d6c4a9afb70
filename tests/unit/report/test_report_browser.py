"""The report in a browser: curves, filters and pages of rollouts, conversations, comparisons; at two widths, light and
dark, without errors, and without a request to anywhere."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from browser import Browser, chromium
from talks import CALLING, ENVIRONMENT, LINE, LONG, NINE, PARTNER, POLICY, SAID, SUM, TOOL, keep_talks, say, talk

from megatron_rl.config.schema import Run
from megatron_rl.main import main
from megatron_rl.report.pages import write_report
from megatron_rl.run.json_lines import append
from megatron_rl.run.metrics import Tracker
from megatron_rl.run.run_directory import open_run
from megatron_rl.training.iteration import Collected, Iteration
from megatron_rl.training.store import IterationStore
from megatron_rl.types import STEP, Annotations, Stop, spans_of

pytestmark = pytest.mark.skipif(
    chromium() is None, reason="there is no Chromium here (Debian: apt-get install chromium)"
)

CONFIG = "run: {name: talks, seed: 7}\nroles: {solver: {model: {path: models/tiny}}}\n"
HOSTILE = "</script><script>boom()</script>\u2028<img src=x onerror=boom()>\u202egnp\u2066\x1b[31mred\0<!-- <b>&amp;"
SAYS = "<final_verification>\\boxed{{{}}}</final_verification>"
WIDE = """
  const free = (one) => one.closest(".scroll, svg, .plot, .tag") === null;
  const wide = [...document.querySelectorAll("main *")].filter((one) => free(one)
    && one.getBoundingClientRect().width > 0
    && one.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5);
"""
LOOKS = (
    WIDE
    + """
  const plots = [...document.querySelectorAll(".chart canvas")];
  const painted = plots.filter((canvas) => canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data
    .some((value, i) => i % 4 === 3 && value > 0));
  const parts = (one, what) => getComputedStyle(one)[what].match(/\\d+/g).slice(0, 3);
  const paint = (one, what) => parts(one, what).reduce((a, b) => a + Number(b), 0);
  return { plots: plots.length, painted: painted.length, width: document.documentElement.clientWidth,
    left: [...document.querySelectorAll("td:not(:first-child)")].filter((one) => !["right", "center"]
      .includes(getComputedStyle(one).textAlign)).map((one) => one.outerHTML.slice(0, 120)),
    scroll: document.documentElement.scrollWidth, wide: wide.slice(0, 5).map((one) => one.outerHTML.slice(0, 120)),
    paper: paint(document.body, "backgroundColor"), ink: paint(document.body, "color") };
"""
)
RESET = """
  document.getElementById("rollout-reset").click();
  await until(() => !document.getElementById("rollout-count").textContent.endsWith("…"));
"""
COUNT = 'return document.getElementById("rollout-count").textContent;'
SET = """
  {{ const one = document.getElementById("{}");
  one.value = "{}";
  one.dispatchEvent(new Event("input"));
  one.dispatchEvent(new Event("change"));
  await until(() => !document.getElementById("rollout-count").textContent.endsWith("…")); }}
"""


def keep(run, iteration, **rollouts):
    own = Iteration(cycle=iteration, index=0, roles=tuple(rollouts), number=iteration)
    return IterationStore(run.rollouts, decode=say).put(own, Collected(rollouts=rollouts, metrics={}), {})


def solution(right, says, *, reward=None, length=2, question="how many?"):
    """A solution with two steps and a verification of it."""
    tokens = [0, *([3, NINE] * length)]
    payload = {"question": question, "answer": "9", "correct": right, "verdicts": [1, -1]}
    return replace(
        talk((POLICY, tokens[1:])), stop=Stop.EOS, rewards={"outcome": float(right) if reward is None else reward},
        spans=spans_of((1, ENVIRONMENT, -1), (len(tokens) - 1, POLICY, 3)),
        payload=payload | {"review": SAYS.format("CORRECT" if says else "INCORRECT")},
        annotations={STEP: Annotations([(1, 2), (2, 3)], [0.5, -0.5])},
    )  # fmt: skip


def keep_timeline(run):
    """Ten iterations of 5 s, with a prediction of 4 s each."""
    for i in range(10):
        work = [
            [i, "solver", "generating", 5 * i + 0.5, 5 * i + 2.0], [i, "judge", "generating", 5 * i + 2.0, 5 * i + 3.0],
            [i, "solver", "training", 5 * i + 3.0, 5 * i + 4.8], [i, "solver", "syncing", 5 * i + 4.8, 5 * i + 5.0],
        ]  # fmt: skip
        sets = [{"ranks": "0-1", "roles": ["solver"], "busy": 3.5}, {"ranks": "2", "roles": ["judge"], "busy": 1.0}]
        line = {"iteration": i, "began": 5.0 * i, "ended": 5.0 * i + 5, "sets": sets, "intervals": work}
        append(run.timeline, json.dumps(line).encode())
    guess = [[i, "solver", "training", 4 * i + 2.0, 4 * i + 4.0] for i in range(9)]
    timeline = {"cycle": 1, "ends": [4.0 * i for i in range(10)], "intervals": guess}
    run.update_summary({"schedule": {"cluster": "1x8xH100", "predicted": [], "timeline": timeline}})


def log(run, iterations=40, shift=0.0):
    tracker, draw = Tracker(run.metrics), random.Random(0)
    for iteration in range(iterations):
        cells = {"tp": 10.0, "fp": 3.0 + iteration % 3, "tn": 5.0, "fn": 2.0}
        metrics = {"reward/outcome": draw.random() + shift, "kl_ref": 0.001 * iteration, "clip_frac": 0.0}
        metrics |= {"seconds/train": 1.0, "seconds/rollout": 2.0 + draw.random()}
        tracker.log(
            iteration, "solver", metrics | {f"confusion/{cell}": n for cell, n in cells.items()}, iteration=iteration
        )
        if iteration % 10 == 0:
            accuracy = 0.2 + 0.015 * iteration + shift / 10
            tracker.log(
                iteration,
                "eval",
                {"solver/accuracy": accuracy, "solver/num_problems": 400.0},
                iteration=iteration,
            )


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report of a run: 60 solutions with verdicts, and episodes of two agents with credit by token and calls."""
    run = open_run(Run(dir=str(tmp_path_factory.mktemp("browser")), name="<i>run"), CONFIG)
    log(run)
    keep_timeline(run)
    credit = [0.0, -1.0, -1.0, -1.0, 2.0, 0.0, 0.0, 0.0, 1.0, 1.0]
    long = (POLICY, [TOOL, *[LONG] * 30]), (ENVIRONMENT, [SUM]), (POLICY, [3])
    mixed = (POLICY, [3]), (PARTNER, [SUM]), (ENVIRONMENT, [LINE]), (POLICY, [NINE])
    for iteration in range(3):
        good = [solution(i < 12, i % 4 > 0, length=1 + i) for i in range(20)]
        keep(run, iteration, solver=good)
    left = [
        talk(*CALLING, agent="left-of-the-table", episode=str(i), advantages=credit, rewards={"outcome": float(i % 2)})
        for i in range(4)
    ]
    right = [talk(*long, agent="right", episode=str(i), role="judge", rewards={"form": 1.0}) for i in range(4)]
    keep(
        run,
        3,
        solver=left,
        judge=[*right, talk(*mixed, role="judge", agent="third", rewards={"form": 0.0, "kind": 1.0})],
    )
    keep(run, 4, solver=[solution(True, True, question=HOSTILE, reward=0.25)])
    return write_report(run.path)


@pytest.fixture(scope="module")
def browser(report, tmp_path_factory):
    """A browser with the report open; what it has to complain about fails the test that is running."""
    with Browser(tmp_path_factory.mktemp("chromium") / "profile") as found:
        found.open(report)
        yield found


@pytest.fixture(autouse=True)
def complains_of_nothing(request):
    yield
    if "browser" in request.fixturenames:
        assert request.getfixturevalue("browser").errors == []


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_all_is_drawn_and_nothing_is_wider_than_the_page(report, tmp_path, width, dark):
    with Browser(tmp_path / "profile", width=width, height=6000, dark=dark) as found:
        found.open(report)
        found.run('document.querySelectorAll("details").forEach((one) => { one.open = true; });')
        found.run("await until(() => Report.charts.all.every((chart) => !chart.stale)); await pause(100);")
        seen = found.run(LOOKS)
        assert found.errors == [] and {address.split(":")[0] for address in found.requests} <= {"file", "about"}
    assert seen["width"] == width and seen["scroll"] <= width and seen["wide"] == []
    assert seen["left"] == [], "numbers stand on the right of their cells"
    assert seen["plots"] == seen["painted"] >= 5
    assert (seen["paper"] < seen["ink"]) == dark, seen


def test_the_page_asks_for_nothing_but_itself(browser, report):
    assert [address for address in browser.requests if address.startswith(("http", "data"))] == []
    assert report.resolve().as_uri() in browser.requests


@pytest.mark.parametrize(
    ("control", "value", "count"),
    [
        ("rollout-outcome", "1", "1–25 of 43"),  # 37 solutions, 2 agents on the left, 4 on the right
        ("rollout-outcome", "-1", None),
        ("rollout-verdict", "disagrees", "1–25 of 27"),  # of each 20: 12 right, 3 of them rejected; 8 wrong, 6 accepted
        ("rollout-verdict", "agrees", None),
        ("rollout-reward-most", "0.3", None),
        ("rollout-length-least", "21", None),
        ("rollout-iteration-least", "5", "1–1 of 1"),
        ("rollout-agent", "0", "1–4 of 4"),
        ("rollout-role", "1", None),
        ("rollout-steps-least", "2", None),
        ("rollout-words", "GNP", "1–1 of 1"),
        ("rollout-words", "no such words", "no rollout passes these filters"),
        ("rollout-words", "lt;", "no rollout passes these filters"),  # of the HTML, as "39" is of an apostrophe
        ("rollout-words", "graded", "no rollout passes these filters"),  # of the page, not of a rollout
    ],
)
def test_filters_leave_what_they_say(browser, report, control, value, count):
    """The count is compared with one made here from the page's index; for some filters it is also written out."""
    data = json.loads(report.read_text().split('id="rollouts-data">')[1].split("</script>")[0])
    columns = ("outcome", "says", "truth", "reward", "length", "iteration", "agent", "role", "steps")
    rows = [{name: data[name][i] for name in columns} for i in range(len(data["iteration"]))]
    known = lambda row: row["says"] in (0, 1) and row["truth"] >= 0  # noqa: E731
    tests = {
        "rollout-outcome": lambda row: row["outcome"] == int(value),
        "rollout-verdict": lambda row: known(row) and (row["says"] != row["truth"]) == (value == "disagrees"),
        "rollout-reward-most": lambda row: row["reward"] <= 0.3,
        "rollout-length-least": lambda row: row["length"] >= 21,
        "rollout-iteration-least": lambda row: row["iteration"] >= 4,
        "rollout-agent": lambda row: row["agent"] == 0,
        "rollout-role": lambda row: row["role"] == 1,
        "rollout-steps-least": lambda row: row["steps"] >= 2,
    }
    browser.run(RESET)
    found = browser.run(SET.format(control, value) + COUNT)
    if control in tests:
        left = sum(map(tests[control], rows))
        assert 0 < left < len(rows) and found == f"1–{min(25, left)} of {left}"
    if count is not None:
        assert found == count


def test_rollouts_come_a_page_at_a_time(browser):
    browser.run(RESET)
    step = """
      document.getElementById("rollouts-after").click();
      await until(() => !document.getElementById("rollout-count").textContent.endsWith("…"));
      const shown = document.querySelectorAll("#rollout-page > .sample");
      return [shown.length, shown[0].dataset.rollout, document.getElementById("rollouts-after").disabled,
        document.getElementById("rollouts-before").disabled];
    """
    assert [browser.run(step) for _ in range(2)] == [[25, "25", False, False], [20, "50", True, False]]


def test_badges_say_whose_opinion_they_are(browser):
    browser.run(RESET)
    script = SET.format("rollout-verdict", "disagrees") + SET.format("rollout-order", "length")
    found = browser.run(
        script
        + """
      const first = document.querySelector("#rollout-page > .sample");
      first.open = true;
      await until(() => first.children.length > 1);
      return [[...first.querySelectorAll(".tag")].map((one) => one.textContent),
        [...first.querySelectorAll(".step")].map((one) => [one.className, one.querySelector(".badge").textContent])];
    """
    )
    assert found[0] == ["truth: ✗ wrong", "verifier says: ✓ correct", "disagrees"]
    assert found[1] == [
        ["step right", "verifier: ✓ correct · advantage +0.5"],
        ["step wrong", "verifier: ✗ incorrect · advantage +0.5"],
    ]


def test_a_hostile_text_stays_text_that_can_be_seen(browser):
    browser.run(RESET)
    found = browser.run(
        SET.format("rollout-iteration-least", "5")
        + """
      const one = document.querySelector("#rollout-page > .sample");
      one.open = true;
      await until(() => one.children.length > 1);
      return [one.querySelector(".title").textContent, one.textContent, one.querySelectorAll("img, script, b b").length,
        typeof boom, document.title];
    """
    )
    assert found[0].startswith("</script><script>boom()</script>‹U+2028›<img src=x onerror=boom()>‹U+202E›gnp")
    assert "␛[31mred␀<!-- <b>&amp;" in found[1] and found[2] == 0
    assert found[3] == "undefined" and found[4] == "<i>run"


def test_conversations_show_who_wrote_what_credit_and_calls(browser):
    browser.run(RESET)
    found = browser.run(
        SET.format("rollout-agent", "2")
        + """
      const one = document.querySelector("#rollout-page > .sample");
      one.open = true;
      await until(() => one.querySelector(".said [title]") !== null);
      one.querySelector(".others").click();
      await until(() => one.querySelector(".sample .said details") !== null);
      const all = (selector) => [...one.querySelectorAll(selector)];
      const paint = (span) => getComputedStyle(span).backgroundColor;
      const own = all(":scope > .said");
      const last = one.querySelector(".sample");
      last.querySelector(".said details").open = true;
      return { said: own.map((said) => [said.className, said.querySelector(".who").textContent]),
        calls: own.flatMap((said) => [...said.querySelectorAll(".call")].map((call) => call.textContent)),
        credit: all(".said [title^='+'], .said [title^='-']").map(
          (span) => [span.title, span.textContent, paint(span)]),
        legend: one.querySelector(".legend").textContent, other: last.querySelector(".facts").textContent,
        long: last.querySelector(".said details > .words").getBoundingClientRect().height,
        folded: last.querySelector(".said details > summary").textContent };
    """
    )
    assert found["said"] == [
        ["said answer", "answer 1 of 2 · 4 tokens"],
        ["said environment", "environment · 3 tokens"],
        ["said answer", "answer 2 of 2 · 2 tokens"],
    ]
    assert found["calls"] == ["".join(SAID[token] for token in (TOOL, SUM, TOOL + 1))]
    assert [(title, text) for title, text, _ in found["credit"]][:3] == [
        ("-1", "a&b"), ("-1", "<tool_call>4 & 5"), ("+2", "</tool_call>"),
    ]  # fmt: skip
    assert len({colour for _, _, colour in found["credit"]}) == 3 and "rgba(0, 0, 0, 0)" not in str(found["credit"])
    assert found["legend"] == "advantage of each token: -2-1+0+1+2" and "right" in found["other"]
    assert found["folded"].startswith("<tool_call>www") and found["long"] > 100


def test_partners_are_set_apart_and_frames_of_a_template_are_left_out(browser):
    browser.run(RESET)
    found = browser.run(
        SET.format("rollout-agent", "1")
        + """
      const one = document.querySelector("#rollout-page > .sample");
      one.open = true;
      await until(() => one.children.length > 1);
      return [one.querySelector(".partner").textContent, one.querySelectorAll(".said.environment").length,
        one.querySelector(".who").textContent];
    """
    )
    assert found == [SAID[SUM], 0, "answer 1 of 2 · 2 tokens"]


def test_curves_zoom_smooth_and_take_logarithmic_axes(browser):
    found = browser.run(
        """
      const chart = Report.charts.all.find((one) => one.title === "solver: reward");
      const wait = async (one = chart) => { await pause(60); await until(() => !one.stale); await pause(60); };
      chart.card.scrollIntoView();
      await wait();
      const raw = [...chart.plot.data[1]], smooth = [...chart.plot.data[2]];
      const spread = (values) => Math.max(...values) - Math.min(...values);
      const over = chart.plot.over, box = over.getBoundingClientRect();
      const mouse = (type, share, target = over) => target.dispatchEvent(new MouseEvent(type, {
        bubbles: true, button: 0, movementX: 5, clientX: box.left + share * box.width, clientY: box.top + 20 }));
      mouse("mousemove", 0.5);
      await wait();
      const told = chart.legend.textContent;
      mouse("mousedown", 0.25);
      mouse("mousemove", 0.5);
      mouse("mouseup", 0.5, document);
      await wait();
      const scale = chart.plot.scales.x, zoomed = [scale.min, scale.max];
      const other = Report.charts.all.find((one) => one.title === "kl_ref");
      other.card.scrollIntoView();
      await wait(other);
      const same = [other.plot.scales.x.min, other.plot.scales.x.max];
      document.querySelector(".unzoom").click();
      await wait(other);
      const log = document.getElementById("log-axes");
      log.click();
      await wait();
      const distribution = other.plot.scales.y.distr;
      log.click();
      document.getElementById("axis").value = "hours";
      document.getElementById("axis").dispatchEvent(new Event("change"));
      await wait(other);
      return { raw: spread(raw), smooth: spread(smooth), told, zoomed, same, distribution,
        hours: other.plot.data[0][other.plot.data[0].length - 1],
        line: Report.charts.smooth([...Array(60).keys()].map((x) => 3 * x + 1), 0.1) };
    """
    )
    assert found["smooth"] < 0.8 * found["raw"] and "iteration " in found["told"] and "outcome 0." in found["told"]
    low, high = found["zoomed"]
    assert 8 < low < 13 and 18 < high < 23 and found["same"] == pytest.approx(found["zoomed"])
    assert found["distribution"] == 3
    assert found["hours"] == pytest.approx(40 * 3.5 / 3600, rel=0.1), "of 40 iterations of 3 to 4 s"
    assert found["line"] == pytest.approx([3 * x + 1 for x in range(60)]), "smoothing shifts nothing"


def test_the_timeline_draws_predicted_and_measured_rows_on_one_axis(browser):
    found = browser.run(
        """
      const card = document.querySelector(".timeline");
      const row = (svg) => [svg.getAttribute("aria-label"), svg.getBoundingClientRect().width > 100
        && svg.getBoundingClientRect().height > 10, svg.querySelectorAll("rect:not(.end)").length];
      const ends = (svg) => { const [box, all] = [svg.getBoundingClientRect(), [...svg.querySelectorAll(".end")]];
        return (all[all.length - 1].getBoundingClientRect().right - box.left) / box.width; };
      const rows = [...card.querySelectorAll("svg")];
      const training = rows[2].querySelector("rect[y='1']");
      return { rows: rows.map(row), ends: rows.map(ends), text: card.textContent,
        title: training.querySelector("title").textContent, colour: getComputedStyle(training).fill };
    """
    )
    assert found["rows"] == [
        ["solver, predicted", True, 8], ["judge, predicted", True, 0],
        ["solver, measured", True, 24], ["judge, measured", True, 8],
    ]  # fmt: skip
    assert found["ends"] == pytest.approx([0.8, 0.8, 1.0, 1.0], abs=0.01)
    assert found["title"] == "iteration 3: training, 1.8 s" and found["colour"] == "rgb(44, 162, 95)"
    idle = "The ranks of the solver (0-1) were idle for 30 % of the time, those of the judge (2) for 80 %."
    assert idle in found["text"] and "no prediction" not in found["text"]


def test_runs_of_a_comparison_can_be_picked_and_seeds_averaged(tmp_path):
    runs = []
    for lr in ("1e-4", "2e-4"):
        for seed in (1, 2, 3):
            config = CONFIG.replace("seed: 7", f"seed: {seed}").replace("models/tiny", f"models/{lr}")
            runs.append(open_run(Run(dir=str(tmp_path), name=f"{lr}-{seed}"), config))
            log(runs[-1], shift=0.1 * seed)
    page = tmp_path / "page.html"
    assert main(["report", *(str(run.path) for run in runs), "-o", str(page)]) == 0
    with Browser(tmp_path / "profile") as found:
        found.open(page)
        seen = found.run(
            """
          const chart = Report.charts.all.find((one) => one.title === "solver: held out: accuracy");
          const wait = async () => { await pause(60); await until(() => !chart.stale); };
          chart.card.scrollIntoView();
          await wait();
          const names = () => [...chart.legend.querySelectorAll("span:not(.where)")].map((one) => one.textContent);
          const all = names();
          document.querySelector("[data-run='5']").click();
          await wait();
          const fewer = names();
          document.querySelector("[data-run='5']").click();
          document.getElementById("seeds").value = "mean";
          document.getElementById("seeds").dispatchEvent(new Event("change"));
          await wait();
          return { all, fewer, means: names(), data: chart.plot.data.slice(1, 4).map((values) => values[0]) };
        """
        )
        assert found.errors == []
    assert [len(seen[name]) for name in ("all", "fewer", "means")] == [6, 5, 2]
    assert seen["means"] == ["path=models/1e-4 (3)", "path=models/2e-4 (3)"]
    half = 4.303 * 0.01 / 3**0.5  # accuracies of 0.21, 0.22 and 0.23
    assert seen["data"] == pytest.approx([0.22 + half, 0.22 - half, 0.22], abs=1e-4)


def test_conversations_of_one_iteration_are_shown(tmp_path):
    """A run that has rollouts and no metrics."""
    run = keep_talks(tmp_path, CONFIG, solver=[talk(*CALLING, agent="a", rewards={"outcome": 1.0})])
    with Browser(tmp_path / "profile") as found:
        found.open(write_report(run.path))
        waiting = 'await until(() => document.querySelector("#rollout-page > .sample") !== null);'
        assert found.run(waiting + COUNT) == "1–1 of 1" and found.errors == []
