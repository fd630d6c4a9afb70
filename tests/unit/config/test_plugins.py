"""Plug-ins: found by name, built from checked arguments, refused with a cure."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.config.plugins import build, find
from megatron_rl.config.schema import ConfigError, Use
from megatron_rl.config.sources import sources

ROOT = Path(__file__).parents[3]
MODULE = """
from dataclasses import dataclass, field

made = []


@dataclass(frozen=True)
class Length:
    best: int
    names: tuple[str, ...] = ()
    rate: float = 0.5
    hidden: list = field(default_factory=list, init=False)

    def __post_init__(self):
        made.append(self)
        if self.best < 1:
            raise ValueError(f"best = {self.best}: give 1 or more")

    def __call__(self, response, payload):
        return len(response) / self.best


@dataclass
class Callback:
    hook: "threading.Lock"


class Plain:
    def __init__(self, size=1):
        self.size = size


def grade(response, payload, /, *, scale=1.0):
    return scale


def anything(response, **options):
    return options


NUMBER = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Returns the name of a user's module in the current directory."""
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        MODULE.replace('"threading.Lock"', "threading.Lock").replace("\nfrom", "\nimport threading\nfrom", 1)
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield name
    sys.modules.pop(name, None)


def refusal(call, *args):
    with pytest.raises(ConfigError) as caught:
        call(*args)
    return str(caught.value)


def test_a_dataclass_is_made_from_its_arguments(own):
    made = build(Use(target=f"{own}:Length", args={"best": 4, "names": ["a"]}))
    assert made("ab", {}) == 0.5 and made.names == ("a",)


def test_a_function_gets_its_arguments_bound(own):
    bound = build(Use(target=f"{own}:grade", args={"scale": 0.25}))
    assert isinstance(bound, functools.partial) and bound("x", {}) == 0.25
    assert build(Use(target=f"{own}:grade")) is find(f"{own}:grade")
    assert build(Use(target=f"{own}:anything", args={"free": 1}))("x") == {"free": 1}


def test_built_ins_are_named_as_a_users_own():
    assert build(Use(target="megatron_rl.recipes.grpo:Grpo", args={"updates": 3})).updates == 3


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        ("Length", {"best": 4, "nams": []}, ": nams: unknown key; did you mean 'names'?"),
        ("Length", {"best": 4, "zzz": 1}, "zzz: unknown key; known here: best, names, rate"),
        ("Length", {"best": 4, "hidden": []}, "hidden: unknown key"),
        ("Length", {"best": 4, "made": []}, "made: unknown key"),
        ("Length", {}, ": best: missing"),
        ("Length", {"best": "4"}, ': best = "4": give a whole number'),
        ("Length", {"best": 2.5}, ": best = 2.5: give a whole number"),
        ("Length", {"best": True}, ": best = true: give a whole number"),
        ("Length", {"best": 4, "names": [1]}, ": names.0 = 1: give text"),
        ("Length", {"best": 4, "names": {1, 2}}, "use plain numbers, text, lists and mappings"),
        ("Callback", {"hook": 1}, "use plain numbers, text, lists and mappings"),
        ("grade", {"scal": 1.0}, "did you mean 'scale'?"),
        ("grade", {"response": "x"}, "unknown argument 'response'"),
        ("Plain", {"size": 2}, "make it a dataclass"),
        ("NUMBER", {}, "is a int: name a function or a dataclass"),
        ("grad", {}, "did you mean 'grade'?"),
    ],
)
def test_what_cannot_be_built_is_refused_with_the_cure(own, name, args, says):
    message = refusal(build, Use(target=f"{own}:{name}", args=args))
    assert says in message and f"{own}:{name}" in message


def test_all_wrong_arguments_at_once(own):
    message = refusal(build, Use(target=f"{own}:Length", args={"best": "x", "rate": "y", "nams": 1}))
    assert all(part in message for part in (": best", ": rate", ": nams"))


def test_a_dataclasses_own_check_is_a_config_error(own):
    assert "best = 0: give 1 or more" in refusal(build, Use(target=f"{own}:Length", args={"best": 0}))


@pytest.mark.parametrize(
    "target", ["", "module", "module:", ":name", "a/b.py:name", ".relative:name", "a..b:name", "a:b.c"]
)
def test_malformed_targets_name_the_form(target):
    assert f"{target!r}: it has the form package.module:name" in refusal(find, target)


def test_a_module_that_is_not_there():
    assert "is it in the current directory" in refusal(find, "no_such_module_anywhere:name")


def test_a_missing_dependency_is_named(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import no_such_dependency\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    assert "no_such_dependency" in refusal(find, "needs_more:name")


def test_the_current_directory_is_importable_and_hides_no_library(tmp_path):
    """A folder or file here, named as a library that is imported later, must not take its place."""
    (tmp_path / "mine.py").write_text("def grade(response, payload):\n    return 1.0\n")
    (tmp_path / "colorsys.py").write_text("raise SystemExit('the wrong colorsys')\n")
    code = (
        "import sys; sys.path[:] = [p for p in sys.path if p]; "
        "from megatron_rl.config.plugins import find; find('mine:grade'); import colorsys"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_sources_that_a_config_names(tmp_path, monkeypatch):
    """Iterations that were collected ahead are dropped when one of these changes; a module is not imported for it."""
    (tmp_path / "my_reward.py").write_text("raise SystemExit('this module must not be imported here')\n")
    (tmp_path / "prompt.txt").write_text("Solve {question}")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    tree = {
        "reward": {"target": "my_reward:grade", "timeout_s": 3.0},
        "recipe": {"args": {"template": str(tmp_path / "prompt.txt"), "names": ["no_such_module:x", "12:30", "a.txt"]}},
    }
    assert sources(tree) == {
        "module my_reward": tmp_path / "my_reward.py",
        "recipe.args.template": tmp_path / "prompt.txt",
    }
    assert not sources(["megatron_rl.recipes.grpo:Grpo"]), "this package is told by its own code"
