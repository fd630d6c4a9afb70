"""The server of the key-value store. It keeps values in memory for clients that know the secret. One thread serves all
clients.

Clients without the secret ("strangers") can neither read nor write. They can hold at most `MAX_STRANGERS` connections,
each for a few seconds and with a few hundred bytes of memory. Therefore they cannot use up the file descriptors that
the process needs to save a checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import resource
import secrets
import socket
import threading
import time
from collections.abc import Sequence

from megatron_rl.key_value_store import store_wire_format
from megatron_rl.key_value_store.store_wire_format import Reply, Seal, Verb, WireError

MAX_STRANGERS = 256  # maximum number of strangers: connections that have not proved yet that they know the secret
STRANGER_S = 5.0  # longest time in seconds that a connection may take to prove that it knows the secret
# at the limit of connections, the oldest connection without a proof of the secret is closed if it is older than this
MERCY_S = 1.0
# Number of file descriptors that the store leaves to the rest of the process, for example to write a checkpoint.
KEPT_BACK = 256
BACKLOG = 4096  # length of the queue of new connections; the kernel may lower it: /proc/sys/net/core/somaxconn
PAUSE_S = 0.1  # pause in seconds before the next accept when the process or the store has no file descriptor left
LONGEST_MS = 10**9  # maximum timeout of a request in milliseconds
MAX_BYTES = 1 << 30  # maximum total size of keys and values, so that a faulty client cannot fill the driver's memory
# a client that leaves more than this number of bytes of responses unread is disconnected
MAX_UNREAD_BYTES = 4 * store_wire_format.MAX_BODY
IDLE_S = 60  # seconds without traffic after which the kernel probes whether the other side is alive


class KeyValueServer:
    """A key-value store that listens at one address, at a port that the system chooses.

    The constructor raises OSError if the store cannot listen at `address`.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        family, _, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        self._listener = socket.create_server(place, family=family, backlog=BACKLOG)
        self._listener.setblocking(False)
        self.address, self.port = address, int(self._listener.getsockname()[1])
        self._secret, self._values = secret, dict[str, bytes]()
        self._bytes = 0  # total size of all keys and values
        self._peers: dict[_Peer, _Peer] = {}
        self._strangers: dict[_Peer, _Peer] = {}  # oldest first
        # {missing key: futures of the requests that wait for this key}
        self._waits: dict[str, set[asyncio.Future[None]]] = {}
        self._room = descriptors() - KEPT_BACK
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="store")
        self._thread.start()

    def close(self) -> None:
        """Ends the store and closes all connections."""
        with contextlib.suppress(RuntimeError):  # the store is already closed
            self._loop.call_soon_threadsafe(self._closing.set)
        # Garbage collection may call `close` in the store's thread, which cannot join itself.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        """Serves requests until `close` is called."""
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        accepting = self._loop.create_task(self._accept())
        await self._closing.wait()
        accepting.cancel()
        self._listener.close()
        for peer in [*self._peers]:
            peer.drop()
        while self._peers:
            await asyncio.sleep(0)  # run the event loop once, so that the dropped connections close their sockets

    async def _accept(self) -> None:
        """Accepts connections as long as the limits on strangers (connections without a proof of the secret) and on
        file descriptors allow it.
        """
        while True:
            oldest = next(iter(self._strangers), None)
            if len(self._strangers) >= MAX_STRANGERS or len(self._peers) >= self._room:
                if oldest is None or time.monotonic() - oldest.since <= MERCY_S:
                    await asyncio.sleep(PAUSE_S)
                else:
                    oldest.drop()
                    await asyncio.sleep(0)  # run the event loop once, so that the connection closes its socket
                continue
            try:
                connection, _ = await self._loop.sock_accept(self._listener)
            except OSError:  # the process has no file descriptor left, or the client has already disconnected
                if oldest is not None:
                    oldest.drop()
                await asyncio.sleep(PAUSE_S)
                continue
            with contextlib.suppress(OSError):  # the client has already disconnected
                configure(connection)
            await self._loop.connect_accepted_socket(lambda: _Peer(self), connection)

    def admit(self, peer: _Peer) -> None:
        """Registers a new connection as a stranger (a connection that has not proved yet that it knows the secret)."""
        self._peers[peer] = self._strangers[peer] = peer

    def greet(self, peer: _Peer, nonce: bytes, signature: bytes) -> bytes:
        """Checks the signature of a client and returns the signature of the store.

        Raises WireError if the client does not know the secret.
        """
        if not hmac.compare_digest(signature, store_wire_format.client_signature(self._secret, peer.nonce, nonce)):
            raise WireError("a stranger")
        del self._strangers[peer]
        nonces = peer.nonce + nonce
        peer.up, peer.down = Seal(self._secret, b"up", nonces), Seal(self._secret, b"down", nonces)
        return store_wire_format.store_signature(self._secret, peer.nonce, nonce)

    def forget(self, peer: _Peer) -> None:
        """Removes a connection that has ended from the registered connections."""
        self._peers.pop(peer, None)
        self._strangers.pop(peer, None)

    async def answer(self, request: Sequence[bytes]) -> list[bytes]:
        """Returns the response to a request. A GET or WAIT request is answered when its keys exist or its timeout is
        over.
        """
        try:
            verb, arguments = Verb(request[0][0]), request[1:]
            if verb not in (Verb.GET, Verb.WAIT):
                return [bytes([Reply.DONE]), *self._at_once(verb, arguments)]
            seconds, keys = min(int(arguments[0]), LONGEST_MS) / 1000, [key.decode() for key in arguments[1:]]
            try:
                async with asyncio.timeout(seconds):
                    await self._wait(keys)
            except TimeoutError:
                return [bytes([Reply.LATE])]
            return [bytes([Reply.DONE]), *(self._values.get(key, b"") for key in keys if verb is Verb.GET)]
        except (IndexError, ValueError) as error:  # the client is from another version of this package, or has a bug
            return [bytes([Reply.REFUSED]), f"{type(error).__name__}: {error}".encode()]

    async def _wait(self, keys: Sequence[str]) -> None:
        """Waits until each of the keys exists, one key after another."""
        for key in keys:
            while key not in self._values:
                came = self._loop.create_future()
                waiting = self._waits.setdefault(key, set())
                waiting.add(came)
                try:
                    await came
                finally:
                    waiting.discard(came)
                    if not waiting and self._waits.get(key) is waiting:
                        del self._waits[key]

    def _at_once(self, verb: Verb, arguments: Sequence[bytes]) -> list[bytes]:
        """Executes a request that needs no waiting, which is any request except GET and WAIT. Returns the byte strings
        of the response.
        """
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
        # the remaining verb is COMPARE_SET; it has the same semantics as compare_set of torch's stores
        expected, desired = arguments[1:]
        if values.get(key, b"") == expected:
            self._set(key, desired)
        return [values.get(key, expected)]

    def _set(self, key: str, value: bytes) -> None:
        """Stores a value and wakes the requests that wait for its key. Raises ValueError when the store is full."""
        self._refuse_too_much(len(key) + len(value) - self._size(key))
        self._remove(key)
        self._values[key] = value
        self._bytes += len(key) + len(value)
        for came in self._waits.pop(key, ()):
            if not came.done():
                came.set_result(None)

    def _refuse_too_much(self, size: int) -> None:
        """Raises ValueError if `size` further bytes would exceed the limit MAX_BYTES of the store."""
        if self._bytes + size > MAX_BYTES:
            raise ValueError(
                f"the key-value store holds {self._bytes} bytes, and {size} more are above its limit of {MAX_BYTES}"
            )

    def _remove(self, key: str) -> bool:
        """Removes a key and its value. Returns whether the key existed."""
        self._bytes -= self._size(key)
        return self._values.pop(key, None) is not None

    def _size(self, key: str) -> int:
        """Returns the size of a key and its value in bytes, or 0 if the key does not exist."""
        return len(key) + len(self._values[key]) if key in self._values else 0


class _Peer(asyncio.Protocol):
    """One connection of the store to a client.

    `up` (frames from the client) and `down` (frames to the client) are None until the client has proved that it knows
    the secret.
    """

    def __init__(self, server: KeyValueServer) -> None:
        self._server, self.since = server, time.monotonic()
        self.nonce, self.inbox = secrets.token_bytes(store_wire_format.NONCE_BYTES), bytearray()
        self.up: Seal | None = None
        self.down: Seal | None = None
        self._work: asyncio.Task[None] | None = None  # task that answers the current request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._late = asyncio.get_running_loop().call_later(STRANGER_S, self.drop)
        self._server.admit(self)
        transport.write(store_wire_format.HELLO + self.nonce)

    def connection_lost(self, exc: Exception | None) -> None:
        self.drop()
        self._server.forget(self)

    def data_received(self, data: bytes) -> None:
        self.inbox += data
        try:
            if self.up is None and len(self.inbox) >= store_wire_format.ANSWER_BYTES:
                proof = bytes(self.inbox[: store_wire_format.ANSWER_BYTES])
                del self.inbox[: store_wire_format.ANSWER_BYTES]
                nonce, signature = proof[: store_wire_format.NONCE_BYTES], proof[store_wire_format.NONCE_BYTES :]
                self._transport.write(self._server.greet(self, nonce, signature))
                self._late.cancel()
            if (request := self._request()) is not None:
                self._work = asyncio.get_running_loop().create_task(self._answer(request))
        except WireError:
            self.drop()

    def drop(self) -> None:
        """Closes the connection and cancels its current request."""
        self._late.cancel()
        if self._work is not None:
            self._work.cancel()
        self._transport.abort()

    def _request(self) -> list[bytes] | None:
        """Removes the next request from the inbox and returns it. Returns None if no complete request has arrived.

        Raises WireError for a frame that is too long or has a wrong authentication tag, and for a request that arrives
        while another is being answered.
        """
        if self.up is None or len(self.inbox) < store_wire_format.HEAD.size:
            return None
        length, tag = store_wire_format.HEAD.unpack_from(self.inbox)
        end = store_wire_format.HEAD.size + length
        if length > store_wire_format.MAX_BODY or self._work is not None:
            raise WireError("a frame is too long, or comes while another is worked on")
        if len(self.inbox) < end:
            return None
        body = bytes(self.inbox[store_wire_format.HEAD.size : end])
        del self.inbox[:end]
        return self.up.open(tag, body)

    async def _answer(self, request: list[bytes]) -> None:
        """Sends the response to a request. Disconnects a client that does not read its responses."""
        answer = await self._server.answer(request)
        assert self.down is not None
        self._work = None
        try:
            self._transport.write(self.down.frame(answer))
        except WireError:
            self.drop()
        if self._transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self.drop()


def configure(connection: socket.socket) -> None:
    """Sets the socket options of a connection: no send delay (TCP_NODELAY), and keepalive probes when idle."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)


def descriptors() -> int:
    """Increases this process's limit of open file descriptors as far as allowed, up to 65,536. Returns the new limit.

    A rank, or a store with two thousand clients, needs more than the 1,024 that are the default on many systems.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            soft = limit
    return 1 << 16 if soft == resource.RLIM_INFINITY else soft
