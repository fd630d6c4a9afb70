"""Rollouts ahead of training: never staler than allowed, in order, and not played twice."""

from __future__ import annotations

import threading
from itertools import islice

import pytest

from megatron_rl.training.player import Ahead, Shelf, schedule
from megatron_rl.training.turns import Played, Turn
from megatron_rl.types import Stop, Trajectory

ROLES = ["a", "a", "b"]
START = {"step": 0, "index": 0, "number": 0, "turns": {}}


class Counting:
    """A game whose state is the number of turns it played. `trained`: how many turns were trained when a turn began, by turn."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.played, self.begun_at, self.trained, self.fails_at = 0, list[int](), 0, fails_at
        self.began = threading.Condition()

    def play(self, turn: Turn) -> Played:
        if turn.number == self.fails_at:
            raise RuntimeError(f"no rollouts for turn {turn.number}")
        with self.began:
            self.begun_at.append(self.trained)
            self.played += 1
            self.began.notify_all()
        t = Trajectory(
            group="0",
            tokens=[turn.number, 1],
            trainable=[False, True],
            logprobs=[0.0, -1.0],
            version=turn.number,
            stop=Stop.EOS,
        )
        return Played(trajectories=[t], metrics={"number": float(turn.number)})

    def state(self):
        return {"played": self.played}

    def restore(self, state):
        self.played = state["played"]

    def wait_until_began(self, count: int) -> None:
        with self.began:
            assert self.began.wait_for(lambda: len(self.begun_at) >= count, 30)


def turns(steps: int = 4, start=START):
    return schedule(lambda step: ROLES, steps, start)


def make(tmp_path, game, *, k: int, fingerprint: str = "same", start=START) -> Ahead:
    return Ahead(game, turns(start=start), max_staleness=k, shelf=Shelf(tmp_path / "ahead", fingerprint))


def test_the_schedule_is_that_of_the_loop():
    got = [(t.step, t.index, t.role, t.number, t.update) for t in islice(turns(), 5)]
    assert got == [(0, 0, "a", 0, 0), (0, 1, "a", 1, 1), (0, 2, "b", 2, 0), (1, 0, "a", 3, 2), (1, 1, "a", 4, 3)]
    middle = {"step": 1, "index": 2, "number": 5, "turns": {"a": 4, "b": 1}}
    assert next(turns(start=middle)) == Turn(step=1, index=2, role="b", number=5, update=1)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_no_turn_begins_before_all_but_k_of_those_before_it_are_trained(tmp_path, k):
    game = Counting()
    ahead = make(tmp_path, game, k=k)
    for turn in turns():
        played = ahead.take(turn)
        assert played.metrics == {"number": float(turn.number)}
        game.wait_until_began(min(12, turn.number + k + 1))  # those that may begin do
        assert game.begun_at[turn.number] >= turn.number - k
        game.trained += 1
        ahead.trained()
    assert all(trained >= number - k for number, trained in enumerate(game.begun_at))
    ahead.close()


def test_the_state_of_a_checkpoint_is_that_after_the_turn_taken_not_after_those_played_since(tmp_path):
    game = Counting()
    ahead = make(tmp_path, game, k=2)
    ahead.take(next(turns()))
    game.wait_until_began(3)
    assert ahead.state() == {"played": 1}
    ahead.close()


@pytest.mark.parametrize("k", [0, 2])
def test_a_killed_trainer_does_not_play_again_what_was_played(tmp_path, k):
    first = Counting()
    ahead = make(tmp_path, first, k=k)
    for turn in islice(turns(), 4):
        ahead.take(turn)
        ahead.trained()
    ahead.saved(2)  # a checkpoint has two turns; then the process is killed
    count = 4 + k
    first.wait_until_began(count)
    ahead.close()
    again = Counting()
    resumed = {"step": 0, "index": 2, "number": 2, "turns": {"a": 2}}
    ahead = make(tmp_path, again, k=k, start=resumed)
    taken = []
    for turn in islice(turns(start=resumed), 2):
        taken.append(ahead.take(turn).trajectories[0].version)
    assert taken == [2, 3] and ahead.state() == {"played": 4}
    assert not [n for n in again.begun_at if n < 0] and (k or not again.begun_at)
    ahead.close()


def test_rollouts_of_other_settings_are_played_again(tmp_path):
    make(tmp_path, Counting(), k=0).take(next(turns()))
    game = Counting()
    make(tmp_path, game, k=0, fingerprint="other").take(next(turns()))
    assert game.played == 1


@pytest.mark.parametrize("k", [0, 1])
def test_a_failure_is_raised_where_its_turn_is_taken(tmp_path, k):
    ahead = make(tmp_path, Counting(fails_at=1), k=k)
    first, second = islice(turns(), 2)
    ahead.take(first)
    ahead.trained()
    with pytest.raises(RuntimeError, match="turn 1"):
        ahead.take(second)


def test_a_recipe_whose_turns_change_is_found_out(tmp_path):
    ahead = make(tmp_path, Counting(), k=0)
    with pytest.raises(ValueError, match="is due"):
        ahead.take(Turn(step=0, index=0, role="b", number=0, update=0))


def test_what_needs_all_ranks_has_its_chance_while_rollouts_are_waited_for(tmp_path):
    asked, allowed = threading.Event(), threading.Event()

    class Slow(Counting):
        def play(self, turn):
            assert allowed.wait(30)
            return super().play(turn)

    def idle():
        asked.set()
        allowed.set()

    ahead = Ahead(Slow(), turns(), max_staleness=1, shelf=Shelf(tmp_path, ""), idle=idle)
    ahead.take(next(turns()))
    assert asked.is_set()
    ahead.close()
