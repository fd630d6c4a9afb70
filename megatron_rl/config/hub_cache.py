"""Looks up models and data sets in this machine's Hugging Face cache, and checks whether the hub may be contacted."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Kind = Literal["models", "datasets"]


def cache() -> Path:
    """Returns the directory of the Hugging Face cache: HF_HUB_CACHE, or the subdirectory `hub` of HF_HOME."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def offline() -> bool:
    """Returns whether HF_HUB_OFFLINE forbids requests to the hub."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def has_token() -> bool:
    """Returns whether there is an access token of the Hugging Face hub, in HF_TOKEN or in the file that `hf auth login`
    writes."""
    from huggingface_hub import get_token

    return get_token() is not None


def is_cached(name: str, kind: Kind) -> bool:
    """Returns whether the Hugging Face cache contains a snapshot of the repository `name`, given as owner/name."""
    snapshots = cache() / f"{kind}--{name.replace('/', '--')}" / "snapshots"
    return snapshots.is_dir() and any(snapshots.iterdir())


def head(name: str, kind: Kind) -> str | None:
    """Returns the commit of the `main` branch of the repository owner/name as recorded in the Hugging Face cache, or
    None if there is no record."""
    file = cache() / f"{kind}--{name.replace('/', '--')}" / "refs" / "main"
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None
