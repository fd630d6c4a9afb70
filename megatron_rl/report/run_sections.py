"""Writes the parts of a run's report that stand still: headline, verdicts against the truth, times, refits, config."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import Any

from megatron_rl.report.html_page import grid, show, table
from megatron_rl.report.reading import GATE, SFT, Curve, RunFigures, flatten
from megatron_rl.run.console import COLUMNS
from megatron_rl.run.metrics import EVAL

# Settings that the head of the page shows, as patterns of their names.
FACTS = (
    r"recipe\.target",
    r"(roles\.\w+\.)?model\.(path|init)",
    r"(roles\.\w+\.)?layout\.(tp|pp)",
    r"(roles\.\w+\.)?optimizer\.lr",
    r"roles\.\w+\.sampling\.(temperature|max_tokens)",
    r"data\.(path|train)",
    r"run\.(seed|steps|prompts_per_step)",
    r"(samples_per_step|epochs)",
    r"launch\.nproc",
    r"recipe\.args\.\w+",
)
WINDOW = 0.2  # the first turns are this share of all, and so are the last turns
LARGEST = 1e300  # whole numbers beyond it are no floats, and differences of floats beyond it are not finite
# The figures of an evaluation that say most of a role, best first.
MAIN = (
    r"accuracy_sampled$",
    r"reward_sampled$",
    r"accuracy$",
    r"outcome_f1$",
    r"exploitability$",
    r"processbench_f1$",
    r"accuracy|outcome|score|reward",
)
LOWER_IS_BETTER = re.compile(r"loss|exploitab|error|cross_entropy|(^|_)kl|gap|num_failed")
# Figures of which it is known whether more is better; of others, such as the number of answers, it is not.
HAS_DIRECTION = re.compile(r"accuracy|outcome|f1|score|reward|success|aligned|pass@|maj@|loss|exploitab|cross_entropy")
MAX_CARDS = 4  # evaluated figures with a card of their own
SPARK = 60  # points of a small curve
CELLS = ("tp", "fp", "tn", "fn")


@dataclass(frozen=True, slots=True)
class Gain:
    """A figure before and after."""

    name: str
    start: float
    end: float
    problems: int | None = None  # that both are means over
    curve: Curve | None = None
    held_out: bool = True  # else it is a figure of training, of whose change no more is said than what it is

    @property
    def error(self) -> float | None:
        """Returns half of the 95 % interval of the difference of two shares of as many problems; None where it is no
        share, or where their number is not known.

        The two are taken as independent, which is too cautious where the problems are the same.
        """
        if not self.problems or self.problems < 0 or not (0 <= self.start <= 1 and 0 <= self.end <= 1):
            return None
        return 1.96 * math.sqrt(sum(p * (1 - p) / self.problems for p in (self.start, self.end)))

    @property
    def by_chance(self) -> bool:
        """Returns whether the change is within its interval."""
        return self.error is not None and abs(self.end - self.start) <= self.error

    @property
    def better(self) -> bool | None:
        """Returns whether the figure got better; None where it did not change, or not by more than chance would, or
        where nothing says which way is better."""
        change = self.end - self.start
        if not self.held_out or change == 0 or self.by_chance or not HAS_DIRECTION.search(self.name):
            return None
        return (change > 0) != bool(LOWER_IS_BETTER.search(self.name))


def headline(run: RunFigures) -> str:
    """Returns what a reader sees first: whether the run learned, as a sentence and as cards."""
    gains = evaluation_gains(run) or summary_gains(run.summary)
    chosen = _main(gains)
    rewards = [gain for role in _in_order(run.roles(), chosen) if (gain := _reward_gain(run, role)) is not None]
    cards = [_card(gain, "held out") for gain in chosen] + [_card(gain, "training") for gain in rewards[:3]]
    cards += _progress_cards(run)
    rest = [gain for gain in gains if gain not in chosen]
    more = f"<details><summary>{len(rest)} more held-out figures</summary>{_gain_table(rest)}</details>" if rest else ""
    first = [f"The run failed: {run.failed}"] if run.failed else []
    bad = "".join(f'<b class="bad">{escape(text)}</b> ' for text in [*first, *run.unlearned()])
    return f'<p class="verdict">{bad}{_sentence(chosen, rewards)}</p><div class="cards">{"".join(cards)}</div>{more}'


def evaluation_gains(run: RunFigures) -> list[Gain]:
    """Returns each evaluated figure at the first and the last evaluation, where there are two."""
    counts = {name: curve for (scope, name), curve in run.curves.items() if scope == EVAL}
    out = []
    for name, curve in run.evaluated().items():
        role = name.rpartition("/")[0]
        number = counts.get(f"{role}/num_problems" if role else "num_problems")
        problems = None if number is None or not number.values else int(min(number.values[-1], 1e9))
        if len(curve.values) > 1 and re.search("accuracy|reward_(sampled|greedy)", name) is None:
            problems = None
        if len(curve.values) > 1:
            out.append(Gain(name, curve.values[0], curve.values[-1], problems, curve))
    return out


def summary_gains(summary: Mapping[str, Any]) -> list[Gain]:
    """Returns every figure that a summary gives as NAME_start and NAME_end."""
    return [Gain(name, start, end) for name, (start, end) in pairs(summary).items()]


def pairs(summary: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Returns {NAME: (start, end)} for every figure that a summary gives as NAME_start and NAME_end."""
    flat = flatten(summary)
    names = [
        key.removesuffix("_start")
        for key in flat
        if key.endswith("_start") and f"{key.removesuffix('_start')}_end" in flat
    ]
    both = {name: (flat[f"{name}_start"], flat[f"{name}_end"]) for name in names}
    return {
        name: values
        for name, values in both.items()
        if "_num_" not in name and all(_is_number(value) for value in values)
    }


def confusions(run: RunFigures) -> str:
    """Returns tables of what the verifier said against what is true, in the first and in the last turns."""
    blocks = []
    for scope in run.updates:
        curves = [run.curves.get((scope, f"confusion/{cell}")) for cell in CELLS]
        known = [curve.values for curve in curves if curve is not None and curve.values]
        if len(known) < len(CELLS) or len({len(values) for values in known}) > 1:
            continue
        turns = len(known[0])
        count = max(1, int(WINDOW * turns))
        parts = {"first turns": slice(0, count), "last turns": slice(turns - count, turns)}
        for when, part in parts.items() if turns > 1 else [("", slice(0, 1))]:
            cells = {cell: sum(values[part]) for cell, values in zip(CELLS, known, strict=True)}
            blocks.append(_confusion_table(f"{scope} turns: {when}".strip(": "), cells))
    return f"<h3>The verifier's final verdicts, against the truth</h3>{grid(blocks)}" if blocks else ""


def times(run: RunFigures) -> str:
    """Returns a bar for each role, divided by phase, and a table of the seconds."""
    seconds: dict[str, dict[str, float]] = {}
    for (scope, phase), curve in run.seconds.items():
        seconds.setdefault(scope, {})[phase] = sum(curve.values)
    total = sum(sum(own.values()) for own in seconds.values())
    if not total > 0:
        return ""
    phases = sorted({phase for own in seconds.values() for phase in own})
    color = {phase: place % 8 for place, phase in enumerate(phases)}
    longest = max(sum(own.values()) for own in seconds.values())
    bars = "".join(_time_bar(scope, own, color, longest) for scope, own in seconds.items())
    legend = "".join(f'<span><i class="tone{color[phase]}"></i>{escape(phase)}</span>' for phase in phases)
    lines = "".join(
        f'<tr><th scope="row">{escape(scope)}</th><th>{escape(phase)}</th>'
        f"<td>{value:,.1f}</td><td>{value / total:.1%}</td></tr>"
        for scope, own in seconds.items()
        for phase, value in sorted(own.items(), key=lambda item: -item[1])
    )
    return (
        f'<div class="card"><h3>Seconds in all, by role and phase</h3><p class="legend">{legend}</p>{bars}'
        f"<details><summary>as a table</summary>{table(('role', 'phase', 'seconds', 'share'), lines)}</details></div>"
    )


def refits(run: RunFigures) -> str:
    """Returns a table with a row for each role: its number of refits and the medians of their figures."""
    names = (
        *("seconds", "floor_seconds", "ratio_to_floor", "gigabytes", "local_gigabytes"),
        *("checked_slices", "failed_engines"),
    )
    lines = []
    for role in dict.fromkeys(role for role, _ in run.refits):
        found = {name: curve for (own, name), curve in run.refits.items() if own == role and curve.values}
        count = max((len(curve.values) for curve in found.values()), default=0)
        cells = "".join(f"<td>{f'{median(found[n].values):,.4g}' if n in found else ''}</td>" for n in names)
        lines.append(f'<tr><th scope="row">{escape(role)}</th><td>{count}</td>{cells}</tr>')
    heads = ("role", "refits", *(name.replace("_", " ") for name in names))
    return f"<h3>Refits, medians</h3>{table(heads, ''.join(lines))}" if lines else ""


def facts(run: RunFigures) -> str:
    """Returns the settings that the head of the page shows."""
    chosen = [(key, run.settings[key]) for pattern in FACTS for key in run.settings if re.fullmatch(pattern, key)]
    items = "".join(
        f"<div><dt>{escape(key)}</dt><dd>{escape(show(value))}</dd></div>" for key, value in chosen if value is not None
    )
    return f'<details><summary>Settings</summary><dl class="facts">{items}</dl></details>' if items else ""


def subtitle(run: RunFigures) -> str:
    """Returns the number of turns and updates by role and the measured time."""
    parts = []
    for scope, count in run.updates.items():
        done = run.curves.get((scope, "update"))
        own = f" turns, {done.values[-1]:,.0f} updates" if done is not None and done.values else " updates"
        parts.append(f"{count:,} {escape(scope)}{own}")
    return " · ".join([*parts, f"{duration(run.clock.total)} measured"])


def damage(sentences: Sequence[str]) -> str:
    """Returns an HTML list of what could not be read."""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in dict.fromkeys(sentences))
    return f"<p>Some of what this page is made from could not be read:</p><ul>{items}</ul>" if items else ""


def constants(texts: Sequence[str]) -> str:
    """Returns the figures that never change, as one paragraph."""
    if not texts:
        return ""
    items = " · ".join(f"<span>{escape(text)}</span>" for text in texts)
    return f'<p class="constants"><b>Never changes:</b> {items}</p>'


def config(text: str) -> str:
    """Returns the run's config, folded."""
    return f"<details><summary>config.yaml</summary><pre>{escape(text)}</pre></details>" if text else ""


def summary_table(summary: Mapping[str, Any]) -> str:
    """Returns the run's summary, folded."""
    lines = "".join(
        f'<tr><th scope="row">{escape(key)}</th><td>{escape(show(value))}</td></tr>'
        for key, value in flatten(summary).items()
    )
    return f"<details><summary>summary.json</summary>{table(('', ''), lines)}</details>" if lines else ""


def duration(seconds: float) -> str:
    """Returns seconds as hours and minutes."""
    if not math.isfinite(seconds) or seconds > LARGEST:
        return "an unknown time"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def spark(curve: Curve) -> str:
    """Returns a small curve without axes, as SVG."""
    values = list(curve.values)
    size = -(-len(values) // SPARK)
    means = [_mean(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    span = high / 2 - low / 2
    points = " ".join(
        f"{100 * i / max(1, len(means) - 1):.1f},{28 - 24 * ((m / 2 - low / 2) / span if span else 0.5):.1f}"
        for i, m in enumerate(means)
    )
    box = 'viewBox="0 0 100 32" preserveAspectRatio="none" aria-hidden="true"'
    return f'<svg class="spark" {box}><polyline points="{points}"/></svg>'


def _main(gains: Sequence[Gain]) -> list[Gain]:
    """Returns the gain that says most of each role, at most MAX_CARDS."""
    by_role: dict[str, list[Gain]] = {}
    for gain in gains:
        by_role.setdefault(gain.name.rpartition("/")[0], []).append(gain)
    chosen = []
    for own in by_role.values():
        found = (gain for pattern in MAIN for gain in own if re.search(pattern, gain.name))
        if (best := next(found, None)) is not None:
            chosen.append(best)
    return (chosen or list(gains))[:MAX_CARDS]


def _in_order(roles: Sequence[str], gains: Sequence[Gain]) -> list[str]:
    """Returns the roles in the order of their held-out figures, then the others."""
    named = [gain.name.rpartition("/")[0] for gain in gains]
    return sorted(roles, key=lambda role: named.index(role) if role in named else len(named))


def _reward_gain(run: RunFigures, role: str) -> Gain | None:
    """Returns the mean of a role's main figure of training over its first and its last turns: the reward that it is
    trained on, or the loss where there is none."""
    names = [*COLUMNS["reward"][:-1], "loss"] if role != SFT else ["validation_loss", "loss"]
    names += sorted(name for scope, name in run.curves if scope == role and name.startswith("reward/"))
    names = [name for name in names if name != "loss"] + ["loss"]
    for name in names:
        curve = run.curves.get((role, name))
        if curve is not None and len(curve.values) > 1:
            count = max(1, int(WINDOW * len(curve.values)))
            start, end = _mean(curve.values[:count]), _mean(curve.values[-count:])
            return Gain(f"{role}/{name.removesuffix('/trained')}", start, end, None, curve, held_out=False)
    return None


def _sentence(gains: Sequence[Gain], rewards: Sequence[Gain]) -> str:
    """Returns HTML that says for each main figure whether it rose; for training figures where nothing was held out."""
    parts = []
    for gain in gains or rewards:
        kind = {True: "good", False: "bad", None: ""}[gain.better]
        verb = "rose" if gain.end > gain.start else "fell" if gain.end < gain.start else "stayed"
        if gain.held_out and gain.by_chance and gain.end != gain.start:
            verb = "did not change beyond chance:"
        error = f" (± {gain.error:.2g})" if gain.error else ""
        parts.append(
            f'{escape(_spoken(gain.name))} <b class="{kind}">{verb}</b> from {show(gain.start)} to '
            f"<b>{show(gain.end)}</b>{error}"
        )
    if not parts:
        return "Nothing has been measured twice yet."
    where = "On held-out problems, " if gains else "In training, first against last turns, "
    return where + "; ".join(parts) + "."


def _spoken(name: str) -> str:
    role, _, figure = name.rpartition("/")
    for way in ("sampled", "greedy"):
        if figure.endswith(f"_{way}"):
            figure = f"{way} {figure.removesuffix(f'_{way}')}"
    figure = figure.replace("_", " ")
    return f"the {role}'s {figure}" if role else figure


def _card(gain: Gain, kind: str) -> str:
    role, _, figure = gain.name.rpartition("/")
    change = gain.end - gain.start
    tone = {True: "good", False: "bad", None: ""}[gain.better]
    error = f" ± {gain.error:.2g}" if gain.error else ""
    problems = f", {gain.problems} problems" if gain.problems else ""
    return (
        f'<div class="headline"><p class="what">{escape(role)} <b>{escape(figure.replace("_", " "))}</b></p>'
        f'<p class="figure">{show(gain.end)}</p>'
        f'<p class="change"><b class="{tone}">{change:+.3g}{error}</b> from {show(gain.start)}</p>'
        f"{spark(gain.curve) if gain.curve is not None else ''}"
        f'<p class="kind">{kind}{problems}</p></div>'
    )


def _progress_cards(run: RunFigures) -> list[str]:
    turns = run.turns
    planned = run.summary.get("planned")
    of = f" of {planned:,}" if type(planned) is int and 0 < planned < 10**12 else ""
    done = sum(run.updates.values())
    if not turns or not done:
        return []
    last = (
        max(
            (curve.turns[-1] for (scope, _), curve in run.curves.items() if scope not in (EVAL, GATE) and curve.turns),
            default=-1,
        )
        + 1
    )
    state = "finished" if run.finished else "not finished"
    phases: dict[str, float] = {}
    for (_, phase), curve in run.seconds.items():
        phases[phase] = phases.get(phase, 0.0) + sum(curve.values)
    longest = max(phases, key=lambda phase: phases[phase], default="")
    share = phases[longest] / run.clock.total if longest and run.clock.total > 0 else 0.0
    most = f"{share:.0%} of it {escape(longest)}" if share else ""
    return [
        f'<div class="headline"><p class="what"><b>turns</b></p><p class="figure">{last:,}<small>{of}</small></p>'
        f'<p class="change">{state}</p></div>',
        f'<div class="headline"><p class="what"><b>time</b></p><p class="figure">{duration(run.clock.total)}</p>'
        f'<p class="change">{most}</p></div>',
    ]


def _gain_table(gains: Sequence[Gain]) -> str:
    lines = []
    for gain in gains:
        tone = {True: "up", False: "down", None: "same"}[gain.better]
        lines.append(
            f'<tr><th scope="row">{escape(gain.name.replace("_", " "))}</th><td>{show(gain.start)}</td>'
            f'<td>{show(gain.end)}</td><td class="{tone}">{gain.end - gain.start:+.4g}</td></tr>'
        )
    return table(("", "before", "after", "change"), "".join(lines))


def _confusion_table(title: str, cells: Mapping[str, float]) -> str:
    positive, negative = cells["tp"] + cells["fn"], cells["tn"] + cells["fp"]

    def cell(name: str, of: float) -> str:
        share = cells[name] / of if of else 0.0
        color = "var(--good)" if name in ("tp", "tn") else "var(--bad)"
        tint = round(10 + 60 * min(1.0, max(0.0, share))) if math.isfinite(share) else 0
        style = f"background: color-mix(in srgb, {color} {tint}%, transparent)"
        return f'<td style="{style}">{cells[name]:,.0f}<small>{share:.0%}</small></td>'

    right, wrong = (cells["tp"] / positive if positive else 0.0), (cells["tn"] / negative if negative else 0.0)
    f1 = 2 * right * wrong / (right + wrong) if right + wrong else 0.0
    body = (
        f'<tr><th scope="row">right</th>{cell("tp", positive)}{cell("fn", positive)}</tr>'
        f'<tr><th scope="row">wrong</th>{cell("fp", negative)}{cell("tn", negative)}</tr>'
    )
    note = f"harmonic mean of the two class accuracies: {f1:.3f}"
    cells_html = table(("truth", "it says right", "it says wrong"), body)
    return f'<figure class="confusion"><h4>{escape(title)}</h4>{cells_html}<p>{note}</p></figure>'


def _time_bar(scope: str, seconds: Mapping[str, float], color: Mapping[str, int], longest: float) -> str:
    own = sum(seconds.values())
    parts = "".join(
        f'<i class="tone{color[phase]}" style="flex: {value:.6g}" title="{escape(f"{phase}: {value:,.1f} s")}"></i>'
        for phase, value in seconds.items()
        if value > 0
    )
    width = 100 * own / longest if longest > 0 else 0
    return (
        f'<div class="timebar"><span>{escape(scope)}</span><div><div style="width: {width:.2f}%">{parts}</div></div>'
        f"<span>{duration(own)}</span></div>"
    )


def _is_number(value: Any) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return abs(value) < LARGEST


def _mean(values: Sequence[float]) -> float:
    """Returns a mean. Each value is divided first: the sum of very large ones is not finite."""
    return sum(value / len(values) for value in values)
