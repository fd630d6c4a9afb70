"""Refuses what an environment cannot mean: moves and ends of episodes that are not well formed. Each refusal names the
value and says what to return instead."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_rl.environments.moves import SEAT, EnvironmentFailure, Episode, Move, Over
from megatron_rl.types import Outcome

MESSAGE = '{"role": "user", "content": "..."}'  # as refusals show a message


def checked_moves(result: object, *, of: str) -> Sequence[Move]:
    """Returns the moves that an environment returned. `of`: begin or step. Raises EnvironmentFailure for anything
    else."""
    if isinstance(result, (list, tuple)) and all(isinstance(one, Move) for one in result):
        return result
    raise EnvironmentFailure(
        f"its {of} returned {_shown(result)}: return a list of Move, one for each seat that speaks next, or Over"
    )


def check_move(move: Move, roles: Collection[str], spoke_as: Mapping[str, str], waiting: Collection[str]) -> None:
    """Raises EnvironmentFailure for a move that nobody can make. `roles`: those that may speak; `spoke_as`: the roles
    of the episode's seats so far; `waiting`: seats that are asked and have not answered."""
    own = f"seat {move.seat!r}"
    if move.role not in roles:
        raise EnvironmentFailure(
            f"{own} has the role {move.role!r}; there are {', '.join(roles)}: give Move.role one of them, or name the "
            "role in recipe.args.seats"
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
    for place, message in enumerate(move.messages):
        if wrong := _wrong_message(message):
            raise EnvironmentFailure(f"message {place} to {own} {wrong}")


def checked_end(over: Over, seats: Mapping[str, int]) -> Over:
    """Returns the end of an episode with all rewards as numbers. `seats`: those that were asked, with how often each
    answered. Raises EnvironmentFailure for rewards, answers or a payload that cannot be kept."""
    if over.outcome is not Outcome.SCORE:
        return replace(over, rewards={}, answers={})
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
    if seats and not any(seats.values()):
        raise EnvironmentFailure(
            f"no seat had room for an answer: what {', '.join(seats)} is told first has more tokens than "
            "roles.NAME.max_prompt_tokens; raise that, or shorten the messages"
        )
    try:
        json.dumps(over.payload)
    except (TypeError, ValueError) as error:
        raise EnvironmentFailure(f"Over.payload cannot be kept as JSON ({error}): give texts, numbers, lists") from None
    return replace(over, rewards={seat: _numbers(seat, given) for seat, given in over.rewards.items()})


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


def _wrong_message(message: object) -> str:
    """Returns what is wrong with a message; an empty text where nothing is."""
    if not isinstance(message, Mapping):
        return f"is {_shown(message)}: give a list of messages, such as [{MESSAGE}]"
    if not isinstance(message.get("role"), str):
        return f"has no role: give it as in {MESSAGE}"
    content = message.get("content")
    if isinstance(content, (str, list)) or (content is None and message.get("tool_calls")):
        return ""
    return f"has the content {_shown(content)}: give a text, as in {MESSAGE}"


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
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise EnvironmentFailure(
                f"the reward {name!r} of seat {seat!r} is {_shown(value)}: give a finite number, or end the episode "
                "with Outcome.ERROR where there is none"
            )
        out[str(name)] = number
    return out


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
