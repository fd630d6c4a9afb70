"""Finds the address at which the other hosts of a job reach this one."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import psutil

from megatron_rl.config.schema import ConfigError

AUTO = "auto"
_NOWHERE = ("192.0.2.1", 9)  # a documentation address: no packet is sent, only the route is asked for


def address_among_ranks(environment: Mapping[str, str]) -> str:
    """Returns this machine's address on the interface that gloo was told to take (GLOO_SOCKET_IFNAME)."""
    return own_address(environment.get("GLOO_SOCKET_IFNAME", AUTO).partition(",")[0])


def own_address(host: str) -> str:
    """Returns the IPv4 address of this machine that `host` stands for.

    `host` is an address of this machine, the name of one of its interfaces (ib0), or "auto": the address of its own
    name, else that of its default route. Raises ConfigError for anything else, and for an interface without an address.
    """
    interfaces = {
        name: [a.address for a in found if a.family is socket.AF_INET] for name, found in psutil.net_if_addrs().items()
    }
    if host == AUTO:
        own = _address_of_name(socket.gethostname())
        if own is not None and not own.startswith("127."):
            return own
        return _address_of_default_route() or own or "127.0.0.1"
    if host in interfaces:
        if not interfaces[host]:
            raise ConfigError(f"interface {host} has no IPv4 address")
        return interfaces[host][0]
    address = _address_of_name(host)
    if address is None:
        known = ", ".join(f"{name} ({addresses[0]})" for name, addresses in interfaces.items() if addresses)
        raise ConfigError(f"{host} is neither an address nor an interface of {socket.gethostname()}; it has {known}")
    return address


def _address_of_name(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None


def _address_of_default_route() -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_NOWHERE)
        except OSError:
            return None
        return probe.getsockname()[0]
