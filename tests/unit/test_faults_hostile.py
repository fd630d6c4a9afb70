"""Faults that hostile neighbours found: other users of a machine and of a group, and servers that lie."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from dataclasses import asdict

import pytest
from test_engines_pool import listing
from test_environments_verifiers import Asker

from megatron_rl.board import server as board_server
from megatron_rl.board.client import BoardClient, BoardError
from megatron_rl.board.server import BoardServer
from megatron_rl.engines import answers
from megatron_rl.engines.guard import TOKEN_FILE, Guard
from megatron_rl.engines.launch import make_token
from megatron_rl.engines.roster import Roster
from megatron_rl.environments import token_route
from megatron_rl.environments.token_route import MODELS, TokenRoute

STRANGER = 12345  # the number of another user


def test_faults_silent_connections_do_not_stop_the_token_route():
    """Connections that never show the token took all descriptors of the driver."""
    route = TokenRoute()
    with contextlib.ExitStack() as stack:
        stack.callback(route.close)
        address = ("127.0.0.1", int(route.url.rpartition(":")[2]))
        own = Asker(route)
        assert own("GET", MODELS)[0] == 200
        silent = [stack.enter_context(socket.create_connection(address, 10)) for _ in range(200)]
        assert silent[0].recv(1) == b"", "the oldest one is closed"
        assert len(route._server._strangers) <= token_route.MOST_STRANGERS
        assert own("GET", MODELS)[0] == 200, "a connection that showed the token stays open"
        assert Asker(route)("GET", MODELS)[0] == 200


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_faults_files_that_a_member_of_the_group_planted_are_not_taken(tmp_path, monkeypatch):
    """A directory that the group may write to: a token and a listing of another user chose which servers are asked."""
    token, roster = tmp_path / "token", Roster(tmp_path)
    token.write_text("planted")
    (tmp_path / "generator-7.json").write_text(json.dumps(asdict(listing(replica=7))))
    own = listing(replica=1)
    roster.write(own)
    for planted in (token, tmp_path / "generator-7.json"):
        os.chown(planted, STRANGER, -1)
    assert roster.read(own.role) == [own]
    assert [each.replica for each in Roster(tmp_path, 0, STRANGER).all()] == [1, 7], "status of another user's run"
    monkeypatch.setenv(TOKEN_FILE, str(token))
    for take in (lambda: make_token(token), lambda: Guard(None)):
        with pytest.raises(PermissionError, match=f"belongs to user {STRANGER}"):
            take()


def test_faults_a_client_cannot_fill_the_memory_of_a_board(monkeypatch):
    """An engine knows its board's secret: it could store values without end, or ask and never read the answers."""
    monkeypatch.setattr(board_server, "MAX_BYTES", 1 << 20)
    server = BoardServer("127.0.0.1", b"s" * 32)
    try:
        client = BoardClient("127.0.0.1", server.port, b"s" * 32, 10.0)
        client.set({"a": b"x" * (1 << 19)})
        with pytest.raises(BoardError, match="above its limit of 1048576"):
            client.set({"b": b"x" * (1 << 19), "c": b"x"})
        assert client.check(["a"]) and not client.check(["b"])
        client.remove("a")
        client.set({"b": b"x" * (1 << 19)})
        for _ in range(3):  # a value that is written over counts once
            client.set({"b": b"y" * (1 << 19)})
        with pytest.raises(BoardError):
            client.append("b", b"x" * (1 << 19))
    finally:
        server.close()


def test_faults_versions_of_a_completion_go_up():
    assert answers.read_versions([(0, 3), (2, 3), (3, 4)], 5) == [(0, 3), (2, 3), (3, 4)]
    for spans in ([(0, 4), (2, 3)], [(0, -2)], [(0, 2.0)]):
        with pytest.raises(answers.AnswerError):
            answers.read_versions(spans, 5)
