"""The count of a model's operations, against torch's own counter over transformers' models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import make_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from megatron_rl.config.schema import Lora
from megatron_rl.models.shape import read_shape
from megatron_rl.planning import compute
from megatron_rl.planning.compute import SequenceBatch
from megatron_rl.weights import flops

LENGTH = 24
FAMILIES = ("qwen3", "gemma3_text", "qwen2_moe", "deepseek_v3")
CLOSE = 2e-4  # torch also counts the product of positions and frequencies


def square_less_triangle(shape):
    """Returns the operations that torch counts beyond ours: it counts scores that a mask throws away, too."""
    whole = 2.0 * shape.sizes.num_layers * shape.sizes.heads * (shape.sizes.head_dim + shape.sizes.value_width)
    return whole * LENGTH * LENGTH - float(flops.attention(shape, [LENGTH])[0])


def transformers_model(directory):
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )


def counted(model, vocab):
    """Returns what torch counts of a forward pass, and of a forward and backward pass."""
    with FlopCounterMode(display=False) as forward:
        logits = model(torch.randint(0, vocab, (1, LENGTH))).logits
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    return forward.get_total_flops(), forward.get_total_flops() + backward.get_total_flops()


@pytest.mark.parametrize("family", FAMILIES)
def test_operations_are_those_of_torchs_counter(tmp_path, family):
    directory = make_model(tmp_path / family, family)
    shape = read_shape(str(directory))
    forward, training = counted(transformers_model(directory), shape.sizes.vocab)
    ours, masked = flops.count(shape, np.array([LENGTH])), square_less_triangle(shape)
    assert ours.forward + masked == pytest.approx(forward, rel=CLOSE)
    assert ours.training + 3 * masked == pytest.approx(training, rel=CLOSE)


def test_frozen_weights_have_no_gradient_and_adapters_have(tmp_path):
    directory = make_model(tmp_path / "llama", "llama")
    shape, lora = read_shape(str(directory)), Lora(rank=8, targets=("q_proj", "v_proj", "down_proj"))
    model = transformers_model(directory)
    model.enable_input_require_grads()  # else torch leaves out what the first layer's inputs would get
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules=list(lora.targets), task_type="CAUSAL_LM"))
    forward, training = counted(adapted, shape.sizes.vocab)
    ours, masked = flops.count(shape, np.array([LENGTH]), lora=lora), square_less_triangle(shape)
    assert ours.forward + masked == pytest.approx(forward, rel=CLOSE)
    assert ours.training + 3 * masked == pytest.approx(training, rel=CLOSE)
    assert ours.training < 0.8 * flops.count(shape, np.array([LENGTH])).training


def test_a_window_and_a_shared_prompt_leave_out_what_is_not_computed():
    """A loop over tokens and the tokens that they see; a token's sight of itself is half a pair."""
    for window in (None, 5, 100):
        met = [sum(1 for key in range(query) if window is None or query - key < window) + 0.5 for query in range(30)]
        assert flops.seen(np.array([30.0]), window)[0] == sum(met)
    shape = read_shape("llama-3.1-8b")
    once, own = flops.count(shape, np.array([900])), flops.of_token(shape)
    twice = flops.count(shape, np.array([900, 900]), shared=np.array([0, 600]), labels=600)
    pairs = sum(range(600, 900)) + 150.0
    scores = 4 * shape.sizes.num_layers * shape.sizes.heads * shape.sizes.head_dim * pairs
    assert twice.forward - once.forward == pytest.approx(300 * own.layers + scores - 300 * own.head)


def test_plans_count_the_same():
    shape = read_shape("qwen3-30b-a3b")
    batch = SequenceBatch(sequences=4, length=512.0, micro_tokens=2048)
    assert compute.train_flops(shape, batch) == pytest.approx(flops.count(shape, np.full(4, 512)).training)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b"])
@pytest.mark.parametrize(("per_prompt", "behind"), [(1, [0, 0, 0, 0]), (2, [0, 200, 0, 200]), (4, [0, 200, 200, 200])])
def test_plans_count_prompts_and_shared_prompts_the_same(name, per_prompt, behind):
    """A prompt's tokens do not go through the output layer, and a shared prompt is computed once."""
    shape, lengths = read_shape(name), np.full(4, 512)
    batch = SequenceBatch(sequences=4, length=512.0, micro_tokens=2048, prompt=200.0, per_prompt=per_prompt)
    counted = flops.count(shape, lengths, shared=np.array(behind), labels=4 * 312)
    assert batch.tokens == lengths.sum() - sum(behind) and batch.labels == 4 * 312
    assert compute.train_flops(shape, batch) == pytest.approx(counted.training)
