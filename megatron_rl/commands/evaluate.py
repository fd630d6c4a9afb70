"""`megatron-rl eval`: measures models on benchmarks and problem sets."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_rl.config import files as config_files
from megatron_rl.config.base import refusing
from megatron_rl.config.evaluation import NO_SCALE
from megatron_rl.config.model import Model
from megatron_rl.config.schema import EvalConfig
from megatron_rl.data.rows import DataError
from megatron_rl.engines.data_parallel_engine import DataParallelEngine
from megatron_rl.engines.embedded.embedded_engine import EmbeddedEngine
from megatron_rl.engines.protocol import Engine
from megatron_rl.evaluation import evaluation_page as report
from megatron_rl.evaluation.draw import ProblemSet, prompt_tokens
from megatron_rl.evaluation.handoff import HANDOFF, HandOff
from megatron_rl.evaluation.judge import JUDGE, Judge, verifier_values
from megatron_rl.evaluation.samples import PARTIAL, Sample, Samples
from megatron_rl.evaluation.set_metrics import SetMetrics, gradings, macro, metrics_of
from megatron_rl.evaluation.sets import LoadedSet, read_sets
from megatron_rl.evaluation.solve import SOLVE, Solver
from megatron_rl.evaluation.text_scores import BASE, DRIFT, JUNIOR, LEGIBILITY, Texts, drift, legibility
from megatron_rl.evaluation.votes import Weigher
from megatron_rl.messages.commands import Commands
from megatron_rl.messages.world import World
from megatron_rl.rewards.grading_pool import check_failures
from megatron_rl.rewards.source_grading import GradePools
from megatron_rl.run import input_digests
from megatron_rl.session.launch_ranks import Place
from megatron_rl.session.open_engines import Direct, embedded_engine, open_engines
from megatron_rl.session.run_setup import open_world_for, sampling_of
from megatron_rl.spec.run_spec import EngineSpec, EvalSpec
from megatron_rl.texts.chat_template import ChatTokenizer, tokenizer_of
from megatron_rl.texts.text import read_template
from megatron_rl.texts.vocabulary import check_vocabularies, vocabulary_of

CHUNK = 256  # number of problems per batch of requests
ASKED = ("question", "messages")  # names of the problem fields that the prompt is built from
# A function that measures problems: (problem set, indices of problems) -> samples of each of these problems.
Measure = Callable[[ProblemSet, Sequence[int]], list[list[Sample]]]


def run(spec: EvalSpec, place: Place, environment: Mapping[str, str] | None = None) -> int:
    """Implements `megatron-rl eval`: runs an evaluation and prints the metrics. Every rank calls it. Returns 0.

    `environment`: the environment variables of the servers that are started.
    """
    # Ctrl-C ends the process at once; the samples of finished problems are on disk
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with open_world_for(spec, place) as world, contextlib.ExitStack() as stack:
        config = spec.config
        read = [config.model, config.junior, config.base] if DRIFT in config.measures else []
        compared = [model for model in read if model is not None]
        commands = Commands(world)
        models = _open_models(spec.engine, compared, world, commands, stack, Direct(environment or {}))
        commands.drive(Evaluation(config, models).run, spec)
    return 0


@dataclass(frozen=True)
class OpenModels:
    """The opened models of an evaluation. A model that has several roles is opened once. Used on the driver (rank 0)
    only."""

    engines: Mapping[Model, Engine]
    readers: Mapping[Model, EmbeddedEngine]  # engines of the models whose token distributions are compared
    tokenizers: Mapping[Model, Any]


def _open_models(
    engines: EngineSpec,
    read: Sequence[Model],
    world: World,
    commands: Commands,
    stack: contextlib.ExitStack,
    servers: Direct,
) -> OpenModels:
    """Opens the engines of the specification `engines`. On the driver (rank 0), also loads the models in `read`, whose
    token distributions will be compared. Collective."""
    models = {name: role.model for name, role in engines.opened.items()}
    tokenizers = {model: tokenizer_of(model) for model in dict.fromkeys([*models.values(), *read])}
    by_role = {name: tokenizers[model] for name, model in models.items()}
    opened = open_engines(engines, by_role, world, commands, stack, servers=servers).engines
    by_model = {models[name]: engine for name, engine in opened.items()}
    readers = dict[Model, EmbeddedEngine]()
    for model in dict.fromkeys(read) if world.rank == 0 else []:
        engine = by_model.get(model)
        if isinstance(engine, DataParallelEngine):
            readers[model] = engine.local
        else:
            readers[model] = embedded_engine(model, engines.settings, tokenizers[model])
            readers[model].load_pretrained()
    return OpenModels(by_model, readers, tokenizers)


@dataclass(frozen=True)
class Evaluation:
    """An evaluation: its config, and its models with their engines. Used on the driver (rank 0)."""

    config: EvalConfig
    models: OpenModels

    def run(self, spec: EvalSpec) -> None:
        """Evaluates the models on every problem set, prints the metrics and writes the output files. Called on the
        driver (rank 0)."""
        config, start = self.config, time.monotonic()
        sources = read_sets(spec.evaluated)
        problem_sets = [self.problems(source) for source in sources]
        output = None if config.output is None else Path(config.output)
        place = None if output is None else output.with_suffix(".jsonl")
        read: Mapping[str, Any] = {}
        if output is not None:
            begun = Path(f"{output.with_suffix('.jsonl')}{PARTIAL}").exists()
            # the record's name does not end in .json, because each .json file in the folder is an evaluation's result
            record = output.with_suffix(".inputs")
            read = input_digests.tell_changes(record, spec.settings, spec.models, begun=begun, what="samples")
        samples = Samples(place, _digest(spec.settings, problem_sets, read))
        if samples.resumed:
            print(f"{samples.resumed} problems were done before: going on from there", file=sys.stderr, flush=True)
        sets: list[SetMetrics] = []
        with contextlib.ExitStack() as stack:
            pools = GradePools(stack)
            for source, problem_set in zip(sources, problem_sets, strict=True):
                for name, measure in self.measures(source, pools, samples):
                    _ask(problem_set, name, measure, samples)
                    ks = source.settings.k
                    sets.append(metrics_of(samples, problem_set.name, problem_set.title, name, ks=ks, seed=config.seed))
        means = macro(sets, seed=config.seed)
        for table in report.console_tables(sets, means):
            Console(width=None if sys.stdout.isatty() else 60 + 40 * len(sets)).print(table)
        for s in sets:
            for what, count in s.counts.items():
                print(f"note: {s.title}: {what}: {count} of {s.samples} samples")
            if s.measure in (SOLVE, HANDOFF) and "accuracy" not in s.metrics:
                print(f"note: {s.title}: no accuracy: {NO_SCALE}")
        if output is not None:
            samples.write()
            text = config_files.dump_tree(spec.settings)
            about = {"model": config.model.path, "seconds": round(time.monotonic() - start, 1)}
            report.write_metrics(output, sets, means, about)
            report.write_evaluation_page(output.with_suffix(".html"), sets, means, samples, text)
            samples.forget()
            print(f"{output}, {output.with_suffix('.jsonl').name}, {output.with_suffix('.html').name}")
        check_failures(gradings(samples, sets), config.reward.max_failure_share)

    def problems(self, source: LoadedSet) -> ProblemSet:
        """Returns a problem set with its tokenized prompts.

        Raises ConfigError if the template file is missing, and DataError for a token id outside the model's vocabulary.
        """
        config = self.config
        tokenizer = self.models.tokenizers[config.model]
        with refusing(lambda error: f"template: {error}", FileNotFoundError):
            text = read_template(source.template)
        values = [
            verifier_values(p.values) if source.judged else {n: p.values[n] for n in ASKED if n in p.values}
            for p in source.problems
        ]
        prompts = [prompt_tokens(tokenizer, text, v, chat=config.chat) for v in values]
        if why := vocabulary_of(config.model, tokenizer).missing(itertools.chain(*prompts)):
            raise DataError(f"{source.settings.title}: a prompt has {why}")
        settings = source.settings
        return ProblemSet(name=settings.name, title=settings.title, problems=source.problems, prompts=prompts)

    def measures(self, source: LoadedSet, pools: GradePools, samples: Samples) -> Iterator[tuple[str, Measure]]:
        """Yields (name, function) of each measure, such as `solve`, that the config requests for a problem set.
        A measure that uses the samples of another measure comes after it. `pools`: has a grader for each reward."""
        config, models = self.config, self.models
        tokenizer, engine = models.tokenizers[config.model], models.engines[config.model]
        settings = source.settings
        drawn = replace(config.sampling, temperature=settings.temperature, top_p=settings.top_p, top_k=settings.top_k)
        sampling = sampling_of(drawn, n=settings.n, seed=config.seed)
        common: dict[str, Any] = {"tokenizer": tokenizer, "sampling": sampling, "context": config.context}
        if source.judged:
            yield JUDGE, Judge(engine=engine, **common)
            return
        grade, measures = pools.of(settings.reward).grade, config.measures
        if SOLVE in measures:
            keep = bool({LEGIBILITY, DRIFT} & set(measures))
            yield SOLVE, Solver(engine=engine, grade=grade, weigher=self.weigher(), keep_tokens=keep, **common)
        if config.junior is None:
            return
        why = f"token ids pass between the models of model.path and junior.path = {config.junior.path}"
        check_vocabularies(tokenizer, models.tokenizers[config.junior], why)
        if HANDOFF in measures:
            pair = (engine, models.engines[config.junior])
            yield HANDOFF, HandOff(engines=pair, grade=grade, max_rounds=config.max_rounds, **common)
        if LEGIBILITY in measures:
            yield LEGIBILITY, self.on_texts(samples, functools.partial(legibility, models.engines[config.junior]))
        if DRIFT in measures:
            others: Mapping[str, Any] = {JUNIOR: models.readers[config.junior]}
            others |= {BASE: models.readers[config.base]} if config.base is not None else {}
            yield DRIFT, self.on_texts(samples, functools.partial(drift, models.readers[config.model], others))

    def weigher(self) -> Weigher | None:
        """Returns the verifier that weights samples for voting, or None if the config has no verifier."""
        config, models = self.config, self.models
        judging = config.verifier
        if judging is None:
            return None
        tokenizer = models.tokenizers[judging.model]
        return Weigher(
            engine=models.engines[judging.model],
            tokenizer=ChatTokenizer(tokenizer) if judging.chat else tokenizer,
            template=read_template(judging.template),
            sampling=sampling_of(judging.sampling, n=judging.votes, seed=config.seed), context=config.context,
            answers=judging.yes_no,
        )  # fmt: skip

    def on_texts(self, samples: Samples, score: Callable[..., list[list[Sample]]]) -> Measure:
        """Returns a measure that applies the function `score` to the responses that the measure `solve` generated
        before."""

        def measure(problems: ProblemSet, places: Sequence[int]) -> list[list[Sample]]:
            written = {group[0]["id"]: group for group in samples.rows(problems.name, SOLVE)}
            texts = [Texts(problems.prompts[place], written[place]) for place in places]
            return score(texts, self.config.context or sys.maxsize)

        return measure


def _digest(settings: Mapping[str, Any], sets: Sequence[ProblemSet], read: Mapping[str, Any]) -> str:
    """Returns a hash of everything that the samples depend on: the settings, the problems, and the input files. `read`:
    digests of the input files."""
    hashed = {name: value for name, value in settings.items() if name not in ("output", "launch")}
    digest = hashlib.sha256(json.dumps(hashed, sort_keys=True).encode())
    digest.update(json.dumps(read, sort_keys=True).encode())
    for problem_set in sets:
        values = [problem.values for problem in problem_set.problems]
        digest.update(repr((problem_set.name, problem_set.prompts, values)).encode())
    return digest.hexdigest()[:16]


def _ask(problems: ProblemSet, name: str, measure: Measure, samples: Samples) -> None:
    """Calls the function `measure` for the problems that have no samples of this measure yet, CHUNK problems at a time,
    and saves the samples. `name`: name of the measure, such as `solve`."""
    missing = samples.missing(problems.name, name, range(len(problems.problems)))
    for start in range(0, len(missing), CHUNK):
        part = missing[start : start + CHUNK]
        samples.add(measure(problems, part))
        print(f"{problems.title}, {name}: {start + len(part)} of {len(missing)} problems", file=sys.stderr, flush=True)
