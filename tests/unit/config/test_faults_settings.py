"""Settings that a stage or a resumed run changes take effect: a recipe's state has what was learned, and no setting."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace

import numpy as np
import pytest
from test_critics import iteration, ppo, rollouts_of
from test_methods_sampling import group, reader_of, taken
from test_recipes import context_of, half_correct, optimist, problems

from megatron_rl.algorithms.gae import FACTORS, Gae, adapted
from megatron_rl.config.base import ConfigError, Use
from megatron_rl.config.evaluation import Best, EarlyStop
from megatron_rl.config.plugins import build, find_function
from megatron_rl.recipes.curriculum import Curriculum, Rates, Record, success_rates
from megatron_rl.recipes.tango import Tango
from megatron_rl.training.credit import CreditStage
from megatron_rl.training.iteration import Collected, CreditContext, Iteration
from megatron_rl.training.progress import Progress
from megatron_rl.types import Author, Rollout, spans_of

GAE_ARGS = {"gamma": 0.5, "lam": 0.5, "level": "turn", "whiten": False, "critic_warmup": 2, "kl_coef": 0.25, "kl": "k2"}
EPISODES = {"environment": {"target": "open_centre:Counting"}, "rewards": {"letters": 1.0}}
TANGO = {"generator_updates": 4, "warmup_updates": 1}
# {recipe with a state: (arguments, other values of its arguments); a name with a dot is an argument of an argument}
RECIPES = {
    "recipes.ppo:Ppo": (
        {"updates": 4, "estimator": {"target": "gae", "args": {"kl_coef": 0.5}}},
        [{"estimator": {"target": "gae", "args": {name: value}}} for name, value in GAE_ARGS.items()]
        + [{"estimator": {"target": "gae", "args": {"kl_coef": 0.5, "kl_target": 0.1, "kl_horizon": 5}}}],
    ),
    "recipes.dapo:Dapo": (
        {"updates": 4, "curriculum": {}},
        [{"curriculum": {name: value}} for name, value in (("retire_at", 0.5), ("rest_at", 0.1), ("rest_epochs", 3))]
        + [{"curriculum": None}, {"curriculum": {"sources": {"a": {"retire_at": 0.5}}}}],
    ),
    "recipes.tango:Tango": (TANGO, []),
    "recipes.tango_agents:TangoAgents": (TANGO | EPISODES, []),
    "recipes.agents:Agents": ({"updates": 4, "compared": "ema"} | EPISODES, [{"agents": {"b": 1, "c": 1}}]),
    "contrib.hacpo:Hacpo": ({"updates": 4}, []),
    "contrib.self_play:SelfPlay": ({"updates": 4, "proposer_estimator": "ema"}, []),
    "contrib.evolve:Evolve": ({"updates": 4}, []),
}


def recipe_of(target, *args):
    """Builds a recipe; later arguments override earlier ones."""
    merged = {name: value for own in args for name, value in own.items()}
    return build(Use(target=f"megatron_rl.{target}", args=merged))


def changes(target):
    """Returns the arguments with another value, one at a time, for every number and switch of a recipe, and the
    other values in RECIPES."""
    base, others = RECIPES[target]
    found = list(others)
    for field in dataclasses.fields(find_function(f"megatron_rl.{target}")):
        value = base.get(field.name, field.default)
        if isinstance(value, (bool, int, float)) and field.init:
            new = not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else value / 2 or 0.25
            found.append({field.name: new})
    return found


@pytest.mark.parametrize("target", RECIPES)
def test_faults_a_state_in_which_nothing_was_learned_has_no_setting(target):
    """The state of a recipe with one setting gave a recipe with another setting the first recipe's value."""
    base, tried = RECIPES[target][0], 0
    default = recipe_of(target, base)
    for change in changes(target):
        try:
            other = recipe_of(target, base, change)
        except ConfigError:  # the value contradicts another argument
            continue
        tried += 1
        assert other.state_dict() == default.state_dict(), change
        again = recipe_of(target, base)
        again.load_state_dict(json.loads(json.dumps(other.state_dict())))
        assert again.state_dict() == default.state_dict(), change
    assert tried >= 3


def kl_metrics(recipe, state=None, count=2):
    """Returns the metrics of a credit, and the recipe's state after it. `state`: what was learned before."""
    if state is not None:
        recipe.load_state_dict(json.loads(json.dumps(state)))
    context = CreditContext()
    rollouts = {"generator": rollouts_of("generator", [float(i % 2) for i in range(count)])}
    recipe.credit(iteration("generator", "critic"), rollouts, context)
    return context.metrics.get("generator", {}), recipe.state_dict()


def test_faults_a_stage_has_its_own_kl_coefficient():
    first, rest = ppo(kl_coef=0.01), ppo(kl_coef=0.5)
    stage = CreditStage(rest, recipe_at=lambda number: first if number < 2 else rest)
    found = []
    for number in range(4):
        due = Iteration(cycle=number, index=0, roles=("generator", "critic"), number=number, updates={})
        rollouts = {"generator": rollouts_of("generator", [0.0, 1.0])}
        found.append(stage.apply(due, Collected(rollouts=rollouts, metrics={})).metrics["generator"]["kl_coef"])
    assert found == [0.01, 0.01, 0.5, 0.5]


def test_faults_a_resumed_run_has_its_own_kl_coefficient():
    """From 0.1 to 0 it ended with a KeyError, from 0 to 0.1 it stayed 0."""
    _, learned = kl_metrics(ppo(kl_coef=0.5, kl_target=0.01, kl_horizon=4))
    factor = learned["kl_factors"]["generator"]
    assert factor == 0.9
    assert kl_metrics(ppo(kl_coef=0.1), learned)[0]["kl_coef"] == 0.1, "without a target the coefficient is fixed"
    scaled = kl_metrics(ppo(kl_coef=0.1, kl_target=0.01, kl_horizon=4), learned)
    assert scaled[0]["kl_coef"] == pytest.approx(0.1 * factor) and scaled[1]["kl_factors"]["generator"] < factor
    assert "kl_coef" not in kl_metrics(ppo(), learned)[0]
    assert kl_metrics(ppo(kl_coef=0.1), ppo().state_dict())[0]["kl_coef"] == 0.1


def test_faults_an_adaptive_kl_coefficient_never_becomes_0():
    """As the released controllers for an update of up to kl_horizon rollouts; five times as many gave exactly 0."""
    settings = Gae(kl_coef=0.1, kl_target=0.1, kl_horizon=100)
    assert adapted(1.0, 0.0, 50, settings) == pytest.approx(1 - 0.2 * 0.5)
    assert adapted(1.0, 1.0, 100, settings) == pytest.approx(1.2)
    assert adapted(1.0, 0.0, 250, settings) == pytest.approx(0.8 * 0.8 * 0.9), "as three updates with 250 rollouts"
    factor = 1.0
    for _ in range(100):
        factor = adapted(factor, 0.0, 5000, settings)
    assert factor == FACTORS[0] > 0
    for _ in range(100):
        factor = adapted(factor, 1.0, 5000, settings)
    assert factor == FACTORS[1]


RATES = [group(0, 1.0), group(1, 0.75), group(2, 0.5), group(3, 0.125), group(4, 0.0)]


@pytest.mark.parametrize(
    ("settings", "retired", "resting"),
    [
        ({}, {0}, set()),
        ({"retire_at": 0.5}, {0, 1, 2}, set()),
        ({"retire_at": None}, set(), set()),
        ({"rest_at": 0.0}, {0}, {4}),
        ({"rest_at": 0.2}, {0}, {3, 4}),
        ({"rest_at": 0.2, "rest_epochs": 5}, {0}, {3, 4}),
    ],
)
def test_faults_a_curriculum_skips_problems_by_the_present_settings(settings, retired, resting):
    record = Record(Curriculum())
    record.learn(success_rates(RATES))
    between = Record(None)  # a stage without a curriculum
    between.load_state_dict(json.loads(json.dumps(record.state_dict())))
    between.learn(success_rates(RATES[3:]))
    again = Record(Curriculum(**settings))
    again.load_state_dict(json.loads(json.dumps(between.state_dict())))
    assert again.metrics() == {"retired": len(retired), "resting": len(resting)}
    reader = reader_of(5)
    reader.take(5)
    left = [row for row in range(5) if row not in retired | resting]
    assert taken(again, reader, len(left)) == [(1, row) for row in left]
    late = next(e for e in range(1, 9) if 4 in retired or again.admits(group(4, 0.0, epoch=e).prompt))
    assert late == (1 if not resting else 1 + again.curriculum.rest_epochs)


def test_faults_a_source_has_rates_of_its_own_in_another_stage():
    record = Record(Curriculum(retire_at=None))
    record.rates = {"math/0": (0, 0.75), "code/0": (0, 0.75)}
    again = Record(Curriculum(sources={"code": Rates(retire_at=0.5)}))
    again.load_state_dict(record.state_dict())
    assert not again.retired("math/0") and again.retired("code/0")


def scored(role, rewards):
    spans = spans_of((1, Author.ENVIRONMENT, -1), (2, Author.POLICY, 0))
    plain = {"tokens": np.zeros(3), "logprobs": np.zeros(3), "spans": spans}
    return [Rollout(role=role, group="0", rewards={"outcome": r, "letters": r, "total": r}, **plain) for r in rewards]


def test_faults_moving_averages_follow_the_present_decay_and_window():
    due = Iteration(cycle=0, index=0, roles=("agent",), number=0, updates={"agent": 0})
    old, new = (
        recipe_of("recipes.agents:Agents", RECIPES["recipes.agents:Agents"][0], {"ema_decay": d}) for d in (0.5, 0.0)
    )
    old.credit(due, {"agent": scored("agent", [1.0])}, CreditContext())
    new.load_state_dict(old.state_dict())
    advantages = [
        r.advantages for r in new.credit(due, {"agent": scored("agent", [2.0, 2.0])}, CreditContext())["agent"]
    ]
    assert advantages == [2.0 - 0.5, 0.0], "the average of the other decay first, then the last reward alone"

    both = Iteration(cycle=0, index=0, roles=("first", "second"), number=0, updates={})
    old, new = (recipe_of("contrib.hacpo:Hacpo", {"updates": 9, "window": window}) for window in (3, 1))
    for reward in (0.0, 0.0, 1.0):
        old.credit(both, {role: scored(role, [reward, reward]) for role in both.roles}, CreditContext())
    new.load_state_dict(old.state_dict())
    context = CreditContext()
    new.credit(both, {role: scored(role, [1.0, 0.0]) for role in both.roles}, context)
    assert context.metrics["first"]["capability"] == 0.5, "of the last iteration alone"


def test_faults_a_pool_of_questions_has_the_present_size():
    old, new = (recipe_of("contrib.evolve:Evolve", {"updates": 4, "pool_size": size}) for size in (8, 2))
    roles = ("proposer", "solver", "judge")
    due = Iteration(cycle=0, index=0, roles=roles, number=0, updates={})
    rollouts = {role: [] for role in roles}
    old.credit(due, rollouts, CreditContext(handed_over={"questions": [str(i) for i in range(5)]}))
    new.load_state_dict(old.state_dict())
    assert new.state_dict() == {"pool": ["3", "4"]}, "also in the first rollouts of the stage"


def test_faults_class_weights_and_the_bound_of_reviews_are_the_present_ones():
    due = Iteration(cycle=0, index=0, roles=("verifier",), number=0, updates={})
    base = {**TANGO, "class_weight_decay": 0.0}
    old = recipe_of("recipes.tango:Tango", base)
    labels = CreditContext(handed_over={"labels": [True, True, True, False]})
    rows = [replace(r, group=str(i)) for i, r in enumerate(rollouts_of("verifier", [1.0] * 4))]
    old.credit(due, {"verifier": rows}, labels)
    for change, wanted in (({"class_weight_decay": 0.5}, 2.5), ({}, 2.0)):
        new = recipe_of("recipes.tango:Tango", base, change)
        new.load_state_dict(json.loads(json.dumps(old.state_dict())))
        new.credit(due, {"verifier": rows}, CreditContext(handed_over={"labels": [True, True, False, False]}))
        assert new.state_dict()["counts"]["correct"] == wanted


def test_faults_the_verification_set_follows_the_present_settings_and_problems(tmp_path):
    """It stayed as large as it was; problems that were gone ended the run, others got solutions of former problems."""
    (tmp_path / "g.txt").write_text("Q {question}")
    (tmp_path / "v.txt").write_text("Q {question} S {solution} K {num_steps}")
    templates = {"generator_template": f"{tmp_path}/g.txt", "verifier_template": f"{tmp_path}/v.txt"}
    held_out, settings = problems(4), {"balanced_rounds": 3, **templates}
    first = context_of(half_correct, optimist)
    same = Tango(balanced_per_class=3, **settings)
    same.evaluate(held_out, first)
    for changed, evaluated in ((Tango(balanced_per_class=2, **settings), held_out), (same, problems(4)[1:])):
        again = context_of(half_correct, optimist)
        again.kept.update(json.loads(json.dumps(first.kept)))
        metrics = changed.evaluate(evaluated, again)
        assert metrics["verifier/num_correct"] == changed.balanced_per_class
        assert again.kept["balanced_solutions"] != first.kept["balanced_solutions"]


@pytest.mark.parametrize("changed", [{"metric": "b"}, {"mode": "min"}])
def test_faults_best_values_of_another_metric_are_not_compared(changed):
    """A resumed run compared a loss with the accuracies of the former setting."""
    best, stop = Best(metric="a", keep=2), EarlyStop(metric="a")
    progress = Progress()
    progress.use_rules(best, stop)
    progress.best, progress.early_stop = [(4, 0.7)], (0.7, 2)
    again = Progress(**json.loads(json.dumps(progress.state_dict())))
    again.use_rules(replace(best, keep=1), replace(stop, patience=9))
    assert again.best == [[4, 0.7]] and again.early_stop == [0.7, 2]
    again.use_rules(replace(best, **changed), stop)
    assert again.best == [] and again.early_stop == [0.7, 2]
    again.use_rules(best, replace(stop, **changed))
    assert again.early_stop is None
