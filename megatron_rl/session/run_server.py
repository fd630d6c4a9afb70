"""`megatron-rl serve`: starts one inference server of a run, registers it, and restarts it if it dies."""

from __future__ import annotations

import functools
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from megatron_rl.cluster.host_address import own_address
from megatron_rl.cluster.job_slices import over
from megatron_rl.cluster.slurm_job import job_from
from megatron_rl.config.schema import ConfigError, Embedded
from megatron_rl.engines.server import Server
from megatron_rl.engines.server_log import newest_error
from megatron_rl.engines.server_process import ServerProcess, StartError
from megatron_rl.engines.server_registry import Announcement, Listing, ServerRegistry
from megatron_rl.run.run_directory import refuse_shared
from megatron_rl.session.control_protocol import ControlChannel
from megatron_rl.session.restart_policy import Restarts
from megatron_rl.session.server_connection import ENGINES, HostServer, local_model
from megatron_rl.spec.model_gate import check_models, models_of_roles
from megatron_rl.spec.run_spec import EngineSpec

POLL_S = 0.5
OVER_S = 2.0  # interval in seconds between checks of whether the run is over
HUNG = 8  # a server without an answer for HUNG * engine.lost_after_s seconds is considered hung


def run(
    engines: EngineSpec, *, role: str, replica: int, with_parent: bool, environment: Mapping[str, str],
    gpus: Sequence[int] = (),
) -> int:  # fmt: skip
    """Runs one server and restarts it when it dies. Returns 0 if the command was asked to exit, 1 if the server died
    too often.

    `gpus`: indices of the GPUs of this host that the server uses; if empty, the server uses its GPUs in engine.gpus.
    `with_parent`: True if a parent process sends orders on standard input; the server then ends when standard input is
    closed. Raises ConfigError for invalid settings or a model that cannot be used. Raises StartError if the server died
    too often and its last start failed.
    """
    settings = engines.settings
    if isinstance(settings, Embedded):
        raise ConfigError(
            "engine.kind = 'embedded' runs inside the trainer: there is nothing to serve; set engine.kind=vllm or "
            "sglang"
        )
    if role not in engines.server_roles:
        raise ConfigError(f"--role {role}: the roles with servers are {', '.join(engines.server_roles)}")
    if not 0 <= replica < settings.replicas:
        raise ConfigError(
            f"--replica {replica}: engine.replicas = {settings.replicas}, so it is 0 to {settings.replicas - 1}"
        )
    if not with_parent:  # with a parent, the run that started this process has checked its directory and models
        refuse_shared(engines.directory)
        local_model(f"roles.{role}.model.path", engines.roles[role].model.path)
        check_models(models_of_roles([engines.roles[role]]))
    settings = replace(settings, host=own_address(settings.host))
    stop = _asked_to_leave(with_parent, functools.partial(over, engines.directory))
    orders = ControlChannel(stop)
    if with_parent:
        # Reads the file descriptor directly, because a thread that reads sys.stdin would hold its lock at exit.
        orders.listen(sys.stdin.fileno())
    server = _Serving(HostServer(engines, settings, role, replica, environment, gpus), orders)
    return _keep_alive(server, Restarts(settings.restarts), stop, f"{role}-{replica}")


def _keep_alive(server: _Serving, restarts: Restarts, stop: threading.Event, name: str) -> int:
    """Runs a server and restarts it when it dies.

    Returns 0 if `stop` was set, 1 if the server died more often in a row than `restarts` allows. Raises StartError
    instead of returning 1 if the server's last start failed.
    """
    while True:
        failure: StartError | None = None
        healthy_s = 0.0
        try:
            healthy_s = server.serve(stop)
        except StartError as error:
            failure = error
        except OSError as error:  # for example, a full disk, which may have free space again at the next start
            failure = StartError(f"{name} could not be started: {error}")
        if stop.is_set():
            return 0
        wait_s = restarts.died(healthy_s)
        if wait_s is None:
            break
        if failure is not None:
            print(failure, file=sys.stderr, flush=True)
        when = f" in {wait_s:g} s" if wait_s else ""
        said = f"{name} ended; starting it again{when} ({restarts.deaths} of {restarts.most})"
        print(said, file=sys.stderr, flush=True)
        if stop.wait(wait_s):
            return 0
    if failure is not None:
        raise failure
    print(
        f"{name} died {restarts.deaths} times in a row (engine.restarts = {restarts.most}; the count begins anew when "
        f"it has answered for {restarts.reset_s:g} s): see {server.log}{newest_error([server.log])}",
        file=sys.stderr,
    )
    return 1


class _Serving:
    """One server of a run across its restarts. `orders`: the orders of the run that started this process."""

    def __init__(self, server: HostServer, orders: ControlChannel) -> None:
        self._server, self._orders, self.log = server, orders, server.log

    def serve(self, stop: threading.Event) -> float:
        """Starts the server, and runs it until it ends, `stop` is set, or it hangs.

        Returns the seconds between the server's first and last answer. Raises StartError if the server cannot be
        started.
        """
        with self._orders.start():
            if stop.is_set():
                return 0.0
            with self._server.running(stop.is_set) as (process, client):
                return 0.0 if stop.is_set() else self._answer(process, client, stop)

    def _answer(self, process: ServerProcess, client: Server, stop: threading.Event) -> float:
        """Registers the server while it answers. Returns as `serve` does."""
        server, job = self._server, job_from(self._server.environment)
        listing = Listing(
            role=server.role, replica=server.replica, url=client.url, incarnation=uuid.uuid4().hex,
            log=str(self.log), node="" if job is None else job.node, job="" if job is None else job.id,
        )  # fmt: skip
        print(f"{listing.name} serves at {client.url}", flush=True)
        begin, registry = time.monotonic(), ServerRegistry(server.engines.directory.resolve() / ENGINES)
        with Announcement(registry, listing, alive=lambda: process.ended() is None and client.ready()) as announced:
            self._orders.serves(listing.incarnation)
            while process.ended() is None and not stop.wait(POLL_S):
                silent_s, why = announced.silent_s(), None
                if silent_s > HUNG * server.settings.lost_after_s:
                    why = f"lives, but has not answered for {silent_s:.0f} s"
                elif self._orders.unwanted:
                    why = "does not sleep, and the trainer takes its GPU: it ends"
                if why is not None:
                    print(f"{listing.name} {why}", file=sys.stderr, flush=True)
                    break
            return max(0.0, time.monotonic() - begin - announced.silent_s())


def _asked_to_leave(with_parent: bool, over: Callable[[], bool]) -> threading.Event:
    """Returns an event that is set by SIGTERM, SIGINT or SIGHUP, or when `over()` returns True.

    If `with_parent` is True, `over` is not called. The caller must then set the event when the parent process closes
    the connection on standard input."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())

    def look() -> None:
        while not stop.wait(OVER_S):
            if over():
                stop.set()

    if not with_parent:  # a parent ends the server by closing standard input, which sets `stop`
        threading.Thread(target=look, daemon=True).start()
    return stop
