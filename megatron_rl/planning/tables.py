"""Prints a plan, advice and proposals as tables and lines."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_rl.planning.alternatives import Alternative
from megatron_rl.planning.hardware import GIB
from megatron_rl.planning.plan import RunPlan
from megatron_rl.planning.search import Proposal
from megatron_rl.weights import counting


def show(plan: RunPlan, advice: Sequence[str], console: Console, *, notes: Sequence[str] = ()) -> None:
    """Prints tables of memory and time, followed by notes, assumptions on episodes, problems and advice."""
    console.print(_memory_table(plan))
    if plan.servers:
        console.print(_servers_table(plan))
    console.print(_time_table(plan))
    device = plan.cluster.device
    flops = sum(iteration.flops * iteration.times for iteration in plan.iterations)
    console.print(
        f"a cycle: {plan.cycle_s:.0f} s, {plan.tokens_per_gpu:,.0f} tokens trained on a second and GPU, "
        f"{flops / plan.cycle_s / plan.cluster.gpus / device.flops:.1%} of the cluster's peak for training alone"
    )
    assumed = [f"in {iteration.role}'s iteration {one}" for iteration in plan.iterations for one in iteration.episodes]
    for line in [*notes, *assumed]:
        console.print(f"[yellow]note[/] {escape(line)}", highlight=False)
    for problem in plan.problems:
        console.print(f"[red]does not fit[/] {escape(problem)}", highlight=False)
    for line in advice:
        console.print(f"- {escape(line)}", highlight=False)


def show_search(found: Sequence[Proposal], asked: RunPlan, console: Console) -> None:
    """Prints the proposals of a search, fastest first, with the config overrides of each proposal."""
    if not found:
        console.print(
            "[red]nothing fits[/]: take more GPUs, or lower micro_batch_tokens and the lengths", highlight=False
        )
    for one in found:
        saved = "" if asked.problems else f" ({one.plan.cycle_s / asked.cycle_s:.0%} of what was asked about)"
        layouts = "; ".join(f"{role.name} {role.parallel}" for role in one.plan.roles)
        console.print(f"[bold]{one.plan.cycle_s:.0f} s a cycle[/]{saved}: {layouts}", highlight=False)
        console.print(
            "    " + (" ".join(map(_quoted, one.overrides)) or "as it is"),
            highlight=False,
            markup=False,  # printed without markup, because the text may contain brackets such as [mlp]
            soft_wrap=True,
        )


def show_alternatives(found: Sequence[Alternative], console: Console) -> None:
    """Prints the time and GPUs of the run with the configured engine, which comes first, and with other engines."""
    title = "engines: the config's own first, then what others would give"
    table = Table(
        "engine", "engines' GPUs", "trainer's GPUs", "seconds a cycle", "settings", title=title, title_justify="left"
    )
    for one in found:
        cost = "does not fit" if one.problem else f"{one.cycle_s:.0f}"
        words = "\n".join(map(_quoted, one.overrides)) or "as it is"
        table.add_row(one.engine, str(one.engine_gpus or ""), str(one.trainer_gpus), cost, words)
    console.print(table, highlight=False)


def _memory_table(plan: RunPlan) -> Table:
    title = f"GiB of a trainer's GPU, the worst of {plan.ranks} ({plan.cluster}, {plan.cluster.device.memory_gib} GiB)"
    table = Table("", *(f"{role.name} trains" for role in plan.roles), title=title, title_justify="left")
    parts = ("weights", "gradients", "optimizer", "activations", "workspace")
    labels = dict(
        zip(parts, ("weights", "gradients", "optimizer", "activations", "output layer's logits"), strict=True)
    )
    for part in parts:
        table.add_row(labels[part], *(_gib(getattr(role.training, part)) for role in plan.roles))
    table.add_row("reference in the weights' place", *(_gib(role.training.swapped) for role in plan.roles), style="dim")
    table.add_row(
        "embedded engine's weights, all roles", *(_gib(sum(r.embedded for r in plan.roles)) for _ in plan.roles)
    )
    others = [sum(o.asleep - o.embedded for o in plan.roles if o is not role) for role in plan.roles]
    table.add_row("other roles, asleep or not", *map(_gib, others))
    table.add_row("reserve (context, NCCL, fragments)", *(_gib(plan.reserve) for _ in plan.roles))
    if plan.beside:
        table.add_row("servers that sleep", *(_gib(plan.beside) for _ in plan.roles))
    table.add_row("peak", *(_gib(plan.peak(role)) for role in plan.roles), style="bold")
    table.add_row("itself asleep", *(_gib(role.asleep - role.embedded) for role in plan.roles), style="dim")
    if plan.beside:
        table.add_row("peak of its refit", *(_gib(plan.refit_peak(role)) for role in plan.roles), style="dim")
    if any(role.embedded for role in plan.roles):
        table.add_row("keys and values while it generates", *(_gib(role.cache) for role in plan.roles))
    caption = [
        f"{r.name}: {r.shape.name}, {counting.total(r.shape) / 1e9:.4g} B parameters, {r.parallel}" for r in plan.roles
    ]
    if any(role.embedded for role in plan.roles):
        caption.append(f"while the embedded engine generates: {_gib(plan.rollout_peak)} GiB")
    if plan.beside:
        caption.append(f"while servers generate in it: {_gib(plan.rollout_peak)} GiB")
    table.caption = "\n".join([*caption, f"of each node's own memory: {_gib(plan.host_per_node)} GiB"])
    table.caption_justify = "left"
    return table


def _servers_table(plan: RunPlan) -> Table:
    table = Table(
        "engine of",
        "weights",
        "keys and values",
        "longest sequences",
        title="GiB of an engine's GPU",
        title_justify="left",
    )
    for server in plan.servers:
        table.add_row(server.role, _gib(server.weights), _gib(server.cache), f"{server.sequences:.0f}")
    return table


def _time_table(plan: RunPlan) -> Table:
    heads = [
        f"{iteration.role}'s iteration" + (f" (x{iteration.times})" if iteration.times > 1 else "")
        for iteration in plan.iterations
    ]
    table = Table("seconds", *heads, "of a cycle", title="time", title_justify="left")
    whole = sum(plan.phases.values())
    for name, seconds in plan.phases.items():
        own = [f"{iteration.phases[name]:.1f}" if name in iteration.phases else "" for iteration in plan.iterations]
        table.add_row(
            name, *own, f"{seconds / whole:.0%}", style="bold" if seconds == max(plan.phases.values()) else ""
        )
    if any(iteration.hidden for iteration in plan.iterations):
        table.add_row("beside others", *(f"-{iteration.hidden:.1f}" for iteration in plan.iterations), "")
    table.add_row("iteration", *(f"{iteration.seconds:.1f}" for iteration in plan.iterations), f"{plan.cycle_s:.0f} s")
    rows = ["; ".join(f"{name} {count:.0f}" for name, count in iteration.rows.items()) for iteration in plan.iterations]
    table.add_row("decoded at once, an engine", *rows, "", style="dim")
    table.add_row(
        "model's PFLOP in training",
        *(f"{iteration.flops / 1e15:,.0f}" for iteration in plan.iterations),
        "",
        style="dim",
    )
    table.add_row("refit, GB sent", *(f"{iteration.sent / 1e9:,.1f}" for iteration in plan.iterations), "", style="dim")
    return table


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"


def _quoted(word: str) -> str:
    """Quotes a command-line argument for a shell if necessary."""
    return f"'{word}'" if any(mark in word for mark in " [{") else word
