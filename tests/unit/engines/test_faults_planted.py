"""Files that somebody planted in a run directory, and run directories that others may write to."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from damaged_runs import CONFIG, make_run
from planted import FILES, plant, use, uses

from megatron_rl.config.schema import Run
from megatron_rl.engines.auth_middleware import TOKEN_FILE, Guard
from megatron_rl.engines.server_process import make_token
from megatron_rl.lib.regular_files import UntrustedFile
from megatron_rl.main import main
from megatron_rl.report.pages import write_report
from megatron_rl.run.run_directory import RunError, open_run

SECRET = '{"secret": "not of this run"}\n'


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("kind", ["link", "FIFO", "directory"])
def test_faults_planted_files_stop_no_reader_and_lead_no_writer_elsewhere(whole, tmp_path, kind):
    """`status`, `report` and `watch` waited for a FIFO for ever; metrics and locks were written through a link."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text(SECRET)
    everywhere = shutil.copytree(whole, tmp_path / "everywhere")
    for number, name in enumerate(FILES):
        run = shutil.copytree(whole, tmp_path / f"run{number}")
        plant(run / name, kind, elsewhere)
        outcomes = {title: use(call) for title, call in uses(run).items() if title != "report"}
        assert outcomes["damage"] == outcomes["evaluations"] == "done", (name, outcomes)
        assert elsewhere.read_text() == SECRET, name
        if name != "sweep.json":  # without it, the runs of a sweep are not known
            plant(everywhere / name, kind, elsewhere)
    assert use(lambda: write_report(everywhere)) == "done" and elsewhere.read_text() == SECRET


def test_faults_a_token_that_is_a_link_is_no_secret(tmp_path, monkeypatch):
    """A link to a file that everybody may read gave a token that everybody knew."""
    (tmp_path / "public").write_text("known to all")
    (tmp_path / "token").symlink_to(tmp_path / "public")
    monkeypatch.setenv(TOKEN_FILE, str(tmp_path / "token"))
    with pytest.raises(UntrustedFile, match="is a link"):
        make_token(tmp_path / "token")
    with pytest.raises(UntrustedFile, match="is a link"):
        Guard(None)


@pytest.mark.parametrize("place", [".", "engines", "checkpoints/iteration_000002"])
def test_faults_a_run_directory_that_others_may_write_to_is_refused(whole, tmp_path, place):
    run = shutil.copytree(whole, tmp_path / "run")
    (run / place).mkdir(exist_ok=True)
    (run / place).chmod(0o775)
    with pytest.raises(RunError, match=r"can be written to by other users \(mode 775\).*`chmod -R go-w "):
        open_run(Run(dir=str(tmp_path), name="run"), CONFIG)
    (run / place).chmod(0o755)
    open_run(Run(dir=str(tmp_path), name="run"), CONFIG)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_faults_a_run_directory_of_another_user_is_refused(whole, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    os.chown(run, 65533, -1)
    with pytest.raises(RunError, match="belongs to user 65533"):
        open_run(Run(dir=str(tmp_path), name="run"), CONFIG)


def test_faults_a_umask_that_lets_the_group_write_does_not_reach_a_run(tmp_path, monkeypatch):
    """With umask 002, which clusters with private groups use, run directories had mode 775."""
    monkeypatch.chdir(tmp_path)
    before = os.umask(0o002)
    try:
        assert main(["settings", "run.dir"]) == 0
        run = open_run(Run(dir=str(tmp_path), name="run"), CONFIG)
        assert {path.stat().st_mode & 0o022 for path in (run.path, run.logs, run.config)} == {0}
    finally:
        os.umask(before)
