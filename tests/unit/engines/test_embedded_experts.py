"""Experts in the embedded engine: which ones it tells that it chose, its storage, and refits of parts of one expert.

test_embedded_engine.py compares tokens and log-probs with transformers.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import make_model
from toys import characters
from transformers import AutoModelForCausalLM

from megatron_rl.algorithms.tandem_authors import Rule
from megatron_rl.engines.embedded.embedded_engine import EmbeddedEngine
from megatron_rl.engines.embedded.engine_weights import ExpertWeights, FeedForward, SharedExpert, WeightSlots, storage
from megatron_rl.engines.embedded.feed_forward import add_experts
from megatron_rl.engines.protocol import Sampling, TandemSampling, complete
from megatron_rl.models.shape import read_shape
from megatron_rl.models.sizes import Routing
from megatron_rl.types import FREE
from megatron_rl.weights import counting, hf_model
from megatron_rl.weights.parameter_mapping import hf_shapes

FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss")
PROMPTS = [[5, 9, 30], [8] * 17, [40], [7 + i for i in range(50)], [8] * 17]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    base = tmp_path_factory.mktemp("experts")
    for family in FAMILIES:
        make_model(base / family, family, eos_token_id=7, max_position_embeddings=60)
    make_model(base / "dense", eos_token_id=7)
    return base


def loaded(directory, **settings):
    engine = EmbeddedEngine(directory, **settings)
    engine.load_pretrained()
    return engine


def chosen_by_transformers(model, sequence):
    """Returns the experts that transformers' routers choose for each token, [T, L, k], ascending, FREE where there is
    none.
    """
    told = []
    sparse = [layer for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    routers = [layer.mlp.router if hasattr(layer.mlp, "router") else layer.mlp.gate for layer in sparse]
    hooks = [router.register_forward_hook(lambda module, given, made: told.append(made[2])) for router in routers]
    with torch.no_grad():
        model(torch.tensor([sequence]))
    for hook in hooks:
        hook.remove()
    told = [torch.full_like(told[0], FREE)] * (len(model.model.layers) - len(sparse)) + told
    return torch.stack(told, dim=1).sort(dim=-1).values.numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_experts_that_are_told_are_those_of_transformers(models, family):
    """Rows come and go: six slots for fifteen rows, some of which share a prompt."""
    reference = AutoModelForCausalLM.from_pretrained(models / family, dtype=torch.float32).eval()
    engine = loaded(models / family, max_batch=6, tells_experts=True)
    groups = complete(engine, PROMPTS, Sampling(max_tokens=30, n=3))
    assert len({len(c.tokens) for group in groups for c in group}) > 2
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for c in group:
            read = [*prompt, *c.tokens.tolist()][:-1]
            assert c.experts.dtype == np.int16 and c.experts.shape == (len(read), 2, 2)
            assert np.array_equal(np.sort(c.experts, axis=-1), chosen_by_transformers(reference, read))


def test_experts_are_told_where_they_are_asked_for(models):
    assert complete(loaded(models / "mixtral"), PROMPTS[:1], Sampling(max_tokens=3))[0][0].experts is None
    full = complete(loaded(models / "mixtral", tells_experts=True), [[9] * 60], Sampling(max_tokens=3))[0][0]
    assert full.tokens.size == 0 and full.experts is None  # nothing was read: the context has no room
    with pytest.raises(ValueError, match="has no experts, whose choice could be told: leave tells_experts out"):
        EmbeddedEngine(models / "dense", tells_experts=True)


@pytest.mark.parametrize("junior", ["dense", "qwen3_moe"])
def test_a_tandem_tells_the_seniors_experts_of_every_token(models, junior):
    reference = AutoModelForCausalLM.from_pretrained(models / "qwen2_moe", dtype=torch.float32).eval()
    engine = loaded(models / "qwen2_moe", tokenizer=characters(), junior=models / junior, tells_experts=True)
    tandem = TandemSampling(rule=Rule(strategy="bernoulli"))
    for prompt, group in zip(PROMPTS, complete(engine, PROMPTS, Sampling(max_tokens=9, tandem=tandem)), strict=True):
        [c] = group
        read = [*prompt, *c.tokens.tolist()][:-1]
        assert np.array_equal(np.sort(c.experts, axis=-1), chosen_by_transformers(reference, read))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("renormalised", [False, True])
def test_the_layer_is_its_formula_in_float64(shared, renormalised):
    """A loop over tokens and experts, in bfloat16 as well: there the router must not round its logits."""
    tokens, hidden, width, experts, count = 300, 8, 16, 20, 3
    draw = torch.Generator().manual_seed(0)

    def make(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float32).bfloat16()

    own = SharedExpert(make(1, hidden), FeedForward(make(2 * width, hidden), make(hidden, width))) if shared else None
    twins = make(experts // 2, hidden)  # every expert has another one whose logits are nearly the same
    router = torch.cat([twins, twins * (1 + 2**-7 * torch.eye(hidden)[0]).bfloat16()])
    layer = ExpertWeights(router, make(experts, 2 * width, hidden), make(experts, hidden, width), own)
    x, y = make(tokens, hidden), make(tokens, hidden)
    wanted, wanted_experts = by_loops(y, layer, count, renormalised)
    rounded = (y @ layer.router.T).topk(count).indices.sort(dim=-1).values.tolist()
    assert rounded != wanted_experts, "bfloat16 logits choose other experts"
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.02)):
        out = x.to(dtype, copy=True)
        chosen = add_experts(out, y.to(dtype), cast(layer, dtype), Routing(chosen=count, renormalised=renormalised))
        assert chosen.sort(dim=-1).values.tolist() == wanted_experts
        assert (out.double() - x.double() - wanted).abs().max() < bound * wanted.abs().max()


def cast(part, dtype):
    """Returns nested dataclasses with their tensors in another dtype."""
    made = {
        name: value.to(dtype) if isinstance(value, torch.Tensor) else value and cast(value, dtype)
        for name, value in vars(part).items()
    }
    return replace(part, **made)


def by_loops(y, layer, count, renormalised):
    """Returns what the layer adds, [N, h] float64, and the experts of each token, ascending."""
    out, found = torch.zeros(y.shape, dtype=torch.float64), []
    for n, state in enumerate(y.double()):
        scores = [float(row @ state) for row in layer.router.double()]
        weights = torch.tensor(scores, dtype=torch.float64).softmax(0).tolist()
        best = sorted(sorted(range(len(scores)), key=lambda e: -scores[e])[:count])
        total = sum(weights[e] for e in best) if renormalised else 1.0
        for e in best:
            out[n] += weights[e] / total * gated(state, layer.gate_up[e], layer.down[e])
        if layer.shared is not None:
            share = 1 / (1 + torch.exp(-(layer.shared.gate[0].double() @ state)))
            out[n] += share * gated(state, layer.shared.layer.gate_up, layer.shared.layer.down)
        found.append(best)
    return out, found


def gated(state, gate_up, down):
    gate, up = (gate_up.double() @ state).chunk(2)
    return down.double() @ (gate / (1 + torch.exp(-gate)) * up)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_storage_is_the_models_tensors_bit_for_bit(models, family):
    """And it takes the memory that `megatron-rl plan` counts."""
    engine, tensors = EmbeddedEngine(models / family), dict(hf_model.read_tensors(models / family))
    weights, slots = storage(engine.arch, torch.float32, CPU)
    assert {name: (*slot.shape, 1)[:2] for name, slot in slots.items()} == hf_shapes(engine.arch)
    for name, tensor in tensors.items():
        slots[name].fill(tensor)
    targets = WeightSlots(slots)
    assert all(torch.equal(targets.read(name, whole(t)).view(t.shape), t) for name, t in tensors.items())
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors_of(weights)}
    shape = read_shape(str(models / family))
    assert sum(held.values()) == 4 * counting.total(shape)


def whole(tensor):
    return (0, 0, len(tensor), tensor[0].numel())


def tensors_of(weights):
    """Yields every tensor within nested dataclasses and tuples."""
    parts = weights if isinstance(weights, tuple) else vars(weights).values()
    for part in parts:
        if isinstance(part, torch.Tensor):
            yield part
        elif part is not None:
            yield from tensors_of(part)


def test_a_refit_writes_rows_and_columns_of_one_expert_alone(models):
    engine = loaded(models / "qwen3_moe")
    places, tensors = engine.targets, dict(hf_model.read_tensors(models / "qwen3_moe"))
    engine.begin_refit()
    for name, tensor in tensors.items():
        places.write(name, whole(tensor), tensor.view(len(tensor), -1))
    up, down = (f"model.layers.1.mlp.experts.2.{part}_proj.weight" for part in ("up", "down"))
    places.write(up, (8, 0, 4, 64), torch.full((4, 64), 2.0))  # as etp cuts the first matrices, and the last one
    places.write(down, (0, 16, 64, 8), torch.full((64, 8), 3.0))
    engine.commit_refit(1)
    tensors[up][8:12], tensors[down][:, 16:24] = 2.0, 3.0
    assert all(torch.equal(places.read(name, whole(t)).view(t.shape), t) for name, t in tensors.items())
    other = EmbeddedEngine(models / "qwen3_moe")
    other.load(tensors.items(), version=1)
    assert all(np.array_equal(a, b) for a, b in zip(engine.score(PROMPTS), other.score(PROMPTS), strict=True))
    missing = {name: tensor for name, tensor in tensors.items() if name != down}
    with pytest.raises(ValueError, match=f"1 tensors are missing, the first is {down}"):
        other.load(missing.items(), version=2)


def test_the_same_experts_twice_are_the_single_model(models):
    engine = loaded(models / "mixtral", tokenizer=characters(), junior=models / "mixtral")
    greedy = Sampling(max_tokens=20, temperature=0.0)
    both = replace(greedy, tandem=TandemSampling(rule=Rule(strategy="alternating")))
    alone, tandem = complete(engine, PROMPTS, greedy), complete(engine, PROMPTS, both)
    assert [g[0].tokens.tolist() for g in tandem] == [g[0].tokens.tolist() for g in alone]


def test_a_bias_of_experts_stays_float32_and_travels_bit_for_bit(models):
    """A bfloat16 bias would send tokens to other experts than the trainer's routers do."""
    arch = hf_model.read_architecture(models / "deepseek_v3")
    _, slots = storage(arch, torch.bfloat16, CPU)
    [name] = [name for name in slots if name.endswith("e_score_correction_bias")]
    assert {slot.rows.dtype for other, slot in slots.items() if other != name} == {torch.bfloat16}
    bias = torch.randn(len(slots[name].rows), generator=torch.Generator().manual_seed(0))
    travels = WeightSlots(slots).carried({name}, torch.bfloat16)
    for row in range(len(bias)):  # in parts, as messages bring them
        travels.write(name, (row, 0, 1, 2), bias[row : row + 1].view(torch.bfloat16)[None])
    assert torch.equal(slots[name].rows, bias)
    assert torch.equal(travels.read(name, (0, 0, len(bias), 2)), bias[:, None].view(torch.bfloat16))
    with pytest.raises(ValueError, match="model.norm.weight is torch.bfloat16: it must be float32"):
        WeightSlots(slots).carried({"model.norm.weight"}, torch.bfloat16)
