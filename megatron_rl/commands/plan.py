"""`megatron-rl plan`: memory, time and bottleneck of a run on a named cluster, before any job; and layouts that would be faster."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_rl.config import checks as config_checks
from megatron_rl.config.schema import ConfigError, Servers, TrainConfig, Use
from megatron_rl.planning import plan as plans
from megatron_rl.planning import search as searching
from megatron_rl.planning import shapes
from megatron_rl.planning.hardware import DEVICES, GIB, parse_cluster
from megatron_rl.planning.plan import RunPlan
from megatron_rl.planning.search import Proposal
from megatron_rl.planning.shapes import Shape, read_shape
from megatron_rl.planning.workload import step_work

DESCRIPTION = f"""Memory of each GPU by part, seconds of each phase, refits, and what to change. Nothing is started; no GPU is needed.
  megatron-rl plan examples/tango_qwen2.5_7b.yaml --cluster 4x8xA100-80
  megatron-rl plan my.yaml --cluster 16x8xH100 --search engine.kind=vllm
Devices: {", ".join(DEVICES)}. Exit status 1: it does not fit. docs/plan.md says how far the figures can be trusted."""
PER_NODE = 8  # GPUs, where --cluster does not say
Load = Callable[[Sequence[str]], tuple[str, Any]]


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="memory, time and bottleneck of a run on a named cluster, before any job",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("settings", nargs="+", metavar="CONFIG.yaml | a.b=c", help="of a `train` run")
    parser.add_argument(
        "--cluster", help="NODESxGPUSxDEVICE (default: job.nodes, those of the engines, 8 A100-80 each)"
    )
    parser.add_argument("--search", action="store_true", help="propose the fastest layouts and engines that fit")
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="ROLE=SOURCE",
        help="sizes of a role's model: a config.json, or a public model's name",
    )
    parser.add_argument(
        "--fill", type=float, default=0.5, help="mean lengths as a share of the longest allowed (default: 0.5)"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, in bytes and seconds")


def run(args: argparse.Namespace, load: Load) -> int:
    """Returns 0 when the run fits (with --search: when something does), else 1. Raises ConfigError."""
    command, config = load(args.settings)
    if not isinstance(config, TrainConfig):
        raise ConfigError(f"a config of `{command}`: only runs of `train` are planned")
    cluster = parse_cluster(args.cluster or _own_cluster(config))
    models = _models(config, args.shape)
    recipe, note = _recipe(config)
    work = step_work(config, recipe, args.fill)
    config_checks.check(config, plans.trainer_gpus(config, cluster), to_come=True)
    made = plans.make(config, cluster, models, work)
    found = searching.search(config, cluster, models, work) if args.search else []
    said = searching.advice(config, made, models, work)
    if args.json:
        told = made.to_json() | {
            "advice": said,
            "search": [one.plan.to_json() | {"overrides": [*one.overrides]} for one in found],
        }
        print(json.dumps(told, indent=1))
    else:
        show(
            made,
            said,
            Console(soft_wrap=False, width=None if Console().is_terminal else 130),
            notes=note + _guesses(models),
        )
        if args.search:
            show_search(found, made, Console(width=None if Console().is_terminal else 130))
    return int(not found) if args.search else int(bool(made.problems))


def show(made: RunPlan, advice: Sequence[str], console: Console, *, notes: Sequence[str] = ()) -> None:
    """Tables of memory and time, then what to do."""
    console.print(_memory_table(made))
    if made.servers:
        console.print(_servers_table(made))
    console.print(_time_table(made))
    device = made.cluster.device
    flops = sum(turn.flops * turn.times for turn in made.turns)
    console.print(
        f"a step: {made.step_s:.0f} s, {made.tokens_per_gpu:,.0f} tokens trained on a second and GPU, "
        f"{flops / made.step_s / made.cluster.gpus / device.flops:.1%} of the cluster's peak for training alone"
    )
    for line in notes:
        console.print(f"[yellow]note[/] {line}", highlight=False)
    for problem in made.problems:
        console.print(f"[red]does not fit[/] {problem}", highlight=False)
    for line in advice:
        console.print(f"- {line}", highlight=False)


def show_search(found: Sequence[Proposal], asked: RunPlan, console: Console) -> None:
    """The proposals, fastest first, each with what to give to the program."""
    if not found:
        console.print(
            "[red]nothing fits[/]: take more GPUs, or lower micro_batch_tokens and the lengths", highlight=False
        )
    for one in found:
        saved = "" if asked.problems else f" ({one.plan.step_s / asked.step_s:.0%} of what was asked about)"
        layouts = "; ".join(f"{role.name} {role.parallel}" for role in one.plan.roles)
        console.print(f"[bold]{one.plan.step_s:.0f} s a step[/]{saved}: {layouts}", highlight=False)
        console.print(
            "    " + (" ".join(f"'{word}'" if " " in word else word for word in one.overrides) or "as it is"),
            highlight=False,
            soft_wrap=True,
        )


def _memory_table(made: RunPlan) -> Table:
    title = f"GiB of a trainer's GPU, the worst of {made.ranks} ({made.cluster}, {made.cluster.device.memory_gib} GiB)"
    table = Table("", *(f"{role.name} trains" for role in made.roles), title=title, title_justify="left")
    parts = ("weights", "gradients", "optimizer", "activations", "workspace")
    labels = dict(
        zip(parts, ("weights", "gradients", "optimizer", "activations", "output layer's logits"), strict=True)
    )
    for part in parts:
        table.add_row(labels[part], *(_gib(getattr(role.training, part)) for role in made.roles))
    table.add_row("reference in the weights' place", *(_gib(role.training.swapped) for role in made.roles), style="dim")
    table.add_row(
        "embedded engine's weights, all roles", *(_gib(sum(r.embedded for r in made.roles)) for _ in made.roles)
    )
    others = [sum(o.asleep - o.embedded for o in made.roles if o is not role) for role in made.roles]
    table.add_row("other roles, asleep or not", *map(_gib, others))
    table.add_row("reserve (context, NCCL, fragments)", *(_gib(made.reserve) for _ in made.roles))
    table.add_row("peak", *(_gib(made.peak(role)) for role in made.roles), style="bold")
    table.add_row("itself asleep", *(_gib(role.asleep - role.embedded) for role in made.roles), style="dim")
    if any(role.embedded for role in made.roles):
        table.add_row("keys and values while it generates", *(_gib(role.cache) for role in made.roles))
    caption = [
        f"{r.name}: {r.shape.name}, {shapes.total(r.shape) / 1e9:.4g} B parameters, {r.parallel}" for r in made.roles
    ]
    if any(role.embedded for role in made.roles):
        caption.append(f"while the embedded engine generates: {_gib(made.rollout_peak)} GiB")
    table.caption = "\n".join([*caption, f"of each node's own memory: {_gib(made.host_per_node)} GiB"])
    table.caption_justify = "left"
    return table


def _servers_table(made: RunPlan) -> Table:
    table = Table(
        "engine of",
        "weights",
        "keys and values",
        "longest sequences",
        title="GiB of an engine's GPU",
        title_justify="left",
    )
    for server in made.servers:
        table.add_row(server.role, _gib(server.weights), _gib(server.cache), f"{server.sequences:.0f}")
    return table


def _time_table(made: RunPlan) -> Table:
    heads = [f"{turn.role}'s turn" + (f" (x{turn.times})" if turn.times > 1 else "") for turn in made.turns]
    table = Table("seconds", *heads, "of a step", title="time", title_justify="left")
    whole = sum(made.phases.values())
    for name, seconds in made.phases.items():
        own = [f"{turn.phases[name]:.1f}" if name in turn.phases else "" for turn in made.turns]
        table.add_row(
            name, *own, f"{seconds / whole:.0%}", style="bold" if seconds == max(made.phases.values()) else ""
        )
    if any(turn.hidden for turn in made.turns):
        table.add_row("beside others", *(f"-{turn.hidden:.1f}" for turn in made.turns), "")
    table.add_row("turn", *(f"{turn.seconds:.1f}" for turn in made.turns), f"{made.step_s:.0f} s")
    rows = ["; ".join(f"{name} {count:.0f}" for name, count in turn.rows.items()) for turn in made.turns]
    table.add_row("decoded at once, an engine", *rows, "", style="dim")
    table.add_row("model's PFLOP in training", *(f"{turn.flops / 1e15:,.0f}" for turn in made.turns), "", style="dim")
    table.add_row("refit, GB sent", *(f"{turn.sent / 1e9:,.1f}" for turn in made.turns), "", style="dim")
    return table


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"


def _own_cluster(config: TrainConfig) -> str:
    engines = len(config.roles) * config.engine.replicas * config.engine.tp if isinstance(config.engine, Servers) else 0
    return f"{config.job.nodes + -(-engines // PER_NODE)}x{PER_NODE}xA100-80"


def _models(config: TrainConfig, given: Sequence[str]) -> dict[str, Shape]:
    sources = {name: role.model.path for name, role in config.roles.items()}
    for word in given:
        name, _, source = word.partition("=")
        if name not in sources or not source:
            raise ConfigError(f"--shape {word}: it has the form ROLE=SOURCE, the roles are {', '.join(sources)}")
        sources[name] = source
    return {name: read_shape(source) for name, source in sources.items()}


def _guesses(models: Mapping[str, Shape]) -> list[str]:
    return [
        f"{name}: sizes are those of {shape.name}, by the words of its path; if it is another model: --shape {name}=..."
        for name, shape in models.items()
        if shape.guessed
    ]


def _recipe(config: TrainConfig) -> tuple[Any | None, list[str]]:
    """The built recipe; None, and a note, where there is no torch that its module may import."""
    try:
        import torch  # noqa: F401
    except ImportError:
        return None, [
            "torch is not installed here: the recipe was not built, each role's turn is taken to draw group_size samples of its own"
        ]
    from megatron_rl.config import plugins

    recipe = plugins.build(Use(target=config.recipe.target, args=config.recipe.args))
    config_checks.check_recipe(config, recipe)
    return recipe, []
