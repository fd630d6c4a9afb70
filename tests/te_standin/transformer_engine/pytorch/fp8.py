"""The state of 8-bit products, which are never on here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


class FP8GlobalStateManager:
    """Says that no 8-bit products are on."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False

    @staticmethod
    def get_fp8_recipe() -> None:
        return None


@contextlib.contextmanager
def fp8_autocast(enabled: bool = True, **unused: Any) -> Iterator[None]:
    """Refuses to turn 8-bit products on."""
    if enabled:
        raise RuntimeError("the stand-in for Transformer Engine has no 8-bit products")
    yield


fp8_model_init = fp8_autocast
