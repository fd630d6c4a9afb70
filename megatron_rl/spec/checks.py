"""Checks the settings of a specification against each other, the number of ranks, the recipe and the models' files.

Constraints within a single section of the config are checked by the section's class. This module does not import torch.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_rl.algorithms.tandem_authors import read_boundaries
from megatron_rl.algorithms.value_loss import loss_of
from megatron_rl.batches.packed_batch import ADVANTAGES
from megatron_rl.config import plugins
from megatron_rl.config.base import ConfigError, Use, read_object, refusal_of
from megatron_rl.config.engines import Embedded, Rollouts, Servers
from megatron_rl.config.evaluation import NO_SCALE, Reward
from megatron_rl.config.model import LossConfig, RoleConfig
from megatron_rl.config.run import Run, Sinks
from megatron_rl.models import registry
from megatron_rl.models.divisibility import engine_problems, trainer_problems
from megatron_rl.models.lora_targets import adapter_problems
from megatron_rl.models.setting_limits import prefix_problems, setting_problems
from megatron_rl.models.sizes import Features, Sizes
from megatron_rl.spec.data_checks import data_problems, run_data_problems
from megatron_rl.spec.form_checks import response_form_problems
from megatron_rl.spec.loss_inputs import centering_problems, loss_input_problems, row_problems
from megatron_rl.spec.rank_sets import rank_sets
from megatron_rl.spec.run_spec import EngineSpec, EvalSpec, GenerateSpec, RoleSpec, RunSpec, SftSpec, Spec, TrainingSpec
from megatron_rl.spec.server_checks import colocation_problems, low_precision_problems, served_adapter_problems
from megatron_rl.spec.server_gpus import number_problems
from megatron_rl.spec.stages import recipe_differences
from megatron_rl.weights.rank_layouts import EngineLayout, TrainerLayout, block_problems


def problems(spec: Spec, *, to_come: bool = False) -> list[str]:
    """Returns one error message for each invalid setting of a run's specification. Each message says how to fix it.

    `to_come`: if True, allows model directories that do not exist yet because an earlier job will write them.
    """
    errors = [*_problems(spec, to_come)]
    if isinstance(spec, RunSpec):
        if not errors and spec.recipe is not None:
            errors += _reset_problems(spec.reference_resets, spec.roles, spec.run.save_every)
        begins = 0
        for number, stage in enumerate(spec.stages):
            lines = [*_problems(stage.spec, to_come), *recipe_differences(spec.recipe, stage.spec.recipe)]
            if begins >= (count := spec.loop.num_iterations) > 0:
                lines.append(f"the stage begins after {begins} iterations, and the run has {count}: leave it out")
            begins = stage.until
            errors += [f"stages[{number}]: {line}" for line in lines if line not in errors]
    return errors


def _problems(spec: Spec, to_come: bool) -> Iterator[str]:
    sets, problems = rank_sets(spec.roles, spec.cluster.ranks)
    yield from problems
    for name, role in spec.roles.items() if isinstance(spec, TrainingSpec) else ():
        place = f"roles.{name}" if isinstance(spec, RunSpec) else "layout of the model"
        if isinstance(spec, RunSpec):
            yield from (f"roles.{name}.{line}" for line in role_problems(role))
        if role.has_policy and role.model.path:
            yield from _trained_problems(place, role, len(sets[name]), to_come)
    yield from _untrained_problems(spec, to_come)
    if isinstance(spec, RunSpec):
        yield from _run_problems(spec)
    if isinstance(spec, SftSpec):
        yield from _sft_problems(spec)
    if spec.engine is not None:
        yield from number_problems(spec.engine)
        yield from _engine_problems(spec.engine, to_come)
    yield from data_problems(spec)
    if isinstance(spec, RunSpec):
        yield from run_data_problems(spec.data, spec.loop.evaluation, spec.recipe, spec.reward)
    yield from response_form_problems(spec)
    if isinstance(spec, TrainingSpec):
        yield from _sink_problems(spec.sinks)
        most = spec.loop.num_iterations if isinstance(spec, RunSpec) else math.inf
        yield from spec.run.profile.rank_problems(spec.cluster.ranks, most)
    if spec.reward is not None:
        yield from refusal_of(plugins.look_at, Use(target=spec.reward.target, args=spec.reward.args))
    if isinstance(spec, RunSpec) and spec.recipe is not None:
        yield from recipe_problems(spec)


def _run_problems(spec: RunSpec) -> Iterator[str]:
    settings, ahead = spec.engine.settings, spec.loop.rollouts.ahead
    if not spec.roles:
        yield "roles is empty: name at least one role"
    if ahead:
        try:
            copy.deepcopy(spec.recipe)
        except TypeError as error:
            yield f"rollouts.max_staleness = {ahead}: copy.deepcopy fails on the recipe ({error}); set it to 0"
    yield from low_precision_problems(spec.roles, settings)
    if isinstance(settings, Embedded):
        if spec.engine.refit.staging != "off":
            yield (
                f"refit.staging = {spec.engine.refit.staging!r} with engine.kind = 'embedded': that engine generates "
                "nothing during a refit; set refit.staging to auto"
            )
        return
    if settings.colocate:
        yield from colocation_problems(spec.roles, spec.engine, settings, ahead=ahead, ranks=spec.cluster.ranks)
    if settings.urls:
        served = list(spec.engine.opened)
        counts = {name: len(urls) for name, urls in settings.urls.items()}
        if set(counts) != set(served) or set(counts.values()) != {settings.replicas}:
            advice = f"{settings.replicas} (engine.replicas) for each of {', '.join(served)}"
            yield f"engine.urls has {counts}: give {advice}"
        if settings.start:
            yield "engine.urls with engine.start = true: servers that run are not started; set engine.start=false"
    yield from settings.role_problems(spec.roles)
    if settings.serves_adapters:
        yield from served_adapter_problems(spec.roles, spec.engine.opened, settings, ahead=ahead)


def role_problems(role: RoleConfig) -> Iterator[str]:
    """Yields error messages about settings of a role that are invalid for every model architecture."""
    if not role.model.path:
        yield "model.path is empty: give a model directory or a hub name, or name a role in same_as"
    if role.endpoint is not None and role.policy == "own":
        yield "endpoint with policy = 'own': an endpoint keeps its weights; set policy to none"
    if role.endpoint is not None and role.tandem is not None:
        yield "endpoint with tandem: an endpoint serves one model; leave one of them out"
    pair, longest = role.tandem, role.sampling.max_tokens
    if pair is not None and pair.strategy == "chunk" and pair.chunk_size >= longest:
        yield (
            f"tandem.chunk_size = {pair.chunk_size}: the senior begins, and sampling.max_tokens = {longest} ends every "
            "text before the junior's first token; give a smaller chunk_size"
        )
    if pair is not None and pair.boundary_ids is not None and Path(pair.boundary_ids).is_file():
        read = _read_model("", role.model.path, True)[1]
        yield from refusal_of(read_boundaries, pair.boundary_ids, read and read[0].vocab)
    if role.lora is not None and role.policy == "none":
        yield "lora with policy = 'none': nothing is trained; leave lora out, or set policy to own"
    yield from _head_problems(role)
    if not role.has_policy or not role.model.path:
        return
    yield from prefix_problems(role)
    longest = role.max_prompt_tokens + role.sampling.max_tokens
    if role.micro_batch_tokens * role.layout.cp < longest:
        shares = f" x layout.cp = {role.layout.cp}" if role.layout.cp > 1 else ""
        yield (
            f"micro_batch_tokens = {role.micro_batch_tokens}{shares} is less than max_prompt_tokens + "
            f"sampling.max_tokens = {longest}: one sequence would not fit; raise it or layout.cp, or lower these"
        )


def _head_problems(role: RoleConfig) -> Iterator[str]:
    """Yields error messages about settings that contradict `head`, or that are read only by roles with a head."""
    defaults = LossConfig()
    if role.head is None and role.loss.value_clip != defaults.value_clip and not role.loss.value_coef:
        yield f"loss.value_clip = {role.loss.value_clip} without head: only a value loss reads it; leave it out"
    if role.head is None or role.shares_as_critic:
        return
    place = f"head = {role.head!r} with"
    reasons = {
        "policy = 'none': the trainer computes what a head puts out; set policy to own": role.policy == "none",
        "endpoint: a model with a head generates no text; leave endpoint out": role.endpoint is not None,
        "tandem: a model with a head generates no text; leave tandem out": role.tandem is not None,
        "router_replay = true: an engine's choices are those of another model's experts; set it to false": (
            role.router_replay
        ),
    }
    yield from (f"{place} {reason}" for reason, holds in reasons.items() if holds)
    read = ("value_clip", "aggregation", "max_tokens")
    for name, value in vars(role.loss).items():
        if name not in read and value != vars(defaults)[name]:
            yield f"{place} loss.{name} = {value!r}: a value loss reads {', '.join(read)} alone; leave it out"


def _sft_problems(spec: SftSpec) -> Iterator[str]:
    role = spec.roles["model"]
    yield from prefix_problems(role)
    yield from (refused := refusal_of(loss_of, role))
    needs = frozenset() if refused else loss_of(role).needs
    most, what = (2 * spec.data.max_tokens, "twice ") if "pairs" in needs else (spec.data.max_tokens, "")
    if role.micro_batch_tokens * role.layout.cp < most:
        yield (
            f"micro_batch_tokens = {role.micro_batch_tokens} is less than {what}data.max_tokens = "
            f"{spec.data.max_tokens}: one pair would not fit; raise micro_batch_tokens or lower data.max_tokens"
        )
    if spec.loss.precompute_ref_log_probs and needs and "reference" not in needs:
        yield (
            f"loss.precompute_ref_log_probs = true with loss.objective = {role.loss.objective!r}, which reads no "
            "reference: set it to false"
        )
    if role.loss.centering:
        yield f"loss.centering = {role.loss.centering}: texts of a data set have no engine to center for; leave it out"
    yield from row_problems(role, needs)
    if spec.run.iterations is not None:
        yield f"run.iterations = {spec.run.iterations}: SFT has its own `steps`; set that, and run.iterations to null"


def _trained_problems(place: str, role: RoleConfig, ranks: int, to_come: bool) -> Iterator[str]:
    """Yields error messages about a trained model: about a parallel layout that does not fit `ranks` ranks or the
    model's sizes, and about settings that the model does not support."""
    path = role.model.path
    yield from (f"{place}: {line}" for line in role.layout.rank_problems(ranks))
    problems, read = _read_model(place, path, to_come)
    yield from problems
    if read is not None:
        sizes, features = read[0].with_head(role.head), read[1]
        lines = trainer_problems(sizes, role.layout, path)
        lines += setting_problems(sizes, features, role.model, path, router_replay=role.router_replay)
        lines += adapter_problems(sizes, role, path)
        if role.loss.centering > sizes.vocab:
            lines.append(f"loss.centering = {role.loss.centering}: {path} has {sizes.vocab} tokens in all; lower it")
        yield from (f"{place}: {line}" for line in lines)


def _untrained_problems(spec: Spec, to_come: bool) -> Iterator[str]:
    """Yields error messages about the config.json of models that are not trained: those of roles without a policy, such
    as teachers and judges, those of `eval` and `generate`, and the frozen juniors of Tandem RL."""
    places = {model: setting for setting, model in spec.models.items()}
    for name, role in spec.roles.items():
        if role.policy == "none" and role.endpoint is None and role.owner == name and role.model.path:
            setting = places.get(role.model, name) if isinstance(spec, EvalSpec | GenerateSpec) else f"roles.{name}"
            yield from _read_model(setting, role.model.path, to_come)[0]
        if role.tandem is not None and role.tandem.junior is not None:
            yield from _read_model(f"roles.{name}.tandem.junior", role.tandem.junior, to_come)[0]


def _engine_problems(engine: EngineSpec, to_come: bool) -> Iterator[str]:
    """Yields error messages about the engines' settings, and about models that cannot be sharded over the GPUs of a
    server."""
    servers = engine.settings if isinstance(engine.settings, Servers) else None
    if not engine.trains:
        if engine.settings.quantization:
            yield (
                f"engine.quantization = {engine.settings.quantization!r} where nothing trains: weight syncs quantise, "
                "and there are none; leave it out"
            )
        if servers is not None and servers.colocate:
            yield "engine.colocate = true where nothing trains: no trainer has GPUs; set it to false"
        return
    for name, role in engine.opened.items():
        path = role.model.path
        if not path:
            continue
        read = _read_model(f"roles.{name}", path, to_come)[1]
        if read is not None and role.has_policy:
            yield from quantisation_problems(engine, name, read[0], Path(path))
        if read is not None and servers is not None:
            sizes = read[0]
            if role.lora is not None and servers.serves_adapters and sizes.experts:
                yield (
                    f"engine.adapters = 'served', and {path} of {name} has experts: vLLM's adapters beside experts are "
                    "not tested; set it to merged"
                )
            lines = engine_problems(sizes, servers.tp, path, expert_parallel=servers.expert_parallel)
            yield from (f"engine of {name}: {line}" for line in lines)


def quantisation_problems(engine: EngineSpec, name: str, sizes: Sizes, directory: Path) -> Iterator[str]:
    """Yields error messages about a role whose engines or model directory hold quantised weights.

    Called when the config is checked, and again before engines are opened, because a model on the hub is read only
    then.
    """
    settings, layout = engine.settings, engine.roles[name].layout
    servers = settings if isinstance(settings, Servers) else None
    published = read_object(directory / "config.json").get("quantization_config")
    if servers is not None and published and not servers.quantization:
        yield (
            f"{directory} has quantised weights, and engine.quantization = null: servers would start with the "
            "files' format, and weight syncs send the model's dtype; set engine.quantization to fp8, or roles.NAME."
            "model.path to a directory that `megatron-rl convert to-hf` has written"
        )
    if not settings.quantization:
        return
    if servers is not None and registry.family_of(sizes).common.bias:
        yield (
            f"engine.quantization = {settings.quantization!r}, and {directory} has experts with biases: servers with "
            "these in 8 bits are not tested; leave it out"
        )
    engine_layout = EngineLayout(quantization=settings.quantization, whole=servers is None)
    if servers is not None:
        engine_layout = replace(engine_layout, tp=servers.tp, expert_parallel=servers.expert_parallel)
    trained = TrainerLayout(tp=layout.tp, dp=layout.expert_tp, etp=layout.expert_tp)
    yield from (f"roles.{name}: {line}" for line in block_problems(sizes, trained, engine_layout))


def _read_model(place: str, path: str, to_come: bool) -> tuple[list[str], tuple[Sizes, Features] | None]:
    """Reads a model's config.json. Returns (error messages, (sizes, features) of the model). The second item is None if
    the file cannot be read.

    Returns ([], None) for a hub name, and for a missing directory that an earlier job will write. Such models are
    checked when the run starts.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        if not to_come and (Path(path).is_absolute() or path.startswith(".")):
            return [f"{place}: no {file}: model.path is a Hugging Face model directory or a hub name"], None
        return [], None
    try:
        facts = read_object(file)
        return [], (registry.read(facts, str(file)), registry.features(facts, str(file)))
    except ConfigError as error:
        return [f"{place}: {error}"], None


def _sink_problems(sinks: Sinks) -> list[str]:
    """Returns an error message for each metric sink (W&B, TensorBoard) whose package is not installed. Without this
    check, a run would continue without the sink."""
    packages = {
        "wandb": (sinks.wandb_project is not None, f"wandb_project = {sinks.wandb_project!r}", "wandb_project to null"),
        "tensorboard": (sinks.tensorboard, "tensorboard = true", "tensorboard to false"),
    }
    return [
        f"sinks.{setting}: the package {package} is not installed; run `pip install {package}`, or set sinks.{off}"
        for package, (used, setting, off) in packages.items()
        if used and importlib.util.find_spec(package) is None
    ]


def recipe_problems(spec: RunSpec) -> list[str]:
    """Returns error messages about settings that contradict the training recipe.

    Checks for: missing or unknown roles, a trained role without a policy, more iterations than the recipe's schedule
    has, a loss that cannot be built or needs other inputs than the recipe gives, groups of rollouts without a learning
    signal, and whatever the recipe's method `check` rejects."""
    recipe, target = spec.recipe, spec.settings["recipe"]["target"]
    parts = recipe.roles()
    errors = [f"roles.{n} is missing" for n in parts if n not in spec.roles]
    errors += [f"roles.{n} is not one of its roles" for n in spec.roles if n not in parts]
    if errors:
        return [f"recipe {target} has the roles {', '.join(parts)}: {'; '.join(errors)}"]
    errors = [
        f"roles.{name}.policy = 'none', and recipe {target} trains that role: set policy to own"
        for name, part in parts.items()
        if part.trained and spec.roles[name].policy == "none"
    ]
    errors += [
        f"roles.{name}.head = {json.dumps(spec.roles[name].head)}: recipe {target} needs {json.dumps(part.head)} there"
        for name, part in parts.items()
        if spec.roles[name].head != part.head
    ]
    errors += [
        f"roles.{name}.lora: the recipe does not train this role, and a new adapter changes nothing; set lora.path to "
        "a trained adapter, or leave lora out"
        for name, role in spec.roles.items()
        if role.has_policy and role.lora is not None and role.lora.path is None and name not in spec.trained_policies
    ]
    if spec.run.iterations is not None and spec.run.iterations > (planned := sum(map(len, recipe.schedule()))):
        errors.append(
            f"run.iterations = {spec.run.iterations}, but the recipe plans {planned} iterations: raise its updates "
            "(recipe.args), or set run.iterations to null"
        )
    errors += refusal_of(recipe.check, spec.checked)
    for name, role in spec.roles.items():
        errors += refusal_of(loss_of, role, place=f"roles.{name}: ")
    errors += (
        []
        if errors
        else [
            *loss_input_problems(recipe, spec.roles, target),
            *centering_problems(
                recipe, spec.roles, spec.engine.settings, spec.loop.rollouts, replayed=spec.data.replay is not None
            ),
            *_score_problems(recipe, spec.roles, target),
            *_vote_problems(recipe, spec.loop.rollouts, target),
        ]
    )
    rewards = [spec.reward, *(source.reward for source in spec.data.sources.values() if source.reward is not None)]
    return errors or [*_signal_problems(recipe, spec.roles, spec.run, rewards)]


def _score_problems(recipe: Any, roles: Mapping[str, RoleSpec], target: str) -> Iterator[str]:
    """Yields an error message for each score (log-probs or values) that the recipe requests and that the run cannot
    compute."""
    kinds = {trained for cycle in recipe.schedule() for trained in cycle}
    for score in sorted({score for trained in kinds for score in recipe.scores_of(trained)}, key=str):
        place = f"recipe {target} requests the score {score.name!r} of {score.role}'s rollouts by {score.by}, "
        if unknown := [name for name in (score.role, score.by) if name not in roles]:
            yield f"{place}and {unknown[0]} is not one of its roles: name it in the recipe's method `roles`"
            continue
        owner = roles[roles[score.by].owner]
        if not owner.has_policy:
            yield f"{place}and roles.{owner.name}.policy = {owner.policy!r} has no model: set policy to own"
        elif (score.name == "value") != (roles[score.by].head is not None):
            yield f"{place}and a role has values if it has a head, and log-probs if it has none"
        elif score.name == "reference_logprobs" and not owner.reference and "reference" not in loss_of(owner).needs:
            yield f"{place}which keeps no reference: set `reference` of the role in the recipe's method `roles`"


def _vote_problems(recipe: Any, rollouts: Rollouts, target: str) -> Iterator[str]:
    """Yields an error message if majority votes replace the known answers (rollouts.labels = votes), but the recipe
    generates no groups of samples that can vote on one label."""
    parts, place = recipe.roles(), "rollouts.labels = 'votes'"
    solver = next(iter(parts))
    if rollouts.labels == "known":
        return
    if not recipe.allows_votes:
        yield f"{place}, and recipe {target} has no groups of samples that elect one label: set it to known"
    elif parts[solver].per_prompt.get(solver, 1) < 2:
        yield f"{place} with one sample of a problem, which has no majority: set recipe.args.group_size to 2 or more"


def _reset_problems(resets: Mapping[str, int], roles: Mapping[str, RoleSpec], save_every: int) -> Iterator[str]:
    """Yields an error message for each role whose reference model cannot be replaced every reset_reference_every
    iterations."""
    for name, every in resets.items():
        place = f"roles.{name}.loss.reset_reference_every = {every}"
        if not roles[name].reference and "reference" not in loss_of(roles[name]).needs:
            yield f"{place}: nothing reads a reference; set kl_coef above 0, or reset_reference_every to null"
        if not save_every or every % save_every:
            yield (
                f"{place}: a resumed run reads the reference from the checkpoint of that iteration; give a multiple of "
                f"run.save_every = {save_every}"
            )


def _signal_problems(recipe: Any, roles: Mapping[str, RoleSpec], run: Run, rewards: Sequence[Reward]) -> Iterator[str]:
    """Yields error messages about settings with which rollouts have no learning signal.

    Checks for: sampling that makes all rollouts of a group identical, a batch of one rollout with an advantage
    estimator that compares the rollouts of a batch, and a reward range that the recipe does not support. Groups that
    are too small for the advantage estimator are rejected by the recipe's own checks.

    `rewards`: the reward of the run, and the rewards of its sources.
    """
    bounds = rewards[0].bounds  # all rewards of a run have the same bounds (data_checks)
    estimator = str(vars(recipe).get("estimator"))
    needs_shares = "w_reinforce" in estimator or recipe.needs_shares
    if any(reward.threshold is None for reward in rewards) and (needs_shares or recipe.needs_correct()):
        part = recipe.needs_correct() or ("recipe.args.estimator" if "w_reinforce" in estimator else "this recipe")
        yield f"{NO_SCALE}, because {part} needs to know which answers are correct"
    elif bounds != (0.0, 1.0) and needs_shares:
        why = "this recipe understands rewards from 0 to 1 alone"
        if "w_reinforce" in estimator:
            why = "recipe.args.estimator = 'w_reinforce' tells correct answers by scores above 0.5"
        yield f"reward.range = {list(bounds)}: {why}; scale the reward to [0, 1]"
    for name, part in {} if run.train_without_signal else recipe.roles().items():
        role = roles[name]
        if not part.trained or ADVANTAGES not in loss_of(role).needs:
            continue
        alike = {"temperature = 0": role.sampling.temperature == 0, "top_k = 1": role.sampling.top_k == 1}
        if part.samples > 1 and part.episode.answers == 1 and (why := [text for text, holds in alike.items() if holds]):
            yield (
                f"roles.{name}.sampling.{why[0]}: all {part.samples} samples of a problem are the same text, so that "
                "no group has anything to learn from; draw them with temperature 1.0 and top_k 0"
            )
        if part.samples * run.prompts_per_iteration == 1 and "reinforce_pp" in estimator:
            yield (
                "run.prompts_per_iteration = 1 with one sample: the estimator compares the rollouts of a batch, and "
                "there is one alone; raise run.prompts_per_iteration or recipe.args.group_size"
            )
