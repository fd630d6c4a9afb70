"""Lists the errors that a user can mend. Their message is printed alone; any other error keeps its traceback."""

from __future__ import annotations

from megatron_rl.config.schema import ConfigError
from megatron_rl.data.rows import DataError
from megatron_rl.engines.base import EngineError
from megatron_rl.engines.http import RequestRefused
from megatron_rl.rewards.pool import RewardFailure
from megatron_rl.run.checkpoint import CheckpointError
from megatron_rl.run.directory import RunBusy
from megatron_rl.run.lines import DiskError
from megatron_rl.training.gate import GateFailure
from megatron_rl.training.loop import NothingTrained
from megatron_rl.training.player import PlayError
from megatron_rl.training.store import StoreError
from megatron_rl.world import DriverError  # raised on the other ranks for an error on rank 0

EXPECTED = (
    CheckpointError,
    ConfigError,
    DataError,
    DiskError,
    DriverError,
    EngineError,
    FileNotFoundError,
    FloatingPointError,
    GateFailure,
    NothingTrained,
    PlayError,
    RequestRefused,
    RewardFailure,
    RunBusy,
    StoreError,
)
