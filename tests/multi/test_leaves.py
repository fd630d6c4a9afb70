"""The core of the package imports and trains without its leaves (LEAVES in tests/unit/project/test_layering.py)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, environment, tango_settings
from limits import RUN_S
from test_layering import LEAVES

from megatron_rl.run.metrics import read_metrics

pytestmark = [pytest.mark.multi, pytest.mark.slow]
# An editable install finds the deleted modules in the checkout: its finder is taken out of every process. At the end of
# a process, the files that it loaded from elsewhere are listed.
FINDER_OFF = """
import atexit, os, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "Editable" not in repr(finder)]
def list_foreign_files():
    files = {name: getattr(module, "__file__", None) for name, module in [*sys.modules.items()]}
    foreign = [file for name, file in files.items()
               if name.partition(".")[0] == "megatron_rl" and file and not file.startswith(ROOT)]
    with open(os.path.join(ROOT, "loaded"), "a") as log:
        log.write("".join(f"{name}\\n" for name in files if name.startswith("megatron_rl.")))
    with open(os.path.join(ROOT, "foreign"), "a") as log:
        log.write("".join(f"{file}\\n" for file in foreign))
atexit.register(list_foreign_files)
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory) -> Path:
    """A folder with a copy of the package without leaves, and with the configuration and the reward of the demo."""
    tree = tmp_path_factory.mktemp("core")
    unwanted = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "megatron_rl", tree / "megatron_rl", ignore=unwanted)
    demo = "examples/miniatures/last_letter"
    shutil.copytree(ROOT / demo / "prompts", tree / demo / "prompts")
    text = (ROOT / demo / "tango.yaml").read_text().replace("megatron_rl.contrib.last_letter:", "last_letter_reward:")
    (tree / demo / "tango.yaml").write_text(text)
    shutil.copy(ROOT / "megatron_rl/contrib/last_letter.py", tree / "last_letter_reward.py")
    for name in LEAVES:
        path = tree / "megatron_rl" / name.replace(".", "/")
        shutil.rmtree(path) if path.is_dir() else path.with_suffix(".py").unlink()
    (tree / "sitecustomize.py").write_text(f"ROOT = {str(tree)!r}\n{FINDER_OFF}")
    return tree


def program(core: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megatron_rl.main", *words], cwd=core, env=environment() | {"PYTHONPATH": str(core)},
        capture_output=True, text=True, timeout=RUN_S,
    )  # fmt: skip


def test_the_demo_trains_without_leaves(core, last_letter, tmp_path):
    done = program(core, "train", *tango_settings(last_letter, tmp_path, "run"), "recipe.args.generator_updates=1")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert {row.scope for row in read_metrics(tmp_path / "run")} >= {"generator", "verifier"}
    assert "no report was written" in done.stdout and "megatron_rl.report" in done.stdout
    loaded = {*(core / "loaded").read_text().split()}
    assert "megatron_rl.training.loop" in loaded and (core / "foreign").read_text() == ""


def test_a_command_of_a_leaf_that_is_gone_is_refused_with_its_name(core):
    done = program(core, "plan", "examples/miniatures/last_letter/tango.yaml", "--cluster", "1x8xH100")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "megatron_rl.commands.plan, which this installation" in done.stderr
