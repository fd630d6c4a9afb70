"""Every shipped config loads, checks out, and builds its recipe; the published runs have the paper's numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_rl.config import checks as config_checks
from megatron_rl.config import files as config_files
from megatron_rl.config import plugins
from megatron_rl.config import schema as config
from megatron_rl.config.schema import EvalConfig, GenerateConfig, SftConfig, TandemConfig, TrainConfig
from megatron_rl.evaluation.benchmarks import benchmark
from megatron_rl.recipes.evolve import Evolve
from megatron_rl.recipes.tango import Tango
from megatron_rl.rewards import ssrl
from megatron_rl.rewards.pool import GradePool
from megatron_rl.training.gate import GateFailure, check_reward
from megatron_rl.types import Prompt

EXAMPLES = Path(__file__).parents[2] / "examples"
TRAIN = [
    *("tango_qwen2.5_7b", "tango_llama3.1_8b", "grpo_qwen2.5_7b", "grpo_chat_qwen2.5_7b", "tandem_qwen3_4b"),
    *("tango_rloo_qwen2.5_7b", "tango_reinforce_pp_qwen2.5_7b"),
    *("dapo_qwen2.5_32b", "scalerl_qwen3_8b"),
    *("rubric_qwen3_30b_a3b", "pairwise_qwen3_8b", "entailment_qwen3_32b", "ssrl_llama3.2_3b"),
    *("last_letter/tango", "last_letter/grpo", "tandem_last_letter/tandem", "gsm8k_cpu", "rubric_mini/rubric"),
    *("evolve_qwen2.5_3b", "evolve_three_qwen2.5_3b", "evolve_mini/three", "evolve_mini/shared"),
]
SFT = ["sft_qwen2.5_math_7b", "sft_llama3.1_8b", "last_letter/sft", "evolve_mini/sft"]
EVAL = ["eval_tango_qwen2.5_7b", "eval_tandem_qwen3_4b"]


def load(schema, name):
    return config_files.load(schema, [EXAMPLES / f"{name}.yaml"])


def test_every_example_is_tested():
    found = {str(p.relative_to(EXAMPLES).with_suffix("")) for p in EXAMPLES.rglob("*.yaml")}
    assert found == {*TRAIN, *SFT, *EVAL, "generate_sft_llama3.1_70b"}


@pytest.mark.parametrize("name", TRAIN)
def test_training_examples_are_valid(name, monkeypatch):
    monkeypatch.chdir(EXAMPLES.parent)
    found = load(TrainConfig, name)
    config_checks.check(found, 32)
    recipe = plugins.build(found.recipe)
    config_checks.check_recipe(found, recipe)
    assert set(recipe.roles()) == set(found.roles) and len(recipe.schedule()) > 0
    problem = {"question": "What is 2 + 3?", "answer": "5", "response": "It is 5.", "principle": "It is right."}
    assert "What is 2 + 3?" in recipe.prompt(problem)


@pytest.mark.parametrize("name", SFT)
def test_sft_examples_are_valid(name):
    config_checks.check(load(SftConfig, name), 32)


@pytest.mark.parametrize("name", EVAL)
def test_eval_examples_are_valid(name):
    config = load(EvalConfig, name)
    config_checks.check(config, 8)
    assert all(benchmark(each).template and not benchmark(each).judged for each in config.benchmarks)


def test_generate_example_is_valid():
    """The numbers of the release's scripts/run_sft_data_generation.sh and data_preprocess/split_parquet.py."""
    config = load(GenerateConfig, "generate_sft_llama3.1_70b")
    config_checks.check(config, 1)
    assert (config.max_prompt_tokens, config.validation_share, config.keep_cut, config.chat) == (1024, 0.1, True, True)
    assert (config.sampling.temperature, config.sampling.top_p, config.n, config.sampling.max_tokens) == (
        0.1,
        0.5,
        1,
        3072,
    )


@pytest.mark.parametrize(
    ("name", "estimator", "alpha_start", "kl", "entropy_coef"),
    [
        ("tango_qwen2.5_7b", "grpo", 0.1, "k3", 0.001),
        ("tango_llama3.1_8b", "grpo", 0.1, "k3", 0.001),
        ("tango_rloo_qwen2.5_7b", "rloo", 0.1, "k3", 0.001),
        ("tango_reinforce_pp_qwen2.5_7b", "reinforce_pp", 0.5, "k2", 0.0),
    ],
)
def test_published_runs_have_the_papers_numbers(name, estimator, alpha_start, kl, entropy_coef):
    """The numbers of the release's scripts/run_rl_tango.sh, with verl's defaults where it says nothing."""
    config = load(TrainConfig, name)
    recipe = plugins.build(config.recipe)
    assert isinstance(recipe, Tango)
    turns = [role for step in recipe.schedule() for roles in step for role in roles]
    assert len(turns) == 440 and turns.count("generator") == 300 and turns[:40] == ["verifier"] * 40
    assert turns[40:44] == ["generator"] * 3 + ["verifier"]
    assert (recipe.alpha_start, recipe.alpha_min, recipe.alpha_schedule) == (alpha_start, 1e-3, "exponential")
    assert recipe.estimator == estimator
    assert (recipe.group_size, recipe.verifications, recipe.format_weight, recipe.class_weight_decay) == (
        5,
        5,
        0.8,
        0.8,
    )
    assert config.run.prompts_per_step == 256 and config.run.train_without_signal
    for role, limit in (("generator", 2048), ("verifier", 4096)):
        settings = config.roles[role]
        assert (settings.max_prompt_tokens, settings.sampling.max_tokens) == (limit, limit)
        assert (settings.optimizer.lr, settings.optimizer.warmup_steps, settings.optimizer.decay) == (
            1e-6,
            0,
            "constant",
        )
        assert (settings.optimizer.clip_grad, settings.samples_per_optimizer_step) == (1.0, None)
        loss = settings.loss
        assert (loss.clip_low, loss.clip_high, loss.kl_coef) == (0.2, 0.2, 0.001)
        assert (loss.kl, loss.entropy_coef) == (kl, entropy_coef)
        assert (settings.optimizer.betas, settings.optimizer.decay_norms) == ((0.9, 0.999), True)
        assert (settings.sampling.temperature, settings.sampling.top_p, settings.sampling.top_k) == (1.0, 1.0, 0)


def test_the_tandem_has_the_papers_numbers():
    config = load(TrainConfig, "tandem_qwen3_4b")
    role, recipe = config.roles["generator"], plugins.build(config.recipe)
    assert role.tandem == TandemConfig(junior=None, strategy="word", p=0.5, max_gap=32)
    assert (role.optimizer.lr, role.loss.clip_low, role.loss.clip_high, role.loss.kl_coef, role.loss.entropy_coef) == (
        1e-6,
        0.2,
        0.2,
        0,
        0,
    )
    assert (role.sampling.temperature, role.sampling.max_tokens, role.max_prompt_tokens) == (0.6, 3000, 1024)
    assert (config.run.prompts_per_step, recipe.group_size, role.samples_per_optimizer_step) == (16, 8, 8 * 8)


def test_dapo_has_the_papers_numbers():
    config = load(TrainConfig, "dapo_qwen2.5_32b")
    role, recipe = config.roles["generator"], plugins.build(config.recipe)
    assert (role.loss.clip_low, role.loss.clip_high, role.loss.kl_coef, role.loss.aggregation) == (
        0.2,
        0.28,
        0,
        "token_mean",
    )
    assert (role.optimizer.lr, role.optimizer.warmup_steps, role.samples_per_optimizer_step) == (1e-6, 20 * 16, 512)
    assert (config.run.prompts_per_step, recipe.group_size, recipe.estimator) == (512, 16, "grpo")
    assert config.run.prompts_per_step * recipe.dynamic_sampling.oversampling == 1536
    assert recipe.dynamic_sampling.rounds == 10
    assert (role.sampling.max_tokens, recipe.overlong.cache, recipe.overlong.penalty) == (20480, 4096, 1.0)
    assert recipe.overlong.reward(20480 - 4096, 20480) == 0.0 and recipe.overlong.reward(20480, 20480) == -1.0


def test_scalerl_has_the_papers_choices():
    config = load(TrainConfig, "scalerl_qwen3_8b")
    role, recipe = config.roles["generator"], plugins.build(config.recipe)
    assert (role.loss.objective, role.loss.objective_args, role.loss.aggregation) == (
        "cispo",
        {"cap": 5.0},
        "prompt_mean",
    )
    assert (recipe.group_size, recipe.estimator, recipe.curriculum.retire_at) == (16, "batch", 0.9)
    assert recipe.dynamic_sampling.rounds == 1 and recipe.dynamic_sampling.oversampling == 1
    assert config.rollouts.max_staleness == 8 and role.loss.kl_coef == 0


def test_ssrl_has_the_released_scripts_numbers():
    config = load(TrainConfig, "ssrl_llama3.2_3b")
    role, recipe = config.roles["generator"], plugins.build(config.recipe)
    assert (config.run.prompts_per_step, recipe.group_size, role.samples_per_optimizer_step) == (256, 5, None)
    assert (role.loss.kl, role.loss.kl_coef, role.loss.entropy_coef, role.optimizer.lr) == ("k3", 0.001, 0.0, 1e-6)
    assert (role.max_prompt_tokens, role.sampling.max_tokens) == (1024, 4096)
    right = config.reward.answer_format.replace("{answer}", "5")
    assert ssrl.grade(right, {"answer": "5"}) == pytest.approx(0.95), "the gate before training takes it for right"


@pytest.mark.parametrize("name", ["evolve_qwen2.5_3b", "evolve_three_qwen2.5_3b"])
def test_multi_agent_evolve_has_the_released_numbers(name):
    """scripts/selfplay/mae.sh and configs/azr_ppo_trainer_general.yaml of ulab-uiuc/Multi-agent-evolve d71c00b."""
    config = load(TrainConfig, name)
    recipe = plugins.build(config.recipe)
    assert isinstance(recipe, Evolve)
    assert (recipe.proposals, recipe.answers, recipe.judgements, recipe.practice) == (1, 5, 5, "pool")
    assert (recipe.reference_share, recipe.references, recipe.least_quality) == (0.5, 1, 0.7)
    assert (recipe.estimator, config.run.prompts_per_step) == ("reinforce_pp", 128)
    shared = [role.same_as for role in config.roles.values()]
    assert shared == ([None, None, None] if "three" in name else [None, "proposer", "proposer"])
    for role in config.roles.values():
        assert role.model.path == "Qwen/Qwen2.5-3B-Instruct" and role.samples_per_optimizer_step == 64
        assert (role.max_prompt_tokens, role.sampling.max_tokens, role.sampling.temperature) == (8192, 8192, 1.0)
        optimizer, loss = role.optimizer, role.loss
        assert (optimizer.lr, optimizer.decay, optimizer.weight_decay, optimizer.clip_grad) == (1e-6, "constant", 0, 1)
        assert (loss.kl_coef, loss.clip_low, loss.clip_high, loss.entropy_coef) == (0, 0.2, 0.28, 0.001)


@pytest.mark.parametrize("name", ["sft_qwen2.5_math_7b", "sft_llama3.1_8b"])
def test_published_sft_has_the_papers_numbers(name):
    config = load(SftConfig, name)
    optimizer = config.optimizer
    assert (config.samples_per_step, config.steps, config.data.max_tokens) == (64, 800, 4096)
    assert (optimizer.lr, optimizer.decay, optimizer.warmup_steps, optimizer.decay_steps) == (5e-6, "cosine", 80, 800)
    assert (optimizer.betas, optimizer.weight_decay, optimizer.decay_norms) == ((0.9, 0.95), 0.01, True)


def test_the_page_on_data_shows_the_example_and_settings_that_there_are(tmp_path):
    """Each YAML block of docs/your_data.md loads, and the example's reward passes the gate."""
    page = (EXAMPLES.parent / "docs/your_data.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    paths = [tmp_path / f"{number}.yaml" for number in range(len(blocks))]
    for path, block in zip(paths, blocks, strict=True):
        path.write_text(block)
    fields, run, sft = paths
    shown, example = config_files.load(TrainConfig, [run]), load(TrainConfig, "grpo_chat_qwen2.5_7b")
    assert (shown.data, shown.evaluation, shown.recipe) == (example.data, example.evaluation, example.recipe)
    assert (shown.run, shown.reward) == (example.run, example.reward)
    mapped = config_files.load(TrainConfig, [run, fields]).data
    assert mapped.fields == {"messages": "chat.turns", "answer": "labels.gold"}
    assert config_files.load(SftConfig, [sft]).model.chat_template == "chatml.jinja"
    with GradePool(shown.reward) as pool:
        prompts = [Prompt(id="0", tokens=[1], payload={"answer": "72"})]
        scores = check_reward(pool.grade, prompts, shown.reward.wrong_answer, shown.reward.answer_format)
    assert scores == {"gate/reward_right": 1.0, "gate/reward_wrong": 0.0}


def test_the_rewards_in_readme_pass_the_gate(tmp_path, monkeypatch):
    """They are as written there, and one is in another format; they run in real workers."""
    [code] = re.findall(r"```python\n# my_rewards.py\n(.*?)```", (EXAMPLES.parent / "README.md").read_text(), re.DOTALL)
    other = "def plain(response, payload):\n    return response == 'Answer: ' + payload['answer']\n"
    (tmp_path / "my_rewards.py").write_text(code + "\n\n" + other)
    monkeypatch.chdir(tmp_path)
    prompts = [Prompt(id="0", tokens=[1], payload={"answer": "72"})]
    boxed, plain = config.Reward().answer_format, "Answer: {answer}"
    with GradePool(config.Reward(target="my_rewards:grade")) as pool:
        assert check_reward(pool.grade, prompts, "x", boxed) == {"gate/reward_right": 1.0, "gate/reward_wrong": 0.0}
    with GradePool(config.Reward(target="my_rewards:plain")) as pool:
        assert check_reward(pool.grade, prompts, "x", plain)["gate/reward_right"] == 1.0
        with pytest.raises(GateFailure, match=r"reward.answer_format .* gate.reward=false"):
            check_reward(pool.grade, prompts, "x", boxed)
