"""How a micro-batch is laid out for products of 8-bit numbers, which take whole blocks of tokens alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layouts_worker import LENGTHS, WeightedLogprobs, make_batch, make_rollouts, work_of
from tiny_models import make_model

from megatron_rl.config.schema import LossConfig, Model, RoleConfig
from megatron_rl.megatron import parallel
from megatron_rl.megatron.attention import Context
from megatron_rl.megatron.pipeline_pass import RankPart, make_micro_batch
from megatron_rl.megatron.policy import MegatronPolicy

LIKE = torch.zeros(1, dtype=torch.bfloat16)


@pytest.mark.parametrize(("parts", "ranks"), [(1, 1), (2, 1), (1, 2), (4, 2)])
def test_a_rank_has_a_multiple_of_the_tokens_that_eight_bit_products_take(parts, ranks):
    """Transformer Engine refuses other numbers, in the first forward pass."""
    batch, wanted = make_batch(97), 0
    for rank in range(ranks):
        cut = RankPart(parts=parts, context=Context(ranks, rank), unit=16)
        micro = make_micro_batch(batch, None, cut=cut, like=LIKE)
        assert micro.tokens.shape[1] % (16 * parts) == 0
        wanted += len(micro.labels)
    assert wanted == int(batch.counted.sum())


def test_without_them_a_packed_batch_has_its_own_tokens_alone():
    micro = make_micro_batch(make_batch(97), None, cut=RankPart(), like=LIKE)
    assert micro.tokens.shape == (1, sum(LENGTHS))


def test_a_policy_in_eight_bits_cuts_its_micro_batches_for_them(tmp_path):
    """The layers are those of a policy without: a CPU refuses to build others, and making micro-batches needs none."""
    path = make_model(tmp_path / "model", "qwen2", vocab_size=97, num_hidden_layers=1)
    role = RoleConfig(model=Model(path=str(path)), loss=LossConfig(kl_coef=0.0), micro_batch_tokens=60)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        policy, found = MegatronPolicy(role, parallel.create(role.layout)), {}
        work, _ = work_of(policy, make_rollouts(97), WeightedLogprobs())
        for fp8 in (False, True):
            policy.role = replace(role, model=replace(role.model, fp8=fp8))
            found[fp8] = [micro.tokens.shape[1] for micro in policy._micro_batches(work, 0)]
    finally:
        torch.distributed.destroy_process_group()
    assert sum(found[False]) == sum(LENGTHS) and any(tokens % 16 for tokens in found[False])
    assert found[True] == [-(-tokens // 16) * 16 for tokens in found[False]]
