"""Refuses what an environment cannot mean: moves and ends of episodes that are not well formed. Each refusal names the
value and says what to return instead."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_rl.chat import QUOTED
from megatron_rl.config.base import ConfigError
from megatron_rl.environments.moves import SEAT, EnvironmentFailure, Episode, Move, Over, Tool
from megatron_rl.types import Outcome
from megatron_rl.user_code import place_of, traceback_of

MESSAGE = '{"role": "user", "content": "..."}'  # as refusals show a message
SHOWN = 500  # characters of a failure's reason
RESERVED = (SEAT, "episode", "verdicts", "review")  # names in a payload that a run writes itself, and reads


def checked_moves(result: object, *, of: str) -> Sequence[Move]:
    """Returns the moves that an environment returned. `of`: begin or step. Raises EnvironmentFailure for anything
    else."""
    if isinstance(result, (list, tuple)) and all(isinstance(one, Move) for one in result):
        return result
    raise EnvironmentFailure(
        f"its {of} returned {_shown(result)}: return a list of Move, one for each seat that speaks next, or Over"
    )


def check_move(move: Move, roles: Collection[str], spoke_as: Mapping[str, str], waiting: Collection[str]) -> None:
    """Raises EnvironmentFailure for a move that nobody can make, and ConfigError for one of a role that the recipe has
    no seat for. `roles`: those that may speak; `spoke_as`: the roles of the episode's seats so far; `waiting`: seats
    that are asked and have not answered."""
    for name in ("seat", "role"):
        if not isinstance(given := getattr(move, name), str) or not given or _broken_text(given):
            raise EnvironmentFailure(f"Move.{name} is {_shown(given)}: give a text")
    own = f"seat {move.seat!r}"
    if move.role not in roles:
        raise ConfigError(
            f"recipe.args.seats names {', '.join(roles)}, and the environment lets {own} speak with the role "
            f"{move.role!r}: name that role in recipe.args.seats (recipe.args.role of TangoAgents), or give Move.role "
            "one of those"
        )
    if spoke_as.get(move.seat, move.role) != move.role:
        raise EnvironmentFailure(
            f"{own} has the role {move.role!r}, and had the role {spoke_as[move.seat]!r} before: a seat keeps its "
            "role; let the other role speak from a seat of its own"
        )
    if move.seat in waiting:
        raise EnvironmentFailure(f"{own} is asked again before it has answered: return one Move for each seat")
    if move.seat not in spoke_as and not move.messages:
        raise EnvironmentFailure(f"{own} was told nothing: its first Move needs a message, such as {MESSAGE}")
    if wrong := _wrong_limit(move):
        raise EnvironmentFailure(f"the Move of {own} has {wrong}")
    for place, message in enumerate(move.messages):
        if wrong := _wrong_message(message):
            raise EnvironmentFailure(f"message {place} to {own} {wrong}")


def checked_end(over: Over, seats: Mapping[str, int]) -> Over:
    """Returns the end of an episode with all rewards as numbers, and with the payload as JSON reads it back. `seats`:
    those that were asked, with how often each answered. Raises EnvironmentFailure for an outcome, rewards, answers or a
    payload that cannot be kept."""
    if not isinstance(over.outcome, Outcome):
        raise EnvironmentFailure(f"Over.outcome is {_shown(over.outcome)}: give one of megatron_rl.types.Outcome")
    if over.outcome is not Outcome.SCORE:
        return replace(over, rewards={}, answers={}, why=str(over.why)[:SHOWN])
    for name, given in (("rewards", over.rewards), ("answers", over.answers), ("payload", over.payload)):
        if not isinstance(given, Mapping):
            raise EnvironmentFailure(f"Over.{name} is {_shown(given)}: give a mapping")
    if unknown := sorted((set(over.rewards) | set(over.answers)) - set(seats), key=str):
        raise EnvironmentFailure(
            f"it gives rewards to {', '.join(map(str, unknown))}, and no such seat spoke: those of this episode are "
            f"{', '.join(seats) or 'none'}"
        )
    for seat, text in over.answers.items():
        if not isinstance(text, str):
            raise EnvironmentFailure(f"Over.answers of seat {seat!r} is {_shown(text)}: give a text")
        if wrong := _broken_text(text):
            raise EnvironmentFailure(f"Over.answers of seat {seat!r} {wrong}")
    if seats and not any(seats.values()):
        raise EnvironmentFailure(
            f"no seat had room for an answer: what {', '.join(seats)} is told first has more tokens than "
            "roles.NAME.max_prompt_tokens; raise that, or shorten the messages"
        )
    if taken := [name for name in RESERVED if name in over.payload]:
        raise EnvironmentFailure(f"Over.payload has the name {taken[0]!r}, which the run writes itself: choose another")
    try:
        payload = json.loads(json.dumps(dict(over.payload), ensure_ascii=False, allow_nan=False).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvironmentFailure(f"Over.payload cannot be kept as JSON ({error}): give texts, numbers, lists") from None
    rewards = {seat: _numbers(seat, given) for seat, given in over.rewards.items()}
    return replace(over, rewards=rewards, payload=payload)


def failed(error: Exception, before: str = "") -> Over:
    """Returns the end of an episode in which something raised. The reason is cut where it is long, and has `before` in
    front and the place in the environment's code behind."""
    place = place_of(error)
    try:
        why, trace = f"{before}{type(error).__name__}: {error}", traceback_of(error)
    except Exception:  # its own text raises, too
        why, trace = f"{before}{type(error).__name__}", ""
    return Over(outcome=Outcome.ERROR, why=why[:SHOWN] + (f" ({place})" if place else ""), trace=trace)


def refused(error: EnvironmentFailure) -> Over:
    """Returns the end of an episode whose environment returned what cannot be meant."""
    return Over(outcome=Outcome.ERROR, why=str(error))


def with_rewards(episode: Episode, names: Collection[str], roles: Collection[str], graded: str) -> Episode:
    """Returns the episode; as an error, without samples, where a sample of `roles` lacks one of the rewards `names`.
    `graded`: the reward that the run's reward function gives to the texts in Over.answers."""
    for rollout in episode.rollouts:
        seat = rollout.payload[SEAT]
        given = {*rollout.rewards, *([graded] if seat in episode.answers else [])}
        missing = [name for name in names if name not in given]
        if rollout.role in roles and missing:
            cure = f"return a text for it in Over.answers, which becomes {graded!r}" if missing == [graded] else ""
            why = (
                f"seat {seat!r} has no reward {missing[0]!r}, only {', '.join(map(repr, sorted(given))) or 'none'}: "
                f"{cure or 'return it in Over.rewards'}, or name others in recipe.args.rewards"
            )
            return replace(episode, rollouts=(), answers={}, outcome=Outcome.ERROR, why=why)
    return episode


def check_seats(episodes: Sequence[Episode], seats: Mapping[str, int]) -> None:
    """Raises ConfigError for the first episode in which a role had more seats than `seats`, the recipe's, says: plans
    and means over seats would be wrong."""
    for episode in episodes:
        found: dict[str, list[str]] = {}
        for rollout in episode.rollouts:
            named = found.setdefault(rollout.role, [])
            if (seat := str(rollout.payload[SEAT])) not in named:
                named.append(seat)
        for role, named in found.items():
            if len(named) > seats[role]:
                raise ConfigError(
                    f"recipe.args.seats gives the role {role!r} {seats[role]} in an episode, and one of the "
                    f"environment had {len(named)}, {', '.join(named)}: write {len(named)}"
                )


def _wrong_message(message: object) -> str:
    """Returns what is wrong with a message; an empty text where nothing is."""
    if not isinstance(message, Mapping):
        return f"is {_shown(message)}: give a list of messages, such as [{MESSAGE}]"
    if not isinstance(message.get("role"), str):
        return f"has no role: give it as in {MESSAGE}"
    quoted = message.get(QUOTED, [])
    pairs = quoted if isinstance(quoted, (list, tuple)) else [None]
    if not all(isinstance(pair, (list, tuple)) and [type(place) for place in pair] == [int, int] for pair in pairs):
        return f"has {_shown(quoted)} as {QUOTED!r}: make such a message by `quoting`"
    content = message.get("content")
    if isinstance(content, str):
        return _broken_text(content)
    if isinstance(content, list) or (content is None and message.get("tool_calls")):
        return ""
    return f"has the content {_shown(content)}: give a text, as in {MESSAGE}"


def _wrong_limit(move: Move) -> str:
    """Returns what is wrong with the texts that end an answer, its length, or the tools; an empty text where nothing
    is."""
    if not isinstance(move.stop, (list, tuple)) or not all(isinstance(text, str) and text for text in move.stop):
        return f"stop = {_shown(move.stop)}: give a list of texts that are not empty"
    if move.max_tokens is not None and (type(move.max_tokens) is not int or move.max_tokens < 1):
        return f"max_tokens = {_shown(move.max_tokens)}: give a whole number of at least 1, or None"
    if not isinstance(move.messages, (list, tuple)):
        return f"messages = {_shown(move.messages)}: give a list, such as [{MESSAGE}]"
    if not isinstance(move.tools, (list, tuple)) or not all(isinstance(tool, Tool) for tool in move.tools):
        return f"tools = {_shown(move.tools)}: give a list of objects whose classes inherit from Tool"
    return ""


def _broken_text(text: str) -> str:
    """Returns what is wrong with a text that cannot be written as UTF-8; an empty text where nothing is."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"has half of a character at {error.start}, which no tokenizer and no file takes: read it as UTF-8"
    return ""


def _numbers(seat: str, given: Any) -> dict[str, float]:
    """Returns a seat's rewards by name. Raises EnvironmentFailure for one that is no finite number."""
    if not isinstance(given, Mapping):
        raise EnvironmentFailure(
            f"the rewards of seat {seat!r} are {_shown(given)}: give them by name, such as {{{seat!r}: {{'won': 1.0}}}}"
        )
    out = {}
    for name, value in given.items():
        try:
            number = math.nan if isinstance(value, str) else float(value)
        except Exception:  # a tensor of two elements raises RuntimeError, and other objects what they like
            number = math.nan
        if not math.isfinite(number):
            raise EnvironmentFailure(
                f"the reward {name!r} of seat {seat!r} is {_shown(value)}: give a finite number, or end the episode "
                "with Outcome.ERROR where there is none"
            )
        out[str(name)] = number
    return out


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # an object of the environment's may raise what it likes
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."
