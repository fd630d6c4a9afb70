"""The actor and the embedded engine on one CUDA device, against transformers on the CPU in float32."""

from __future__ import annotations

import gpu_rank
import pytest
import torch
from layouts_worker import (
    WeightedLogprobs,
    gradient_error,
    learn,
    logprobs_of,
    make_policy,
    make_rollouts,
    reference,
    work_of,
)
from prefixes_worker import make_groups
from prefixes_worker import make_policy as make_sharing
from tiny_models import make_model

pytest_plugins = ["gpu_rank"]
pytestmark = gpu_rank.MARKS
VOCAB = 97
# float32 products of a GPU add in another order than a CPU's; TF32 is off unless somebody turns it on
TOLERANCE = 1e-3


@pytest.mark.parametrize(
    ("family", "packed"), [("qwen2", True), ("qwen2", False), ("qwen3_moe", True), ("deepseek_v3", True)]
)
def test_passes_and_an_update_are_those_of_transformers(one_rank, tmp_path, family, packed):
    path = str(make_model(tmp_path / "model", family, vocab_size=VOCAB, num_hidden_layers=2))
    rollouts, loss = make_rollouts(VOCAB), WeightedLogprobs()
    logprobs, expected_loss, entropy, gradients, after, norm, _ = reference(path, rollouts)
    policy = make_policy(path, {"layout": {}, "packed": packed})
    assert (logprobs_of(policy, rollouts) - logprobs).abs().max() < TOLERANCE
    work, _ = work_of(policy, rollouts, loss)
    largest = max(gradient.abs().max() for gradient in gradients.values())
    assert gradient_error(policy, work, loss, gradients) < TOLERANCE * largest
    metrics = policy.update(work, 0, loss)
    assert abs(metrics["loss"] - expected_loss) < TOLERANCE and abs(metrics["entropy"] - entropy) < TOLERANCE
    assert abs(metrics["grad_norm"] / norm - 1) < TOLERANCE
    now = dict(policy.export.weights())
    assert max((now[name] - after[name]).abs().max() for name in now) < TOLERANCE
    assert learn(policy)["loss"] < metrics["loss"]


def test_shared_prompts_give_the_gradients_of_repeated_ones(one_rank, tmp_path):
    path = str(make_model(tmp_path / "model", "qwen3", vocab_size=VOCAB, num_hidden_layers=2))
    found = {}
    for shared in (True, False):
        policy, rollouts = make_sharing(path, {"dtype": "float32"}, shared=shared), make_groups(VOCAB)
        logprobs = logprobs_of(policy, rollouts)
        work, _ = work_of(policy, rollouts, WeightedLogprobs())
        found[shared] = logprobs, policy.update(work, 0, WeightedLogprobs())
    (once, metrics), (whole, others) = found[True], found[False]
    assert (once - whole).abs().max() < TOLERANCE and metrics["shared_tokens"] > 0
    assert abs(metrics["grad_norm"] / others["grad_norm"] - 1) < TOLERANCE


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_the_engine_is_greedy_like_transformers(tmp_path, family):
    from transformers import AutoModelForCausalLM

    from megatron_rl.engines.embedded.embedded_engine import EmbeddedEngine
    from megatron_rl.engines.protocol import Sampling, complete

    path = make_model(tmp_path / "model", family, vocab_size=VOCAB, num_hidden_layers=2)
    engine = EmbeddedEngine(path)
    engine.load_pretrained()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompts = [[3, 14, 15, 92, 65], [7] * 20]
    found = complete(engine, prompts, Sampling(max_tokens=12, temperature=0.0))
    for prompt, [row] in zip(prompts, found, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
        assert row.tokens.tolist() == expected.tolist()
        text = torch.tensor([prompt + row.tokens.tolist()])
        wanted = model(text).logits[0, :-1].log_softmax(-1).gather(1, text[0, 1:, None])[:, 0].detach()
        (scores,) = engine.score(text.numpy())
        assert (torch.from_numpy(scores[1:]) - wanted).abs().max() < TOLERANCE


def test_steps_are_captured_anew_whenever_the_cache_has_grown(tmp_path, caplog):
    """torch 2.11 refused every capture after the first growth, and after it every random number."""
    from megatron_rl.engines.embedded.embedded_engine import EmbeddedEngine
    from megatron_rl.engines.protocol import Sampling, complete

    path, found = make_model(tmp_path / "model", "qwen2", vocab_size=VOCAB, num_hidden_layers=2), {}
    for graphs in (True, False):
        engine = EmbeddedEngine(path, cuda_graphs=graphs)
        engine.load_pretrained()
        sampling = Sampling(max_tokens=150, temperature=0.0)
        found[graphs] = [complete(engine, [[3, 14, 15]], sampling)[0][0].tokens.tolist() for _ in range(2)]
    assert found[True] == found[False] and "without CUDA graphs" not in caplog.text
    assert 0 <= torch.rand(1, device="cuda").item() < 1
