"""An adapter for gymnasium environments: observations are converted to messages, and actions are parsed
from answers.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.base import ConfigError, refusing
from megatron_rl.environments.environment import Environment
from megatron_rl.environments.episode_types import EpisodeEnd, NextRequest, Said
from megatron_rl.texts.chat_template import USER
from megatron_rl.texts.tags import block_texts
from megatron_rl.texts.text import fill, read_template

RENDERED = "ansi"  # gymnasium's render mode for text
_COLOURED = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0m")
_INTEGER = r"(?<![\w.])-?\d+(?![\w.]*\d)"


@dataclass(kw_only=True)
class GymnasiumText(Environment):
    """One agent in a gymnasium environment whose actions are a text or a number from a small range.

    The agent gets an observation and answers with an action, until the environment ends or `turns` answers have been
    given. The reward `return` is the sum of the environment's rewards. The environment is reset with the task's `seed`
    if the task has one, so that all episodes of the task begin in the same state. Otherwise it is reset with the
    episode's seed. The task's `options` are passed to `reset`.
    """

    id: str  # id of the environment for gymnasium.make: a name, or module:name
    args: dict[str, Any] = field(default_factory=dict)  # keyword arguments of gymnasium.make
    role: str = "agent"  # role of the agent, also used as the agent's name
    # Template of the first message: a text file or a packaged prompt with {observation}, {actions}, and {question}.
    template: str = "gymnasium"
    observation: str = "{observation}"  # template of later messages
    # message after an answer without a valid action
    unreadable: str = "This names no action. The actions are: {actions}."
    # names of the numbered actions, in order; the agent may also give the number of an action
    actions: tuple[str, ...] = ()
    tag: str | None = None  # the action is inside the last <tag>...</tag>; null: the action is anywhere in the answer
    # Whether the observation is the environment's text rendering (render_mode: ansi), with coloured parts in brackets.
    render: bool = False
    turns: int = 20  # maximum number of answers per episode

    def __post_init__(self) -> None:
        if self.turns < 1:
            raise ConfigError(f"args.turns = {self.turns}: give at least 1")
        with refusing(lambda error: f"args.template: {error}", FileNotFoundError):
            self._template = read_template(self.template)
        with refusing(
            lambda error: f"gymnasium cannot be imported ({error}): run `pip install gymnasium`", ImportError
        ):
            self._gymnasium: Any = importlib.import_module("gymnasium")
        self._world = self._make()
        try:
            self._space = self._world.action_space
            self._named = self._check_actions()
        finally:
            self._world.close()

    def begin(self, task: Mapping[str, Any], seed: int) -> Sequence[NextRequest] | EpisodeEnd:
        self._world, self._return, self._left = self._make(), 0.0, self.turns
        observation, _ = self._world.reset(seed=int(task.get("seed", seed)), options=task.get("options"))
        values = {"question": str(task.get("question", "")), "actions": self._named}
        return self._ask(fill(self._template, **values, observation=self._shown(observation)))

    def step(self, said: Said) -> Sequence[NextRequest] | EpisodeEnd:
        if said.stop is None:
            return self._over()
        self._left -= 1
        action = self._action(said.text)
        if action is None:
            text = fill(self.unreadable, actions=self._named)
            return self._ask(text) if self._left else self._over()
        observation, reward, terminated, truncated, _ = self._world.step(action)
        self._return += float(reward)
        if terminated or truncated or not self._left:
            return self._over()
        return self._ask(fill(self.observation, observation=self._shown(observation)))

    def close(self) -> None:
        self._world.close()

    def speaking_roles(self) -> Collection[str]:
        return (self.role,)

    def most_answers(self, role: str) -> int | None:
        return self.turns if role == self.role else None

    def _ask(self, text: str) -> Sequence[NextRequest]:
        return [NextRequest(agent=self.role, role=self.role, messages=[{"role": USER, "content": text}])]

    def _over(self) -> EpisodeEnd:
        return EpisodeEnd(rewards={self.role: {"return": self._return}})

    def _make(self) -> Any:
        mode = {"render_mode": RENDERED} if self.render else {}
        try:
            return self._gymnasium.make(self.id, disable_env_checker=True, **mode, **self.args)
        except (self._gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
            raise ConfigError(f"args.id = {self.id!r} with args.args = {self.args} cannot be made: {error}") from error

    def _check_actions(self) -> str:
        """Returns the description of the actions for the agent. Raises ConfigError for an action space that cannot be
        expressed as text.
        """
        spaces = self._gymnasium.spaces
        if isinstance(self._space, spaces.Text) and not self.actions:
            return "any text"
        if not isinstance(self._space, spaces.Discrete):
            raise ConfigError(
                f"args.id = {self.id!r} has actions {self._space}: only Text, and Discrete with or without "
                "args.actions, can be read from a text"
            )
        numbers = range(int(self._space.start), int(self._space.start + self._space.n))
        if self.actions and len(self.actions) != len(numbers):
            raise ConfigError(f"args.actions names {len(self.actions)} actions, and {self.id!r} has {len(numbers)}")
        names = self.actions or [str(number) for number in numbers]
        self._numbers = {str(number): number for number in numbers}
        self._numbers |= {name.lower(): number for name, number in zip(names, numbers, strict=True)}
        return ", ".join(names)

    def _action(self, text: str) -> Any:
        """Returns the action in a text: the whole text for a text space, otherwise the last number or name of an
        action. Returns None if there is no action.
        """
        if self.tag is not None:
            blocks = block_texts(text, self.tag)
            if not blocks:
                return None
            text = blocks[-1]
        if isinstance(self._space, self._gymnasium.spaces.Text):
            return text.strip() if self._space.contains(text.strip()) else None
        names = [rf"(?<!\w){re.escape(name)}(?!\w)" for name in self.actions]
        matches = re.findall("|".join([*names, _INTEGER]), text, re.IGNORECASE)
        return self._numbers.get(matches[-1].lower()) if matches else None

    def _shown(self, observation: Any) -> str:
        if self.render:
            return _COLOURED.sub(r"[\1]", str(self._world.render())).strip("\n")
        return str(_plain(observation))


def _plain(value: Any) -> Any:
    """Returns an observation with numpy's numbers and arrays converted to Python's, because numpy's text representation
    shows types.
    """
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value)) if isinstance(value, tuple) else [*map(_plain, value)]
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
