"""The settings of vLLM servers, and the roles that these servers can serve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from megatron_rl.config.base import config
from megatron_rl.config.engines import Servers
from megatron_rl.config.model import RoleConfig

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of vLLM's --max-lora-rank


@config
class Vllm(Servers):
    """Settings of vLLM servers."""

    holds_tandems: ClassVar[bool] = True
    tells_experts: ClassVar[bool] = True
    tells_top: ClassVar[bool] = True
    stages_experts: ClassVar[bool] = True  # True because vLLM repacks the weights of experts (worker.py)

    kind: Literal["vllm"] = "vllm"  # servers that run vLLM
    # How servers apply the LoRA adapters of roles (roles.NAME.lora).
    # "merged": servers hold weights with the adapter merged into them. Weight syncs (refits) send the merged weights.
    # "served": servers keep the base model and apply the adapter separately. Refits send only the adapter.
    # With "served", roles with adapters of the same model share their servers.
    adapters: Literal["merged", "served"] = "merged"

    @property
    def serves_adapters(self) -> bool:
        """Whether the servers apply LoRA adapters to an unchanged base model."""
        return self.adapters == "served"

    def problems(self) -> Iterator[str]:
        """Implements `Servers.problems`. Also yields a message if vLLM does not support the configured format of the KV
        cache together with quantised weights."""
        yield from super().problems()
        if self.quantization and self.kv_cache_dtype == "fp8_e5m2":
            yield (
                f"engine.kv_cache_dtype = 'fp8_e5m2' with engine.quantization = {self.quantization!r}: vLLM has this "
                "cache for weights that are not quantised only; set it to fp8_e4m3"
            )

    def role_problems(self, roles: Mapping[str, RoleConfig]) -> list[str]:
        """Implements `Servers.role_problems`: returns messages about role settings that vLLM servers do not support."""
        problems = [
            f"roles.{name}.router_replay = true with roles.{name}.tandem: vLLM has no model runner that does both; "
            "leave one of them out, or set engine.kind to embedded"
            for name, role in roles.items()
            if role.router_replay and role.tandem is not None
        ]
        adapted = {name: role for name, role in roles.items() if role.lora is not None and self.serves_adapters}
        problems += [
            f"roles.{name}.tandem with engine.adapters = 'served': vLLM holds no adapters beside two models; set it to "
            "merged"
            for name, role in adapted.items()
            if role.tandem is not None
        ]
        problems += [
            f"roles.{name}.lora.rank = {lora.rank} with engine.adapters = 'served': vLLM takes up to {LORA_RANKS[-1]}; "
            "set it to merged"
            for name, role in adapted.items()
            if (lora := role.lora) is not None and lora.rank > LORA_RANKS[-1]
        ]
        return super().role_problems(roles) + problems
