"""Checks the settings of a specification against each other, the number of ranks, the recipe and the models' files.

Constraints within a single section of the config are checked by the section itself. This module does not import torch.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_rl.algorithms.policy_loss import PolicyLoss
from megatron_rl.config import plugins
from megatron_rl.config.base import ConfigError, Use, read_object
from megatron_rl.config.data_settings import ALL, TEST, TRAIN, generated_name, generated_names, resolve
from megatron_rl.config.datasets import PromptSet
from megatron_rl.config.engines import Embedded, Servers
from megatron_rl.config.model import Layout, RoleConfig
from megatron_rl.config.run import Sinks
from megatron_rl.config.schema import HELD_OUT
from megatron_rl.models import registry
from megatron_rl.models.divisibility import Axes, engine_problems, trainer_problems
from megatron_rl.models.lora_targets import adapter_problems
from megatron_rl.models.setting_limits import prefix_problems, setting_problems
from megatron_rl.models.sizes import Features, Sizes
from megatron_rl.spec.run_spec import EngineSpec, RunSpec, SftSpec, Spec, TrainingSpec
from megatron_rl.spec.server_gpus import number_problems


def problems(spec: Spec, *, to_come: bool = False) -> list[str]:
    """Returns one error message for each invalid setting of a run's specification. Each message says how to fix it.

    `to_come`: if True, allows model directories that do not exist yet because an earlier job will write them.
    """
    found: list[str] = []
    for name, role in spec.roles.items() if isinstance(spec, TrainingSpec) else ():
        place = f"roles.{name}" if isinstance(spec, RunSpec) else "layout of the model"
        if isinstance(spec, RunSpec):
            found += [f"roles.{name}.{line}" for line in role_problems(role)]
        if role.has_policy and role.model.path:
            found += _trained_problems(place, role, spec.cluster.ranks, to_come)
    if isinstance(spec, RunSpec):
        found += _run_problems(spec)
    if isinstance(spec, SftSpec):
        found += _sft_problems(spec)
    if spec.engine is not None:
        found += number_problems(spec.engine)
        found += _engine_problems(spec, spec.engine, to_come)
    for name, source in spec.sets.items():
        found += _set_problems(name, source)
    found += _overlaps(spec)
    if isinstance(spec, TrainingSpec):
        found += _sink_problems(spec.sinks)
    if spec.reward is not None:
        found += _said(plugins.look_at, Use(target=spec.reward.target, args=spec.reward.args))
    if isinstance(spec, RunSpec) and spec.recipe is not None:
        found += recipe_problems(spec)
    return found


def _said(check: Callable[..., object], *args: object, place: str = "") -> list[str]:
    """Calls a function that checks settings. If it raises ConfigError, returns a list of one message, which begins with
    `place`; otherwise an empty list."""
    try:
        check(*args)
    except ConfigError as error:
        return [f"{place}{error}"]
    return []


def _run_problems(spec: RunSpec) -> list[str]:
    found, settings, ahead = [], spec.engine.settings, spec.loop.rollouts.max_staleness
    if not spec.roles:
        found.append("roles is empty: name at least one role")
    if ahead and isinstance(settings, Embedded):
        found.append(
            f"rollouts.max_staleness = {ahead} with engine.kind = 'embedded': that engine runs in the trainer's "
            "processes and cannot write rollouts while they train; set it to 0, or engine.kind to vllm or sglang"
        )
    if isinstance(settings, Servers) and settings.colocate:
        found += _colocation_problems(spec, settings)
    if isinstance(settings, Servers) and settings.urls:
        served = list(spec.engine.opened)
        counts = {name: len(urls) for name, urls in settings.urls.items()}
        if set(counts) != set(served) or set(counts.values()) != {settings.replicas}:
            wanted = f"{settings.replicas} (engine.replicas) for each of {', '.join(served)}"
            found.append(f"engine.urls has {counts}: give {wanted}")
        if settings.start:
            found.append(
                "engine.urls with engine.start = true: servers that run already are not started; set engine.start=false"
            )
    if isinstance(settings, Servers):
        found += settings.role_problems(spec.roles)
        found += _served_adapter_problems(spec, settings) if settings.serves_adapters else []
    return found


def _served_adapter_problems(spec: RunSpec, settings: Servers) -> list[str]:
    """Returns error messages about settings that are invalid if servers apply LoRA adapters at inference
    (engine.adapters = 'served')."""
    found, ahead = [], spec.loop.rollouts.max_staleness
    if all(role.lora is None for role in spec.roles.values()):
        found.append("engine.adapters = 'served', and no role has lora: set it to merged")
    if settings.urls:
        found.append(
            "engine.adapters = 'served' with engine.urls: those servers share no directory with the run, where "
            "adapters are written; set it to merged, or leave urls out"
        )
    if settings.pause == "keep" and ahead > 1:
        found.append(
            f"engine.pause = 'keep' with engine.adapters = 'served' and rollouts.max_staleness = {ahead}: answers "
            "under way would need adapters that are gone; set engine.pause to abort or wait"
        )
    sharing = [name for name, role in spec.engine.opened.items() if role.servers != name]
    if sharing and ahead > 1:
        found.append(
            f"roles.{sharing[0]} and roles.{spec.roles[sharing[0]].servers} share servers (engine.adapters = "
            f"'served'), and rollouts.max_staleness = {ahead}: a refit does not cut answers of shared servers short, "
            "and they would need adapters that are gone; set it to 1, or engine.adapters to merged"
        )
    return found


def _colocation_problems(spec: RunSpec, settings: Servers) -> list[str]:
    """Returns error messages about settings that are invalid if servers share the trainer's GPUs (engine.colocate =
    true)."""
    ranks, sets, place = spec.cluster.ranks, len(spec.engine.server_roles), "engine.colocate = true with"
    found = []
    if not settings.start or settings.urls:
        found.append(
            f"{place} engine.start = false or engine.urls: each of the trainer's nodes starts the servers in its own "
            "GPUs; set engine.start to true and leave engine.urls out"
        )
    if settings.gpus:
        found.append(
            f"{place} engine.gpus = {list(settings.gpus)}: the servers stand in the trainer's GPUs, replica 0 in the "
            "first engine.tp of them; leave engine.gpus out"
        )
    if settings.replicas * settings.tp > ranks:
        found.append(
            f"{place} engine.replicas = {settings.replicas} x engine.tp = {settings.tp} on {ranks} ranks: a role has "
            "at most one server in a GPU; lower engine.replicas or engine.tp"
        )
    if (shares := settings.memory_share * sets) > 1:
        found.append(
            f"{place} engine.memory_share = {settings.memory_share}: servers of {sets} roles stand in each GPU and "
            f"would take {shares:g} of it; lower it to {0.9 / sets:.2g}"
        )
    if spec.loop.rollouts.max_staleness:
        found.append(
            f"{place} rollouts.max_staleness = {spec.loop.rollouts.max_staleness}: servers in the trainer's GPUs sleep "
            "while it trains, so that no iteration can be written beside training; set one of them to its default"
        )
    if spec.engine.refit.delta:
        found.append(
            f"{place} refit.delta = true: servers that drop their weights have nothing that a difference could be "
            "added to; set refit.delta to false"
        )
    found += [
        f"{place} roles.{name}.lora: roles with adapters may share one model in the trainer, which does not leave the "
        "GPU; set engine.colocate to false"
        for name, role in spec.roles.items()
        if role.lora is not None
    ]
    return found


def role_problems(role: RoleConfig) -> Iterator[str]:
    """Yields error messages about a role's settings that are invalid whatever the architecture of its model."""
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
    if role.lora is not None and role.policy == "none":
        yield "lora with policy = 'none': nothing is trained; leave lora out, or set policy to own"
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


def _sft_problems(spec: SftSpec) -> Iterator[str]:
    role = spec.roles["model"]
    if role.micro_batch_tokens * role.layout.cp < spec.data.max_tokens:
        yield (
            f"micro_batch_tokens = {role.micro_batch_tokens} is less than data.max_tokens = {spec.data.max_tokens}: "
            "one pair would not fit; raise micro_batch_tokens or lower data.max_tokens"
        )
    if spec.run.iterations is not None:
        yield f"run.iterations = {spec.run.iterations}: SFT has its own `steps`; set that, and run.iterations to null"


def _trained_problems(place: str, role: RoleConfig, ranks: int, to_come: bool) -> list[str]:
    """Returns error messages about a trained model: an invalid parallel layout, and settings that the model does not
    support."""
    found, read = _read_model(place, role.model.path, to_come)
    if read is not None:
        (sizes, features), path = read, role.model.path
        lines = trainer_problems(sizes, Axes.of(role.layout), path)
        lines += setting_problems(sizes, features, role.model, path, router_replay=role.router_replay)
        lines += adapter_problems(sizes, role, path)
        found += [f"{place}: {line}" for line in lines]
    return [*_rank_problems(place, role.layout, ranks), *found]


def _rank_problems(place: str, layout: Layout, ranks: int) -> list[str]:
    """Returns error messages about a parallel layout that is invalid on `ranks` ranks, whatever the model."""
    if ranks % layout.model_ranks:
        return [
            f"{place}: tp {layout.tp} x cp {layout.cp} x pp {layout.pp} = {layout.model_ranks} does not divide {ranks} "
            "ranks: start a multiple of it (launch.nproc, or the launcher's), or change the layout"
        ]
    if ranks % layout.expert_ranks:
        return [
            f"{place}: etp {layout.expert_tp} x ep {layout.ep} x pp {layout.pp} = {layout.expert_ranks} does not "
            f"divide {ranks} ranks: lower ep or etp (null is tp), or start a multiple of it"
        ]
    return []


def _engine_problems(spec: Spec, engine: EngineSpec, to_come: bool) -> list[str]:
    """Returns error messages about the models that the engines generate with.

    Checks the models of untrained roles, the frozen junior models of Tandem RL, and whether each model can be sharded
    over the GPUs of a server."""
    found, settings = [], engine.settings
    if not engine.trains:
        if isinstance(settings, Servers) and settings.colocate:
            found.append("engine.colocate = true where nothing trains: no trainer has GPUs; set it to false")
        return found
    for name, role in engine.opened.items():
        if not role.model.path:
            continue
        own, read = _read_model(f"roles.{name}", role.model.path, to_come)
        found += own if role.policy == "none" else []
        served = role.lora is not None and isinstance(settings, Servers) and settings.serves_adapters
        if served and read is not None and read[0].experts:
            found.append(
                f"engine.adapters = 'served', and {role.model.path} of {name} has experts: vLLM's adapters beside "
                "experts are not tested; set it to merged"
            )
        if read is not None and isinstance(settings, Servers):
            lines = engine_problems(read[0], settings.tp, role.model.path, expert_parallel=settings.expert_parallel)
            found += [f"engine of {name}: {line}" for line in lines]
        if role.tandem is not None and role.tandem.junior is not None:
            found += _read_model(f"roles.{name}.tandem.junior", role.tandem.junior, to_come)[0]
    return found


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


def _set_problems(name: str, source: PromptSet) -> list[str]:
    """Returns error messages about the settings of a prompt set. `name`: name of the setting that describes the set."""
    found = _said(resolve, source, place=f"{name}: ")
    try:
        re.compile(source.answer_pattern or "")
    except re.error as error:
        found.append(f"{name}.answer_pattern = {source.answer_pattern!r} is not a regular expression: {error}")
    if generated_name(source.path) is None:
        if source.generated is not None:
            found.append(
                f"{name}.generated is set, but {name}.path = {source.path!r} is not generated: write reasoning_gym:NAME"
            )
        return found
    found += [
        f"{name}.{key} = {value!r} with {name}.path = {source.path!r}: generated problems have none; set it to null"
        for key, value in {"settings": source.settings, "subset": source.subset, "file": source.file}.items()
        if value is not None
    ]
    if source.split not in (TRAIN, TEST, ALL):
        found.append(f"{name}.split = {source.split!r}: generated problems have {TRAIN}, {TEST} and {ALL}")
    if importlib.util.find_spec("reasoning_gym") is None:
        found.append(f"{name}.path = {source.path!r}: reasoning-gym is not installed; run `pip install reasoning-gym`")
    return found


def _overlaps(spec: Spec) -> list[str]:
    """Returns an error message for each generated (reasoning-gym) training set that may contain questions of the
    held-out set."""
    held = spec.sets.get(HELD_OUT)
    return [
        f"{HELD_OUT} may have questions of {name}: both are of {', '.join(sorted(common))}; set "
        f"{name}.split to {TRAIN} and {HELD_OUT}.split to {TEST}, which have none in common"
        for name, source in spec.sets.items()
        if held is not None
        and name != HELD_OUT
        and (common := generated_names(source) & generated_names(held))
        and {source.split, held.split} != {TRAIN, TEST}
    ]


def _sink_problems(sinks: Sinks) -> list[str]:
    """Returns an error message for each metric sink (W&B, TensorBoard) whose package is not installed. Without this
    check, a run would continue without the sink."""
    wanted = {
        "wandb": (sinks.wandb_project is not None, f"wandb_project = {sinks.wandb_project!r}", "wandb_project to null"),
        "tensorboard": (sinks.tensorboard, "tensorboard = true", "tensorboard to false"),
    }
    return [
        f"sinks.{setting}: the package {package} is not installed; run `pip install {package}`, or set sinks.{off}"
        for package, (asked, setting, off) in wanted.items()
        if asked and importlib.util.find_spec(package) is None
    ]


def recipe_problems(spec: RunSpec) -> list[str]:
    """Returns error messages about settings that do not fit the training recipe.

    Checks for: missing or unknown roles, a trained role without a policy, more iterations than the recipe's schedule
    has, a loss that cannot be built, groups of rollouts without a learning signal, and whatever the recipe's method
    `check` rejects."""
    recipe, target = spec.recipe, spec.settings["recipe"]["target"]
    parts = recipe.roles()
    found = [f"roles.{n} is missing" for n in parts if n not in spec.roles]
    found += [f"roles.{n} is not one of its roles" for n in spec.roles if n not in parts]
    if found:
        return [f"recipe {target} has the roles {', '.join(parts)}: {'; '.join(found)}"]
    found = [
        f"roles.{name}.policy = 'none', and recipe {target} trains that role: set policy to own"
        for name, part in parts.items()
        if part.trained and spec.roles[name].policy == "none"
    ]
    if spec.run.iterations is not None and spec.run.iterations > (planned := sum(map(len, recipe.schedule()))):
        found.append(
            f"run.iterations = {spec.run.iterations}, but the recipe plans {planned} iterations: raise its updates "
            "(recipe.args), or set run.iterations to null"
        )
    found += _said(recipe.check, spec)
    for name, role in spec.roles.items():
        found += _said(PolicyLoss, role.loss, place=f"roles.{name}: ")
    return found or _signal_problems(spec)


def _signal_problems(spec: RunSpec) -> list[str]:
    """Returns error messages about settings with which rollouts have no learning signal.

    Checks for: sampling that makes all rollouts of a group identical, a batch of one rollout with an advantage
    estimator that compares the rollouts of a batch, and a reward range that the recipe does not support. The recipe
    itself rejects groups that are too small for its estimator.
    """
    recipe, bounds, found = spec.recipe, spec.reward.range, []
    estimator = str(vars(recipe).get("estimator"))
    if bounds != (0.0, 1.0) and ("w_reinforce" in estimator or recipe.needs_shares):
        why = "this recipe understands rewards from 0 to 1 alone"
        if "w_reinforce" in estimator:
            why = "recipe.args.estimator = 'w_reinforce' tells correct answers by scores above 0.5"
        found.append(f"reward.range = {list(bounds)}: {why}; scale the reward to [0, 1]")
    for name, part in {} if spec.run.train_without_signal else recipe.roles().items():
        role = spec.roles[name]
        if not part.trained or not PolicyLoss(role.loss).uses_advantages:
            continue
        alike = {"temperature = 0": role.sampling.temperature == 0, "top_k = 1": role.sampling.top_k == 1}
        if part.samples > 1 and part.episode.answers == 1 and (why := [text for text, holds in alike.items() if holds]):
            found.append(
                f"roles.{name}.sampling.{why[0]}: all {part.samples} samples of a problem are the same text, so that "
                "no group has anything to learn from; draw them with temperature 1.0 and top_k 0"
            )
        if part.samples * spec.run.prompts_per_iteration == 1 and "reinforce_pp" in estimator:
            found.append(
                "run.prompts_per_iteration = 1 with one sample: the estimator compares the rollouts of a batch, and "
                "there is one alone; raise run.prompts_per_iteration or recipe.args.group_size"
            )
    return found
