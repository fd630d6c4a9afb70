"""Finds the address at which other hosts of a job reach this host, and a free port to listen on."""

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
PORTS, TRIES = (10_000, 20_000), 100  # range of port numbers, and number of random ports that `free_port` tries
# an address reserved for documentation: nothing is sent to it, only the route to it is looked up
_NOWHERE = ("192.0.2.1", 9)


def address_among_ranks(environment: Mapping[str, str]) -> str:
    """Returns the IPv4 address at which other ranks reach this machine. It is the address of the first interface in
    GLOO_SOCKET_IFNAME. If this environment variable is not set, it is the address that `own_address` finds for "auto".
    """
    return own_address(environment.get("GLOO_SOCKET_IFNAME", AUTO).partition(",")[0])


def address_of_first_rank(host: str, environment: Mapping[str, str]) -> str:
    """Returns the IPv4 address at which rank 0 listens. `host` is the name or address in the launcher's MASTER_ADDR.

    Many systems resolve a host's own name to a loopback address (127.0.1.1), which no other host can reach. In this
    case, returns `address_among_ranks(environment)` instead. Raises ConfigError for a name that cannot be resolved.
    """
    address = _address_of_name(host)
    if address is None:
        raise ConfigError(f"MASTER_ADDR = {host}: there is no such host; export the address of the first rank's host")
    if address.startswith("127.") and host != "localhost" and not host.startswith("127."):
        return address_among_ranks(environment)
    return address


def loopback_interface() -> str | None:
    """Returns the name of the loopback interface, such as "lo", or None if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family is socket.AF_INET and a.address.startswith("127.") for a in addresses):
            return name
    return None


def own_address(host: str) -> str:
    """Resolves `host` to an IPv4 address of this machine.

    `host` is one of: an address of this machine; the name of an interface, such as "ib0"; or "auto". For "auto",
    returns the address that the host name of this machine resolves to. If the host name resolves to a loopback address,
    returns the source address of the default route instead. Raises ConfigError for a name that cannot be resolved, and
    for an interface without an address.
    """
    interfaces = {
        name: [a.address for a in addrs if a.family is socket.AF_INET] for name, addrs in psutil.net_if_addrs().items()
    }
    if host == AUTO:
        host_ip = _address_of_name(socket.gethostname())
        if host_ip is not None and not host_ip.startswith("127."):
            return host_ip
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(_NOWHERE)
            return probe.getsockname()[0]  # the address of the default route
        return host_ip or "127.0.0.1"
    if host in interfaces:
        if not interfaces[host]:
            raise ConfigError(f"interface {host} has no IPv4 address")
        return interfaces[host][0]
    address = _address_of_name(host)
    if address is None:
        listing = ", ".join(f"{name} ({addresses[0]})" for name, addresses in interfaces.items() if addresses)
        raise ConfigError(
            f"{host} is neither an address nor an interface of {socket.gethostname()}; its interfaces: {listing}"
        )
    return address


def _address_of_name(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None


def free_port(host: str) -> int:
    """Returns a currently free port at address `host`, for a process that is about to be started.

    If possible, the port is below the range that the system assigns to outgoing connections, because a port in that
    range could be taken before the process listens. Raises ConfigError if `host` is not an address of this machine.
    """
    candidates = range(*PORTS) if first_outgoing_port() >= PORTS[1] else ()
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


def first_outgoing_port() -> int:
    """Returns the lowest port that the system assigns to outgoing connections, or 0 if this port is not known."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    return 0
