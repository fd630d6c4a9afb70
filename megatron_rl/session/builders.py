"""Builds the parts of a training run from the specification: prompt readers, policies, rollout context, trainees."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from megatron_rl.algorithms.tandem_authors import Rule
from megatron_rl.algorithms.value_loss import loss_of
from megatron_rl.config.data_sources import SOURCES, Source
from megatron_rl.config.engines import Rollouts
from megatron_rl.config.evaluation import Reward
from megatron_rl.config.run import Preflight
from megatron_rl.config.schema import HELD_OUT, RoleConfig, Run
from megatron_rl.data.mixed_sources import MixedReader
from megatron_rl.data.problems import PromptReader
from megatron_rl.devices import hardware
from megatron_rl.engines.protocol import Engine, TandemSampling
from megatron_rl.megatron import parallel
from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.models.lora_targets import owners
from megatron_rl.rewards.source_grading import GradePools, by_source
from megatron_rl.run.metrics import Stopwatch
from megatron_rl.session.run_setup import sampling_of
from megatron_rl.spec.run_spec import DataSpec, RoleSpec
from megatron_rl.texts.vocabulary import vocabulary_of
from megatron_rl.training.iteration import Grade, Recipe, RolloutContext
from megatron_rl.training.preflight import PreflightPlan
from megatron_rl.training.prompts import asked_tokenizers, read_sets, readers_of
from megatron_rl.training.update import Trainee
from megatron_rl.types import Prompt


def prompts(
    recipe: Recipe,
    data: DataSpec,
    roles: Mapping[str, RoleSpec],
    tokenizers: Mapping[str, Any],
    limits: Mapping[str, int],
    *,
    seed: int,
) -> tuple[dict[str, PromptReader | MixedReader], dict[str, list[Prompt]], dict[str, dict[str, Any]]]:
    """Returns three mappings: {role: prompt reader}, {name of an evaluation set: prompts}, and {"rows of SETTING":
    {path, row count and sha256 of the data set}}, with keys such as "rows of data".

    Roles without separate data share a reader. `limits`: see RunSpec.prompt_limits. Raises ConfigError if a set
    contains no data or has a form that the recipe or the tokenizer cannot use, and DataError if too many rows are bad,
    too many prompts are too long, or a prompt cannot be encoded.
    """
    role = next(iter(recipe.roles()))
    tokenizer = asked_tokenizers(roles, tokenizers)[role]
    evaluated = data.held_out if data.replay is None else ()  # a replay of saved rollouts has no engine to evaluate
    places = {own.name: f"{HELD_OUT}.{own.name}" for own in evaluated}
    sets = {**data.training, **{places[own.name]: own.source for own in evaluated}}
    vocabulary = vocabulary_of(roles[role].model, tokenizers[role])
    problems = read_sets(sets, recipe, tokenizer, held_out=evaluated, vocabulary=vocabulary)
    readers = readers_of(recipe, tokenizer, sets, problems, limits=limits, seed=seed)
    shared: PromptReader | MixedReader
    if sources := {name: readers[f"{SOURCES}.{name}"] for name in data.sources}:
        shared = MixedReader(sources, data.weights, seed=seed)
    else:
        shared = readers["data"]
    by_role = {name: readers.get(f"roles.{name}.data", shared) for name in roles}
    told = {name: {"path": source.path, **readers[name].told} for name, source in sets.items()}
    held_out = {name: readers[place].once() for name, place in places.items()}
    return by_role, held_out, {f"rows of {name}": own for name, own in told.items()}


def grade_with(sources: Mapping[str, Source], reward: Reward, pools: GradePools) -> Grade:
    """Returns the grader of a run. It grades the problems of a source with the source's reward if the source has one,
    and all other problems with the run's reward."""
    graders = {name: pools.of(source.reward).grade for name, source in sources.items() if source.reward}
    return by_source(graders, pools.of(reward).grade)


def preflight_plan(
    settings: Preflight,
    held_out_name: str | None,
    reward: Reward,
    sources: Mapping[str, Source],
    reader: PromptReader | MixedReader,
    held_out: Mapping[str, Sequence[Prompt]],
) -> PreflightPlan | None:
    """Returns the plan of the preflight (the checks before the first update), or None if the preflight is disabled.

    `held_out_name`: name of the evaluation set whose problems are tried (RunSpec.preflight_set); None: problems of the
    training data. `reader`: the prompt reader of the first role. `held_out`: {name of an evaluation set: prompts}.
    """
    if not settings.enabled:
        return None
    held_out_prompts = held_out.get(held_out_name or "")
    return PreflightPlan(
        settings=settings,
        prompts=held_out_prompts or reader.first(settings.num_prompts),
        place=f"{HELD_OUT}: {held_out_name}" if held_out_prompts else "data",
        reward=reward,
        rewards={name: source.reward for name, source in sources.items() if source.reward is not None},
    )


def policies(
    roles: Mapping[str, RoleSpec], trained: Collection[str], run: Run, *, ranks: Mapping[str, range] | None = None
) -> dict[str, MegatronPolicy]:
    """Loads the model of each role that has a separate policy and whose ranks include this rank. Returns {role: policy}
    in the order of the roles. Collective over the world.

    `ranks`: {role: its ranks}, see `RunSpec.role_ranks`; None: each role has all ranks. Policies of roles with the
    setting `sleep` are offloaded from the GPU. Roles with LoRA adapters on the same model, parallel layout and ranks
    share one base model.
    """
    ranks, owner = ranks or {}, owners(roles, ranks)
    # Every rank creates the groups of all roles before any model is loaded, so that no role waits for another's model.
    groups_of = {
        name: parallel.create(role.layout, ranks.get(name), seed=run.seed)
        for name, role in roles.items()
        if role.has_policy
    }
    out: dict[str, MegatronPolicy] = {}
    for name, groups in groups_of.items():
        if groups is None:
            continue
        role = roles[name]
        out[name] = MegatronPolicy(
            role, groups, trainable=name in trained, seed=run.seed, deterministic=run.deterministic,
            base=out.get(owner.get(name, "")),
        )  # fmt: skip
        if role.reference:
            out[name].keep_reference()
        if role.sleep:  # offloaded before the next model is built, because two models may not fit in GPU memory
            out[name].memory.sleep()
    return out


def context(
    roles: Mapping[str, RoleSpec],
    reward: Reward,
    rollouts: Rollouts,
    engines: Mapping[str, Engine],
    tokenizers: Mapping[str, Any],
    grade: Grade,
    watch: Stopwatch,
    *,
    seed: int,
) -> RolloutContext:
    """Returns the engines, tokenizers, sampling parameters and grader with which the recipe collects rollouts. Roles
    that share a policy share an engine.

    `engines` may be incomplete on ranks other than the driver (rank 0), because the driver generates the rollouts.
    """
    return RolloutContext(
        engines={
            name: engines[role.owner] for name, role in roles.items() if role.head is None and role.owner in engines
        },
        tokenizers=asked_tokenizers(roles, tokenizers),
        samplings={
            name: dataclasses.replace(
                sampling_of(role.sampling), tandem=tandem_of(role), top=_top_of(roles[role.owner])
            )
            for name, role in roles.items()
        },
        max_prompt_tokens={name: role.max_prompt_tokens for name, role in roles.items()},
        partner_weights={n: r.tandem.junior_weight for n, r in roles.items() if r.tandem is not None},
        grade=grade,
        watch=watch,
        seed=seed,
        threshold=reward.threshold,
        lowest_reward=reward.bounds[0],
        max_failure_share=reward.max_failure_share,
        voted=rollouts.labels == "votes",
    )


def _top_of(role: RoleSpec) -> int:
    """Returns the number of the engine's most likely tokens at each position that the loss of a policy reads: 0
    without loss.centering."""
    return role.loss.centering if role.has_policy and role.head is None else 0


def tandem_of(role: RoleConfig) -> TandemSampling | None:
    """Returns the sampling parameters for Tandem RL, in which a trained and a frozen model generate each response in
    turns. Returns None if the role has no `tandem`."""
    if role.tandem is None:
        return None
    rule = {
        name: value
        for name, value in dataclasses.asdict(role.tandem).items()
        if name not in ("junior", "junior_weight")
    }
    return TandemSampling(rule=Rule(**rule))


def trainee(role: RoleSpec, run: Run, policy: MegatronPolicy) -> Trainee:
    """Returns everything that is needed to train a role: the policy, the loss and the batch settings."""
    return Trainee(
        policy=policy,
        loss=loss_of(role),
        samples_per_optimizer_step=role.samples_per_optimizer_step,
        sleeps=role.sleep,
        peak_flops=peak_flops(run, role.model.dtype),
    )


def with_settings(trainee: Trainee, role: RoleSpec) -> Trainee:
    """Returns the trainee with the loss and the batch settings of a stage of the run."""
    return dataclasses.replace(trainee, loss=loss_of(role), samples_per_optimizer_step=role.samples_per_optimizer_step)


def peak_flops(run: Run, dtype: str) -> float | None:
    """Returns the peak FLOP/s of one device, the denominator of MFU (model FLOP/s utilization); None if unknown."""
    if run.peak_tflops is not None:
        return run.peak_tflops * 1e12
    if dtype != "bfloat16" or not torch.cuda.is_available():
        return None
    return hardware.peak_flops(torch.cuda.get_device_name())
