"""Measures how fast iterations follow each other when several are generated at once, against the simulation of
`megatron-rl plan`, and against one iteration at a time in the background, as before.

The collector, the credit stage, the store and the pool of servers are those of a run. A recipe asks for one answer of a
set length for each prompt. The trainer sleeps.

--engines fake: servers that answer after a time in proportion to the length. Three distributions of lengths, each
log-normal and clipped, with 64 answers an iteration in 32 places, and a trainer that needs 0.8 of the time in which the
engines generate an iteration without a tail. All settings run at the same time, in one process that mostly sleeps.

    K/over_simulated   iterations a second over those that are simulated, with rollouts.max_staleness = K
    K/over_former      over the former mode at max_staleness = 1, in which a second one gained nothing
    K/idle             share of the servers' places that no answer occupied; simulated_idle: as simulated

--engines vllm: two vLLM servers on a CPU, a random model without an end of sequence, and lengths with a heavy tail
(mean 40, longest 400 tokens). The time of an answer of mean length is measured first, and the trainer sleeps as above.
`busy_over_former`: share of the servers' places that answers occupied with
max_staleness = 2, over that of the former mode. The work of an iteration is the same, so that this is the gain where
the speed of a sequence does not depend on how many are decoded; on a CPU it does.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import common
import numpy as np
import served

from megatron_rl.data.problems import Draw
from megatron_rl.engines.pool.membership import Limits
from megatron_rl.engines.pool.server_pool import ServerEngine, given
from megatron_rl.engines.pool.states import Loaded, Paused, Refit
from megatron_rl.engines.protocol import Completion, Sampling
from megatron_rl.engines.server import Server
from megatron_rl.engines.vllm.settings import Vllm
from megatron_rl.planning.schedule import lengths
from megatron_rl.planning.simulation import Sample, SimulatedIteration, Station, simulate
from megatron_rl.training.collector import Collector, RolloutMaker, Turn, upcoming
from megatron_rl.training.credit import CreditStage
from megatron_rl.training.iteration import Collected, Iteration, PromptSource, Recipe, RecipeRole, RolloutContext
from megatron_rl.training.rollouts import from_completion
from megatron_rl.training.store import IterationStore, State
from megatron_rl.types import Prompt, Rollout, Stop

ROLE = "model"
SAMPLES, PLACES, SERVERS = 64, 32, 2
TRAIN_SHARE = 0.8  # seconds of training over those of generating an iteration in full engines
STALENESS = (0, 1, 2, 4)
COUNT, PERMUTATIONS = 10, 4  # measured iterations; iterations after which the lengths repeat
BOUND = 0.1  # greatest difference from the simulation
BARS = {"mathematics/4/over_former": 1.6, "agents/4/over_former": 2.5}
VLLM_BAR, VLLM_COUNT = 1.3, 6


@dataclass(frozen=True, kw_only=True)
class Case:
    """Lengths of answers: log-normal, clipped. `mean_s`: seconds of an answer of mean length."""

    mean: float
    longest: float
    mean_s: float
    samples: int = SAMPLES
    places: int = PLACES

    def tokens(self) -> np.ndarray:
        """Returns the lengths [PERMUTATIONS, samples] of the answers of iterations."""
        drawn = [lengths(self.mean, self.longest, self.samples, seed=i) for i in range(PERMUTATIONS)]
        return np.maximum(1, np.round(drawn)).astype(int)

    @property
    def train_s(self) -> float:
        return TRAIN_SHARE * self.mean_s * self.samples / self.places


CASES = {
    "mathematics": Case(mean=3000, longest=8000, mean_s=1.0),
    "long reasoning": Case(mean=9000, longest=32000, mean_s=0.8),
    "agents": Case(mean=12000, longest=128000, mean_s=0.45),
}
HEAVY = Case(mean=40, longest=400, mean_s=1.0, samples=32, places=16)


class TimedServer(Server):
    """A server that answers after `token_s` seconds for each token."""

    health = "/"

    def __init__(self, token_s: float) -> None:
        super().__init__("http://127.0.0.1:9", {}, ends=(), vocab=0)
        self._token_s = token_s

    async def generate(
        self, prompt: np.ndarray, sampling: Sampling, *, seed: int, timeout_s: float, priority: int = 0
    ) -> list[Completion]:
        await asyncio.sleep(sampling.max_tokens * self._token_s)
        return [Completion(tokens=np.ones(1), logprobs=np.zeros(1), stop=Stop.EOS)]


class Lengths(Recipe):
    """Asks for one answer to each prompt, with the length that the prompt names."""

    def roles(self) -> dict[str, RecipeRole]:
        return {ROLE: RecipeRole()}

    def schedule(self) -> list[list[tuple[str, ...]]]:
        return [[(ROLE,)]] * 10_000

    def prompt(self, payload: Mapping[str, Any]) -> str:
        return ""

    def rollout(self, iteration: Iteration, source: PromptSource, context: RolloutContext) -> dict[str, list[Rollout]]:
        session, prompts = context.session(ROLE), source.take()
        for i, prompt in enumerate(prompts):
            sampling = replace(context.samplings[ROLE], max_tokens=prompt.payload["length"], seed=iteration.number)
            session.ask(i, prompt.tokens, sampling)
        samples = [
            from_completion(prompts[i], answer, role=ROLE, group="all", version=0) for i, [answer] in session.answers()
        ]
        return {ROLE: [replace(sample, rewards={"outcome": float(i % 2)}) for i, sample in enumerate(samples)]}


class Prompts:
    """An endless stream of prompts, which name the lengths of their answers."""

    dropped = 0

    def __init__(self, tokens: np.ndarray) -> None:
        self._lengths, self._place = tokens.ravel(), 0

    def take(self, count: int, fits: Callable[[Prompt], bool], draw: Draw) -> list[Prompt]:
        places = range(self._place, self._place + count)
        self._place += count
        drawn = [int(self._lengths[place % len(self._lengths)]) for place in places]
        return [
            Prompt(id=str(place), tokens=[1 + place % 50, 2, 3], payload={"length": length})
            for place, length in zip(places, drawn, strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        return {"place": self._place}


@dataclass(frozen=True, kw_only=True)
class FormerMaker(RolloutMaker):
    """Generates one iteration after the other, as the single thread of the former collector did."""

    complete: list[int] = field(default_factory=list)
    change: threading.Condition = field(default_factory=threading.Condition)

    def make(self, iteration: Iteration, recipe_state: State, turn: Turn = nullcontext) -> tuple[Collected, None]:
        with self.change:
            self.change.wait_for(lambda: len(self.complete) == iteration.number)
        collected = super().make(iteration, recipe_state, turn)
        with self.change:
            self.complete.append(iteration.number)
            self.change.notify_all()
        return collected


def context_of(engine: ServerEngine) -> RolloutContext:
    return RolloutContext(
        engines={ROLE: engine}, tokenizers={}, samplings={ROLE: Sampling(max_tokens=1)}, max_prompt_tokens={},
        grade=lambda responses, payloads: [],
    )  # fmt: skip


def answer_s(engine: ServerEngine, case: Case) -> float:
    """Returns the seconds of an answer of mean length when all places are occupied. The first round warms up."""
    for _ in range(2):
        session, began = context_of(engine).session(ROLE), time.perf_counter()
        for place in range(case.places):
            session.ask(place, [1 + place, 2, 3], Sampling(max_tokens=round(case.mean)))
        assert sum(1 for _ in session.answers()) == case.places
    return time.perf_counter() - began


def run(
    engine: ServerEngine, case: Case, staleness: int, *, former: bool = False, count: int = COUNT
) -> dict[str, float]:
    """Returns the rate, the idle share of the servers' places, and the mean staleness of a run of the collector."""
    context = context_of(engine)
    recipe, kind = Lengths(), FormerMaker if former else RolloutMaker
    maker = kind(
        recipe=recipe, readers={ROLE: Prompts(case.tokens())}, context=context,  # type: ignore[dict-item]
        prompts_per_iteration=case.samples, max_staleness=staleness,
    )  # fmt: skip
    warm = 2 * (staleness + 1)
    count = -(-count // (staleness + 1)) * (staleness + 1)
    schedule = recipe.schedule()[: warm + count + staleness + 1]
    start = {"cycle": 0, "index": 0, "number": 0, "iterations": {}}
    marks, ages, members = list[tuple[float, float]](), list[float](), engine.members
    first = members.version
    with tempfile.TemporaryDirectory() as folder:
        collector = Collector(
            maker, CreditStage(recipe, lag=staleness), upcoming(schedule, start), IterationStore(Path(folder)),
            max_staleness=staleness,
        )  # fmt: skip
        for number, iteration in enumerate(upcoming(schedule, start)):
            if number >= warm:
                marks.append((time.perf_counter(), members.occupied_s()))
            if number == warm + count:
                break
            collected = collector.take(iteration)
            ages += [members.version - r.version for r in collected.rollouts[ROLE]] if number >= warm else []
            time.sleep(case.train_s)
            for pause in members.post(Refit(members.version + 1, [*members.by_replica], everyone=True)):  # new weights
                for load in members.post(Paused(pause.replica, pause.ticket)):
                    members.post(Loaded(load.replica, load.ticket, load.version))
            collector.trained()
        collector.close()
    assert members.version == first + warm + count
    (begin, busy_start), (end, busy_end) = marks[0], marks[-1]
    busy = (busy_end - busy_start) / (end - begin) / members.limits.places
    return {"rate": count / (end - begin), "idle": 1 - busy, "staleness": fmean(ages)}


def fake_run(case: Case, staleness: int, former: bool, count: int) -> dict[str, float]:
    servers = [TimedServer(case.mean_s / case.mean) for _ in range(SERVERS)]
    engine = given(ROLE, servers, Limits(servers=SERVERS, at_once=case.places // SERVERS))
    try:
        return run(engine, case, staleness, former=former, count=count)
    finally:
        engine.close()


def simulated(case: Case, staleness: int, former: bool) -> dict[str, float]:
    station = Station(places=case.places, rates=[case.mean / case.mean_s] * (case.places + 1))
    cycle = [
        SimulatedIteration(samples=[Sample(visits=[(0, float(length))]) for length in drawn], train_s=case.train_s)
        for drawn in case.tokens()
    ]
    simulation = simulate([station], cycle, max_staleness=staleness, one_at_a_time=former)
    mean = sum(age * share for age, share in enumerate(simulation.staleness))
    return {"rate": simulation.iterations_per_hour / 3600, "idle": simulation.engines_idle, "staleness": mean}


def fake_figures(speed: float, count: int) -> dict[str, float]:
    """Returns the metrics of all cases. `speed`: factor by which servers and trainer are faster. `count`: number of
    measured iterations."""
    cases = {name: replace(case, mean_s=case.mean_s / speed) for name, case in CASES.items()}
    modes = [("former", 1, True), *((str(k), k, False) for k in STALENESS)]
    figures: dict[str, float] = {}
    with ThreadPoolExecutor(len(cases) * len(modes)) as threads:
        runs = {
            (name, mode): threads.submit(fake_run, case, k, former, count)
            for name, case in cases.items()
            for mode, k, former in modes
        }
        for name, case in cases.items():
            measured = {mode: runs[name, mode].result() for mode, _, _ in modes}
            for mode, k, former in modes:
                measured_here, model = measured[mode], simulated(case, k, former)
                figures |= {
                    f"{name}/{mode}/iterations_per_s": measured_here["rate"],
                    f"{name}/{mode}/over_simulated": measured_here["rate"] / model["rate"],
                    f"{name}/{mode}/over_former": measured_here["rate"] / measured["former"]["rate"],
                    f"{name}/{mode}/idle": measured_here["idle"],
                    f"{name}/{mode}/simulated_idle": model["idle"],
                    f"{name}/{mode}/staleness": measured_here["staleness"],
                    f"{name}/{mode}/simulated_staleness": model["staleness"],
                }
    return figures


@contextmanager
def vllm_pool(python: str, folder: Path) -> Iterator[ServerEngine]:
    import rollout

    model = folder / "model"
    rollout.write_model(model, rollout.VLLM_PRESET, 1e-9)
    settings = Vllm(python=python, replicas=SERVERS, max_batch=HEAVY.places // SERVERS, lost_after_s=600.0)
    with served.open_pool(folder, model, settings, rollout.EOS) as (pool, _):
        yield pool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", choices=("fake", "vllm"), default="fake", help="(default: %(default)s)")
    parser.add_argument("--python", default=".venv-vllm/bin/python", help="interpreter that has vLLM (make engines)")
    parser.add_argument("--iterations", type=int, default=COUNT, help="measured iterations (engines fake)")
    parser.add_argument(
        "--speed", type=float, default=1.0, help="times as fast as described, with less exact figures (engines fake)"
    )
    common.add_arguments(parser)
    args = parser.parse_args()
    if args.engines == "fake":
        metrics = fake_figures(args.speed, args.iterations)
        held = [name for name in metrics if name.endswith("/over_simulated")]
        bars = BARS | dict.fromkeys(held, 1 - BOUND)
        common.finish(metrics, bars, args, limits=dict.fromkeys(held, 1 + BOUND))
        return
    with tempfile.TemporaryDirectory() as folder, vllm_pool(args.python, Path(folder)) as pool:
        case = replace(HEAVY, mean_s=answer_s(pool, HEAVY))
        former, ahead = (run(pool, case, k, former=k == 1, count=VLLM_COUNT) for k in (1, 2))
    metrics = {
        f"{mode}/{name}": value
        for mode, figures in (("former", former), ("2", ahead))
        for name, value in figures.items()
    }
    metrics["2/busy_over_former"] = (1 - ahead["idle"]) / (1 - former["idle"])
    metrics["answer_s"] = case.mean_s
    metrics["2/rate_over_former"] = ahead["rate"] / former["rate"]
    common.finish(metrics, {"2/busy_over_former": VLLM_BAR}, args)


if __name__ == "__main__":
    main()
