"""Measures what roles on ranks of their own take in the real control plane, beside what the plan's simulator predicts.

The ranks are processes of this machine with the real driver, commands, loop, fleet and collector; what a GPU would
compute (rollouts, updates, weight syncs) is slept. `shared`, `apart` and `ahead` are runs of two roles whose updates
are not equally long: on the same ranks, on ranks of their own, and in turns on ranks of their own with
rollouts.max_staleness 1. `planned` is a run of three roles as examples/published/evolve_7b_3b_1.5b.yaml has them: on as
many ranks as 4 nodes have, with the plan's times, made shorter by one factor.

    RUN/over_plan    seconds of an iteration over those that planning.simulation predicts
    RUN/idle_points  largest difference of a set's measured idle share from the predicted one, in points (percent)
    RUN/command_ms   milliseconds that the driver needs to post a command to all ranks
    RUN/answer_ms    milliseconds until all ranks have answered a command that does nothing
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import common
import torch.distributed as dist

from megatron_rl.algorithms.policy_loss import PolicyLoss
from megatron_rl.cluster.host_address import free_port
from megatron_rl.config import files
from megatron_rl.config.schema import LossConfig, TrainConfig
from megatron_rl.messages.commands import Commands
from megatron_rl.messages.world import World
from megatron_rl.planning.phases import SetWork
from megatron_rl.planning.plan import make
from megatron_rl.planning.schedule import case_of
from megatron_rl.planning.simulation import Sample, Schedule, SimulatedIteration, Station, simulate
from megatron_rl.run.metrics import Stopwatch
from megatron_rl.spec.resolve import resolve
from megatron_rl.training import loop
from megatron_rl.training.collector import Collector, IterationMaker, upcoming
from megatron_rl.training.credit import CreditStage
from megatron_rl.training.device_memory import DeviceMemory
from megatron_rl.training.iteration import Collected, Iteration, Recipe, RecipeRole
from megatron_rl.training.lessons import CreditDesk
from megatron_rl.training.progress import Plan, Progress
from megatron_rl.training.rank_fleet import RankFleet
from megatron_rl.training.store import IterationStore
from megatron_rl.types import Author, Rollout

THREE = Path(__file__).parent.parent / "examples/published/evolve_7b_3b_1.5b.yaml"
SETS = {"proposer": "0-7", "solver": "8-23", "judge": "24-31"}  # of `planned`: ranks of 4 nodes
REPLICAS = 24  # servers of each role in `planned`: with fewer, all ranks wait for rollouts nearly all of the time
COMMANDS = 200
OVER_PLAN, IDLE_POINTS, COMMAND_MS = 1.05, 5.0, 5.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run whose computations are slept. `sets`: {role: its ranks}. `schedule`: the roles that each iteration of a
    cycle trains. `update_s`, `refit_s`: {role: seconds}. `rollout_s`: seconds in which the engines write the rollouts
    of an iteration; they write one iteration at a time."""

    ranks: int
    sets: Mapping[str, range]
    schedule: Sequence[tuple[str, ...]]
    update_s: Mapping[str, float]
    refit_s: Mapping[str, float]
    rollout_s: float
    ahead: int = 0

    def predicted(self) -> Schedule:
        cycle = [
            SimulatedIteration(
                samples=[Sample(visits=[(0, self.rollout_s)])],
                trained=roles,
                sets=[*map(self._work, _by_set(self, roles))],
            )
            for roles in self.schedule
        ]
        return simulate([Station(places=1, rates=[1.0, 1.0])], cycle, max_staleness=self.ahead)

    def _work(self, roles: Sequence[str]) -> SetWork:
        return SetWork(
            ranks=self.sets[roles[0]], policies=[*roles], update_s=sum(self.update_s[role] for role in roles),
            refit_s=sum(self.refit_s[role] for role in roles), paused=[],
        )  # fmt: skip


def _by_set(run: Run, roles: Sequence[str]) -> list[list[str]]:
    """Returns the roles, grouped by their ranks."""
    groups = dict[range, list[str]]()
    for role in roles:
        groups.setdefault(run.sets[role], []).append(role)
    return [*groups.values()]


@dataclass(kw_only=True)
class Players(Recipe):
    """A recipe whose rollouts are the same two samples of each role."""

    run: Run
    iterations: int

    def roles(self) -> Mapping[str, RecipeRole]:
        return dict.fromkeys(self.run.sets, RecipeRole(samples=2))

    def schedule(self) -> list[list[tuple[str, ...]]]:
        return [[*self.run.schedule]] * -(-self.iterations // len(self.run.schedule))

    def prompt(self, payload: Mapping[str, Any]) -> str:
        return ""

    def rollout(self, iteration: Iteration, source: Any, context: Any) -> dict[str, list[Rollout]]:
        def sample(role: str, reward: float) -> Rollout:
            spans = [(0, 1, Author.ENVIRONMENT, 0), (1, 2, Author.POLICY, 0)]
            return Rollout(
                role=role, group="0", tokens=[0, 1], logprobs=[0.0, -1.0], spans=spans, rewards={"outcome": reward}
            )

        return {role: [sample(role, reward) for reward in (0.0, 1.0)] for role in iteration.roles}


@dataclass(frozen=True, kw_only=True)
class SleepingMaker(IterationMaker):
    """Makes rollouts of a Players run, with engines that write one iteration at a time."""

    recipe: Players
    engines: threading.Lock

    def make(
        self, iteration: Iteration, recipe_state: Any, turn: Any = contextlib.nullcontext
    ) -> tuple[Collected, None]:
        with turn():
            pass
        with self.engines:
            time.sleep(self.recipe.run.rollout_s)
        return Collected(rollouts=self.recipe.rollout(iteration, None, None), metrics={}), None


class SleepingFleet(RankFleet):
    """A fleet whose ranks sleep while they would train or send weights."""

    def __init__(self, run: Run, commands: Commands, worlds: Mapping[str, World]) -> None:
        self.run, self.worlds, self.busy_s = run, worlds, 0.0
        refits = {role: lambda version, role=role: self.call("send", role, bulk=version).result() for role in run.sets}
        super().__init__(
            commands, DeviceMemory({}), refits, world_of=worlds.__getitem__,
            ranks={role: [*own] for role, own in run.sets.items()},
        )  # fmt: skip
        self.serve("send", lambda policy, version: self._sleep(policy, run.refit_s[policy]))
        self.serve("nothing", lambda: None)
        self.serve("busy", lambda: self.busy_s)
        self.serve("forget", lambda: setattr(self, "busy_s", 0.0))

    def _train(self, policy: str, rollouts: Sequence[Rollout] | None) -> dict[str, float]:
        self._sleep(policy, self.run.update_s[policy])
        return {}

    def _sleep(self, policy: str, seconds: float) -> None:
        start = time.perf_counter()
        time.sleep(seconds)
        self.worlds[policy].barrier()
        self.busy_s += time.perf_counter() - start


def _rank(rank: int, run: Run, iterations: int, port: int, folder: str, answers: Any) -> None:
    """One rank of a run. Rank 0 puts {figure: value} into `answers`."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=run.ranks)
    groups = {own: dist.new_group([*own], backend="gloo") for own in dict.fromkeys(run.sets.values())}
    worlds = {role: World(groups[own]) for role, own in run.sets.items() if rank in own}
    commands = Commands(World())
    fleet = SleepingFleet(run, commands, worlds)
    found = commands.drive(_drive, run, iterations, fleet, commands, Path(folder))
    if rank == 0:
        answers.put(found)
    dist.barrier()
    dist.destroy_process_group()


def _drive(run: Run, iterations: int, fleet: SleepingFleet, commands: Commands, folder: Path) -> dict[str, Any]:
    """Runs the loop. Returns the seconds of an iteration, those of a command, and the idle share of each set."""
    recipe, watch, ends = Players(run=run, iterations=iterations), Stopwatch(), list[float]()
    maker = SleepingMaker(readers={}, recipe=recipe, engines=threading.Lock())
    progress, skipped = Progress(), 2 * (run.ahead + 1)
    collector = Collector(
        maker, CreditStage(recipe, lag=run.ahead), upcoming(recipe.schedule(), progress.state_dict()),
        IterationStore(folder), max_staleness=run.ahead, watch=watch,
    )  # fmt: skip
    desk = CreditDesk(
        recipe=recipe, policy_of={role: role for role in run.sets},
        loss_of=lambda policy, number: PolicyLoss(LossConfig(kl_coef=0.0)), mixed="keep", train_without_signal=False,
    )  # fmt: skip
    nothing = _Nothing()

    def observe(event: Any) -> None:
        if isinstance(event, loop.Finished):
            ends.append(time.perf_counter())
            if len(ends) == skipped:
                fleet._post("forget")

    parts = loop.Parts(
        fleet=fleet, rollouts=collector, desk=desk, examiner=None, checkpoints=nothing, observe=observe,
        leave=lambda: False, watch=watch,
    )  # fmt: skip
    times = [_command_seconds(commands) for _ in range(COMMANDS)]
    loop.train(parts, Plan(iterations=iterations, ahead=run.ahead), progress)
    collector.close()
    counted, seconds = len(ends) - skipped, ends[-1] - ends[skipped - 1]
    busy = commands.each("busy", [[]] * run.ranks)
    shares = {own: 1 - fmean(busy[rank] for rank in own) / seconds for own in dict.fromkeys(run.sets.values())}
    return {
        "iteration_s": seconds / counted,
        "command_ms": 1000 * median(posting for posting, _ in times),
        "answer_ms": 1000 * median(answer for _, answer in times),
        "idle": {f"{own[0]}-{own[-1]}": share for own, share in shares.items()},
    }  # fmt: skip


class _Nothing:
    """Checkpoints that are not written."""

    def begin(self, number: int) -> None:
        return None

    def save(self, number: int, state: Mapping[str, Any]) -> int:
        return number

    def settle(self, *, wait: bool) -> None:
        return None

    def keep_best(self, number: int, best: Any) -> None:
        return None

    def remove_surpassed(self, best: Any) -> None:
        return None


def _command_seconds(commands: Commands) -> tuple[float, float]:
    """Posts a command to all ranks. Returns the seconds until it is posted, and until it is answered."""
    start = time.perf_counter()
    answer = commands.together("nothing", (), ())
    posted = time.perf_counter()
    answer.result()
    return posted - start, time.perf_counter() - start


def measured(run: Run, iterations: int) -> dict[str, Any]:
    """Returns what `_drive` returns, from a run on processes of this machine."""
    context = multiprocessing.get_context("fork")
    answers, port = context.SimpleQueue(), free_port("127.0.0.1")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, run, iterations, port, folder, answers))
            for rank in range(run.ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise RuntimeError("a rank failed, see its traceback above")
        return answers.get()


def figures(name: str, run: Run, iterations: int) -> dict[str, float]:
    """Returns the figures of a run, by their names in the table."""
    found, plan = measured(run, iterations), run.predicted()
    points = [100 * abs(found["idle"][own.ranks] - own.idle) for own in plan.sets]
    idle = {f"{name}/idle of {own.ranks}": found["idle"][own.ranks] for own in plan.sets}
    return {
        f"{name}/iteration_s": found["iteration_s"],
        f"{name}/over_plan": found["iteration_s"] * plan.iterations_per_hour / 3600,
        f"{name}/idle_points": max(points), **idle, f"{name}/command_ms": found["command_ms"],
        f"{name}/answer_ms": found["answer_ms"],
    }  # fmt: skip


def planned(iteration_s: float) -> Run:
    """Returns the run of three roles with the plan's times, made shorter by one factor, so that an iteration takes
    `iteration_s` seconds."""
    ranks = [f"roles.{role}.ranks={own}" for role, own in SETS.items()]
    config = files.load(TrainConfig, [THREE], ["job.nodes=4", f"engine.replicas={REPLICAS}", *ranks])
    case = case_of(resolve(config, 32, to_come=True), "H100")
    [iteration] = make(case).iterations
    sets = {role: case.role_ranks[role] for role in SETS}
    works = {work.ranks: work for work in iteration.sets}
    run = Run(
        ranks=case.ranks, sets=sets, schedule=[tuple(SETS)], ahead=case.spec.loop.rollouts.ahead,
        update_s={role: works[own].update_s for role, own in sets.items()},
        refit_s={role: works[own].refit_s for role, own in sets.items()},
        rollout_s=sum(own for phase, own in iteration.phases.items() if phase.startswith(("rollout", "reward"))),
    )  # fmt: skip
    shorter = iteration_s * run.predicted().iterations_per_hour / 3600
    return replace(
        run, update_s={role: shorter * own for role, own in run.update_s.items()},
        refit_s={role: shorter * own for role, own in run.refit_s.items()}, rollout_s=shorter * run.rollout_s,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=16, help="of each run (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of an update (default: %(default)s)")
    parser.add_argument("--runs", default="shared,apart,ahead,planned", help="runs (default: %(default)s)")
    common.add_arguments(parser)
    args = parser.parse_args()
    one = args.seconds
    shared = Run(
        ranks=4, sets={"a": range(4), "b": range(4)}, schedule=[("a", "b")], update_s={"a": one, "b": one / 3},
        refit_s={"a": one / 10, "b": one / 20}, rollout_s=one / 2,
    )  # fmt: skip
    apart = replace(shared, sets={"a": range(1, 3), "b": range(3, 4)})
    runs: dict[str, Callable[[], Run]] = {
        "shared": lambda: shared, "apart": lambda: apart,
        "ahead": lambda: replace(apart, schedule=[("a",), ("b",)], ahead=1), "planned": lambda: planned(3 * one),
    }  # fmt: skip
    metrics = dict[str, float]()
    for name in args.runs.split(","):
        metrics |= figures(name, runs[name](), args.iterations)
    limits = {name: OVER_PLAN for name in metrics if name.endswith("/over_plan")}
    limits |= {name: IDLE_POINTS for name in metrics if name.endswith("/idle_points")}
    limits |= {f"{name}/command_ms": COMMAND_MS for name in args.runs.split(",") if name != "planned"}
    common.finish(metrics, {}, args, limits=limits)


if __name__ == "__main__":
    main()
