"""Checks settings against each other, the number of ranks and the model's config.json, and says what the numbers mean.

Nothing here imports torch.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

from megatron_rl.config.absent import prompt_sets
from megatron_rl.config.base import read_object
from megatron_rl.config.colocation import colocation_problems
from megatron_rl.config.data_settings import ALL, TEST, TRAIN, generated_name, generated_names, resolve
from megatron_rl.config.schema import (
    ConfigError,
    Embedded,
    Layout,
    PromptSet,
    RoleConfig,
    Servers,
    SftConfig,
    Sinks,
    TrainConfig,
)
from megatron_rl.config.server_gpus import number_problems
from megatron_rl.models import registry
from megatron_rl.models.adapters import adapter_problems, num_elements, owners
from megatron_rl.models.divisibility import Axes, engine_problems, trainer_problems
from megatron_rl.models.setting_limits import prefix_problems, setting_problems
from megatron_rl.models.sizes import Features, Sizes


def check(config: Any, ranks: int, *, to_come: bool = False) -> None:
    """Raises ConfigError for settings that cannot work together, or on `ranks` ranks. It names all problems at once.

    `to_come`: model directories may be missing still, as an earlier stage writes them.
    """
    problems = _train_problems(config, ranks, to_come) if isinstance(config, TrainConfig) else []
    problems += [line for name, source in prompt_sets(config) for line in _prompt_set_problems(name, source)]
    problems += _overlaps(config)
    engine = None if isinstance(config, TrainConfig) else getattr(config, "engine", None)
    if isinstance(engine, Servers) and engine.colocate:
        problems.append("engine.colocate = true where nothing trains: no trainer has GPUs; set it to false")
    problems += number_problems(config)
    if isinstance(config, SftConfig):
        problems += _sft_problems(config, ranks, to_come)
    if isinstance(config, TrainConfig | SftConfig):
        problems += _sink_problems(config.sinks)
    if problems:
        raise ConfigError("\n  ".join(problems))


def _sink_problems(sinks: Sinks) -> list[str]:
    """Returns a line for each place of metrics whose package is not installed: a run would go on without it."""
    wanted = {
        "wandb": (sinks.wandb_project is not None, f"wandb_project = {sinks.wandb_project!r}", "wandb_project to null"),
        "tensorboard": (sinks.tensorboard, "tensorboard = true", "tensorboard to false"),
    }
    return [
        f"sinks.{setting}: the package {package} is not installed; run `pip install {package}`, or set sinks.{off}"
        for package, (asked, setting, off) in wanted.items()
        if asked and importlib.util.find_spec(package) is None
    ]


def _train_problems(config: TrainConfig, ranks: int, to_come: bool) -> list[str]:
    problems: list[str] = []
    if not config.roles:
        problems.append("roles is empty: name at least one role")
    for name, role in config.roles.items():
        problems += _policy_problems(f"roles.{name}", role)
        if role.has_policy and role.model.path:
            problems += _trained_problems(f"roles.{name}", role, ranks, to_come)
            problems += _role_problems(f"roles.{name}", role)
    if config.run.steps is not None and config.run.steps < 1:
        problems.append(
            f"run.steps = {config.run.steps}: zero steps would train nothing; give 1 or more, or null for "
            "the recipe's plan"
        )
    if config.run.prompts_per_step < 1:
        problems.append(f"run.prompts_per_step = {config.run.prompts_per_step}: give 1 or more")
    if config.rollouts.max_staleness and isinstance(config.engine, Embedded):
        problems.append(
            f"rollouts.max_staleness = {config.rollouts.max_staleness} with engine.kind = 'embedded': that engine runs "
            "in the "
            "trainer's processes and cannot write rollouts while they train; set it to 0, or engine.kind to vllm or "
            "sglang"
        )
    problems += _engine_problems(config, to_come)
    if isinstance(config.engine, Servers):
        problems += _server_problems(config, config.engine)
        problems += colocation_problems(config, config.engine, ranks) if config.engine.colocate else []
        problems += config.engine.role_problems(config.roles)
        problems += _adapter_server_problems(config, config.engine) if config.engine.serves_adapters else []
    return problems


def _policy_problems(name: str, role: RoleConfig) -> list[str]:
    """Returns what is wrong with where a role's weights come from."""
    problems = []
    if not role.model.path:
        problems.append(f"{name}.model.path is empty: give a model directory or a hub name, or {name}.same_as a role")
    if role.endpoint is not None and role.policy == "own":
        problems.append(
            f"{name}.endpoint with {name}.policy = 'own': an endpoint keeps its weights; set policy to none"
        )
    if role.endpoint is not None and role.tandem is not None:
        problems.append(f"{name}.endpoint with {name}.tandem: an endpoint serves one model; leave one of them out")
    pair, longest = role.tandem, role.sampling.max_tokens
    if pair is not None and pair.strategy == "chunk" and pair.chunk_size >= longest:
        problems.append(
            f"{name}.tandem.chunk_size = {pair.chunk_size}: the senior begins, and {name}.sampling.max_tokens = "
            f"{longest} ends every text before the junior's first token; give a smaller chunk_size"
        )
    if role.lora is not None and role.policy == "none":
        problems.append(
            f"{name}.lora with {name}.policy = 'none': nothing is trained; leave lora out, or set policy to own"
        )
    return problems


def _sft_problems(config: SftConfig, ranks: int, to_come: bool) -> list[str]:
    problems = _trained_problems("layout of the model", config.trained, ranks, to_come)
    if config.micro_batch_tokens * config.layout.cp < config.data.max_tokens:
        problems.append(
            f"micro_batch_tokens = {config.micro_batch_tokens} is less than data.max_tokens = "
            f"{config.data.max_tokens}: "
            "one pair would not fit; raise micro_batch_tokens or lower data.max_tokens"
        )
    if config.run.steps is not None:
        problems.append(f"run.steps = {config.run.steps}: SFT has its own `steps`; set that, and run.steps to null")
    if config.samples_per_step < 1 or (config.steps is not None and config.steps < 1):
        problems.append(
            f"steps = {config.steps}, samples_per_step = {config.samples_per_step}: zero steps would train nothing"
        )
    return problems


def _server_problems(config: TrainConfig, settings: Servers) -> list[str]:
    problems = []
    if settings.urls:
        served = config.engine_roles
        counts = {name: len(settings.urls.get(name, ())) for name in served}
        if set(settings.urls) != set(served) or set(counts.values()) != {settings.replicas}:
            wanted = f"{settings.replicas} (engine.replicas) for each of {', '.join(served)}"
            problems.append(
                f"engine.urls has { ({name: len(urls) for name, urls in settings.urls.items()}) }: give {wanted}"
            )
        if settings.start:
            problems.append(
                "engine.urls with engine.start = true: servers that run already are not started; set engine.start=false"
            )
    return problems


def _adapter_server_problems(config: TrainConfig, settings: Servers) -> list[str]:
    """Returns what is wrong with servers that compute with adapters beside a model."""
    adapted, problems = [name for name, role in config.roles.items() if role.lora is not None], []
    if not adapted:
        problems.append("engine.adapters = 'served', and no role has lora: set it to merged")
    if settings.urls:
        problems.append(
            "engine.adapters = 'served' with engine.urls: those servers share no directory with the run, where "
            "adapters are written; set it to merged, or leave urls out"
        )
    if settings.pause == "keep" and config.rollouts.max_staleness > 1:
        problems.append(
            "engine.pause = 'keep' with engine.adapters = 'served' and rollouts.max_staleness = "
            f"{config.rollouts.max_staleness}: answers under way would need adapters that are gone; set engine.pause "
            "to abort or wait"
        )
    sharing = [name for name, owner in config.server_owners.items() if owner != name]
    if sharing and config.rollouts.max_staleness > 1:
        problems.append(
            f"roles.{sharing[0]} and roles.{config.server_owners[sharing[0]]} share servers (engine.adapters = "
            f"'served'), and rollouts.max_staleness = {config.rollouts.max_staleness}: a refit does not cut answers of "
            "shared servers short, and they would need adapters that are gone; set it to 1, or engine.adapters to "
            "merged"
        )
    return problems


def _prompt_set_problems(name: str, source: PromptSet) -> list[str]:
    problems = _generated_problems(name, source)
    try:
        resolve(source)
    except ConfigError as error:
        problems.append(f"{name}: {error}")
    try:
        re.compile(source.answer_pattern or "")
    except re.error as error:
        problems.append(f"{name}.answer_pattern = {source.answer_pattern!r} is not a regular expression: {error}")
    return problems


def _generated_problems(name: str, source: PromptSet) -> list[str]:
    """Returns what is wrong with the settings of problems that reasoning-gym generates."""
    if generated_name(source.path) is None:
        if source.generated is None:
            return []
        return [
            f"{name}.generated is set, but {name}.path = {source.path!r} is not generated: write reasoning_gym:NAME"
        ]
    problems = [
        f"{name}.{key} = {value!r} with {name}.path = {source.path!r}: generated problems have none; set it to null"
        for key, value in {"settings": source.settings, "subset": source.subset, "file": source.file}.items()
        if value is not None
    ]
    if source.split not in (TRAIN, TEST, ALL):
        problems.append(f"{name}.split = {source.split!r}: generated problems have {TRAIN}, {TEST} and {ALL}")
    if importlib.util.find_spec("reasoning_gym") is None:
        problems.append(
            f"{name}.path = {source.path!r}: reasoning-gym is not installed; run `pip install reasoning-gym`"
        )
    return problems


def _overlaps(config: Any) -> list[str]:
    """Returns a line for each set of generated problems to train on that may have questions of those held out."""
    sets = dict(prompt_sets(config))
    held = sets.pop("evaluation.prompts", None)
    return [
        f"evaluation.prompts may have questions of {name}: both are of {', '.join(sorted(common))}; set "
        f"{name}.split to {TRAIN} and evaluation.prompts.split to {TEST}, which have none in common"
        for name, source in sets.items()
        if held is not None
        and (common := generated_names(source) & generated_names(held))
        and {source.split, held.split} != {TRAIN, TEST}
    ]


def check_recipe(config: TrainConfig, recipe: Any) -> None:
    """Raises ConfigError when recipe and config name different roles, a trained role has no policy, run.steps is beyond
    the recipe's plan, or the recipe itself refuses the config.
    """
    roles, steps = recipe.roles(), len(recipe.schedule())
    problems = [f"roles.{n} is missing" for n in roles if n not in config.roles]
    problems += [f"roles.{n} is not one of its roles" for n in config.roles if n not in roles]
    if problems:
        raise ConfigError(
            f"recipe {config.recipe.target} plays with the roles {', '.join(roles)}: {'; '.join(problems)}"
        )
    for name, part in roles.items():
        if part.trained and config.roles[name].policy == "none":
            raise ConfigError(
                f"roles.{name}.policy = 'none', and recipe {config.recipe.target} trains that role: set policy to own"
            )
    if config.run.steps is not None and config.run.steps > steps:
        raise ConfigError(
            f"run.steps = {config.run.steps}, but the recipe plans {steps} steps: raise its updates "
            "(recipe.args), or set run.steps to null"
        )
    recipe.check(config)


def explain_recipe(config: TrainConfig, recipe: Any, ranks: int) -> list[str]:
    """Returns one line for each trained role: prompts, samples and optimizer steps of one update; and a note on each
    that has no turn, or none after the others' first ones."""
    prompts, parts = config.run.prompts_per_step, recipe.roles()
    trained = [name for name, part in parts.items() if part.trained]
    lines = [
        explain_role(name, config.roles[name], prompts=prompts, group_size=parts[name].samples, ranks=ranks)
        for name in trained
    ]
    turns = [turn for step in recipe.schedule()[: config.run.steps] for turn in step]
    for name in trained:
        first = next((i for i, turn in enumerate(turns) if set(turn) & {*trained} - {name}), None)
        own = [i for i, turn in enumerate(turns) if name in turn]
        if not own:
            lines.append(f"note: {name} has no turn in a run of this length: it is not trained")
        elif first is not None and own[-1] < first:
            lines.append(f"note: {name} is trained in the first {len(own)} turns alone, before any other role is")
    return lines


def explain(config: Any, ranks: int) -> list[str]:
    """Returns one line for each role of a training config: how its model lies over the ranks; what adapters train."""
    if isinstance(config, SftConfig) and config.lora is not None:
        return [f"the model: {_adapters(config.trained)}"]
    if not isinstance(config, TrainConfig):
        return []
    lines = []
    for name, role in config.roles.items():
        if not role.has_policy:
            lines.append(f"{name}: {_no_policy(role)}")
            continue
        layout = role.layout
        cp = f" x cp {layout.cp}" if layout.cp > 1 else ""
        lines.append(
            f"{name}: tp {layout.tp}{cp} x pp {layout.pp} x dp {ranks // layout.model_ranks} on {ranks} ranks"
            f"{_experts(layout)}; micro-batches of up to {role.micro_batch_tokens * layout.cp} tokens per replica"
        )
        if role.lora is not None:
            owner = owners(config.roles).get(name, name)
            shared = "" if owner == name else f"; it is the copy that {owner} has"
            lines.append(f"{name}: {_adapters(role)}{shared}")
        if (server := config.server_owners.get(name, name)) != name:
            lines.append(f"{name}: answers come from the servers of {server}, which compute with adapters of both")
        if role.tandem is not None:
            junior = role.tandem.junior or f"a frozen copy of {role.model.path}"
            lines.append(f"{name}: its rollouts are written together with {junior}, strategy {role.tandem.strategy}")
    return lines


def _adapters(role: RoleConfig) -> str:
    """Describes what a role with adapters trains."""
    assert role.lora is not None
    text = f"trains adapters of rank {role.lora.rank} on {', '.join(role.lora.targets)}"
    file = Path(role.model.path) / "config.json"
    if not file.is_file():
        return text
    found = num_elements(registry.read(read_object(file), str(file)), role.lora)
    return f"{text}: {found / 1e6:.2f} million numbers; {role.model.path} stays as it is"


def _no_policy(role: RoleConfig) -> str:
    if role.same_as is not None:
        return f"shares policy and engines with {role.same_as}"
    where = "own engines" if role.endpoint is None else role.endpoint.url
    return f"no policy in the trainer; {where} answer with fixed weights"


def _experts(layout: Layout) -> str:
    return (
        "" if layout.ep == 1 and layout.expert_tp == layout.tp else f", experts ep {layout.ep} x etp {layout.expert_tp}"
    )


def explain_role(name: str, role: RoleConfig, *, prompts: int, group_size: int, ranks: int) -> str:
    """Describes an update of one role: P prompts x G samples = S samples, S / B optimizer steps, most tokens."""
    samples = prompts * group_size
    batch = role.samples_per_optimizer_step or samples
    longest = samples * (role.max_prompt_tokens + role.sampling.max_tokens)
    replicas = ranks // role.layout.model_ranks
    steps, micro_batches = -(-samples // batch), -(-longest // (replicas * role.micro_batch_tokens))
    return (
        f"{name}: {prompts} prompts x {group_size} samples = {samples} samples per update; {samples} / {batch} = "
        f"{steps} "
        f"optimizer steps; at most {longest} tokens, that is up to {micro_batches} micro-batches of "
        f"{role.micro_batch_tokens} tokens on each of {replicas} data-parallel replicas "
        f"(tp {role.layout.tp}, pp {role.layout.pp})"
    )


def _role_problems(name: str, role: RoleConfig) -> list[str]:
    problems = [f"{name}.{line}" for line in prefix_problems(role)]
    if role.samples_per_optimizer_step is not None and role.samples_per_optimizer_step < 1:
        problems.append(
            f"{name}.samples_per_optimizer_step = {role.samples_per_optimizer_step}: give 1 or more, or null for all "
            "samples"
        )
    longest = role.max_prompt_tokens + role.sampling.max_tokens
    if role.micro_batch_tokens * role.layout.cp < longest:
        shares = f" x layout.cp = {role.layout.cp}" if role.layout.cp > 1 else ""
        problems.append(
            f"{name}.micro_batch_tokens = {role.micro_batch_tokens}{shares} is less than max_prompt_tokens + "
            f"sampling.max_tokens = {longest}: one sequence would not fit; raise it or layout.cp, or lower these"
        )
    return problems


def _rank_problems(name: str, layout: Layout, ranks: int) -> list[str]:
    """Returns what is wrong with a layout on so many ranks, whatever the model is."""
    if ranks % layout.model_ranks:
        return [
            f"{name}: tp {layout.tp} x cp {layout.cp} x pp {layout.pp} = {layout.model_ranks} does not divide {ranks} "
            "ranks: start a multiple of it (launch.nproc, or the launcher's), or change the layout"
        ]
    if ranks % layout.expert_ranks:
        return [
            f"{name}: etp {layout.expert_tp} x ep {layout.ep} x pp {layout.pp} = {layout.expert_ranks} does not divide "
            f"{ranks} ranks: lower ep or etp (null is tp), or start a multiple of it"
        ]
    return []


def _trained_problems(name: str, role: RoleConfig, ranks: int, to_come: bool) -> list[str]:
    """Returns what is wrong with the layout of a model that is trained, and with settings that it does not allow."""
    problems, found = _read_model(name, role.model.path, to_come)
    problems = _rank_problems(name, role.layout, ranks) + problems
    if found is not None:
        (sizes, features), path = found, role.model.path
        lines = trainer_problems(sizes, Axes.of(role.layout), path)
        lines += setting_problems(sizes, features, role.model, path, router_replay=role.router_replay)
        lines += adapter_problems(sizes, role, path)
        problems += [f"{name}: {line}" for line in lines]
    return problems


def _engine_problems(config: TrainConfig, to_come: bool) -> list[str]:
    """Returns what is wrong with the models that engines hold: of roles that are not trained, of juniors, and those
    that the ranks of a server do not divide."""
    problems, settings = [], config.engine
    for name in config.engine_roles:
        role = config.roles[name]
        if not role.model.path:
            continue
        own, found = _read_model(f"roles.{name}", role.model.path, to_come)
        problems += own if role.policy == "none" else []
        served = role.lora is not None and isinstance(settings, Servers) and settings.serves_adapters
        if served and found is not None and found[0].experts:
            problems.append(
                f"engine.adapters = 'served', and {role.model.path} of {name} has experts: vLLM's adapters beside "
                "experts are not tested; set it to merged"
            )
        if found is not None and isinstance(settings, Servers):
            lines = engine_problems(found[0], settings.tp, role.model.path, expert_parallel=settings.expert_parallel)
            problems += [f"engine of {name}: {line}" for line in lines]
        if role.tandem is not None and role.tandem.junior is not None:
            problems += _read_model(f"roles.{name}.tandem.junior", role.tandem.junior, to_come)[0]
    return problems


def _read_model(name: str, path: str, to_come: bool) -> tuple[list[str], tuple[Sizes, Features] | None]:
    """Reads a model's config.json -> what is wrong with it, and what it says.

    Both are empty for a hub name, and for a directory that an earlier stage writes: these are checked when the run
    starts.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        if not to_come and (Path(path).is_absolute() or path.startswith(".")):
            return [f"{name}: no {file}: model.path is a Hugging Face model directory or a hub name"], None
        return [], None
    try:
        facts = read_object(file)
        return [], (registry.read(facts, str(file)), registry.features(facts, str(file)))
    except ConfigError as error:
        return [f"{name}: {error}"], None
