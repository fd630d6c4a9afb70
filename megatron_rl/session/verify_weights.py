"""Refuses models whose weights are not those whose checksums stand beside them, for every command that reads models.

Light: every supervisor of a server imports it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megatron_rl.config.model import RoleConfig
from megatron_rl.run.file_checksums import refuse, wrong_of


def refuse_damaged_models(roles: Iterable[RoleConfig]) -> None:
    """Reads the weights of all model directories that roles name and that have a SHA256SUMS; a hub name has none.

    Raises ConfigError with the first file that differs.
    """
    named = [path for role in roles for path in (role.model.path, role.tandem and role.tandem.junior) if path]
    for directory in dict.fromkeys(Path(name) for name in named if Path(name).is_dir()):
        refuse(wrong_of(directory))
