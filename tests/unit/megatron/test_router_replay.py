"""Router replay: the engine's choices of experts through records, packing and the cuts of a micro-batch.

test_layouts tests its gradients.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from one_process import OneProcess

from megatron_rl.config.schema import ConfigError, Layout, Lora, LossConfig, Model, RoleConfig
from megatron_rl.megatron.router_replay import RouterReplay, of_tokens
from megatron_rl.training.update import policy_logprobs
from megatron_rl.types import FREE, Author, Rollout, spans_of

LAYERS, CHOSEN = 3, 2


def rollout(length, experts=True):
    draw = np.random.default_rng(length)
    return Rollout(
        role="generator",
        group="a",
        tokens=np.arange(length),
        logprobs=np.zeros(length),
        spans=spans_of((1, Author.ENVIRONMENT, -1), (length - 1, Author.POLICY, 0)),
        experts=draw.integers(0, 300, (length - 1, LAYERS, CHOSEN)).astype(np.int16) if experts else None,
    )


def test_the_routers_of_tensor_ranks_see_their_share_position_by_position():
    """There are two rows of four positions. Core flattens [4, 2, h], and sequence parallelism cuts the 4."""
    experts = torch.arange(6)[:, None, None].expand(6, LAYERS, CHOSEN)
    places = torch.tensor([[0, 1, 2, -1], [3, 4, 5, -1]])
    assert of_tokens(experts, places, parts=1, part=0)[:, 0, 0].tolist() == [0, 3, 1, 4, 2, 5, FREE, FREE]
    assert of_tokens(experts, places, parts=2, part=1)[:, 0, 0].tolist() == [2, 5, FREE, FREE]


def ask(router, scores):
    return router.get_replay_topk(scores, CHOSEN, default_compute_topk=lambda s, k, *_: torch.topk(s, k, dim=1))


def test_a_router_takes_what_is_shown_and_its_own_where_nothing_is():
    router, scores = RouterReplay(1), torch.tensor([[0.1, 0.4, 0.3, 0.2]] * 2, requires_grad=True)
    assert ask(router, scores)[1].tolist() == [[1, 2], [1, 2]]
    shown = torch.full((2, LAYERS, CHOSEN), FREE)
    shown[0, 1] = torch.tensor([3, 0])
    router.show(shown, training=True)
    values, chosen = ask(router, scores)
    assert chosen.tolist() == [[3, 0], [1, 2]]
    values.sum().backward()
    assert scores.grad.tolist() == [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0]]


def test_a_recomputed_layer_takes_each_micro_batchs_own_choices_again():
    """Two forward passes begin before the first goes back (1F1B). A scoring pass between them leaves nothing behind."""
    router, scores = RouterReplay(0), torch.rand(1, 8)

    def shown(expert):
        return torch.tensor([expert, expert + 1]).expand(1, LAYERS, CHOSEN)

    def forward(expert, training=True):
        router.show(shown(expert), training=training)
        with torch.no_grad():
            return ask(router, scores)[1].tolist()

    assert forward(0) == [[0, 1]] and forward(2) == [[2, 3]]
    assert ask(router, scores)[1].tolist() == [[0, 1]], "the backward pass of the first"
    assert forward(4) == [[4, 5]]
    assert [ask(router, scores)[1].tolist() for _ in range(2)] == [[[2, 3]], [[4, 5]]]
    assert forward(6, training=False) == [[6, 7]]
    router.forget()
    router.show(shown(1), training=True)
    assert ask(router, scores)[1].tolist() == [[1, 2]], "without recomputation there is one pass, with gradients"


def test_choices_of_another_model_are_refused(tmp_path):
    from tiny_models import make_model

    from megatron_rl.megatron import parallel
    from megatron_rl.megatron.policy import MegatronPolicy

    moe, dense = (
        make_model(tmp_path / "moe", "qwen3_moe", vocab_size=31),
        make_model(tmp_path / "dense", "qwen2", vocab_size=31),
    )
    role = RoleConfig(model=Model(path=str(moe)), loss=LossConfig(kl_coef=0.0), router_replay=True)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        groups = parallel.create(role.layout)
        with pytest.raises(ConfigError, match="has no experts"):
            MegatronPolicy(replace(role, model=Model(path=str(dense))), groups)
        policy = MegatronPolicy(role, groups)
        with pytest.raises(ValueError, match="another model"):
            policy_logprobs(OneProcess(), policy, [rollout(5)])
        known = replace(rollout(5), experts=np.ones((4, policy.arch.num_layers, 2), np.int16))
        found = policy_logprobs(OneProcess(), policy, [known, rollout(4, experts=False)])
        assert [len(one) for one in found] == [5, 4] and all(np.isfinite(one).all() for one in found)
    finally:
        torch.distributed.destroy_process_group()


def test_the_second_role_with_adapters_on_a_shared_model_replays_choices(tmp_path):
    """Only the first role could: the setting of the second one was ignored."""
    from tiny_models import make_model

    from megatron_rl.megatron import parallel
    from megatron_rl.megatron.policy import MegatronPolicy

    model = Model(path=str(make_model(tmp_path / "moe", "qwen3_moe", vocab_size=31)))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        found, base = {}, None
        groups = parallel.create(Layout())
        for replays in (False, True, False):
            lora = Lora(rank=2, targets=("q_proj", "v_proj"))
            role = RoleConfig(model=model, loss=LossConfig(kl_coef=0.0), lora=lora, router_replay=replays)
            policy = MegatronPolicy(role, groups, base=base)
            base = base or policy
            for choice in (0, 2):
                experts = np.broadcast_to(np.int16([choice, choice + 1]), (7, policy.arch.num_layers, 2))
                [found[replays, choice]] = policy_logprobs(OneProcess(), policy, [replace(rollout(8), experts=experts)])
        assert np.abs(found[True, 0] - found[True, 2]).max() > 1e-4
        np.testing.assert_array_equal(found[False, 0], found[False, 2])
    finally:
        torch.distributed.destroy_process_group()
