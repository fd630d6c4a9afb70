"""Iterations that were collected ahead are never trained on once the code that scored them has changed."""

from __future__ import annotations

import sys

import pytest
from specs import spec_of

from megatron_rl.config import schema as configs
from megatron_rl.config.sources import own_code, sources
from megatron_rl.run.input_digests import read_files
from megatron_rl.session.run_collection import run_fingerprint
from megatron_rl.training.iteration import Collected, Iteration
from megatron_rl.training.store import IterationStore, Waiting


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory with a reward that imports helpers in four ways, in the middle of which the test stands."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    files = {
        "mine_rewards.py": "import json\nimport torch\nfrom mine_kit import scales\n\ngrade = json.dumps\n",
        "mine_kit/__init__.py": "from .deep import depth\n",
        "mine_kit/scales.py": "def late():\n    import mine_context\n",
        "mine_kit/deep.py": "depth = 1\n",
        "mine_context.py": "TABLE = {}\n",
        "mine_broken.py": "this is no Python\n",
        "apart.py": "nobody = 'imports this'\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def config(target: str = "mine_rewards:grade", **recipe) -> configs.TrainConfig:
    return configs.TrainConfig(
        roles={},
        recipe=configs.Use(target="megatron_rl.recipes.grpo:Grpo", args=recipe),
        reward=configs.Reward(target=target),
        data=configs.PromptSet(path="nowhere"),
    )


def _fingerprint(config):
    settings = spec_of(config).settings
    return run_fingerprint(settings, read_files(settings))


@pytest.mark.parametrize(
    "file", ["mine_rewards.py", "mine_kit/__init__.py", "mine_kit/scales.py", "mine_kit/deep.py", "mine_context.py"]
)
def test_hostile_change_of_code_under_iterations_collected_ahead_is_seen(here, file):
    """A run was killed before its first checkpoint, a module that its reward imports was mended, and the same command
    trained on the old scores: only the reward's own file counted."""
    old = _fingerprint(config())
    store, iteration = IterationStore(here / "rollouts", old), Iteration(cycle=0, index=0, roles=("solver",), number=0)
    store.put(iteration, Collected(rollouts={"solver": []}, metrics={}), {})
    assert _fingerprint(config()) == old and IterationStore(here / "rollouts", old).get(iteration) is not None
    (here / file).write_text((here / file).read_text() + "# mended\n")
    new = _fingerprint(config())
    assert new != old and IterationStore(here / "rollouts", new).get(iteration) is None
    assert IterationStore(here / "rollouts", new).clean(0) == Waiting(kept=0, dropped=1)


def test_hostile_modules_are_read_and_never_run(here):
    found = sources({"target": "mine_rewards:grade", "other": "mine_broken:x"})
    assert {*found} == {
        f"module mine_{name}" for name in ("rewards", "kit", "kit.scales", "kit.deep", "context", "broken")
    }, "libraries are another matter, and so is what nobody imports"
    assert not {name for name in sys.modules if name.startswith("mine")}


def test_hostile_texts_in_a_config_name_no_file(here):
    texts = ["", "x" * 10_000, "a\nb", "nul\0", "C:x", ":", "a:", "mine_rewards.missing:x", "~", "/", ".", "é:é"]
    assert sources(texts) == {}


def test_hostile_change_of_this_package_is_seen_but_not_of_its_commands():
    names = {name for name, _ in own_code()}
    assert {"recipes/solutions.py", "algorithms/estimators.py", "recipes/prompts/tango_verifier.txt"} <= names
    assert not {name for name in names if name.startswith(("commands/", "run/", "planning/"))}


def test_hostile_iterations_are_dropped_on_request(tmp_path):
    store = IterationStore(tmp_path, "same")
    for number in range(3):
        store.put(
            Iteration(cycle=0, index=0, roles=("solver",), number=number),
            Collected(rollouts={"solver": []}, metrics={}),
            {},
        )
    assert IterationStore(tmp_path, "same").clean(1) == Waiting(kept=2, dropped=0)
    assert IterationStore(tmp_path, "same").clean(1, fresh=True) == Waiting(kept=0, dropped=2)
    assert [path.name for path in tmp_path.iterdir()] == ["iteration_000000.parquet"]
