"""Shows samples in a run's report: rollouts with their reasoning steps, and episodes as the conversations they were."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby, pairwise
from typing import Any

from megatron_rl.types import Author

MAX_SAMPLES = 2  # rollouts shown for each role, end of the run and outcome; episodes for each end and outcome
MAX_CHARACTERS = 20000  # longer texts are cut
MAX_OPEN = 1500  # characters; longer turns of a conversation are folded
_MARKS = {1: ("right", "✓ correct"), -1: ("wrong", "✗ incorrect"), None: ("unread", "no verdict")}
# Calls of tools in the forms that models write them: in tags, or as a block of code. The last one may be cut short.
_CALL = re.compile(
    r"<(tool_call|function_call|function|tool|python|calculator|code|bash|search|query)\b[^<>]*>.*?(?:</\1>|\Z)"
    r"|```.*?(?:```|\Z)",
    re.DOTALL,
)
_ABOUT_EPISODES = (
    '<p class="about">Episodes of the first turns (early) and of the last ones (late), two of each outcome; a click '
    'unfolds one. <span class="said answer">what a model wrote</span> '
    '<span class="said environment">what it was told</span> '
    '<span class="call">a call of a tool</span></p>'
)
Row = Mapping[str, Any]  # of a turn's file, as store.read_rows gives it


@dataclass(slots=True)
class RolloutEnds:
    """The rollouts of one role from both ends of a run. `late` is empty when there is only one turn."""

    early: list[dict[str, Any]] = field(default_factory=list)
    late: list[dict[str, Any]] = field(default_factory=list)


def samples(rollouts: Mapping[str, RolloutEnds]) -> str:
    """Returns HTML of some rollouts by role from both ends of a run. Episodes come first, each with all of its seats,
    whatever roles these have."""
    any_late = any(ends.late for ends in rollouts.values())
    blocks = _episodes("early", [row for ends in rollouts.values() for row in ends.early], shown=not any_late)
    blocks += _episodes("late", [row for ends in rollouts.values() for row in ends.late], shown=True)
    blocks = [_ABOUT_EPISODES, *blocks] if blocks else []
    for role, ends in rollouts.items():
        for when, rows in (("early", ends.early), ("late", ends.late)):
            alone = [row for row in rows if not _talks(row)]
            for outcome in (True, False, None):
                chosen = [row for row in alone if _is_right(row) is outcome]
                several = sorted(chosen, key=lambda row: not row["steps"])[:MAX_SAMPLES]  # rollouts with steps first
                shown = when == "late" or not ends.late
                blocks += [_sample(role, when, row, is_open=shown and place == 0) for place, row in enumerate(several)]
    return "\n".join(blocks)


def split_steps(text: str, steps: Sequence[str]) -> list[tuple[int | None, str]]:
    """Cuts `text` at its reasoning steps into (step number, its text) and (None, text between steps), in order.

    Joined, the parts give `text`, unless a step is not found in it, as a tokenizer may decode parts differently. Such a
    step is inserted where it was due.
    """
    parts: list[tuple[int | None, str]] = []
    place = 0
    for number, step in enumerate(steps):
        found = text.find(step, place)
        if found > place:
            parts.append((None, text[place:found]))
        parts.append((number, step))
        place = found + len(step) if found >= 0 else place
    if place < len(text):
        parts.append((None, text[place:]))
    return parts


def num_answers(row: Row) -> int | None:
    """Returns how often a seat answered; None for a row that is no conversation."""
    return sum(own[0]["author"] != Author.ENVIRONMENT for own in _turns(row)) if _talks(row) else None


def _talks(row: Row) -> bool:
    """Returns whether the row is shown as a conversation: it has a seat, or an environment spoke after its prompt."""
    return row["seat"] is not None or any(piece["author"] == Author.ENVIRONMENT for piece in row["pieces"] or [])


def _turns(row: Row) -> list[list[Row]]:
    """Returns the pieces of each answer, and of what the environment said between answers, in order."""
    pieces = row["pieces"] or []
    return [list(own) for _, own in groupby(pieces, key=lambda piece: piece["author"] == Author.ENVIRONMENT)]


def _episodes(when: str, rows: Sequence[Row], *, shown: bool) -> list[str]:
    """Returns the HTML of some episodes of each outcome. Rows of one turn and episode belong together; a row without an
    episode is one by itself. `shown`: the first of each outcome is unfolded."""
    found: dict[tuple[int, str | int], list[Row]] = {}
    for number, row in enumerate(rows):
        if _talks(row):
            found.setdefault((row["turn"], number if row["episode"] is None else row["episode"]), []).append(row)
    blocks = []
    for outcome in (True, False, None):
        chosen = [seats for seats in found.values() if _outcome(seats) is outcome][:MAX_SAMPLES]
        blocks += [_episode(when, seats, is_open=shown and place == 0) for place, seats in enumerate(chosen)]
    return blocks


def _outcome(seats: Sequence[Row]) -> bool | None:
    """Returns whether an episode ended well for all of its seats of which that is known; None where they differ."""
    known = {right for row in seats if (right := _is_right(row)) is not None}
    return known.pop() if len(known) == 1 else None


def _episode(when: str, seats: Sequence[Row], *, is_open: bool) -> str:
    roles = ", ".join(dict.fromkeys(row["role"] for row in seats))
    first = seats[0]
    named = "" if first["episode"] is None else f" · episode {first['episode']}"
    about = next((row for row in seats if row["question"] or row["answer"]), first)
    extra = [("Question", about["question"]), ("Answer", about["answer"])]
    differ = len({_is_right(row) for row in seats} - {None}) > 1
    tag = _tag(_outcome(seats), unknown="seats differ" if differ else "not graded")
    return (
        f'<details class="sample episode"{" open" if is_open else ""}>'
        f"<summary>{tag} {when} {escape(roles)} · {escape(_title(about))}</summary>"
        f'<p class="meta">turn {first["turn"] + 1}{escape(named)}</p>{_lines(extra)}'
        f"{''.join(map(_seat, seats))}</details>"
    )


def _seat(row: Row) -> str:
    """Returns one seat's conversation: its facts, its prompt, and what it and its environment said, in order."""
    name = escape(row["seat"] or row["role"])
    of = f" <small>{escape(row['role'])}</small>" if row["seat"] not in (None, row["role"]) else ""
    most, answers = _most(row["pieces"] or []), num_answers(row)
    turns, number = [], 0
    for own in _turns(row):
        is_answer = own[0]["author"] != Author.ENVIRONMENT
        number += is_answer
        if is_answer or "".join(piece["text"] for piece in own).strip():  # else it is the frame of a chat template
            who = f"answer {number} of {answers}" if is_answer else "environment"
            turns.append(_turn(who, own, most, kind="answer" if is_answer else "environment"))
    return (
        f'<div class="seat"><h3>{name}{of}</h3><p class="meta">{escape(" · ".join(_facts(row)))}</p>{_legend(most)}'
        f"{_hidden([('Prompt', row['prompt'])])}{''.join(turns)}{_hidden([('Review by the verifier', row['review'])])}"
        "</div>"
    )


def _turn(who: str, pieces: Sequence[Row], most: float, *, kind: str) -> str:
    """Returns one turn of a conversation. `most`: the largest advantage of the seat, see `_most`."""
    tokens, text = sum(piece["tokens"] for piece in pieces), "".join(piece["text"] for piece in pieces)
    credit = {piece["advantage"] for piece in pieces} - {None}
    facts = [who, _counted(tokens), *([f"advantage {credit.pop():+.2f}"] if most and len(credit) == 1 else [])]
    words = f'<div class="words">{_credited(pieces, most)}</div>'
    if len(text) > MAX_OPEN:
        words = f"<details><summary>{escape(text[:120])} … ({len(text)} characters)</summary>{words}</details>"
    return f'<div class="said {kind}"><p class="who">{" · ".join(facts)}</p>{words}</div>'


def _credited(pieces: Sequence[Row], most: float) -> str:
    """Returns the text of pieces as HTML: each in the colour of its advantage, a partner's set apart, and with calls of
    tools framed, which may go over several pieces."""
    text = "".join(piece["text"] for piece in pieces)
    ends = [0]
    for piece in pieces:
        ends.append(ends[-1] + len(piece["text"]))
    calls = [match.span() for match in _CALL.finditer(text)] if pieces[0]["author"] != Author.ENVIRONMENT else []
    opening, closing = {start for start, _ in calls}, {end for _, end in calls}
    closing |= {MAX_CHARACTERS for start, end in calls if start < MAX_CHARACTERS < end}  # it is cut there
    places = sorted({*ends, *opening, *closing, min(MAX_CHARACTERS, len(text))})
    out, number = [], 0
    for start, end in pairwise(place for place in places if place <= MAX_CHARACTERS):
        while ends[number + 1] <= start:
            number += 1
        words = _coloured_words(text[start:end], pieces[number], most)
        opens, closes = '<span class="call">' * (start in opening), "</span>" * (end in closing)
        out.append(opens + words + closes)
    more = len(text) - MAX_CHARACTERS
    return "".join(out) + (f" … ({more} more characters)" if more > 0 else "")


def _coloured_words(text: str, piece: Row, most: float) -> str:
    if piece["author"] == Author.PARTNER:
        return f'<span class="partner" title="written by a partner">{escape(text)}</span>'
    if not most or piece["advantage"] is None:
        return escape(text)
    return f'<span style="{_colour(piece["advantage"], most)}" title="{piece["advantage"]:+.3g}">{escape(text)}</span>'


def _colour(advantage: float, most: float) -> str:
    name = "var(--good)" if advantage > 0 else "var(--bad)"
    share = round(60 * min(1.0, abs(advantage) / most))
    return f"background: color-mix(in srgb, {name} {share}%, transparent)"


def _most(pieces: Sequence[Row]) -> float:
    """Returns the largest size of an advantage where they differ; else 0, as then no colour is needed."""
    found = {piece["advantage"] for piece in pieces} - {None}
    return max(map(abs, found)) if len(found) > 1 else 0.0


def _legend(most: float) -> str:
    """Returns the key to the colours; nothing where there are none."""
    if not most:
        return ""
    marks = "".join(f'<span style="{_colour(a, most)}">{a:+.2f}</span>' for a in (-most, -most / 2))
    marks += "<span>0</span>" + "".join(f'<span style="{_colour(a, most)}">{a:+.2f}</span>' for a in (most / 2, most))
    return f'<p class="legend">advantage of each token: {marks}</p>'


def _sample(role: str, when: str, row: Row, *, is_open: bool) -> str:
    facts = [f"turn {row['turn'] + 1}", *_facts(row)]
    extra = [("Question", row["question"]), ("Answer", row["answer"])]
    hidden = [("Prompt", row["prompt"]), ("Review by the verifier", row["review"])]
    pieces = row["pieces"] or []
    most = _most(pieces)
    body = _credited(pieces, most) if pieces else _coloured(row)
    return (
        f'<details class="sample"{" open" if is_open else ""}>'
        f"<summary>{_tag(_is_right(row))} {when} {escape(role)} · {escape(_title(row))}</summary>"
        f'<p class="meta">{escape(" · ".join(facts))}</p>{_lines(extra)}{_legend(most)}'
        f'<div class="text">{body}</div>{_hidden(hidden)}</details>'
    )


def _facts(row: Row) -> list[str]:
    """Returns a rollout's length, stop, weights, rewards by name and advantage, as far as it has them."""
    rewards = "  ".join(f"{name} {value:.3g}" for name, value in row["rewards"].items())
    advantage = f"advantage {row['advantage']:+.2f}" if row["advantage"] is not None else ""
    own = {piece["advantage"] for piece in row["pieces"] or []} - {None}
    if len(own) > 1:
        advantage = f"advantages from {min(own):+.2f} to {max(own):+.2f}"
    facts = (_counted(row["num_tokens"]), f"stop: {row['stop']}", f"weights {row['version']}", rewards, advantage)
    return [fact for fact in facts if fact]


def _counted(tokens: int) -> str:
    return f"{tokens} token" if tokens == 1 else f"{tokens} tokens"


def _tag(right: bool | None, *, unknown: str = "not graded") -> str:
    kind, mark = _MARKS[{True: 1, False: -1, None: None}[right]]
    return f'<span class="tag {kind}">{unknown if right is None else mark}</span>'


def _title(row: Row) -> str:
    return (row["question"] or row["group"] or "")[:120]


def _lines(named: Iterable[tuple[str, str | None]]) -> str:
    return "".join(f"<p><b>{name}</b> {escape(_cut(value))}</p>" for name, value in named if value)


def _hidden(named: Iterable[tuple[str, str | None]]) -> str:
    return "".join(
        f"<details><summary>{name}</summary><pre>{escape(_cut(value))}</pre></details>"
        for name, value in named
        if value
    )


def _coloured(row: Row) -> str:
    """Returns the text as HTML, with each step in the colour of its verdict and its advantage behind it."""
    steps, verdicts, advantages = row["steps"] or [], row["verdicts"] or [], row["step_advantages"] or []
    matching = len(verdicts) == len(steps)
    parts = []
    for number, text in split_steps(row["text"], steps):
        if number is None:
            parts.append(escape(_cut(text)))
            continue
        kind, mark = _MARKS[verdicts[number]] if matching else _MARKS[None]
        badge = f"{mark}  A {advantages[number]:+.2f}" if number < len(advantages) else mark
        parts.append(f'<span class="step {kind}">{escape(_cut(text))}<span class="badge">{badge}</span></span>')
    if verdicts and not matching:
        parts.append(f'<span class="meta">\n{len(verdicts)} verdicts for {len(steps)} steps: no step rewards</span>')
    return "".join(parts)


def _is_right(row: Row) -> bool | None:
    """Returns the `correct` column; where it is empty, whether the reward `outcome` (or the only one) is above 0.5."""
    if row["correct"] is not None:
        return row["correct"]
    rewards = row["rewards"]
    value = rewards.get("outcome", next(iter(rewards.values())) if len(rewards) == 1 else None)
    return None if value is None else value > 0.5


def _cut(text: str) -> str:
    return (
        text
        if len(text) <= MAX_CHARACTERS
        else f"{text[:MAX_CHARACTERS]} … ({len(text) - MAX_CHARACTERS} more characters)"
    )
