"""Every shipped config loads, checks out, and builds its recipe; the published runs have the paper's numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl import config_checks, config_files, plugins
from megatron_rl.config import GenerateConfig, SftConfig, TrainConfig
from megatron_rl.recipes.tango import Tango

EXAMPLES = Path(__file__).parent.parent / "examples"
TRAIN = ["tango_qwen2.5_7b", "tango_llama3.1_8b", "grpo_qwen2.5_7b", "last_letter/tango", "last_letter/grpo", "gsm8k_cpu"]
SFT = ["sft_qwen2.5_math_7b", "sft_llama3.1_8b", "last_letter/sft"]


def load(schema, name):
    return config_files.load(schema, [EXAMPLES / f"{name}.yaml"])


def test_every_example_is_tested():
    found = {str(p.relative_to(EXAMPLES).with_suffix("")) for p in EXAMPLES.rglob("*.yaml")}
    assert found == {*TRAIN, *SFT, "generate_sft_llama3.1_70b"}


@pytest.mark.parametrize("name", TRAIN)
def test_training_examples_are_valid(name, monkeypatch):
    monkeypatch.chdir(EXAMPLES.parent)
    config = load(TrainConfig, name)
    config_checks.check(config, 32)
    recipe = plugins.build(config.recipe)
    assert set(recipe.roles) == set(config.roles) and recipe.num_steps() > 0
    assert "What is 2 + 3?" in recipe.generator_prompt({"question": "What is 2 + 3?", "answer": "5"})


@pytest.mark.parametrize("name", SFT)
def test_sft_examples_are_valid(name):
    config_checks.check(load(SftConfig, name), 32)


def test_generate_example_is_valid():
    config = load(GenerateConfig, "generate_sft_llama3.1_70b")
    assert (config.sampling.temperature, config.sampling.top_p, config.n, config.sampling.max_tokens) == (0.1, 0.5, 1, 3072)


@pytest.mark.parametrize("name", ["tango_qwen2.5_7b", "tango_llama3.1_8b"])
def test_published_runs_have_the_papers_numbers(name):
    config = load(TrainConfig, name)
    recipe = plugins.build(config.recipe)
    assert isinstance(recipe, Tango)
    turns = [role for step in range(recipe.num_steps()) for role in recipe.turns(step)]
    assert len(turns) == 440 and turns.count("generator") == 300 and turns[:40] == ["verifier"] * 40
    assert turns[40:44] == ["generator"] * 3 + ["verifier"]
    assert (recipe.alpha_start, recipe.alpha_min, recipe.alpha_schedule) == (0.1, 1e-3, "exponential")
    assert (recipe.group_size, recipe.verifications, recipe.format_weight, recipe.class_weight_decay) == (5, 5, 0.8, 0.8)
    assert config.run.prompts_per_step == 256
    for role, limit in (("generator", 2048), ("verifier", 4096)):
        settings = config.roles[role]
        assert (settings.max_prompt_tokens, settings.sampling.max_tokens) == (limit, limit)
        assert (settings.optimizer.lr, settings.optimizer.warmup_steps, settings.optimizer.decay) == (1e-6, 0, "constant")
        assert (settings.optimizer.clip_grad, settings.samples_per_optimizer_step) == (1.0, None)
        loss = settings.loss
        assert (loss.clip_low, loss.clip_high, loss.kl, loss.kl_coef, loss.entropy_coef) == (0.2, 0.2, "k3", 0.001, 0.001)
        assert (settings.sampling.temperature, settings.sampling.top_p, settings.sampling.top_k) == (1.0, 1.0, 0)


@pytest.mark.parametrize("name", ["sft_qwen2.5_math_7b", "sft_llama3.1_8b"])
def test_published_sft_has_the_papers_numbers(name):
    config = load(SftConfig, name)
    optimizer = config.optimizer
    assert (config.samples_per_step, config.steps, config.data.max_tokens) == (64, 800, 4096)
    assert (optimizer.lr, optimizer.decay, optimizer.warmup_steps, optimizer.decay_steps) == (5e-6, "cosine", 80, 800)
