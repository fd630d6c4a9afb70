"""The exception types for errors that a user can fix. Only the message of such an error is printed; other errors are
printed with their traceback.
"""

from __future__ import annotations

from megatron_rl.config.schema import ConfigError
from megatron_rl.data.rows import DataError
from megatron_rl.engines.http import RequestRefused
from megatron_rl.engines.protocol import EngineError
from megatron_rl.lib.regular_files import UntrustedFile
from megatron_rl.messages.world import DriverError  # raised on all ranks except rank 0 after an error on rank 0
from megatron_rl.rewards.grading_pool import RewardFailure
from megatron_rl.run.checkpoint import CheckpointError
from megatron_rl.run.json_lines import DiskError
from megatron_rl.run.run_directory import RunBusy
from megatron_rl.training.credit import RolloutError
from megatron_rl.training.preflight import PreflightFailure
from megatron_rl.training.progress import NothingTrained
from megatron_rl.training.store import StoreError

EXPECTED = (
    CheckpointError,
    ConfigError,
    DataError,
    DiskError,
    DriverError,
    EngineError,
    FileNotFoundError,
    FloatingPointError,
    PreflightFailure,
    NothingTrained,
    RolloutError,
    RequestRefused,
    RewardFailure,
    RunBusy,
    StoreError,
    UntrustedFile,
)
