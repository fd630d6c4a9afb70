"""Settings of a run that its recipe cannot work with are refused by `megatron-rl check`, before anything starts."""

import re

import pytest
import specs as checks

from megatron_rl.config import plugins
from megatron_rl.config.files import load
from megatron_rl.config.schema import ConfigError, TrainConfig, Use

TANDEM = "roles.generator.tandem={}"
VOTES = "rollouts.labels=votes"
HINTS = "recipe.args.hints={field: proof}"
DPO = "roles.generator.loss.objective=dpo"
CASES = [
    (
        "recipes.dapo:Dapo", ["recipe.args.overlong.cache=51"],
        "recipe.args.overlong.cache = 51 is above roles.generator.sampling.max_tokens = 50: give at most that",
    ),
    ("contrib.remax:Remax", ["recipe.args.overlong.cache=51"], "recipe.args.overlong.cache = 51"),
    ("recipes.tandem:Tandem", [TANDEM, "recipe.args.overlong.cache=51"], "recipe.args.overlong.cache = 51"),
    (
        "recipes.dapo:Dapo", [HINTS],
        "data.fields.proof is not set, and recipe.args.hints reads the field 'proof' of every problem: set it to the "
        "name of the column",
    ),
    (
        "recipes.dapo:Dapo", [HINTS, "data.fields={proof: x}", "roles.generator.data.path=y"],
        "roles.generator.data.fields.proof is not set",
    ),
    ("recipes.dapo:Dapo", ["recipe.args.hints={}", "data.settings=gsm8k"], "data.fields.solution"),
    ("recipes.tandem:Tandem", [], "set roles.generator.tandem; {} takes a frozen copy"),
    ("contrib.rubric:Rubric", ["roles.judge.model.path=x/z"], "data.fields.rubric"),
    (
        "contrib.rubric:Rubric", ["roles.judge.model.path=x/z", "data.fields={rubric: x}",
            "evaluation.sets=[{path: y, fields: {question: q}}]"],
        "evaluation.sets.y.fields.rubric",
    ),
    ("contrib.entailment:Entailment", ["data.fields={response: x}"], "data.fields.principle"),
    ("contrib.rubric:Rubric", ["recipe.args.labels=math:pi"], "'math:pi' is a float: name a function"),
    ("recipes.tango:Tango", ["recipe.args={step_labels: 'math:pi'}"], "'math:pi' is a float: name a function"),
    ("recipes.online_dpo:OnlineDpo", [DPO, "recipe.args.estimator=rloo"], "'rloo': pairs need no estimator"),
    ("recipes.online_dpo:OnlineDpo", [DPO, "recipe.args.group_size=1"], "recipe.args.group_size = 1"),
    ("recipes.dapo:Dapo", [VOTES, HINTS, "data.fields={proof: x}"], "recipe.args.hints show known solutions"),
    ("recipes.dapo:Dapo", [VOTES, "recipe.args.curriculum={}"], "recipe.args.curriculum retires problems that are"),
    ("contrib.remax:Remax", [VOTES], "recipe megatron_rl.contrib.remax:Remax has no groups of samples that elect"),
    ("recipes.tango:Tango", [VOTES, "roles.verifier.model.path=x/z"], "Tango has no groups of samples that elect"),
    (
        "recipes.grpo:Grpo", [VOTES, "recipe.args={group_size: 1, estimator: reinforce}"],
        "rollouts.labels = 'votes' with one sample of a problem",
    ),
    ("recipes.grpo:Grpo", ["recipe.args.estimator=math:pi"], "'math:pi' is a float: name a function"),
]  # fmt: skip
ACCEPTED = [
    ("recipes.online_dpo:OnlineDpo", [DPO]),
    ("recipes.dapo:Dapo", ["recipe.args.overlong.cache=50", "evaluation.sets=[{path: y}]"]),
    ("recipes.dapo:Dapo", [HINTS, "data.fields={proof: x}", "evaluation.sets=[{path: y}]"]),
    ("recipes.dapo:Dapo", [HINTS, "roles.generator.data={path: y, fields: {proof: x}}"]),
    ("recipes.tandem:Tandem", [TANDEM, VOTES]),
    ("recipes.ppo:Ppo", [VOTES, "recipe.args.group_size=4", "roles.critic={model: {path: x/y}, head: value}"]),
    (
        "contrib.rubric:Rubric",  # a set of one's own has the fields of the data
        ["roles.judge.model.path=x/z", "data.fields={rubric: x}", "evaluation.sets=[{path: y}]"],
    ),
    ("contrib.entailment:Entailment", ["data.fields={response: x, principle: y}"]),
]  # fmt: skip


@pytest.fixture
def check(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "roles: {generator: {model: {path: x/y}, sampling: {max_tokens: 50}}}\n"
        "data: {path: problems.jsonl}\nrecipe: {target: t, args: {updates: 3}}\n"
    )

    def found(recipe, overrides):
        if recipe.endswith(":Tango"):  # which counts the generator's updates
            file.write_text(file.read_text().replace("updates", "generator_updates"))
        config = load(TrainConfig, [file], [f"recipe.target=megatron_rl.{recipe}", *overrides])
        checks.check_recipe(config, plugins.build(config.recipe))

    return found


@pytest.mark.parametrize(("recipe", "overrides", "message"), CASES)
def test_what_the_config_alone_tells_is_refused(check, recipe, overrides, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check(recipe, overrides)


@pytest.mark.parametrize(
    ("recipe", "argument", "value"),
    [
        ("contrib.remax:Remax", "group_size", 0),
        ("contrib.entailment:Entailment", "group_size", 10**7),
        ("recipes.tandem:Tandem", "group_size", 10**7),
    ],
)
def test_a_recipe_with_another_default_keeps_the_bounds_of_the_argument(recipe, argument, value):
    """The new default had a plain type, such as int, beside it, which lifted the bounds."""
    updates = {"updates": 1} if "Tango" not in recipe else {}
    with pytest.raises(ConfigError, match=f"{argument} = {value}: give"):
        plugins.build(Use(target=f"megatron_rl.{recipe}", args={**updates, argument: value}))


@pytest.mark.parametrize(("recipe", "overrides"), ACCEPTED)
def test_what_can_be_played_with_is_accepted(check, recipe, overrides):
    check(recipe, overrides)


LACKING = [
    ("recipes.grpo:Grpo", {"template": "Solve it."}, "question"),
    ("contrib.ssrl:Ssrl", {"template": "{Question}"}, "question"),
    ("recipes.dapo:Dapo", {"template": "{ question }"}, "question"),
    ("recipes.distil:Distil", {"template": "{answer}"}, "question"),
    ("contrib.entailment:Entailment", {"template": "{question} {criterion}"}, "response"),
    ("recipes.tango:Tango", {"generator_template": "Solve it."}, "question"),
    ("recipes.tango:Tango", {"verifier_template": "{question} {num_steps}"}, "solution"),
    ("contrib.rubric:Rubric", {"generator_template": "Write."}, "question"),
    ("contrib.rubric:Rubric", {"judge_template": "{question} {criterion} {tiers}"}, "response"),
    ("contrib.rubric:Rubric", {"judge_template": "{question} {response}"}, "criterion"),
    ("contrib.pairwise:Pairwise", {"generator_template": "Write."}, "question"),
    ("contrib.pairwise:Pairwise", {"judge_template": "{question} {first}"}, "second"),
    ("contrib.self_play:SelfPlay", {"solver_template": "Solve it."}, "question"),
    ("contrib.evolve:Evolve", {"reference_template": "Something new."}, "references"),
    ("contrib.evolve:Evolve", {"solver_template": "Solve it."}, "question"),
    ("contrib.evolve:Evolve", {"question_template": "Is it good?"}, "question"),
    ("contrib.evolve:Evolve", {"answer_template": "{question}"}, "answer"),
]
ENOUGH = [
    ("contrib.self_play:SelfPlay", {"proposer_template": "Write a problem."}),  # of nothing, as in R-Zero
    ("contrib.evolve:Evolve", {"proposer_template": "Write a problem."}),
    ("recipes.tango:Tango", {"verifier_template": "{question} {solution}"}),
    ("contrib.rubric:Rubric", {"judge_template": "{response} {criterion}"}),  # a criterion may speak for itself
    ("contrib.pairwise:Pairwise", {"judge_template": "{first} {second}"}),
]


def built(recipe, templates, tmp_path):
    args = {"generator_updates" if recipe == "recipes.tango:Tango" else "updates": 1}
    for name, text in templates.items():
        (tmp_path / name).write_text(text)
        args[name] = str(tmp_path / name)
    return plugins.build(Use(target=f"megatron_rl.{recipe}", args=args))


@pytest.mark.parametrize(("recipe", "templates", "lacks"), LACKING)
def test_a_template_without_what_it_is_about_is_refused(tmp_path, recipe, templates, lacks):
    [name] = templates
    said = f"recipe.args.{name} = '{tmp_path / name}': the text has no {{{lacks}}}; write the name"
    with pytest.raises(ConfigError, match=re.escape(said)):
        built(recipe, templates, tmp_path)


@pytest.mark.parametrize(("recipe", "templates"), ENOUGH)
def test_a_template_needs_no_more_than_what_it_is_about(tmp_path, recipe, templates):
    built(recipe, templates, tmp_path)


def test_all_that_a_template_lacks_is_named(tmp_path):
    with pytest.raises(ConfigError, match=re.escape("has no {first} and no {second}; write")):
        built("contrib.pairwise:Pairwise", {"judge_template": "Which?"}, tmp_path)
