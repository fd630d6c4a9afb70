"""Tandem RL (arXiv 2606.28166): GRPO on texts that a frozen junior writes along; the senior learns from its part."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.config.schema import ConfigError
from megatron_rl.recipes.base import GENERATOR
from megatron_rl.recipes.dapo import Dapo
from megatron_rl.training.turns import Source, Table, Turn
from megatron_rl.types import Prompt, Rollout


@dataclass(frozen=True, kw_only=True)
class Tandem(Dapo):
    """A run that trains `generator`, the senior, on the reward of the whole text. `roles.generator.tandem` names the
    junior and says who writes when.

    The junior's tokens are part of the text that old and new log-probs are computed on, and are in no loss, mean or
    gradient, unless `tandem.junior_weight` says so. Held-out problems are solved by the senior alone. Any other recipe
    becomes a tandem by the same setting; this one refuses to run without it, where plain GRPO would go on in silence.
    """

    group_size: int = 8

    def play(self, turn: Turn, source: Source, table: Table) -> Mapping[str, Sequence[Rollout]]:
        """Plays as Grpo does. Raises EngineError without an author for every token, and for a senior's share of the
        tokens that is not what the strategy gives."""
        _check(table)
        return super().play(turn, source, table)

    def evaluate(self, prompts: Sequence[Prompt], table: Table) -> dict[str, float]:
        _check(table)
        return super().evaluate(prompts, table)


def _check(table: Table) -> None:
    """Raises ConfigError without a junior."""
    if table.samplings[GENERATOR].tandem is None:
        raise ConfigError(
            f"the recipe is a tandem and has no junior: set roles.{GENERATOR}.tandem; {{}} takes a frozen copy"
        )
