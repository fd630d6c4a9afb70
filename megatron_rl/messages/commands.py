"""Commands of the driver to the ranks of a run. The driver is a function that runs in a thread of rank 0. Every rank,
rank 0 as well, runs the commands that it gets one after the other, in the order in which the driver posted them.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import struct
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_rl.messages.message_codec import pack, unpack
from megatron_rl.messages.world import DriverError, World

T = TypeVar("T")
Handler = Callable[[Any], Any]
DOWN, UP = 1, 2  # tags of messages from the driver and to the driver
RUN, RETURN, RAISE = "run", "return", "raise"  # kinds of orders: a command, and how the driver has ended
LOCK_S = 1.0  # seconds for which `longest` waits for the lock; a thread that holds it for longer is sending a message
FIRST = 4096  # size in bytes of the first message in which an order or an answer is sent
_SIZES = struct.Struct("<qq")  # sizes of an order and of its argument, at the beginning of the first message
ENDLESS = timedelta(days=365)  # timeout of a rank that waits for a command; cluster.watchdog ends a run that hangs


class FollowerError(RuntimeError):
    """Raised in the driver if a command raised an error on another rank than rank 0, or if a rank ended. The message
    has the rank, and the traceback from it.
    """


@dataclass(frozen=True)
class _Failure:
    """An error on another rank than rank 0."""

    traceback: str
    repeated: bool  # whether it only repeats the error of the first rank of the command (DriverError)


@dataclass(eq=False)
class Command:
    """A posted command that has not been answered by all its ranks."""

    name: str
    ranks: Sequence[int]
    collective: bool
    about: str  # name of the role to which the command belongs; empty if it belongs to none
    iteration: int  # index of the iteration to which the command belongs, or of the one that began last
    posted: float = field(default_factory=time.monotonic)
    results: dict[int, Any] = field(default_factory=dict)  # {rank: result} of the ranks that have answered
    future: Future[Any] = field(default_factory=Future)
    begun: dict[int, float] = field(default_factory=dict)  # {rank: time.monotonic() when its turn came on the rank}
    ended: dict[int, float] = field(default_factory=dict)  # {rank: time.monotonic() when it answered}
    repeated: BaseException | None = None  # an error that only repeats the error of the first rank

    @property
    def began(self) -> float:
        """Returns when the command began: a collective command when its turn came on all its ranks."""
        return (max if self.collective else min)(self.begun.values())


class Commands:
    """Posts commands to ranks. Every rank creates an instance, with the same handlers; `drive` starts the driver.

    No deadlock is possible, because each rank runs its commands in the order of one list: the oldest command that is
    not complete is the next one on all its ranks. Sending waits until the other rank receives; each rank receives in a
    thread of its own, so that posting never waits until a rank has finished its work. Rank 0 has one such thread for
    each other rank, in which a closed connection shows at once.
    """

    def __init__(self, world: World) -> None:
        """`world`: all ranks of the run. Collective."""
        self.rank, self.size = world.rank, world.size
        self._group: Any = dist.new_group(backend="gloo", timeout=ENDLESS) if self.size > 1 else None
        self._handlers: dict[str, Handler] = {}
        self._inbox = queue.SimpleQueue[tuple[Any, ...]]()
        self._posting, self._numbers = threading.RLock(), itertools.count()
        self._commands: dict[int, Command] = {}  # on rank 0: the commands that are not complete, in order
        # on rank 0: (when a message to a rank began, description), while it waits for its receiver
        self._sending: tuple[float, str] | None = None
        self._lost: dict[int, str] = {}  # on rank 0: {rank that ended: why}
        self._driving = False
        self._ended = False  # on rank 0: whether the driver has ended, so that no thread may post any more
        self._driver: int | None = None  # id of the driver's thread, on rank 0
        self._threads: list[threading.Thread] = []
        self._handling: int | None = None  # id of the thread that runs a handler
        self._free = dict[int, float]()  # on rank 0: {rank: time.monotonic() of its last answer}
        self.iteration = 0  # index of the newest iteration that the driver has begun: the first iteration has index 0
        # called on rank 0 when all ranks have answered a command; must return quickly, and must not post
        self.completed: Callable[[Command], None] = lambda command: None

    def serve(self, name: str, handler: Handler) -> None:
        """Registers a handler under a name. Every rank that a command of this name is posted to must register it."""
        self._handlers[name] = handler

    def each(
        self, name: str, arguments: Sequence[Any], ranks: Sequence[int] | None = None, *, iteration: int | None = None
    ) -> list[Any]:
        """Runs the handler with this name on some ranks at the same time, each with its own argument. Returns their
        results in the order of the ranks. Must be called by the driver, in any of its threads.

        `arguments`: one for each rank. `ranks`: numbers of the ranks; None: all ranks. `iteration`: see Command; None:
        the one that began last. If the handler raises an error on a rank, raises this error (rank 0) or FollowerError
        when all ranks have answered; the ranks go on.
        """
        ranks = range(self.size) if ranks is None else ranks
        if len(arguments) != len(ranks):
            raise ValueError(f"{len(arguments)} arguments for {len(ranks)} ranks: give one per rank")
        results = self._post(name, ranks, arguments, collective=False, iteration=iteration).result()
        for rank in ranks:
            if isinstance(results[rank], BaseException):
                raise results[rank]
        return [results[rank] for rank in ranks]

    def together(
        self, name: str, argument: Any, others: Any, ranks: Sequence[int] | None = None, *, about: str = ""
    ) -> Future[Any]:
        """Runs the handler with this name on some ranks at the same time: with `argument` on the first of the ranks,
        and with `others` on the other ones. Returns at once. The future gives the result of the first rank when all
        ranks have finished. Must be called by the driver, in any of its threads.

        For a handler that is collective, so that ranks wait for one another inside it. A rank where the handler fails
        therefore raises its error out of `drive`, and the run cannot go on. The future then raises this error (rank 0)
        or FollowerError, without waiting for the other ranks. `about`: name of the role to which the command belongs,
        for error messages.
        """
        ranks = range(self.size) if ranks is None else ranks
        arguments, done = [argument] + [others] * (len(ranks) - 1), Future[Any]()

        def finish(results: Future[dict[int, Any]]) -> None:
            if (error := results.exception()) is not None:
                done.set_exception(error)
            else:
                done.set_result(results.result()[ranks[0]])

        self._post(name, ranks, arguments, collective=True, about=about).add_done_callback(finish)
        return done

    def drive(self, function: Callable[..., T], *args: Any) -> T:
        """Runs `function(*args)`, the driver, in a thread of rank 0, and the commands that it posts on all ranks.
        Returns the driver's result on every rank. An error of the driver is raised on every rank: itself on rank 0, as
        DriverError on the other ranks. Every rank calls it in its main thread.
        """
        if self._driving or self._handling == threading.get_ident():
            raise RuntimeError("drive inside drive: the ranks have one driver")
        for thread in self._threads:  # of an earlier call; they end when the ranks have left it
            thread.join()
        self._driving, self._ended = True, False
        start = lambda name, target, *args: threading.Thread(target=target, args=args, name=name, daemon=True)  # noqa: E731
        if self.rank == 0:
            self._threads = [start(f"answers {rank}", self._listen, rank) for rank in range(1, self.size)]
            device = torch.cuda.current_device() if torch.cuda.is_available() else None
            self._threads.append(start("driver", self._drive, function, args, device))
        else:
            self._threads = [start("inbox", self._receive)]
        for thread in self._threads:
            thread.start()
        try:
            return self._work()
        finally:
            self._driving = False

    def in_driver(self) -> bool:
        """Returns whether this is the driver's thread itself, and not one of the threads that the driver started."""
        return self._driving and self._driver == threading.get_ident()

    def longest(self) -> tuple[float, str] | None:
        """Returns (seconds since the turn of the command came on all its ranks, description) of the command that has
        been running longest; None if no command runs. Called on rank 0.
        """
        if not self._posting.acquire(timeout=LOCK_S):  # a rank does not receive what is sent to it
            sending = self._sending
            return None if sending is None else (time.monotonic() - sending[0], sending[1])
        try:
            running = self._running()
        finally:
            self._posting.release()
        if not running:
            return None
        seconds, command = max(running, key=lambda pair: pair[0])
        missing = [rank for rank in command.ranks if rank not in command.results]
        of = f" of {command.about}" if command.about else ""
        return seconds, f"{command.name}{of} on ranks {ranges(command.ranks)} has no answer of {ranges(missing)}"

    def _running(self) -> list[tuple[float, Command]]:
        """Returns (seconds since the turn of the command came on all its ranks, command) of the commands that run.
        Called on rank 0 with the lock held."""
        now, first = time.monotonic(), dict[int, int]()  # {rank: number of the rank's next command}
        for number, command in self._commands.items():
            for rank in command.ranks:
                if rank not in command.results and first.setdefault(rank, number) == number:
                    self._note_turn(command, rank)
        return [
            (now - max(command.begun.values()), command)
            for command in self._commands.values()
            if all(rank in command.begun or rank in command.results for rank in command.ranks) and command.begun
        ]

    def _post(
        self, name: str, ranks: Sequence[int], arguments: Sequence[Any], *, collective: bool, about: str = "",
        iteration: int | None = None,
    ) -> Future[dict[int, Any]]:  # fmt: skip
        """Posts a command. The future gives {rank: result, or the error that its handler raised}."""
        if 0 in ranks:
            self._handler(name)
        if self._handling == threading.get_ident():
            raise RuntimeError(f"{name!r} inside a running handler: only the driver posts commands")
        outside = RuntimeError(f"{name!r} outside of drive, where the ranks do not listen")
        if not self._driving or self.rank != 0:
            raise outside
        packed = dict[int, bytearray]()  # {id of an argument: its bytes}
        for rank, argument in zip(ranks, arguments, strict=True):
            if rank != 0 and id(argument) not in packed:
                packed[id(argument)] = pack(argument)
        command = Command(name, ranks, collective, about, self.iteration if iteration is None else iteration)
        with self._posting:
            if self._ended:
                raise outside
            if lost := [rank for rank in ranks if rank in self._lost]:
                raise FollowerError(self._lost[lost[0]])
            self._commands[number := next(self._numbers)] = command
            for rank, argument in zip(ranks, arguments, strict=True):
                order = (RUN, number, name, collective, not collective or rank == ranks[0])
                if rank == 0:
                    self._inbox.put((order, argument))
                else:
                    try:
                        self._send(rank, DOWN, order, packed[id(argument)])
                    except RuntimeError as error:  # the rank has ended, and its thread here has not seen it yet
                        self._lose(rank, str(error))
        return command.future

    def _work(self) -> Any:
        """Runs this rank's commands until the driver has ended. Returns the driver's result."""
        failed: BaseException | None = None  # error of a collective command on rank 0, after which none can run
        while True:
            (kind, *order), argument = self._inbox.get()
            if kind == RETURN:
                self._answer(None, None)
                return argument
            if kind == RAISE:
                self._answer(None, None)
                raise argument if self.rank == 0 else DriverError(f"the driver failed:\n{argument}")
            number, name, collective, wanted = order
            if failed is not None:
                self._answer(number, failed)
                continue
            self._handling = threading.get_ident()
            try:
                result = self._handler(name)(argument)
                self._answer(number, result if wanted else None)
            except BaseException as error:
                self._answer(number, error)
                if collective:
                    failed = error
                    if self.rank != 0:
                        raise
            finally:
                self._handling = None

    def _handler(self, name: str) -> Handler:
        if (handler := self._handlers.get(name)) is None:
            raise ValueError(f"no handler {name!r} is served; known: {', '.join(sorted(self._handlers)) or 'none'}")
        return handler

    def _drive(self, function: Callable[..., Any], args: Sequence[Any], device: int | None) -> None:
        """Runs the driver, and tells all ranks how it ended. `device`: the GPU of this rank, which torch chooses for
        each thread."""
        if device is not None:
            torch.cuda.set_device(device)
        self._driver = threading.get_ident()
        order, packed = (RETURN,), bytearray()
        try:
            own = function(*args)
            packed = pack(own) if self.size > 1 else packed
        except BaseException as error:
            order, own = (RAISE,), error
            packed = pack("".join(traceback.format_exception(error)))
        with self._posting:
            self._ended = True
            for command in self._commands.values():  # posted by other threads of the driver, which wait for them
                command.future.set_exception(RuntimeError(f"{command.name!r}: the driver has ended"))
            self._commands.clear()
            for rank in range(1, self.size):
                with contextlib.suppress(RuntimeError):  # the rank has ended
                    self._send(rank, DOWN, order, packed)
            self._inbox.put((order, own))

    def _receive(self) -> None:
        """Puts the orders of the driver into this rank's inbox, until the driver has ended."""
        kind = RUN
        while kind == RUN:
            try:
                order, packed = self._read(0, DOWN)
            except RuntimeError as error:
                return self._inbox.put(((RAISE,), f"rank 0 ended: {error}"))
            kind = order[0]
            self._inbox.put((order, unpack(packed)))

    def _listen(self, rank: int) -> None:
        """Receives the answers of a rank until the rank has left `drive`. Runs in a thread of rank 0."""
        while True:
            try:
                (number, failed), packed = self._read(rank, UP)
            except RuntimeError as error:
                return self._lose(rank, str(error))
            if number is None:
                return None
            result = unpack(packed)
            with self._posting:
                self._complete(number, rank, _Failure(result, failed == "repeated") if failed else result)

    def _answer(self, number: int | None, result: Any) -> None:
        """Sends the result of a command, or the error of its handler, to the driver. `number`: None says that this rank
        leaves `drive`."""
        if self.rank == 0:
            if number is not None:
                with self._posting:
                    self._complete(number, 0, result)
            return
        failure = "".join(traceback.format_exception(result)) if isinstance(result, BaseException) else None
        packed = bytearray()
        if failure is None:
            try:
                packed = pack(result)
            except TypeError as error:
                failure = "".join(traceback.format_exception(error))
        failed = "repeated" if isinstance(result, DriverError) else "failed"
        ignored = [RuntimeError] if number is None else []  # rank 0 may have left and ended already
        with contextlib.suppress(*ignored):
            self._send(0, UP, (number, failed if failure else ""), packed if failure is None else pack(failure))

    def _complete(self, number: int, rank: int, result: Any) -> None:
        """Records the result of a command on a rank. Called on rank 0 with the lock held."""
        if (command := self._commands.get(number)) is None:  # the driver does not wait for the command any more
            return
        repeated = isinstance(result, _Failure) and result.repeated
        if isinstance(result, _Failure):
            of = f" ({command.about})" if command.about else ""
            result = FollowerError(f"rank {rank}{of} failed in {command.name!r}:\n{result.traceback}")
        command.results[rank] = result
        self._note_turn(command, rank)
        command.ended[rank] = self._free[rank] = time.monotonic()
        error: BaseException | None = None  # with which the command ends
        if command.collective and isinstance(result, BaseException):
            if repeated:  # the error of the first rank is still to come, and says more
                command.repeated = result
            else:
                error = result
        if error is None and len(command.results) < len(command.ranks):
            return
        del self._commands[number]
        if (error := error or command.repeated) is not None:
            command.future.set_exception(error)
        else:
            self.completed(command)
            command.future.set_result(command.results)

    def _note_turn(self, command: Command, rank: int) -> None:
        """Notes when the turn of a command came on a rank, which has answered all earlier commands."""
        command.begun[rank] = max(command.posted, self._free.get(rank, 0.0))

    def _lose(self, rank: int, why: str) -> None:
        """Notes that a rank has ended, and ends the commands that wait for it. Runs in a thread of rank 0."""
        with self._posting:
            for number, command in [*self._commands.items()]:
                if rank in command.ranks and rank not in command.results:
                    of = f" ({command.about})" if command.about else ""
                    del self._commands[number]
                    command.future.set_exception(FollowerError(f"rank {rank}{of} ended in {command.name!r}: {why}"))
            self._lost[rank] = f"rank {rank} has ended: {why}"

    def _send(self, rank: int, tag: int, order: Sequence[Any], packed: bytearray) -> None:
        """Sends an order and an argument, in one message if they fit: each message costs two ways through the network,
        because a sender waits for its receiver."""
        head, first = pack([*order]), bytearray(FIRST)
        assert _SIZES.size + len(head) <= FIRST, f"the name of {order} is too long"
        body = head + packed if _fits(len(head), len(packed)) else head
        first[: _SIZES.size + len(body)] = _SIZES.pack(len(head), len(packed)) + body
        if tag == DOWN:
            name = order[2] if order[0] == RUN else "the end of the driver"
            self._sending = time.monotonic(), f"{name} is not received by rank {rank}"
        try:
            dist.send(torch.frombuffer(first, dtype=torch.uint8), rank, group=self._group, tag=tag)
            if not _fits(len(head), len(packed)):
                dist.send(torch.frombuffer(packed, dtype=torch.uint8), rank, group=self._group, tag=tag)
        finally:
            self._sending = None

    def _read(self, rank: int, tag: int) -> tuple[list[Any], bytearray]:
        first = bytearray(FIRST)
        dist.recv(torch.frombuffer(first, dtype=torch.uint8), rank, group=self._group, tag=tag)
        (size, more), found = _SIZES.unpack_from(first), first[_SIZES.size :]
        head, packed = found[:size], found[size : size + more]
        if not _fits(size, more):
            packed = bytearray(more)
            dist.recv(torch.frombuffer(packed, dtype=torch.uint8), rank, group=self._group, tag=tag)
        return unpack(head), packed


def _fits(head: int, packed: int) -> bool:
    """Returns whether an order and an argument of these sizes in bytes fit into one message."""
    return _SIZES.size + head + packed <= FIRST


def ranges(ranks: Sequence[int]) -> str:
    """Returns rank numbers as text, such as `0-3, 6`. `ranks`: in ascending order."""
    parts, rest = list[str](), [*ranks]
    while rest:
        count = next((place for place, rank in enumerate(rest) if rank != rest[0] + place), len(rest))
        parts.append(f"{rest[0]}-{rest[count - 1]}" if count > 1 else str(rest[0]))
        rest = rest[count:]
    return ", ".join(parts)
