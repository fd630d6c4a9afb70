"""Computes the timeline of a run's page: when each role works, as predicted and as measured, and how long ranks are
idle."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_rl.report.reading import RunMetrics
from megatron_rl.run import json_lines
from megatron_rl.run.work_intervals import PHASES, Interval

SHOWN = 8  # at most this number of iterations is drawn, the newest ones since the run was last started
WIDTH = 1000  # width of a drawn row, in units of its viewBox


class Span(NamedTuple):
    """Consecutive iterations, from the second `began` to the second `ended`. `ends`: the second at which each ends."""

    began: float
    ends: Sequence[float]
    intervals: Sequence[Interval]

    @property
    def seconds(self) -> float:
        return self.ends[-1] - self.began


@dataclass
class Measured:
    """The lines of timeline.jsonl: the last ones, and the sums over all of them."""

    lines: deque[tuple[int, Span]] = field(default_factory=lambda: deque(maxlen=SHOWN))  # (iteration, its span)
    # {(ranks, roles): [busy seconds, all seconds]}
    sets: dict[tuple[str, tuple[str, ...]], list[float]] = field(default_factory=dict)

    def take(self, raw: Any) -> None:
        """Adds a line. Raises one of json_lines.UNREADABLE if the line has another structure."""
        began, ended = _seconds(raw["began"]), _seconds(raw["ended"])
        span = Span(began, [ended], _intervals(raw["intervals"]))
        sets = [(str(one["ranks"]), tuple(map(str, one["roles"])), _seconds(one["busy"])) for one in raw["sets"]]
        if self.lines and began < self.lines[-1][1].ends[-1]:  # another start of the run
            self.lines.clear()
        self.lines.append((int(raw["iteration"]), span))
        for ranks, roles, busy_s in sets:
            sums = self.sets.setdefault((ranks, roles), [0.0, 0.0])
            sums[0] += busy_s
            sums[1] += max(0.0, ended - began)

    @property
    def shown(self) -> Span:
        """Returns the iterations of `lines`, of which there must be one."""
        spans = [span for _, span in self.lines]
        intervals = [interval for span in spans for interval in span.intervals]
        return Span(spans[0].began, [span.ends[-1] for span in spans], intervals)


def timeline(run: RunMetrics) -> dict[str, Any] | None:
    """Returns the values of the page's timeline; None if the run has recorded none.

    `idle`: a sentence about the idle shares of all sets of ranks. `groups`: {"predicted" or "measured": [(role, bars)]}
    with the bars as (phase, x, y, width, title). `marks`: {group: x of the end of each iteration}. `count`: number of
    drawn iterations. `seconds`: length of the axis. `missing`: a sentence if there is no prediction.
    """
    measured = Measured()
    if damage := json_lines.each(run.record.directory.timeline, measured.take):
        run.record.damage.append(damage)
    if not measured.lines or measured.shown.seconds <= 0:
        return None
    groups, why = {"measured": measured.shown}, ""
    schedule = run.summary.get("schedule")
    if isinstance(schedule, Mapping) and "timeline" in schedule:
        try:
            expected = predicted(schedule["timeline"], measured.lines[0][0], len(measured.lines))
            groups = {"predicted": expected, **groups}
        except json_lines.UNREADABLE:
            why = "it is damaged in summary.json"
    else:
        why = (schedule if isinstance(schedule, Mapping) else {}).get("not_predicted", "summary.json has none")
    roles = [role for _, names in measured.sets for role in names]
    roles += [interval.role for interval in measured.shown.intervals]
    axis_s = max(span.seconds for span in groups.values())
    return {
        "idle": idle_text(measured),
        "groups": {
            name: [(role, _bars(span, role, axis_s)) for role in dict.fromkeys(roles) if role]
            for name, span in groups.items()
        },
        "marks": {name: [WIDTH * (end - span.began) / axis_s for end in span.ends] for name, span in groups.items()},
        "count": len(measured.lines), "seconds": axis_s,
        "missing": f"There is no prediction to compare with: {why}." if why else "",
    }  # fmt: skip


def predicted(found: Any, first: int, count: int) -> Span:
    """Returns `count` predicted iterations, of which the first has the same place in its cycle as the run's iteration
    `first`. `found`: see planning.schedule.predicted. Raises one of json_lines.UNREADABLE if it is damaged."""
    place, ends = first % max(1, int(found["cycle"])), [*map(_seconds, found["ends"])]
    ends = ends[place : place + count + 1]
    if len(ends) < 2 or ends[-1] <= ends[0]:
        raise ValueError("it has fewer iterations than are drawn")
    intervals = [one._replace(iteration=one.iteration - place + first) for one in _intervals(found["intervals"])]
    return Span(ends[0], ends[1:], intervals)


def idle_text(measured: Measured) -> str:
    """Returns a sentence about the share of the time in which each set of ranks was idle."""
    texts = list[str]()
    for (ranks, roles), (busy_s, seconds) in measured.sets.items():
        whose = f"of {'the ' if len(roles) == 1 else ''}{' and '.join(roles)} ({ranks})"
        share = f"for {100 * max(0.0, 1 - busy_s / seconds) if seconds else 0:.0f} %"
        texts.append(f"those {whose} {share}" if texts else f"The ranks {whose} were idle {share} of the time")
    return f"{', '.join(texts)}." if texts else ""


def _bars(span: Span, role: str, axis_s: float) -> list[tuple[str, float, int, float, str]]:
    """Returns the bars of a role. Servers generate beside the work of ranks, so that generation is drawn above it."""
    bars = list[tuple[str, float, int, float, str]]()
    for interval in span.intervals:
        began, ended = max(interval.began, span.began), min(interval.ended, span.ends[-1])
        if interval.role in ("", role) and interval.phase in PHASES and began < ended:
            x, width = WIDTH * (began - span.began) / axis_s, max(1.0, WIDTH * (ended - began) / axis_s)
            what = f"iteration {interval.iteration + 1}: {interval.phase}, {interval.ended - interval.began:.3g} s"
            bars.append((interval.phase, x, 0 if interval.phase == PHASES[0] else 1, width, what))
    return bars


def _intervals(raw: Any) -> list[Interval]:
    return [Interval(int(i), str(role), str(phase), _seconds(a), _seconds(b)) for i, role, phase, a, b in raw]


def _seconds(raw: Any) -> float:
    """Returns a time. Raises ValueError if it is not a finite number."""
    if not math.isfinite(seconds := float(raw)):
        raise ValueError("a time is finite")
    return seconds
