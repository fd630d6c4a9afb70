"""Settings of a run that its recipe cannot play with are refused by `megatron-rl check`, before anything starts."""

import re

import pytest

from megatron_rl.config import checks, plugins
from megatron_rl.config.files import load
from megatron_rl.config.schema import ConfigError, TrainConfig

TANDEM = "roles.generator.tandem={}"
HINTS = "recipe.args.hints={field: proof}"
CASES = [
    (
        "dapo:Dapo", ["recipe.args.overlong.cache=51"],
        "recipe.args.overlong.cache = 51 is above roles.generator.sampling.max_tokens = 50: give at most that",
    ),
    ("remax:Remax", ["recipe.args.overlong.cache=51"], "recipe.args.overlong.cache = 51"),
    ("tandem:Tandem", [TANDEM, "recipe.args.overlong.cache=51"], "recipe.args.overlong.cache = 51"),
    (
        "dapo:Dapo", [HINTS],
        "data.fields.proof is not set, and recipe.args.hints reads the field 'proof' of every problem: set it to the "
        "name of the column",
    ),
    (
        "dapo:Dapo", [HINTS, "data.fields={proof: x}", "roles.generator.data.path=y"],
        "roles.generator.data.fields.proof is not set",
    ),
    ("dapo:Dapo", ["recipe.args.hints={}", "data.settings=gsm8k"], "data.fields.solution"),
    ("tandem:Tandem", [], "set roles.generator.tandem; {} takes a frozen copy"),
    ("rubric:Rubric", ["roles.judge.model.path=x/z"], "data.fields.rubric"),
    (
        "rubric:Rubric", ["roles.judge.model.path=x/z", "data.fields={rubric: x}", "evaluation.prompts.path=y"],
        "evaluation.prompts.fields.rubric",
    ),
    ("entailment:Entailment", ["data.fields={response: x}"], "data.fields.principle"),
    ("rubric:Rubric", ["recipe.args.labels=math:pi"], "'math:pi' is a float: name a function"),
    ("tango:Tango", ["recipe.args={step_labels: 'math:pi'}"], "'math:pi' is a float: name a function"),
    ("grpo:Grpo", ["recipe.args.estimator=math:pi"], "'math:pi' is a float: name a function"),
]  # fmt: skip
ACCEPTED = [
    ("dapo:Dapo", ["recipe.args.overlong.cache=50", "evaluation.prompts.path=y"]),
    ("dapo:Dapo", [HINTS, "data.fields={proof: x}", "evaluation.prompts.path=y"]),
    ("dapo:Dapo", [HINTS, "roles.generator.data={path: y, fields: {proof: x}}"]),
    ("tandem:Tandem", [TANDEM]),
    ("rubric:Rubric", ["roles.judge.model.path=x/z", "data.fields={rubric: x}"]),
    ("entailment:Entailment", ["data.fields={response: x, principle: y}"]),
]  # fmt: skip


@pytest.fixture
def check(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "roles: {generator: {model: {path: x/y}, sampling: {max_tokens: 50}}}\n"
        "data: {path: problems.jsonl}\nrecipe: {target: t, args: {updates: 3}}\n"
    )

    def found(recipe, overrides):
        config = load(TrainConfig, [file], [f"recipe.target=megatron_rl.recipes.{recipe}", *overrides])
        checks.check_recipe(config, plugins.build(config.recipe))

    return found


@pytest.mark.parametrize(("recipe", "overrides", "message"), CASES)
def test_what_the_config_alone_tells_is_refused(check, recipe, overrides, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check(recipe, overrides)


@pytest.mark.parametrize(("recipe", "overrides"), ACCEPTED)
def test_what_can_be_played_with_is_accepted(check, recipe, overrides):
    check(recipe, overrides)
