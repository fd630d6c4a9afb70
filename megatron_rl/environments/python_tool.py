"""A Python interpreter as a tool for models. Each call runs a separate program in the sandbox."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import PositiveFloat, PositiveInt

from megatron_rl.config.base import ConfigError
from megatron_rl.environments.episode_types import EnvironmentFailure, Tool
from megatron_rl.rewards import sandbox
from megatron_rl.rewards.sandbox import SandboxFailure, SandboxSettings

_FENCED = re.compile(r"\s*```[^\n`]*\n(.*?)```\s*", re.DOTALL)


@dataclass(kw_only=True)
class PythonTool(Tool):
    """A tool that runs a Python program and returns its output. If there is no output, the tool returns the value of
    the program's last expression.

    If the program raises an exception, times out or prints too much, the tool returns the output so far and a message.
    No state is kept between calls, so a call can be repeated. If the sandbox fails, `run` raises EnvironmentFailure.
    """

    name: str = "python"
    timeout_s: PositiveFloat = 10.0  # timeout of one call in seconds, wall-clock time
    memory_mib: PositiveInt = 512  # memory limit of one process of the program, in MiB
    max_characters: PositiveInt = 4000  # maximum length of the output; longer output is truncated
    # Directories from which the program can import additional modules, such as a site-packages directory
    packages: tuple[str, ...] = ()

    description = (
        "Runs Python code and returns what it prints. Each call starts anew: nothing is kept from earlier calls. There "
        "is no network."
    )
    parameters = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "a whole program; print what you want to see"}},
        "required": ["code"],
    }

    def __post_init__(self) -> None:
        self._settings = SandboxSettings(
            timeout_s=self.timeout_s,
            memory_mib=self.memory_mib,
            output_bytes=4 * self.max_characters + 1,  # a character has at most 4 bytes in UTF-8
            packages=tuple(self.packages),
        )

    def load(self) -> None:
        try:
            sandbox.require()
        except SandboxFailure as error:
            raise ConfigError(str(error)) from error

    def run(self, arguments: Mapping[str, Any]) -> str:
        code = arguments.get("code")
        if not isinstance(code, str) or not code.strip():
            return "error: give a program as text in the argument code"
        fenced = _FENCED.fullmatch(code)
        try:
            ran = sandbox.run_program(fenced[1] if fenced else code, show_value=True, settings=self._settings)
        except SandboxFailure as error:
            raise EnvironmentFailure(f"the tool {self.name}: {error}") from error
        printed = ran.output.rstrip()
        why = f"error: the code did not end within {self.timeout_s:g} s" if ran.late else "" if ran.cut else ran.why
        if len(printed) > self.max_characters or ran.cut:
            note = f"... (only the first {self.max_characters} characters are shown)"
            printed = f"{printed[: self.max_characters]}\n{note}"
        return "\n".join(text for text in (printed, why) if text) or "(the code printed nothing)"
