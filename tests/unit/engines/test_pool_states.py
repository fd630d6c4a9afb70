"""The state machine of a pool's servers (engines/pool/states.py), under random orders of events."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from megatron_rl.engines.pool.states import (
    Action,
    Alive,
    Asleep,
    Awake,
    Failed,
    Gone,
    Joined,
    Listed,
    Loaded,
    Paused,
    Phase,
    PoolState,
    Refit,
    step,
)

REPLICAS, EVENTS = 3, 150
ADDRESS = ("127.0.0.1", 1, "s3")


@dataclass
class Servers:
    """Servers that do the actions of the machine in a random order, and the weights that they really hold."""

    random: random.Random
    state: PoolState = field(default_factory=PoolState)
    under_way: list[tuple[Action, str]] = field(default_factory=list)  # with the start of the server
    held: dict[tuple[int, str], int] = field(default_factory=dict)  # {(replica, start): version}
    answers: list[Paused | Loaded | Failed] = field(default_factory=list)  # that have not arrived yet
    alive: set[tuple[int, str]] = field(default_factory=set)  # starts with a sign of life that are not gone
    phases: set[tuple[Phase, Phase]] = field(default_factory=set)

    def apply(self, event):
        before = self.state.servers
        if isinstance(event, Alive):
            self.alive.add((event.replica, event.incarnation))
        elif isinstance(event, Gone):
            self.alive.discard((event.replica, event.incarnation))
        self.state, actions = step(self.state, event)
        after = self.state.servers
        self.phases |= {(before[r].phase, after[r].phase) for r in before if before[r].phase is not after[r].phase}
        self.under_way += [(a, after[a.replica].incarnation) for a in actions if a.verb != "hang_up"]
        self.check()

    def check(self):
        for replica, server in self.state.servers.items():
            ready = server.phase is Phase.READY
            assert (server.phase is not Phase.LOST) == ((replica, server.incarnation) in self.alive)
            assert not ready or self.held.get((replica, server.incarnation)) == self.state.version
            assert ready == (server.version is not None) and (not ready or server.version == self.state.version >= 0)
            assert (server.phase in (Phase.PAUSING, Phase.LOADING)) == (server.ticket > 0)
        tickets = [server.ticket for server in self.state.servers.values() if server.ticket]
        assert len(tickets) == len({*tickets}) and max(tickets, default=0) <= self.state.tickets

    def finish_one(self, *, well: bool):
        """Ends an action, in the start of the server that began it, which may be dead by now; or an answer arrives."""
        place = self.random.randrange(len(self.under_way) + len(self.answers))
        if place >= len(self.under_way):
            self.apply(self.answers.pop(place - len(self.under_way)))
            return
        action, start = self.under_way.pop(place)
        if well and action.verb == "pause":
            self.answers.append(Paused(action.replica, action.ticket))
        elif well and action.version == self.state.version:  # the trainer sends its newest weights alone
            self.held[action.replica, start] = action.version
            self.answers.append(Loaded(action.replica, action.ticket, action.version))
        else:
            self.answers.append(Failed(action.replica, start, action.ticket, "it died", 1.0, hang_up=True))

    def finish_all(self):
        while self.under_way or self.answers:
            self.finish_one(well=True)

    def living(self):
        return [r for r, server in self.state.servers.items() if server.phase is not Phase.LOST]

    def random_event(self, number: int):
        replica = self.random.randrange(REPLICAS)
        server = self.state.servers.get(replica)
        start = server.incarnation if server is not None and self.random.random() < 0.8 else "an earlier start"
        match self.random.randrange(9):
            case 0 if server is not None and self.random.random() < 0.6:
                self.apply(Listed(replica, server.incarnation))
            case 0:
                self.apply(Listed(replica, f"start {number}"))
            case 1:
                self.apply(Alive(replica, start, None))
            case 2 if self.random.random() < 0.5:
                self.apply(Gone(replica, start, "no sign of life"))
            case 3:
                self.apply(Joined(replica, start, ADDRESS))
            case 4:
                some = [r for r in self.living() if self.random.random() < 0.7]
                self.apply(Refit(self.state.version + 1, some, everyone=True))
            case 5 if self.state.version >= 0:
                stale = [r for r in self.living() if self.state.servers[r].phase is Phase.STALE]
                self.apply(Refit(self.state.version, stale, everyone=False))
            case 6 if not any(server.ticket for server in self.state.servers.values()):
                self.apply(Asleep(discard=self.random.random() < 0.5))
            case 7:
                self.apply(Awake())
            case _ if self.under_way or self.answers:
                self.finish_one(well=self.random.random() < 0.85)


@pytest.mark.parametrize("tenth", range(10))
def test_no_order_of_events_makes_a_server_answer_with_other_weights_than_it_holds(tenth):
    phases = set()
    for seed in range(200 * tenth, 200 * (tenth + 1)):
        servers = Servers(random.Random(seed))
        for number in range(EVENTS):
            servers.random_event(number)
        servers.finish_all()
        servers.apply(Listed(0, "last"))
        servers.apply(Alive(0, "last", None))
        servers.apply(Refit(servers.state.version + 1, servers.living(), everyone=True))
        servers.finish_all()
        assert all(servers.state.servers[r].phase is Phase.READY for r in servers.living()), "none is left behind"
        phases |= servers.phases
    assert len(phases) >= 11, "the orders reach nearly every transition"


def test_a_late_answer_of_a_load_that_was_given_up_changes_nothing():
    state = PoolState()
    for event in (Listed(0, "a"), Alive(0, "a", None), Refit(1, [0], everyone=True)):
        state, actions = step(state, event)
    [pause] = actions
    state, [load] = step(state, Paused(0, pause.ticket))
    for event in (Gone(0, "a", "silent"), Alive(0, "a", None)):
        state, _ = step(state, event)
    assert step(state, Loaded(0, load.ticket, 1)) == (state, [])
    assert step(state, Failed(0, "a", load.ticket, "late", 2.0, hang_up=True)) == (state, [])
    assert state.servers[0].phase is Phase.STALE


def test_servers_that_drop_their_weights_in_their_sleep_are_stale_until_a_refit():
    state = PoolState(version=0)
    for event in (Listed(0, "a"), Alive(0, "a", 0), Asleep(discard=False), Awake()):
        state, _ = step(state, event)
    assert state.servers[0].phase is Phase.READY and (state.sleeps, state.asleep) == (1, False)
    state, _ = step(state, Asleep(discard=True))
    assert state.servers[0].phase is Phase.STALE and state.asleep


def test_a_refit_of_some_leaves_the_others_serving():
    state = PoolState(version=0)
    for replica in (0, 1):
        for event in (Listed(replica, "a"), Alive(replica, "a", 0)):
            state, _ = step(state, event)
    state, actions = step(state, Refit(0, [1], everyone=False))
    assert [action.replica for action in actions] == [1]
    assert [server.phase for server in state.servers.values()] == [Phase.READY, Phase.PAUSING]


def test_a_refit_leaves_out_a_server_that_still_loads_the_weights_before():
    """Its late load would overwrite weights that are called current."""
    state = PoolState()
    for event in (Listed(0, "a"), Alive(0, "a", None)):
        state, _ = step(state, event)
    state, [pause] = step(state, Refit(1, [0], everyone=True))
    state, [load] = step(state, Paused(0, pause.ticket))
    state, actions = step(state, Refit(2, [0], everyone=True))
    assert actions == [] and state.servers[0].phase is Phase.LOADING
    state, _ = step(state, Loaded(0, load.ticket, 1))
    assert state.servers[0].phase is Phase.STALE
