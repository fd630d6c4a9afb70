"""Rejects models whose weight files do not match their SHA256SUMS file, for every command that loads models.

This module must be fast to import, because the supervisor process of every server imports it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megatron_rl.config.model import RoleConfig
from megatron_rl.run.file_checksums import refuse, wrong_of


def refuse_damaged_models(roles: Iterable[RoleConfig]) -> None:
    """Verifies the weights of the roles' local model directories that have a SHA256SUMS file. Skips hub names.

    Raises ConfigError that names the first file that differs.
    """
    named = [path for role in roles for path in (role.model.path, role.tandem and role.tandem.junior) if path]
    for directory in dict.fromkeys(Path(name) for name in named if Path(name).is_dir()):
        refuse(wrong_of(directory))
