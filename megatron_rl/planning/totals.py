"""Estimates the totals of a command: iterations or steps, hours, GPU-hours, and bytes on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_rl.config.datasets import PromptSet
from megatron_rl.config.model import WEIGHT_BYTES, RoleConfig
from megatron_rl.models.shape import Shape
from megatron_rl.planning.case import Case
from megatron_rl.planning.memory import MASTER, MOMENTS
from megatron_rl.planning.other_commands import Rows, evaluation_work
from megatron_rl.planning.plan import RunPlan, make
from megatron_rl.spec.run_spec import SftSpec, Spec
from megatron_rl.weights.counting import Parallel, adapter_elements, total

TOKEN_BYTES = 16  # bytes of a token in a file of rollouts: its id, its log-prob and its text
TOP_BYTES = 8  # bytes of a stored candidate token of loss.centering: its id and its log-prob
TEXT_BYTES = 4  # bytes of the text of a token


@dataclass(frozen=True, kw_only=True)
class Totals:
    """The estimated totals of a command on a cluster of `gpus` GPUs."""

    unit: str  # what is counted, such as "iterations"
    count: int
    hours: float  # includes evaluations; excludes the start of the run and the writing of checkpoints
    evaluations: int  # number of evaluations during training
    evaluation_hours: float  # hours that evaluations add, part of `hours`
    gpus: int
    gpu_hours: float
    disk: float  # bytes of the files that stay on disk: checkpoints, models, rollouts and answers

    def __str__(self) -> str:
        beside = f" ({self.evaluations} evaluations: {self.evaluation_hours:,.1f} hours)" if self.evaluations else ""
        return (
            f"in all: {self.count:,} {self.unit}, {self.hours:,.1f} hours{beside}, {self.gpu_hours:,.0f} GPU-hours of "
            f"{self.gpus} GPUs, {self.disk / 1e9:,.1f} GB on disk"
        )


def of_training(case: Case, plan: RunPlan, rows: Rows, fills: Mapping[str, float]) -> Totals:
    """Returns the totals of a training run. All iterations are assumed to take as long as those of the planned cycle.
    `rows`: numbers of rows of the evaluation sets."""
    spec, iterations = case.spec, case.spec.loop.num_iterations
    settings, run = spec.loop.evaluation, spec.run
    solver = spec.roles[case.work[0].draws[0].role]
    evaluated_s, evaluations = 0.0, 0
    cycles = iterations / sum(iteration.times for iteration in plan.iterations)
    if spec.data.held_out and solver.endpoint is None and solver.head is None:
        work = evaluation_work(spec.data.held_out, solver, rows, fills, greedy=settings.greedy)
        each_s = make(replace(case.with_staleness(0), work=work)).cycle_s
        regular, remainder = divmod(iterations, settings.every) if settings.every else (0, iterations)
        evaluations = settings.at_start + regular + (remainder > 0)
        evaluated_s = evaluations * each_s
        if evaluations and spec.evaluates_beside:  # all evaluations except the last overlap one iteration each
            beside_s = max(0.0, each_s - cycles * plan.cycle_s / iterations)
            evaluated_s = (evaluations - 1) * beside_s + each_s
    best = settings.best.keep if settings.best else 0
    disk = checkpoint_bytes(case, keep=run.keep + 1 + best, models=1 + best)
    if run.save_rollouts_every:
        written = cycles * sum(iteration.generated * iteration.times for iteration in plan.iterations)
        top = max(role.loss.centering for role in spec.roles.values())
        disk += (TOKEN_BYTES + TOP_BYTES * top) * written / run.save_rollouts_every
    return _totals(
        "iterations", iterations, cycles * plan.cycle_s, case, disk=disk, evaluations=(evaluations, evaluated_s)
    )  # fmt: skip


def of_command(spec: Spec, case: Case, plan: RunPlan, rows: Rows) -> Totals:
    """Returns the totals of `sft`, `generate` or `eval`."""
    if isinstance(spec, SftSpec):
        size = 0 if spec.steps else rows.of("data", PromptSet(path=spec.data.train))
        steps = max(1, spec.num_steps(size))
        disk = checkpoint_bytes(case, keep=spec.run.keep + 1, models=1)
        return _totals("steps", steps, steps * plan.cycle_s, case, disk=disk)
    answers = sum(draw.samples * work.times for work in case.work for draw in work.draws[:1])
    disk = TEXT_BYTES * sum(iteration.generated * iteration.times for iteration in plan.iterations)
    return _totals("answers", answers, plan.cycle_s, case, disk=disk)


def checkpoint_bytes(case: Case, *, keep: int, models: int) -> float:
    """Returns the bytes of `keep` checkpoints and of `models` exported models of all trained policies."""
    trained = {case.roles[role].owner for work in case.work for role in work.roles}
    sizes = [saved_bytes(case.roles[name], case.models[name]) for name in trained]
    return float(sum(keep * checkpoint + models * model for checkpoint, model in sizes))


def saved_bytes(role: RoleConfig, shape: Shape) -> tuple[int, int]:
    """Returns the bytes of (one checkpoint, the exported model) of a trained policy.

    A checkpoint has the weights, Adam's moments and float32 weights, which Megatron-core's optimizer writes as `param`
    also if the weights are float32 (megatron/optimizer_checkpoint.py). If the policy trains LoRA adapters, a checkpoint
    has these tensors only for the adapters.
    """
    width = WEIGHT_BYTES[role.model.dtype]
    trained = adapter_elements(shape, Parallel(world=1), role.lora) if role.lora else total(shape)
    return trained * (width + MOMENTS + MASTER), width * total(shape)


def _totals(
    unit: str, count: int, seconds: float, case: Case, *, disk: float, evaluations: tuple[int, float] = (0, 0.0)
) -> Totals:
    """Returns the totals of a command. `evaluations`: (number of evaluations, seconds that they add to the command)."""
    number, evaluated_s = evaluations
    hours = (seconds + evaluated_s) / 3600
    return Totals(
        unit=unit, count=count, hours=hours, evaluations=number, evaluation_hours=evaluated_s / 3600,
        gpus=case.cluster.gpus, gpu_hours=hours * case.cluster.gpus, disk=disk,
    )  # fmt: skip
