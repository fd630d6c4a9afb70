"""The tutorials of docs/tutorials: their files are written and their commands are run, one page after the other.

A block of Python or YAML that begins with `# NAME` is the file NAME. Blocks of bash are run in the page's order, in one
directory, but for those that say why they are not run. Each page begins with the config and model of the first.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, environment
from docs_pages import TUTORIALS, blocks_of
from limits import RUN_S

from megatron_rl.run.metrics import read_metrics

pytestmark = [pytest.mark.multi, pytest.mark.slow]


def follow(name: str, folder: Path) -> str:
    """Does what a page says. Returns what its commands print."""
    own = environment()
    own |= {"PATH": f"{Path(sys.executable).parent}:{own['PATH']}", "COLUMNS": "160"}
    said = ""
    for block in blocks_of(ROOT / f"docs/tutorials/{name}.md"):
        if block.language == "bash" and not block.mark:
            words = ["bash", "-euo", "pipefail", "-c", block.text]
            done = subprocess.run(words, cwd=folder, env=own, capture_output=True, text=True, timeout=RUN_S)
            assert done.returncode == 0, f"{block.name}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            said += done.stdout + done.stderr
        elif file := re.match(r"# (\w+\.(?:py|yaml))\n", block.text):
            (folder / file[1]).write_text(block.text)
    return said


def column(run: Path, scope: str, name: str) -> list[float]:
    return [row.metrics[name] for row in read_metrics(run) if row.scope == scope and name in row.metrics]


@pytest.fixture(scope="module")
def first_run(tmp_path_factory) -> tuple[Path, str]:
    """The directory of the first tutorial, and what its commands print."""
    folder = tmp_path_factory.mktemp("first_run")
    return folder, follow("first_run", folder)


@pytest.fixture
def begun(first_run, tmp_path) -> Path:
    """A directory with first.yaml and the tiny model of the first tutorial."""
    shutil.copytree(first_run[0] / "tiny", tmp_path / "tiny")
    shutil.copy(first_run[0] / "first.yaml", tmp_path)
    return tmp_path


def test_your_first_run(first_run):
    folder, said = first_run
    assert "64 samples per update" in said and "check says which name is the right one" in said
    rewards = column(folder / "runs/first", "generator", "reward/trained")
    assert len(rewards) == 25 and rewards[0] < 0.05 and rewards[19] > 0.3
    assert column(folder / "runs/first", "eval", "generator/accuracy_greedy")[1] == 1.0
    assert "going on from runs/first/checkpoints/iteration_000020" in said
    kept = {path.name for path in (folder / "runs/first").iterdir()}
    assert kept >= {"config.yaml", "inputs.json", "metrics.jsonl", "summary.json", "report.html", "checkpoints"}
    if not torch.cuda.is_available():  # its report once predicted rates of GPUs that the machine does not have
        schedule = json.loads((folder / "runs/first/summary.json").read_text())["schedule"]
        assert schedule == {"not_predicted": "the run has no GPU, and predictions are made for GPUs"}


@pytest.mark.matrix
def test_own_reward(begun):
    said = follow("own_reward", begun)
    assert "refused" in said and "the response 'the letter is " in said and "<|user|>" in said
    rewards = column(begun / "runs/own", "generator", "reward/trained")
    assert rewards[0] < 0.05 and rewards[-1] > 0.4
    assert column(begun / "runs/own", "eval", "generator/accuracy_greedy") == [0.0, 1.0]
    [answer] = re.findall(r"^answer: (\w*)$", said, re.MULTILINE)
    assert set(answer) == {"b"}


@pytest.mark.matrix  # make test-more ONLY=tutorials
def test_two_models_that_play(begun):
    said = follow("two_models", begun)
    assert "'4 left:'" in said and "{'alice': {'won': 1.0}, 'bob': {'won': 0.0}}" in said
    moves = column(begun / "runs/game", "alice", "answers")
    assert moves[0] < 1.3 and moves[-1] > 2.5
    won = column(begun / "runs/game", "bob", "reward/won")
    assert won[0] < 0.2 and max(won) > 0.3


@pytest.mark.matrix  # make test-more ONLY=tutorials
def test_an_agent_with_a_tool(begun):
    follow("tool_agent", begun)
    before, after = column(begun / "runs/agent", "eval", "agent/accuracy_greedy")
    rewards = column(begun / "runs/agent", "agent", "reward/trained")
    assert after > before + 0.2 and rewards[0] < 0.6 and rewards[-1] > 0.75
    answers = column(begun / "runs/agent", "agent", "answers")
    assert answers[0] < 1.75 and answers[-1] > 1.85


@pytest.mark.matrix
def test_a_method_of_your_own(begun):
    said = follow("own_recipe", begun)
    assert "momentum" in said and "check names the arguments" in said
    rewards = column(begun / "runs/average", "writer", "reward/outcome")
    assert len(rewards) == 25 and rewards[0] < 0.05 and rewards[19] > 0.3
    averages = column(begun / "runs/average", "writer", "average")
    assert averages[0] == 0.0 and averages[20] > averages[10] > 0.0, "the resumed run has the average of the first"


def test_from_laptop_to_slurm(begun):
    said = follow("laptop_to_slurm", begun)
    for line in (*re.findall(r"`(#SBATCH .*?)`", (ROOT / "docs/tutorials/laptop_to_slurm.md").read_text()),
                 "#SBATCH --partition=gpu", "#SBATCH --time=01:00:00"):  # fmt: skip
        assert line in said
    assert not (begun / "runs/first/metrics.jsonl").exists()


def test_every_tutorial_has_a_test():
    tests = Path(__file__).read_text()
    assert len(TUTORIALS) == 6 and not [page.stem for page in TUTORIALS if f'follow("{page.stem}"' not in tests]
