"""The conversation of one agent in an episode, and its conversion to training samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_rl.engines.protocol import Completion, EngineError, Sampling
from megatron_rl.environments.dialogue import Dialogue, Exchange, Reply
from megatron_rl.environments.episode_types import Tool
from megatron_rl.texts.chat_template import Message, with_system
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.training.rollouts import continued, from_completion
from megatron_rl.types import Prompt, Rollout


class AgentConversation:
    """The conversation of one agent in one episode, and the training samples made from it.

    Tokens are stored as the engine and the `Dialogue` object returned them; no text is tokenized again. If the next
    prompt cannot be formed by appending tokens to the last answer (`Dialogue.bridge` returns None), the conversation is
    split. The tokens so far become one sample, and the next sample begins with the whole conversation rendered anew.
    """

    def __init__(self, role: str, dialogue: Dialogue, tools: Sequence[Tool], *, system: str | None = None) -> None:
        """`system`: the system message, used if the conversation does not begin with a system message."""
        self.role, self._dialogue, self._tools, self._system = role, dialogue, tools, system
        self.answers = 0
        self.cuts = 0
        # One text for each non-empty answer: the messages that the agent received before the answer
        self.observations: list[str] = []
        self.last_key: int | None = None  # key of the agent's last request to the engine
        self._history: list[Message] = []
        self._heard: list[str] = []  # texts of the messages since the last answer
        self._context = np.empty(0, np.int32)  # [T] prompt of the next or last request
        self._answer = np.empty(0, np.int32)  # [T] tokens of the last answer
        self._ended: list[Rollout] = []
        self._current: Rollout | None = None

    def listen(self, messages: Sequence[Message]) -> np.ndarray:
        """Adds messages to the conversation. Returns the tokens [T] of the agent's next prompt.

        Raises ChatError if the messages cannot be rendered.
        """
        self._heard += [str(message.get("content") or "") for message in messages]
        if self._current is None:
            self._history += messages if self._history else with_system(messages, self._system)
            self._context = self._dialogue.open(self._history, self._tools)
            return self._context
        past = Exchange(prompt=self._context, answer=self._answer, history=self._history, tools=self._tools)
        between = self._dialogue.bridge(past, messages)
        self._history += messages
        if between is None:
            self.cuts += 1
            self._ended.append(self._current)
            self._current = None
            self._context = self._dialogue.open(self._history, self._tools)
        else:
            self._context = np.concatenate([self._context, self._answer, between])
        return self._context

    def say(self, completion: Completion, *, task: Prompt, context: RolloutContext, sampling: Sampling) -> Reply:
        """Adds the completion of the last prompt to the conversation. Returns the parsed completion.

        Raises EngineError if the role is a tandem (a senior and a junior model that write one response together) and
        the completion does not have the author of each token.
        """
        if sampling.tandem is not None and completion.authors is None:
            raise EngineError("an engine sent a tandem's completion without an author for each token")
        turn = from_completion(
            Prompt(id=task.id, tokens=self._context, payload=task.payload),
            completion,
            role=self.role,
            group=task.id,
            version=context.engines[self.role].version,
            partner_weight=context.partner_weights.get(self.role, 0.0),
        )
        self._current = turn if self._current is None else continued(self._current, turn)
        self._answer = completion.tokens
        self.answers += 1
        if len(completion.tokens):
            self.observations.append("\n".join(self._heard))
            self._heard = []
        reply = self._dialogue.read(self._context, completion.tokens, self._tools)
        self._history.append(reply.message)
        return reply

    def rollouts(self) -> list[Rollout]:
        """Returns the training samples of the conversation, in order."""
        return self._ended if self._current is None else [*self._ended, self._current]
