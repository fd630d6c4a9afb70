"""The Slurm job of a run, read from the environment, and when a run saves and leaves its job."""

from megatron_rl.cluster.slurm_job import Leave, SlurmJob, job_from, leave_file

JOB = SlurmJob(id="17_2", restart=1, node="n1", step=None, end=None, warning_s=None)


def test_the_job_is_read_from_the_environment():
    assert job_from({}) is None
    plain = job_from({"SLURM_JOB_ID": "5"})
    assert plain == SlurmJob(id="5", restart=0, node="", step=None, end=None, warning_s=None) and plain.name == "5.0"
    element = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2", "SLURM_RESTART_COUNT": "3"}
    found = job_from(element | {"MEGATRON_RL_JOB_END": "100", "MEGATRON_RL_WARNING_S": "", "SLURMD_NODENAME": "n4"})
    assert found == SlurmJob(id="5_2", restart=3, node="n4", step=None, end=100.0, warning_s=None, scripted=True)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_run_leaves_while_an_iteration_and_a_save_still_fit(tmp_path):
    """Iterations of 100 s and a save of 20 s, with a margin of 1.2 and 60 s to spare, need 204 s."""
    clock, said = Clock(), list[str]()
    job = SlurmJob(id="1", restart=0, node="", step="0", end=1000.0 + 450, warning_s=150.0)
    clock.now = 0.0  # it loads its models and waits for engines
    leave = Leave(tmp_path, job, said.append, clock, wall=clock)
    clock.now = 1000.0
    leave.begin()
    leave.saved(20.0)
    for now, wanted in ((1100.0, False), (1200.0, False), (1245.0, False), (1247.0, True)):
        clock.now = now
        assert leave() is wanted, now
    assert "leaving now" in said[-1]
    assert "set job.warning_s to at least 204" in said[0] and len(said) == 2


def test_files_ask_a_run_to_leave(tmp_path):
    said = list[str]()
    leave = Leave(tmp_path, JOB, said.append)
    assert not leave() and not leave.asked()
    leave_file(
        tmp_path, SlurmJob(id="17_2", restart=0, node="", step=None, end=None, warning_s=None)
    ).touch()  # of an earlier start
    assert not leave()
    leave_file(tmp_path, JOB).touch()
    assert leave() and leave.asked()
    leave_file(tmp_path, JOB).unlink()
    (tmp_path / "stop").touch()
    assert leave()
    assert "time limit" in said[0] and f"{tmp_path}/stop; the same command" in said[1]
