"""Pools of graders whose reward function a test writes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.config.schema import Reward
from megatron_rl.rewards.grading_pool import GradePool


@contextlib.contextmanager
def grading_by(
    name: str, source: str, directory: Path, monkeypatch: pytest.MonkeyPatch, *, workers: int
) -> Iterator[GradePool]:
    """Writes the module `name` and grades with its function `grade`. In `source`, {path} stands for the directory."""
    (directory / f"{name}.py").write_text(source.format(path=str(directory)))
    monkeypatch.syspath_prepend(str(directory))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    with GradePool(Reward(target=f"{name}:grade", workers=workers, timeout_s=1.0, answer_format="{answer}")) as pool:
        yield pool
