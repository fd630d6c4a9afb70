"""Tests slurm/job.sh in bash with fake Slurm commands that answer as a test chooses."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from limits import PROCESS_S

ROOT = Path(__file__).parents[2]
# Each writes its words into $LOG and answers what the variable of its name says.
FAKES = {
    "squeue": 'case "$*" in *format=%e*) echo "${END_TIME:-}";; '
    '*) printf "%b" "${SQUEUE:-}"; exit "${SQUEUE_STATUS:-0}";; esac',
    "scontrol": 'n=$(grep -c "^scontrol" "$LOG"); [ "$n" -gt "${REFUSED:-0}" ]',
    "scancel": "",
    "sleep": "",
    "srun": 'case "$*" in *doctor*) exit "${DOCTOR:-0}";; '
    '*serve*|*generate*) [ -z "${WARN:-}" ] || { kill -USR1 $PPID; /bin/sleep 0.3; };; esac\n'
    'exit "${STEP:-0}"',
    "python": 'case "$*" in *where*) echo "$RUN";; *begin*) echo "${BEGIN:-go: now}";; '
    '*over*) echo "${OVER:-goes on}";; '
    '*"slice end"*) echo "${END:-slice: left in time}";; esac',
}
SCRIPT = """
set -euo pipefail
CONFIG=c.yaml PYTHON=$FAKES/python SETUP= PROFILE= SRUN=() CONTAINER=() ROLES=(generator verifier) REPLICAS=2
source "$ROOT/slurm/job.sh"
setup
echo "end=$MEGATRON_RL_JOB_END"
"""


@dataclass(frozen=True)
class Ran:
    status: int
    said: str
    commands: list[str]  # of Slurm's, but for srun and squeue

    def did(self, words: str) -> bool:
        return words in self.commands


@pytest.fixture
def job(tmp_path):
    """Runs lines of bash as element 2 of array 17; that element has the array's number, as one of each array does."""
    fakes, log, run = tmp_path / "fakes", tmp_path / "log", tmp_path / "a run"
    for place in (fakes, run / "jobs"):
        place.mkdir(parents=True)
    for name, body in FAKES.items():
        (fakes / name).write_text(f'#!/bin/bash\necho "{name} $*" >>"$LOG"\n{body}\n')
        (fakes / name).chmod(0o755)

    def runs(lines: str, **answers: str) -> Ran:
        log.write_text("")
        slurm = {
            "SLURM_JOB_ID": "17",
            "SLURM_ARRAY_JOB_ID": "17",
            "SLURM_ARRAY_TASK_ID": "2",
            "SLURM_JOB_NAME": "x-train",
        }
        slurm |= {"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1"}
        own = {
            "FAKES": str(fakes),
            "LOG": str(log),
            "RUN": str(run),
            "ROOT": str(ROOT),
            "PATH": f"{fakes}:{os.environ['PATH']}",
        }
        done = subprocess.run(
            ["bash", "-c", SCRIPT + lines], env=slurm | own | answers, capture_output=True, text=True, timeout=PROCESS_S
        )
        commands = [line for line in log.read_text().splitlines() if line.startswith(("scontrol", "scancel"))]
        return Ran(done.returncode, done.stdout + done.stderr, commands)

    return runs


def test_faults_of_a_locale_do_not_give_a_run_another_directory(job):
    """In a shell with LANG=de_DE.ISO-8859-1 a run named ä was one of other bytes than on the login node."""
    assert "utf8=1\n" in job('echo "utf8=${PYTHONUTF8-}"').said


def test_a_silent_queue_is_no_end_of_the_job_at_midnight(job):
    assert "end=\n" in job("", END_TIME="").said
    assert "end=\n" in job("", END_TIME="N/A").said
    assert "end=1795600000\n" in job("", END_TIME="2026-11-25T09:46:40", TZ="UTC").said


def test_a_slice_leaves_to_those_that_wait_and_else_comes_again(job):
    many = "".join(f"17_{n}\\n" for n in range(3, 900))
    for waiting, again in (("17_3\\n", False), (many, False), ("", True)):
        ran = job("train train", SQUEUE=waiting)
        assert ran.status == 0 and ran.did("scontrol requeue 17_2") is again, ran


def test_a_busy_slurmctld_is_asked_again_for_the_requeue(job):
    ran = job("train train", END="again: killed", REFUSED="3")
    assert ran.status == 0 and ran.commands == ["scontrol requeue 17_2"] * 4
    ran = job("train train", END="again: killed", REFUSED="99")
    assert ran.status == 1 and "could not be queued again" in ran.said


def test_a_failed_check_of_a_node_ends_as_a_failed_step_does(job):
    assert job("train train", DOCTOR="1", END="again: failed").did("scontrol requeue 17_2")
    wrong = job("train train", DOCTOR="2", END="stopped: the config is wrong")
    assert wrong.status == 1 and wrong.commands == ["scancel --state=PENDING 17"]


def test_the_end_of_a_run_cancels_what_waits_and_the_engines(job, tmp_path):
    (tmp_path / "a run/jobs/engines").write_text("18\n")
    for answers in ({"BEGIN": "done: finished"}, {"END": "done: all iterations"}, {"END": "stopped: asked"}):
        assert job("train train", **answers).commands == ["scancel --state=PENDING 17", "scancel 18"], answers
    stalled = job("train train", BEGIN="stopped: no progress")
    assert stalled.status == 1 and stalled.did("scancel 18"), "jobs that depend on this one must not begin"
    assert job("CHAIN= ENGINES=17_[1-4]; train train", END="stopped: no progress").commands == [
        "scancel 17_[1-4]",
        "scancel 18",
    ]


def test_a_warned_engine_asks_its_own_server_alone_to_leave(job):
    """The number of the array would reach them all."""
    ran = job("engine 3", WARN="1")
    assert ran.commands == ["scancel --signal=TERM 17_2", "scontrol requeue 17_2"], ran


def test_sft_data_go_on_after_the_time_limit_and_end_with_a_fault(job):
    late = job("generate", WARN="1", STEP="143")
    assert late.status == 0 and late.commands == ["scancel --signal=TERM 17_2", "scontrol requeue 17_2"]
    failed = job("generate", STEP="3")
    assert failed.status == 3 and not failed.commands
    done = job("generate", WARN="1")
    assert done.status == 0 and not done.did("scontrol requeue 17_2"), "it had ended by itself"


def test_sft_data_that_are_stopped_are_not_queued_again(job, tmp_path):
    (tmp_path / "a run/stop").touch()
    ran = job('CONFIG="$RUN/jobs/config.yaml"; generate', WARN="1", STEP="143")
    assert ran.status == 143 and not ran.did("scontrol requeue 17_2")
    assert f"not queued again: {tmp_path}/a run/stop is there" in ran.said


def test_engines_do_not_outlive_a_trainer_that_was_cancelled(job, tmp_path):
    assert job("engine 0").did("scontrol requeue 17_2"), "by hand nobody says which job the trainer is"
    (tmp_path / "a run/jobs/trainer").write_text("16\n")
    gone = job("engine 0", SQUEUE="slurm_load_jobs error: Invalid job id specified\\n", SQUEUE_STATUS="1")
    assert gone.status == 0 and not gone.commands and "nothing to serve" in gone.said
    assert not job("engine 0", SQUEUE="").commands
    for said, status in (("16_0\\n", "0"), ("slurm_load_jobs error: Socket timed out\\n", "1")):
        assert job("engine 0", SQUEUE=said, SQUEUE_STATUS=status).did("scontrol requeue 17_2"), said
    assert not job("engine 0", SQUEUE="16_0\\n", OVER="over").commands


def test_an_engine_that_fails_and_fails_is_given_up(job):
    """Its time limits do not count, only faults do; a wrong config is not tried again."""
    assert job("engine 0", STEP="1", SLURM_RESTART_COUNT="20").did("scontrol requeue 17_2")
    assert job("engine 0", STEP="1", WARN="1", MAX_FAULTS="2").did("scontrol requeue 17_2")
    ran = job("engine 0", STEP="1", MAX_FAULTS="2")
    assert ran.status == 1 and not ran.commands
    ran = job("engine 0", STEP="2")
    assert ran.status == 1 and not ran.commands


def test_a_node_on_which_the_program_does_not_start_is_left(job):
    assert job("PYTHON=/nowhere; train train").did("scontrol requeue 17_2")
    ran = job("PYTHON=/nowhere; train train", SLURM_RESTART_COUNT="20")
    assert ran.status == 1 and not ran.commands
    unreadable = job("rl() { return 2; }; train train")
    assert unreadable.status == 1 and not unreadable.commands, "a wrong config is one on every node"


def test_faults_of_a_shell_in_another_job_do_not_reach_a_script_submitted_by_hand(job):
    """srun and the ranks took them for the job's own. Without a step, SLURM_DISTRIBUTION is an option of sbatch's."""
    other = {"SLURM_DISTRIBUTION": "cyclic", "SLURM_STEP_NODELIST": "n9", "SRUN_EXPORT_ENV": "NONE", "RANK": "3"}
    ran = job('echo "${SLURM_DISTRIBUTION-} ${SLURM_STEP_NODELIST-} ${SRUN_EXPORT_ENV-} ${RANK-}."', **other)
    assert "cyclic n9  .\n" in ran.said
    ran = job(
        'echo ">${SLURM_DISTRIBUTION-}${SLURM_STEP_NODELIST-}${RANK-}<$SLURM_JOB_NODELIST"', **other, SLURM_STEP_ID="0"
    )
    assert "><n1\n" in ran.said
