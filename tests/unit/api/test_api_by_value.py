"""Functions that a Trainer hands to its run by value: each run has the function that it was given."""

from __future__ import annotations

import functools
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl import Trainer
from megatron_rl.api.data_files import data_settings, reward_settings
from megatron_rl.api.recipes import use_of
from megatron_rl.config.base import ConfigError
from megatron_rl.data.tiny import write_tiny_model
from megatron_rl.recipes.grpo import Grpo

ROOT = Path(__file__).parents[3]
# A program that prints the files of its rewards: everything that pickles may hold in another order each time.
PROGRAM = """
import enum, functools, re, sys
from pathlib import Path
import numpy, torch
from megatron_rl.api.data_files import reward_settings

WORDS = {"alpha", "beta", "gamma", "delta", ("a", 1)}
ARRAY, TENSOR = numpy.arange(5.0), torch.ones(3)

class Kind(enum.Enum):
    GOOD = 1

class Grader:
    table = {"x": frozenset({"q", "r", "s"})}
    def __init__(self):
        self.own, self.seen = self, set("abcdef")
    def __call__(self, response, payload):
        return helper(response) * ARRAY.sum() if Kind.GOOD else TENSOR
    def graded(self, response, payload):
        return self(response, payload)

def helper(text):
    return text in WORDS or text in {"one", "two", "three"}

def make(n):
    def inner(response, payload, pattern=re.compile("a+"), *, again=("a b", b"c")):
        return n * helper(response) or inner
    return inner

given = [make(2), Grader(), Grader().graded, functools.partial(make(3), again=WORDS), lambda r, p, k=2: k + len(WORDS)]
for one in reward_settings(given, Path(sys.argv[1]))[0]["args"]["functions"]:
    print(Path(one["pickled"]).name)
"""


def written(function, directory):
    """Returns the file of a function, and the function that the file holds."""
    path = Path(reward_settings(function, directory)[0]["args"]["functions"][0]["pickled"])
    return path.name, pickle.loads(path.read_bytes())


class Scaled:
    def __init__(self, by):
        self.by = by

    def __call__(self, response, payload):
        return self.by

    def graded(self, response, payload):
        return self.by


def closure(n):
    return lambda response, payload: n


def default(n):
    return lambda response, payload, k=n: k


def keyword(n):
    def scored(response, payload, *, k=n):
        return k

    return scored


def attribute(n):
    def scored(response, payload):
        return scored.n

    scored.n = n
    return scored


def of_module(n):
    """A function whose module, a notebook's, has defined its helper again."""
    space = {"__name__": "__main__"}
    exec(f"def helper():\n    return {n}\ndef scored(response, payload):\n    return helper()\n", space)
    return space["scored"]


def nested(n):
    kept = {"a": [0, {"b": n}]}
    return lambda response, payload: kept["a"][1]["b"]


def of_local_class(n):
    class Local:
        value = n

        def __call__(self, response, payload):
            return self.value

    return Local()


MADE = [
    closure, default, keyword, attribute, of_module, nested, of_local_class, Scaled, lambda n: Scaled(n).graded,
    lambda n: functools.partial(lambda response, payload, k: k, k=n),
    lambda n: functools.partial(Scaled(n)),
]  # fmt: skip


@pytest.mark.parametrize("make", MADE)
def test_a_reward_that_another_one_wrote_over(make, tmp_path):
    """A pickle was named after the text of its function alone and written over: three closures, made first and trained
    afterwards, all trained on the last one's reward."""
    found = [written(make(n), tmp_path) for n in (1, 5, 9)]
    assert len({name for name, _ in found}) == 3
    assert [function("r", {}) for _, function in found] == [1, 5, 9]
    kept = (tmp_path / found[0][0]).stat().st_mtime_ns
    assert written(make(1), tmp_path)[0] == found[0][0] and (tmp_path / found[0][0]).stat().st_mtime_ns == kept


def test_a_program_that_is_started_again_has_the_same_rewards(tmp_path):
    """Other seeds of hashes, other lines and another file, as a notebook's cells have them, make no other function."""
    told = set()
    for seed, name in enumerate(("first.py", "second.py")):
        (tmp_path / name).write_text("\n" * 7 * seed + PROGRAM)
        environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": str(ROOT)}
        told.add(subprocess.check_output([sys.executable, name, "out"], cwd=tmp_path, env=environment, text=True))
    assert len(told) == 1 and len(set(told.pop().split())) == 5


def test_trainers_that_differ_by_a_closure_are_different_runs(tmp_path):
    """The second run was told that it is finished, and returned the first one's metrics."""
    model, rows = write_tiny_model(tmp_path / "model"), [{"question": "1+1"}]
    settings = {"updates": 1, "group_size": 2, "prompts_per_iteration": 1, "dir": str(tmp_path / "runs")}
    made = [Trainer(model, closure(n), rows, **settings).config for n in (1, 5, 1)]
    assert made[0].get("run.name") != made[1].get("run.name") and made[0] == made[2]


def test_a_module_that_ranks_do_not_find_is_written_by_value(tmp_path, monkeypatch):
    """A module that a program loaded from a file by itself was named, and ranks found another file of that name."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setitem(sys.modules, "twice_rewards", None)
    for place, value in (("twice_rewards.py", 1), ("apart/twice_rewards.py", 2)):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text(f"def grade(response, payload):\n    return {value}\n")
    import importlib.util

    spec = importlib.util.spec_from_file_location("twice_rewards", tmp_path / "apart/twice_rewards.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "twice_rewards", module)
    spec.loader.exec_module(module)
    assert written(module.grade, tmp_path / "inputs")[1]("r", {}) == 2


def test_rows_that_somebody_changed_after_they_were_written(tmp_path):
    path = Path(data_settings([{"question": "1+1"}], "data", tmp_path)["path"])
    path.write_text('{"question": "2+2"}\n')
    with pytest.raises(ConfigError, match=re.escape(f"{path} was changed after a Trainer wrote it: remove it")):
        data_settings([{"question": "1+1"}], "data", tmp_path)


def test_a_recipe_of_a_class_that_its_module_has_another_one_for():
    """A class that was defined again, or changed in a program, was named, and the ranks took the module's."""
    changed = type("Grpo", (Grpo,), {"__module__": Grpo.__module__, "__qualname__": "Grpo"})
    with pytest.raises(ConfigError, match="put the class into a module"):
        use_of(changed(updates=1))
    assert use_of(Grpo(updates=1))["target"] == "megatron_rl.recipes.grpo:Grpo"
