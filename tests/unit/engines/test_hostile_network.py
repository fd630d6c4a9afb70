"""Strangers at the ports of a run, and servers that drip, flood and lie."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fake_vllm import FakeVllm
from limits import PROCESS_S

from megatron_rl.cluster.host_address import address_of_first_rank
from megatron_rl.cluster.rendezvous import MeetingError, meet, read_private, write_private
from megatron_rl.config.schema import ConfigError, RefitConfig
from megatron_rl.engines import response_parsing
from megatron_rl.engines.http import Http, ServerLost
from megatron_rl.engines.kind import ModelFacts
from megatron_rl.engines.pool.membership import Limits
from megatron_rl.engines.pool.server_pool import given
from megatron_rl.engines.protocol import Sampling, complete
from megatron_rl.engines.vllm.client import VllmServer
from megatron_rl.engines.vllm.settings import Vllm
from megatron_rl.key_value_store import store_client as store_client
from megatron_rl.key_value_store import store_server as store_server
from megatron_rl.key_value_store import store_wire_format
from megatron_rl.key_value_store.store_client import KeyValueClient, KeyValueError, KeyValueStranger, KeyValueTimeout
from megatron_rl.key_value_store.store_server import KeyValueServer
from megatron_rl.lib.frames import CodecError
from megatron_rl.messages.message_codec import pack, unpack
from megatron_rl.refit import tcp_transport
from megatron_rl.refit.refit_store import RefitStore
from megatron_rl.refit.transport import Deadline

SECRET = b"s" * 32
SHORT = timedelta(seconds=2)


@pytest.fixture
def store():
    server = KeyValueServer("127.0.0.1", SECRET)
    yield server
    server.close()


def joined(server: KeyValueServer) -> KeyValueClient:
    return KeyValueClient("127.0.0.1", server.port, SECRET, 10.0)


def until(what, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


def closed(connection: socket.socket) -> bool:
    """Says whether the other side ends the connection within some seconds, whatever it sends before."""
    connection.settimeout(10.0)
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def test_security_a_store_gives_strangers_nothing(store):
    """The ranks' store took anybody who reached its port for a rank."""
    own = joined(store)
    own.set({"nccl id": b"1"})
    with pytest.raises(KeyValueStranger, match="another secret"):
        KeyValueClient("127.0.0.1", store.port, b"guessed", 10.0)
    for said in (b"GET / HTTP/1.1\r\n\r\n" + bytes(100), bytes(10**6), b"\xce\xf7\x85<" * 50):
        with socket.create_connection(("127.0.0.1", store.port)) as stranger:
            stranger.settimeout(10.0)
            try:
                stranger.sendall(said)
            except ConnectionError:
                continue
            assert closed(stranger)
    with pytest.raises((RuntimeError, ValueError)):
        dist.TCPStore("127.0.0.1", store.port, None, False, timedelta(seconds=1)).set("nccl id", "2")
    assert own.get(["nccl id"], 0.0) == [b"1"] and own.num_keys() == 1


def test_security_what_does_not_know_the_secret_is_no_store():
    """Who listens at the port in rank 0's place learns nothing and is believed nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def play() -> None:
            made, _ = listening.accept()
            with made:
                made.sendall(store_wire_format.HELLO + bytes(32))
                made.recv(64)
                made.sendall(bytes(32))
                made.recv(1)

        thread = threading.Thread(target=play, daemon=True)
        thread.start()
        with pytest.raises(KeyValueStranger, match="does not know this run's secret"):
            KeyValueClient("127.0.0.1", listening.getsockname()[1], SECRET, 5.0)
        thread.join()


def test_hostile_listener_that_drips_does_not_hold_a_client(monkeypatch):
    monkeypatch.setattr(store_client, "GREETING_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        stop = threading.Event()

        def play() -> None:
            made, _ = listening.accept()
            with made:
                while not stop.wait(0.02):
                    try:
                        made.sendall(b"m")
                    except OSError:
                        return

        thread = threading.Thread(target=play, daemon=True)
        thread.start()
        start = time.monotonic()
        with pytest.raises(KeyValueError, match="no answer in time|timed out"):
            KeyValueClient("127.0.0.1", listening.getsockname()[1], SECRET, 0.1)
        assert time.monotonic() - start < 5.0
        stop.set()
        thread.join()


def test_security_recorded_frames_do_not_count_again(store):
    """An old signed `next` could be put on the refit store a second time."""
    said = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as between:

        def relay() -> None:
            made, _ = between.accept()
            with made, socket.create_connection(("127.0.0.1", store.port)) as on:
                back = threading.Thread(target=pump, args=(on, made, bytearray()), daemon=True)
                back.start()
                pump(made, on, said)

        def pump(source: socket.socket, target: socket.socket, kept: bytearray) -> None:
            try:
                while came := source.recv(4096):
                    kept.extend(came)
                    target.sendall(came)
            except OSError:
                return

        thread = threading.Thread(target=relay, daemon=True)
        thread.start()
        recorded = KeyValueClient("127.0.0.1", between.getsockname()[1], SECRET, 10.0)
        recorded.set({"next": b"1"})
        recorded.close()
        thread.join(10.0)
    own = joined(store)
    own.set({"next": b"2"})
    with socket.create_connection(("127.0.0.1", store.port)) as stranger:
        stranger.sendall(said)
        assert closed(stranger)
    seal = store_wire_format.Seal(SECRET, b"up", bytes(64))
    tag, body = (frame := seal.frame([b"\x01", b"next", b"3"]))[4:20], frame[20:]
    reader = store_wire_format.Seal(SECRET, b"up", bytes(64))
    assert reader.open(tag, body)
    with pytest.raises(store_wire_format.WireError, match="wrong tag"):
        reader.open(tag, body)  # the same frame again, in the same connection
    assert own.get(["next"], 0.0) == [b"2"]


def test_hostile_silent_connections_leave_room_for_those_who_know_the_secret(store, monkeypatch):
    """Silent connections used up all descriptors."""
    monkeypatch.setattr(store_server, "MAX_STRANGERS", 8)
    monkeypatch.setattr(store_server, "MERCY_S", 0.05)
    monkeypatch.setattr(store_server, "STRANGER_S", 0.5)
    silent = [socket.create_connection(("127.0.0.1", store.port)) for _ in range(60)]
    until(lambda: len(store._strangers) == 8)
    own = joined(store)
    own.set({"a": b"1"})
    assert own.check(["a"]) and len(store._peers) <= 9
    until(lambda: not store._strangers)
    assert all(closed(each) for each in silent)
    for each in silent:
        each.close()


def test_hostile_bytes_of_strangers_are_not_kept(store):
    """Puts of strangers grew the store's memory: now it reads no more than a proof has, and takes none of them."""
    strangers = [socket.create_connection(("127.0.0.1", store.port)) for _ in range(8)]
    for each in strangers:
        each.sendall(bytes(store_wire_format.ANSWER_BYTES - 1))
    until(lambda: sorted(len(p.inbox) for p in store._strangers.values()) == 8 * [store_wire_format.ANSWER_BYTES - 1])
    for each in strangers:
        with contextlib.suppress(ConnectionError):
            each.sendall(bytes(1 << 20))
    assert all(closed(each) for each in strangers)
    until(lambda: not store._peers)
    assert joined(store).num_keys() == 0
    for each in strangers:
        each.close()


KEPT_BACK = """
import os, resource, socket, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
from megatron_rl.key_value_store.store_server import KeyValueServer
server = KeyValueServer("127.0.0.1", b"s" * 32)
print(server.port, flush=True)
sys.stdin.readline()
files = [open(os.devnull) for _ in range(200)]  # a checkpoint
print(len(server._peers), flush=True)
"""


def test_hostile_connections_leave_descriptors_for_a_checkpoint():
    pipe = subprocess.PIPE
    child = subprocess.Popen([sys.executable, "-c", KEPT_BACK], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert child.stdin and child.stdout
    port = int(child.stdout.readline())
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(150)]
    time.sleep(0.2)
    out, errors = child.communicate("\n", timeout=PROCESS_S)
    assert 0 < int(out) <= 300 - store_server.KEPT_BACK, errors
    for each in silent:
        each.close()


def test_store_waits_are_answered_when_a_key_comes_and_end_with_their_time(store):
    one, other = joined(store), joined(store)
    found: list[bytes] = []
    waiting = threading.Thread(target=lambda: found.extend(one.get(["x", "y"], 10.0)))
    waiting.start()
    until(lambda: store._waits)
    assert not one.check(["x"]), "a request that waits holds no other thread of the same client up"
    other.set({"x": b"1"})
    other.set({"y": b"2"})
    waiting.join()
    assert found == [b"1", b"2"] and not store._waits
    with pytest.raises(KeyValueTimeout):
        one.wait(["z"], 0.05)
    until(lambda: not store._waits)


def test_security_ranks_meet_by_a_file_that_nobody_else_reads(tmp_path):
    file = tmp_path / "run" / "ranks.1.json"
    write_private(file, {"address": "127.0.0.1", "port": 9, "secret": "00"})  # of a start that was killed
    first = meet(file, rank=0, address="127.0.0.1", timeout=SHORT)
    assert file.stat().st_mode & 0o777 == 0o600 and os.listdir(file.parent) == [file.name]
    other = meet(file, rank=1, address="not used", timeout=SHORT)
    first.set("a", "1")
    assert other.get("a") == b"1"
    file.chmod(0o644)
    with pytest.raises(MeetingError, match=r"can be read by other users \(mode 644\)"):
        meet(file, rank=1, address="", timeout=SHORT)
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MeetingError, match="cannot be read"):
        meet(file, rank=1, address="", timeout=SHORT)
    if os.geteuid() == 0:
        file.unlink()
        write_private(file, {})
        os.chown(file, 4242, 4242)
        with pytest.raises(MeetingError, match="belongs to user 4242"):
            read_private(file)


def test_security_a_rank_waits_for_a_store_that_knows_the_secret_of_the_file(tmp_path):
    file, stranger = tmp_path / "ranks.1.json", KeyValueServer("127.0.0.1", b"another run's")
    write_private(file, {"address": "127.0.0.1", "port": stranger.port, "secret": SECRET.hex()})
    with pytest.raises(MeetingError, match="another secret"):
        meet(file, rank=1, address="", timeout=timedelta(seconds=0.1))
    stranger.close()


def test_security_rank_0_listens_at_the_address_of_the_job_alone(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="there is no such host"):
        address_of_first_rank("no-such-host.invalid", {})
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    assert address_of_first_rank("node17", {"GLOO_SOCKET_IFNAME": "lo"}) == "127.0.0.1"  # lo's own, as it was told
    assert address_of_first_rank("localhost", {}) == "127.0.1.1"
    store = meet(tmp_path / "ranks.json", rank=0, address="127.0.0.2", timeout=SHORT)
    port = json.loads((tmp_path / "ranks.json").read_text())["port"]
    sockets = pytest.importorskip("psutil").Process().net_connections("inet")  # others may listen at the port, too
    assert {each.laddr.ip for each in sockets if each.status == "LISTEN" and each.laddr.port == port} == {"127.0.0.2"}
    store.set("a", "1")


class Planted:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch /tmp/megatron_rl_unpickled",)


def test_security_nothing_between_ranks_is_unpickled():
    with pytest.raises(CodecError):
        unpack(pickle.dumps(Planted()))
    with pytest.raises(TypeError, match="a test_hostile_network.Planted does not travel"):
        pack({"a": [Planted()]})
    shared = np.arange(6, dtype=np.int32).reshape(2, 3)
    value = {1: (shared, [shared, None, 0.1, "ü\ud800"]), "s": Sampling(max_tokens=3, stop_strings=("a",)), "b": b"\0"}
    back = unpack(pack(value))
    assert back[1][0] is back[1][1][0] and back[1][0].tolist() == shared.tolist() and back[1][0].flags.writeable
    assert back["s"] == value["s"] and back["b"] == b"\0" and back[1][1][1:] == [None, 0.1, "ü\ud800"]
    assert type(unpack(pack(np.float32(0.1)))) is np.float32


class Raw:
    """A server that answers every connection with what `play` sends."""

    def __init__(self, play) -> None:
        self._listening, self._play, self.sent = socket.create_server(("127.0.0.1", 0)), play, 0
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                made, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._one, args=(made,), daemon=True).start()

    def _one(self, made: socket.socket) -> None:
        with made:
            try:
                made.recv(65536)
                for data in self._play():
                    made.sendall(data)
                    self.sent += len(data)
            except OSError:
                return

    def close(self) -> None:
        self._listening.close()


def dripping(head: bytes):
    """Sends the head, and then a byte every now and then, for ever."""

    def play():
        yield head
        while True:
            time.sleep(0.02)
            yield b" "

    return play


def flooding(head: bytes):
    def play():
        yield head
        for _ in range(2048):
            yield bytes(1 << 20)  # 2 GB in all

    return play


OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "head",
    [b"", b"HTTP/1.1 200", OK, OK + b"Content-Length: 100000\r\n\r\n", OK + b"\r\n[",
     OK + b"Transfer-Encoding: chunked\r\n\r\n1", b"HTTP/1.1 500 Oops\r\nContent-Length: 100000\r\n\r\n"],
)  # fmt: skip
def test_hostile_servers_that_drip_are_late_at_the_deadline(head):
    """The time-out was one for each read: a byte now and then held an iteration for ever."""
    server = Raw(dripping(head))
    start = time.monotonic()
    with pytest.raises(ServerLost):
        Http(server.url, {}).call("GET", "/server_info", timeout_s=0.3)
    assert time.monotonic() - start < 3.0
    server.close()


@pytest.mark.parametrize(
    "head",
    [OK + b"Content-Length: 2147483648\r\n\r\n", OK + b"\r\n", b"HTTP/1.1 400 No\r\n\r\n",
     OK + b"Content-Encoding: gzip\r\n\r\n"],
)  # fmt: skip
def test_hostile_servers_that_flood_are_cut(head):
    """An answer of 2 GB took 4.2 GB of memory."""
    server = Raw(flooding(head))
    with pytest.raises(ServerLost, match="more than 1000000 bytes"):
        Http(server.url, {}).call("GET", "/", timeout_s=20.0, max_bytes=10**6)
    assert server.sent < 64 << 20
    server.close()


def test_connections_are_used_again_and_each_request_has_its_own_time():
    fake = FakeVllm("token")
    server = VllmServer(fake.url, "token", Vllm(), 5, ModelFacts(vocab=97))

    async def three() -> set[int]:
        kept = set()
        for timeout_s in (0.3, 5.0, 5.0):
            await server.generate(np.array([1, 2], np.int32), Sampling(max_tokens=4), seed=1, timeout_s=timeout_s)
            [(session, _)] = server._http._sessions.values()
            kept.update(id(connection) for [(connection, _)] in session.connector._conns.values())
            await asyncio.sleep(0.15)
        return kept

    assert len(asyncio.run(three())) == 1
    fake.close()


@pytest.mark.parametrize("told", [[1, 97], [-1], [1.5], [[1]], ["a"], [True], None, {}, [2**40], [1] * 9])
def test_hostile_tokens_are_refused(told):
    with pytest.raises(response_parsing.AnswerError):
        response_parsing.read_tokens(told, 97, 8)


@pytest.mark.parametrize("told", [[float("nan"), 0], [0.1, -1], [-1], [[-1, -1]], ["a", "b"], None, [None, -1]])
def test_hostile_logprobs_are_refused(told):
    with pytest.raises(response_parsing.AnswerError):
        response_parsing.read_logprobs(told, (2,))


def test_answers_that_make_sense_are_taken_as_they_are():
    assert response_parsing.read_tokens([0, 96], 97, 2).tolist() == [0, 96] and not len(
        response_parsing.read_tokens([], 97, 2)
    )
    assert response_parsing.read_logprobs([-1.5, 1e-4], (2,)).tolist() == np.float32([-1.5, 1e-4]).tolist()
    assert response_parsing.read_versions([(0, 3), (2, 4)], 5) == [(0, 3), (2, 4)]
    for spans in ([(1, 3)], [(0, 3), (9, 4)], [(0, 3), (3, 4), (2, 5)], [(0, "3")], [(0, -2)]):
        with pytest.raises(response_parsing.AnswerError):
            response_parsing.read_versions(spans, 5)


@pytest.mark.parametrize("vocab", [97, 8])
def test_hostile_servers_tokens_outside_the_vocabulary_are_that_servers_failure(vocab):
    """No client compared token ids with the vocabulary: such a token ended the trainer in its embedding."""
    fake = FakeVllm("token")
    server = VllmServer(fake.url, "token", Vllm(), 5, ModelFacts(vocab=vocab))
    prompt = np.array([1, 2], np.int32)
    if vocab == 97:
        assert asyncio.run(server.generate(prompt, Sampling(max_tokens=30), seed=1, timeout_s=5.0))
    else:
        with pytest.raises(ServerLost, match="the vocabulary has 0 to 7"):
            asyncio.run(server.generate(prompt, Sampling(max_tokens=30), seed=1, timeout_s=5.0))
        with pytest.raises(ServerLost, match="the vocabulary has 0 to 7"):
            asyncio.run(server.score([np.arange(1, 8, dtype=np.int32)], 3, timeout_s=5.0))
    fake.close()


def test_hostile_answers_of_one_replica_are_asked_of_another():
    """Prompts that a lying replica answered got their answers from the other one, each exactly once."""
    fakes = [FakeVllm("token", vocab=97), FakeVllm("token", vocab=40_000)]  # the second writes tokens that are none
    servers = [VllmServer(fake.url, "token", Vllm(), 5, ModelFacts(vocab=97)) for fake in fakes]
    engine = given("judge", servers, Limits(servers=2, at_once=4, attempts=5, request_timeout_s=5.0))
    found = complete(engine, [[1, 2, i] for i in range(6)], Sampling(max_tokens=20, n=2))
    assert [len(group) for group in found] == [2] * 6
    assert all((completion.tokens < 97).all() for group in found for completion in group)
    for fake in fakes:
        fake.close()


def test_hostile_silent_callers_of_a_refit_make_room_for_a_peer(monkeypatch):
    """Each silent connection had a thread and a descriptor, without limit."""
    monkeypatch.setattr(tcp_transport, "MAX_CALLERS", 8)
    monkeypatch.setattr(tcp_transport, "MERCY_S", 0.05)
    store, _ = RefitStore.host("127.0.0.1")
    receiver, sender = (tcp_transport.Tcp(store, rank, RefitConfig()) for rank in (0, 1))
    host, port, _ = store.peek("0", tuple[str, int, str])
    silent = [socket.create_connection((host, port)) for _ in range(40)]
    until(lambda: len(receiver._callers) == 8)
    message = torch.arange(8, dtype=torch.uint8)
    coming = receiver.receive(1, "a bucket", 8, torch.device("cpu"))
    sender.send(0, "a bucket", message)
    assert coming.wait(Deadline.start(20.0, 20.0)).equal(message) and len(receiver._callers) <= 8
    for each in silent:
        each.close()
    for end in (receiver, sender):
        end.close()


@pytest.mark.parametrize("chunk", [b"-5\r\n", b"x\r\n", b"ffffffffffffffff\r\n[", b"5\r\n[1,2]-5\r\n"])
def test_hostile_chunks_are_that_servers_failure(chunk):
    """A chunk of -5 bytes was a ValueError, which ended the run."""

    def play():
        yield OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunk

    server = Raw(play)
    with pytest.raises(ServerLost):
        Http(server.url, {}).call("GET", "/", timeout_s=5.0)
    server.close()
