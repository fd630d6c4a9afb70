"""Prints a plan, advice and proposals as tables and lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_rl.planning.alternatives import Alternative
from megatron_rl.planning.hardware import GIB
from megatron_rl.planning.plan import RunPlan
from megatron_rl.planning.search import Proposal
from megatron_rl.planning.simulation import ENGINES, Schedule
from megatron_rl.spec.rank_sets import words
from megatron_rl.weights import counting

LEAST_WAIT = 0.01  # minimum share of the time of a wait that is printed


def show(plan: RunPlan, advice: Sequence[str], console: Console, *, notes: Sequence[str] = ()) -> None:
    """Prints tables of memory and time, followed by notes, assumptions on episodes, problems and advice. `console`
    must not highlight numbers."""
    _show_memory(plan, console)
    console.print(_time_table(plan))
    device = plan.cluster.device
    flops = sum(iteration.flops * iteration.times for iteration in plan.iterations)
    console.print(
        f"a cycle: {plan.cycle_s:.0f} s, {plan.tokens_per_gpu:,.0f} tokens trained on a second and GPU, "
        f"{flops / plan.cycle_s / plan.cluster.gpus / device.flops:.1%} of the cluster's peak for training alone",
        highlight=True,
    )
    assumed = [f"in {part.role}'s iteration {episode}" for part in plan.iterations for episode in part.episodes]
    _show_remarks([*notes, *assumed], plan.problems, console)
    for line in advice:
        console.print(f"- {escape(line)}")


def show_parts(plan: RunPlan, console: Console, *, notes: Sequence[str]) -> None:
    """Prints the tables of a command other than `train`, followed by notes and problems."""
    _show_memory(plan, console)
    table = _table("part", "times", "seconds", "of these", "tokens written", title="time")
    for part in plan.iterations:
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in part.phases.items())
        table.add_row(part.role, f"{part.times:,}", f"{part.seconds:,.1f}", phases, f"{part.generated:,.0f}")
    console.print(table)
    _show_remarks(notes, plan.problems, console)


def show_search(proposals: Sequence[Proposal], base: RunPlan, console: Console) -> None:
    """Prints the proposals of a search, fastest first, with the config overrides of each proposal."""
    if not proposals:
        console.print("[red]nothing fits[/]: take more GPUs, or lower micro_batch_tokens and the lengths")
    for proposal in proposals:
        saved = "" if base.problems else f" ({proposal.plan.cycle_s / base.cycle_s:.0%} of what was asked about)"
        layouts = "; ".join(
            f"{role.name} {role.parallel}" + ("" if proposal.shared else f" on ranks {words(role.ranks)}")
            for role in proposal.plan.roles
        )
        layouts += ", all roles on all ranks" * (proposal.shared and len(proposal.plan.roles) > 1)
        console.print(f"[bold]{proposal.plan.cycle_s:.0f} s a cycle[/]{saved}: {layouts}")
        settings = " ".join(map(_quoted, proposal.overrides)) or "as it is"
        console.print(f"    {settings}", markup=False, soft_wrap=True)  # brackets such as [mlp] are not markup


def show_schedules(schedules: Sequence[Schedule], max_staleness: int, console: Console, *, auto: bool) -> None:
    """Prints the simulated schedules. `max_staleness`: the run's value. `auto`: whether the plan chose this value."""
    table = _table(
        "rollouts.max_staleness", "iterations an hour", "engines idle", "trainer idle",
        "samples trained 0, 1, ... updates after their start", title="iterations in flight, simulated",
    )  # fmt: skip
    for schedule in schedules:
        mark = "" if schedule.max_staleness != max_staleness else " (auto)" if auto else " (configured)"
        ages = ", ".join(f"{share:.0%}" for share in schedule.staleness)
        idle = f"{schedule.engines_idle:.0%}", f"{schedule.trainer_idle:.0%}"
        table.add_row(f"{schedule.max_staleness}{mark}", f"{schedule.iterations_per_hour:.3g}", *idle, ages)
    console.print(table)


def show_sets(schedule: Schedule, roles: Mapping[str, Sequence[str]], console: Console) -> None:
    """Prints a row for each set of ranks, and what the sets and the engines wait for. `roles`: ranks such as 8-15 ->
    their roles. Prints nothing if all roles have the same ranks."""
    if len(schedule.sets) < 2:
        return
    title = f"sets of ranks, simulated with rollouts.max_staleness {schedule.max_staleness}"
    table = _table("ranks", "roles", "busy seconds an iteration", "idle", title=title)
    for own in schedule.sets:
        table.add_row(own.ranks, ", ".join(roles[own.ranks]), f"{own.busy_s:.1f}", f"{own.idle:.0%}")
    console.print(table)
    console.print(escape(waits_text(schedule)))


def waits_text(schedule: Schedule) -> str:
    """Returns a sentence that says which sets of ranks, and whether the engines, wait for whom."""
    waiting = {f"ranks {own.ranks}": own.waits for own in schedule.sets} | {ENGINES: schedule.engines_wait}
    parts = list[str]()
    for name, waits in waiting.items():
        shares = sorted(waits.items(), key=lambda wait: -wait[1])
        whom = [
            f"{share:.0%} of the time for {other if other == ENGINES else f'ranks {other}'}"
            for other, share in shares
            if share >= LEAST_WAIT
        ]
        if whom:
            parts.append(f"{name} wait {' and '.join(whom)}")
    return "; ".join(parts) or "no set of ranks waits for another"


def show_alternatives(alternatives: Sequence[Alternative], console: Console) -> None:
    """Prints the time and GPUs of the run with the configured engine, which comes first, and with other engines."""
    title = "engines: the config's own first, then what others would give"
    table = _table("engine", "engines' GPUs", "trainer's GPUs", "seconds a cycle", "settings", title=title)
    for option in alternatives:
        cost = "does not fit" if option.problem else f"{option.cycle_s:.0f}"
        settings = "\n".join(map(_quoted, option.overrides)) or "as it is"
        table.add_row(option.engine, str(option.engine_gpus or ""), str(option.trainer_gpus), cost, settings)
    console.print(table)


def _show_memory(plan: RunPlan, console: Console) -> None:
    if plan.roles:
        console.print(_memory_table(plan))
    if plan.servers:
        console.print(_servers_table(plan))


def _show_remarks(notes: Sequence[str], problems: Sequence[str], console: Console) -> None:
    for line in notes:
        console.print(f"[yellow]note[/] {escape(line)}")
    for problem in problems:
        console.print(f"[red]does not fit[/] {escape(problem)}")


def _table(*columns: str, title: str) -> Table:
    return Table(*columns, title=title, title_justify="left", caption_justify="left")


def _memory_table(plan: RunPlan) -> Table:
    title = f"GiB of a trainer's GPU, the worst of {plan.ranks} ({plan.cluster}, {plan.cluster.device.memory_gib} GiB)"
    table = _table("", *(f"{role.name} trains" for role in plan.roles), title=title)
    roles, count = plan.roles, len(plan.roles)
    embedded, asleep = sum(r.embedded for r in roles), sum(r.asleep - r.embedded for r in roles)
    parts = ("weights", "gradients", "optimizer", "activations")
    rows = [(part, [getattr(r.training, part) for r in roles], "") for part in parts]
    rows += [
        ("output layer's logits", [r.training.workspace for r in roles], ""),
        ("reference in the weights' place", [r.training.swapped for r in roles], "dim"),
        ("embedded engine's weights, all roles", [embedded] * count, ""),
        ("other roles, asleep or not", [asleep - (r.asleep - r.embedded) for r in roles], ""),
        ("reserve (context, NCCL, fragments)", [plan.reserve] * count, ""),
        *([("servers that sleep", [plan.beside] * count, "")] if plan.beside else []),
        ("peak", [plan.peak(r) for r in roles], "bold"),
        ("itself asleep", [r.asleep - r.embedded for r in roles], "dim"),
        *([("peak of its refit", [plan.refit_peak(r) for r in roles], "dim")] if plan.beside else []),
        *([("keys and values while it generates", [r.cache for r in roles], "")] if embedded else []),
    ]
    for label, sizes, style in rows:
        table.add_row(label, *map(_gib, sizes), style=style)
    caption = [
        f"{r.name}: {r.shape.name}, {counting.total(r.shape) / 1e9:.4g} B parameters, {r.parallel}" for r in plan.roles
    ]
    if any(role.embedded for role in plan.roles):
        caption.append(f"while the embedded engine generates: {_gib(plan.rollout_peak)} GiB")
    if plan.beside:
        caption.append(f"while servers generate in it: {_gib(plan.rollout_peak)} GiB")
    table.caption = "\n".join([*caption, f"of each node's own memory: {_gib(plan.host_per_node)} GiB"])
    return table


def _servers_table(plan: RunPlan) -> Table:
    table = _table("engine of", "weights", "keys and values", "longest sequences", title="GiB of an engine's GPU")
    for server in plan.servers:
        table.add_row(server.role, _gib(server.weights), _gib(server.cache), f"{server.sequences:.0f}")
    if plan.staging_per_node:
        table.caption = f"of each node's own memory, for new weights: {_gib(plan.staging_per_node)} GiB"
    return table


def _time_table(plan: RunPlan) -> Table:
    every = plan.iterations
    heads = [f"{part.role}'s iteration" + (f" (x{part.times})" if part.times > 1 else "") for part in every]
    table = _table("seconds", *heads, "of a cycle", title="time")
    total_s, longest = sum(plan.phases.values()), max(plan.phases.values())
    for name, seconds in plan.phases.items():
        cells = [f"{part.phases[name]:.1f}" if name in part.phases else "" for part in every]
        table.add_row(name, *cells, f"{seconds / total_s:.0%}", style="bold" if seconds == longest else "")
    if any(part.hidden for part in every):
        table.add_row("beside others", *(f"-{part.hidden:.1f}" for part in every), "")
    table.add_row("iteration", *(f"{part.seconds:.1f}" for part in every), f"{plan.cycle_s:.0f} s")
    decoded = ["; ".join(f"{name} {count:.0f}" for name, count in part.rows.items()) for part in every]
    table.add_row("decoded at once, an engine", *decoded, "", style="dim")
    table.add_row("model's PFLOP in training", *(f"{part.flops / 1e15:,.0f}" for part in every), "", style="dim")
    table.add_row("refit, GB sent", *(f"{part.sent / 1e9:,.1f}" for part in every), "", style="dim")
    return table


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"


def _quoted(word: str) -> str:
    """Quotes a command-line argument for a shell if necessary."""
    return f"'{word}'" if any(mark in word for mark in " [{") else word
