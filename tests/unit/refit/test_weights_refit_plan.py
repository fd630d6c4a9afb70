"""The plan of a refit, executed on numbered weights: every engine rank gets its part, and each element is sent once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from coverage_of_ranks import check_coverage
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numbered import numbered

from megatron_rl.config.schema import ConfigError
from megatron_rl.models.registry import families, known_sizes
from megatron_rl.models.sizes import Sizes
from megatron_rl.refit.topology import Topology
from megatron_rl.refit.transport_choice import RankLocation, RankLocations
from megatron_rl.weights import parameter_mapping, rank_layouts, refit_plan, tensor_copies
from megatron_rl.weights.rank_layouts import EngineLayout, TrainerLayout
from megatron_rl.weights.refit_plan import RankPlacement


def apart(trainer: int, engine: int, per_node: int = 8) -> tuple[RankPlacement, RankPlacement]:
    """Returns placements with trainer and engines on nodes of their own."""
    nodes = -(-trainer // per_node)
    return (
        RankPlacement([r // per_node for r in range(trainer)], list(range(trainer))),
        RankPlacement([nodes + r // per_node for r in range(engine)], [nodes * per_node + r for r in range(engine)]),
    )


def together(trainer: int, engine: int, per_node: int = 8) -> tuple[RankPlacement, RankPlacement]:
    """Returns placements with engine rank r on the device of trainer rank r."""
    return tuple(RankPlacement([r // per_node for r in range(n)], list(range(n))) for n in (trainer, engine))


def make_plan(sizes: Sizes, trainer: TrainerLayout, engine: EngineLayout, places=apart, **settings):
    where = places(trainer.world, engine.world)
    return refit_plan.plan(
        rank_layouts.trainer(sizes, trainer),
        rank_layouts.engines(sizes, engine),
        trainer=where[0],
        engine=where[1],
        **settings,
    )


@st.composite
def cases(draw):
    """Draws sizes, a trainer's layout and an engine's layout."""
    family = draw(st.sampled_from(sorted(families())))
    moe = families()[family].has_experts
    tp, engine_tp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    sizes = Sizes(
        family=family,
        num_layers=draw(st.integers(1, 3)),
        hidden=8,
        heads=4,
        kv_heads=kv_heads,
        head_dim=4,
        ffn=8,
        vocab=draw(st.integers(5, 40)),
        tied=draw(st.booleans()),
        experts=4 * moe,
        expert_ffn=8 * moe,
        shared_ffn=8 if families()[family].has_shared_expert else 0,
    )
    dp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, sizes.num_layers))
    ep, etp = (draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))) if moe else (1, 1)
    assume(tp * dp % (ep * etp) == 0)
    assume(kv_heads % tp == 0)  # the trainer keeps key/value heads whole
    biased = families()[family].common.bias and moe  # such experts are not cut
    etp = 1 if biased else etp
    trainer = TrainerLayout(tp=tp, pp=pp, dp=dp, ep=ep, etp=etp, vocab_multiple=draw(st.sampled_from([1, 8])))
    return (
        sizes,
        trainer,
        EngineLayout(
            tp=engine_tp, replicas=draw(st.integers(1, 2)), expert_parallel=moe and (biased or draw(st.booleans()))
        ),
    )


def parameters_of(sizes: Sizes, layout: TrainerLayout) -> dict[int, dict[str, torch.Tensor]]:
    """Returns {rank: its parameters}, 2-D, filled from the numbered model by their own shapes."""
    whole = {n: t if t.dim() > 1 else t[:, None] for n, t in numbered(sizes).items()}
    out: dict[int, dict[str, torch.Tensor]] = {r: {} for r in range(layout.world)}
    for holding in rank_layouts.trainer(sizes, layout):
        found: dict[str, list[parameter_mapping.Rect]] = {}
        for name, rect in holding.parameters:
            found.setdefault(name, []).append(rect)
        for name, rects in found.items():
            shape = max(r.at_row + r.rows for r in rects), max(r.at_column + r.columns for r in rects)
            parameter = torch.zeros(shape, dtype=torch.float64)
            tensor_copies.fill(parameter, rects, lambda rect: tensor_copies.from_tensor(whole[rect.tensor], rect))
            for rank in holding.ranks:
                out[rank][name] = parameter
    return out


@settings(max_examples=20, deadline=None, derandomize=True)
@given(cases())
def test_messages_between_processes_on_one_gpu_are_larger(case):
    """Each of the 49 messages of 1.5 B parameters had its handshake, which takes longer than the copy of 64 MiB."""
    sizes, trainer, engine = case
    topology = Topology(sizes=sizes, trainer=trainer, engines=engine, dtype="float32")

    def plan(device):
        ranks = [[RankLocation("a", f"{side}{i}", device) for i in range(side.world)] for side in (trainer, engine)]
        return topology.plan(RankLocations(ranks[0], dict(enumerate(ranks[1]))), 40 * 4 / 2**20)

    small, large = plan("cpu"), plan("GPU-0")
    assert not small.local and not large.buckets and len(large.slices) >= 1
    assert sum(b.elements for b in small.buckets) == sum(b.elements for b in large.local)
    assert all(b.elements <= 40 or b.last - b.first == 1 for b in small.buckets)
    assert all(b.elements <= 320 or b.last - b.first == 1 for b in large.local)
    assert len(large.local) < len(small.buckets) or len(small.buckets) == engine.world


@pytest.mark.parametrize("elements", [0, 1, 2, 3, 100])
def test_a_message_holds_what_its_size_allows_and_at_least_one_value(elements):
    least = Sizes(
        family="qwen2", num_layers=1, hidden=1, heads=1, kv_heads=1, head_dim=1, ffn=1, vocab=1, tied=True
    )  # of parameters of a single value
    topology = Topology(sizes=least, trainer=TrainerLayout(), engines=EngineLayout(), dtype="float32")
    locations = RankLocations([RankLocation("a", "trainer", "cpu")], {0: RankLocation("a", "engine", "cpu")})
    made = topology.plan(locations, elements * 4 / 2**20)
    total = sum(bucket.elements for bucket in made.buckets)
    assert total > 10 and max(bucket.elements for bucket in made.buckets) == min(total, max(1, elements))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(cases(), st.sampled_from([apart, together]), st.sampled_from([40, 64 << 20]))
def test_weights_resharded_by_the_plan_are_those_of_the_model(case, places, bucket):
    sizes, trainer, engine = case
    plan = make_plan(sizes, trainer, engine, places, bucket_elements=bucket)
    held, s = parameters_of(sizes, trainer), plan.slices
    whole = {n: t if t.dim() > 1 else t[:, None] for n, t in numbered(sizes).items()}
    wanted, got = {}, {}
    for rank in range(engine.world):
        own = parameter_mapping.engine(sizes, engine.tp, rank % engine.tp, expert_parallel=engine.expert_parallel)
        got[rank] = {name: torch.zeros(shape, dtype=torch.float64) for name, (shape, _) in own.items()}
        wanted[rank] = {name: torch.zeros(shape, dtype=torch.float64) for name, (shape, _) in own.items()}
        for name, (_, rects) in own.items():
            tensor_copies.fill(
                wanted[rank][name], rects, lambda rect: tensor_copies.from_tensor(whole[rect.tensor], rect)
            )
    for i in range(len(s)):
        source = held[int(s.source[i])][s.source_names[s.source_parameter[i]]]
        part = source[
            s.source_row[i] : s.source_row[i] + s.rows[i], s.source_column[i] : s.source_column[i] + s.columns[i]
        ]
        target = got[int(s.destination[i])][s.destination_names[s.destination_parameter[i]]]
        target[s.row[i] : s.row[i] + s.rows[i], s.column[i] : s.column[i] + s.columns[i]] += (
            part  # a part that came twice would show
        )
    for rank in wanted:
        for name, tensor in wanted[rank].items():
            assert torch.equal(got[rank][name], tensor), (rank, name)
    assert plan.sent == plan.lower_bound
    assert places is together or plan.lower_bound == sum(plan.needed.values())
    assert sorted(i for b in plan.buckets for i in range(b.first, b.last)) == sorted(
        i for i in range(len(s)) if places is apart or s.source[i] != s.destination[i]
    )
    assert sorted(i for b in plan.buckets + plan.local for i in range(b.first, b.last)) == [*range(len(s))]
    for number in {b.round_number for b in plan.buckets}:
        now = [b for b in plan.buckets if b.round_number == number]
        assert len({b.source for b in now}) == len({b.destination for b in now}) == len(now)
    assert all(b.elements <= bucket or b.last == b.first + 1 and s.rows[b.first] == 1 for b in plan.buckets)


def test_weights_plan_is_the_same_whoever_computes_it():
    sizes, trainer, engine = known_sizes("qwen2.5-7b"), TrainerLayout(tp=4, pp=2, dp=4), EngineLayout(tp=2, replicas=4)
    first, second = make_plan(sizes, trainer, engine), make_plan(sizes, trainer, engine)
    assert first.buckets == second.buckets
    assert all(
        (getattr(first.slices, c) == getattr(second.slices, c)).all() for c in ("source", "row", "source_row", "rows")
    )


@pytest.mark.parametrize(
    ("name", "trainer", "engine", "giga_bytes"),
    [
        ("llama3-70b", TrainerLayout(tp=8, pp=4, dp=2), EngineLayout(tp=8), 17.6),
        ("qwen3-30b-a3b", TrainerLayout(tp=2, pp=2, dp=4, ep=8), EngineLayout(tp=8, expert_parallel=True), 7.7),
    ],
)
def test_weights_plan_sends_an_engine_rank_its_own_shard_alone(name, trainer, engine, giga_bytes):
    plan = make_plan(known_sizes(name), trainer, engine)
    assert all(abs(2 * elements / 1e9 - giga_bytes) < 0.06 for elements in plan.needed.values())
    assert plan.sent == plan.lower_bound


def test_weights_plan_spreads_the_load_over_replicas_and_stays_on_the_node():
    sizes = known_sizes("llama3-8b")
    plan = make_plan(sizes, TrainerLayout(tp=2, dp=4), EngineLayout(tp=2))
    out = Counter()
    for bucket in plan.buckets:
        out[bucket.source] += bucket.elements
    assert len(out) == 8 and max(out.values()) < 1.1 * min(out.values())
    trainer, engine = RankPlacement([0, 0, 1, 1], [0, 1, 2, 3]), RankPlacement([1, 1], [8, 9])
    near = refit_plan.plan(
        rank_layouts.trainer(sizes, TrainerLayout(tp=2, dp=2)),
        rank_layouts.engines(sizes, EngineLayout(tp=2)),
        trainer=trainer,
        engine=engine,
    )
    assert {bucket.source for bucket in near.buckets} == {2, 3}


def test_weights_that_lie_on_the_device_already_are_not_sent():
    """All tensor-parallel ranks hold norms and routers; the first and the last stage hold the tied embedding."""
    width = {"hidden": 8, "heads": 4, "kv_heads": 2, "head_dim": 4, "ffn": 8, "expert_ffn": 8}
    sizes = Sizes(family="qwen3_moe", num_layers=2, vocab=16, tied=True, experts=4, **width)
    trainer, engine = TrainerLayout(tp=2, pp=2, ep=2), EngineLayout(replicas=4, whole=True)
    plan = make_plan(sizes, trainer, engine, together)
    s, shapes = plan.slices, parameter_mapping.hf_shapes(sizes)
    whole = sum(rows * columns for rows, columns in shapes.values())
    held = {r: 0 for r in range(4)}
    for holding in rank_layouts.trainer(sizes, trainer):
        parts = {rect[:5] for _, rect in holding.parameters}
        for rank in holding.ranks:
            held[rank] += sum(rows * columns for _, _, _, rows, columns in parts)
    assert plan.needed == dict.fromkeys(range(4), whole) and plan.held == held
    assert {s.destination_names[i] for i in s.destination_parameter} == shapes.keys()


def test_weights_of_interleaved_stages_are_all_held():
    sizes = known_sizes("llama3-8b")
    layout = TrainerLayout(pp=2, vpp=4)
    assert layout.layers(sizes)[0][:5] == [0, 1, 2, 3, 8]
    check_coverage(sizes, [rect for h in rank_layouts.trainer(sizes, layout) for _, rect in h.parameters])


def test_weights_plan_refuses_what_nobody_holds_and_layouts_that_do_not_divide():
    sizes = known_sizes("qwen2.5-7b")
    half = [h for h in rank_layouts.trainer(sizes, TrainerLayout(tp=1, pp=2)) if h.ranks == (0,)]
    where = apart(2, 1)
    with pytest.raises(ValueError, match="rectangles of the engines are not held by the trainer, e.g. "):
        refit_plan.plan(half, rank_layouts.engines(sizes, EngineLayout()), trainer=where[0], engine=where[1])
    with pytest.raises(ConfigError, match="num_attention_heads = 28 of the qwen2 model is not divisible by tp = 8"):
        list(rank_layouts.engines(sizes, EngineLayout(tp=8)))
    for sides in (
        (TrainerLayout(tp=2, ep=2), EngineLayout()),
        (TrainerLayout(), EngineLayout(tp=2, expert_parallel=True)),
    ):
        with pytest.raises(ConfigError, match="has no experts"):
            make_plan(sizes, *sides)
    with pytest.raises(ConfigError, match="does not divide the 4 ranks of a stage"):
        TrainerLayout(tp=2, dp=2, ep=8)
    with pytest.raises(ConfigError, match="hold 27 layers, the model has 28"):
        list(rank_layouts.trainer(sizes, TrainerLayout(pp=2, stages=(13, 14))))


def test_weights_of_experts_are_not_held_to_the_dense_width_that_they_do_not_have():
    """No layer of Qwen3-MoE uses its config's intermediate_size. tp cuts a shared expert, but not whole experts."""
    sizes = replace(known_sizes("qwen3-30b-a3b"), ffn=6145)
    make_plan(sizes, TrainerLayout(tp=2), EngineLayout(tp=2))
    make_plan(replace(sizes, expert_ffn=767), TrainerLayout(tp=2), EngineLayout(tp=2, expert_parallel=True))
    with pytest.raises(ConfigError, match="engine: moe_intermediate_size = 767 of .* is not divisible by tp = 2"):
        make_plan(replace(sizes, expert_ffn=767), TrainerLayout(tp=2), EngineLayout(tp=2))
    with pytest.raises(ConfigError, match="trainer: moe_intermediate_size = 767 of .* is not divisible by etp = 2"):
        make_plan(replace(sizes, expert_ffn=767), TrainerLayout(tp=2, etp=2), EngineLayout())
    shared = replace(sizes, family="qwen2_moe", shared_ffn=5633)
    with pytest.raises(
        ConfigError, match="trainer: shared_expert_intermediate_size = 5633 of .* is not divisible by tp = 2"
    ):
        make_plan(shared, TrainerLayout(tp=2), EngineLayout())


def test_weights_of_uneven_stages_are_all_held():
    sizes = known_sizes("llama3-8b")
    held = [
        rect for h in rank_layouts.trainer(sizes, TrainerLayout(pp=3, stages=(10, 12, 10))) for _, rect in h.parameters
    ]
    check_coverage(sizes, held)
