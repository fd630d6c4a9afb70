"""Tools for tests of environments, named in configs as `task_tools:NAME`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.environments.episode_types import EnvironmentFailure, Tool


@dataclass(kw_only=True)
class Echo(Tool):
    """Says what it was asked, and remembers it."""

    name: str = "echo"
    asked: list[Any] = field(default_factory=list)

    description = "Says it again."
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}

    def run(self, arguments: Mapping[str, Any]) -> str:
        self.asked.append(dict(arguments))
        return f"[{arguments['text']}]"


@dataclass(kw_only=True)
class Flaky(Echo):
    """Breaks the first `failures` times that it is asked."""

    name: str = "flaky"
    failures: int = 1

    def run(self, arguments: Mapping[str, Any]) -> str:
        if self.failures > 0:
            self.failures -= 1
            raise EnvironmentFailure("the server is away")
        return super().run(arguments)


@dataclass(kw_only=True)
class Pair(Echo):
    """A tool that a tag cannot call: it requires two arguments."""

    name: str = "pair"
    parameters = {
        "type": "object",
        "properties": {"text": {"type": "string"}, "times": {"type": "integer"}},
        "required": ["text", "times"],
    }
