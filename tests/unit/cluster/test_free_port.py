"""A port for a process that is started next."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from megatron_rl.cluster import host_address
from megatron_rl.config.schema import ConfigError


def test_a_free_port_is_none_that_an_outgoing_connection_may_take():
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = {host_address.free_port("127.0.0.1") for _ in range(20)}
    assert len(ports) > 10
    assert all(port < first for port in ports)


def test_a_free_port_where_outgoing_connections_may_take_all(monkeypatch):
    monkeypatch.setattr(host_address, "first_outgoing_port", lambda: 1024)
    assert 0 < host_address.free_port("127.0.0.1") < 65536


def test_a_port_that_somebody_listens_on_is_not_free(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr(host_address, "PORTS", (port, port + 1))
        monkeypatch.setattr(host_address, "first_outgoing_port", lambda: port + 1)
        assert host_address.free_port("127.0.0.1") != port


def test_a_host_that_is_another_machines_has_no_free_port():
    with pytest.raises(ConfigError, match=r"engine.host = 192.0.2.1: this machine cannot listen there"):
        host_address.free_port("192.0.2.1")
