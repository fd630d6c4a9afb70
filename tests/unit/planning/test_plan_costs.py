"""Parameters, bytes and seconds that plans are made of, against published figures and the refit that is planned."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from megatron_rl.models.shape import read_shape
from megatron_rl.planning import compute, memory
from megatron_rl.planning.compute import EngineSetup, SequenceBatch
from megatron_rl.planning.hardware import parse_cluster
from megatron_rl.planning.memory import Actor, MicroBatchLoad, Precision
from megatron_rl.planning.workload import Draw
from megatron_rl.weights import rank_layouts, refit_plan
from megatron_rl.weights.counting import Parallel, counts, total
from megatron_rl.weights.rank_layouts import EngineLayout, TrainerLayout
from megatron_rl.weights.refit_plan import RankPlacement

BF16 = Precision.gpu("bfloat16")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen/Qwen2.5-7B", 7_615_616_512),
        ("Qwen/Qwen2.5-Math-7B", 7_615_616_512),
        ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
        ("Qwen/Qwen2.5-72B", 72_706_203_648),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248),
        ("allenai/OLMo-2-0425-1B-Instruct", 1_484_916_736),
        ("allenai/OLMo-2-1124-7B", 7_298_617_344),
        ("allenai/OLMo-2-1124-13B", 13_716_198_400),
        ("allenai/OLMo-2-0325-32B", 32_234_279_936),
        ("meta-llama/Llama-3.1-70B", 70_553_706_496),
        ("mistralai/Mixtral-8x7B-v0.1", 46_702_792_704),
        ("Qwen/Qwen3-30B-A3B", 30_532_122_624),
        ("Qwen/Qwen3-235B-A22B", 235_093_634_560),
        ("deepseek-ai/DeepSeek-V2-Lite", 15_706_484_224),
        ("deepseek-ai/DeepSeek-V2", 235_741_434_880),
        ("deepseek-ai/DeepSeek-V3", 671_026_419_200),
    ],
)
def test_public_models_have_their_published_number_of_parameters(name, parameters):
    shape = read_shape(name)
    assert total(shape) == parameters and not shape.guessed


def test_a_path_with_a_public_models_words_is_a_guess_that_is_said():
    assert read_shape("runs/sft_qwen2.5_math_7b/model").guessed


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("qwen2.5-7b", {"tp": 4, "pp": 2}),
        ("qwen3-4b", {"tp": 2, "pp": 3}),
        ("qwen3-30b-a3b", {"tp": 2, "pp": 2, "ep": 4, "etp": 1}),
        ("mixtral-8x7b", {"tp": 2, "ep": 2, "etp": 2}),
        ("deepseek-v2-lite", {"tp": 2, "ep": 4, "etp": 1}),
    ],
)
def test_a_ranks_parameters_are_those_of_the_table_of_rectangles(name, cut):
    shape, parallel = read_shape(name), Parallel(world=32, **cut)
    held: dict[int, int] = {}
    for holding in rank_layouts.trainer(shape.sizes, TrainerLayout(dp=parallel.dp, **cut)):
        own = sum(rect.elements for _, rect in holding.parameters)
        for rank in holding.ranks:
            held[rank] = held.get(rank, 0) + own
    for rank, elements in held.items():
        assert counts(shape, parallel, rank // (32 // parallel.pp)).all == elements


def test_more_ranks_never_need_more_memory():
    shape, micro = read_shape("qwen2.5-7b"), MicroBatchLoad(tokens=8192)

    def held(**cut):
        return memory.worst(Actor(shape, Parallel(world=64, **cut), BF16), micro)

    for axis, sizes in (("tp", (1, 2, 4)), ("pp", (1, 2, 4, 7)), ("cp", (1, 2, 4))):
        plans_ = [held(**{axis: size}) for size in sizes]
        assert all(b.weights <= a.weights and b.gradients <= a.gradients for a, b in pairwise(plans_)), axis
    assert held(cp=4).activations < held().activations and held(tp=4).activations < held().activations
    assert held(tp=4, sequence_parallel=True).activations < held(tp=4).activations
    again = memory.worst(Actor(shape, Parallel(world=64), BF16), replace(micro, recompute=frozenset([memory.WHOLE])))
    assert again.activations < held().activations / 4
    more = memory.worst(Actor(shape, Parallel(world=128), BF16), micro)
    assert more.optimizer == held().optimizer / 2 and more.gradients == held().gradients


def test_what_is_computed_again_takes_its_modules_time_and_no_more():
    cluster, batch = parse_cluster("4x8xA100-80"), SequenceBatch(sequences=64, length=4096, micro_tokens=8192)

    def seconds(name, modules, **cut):
        parallel = Parallel(world=32, **cut)
        return compute.pass_seconds(
            Actor(read_shape(name), parallel, BF16), cluster, batch, backward=True, recompute=modules
        )

    dense, experts = "qwen2.5-7b", "qwen3-30b-a3b"
    plain, whole = seconds(dense, ()), seconds(dense, [memory.WHOLE])
    attention, mlp = seconds(dense, ["core_attn"]) - plain, seconds(dense, ["mlp"]) - plain
    both = seconds(dense, ["core_attn", "mlp"]) - plain
    assert 0 < attention < mlp and both == pytest.approx(attention + mlp) and both < whole - plain
    sizes = read_shape(dense).sizes
    assert mlp / attention == pytest.approx(3 * sizes.ffn * sizes.hidden / (sizes.heads * sizes.head_dim * 4096))
    assert seconds(dense, ["moe"]) == plain and seconds(experts, ["mlp"]) == seconds(experts, ())
    plain, whole = seconds(experts, (), ep=8), seconds(experts, [memory.WHOLE], ep=8)
    assert 0.5 * (whole - plain) < seconds(experts, ["moe"], ep=8) - plain < whole - plain


def test_experts_are_cut_by_ep_and_their_optimizer_by_their_own_replicas():
    shape = read_shape("qwen3-30b-a3b")
    whole, cut = (counts(shape, Parallel(world=64, ep=ep)) for ep in (1, 16))
    assert cut.expert * 16 == whole.expert and cut.dense == whole.dense
    found = memory.optimizer_bytes(Actor(shape, Parallel(world=64, ep=16), BF16), 0)
    assert found == 12 * (cut.dense / 64 + cut.expert / 4)


def test_time_falls_with_ranks_and_rises_with_bubbles():
    shape, cluster = read_shape("qwen2.5-7b"), parse_cluster("4x8xA100-80")
    batch = SequenceBatch(sequences=256, length=2048, micro_tokens=8192)

    def seconds(world, **cut):
        return compute.pass_seconds(Actor(shape, Parallel(world=world, **cut), BF16), cluster, batch, backward=True)

    assert seconds(8) > seconds(16) > seconds(32)
    assert seconds(32, pp=4) > seconds(32) and seconds(32, pp=4) > seconds(32, pp=4, vpp=7)
    forward = compute.pass_seconds(Actor(shape, Parallel(world=8), BF16), cluster, batch, backward=False)
    assert 2.5 < seconds(8) / forward < 4


def test_a_decoding_step_is_bound_by_memory_for_few_rows_and_more_rows_give_more_tokens():
    shape, cluster = read_shape("llama-3.1-8b"), parse_cluster("1x1xA100-80")
    engine = EngineSetup(replicas=1, tp=1, max_batch=512, kv_bytes=4e10)
    steps = [
        compute.decode_step_seconds(shape, engine, cluster, rows=rows, context=1000, width=2)
        for rows in (1, 8, 64, 256)
    ]
    assert all(a < b for a, b in pairwise(steps)) and all(
        a > b for a, b in pairwise(s / r for s, r in zip(steps, (1, 8, 64, 256), strict=True))
    )
    assert steps[0] > 2 * 7.5e9 / cluster.device.hbm
    draw = Draw(role="", samples=64, prompt=200, response=800, longest=800)
    few = compute.rollout_cost(shape, replace(engine, kv_bytes=1e9), cluster, draw, width=2)
    many = compute.rollout_cost(shape, engine, cluster, draw, width=2)
    assert few.rows < 8 and many.rows == 64 and few.seconds > 3 * many.seconds


@pytest.mark.parametrize(
    ("name", "cut", "engine"),
    [("qwen2.5-7b", {"tp": 2, "pp": 2}, (4, 2)), ("qwen3-30b-a3b", {"tp": 2, "ep": 8, "etp": 1}, (8, 2))],
)
def test_a_refit_sends_what_its_plan_sends(name, cut, engine):
    shape, (tp, replicas) = read_shape(name), engine
    parallel, cluster = Parallel(world=16, **cut), parse_cluster("4x8xH100")
    sizes = replace(shape.sizes, num_layers=4)  # enough of it
    shape = replace(shape, sizes=sizes)
    plan = refit_plan.plan(
        rank_layouts.trainer(sizes, TrainerLayout(dp=parallel.dp, **cut)),
        rank_layouts.engines(sizes, EngineLayout(tp=tp, replicas=replicas)),
        trainer=RankPlacement([rank // 8 for rank in range(16)], list(range(16))),
        engine=RankPlacement([2 + rank // 8 for rank in range(tp * replicas)],
                             [16 + rank for rank in range(tp * replicas)]),
        bucket_elements=1 << 26,
    )  # fmt: skip
    setup = EngineSetup(replicas=replicas, tp=tp, max_batch=1, kv_bytes=0)
    ours = compute.refit_cost(Actor(shape, parallel, BF16), setup, cluster, place="elsewhere")
    assert ours.sent == pytest.approx(2 * plan.sent, rel=0.02)
