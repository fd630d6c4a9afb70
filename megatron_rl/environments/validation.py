"""Checks the values that an environment returns: requests and ends of episodes.

Each error names the value and what to return instead.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import get_args

from megatron_rl.config.base import ConfigError
from megatron_rl.environments.episode_types import (
    EnvironmentFailure,
    Episode,
    EpisodeEnd,
    FailureKind,
    NextRequest,
    Tool,
)
from megatron_rl.lib.user_code import place_of, traceback_of
from megatron_rl.rewards.reward_functions import LARGEST, finite, in_range
from megatron_rl.texts.chat_template import QUOTED
from megatron_rl.types import AGENT, Outcome

MESSAGE = '{"role": "user", "content": "..."}'  # example of a chat message, quoted in error messages
SHOWN = 500  # maximum number of characters that are kept of the reason why an episode failed
RESERVED = (AGENT, "episode", "verdicts", "review")  # payload keys that only the run itself may set


def checked_requests(result: object, *, of: str) -> Sequence[NextRequest]:
    """Returns `result` if it is a list or tuple of NextRequest. Raises EnvironmentFailure for any other value.

    `of`: the name of the environment's method that returned `result`, begin or step.
    """
    if isinstance(result, (list, tuple)) and all(isinstance(request, NextRequest) for request in result):
        return result
    raise EnvironmentFailure(
        f"its {of} returned {_shown(result)}: return a list of NextRequest, one for each agent that speaks next, or "
        "EpisodeEnd"
    )


def check_request(
    request: NextRequest, roles: Collection[str], spoke_as: Mapping[str, str], waiting: Collection[str]
) -> None:
    """Checks one request of an environment.

    `roles`: the roles that the recipe has agents for. `spoke_as`: {agent: role} of the episode's agents so far.
    `waiting`: the agents whose answers are pending. Raises EnvironmentFailure if the request is malformed, and
    ConfigError if the role of the request is not in `roles`.
    """
    if wrong := _wrong_request(request, spoke_as, waiting):
        raise EnvironmentFailure(wrong)
    if request.role not in roles:
        raise ConfigError(
            f"recipe.args.agents names {', '.join(roles)}, and the environment lets agent {request.agent!r} speak with "
            f"the role {request.role!r}: name that role in recipe.args.agents (recipe.args.role of TangoAgents), or "
            "give NextRequest.role one of those"
        )


def checked_end(over: EpisodeEnd, agents: Mapping[str, int]) -> EpisodeEnd:
    """Validates an EpisodeEnd. Returns a copy in which rewards are floats and the payload consists of JSON values.

    `agents`: {agent: number of the agent's answers}. In the copy, a failure of the kind "policy" has the outcome SCORE,
    and any other failure has no rewards and no answers. Raises EnvironmentFailure if the outcome, rewards, answers or
    payload are invalid, or if no agent answered because all prompts were too long.
    """
    if over.failure not in (None, *get_args(FailureKind)):
        raise EnvironmentFailure(
            f"EpisodeEnd.failure is {_shown(over.failure)}: give {' or '.join(get_args(FailureKind))}, or None"
        )
    if isinstance(over.outcome, Outcome) and over.outcome is not Outcome.SCORE:
        over = replace(over, why=str(over.why)[:SHOWN])
        if over.failure != "policy":
            return replace(over, rewards={}, answers={})
        over = replace(over, outcome=Outcome.SCORE)
    else:
        over = replace(over, failure=None)
    if wrong := _wrong_end(over, agents):
        raise EnvironmentFailure(wrong)
    try:
        payload = json.loads(json.dumps(dict(over.payload), ensure_ascii=False, allow_nan=False).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvironmentFailure(
            f"EpisodeEnd.payload cannot be kept as JSON ({error}): give texts, numbers, lists"
        ) from None
    rewards = {
        agent: {str(name): number for name, value in values.items() if (number := finite(value)) is not None}
        for agent, values in over.rewards.items()
    }
    return replace(over, rewards=rewards, payload=payload)


def failed(error: Exception, prefix: str = "") -> EpisodeEnd:
    """Returns the EpisodeEnd of an episode in which the exception `error` was raised.

    Its field `why` consists of the text `prefix` and the error message (both truncated if they are long), and the
    location of the error in the environment's code.
    """
    place = place_of(error)
    try:
        why, trace = f"{prefix}{type(error).__name__}: {error}", traceback_of(error)
    except Exception:  # converting the exception to text may raise any exception
        why, trace = f"{prefix}{type(error).__name__}", ""
    kind = error.kind if isinstance(error, EnvironmentFailure) else "infrastructure"
    why = why[:SHOWN] + (f" ({place})" if place else "")
    return EpisodeEnd(outcome=Outcome.ERROR, why=why, failure=kind, trace=trace)


def refused(error: EnvironmentFailure) -> EpisodeEnd:
    """Returns the EpisodeEnd of an environment that returned a malformed value. The episode is not played again."""
    return EpisodeEnd(outcome=Outcome.ERROR, why=str(error), failure=None)


def with_rewards(
    episode: Episode, names: Collection[str], roles: Collection[str], *, graded: str, lowest: float
) -> Episode:
    """Checks that each sample whose role is in `roles` has every reward in `names`. If so, returns the episode.

    If rewards are missing and the failure kind of the episode is "policy", sets the missing rewards to `lowest`. If
    rewards are missing in any other episode, returns an episode with the outcome ERROR and no samples. `graded`: name
    of the reward that the run's reward function gives later to the texts in EpisodeEnd.answers. For agents with such a
    text, this reward does not count as missing.
    """
    if episode.failure == "policy":
        rollouts = []
        for rollout in episode.rollouts:
            to_come = [graded] if rollout.payload[AGENT] in episode.answers else []
            missing = {name: lowest for name in names if name not in to_come} if rollout.role in roles else {}
            rollouts.append(replace(rollout, rewards={**missing, **rollout.rewards}))
        return replace(episode, rollouts=rollouts)
    for rollout in episode.rollouts:
        agent = rollout.payload[AGENT]
        present = {*rollout.rewards, *([graded] if agent in episode.answers else [])}
        missing = [name for name in names if name not in present]
        if rollout.role in roles and missing:
            cure = (
                f"return a text for it in EpisodeEnd.answers, which becomes {graded!r}" if missing == [graded] else ""
            )
            why = (
                f"agent {agent!r} has no reward {missing[0]!r}, only {', '.join(map(repr, sorted(present))) or 'none'}"
                f": {cure or 'return it in EpisodeEnd.rewards'}, or name others in recipe.args.rewards"
            )
            return replace(episode, rollouts=(), answers={}, outcome=Outcome.ERROR, why=why)
    return episode


def check_agents(episodes: Sequence[Episode], agents: Mapping[str, int]) -> None:
    """Raises ConfigError if a role had more agents in an episode than the recipe's `agents` ({role: number}) allows.

    With more agents, the estimates of `megatron-rl plan` and means over agents would be wrong.
    """
    for episode in episodes:
        agents_of_role: dict[str, list[str]] = {}
        for rollout in episode.rollouts:
            named = agents_of_role.setdefault(rollout.role, [])
            if (agent := str(rollout.payload[AGENT])) not in named:
                named.append(agent)
        for role, named in agents_of_role.items():
            if len(named) > agents[role]:
                raise ConfigError(
                    f"recipe.args.agents gives the role {role!r} {agents[role]} in an episode, and one of the "
                    f"environment had {len(named)}, {', '.join(named)}: write {len(named)}"
                )


def _wrong_request(request: NextRequest, spoke_as: Mapping[str, str], waiting: Collection[str]) -> str:
    """Returns a description of the error in a request, or "" if the request is valid."""
    for name in ("agent", "role"):
        if not isinstance(value := getattr(request, name), str) or not value or _broken_text(value):
            return f"NextRequest.{name} is {_shown(value)}: give a text"
    agent = f"agent {request.agent!r}"
    if spoke_as.get(request.agent, request.role) != request.role:
        return (
            f"{agent} has the role {request.role!r}, and had the role {spoke_as[request.agent]!r} before: an agent "
            "keeps its role; let the other role speak from an agent of its own"
        )
    if request.agent in waiting:
        return f"{agent} is asked again before it has answered: return one NextRequest for each agent"
    if request.agent not in spoke_as and not request.messages:
        return f"{agent} was told nothing: its first NextRequest needs a message, such as {MESSAGE}"
    limit, lists = request.max_tokens, (list, tuple)
    for name, good, cure in (
        ("stop", lambda text: isinstance(text, str) and text, "texts that are not empty"),
        ("messages", lambda message: True, f"messages, such as [{MESSAGE}]"),
        ("tools", lambda tool: isinstance(tool, Tool), "objects whose classes inherit from Tool"),
    ):
        if not isinstance(value := getattr(request, name), lists) or not all(map(good, value)):
            return f"the NextRequest of {agent} has {name} = {_shown(value)}: give a list of {cure}"
    if limit is not None and (type(limit) is not int or limit < 1):
        return (
            f"the NextRequest of {agent} has max_tokens = {_shown(limit)}: give a whole number of at least 1, or None"
        )
    wrong = ((place, _wrong_message(message)) for place, message in enumerate(request.messages))
    return next((f"message {place} to {agent} {why}" for place, why in wrong if why), "")


def _wrong_message(message: object) -> str:
    """Returns a description of the error in a message, or "" if the message is valid."""
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


def _wrong_end(over: EpisodeEnd, agents: Mapping[str, int]) -> str:
    """Returns a description of the error in an EpisodeEnd, or "" if the EpisodeEnd is valid."""
    if not isinstance(over.outcome, Outcome):
        return f"EpisodeEnd.outcome is {_shown(over.outcome)}: give one of megatron_rl.types.Outcome"
    for name in ("rewards", "answers", "payload"):
        if not isinstance(value := getattr(over, name), Mapping):
            return f"EpisodeEnd.{name} is {_shown(value)}: give a mapping"
    if unknown := sorted((set(over.rewards) | set(over.answers)) - set(agents), key=str):
        return (
            f"it gives rewards to {', '.join(map(str, unknown))}, and no such agent spoke: those of this episode are "
            f"{', '.join(agents) or 'none'}"
        )
    for agent, text in over.answers.items():
        if wrong := _broken_text(text) if isinstance(text, str) else f"is {_shown(text)}: give a text":
            return f"EpisodeEnd.answers of agent {agent!r} {wrong}"
    if agents and not any(agents.values()):
        return (
            f"no agent had room for an answer: what {', '.join(agents)} is told first has more tokens than "
            "roles.NAME.max_prompt_tokens; raise that, or shorten the messages"
        )
    if taken := [name for name in RESERVED if name in over.payload]:
        return f"EpisodeEnd.payload has the name {taken[0]!r}, which the run writes itself: choose another"
    for agent, value in over.rewards.items():
        if not isinstance(value, Mapping):
            return (
                f"the rewards of agent {agent!r} are {_shown(value)}: give them by name, such as "
                f"{{{agent!r}: {{'won': 1.0}}}}"
            )
        numbers = {name: finite(value) for name, value in value.items()}
        if wrong := [name for name, number in numbers.items() if number is None or not in_range(number)]:
            return (
                f"the reward {wrong[0]!r} of agent {agent!r} is {_shown(value[wrong[0]])}: give a finite number, or "
                f"end the episode with Outcome.ERROR where there is none; the largest is {LARGEST:g}"
            )
    return ""


def _broken_text(text: str) -> str:
    """Returns a description of the error if a text cannot be encoded as UTF-8, otherwise ""."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"has half of a character at {error.start}, which no tokenizer and no file takes: read it as UTF-8"
    return ""


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # `repr` of an environment's object may raise any exception
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."
