"""Files of the current directory that have the names of installed packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.config import plugins
from megatron_rl.config.schema import ConfigError, Reward, Use
from megatron_rl.rewards.grading_pool import GradePool
from megatron_rl.types import Outcome

PACKAGE = Path(__file__).parents[3]
PLANTED = (
    "from pathlib import Path\nPath(__file__).with_name('ran').touch()\ndef grade(response, payload): return 0.5\n"
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("sympy", "pydantic", "yaml"):
        Path(f"{name}.py").write_text(PLANTED)
    return tmp_path


def test_faults_a_file_beside_the_data_does_not_replace_an_installed_package(here):
    """`python -m megatron_rl.main` puts the current directory before the installed packages."""
    words = [sys.executable, "-m", "megatron_rl.main", "settings", "run.dir"]
    done = subprocess.run(words, env=os.environ | {"PYTHONPATH": str(PACKAGE)}, capture_output=True, text=True)
    assert done.returncode == 0 and "run.dir" in done.stdout, done.stderr
    assert not Path("ran").exists()


def test_faults_a_reward_worker_imports_installed_packages_first(here):
    Path("my_reward.py").write_text("import sympy\ndef grade(response, payload): return float(sympy.Integer(1))\n")
    with GradePool(Reward(target="my_reward:grade", workers=1)) as pool:
        [graded] = pool.grade(["a"], [{}])
    assert (graded.outcome, graded.score) == (Outcome.SCORE, 1.0) and not Path("ran").exists()


def test_faults_a_plugin_that_an_installed_package_hides_is_refused(here):
    for look in (plugins.find, lambda target: plugins.look_at(Use(target=target))):
        with pytest.raises(ConfigError, match=r"sympy.py is hidden by the installed .*: rename it"):
            look("sympy:grade")
    assert not Path("ran").exists()


def test_faults_a_plugin_that_a_module_hides_is_refused_before_that_module_is_imported(here):
    Path("tabnanny.py").write_text(PLANTED)
    with pytest.raises(ConfigError, match=r"tabnanny.py is hidden by the installed .*: rename it"):
        plugins.look_at(Use(target="tabnanny:check"))
    assert "tabnanny" not in sys.modules and not Path("ran").exists()
