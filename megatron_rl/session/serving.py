"""`megatron-rl serve`: starts one server of a run's rollouts, announces it, and starts it again when it dies."""

from __future__ import annotations

import functools
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megatron_rl.cluster.address import free_port, own_address
from megatron_rl.cluster.job import job_from
from megatron_rl.cluster.slices import over
from megatron_rl.config.schema import ConfigError, Embedded, Servers
from megatron_rl.engines import own_families
from megatron_rl.engines.kind import ServerStart, kind_of
from megatron_rl.engines.launch import ServerProcess, StartError, make_token
from megatron_rl.engines.roster import Announcement, Listing, Roster
from megatron_rl.engines.server_log import newest_error
from megatron_rl.session.damage import refuse_damaged_models
from megatron_rl.session.launch import has_gpu
from megatron_rl.session.orders import Orders
from megatron_rl.session.restarts import Restarts
from megatron_rl.session.servers import ENGINES, TOKEN, connect
from megatron_rl.spec import server_gpus
from megatron_rl.spec.run_spec import EngineSpec

POLL_S = 0.5
OVER_S = 2.0  # between two looks whether the run is over
HUNG = 8  # times engine.lost_after_s without an answer: a server that will not mend by itself


def run(
    engines: EngineSpec, *, role: str, replica: int, with_parent: bool, environment: Mapping[str, str],
    gpus: Sequence[int] = (),
) -> int:  # fmt: skip
    """Returns 0 when it was asked to leave, 1 when the server died too often. `gpus`: those of this host that the
    server takes; none: those that engine.gpus has for it.

    Raises ConfigError, also for damaged weights; StartError when the last start failed.
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
    if not with_parent:  # else the run that starts this has looked
        refuse_damaged_models([engines.roles[role]])
    settings = replace(settings, host=own_address(settings.host))
    own = visible_gpus(gpus, environment) if gpus else _gpus(engines, settings, role, replica, environment)
    server = _Serving(engines, settings, role, replica, kind_of(settings).interpreter(settings), {**environment, **own})
    stop = _asked_to_leave(with_parent, functools.partial(over, engines.directory))
    if with_parent:
        server.orders = Orders(stop)
        server.orders.listen(sys.stdin.fileno())  # not by sys.stdin, whose lock that thread would hold at the end
    return _keep_alive(server, settings, stop, f"{role}-{replica}")


def _keep_alive(server: _Serving, settings: Servers, stop: threading.Event, name: str) -> int:
    """Runs a server again and again. Returns 0 when it was asked to leave, 1 when the server died too often in a row.

    Raises StartError when the last one of these deaths was a failed start.
    """
    restarts = Restarts(settings.restarts, wait_s=settings.restart_wait_s, reset_s=settings.restart_reset_s)
    while True:
        failure: StartError | None = None
        healthy_s = 0.0
        try:
            healthy_s = server.serve(stop)
        except StartError as error:
            failure = error
        except OSError as error:  # a disk that is full now may have room at the next start
            failure = StartError(f"{name} could not be started: {error}")
        if stop.is_set():
            return 0
        wait_s = restarts.died(healthy_s)
        if wait_s is None:
            break
        if failure is not None:
            print(failure, file=sys.stderr, flush=True)
        when = f" in {wait_s:g} s" if wait_s else ""
        said = f"{name} ended; starting it again{when} ({restarts.deaths} of {settings.restarts})"
        print(said, file=sys.stderr, flush=True)
        if stop.wait(wait_s):
            return 0
    if failure is not None:
        raise failure
    print(
        f"{name} died {restarts.deaths} times in a row (engine.restarts = {settings.restarts}; the count begins anew "
        f"when it has answered for engine.restart_reset_s = {settings.restart_reset_s:g} s): see {server.log}"
        f"{newest_error([server.log])}",
        file=sys.stderr,
    )
    return 1


class _Serving:
    """One replica, over its restarts."""

    def __init__(
        self, engines: EngineSpec, settings: Servers, role: str, replica: int, python: str,
        environment: Mapping[str, str],
    ) -> None:  # fmt: skip
        self._engines, self._settings, self._role, self._replica, self._python = (
            engines,
            settings,
            role,
            replica,
            python,
        )
        directory = engines.directory.resolve()  # the log's name is read elsewhere
        self._roster, self._token_file = Roster(directory / ENGINES), directory / ENGINES / TOKEN
        self._imports = directory / ENGINES / "imports"
        self.log = directory / "logs" / f"engine_{role}_{replica}.log"
        self._model = _directory_of(f"roles.{role}.model.path", engines.roles[role].model.path)
        families = own_families.variables(engines.families)
        self._environment = {**environment, **families}
        self._job = job_from(environment)
        self.orders = Orders(threading.Event())  # nobody gives any, unless `run` listens to them

    def serve(self, stop: threading.Event) -> float:
        """Runs the server from its start to its end, or until `stop`, or until it has not answered for long.

        Returns the seconds from its first answer to its last one. Raises StartError.
        """
        with self.orders.start():
            return 0.0 if stop.is_set() else self._serve(stop)

    def _serve(self, stop: threading.Event) -> float:
        settings = self._settings
        token, port = make_token(self._token_file), free_port(settings.host)
        words = kind_of(settings).command(settings, self._start(port))
        url = f"http://{settings.host}:{port}"
        job, node = ("", "") if self._job is None else (self._job.id, self._job.node)
        listing = Listing(
            role=self._role,
            replica=self._replica,
            url=url,
            incarnation=uuid.uuid4().hex,
            log=str(self.log),
            node=node,
            job=job,
        )
        client = connect(settings, token, self._engines.refit.timeout_s)(listing)
        process = ServerProcess(words, self.log, self._environment, imports=self._imports)
        try:
            if not process.wait_until(client.ready, settings.start_timeout_s, stop.is_set):
                return 0.0
            print(f"{listing.name} serves at {url}", flush=True)
            begin = time.monotonic()
            with Announcement(
                self._roster, listing, alive=lambda: process.ended() is None and client.ready()
            ) as announced:
                self.orders.serves(listing.incarnation)
                while process.ended() is None and not stop.wait(POLL_S):
                    if announced.silent_s() > HUNG * settings.lost_after_s:
                        print(
                            f"{listing.name} lives, but has not answered for {announced.silent_s():.0f} s",
                            file=sys.stderr,
                            flush=True,
                        )
                        break
                    if self.orders.unwanted:
                        print(f"{listing.name} does not sleep, and the trainer takes its GPU: it ends", file=sys.stderr)
                        break
                return max(0.0, time.monotonic() - begin - announced.silent_s())
        finally:
            process.stop()
            client.close()

    def _start(self, port: int) -> ServerStart:
        """Returns the properties of the server that its role asks for."""
        role = self._engines.roles[self._role]
        loras = [other.lora for other in self._engines.opened.values() if other.servers == self._role]
        start = ServerStart(
            python=self._python, model=self._model, dtype=role.model.dtype, port=port, token_file=self._token_file,
            on_gpu=has_gpu(self._environment), tells_experts=role.router_replay,
            adapter_ranks=tuple(lora.rank for lora in loras if lora is not None and self._settings.serves_adapters),
        )  # fmt: skip
        if role.tandem is None:
            return start
        junior = _directory_of(f"roles.{self._role}.tandem.junior", role.tandem.junior or self._model)
        tokenizer = _directory_of(f"roles.{self._role}.model.tokenizer", role.model.tokenizer or self._model)
        return replace(start, junior=junior, tokenizer=tokenizer)


def _directory_of(setting: str, path: str | Path) -> Path:
    path = Path(path)
    if path.is_dir():
        return path.resolve()
    from megatron_rl.weights import hf  # takes seconds, and is for hub names

    try:
        return hf.local_directory(path)
    except FileNotFoundError as error:
        raise ConfigError(f"{setting}: {error}") from error


def visible_gpus(numbers: Sequence[int], environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variable by which a server sees GPUs alone that engine.gpus names; nothing where it names none.

    The numbers count the GPUs that this process sees: of CUDA_VISIBLE_DEVICES=4,5 GPU 1 is 5. Raises ConfigError for a
    number beyond these.
    """
    if not numbers:
        return {}
    seen = environment.get("CUDA_VISIBLE_DEVICES")
    names = None if seen is None else [name for name in seen.split(",") if name]
    if names is not None and max(numbers) >= len(names):
        raise ConfigError(f"engine.gpus names GPU {max(numbers)}: CUDA_VISIBLE_DEVICES = {seen} has {len(names)}")
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(n) if names is None else names[n] for n in numbers)}


def check_gpus(engines: EngineSpec, environment: Mapping[str, str]) -> None:
    """Raises ConfigError for servers that cannot have the GPUs of this host, or are to sleep where there is none."""
    if has_gpu(environment):
        server_gpus.refuse(engines, 1)
    elif isinstance(engines.settings, Servers) and engines.settings.colocate:
        raise ConfigError(
            f"engine.colocate without a GPU: the sleep mode of {engines.settings.kind}, which gives the trainer its "
            "memory back, needs CUDA; set engine.colocate to false"
        )


def _gpus(
    engines: EngineSpec, settings: Servers, role: str, replica: int, environment: Mapping[str, str]
) -> dict[str, str]:
    """engine.gpus, tp for each server, roles in order."""
    if not settings.gpus:
        return {}
    if doubled := server_gpus.doubled_gpus(settings):
        raise ConfigError(*doubled)
    first = (engines.server_roles.index(role) * settings.replicas + replica) * settings.tp
    own = settings.gpus[first : first + settings.tp]
    if len(own) < settings.tp:
        wanted = len(engines.server_roles) * settings.replicas * settings.tp
        raise ConfigError(
            f"engine.gpus = {list(settings.gpus)}: {wanted} are needed (roles x engine.replicas x engine.tp)"
        )
    return visible_gpus(own, environment)


def _asked_to_leave(with_parent: bool, over: Callable[[], bool]) -> threading.Event:
    """Set by SIGTERM, SIGINT or SIGHUP, and when the run is over; who has a parent hears that from its orders."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())

    def look() -> None:
        while not stop.wait(OVER_S):
            if over():
                stop.set()

    if not with_parent:  # else the end of its orders tells
        threading.Thread(target=look, daemon=True).start()
    return stop
