"""Computes the sections of a run's page: whether it learned, a verifier's verdicts against the truth, times, refits."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from megatron_rl.evaluation.samples import chosen_answers
from megatron_rl.evaluation.solve import SOLVE
from megatron_rl.report.reading import CELLS, METRICS, SFT, WINDOW, Curve, RunMetrics, mean, metric_of
from megatron_rl.run.console import COLUMNS, duration
from megatron_rl.run.metrics import EVAL, SPEED

LOWER_IS_BETTER = re.compile(r"loss|exploitab|error|cross_entropy|(^|_)kl|gap|num_failed")
# Pattern of the metrics for which it is known whether higher or lower values are better.
# For other metrics, such as the number of answers, the better direction is not known.
HAS_DIRECTION = re.compile(r"accuracy|outcome|f1|score|reward|success|aligned|pass@|maj@|loss|exploitab|cross_entropy")
# Maximum number of held-out metrics that are shown as a card, a box with the metric's change
MAX_CARDS = 4
SCHEDULE_FIGURES = (
    *("iterations an hour", "engines idle", "trainer idle"),
    "rollouts trained 0, 1, ... updates after their start",
)
SHOWN = 6  # maximum number of answers that are shown for each problem set
SPARK = 60  # maximum number of points of a sparkline
REFIT_FIGURES = (
    *("seconds", "pause_seconds", "floor_seconds", "ratio_to_floor", "gigabytes", "local_gigabytes"),
    *("checked_slices", "failed_engines", "saturated_weights"),
)


@dataclass(frozen=True, slots=True)
class Gain:
    """The change of a metric between the start and the end of a run."""

    name: str
    start: float
    end: float
    problems: int | None = None  # number of problems over which both values are means; None if unknown
    curve: Curve | None = None
    held_out: bool = True  # False for a training metric, whose change is never called better or worse
    metric: str = ""  # name on the page, without the role

    @property
    def role(self) -> str:
        return self.name.rpartition("/")[0]

    @property
    def error(self) -> float | None:
        """Returns half the width of the 95 % interval of `end - start`, if both are fractions of `problems` problems.

        The two fractions are treated as independent; if both are measured on the same problems, the interval is wider
        than necessary. Returns None if the values are not fractions between 0 and 1, or the number of problems is
        unknown.
        """
        if not self.problems or self.problems < 0 or not (0 <= self.start <= 1 and 0 <= self.end <= 1):
            return None
        return 1.96 * math.sqrt(sum(p * (1 - p) / self.problems for p in (self.start, self.end)))

    @property
    def by_chance(self) -> bool:
        """Returns whether the change is not larger than `error`, half the width of its 95 % interval, and may therefore
        be due to chance."""
        return self.error is not None and abs(self.end - self.start) <= self.error

    @property
    def better(self) -> bool | None:
        """Returns whether the metric improved.

        Returns None for a training metric, for a metric whose change may be due to chance, and if it is not known
        whether higher or lower values are better.
        """
        change = self.end - self.start
        if not self.held_out or change == 0 or self.by_chance or not HAS_DIRECTION.search(self.name):
            return None
        return (change > 0) != bool(LOWER_IS_BETTER.search(self.name))

    @property
    def rose(self) -> bool:
        """Returns whether the metric rose by more than a tenth of its larger absolute value. False for a loss."""
        return self.end - self.start > 0.1 * max(abs(self.start), abs(self.end)) and "loss" not in self.name

    @property
    def spark(self) -> str:
        """Returns the points of a sparkline in a box of 100 x 32, in the format of an SVG polyline."""
        values = list(self.curve.values) if self.curve is not None else []
        size = max(1, -(-len(values) // SPARK))
        means = [mean(values[i : i + size]) for i in range(0, len(values), size)]
        low, high = min(means, default=0.0), max(means, default=0.0)
        span = high / 2 - low / 2
        return " ".join(
            f"{100 * i / max(1, len(means) - 1):.1f},{28 - 24 * ((m / 2 - low / 2) / span if span else 0.5):.1f}"
            for i, m in enumerate(means)
        )


def headline(run: RunMetrics) -> dict[str, Any]:
    """Returns the values of the page's first section, which shows whether the run learned.

    `alarms`: sentences about problems. `gains`: the main held-out metric of each role. `rewards`: the main training
    metric of each role. `rest`: the other held-out metrics. `longest`: (phase that takes most time, its fraction of the
    time), or None.
    """
    gains = evaluation_gains(run)
    chosen = main_gains(gains, run.settings)
    named = [gain.role for gain in chosen]
    roles = sorted(run.updates, key=lambda role: named.index(role) if role in named else len(named))
    phases: dict[str, float] = {}
    for (_, phase), curve in run.seconds.items():
        phases[phase] = phases.get(phase, 0.0) + sum(curve.values)
    longest = max(phases, key=lambda phase: phases[phase], default="")
    return {
        "alarms": [*([f"The run failed: {run.failed}"] if run.failed else []), *run.unlearned()],
        "gains": chosen,
        "rewards": [gain for role in roles if (gain := reward_gain(run, role)) is not None],
        "rest": [gain for gain in gains if gain not in chosen],
        "longest": (longest, phases[longest] / run.clock.total) if longest and run.clock.total > 0 else None,
    }


def evaluation_gains(run: RunMetrics) -> list[Gain]:
    """Returns the change of each held-out metric from the first to the last evaluation. Metrics with only one
    evaluation are left out."""
    counts = {name: curve for (scope, name), curve in run.curves.items() if scope == EVAL}
    gains = []
    evaluated = run.evaluated()
    for name, curve in evaluated.items():
        if len(curve.values) < 2:
            continue
        role = name.rpartition("/")[0]
        number = counts.get(f"{role}/num_problems" if role else "num_problems")
        counted = number is not None and number.values and re.search("accuracy|reward|pass@|maj@", name)
        problems = int(min(number.values[-1], 1e9)) if counted and number is not None else None
        metric = metric_of(name, evaluated).replace("_", " ")
        gains.append(Gain(name, curve.values[0], curve.values[-1], problems, curve, metric=metric))
    return gains


def evaluations(run: RunMetrics) -> dict[str, Any]:
    """Returns the values of the section about evaluations on problem sets.

    `tables`: one table each for the first and the last evaluation, as (title, names of the metrics, rows). A row is
    (set, number of problems, {metric: Interval}). `samples`: answers in the last evaluation, as (set, answer, whether
    the answer is correct). `best`: the summary's entries about the best evaluations.
    """
    tables, samples = [], list[tuple[str, Mapping[str, Any], bool]]()
    stored = run.record.evaluations()
    for number, sets, answers in stored:
        rows = [
            (title if measure == SOLVE else f"{title}, {measure}", problems, metrics)
            for measures in sets.values()
            for measure, (title, problems, metrics) in measures.items()
        ]
        names = list(dict.fromkeys(metric for *_, metrics in rows for metric in metrics))
        tables.append((f"After iteration {number}", names, rows))
        if number == stored[-1][0]:
            for name in dict.fromkeys(row["set"] for row in answers):
                chosen = chosen_answers([row for row in answers if row["set"] == name], SHOWN)
                samples += [(name, row, bool(row.get("correct"))) for row in chosen]
    return {"tables": tables, "samples": samples, "best": run.record.best()}


def confusions(run: RunMetrics) -> list[dict[str, Any]]:
    """Returns the confusion matrices of the verifier's verdicts in the first and in the last iterations of each scope.

    `rows`: {truth: (colour, count, fraction) for each verdict}. `f1`: the harmonic mean of the accuracies on correct
    and on wrong solutions.
    """
    matrices = []
    for scope in run.updates:
        if not (curves := run.confusion(scope)):
            continue
        iterations = len(curves[0].values)
        count = max(1, int(WINDOW * iterations))
        parts = {"first iterations": slice(0, count), "last iterations": slice(iterations - count, iterations)}
        for when, part in parts.items() if iterations > 1 else [("", slice(0, 1))]:
            cells = {cell: sum(curve.values[part]) for cell, curve in zip(CELLS, curves, strict=True)}
            matrices.append(_verdict_counts(f"{scope} iterations: {when}".strip(": "), cells))
    return matrices


def _verdict_counts(title: str, cells: Mapping[str, float]) -> dict[str, Any]:
    rows: dict[str, list[tuple[str, float, float]]] = {}
    for truth, names in {"right": ("tp", "fn"), "wrong": ("fp", "tn")}.items():
        total = sum(cells[name] for name in names)
        shares = {name: cells[name] / total if total else 0.0 for name in names}
        rows[truth] = [("--good" if n in ("tp", "tn") else "--bad", cells[n], share) for n, share in shares.items()]
    right, wrong = rows["right"][0][2], rows["wrong"][1][2]
    f1 = 2 * right * wrong / (right + wrong) if right + wrong else 0.0
    return {"title": title, "rows": rows, "f1": f1}


def seconds(run: RunMetrics) -> dict[str, dict[str, float]]:
    """Returns the measured seconds as {scope: {phase: seconds}}; {} if no seconds were measured."""
    totals: dict[str, dict[str, float]] = {}
    for (scope, phase), curve in run.seconds.items():
        totals.setdefault(scope, {})[phase] = sum(curve.values)
    return totals if sum(sum(phases.values()) for phases in totals.values()) > 0 else {}


def schedules(run: RunMetrics) -> dict[str, list[str]]:
    """Returns {label: row of a table with the columns SCHEDULE_FIGURES}. For each value of rollouts.max_staleness, a
    row has the rates that were predicted at the start of the run. The last row has the measured rates."""
    rows: dict[str, list[str]] = {}
    schedule, staleness = run.summary.get("schedule", {}), run.settings.get("rollouts.max_staleness", 0)
    with contextlib.suppress(TypeError, ValueError, LookupError, AttributeError):  # the summary is damaged
        for predicted in schedule.get("predicted", ()):
            k, rate = int(predicted["max_staleness"]), float(predicted["iterations_per_hour"])
            label = f"predicted for max_staleness {k}, {schedule['cluster']}"
            idle = float(predicted["engines_idle"]), float(predicted["trainer_idle"])
            rows[label] = _schedule_row(rate, *idle, list(map(float, predicted["staleness"])))
    speed: dict[str, list[float]] = {"iteration_seconds": [], "trainer_idle": [], "engines_idle": []}
    for (_, name), curve in run.curves.items():
        if name.removeprefix(SPEED) in speed:  # leave out iteration 0, for which no rollouts were generated in advance
            speed[name.removeprefix(SPEED)] += [v for i, v in zip(curve.iterations, curve.values, strict=True) if i]
    if seconds := speed["iteration_seconds"]:
        late, lines = (
            dict[int, float](),
            sum(len(c.values) for (_, name), c in run.curves.items() if name == "staleness"),
        )
        for (_, name), curve in run.curves.items():
            if re.fullmatch(r"trained_late/\d{1,4}", name):
                age = int(name.partition("/")[2])
                late[age] = late.get(age, 0.0) + sum(curve.values) / max(1, lines)
        ages = [1 - sum(late.values()), *(late.get(age, 0.0) for age in range(1, max(late, default=0) + 1))]
        engines, trainer = (fmean(speed[n]) if speed[n] else None for n in ("engines_idle", "trainer_idle"))
        rows[f"measured with max_staleness {staleness}"] = _schedule_row(3600 / fmean(seconds), engines, trainer, ages)
    return rows


def _schedule_row(rate: float, engines_idle: float | None, trainer_idle: float | None, ages: list[float]) -> list[str]:
    idle = ["" if share is None else f"{share:.0%}" for share in (engines_idle, trainer_idle)]
    return [f"{rate:,.4g}", *idle, ", ".join(f"{share:.0%}" for share in ages)]


def refits(run: RunMetrics) -> dict[str, list[str]]:
    """Returns {role: row of a table}. A row has the number of the role's refits, and the medians of REFIT_FIGURES."""
    rows: dict[str, list[str]] = {}
    for role in dict.fromkeys(role for role, _ in run.refits):
        figures = {name: curve.values for (owner, name), curve in run.refits.items() if owner == role and curve.values}
        count = max(map(len, figures.values()), default=0)
        rows[role] = [str(count), *(f"{median(figures[n]):,.4g}" if n in figures else "" for n in REFIT_FIGURES)]
    return rows


def facts(run: RunMetrics) -> list[tuple[str, Any]]:
    """Returns [(setting, value)] of the settings that are shown at the top of the page."""
    chosen = [(key, run.settings[key]) for p in METRICS["facts"] for key in run.settings if re.fullmatch(p, key)]
    return [(key, value) for key, value in chosen if value is not None]


def subtitle(run: RunMetrics) -> str:
    """Returns a text with the numbers of iterations and updates of each role, and the measured time."""
    parts = []
    for scope, count in run.updates.items():
        done = run.curves.get((scope, "update"))
        ending = f" iterations, {done.values[-1]:,.0f} updates" if done is not None and done.values else " updates"
        parts.append(f"{count:,} {scope}{ending}")
    return " · ".join([*parts, f"{duration(run.clock.total)} measured"])


def main_gains(gains: Sequence[Gain], settings: Mapping[str, Any]) -> list[Gain]:
    """Returns the changes of the roles' main metrics, at most MAX_CARDS in total.

    The main metric of a role is the first metric that matches METRICS["main"], or else the reward with the largest
    weight in recipe.args.rewards. If no role has a main metric, the changes of other metrics are returned.

    `settings`: flat settings of the run.
    """
    start = "recipe.args.rewards."
    weights = {name: w for name, w in settings.items() if name.startswith(start) and isinstance(w, int | float)}
    order = sorted(weights, key=lambda name: -weights[name])
    weighed = [f"/{re.escape(name.removeprefix(start))}$" for name in order]
    by_role: dict[str, list[Gain]] = {}
    for gain in gains:
        by_role.setdefault(gain.role, []).append(gain)
    chosen = []
    for group in by_role.values():
        main = (gain for pattern in [*METRICS["main"], *weighed] for gain in group if re.search(pattern, gain.name))
        chosen += [*main][:1]
    return (chosen or [gain for gain in gains if gain.start != gain.end])[:MAX_CARDS]


def reward_gain(run: RunMetrics, role: str) -> Gain | None:
    """Returns the change of a role's main training metric between the first and the last iterations of the run. Both
    ends are means over a share WINDOW of the metric's values.

    The main metric is the reward on which the role is trained, or the loss if there is no reward. Returns None if there
    is no such metric with several values.
    """
    names = ["validation_loss"] if role == SFT else [*COLUMNS["reward"][:-1]]
    names += sorted(name for scope, name in run.curves if scope == role and name.startswith("reward/"))
    for name in [*names, "loss"]:
        curve = run.curves.get((role, name))
        if curve is not None and len(curve.values) > 1:
            plain = name.removesuffix("/trained")
            metric = plain.rpartition("/")[2].replace("_", " ")
            return Gain(f"{role}/{plain}", *curve.ends, None, curve, held_out=False, metric=metric)
    return None
