"""An environment in which a model calls tools until it answers, as in Search-R1, ReTool, VerlTool and Tool-Star."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import PositiveInt

from megatron_rl.config import plugins
from megatron_rl.config.base import ConfigError, Use, refuse
from megatron_rl.environments.dialogue import RENDERERS
from megatron_rl.environments.environment import Environment, EpisodeSettings
from megatron_rl.environments.episode_types import (
    Call,
    EnvironmentFailure,
    EpisodeEnd,
    NextRequest,
    Said,
    Tool,
    quoting,
)
from megatron_rl.texts.chat_template import TOOL, USER, UserText, problem_text
from megatron_rl.texts.text import read_template


@dataclass(kw_only=True)
class ToolTask(Environment):
    """An environment with one agent, which gets a question and calls tools until it answers or reaches `max_calls`.

    With `calls: tags` the model writes a call as `<search>query</search>`, which base models can do. The tag is the
    name of the tool, and the content is the tool's one required argument. With `calls: template` the chat template
    defines the format of calls, and the results are messages of the role `tool`. The prompt is the conversation of the
    task (`messages`) if there is one, otherwise the template with the question. The run's reward function grades the
    agent's text (see `graded`). The reward `tool_calls` is the number of calls. A tool that fails is called once more;
    if the tool fails again, the episode fails.
    """

    tools: tuple[Use, ...]  # {target, args} of each tool
    template: str  # prompt template with {question}: a text file or the name of a packaged prompt
    role: str = "agent"  # role of the agent, and its name
    calls: Literal["tags", "template"] = "tags"  # format of the model's tool calls
    answer: str = "answer"  # tag of the answer (calls = tags)
    result: str = "\n<result>{result}</result>\n"  # message with a tool's result, if calls = tags
    # Message to an agent that neither called a tool nor answered (calls = tags). A reminder is counted towards
    # max_calls. If reminder is null, no message is sent, and the episode ends with the text that the agent wrote.
    reminder: str | None = None
    max_calls: PositiveInt = 4  # maximum number of tool calls (and reminders) in an episode
    # Text that is graded. all: all texts of the agent, without tool results. last: the agent's last text
    graded: Literal["all", "last"] = "all"

    def __post_init__(self) -> None:
        try:
            self._template = read_template(self.template)
        except FileNotFoundError as error:
            raise ConfigError(f"args.template: {error}") from None
        tools = [plugins.build(use) for use in self.tools]
        refuse(*(problem for use, tool in zip(self.tools, tools, strict=True) for problem in _tool_problems(use, tool)))
        self._tools: dict[str, Tool] = {tool.name: tool for tool in tools}
        refuse(*self._problems(tools))
        if self.calls == "tags":  # {name of a tool: name of the tool's only required argument}
            self._arguments = {tool.name: tool.parameters["required"][0] for tool in tools}

    def _problems(self, tools: Sequence[Tool]) -> Iterator[str]:
        if "{question}" not in self._template:
            yield f"args.template = {self.template!r}: it needs {{question}} where the question stands"
        if "{result}" not in self.result:
            yield f"args.result = {self.result!r}: it needs {{result}} where a tool's answer stands"
        if not tools or len(self._tools) < len(tools) or self.answer in self._tools:
            yield (
                f"args.tools are named {', '.join(tool.name for tool in tools) or 'nothing'}: give at least one, each "
                f"with a name of its own, other than args.answer = {self.answer!r}"
            )
        for tool in tools if self.calls == "tags" else ():
            required = list(tool.parameters.get("required", ()))
            if [tool.parameters["properties"][name].get("type") for name in required] != ["string"]:
                yield (
                    f"args.calls = 'tags', and the tool {tool.name!r} requires {', '.join(required) or 'nothing'}: a "
                    "tag gives one text; set calls to template"
                )

    def begin(self, task: Mapping[str, Any], seed: int) -> Sequence[NextRequest] | EpisodeEnd:
        self._texts: list[str] = []
        self._made = 0  # number of calls and reminders
        self._run_calls = 0
        fields = {"question": task["question"]} | ({"messages": task["messages"]} if "messages" in task else {})
        text = problem_text(self._template, fields)
        return self._ask(text.messages if isinstance(text, UserText) else [{"role": USER, "content": text}])

    def step(self, said: Said) -> Sequence[NextRequest] | EpisodeEnd:
        self._texts.append(said.text)
        if said.stop is None or not said.stop.finished or self._made >= self.max_calls:
            return self._over()
        return self._after_tags(said.text) if self.calls == "tags" else self._after_calls(said.calls)

    def check(self, settings: EpisodeSettings) -> None:
        if self.calls == "template" and not settings.dialogue.startswith(RENDERERS):
            raise ConfigError(
                f"recipe.args.dialogue = {settings.dialogue!r} reads no calls of tools, and "
                "recipe.args.environment.args.calls is 'template': set the dialogue to renderers:NAME, or calls to tags"
            )

    def speaking_roles(self) -> Collection[str]:
        return (self.role,)

    def files(self) -> Mapping[str, str]:
        return {
            f"tools.{name}.{argument}": path
            for name, tool in self._tools.items()
            for argument, path in tool.files().items()
        }

    def load(self) -> None:
        for tool in self._tools.values():
            tool.load()

    def most_answers(self, role: str) -> int | None:
        return self.max_calls + 1 if role == self.role else None

    def _after_tags(self, text: str) -> Sequence[NextRequest] | EpisodeEnd:
        """Runs the first tool call in a text. Returns the next request, or the end of the episode.

        A block <tag>...</tag> is a call if the tag is a tool's name, and an answer if the tag is `self.answer`. The
        episode ends if the first block is an answer, or if the text has no block and the setting `reminder` is null.
        """
        block = first_call(text, [*self._tools, self.answer])
        if block is None and self.reminder is not None:
            self._made += 1
            return self._ask([{"role": USER, "content": self.reminder}])
        if block is None or block[0] == self.answer:
            return self._over()
        content = textwrap.dedent(block[1]).strip()
        result = self._result(Call(name=block[0], arguments={self._arguments[block[0]]: content}))
        return self._ask([quoting(USER, self.result, result=result)])

    def _after_calls(self, calls: Sequence[Call]) -> Sequence[NextRequest] | EpisodeEnd:
        """Runs the tool calls of a message, up to `max_calls`. Returns the next request, or the end of the episode if
        there is no call."""
        messages = []
        for call in calls:
            allowed = self._made < self.max_calls
            content = self._result(call) if allowed else f"error: no more than {self.max_calls} calls are answered"
            call_id = {} if call.id is None else {"tool_call_id": call.id}
            messages.append({"role": TOOL, "name": call.name, "content": content, **call_id})
        return self._ask(messages) if messages else self._over()

    def _result(self, call: Call) -> str:
        """Runs a tool call. Returns the text for the model. Raises EnvironmentFailure if the tool failed twice or
        returned no text."""
        self._made += 1
        self._run_calls += 1
        tool = self._tools.get(call.name)
        if tool is None:
            return f"error: there is no tool {call.name!r}, only {', '.join(self._tools)}"
        if call.arguments is None:
            return "error: the arguments cannot be read: write them as a JSON object"
        try:
            result = tool.run(call.arguments)
        except EnvironmentFailure:
            result = tool.run(call.arguments)
        if not isinstance(result, str):
            raise EnvironmentFailure(
                f"the tool {tool.name!r} returned {str(result)[:80]}, which is no text: return one"
            )
        return result

    def _ask(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[NextRequest]:
        tags = [*self._tools, self.answer] if self._made < self.max_calls else [self.answer]
        return [
            NextRequest(
                agent=self.role,
                role=self.role,
                messages=messages,
                tools=[*self._tools.values()] if self.calls == "template" else (),
                stop=[f"</{tag}>" for tag in tags] if self.calls == "tags" else (),
            )
        ]

    def _over(self) -> EpisodeEnd:
        text = "\n".join(self._texts) if self.graded == "all" else self._texts[-1]
        return EpisodeEnd(answers={self.role: text}, rewards={self.role: {"tool_calls": float(self._run_calls)}})


def first_call(text: str, names: Sequence[str]) -> tuple[str, str] | None:
    """Returns (name, content) of the first block <name>...</name> whose name is in `names`, or None.

    An opening tag without a closing tag is skipped. The time is linear in the length of the text.
    """
    last = {name: text.rfind(f"</{name}>") for name in names}
    for opening in re.finditer(f"<({'|'.join(map(re.escape, names))})>", text):
        if last[opening[1]] >= opening.end():
            return opening[1], text[opening.end() : text.index(f"</{opening[1]}>", opening.end())]
    return None


def _tool_problems(use: Use, tool: object) -> Iterator[str]:
    """Yields error messages if an object from the setting `tools` is not a valid Tool."""
    if not isinstance(tool, Tool):
        yield (
            f"args.tools: {use.target} is no tool: name a dataclass that inherits from "
            "megatron_rl.environments.episode_types:Tool"
        )
    elif lacking := [name for name in ("name", "description", "parameters") if not hasattr(tool, name)]:
        yield f"args.tools: {use.target} has no {' and no '.join(lacking)}: write them into the class"
