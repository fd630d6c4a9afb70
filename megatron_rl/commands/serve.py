"""`megatron-rl serve`: starts one inference server of a run, and restarts the server if it dies."""

from __future__ import annotations

import argparse
import os
import sys

from megatron_rl.commands.settings import split
from megatron_rl.config import files as config_files
from megatron_rl.config.schema import TrainConfig
from megatron_rl.spec.resolve import engine_of


def run(args: argparse.Namespace) -> int:
    """Implements `megatron-rl serve`: runs one server until it is asked to exit. Returns 0, or 1 if the server died too
    often or cannot be started.

    Raises ConfigError for settings that cannot be used."""
    from megatron_rl.engines.protocol import EngineError
    from megatron_rl.session import run_server

    engines = engine_of(config_files.load(TrainConfig, *split(args.settings)))
    try:
        return run_server.run(
            engines, role=args.role, replica=args.replica, with_parent=args.with_parent, environment=os.environ,
            gpus=args.gpus,
        )  # fmt: skip
    except EngineError as error:
        print(f"megatron-rl serve: {error}", file=sys.stderr)
        return 1
