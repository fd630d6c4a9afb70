"""Everything that the package knows of one kind of inference servers, as one object for each kind."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config.base import ConfigError
from megatron_rl.config.engines import Servers
from megatron_rl.config.model import Strategy
from megatron_rl.engines.server import Adapters, Server


@dataclass(frozen=True)
class Command:
    """The command line of a server, and what its process needs beside it."""

    words: list[str]
    environment: Mapping[str, str]  # on top of the inherited environment
    entry_points: str = ""  # entry points of this package in the server's process, as entry_points.txt has them


@dataclass(frozen=True, kw_only=True)
class ServerStart:
    """The properties of one server, beside its settings, that its command line depends on."""

    python: str  # interpreter of an environment that has the engine
    model: Path
    dtype: str
    port: int
    token_file: Path
    on_gpu: bool
    tells_experts: bool = False  # for router replay
    junior: Path | None = None  # the second model of a tandem
    tokenizer: Path | None = None  # of a tandem
    adapter_ranks: tuple[int, ...] = ()  # ranks of the adapters that the server computes with, one for each role


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The facts about a server's model that its client needs. A client that asks for no completions needs none."""

    ends: frozenset[int] = frozenset()  # end-of-sequence tokens
    vocab: int = 0  # size of the vocabulary; 0: not known
    boundaries: Callable[[Strategy], frozenset[int]] | None = None  # tokens after which the author of a tandem changes
    adapters: Adapters | None = None  # None: servers hold merged weights


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """One kind of servers. Its folder megatron_rl/engines/NAME/ has it as `ENGINE` in kind.py, and its settings in
    settings.py. The engine's package has the same NAME.
    """

    name: str
    make_target: str  # of the Makefile: makes the environment .venv-NAME
    # Makes the command line of a server. Raises ConfigError for settings that the engine does not have.
    command: Callable[[Any, ServerStart], Command]
    # Makes a client: (URL, the job's token, settings, seconds that a refit may take, facts about the model).
    client: Callable[[str, str, Any, float, ModelFacts], Server]

    def interpreter(self, settings: Servers) -> str:
        """Returns the Python that servers run in. Raises ConfigError when there is no such program."""
        python = settings.python or sys.executable
        if shutil.which(python) is None:
            raise ConfigError(
                f"engine.python = {python}: there is no such program; `make {self.make_target}` makes "
                f".venv-{self.name}/bin/python"
            )
        return python


def kind_of(settings: Servers) -> EngineKind:
    """Returns the kind of servers that have these settings."""
    return importlib.import_module(f"megatron_rl.engines.{settings.kind}.kind").ENGINE
