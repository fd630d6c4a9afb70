"""Checks between settings, against the number of ranks and the model's config.json; and what the numbers mean. No torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from megatron_rl.config.data_settings import resolve
from megatron_rl.config.schema import (
    ConfigError,
    Embedded,
    Layout,
    PromptSet,
    RoleConfig,
    Servers,
    SftConfig,
    Sglang,
    TrainConfig,
)

_DATA_FILES = (".jsonl", ".json", ".parquet")
_SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "num_hidden_layers")
_EXPERT_SIZES = ("num_experts", "num_local_experts", "moe_intermediate_size", "shared_expert_intermediate_size")


def check(config: Any, ranks: int, *, to_come: bool = False) -> None:
    """Raises ConfigError for a layout or batch size that cannot work on `ranks` ranks; changes nothing. `to_come`: an earlier stage may
    still write the model directories."""
    problems: list[str] = []
    if isinstance(config, TrainConfig):
        if not config.roles:
            problems.append("roles is empty: name at least one role")
        for name, role in config.roles.items():
            problems += _layout_problems(
                f"roles.{name}", role.model.path, role.layout, ranks, to_come
            ) + _role_problems(f"roles.{name}", role)
        if config.run.steps is not None and config.run.steps < 1:
            problems.append(
                f"run.steps = {config.run.steps}: zero steps would train nothing; give 1 or more, or null for the recipe's plan"
            )
        if config.run.prompts_per_step < 1:
            problems.append(f"run.prompts_per_step = {config.run.prompts_per_step}: give 1 or more")
        if config.rollouts.max_staleness and isinstance(config.engine, Embedded):
            problems.append(
                f"rollouts.max_staleness = {config.rollouts.max_staleness} with engine.kind = 'embedded': that engine shares the trainer's "
                "processes and cannot work beside them; set it to 0, or engine.kind to vllm or sglang"
            )
        if isinstance(config.engine, Servers):
            problems += _server_problems(config, config.engine)
        problems += [
            f"roles.{name}.router_replay = true with engine.kind = {config.engine.kind!r}: vLLM's servers alone tell what they choose"
            for name, role in config.roles.items()
            if role.router_replay and config.engine.kind != "vllm"
        ]
        problems += [
            f"roles.{name}.router_replay = true with roles.{name}.tandem: vLLM has no model runner that does both; leave one of them out"
            for name, role in config.roles.items()
            if role.router_replay and role.tandem is not None
        ]
    problems += [line for name, source in _prompt_sets(config) for line in _prompt_set_problems(name, source)]
    if isinstance(config, SftConfig):
        problems += _layout_problems("layout of the model", config.model.path, config.layout, ranks, to_come)
        if config.micro_batch_tokens * config.layout.cp < config.data.max_tokens:
            problems.append(
                f"micro_batch_tokens = {config.micro_batch_tokens} is less than data.max_tokens = {config.data.max_tokens}: one pair would "
                "not fit; raise it or lower that"
            )
        if config.run.steps is not None:
            problems.append(f"run.steps = {config.run.steps}: SFT has its own `steps`; set that, and run.steps to null")
        if config.samples_per_step < 1 or (config.steps is not None and config.steps < 1):
            problems.append(
                f"steps = {config.steps}, samples_per_step = {config.samples_per_step}: zero steps would train nothing"
            )
    if problems:
        raise ConfigError("\n  ".join(problems))


def _server_problems(config: TrainConfig, settings: Servers) -> list[str]:
    problems = []
    if settings.urls:
        counts = {name: len(settings.urls.get(name, ())) for name in config.roles}
        if set(settings.urls) != set(config.roles) or set(counts.values()) != {settings.replicas}:
            wanted = f"{settings.replicas} (engine.replicas) for each of {', '.join(config.roles)}"
            problems.append(
                f"engine.urls has { ({name: len(urls) for name, urls in settings.urls.items()}) }: give {wanted}"
            )
        if settings.start:
            problems.append(
                "engine.urls with engine.start = true: servers that run already are not started; set engine.start=false"
            )
    if isinstance(settings, Sglang):
        tandems = [name for name, role in config.roles.items() if role.tandem is not None]
        problems += [
            f"roles.{name}.tandem with engine.kind = 'sglang': two models in one server are there for vLLM and the embedded engine alone; "
            "set engine.kind to one of them"
            for name in tandems
        ]
        for name, role in config.roles.items():
            drawn = role.sampling
            if drawn.temperature > 0 and (drawn.top_p < 1 or drawn.min_p > 0) and not drawn.top_k:
                problems.append(
                    f"roles.{name}.sampling.top_p = {drawn.top_p}, min_p = {drawn.min_p} with engine.kind = 'sglang': it tells "
                    "the log-probs of what it draws then only under a top_k; set sampling.top_k, or leave truncation off"
                )
    return problems


def absent_files(config: Any) -> list[str]:
    """A line for each file or directory that the config names and that is not there yet (an earlier stage may make it)."""
    places = {name: source.path for name, source in _prompt_sets(config)}
    if isinstance(config, SftConfig):
        places |= {"data.train": config.data.train, "data.validation": config.data.validation or ""}
    if isinstance(config, TrainConfig):
        places["debug.replay"] = config.debug.replay or ""
    models = {f"roles.{name}.model.path": role.model.path for name, role in getattr(config, "roles", {}).items()}
    models |= {"model.path": config.model.path} if hasattr(config, "model") else {}
    notes = [
        f"note: {name} = {path} is no directory here: taken for a hub name"
        for name, path in models.items()
        if not Path(path).is_dir()
    ]
    local = {
        name: path for name, path in places.items() if path and path.count("/") != 1 or Path(path).suffix in _DATA_FILES
    }
    return notes + [
        f"note: {name} = {path} is not there yet" for name, path in local.items() if not Path(path).exists()
    ]


def _prompt_sets(config: Any) -> list[tuple[str, PromptSet]]:
    if isinstance(config, TrainConfig):
        found = [("data", config.data), ("evaluation.prompts", config.evaluation.prompts)]
        found += [(f"roles.{name}.data", role.data) for name, role in config.roles.items()]
    else:
        found = [("data", getattr(config, "data", None))]
    return [(name, source) for name, source in found if isinstance(source, PromptSet)]


def _prompt_set_problems(name: str, source: PromptSet) -> list[str]:
    problems = []
    try:
        resolve(source)
    except ConfigError as error:
        problems.append(f"{name}: {error}")
    try:
        re.compile(source.answer_pattern or "")
    except re.error as error:
        problems.append(f"{name}.answer_pattern = {source.answer_pattern!r} is not a regular expression: {error}")
    return problems


def check_recipe(config: TrainConfig, recipe: Any) -> None:
    """Raises ConfigError when the recipe's roles are not the config's, or run.steps is beyond its plan."""
    problems = [f"roles.{n} is missing" for n in recipe.roles if n not in config.roles]
    problems += [f"roles.{n} is not one of them" for n in config.roles if n not in recipe.roles]
    if problems:
        raise ConfigError(
            f"recipe {config.recipe.target} plays with the roles {', '.join(recipe.roles)}: {'; '.join(problems)}"
        )
    if config.run.steps is not None and config.run.steps > recipe.num_steps():
        raise ConfigError(
            f"run.steps = {config.run.steps}, but the recipe plans {recipe.num_steps()} steps: raise its updates (recipe.args), or set "
            "run.steps to null"
        )


def explain_recipe(config: TrainConfig, recipe: Any, ranks: int) -> list[str]:
    """What an update of each trained role is made of, one line each."""
    prompts, sizes = config.run.prompts_per_step, recipe.group_sizes
    return [explain_role(n, config.roles[n], prompts=prompts, group_size=sizes[n], ranks=ranks) for n in recipe.trained]


def explain(config: Any, ranks: int) -> list[str]:
    """How each role of a training config lies over the ranks, one line each."""
    if not isinstance(config, TrainConfig):
        return []
    lines = []
    for name, role in config.roles.items():
        data_parallel = ranks // role.layout.model_ranks
        cp = f" x cp {role.layout.cp}" if role.layout.cp > 1 else ""
        lines.append(f"{name}: tp {role.layout.tp}{cp} x pp {role.layout.pp} x dp {data_parallel} on {ranks} ranks{_experts(role.layout)}; "
                     f"micro-batches of up to {role.micro_batch_tokens * role.layout.cp} tokens per replica")  # fmt: skip
        if role.tandem is not None:
            junior = role.tandem.junior or f"a frozen copy of {role.model.path}"
            lines.append(f"{name}: its rollouts are written along by {junior}, strategy {role.tandem.strategy}")
    return lines


def _experts(layout: Layout) -> str:
    return (
        "" if layout.ep == 1 and layout.expert_tp == layout.tp else f", experts ep {layout.ep} x etp {layout.expert_tp}"
    )


def explain_role(name: str, role: RoleConfig, *, prompts: int, group_size: int, ranks: int) -> str:
    """P prompts x G samples = S; S / B optimizer steps; the most tokens of an update; ranks."""
    samples = prompts * group_size
    batch = role.samples_per_optimizer_step or samples
    longest = samples * (role.max_prompt_tokens + role.sampling.max_tokens)
    replicas = ranks // role.layout.model_ranks
    return (
        f"{name}: {prompts} prompts x {group_size} samples = {samples} samples per update; {samples} / {batch} = {-(-samples // batch)} "
        f"optimizer steps; at most {longest} tokens, that is up to {-(-longest // (replicas * role.micro_batch_tokens))} micro-batches of "
        f"{role.micro_batch_tokens} tokens on each of {replicas} data-parallel replicas (tp {role.layout.tp}, pp {role.layout.pp})"
    )


def _role_problems(name: str, role: RoleConfig) -> list[str]:
    problems = []
    if role.samples_per_optimizer_step is not None and role.samples_per_optimizer_step < 1:
        problems.append(
            f"{name}.samples_per_optimizer_step = {role.samples_per_optimizer_step}: give 1 or more, or null for all samples"
        )
    longest = role.max_prompt_tokens + role.sampling.max_tokens
    if role.micro_batch_tokens * role.layout.cp < longest:
        shares = f" x layout.cp = {role.layout.cp}" if role.layout.cp > 1 else ""
        problems.append(
            f"{name}.micro_batch_tokens = {role.micro_batch_tokens}{shares} is less than max_prompt_tokens + sampling.max_tokens = "
            f"{longest}: one sequence would not fit; raise it or layout.cp, or lower these"
        )
    return problems


def _layout_problems(name: str, path: str, layout: Layout, ranks: int, to_come: bool) -> list[str]:
    problems = []
    if ranks % layout.model_ranks:
        problems.append(
            f"{name}: tp {layout.tp} x cp {layout.cp} x pp {layout.pp} = {layout.model_ranks} does not divide {ranks} ranks: start a "
            "multiple of it (launch.nproc, or the launcher's), or change the layout"
        )
    elif ranks % layout.expert_ranks:
        problems.append(
            f"{name}: etp {layout.expert_tp} x ep {layout.ep} x pp {layout.pp} = {layout.expert_ranks} does not divide {ranks} ranks: "
            "lower ep or etp (null is tp), or start a multiple of it"
        )
    file = Path(path) / "config.json"
    if not file.is_file():
        if not to_come and (Path(path).is_absolute() or path.startswith(".")):
            problems.append(f"{name}: no {file}: model.path is a Hugging Face model directory or a hub name")
        return problems  # a hub name, or a directory that an earlier stage writes: checked when the run starts
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        sizes = {key: int(facts[key]) for key in (*_SIZES, *_EXPERT_SIZES) if facts.get(key) is not None}
    except (ValueError, TypeError) as error:
        return [*problems, f"{name}: {file} is not a model's config ({error}): look at model.path"]
    experts = any(key in sizes for key in _EXPERT_SIZES[:2])
    problems += _expert_problems(name, path, layout, experts=experts)
    for key, by, what in (
        ("num_attention_heads", layout.tp, "tp"),
        ("num_key_value_heads", layout.tp, "tp"),
        ("num_hidden_layers", layout.pp * (layout.vpp or 1), "pp x vpp"),
        *(_cuts_of_experts(layout, sizes) if experts else [("intermediate_size", layout.tp, "tp")]),
    ):
        if key in sizes and sizes[key] % by:
            problems.append(
                f"{name}: {key} = {sizes[key]} of {path} is not divisible by {what} = {by}: choose a divisor of it"
            )
    return problems


def _cuts_of_experts(layout: Layout, sizes: dict[str, int]) -> list[tuple[str, int, str]]:
    """(key of config.json, number it must divide by, what that is) of a model with experts in every layer."""
    width = "moe_intermediate_size" if "moe_intermediate_size" in sizes else "intermediate_size"
    numbers = [(key, layout.ep, "ep") for key in _EXPERT_SIZES[:2]]
    etp = "etp" if layout.etp is not None else "etp (null: tp)"
    return [*numbers, (width, layout.expert_tp, etp), ("shared_expert_intermediate_size", layout.tp, "tp")]


def _expert_problems(name: str, path: str, layout: Layout, *, experts: bool) -> list[str]:
    """What Megatron-core would refuse later, or do without need."""
    if not experts and (layout.ep > 1 or layout.expert_tp != layout.tp):
        return [
            f"{name}: layout.ep = {layout.ep}, layout.etp = {layout.etp}, but {path} has no experts: set ep to 1 and etp to null"
        ]
    if experts and layout.tp > 1 and not layout.sequence_parallel:
        return [
            f"{name}: {path} has experts and layout.tp = {layout.tp}: Megatron-core trains that only with sequence parallelism; set "
            "layout.sequence_parallel to true"
        ]
    return []
