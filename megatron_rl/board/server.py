"""Serves a board: values under keys in memory, for clients that know the secret. One thread serves all of them.

Strangers can connect, and that is all: they hold at most `MAX_STRANGERS` connections of a few hundred bytes for a few
seconds each, can neither read nor write, and never take the descriptors that the process needs to save.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import itertools
import resource
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from megatron_rl.board import wire
from megatron_rl.board.wire import Reply, Seal, Verb, WireError

MAX_STRANGERS = 256  # connections that have not shown the secret yet
STRANGER_S = 5.0  # the longest that one of them stays
MERCY_S = 1.0  # one that is older makes room for another when all places are taken
KEPT_BACK = 256  # descriptors that the board leaves to the rest of the process: a checkpoint has to be written
BACKLOG = 4096  # the kernel allows less: /proc/sys/net/core/somaxconn
PAUSE_S = 0.1  # without new connections when the process or the board has no descriptor left
RECEIVED_AT_ONCE = 1 << 20
LONGEST_MS = 10**9  # of one wait
MAX_BYTES = 1 << 30  # of all keys and values: an engine that lies must not fill the driver's memory
MAX_UNREAD_BYTES = 4 * wire.MAX_BODY  # of answers that a client does not read; a connection with more ends
IDLE_S = 60  # after so long without traffic the kernel asks whether the other side is alive


class BoardServer:
    """A board that listens at one address, at a port of the system's choice. Raises OSError when it cannot."""

    def __init__(self, address: str, secret: bytes) -> None:
        family, _, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        self._listener = socket.create_server(place, family=family, backlog=BACKLOG)
        self._listener.setblocking(False)
        self.address, self.port = address, int(self._listener.getsockname()[1])
        self._secret, self._values = secret, dict[str, bytes]()
        self._bytes = 0  # of all keys and values
        self._peers: dict[socket.socket, _Peer] = {}
        self._strangers: dict[socket.socket, _Peer] = {}  # oldest first
        self._waits: dict[str, list[_Wait]] = {}  # by a key that is missed
        self._alarms: list[tuple[float, int, _Wait]] = []
        self._serial = itertools.count()
        self._accept_again: float | None = None  # while no connection is accepted
        self._room = descriptors() - KEPT_BACK
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, daemon=True, name="board")
        self._thread.start()

    def close(self) -> None:
        """Ends the board; clients see their connections end."""
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        if threading.current_thread() is not self._thread:  # a garbage collector may call this in any thread
            self._thread.join()

    def _serve(self) -> None:
        """Serves until `close`."""
        while True:
            for key, events in self._selector.select(self._pause()):
                if key.fileobj is self._woken:
                    self._end()
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif (peer := self._peers.get(key.fileobj)) is not None:  # type: ignore[arg-type]
                    self._work(peer, events)
            self._tend()

    def _end(self) -> None:
        for peer in [*self._peers.values()]:
            self._drop(peer)
        self._selector.close()
        for own in (self._listener, self._wake, self._woken):
            own.close()

    def _pause(self) -> float | None:
        """Returns how long nothing is due."""
        due = [self._alarms[0][0]] if self._alarms else []
        if self._strangers:
            due.append(next(iter(self._strangers.values())).since + STRANGER_S)
        if self._accept_again is not None:
            due.append(self._accept_again)
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _tend(self) -> None:
        """Does what is due by now."""
        now = time.monotonic()
        while self._alarms and self._alarms[0][0] <= now:
            wait = heappop(self._alarms)[2]
            if not wait.done:
                self._give_up(wait)
                self._answer(wait.peer, [bytes([Reply.LATE])])
        for peer in [*self._strangers.values()]:
            if peer.since + STRANGER_S > now:
                break
            self._drop(peer)
        if self._accept_again is not None and self._accept_again <= now:
            self._accept_again = None
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _accept(self) -> None:
        """Takes one connection, if there is room for it."""
        oldest = next(iter(self._strangers.values()), None)
        full = len(self._strangers) >= MAX_STRANGERS or len(self._peers) >= self._room
        if full and oldest is not None and time.monotonic() - oldest.since > MERCY_S:
            self._drop(oldest)
        elif full:
            self._accept_later()
            return
        try:
            made, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                if oldest is not None:
                    self._drop(oldest)
                self._accept_later()
            return  # else the caller has gone already
        made.setblocking(False)
        peer = _Peer(made)
        self._peers[made] = self._strangers[made] = peer
        self._selector.register(made, selectors.EVENT_READ)
        try:
            configure(made)
            self._write(peer, wire.HELLO + peer.nonce)
        except OSError:
            self._drop(peer)

    def _accept_later(self) -> None:
        self._selector.unregister(self._listener)
        self._accept_again = time.monotonic() + PAUSE_S

    def _work(self, peer: _Peer, events: int) -> None:
        """Reads and writes what a connection is ready for. A connection that breaks the protocol ends."""
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(peer)
            if events & selectors.EVENT_READ:
                limit = wire.ANSWER_BYTES - len(peer.inbox) if peer.up is None else RECEIVED_AT_ONCE
                came = peer.socket.recv(limit)
                if not came:
                    self._drop(peer)
                    return
                peer.inbox += came
                self._read(peer)
        except (BlockingIOError, InterruptedError):
            pass
        except (OSError, WireError):
            self._drop(peer)

    def _read(self, peer: _Peer) -> None:
        """Works on all that has come whole. Raises WireError."""
        if peer.up is None:
            if len(peer.inbox) < wire.ANSWER_BYTES:
                return
            self._greet(peer)
        while peer.up is not None and len(peer.inbox) >= wire.HEAD.size:
            length, tag = wire.HEAD.unpack_from(peer.inbox)
            end = wire.HEAD.size + length
            if length > wire.MAX_BODY or peer.wait is not None:
                raise WireError("a frame is too long, or comes while another is worked on")
            if len(peer.inbox) < end:
                return
            request = peer.up.open(tag, bytes(peer.inbox[wire.HEAD.size : end]))
            del peer.inbox[:end]
            answer = self._request(peer, request)
            if answer is not None:
                self._answer(peer, answer)

    def _greet(self, peer: _Peer) -> None:
        """Checks a client's proof and gives the board's. Raises WireError for a stranger's."""
        nonce, signature = bytes(peer.inbox[: wire.NONCE_BYTES]), bytes(peer.inbox[wire.NONCE_BYTES :])
        if not hmac.compare_digest(signature, wire.client_signature(self._secret, peer.nonce, nonce)):
            raise WireError("a stranger")
        del self._strangers[peer.socket]
        peer.inbox.clear()
        nonces = peer.nonce + nonce
        peer.up, peer.down = Seal(self._secret, b"up", nonces), Seal(self._secret, b"down", nonces)
        self._write(peer, wire.board_signature(self._secret, peer.nonce, nonce))

    def _request(self, peer: _Peer, request: Sequence[bytes]) -> list[bytes] | None:
        """Returns the answer to a request; None when it comes later."""
        try:
            verb, arguments = Verb(request[0][0]), request[1:]
            if verb in (Verb.GET, Verb.WAIT):
                return self._wait(peer, verb, int(arguments[0]), [key.decode() for key in arguments[1:]])
            return [bytes([Reply.DONE]), *self._at_once(verb, arguments)]
        except (IndexError, ValueError) as error:  # a client of another edition, or with a bug
            return [bytes([Reply.REFUSED]), f"{type(error).__name__}: {error}".encode()]

    def _at_once(self, verb: Verb, arguments: Sequence[bytes]) -> list[bytes]:
        """Does what needs no waiting. Returns the answer's byte strings."""
        values = self._values
        if verb is Verb.SET:
            pairs = [(key.decode(), value) for key, value in zip(arguments[::2], arguments[1::2], strict=True)]
            self._refuse_too_much(sum(len(key) + len(value) - self._size(key) for key, value in pairs))
            for key, value in pairs:
                self._set(key, value)
            return []
        if verb is Verb.CHECK:
            return [b"1" if all(key.decode() in values for key in arguments) else b"0"]
        if verb is Verb.NUM_KEYS:
            return [str(len(values)).encode()]
        if verb is Verb.CLEAR:
            prefixes = tuple(prefix.decode() for prefix in arguments)
            cleared = [key for key in values if key.startswith(prefixes)]
            for key in cleared:
                self._remove(key)
            return [str(len(cleared)).encode()]
        key = arguments[0].decode()
        if verb is Verb.ADD:
            self._set(key, str(int(values.get(key, b"0")) + int(arguments[1])).encode())
            return [values[key]]
        if verb is Verb.REMOVE:
            return [b"1" if self._remove(key) else b"0"]
        if verb is Verb.APPEND:
            self._set(key, values.get(key, b"") + arguments[1])
            return []
        expected, desired = arguments[1:]  # of COMPARE_SET, as torch's stores do it
        if values.get(key, b"") == expected:
            self._set(key, desired)
        return [values.get(key, expected)]

    def _set(self, key: str, value: bytes) -> None:
        """Stores a value, and answers those who waited for its key. Raises ValueError when the board is full."""
        self._refuse_too_much(len(key) + len(value) - self._size(key))
        self._remove(key)
        self._values[key] = value
        self._bytes += len(key) + len(value)
        for wait in self._waits.pop(key, ()):
            wait.missed.discard(key)
            if not wait.missed and not wait.done:
                wait.done, wait.peer.wait = True, None
                self._answer(wait.peer, self._found(wait.verb, wait.keys))

    def _refuse_too_much(self, size: int) -> None:
        """Raises ValueError when `size` more bytes are more than the board may hold."""
        if self._bytes + size > MAX_BYTES:
            raise ValueError(f"the board holds {self._bytes} bytes, and {size} more are above its limit of {MAX_BYTES}")

    def _remove(self, key: str) -> bool:
        """Removes a key with its value. Returns whether the key was there."""
        self._bytes -= self._size(key)
        return self._values.pop(key, None) is not None

    def _size(self, key: str) -> int:
        """Returns the bytes of a key and its value; 0 for a key that is not there."""
        return len(key) + len(self._values[key]) if key in self._values else 0

    def _wait(self, peer: _Peer, verb: Verb, milliseconds: int, keys: list[str]) -> list[bytes] | None:
        missed = {key for key in keys if key not in self._values}
        if not missed:
            return self._found(verb, keys)
        if milliseconds <= 0:
            return [bytes([Reply.LATE])]
        wait = peer.wait = _Wait(peer, verb, keys, missed)
        for key in missed:
            self._waits.setdefault(key, []).append(wait)
        heappush(self._alarms, (time.monotonic() + min(milliseconds, LONGEST_MS) / 1000, next(self._serial), wait))
        if len(self._alarms) > 2 * len(self._peers) + 1000:  # most of them are of waits that are over
            self._alarms = [alarm for alarm in self._alarms if not alarm[2].done]
            heapify(self._alarms)
        return None

    def _found(self, verb: Verb, keys: Sequence[str]) -> list[bytes]:
        values = [self._values.get(key, b"") for key in keys] if verb is Verb.GET else []
        return [bytes([Reply.DONE]), *values]

    def _give_up(self, wait: _Wait) -> None:
        """Takes a wait out of the books."""
        wait.done, wait.peer.wait = True, None
        for key in wait.missed:
            others = [one for one in self._waits.get(key, ()) if one is not wait]
            if others:
                self._waits[key] = others
            else:
                self._waits.pop(key, None)

    def _answer(self, peer: _Peer, parts: Sequence[bytes]) -> None:
        """Sends an answer. A connection that cannot take it ends."""
        assert peer.down is not None
        try:
            self._write(peer, peer.down.frame(parts))
        except (OSError, WireError):
            self._drop(peer)

    def _write(self, peer: _Peer, data: bytes) -> None:
        if len(peer.outbox) + len(data) > MAX_UNREAD_BYTES:
            raise WireError("a client does not read its answers")
        idle = not peer.outbox
        peer.outbox += data
        if idle:
            self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        """Sends what the connection takes now; the rest follows when it takes more."""
        with contextlib.suppress(BlockingIOError):
            while peer.outbox:
                sent = peer.socket.send(peer.outbox)
                del peer.outbox[:sent]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outbox else 0)
        if wanted != peer.events:
            peer.events = wanted
            self._selector.modify(peer.socket, wanted)

    def _drop(self, peer: _Peer) -> None:
        """Ends a connection."""
        if self._peers.pop(peer.socket, None) is None:
            return
        self._strangers.pop(peer.socket, None)
        if peer.wait is not None:
            self._give_up(peer.wait)
        self._selector.unregister(peer.socket)
        peer.socket.close()


class _Peer:
    """A connection. `up` and `down` are None until it has shown the secret."""

    def __init__(self, made: socket.socket) -> None:
        self.socket, self.since, self.events = made, time.monotonic(), selectors.EVENT_READ
        self.nonce = secrets.token_bytes(wire.NONCE_BYTES)
        self.inbox, self.outbox = bytearray(), bytearray()
        self.up: Seal | None = None
        self.down: Seal | None = None
        self.wait: _Wait | None = None


class _Wait:
    """A request whose keys are not all there yet."""

    def __init__(self, peer: _Peer, verb: Verb, keys: list[str], missed: set[str]) -> None:
        self.peer, self.verb, self.keys, self.missed, self.done = peer, verb, keys, missed, False


def configure(made: socket.socket) -> None:
    """Sets a connection's options: no waiting to fill packets, and probes while it is idle."""
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)


def descriptors() -> int:
    """Allows this process as many descriptors as it may have, and returns their number. A rank or two thousand clients
    need more than the 1,024 that many systems begin with.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return 1 << 16 if soft == resource.RLIM_INFINITY else soft
