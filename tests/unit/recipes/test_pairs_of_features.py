"""The table of pairs of features (docs/reference/pairs.md): each pair is tested, refused by `check`, or documented."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from scripted_rollouts import context_of, iteration, reader_of
from test_methods_votes import N, agrees, writes
from test_pairs_objectives import TABLE
from test_reward_models import solution

from megatron_rl.config.files import load
from megatron_rl.config.schema import ConfigError, TrainConfig
from megatron_rl.contrib.ssrl import Ssrl
from megatron_rl.data.scored_texts import scored_rollout
from megatron_rl.models import registry
from megatron_rl.models.lora_targets import adapter_problems
from megatron_rl.recipes.dapo import Dapo
from megatron_rl.recipes.ppo import Ppo
from megatron_rl.recipes.reward_model import RewardModel
from megatron_rl.recipes.tandem import Tandem
from megatron_rl.recipes.tango import Tango
from megatron_rl.spec.resolve import resolve
from megatron_rl.training.collector import ReaderSource
from megatron_rl.training.iteration import CreditContext, Iteration

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/reference/pairs.md"
HERE = "tests/unit/recipes/test_pairs_of_features.py::"
UNIT = "tests/unit/algorithms/test_pairs_unit_of_an_agent.py::"
HEAD = """# Features in pairs

Two features that work alone can contradict each other. The tables below name pairs of features, and say how each pair
is covered: a test runs both features together, `megatron-rl check` refuses the pair with the quoted words, or a page
says what happens. `tests/unit/recipes/test_pairs_of_features.py` holds these tables as data. It fails if a named test
or section does not exist, if `check` accepts a pair that is refused here, or if a packaged recipe is missing. Which
objectives fit which recipes has [a table of its own](recipes.md#what-a-recipe-gives-a-loss).
"""


@dataclass(frozen=True)
class Cell:
    """How a pair of features is covered. One of the three fields is set."""

    test: str = ""  # file::name of a test
    section: str = ""  # page#anchor
    refusal: str = ""  # words of the message with which `check` refuses the pair
    settings: tuple[str, ...] = ()  # with `refusal`: settings that are added to the example
    example: str = "published/methods/grpo"


def covered(name: str) -> Cell:
    return Cell(test=f"tests/{name}" if not name.startswith("tests/") else name)


def refused(words: str, *settings: str, example: str = "published/methods/grpo") -> Cell:
    return Cell(refusal=words, settings=settings, example=example)


def documented(section: str) -> Cell:
    return Cell(section=f"docs/{section}")


def example_of(recipe: str) -> str:
    return next(TABLE[row][0] for row in TABLE if row.split(",")[0] == recipe)


def recipe_of(recipe: str) -> tuple[str, ...]:
    return tuple(TABLE[recipe][1]) if recipe in TABLE else ()


VOTES, LORA = "rollouts.labels=votes", "{rank: 4}"
LOSS, CENTERED = "roles.generator.loss", "roles.generator.loss.centering=20"
TTRL = covered(
    "unit/recipes/test_methods_votes.py::test_recipes_learn_from_votes_where_known_answers_are_wrong_or_hidden"
)
LABELLED = covered(f"{HERE}test_pairs_recipes_that_draw_as_grpo_take_votes_as_labels")
MIXED = covered(f"{HERE}test_pairs_every_recipe_with_a_reward_model_mixes_its_score_with_the_outcome")
REWARD = (
    "roles.reward={model: {path: an/other}, head: score, max_prompt_tokens: 50000, micro_batch_tokens: 100000}",
    "recipe.args.reward_model={weight: 0.5, scale: sigmoid}",
)
SHARED = (
    "recipe.target=megatron_rl.recipes.ppo:Ppo", "recipe.args.estimator=gae",
    "roles.critic={same_as: generator, head: value}", "roles.generator.loss.value_coef=0.5",
)  # fmt: skip


def stage(setting: str, value: str) -> str:
    return f'stages=[{{until: 2, overrides: {{"{setting}": {value}}}}}]'


NO_VOTES = (
    "Agents", "Distil", "Entailment", "Evolve", "Hacpo", "Pairwise", "Remax", "Rubric", "SelfPlay",
    "Tango", "TangoAgents",
)  # fmt: skip
NO_SCORES = (
    "Agents", "Distil", "Entailment", "Evolve", "Grpo", "Hacpo", "OnlineDpo", "Pairwise", "Rubric", "SelfPlay", "Ssrl",
    "TangoAgents",
)  # fmt: skip
PAIRS: dict[str, dict[str, Cell]] = {
    "Votes (`rollouts.labels: votes`) and recipes": {
        **dict.fromkeys(("`Dapo`", "`Grpo`", "`OnlineDpo`"), TTRL),
        **dict.fromkeys(("`Ppo`", "`Ssrl`", "`Tandem`"), LABELLED),
        "`Dapo` with `hints`": refused(
            "rollouts.labels = 'votes' has none", VOTES, "recipe.args.hints={}", example="published/methods/ghpo"
        ),
        **{
            f"`{name}`": refused(
                "has no groups of samples that elect one label: set it to known",
                VOTES,
                *recipe_of(name),
                example=example_of(name),
            )
            for name in NO_VOTES
        },
    },
    "Transcripts that were cut and estimators": {
        "`Agents`, every estimator": covered(f"{UNIT}test_every_estimator_counts_a_cut_transcript_once"),
        "`Agents`, `gae` over tokens and turns": covered(
            f"{UNIT}test_advantages_of_a_critic_are_those_of_the_whole_transcript"
        ),
        "`Agents`, `compared: ema` and `episode`": covered(
            f"{UNIT}test_moving_averages_and_peers_count_a_cut_transcript_once"
        ),
        "step advantages": covered(f"{UNIT}test_step_advantages_and_weights_are_those_of_the_whole_transcript"),
        "`loss.aggregation`": covered(f"{UNIT}test_every_mean_of_the_loss_counts_a_cut_transcript_once"),
        "ratios of whole sequences: `gspo`, `gmpo`, `loss.correction.level`": documented(
            "how_to/environments.md#how-messages-become-tokens"
        ),
        "metrics": covered(f"{UNIT}test_metrics_count_a_cut_transcript_once"),
        "`TangoAgents`, its estimators": covered(
            "unit/recipes/test_recipes_tango_agents.py::test_a_transcript_that_was_cut_is_judged_and_credited_as_a_whole"
        ),
        "`TangoAgents`, `gae`": covered(
            "unit/recipes/test_critics.py::test_a_critic_credits_a_transcript_that_was_cut_as_a_whole"
        ),
    },
    "Reward models (`recipe.args.reward_model`) and recipes": {
        **dict.fromkeys(("`Dapo`", "`Ppo`", "`Tandem`", "`Tango`"), MIXED),
        "`Dapo`, a whole run": covered(
            "multi/test_reward_models_run.py::test_reward_models_scores_are_the_rewards_of_grpo"
        ),
        "`Ppo` with `step_weight`, a whole run": covered(
            "multi/test_critics_run.py::test_a_process_reward_model_scores_the_steps_of_solutions"
        ),
        "`Tango` with `step_weight`": refused(
            "Tango's verifier scores the steps already",
            REWARD[0],
            "recipe.args.reward_model={step_weight: 0.5}",
            example=example_of("Tango"),
        ),
        "`Dapo` with `hints`": refused(
            "hints and reward_model: a reward model would not see the hint",
            *REWARD,
            "recipe.args.hints={}",
            example="published/methods/ghpo",
        ),
        "`Dapo` with `dynamic_sampling`, `curriculum`": documented("how_to/reward_models.md#reward-a-policy"),
        "`Remax`": refused("ReMax's baseline is a graded outcome", *REWARD, *recipe_of("Remax")),
        **{
            f"`{name}`": refused("reward_model: unknown key", *REWARD, *recipe_of(name), example=example_of(name))
            for name in NO_SCORES
        },
    },
    "Stages and settings": {
        "every setting that a stage may change": covered(
            "unit/session/test_stages.py::test_faults_every_setting_of_a_stage_reaches_what_runs"
        ),
        "a stage's `kl_coef` of the estimator": covered(
            "unit/config/test_faults_settings.py::test_faults_a_stage_has_its_own_kl_coefficient"
        ),
        "`data.sources.*.weight`, `sampling`, `loss`, `optimizer`": covered(
            "multi/test_sources_run.py::test_stages_change_weights_lengths_and_settings_and_are_resumed_exactly"
        ),
        "`recipe.args`, `max_tokens`, `clip_high`, `kl_coef`": covered(
            "unit/session/test_stages.py::test_an_iteration_has_the_settings_of_its_stage_over_those_of_the_run"
        ),
        "`recipe.args.curriculum`": covered(
            "unit/training/test_sources.py::test_a_stage_may_leave_the_curriculum_out_and_take_it_in_again"
        ),
        "resets of the reference": covered(
            "unit/session/test_stages.py::test_a_stage_without_a_kl_term_may_interrupt_resets_of_the_reference"
        ),
        "what the recipe gives the loss": covered(
            "unit/algorithms/test_pairs_objectives.py::test_pairs_a_stage_whose_recipe_gives_something_else_is_refused"
        ),
        "`loss.objective`": refused("cannot change during a run", stage("roles.generator.loss.objective", "gspo")),
        "`loss.value_coef`": refused(
            "cannot change during a run", *SHARED, stage("roles.generator.loss.value_coef", "0.1")
        ),
        "`recipe.args.template`": refused("cannot change during a run", stage("recipe.args.template", "plain")),
        "roles, scores and schedule of the recipe": refused(
            "the recipe then has other roles, scores or iterations", stage("recipe.args.updates", "7")
        ),
        "models, layouts, engines, data sets": refused(
            "cannot change during a run", stage("roles.generator.layout.tp", "1")
        ),
        "a length above the run's": refused(
            "for which memory and engines are set up", stage("roles.generator.sampling.max_tokens", "4096")
        ),
    },
    "Score centering (`loss.centering`)": {
        "objectives of single tokens, each correction": covered(
            "unit/algorithms/test_centering.py::test_centering_leaves_no_expected_gradient_of_a_constant_advantage"
        ),
        "`gspo`, `gmpo`, `vespo`": refused("combines the tokens of a rollout", CENTERED, f"{LOSS}.objective=gspo"),
        "`rover`, `rl_plus`, `distilled`, losses of pairs": refused(
            "an objective that reads advantages, old, vocab_mean", CENTERED, f"{LOSS}.objective=rover"
        ),
        "`loss.correction.level` of rollouts": refused(
            "set the level to token", CENTERED, f"{LOSS}.correction={{kind: mask, level: sequence, high: 3.0}}"
        ),
        "`loss.off_policy_mask`": documented("reference/recipes.md#score-centering"),
        "`rollouts.mixed: rescore`": refused(
            "those of the other tokens cannot be", CENTERED, "rollouts={max_staleness: 1, mixed: rescore}"
        ),
        "temperature 0": refused("set it above 0", CENTERED, "roles.generator.sampling.temperature=0"),
        "temperature 0 of a role that shares the policy": refused(
            "roles.solver.sampling.temperature = 0",
            "roles.proposer.loss.centering=20",
            "roles.solver.sampling.temperature=0",
            example="published/evolve_qwen2.5_3b",
        ),
        "`debug.replay`": refused("stored rollouts may lack", CENTERED, "debug.replay=runs/other"),
        "cut sampling, embedded engine": covered(
            "unit/engines/test_likeliest_tokens.py"
            "::test_embedded_engine_returns_the_head_of_the_distribution_that_it_samples_from"
        ),
        "cut sampling, vLLM": covered("servers/test_engines_vllm.py::test_vllm_conforms"),
        "cut sampling, SGLang": refused(
            "return the most likely tokens before tokens are removed",
            CENTERED,
            "engine.kind=sglang",
            "roles.generator.sampling.top_k=20",
        ),
        "several optimizer steps": covered(
            "unit/batches/test_data_parallel_split.py::test_what_a_loss_does_not_ask_for_is_not_computed"
        ),
        "a request that is aborted in its queue": covered(
            "unit/engines/test_likeliest_tokens.py::test_completion_without_tokens_has_arrays_without_rows"
        ),
        "refits during generation": covered(
            "unit/engines/test_likeliest_tokens.py::test_pool_joins_the_likeliest_tokens_of_what_a_refit_cuts"
        ),
        "tensor, context and pipeline parallelism": covered(
            "multi/test_layouts.py::test_parity_with_transformers_in_further_layouts"
        ),
        "a critic that shares the policy, cut sampling, a run that was cut": covered(
            "multi/test_resume_methods.py::test_a_run_of_any_method_that_was_cut_goes_on_exactly"
        ),
        "agents, a verifier, rollouts ahead, a run that was cut": covered(
            "multi/test_open_centre.py::test_a_run_of_any_method_that_was_cut_goes_on_exactly"
        ),
        "adapters": covered("multi/test_lora_run.py::test_lora_run_that_was_cut_goes_on_exactly"),
        "experts, router replay": covered(
            "multi/test_open_centre.py::test_a_model_with_experts_trains_on_the_experts_that_its_embedded_engine_chose"
        ),
        "ranks of a role's own": covered(
            "multi/test_placement_pairs.py::test_placement_of_pairs_gives_the_bits_of_shared_ranks"
        ),
        "tokens of a tandem's junior": covered(
            "unit/algorithms/test_centering.py::test_tokens_of_a_partner_are_not_centered"
        ),
        "a stage": refused("cannot change during a run", stage(f"{LOSS}.centering", "20")),
    },
    "Sources (`data.sources`) and evaluation": {
        "metrics, rewards and templates of each source": covered(
            "multi/test_sources_run.py::test_a_run_draws_by_weights_and_has_metrics_of_each_source"
        ),
        "`evaluation.sets`": documented("how_to/your_data.md#several-sources-in-a-run"),
        "the preflight": documented("how_to/your_data.md#several-sources-in-a-run"),
        "`curriculum`": covered(
            "unit/training/test_sources.py::test_a_run_that_was_cut_after_any_iteration_draws_the_same"
        ),
        "rewards of another range": refused(
            "all rewards of a run have the same range",
            "data.sources.code.reward.range=[0, 2]",
            example="published/mixed_qwen2.5_7b",
        ),
        "`best`, and a set that is the training data": covered(
            "unit/commands/test_check_deep.py::test_faults_best_models_are_not_chosen_by_the_training_data"
        ),
        "generated problems in both": refused(
            "may have questions of",
            "data={path: 'reasoning_gym:leg_counting', split: all}",
            "evaluation.sets=[{name: held, path: 'reasoning_gym:leg_counting', split: all}]",
        ),
    },
    "Adapters (`lora`) and heads": {
        "a critic with a model of its own": covered("multi/test_heads.py::test_a_checkpoint_of_a_head_crosses_layouts"),
        "a reward model that `sft` trains": covered(
            "multi/test_reward_models_run.py::"
            "test_pairs_a_reward_model_trained_with_adapters_is_pefts_and_its_merged_model"
        ),
        "a policy that a critic shares": covered(
            "multi/test_heads.py::test_a_checkpoint_of_a_policy_that_a_critic_shares_crosses_layouts"
        ),
        "an adapter with a head, loaded by peft and by `lora.path`": covered(
            "multi/test_heads.py::test_peft_loads_an_adapter_with_its_head"
        ),
        "`convert` of a checkpoint with both": covered(
            "multi/test_heads.py::test_conversions_of_a_checkpoint_with_a_head"
        ),
        "the shared critic's own `lora`": documented("reference/recipes.md#critics"),
        "roles that share a copy of the model": documented("how_to/lora.md#how-ranks-share-adapters"),
        "a frozen reward model, a new adapter": refused(
            "roles.reward.lora: the recipe does not train this role, and a new adapter changes nothing",
            *REWARD,
            "recipe.target=megatron_rl.recipes.dapo:Dapo",
            f"roles.reward.lora={LORA}",
        ),
        "a role without a policy": refused(
            "lora with policy = 'none': nothing is trained", f"roles.teacher.lora={LORA}", example=example_of("Distil")
        ),
    },
    "Adapters and models with experts": {
        "adapters of the attention: one process, `ep`, `tp` + `sp`": covered("multi/test_lora.py::test_lora_is_pefts"),
        "refits of merged weights": covered("multi/test_lora.py::test_lora_refits_bring_merged_weights_to_engines"),
        "`engine.adapters: served`": covered(f"{HERE}test_pairs_served_adapters_beside_experts_are_refused"),
        "adapters of `gate_proj`, `up_proj`, `down_proj`": covered(
            f"{HERE}test_pairs_adapters_of_experts_are_refused_for_every_family"
        ),
        "latent attention (DeepSeek)": covered(f"{HERE}test_pairs_adapters_of_experts_are_refused_for_every_family"),
        "`router_replay`, `model.router_aux_loss`": documented("how_to/lora.md#adapters-lora"),
    },
}
CELLS = [(table, pair) for table, cells in PAIRS.items() for pair in cells]


def page() -> str:
    """Returns the text of docs/reference/pairs.md. Pairs of a table that are covered alike share a row."""
    parts = [HEAD]
    for table, cells in PAIRS.items():
        rows: dict[str, list[str]] = {}
        for pair, cell in cells.items():
            how = f"tested: `{cell.test}`"
            if cell.refusal:
                how = f'refused: "{cell.refusal}"'
            if cell.section:
                how = f"documented: [{cell.section.rpartition('/')[2]}](../{cell.section.removeprefix('docs/')})"
            rows.setdefault(how, []).append(pair)
        lines = "".join(f"| {', '.join(pairs)} | {how} |\n" for how, pairs in rows.items())
        parts.append(f"\n## {table}\n\n| with | how |\n|---|---|\n{lines}")
    return "".join(parts)


def test_pairs_the_page_has_the_tables_of_this_file():
    assert PAGE.read_text() == page(), (
        "PYTHONPATH=tests/helpers:$(printf %s: tests/unit/*/) "
        "python tests/unit/recipes/test_pairs_of_features.py writes it"
    )


@cache
def names_in(file: str) -> set[str]:
    return {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)}


@cache
def anchors_in(page: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(("table", "pair"), CELLS)
def test_pairs_every_cell_holds(table, pair):
    cell = PAIRS[table][pair]
    if cell.test:
        file, _, name = cell.test.partition("::")
        assert name.startswith("test_") and name in names_in(file)
    elif cell.section:
        file, _, anchor = cell.section.partition("#")
        assert anchor in anchors_in(file)
    else:
        with pytest.raises(ConfigError, match=re.escape(cell.refusal)):
            resolve(load(TrainConfig, [ROOT / f"examples/{cell.example}.yaml"], [*cell.settings]), 64, to_come=True)


@pytest.mark.parametrize("table", [table for table in PAIRS if table.endswith("and recipes")])
def test_pairs_every_packaged_recipe_has_a_cell(table):
    assert {f"`{row.split(',')[0]}`" for row in TABLE} <= PAIRS[table].keys()


@pytest.mark.parametrize("kind", [Ppo, Ssrl, Tandem])
def test_pairs_recipes_that_draw_as_grpo_take_votes_as_labels(kind, tmp_path):
    (tmp_path / "q.txt").write_text("Q{question}:")
    recipe = kind(updates=1, group_size=N, template=str(tmp_path / "q.txt"))
    context = context_of(writes, grade=agrees, voted=True)
    source = ReaderSource(reader_of(4, answer="9"), 3)
    rollouts = recipe.rollout(iteration(), source, context)["generator"]
    metrics = context.metrics["generator"]
    outcomes = [rollout.rewards["outcome"] for rollout in rollouts]
    assert metrics["votes/labels_right"] == 0.0 and metrics["votes/share"] == pytest.approx(np.mean(outcomes))
    assert 0.3 < np.mean(outcomes) < 1, "the known answer 9 would give 0"


@pytest.mark.parametrize("kind", [Dapo, Ppo, Tandem, Tango])
def test_pairs_every_recipe_with_a_reward_model_mixes_its_score_with_the_outcome(kind):
    settings = {} if kind is Tango else {"updates": 1, "template": "plain"}
    recipe = kind(reward_model=RewardModel(weight=0.25), **settings)
    rollouts = [solution("c", outcome=outcome) for outcome in (0.0, 1.0)]
    rollouts = [replace(rollout, values={"value": np.zeros(len(rollout.tokens))}) for rollout in rollouts]
    read = [scored_rollout("reward", "0", [1, 2], values={"value": [score]}) for score in (0.5, -2.0)]
    roles = next(roles for cycle in recipe.schedule() for roles in cycle if "generator" in roles)
    now, context = Iteration(cycle=0, index=0, roles=roles, number=0), CreditContext(handed_over={"reviewed": []})
    assert ("reward", "value") in [(score.by, score.name) for score in recipe.scores(now)]
    credited = recipe.credit(now, {"generator": rollouts, "reward": read}, context)
    assert [r.rewards["trained"] for r in credited["generator"]] == pytest.approx([0.125, 0.25])
    first, second = (np.max(r.advantages) for r in credited["generator"])
    assert first < second and "reward" not in credited


def test_pairs_adapters_of_experts_are_refused_for_every_family():
    role = load(TrainConfig, [ROOT / "examples/published/tango_lora_qwen2.5_7b.yaml"]).roles["generator"]
    of_attention = replace(role, lora=replace(role.lora, targets=("q_proj", "k_proj", "v_proj", "o_proj")))
    names = {type(family): name for name, family in registry.families().items()}
    families = set()
    for name in registry.known():
        sizes = registry.known_sizes(name)
        if sizes.experts:
            families.add(names[type(registry.family_of(sizes))])
            assert "its attention alone can have adapters" in "\n".join(adapter_problems(sizes, role, name))
            problems = adapter_problems(sizes, of_attention, name)
            assert problems == [] or (sizes.kv_rank and "attends through latents" in problems[0])
    assert families == {"deepseek_v2", "deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe"}, "qwen2_moe has no known sizes"


def test_pairs_served_adapters_beside_experts_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dict(registry.known()["qwen3-30b-a3b"])))
    settings = [f"roles.generator.model.path={tmp_path}", "roles.generator.lora={rank: 4, targets: [q_proj, v_proj]}"]
    config = load(TrainConfig, [ROOT / "examples/published/methods/grpo.yaml"], [*settings, "engine.adapters=served"])
    with pytest.raises(ConfigError, match="vLLM's adapters beside experts are not tested; set it to merged"):
        resolve(config, 64, to_come=True)


if __name__ == "__main__":
    PAGE.write_text(page())
