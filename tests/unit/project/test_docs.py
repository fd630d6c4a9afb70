"""What the pages about methods show is what the code takes."""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from dataclasses import fields
from pathlib import Path

import pytest
from own_family import FAMILY

from megatron_rl.algorithms.estimators import ESTIMATORS
from megatron_rl.algorithms.objectives import WORDS
from megatron_rl.algorithms.policy_loss import PolicyLoss
from megatron_rl.config.files import load, read_top
from megatron_rl.config.plugins import build
from megatron_rl.config.schema import Reward, TrainConfig
from megatron_rl.environments.episode_types import Said
from megatron_rl.models import partitions
from megatron_rl.models.family import Family
from megatron_rl.models.sizes import Features

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/reference/recipes.md").read_text()
BASE = (
    "roles: {generator: {model: {path: org/model}}}\ndata: {path: problems.jsonl}\n"
    "recipe: {target: 'megatron_rl.recipes.grpo:Grpo', args: {updates: 3}}\n"
)


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("number", range(len(blocks("yaml"))))
def test_every_snippet_of_a_config_can_be_read(tmp_path, number):
    base, snippet = tmp_path / "base.yaml", tmp_path / "snippet.yaml"
    base.write_text(BASE)
    snippet.write_text(blocks("yaml")[number])
    whole = {"roles", "recipe", "data"} <= read_top([snippet]).keys()
    load(TrainConfig, [snippet] if whole else [base, snippet])


def test_every_correction_of_the_table_can_be_used(tmp_path):
    (tmp_path / "base.yaml").write_text(BASE)
    found = re.findall(r"\| (?:`clipped` with )?`(\{kind: [^`]*\})` \|", PAGE)
    assert len(found) == 7
    for text in found:
        config = load(TrainConfig, [tmp_path / "base.yaml"], [f"roles.generator.loss.correction={text}"])
        PolicyLoss(config.roles["generator"].loss)


@pytest.mark.parametrize("page", ["docs/explanation/concepts.md", "docs/reference/recipes.md"])
def test_every_objective_and_estimator_is_named(page):
    text = (ROOT / page).read_text()
    assert not [word for word in (*WORDS, *ESTIMATORS) if f"`{word}`" not in text], f"name them in {page}"


@pytest.fixture
def own_parts(tmp_path, monkeypatch):
    """The games and the tool of docs/how_to/environments.md as modules, and the runs' configs, by the run's name."""
    page = (ROOT / "docs/how_to/environments.md").read_text()
    configs, codes = (re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL) for language in ("yaml", "python"))
    for name, code in zip(("guess", "sticks", "letters"), codes, strict=True):
        (tmp_path / f"{name}.py").write_text(code)
    [prompt] = re.findall(r"    Write a word.*?\{question\}\n", page, re.DOTALL)
    (tmp_path / "ask.txt").write_text(textwrap.dedent(prompt))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for place, config in enumerate(configs):
        (tmp_path / f"{place}.yaml").write_text(config)
        found.append(load(TrainConfig, [tmp_path / f"{place}.yaml"]))
    yield {config.run.name: config for config in found}
    for name in ("guess", "sticks", "letters"):
        sys.modules.pop(name, None)


def test_the_runs_that_a_page_shows_can_be_built(own_parts):
    for name in ("guess", "sticks", "letters"):
        recipe = build(own_parts[name].recipe)
        recipe.check(own_parts[name])
        assert set(recipe.roles()) == set(own_parts[name].roles)
    assert not own_parts["guess"].preflight.reward and own_parts["letters"].preflight.reward


def test_the_game_of_one_agents_that_a_page_shows_can_be_played(own_parts):
    import guess

    game = guess.GuessTheNumber(most=10, guesses=4).copy()
    [move] = game.begin({}, seed=6)
    assert (move.agent, move.role) == ("player", "agent")
    told = [game.step(Said(agent="player", text=text)) for text in ("3", "I say 9.", "none", "7")]
    said = [move.messages[0]["content"] for [move] in told[:3]]
    assert said == ["Too small.\n", "Too large.\n", "This was no number.\n"]
    assert told[3].rewards == {"player": {"won": 1.0}}
    [move] = game.begin({}, seed=6) and game.step(Said(agent="player", text="9" * 5000))
    assert move.messages[0]["content"] == "Too large.\n"


def test_the_game_of_two_agents_that_a_page_shows_can_be_played(own_parts):
    import sticks

    game = sticks.Sticks(sticks=5).copy()
    [move] = game.begin({}, seed=6)
    assert (move.agent, move.role) == ("first", "alice") and "5 sticks are left" in move.messages[0]["content"]
    [move] = game.step(Said(agent="first", text="I take 3"))
    assert (move.agent, move.role) == ("second", "bob") and "2 sticks are left" in move.messages[0]["content"]
    assert game.step(Said(agent="second", text="2")).rewards == {"first": {"won": 0.0}, "second": {"won": 1.0}}
    for wrong in (Said(agent="first", text="4"), Said(agent="first", text="", stop=None)):
        game.begin({}, seed=6)
        assert game.step(wrong).rewards == {"first": {"won": 0.0}}, "the second agent has no sample"


def test_the_tool_that_a_page_shows_can_be_called(own_parts):
    import letters

    tool = letters.CountLetters()
    assert tool.run({"text": "Strawberry, r"}) == "3"
    assert all(tool.run(given).startswith("error: write a word") for given in ({}, {"text": "a"}, {"text": "a, bc"}))


def test_the_page_about_families_shows_one_as_it_is_and_names_all_that_one_can_say():
    page = (ROOT / "docs/how_to/adding_a_model.md").read_text()
    assert (ROOT / "megatron_rl/models/olmo2.py").read_text() in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    members = {name for name in (*vars(Family), "model_type") if not name.startswith("_")}
    own = {
        name
        for name, cut in vars(partitions).items()
        if isinstance(cut, type) and cut.__module__ == partitions.__name__
    }
    ways = {name for name in own if hasattr(vars(partitions)[name], "held")} - {"Partition"}
    wanted = {*members, *ways, *(field.name for field in fields(Features))}
    assert len(ways) == 7 and not {name for name in wanted if f"`{name}`" not in page}
    linked = re.findall(r"\]\(([^)#]+)\)", page) + re.findall(r"`((?:tests|megatron)/[\w/]*\.?\w*)`", page)
    rooms = [ROOT / room for room in ("docs/how_to", ".", "megatron_rl")]
    assert not [name for name in linked if not any((room / name).exists() for room in rooms)]


def test_the_family_that_a_page_shows_is_the_one_that_is_trained():
    page = (ROOT / "docs/how_to/adding_a_model.md").read_text()
    [code] = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if FAMILY.model_type in block]
    space = {}
    exec(code, space)  # the page's own code
    shown = space["FAMILY"]
    assert (shown.model_type, shown.settled, shown.common) == (FAMILY.model_type, FAMILY.settled, FAMILY.common)


def test_every_packaged_reward_is_named_and_can_be_found():
    """The page named `reasoning_gym:grade`, which there is not, and left half of them out."""
    page = (ROOT / "docs/how_to/writing_a_reward.md").read_text()
    named = re.findall(r"^\| `(megatron_rl\.rewards\.\w+:\w+)`", page, re.MULTILINE)
    found = [
        f"megatron_rl.rewards.{file.stem}:{node.name}"
        for file in (ROOT / "megatron_rl/rewards").glob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        and [argument.arg for argument in node.args.args[:2]] == ["response", "payload"]
    ]  # fmt: skip
    found.append("megatron_rl.rewards.reward_server:ServedRewardModel")  # the only reward that is a class
    assert sorted(named) == sorted(found) and Reward().target == named[0]


def test_the_readmes_metrics_of_the_demo_are_those_of_its_page():
    rows = [
        re.findall(r"^\| (?:generator|verifier), .*\|$", (ROOT / name).read_text(), re.MULTILINE)
        for name in ("README.md", "docs/experiments/last_letter.md")
    ]
    assert len(rows[0]) == 4 and rows[0] == rows[1]
