"""RUN/environment.json: what a run was started with, once for each environment."""

from __future__ import annotations

import hashlib
import json
import subprocess
from importlib import metadata

from megatron_rl.run import environment_record
from megatron_rl.run.environment_record import commit_of, packages, record_start
from megatron_rl.run.run_directory import RunDirectory


def git(directory, *words):
    own = ["-c", "user.name=n", "-c", "user.email=e"]
    return subprocess.run(["git", *own, *words], cwd=directory, check=True, capture_output=True, text=True).stdout


def test_each_environment_of_a_run_is_recorded_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    git(tmp_path, "init", "-q")
    (tmp_path / "rows.jsonl").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "rows")
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    directory.config.write_text("run: {seed: 1}\n")
    inputs = {"data.path": {"path": "rows.jsonl", "sha256": "0f"}, "model": {"path": "a/b", "revision": "c0"}}

    def starts():
        record_start(directory, inputs, ["NVIDIA H100"])
        return json.loads((directory.path / environment_record.FILE).read_text())

    [first] = starts()
    head = git(tmp_path, "rev-parse", "HEAD").strip()
    assert first["commits"]["working directory"] == head
    assert first["config"] == hashlib.sha256(b"run: {seed: 1}\n").hexdigest()
    assert first["inputs"] == {"data.path": "0f", "model": "c0"} and first["devices"] == ["NVIDIA H100"]
    assert first["packages"]["torch"] == metadata.version("torch") and first["packages"] == packages()
    assert starts() == [first]
    (tmp_path / "rows.jsonl").write_text("2")
    changed = starts()
    assert changed[0] == first and changed[1]["commits"]["working directory"] == f"{head}, with changes"
    (directory.path / environment_record.FILE).write_text("[{")
    assert len(starts()) == 1  # a damaged record begins anew


def test_a_directory_outside_of_a_checkout_has_no_commit(tmp_path):
    """A package that is installed in a user's checkout had the commit of that checkout."""
    assert commit_of(tmp_path) is None
    git(tmp_path, "init", "-q")
    installed = tmp_path / "venv/lib/megatron_rl"
    installed.mkdir(parents=True)
    (installed / "run.py").touch()
    (tmp_path / ".gitignore").write_text("venv\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "own work")
    assert commit_of(installed) is None and commit_of(tmp_path) == git(tmp_path, "rev-parse", "HEAD").strip()
