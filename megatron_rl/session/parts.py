"""Builds the parts of a reinforcement-learning run from its config: readers, policies, the table, trainees."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron_rl.algorithms.authors import Rule
from megatron_rl.algorithms.losses import PolicyLoss
from megatron_rl.config.schema import CORRECTION_AHEAD, RoleConfig, Run, TrainConfig
from megatron_rl.data.problems import PromptReader
from megatron_rl.engines.base import Engine, TandemSampling
from megatron_rl.megatron import parallel
from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.models.adapters import owners
from megatron_rl.planning import hardware
from megatron_rl.session.common import Driver, sampling_of
from megatron_rl.training.prompts import HELD_OUT, asked_tokenizers, read_sets, readers_of, training_sets
from megatron_rl.training.turns import Grade, Recipe, Table
from megatron_rl.training.update import Trainee
from megatron_rl.types import Prompt
from megatron_rl.vocabulary import vocabulary_of


def prompts(
    config: TrainConfig, recipe: Recipe, tokenizers: Mapping[str, Any]
) -> tuple[dict[str, PromptReader], list[Prompt], dict[str, dict[str, Any]]]:
    """A reader for every role's turns (one and the same where a role has no data of its own), the held-out prompts, and
    path, rows and sha256 of each data set by its setting.

    Raises what training.prompts.read_sets and readers_of raise.
    """
    role = next(iter(recipe.roles()))
    tokenizer = asked_tokenizers(config, tokenizers)[role]
    sets, held = training_sets(config), config.evaluation.prompts
    if held is not None and not config.debug.replay:  # a replay has no engine to evaluate with
        sets[HELD_OUT] = held
    vocabulary = vocabulary_of(config.roles[role].model, tokenizers[role])
    problems = read_sets(sets, recipe, tokenizer, held_out=HELD_OUT, vocabulary=vocabulary)
    readers = readers_of(config, recipe, tokenizer, sets, problems)
    held_out = readers[HELD_OUT].once(config.evaluation.num_prompts) if HELD_OUT in readers else []
    by_role = {name: readers.get(f"roles.{name}.data", readers["data"]) for name in config.roles}
    told = {name: {"path": source.path, **readers[name].told} for name, source in sets.items()}
    return by_role, held_out, {f"rows of {name}": own for name, own in told.items()}


def policies(config: TrainConfig, recipe: Recipe) -> dict[str, MegatronPolicy]:
    """The model of every role that has a policy of its own; those that sleep are asleep. Collective.

    Roles with adapters of the same model and layout share one model.
    """
    trained, owner = trained_policies(config, recipe), owners(config.roles)
    out: dict[str, MegatronPolicy] = {}
    for name, role in config.roles.items():
        if not role.has_policy:
            continue
        groups = parallel.create(role.layout, seed=config.run.seed)
        out[name] = MegatronPolicy(
            role, groups, trainable=name in trained, seed=config.run.seed, deterministic=config.run.deterministic,
            base=out.get(owner.get(name, "")),
        )  # fmt: skip
        if role.sleep:  # before the next role is built: both may not fit awake
            out[name].memory.sleep()
    return out


def policy_of(config: TrainConfig, recipe: Recipe) -> dict[str, str]:
    """The name of the policy that each trained role's rollouts train: its own, or that of the role it is the
    same as.
    """
    return {name: config.roles[name].same_as or name for name, part in recipe.roles().items() if part.trained}


def trained_policies(config: TrainConfig, recipe: Recipe) -> list[str]:
    """The names of the policies that are updated, each once."""
    return list(dict.fromkeys(policy_of(config, recipe).values()))


def uncredited(config: TrainConfig, recipe: Recipe) -> frozenset[str]:
    """The trained roles whose loss reads no advantages."""
    found = policy_of(config, recipe).items()
    return frozenset(role for role, name in found if not PolicyLoss(config.roles[name].loss).uses_advantages)


def table(
    config: TrainConfig, engines: Mapping[str, Engine], tokenizers: Mapping[str, Any], grade: Grade, driver: Driver
) -> Table:  # fmt: skip
    """Returns the table that the recipe plays with. Roles that share a policy share its engine.

    Other ranks than the driver may lack engines.
    """
    owners = {name: role.same_as or name for name, role in config.roles.items()}
    return Table(
        engines={name: engines[owner] for name, owner in owners.items() if owner in engines},
        tokenizers=asked_tokenizers(config, tokenizers),
        samplings={
            name: dataclasses.replace(sampling_of(role.sampling), tandem=tandem_of(role))
            for name, role in config.roles.items()
        },
        max_prompt_tokens={name: role.max_prompt_tokens for name, role in config.roles.items()},
        partner_weights={n: r.tandem.junior_weight for n, r in config.roles.items() if r.tandem is not None},
        grade=grade,
        watch=driver.watch,
        seed=config.run.seed,
        half=config.reward.half,
        max_failure_share=config.reward.max_failure_share,
    )


def tandem_of(role: RoleConfig) -> TandemSampling | None:
    """The engine's terms for a role's tandem."""
    if role.tandem is None:
        return None
    rule = {
        name: value
        for name, value in dataclasses.asdict(role.tandem).items()
        if name not in ("junior", "junior_weight")
    }
    return TandemSampling(rule=Rule(**rule))


def trainee(config: TrainConfig, name: str, policy: MegatronPolicy, refit: Callable[[int], None] | None) -> Trainee:
    """A policy with what it is trained with.

    Rollouts made ahead of training get importance weights against their engine.
    """
    settings = config.roles[name]
    loss = dataclasses.replace(settings.loss, max_tokens=settings.loss.max_tokens or settings.sampling.max_tokens)
    if config.rollouts.max_staleness > 0 and loss.correction is None:
        loss = dataclasses.replace(loss, correction=CORRECTION_AHEAD)
    return Trainee(
        policy=policy,
        loss=PolicyLoss(loss),
        refit=refit,
        samples_per_optimizer_step=settings.samples_per_optimizer_step,
        sleeps=settings.sleep,
        peak_flops=peak_flops(config.run, settings.model.dtype),
    )


def peak_flops(run: Run, dtype: str) -> float | None:
    """Returns the operations a second of one device that the MFU of an update is a share of; None: not known."""
    if run.peak_tflops is not None:
        return run.peak_tflops * 1e12
    if dtype != "bfloat16" or not torch.cuda.is_available():
        return None
    return hardware.peak_flops(torch.cuda.get_device_name())
