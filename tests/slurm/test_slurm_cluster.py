"""Tests that what the launcher relies on holds on the real Slurm daemons of the `slurm` fixture.

All jobs are submitted before the first test, since Slurm takes half a minute to give up on a node and as long to look
at time limits.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from conftest import environment
from fake_servers import until
from slurm_cluster import Cluster, SlurmError, processes

pytestmark = pytest.mark.multi
# one line when it starts, one when it ends; the second element ends the chain
SERIAL = """
echo "start $SLURM_ARRAY_TASK_ID of $SLURM_ARRAY_JOB_ID"
sleep 0.5
[ "$SLURM_ARRAY_TASK_ID" = 1 ] && scancel --state=PENDING "$SLURM_ARRAY_JOB_ID"
echo "end $SLURM_ARRAY_TASK_ID of $SLURM_ARRAY_JOB_ID"
"""
# waits at its first start, whatever node that is on
TWICE = """
echo "$SLURMD_NODENAME ${SLURM_RESTART_COUNT:-0}"
[ -n "$SLURM_RESTART_COUNT" ] || srun sleep 600
"""
# a trap waits for a foreground child, and not for `wait`
WARNED = """
trap 'echo warned; kill $child' USR1
srun --kill-on-bad-exit=1 sleep 600 & child=$!
wait $child
echo saved
"""


# a cluster with a job, until its end comes from outside
OWNER = """
import signal
import sys
from pathlib import Path
from slurm_cluster import Cluster

signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
with Cluster(Path(sys.argv[1]), nodes=1) as cluster:
    cluster.wait(cluster.submit("srun sleep 600"), "RUNNING")
    print("running", flush=True)
    sys.stdin.read()
"""


@dataclass(frozen=True)
class Submitted:
    serial: str
    requeued: str
    crashed: str
    crashed_node: str
    warned: str


@pytest.fixture(scope="module", autouse=True)
def submitted(slurm: Cluster) -> Iterator[Submitted]:
    """All jobs, each with its output in JOB.txt; the node of one has crashed."""
    crashed = slurm.submit(TWICE, "--exclusive", "--requeue", *output())
    warned = slurm.submit(WARNED, "--nodes=2", "--time=1", "--signal=B:USR1@50", *output())
    serial = slurm.submit(SERIAL, "--array=0-3%1", *output("%A"))
    requeued = slurm.submit(TWICE, "--requeue", *output())
    slurm.wait(crashed, "RUNNING")
    node = slurm.field(crashed, "NodeList")
    until("the job's first line", lambda: lines(slurm, crashed))
    slurm.crash_node(node)
    slurm.wait(requeued, "RUNNING")
    until("the job's first line", lambda: lines(slurm, requeued))
    slurm.run("scontrol", "requeue", requeued)
    yield Submitted(serial, requeued, crashed, node, warned)
    slurm.reset()


def test_two_nodes_with_eight_gpus_each(slurm):
    said = slurm.run(
        "srun",
        "--nodes=2",
        "--gpus-per-node=8",
        "bash",
        "-c",
        "echo $SLURMD_NODENAME $SLURM_PROCID $CUDA_VISIBLE_DEVICES",
    )
    nodes, ranks, gpus = zip(*(line.split() for line in said.splitlines()), strict=True)
    assert len(set(nodes)) == 2 and set(nodes) < set(slurm.names)
    assert sorted(ranks) == ["0", "1"]
    assert set(gpus) == {"0,1,2,3,4,5,6,7"}


def test_more_gpus_than_a_node_has_are_refused(slurm):
    with pytest.raises(SlurmError, match="Requested node configuration is not available"):
        slurm.submit("true", "--gpus-per-node=9")


def test_a_serial_array_ends_with_its_pending_elements(slurm, submitted):
    job = submitted.serial
    assert slurm.wait(job) == {f"{job}_0": "COMPLETED", f"{job}_1": "COMPLETED", job: "CANCELLED"}
    assert lines(slurm, job) == [f"{what} {element} of {job}" for element in (0, 1) for what in ("start", "end")]


def test_a_requeued_job_knows_that_it_is_one(slurm, submitted):
    assert slurm.wait(submitted.requeued) == {submitted.requeued: "COMPLETED"}
    assert [line.split()[1] for line in lines(slurm, submitted.requeued)] == ["0", "1"]
    assert slurm.field(submitted.requeued, "Restarts") == "1"


def test_a_warning_reaches_the_batch_shell_before_the_time_limit(slurm, submitted):
    assert slurm.wait(submitted.warned) == {submitted.warned: "COMPLETED"}
    assert lines(slurm, submitted.warned) == ["warned", "saved"]


def test_a_crashed_nodes_job_comes_back_on_another(slurm, submitted):
    assert slurm.wait(submitted.crashed) == {submitted.crashed: "COMPLETED"}
    (first, zero), (second, one) = (line.split() for line in lines(slurm, submitted.crashed))
    assert (first, zero, one) == (submitted.crashed_node, "0", "1") and second != first
    assert slurm.node_states()[first] == "down*"
    slurm.start_node(first)
    assert slurm.run("srun", f"--nodelist={first}", "bash", "-c", "echo $SLURMD_NODENAME") == first


def test_a_second_cluster_does_not_meet_the_first(slurm, tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("second") / "mini", nodes=2, gpus=0) as second:
        assert second.node_states() == {"n1": "idle", "n2": "idle"}
        job = second.submit("srun sleep 600", "--nodes=2")
        second.wait(job, "RUNNING")
        assert job == "1" and second.states(job) == {"1": "RUNNING"}  # it counts its own jobs
        assert {process.pid for process in processes(second.conf)}.isdisjoint(
            process.pid for process in processes(slurm.conf)
        )
    assert processes(second.conf) == []
    assert len(slurm.node_states()) == 4


def test_nothing_survives_a_failed_start(tmp_path):
    cluster = Cluster(tmp_path / "mini", nodes=1, memory_mib=-5)
    with pytest.raises(SlurmError, match=r"(?s)daemons ended.*RealMemory value \(-5\) is less than zero"):
        cluster.start()
    assert processes(cluster.conf) == []


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_survives_its_owner(tmp_path_factory, end):
    directory = tmp_path_factory.mktemp("owned") / "mini"
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, directory],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with owner:
        assert owner.stdout is not None and owner.stdout.readline() == b"running\n"
        until("a job's processes", lambda: len(processes(directory / "slurm.conf")) > 4)
        owner.send_signal(end)
        until("the end of all", lambda: not processes(directory / "slurm.conf"))


def output(name: str = "%j") -> tuple[str, str]:
    """Returns the options that let a job append to one file over its restarts."""
    return f"--output={name}.txt", "--open-mode=append"


def lines(slurm: Cluster, job: str) -> list[str]:
    """Returns the lines that a job wrote itself, without Slurm's."""
    path = slurm.directory / f"{job}.txt"
    found = path.read_text().splitlines() if path.exists() else []
    return [line for line in found if not line.startswith(("slurmstepd", "srun"))]
