"""Which updates run at the same time, and in which order their engines get the weights (loop.Flights)."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from megatron_rl.run.metrics import Stopwatch
from megatron_rl.training import loop
from megatron_rl.training.iteration import Collected, Iteration
from megatron_rl.training.lessons import Credited, Lesson
from megatron_rl.training.progress import Progress

RANKS = {"generator": range(2), "verifier": range(2, 4), "critic": range(1, 3), "judge": range(4, 5)}


class Notes:
    """A run whose updates end only when they are waited for, and that notes what happens."""

    def __init__(self, schedule, *, ahead=0, silent=(), save_every=0):
        self.events, self.silent, self.states = [], silent, []
        self.around, self.done = [], False  # done: whether an update is complete as soon as it has begun
        self.iterations = [
            Iteration(cycle=0, index=i, roles=tuple(roles.split()), number=i, updates={})
            for i, roles in enumerate(schedule)
        ]
        fleet = SimpleNamespace(
            begin=lambda number: self.around.append(f"begin {number}"), end=lambda: self.around.append("end"),
            generate=lambda: None, occupied_s=lambda: None,
            apart=lambda a, b: {*RANKS[a]}.isdisjoint(RANKS[b]), update=self.update,
            refit=lambda policy, version: self.events.append(f"refit {policy} {version}"),
        )  # fmt: skip
        rollouts = SimpleNamespace(
            take=lambda iteration, meanwhile: Collected(rollouts={}, metrics={}, credited=True),
            trained=lambda: self.events.append("trained"),
            wait_until_written=lambda number: self.events.append(f"written {number}"), state=dict,
        )  # fmt: skip
        desk = SimpleNamespace(
            requests=lambda iteration: {}, lessons=self.lessons, policy_of={name: name for name in RANKS},
        )  # fmt: skip
        checkpoints = SimpleNamespace(
            settle=lambda wait: None, begin=lambda number: self.events.append(f"begin save {number}"),
            save=lambda number, state: self.states.append(state) or self.events.append(f"save {number}"),
        )  # fmt: skip
        self.parts = loop.Parts(
            fleet=fleet, rollouts=rollouts, desk=desk, examiner=None, checkpoints=checkpoints,
            observe=lambda event: None, leave=lambda: False, watch=Stopwatch(),
        )  # fmt: skip
        self.plan = loop.Plan(iterations=len(schedule), ahead=ahead, refits_wait=ahead > 0, save_every=save_every)

    def lessons(self, iteration, collected, versions):
        found = [Lesson(policy=r, roles=(r,), rollouts=[], signal=r not in self.silent) for r in iteration.roles]
        return Credited(lessons=found, rollouts={}, metrics={})

    def update(self, lesson, learning):
        self.events.append(f"begin {lesson.policy}")
        notes = self

        class Ending(Future):
            def done(self):
                return notes.done

            def result(self, timeout=None):
                notes.events.append(f"end {lesson.policy}")
                return {}

        return Ending()

    def run(self):
        flights = loop.Flights(self.parts, self.plan, Progress(), len(self.iterations))
        for iteration in self.iterations:
            flights.land_before(iteration)
            flights.begin(iteration, None)
        flights.land(0)
        return ", ".join(self.events)


@pytest.mark.parametrize(
    ("roles", "events"),
    [
        ("generator verifier", "begin 1, begin 2, end 1, refit 1, end 2, refit 2"),
        ("generator critic", "begin 1, end 1, refit 1, begin 2, end 2, refit 2"),
    ],
)
def test_placement_of_policies_apart_lets_the_updates_of_an_iteration_run_at_the_same_time(roles, events):
    found = Notes([roles]).run().replace(" 1,", ",")
    for place, role in enumerate(roles.split(), 1):
        found = found.replace(role, str(place))
    assert found == f"{events}, trained"


def test_placement_with_rollouts_ahead_lets_iterations_of_policies_apart_overlap():
    events = Notes(["generator", "verifier", "generator"], ahead=1).run().split(", ")
    assert events.index("begin verifier") < events.index("end generator"), "iteration 1 begins in iteration 0"
    second = [place for place, event in enumerate(events) if event == "begin generator"][1]
    assert events.index("refit generator 1") < second, "the engine gets the weights before the trainer changes them"
    assert events.index("written 1") < events.index("refit generator 1"), "of the iteration that the old weights write"
    assert events.count("trained") == 3 and events[-2] == "refit generator 2"


def test_placement_on_shared_ranks_completes_an_iteration_before_the_next():
    assert Notes(["generator", "critic"], ahead=1).run() == (
        "begin generator, end generator, written 1, refit generator 1, trained, "
        "begin critic, end critic, written 2, refit critic 1, trained"
    )


def test_placement_without_ahead_completes_an_iteration_before_the_next():
    alone = Notes(["generator", "verifier"]).run()
    assert alone.index("trained") < alone.index("begin verifier")


def test_placement_a_checkpoint_is_a_place_in_the_order_and_no_pause():
    """The policies are saved behind the updates of iteration 0; the updates of iteration 1 begin behind that."""
    notes = Notes(["generator", "verifier"], ahead=1, save_every=1)
    saved = notes.run().split(", ")
    order = ["begin generator", "begin save 1", "begin verifier", "end generator", "save 1", "begin save 2", "save 2"]
    assert [saved.index(event) for event in order] == sorted(saved.index(event) for event in order)
    first, second = (state["progress"] for state in notes.states)
    assert (first["number"], first["updates"]) == (1, {"generator": 1}), "without the update that had begun"
    assert (second["number"], second["updates"]) == (2, {"generator": 1, "verifier": 1})


def test_placement_of_a_policy_without_signal_is_no_update():
    events = Notes(["generator verifier"], silent=("generator",)).run()
    assert events == "begin verifier, end verifier, refit verifier 1, trained"


def test_placement_an_iteration_ends_on_the_ranks_when_none_is_in_flight():
    """Iteration 0 is completed while the rollouts of iteration 1 are awaited: its end would end iteration 1."""
    notes = Notes(["generator", "verifier"], ahead=1)

    def take(iteration, meanwhile):
        notes.done = iteration.number == 1
        meanwhile()
        return Collected(rollouts={}, metrics={}, credited=True)

    notes.parts.rollouts.take = take
    events = notes.run().split(", ")
    assert events.index("trained") < events.index("begin verifier")
    assert notes.around == ["begin 0", "begin 1", "end"]
