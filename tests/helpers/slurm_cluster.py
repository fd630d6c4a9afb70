"""A real Slurm cluster (munged, slurmctld, one slurmd per node) on this machine, for tests.

Needs no root rights, no systemd, no cgroup and no line in /etc/hosts, and writes nothing outside its directory. All
nodes are this machine: a script asks `hostname` for an address that others reach; the name n1 does not resolve, though
srun reaches it.

Processes of a cluster are found whoever their parent is: jobs carry its SLURM_CONF and their node's SLURMD_NODENAME in
the environment; slurmstepd writes its title over its environment, but stays in the directory that its node's slurmd was
started in. As a program, `slurm_cluster.py CONF` kills them all as soon as its standard input closes: the guard of a
cluster whose owner was killed.
"""

from __future__ import annotations

import atexit
import contextlib
import getpass
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil
from limits import RUN_S

COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "sinfo", "scancel")
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])  # where Debian puts daemons
PORTS = range(20000, 32000, 64)  # blocks of 64, all below the ports that the kernel gives to clients
MAX_NODES = 32
ENDED = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"}
)
LOOK_S = 0.2

CONF = """\
ClusterName={cluster}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# a requeued job starts again only after the credentials of its first start are void: 120 s without cred_expire
AuthInfo=socket={directory}/munge.sock,cred_expire=5
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/log/slurmctld.log
SlurmdLogFile={directory}/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# CPUs and memory are those written below, whatever this machine has
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,sched_min_interval=0,batch_sched_delay=0,requeue_setup_env_fail
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=10
KillWait=3
UnkillableStepTimeout=20
# how long squeue and scontrol know of a job that has ended
MinJobAge=3600
MaxArraySize=1001
GresTypes=gpu
{nodes}
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL Default=NO MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


class SlurmError(RuntimeError):
    """A daemon did not come up, a command failed, or a wait was in vain."""


class Cluster:
    """A cluster with the nodes n1 to n{nodes}, partitions batch and urgent (which preempts batch), and fake GPUs.

    The GPUs are links to /dev/null: Slurm wants character devices, and only root may make such. Several clusters on a
    machine do not meet. With SlurmdTimeout=10 it takes about half a minute until slurmctld gives up on a crashed node.
    """

    def __init__(
        self, directory: Path, *, nodes: int = 4, cpus: int = 16, gpus: int = 8, memory_mib: int = 4000
    ) -> None:
        """`directory` is made.

        Raises ValueError for more nodes than a block of ports serves or a path too long for a socket.
        """
        if not 1 <= nodes <= MAX_NODES:
            raise ValueError(f"{nodes} nodes: give 1 to {MAX_NODES}")
        self.directory = directory.absolute()
        if (
            len(str(self.directory)) > 70
        ):  # a socket's path ends at 107 characters, and slurmstepd's is /spool/n10/n10_1000.4294967291
            raise ValueError(
                f"{self.directory} is too long a path for Unix sockets: take a directory of up to 70 characters"
            )
        self.names = [f"n{i}" for i in range(1, nodes + 1)]
        self.conf = self.directory / "slurm.conf"
        self._cpus, self._gpus, self._memory_mib = cpus, gpus, memory_mib
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}  # by log name
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Cluster:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self, *, timeout_s: float = RUN_S) -> Cluster:
        """Starts all daemons and returns once every node is idle.

        Raises SlurmError with the logs' ends; then nothing is left running.
        """
        atexit.register(self.stop)
        try:
            port = self._stack.enter_context(claimed_ports(len(self.names) + 2))
            self._write_files(port)
            self._stack.enter_context(_guarded(self.conf))
            self._start_daemon("munged", self._munge_words(), self.directory)
            self._until("munged's socket", (self.directory / "munge.sock").exists, timeout_s)
            self._start_daemon("slurmctld", ["slurmctld", "-D"], self.directory)
            for name in self.names:
                self._start_slurmd(name)
            self._until("idle nodes", lambda: set(self.node_states().values()) == {"idle"}, timeout_s)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Kills every process of the cluster, those of its jobs too. May be called twice."""
        atexit.unregister(self.stop)
        kill_all(lambda: processes(self.conf))
        for daemon in self._daemons.values():
            daemon.wait()
        self._daemons.clear()
        self._stack.close()

    def environment(self) -> dict[str, str]:
        """Returns the environment for this cluster's commands: without what another Slurm left there, as in a test that
        itself runs in a job.
        """
        foreign = re.compile("(SLURM|SBATCH|SRUN|SALLOC|SQUEUE|SINFO|SCANCEL|MUNGE)")
        kept = {name: value for name, value in os.environ.items() if not foreign.match(name)}
        return kept | {"SLURM_CONF": str(self.conf), "PATH": PATH}

    def run(self, *words: str | Path, timeout_s: float = RUN_S, cwd: Path | None = None) -> str:
        """Runs one of Slurm's commands, in the cluster's directory unless `cwd` is given -> its output.

        SlurmError where it fails.
        """
        done = subprocess.run(
            list(map(str, words)),
            env=self.environment(),
            cwd=cwd or self.directory,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if done.returncode:
            raise SlurmError(
                f"{' '.join(map(str, words))} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
        return done.stdout.strip()

    def submit(self, script: str, *options: str) -> str:
        """Submits a bash script by its text -> the job's number."""
        path = self.directory / "scripts" / f"{secrets.token_hex(4)}.sbatch"
        path.write_text(f"#!/usr/bin/env bash\n{script}\n")
        return self.run("sbatch", "--parsable", *options, path)

    def states(self, job: str) -> dict[str, str]:
        """{job: state}, or of an array {job_index: state}, where those cancelled before they ran are one entry, {job:
        CANCELLED}.
        """
        listing = self.run("squeue", "--noheader", "--array", "--states=all", f"--jobs={job}", "--format=%i %T")
        return dict(line.split() for line in listing.splitlines())

    def field(self, job: str, name: str) -> str:
        """A field of a job or of one array element (12_3) in `scontrol show job`: Restarts, NodeList, Reason,
        ExitCode...
        """
        return _field(self.run("scontrol", "--oneliner", "show", "job", job), name)

    def node_states(self) -> dict[str, str]:
        """idle, mixed, allocated, down... by node; with a star where the node does not answer."""
        return dict(
            line.split()
            for line in self.run("sinfo", "--noheader", "--Node", "--partition=batch", "--format=%N %T").splitlines()
        )

    def wait(self, job: str, states: str | Iterable[str] = ENDED, timeout_s: float = RUN_S) -> dict[str, str]:
        """Waits until the job, and of an array each element, is in one of `states` -> `states(job)`.

        SlurmError after `timeout_s`.
        """
        goals = {states} if isinstance(states, str) else set(states)
        reached: dict[str, str] = {}

        def all_there() -> bool:
            reached.clear()
            reached.update(self.states(job))
            return bool(reached) and goals.issuperset(reached.values())

        self._until(f"job {job} in {sorted(goals)}", all_there, timeout_s, show=("scontrol", "show", "job", job))
        return reached

    def crash_node(self, name: str) -> None:
        """SIGKILL to the node's slurmd, its slurmstepds and all its jobs' processes."""
        if name not in self._daemons:
            raise ValueError(
                f"{name} does not run; those that do: {[name for name in self.names if name in self._daemons]}"
            )
        kill_all(lambda: processes(self.conf, name))
        self._daemons.pop(name).wait()

    def start_node(self, name: str, timeout_s: float = RUN_S) -> None:
        """Brings a crashed node back, and waits until it takes jobs."""
        if name in self._daemons or name not in self.names:
            raise ValueError(
                f"{name} has not crashed; those that have: {[name for name in self.names if name not in self._daemons]}"
            )
        started = self._started(name)
        self._start_slurmd(name)
        ready = ("idle", "mixed", "allocated")
        self._until(
            f"{name} back", lambda: self._started(name) != started and self.node_states()[name] in ready, timeout_s
        )

    def reset(self, timeout_s: float = RUN_S) -> None:
        """Between tests: cancels every job, brings crashed nodes back, and waits until all are idle."""
        self.run("scancel", f"--user={getpass.getuser()}")
        for name in self.names:
            if name not in self._daemons:
                self._start_slurmd(name)
        self._until("idle nodes", lambda: set(self.node_states().values()) == {"idle"}, timeout_s)

    def _until(
        self, what: str, condition: Callable[[], bool], timeout_s: float, *, show: tuple[str, ...] = ("sinfo",)
    ) -> None:
        """Looks until the condition holds.

        A daemon that ends, or the time, raises SlurmError with the logs' ends and what `show` says.
        """
        end, trouble = time.monotonic() + timeout_s, ""
        while True:
            ended = {name: daemon.returncode for name, daemon in self._daemons.items() if daemon.poll() is not None}
            if ended:
                raise SlurmError(f"{what}: daemons ended, by status: {ended}\n{self._logs(list(ended))}")
            try:
                if condition():
                    return
            except SlurmError as error:  # slurmctld does not answer while it starts
                trouble = str(error)
            if time.monotonic() > end:
                with contextlib.suppress(SlurmError):
                    trouble += self.run(*show)
                raise SlurmError(f"{what}: not within {timeout_s} s\n{trouble}\n{self._logs(list(self._daemons))}")
            time.sleep(LOOK_S)

    def _logs(self, names: list[str]) -> str:
        return "\n".join(
            f"--- {self.directory}/log/{name}.out\n{(self.directory / f'log/{name}.out').read_text()[-800:]}"
            for name in names
        )

    def _started(self, name: str) -> str:
        return _field(self.run("scontrol", "--oneliner", "show", "node", name), "SlurmdStartTime")

    def _start_slurmd(self, name: str) -> None:
        self._start_daemon(name, ["slurmd", "-D", "-N", name], self.directory / "spool" / name)

    def _start_daemon(self, name: str, words: list[str], cwd: Path) -> None:
        """Starts a daemon in a session of its own, so that Ctrl-C reaches the tests alone."""
        with (self.directory / f"log/{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                [shutil.which(words[0], path=PATH) or words[0], *words[1:]], env=self.environment(), cwd=cwd,
                start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def _munge_words(self) -> list[str]:
        paths = {
            "key-file": "munge.key",
            "socket": "munge.sock",
            "pid-file": "munged.pid",
            "log-file": "log/munged.log",
            "seed-file": "seed",
        }
        return [
            "munged",
            "--foreground",
            "--force",
            *(f"--{option}={self.directory}/{path}" for option, path in paths.items()),
        ]

    def _write_files(self, port: int) -> None:
        for name in ("log", "state", "gpu", "scripts", *(f"spool/{name}" for name in self.names)):
            (self.directory / name).mkdir(parents=True)
        host = socket.gethostname().split(".")[0]
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.1.{i} Port={port + i} CPUs={self._cpus} "
            f"RealMemory={self._memory_mib} {f'Gres=gpu:a100:{self._gpus} ' if self._gpus else ''}State=UNKNOWN"
            for i, name in enumerate(self.names, 1)
        )
        self.conf.write_text(
            CONF.format(
                cluster=f"test{port}",
                host=host,
                port=port,
                user=getpass.getuser(),
                directory=self.directory,
                nodes=nodes,
            )
        )
        for i in range(self._gpus):
            (self.directory / f"gpu/nvidia{i}").symlink_to("/dev/null")
        if self._gpus:
            (self.directory / "gres.conf").write_text(
                f"Name=gpu Type=a100 File={self.directory}/gpu/nvidia[0-{self._gpus - 1}]\n"
            )
        (self.directory / "cgroup.conf").write_text(
            "CgroupPlugin=cgroup/v1\n"
        )  # read at start even where no plugin uses it
        (self.directory / "munge.key").write_bytes(secrets.token_bytes(128))
        (self.directory / "munge.key").chmod(0o400)


def missing_commands() -> list[str]:
    """Returns those of Slurm's programs that are not installed."""
    return [name for name in COMMANDS if shutil.which(name, path=PATH) is None]


def processes(conf: Path, node: str | None = None) -> list[psutil.Process]:
    """All processes of a cluster, or of one of its nodes.

    First Slurm's own: they would report the end of the others.
    """
    slurms, others = [], []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
            is_slurms = process.name().startswith("slurm")
            if is_slurms:
                cwd = Path(process.cwd())
                belongs = cwd == conf.parent / "spool" / node if node else cwd.is_relative_to(conf.parent)
            else:
                environment = process.environ()
                belongs = environment.get("SLURM_CONF") == str(conf) and node in (
                    None,
                    environment.get("SLURMD_NODENAME"),
                )
            if belongs:
                (slurms if is_slurms else others).append(process)
                if not is_slurms:
                    others += process.children(recursive=True)  # some write a title over their environment
    return slurms + others


def kill_all(find: Callable[[], list[psutil.Process]], timeout_s: float = 30.0) -> None:
    """SIGKILL to all that `find` gives, again and again until it gives none: one that is killed may have started
    another.
    """
    end = time.monotonic() + timeout_s
    while survivors := [process for process in find() if process.pid != os.getpid()]:
        for process in survivors:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if time.monotonic() > end:
            raise SlurmError(f"processes that SIGKILL does not end after {timeout_s} s: {survivors}")
        time.sleep(0.01)


@contextlib.contextmanager
def claimed_ports(count: int) -> Iterator[int]:
    """Gives the first of `count` free ports in a row.

    The one before it stays bound to the end: the sign that the block is taken.
    """
    for block in random.sample(PORTS, len(PORTS)):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            stack.enter_context(_bound(block))
            for port in range(block + 1, block + 1 + count):
                _bound(port).close()
            yield block + 1
            return
    raise SlurmError(f"no {count} free ports in a row between {PORTS.start} and {PORTS.stop}")


def _bound(port: int) -> socket.socket:
    bound = socket.socket()
    try:
        bound.bind(("", port))
    except OSError:
        bound.close()
        raise
    return bound


@contextlib.contextmanager
def _guarded(conf: Path) -> Iterator[None]:
    """A process that ends the cluster when this one is gone, however it went."""
    guard = subprocess.Popen([sys.executable, __file__, str(conf)], stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        guard.communicate()


def _field(line: str, name: str) -> str:
    match = re.search(rf"(?:^|\s){re.escape(name)}=(\S*)", line)
    if match is None:
        raise SlurmError(f"no field {name} in: {line}")
    return match[1]


def main() -> None:
    conf = Path(sys.argv[1])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.stdin.read()
    kill_all(lambda: processes(conf))


if __name__ == "__main__":
    main()
