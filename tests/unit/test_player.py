"""The player: turns in order and never staler than allowed, played once, with the state of recipe and readers exact."""

from __future__ import annotations

import threading
from itertools import islice

import numpy as np
import pytest

from megatron_rl.run.metrics import Stopwatch
from megatron_rl.training.player import Player, PlayError, ReplayPlayer, TurnPlayer, upcoming
from megatron_rl.training.store import StoreError, TurnStore
from megatron_rl.training.turns import Part, Played, Recipe, Table, Turn
from megatron_rl.types import STEP, Author, Marks, Prompt, Rollout, spans_of

SCHEDULE = [[("a",), ("a",), ("b",)]] * 4
START = {"step": 0, "index": 0, "number": 0, "turns": {}}


def rollout(role: str = "a", tokens=(7, 1), **changes) -> Rollout:
    spans = spans_of((1, Author.ENVIRONMENT, -1), (len(tokens) - 1, Author.POLICY, 0))
    values = {"role": role, "group": "0", "tokens": list(tokens), "logprobs": [0.0] * len(tokens), "spans": spans}
    return Rollout(**{**values, "advantages": 0.5, **changes})


class Counting:
    """A maker whose state is the number of turns it played. `begun_at`: by turn, turns trained when it began."""

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
        rollouts = {role: [rollout(role, (turn.number, 1))] for role in turn.roles}
        return Played(rollouts=rollouts, metrics={turn.role: {"number": float(turn.number)}})

    def state(self):
        return {"played": self.played}

    def restore(self, state):
        self.played = state["played"]

    def wait_until_began(self, count: int) -> None:
        with self.began:
            assert self.began.wait_for(lambda: len(self.begun_at) >= count, 30)


def make(tmp_path, maker, *, k: int, fingerprint: str = "same", start=START, schedule=SCHEDULE, **own) -> Player:
    store = TurnStore(tmp_path / "rollouts", fingerprint, keep_every=own.pop("every", 0))
    return Player(maker, upcoming(schedule, start), store, max_staleness=k, **own)


def test_the_schedule_is_that_of_the_loop():
    got = [(t.step, t.index, t.role, t.number, t.update(t.role)) for t in islice(upcoming(SCHEDULE, START), 5)]
    assert got == [(0, 0, "a", 0, 0), (0, 1, "a", 1, 1), (0, 2, "b", 2, 0), (1, 0, "a", 3, 2), (1, 1, "a", 4, 3)]
    middle = {"step": 1, "index": 2, "number": 5, "turns": {"a": 4, "b": 1}}
    expected = Turn(step=1, index=2, roles=("b",), number=5, updates={"a": 4, "b": 1})
    assert next(upcoming(SCHEDULE, middle)) == expected
    assert list(upcoming(SCHEDULE, middle)) == list(upcoming(SCHEDULE, START))[5:]
    assert list(upcoming(SCHEDULE, {"step": 4, "index": 0, "number": 12, "turns": {}})) == []


def test_a_turn_of_several_roles_counts_for_each_and_a_step_may_be_empty():
    turns = list(upcoming([[("a", "b")], [], [("b",), ("b", "a")]], START))
    assert [(t.step, t.index, t.number, dict(t.updates)) for t in turns] == [
        (0, 0, 0, {}), (2, 0, 1, {"a": 1, "b": 1}), (2, 1, 2, {"a": 1, "b": 2}),
    ]  # fmt: skip
    assert turns[1].update("a") == 1 and turns[0].update("a") == 0


@pytest.mark.parametrize("k", [0, 1, 3])
def test_no_turn_begins_before_all_but_k_of_those_before_it_are_trained(tmp_path, k):
    maker = Counting()
    player = make(tmp_path, maker, k=k)
    for turn in upcoming(SCHEDULE, START):
        assert player.take(turn).metrics == {turn.role: {"number": float(turn.number)}}
        maker.wait_until_began(min(12, turn.number + k + 1))  # those that may begin do
        assert maker.begun_at[turn.number] >= turn.number - k
        maker.trained += 1
        player.trained()
    assert all(trained >= number - k for number, trained in enumerate(maker.begun_at))
    player.close()


def test_the_state_of_a_checkpoint_is_that_after_the_turn_taken_not_after_those_played_since(tmp_path):
    maker = Counting()
    player = make(tmp_path, maker, k=2)
    assert player.state() == {"played": 0}
    player.take(next(upcoming(SCHEDULE, START)))
    maker.wait_until_began(3)
    assert player.state() == {"played": 1}
    player.close()


@pytest.mark.parametrize("k", [0, 2])
def test_a_killed_trainer_does_not_play_again_what_was_played(tmp_path, k):
    first = Counting()
    player = make(tmp_path, first, k=k)
    for turn in islice(upcoming(SCHEDULE, START), 4):
        player.take(turn)
        player.trained()
    player.saved(2)  # a checkpoint has two turns; then the process is killed
    first.wait_until_began(4 + k)
    player.close()
    again = Counting()
    resumed = {"step": 0, "index": 2, "number": 2, "turns": {"a": 2}}
    player = make(tmp_path, again, k=k, start=resumed)
    taken = [player.take(turn).rollouts for turn in islice(upcoming(SCHEDULE, resumed), 2)]
    assert [(role, found[0].tokens[0]) for by_role in taken for role, found in by_role.items()] == [("b", 2), ("a", 3)]
    assert player.state() == {"played": 4} and (k or not again.begun_at)
    player.close()


def test_a_checkpoint_frees_the_turns_before_it_that_are_not_kept(tmp_path):
    player = make(tmp_path, Counting(), k=0, every=2)
    for turn in islice(upcoming(SCHEDULE, START), 4):
        player.take(turn)
    player.saved(3)
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == [
        f"turn_00000{number}.parquet" for number in (0, 2, 3)
    ]


def test_rollouts_of_other_settings_are_played_again(tmp_path):
    turn = next(upcoming(SCHEDULE, START))
    make(tmp_path, Counting(), k=0).take(turn)
    maker = Counting()
    make(tmp_path, maker, k=0, fingerprint="other").take(turn)
    assert maker.played == 1


def test_a_damaged_turn_is_played_again(tmp_path, caplog):
    turn = next(upcoming(SCHEDULE, START))
    make(tmp_path, Counting(), k=0).take(turn)
    path = tmp_path / "rollouts/turn_000000.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    maker = Counting()
    make(tmp_path, maker, k=0).take(turn)
    assert maker.played == 1 and "turn 0 is played again" in caplog.text
    make(tmp_path, maker, k=0).take(turn)
    assert maker.played == 1


@pytest.mark.parametrize("k", [0, 1])
def test_a_failure_is_raised_where_its_turn_is_taken(tmp_path, k):
    player = make(tmp_path, Counting(fails_at=1), k=k)
    first, second = islice(upcoming(SCHEDULE, START), 2)
    player.take(first)
    player.trained()
    with pytest.raises(RuntimeError, match="turn 1"):
        player.take(second)


@pytest.mark.parametrize("k", [0, 1])
def test_a_recipe_whose_turns_change_is_found_out(tmp_path, k):
    player = make(tmp_path, Counting(), k=k)
    with pytest.raises(ValueError, match="is due"):
        player.take(Turn(step=0, index=0, roles=("b",), number=0))
    player.close()


@pytest.mark.parametrize("k", [0, 1])
def test_more_turns_than_the_schedule_has_are_refused(tmp_path, k):
    schedule = [[("a",)]]
    player = make(tmp_path, Counting(), k=k, schedule=schedule)
    (turn,) = upcoming(schedule, START)
    player.take(turn)
    player.trained()
    with pytest.raises(ValueError, match="after the last one of the schedule"):
        player.take(turn)


def test_what_needs_all_ranks_has_its_chance_while_rollouts_are_waited_for(tmp_path):
    asked, allowed = threading.Event(), threading.Event()

    class Slow(Counting):
        def play(self, turn):
            assert allowed.wait(30)
            return super().play(turn)

    def idle():
        asked.set()
        allowed.set()

    watch = Stopwatch()
    player = make(tmp_path, Slow(), k=1, idle=idle, watch=watch)
    player.take(next(upcoming(SCHEDULE, START)))
    assert asked.is_set() and watch.take()["seconds/wait"] > 0
    player.close()


class Watched(threading.Condition):
    """A condition that tells when somebody begins to wait for it without a time limit."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = threading.Semaphore(0)

    def wait(self, timeout=None):
        if timeout is None:
            self.waits.release()
        return super().wait(timeout)


def test_a_thread_that_waits_to_play_goes_on_after_an_update_and_ends_when_the_player_is_closed(tmp_path):
    maker = Counting()
    player = make(tmp_path, maker, k=1)
    change = player._exchange.change = Watched()
    player.take(next(upcoming(SCHEDULE, START)))
    assert change.waits.acquire(timeout=30) and maker.played == 2, "it waits for the first update"
    player.trained()
    maker.wait_until_began(3)
    assert change.waits.acquire(timeout=30) and maker.played == 3
    player.close()
    player._thread.join(30)
    assert not player._thread.is_alive() and maker.played == 3


def test_closing_waits_for_a_turn_that_is_being_written(tmp_path):
    """A process that ended in the middle of it would lose the turn, or die in a library's thread."""
    writing, allowed = threading.Event(), threading.Event()

    class SlowStore(TurnStore):
        def put(self, turn, played, state):
            writing.set()
            assert allowed.wait(30)
            return super().put(turn, played, state)

    store = SlowStore(tmp_path)
    player = Player(Counting(), upcoming(SCHEDULE, START), store, max_staleness=1)
    taker = threading.Thread(target=lambda: player.take(next(upcoming(SCHEDULE, START))), daemon=True)
    taker.start()
    assert writing.wait(30)
    closer = threading.Thread(target=player.close)
    closer.start()
    assert not store.path(0).exists() and closer.is_alive()
    allowed.set()
    closer.join(30)
    assert not closer.is_alive() and store.path(0).exists()


def test_a_turn_that_is_played_after_closing_is_not_written(tmp_path):
    allowed, done = threading.Event(), threading.Event()

    class SlowSecond(Counting):
        def play(self, turn):
            assert turn.number == 0 or allowed.wait(30)
            return super().play(turn)

        def state(self):
            if self.played == 2:
                done.set()
            return super().state()

    player = make(tmp_path, SlowSecond(), k=1)
    player.take(next(upcoming(SCHEDULE, START)))
    player.close()
    allowed.set()
    assert done.wait(30)
    player.close()
    for thread in threading.enumerate():
        if thread.name == "rollouts":
            thread.join(30)
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["turn_000000.parquet"]


class Numbers:
    """An endless stream of prompts 0, 1, 2, ..."""

    dropped = 0

    def __init__(self, name: str) -> None:
        self.name, self.place = name, 0

    def take(self, count: int) -> list[Prompt]:
        self.place += count
        return [Prompt(id=f"{self.name}{i}", tokens=[i]) for i in range(self.place - count, self.place)]

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class Greedy(Recipe):
    """A recipe that takes prompts until their sum is even. `wrong`: by turn, what it returns instead."""

    def __init__(self, wrong=None) -> None:
        self.seen, self.wrong = list[str](), wrong or {}

    def roles(self):
        return {"a": Part()}

    def schedule(self):
        return [[("a",)]]

    def prompt(self, payload):
        return str(payload)

    def play(self, turn, source, table):
        with table.watch("rollout"):
            prompts = source.take()
            while sum(int(prompt.tokens[0]) for prompt in prompts) % 2:
                prompts += source.take(1)
        self.seen += [prompt.id for prompt in prompts]
        assert table.notes == {}
        table.note(turn.role, {"taken": float(len(prompts)), "samples": -1.0})
        if turn.number in self.wrong:
            return self.wrong[turn.number]
        return {
            role: [rollout(role, (int(p.tokens[0]), 1), group=p.id) for p in prompts] for role in reversed(turn.roles)
        }

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = list(state["seen"])


def table(**own) -> Table:
    fields = {"engines": {}, "tokenizers": {}, "samplings": {}, "max_prompt_tokens": {}, "grade": lambda a, b: []}
    return Table(**{**fields, **own})


def turn_player(recipe=None, **own) -> TurnPlayer:
    """Roles a and c share a reader; b has its own."""
    shared = Numbers("s")
    readers = {"a": shared, "b": Numbers("b"), "c": shared}
    return TurnPlayer(recipe=recipe or Greedy(), readers=readers, table=table(), prompts_per_step=2, **own)


def play_all(maker, tmp_path, schedule, *, k=0, cut_at=None):
    """Plays the schedule, in two processes when `cut_at` turns are in a checkpoint then. -> rollouts of each turn."""
    player = Player(maker, upcoming(schedule, START), TurnStore(tmp_path), max_staleness=k)
    found = []
    for turn in upcoming(schedule, START):
        found.append(player.take(turn).rollouts)
        player.trained()
        if turn.number + 1 == cut_at:
            break
    state = player.state()
    player.close()
    return found, state


MIXED = [[("a",), ("b",)], [("c", "b")], [("a", "c"), ("b", "a")]]


def test_a_turn_has_the_reader_of_its_first_role_and_takes_what_it_wants(tmp_path):
    maker = turn_player()
    turns = list(upcoming(MIXED, START))
    played = [maker.play(turn) for turn in turns]
    assert [list(p.rollouts) for p in played] == [["a"], ["b"], ["c", "b"], ["a", "c"], ["b", "a"]]
    taken = [[r.group for r in next(iter(p.rollouts.values()))] for p in played]
    expected = [("s", range(4)), ("b", range(4)), ("s", range(4, 8)), ("s", range(8, 12)), ("b", range(4, 8))]
    assert taken == [[f"{name}{i}" for i in places] for name, places in expected]
    assert maker.state()["data"] == {"a": {"place": 12}, "b": {"place": 8}, "c": {"place": 12}}


def test_figures_are_the_rollouts_and_what_the_recipe_noted_has_the_last_word():
    played = turn_player().play(Turn(step=0, index=0, roles=("a", "b"), number=0))
    assert played.metrics["a"]["taken"] == 4.0 and played.metrics["a"]["samples"] == -1.0
    assert played.metrics["b"]["samples"] == 4.0 and played.metrics["b"]["groups_without_signal"] == 0.0
    assert "seconds/rollout" not in played.metrics["a"]  # the run's own watch has it
    beside = turn_player(own_watch=Stopwatch()).play(Turn(step=0, index=0, roles=("a", "b"), number=0))
    assert beside.metrics["a"]["seconds/rollout"] > 0 and "seconds/rollout" not in beside.metrics["b"]


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("cut", [1, 2, 4])
def test_resume_takes_up_readers_and_recipe_where_the_checkpoint_was(tmp_path, k, cut):
    """Also where turns ahead were played and lost: another directory is a store without them."""
    whole, end = play_all(turn_player(), tmp_path / "whole", MIXED)
    before, state = play_all(turn_player(), tmp_path / "cut", MIXED, k=k, cut_at=cut)
    turns = list(upcoming(MIXED, START))
    progress = {"step": turns[cut].step, "index": turns[cut].index, "number": cut, "turns": dict(turns[cut].updates)}
    for directory in (tmp_path / "cut", tmp_path / "empty"):
        maker = turn_player()
        maker.restore(state)
        player = Player(maker, upcoming(MIXED, progress), TurnStore(directory), max_staleness=k)
        after = []
        for turn in upcoming(MIXED, progress):
            after.append(player.take(turn).rollouts)
            player.trained()
        player.close()
        assert groups([*before, *after]) == groups(whole) and player.state() == end


def groups(turns):
    return [{role: [r.group for r in rollouts] for role, rollouts in found.items()} for found in turns]


def test_the_state_given_to_a_checkpoint_does_not_change_with_the_recipe(tmp_path):
    maker = turn_player()
    player = Player(maker, upcoming(MIXED, START), TurnStore(tmp_path), max_staleness=0)
    player.take(next(upcoming(MIXED, START)))
    maker.recipe.seen.append("later")
    assert player.state()["recipe"]["seen"] == ["s0", "s1", "s2", "s3"]


def test_a_replay_gives_the_same_rollouts_and_moves_readers_and_recipe(tmp_path):
    whole, end = play_all(turn_player(own_watch=Stopwatch()), tmp_path / "run", MIXED)
    original = turn_player()
    maker = ReplayPlayer(recipe=Greedy(), readers=original.readers, recorded=TurnStore(tmp_path / "run"))
    again, state = play_all(maker, tmp_path / "again", MIXED)
    assert groups(again) == groups(whole) and state == end == maker.state()
    played = maker.play(next(upcoming(MIXED, START)))
    assert "seconds/rollout" not in played.metrics["a"] and played.metrics["a"]["taken"] == 4.0
    with pytest.raises(StoreError, match="replay a run of the same recipe"):
        maker.play(Turn(step=0, index=0, roles=("b",), number=0))
    with pytest.raises(FileNotFoundError, match="turn 9"):
        maker.play(Turn(step=9, index=0, roles=("b",), number=9))


FAULTS = [
    ({"b": []}, "trains a, and the recipe returned rollouts of b"),
    ({}, "rollouts of no role"),
    ({"a": [], "b": []}, "rollouts of a, b"),
    ({"a": [rollout(), rollout("b")]}, r"a: rollout 1 \(group '0'\) is of role 'b'"),
    ({"a": [rollout(advantages=None)]}, "has no advantages: assign them"),
    ({"a": [rollout(advantages=[0.0, np.nan])]}, "advantages that are not finite"),
    (
        {"a": [rollout(experts=np.zeros((2, 1, 1), np.int16))]},
        "experts of 2 tokens; an engine tells those of all 2 but",
    ),
    ({"a": [rollout(marks={STEP: Marks([(0, 3)])})]}, "has marks 'step' outside its 2 tokens"),
]


@pytest.mark.parametrize(("returned", "message"), FAULTS)
def test_rollouts_that_cannot_be_trained_on_are_named(returned, message):
    maker = turn_player(Greedy(wrong={0: returned}))
    with pytest.raises(PlayError, match=message):
        maker.play(Turn(step=0, index=0, roles=("a",), number=0))


def test_a_role_whose_loss_reads_no_advantages_needs_none():
    maker = turn_player(Greedy(wrong={0: {"a": [rollout(advantages=None)]}}), uncredited=frozenset("a"))
    played = maker.play(Turn(step=0, index=0, roles=("a",), number=0))
    assert played.rollouts["a"][0].advantages is None and "groups_without_signal" not in played.metrics["a"]
