"""Tandem RL (arXiv 2606.28166): GRPO on texts that a frozen junior wrote along; the trained senior learns from its own tokens alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.config.schema import ConfigError
from megatron_rl.recipes.grpo import GENERATOR, Grpo
from megatron_rl.training.turns import Played, Players, Turn
from megatron_rl.types import Prompt


@dataclass(frozen=True, kw_only=True)
class Tandem(Grpo):
    """Trains `generator`, the senior, on the reward of the whole text; `roles.generator.tandem` names the junior and says who writes when.

    The junior's tokens are part of the text that old and new log-probs are computed on, and are in no loss, mean or gradient, unless
    `tandem.junior_weight` says so. Held-out problems are solved by the senior alone.
    Any other recipe becomes a tandem by the same setting; this one refuses to run without it, where plain GRPO would go on in silence.
    """

    group_size: int = 8

    def play(self, turn: Turn, prompts: Sequence[Prompt], players: Players) -> Played:
        """As Grpo.play, with senior_share and switches. Raises EngineError without an author for every token, and for a senior's share of
        the tokens that is not what the strategy gives."""
        _check(players)
        return super().play(turn, prompts, players)

    def evaluate(self, prompts: Sequence[Prompt], players: Players, seed: int) -> dict[str, float]:
        _check(players)
        return super().evaluate(prompts, players, seed)


def _check(players: Players) -> None:
    if players.samplings[GENERATOR].tandem is None:
        raise ConfigError(
            f"the recipe is a tandem and has no junior: set roles.{GENERATOR}.tandem ({{}} takes a frozen copy of the start)"
        )
