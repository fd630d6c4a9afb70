"""The report's conversations in a browser: what is folded opens, credit has colours, and nothing is wider than the
page."""

from __future__ import annotations

import random

import pytest
from browser import chromium, look
from talks import CALLING, ENVIRONMENT, LONG, POLICY, SUM, TOOL, keep_talks, talk

from megatron_rl.run.metrics import Tracker
from megatron_rl.run.report import write_report

pytestmark = pytest.mark.skipif(
    chromium() is None, reason="there is no Chromium here (Debian: apt-get install chromium)"
)

CONFIG = "run: {name: talks, seed: 7}\nroles: {solver: {model: {path: models/tiny}}}\n"
LOOK = """
  const all = (selector) => [...page.querySelectorAll(selector)];
  const episodes = all("details.episode");
  const before = episodes.map((one) => one.open);
  const closed = episodes.filter((one) => !one.open);
  closed.forEach((one) => one.querySelector("summary").click());
  all(".said details > summary").forEach((one) => one.click());
  const paint = (one) => getComputedStyle(one).backgroundColor;
  const wide = all("main *").filter((one) => one.closest(".scroll, svg") === null
    && one.getBoundingClientRect().right > page.documentElement.clientWidth + 0.5);
  return {
    before, after: episodes.map((one) => one.open),
    shown: closed.map((one) => one.querySelector(".said").getBoundingClientRect().height),
    long: all(".said details > .words").map((one) => one.getBoundingClientRect().height),
    credit: all("[title^='+'], [title^='-']").map((one) => [Number(one.title), paint(one)]),
    paper: paint(page.body), ink: getComputedStyle(page.body).color,
    width: page.documentElement.clientWidth, scroll: page.documentElement.scrollWidth,
    wide: wide.slice(0, 5).map((one) => one.outerHTML.slice(0, 120)),
  };
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The report of a run with six episodes of two seats: credit by token, calls, and turns of very long words."""
    credit = [0.0, -1.0, -1.0, -1.0, 2.0, 0.0, 0.0, 0.0, 1.0, 1.0]
    long = (POLICY, [TOOL, *[LONG] * 30]), (ENVIRONMENT, [SUM]), (POLICY, [3])
    solver = [
        talk(*CALLING, seat="left-of-the-table", episode=str(i), advantages=credit, rewards={"outcome": float(i % 2)})
        for i in range(6)
    ]
    judge = [talk(*long, seat="right", episode=str(i), role="judge", rewards={"form": 1.0}) for i in range(6)]
    run = keep_talks(tmp_path_factory.mktemp("browser"), CONFIG, solver=solver, judge=judge)
    tracker, draw = Tracker(run.metrics), random.Random(0)
    for turn in range(4):
        figures = {"reward/outcome": draw.random(), "turns": 2.0 + turn, "episodes/error": 1.0, "seconds/train": 1.0}
        tracker.log(turn, "solver", figures, turn=turn)
        tracker.log(turn, "eval", {"solver/outcome_sampled": draw.random()}, turn=turn)
    return write_report(run.path).read_text(encoding="utf-8")


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_episodes_open_their_credit_is_coloured_and_no_line_runs_out_of_the_page(page, tmp_path, width, dark):
    found = look(page, LOOK, tmp_path / "look", width=width, dark=dark)
    assert found.get("error") is None and found["width"] == width
    assert found["before"] == [True, False, True, False] and all(found["after"]), "two of each outcome, the first open"
    assert min(found["shown"]) > 20 and min(found["long"]) > 100
    colours = {value: colour for value, colour in found["credit"]}
    assert set(colours) == {-1.0, 2.0, 1.0} and len({*colours.values()}) == 3
    assert all(colour != "rgba(0, 0, 0, 0)" for colour in colours.values())
    assert found["scroll"] <= width and found["wide"] == []
    brightness = [sum(map(int, colour[4:-1].split(", "))) for colour in (found["paper"], found["ink"])]
    assert (brightness[0] < brightness[1]) == dark, found
