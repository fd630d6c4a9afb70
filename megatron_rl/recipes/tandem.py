"""Tandem RL (arXiv 2606.28166): GRPO on texts that a frozen junior writes along; the senior learns from its part."""

from dataclasses import dataclass

from megatron_rl.config.schema import ConfigError
from megatron_rl.recipes.dapo import Dapo
from megatron_rl.recipes.solutions import GENERATOR
from megatron_rl.spec.run_spec import RunSpec


@dataclass(frozen=True, kw_only=True)
class Tandem(Dapo):
    """A run that trains `generator`, the senior, on the reward of the whole text. `roles.generator.tandem` names the
    junior and says who writes when.

    The junior's tokens are part of the text that old and new log-probs are computed on, and are in no loss, mean or
    gradient, unless `tandem.junior_weight` says so. Held-out problems are solved by the senior alone. Any other recipe
    becomes a tandem by the same setting; this one refuses to run without it, where plain GRPO would go on in silence.
    """

    group_size: int = 8

    def check(self, spec: RunSpec) -> None:
        super().check(spec)
        if spec.roles[GENERATOR].tandem is None:
            raise ConfigError(
                f"the recipe is a tandem and has no junior: set roles.{GENERATOR}.tandem; {{}} takes a frozen copy"
            )
