"""Uploads a model directory to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from megatron_rl.config.base import ConfigError

LEFT_OUT = ["*.tmp", "SHA256SUMS*"]  # files of a model directory that are not uploaded


def push(directory: Path, repo: str, *, private: bool) -> str:
    """Uploads a directory to the repository `owner/name`, which is created if necessary, and returns its address.

    Raises ConfigError if the name is invalid, there is no token, HF_HUB_OFFLINE is set, or the hub rejects the upload
    or cannot be reached.
    """
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(f"push_to_hub({repo!r}): {error}") from error
    if repo.count("/") != 1:
        raise ConfigError(f"push_to_hub({repo!r}): the name has the form owner/name")
    if constants.HF_HUB_OFFLINE:
        raise ConfigError("push_to_hub: HF_HUB_OFFLINE is set; unset it before Python starts, to upload")
    if get_token() is None:
        raise ConfigError(
            "push_to_hub: this machine has no token of the Hugging Face hub: run `hf auth login`, or set HF_TOKEN to "
            "a token that may write"
        )
    api = HfApi()
    try:
        address = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=directory, ignore_patterns=LEFT_OUT)
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError) as error:
        raise ConfigError(f"push_to_hub({repo!r}): the hub refused it or cannot be reached: {error}") from error
    return str(address)
