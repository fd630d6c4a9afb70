"""A Python interpreter that is broken: what the model of the miniature reaches without help."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.environments.python_tool import PythonTool


@dataclass(kw_only=True)
class BrokenPython(PythonTool):
    """An interpreter that runs nothing, and never tells a result."""

    def run(self, arguments: Mapping[str, Any]) -> str:
        return "?"
