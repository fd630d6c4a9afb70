"""The types that pass between an environment and the models that act in it: requests, answers, tools, episodes."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.chat_template import QUOTED, Message
from megatron_rl.types import Outcome, Prompt, Rollout, Stop

AGENT = "agent"  # the name in a rollout's payload of the agent that it is the sample of


def quoting(role: str, template: str, **values: str) -> Message:
    """Returns a message whose content is a template with each `{name}` replaced by a quoted text.

    A quoted text was written by somebody else, such as the output of a tool. With the dialogue `text`, control tokens
    take effect in the template and not in quoted texts. With the other dialogues, they take effect in neither.
    """
    content, quoted = "", []
    for part in re.split("(" + "|".join(rf"\{{{name}\}}" for name in values) + ")", template):
        value = values.get(part[1:-1]) if part.startswith("{") else None
        if value is not None:
            quoted.append([len(content), len(content) + len(value)])
        content += part if value is None else value
    return {"role": role, "content": content, QUOTED: quoted}


class EnvironmentFailure(RuntimeError):
    """An environment or a tool failed for a reason that is not the model's fault, such as a server that is down.

    The samples of the episode are dropped and counted. They never get a reward of 0.
    """


class Tool(ABC):
    """A function that models may call. A subclass is a dataclass whose fields are its settings.

    One object serves all episodes, and several threads call it at the same time.
    """

    name: str  # by which a model calls it
    description: str  # what a model is told of it
    parameters: Mapping[str, Any]  # the JSON schema of its arguments, an object's

    @abstractmethod
    def run(self, arguments: Mapping[str, Any]) -> str:
        """Returns the text that the model is told.

        A mistake of the model (wrong arguments, code that raises an error or does not end) is reported as a text, too.
        Raises EnvironmentFailure at once if the tool itself failed. The environment retries; the tool does not.
        """
        ...

    def files(self) -> Mapping[str, str]:
        """Returns {argument: path} of the files that the tool reads. They must exist before a run."""
        return {}

    def load(self) -> None:
        """Loads data that takes long to load. Calls after the first one are no-ops.

        It is called before each batch of episodes, in the process that plays them. Raises ConfigError for files that
        cannot be used.
        """
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a tool that a model wrote."""

    name: str
    arguments: Mapping[str, Any] | None  # None: what the model wrote cannot be read
    id: str | None = None  # by which the answer refers to the call, where the template has such


@dataclass(frozen=True, slots=True, kw_only=True)
class NextRequest:
    """An agent that speaks next. An agent is one participant of one episode; it belongs to the role whose model it
    is."""

    agent: str
    role: str
    messages: Sequence[Message]  # what is new to the agent since it spoke last
    tools: Sequence[Tool] = ()  # offered to the model by the chat template; read at the agent's first request
    stop: Sequence[str] = ()  # texts that end this answer, beside the role's own
    max_tokens: int | None = None  # of this answer; None, or more than that: the role's sampling.max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The answer to a request."""

    agent: str
    text: str  # without special tokens
    calls: Sequence[Call] = ()  # of tools, where the template has a form for them
    stop: Stop | None = Stop.EOS  # None: the conversation has no room for an answer, and the model was not asked
    tokens: int = 0  # that the model wrote


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeEnd:
    """The end of an episode."""

    rewards: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # by agent, by name
    answers: Mapping[str, str] = field(default_factory=dict)  # by agent: a text for the run's reward function to grade
    outcome: Outcome = Outcome.SCORE  # TIMEOUT, ERROR: the samples of all agents are dropped
    why: str = ""  # of another outcome than SCORE
    trace: str = ""  # the traceback, where the environment raised
    payload: Mapping[str, Any] = field(default_factory=dict)  # JSON values that are kept with every agent's sample


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Episode:
    """One episode that was played to its end, or given up."""

    task: Prompt
    number: int  # its place among the episodes of one call
    # The samples of all agents, in the order in which they first spoke; payload["agent"] names the agent, and what the
    # environment gave it stands in the rewards. An agent whose transcript was truncated has several. None unless
    # `outcome` is SCORE.
    rollouts: Sequence[Rollout]
    answers: Mapping[str, str] = field(default_factory=dict)  # by agent: what is still to be graded, see EpisodeEnd
    outcome: Outcome = Outcome.SCORE
    why: str = ""  # of another outcome
    trace: str = ""  # the traceback, where the environment raised
    turns: int = 0  # answers of all agents
    tool_calls: int = 0
    cuts: int = 0  # of transcripts whose template renders the past in another way once a turn follows
    # By agent: the text that it was told before each of its answers; an agent is not named where that is not known.
    told: Mapping[str, Sequence[str]] = field(default_factory=dict)
