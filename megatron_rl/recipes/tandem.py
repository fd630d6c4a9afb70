"""Tandem RL (arXiv 2606.28166): GRPO on texts that a trained senior and a frozen junior generate together. The senior
is trained on the tokens that it generated.
"""

from dataclasses import dataclass

from megatron_rl.config.base import ConfigError, Count
from megatron_rl.recipes.dapo import Dapo
from megatron_rl.recipes.solutions import GENERATOR
from megatron_rl.spec.run_spec import CheckedRun


@dataclass(frozen=True, kw_only=True)
class Tandem(Dapo):
    """A recipe that trains `generator`, the senior, on the reward of the whole text. `roles.generator.tandem`
    configures the junior and how the author of each token is chosen.

    The junior's tokens are part of the text for which log-probs are computed, but are excluded from loss, means and
    gradient, unless `tandem.junior_weight` is set. Held-out problems are solved by the senior alone. Other recipes
    support tandems through the same setting. The difference is that this recipe raises an error if the setting is
    missing, whereas Grpo would run without a junior.
    """

    group_size: Count = 8

    def check(self, run: CheckedRun) -> None:
        super().check(run)
        if run.roles[GENERATOR].tandem is None:
            raise ConfigError(
                f"the recipe is a tandem and has no junior: set roles.{GENERATOR}.tandem; {{}} takes a frozen copy"
            )
