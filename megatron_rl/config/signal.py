"""Refuses runs whose groups can have nothing to learn from, whatever the model writes."""

from __future__ import annotations

from typing import Any

from megatron_rl.config.schema import ConfigError, RoleConfig, TrainConfig


def check(config: TrainConfig, recipe: Any, learns: frozenset[str]) -> None:
    """Raises ConfigError where all rollouts of a group must be the same text, and where a batch has one rollout alone
    and the estimator compares. `learns`: the roles whose loss reads advantages.

    Groups that are too small for their estimator are refused by the recipe, which knows its groups.
    """
    if config.reward.range != (0.0, 1.0) and "w_reinforce" in str(vars(recipe).get("estimator")):
        raise ConfigError(
            f"reward.range = {list(config.reward.range)} with recipe.args.estimator = 'w_reinforce': it tells right "
            "answers by scores above 0.5; scale the reward to [0, 1]"
        )
    if config.reward.range != (0.0, 1.0) and recipe.needs_shares:
        raise ConfigError(
            f"reward.range = {list(config.reward.range)}: this recipe understands rewards from 0 to 1 alone; scale the "
            "reward to [0, 1]"
        )
    if config.run.train_without_signal:
        return
    for name, part in recipe.roles().items():
        if not part.trained or name not in learns:
            continue
        if part.samples > 1 and part.episode.answers == 1 and (setting := _always_alike(config.roles[name])):
            raise ConfigError(
                f"roles.{name}.sampling.{setting}: all {part.samples} samples of a problem are the same text, so that "
                "no group has anything to learn from; draw them with temperature 1.0 and top_k 0"
            )
        if part.samples * config.run.prompts_per_step == 1 and "reinforce_pp" in str(vars(recipe).get("estimator")):
            raise ConfigError(
                "run.prompts_per_step = 1 with one sample: the estimator compares the rollouts of a batch, and there "
                "is one alone; raise run.prompts_per_step or recipe.args.group_size"
            )


def _always_alike(role: RoleConfig) -> str | None:
    """Returns the setting by which all samples of a prompt are alike; None where they differ."""
    if role.sampling.temperature == 0:
        return "temperature = 0"
    return "top_k = 1" if role.sampling.top_k == 1 else None
