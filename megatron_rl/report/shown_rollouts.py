"""Selects rollouts of runs for a report. The page gets a small index, by which it filters rollouts, and the HTML of the
rollouts in compressed chunks."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

from megatron_rl.report.curves import rounded_float
from megatron_rl.report.html_page import as_json, shortened, templates, visible
from megatron_rl.report.reading import WINDOW
from megatron_rl.rewards.verdicts import final_verdict
from megatron_rl.session.run_record import RunRecord
from megatron_rl.types import Author, is_correct

MAX_ROLLOUTS = 4000  # default maximum number of rollouts of all runs together
# Maximum number of iterations whose rollouts are read, for all runs together.
# This maximum is raised if more than 16 * MAX_FILES rollouts are requested.
MAX_FILES = 400
CHUNK = 64  # number of rollouts whose HTML is compressed together
MAX_CHARACTERS = 20_000  # maximum length of a text; longer texts are truncated
# Maximum number of characters of the question, and of the model's text, in the title line of a rollout on the page
SHOWN_CHARACTERS = 160
MAX_PIECES = 400  # maximum number of pieces of a conversation that the page shows
# Pattern of tool calls as models write them: in tags, or as a block of code. The last call may be cut short.
CALL = re.compile(
    r"<(tool_call|function_call|function|tool|python|calculator|code|bash|search|query)\b[^<>]*>.*?(?:</\1>|$)"
    r"|```.*?(?:```|$)", re.DOTALL,
)  # fmt: skip
Row = Mapping[str, Any]  # a rollout as store.read_rows returns it


@dataclass(slots=True)
class Index:
    """The columns by which the page filters rollouts. In integer columns, -1 means None.

    `run`, `iteration`: index of the run, and of the iteration. `role`, `agent`: indices in `roles` and `agents`.
    `episode`: index of the episode on the page. `outcome`: 1 for a correct rollout, 0 for a wrong one. `says`: the
    verifier's final verdict on the solution: 1 for correct, 0 for wrong, 2 for unreadable. `truth`: 1 if the solution
    is correct, 0 if it is wrong. `length`: number of tokens that models generated. `steps`: number of reasoning steps.
    `reward` and `advantage`: floats or None.
    """

    columns: dict[str, list[Any]] = field(default_factory=dict)
    roles: dict[str, int] = field(default_factory=dict)
    agents: dict[str, int] = field(default_factory=dict)
    episodes: dict[tuple[int, int, str], int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.columns.get("run", ()))

    def add(self, run: int, row: Row, threshold: float | None) -> dict[str, Any]:
        """Adds the values of a rollout to the columns, and returns them as {column: value}. `run`: index of the
        rollout's run. `threshold`: score above which an answer is correct."""
        says, truth = opinion(row, threshold)
        episode, agent = row["episode"], row["agent"]
        values = {
            "run": run,
            "iteration": row["iteration"],
            "role": self.roles.setdefault(row["role"], len(self.roles)),
            "agent": -1 if agent is None else self.agents.setdefault(agent, len(self.agents)),
            "episode": -1
            if episode is None
            else self.episodes.setdefault((run, row["iteration"], episode), len(self.episodes)),
            "reward": _finite(main_reward(row["rewards"])),
            "outcome": _flag(rollout_is_correct(row, threshold)),
            "says": says,
            "truth": _flag(truth),
            "length": row["num_tokens"] or 0,
            "steps": len(row["steps"] or ()),
            "advantage": _finite(row["advantage"]),
        }
        for name, value in values.items():
            self.columns.setdefault(name, []).append(value)
        return values

    def plain(self, runs: Sequence[str]) -> dict[str, Any]:
        """Returns the columns, and the names to which their indices refer, in the format of the page's scripts. `runs`:
        names of the runs."""
        names = {"roles": self.roles, "agents": self.agents, "runs": runs}
        return {**self.columns, **{key: [*map(visible, labels)] for key, labels in names.items()}, "chunk": CHUNK}


@dataclass(slots=True)
class Picked:
    """The rollouts that a page shows, and counts of the texts that were graded correct among these rollouts."""

    index: Index = field(default_factory=Index)
    # each item has the HTML of CHUNK rollouts, as a JSON list that is compressed by gzip and encoded as base64
    chunks: list[str] = field(default_factory=list)
    # {(role, text of the answer, the data set's correct answer): number of correct answers in the last iterations}
    correct: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    files: int = 0  # number of files of rollouts
    read: int = 0  # number of files that were read
    seen: int = 0  # number of rollouts in the files that were read

    def blocks(self, runs: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yields the blocks of data for the page's scripts. Yields nothing if there are no rollouts. `runs`: names of
        the runs."""
        if len(self.index):
            yield "rollouts-data", as_json(self.index.plain(runs))
        for number, chunk in enumerate(self.chunks):
            yield f"texts-{number}", chunk


def pick(records: Sequence[RunRecord], most: int = MAX_ROLLOUTS) -> Picked:
    """Selects about `most` rollouts. The selected iterations are evenly spaced over each run, including the first and
    the last iteration. Within an iteration, whole groups (all samples of a prompt) are selected."""
    picked, waiting = Picked(), list[str]()
    render: Any = templates().get_template("rollout.html").module
    for place, record in enumerate(records):
        files, threshold = record.iteration_files(), record.threshold()
        count = max(2, max(MAX_FILES, most // 16) // len(records))  # number of files to read per run
        spaced = (files[round(i * (len(files) - 1) / (count - 1))] for i in range(count))
        chosen = files if len(files) <= count else [*spaced]
        quota = max(1, most // (len(records) * max(1, len(chosen))))
        picked.files += len(files)
        for number, path in enumerate(chosen):
            rows = [row for row in record.rollouts(path) if row["text"] is not None]
            picked.read += bool(rows)
            picked.seen += len(rows)
            for row in _groups(rows, quota):
                columns = picked.index.add(place, row, threshold)
                if number >= (1 - WINDOW) * len(chosen) and _is_correct_answer(row, threshold):
                    picked.correct[row["role"], row["text"].strip()[:MAX_CHARACTERS], row["answer"]] += 1
                waiting.append(render.rollout({**columns, **details(row)}))
                if len(waiting) == CHUNK:
                    picked.chunks.append(_packed(waiting))
                    waiting.clear()
    if waiting:
        picked.chunks.append(_packed(waiting))
    return picked


def rollout_is_correct(row: Row, threshold: float | None) -> bool | None:
    """Returns whether a rollout is correct, or None if this is unknown.

    The result is the column `correct`. If this column is empty, the result is whether the reward `outcome`, or the
    rollout's only reward, means a correct answer (see types.is_correct).

    `threshold`: see RunRecord.threshold.
    """
    if row["correct"] is not None:
        return row["correct"]
    rewards = row["rewards"]
    value = rewards.get("outcome", next(iter(rewards.values())) if len(rewards) == 1 else None)
    if value is None or (threshold is not None and math.isnan(threshold)):
        return None
    return is_correct(value, threshold)


def opinion(row: Row, threshold: float | None) -> tuple[int, bool | None]:
    """Returns (a verifier's final verdict on a solution, whether the solution is correct). The first value is 1 for
    correct, 0 for wrong, 2 if the verdict is unreadable, and -1 without a verdict. The second is None if unknown.

    `row`: a row of a solution or of a verification. A solution has its verification in the column `review`. A
    verification has a value in the column `verdicts` and none in `review`; its column `correct` is whether the verdict
    agrees with the truth. `threshold`: score above which an answer is correct.
    """
    if row["review"] is not None:
        verdict = final_verdict(row["review"])
        return 2 if verdict is None else int(verdict), rollout_is_correct(row, threshold)
    if row["verdicts"] is None or (verdict := final_verdict(row["text"])) is None:
        return (-1 if row["verdicts"] is None else 2), None
    agrees = row["correct"]
    return int(verdict), None if agrees is None else verdict == agrees


def main_reward(rewards: Mapping[str, float]) -> float | None:
    """Returns the reward that is named "trained". Without it, returns the reward named "outcome", or else the first
    reward. `rewards`: {name: reward}. Returns None if there are no rewards."""
    for name in ("trained", "outcome"):
        if name in rewards:
            return rewards[name]
    return next(iter(rewards.values()), None)


def details(row: Row) -> dict[str, Any]:
    """Returns the details of a rollout that its HTML shows, in addition to the values of the index. Long texts are
    truncated."""
    names = ("group", "question", "answer", "prompt", "stop", "version", "review")
    fields = {name: _cut(row[name]) for name in names}
    fields |= {f"{name}_name": _cut(row[name]) for name in ("role", "agent", "episode")}
    fields["rewards"] = {name: _finite(value) for name, value in row["rewards"].items()}
    fields["verdicts"], fields["steps"] = row["verdicts"] or [], [_cut(step) for step in row["steps"] or ()]
    written = (p["text"] for p in row["pieces"] or () if p["author"] != Author.ENVIRONMENT)
    fields["wrote"] = next(written, row["text"])[:SHOWN_CHARACTERS]
    if not row["pieces"]:
        stepwise = _stepwise(_cut(row["text"]), row["step_advantages"] or (), fields)
        return fields | {"turns": [], "most": 0, "stepwise": stepwise}
    shown = row["pieces"][:MAX_PIECES]
    pieces = [Piece(p["author"], p["tokens"], _finite(p["advantage"]), _cut(p["text"])) for p in shown]
    credits = {piece.advantage for piece in pieces if piece.advantage is not None}
    most = max(map(abs, credits)) if len(credits) > 1 else 0  # one advantage needs no colours
    return fields | {"turns": _conversation(pieces, coloured=bool(most)), "most": most}


class Piece(NamedTuple):
    """A part of a conversation that one author wrote, with one advantage."""

    author: int
    tokens: int
    advantage: float | None
    text: str


def _stepwise(text: str, credit: Sequence[float], fields: Mapping[str, Any]) -> list[tuple[str, str | None, str]]:
    """Splits a solution's text into its steps and the texts between steps. Returns [(text, kind, label)]. The kind of a
    step says how a verifier judged it: "right", "wrong" or "unread". The label shows the verdict and the advantage of
    the step. A text between steps has the kind None and an empty label."""
    steps, verdicts, parts, at = fields["steps"], fields["verdicts"], list[tuple[str, str | None, str]](), 0
    for k, step in enumerate(steps):
        start = text.find(step, at)
        if start > at:
            parts.append((text[at:start], None, ""))
        verdict = verdicts[k] if len(verdicts) == len(steps) else 0
        kind, mark = {1: ("right", "✓ correct"), -1: ("wrong", "✗ incorrect")}.get(verdict, ("unread", "no verdict"))
        worth = f" · advantage {credit[k]:+.3g}" if k < len(credit) else ""
        parts.append((step, kind, f"{mark}{worth}"))
        at = start + len(step) if start >= 0 else at
    return [*parts, (text[at:], None, "")]


def _conversation(pieces: Sequence[Piece], *, coloured: bool) -> list[dict[str, Any]]:
    """Returns the turns of a conversation, in the format of the page's template.

    The key `parts` of a turn has a list of groups (whether this text is in a tool call, parts of the text). A part is
    (text, whether a partner wrote the text, the advantage as text, such as "+0.5"). The advantage is "" if it is
    unknown or if `coloured` is False. Turns of the environment that have no text, but only tokens of the chat template,
    are left out.
    """
    turns, answers = [], 0
    for outside, group in groupby(pieces, key=lambda piece: piece.author == Author.ENVIRONMENT):
        turn_pieces = list(group)
        text, answers = "".join(piece.text for piece in turn_pieces), answers + (not outside)
        if outside and not text.strip():
            continue
        calls = [] if outside else [match.span() for match in CALL.finditer(text)]
        starts, ends = [first for first, _ in calls], list(accumulate(len(piece.text) for piece in turn_pieces))
        parts = []
        for start, end in pairwise(sorted({0, *ends, *(cut for call in calls for cut in call)})):
            piece = turn_pieces[bisect_right(ends, start)]
            begun = bisect_right(starts, start)  # number of tool calls that begin at or before this part
            call = begun if begun and start < calls[begun - 1][1] else None
            advantage = "" if piece.advantage is None or not coloured else f"{piece.advantage:+.3g}"
            parts.append((call, (visible(text[start:end]), piece.author == Author.PARTNER, advantage)))
        tokens = sum(piece.tokens for piece in turn_pieces)
        who = "environment" if outside else f"answer {answers} of"
        turns.append({
            "kind": who.split()[0], "text": text, "who": who, "tokens": f"{tokens} token{'s' * (tokens != 1)}",
            "parts": [(call is not None, [p for _, p in chunk]) for call, chunk in groupby(parts, key=lambda p: p[0])],
        })  # fmt: skip
    return [turn | {"who": f"{turn['who']} {answers}" if turn["kind"] == "answer" else turn["who"]} for turn in turns]


def _cut(value: Any) -> Any:
    return shortened(value, MAX_CHARACTERS) if isinstance(value, str) else value


def _packed(rows: Sequence[str]) -> str:
    payload = json.dumps(rows, separators=(",", ":"), allow_nan=False).encode()
    return base64.b64encode(gzip.compress(payload, 5, mtime=0)).decode()


def _groups(rows: Sequence[dict[str, Any]], quota: int) -> list[dict[str, Any]]:
    """Selects about `quota` rows, equally many of each role. Whole groups (all samples of a prompt) are selected as
    long as they fit; if no group fits, a part of one group is selected."""
    graded = [row for row in rows if row["rewards"]] or rows  # rows of a reward model have no rewards
    roles = {role: list(group) for role, group in groupby(sorted(graded, key=lambda r: r["role"]), lambda r: r["role"])}
    selected: list[dict[str, Any]] = []
    for role_rows in roles.values():
        share, taken = max(1, quota // len(roles)), list[dict[str, Any]]()
        for _, group in groupby(role_rows, key=lambda row: row["group"]):
            members = list(group)
            if taken and len(taken) + len(members) > share:
                break
            taken += members[:share]
        selected += taken
    return selected


def _is_correct_answer(row: Row, threshold: float | None) -> bool:
    """Returns whether the rollout is an answer to a problem with a known answer, not a verification, and correct."""
    is_verification = row["verdicts"] is not None and row["review"] is None
    known = row["question"] is not None and row["answer"] is not None
    return known and not is_verification and rollout_is_correct(row, threshold) is True


def _flag(value: bool | None) -> int:
    return -1 if value is None else int(value)


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else rounded_float(value)
