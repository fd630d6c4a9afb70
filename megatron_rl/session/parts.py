"""The parts of a reinforcement-learning run as its config describes them: what `train` and `drift` are put together from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from megatron_rl.algorithms.authors import Rule
from megatron_rl.algorithms.losses import PolicyLoss
from megatron_rl.config.schema import RoleConfig, TrainConfig
from megatron_rl.data.problems import PromptReader, read_problems
from megatron_rl.engines.base import Engine, Tandem
from megatron_rl.megatron import parallel
from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.session.common import Driver, sampling_of
from megatron_rl.training import loop
from megatron_rl.training.rollouts import tokenize
from megatron_rl.training.turns import Grade, Players, Recipe
from megatron_rl.types import Prompt


def prompts(
    config: TrainConfig, recipe: Recipe, tokenizers: Mapping[str, Any]
) -> tuple[dict[str, PromptReader], list[Prompt]]:
    """A reader for every role's turns (one and the same where a role has no data of its own), and the held-out prompts."""
    role = recipe.prompt_role
    limit = config.roles[role].max_prompt_tokens

    def encode(values: Mapping[str, Any]) -> list[int]:
        return tokenize(tokenizers[role], recipe.generator_prompt(values))

    def reader(source: Any) -> PromptReader:
        return PromptReader(
            read_problems(source), encode, seed=config.run.seed, shuffle=source.shuffle, max_prompt_tokens=limit
        )

    held_out: list[Prompt] = []
    if config.evaluation.prompts is not None and not config.debug.replay:  # a replay has no engine to evaluate with
        held = config.evaluation.prompts
        held_out = reader(held).once(config.evaluation.num_prompts)
    common = reader(config.data)
    own = {name: reader(settings.data) for name, settings in config.roles.items() if settings.data is not None}
    return {name: own.get(name, common) for name in config.roles}, held_out


def policies(config: TrainConfig, recipe: Recipe) -> dict[str, MegatronPolicy]:
    """Every role's model, those that sleep asleep. Collective."""
    out = {}
    for name, role in config.roles.items():
        groups = parallel.create(role.layout, seed=config.run.seed)
        out[name] = MegatronPolicy(
            role, groups, trainable=name in recipe.trained, seed=config.run.seed, deterministic=config.run.deterministic
        )
        if role.sleep:  # before the next role is built: both may not fit awake
            out[name].sleep()
    return out


def players(
    config: TrainConfig, engines: Mapping[str, Engine], tokenizers: Mapping[str, Any], grade: Grade, driver: Driver
) -> Players:  # fmt: skip
    return Players(
        engines=engines,
        tokenizers=tokenizers,
        samplings={
            name: dataclasses.replace(sampling_of(role.sampling), tandem=tandem_of(role))
            for name, role in config.roles.items()
        },
        max_prompt_tokens={name: role.max_prompt_tokens for name, role in config.roles.items()},
        grade=grade,
        watch=driver.watch,
        seed=config.run.seed,
        max_failure_share=config.reward.max_failure_share,
    )


def tandem_of(role: RoleConfig) -> Tandem | None:
    """The engine's terms for a role's tandem."""
    if role.tandem is None:
        return None
    rule = {
        name: value
        for name, value in dataclasses.asdict(role.tandem).items()
        if name not in ("junior", "junior_weight")
    }
    return Tandem(rule=Rule(**rule), junior_weight=role.tandem.junior_weight)


def role(config: TrainConfig, name: str, policy: MegatronPolicy, refit: Callable[[int], None] | None) -> loop.Role:
    settings = config.roles[name]
    late = config.rollouts.max_staleness > 0 and settings.loss.tis_cap is None
    loss = dataclasses.replace(settings.loss, tis_cap=config.rollouts.tis_cap) if late else settings.loss
    return loop.Role(
        policy=policy,
        loss=PolicyLoss(loss),
        refit=refit,
        needs_reference=settings.loss.kl_coef > 0,
        samples_per_optimizer_step=settings.samples_per_optimizer_step,
        sleeps=settings.sleep,
    )
