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

from megatron_rl.megatron import vocab_statistics
from megatron_rl.megatron.adam import FusedAdam
from megatron_rl.megatron.kernels import choice

pytest_plugins = ["gpu_rank"]
pytestmark = gpu_rank.MARKS
VOCAB = 97
# float32 products of a GPU add in another order than a CPU's; TF32 is off unless somebody turns it on
TOLERANCE = 1e-3


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "deepseek_v3"])
def test_passes_and_an_update_are_those_of_transformers(one_rank, tmp_path, family):
    path = str(make_model(tmp_path / "model", family, vocab_size=VOCAB, num_hidden_layers=2))
    rollouts, loss = make_rollouts(VOCAB), WeightedLogprobs()
    logprobs, expected_loss, entropy, gradients, after, norm, *_ = reference(path, rollouts)
    policy = make_policy(path, {"layout": {}})
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


def test_kept_logits_give_the_gradients_of_logits_that_are_computed_again(one_rank, monkeypatch):
    """Three chunks of rows, by Triton kernels where they can be had."""
    triton, draw = choice.obstacle() is None, torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=draw).bfloat16().cuda().requires_grad_() for n in (300, 5000))
    labels = torch.randint(5000, (300,), generator=draw).cuda()
    monkeypatch.setitem(vocab_statistics.CHUNK_ELEMENTS, "cuda", 1)
    found = []
    for share in (0.0, 0.5):
        monkeypatch.setattr(vocab_statistics, "KEPT_SHARE", share)
        logprobs, entropy = vocab_statistics.vocab_parallel_statistics(
            hidden, weight, labels, first_row=0, vocab=5000, temperature=0.7, group=torch.distributed.group.WORLD,
            names=["logprobs", "entropy"], triton=triton,
        )  # fmt: skip
        found.append(torch.autograd.grad((logprobs + 0.1 * entropy).sum(), (hidden, weight)))
    assert all(torch.equal(again, kept) for again, kept in zip(*found, strict=True))


def test_adam_takes_the_fused_kernel_and_its_numbers_are_those_of_other_kernels():
    found = []
    for fused in (None, False):
        draw = torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(n, generator=draw).cuda()) for n in (5, 0, 70_000)]
        optimizer = FusedAdam(params, lr=1e-2, weight_decay=0.1, fused=fused)
        for _ in range(3):
            for param in params:
                param.grad = torch.randn(param.shape, generator=draw).cuda()
            optimizer.step()
        assert optimizer.param_groups[0]["step"] == 3
        found.append(torch.cat([param.detach() for param in params]).cpu())
    assert (found[0] - found[1]).abs().max() < 1e-6
