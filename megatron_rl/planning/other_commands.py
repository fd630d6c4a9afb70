"""Describes the work of `sft`, `generate`, `eval` and evaluations during training, so that it is planned as a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_rl.algorithms.value_loss import loss_of
from megatron_rl.config.data_settings import generated_name
from megatron_rl.config.datasets import Generated, PromptSet
from megatron_rl.config.engines import Embedded, Rollouts
from megatron_rl.config.evaluation import Evaluation, Reward
from megatron_rl.config.run import Preflight, Run, Sinks
from megatron_rl.data.rows import rows_of
from megatron_rl.planning.workload import FILL, Draw, IterationWork
from megatron_rl.spec.evaluated_sets import EvaluatedSet
from megatron_rl.spec.run_spec import (
    DataSpec,
    EngineSpec,
    EvalSpec,
    GenerateSpec,
    LoopSpec,
    RoleSpec,
    RunSpec,
    SftSpec,
    Spec,
)

ASKED = 512  # number of problems whose answers `generate` generates and saves together
ASSUMED = 1000  # number of rows that is assumed for a data set whose number of rows is unknown (see Rows.of)
# Numbers of problems of benchmarks
SIZES = {
    "math500": 500, "aime24": 30, "aime25": 30, "aime26": 30, "amc23": 40, "minerva_math": 272, "gsm8k": 1319,
    "svamp": 300, "cruxeval": 800, "cruxeval_input": 800, "strategyqa": 687, "strategyqa_train": 2290, "ifeval": 541,
    "processbench_gsm8k": 400, "processbench_math": 1000, "processbench_olympiadbench": 1000,
    "processbench_omnimath": 1000,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The numbers of rows of data sets. `user_counts`: {data set: number of rows, from the user}; the key "" applies to
    all sets. `notes`: list to which a note is added for each number that is assumed.
    """

    user_counts: Mapping[str, float]
    notes: list[str]

    def of(self, name: str, source: PromptSet) -> int:
        """Returns the number of rows of a data set, at most the set's `limit`.

        The number is the first of these that is known: the number that the user gave, the size of a generated set, the
        number of rows in files on this host, the published size of a benchmark, ASSUMED.
        """
        count = self.user_counts.get(name, self.user_counts.get(""))
        if count is None and generated_name(source.path) is not None:
            count = (source.generated or Generated()).size
        if count is None and Path(source.path).exists():
            count = sum(1 for _ in rows_of(source.path, source.split, source.subset, source.file))
        count = SIZES.get(name) if count is None else count
        if count is None and source.limit is None:
            self.notes.append(
                f"{name}: {ASSUMED:,} rows are assumed, because the data are not here; give --rows {name}=NUMBER"
            )
        return min(round(ASSUMED if count is None else count), source.limit or 1 << 60)


def as_run(spec: Spec) -> RunSpec:
    """Converts the specification of `sft`, `generate` or `eval` to that of a run, so that `plan` can estimate it. The
    run's maximum lengths of prompts and answers are those that the command's settings allow.
    """
    roles = dict(spec.roles)
    if isinstance(spec, GenerateSpec):
        longest = spec.config.max_prompt_tokens or roles["model"].max_prompt_tokens
        roles["model"] = replace(roles["model"], sampling=spec.config.sampling, max_prompt_tokens=longest)
    elif isinstance(spec, EvalSpec):
        judging, context = spec.config.verifier, spec.config.context or 1 << 30
        for name, role in roles.items():
            sampling = judging.sampling if judging and name == _judge(spec) else spec.config.sampling
            sampling = replace(sampling, max_tokens=min(sampling.max_tokens, context - 1))
            longest = min(role.max_prompt_tokens, context - sampling.max_tokens)
            roles[name] = replace(role, sampling=sampling, max_prompt_tokens=longest)
    engine = spec.engine or EngineSpec(settings=Embedded(), roles={}, directory=spec.directory, trains=True)
    engine = replace(engine, roles={name: roles[name] for name in engine.roles})
    loop = LoopSpec(schedule=(), evaluation=Evaluation(), rollouts=Rollouts(), preflight=Preflight())
    return RunSpec(
        roles=roles, engine=engine, cluster=spec.cluster, directory=spec.directory, models=spec.models, sets={},
        reward=spec.reward or Reward(target=""), settings={}, run=Run(), sinks=Sinks(), recipe=None,
        data=DataSpec(training={}, held_out=(), replay=None), loop=loop,
    )  # fmt: skip


def work_of(spec: Spec, roles: Mapping[str, RoleSpec], rows: Rows, fills: Mapping[str, float]) -> list[IterationWork]:
    """Returns the parts into which the work of a command is divided. For `sft`, a part is one optimizer step, for
    `generate` the answers to ASKED problems, and for `eval` one measure on one problem set.

    `roles`: see `as_run`. `fills`: {role: mean length as a share of the maximum length}. A preference pair of `sft`
    counts as two samples, and all tokens of both samples count as trained.
    """
    if isinstance(spec, SftSpec):
        samples = spec.samples_per_step * (2 if "pairs" in loss_of(roles["model"]).needs else 1)
        longest = spec.data.max_tokens
        mean = fills.get("model", FILL) * longest
        return [
            _part("step", trained=[Draw(role="model", samples=samples, prompt=0.0, response=mean, longest=longest)])
        ]
    if isinstance(spec, GenerateSpec):
        problems, n = rows.of("data", spec.config.data), spec.config.n
        parts, last = divmod(problems, ASKED)
        sizes = {ASKED: parts, last: 1}
        return [
            _part(f"{size} problems", _draw(roles["model"], size * n, fills, n), times=times)
            for size, times in sizes.items()
            if size and times
        ]
    assert isinstance(spec, EvalSpec)
    work = list[IterationWork]()
    for evaluated in spec.evaluated:
        count = rows.of(evaluated.name, evaluated.source) * evaluated.n
        judged = evaluated.benchmark is not None and evaluated.benchmark.judged
        draw = _draw(roles["model"], count, fills, evaluated.n)
        draws = [draw]
        if spec.config.verifier is not None and not judged:
            votes = spec.config.verifier.votes
            draws.append(_draw(roles[_judge(spec)], count * votes, fills, votes))
        if judged or "solve" in spec.config.measures:
            work.append(_part(evaluated.name, *draws))
        if "handoff" in spec.config.measures and not judged:  # each of the two models writes half of an answer
            half = replace(draw, response=draw.response / 2, longest=-(-draw.longest // 2))
            work.append(_part(f"{evaluated.name}, handoff", half, replace(half, role="junior")))
    return work


def evaluation_work(
    sets: Sequence[EvaluatedSet], solver: RoleSpec, rows: Rows, fills: Mapping[str, float], *, greedy: bool
) -> list[IterationWork]:  # fmt: skip
    """Returns the parts of one evaluation during training: the answers of the role `solver` to the problems of
    each set. `greedy`: whether one greedy answer is generated in addition to the samples.
    """
    work = list[IterationWork]()
    for held_out in sets:
        samples = rows.of(held_out.name, held_out.source) * (held_out.n + (greedy and held_out.temperature > 0))
        work.append(_part(held_out.name, _draw(solver, samples, fills, held_out.n)))
    return work


def _judge(spec: EvalSpec) -> str:
    """Returns the name of the role that judges samples in an evaluation; "" if there is none."""
    judging = spec.config.verifier
    judges = [name for name, role in spec.roles.items() if judging is not None and role.model == judging.model]
    return judges[-1] if judges else ""


def _part(name: str, *draws: Draw, trained: Sequence[Draw] = (), times: int = 1) -> IterationWork:
    return IterationWork(draws=draws, scores=[], trained=trained, times=times, name=name)


def _draw(role: RoleSpec, samples: int, fills: Mapping[str, float], per_prompt: int) -> Draw:
    """Returns the samples that a role draws. `fills`: {role: mean length as a share of the maximum length}. For a role
    without an entry, the mean lengths are those of the setting mean_tokens or, if not set, a share FILL of the maximum.
    """
    share, mean_tokens, longest = fills.get(role.name, FILL), role.mean_tokens, role.sampling.max_tokens
    prompt, answer = share * role.max_prompt_tokens, share * longest
    if role.name not in fills:
        prompt, answer = mean_tokens.prompt or prompt, min(mean_tokens.answer or answer, longest)
    return Draw(
        role=role.name, samples=samples, prompt=prompt, response=answer, longest=longest, per_prompt=float(per_prompt)
    )
