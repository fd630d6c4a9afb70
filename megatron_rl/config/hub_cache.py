"""Tells what the Hugging Face hub's cache of this machine holds, and whether the hub may be asked."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Kind = Literal["models", "datasets"]


def cache() -> Path:
    """Returns the directory that the hub's files are kept in: HF_HUB_CACHE, or `hub` in HF_HOME."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def offline() -> bool:
    """Returns whether HF_HUB_OFFLINE forbids to ask the hub."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def has_token() -> bool:
    """Returns whether there is a token, in HF_TOKEN or in the file of `hf auth login`. It is not returned."""
    from huggingface_hub import get_token

    return get_token() is not None


def is_cached(name: str, kind: Kind) -> bool:
    """Returns whether the cache holds a snapshot of `owner/name`."""
    snapshots = cache() / f"{kind}--{name.replace('/', '--')}" / "snapshots"
    return snapshots.is_dir() and any(snapshots.iterdir())


def head(name: str, kind: Kind) -> str | None:
    """Returns the commit that the cache has as the newest of `owner/name`; None where it has none."""
    file = cache() / f"{kind}--{name.replace('/', '--')}" / "refs" / "main"
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None
