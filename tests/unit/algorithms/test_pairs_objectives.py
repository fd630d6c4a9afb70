"""The table of pairs of a loss objective and a recipe: `check` accepts exactly the pairs in which the loss reads what
the recipe gives it. In each of them another signal changes the gradient.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import specs
import torch

from megatron_rl import contrib, recipes
from megatron_rl.algorithms.objectives import WORDS, Objective
from megatron_rl.algorithms.value_loss import loss_of
from megatron_rl.batches.packed_batch import IN_ADVANTAGES, SIGNALS, Statistics, inputs_of_rollouts, pack
from megatron_rl.config.files import load
from megatron_rl.config.schema import ConfigError, SftConfig, TrainConfig
from megatron_rl.recipes.grpo import Grpo
from megatron_rl.spec import checks
from megatron_rl.spec.resolve import resolve
from megatron_rl.training.iteration import Recipe, RecipeRole
from megatron_rl.types import Author, Rollout, spans_of

ROOT = Path(__file__).parents[3] / "examples"
HACPO = "megatron_rl.contrib.hacpo:hacpo"
OBJECTIVES = [*WORDS, HACPO]
COMPARED = {"clipped", "gspo", "gmpo", "cispo", "sapo", "dppo_tv", "dppo_kl", "vespo", "reinforce", "rover"}
PAIRS = {"dpo", "dpo_norm", "ipo", "simpo"}
# row of the table: (example, settings in addition to it, {trained role that generates: objectives that it can have})
TABLE = {
    "Agents": ("miniatures/agent/agent", [], {"agent": COMPARED}),
    "Dapo": ("published/dapo_qwen2.5_32b", [], {"generator": COMPARED}),
    "Distil, top_k 0": ("published/distil_llama3.2_1b_from_qwen3_4b", [], {"student": {"distilled"}}),
    "Distil, top_k": ("published/distil_qwen3_1.7b", [], {"student": {"distilled_top_k"}}),
    "Entailment": ("published/entailment_qwen3_32b", [], {"generator": COMPARED}),
    "Evolve": ("published/evolve_three_qwen2.5_3b", [], dict.fromkeys(("proposer", "solver", "judge"), COMPARED)),
    "Grpo": ("published/methods/grpo", [], {"generator": COMPARED}),
    "Hacpo": ("published/hacpo_qwen3_4b_llama3.2_3b", [], {"first": {HACPO}, "second": {HACPO}}),
    "OnlineDpo": ("miniatures/last_letter/online_dpo", [], {"generator": PAIRS}),
    "Pairwise": ("published/pairwise_qwen3_8b", [], dict.fromkeys(("generator", "judge"), COMPARED)),
    "Ppo": ("published/methods/ppo", [], {"generator": COMPARED}),
    "Ppo, shared critic": ("published/methods/grpo", [
        "recipe.target=megatron_rl.recipes.ppo:Ppo", "recipe.args.estimator=gae",
        "roles.critic={same_as: generator, head: value}", "roles.generator.loss.value_coef=0.5"],
        {"generator": COMPARED}),
    "Remax": ("published/methods/grpo", [
        "recipe.target=megatron_rl.contrib.remax:Remax", "recipe.args.estimator=reinforce"], {"generator": COMPARED}),
    "Rubric": ("published/rubric_qwen3_30b_a3b", [], {"generator": COMPARED}),
    "SelfPlay": ("published/self_play_ssp_qwen2.5_7b", [], {"proposer": COMPARED}),
    "Ssrl": ("published/ssrl_llama3.2_3b", [], {"generator": COMPARED}),
    "Tandem": ("published/tandem_qwen3_4b", [], {"generator": COMPARED}),
    "Tango": ("published/tango_qwen2.5_7b", [], dict.fromkeys(("generator", "verifier"), COMPARED)),
    "Tango, critics": ("published/tango_gae_qwen2.5_7b", [], dict.fromkeys(("generator", "verifier"), COMPARED)),
    "TangoAgents": ("miniatures/tango_agent/tango", [], dict.fromkeys(("generator", "verifier"), COMPARED)),
}  # fmt: skip
SFT = {"nll", *PAIRS, "kto", "a_lol", "rwr", "bradley_terry", "prm"}


@pytest.fixture(scope="module")
def spec_of_row():
    """Returns a function (row of the table) -> the specification of the row's example."""
    made = {}

    def spec(row):
        if row not in made:
            example, more, _ = TABLE[row]
            made[row] = specs.spec_of(load(TrainConfig, [ROOT / f"{example}.yaml"], more))
        return made[row]

    return spec


def with_objective(spec, role, objective):
    """Returns a specification in which a role's policy has another objective."""
    owner = spec.roles[role].owner
    loss = replace(spec.roles[owner].loss, objective=objective, objective_args={}, clip_low=0.2, clip_high=0.2)
    sharing = [name for name, one in spec.roles.items() if one.owner == owner]
    return replace(spec, roles=spec.roles | {name: replace(spec.roles[name], loss=loss) for name in sharing})


def test_pairs_the_table_has_every_packaged_recipe_and_objective():
    named, objectives = set(), set()
    for package in (recipes, contrib):
        for item in pkgutil.iter_modules(package.__path__):
            module = importlib.import_module(f"{package.__name__}.{item.name}")
            for name, one in vars(module).items():
                here = getattr(one, "__module__", None) == module.__name__ and isinstance(one, type)
                named |= {name} if here and issubclass(one, Recipe) and not inspect.isabstract(one) else set()
                objectives |= {f"{module.__name__}:{name}"} if isinstance(one, Objective) else set()
    assert named == {row.split(",")[0] for row in TABLE} and objectives == {HACPO}


@pytest.mark.parametrize("row", TABLE)
def test_pairs_check_accepts_what_fits_and_refuses_the_rest_with_a_cure(row, spec_of_row):
    spec = spec_of_row(row)
    parts = {name: part for name, part in spec.recipe.roles().items() if part.trained and part.head is None}
    accepted = TABLE[row][2]
    assert parts.keys() == accepted.keys() or {spec.roles[name].owner for name in parts} == accepted.keys()
    for role in accepted:
        for objective in OBJECTIVES:
            problems = checks.recipe_problems(with_objective(spec, role, objective))
            if objective in accepted[role]:
                assert problems == [], (role, objective, problems)
                continue
            text = "\n".join(problems)
            assert objective in text, (role, objective, problems)
            if objective in ("bradley_terry", "prm"):
                assert "train reward models with `megatron-rl sft`" in text
                continue
            cure = re.search(r"needs .*, and recipe .* gives .*: take ([^;\n]*)", text)
            assert cure is not None, (role, objective, problems)
            assert {*re.split(", | or ", cure[1])} == accepted[role], "the message names exactly what is accepted"


def rollouts_giving(gives):
    """Returns four rollouts, two of each group, that give a loss what `gives` names. Each has six tokens, of which the
    last four are in the loss."""
    draw, rollouts = np.random.default_rng(3), []
    for number in range(4):
        values = {name: draw.normal(-1, 0.3, 6).astype(np.float32) for name in sorted(gives - SIGNALS)}
        if "candidates" in gives:
            values["candidates"] = draw.integers(0, 9, (6, 2)).astype(np.int32)
            values["teacher_candidate_logprobs"] = draw.normal(-1, 0.3, (6, 2)).astype(np.float32)
        if "cross_clip_low" in gives:  # the first rollout of a group is the learner's own
            values["cross_clip_low"] = np.full(6, (-1.0, 0.5)[number % 2], np.float32)
        spans = spans_of((2, Author.ENVIRONMENT, -1), (2, Author.PARTNER, -1), (2, Author.POLICY, 0))
        rollouts.append(
            Rollout(role="a", group=str(number // 2), tokens=np.arange(6), logprobs=np.full(6, -1.0), spans=spans,
                    advantages=float(draw.normal()), values=values, partner_weight=1.0)
        )  # fmt: skip
    return rollouts


def with_another(rollouts, signal):
    """Returns the rollouts with another value of a signal."""
    if signal == "pairs":
        return [rollouts[place] for place in (1, 0, 2, 3)]
    if signal in IN_ADVANTAGES:
        return [replace(rollout, advantages=-rollout.advantages) for rollout in rollouts]
    if signal in ("targets", "demonstrations"):  # the partner's tokens are in the loss, or not
        return [replace(rollout, partner_weight=0.0) for rollout in rollouts]
    if signal == "cross_clip_low":  # the other model wrote the rollout
        return [
            replace(rollout, values={**rollout.values, signal: np.full(6, 0.95, np.float32)}) for rollout in rollouts
        ]
    return [
        replace(rollout, values={**rollout.values, signal: rollout.values[signal] * np.float32(0.5)})
        for rollout in rollouts
    ]


def gradient(loss, rollouts, order=(0, 1, 2, 3)):
    """Returns the gradient of a loss with respect to all statistics of the model, [rollout, ...]. The statistics are
    the same for every call. `order`: places of the rollouts before `with_another` changed their order."""
    draw, batch = torch.Generator().manual_seed(5), pack(rollouts)
    size, places = len(batch.tokens), torch.cat([torch.arange(6) + 6 * place for place in order])
    old, reference, logprobs, entropy, mean, value = (-torch.rand(size, generator=draw) - 0.5 for _ in range(6))
    live = [one[places].requires_grad_() for one in (logprobs, entropy, value)]
    candidates = (-torch.rand(size, 2, generator=draw) - 0.9)[places].requires_grad_()
    batch = replace(
        batch, old_logprobs=old[places], reference_logprobs=reference[places],
        values={**batch.values, "old_vocab_mean": mean[places]},
    )  # fmt: skip
    total, _ = loss(Statistics(live[0], live[1], mean[places], candidates, live[2]), batch)
    total.backward()
    parts = [*(one.grad for one in live), candidates.grad]
    rows = [part.reshape(4, -1)[list(np.argsort(order))] for part in parts if part is not None]
    return torch.cat(rows, dim=1)


def changes_the_gradient(loss, gives, signal):
    rollouts = rollouts_giving(gives)
    order = (1, 0, 2, 3) if signal == "pairs" else (0, 1, 2, 3)
    first, second = gradient(loss, rollouts), gradient(loss, with_another(rollouts, signal), order)
    assert torch.isfinite(first).all() and torch.isfinite(second).all()
    return not torch.allclose(first, second, atol=1e-4)


@pytest.mark.parametrize("row", TABLE)
def test_pairs_another_signal_changes_the_gradient_in_every_accepted_cell(row, spec_of_row):
    spec = spec_of_row(row)
    parts, accepted = spec.recipe.roles(), TABLE[row][2]
    critics = [name for name, part in parts.items() if part.trained and part.head is not None]
    cells = [(role, objective) for role in accepted for objective in sorted(accepted[role])]
    for role, objective in [*cells, *((name, None) for name in critics)]:
        own = spec if objective is None else with_objective(spec, role, objective)
        owner = own.roles[own.roles[role].owner]
        loss = loss_of(replace(owner, loss=replace(owner.loss, kl_coef=0.0, entropy_coef=0.0, value_clip=0.1)))
        inputs = inputs_of_rollouts(loss.needs)
        unread = {"candidates", *({"teacher_logprobs"} if objective == "distilled_top_k" else ())}
        for signal in parts[role].gives - unread:  # the model reads the candidates, not the loss
            assert changes_the_gradient(loss, inputs, signal), (role, objective, signal)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_pairs_sft_accepts_what_rows_of_data_give_and_another_row_changes_the_gradient(objective):
    settings = ["model.path=org/model", "data.train=rows.jsonl", f"loss.objective={objective}"]
    spec = specs.spec_of(load(SftConfig, [], settings))
    problems = checks.problems(spec, to_come=True)
    if objective not in SFT:
        [text] = problems
        cure = re.search(r"needs .*, which rows of data do not have: take ([^(]*) \(", text)
        assert cure is not None and {*re.split(", | or ", cure[1])} == SFT
        return
    loss = loss_of(spec.roles["model"])
    signals = inputs_of_rollouts(loss.needs)
    assert problems == [] and signals
    assert all(changes_the_gradient(loss, signals, signal) for signal in signals)


def by_default(live, batch):
    """Stands for an objective of a user, who declares nothing."""
    return -live.logprobs * batch.advantages


@dataclass(frozen=True, kw_only=True)
class Declaring(Grpo):
    """Stands for a recipe of a user, with a declaration of what its rollouts give."""

    gives: tuple[str, ...] = ("advantages",)
    critic: bool = False

    def roles(self):
        parts = {name: replace(part, gives=frozenset(self.gives)) for name, part in super().roles().items()}
        return parts | ({"critic": RecipeRole(head="value")} if self.critic else {})


HERE = f"{__name__}:by_default"
GRPO = ["recipe.target=megatron_rl.recipes.grpo:Grpo"]
DECLARED = [  # (settings, objective, what the message says or None)
    (GRPO, HERE, None),
    (["recipe.target=megatron_rl.recipes.online_dpo:OnlineDpo"], HERE, "advantages, and .* gives pairs: take dpo"),
    (GRPO, "dpo", "pairs can be had from the recipe megatron_rl.recipes.online_dpo:OnlineDpo"),
    (GRPO, "nll", "gives advantages: take .*; targets can be had from `megatron-rl sft`"),
    (["recipe.args.gives=[targets]"], "nll", None),
    (["recipe.args.gives=[rewards]"], "rwr", None),
    (["recipe.args.gives=[rewards]"], "clipped", "needs advantages, and .* gives rewards: take a_lol or rwr; declare"),
    (["recipe.args.gives=[advantages, demonstrations]"], "rl_plus", None),
    (["recipe.args.gives=[advantages, demonstrations]"], "clipped", "advantages and demonstrations: take rl_plus"),
    (["recipe.args.gives=[weights]"], "clipped", "needs advantages, and .* gives weights: declare what your objective"),
    (["recipe.args.critic=true", "roles.critic={model: {path: x/y}, head: value}"], "clipped",
     "roles.critic.head = 'value' needs old_value and returns, and .* gives advantages: declare what your"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "objective", "says"), DECLARED)
def test_pairs_objectives_and_recipes_of_users_are_compared_by_what_they_declare(settings, objective, says):
    given = ["roles.generator.model.path=x/y", "data.path=p.jsonl", f"recipe.target={__name__}:Declaring"]
    given += [f"roles.generator.loss.objective={objective}", "recipe.args.updates=3"]
    spec = specs.spec_of(load(TrainConfig, [], [*given, *settings]))
    problems = checks.recipe_problems(spec)
    assert bool(problems) == (says is not None), problems
    assert says is None or re.search(says, problems[0]), problems


def test_pairs_a_stage_whose_recipe_gives_something_else_is_refused():
    """A stage that changes the objective itself is refused in test_stages.py."""
    stage = {"until": 2, "overrides": {"recipe.args.top_k": 0}}
    config = load(TrainConfig, [ROOT / "published/distil_qwen3_1.7b.yaml"], [f"stages={json.dumps([stage])}"])
    with pytest.raises(ConfigError, match=r"stages\[0\]: roles.student.loss.objective = 'distilled_top_k' needs"):
        resolve(config, 8, to_come=True)
