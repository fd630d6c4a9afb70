"""The servers of a pool as a state machine: a pure function from a state and an event to the next state and actions.

    lost --alive--> stale --refit--> pausing --paused--> loading --loaded--> ready --refit--> pausing
    every phase --gone--> lost        every phase but lost --failed--> stale        ready --asleep, discard--> stale

`Members` holds the state and handles one event at a time. What takes long, such as a request to a server, is an action
and runs elsewhere. Its end comes back as an event with the ticket of the action. An event with an old ticket is late
and changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto

Address = tuple[str, int, str]  # address of a refit store: host, port, and the key that signs messages


class Phase(Enum):
    """What a server of a pool can do."""

    LOST = auto()  # it is considered dead
    STALE = auto()  # it lives, and its weights are unknown or not those of the pool
    PAUSING = auto()  # it is told to generate nothing, because a weight sync (refit) begins
    LOADING = auto()  # it receives the weights of a weight sync
    READY = auto()  # it has the weights of the pool, and gets requests


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """The state of one start of a server."""

    incarnation: str  # id of the start of the server
    phase: Phase = Phase.LOST
    version: int | None = None  # version of the weights; None unless the server is ready
    joined: Address | None = field(default=None, repr=False)  # refit store that the server has joined
    why: str | None = "it has given no sign of life yet"  # why the server is lost, or its last weight sync failed
    failed_s: float = -math.inf  # value of time.monotonic() when its last weight sync failed
    ticket: int = 0  # of the action under way; 0: none


@dataclass(frozen=True, kw_only=True)
class PoolState:
    """The state of all servers of a pool, by replica."""

    version: int = -1  # version of the weights with which requests are answered; -1 before the first weight sync
    servers: Mapping[int, ServerState] = field(default_factory=dict)
    tickets: int = 0  # number of tickets given
    sleeps: int = 0  # number of times that all servers were put to sleep, which aborts their requests
    asleep: bool = False  # whether the servers have been put to sleep and not been woken


@dataclass(frozen=True)
class Listed:
    """The server registry lists a start of a server that it did not list before."""

    replica: int
    incarnation: str


@dataclass(frozen=True)
class Alive:
    """A start of a server gives a sign of life. `version`: of its weights; None if they are unknown."""

    replica: int
    incarnation: str
    version: int | None


@dataclass(frozen=True)
class Gone:
    """A start of a server is considered dead."""

    replica: int
    incarnation: str
    why: str


@dataclass(frozen=True)
class Joined:
    """A start of a server has joined the refit store at an address."""

    replica: int
    incarnation: str
    address: Address


@dataclass(frozen=True)
class Refit:
    """A weight sync to `replicas` begins. `everyone`: no other server has these weights either."""

    version: int
    replicas: Collection[int]
    everyone: bool


@dataclass(frozen=True)
class Paused:
    """A server generates nothing now."""

    replica: int
    ticket: int


@dataclass(frozen=True)
class Loaded:
    """A server has received the weights of a version."""

    replica: int
    ticket: int
    version: int


@dataclass(frozen=True)
class Failed:
    """A request of a weight sync, a sleep or a wake-up failed at a server. `now`: value of time.monotonic().

    `ticket`: of the action that failed; None if it has no ticket. `hang_up`: whether the server's requests end, too."""

    replica: int
    incarnation: str
    ticket: int | None
    why: str
    now: float
    hang_up: bool


@dataclass(frozen=True)
class Asleep:
    """All servers are put to sleep. `discard`: they drop their weights."""

    discard: bool


@dataclass(frozen=True)
class Awake:
    """All servers have been woken."""


@dataclass(frozen=True)
class Action:
    """What is to be done at a server: `pause`, `load` or `hang_up`."""

    verb: str
    replica: int
    ticket: int = 0
    version: int = -1


Event = Listed | Alive | Gone | Joined | Refit | Paused | Loaded | Failed | Asleep | Awake


def step(state: PoolState, event: Event) -> tuple[PoolState, list[Action]]:
    """Returns the state after an event, and the actions that the event causes. An event about a start of a server that
    is no longer the newest, or with an old ticket, changes nothing."""
    match event:
        case Refit():
            return _refit(state, event)
        case Asleep():
            asleep = replace(state, asleep=True, sleeps=state.sleeps + 1)
            return (_all_stale(asleep, ()) if event.discard else asleep), []
        case Awake():
            return replace(state, asleep=False), []
        case Listed():
            listed = state.servers.get(event.replica)
            if listed is not None and listed.incarnation == event.incarnation:
                return state, []
            return _having(state, event.replica, ServerState(incarnation=event.incarnation)), []
    server = state.servers.get(event.replica)
    if server is None or _is_late(event, server):
        return state, []
    changed, actions = _server_step(state.version, server, event)
    return _having(state, event.replica, changed), actions


def _is_late(event: Alive | Gone | Joined | Paused | Loaded | Failed, server: ServerState) -> bool:
    """Returns whether an event is about an earlier start of the server, or about an action that was given up."""
    if isinstance(event, Paused | Loaded):
        return event.ticket != server.ticket
    if isinstance(event, Failed) and event.ticket is not None and event.ticket != server.ticket:
        return True
    return event.incarnation != server.incarnation or (server.phase is Phase.LOST) != isinstance(event, Alive)


def _server_step(
    version: int, server: ServerState, event: Alive | Gone | Joined | Paused | Loaded | Failed
) -> tuple[ServerState, list[Action]]:
    """Returns the state of a server after an event that is not late. `version`: of the pool."""
    match event:
        case Alive():
            phase = Phase.READY if event.version == version >= 0 else Phase.STALE
            changed = replace(server, phase=phase, version=event.version, joined=None, why=None)
            return changed if phase is Phase.READY else replace(changed, version=None), []
        case Gone():
            return replace(server, phase=Phase.LOST, version=None, why=event.why, ticket=0), []
        case Joined():
            return replace(server, joined=event.address), []
        case Paused():
            return replace(server, phase=Phase.LOADING), [Action("load", event.replica, event.ticket, version)]
        case Loaded():
            if event.version == version:
                return replace(server, phase=Phase.READY, version=version, why=None, ticket=0), []
            return replace(server, phase=Phase.STALE, ticket=0), []
        case Failed():
            stale = replace(server, phase=Phase.STALE, version=None, joined=None, ticket=0)
            hang_up = [Action("hang_up", event.replica)] * event.hang_up
            return replace(stale, why=event.why, failed_s=event.now), hang_up


def _refit(state: PoolState, event: Refit) -> tuple[PoolState, list[Action]]:
    """Begins a weight sync: its servers are paused."""
    state = replace(state, version=event.version)
    if event.everyone:
        state = _all_stale(state, event.replicas)
    actions = []
    for replica in event.replicas:
        server = state.servers[replica]
        # A server with an action under way is left out: a late load would overwrite weights that are called current.
        if server.phase is not Phase.LOST and not server.ticket:
            state = replace(state, tickets=state.tickets + 1)
            pausing = replace(server, phase=Phase.PAUSING, version=None, ticket=state.tickets)
            state = _having(state, replica, pausing)
            actions.append(Action("pause", replica, state.tickets))
    return state, actions


def _all_stale(state: PoolState, kept: Collection[int]) -> PoolState:
    """Returns the state in which no ready server has the weights of the pool, but those in `kept` do not change."""
    servers = {
        replica: replace(server, phase=Phase.STALE, version=None)
        if server.phase is Phase.READY and replica not in kept
        else server
        for replica, server in state.servers.items()
    }
    return replace(state, servers=servers)


def _having(state: PoolState, replica: int, server: ServerState) -> PoolState:
    return replace(state, servers={**state.servers, replica: server})
