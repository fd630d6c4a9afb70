"""Names in configs and profiles never become lines of a batch script, and clocks that jump end no run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from megatron_rl.cluster.profile import Profile
from megatron_rl.cluster.slurm_job import Leave, SlurmJob
from megatron_rl.cluster.watchdog import Watchdog
from megatron_rl.config.base import ConfigError
from megatron_rl.config.schema import Run
from megatron_rl.jobs.batch_script import ScriptShape, script

EVIL = ["a\nrm -rf /tmp/x", "a\r#SBATCH --uid=0", "a\n#SBATCH --comment=x", "\x00", "a\x1b[2J", "a\u2028b", "\n"]


def rendered(*, name: str = "run", values=None, logs: str = "logs", **profile) -> str:
    shape = ScriptShape(
        template="train", name=name, ranks=1, gpus=0, time="00:10:00", array=None, logs=Path(logs)
    )  # fmt: skip
    return script(shape, Profile(**profile), values or {}, Path("/work"))


@pytest.mark.parametrize("text", EVIL)
@pytest.mark.parametrize("where", ["name", "logs", "partition", "account", "qos", "constraint"])
def test_hostile_line_break_becomes_no_line_of_a_batch_script(where, text):
    """A newline in run.name was a line of the batch script."""
    with pytest.raises(ConfigError, match="control character"):
        rendered(**{where: text})


@pytest.mark.parametrize("text", EVIL)
def test_hostile_options_and_names_of_variables_are_refused(text):
    with pytest.raises(ConfigError, match="control character"):
        rendered(sbatch=(text,))
    with pytest.raises(ConfigError, match="no name of a variable"):
        rendered(environment={text: "1"})
    for key in ("name", "dir"):
        with pytest.raises(ConfigError, match=f"run.{key} = "):
            Run(**{key: text})


@pytest.mark.parametrize("name", ["A B", "A;true", "$(true)", "1A", "", "A=1", "é"])
def test_hostile_names_of_variables(name):
    with pytest.raises(ConfigError, match="no name of a variable"):
        rendered(environment={name: "1"})


@pytest.mark.parametrize(
    "text", ["$(touch pwned)", "`touch pwned`", "'; touch pwned; '", '"; touch pwned; "', "a\ntouch pwned"]
)
def test_hostile_values_are_quoted_for_the_shell(tmp_path, text):
    """What a config may hold is a word of the script, whatever is in it."""
    lines = rendered(values={"CONFIG": text}, environment={"OWN": text}).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("# --- settings"))
    last = next(i for i, line in enumerate(lines) if line.startswith("# --- end of settings"))
    body = "\n".join([*lines[first:last], 'printf "%s|%s" "$CONFIG" "$OWN"'])
    done = subprocess.run(["bash", "-c", body], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == f"{text}|{text}" and not [*tmp_path.iterdir()]


def test_hostile_jump_of_the_clock_ends_no_run(tmp_path):
    """A clock that was set forward by an hour made a run leave; set back, it ran into its time limit."""
    steady, day = [100.0], [1_000_000.0]
    job = SlurmJob(id="1", restart=0, node="", step="0", end=1_000_000.0 + 3600, warning_s=None)
    said: list[str] = []
    leave = Leave(tmp_path, job, said.append, clock=lambda: steady[0], wall=lambda: day[0])
    leave.begin()
    for jump in (7200.0, -9000.0, 86_400.0):
        steady[0], day[0] = steady[0] + 10, day[0] + jump
        assert not leave() and not said
    steady[0] = 100.0 + 3600 - 60
    assert leave() and said


def test_hostile_clock_does_not_keep_ranks_from_being_told(tmp_path):
    """A rank compared a file's time, which another host may have set, with its own clock."""
    (tmp_path / "hang.s").touch()
    watchdog = Watchdog(tmp_path, "s", 1, 100.0)
    assert not watchdog.told_to_end(), "an earlier start left the file"
    os.utime(tmp_path / "hang.s", (1.0, 1.0))
    assert watchdog.told_to_end()
