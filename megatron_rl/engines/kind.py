"""The properties of each kind of inference server (such as vLLM and SGLang), as one object per kind."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.algorithms.tandem_authors import Rule
from megatron_rl.config.base import ConfigError
from megatron_rl.config.engines import Servers
from megatron_rl.engines.server import Adapters, Server


@dataclass(frozen=True)
class Command:
    """The command line of a server, and the environment variables and entry points of the server's process."""

    words: list[str]
    environment: Mapping[str, str]  # variables that are added to the inherited environment
    # Python entry points that this package provides in the server's process, in the format of entry_points.txt
    entry_points: str = ""


@dataclass(frozen=True, kw_only=True)
class ServerStart:
    """The properties of one server that determine its command line together with the engine settings."""

    python: str  # Python interpreter of an environment in which the engine is installed
    model: Path
    dtype: str
    port: int
    token_file: Path
    on_gpu: bool
    tells_experts: bool = False  # whether the server returns the router's expert choices, for router replay
    junior: Path | None = None  # the junior (frozen) model of a Tandem RL engine
    tokenizer: Path | None = None  # tokenizer of a Tandem RL engine
    by_priority: bool = False  # whether the server serves requests with a lower priority number first
    # Quantization format in which refits (weight syncs) send the weights; None: the model's dtype.
    # With a quantization format, a server does not read the model's files: its first refit brings all weights.
    quantization: str | None = None
    # Ranks (sizes) of the LoRA adapters that the server applies, one rank for each role.
    adapter_ranks: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The facts about a server's model that the client of the server needs. A client that requests no completions needs
    none of these facts.
    """

    ends: frozenset[int] = frozenset()  # end-of-sequence token ids
    vocab: int = 0  # size of the vocabulary; 0 if unknown
    # For Tandem RL, where a senior and a junior model take turns: returns the token ids after which the model that
    # generates the next token may change.
    boundaries: Callable[[Rule], frozenset[int]] | None = None
    adapters: Adapters | None = None  # LoRA adapters; None if servers hold weights with merged adapters


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """A kind of inference server, such as vLLM. In the folder megatron_rl/engines/NAME/, kind.py defines the kind as
    `ENGINE`, and settings.py defines the settings of the kind. The engine's Python package has the same NAME.
    """

    name: str
    make_target: str  # Makefile target that creates the environment .venv-NAME
    # Builds the command line of a server. Raises ConfigError for settings that the engine does not support.
    command: Callable[[Any, ServerStart], Command]
    # Creates a client from (URL, token of the job, settings, maximum seconds of a refit, facts about the model).
    client: Callable[[str, str, Any, float, ModelFacts], Server]

    def interpreter(self, settings: Servers) -> str:
        """Returns the Python interpreter that servers run in. Raises ConfigError if there is no such program."""
        python = settings.python or sys.executable
        if shutil.which(python) is None:
            raise ConfigError(
                f"engine.python = {python}: there is no such program; `make {self.make_target}` makes "
                f".venv-{self.name}/bin/python"
            )
        return python


def kind_of(settings: Servers) -> EngineKind:
    """Returns the kind of server that these settings configure."""
    return importlib.import_module(f"megatron_rl.engines.{settings.kind}.kind").ENGINE
