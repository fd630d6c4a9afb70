"""Our actor equals Hugging Face transformers: log-probs, loss, every gradient, and the weights after one optimizer
step.
"""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path

import pytest
from ranks import run_ranks
from tiny_models import make_model, make_scored

from megatron_rl.models.registry import families

WORKER = Path(__file__).parents[1] / "helpers" / "layouts_worker.py"
TP, PP = {"tp": 2}, {"pp": 2}
SP = {"tp": 2, "sequence_parallel": True}
EP, ETP, CP = {"ep": 2}, {"etp": 2}, {"cp": 2}
VPP = {"pp": 2, "vpp": 2, "overlap_p2p": True}
AT_ONCE = (
    12  # cases of one set of processes: a layout's groups keep threads, some fifty, for as long as its process lives
)
AUX = {"router_aux_loss": 0.1}
RECOMPUTE = {"recompute": "full"}


def selective(*modules):
    return {"recompute": "selective", "recompute_modules": modules}


CASES: dict[int, list[dict]] = {
    1: [
        {"name": "tp1-packed", "layout": {}, "packed": True},
        {"name": "tp1-padded", "layout": {}, "packed": False},
        {"name": "tp1-one-micro-batch", "layout": {}, "packed": True, "budget": 4096},
        {"name": "tp1-policy-loss", "layout": {}, "packed": True, "loss": "policy"},
        {
            "name": "tp1-tied-recompute",
            "model": "qwen2_tied",
            "layout": {},
            "packed": True,
            "model_settings": RECOMPUTE,
        },
        {"name": "tp1-distilled", "layout": {}, "packed": False, "loss": "distilled"},
        {"name": "tp1-selective", "layout": {}, "packed": True, "model_settings": selective("core_attn", "mlp")},
        {
            "name": "qwen2_moe-selective",
            "model": "qwen2_moe",
            "layout": {},
            "packed": True,
            "model_settings": selective("core_attn", "moe"),
        },
        {
            "name": "qwen2_moe-shared",
            "model": "qwen2_moe",
            "layout": {},
            "packed": True,
            "model_settings": selective("shared_experts"),
        },
        {
            "name": "qwen3_moe-aux",
            "model": "qwen3_moe",
            "layout": {},
            "packed": True,
            "budget": 4096,
            "model_settings": AUX,
        },
        {"name": "mixtral-replay", "model": "mixtral", "layout": {}, "packed": True, "replay": True, "loss": "policy"},
        {
            "name": "qwen2_moe-replay-recompute",
            "model": "qwen2_moe",
            "layout": {},
            "packed": False,
            "replay": True,
            "model_settings": RECOMPUTE,
        },
        {"name": "bf16-packed", "layout": {}, "packed": True, "dtype": "bfloat16"},
        {"name": "bf16-experts", "model": "qwen3_moe", "layout": {}, "packed": False, "dtype": "bfloat16"},
        {"name": "qwen3-packed", "model": "qwen3", "layout": {}, "packed": True},
        {"name": "llama3-packed", "model": "llama", "layout": {}, "packed": True},
        {"name": "mistral-packed", "model": "mistral", "layout": {}, "packed": True},
        {"name": "mixtral-packed", "model": "mixtral", "layout": {}, "packed": True},
        {"name": "qwen3_moe-packed", "model": "qwen3_moe", "layout": {}, "packed": True},
        {"name": "qwen3_moe-renormalised-padded", "model": "qwen3_moe_renormalised", "layout": {}, "packed": False},
        {"name": "qwen2_moe-packed", "model": "qwen2_moe", "layout": {}, "packed": True},
        {"name": "gemma3-packed", "model": "gemma3_text", "layout": {}, "packed": True},
        {"name": "gemma3-padded", "model": "gemma3_text", "layout": {}, "packed": False},
        {
            "name": "gemma3-untied-recompute",
            "model": "gemma3_untied",
            "layout": {},
            "packed": True,
            "model_settings": RECOMPUTE,
        },
        {"name": "gemma3-bf16", "model": "gemma3_text", "layout": {}, "packed": True, "dtype": "bfloat16"},
        {"name": "deepseek_v2-packed", "model": "deepseek_v2", "layout": {}, "packed": True},
        {"name": "deepseek_v3-padded", "model": "deepseek_v3", "layout": {}, "packed": False},
        {"name": "olmo2-packed", "model": "olmo2", "layout": {}, "packed": True},
        {"name": "head-packed", "layout": {}, "packed": True, "head": "value"},
        {"name": "head-bf16", "layout": {}, "packed": True, "head": "score", "dtype": "bfloat16"},
        {
            "name": "qwen2_moe-recompute-padded",
            "model": "qwen2_moe",
            "layout": {},
            "packed": False,
            "model_settings": RECOMPUTE,
        },
    ],
    2: [
        {"name": "tp2-packed", "layout": TP, "packed": True},
        {"name": "tp2-padded", "layout": TP, "packed": False},
        {"name": "tp2sp-packed", "layout": SP, "packed": True},
        {"name": "tp2sp-padded", "layout": SP, "packed": False},
        {"name": "pp2-packed", "layout": PP, "packed": True},
        {"name": "pp2-padded", "layout": PP, "packed": False},
        {"name": "pp2-tied", "model": "qwen2_tied", "layout": PP, "packed": True},
        {"name": "pp2vpp2-packed", "layout": VPP, "packed": True},
        {"name": "dp2-packed", "layout": {}, "packed": True},
        {"name": "dp2-padded", "layout": {}, "packed": False},
        {"name": "cp2-packed", "layout": CP, "packed": True},
        {"name": "cp2-padded", "layout": CP, "packed": False},
        {"name": "cp2-policy-loss", "layout": CP, "packed": True, "loss": "policy"},
        {"name": "cp2-distilled", "layout": CP, "packed": True, "loss": "distilled"},
        {"name": "tp2-distilled", "layout": TP, "packed": True, "loss": "distilled"},
        {"name": "tp2sp-distilled", "layout": SP, "packed": False, "loss": "distilled"},
        {"name": "pp2-distilled", "model": "qwen2_tied", "layout": PP, "packed": True, "loss": "distilled"},
        {"name": "cp2-bf16", "layout": CP, "packed": True, "dtype": "bfloat16"},
        {"name": "tp2sp-bf16", "layout": SP, "packed": True, "dtype": "bfloat16"},
        {"name": "pp2-bf16", "layout": PP, "packed": False, "dtype": "bfloat16"},
        {"name": "qwen3_moe-ep2-bf16", "model": "qwen3_moe", "layout": EP, "packed": True, "dtype": "bfloat16"},
        {"name": "dp2-overlap", "layout": {}, "packed": True, "optimizer": {"overlap": True}},
        {"name": "dp2-decay-norms", "layout": {}, "packed": True, "optimizer": {"decay_norms": True}},
        {"name": "pp2-vpp2-policy-loss", "layout": VPP, "packed": True, "loss": "policy"},
        {"name": "qwen2_moe-cp2-packed", "model": "qwen2_moe", "layout": CP, "packed": True},
        {"name": "qwen3_moe-cp2-ep2-padded", "model": "qwen3_moe", "layout": CP | EP, "packed": False},
        {"name": "qwen3-tp2-packed", "model": "qwen3", "layout": TP, "packed": True},
        {"name": "qwen3-tp2sp-packed", "model": "qwen3", "layout": SP, "packed": True},
        {"name": "mistral-tp2sp-packed", "model": "mistral", "layout": SP, "packed": True},
        {"name": "mixtral-ep2-packed", "model": "mixtral", "layout": EP, "packed": True},
        {"name": "mixtral-etp2-padded", "model": "mixtral", "layout": ETP, "packed": False},
        {"name": "mixtral-dp2-packed", "model": "mixtral", "layout": {}, "packed": True},
        {"name": "qwen3_moe-ep2-padded", "model": "qwen3_moe", "layout": EP, "packed": False},
        {"name": "qwen3_moe-tp2sp-packed", "model": "qwen3_moe", "layout": SP, "packed": True},
        {
            "name": "qwen3_moe-tp2sp-etp1-packed",
            "model": "qwen3_moe_renormalised",
            "layout": SP | {"etp": 1},
            "packed": True,
        },
        {"name": "qwen2_moe-tp2sp-ep2-packed", "model": "qwen2_moe", "layout": SP | EP | {"etp": 1}, "packed": True},
        {"name": "qwen2_moe-tp2sp-padded", "model": "qwen2_moe", "layout": SP, "packed": False},
        {"name": "qwen2_moe-pp2-packed", "model": "qwen2_moe", "layout": PP, "packed": True},
        {"name": "qwen3_moe-pp2vpp2-packed", "model": "qwen3_moe_renormalised", "layout": VPP, "packed": True},
        {"name": "gemma3-tp2-packed", "model": "gemma3_text", "layout": TP, "packed": True},
        {"name": "gemma3-tp2sp-packed", "model": "gemma3_text", "layout": SP, "packed": True},
        {"name": "gemma3-tp2sp-padded", "model": "gemma3_text", "layout": SP, "packed": False},
        {"name": "gemma3-pp2-packed", "model": "gemma3_text", "layout": PP, "packed": True},
        {"name": "gemma3-pp2vpp2-padded", "model": "gemma3_text", "layout": VPP, "packed": False},
        {"name": "gemma3-cp2-packed", "model": "gemma3_text", "layout": CP, "packed": True},
        {"name": "gemma3-cp2-padded", "model": "gemma3_text", "layout": CP, "packed": False},
        {"name": "deepseek_v2-ep2-padded", "model": "deepseek_v2", "layout": EP, "packed": False},
        {
            "name": "deepseek_v3-tp2sp-ep2-packed",
            "model": "deepseek_v3",
            "layout": SP | EP | {"etp": 1},
            "packed": True,
        },
        {"name": "deepseek_v3-pp2-packed", "model": "deepseek_v3", "layout": PP, "packed": True},
        {"name": "deepseek_v3-cp2-padded", "model": "deepseek_v3", "layout": CP, "packed": False},
        {"name": "olmo2-tp2sp-packed", "model": "olmo2", "layout": SP, "packed": True},
        {"name": "olmo2-tp2-padded", "model": "olmo2", "layout": TP, "packed": False},
        {"name": "head-tp2sp-packed", "layout": SP, "packed": True, "head": "value"},
        {"name": "head-tied-pp2-padded", "model": "qwen2_tied", "layout": PP, "packed": False, "head": "value"},
    ],
    4: [
        {"name": "tp2pp2-packed", "layout": TP | PP, "packed": True},
        {"name": "tp2pp2sp-padded", "layout": SP | PP, "packed": False},
        {"name": "tp2dp2-packed", "layout": TP, "packed": True},
        {"name": "pp2dp2-packed", "layout": PP, "packed": True},
        {"name": "pp2dp2-overlap", "layout": PP, "packed": True, "optimizer": {"overlap": True}},
        {"name": "pp2vpp2dp2-overlap", "layout": VPP, "packed": True, "optimizer": {"overlap": True}},
        {"name": "cp2dp2-policy-loss", "layout": CP, "packed": True, "loss": "policy"},
        {"name": "cp4-packed", "layout": {"cp": 4}, "packed": True},
        {"name": "tp2sp-cp2-packed", "layout": SP | CP, "packed": True},
        {"name": "tp2sp-cp2-padded", "layout": SP | CP, "packed": False},
        {"name": "pp2cp2-packed", "layout": PP | CP, "packed": True},
        {"name": "pp2vpp2cp2-padded", "layout": VPP | CP, "packed": False},
        {"name": "qwen2_moe-tp2sp-cp2-ep2-packed", "model": "qwen2_moe", "layout": SP | CP | EP, "packed": True},
        {"name": "mixtral-tp2sp-ep2-packed", "model": "mixtral", "layout": SP | EP, "packed": True},
        {
            "name": "qwen2_moe-tp2sp-dp2-ep2-etp1-padded",
            "model": "qwen2_moe",
            "layout": SP | EP | {"etp": 1},
            "packed": False,
        },
        {"name": "qwen2_moe-replay-tp2sp-cp2", "model": "qwen2_moe", "layout": SP | CP, "packed": True, "replay": True},
        {
            "name": "qwen3_moe-replay-recompute-pp2vpp2-ep2",
            "model": "qwen3_moe_renormalised",
            "layout": VPP | EP,
            "packed": True,
            "replay": True,
            "model_settings": RECOMPUTE,
        },
        {
            "name": "mixtral-replay-selective-pp2-cp2",
            "model": "mixtral",
            "layout": PP | CP,
            "packed": False,
            "replay": True,
            "model_settings": selective("moe"),
        },
        {"name": "qwen3_moe-pp2-ep2-packed", "model": "qwen3_moe", "layout": PP | EP, "packed": True},
        {
            "name": "qwen3_moe-pp2vpp2-ep2-padded",
            "model": "qwen3_moe_renormalised",
            "layout": VPP | EP,
            "packed": False,
        },
        {"name": "qwen3_moe-ep2-dp4-packed", "model": "qwen3_moe", "layout": EP, "packed": True},
    ],
}
FURTHER: dict[int, list[dict]] = {  # cases that `make test` has no time for
    1: [
        {"name": "deepseek_v3-packed", "model": "deepseek_v3", "layout": {}, "packed": True},
        {"name": "deepseek_v2_greedy-padded", "model": "deepseek_v2_greedy", "layout": {}, "packed": False},
        {"name": "deepseek_v3-bf16", "model": "deepseek_v3", "layout": {}, "packed": True, "dtype": "bfloat16"},
        {"name": "deepseek_v2-bf16", "model": "deepseek_v2", "layout": {}, "packed": False, "dtype": "bfloat16"},
        {
            "name": "deepseek_v3-recompute",
            "model": "deepseek_v3_deep",
            "layout": {},
            "packed": True,
            "model_settings": RECOMPUTE,
        },
        {
            "name": "deepseek_v3-selective",
            "model": "deepseek_v3",
            "layout": {},
            "packed": False,
            "model_settings": selective("core_attn", "mlp", "moe"),
        },
        {"name": "deepseek_v3-replay", "model": "deepseek_v3", "layout": {}, "packed": True, "replay": True},
    ],
    2: [
        {"name": "deepseek_v2-tp2sp-packed", "model": "deepseek_v2", "layout": SP, "packed": True},
        {"name": "deepseek_v3-tp2sp-padded", "model": "deepseek_v3", "layout": SP, "packed": False},
        {"name": "deepseek_v2_greedy-tp2sp-packed", "model": "deepseek_v2_greedy", "layout": SP, "packed": True},
        {"name": "deepseek_v3-pp2-padded", "model": "deepseek_v3", "layout": PP, "packed": False},
        {"name": "deepseek_v3-pp2vpp2-packed", "model": "deepseek_v3_deep", "layout": VPP, "packed": True},
        {"name": "deepseek_v3-ep2-packed", "model": "deepseek_v3", "layout": EP, "packed": True},
        {"name": "deepseek_v3-etp2-padded", "model": "deepseek_v3", "layout": ETP, "packed": False},
        {"name": "deepseek_v2-cp2-packed", "model": "deepseek_v2", "layout": CP, "packed": True},
        {
            "name": "deepseek_v3-dp2-overlap",
            "model": "deepseek_v3",
            "layout": {},
            "packed": True,
            "optimizer": {"overlap": True},
        },
        {"name": "deepseek_v3-tp2sp-bf16", "model": "deepseek_v3", "layout": SP, "packed": True, "dtype": "bfloat16"},
        {"name": "deepseek_v2-replay-pp2", "model": "deepseek_v2", "layout": PP, "packed": True, "replay": True},
    ],
    4: [
        {"name": "deepseek_v3-tp2sp-pp2-packed", "model": "deepseek_v3", "layout": SP | PP, "packed": True},
        {"name": "deepseek_v2-pp2-ep2-padded", "model": "deepseek_v2", "layout": PP | EP, "packed": False},
        {"name": "deepseek_v3-tp2sp-cp2-ep2-packed", "model": "deepseek_v3", "layout": SP | CP | EP, "packed": True},
    ],
}
# The bounds are twice the largest error that was seen on three sets of instructions (`make test-more ONLY=processors`),
# for each adds in an order of its own. A part that is rounded to bfloat16 is off by a thousand times as much.
GRADIENTS = 4e-6  # largest error over largest gradient
STEP = 100.0  # lr / eps: one Adam step makes at most so many times a gradient's error of it
BOUNDS = {  # absolute, fp32
    "logits": 6e-6,
    "logprobs": 4e-6,  # four steps of float32 between 8 and 16
    "reference": 4e-6,
    "loss": 5e-7,
    "loss_forward": 5e-7,
    "entropy": 2e-6,
    "grad_norm": 1e-6,  # of itself where it is above 1
    "names": 0.0,
    "swap": 0.0,
    "driver": 0.0,
}
BF16 = {
    # The root mean square, as a multiple of what transformers in bfloat16 is off from float32 on the same weights.
    "logprobs": 1.5,
    "gradients": 2.0,  # the largest, likewise
    "loss": 0.01,
    "weights": 2e-3,  # mean, after one Adam step of lr 1e-2
}
# A rounded state sends a token near a tie to other experts than the exact one does, and groups make more ties.
BF16_OF = {"deepseek_v3": BF16 | {"loss": 0.03}}


AXES = {"tp": TP, "sp": SP, "pp": PP, "vpp": VPP, "cp": CP, "dp": {}, "ep": EP, "etp": ETP}
WIDE = {
    "pp": {"pp": 4},
    "cp": {"cp": 4},
    "dp": {},
    "ep": {"ep": 4},
}  # one axis alone on four ranks; tp is bound by the 2 key/value heads
ONE_OF = ({"tp", "sp"}, {"pp", "vpp"})  # two forms of one axis
MOE = ("mixtral", "qwen2_moe", "qwen3_moe")
NORMS_MOVED: dict[int, list[dict]] = {  # whole-width norms under every axis; the cases above have the likeliest
    2: [
        {"name": "olmo2-tp2-packed", "layout": TP, "packed": True},
        {"name": "olmo2-tp2sp-padded", "layout": SP, "packed": False},
        {"name": "olmo2-tp2sp-bf16", "layout": SP, "packed": True, "dtype": "bfloat16"},
        {"name": "olmo2-tp2-recompute", "layout": TP, "packed": True, "model_settings": RECOMPUTE},
        {"name": "olmo2-tp2sp-decay-norms", "layout": SP, "packed": True, "optimizer": {"decay_norms": True}},
        {"name": "olmo2-pp2-packed", "layout": PP, "packed": True},
        {"name": "olmo2-pp2vpp2-padded", "layout": VPP, "packed": False},
        {"name": "olmo2-cp2-packed", "layout": CP, "packed": True},
        {"name": "olmo2-cp2-padded", "layout": CP, "packed": False},
        {"name": "olmo2-dp2-policy-loss", "layout": {}, "packed": True, "loss": "policy"},
    ],
    4: [
        {"name": "olmo2-tp2sp-cp2-packed", "layout": SP | CP, "packed": True},
        {"name": "olmo2-tp2-pp2-padded", "layout": TP | PP, "packed": False},
        {"name": "olmo2-tp2sp-dp2-packed", "layout": SP, "packed": True},
    ],
}


def matrix(world: int) -> list[dict]:
    """Every axis alone on two ranks, and on four every pair of axes and what an axis can do alone; packed and padded,
    dense and experts; and the axes of a family whose norms stand elsewhere and are wider.
    """
    if world == 2:
        pairs = [(name,) for name in AXES]
    else:
        pairs = [pair for pair in itertools.combinations(AXES, 2) if set(pair) not in ONE_OF] + [
            (name, name) for name in WIDE
        ]
    cases = []
    for pair in pairs:
        layout = WIDE[pair[0]] if len(set(pair)) < len(pair) else {k: v for name in pair for k, v in AXES[name].items()}
        dense, experts = (
            not {"ep", "etp"} & set(pair),
            "tp" not in pair,
        )  # core trains experts under tp with sequence parallelism alone
        if experts and "sp" in pair and "etp" not in pair:
            layout_of_experts = layout | {"etp": 1}
        else:
            layout_of_experts = layout
        for packed, (kind, allowed) in itertools.product((True, False), (("dense", dense), ("experts", experts))):
            if not allowed:
                continue
            cases.append({
                "name": f"{kind}-{'x'.join(pair)}-{'packed' if packed else 'padded'}",
                "model": "qwen2" if kind == "dense" else f"{MOE[len(cases) % 3]}_deep",
                "layout": layout if kind == "dense" else layout_of_experts,
                "packed": packed,
                "loss": "policy" if len(cases) % 2 else "weighted",
            })  # fmt: skip
    # a head under every axis and pair, in half of the cases, which are dense ones on two ranks and have experts on four
    heads = [
        {**case, "name": f"head-{case['name']}", "head": "value", "loss": "value"}
        for number, case in enumerate(cases)
        if number % 2 == (world == 4)
    ]
    return cases + heads + [{"model": "olmo2", **case} for case in NORMS_MOVED[world]]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    directory = tmp_path_factory.mktemp("parity")
    sizes = dict(vocab_size=97)  # odd: the vocabulary is padded under tp 2
    make_model(directory / "qwen2", "qwen2", **sizes)
    make_model(directory / "qwen2_tied", "qwen2", tie_word_embeddings=True, **sizes)
    make_model(directory / "qwen3", "qwen3", **sizes)
    for family in (
        *("llama", "mistral", "mixtral", "qwen3_moe", "qwen2_moe", "gemma3_text", "olmo2"),
        *("deepseek_v2", "deepseek_v3"),
    ):
        make_model(directory / family, family, **sizes)
    make_model(directory / "gemma3_untied", "gemma3_text", tie_word_embeddings=False, **sizes)
    for family in MOE:
        make_model(directory / f"{family}_deep", family, **sizes, num_hidden_layers=4)
    make_model(directory / "deepseek_v3_deep", "deepseek_v3", **sizes, num_hidden_layers=4)
    make_model(directory / "deepseek_v2_greedy", "deepseek_v2", **sizes, q_lora_rank=24, topk_method="greedy")
    make_model(directory / "qwen3_moe_renormalised", "qwen3_moe", norm_topk_prob=True, num_hidden_layers=4, **sizes)
    for name in ("qwen2", "qwen2_tied", *(f"{family}_deep" for family in MOE)):
        make_scored(directory / name)

    @cache
    def of(world: int, which: str = "cases") -> list[dict]:
        cases = {"cases": CASES, "further": FURTHER}[which][world] if which != "matrix" else matrix(world)
        answers: list[dict] = [{} for _ in range(world)]
        for part in range(0, len(cases), AT_ONCE):
            out, some = directory / f"{which}{world}.{part}", cases[part : part + AT_ONCE]
            for whole, found in zip(
                answers, run_ranks(WORKER, world, out, str(directory), json.dumps(some)), strict=True
            ):
                whole.update(found)
        return answers

    return of


@pytest.mark.multi
@pytest.mark.parametrize(("world", "name"), [(world, case["name"]) for world, cases in CASES.items() for case in cases])
def test_parity_with_transformers(results, world, name):
    check(results(world), name)


def test_every_family_has_a_case():
    """A family that nobody compared with transformers is a claim."""
    models = {case.get("model", "qwen2") for cases in CASES.values() for case in cases}
    assert not families().keys() - models, "give these families cases above"
    assert {name for name, family in families().items() if family.has_experts} <= {
        case.get("model") for cases in CASES.values() for case in cases if case["layout"].get("ep") == 2
    }


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("world", "name"), [(world, case["name"]) for world, cases in FURTHER.items() for case in cases]
)
def test_parity_with_transformers_in_further_layouts(results, world, name):
    check(results(world, "further"), name)


@pytest.mark.matrix
@pytest.mark.parametrize(("world", "name"), [(world, case["name"]) for world in (2, 4) for case in matrix(world)])
def test_every_axis_and_every_pair_of_axes(results, world, name):
    check(results(world, "matrix"), name)


def check(answers, name):
    for rank, answer in enumerate(answers):
        errors = answer[name]
        if "bf16" in name:
            for what, bound in BF16_OF.get(name.partition("-")[0], BF16).items():
                assert errors[what] <= bound, f"rank {rank}: {what}: {errors[what]:.2e}, bound {bound}"
            continue
        assert errors["moved"] > 5e-3, "the optimizer step changed nothing"
        assert errors["largest_gradient"] > 1e-2
        relative = errors["gradients"] / errors["largest_gradient"]
        assert relative <= GRADIENTS, f"rank {rank}: gradients are off by {relative:.1e} of the largest"
        for what, bound in (BOUNDS | {"weights": 1e-6 + STEP * errors["gradients"]}).items():
            assert errors[what] <= bound, f"rank {rank}: {what} is off by {errors[what]:.2e}, bound {bound:.0e}"
