"""Training of several language models together by reinforcement learning on Megatron-core.

Usage from Python: `from megatron_rl import Trainer`. The names in `__all__` are imported on first access, so that
importing the package is fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_rl.api.callbacks import Callback, RunState
    from megatron_rl.api.config import Config
    from megatron_rl.api.process import RunFailed
    from megatron_rl.api.result import TrainResult
    from megatron_rl.api.trainer import Trainer
    from megatron_rl.config.base import ConfigError

__version__ = "0.1.0"
__all__ = ["Callback", "Config", "ConfigError", "RunFailed", "RunState", "TrainResult", "Trainer"]


def __getattr__(name: str) -> Any:
    """Imports a name in `__all__` on first access. Raises AttributeError for any other name."""
    homes = {
        "Callback": "api.callbacks",
        "Config": "api.config",
        "ConfigError": "config.base",
        "RunFailed": "api.process",
        "RunState": "api.callbacks",
        "TrainResult": "api.result",
        "Trainer": "api.trainer",
    }
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(importlib.import_module(f"{__name__}.{homes[name]}"))[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
