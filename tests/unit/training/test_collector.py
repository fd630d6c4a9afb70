"""The collector: iterations in order and never staler than allowed, collected once, with the state of recipe and
readers exact."""

from __future__ import annotations

import copy
import threading
from itertools import islice

import pytest
import torch
from fake_engines import TableEngine

from megatron_rl.engines.protocol import EngineError, Sampling, complete
from megatron_rl.run.metrics import Stopwatch
from megatron_rl.training.collector import Collector, ReplayMaker, RolloutMaker, upcoming
from megatron_rl.training.credit import CreditStage
from megatron_rl.training.iteration import Collected, Iteration, Recipe, RecipeRole, RolloutContext
from megatron_rl.training.iteration_engines import GradeTurns
from megatron_rl.training.store import IterationStore, StoreError
from megatron_rl.types import Author, Prompt, Rollout, spans_of

SCHEDULE = [[("a",), ("a",), ("b",)]] * 4
START = {"cycle": 0, "index": 0, "number": 0, "iterations": {}}


def rollout(role: str = "a", tokens=(7, 1), **changes) -> Rollout:
    spans = spans_of((1, Author.ENVIRONMENT, -1), (len(tokens) - 1, Author.POLICY, 0))
    values = {"role": role, "group": "0", "tokens": list(tokens), "logprobs": [0.0] * len(tokens), "spans": spans}
    return Rollout(**{**values, "advantages": 0.5, **changes})


class Given(Recipe):
    """A recipe whose rollouts have their advantages from the beginning."""

    def roles(self):
        return {name: RecipeRole() for name in "abc"}

    def schedule(self):
        return [[("a",)]]

    def prompt(self, payload):
        return str(payload)

    def rollout(self, iteration, source, context):
        raise NotImplementedError  # the tests' makers give the rollouts

    def credit(self, iteration, rollouts, context):
        return rollouts


class Counting:
    """A maker whose position is the number of iterations it collected. `begun_at`: by iteration, iterations trained
    when it began."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.collected, self.begun_at, self.trained, self.fails_at = 0, list[int](), 0, fails_at
        self.began = threading.Condition()

    def make(self, iteration: Iteration, recipe_state, turn):
        if iteration.number == self.fails_at:
            raise RuntimeError(f"no rollouts for iteration {iteration.number}")
        with turn(), self.began:
            self.begun_at.append(self.trained)
            self.collected += 1
            self.began.notify_all()
        rollouts = {role: [rollout(role, (iteration.number, 1))] for role in iteration.roles}
        return Collected(rollouts=rollouts, metrics={iteration.role: {"number": float(iteration.number)}}), None

    def positions(self):
        return {"collected": self.collected}

    def restore(self, positions):
        self.collected = positions["collected"]

    def close(self):
        pass

    def wait_until_began(self, count: int) -> None:
        with self.began:
            assert self.began.wait_for(lambda: len(self.begun_at) >= count, 30)


def make(tmp_path, maker, *, k: int, fingerprint: str = "same", start=START, schedule=SCHEDULE, **own) -> Collector:
    store = IterationStore(tmp_path / "rollouts", fingerprint, keep_every=own.pop("every", 0))
    credit = CreditStage(Given(), lag=k)
    return Collector(maker, credit, upcoming(schedule, start), store, max_staleness=k, **own)


def test_the_schedule_is_that_of_the_loop():
    got = [(t.cycle, t.index, t.role, t.number, t.update(t.role)) for t in islice(upcoming(SCHEDULE, START), 5)]
    assert got == [(0, 0, "a", 0, 0), (0, 1, "a", 1, 1), (0, 2, "b", 2, 0), (1, 0, "a", 3, 2), (1, 1, "a", 4, 3)]
    middle = {"cycle": 1, "index": 2, "number": 5, "iterations": {"a": 4, "b": 1}}
    expected = Iteration(cycle=1, index=2, roles=("b",), number=5, updates={"a": 4, "b": 1})
    assert next(upcoming(SCHEDULE, middle)) == expected
    assert list(upcoming(SCHEDULE, middle)) == list(upcoming(SCHEDULE, START))[5:]
    assert list(upcoming(SCHEDULE, {"cycle": 4, "index": 0, "number": 12, "iterations": {}})) == []


def test_an_iteration_of_several_roles_counts_for_each_and_a_cycle_may_be_empty():
    iterations = list(upcoming([[("a", "b")], [], [("b",), ("b", "a")]], START))
    assert [(t.cycle, t.index, t.number, dict(t.updates)) for t in iterations] == [
        (0, 0, 0, {}), (2, 0, 1, {"a": 1, "b": 1}), (2, 1, 2, {"a": 1, "b": 2}),
    ]  # fmt: skip
    assert iterations[1].update("a") == 1 and iterations[0].update("a") == 0


@pytest.mark.parametrize("k", [0, 1, 3])
def test_no_iteration_begins_before_all_but_k_of_those_before_it_are_trained(tmp_path, k):
    maker = Counting()
    collector = make(tmp_path, maker, k=k)
    for iteration in upcoming(SCHEDULE, START):
        assert collector.take(iteration).metrics[iteration.role]["number"] == iteration.number
        maker.wait_until_began(min(12, iteration.number + k + 1))  # those that may begin do
        assert maker.begun_at[iteration.number] >= iteration.number - k
        maker.trained += 1
        collector.trained()
    assert all(trained >= number - k for number, trained in enumerate(maker.begun_at))
    collector.close()


def test_the_state_of_a_checkpoint_is_that_after_the_iteration_taken_not_after_those_collected_since(tmp_path):
    maker = Counting()
    collector = make(tmp_path, maker, k=2)
    assert collector.state()["data"] == {"collected": 0}
    collector.take(next(upcoming(SCHEDULE, START)))
    maker.wait_until_began(3)
    assert collector.state()["data"] == {"collected": 1}
    collector.close()


@pytest.mark.parametrize("k", [0, 2])
def test_a_killed_trainer_does_not_collect_again_what_was_collected(tmp_path, k):
    first = Counting()
    collector = make(tmp_path, first, k=k)
    for iteration in islice(upcoming(SCHEDULE, START), 4):
        collector.take(iteration)
        collector.trained()
    collector.saved(2)  # a checkpoint has two iterations; then the process is killed
    first.wait_until_began(4 + k)
    collector.close()
    again = Counting()
    resumed = {"cycle": 0, "index": 2, "number": 2, "iterations": {"a": 2}}
    collector = make(tmp_path, again, k=k, start=resumed)
    taken = [collector.take(iteration).rollouts for iteration in islice(upcoming(SCHEDULE, resumed), 2)]
    assert [(role, found[0].tokens[0]) for by_role in taken for role, found in by_role.items()] == [("b", 2), ("a", 3)]
    assert collector.state()["data"] == {"collected": 4} and (k or not again.begun_at)
    collector.close()


def test_a_checkpoint_frees_the_iterations_before_it_that_are_not_kept(tmp_path):
    collector = make(tmp_path, Counting(), k=0, every=2)
    for iteration in islice(upcoming(SCHEDULE, START), 4):
        collector.take(iteration)
    collector.saved(3)
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == [
        f"iteration_00000{number}.parquet" for number in (0, 2, 3)
    ]


def test_rollouts_of_other_settings_are_collected_again(tmp_path):
    iteration = next(upcoming(SCHEDULE, START))
    make(tmp_path, Counting(), k=0).take(iteration)
    maker = Counting()
    make(tmp_path, maker, k=0, fingerprint="other").take(iteration)
    assert maker.collected == 1


def test_a_damaged_iteration_is_collected_again(tmp_path, caplog):
    iteration = next(upcoming(SCHEDULE, START))
    make(tmp_path, Counting(), k=0).take(iteration)
    path = tmp_path / "rollouts/iteration_000000.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    maker = Counting()
    make(tmp_path, maker, k=0).take(iteration)
    assert maker.collected == 1 and "iteration 0 is collected again" in caplog.text
    make(tmp_path, maker, k=0).take(iteration)
    assert maker.collected == 1


@pytest.mark.parametrize("k", [0, 1])
def test_a_failure_is_raised_where_its_iteration_is_taken(tmp_path, k):
    collector = make(tmp_path, Counting(fails_at=1), k=k)
    first, second = islice(upcoming(SCHEDULE, START), 2)
    collector.take(first)
    collector.trained()
    with pytest.raises(RuntimeError, match="iteration 1"):
        collector.take(second)
    collector.close()


@pytest.mark.parametrize("k", [0, 1])
def test_a_recipe_whose_iterations_change_is_found_out(tmp_path, k):
    collector = make(tmp_path, Counting(), k=k)
    with pytest.raises(ValueError, match="is due"):
        collector.take(Iteration(cycle=0, index=0, roles=("b",), number=0))
    collector.close()


@pytest.mark.parametrize("k", [0, 1])
def test_more_iterations_than_the_schedule_has_are_refused(tmp_path, k):
    schedule = [[("a",)]]
    collector = make(tmp_path, Counting(), k=k, schedule=schedule)
    (iteration,) = upcoming(schedule, START)
    collector.take(iteration)
    collector.trained()
    with pytest.raises(ValueError, match="the schedule has no further iteration"):
        collector.take(iteration)


def test_what_needs_all_ranks_has_its_chance_while_rollouts_are_waited_for(tmp_path):
    asked, allowed = threading.Event(), threading.Event()

    class Slow(Counting):
        def make(self, iteration, recipe_state, turn):
            assert allowed.wait(30)
            return super().make(iteration, recipe_state, turn)

    def idle():
        asked.set()
        allowed.set()

    watch = Stopwatch()
    collector = make(tmp_path, Slow(), k=1, idle=idle, watch=watch)
    collector.take(next(upcoming(SCHEDULE, START)))
    assert asked.is_set() and watch.take()["seconds/wait"] > 0
    collector.close()


def join_workers() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("rollouts"):
            thread.join(30)
            assert not thread.is_alive(), thread.name


def test_an_iteration_begins_after_an_update_and_none_after_the_collector_was_closed(tmp_path):
    maker = Counting()
    collector = make(tmp_path, maker, k=1)
    collector.take(next(upcoming(SCHEDULE, START)))
    join_workers()
    assert maker.collected == 2, "the third waits for the first update"
    collector.trained()
    join_workers()
    assert maker.collected == 3
    collector.close()
    collector.trained()
    join_workers()
    assert maker.collected == 3


def test_closing_waits_for_an_iteration_that_is_being_written(tmp_path):
    """A process that ended in the middle of it would lose the iteration, or die in a library's thread."""
    writing, allowed = threading.Event(), threading.Event()

    class SlowStore(IterationStore):
        def put(self, *arguments, **credited):
            writing.set()
            assert allowed.wait(30)
            return super().put(*arguments, **credited)

    store = SlowStore(tmp_path)
    collector = Collector(Counting(), CreditStage(Given(), lag=1), upcoming(SCHEDULE, START), store, max_staleness=1)
    taker = threading.Thread(target=lambda: collector.take(next(upcoming(SCHEDULE, START))), daemon=True)
    taker.start()
    assert writing.wait(30)
    closer = threading.Thread(target=collector.close)
    closer.start()
    assert not store.path(0).exists() and closer.is_alive()
    allowed.set()
    closer.join(30)
    assert not closer.is_alive() and store.path(0).exists()


def test_an_iteration_that_is_collected_after_closing_is_not_written(tmp_path):
    allowed = threading.Event()

    class SlowSecond(Counting):
        def make(self, iteration, recipe_state, turn):
            found = super().make(iteration, recipe_state, turn)
            assert iteration.number == 0 or allowed.wait(30)
            return found

    collector = make(tmp_path, SlowSecond(), k=1)
    collector.take(next(upcoming(SCHEDULE, START)))
    collector.close()
    allowed.set()
    join_workers()
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["iteration_000000.parquet"]


class Numbers:
    """An endless stream of prompts 0, 1, 2, ..."""

    dropped = 0

    def __init__(self, name: str) -> None:
        self.name, self.place = name, 0

    def take(self, count: int, fits: object = None, draw: object = None) -> list[Prompt]:
        self.place += count
        return [Prompt(id=f"{self.name}{i}", tokens=[i]) for i in range(self.place - count, self.place)]

    def beside(self, name: str, taken: list[Prompt], state: object) -> Numbers:
        other = Numbers(self.name)
        other.place = int(taken[-1].tokens[0]) + 1
        return other

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class Greedy(Given):
    """A recipe that takes prompts until their sum is even. Its state is the prompts that were credited. `wrong`: by
    iteration, what it returns instead. `saw`: by iteration, how many prompts the state had when the rollouts began."""

    def __init__(self, wrong=None) -> None:
        self.seen, self.wrong, self.saw = list[str](), wrong or {}, dict[int, int]()

    def __deepcopy__(self, memo):
        other = copy.copy(self)  # `saw` is of all copies
        other.seen = list(self.seen)
        return other

    def rollout(self, iteration, source, context):
        self.saw[iteration.number] = len(self.seen)
        with context.watch("rollout"):
            prompts = source.take()
            while sum(int(prompt.tokens[0]) for prompt in prompts) % 2:
                prompts += source.take(1)
        context.handed_over["ids"] = [prompt.id for prompt in prompts]
        assert context.metrics == {}
        context.add_metrics(iteration.role, {"taken": float(len(prompts)), "samples": -1.0})
        if iteration.number in self.wrong:
            return self.wrong[iteration.number]
        return {
            role: [rollout(role, (int(p.tokens[0]), 1), group=p.id) for p in prompts]
            for role in reversed(iteration.roles)
        }

    def credit(self, iteration, rollouts, context):
        self.seen = [*self.seen, *context.handed_over.get("ids", ())]
        return rollouts

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = list(state["seen"])


def table(**own) -> RolloutContext:
    fields = {"engines": {}, "tokenizers": {}, "samplings": {}, "max_prompt_tokens": {}, "grade": lambda a, b: []}
    return RolloutContext(**{**fields, **own})


def rollout_maker(recipe=None, **own) -> RolloutMaker:
    """Roles a and c share a reader; b has its own."""
    shared = Numbers("s")
    readers = {"a": shared, "b": Numbers("b"), "c": shared}
    return RolloutMaker(recipe=recipe or Greedy(), readers=readers, context=table(), prompts_per_iteration=2, **own)


def stage(*, recipe=None, k=0, **own) -> CreditStage:
    return CreditStage(recipe or Greedy(), lag=k, **own)


def play_all(maker, tmp_path, schedule, *, k=0, cut_at=None):
    """Collects the schedule's iterations, in two processes when `cut_at` iterations are in a checkpoint then. ->
    rollouts of each iteration."""
    collector = Collector(maker, stage(k=k), upcoming(schedule, START), IterationStore(tmp_path), max_staleness=k)
    found = []
    for iteration in upcoming(schedule, START):
        found.append(collector.take(iteration).rollouts)
        collector.trained()
        if iteration.number + 1 == cut_at:
            break
    state = collector.state()
    collector.close()
    return found, state


MIXED = [[("a",), ("b",)], [("c", "b")], [("a", "c"), ("b", "a")]]


def test_an_iteration_has_the_reader_of_its_first_role_and_takes_what_it_wants(tmp_path):
    maker = rollout_maker()
    iterations = list(upcoming(MIXED, START))
    collected = [maker.make(iteration, {"seen": []})[0] for iteration in iterations]
    assert [list(p.rollouts) for p in collected] == [["a"], ["b"], ["b", "c"], ["c", "a"], ["a", "b"]]
    taken = [[r.group for r in next(iter(p.rollouts.values()))] for p in collected]
    expected = [("s", range(4)), ("b", range(4)), ("s", range(4, 8)), ("s", range(8, 12)), ("b", range(4, 8))]
    assert taken == [[f"{name}{i}" for i in places] for name, places in expected]
    assert maker.positions() == {"a": {"place": 12}, "b": {"place": 8}, "c": {"place": 12}}


def credited(maker, iteration, **own):
    credit = stage(**own)
    return credit.apply(iteration, maker.make(iteration, credit.state_for(iteration.number))[0])


def test_metrics_are_the_rollouts_and_what_the_recipe_added_has_the_last_word():
    iteration = Iteration(cycle=0, index=0, roles=("a", "b"), number=0)
    collected = credited(rollout_maker(), iteration)
    assert [*collected.rollouts] == ["a", "b"]
    assert collected.metrics["a"]["taken"] == 4.0 and collected.metrics["a"]["samples"] == -1.0
    assert collected.metrics["b"]["samples"] == 4.0 and collected.metrics["b"]["groups_without_signal"] == 0.0
    assert "seconds/rollout" not in collected.metrics["a"]  # the run's own watch has it
    beside = credited(rollout_maker(max_staleness=1), iteration)
    assert beside.metrics["a"]["seconds/rollout"] > 0 and "seconds/rollout" not in beside.metrics["b"]


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("cut", [1, 2, 4])
def test_resume_takes_up_readers_and_recipe_where_the_checkpoint_was(tmp_path, k, cut):
    """Also where iterations ahead were collected and lost: another directory is a store without them."""
    first = rollout_maker(max_staleness=k)
    whole, end = play_all(first, tmp_path / "whole", MIXED, k=k)
    assert first.recipe.saw == {n: 4 * max(0, n - k) for n in range(5)}, "the state after iteration n - 1 - k"
    before, state = play_all(rollout_maker(max_staleness=k), tmp_path / "cut", MIXED, k=k, cut_at=cut)
    iterations = list(upcoming(MIXED, START))
    progress = {
        "cycle": iterations[cut].cycle,
        "index": iterations[cut].index,
        "number": cut,
        "iterations": dict(iterations[cut].updates),
    }
    for directory in (tmp_path / "cut", tmp_path / "empty"):
        maker, credit = rollout_maker(max_staleness=k), stage(k=k)
        maker.restore(state["data"])
        credit.restore(state["recipe"], cut)
        collector = Collector(maker, credit, upcoming(MIXED, progress), IterationStore(directory), max_staleness=k)
        after = []
        for iteration in upcoming(MIXED, progress):
            after.append(collector.take(iteration).rollouts)
            collector.trained()
        collector.close()
        assert groups([*before, *after]) == groups(whole) and collector.state() == end
        assert maker.recipe.saw == {n: own for n, own in first.recipe.saw.items() if n in maker.recipe.saw}


def groups(iterations):
    return [{role: [r.group for r in rollouts] for role, rollouts in found.items()} for found in iterations]


def test_the_state_given_to_a_checkpoint_does_not_change_with_the_recipe(tmp_path):
    credit = stage()
    collector = Collector(rollout_maker(), credit, upcoming(MIXED, START), IterationStore(tmp_path), max_staleness=0)
    collector.take(next(upcoming(MIXED, START)))
    credit.recipe.seen.append("later")
    assert collector.state()["recipe"] == [{"seen": ["s0", "s1", "s2", "s3"]}]


def test_a_replay_gives_the_same_rollouts_and_moves_readers_and_recipe(tmp_path):
    whole, end = play_all(rollout_maker(max_staleness=1), tmp_path / "run", MIXED)
    maker = ReplayMaker(readers=rollout_maker().readers, recorded=IterationStore(tmp_path / "run"))
    again, state = play_all(maker, tmp_path / "again", MIXED)
    assert groups(again) == groups(whole) and state == end and end["data"] == maker.positions()
    collected, _ = maker.make(next(upcoming(MIXED, START)), {})
    assert "seconds/rollout" not in collected.metrics["a"] and collected.metrics["a"]["taken"] == 4.0
    with pytest.raises(StoreError, match="replay a run of the same recipe"):
        maker.make(Iteration(cycle=0, index=0, roles=("b",), number=0), {})
    with pytest.raises(FileNotFoundError, match="iteration 9"):
        maker.make(Iteration(cycle=9, index=0, roles=("b",), number=9), {})


def test_the_end_of_a_run_ends_an_evaluation_beside_it(tmp_path):
    collector, begun, ended = make(tmp_path, Counting(), k=1), threading.Event(), threading.Event()
    engine = TableEngine(vocab=5, eos=0)
    engine.load([("table", torch.zeros(25, 5))], version=0)
    context = RolloutContext(engines={"a": engine}, tokenizers={}, samplings={}, max_prompt_tokens={}, grade=None)

    def evaluate(own):
        begun.set()
        assert ended.wait(30)
        return complete(own.engines["a"], [[1, 2]], Sampling(max_tokens=1))

    result = collector.beside(context, 0, evaluate, lambda: True)
    assert begun.wait(30)
    collector.close()
    ended.set()
    with pytest.raises(EngineError, match="the run ends"):
        result()


def test_the_end_of_a_run_ends_sessions_and_gradings_of_iterations_ahead():
    made = rollout_maker(turns=GradeTurns(lambda responses, payloads: []))
    made.close()
    for call in (lambda: made.turns.at(0)(["late"], [{}]), lambda: made.sessions.add(None)):
        with pytest.raises(EngineError, match="the run ends"):
            call()
