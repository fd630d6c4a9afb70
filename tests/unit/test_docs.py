"""What the pages about methods show is what the code takes."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from megatron_rl.algorithms.estimators import ESTIMATORS
from megatron_rl.algorithms.losses import PolicyLoss
from megatron_rl.algorithms.objectives import WORDS
from megatron_rl.config.files import load, read_keys
from megatron_rl.config.plugins import build
from megatron_rl.config.schema import TrainConfig
from megatron_rl.environments.moves import Said
from megatron_rl.models import cuts
from megatron_rl.models.base import Family
from megatron_rl.models.sizes import Features

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/writing_a_recipe.md").read_text()
BASE = (
    "roles: {generator: {model: {path: org/model}}}\ndata: {path: problems.jsonl}\n"
    "recipe: {target: 'megatron_rl.recipes.grpo:Grpo', args: {updates: 3}}\n"
)


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_recipe_that_the_page_shows_whole_is_the_packaged_one():
    [shown] = [block for block in blocks("python") if "class Grpo(" in block]
    assert shown == (ROOT / "megatron_rl/recipes/grpo.py").read_text()


@pytest.mark.parametrize("number", range(len(blocks("yaml"))))
def test_every_snippet_of_a_config_can_be_read(tmp_path, number):
    base, snippet = tmp_path / "base.yaml", tmp_path / "snippet.yaml"
    base.write_text(BASE)
    snippet.write_text(blocks("yaml")[number])
    whole = {"roles", "recipe", "data"} <= read_keys([snippet])
    load(TrainConfig, [snippet] if whole else [base, snippet])


def test_every_correction_of_the_table_can_be_used(tmp_path):
    (tmp_path / "base.yaml").write_text(BASE)
    found = re.findall(r"\| (?:`clipped` with )?`(\{kind: [^`]*\})` \|", PAGE)
    assert len(found) == 7
    for text in found:
        config = load(TrainConfig, [tmp_path / "base.yaml"], [f"roles.generator.loss.correction={text}"])
        PolicyLoss(config.roles["generator"].loss)


@pytest.mark.parametrize("page", ["docs/concepts.md", "docs/writing_a_recipe.md"])
def test_every_objective_and_estimator_is_named(page):
    text = (ROOT / page).read_text()
    assert not [word for word in (*WORDS, *ESTIMATORS) if f"`{word}`" not in text], f"name them in {page}"


def test_the_environment_that_a_page_shows_can_be_played(tmp_path, monkeypatch):
    page = (ROOT / "docs/environments.md").read_text()
    configs, [code] = (re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL) for language in ("yaml", "python"))
    (tmp_path / "guess.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    for place, config in enumerate(configs):
        (tmp_path / f"{place}.yaml").write_text(config)
    tools, own = (load(TrainConfig, [tmp_path / f"{place}.yaml"]) for place in range(2))
    assert tools.recipe.target == "megatron_rl.recipes.agents:Agents"
    recipe = build(own.recipe)
    recipe.check(own)
    assert recipe.rewards == {"won": 1.0} and not own.gate.reward
    space = {}
    exec(code, space)  # the page's own code
    game = space["GuessTheNumber"](most=10, guesses=4).copy()
    [move] = game.begin({}, seed=6)
    assert (move.seat, move.role) == ("player", "agent")
    told = [game.step(Said(seat="player", text=text)) for text in ("3", "I say 9.", "none", "7")]
    said = [move.messages[0]["content"] for [move] in told[:3]]
    assert said == ["Too small.\n", "Too large.\n", "This was no number.\n"]
    assert told[3].rewards == {"player": {"won": 1.0}}


def test_the_page_about_families_shows_one_as_it_is_and_names_all_that_one_can_say():
    page = (ROOT / "docs/adding_a_model.md").read_text()
    assert re.findall(r"```python\n(.*?)```", page, re.DOTALL) == [(ROOT / "megatron_rl/models/olmo2.py").read_text()]
    members = {name for name in (*vars(Family), "model_type") if not name.startswith("_")}
    own = {name for name, cut in vars(cuts).items() if isinstance(cut, type) and cut.__module__ == cuts.__name__}
    ways = {name for name in own if hasattr(vars(cuts)[name], "held")} - {"Cut"}
    wanted = {*members, *ways, *(field.name for field in fields(Features))}
    assert len(ways) == 7 and not {name for name in wanted if f"`{name}`" not in page}
    linked = re.findall(r"\]\(([^)#]+)\)", page) + re.findall(r"`((?:tests|megatron)/[\w/]*\.?\w*)`", page)
    rooms = [ROOT / room for room in ("docs", ".", "megatron_rl")]
    assert not [name for name in linked if not any((room / name).exists() for room in rooms)]
