"""Small runs that are killed at random instants, again and again, until they have gone through; and what their samples
must have gone through. Every sample that a run asks an engine for, and every sample that its write-ahead log has, is
noted in a file of its own by each process.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import cut_runs
import forks
import numpy as np
import psutil
import pyarrow.parquet as pq
from cut_runs import TOKEN, WORDS, config, judged_iterations, role
from limits import RUN_S
from refitted_servers import RefittedVllm

from megatron_rl.cluster.host_address import free_port
from megatron_rl.engines import batched_session
from megatron_rl.engines.embedded.embedded_engine import EmbeddedEngine
from megatron_rl.engines.protocol import Completion
from megatron_rl.lib.frames import pack_parts, unpack_parts
from megatron_rl.main import main
from megatron_rl.messages.message_codec import unpack
from megatron_rl.session import run_collection
from megatron_rl.training import write_ahead
from megatron_rl.training.collector import Collector
from megatron_rl.training.iteration import Collected, Iteration
from megatron_rl.training.rollout_parquet import from_table
from megatron_rl.training.store import iteration_files, iteration_number
from megatron_rl.types import Rollout

ASKED, LOGGED = "asked", "logged"  # what a line of the notes is about
HEAD, ADDRESS = 8 + 1 + 4 + 16, 16  # bytes before the body of a record, and of the address at the begin of the body
WHO = ("driver", "rank", "all")  # who is killed; with servers also one of these
PAUSE_S = 0.06  # that an engine takes for an answer, at most
# Time for which a round of the embedded engine waits for further requests of agents. Log-probs depend, in the last bit,
# on which rows are sampled together; with the package's 10 ms this would depend on how busy the machine is.
SETTLE_S = 0.2
WITHIN_S = 0.7  # a kill comes so long after the first request of a process at the latest


def single(base: Path, name: str) -> dict[str, Any]:
    args = {"updates": 4, "group_size": 4, "template": f"{base}/plain.txt"}
    roles = {"generator": role(base, model=cut_runs.PLAYERS[0], lr=0.002)}
    return config(base, name, "megatron_rl.recipes.grpo:Grpo", roles, args=args, reward="begins_well")


def tango(base: Path, name: str) -> dict[str, Any]:
    settings = judged_iterations(base, name, role(base, model=cut_runs.PLAYERS[0], lr=0.002), {})
    settings["roles"]["generator"] = settings["roles"].pop("agent")
    del settings["recipe"]["args"]["role"]
    settings["recipe"]["args"]["generator_template"] = f"{base}/plain.txt"
    settings["recipe"]["target"] = "megatron_rl.recipes.tango:Tango"
    return settings


def agents(base: Path, name: str) -> dict[str, Any]:
    args = {
        "updates": 3, "group_size": 4, "environment": {"target": "open_centre:Counting"}, "rewards": {"letters": 1.0},
    }  # fmt: skip
    roles = {"agent": role(base, model=cut_runs.PLAYERS[0], lr=0.002)}
    return config(base, name, "megatron_rl.recipes.agents:Agents", roles, args=args)


METHODS: dict[str, Callable[[Path, str], dict[str, Any]]] = {"single": single, "tango": tango, "agents": agents}


class Noisy(RefittedVllm):
    """A server whose log-probs, and times, are others in every answer: two answers to one request are never the
    same."""

    def generate(self, frame: bytes, fault: str | None) -> bytes:
        time.sleep(random.random() * PAUSE_S)
        parts = unpack_parts(super().generate(frame, fault))
        for _, arrays in parts:
            if "logprobs" in arrays:
                noise = np.random.default_rng().random(len(arrays["logprobs"])) / 8
                arrays["logprobs"] = (arrays["logprobs"] - noise).astype(np.float32)
        return pack_parts(parts)


def serve(port: int) -> None:
    """A server as a program."""
    server = Noisy(TOKEN, port=port, vocab=len(WORDS))
    print(f"listens at {server.url}", flush=True)
    signal.pause()


class Servers:
    """Two servers of each of some roles, which may be killed, and start again at once at the same port."""

    def __init__(self, base: Path, roles: Sequence[str]) -> None:
        self._base, self._ports = base, {name: [free_port("127.0.0.1") for _ in range(2)] for name in roles}
        self._processes = {port: self._start(port) for ports in self._ports.values() for port in ports}

    def engine(self) -> dict[str, Any]:
        urls = {name: [f"http://127.0.0.1:{port}" for port in ports] for name, ports in self._ports.items()}
        more = {"replicas": 2, "wait_s": 120.0, "lost_after_s": 30.0, "token_file": f"{self._base}/token"}
        return {"kind": "vllm", "urls": urls, "start": False, **more}

    def kill(self, rng: random.Random) -> None:
        port = rng.choice(sorted(self._processes))
        self._end(port)
        self._processes[port] = self._start(port)

    def close(self) -> None:
        for port in self._processes:
            self._end(port)

    def _start(self, port: int) -> Any:
        return forks.start(self._base / f"server_{port}.log", serve, port)

    def _end(self, port: int) -> None:
        self._processes[port].kill()
        self._processes[port].join()


class Noted(write_ahead.RoleLog):
    """A role's log that notes what is asked for, and what it has once it has it."""

    notes: Path

    def known(self, key: int, tokens: np.ndarray, sampling: Any) -> tuple[bytes, dict[int, Completion]]:
        address, completions = super().known(key, tokens, sampling)
        self._note(ASKED, [(address, j) for j in range(sampling.n) if j not in completions])
        return address, completions

    def add(self, samples: Sequence[tuple[bytes, int, Completion]]) -> None:
        super().add(samples)
        self._note(LOGGED, [(address, j) for address, j, _ in samples])

    def _note(self, what: str, samples: Sequence[tuple[bytes, int]]) -> None:
        descriptor = os.open(self.notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, "".join(f"{what} {address.hex()} {j}\n" for address, j in samples).encode())
        os.close(descriptor)


def slowly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function with a pause before it and behind it."""

    def slow(*arguments: Any) -> Any:
        time.sleep(random.random() * PAUSE_S)
        answer = function(*arguments)
        time.sleep(random.random() * PAUSE_S)
        return answer

    return slow


class Killed(Collector):
    """Kills all processes of the run when the iteration `last` is trained on and its metrics are written."""

    last: int

    def take(self, iteration: Iteration, meanwhile: Callable[[], None] = lambda: None) -> Collected:
        self.taken = iteration.number
        return super().take(iteration, meanwhile)

    def trained(self) -> None:
        super().trained()
        if self.taken == self.last:
            os.killpg(0, signal.SIGKILL)


def train(words: Sequence[str], notes: str | None, last: int | None = None) -> None:
    """Runs `megatron-rl train *words` in this process, whose group has all processes of the run. `notes`: file of what
    is asked and logged; without one, nothing disturbs the run. `last`: index of the iteration after which the run is
    killed."""
    os.setsid()
    os.environ.update(forks.environment())
    os.chdir(forks.ROOT)
    mock.patch.object(batched_session, "SETTLE_S", SETTLE_S).start()
    if last is not None:
        Killed.last = last
        mock.patch.object(run_collection, "Collector", Killed).start()
    if notes is not None:
        Noted.notes = Path(notes)
        mock.patch.object(write_ahead, "RoleLog", Noted).start()
        mock.patch.object(EmbeddedEngine, "generate_rows", slowly(EmbeddedEngine.generate_rows)).start()
        grader = write_ahead.LogFile.grader
        mock.patch.object(write_ahead.LogFile, "grader", lambda self, grade: slowly(grader(self, grade))).start()
    os._exit(main(["train", *words]))


class KilledRun:
    """A run of `settings` in the directory `base`. `written`: by iteration, the samples that its log had at a kill.
    `kills`: how many there were, by who was killed."""

    def __init__(self, base: Path, settings: Mapping[str, Any]) -> None:
        self.name, self.kills, self.ended = settings["run"]["name"], Counter[str](), False
        self._base, self._config = base, base / f"{self.name}.yaml"
        self._config.write_text(json.dumps(settings))
        self.notes, self.directory = base / f"{self.name}.notes", base / "runs" / self.name
        self.written: dict[int, set[bytes]] = {}

    def finish(self, *words: str, disturbed: bool = True) -> None:
        """Runs to the end."""
        process = self._start(*words, notes=disturbed)
        process.join(RUN_S)
        assert process.exitcode == 0, self._log()
        self.ended = True

    def kill(self, who: str, rng: random.Random, servers: Servers | None, *, after: str = "") -> None:
        """Starts the run, and kills at a random instant after its first request, or its first note that begins with
        `after`. The run may have ended before."""
        process, lines_before = self._start(notes=True), len(self._lines())
        while not any(line.startswith(after) for line in self._lines()[lines_before:]) and process.exitcode is None:
            process.join(0.01)
        process.join(rng.random() * WITHIN_S)
        if process.exitcode is not None:
            assert process.exitcode == 0, self._log()
            self.ended = True
            return
        self.kills[who] += 1
        if who == "server":
            assert servers is not None
            servers.kill(rng)
            if rng.random() < 0.5:  # the run goes on with the others
                process.join(RUN_S)
                assert process.exitcode == 0, self._log()
                self.ended = True
                return
            process.join(rng.random() * WITHIN_S)
            who = "all"
        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, IndexError):  # it has just ended
            family = psutil.Process(process.pid).children(recursive=True)
            if who == "all":
                os.killpg(process.pid, signal.SIGKILL)
            else:
                command = psutil.Process(process.pid).cmdline()
                ranks = [member for member in family if member.is_running() and member.ppid() == process.pid]
                forked = sorted(
                    (member for member in ranks if "python" in member.name() and member.cmdline() == command),
                    key=lambda member: (member.create_time(), member.pid),
                )
                forked[who == "rank"].kill()
        process.join(RUN_S)
        psutil.wait_procs(family, RUN_S)
        self._look()

    def kill_between(self, iteration: int) -> None:
        """Runs until an iteration is trained, and kills all processes then, before a checkpoint of the iteration can be
        written (run.save_every is larger)."""
        process = self._start(notes=False, last=iteration)
        process.join(RUN_S)
        assert process.exitcode == -signal.SIGKILL, self._log()
        self.kills["all"] += 1

    def check(self) -> None:
        """Fails if a sample that was finished was asked for again, or written twice."""
        seen = set[str]()
        for what, sample in (line.split(" ", 1) for line in self._lines()):
            assert sample not in seen, f"{what} again: {sample}"
            if what == LOGGED:
                seen.add(sample)
        assert seen and not [*self.directory.glob("rollouts/*.ahead")]

    def check_used(self) -> None:
        """Fails if a sample that the log had at a kill is none of the rollouts of its iteration."""
        for file in iteration_files(self.directory / "rollouts"):
            number = iteration_number(file)
            trained = {r.tokens[r.start :].tobytes() + r.logprobs[r.start :].tobytes() for r in rollouts_of(file)}
            assert self.written.get(number, set()) <= trained

    def _look(self) -> None:
        """Notes the samples in the logs."""
        for path in self.directory.glob("rollouts/*.ahead"):
            completions = self.written.setdefault(int(path.stem.removeprefix("iteration_")), set())
            completions |= {
                completion.tokens.tobytes() + completion.logprobs.tobytes() for completion in completions_in(path)
            }

    def _start(self, *words: str, notes: bool, last: int | None = None) -> Any:
        log, words = self._base / f"{self.name}.log", (str(self._config), *words)
        return forks.start(log, train, words, str(self.notes) if notes else None, last)

    def _lines(self) -> list[str]:
        return self.notes.read_text().splitlines() if self.notes.exists() else []

    def _log(self) -> str:
        return (self._base / f"{self.name}.log").read_text()[-3000:]


def trained_again(home: Path, run: KilledRun, settings: dict[str, Any]) -> None:
    """Fails unless the stored iterations of a run lead to its weights."""
    replayed = {
        "engine": {"kind": "vllm", "start": False},
        "debug": {"replay": str(run.directory)},
    }  # it opens no servers
    again = KilledRun(home, settings | replayed)
    again.finish(disturbed=False)
    for name in settings["roles"]:
        files = [trained.directory / "models" / name / "model.safetensors" for trained in (run, again)]
        assert files[0].read_bytes() == files[1].read_bytes(), name


def completions_in(path: Path) -> list[Completion]:
    """Returns the samples of the whole transactions in a log, read without the code that a run reads them with."""
    data, place, completions, open_ = path.read_bytes(), 0, list[Completion](), list[Completion]()
    while place < len(data):
        length, last = struct.unpack_from("<QB", data, place) if len(data) - place >= HEAD else (len(data), 0)
        place += HEAD + length
        if place > len(data):
            break
        value = unpack(data[place - length + ADDRESS : place], write_ahead._KINDS)
        open_ += [value] if isinstance(value, Completion) else []
        completions, open_ = (completions + open_, []) if last else (completions, open_)
    return completions


def rollouts_of(file: Path) -> list[Rollout]:
    """Returns the rollouts of an iteration's file."""
    return from_table(pq.read_table(file))
