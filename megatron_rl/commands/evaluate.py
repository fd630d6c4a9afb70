"""`megatron-rl eval`: models on benchmarks and problem sets; comparisons of what it has written, and grading of given completions."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_rl import config_files
from megatron_rl.chat import read_template
from megatron_rl.commands.common import open_world, sampling_of
from megatron_rl.commands.eval_engines import Cast, open_cast
from megatron_rl.commands.launch import Place, run_directory
from megatron_rl.config import ConfigError, EvalConfig, Launch, PromptSet, Reward
from megatron_rl.data import Problem, read_problems
from megatron_rl.data_settings import resolve
from megatron_rl.evaluation import report
from megatron_rl.evaluation.benchmarks import TANGO, benchmark, read_benchmark, solution, source_of
from megatron_rl.evaluation.draw import ProblemSet, prompt_tokens
from megatron_rl.evaluation.figures import SetFigures, figures_of, gradings, macro
from megatron_rl.evaluation.handoff import HANDOFF, HandOff, check_vocabularies
from megatron_rl.evaluation.judge import JUDGE, Judge, verifier_values
from megatron_rl.evaluation.samples import Sample, Samples
from megatron_rl.evaluation.solve import SOLVE, Grade, Solver, Weigher
from megatron_rl.evaluation.text_scores import BASE, DRIFT, JUNIOR, LEGIBILITY, drift, legibility
from megatron_rl.rewards.pool import GradePool, check_failures

CHUNK = 256  # problems asked at once
JUDGED_TEMPLATE = "tango_verifier"
Measure = Callable[[ProblemSet, Sequence[int]], list[list[Sample]]]  # places of problems -> the samples of each


@dataclass(frozen=True, kw_only=True)
class Task:
    """A set and who grades it."""

    problems: ProblemSet
    reward: Reward
    judged: bool


@dataclass
class Graders:
    """A pool of worker processes for each grader that is needed, kept until the end."""

    stack: contextlib.ExitStack
    pools: dict[str, GradePool] = field(default_factory=dict)

    def of(self, reward: Reward) -> Grade:
        key = f"{reward.target} {reward.args}"
        if key not in self.pools:
            self.pools[key] = self.stack.enter_context(GradePool(reward))
        return self.pools[key].grade


def run(config: EvalConfig, place: Place, environment: Mapping[str, str] | None = None) -> int:
    """Every rank runs it. Prints the figures; returns the exit status. `environment`: of servers that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # leave at once: finished problems are kept
    with open_world(place, run_directory(config)) as world, contextlib.ExitStack() as stack:
        cast = open_cast(config, world, stack, environment or {})
        world.from_driver(functools.partial(_evaluate, config, cast))
    return 0


def _evaluate(config: EvalConfig, cast: Cast) -> None:
    """On the driver."""
    start = time.monotonic()
    tasks = [_task(config, cast, *read) for read in _sets(config)]
    output = None if config.output is None else Path(config.output)
    samples = Samples(None if output is None else output.with_suffix(".jsonl"), _digest(config, tasks))
    if samples.resumed:
        print(f"{samples.resumed} problems were done before: going on from there", file=sys.stderr, flush=True)
    sets: list[SetFigures] = []
    with contextlib.ExitStack() as stack:
        graders = Graders(stack)
        for task in tasks:
            for name, measure in _measures(config, cast, task, graders, samples):
                _ask(task.problems, name, measure, samples)
                own = task.problems
                sets.append(figures_of(samples, own.name, own.title, name, ks=config.k, seed=config.seed))
    means = macro(sets, seed=config.seed)
    for table in report.console_table(sets, means):
        Console(width=None if sys.stdout.isatty() else 60 + 40 * len(sets)).print(table)
    _say(sets)
    if output is not None:
        samples.finish()
        text = config_files.dump(config)
        report.write_page(output.with_suffix(".html"), sets, means, samples, text)
        about = {"model": config.model.path, "seconds": round(time.monotonic() - start, 1)}
        report.write_figures(output, report.figures_json(sets, means, about))
        print(f"{output}, {output.with_suffix('.jsonl').name}, {output.with_suffix('.html').name}")
    check_failures(gradings(samples, sets), config.reward.max_failure_share)


def _say(sets: Sequence[SetFigures]) -> None:
    for s in sets:
        for what, count in s.counts.items():
            print(f"note: {s.title}: {what}: {count} of {s.samples} samples")


def _sets(config: EvalConfig) -> Iterator[tuple[str, str, list[Problem], Reward, bool, str]]:
    """(name, title, problems, grader, whether they are solutions for a verifier, template) of every set."""
    for name in config.benchmarks:
        found = benchmark(name)
        source = source_of(found, config.data_dir, limit=config.limit)
        reward = replace(config.reward, target=found.grader, args={})
        yield name, found.title, read_benchmark(found, source), reward, found.judged, config.template or found.template
    if config.data is not None:
        problems = read_problems(config.data)
        judged = "steps" in resolve(config.data).fields
        if judged:
            problems = [replace(p, values=solution(p.values)) for p in problems]
        name = _name_of(config.data)
        yield name, name, problems, config.reward, judged, config.template or (JUDGED_TEMPLATE if judged else TANGO)


def _name_of(source: PromptSet) -> str:
    path = Path(source.path)
    return path.stem if path.stem not in ("test", "train") or not path.parent.name else path.parent.name


def _task(
    config: EvalConfig, cast: Cast, name: str, title: str, problems: list[Problem], reward: Reward, judged: bool, template: str
) -> Task:  # fmt: skip
    try:
        text = read_template(template)
    except FileNotFoundError as error:
        raise ConfigError(f"template: {error}") from None
    tokenizer = cast.tokenizers[config.model]
    values = [verifier_values(p.values) if judged else {"question": str(p.values["question"])} for p in problems]
    try:
        prompts = [prompt_tokens(tokenizer, text, v, chat=config.chat) for v in values]
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return Task(problems=ProblemSet(name=name, title=title, problems=problems, prompts=prompts), reward=reward, judged=judged)


def _digest(config: EvalConfig, tasks: Sequence[Task]) -> str:
    """Of all that samples depend on."""
    asked = replace(config, output=None, launch=Launch())
    digest = hashlib.sha256(config_files.dump(asked).encode())
    for task in tasks:
        digest.update(repr((task.problems.name, task.problems.prompts)).encode())
    return digest.hexdigest()[:16]


def _measures(config: EvalConfig, cast: Cast, task: Task, graders: Graders, samples: Samples) -> Iterator[tuple[str, Measure]]:
    """The measures of a set, in the order in which they need each other."""
    tokenizer, sampling = cast.tokenizers[config.model], sampling_of(config.sampling, n=config.n, seed=config.seed)
    engine = cast.engines[config.model]
    if task.judged:
        yield JUDGE, Judge(engine=engine, tokenizer=tokenizer, sampling=sampling, context=config.context)
        return
    grade, wanted = graders.of(task.reward), config.measures
    if SOLVE in wanted:
        yield (
            SOLVE,
            Solver(
                engine=engine, tokenizer=tokenizer, sampling=sampling, grade=grade, context=config.context,
                weigher=_weigher(config, cast), keep_tokens=bool({LEGIBILITY, DRIFT} & set(wanted)),
            ),
        )  # fmt: skip
    if config.junior is None:
        return
    try:
        check_vocabularies(tokenizer, cast.tokenizers[config.junior])
    except ValueError as error:
        raise ConfigError(f"junior.path = {config.junior.path}: {error}") from None
    if HANDOFF in wanted:
        pair = (engine, cast.engines[config.junior])
        yield (
            HANDOFF,
            HandOff(
                engines=pair, tokenizer=tokenizer, sampling=sampling, grade=grade, context=config.context, max_rounds=config.max_rounds
            ),
        )
    if LEGIBILITY in wanted:
        yield LEGIBILITY, _on_texts(samples, functools.partial(legibility, cast.scorers[config.junior]), config)
    if DRIFT in wanted:
        others: Mapping[str, Any] = {JUNIOR: cast.scorers[config.junior]}
        others |= {BASE: cast.scorers[config.base]} if config.base is not None else {}
        yield DRIFT, _on_texts(samples, functools.partial(drift, cast.scorers[config.model], others), config)


def _weigher(config: EvalConfig, cast: Cast) -> Weigher | None:
    judging = config.verifier
    if judging is None:
        return None
    return Weigher(
        engine=cast.engines[judging.model], tokenizer=cast.tokenizers[judging.model], template=read_template(judging.template),
        sampling=sampling_of(judging.sampling, n=judging.votes, seed=config.seed), context=config.context,
    )  # fmt: skip


def _on_texts(samples: Samples, score: Callable[..., list[Sample]], config: EvalConfig) -> Measure:
    """A measure of the texts that were written before."""

    def measure(problems: ProblemSet, places: Sequence[int]) -> list[list[Sample]]:
        texts = {group[0]["id"]: group for group in samples.rows(problems.name, SOLVE)}
        context = config.context or sys.maxsize
        return [score(texts[place], problems.prompts[place], context) for place in places]

    return measure


def _ask(problems: ProblemSet, name: str, measure: Measure, samples: Samples) -> None:
    """Chunk by chunk what is not there yet."""
    missing = samples.missing(problems.name, name, range(len(problems.problems)))
    for start in range(0, len(missing), CHUNK):
        part = missing[start : start + CHUNK]
        samples.add(measure(problems, part))
        print(f"{problems.title}, {name}: {start + len(part)} of {len(missing)} problems", file=sys.stderr, flush=True)
