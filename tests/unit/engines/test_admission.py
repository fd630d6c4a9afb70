"""Several iterations are generated at once: what each gets does not depend on timing, nothing is discarded, engines do
not idle at the end of an iteration, and a run ends although iterations are being generated."""

from __future__ import annotations

import copy
import json
import math
import random
import threading
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
from fake_engines import ScriptedEngine
from scripted_rollouts import GROUP, TOKENIZER, context_of, lucky, reader_of
from test_collector import START, join_workers
from test_methods_sampling import RECIPES
from test_recipes import mixed_verifier, says, solution
from toys import graded

from megatron_rl.algorithms.advantages import StepCredit
from megatron_rl.config.files import load
from megatron_rl.config.schema import TrainConfig, Use
from megatron_rl.engines.batched_session import BatchedSession
from megatron_rl.engines.full_prompts import FullPrompts
from megatron_rl.engines.protocol import EngineError, Sampling
from megatron_rl.environments.environment import Environment
from megatron_rl.environments.episode_types import EpisodeEnd, NextRequest
from megatron_rl.recipes.agents import Agents
from megatron_rl.recipes.dapo import Dapo
from megatron_rl.recipes.grpo import Grpo
from megatron_rl.recipes.tango import Tango
from megatron_rl.spec.checks import problems
from megatron_rl.spec.resolve import specify
from megatron_rl.texts.tags import boxed
from megatron_rl.training.collector import Collector, RolloutMaker, upcoming
from megatron_rl.training.credit import CreditStage
from megatron_rl.training.store import IterationStore

COUNT = 8  # iterations of a run


class Gate:
    """Decides in which order iterations that are generated at once end: an iteration gets no answer before those that
    come first in a random order have ended. Without a seed, nothing is decided."""

    def __init__(self, seed: int | None, k: int, first: int = 0) -> None:
        self._change, self._ended, self._before = threading.Condition(), set[int](), dict[int, list[int]]()
        for start in range(first, COUNT, k + 1) if seed is not None else ():
            block = list(range(start, min(start + k + 1, COUNT)))
            random.Random(f"{seed}/{start}").shuffle(block)
            self._before |= {number: block[:place] for place, number in enumerate(block)}

    def wait(self, number: int) -> None:
        with self._change:
            assert self._change.wait_for(lambda: self._ended.issuperset(self._before.get(number, ())), 60)

    def end(self, number: int) -> None:
        with self._change:
            self._ended.add(number)
            self._change.notify_all()


class Gated:
    """An engine behind a gate. An iteration's requests have its number, plus 1, as their priority."""

    version = 0

    def __init__(self, engine: ScriptedEngine, gate: Gate) -> None:
        self._engine, self._gate = engine, gate

    def session(self, priority: int = 0, log: Any = None) -> BatchedSession:
        def run(rows):
            self._gate.wait(priority - 1)
            return self._engine.generate_rows(rows)

        return BatchedSession(run, self._engine.check_ask, FullPrompts("a fake"))

    def tend(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class GatedMaker(RolloutMaker):
    gate: Gate

    def make(self, iteration, recipe_state, turn):
        made = super().make(iteration, recipe_state, turn)
        self.gate.end(iteration.number)
        return made


@dataclass
class Talk(Environment):
    """Two answers; the reward depends on the first."""

    def begin(self, task, seed):
        self.first = ""
        return [self._next(f"{task['question']} {seed % 7} ")]

    def step(self, said):
        if not self.first:
            self.first = said.text
            return [self._next("again ")]
        return EpisodeEnd(rewards={"generator": {"outcome": float(self.first == "yes")}})

    def _next(self, text):
        return NextRequest(agent="generator", role="generator", messages=[{"role": "user", "content": text}])


def chance(text: str, j: int, sampling: Sampling) -> bool:
    return random.Random(f"{sampling.seed}/{text}/{j}").random() < 0.4


@pytest.fixture
def methods(tmp_path):
    """By name: a function that makes the recipe, and its context."""
    (tmp_path / "g.txt").write_text("Q {question}\n")
    (tmp_path / "v.txt").write_text("Q {question} S {solution} K {num_steps}\n")
    (tmp_path / "q.txt").write_text("Q{question}:")
    templates = {"generator_template": str(tmp_path / "g.txt"), "verifier_template": str(tmp_path / "v.txt")}
    dapo = {"updates": COUNT, "group_size": GROUP, "template": str(tmp_path / "q.txt")}
    words = {"generator_updates": 5, "generator_iterations": 2, "warmup_updates": 1, "group_size": 3}
    tango = {**words, "verifications": 2, "review_below": 0.3, **templates}
    tango |= {"reviewed": "failed", "verifier_rests": True, "greedy_verdicts": True, "alpha_start": 1.0}
    tango |= {"step_credit": StepCredit(span="own", baseline="step"), "alpha_min": 1.0}
    reviewed = replace(
        context_of(lucky), grade=graded(lambda response, payload: boxed(response) == payload["answer"]),
        engines={
            "generator": says(lambda p, i, j, s: solution(2, "yes" if chance(p, j, s) else "no")),
            "verifier": says(mixed_verifier),
        },
        tokenizers=dict.fromkeys(("generator", "verifier"), TOKENIZER),
        samplings=dict.fromkeys(("generator", "verifier"), Sampling(max_tokens=4000)),
        max_prompt_tokens=dict.fromkeys(("generator", "verifier"), 10_000),
    )  # fmt: skip
    agents = {"updates": COUNT, "group_size": 2, "agents": {"generator": 1}, "compared": "ema"}
    environment = Use(target=f"{__name__}:Talk")
    found = {name: (lambda own=own: Dapo(**dapo, **own), context_of(lucky)) for name, own in RECIPES.items()}
    found["grpo"] = lambda: Grpo(**dapo), context_of(lucky)
    found["tango"] = lambda: Tango(**tango), reviewed
    found["agents"] = lambda: Agents(**agents, environment=environment), context_of(lucky)
    return found


def collect(method, directory, k, *, seed=None, cut=COUNT, state=None, number=0, per=3):
    """Collects the iterations from `number` to `cut`. -> [(iteration, its content, the state after it)]"""
    build, context = method
    recipe, gate, reader = build(), Gate(seed, k, number), reader_of(13, shuffle=True, solution="because")
    if seed is not None:
        context = replace(context, engines={name: Gated(engine, gate) for name, engine in context.engines.items()})
    readers = dict.fromkeys(recipe.roles(), reader)
    maker = GatedMaker(
        recipe=recipe, readers=readers, context=context, prompts_per_iteration=per, max_staleness=k, gate=gate
    )  # fmt: skip
    credit = CreditStage(recipe, lag=k)
    iterations = [*islice(upcoming(recipe.schedule(), START), COUNT)]
    if state is not None:
        kept = json.loads(json.dumps(state))
        maker.restore(kept["data"])
        credit.restore(kept["recipe"], number)
    collector = Collector(maker, credit, iter(iterations[number:]), IterationStore(directory), max_staleness=k)
    out = []
    for due in iterations[number:cut]:
        found = collector.take(due)
        collector.trained()
        rows = {role: [content(r) for r in own] for role, own in found.rollouts.items()}
        metrics = {role: {n: v for n, v in own.items() if "seconds" not in n} for role, own in found.metrics.items()}
        out.append((due.number, rows, metrics, collector.state()))
    collector.close()
    return out


def content(rollout):
    advantages = np.asarray(rollout.advantages).tolist()
    return rollout.group, rollout.tokens.tolist(), advantages, dict(rollout.rewards), rollout.length


METHODS = [*RECIPES, "grpo", "tango", "agents"]


@pytest.mark.parametrize(
    ("name", "k"), [*((name, 2) for name in METHODS), ("dynamic", 1), ("tango", 1), ("dynamic", 4), ("all", 4)]
)
def test_what_an_iteration_gets_does_not_depend_on_timing(methods, tmp_path, name, k):
    found = [collect(methods[name], tmp_path / str(seed), k, seed=seed) for seed in (None, 1, 2)]
    assert len(found[0]) == COUNT and found[1] == found[0] and found[2] == found[0]
    rounds = [own.get("rounds", 1.0) for _, _, metrics, _ in found[0] for own in metrics.values()]
    assert max(rounds) > 1 or name != "dynamic", "some iterations take problems several times"


@pytest.mark.parametrize("name", ["grpo", "agents"])
def test_problems_are_the_same_however_many_iterations_are_generated_at_once(methods, tmp_path, name):
    every = [collect(methods[name], tmp_path / str(k), k, seed=k or None) for k in range(5)]
    rows = [[{r: [group for group, *_ in own] for r, own in by.items()} for _, by, _, _ in found] for found in every]
    assert all(own == rows[0] for own in rows) and len({str(own) for own in rows[0]}) == COUNT
    assert [found[-1][3]["data"] for found in every] == [every[0][-1][3]["data"]] * 5


@pytest.mark.parametrize("name", METHODS)
def test_a_run_that_is_resumed_after_any_iteration_gets_the_same(methods, tmp_path, name):
    """With iterations ahead that are lost, and with those that the store has."""
    whole = collect(methods[name], tmp_path / "whole", 2)
    for cut in range(1, COUNT):
        state = whole[cut - 1][3]
        seed = cut if cut % 2 else None
        assert collect(methods[name], tmp_path / f"{cut}", 2, seed=seed, state=state, number=cut) == whole[cut:]
    collect(methods[name], tmp_path / "cut", 2, cut=4)
    assert collect(methods[name], tmp_path / "cut", 2, state=whole[3][3], number=4) == whole[4:]


def ks_distance(one, other) -> float:
    """The largest difference of the two empirical distribution functions (Kolmogorov-Smirnov)."""
    places = np.sort(np.concatenate([one, other]))
    shares = [np.searchsorted(np.sort(own), places, side="right") / len(own) for own in (one, other)]
    return float(np.abs(shares[0] - shares[1]).max())


def ks_bound(one, other, level: float = 1e-3) -> float:
    """The distance that two samples of one distribution exceed with this probability (Smirnov's limit)."""
    return math.sqrt(-math.log(level / 2) / 2 * (len(one) + len(other)) / (len(one) * len(other)))


class DropsStale(Grpo):
    """The policy of frameworks that bound staleness by discarding: a group is dropped if its longest answer took longer
    than `most` tokens, which is what an engine writes in the updates that are allowed."""

    most = 0

    def rollout(self, iteration, source, context):
        [(role, own)] = super().rollout(iteration, source, context).items()
        longest = {r.group: max(o.length for o in own if o.group == r.group) for r in own}
        return {role: [r for r in own if longest[r.group] <= self.most]}


@pytest.mark.parametrize("k", [1, 2])
def test_the_lengths_that_are_trained_on_are_distributed_as_those_that_were_asked_for(methods, tmp_path, k):
    """Groups that are dropped because they are stale would make a bias against long answers, which the statistic
    finds."""
    draw = lambda rng: max(1, min(2000, int(rng.lognormvariate(3.0, 1.2))))  # noqa: E731
    asked = list[int]()

    def script(text, j, sampling):
        asked.append(draw(random.Random(f"{sampling.seed}/{text}/{j}")))
        return "y" * asked[-1]

    build = methods["grpo"][0]
    context = context_of(script, grade=graded(lambda response, payload: len(response) % 2), max_tokens=3000)
    expected = [draw(random.Random(i)) + 1 for i in range(5000)]

    def lengths(recipe):
        asked.clear()
        found = collect((lambda: recipe, context), tmp_path / type(recipe).__name__, k, seed=k, per=24)
        return [length for _, rows, _, _ in found for *_, length in rows["generator"]]

    ours = lengths(build())
    assert sorted(ours) == sorted(length + 1 for length in asked) and len(ours) == COUNT * 24 * GROUP
    assert ks_distance(ours, expected) < ks_bound(ours, expected)
    DropsStale.most = 30 * k
    biased = lengths(DropsStale(updates=COUNT, group_size=GROUP, template=build().template))
    assert ks_distance(biased, expected) > 1.5 * ks_bound(biased, expected)


class VirtualTime:
    """Engine and trainer of a run in virtual time: an answer of n tokens takes n units on one of the engine's places,
    which the oldest iteration gets first. Time goes on only while every thread waits for it."""

    def __init__(self, places: int) -> None:
        self.now, self._free, self._busy = 0, places, 1  # busy: threads that do not wait; the trainer is one
        self._change, self._ended, self._due = threading.Condition(), set[int](), -1
        self._queue: list[tuple[int, int, int]] = []  # (priority, place in its round, length)
        self._running: list[tuple[int, int]] = []  # (when it ends, priority); priority -1: the trainer
        self._left: dict[int, int] = {}  # unfinished answers of an iteration, and of the trainer

    def begin(self, iterations: int) -> None:
        with self._change:
            self._busy += iterations

    def end(self, number: int) -> None:
        """An iteration has its rollouts. The trainer goes on if it waits for them."""
        with self._change:
            self._ended.add(number)
            self._busy -= number != self._due
            self._due = -1 if number == self._due else self._due
            self._advance()

    def due(self, number: int) -> None:
        """The trainer waits for the rollouts of an iteration."""
        with self._change:
            if number not in self._ended:
                self._due = number
                self._busy -= 1
                self._advance()

    def wait(self, priority: int, lengths: list[int]) -> None:
        with self._change:
            self._left[priority] = len(lengths)
            if priority < 0:
                self._running.append((self.now + lengths[0], priority))
            else:
                self._queue += [(priority, place, length) for place, length in enumerate(lengths)]
            self._busy -= 1
            self._advance()
            assert self._change.wait_for(lambda: not self._left[priority], 60)

    def _advance(self) -> None:
        while not self._busy and (self._queue or self._running):
            self._queue.sort()
            while self._queue and self._free:
                priority, _, length = self._queue.pop(0)
                self._running.append((self.now + length, priority))
                self._free -= 1
            self._running.sort()
            self.now, priority = self._running.pop(0)
            self._free += priority >= 0
            self._left[priority] -= 1
            if not self._left[priority]:
                self._busy += 1
                self._change.notify_all()


def virtual_duration(build, directory, k, *, iterations, places, training) -> tuple[int, list[int]]:
    """How long a run takes in virtual time, and how long the rollouts of each iteration take alone."""
    clock, alone = VirtualTime(places), list[int]()

    class Engine(Gated):
        def session(self, priority: int = 0, log: Any = None) -> BatchedSession:
            def run(rows):
                draws = [random.Random(f"{row.sampling.seed}/{row.key}/{row.sample}") for row in rows]
                lengths = [int(min(30_000, own.lognormvariate(6.0, 1.3))) + 1 for own in draws]
                alone.append(max(*lengths, -(-sum(lengths) // places)))
                clock.wait(priority, lengths)
                return self._engine.generate_rows(rows)

            return BatchedSession(run, self._engine.check_ask, FullPrompts("a fake"))

    @dataclass(frozen=True, kw_only=True)
    class Maker(RolloutMaker):
        def make(self, iteration, recipe_state, turn):
            made = super().make(iteration, recipe_state, turn)
            clock.end(iteration.number)
            return made

    recipe, context = build(), context_of(lucky)
    context = replace(context, engines={name: Engine(own, Gate(None, k)) for name, own in context.engines.items()})
    readers = {"generator": reader_of(100)}
    maker = Maker(recipe=recipe, readers=readers, context=context, prompts_per_iteration=3, max_staleness=k)
    every = [*islice(upcoming([[("generator",)]] * iterations, START), iterations)]
    collector = Collector(maker, CreditStage(recipe, lag=k), iter(every), IterationStore(directory), max_staleness=k)
    clock.begin(min(k + 1, iterations))
    for iteration in every:
        clock.due(iteration.number)
        collector.take(iteration)
        clock.wait(-1, [training])
        clock.begin(iteration.number + k + 1 < iterations)
        collector.trained()
    collector.close()
    return clock.now, alone


def test_engines_do_not_idle_at_the_end_of_each_iteration(methods, tmp_path):
    """Virtual time of the same work: with k = 1, one iteration after the other would take what they take alone."""
    own = {"iterations": 20, "places": 8, "training": 300}
    times = {k: virtual_duration(methods["grpo"][0], tmp_path / str(k), k, **own) for k in (0, 1, 2, 4)}
    took, alone = {k: time for k, (time, _) in times.items()}, times[0][1]
    assert all(sorted(each) == sorted(alone) for _, each in times.values()), "the answers are the same"
    assert took[0] >= sum(alone) + 20 * 300, "rollouts and training alternate"
    assert took[0] > took[1] > took[2] > took[4]
    assert took[1] < 0.9 * sum(alone) and took[4] < 0.7 * sum(alone), (took, sum(alone))


class Stuck(Gated):
    """An engine that answers nothing until its sessions are closed. `asked`: released for each session that waits."""

    def __init__(self) -> None:
        self.asked = threading.Semaphore(0)

    def session(self, priority: int = 0, log: Any = None) -> BatchedSession:
        stuck, closed = self, threading.Event()

        class Session(BatchedSession):
            def close(self) -> None:
                super().close()
                closed.set()

        def run(rows):
            stuck.asked.release()
            assert closed.wait(60)
            raise EngineError("the session was closed")

        return Session(run, lambda *_: None, FullPrompts("a fake"))


@pytest.mark.parametrize("name", ["grpo", "agents"])
def test_closing_cancels_the_iterations_that_are_being_generated(methods, tmp_path, name):
    build, context = methods[name]
    engine, recipe = Stuck(), build()
    maker = RolloutMaker(
        recipe=recipe, readers={"generator": reader_of(13)}, context=replace(context, engines={"generator": engine}),
        prompts_per_iteration=3, max_staleness=2,
    )  # fmt: skip
    schedule = upcoming(recipe.schedule(), START)
    collector = Collector(maker, CreditStage(recipe, lag=2), schedule, IterationStore(tmp_path), max_staleness=2)
    failed = list[BaseException]()

    def take():
        try:
            collector.take(next(upcoming(recipe.schedule(), START)))
        except EngineError as error:
            failed.append(error)

    taker = threading.Thread(target=take)
    taker.start()
    for _ in range(3):
        assert engine.asked.acquire(timeout=60)
    collector.close()
    join_workers()
    taker.join(60)
    assert not taker.is_alive() and len(failed) == 1 and not [*tmp_path.glob("*.parquet")]
    with pytest.raises(EngineError, match="no further rollouts"):
        maker.sessions.add(engine.session())


def test_an_order_of_an_iterations_own_begins_with_what_it_has_not_taken_and_moves_nothing():
    reader = reader_of(10, shuffle=True)
    taken = reader.take(13)[10:]  # the second epoch
    state = reader.state_dict()
    names = ("iteration 3", "iteration 3", "iteration 4")
    first, again, other = (reader.beside(name, taken, state).take(20) for name in names)
    ids = [prompt.id for prompt in first]
    rows = [int(name.split("/")[1]) for name in ids]
    assert {*rows[:7]} == {*range(10)} - {int(p.id.split("/")[1]) for p in taken} and {*rows[7:17]} == {*range(10)}
    assert [name.split("/")[0] for name in ids] == ["1"] * 7 + ["2"] * 10 + ["3"] * 3
    assert [p.id for p in again] == ids != [p.id for p in other] and reader.state_dict() == state
    assert reader.beside("x", [], state).take(1)[0].id.startswith("1/"), "nothing was taken of this epoch"
    assert reader_of(2).beside("x", taken, state).take(5)


def test_copies_of_a_recipe_share_the_environment_and_nothing_else(methods):
    for name in METHODS:
        recipe = methods[name][0]()
        other = copy.deepcopy(recipe)
        other.load_state_dict(recipe.state_dict())
        assert other is not recipe and other.state_dict() == recipe.state_dict()
    agents = methods["agents"][0]()
    assert copy.deepcopy(agents)._maker is agents._maker


class Locked(Grpo):
    """A recipe that cannot be copied."""

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "lock", threading.Lock())


@pytest.mark.parametrize("k", [0, 1])
def test_a_recipe_that_cannot_be_copied_is_refused_with_iterations_ahead(k):
    words = [f"recipe.target={__name__}:Locked", f"rollouts.max_staleness={k}", "recipe.args.updates=3"]
    roles = "roles={generator: {model: {path: m}}}"
    spec, _ = specify(load(TrainConfig, [], [roles, "data.path=d", "engine.kind=vllm", *words]), 1)
    assert sum("copy.deepcopy fails" in text for text in problems(spec, to_come=True)) == k
