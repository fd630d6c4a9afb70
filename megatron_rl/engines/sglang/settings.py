"""The settings of SGLang servers, and the roles that these servers can serve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from megatron_rl.config.base import config
from megatron_rl.config.engines import Servers
from megatron_rl.config.model import RoleConfig


@config
class Sglang(Servers):
    """Settings of SGLang servers."""

    tells_top: ClassVar[bool] = True
    top_before_cuts: ClassVar[bool] = True

    kind: Literal["sglang"] = "sglang"  # servers that run SGLang

    def role_problems(self, roles: Mapping[str, RoleConfig]) -> list[str]:
        """Implements `Servers.role_problems`: returns messages about role settings that SGLang servers do not
        support.
        """
        problems = super().role_problems(roles)
        for name, role in roles.items():
            drawn = role.sampling
            if drawn.temperature > 0 and (drawn.top_p < 1 or drawn.min_p > 0) and not drawn.top_k:
                problems.append(
                    f"roles.{name}.sampling.top_p = {drawn.top_p}, min_p = {drawn.min_p} with engine.kind = "
                    "'sglang': with such a truncation SGLang returns log-probs of drawn tokens only under a top_k; set "
                    "sampling.top_k, or leave truncation off"
                )
        return problems
