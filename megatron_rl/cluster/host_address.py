"""Finds the address at which the other hosts of a job reach this one, and a port to listen on."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil

from megatron_rl.config.schema import ConfigError

AUTO = "auto"
PORTS, TRIES = (10_000, 20_000), 100  # of `free_port`
_NOWHERE = ("192.0.2.1", 9)  # a documentation address: no packet is sent, only the route is asked for


def address_among_ranks(environment: Mapping[str, str]) -> str:
    """Returns this machine's address on the interface that gloo was told to take (GLOO_SOCKET_IFNAME)."""
    return own_address(environment.get("GLOO_SOCKET_IFNAME", AUTO).partition(",")[0])


def address_of_first_rank(host: str, environment: Mapping[str, str]) -> str:
    """Returns the address at which rank 0 listens, for the host name or address that a launcher gave it.

    Many systems give a host's own name an address that no other host reaches (127.0.1.1): then it is that of
    `address_among_ranks`. Raises ConfigError for a name that nobody knows.
    """
    found = _address_of_name(host)
    if found is None:
        raise ConfigError(f"MASTER_ADDR = {host}: there is no such host; export the address of the first rank's host")
    if found.startswith("127.") and host != "localhost" and not host.startswith("127."):
        return address_among_ranks(environment)
    return found


def loopback_interface() -> str | None:
    """Returns the name of the interface that reaches this machine alone; None where there is none."""
    for name, found in psutil.net_if_addrs().items():
        if any(a.family is socket.AF_INET and a.address.startswith("127.") for a in found):
            return name
    return None


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


def free_port(host: str) -> int:
    """A port that nobody listens on now, for a process that is started next.

    It lies below the ports that the system gives to outgoing connections: one of those could be taken in the seconds
    until the process listens. Raises ConfigError for a host that is not this machine's.
    """
    candidates = range(*PORTS) if _first_outgoing_port() >= PORTS[1] else ()
    for port in [*random.SystemRandom().sample(candidates, k=min(TRIES, len(candidates))), 0]:
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if port and error.errno == errno.EADDRINUSE:
                    continue
                raise ConfigError(
                    f"engine.host = {host}: this machine cannot listen there ({error}); give an address of its own"
                ) from error
            return probe.getsockname()[1]
    raise AssertionError("the system chooses the port at the last try")


def _first_outgoing_port() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    return 0
