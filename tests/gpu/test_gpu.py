"""The actor and the embedded engine on one CUDA device (`make test-gpu`)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from layouts_worker import learn, logprobs_of, make_rollouts, reference
from tiny_models import make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device here: the CPU tests cover the same code over gloo"
    ),
]


@pytest.fixture
def one_rank():
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_actor_matches_transformers_and_learns_on_cuda(one_rank, tmp_path):
    from megatron_rl.config.schema import Layout, Model, Optimizer, RoleConfig
    from megatron_rl.megatron import parallel
    from megatron_rl.megatron.policy import MegatronPolicy

    path = make_model(tmp_path / "model", "qwen2", vocab_size=97)
    role = RoleConfig(model=Model(path=str(path)), optimizer=Optimizer(lr=1e-3), micro_batch_tokens=60)
    policy, rollouts = MegatronPolicy(role, parallel.create(Layout())), make_rollouts(97)
    expected, expected_loss, *_ = reference(str(path), rollouts)
    assert (logprobs_of(policy, rollouts) - expected).abs().max() < 1e-3
    losses = [learn(policy)["loss"] for _ in range(5)]
    assert abs(losses[0] - expected_loss) < 1e-3 and losses[-1] < losses[0]


def test_the_engine_is_greedy_like_transformers_on_cuda(tmp_path):
    from transformers import AutoModelForCausalLM

    from megatron_rl.engines.base import Sampling, complete
    from megatron_rl.engines.embedded.engine import EmbeddedEngine

    path = make_model(tmp_path / "model", "qwen2", vocab_size=97)
    engine = EmbeddedEngine(path)
    engine.load_pretrained()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompt = [3, 14, 15, 92, 65]
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :].tolist()
    [[found]] = complete(engine, [prompt], Sampling(max_tokens=12, temperature=0.0))
    assert found.tokens.tolist() == expected
