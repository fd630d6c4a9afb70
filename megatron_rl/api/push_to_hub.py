"""Uploads a model directory to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

from megatron_rl.config.base import ConfigError

LEFT_OUT = ["*.tmp", "SHA256SUMS*"]  # files of a model directory that are not uploaded


def push(directory: Path, repo: str, *, private: bool) -> str:
    """Uploads a directory to the repository `owner/name`, which is created if necessary, and returns its address.

    Raises ConfigError if the name is invalid, there is no token, HF_HUB_OFFLINE is set, or the hub rejects the upload
    or cannot be reached.
    """
    wrong = None
    if repo.count("/") != 1:
        wrong = "the name has the form owner/name"
    elif constants.HF_HUB_OFFLINE:
        wrong = "HF_HUB_OFFLINE is set; unset it before Python starts, to upload"
    elif get_token() is None:
        wrong = (
            "this machine has no token of the Hugging Face hub: run `hf auth login`, or set HF_TOKEN to a token that "
            "may write"
        )
    else:
        api = HfApi()
        try:
            address = api.create_repo(repo, private=private, exist_ok=True)
            api.upload_folder(repo_id=repo, folder_path=directory, ignore_patterns=LEFT_OUT)
            return str(address)
        except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError) as error:
            wrong = f"the hub refused it or cannot be reached: {error}"
    raise ConfigError(f"push_to_hub({repo!r}): {wrong}")
