"""Adapters (LoRA) on ranks: parity with peft in every layout, checkpoints, refits of merged weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import run_ranks
from tiny_models import make_model

pytest.importorskip("peft", reason="parity is measured against peft: pip install -e '.[dev]'")
HELPERS = Path(__file__).parents[1] / "helpers"
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Two matrices of those that Megatron joins, and one of the others: their rows stand between rows without an adapter.
SOME = ["v_proj", "up_proj", "o_proj"]
ATTENTION = ALL[:4]  # of models with experts
TARGETS = {"all": ALL, "some": SOME, "attention": ATTENTION}
TOLD = {
    "qwen2": ("all", "some"), "qwen3": ("all",), "llama": ("all",), "tied": ("all",), "gemma3_text": ("all",),
    "qwen3_moe": ("attention",), "qwen2_moe": ("attention",), "gpt_oss": ("attention",),
}  # fmt: skip
TP, SP = {"tp": 2}, {"tp": 2, "sequence_parallel": True}
CASES: dict[int, list[dict]] = {
    1: [
        {"name": "qwen2", "model": "qwen2"},
        {"name": "qwen2 some", "model": "qwen2", "told": "some"},
        {"name": "qwen3", "model": "qwen3"},
        {"name": "llama", "model": "llama"},
        {"name": "recompute full", "model": "qwen2", "recompute": "full"},
        {"name": "experts", "model": "qwen3_moe", "told": "attention"},
    ],
    2: [
        {"name": "tp", "model": "qwen2", "layout": TP},
        {"name": "tp sp", "model": "qwen3", "layout": SP},
        {"name": "tp sp some, recompute", "model": "qwen2", "layout": SP, "told": "some", "recompute": "full"},
        {"name": "pp", "model": "llama", "layout": {"pp": 2}},
        {"name": "pp tied", "model": "tied", "layout": {"pp": 2}},
        {"name": "dp", "model": "qwen2", "overlap": True},
        {"name": "experts ep", "model": "qwen3_moe", "told": "attention", "layout": {"ep": 2}},
        {"name": "experts tp sp, shared", "model": "qwen2_moe", "told": "attention", "layout": SP},
    ],
    4: [{"name": "tp dp", "model": "qwen2", "layout": TP}],
}
MORE: dict[int, list[dict]] = {  # make test-more ONLY=layouts
    1: [
        {"name": "gemma3", "model": "gemma3_text"},
        {"name": "recompute some", "model": "qwen2", "recompute": "selective", "told": "some"},
    ],
    2: [
        {"name": "tp some", "model": "qwen2", "layout": TP, "told": "some"},
        {"name": "pp vpp", "model": "qwen2", "layout": {"pp": 2, "vpp": 2, "overlap_p2p": True}},
        {"name": "cp", "model": "qwen2", "layout": {"cp": 2}},
        {"name": "experts pp", "model": "qwen2_moe", "told": "attention", "layout": {"pp": 2}},
        {"name": "sinks ep", "model": "gpt_oss", "told": "attention", "layout": {"ep": 2}},
        {"name": "sinks tp sp", "model": "gpt_oss", "told": "attention", "layout": SP | {"etp": 1}},
    ],
    4: [
        {"name": "tp sp pp", "model": "qwen2", "layout": SP | {"pp": 2}},
        {"name": "experts tp ep", "model": "qwen3_moe", "told": "attention", "layout": SP | {"ep": 2}},
    ],
}
RUNS = [
    {"name": "roles tp", "run": "roles", "model": "qwen2", "layout": SP},
    {"name": "roles pp", "run": "roles", "model": "tied", "layout": {"pp": 2}, "dtype": "bfloat16"},
    {"name": "roles dp", "run": "roles", "model": "qwen2", "overlap": True},
    {"name": "dp to tp", "run": "checkpoints", "model": "qwen2", "other": TP},
    {"name": "tp to pp", "run": "checkpoints", "model": "qwen2", "layout": SP, "other": {"pp": 2}},
    {"name": "same", "run": "checkpoints", "model": "qwen2", "other": {}},
    {
        "name": "experts",
        "run": "checkpoints",
        "model": "qwen3_moe",
        "told": "attention",
        "layout": {"ep": 2},
        "other": SP,
    },
    {"name": "refit tp", "run": "refits", "model": "qwen2", "layout": TP, "settings": {"verify": "full"}},
    {"name": "refit pp", "run": "refits", "model": "tied", "layout": {"pp": 2}, "settings": {"delta": True}},
    {
        "name": "refit experts",
        "run": "refits",
        "model": "qwen3_moe",
        "told": "attention",
        "layout": {"ep": 2},
        "settings": {"verify": "full"},
    },
    {"name": "refit half", "run": "refits", "model": "qwen2", "layout": TP, "dtype": "bfloat16", "settings": {}},
    {"name": "digests", "run": "digests", "model": "qwen2", "layout": TP},
    {"name": "fresh dp", "run": "fresh", "model": "qwen2", "init": "kaiming"},
    {"name": "fresh tp", "run": "fresh", "model": "qwen2", "init": "kaiming", "layout": TP},
    {"name": "fresh gaussian", "run": "fresh", "model": "qwen2", "init": "gaussian", "layout": {"pp": 2}},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, and what peft computes of each."""
    place = tmp_path_factory.mktemp("lora")
    for name in ("qwen2", "qwen3", "llama", "gemma3_text", "qwen3_moe", "qwen2_moe", "gpt_oss"):
        make_model(place / name, name, vocab_size=97)
    make_model(place / "tied", "qwen2", vocab_size=97, tie_word_embeddings=True)
    make_model(place / "qwen2 trained", "qwen2", vocab_size=97, seed=1)
    told = [(model, which, TARGETS[which]) for model, each in TOLD.items() for which in each]
    run_ranks(HELPERS / "lora_reference.py", 1, place / "reference", str(place), json.dumps(told))
    return place


def run(folder, world, cases, out):
    """Returns {name of a case: [answer of each rank]}."""
    told = run_ranks(HELPERS / "lora_worker.py", world, out, str(folder), json.dumps(cases))
    return {case["name"]: [answer[case["name"]] for answer in told] for case in cases}


EVERY = [pytest.param((world, cases), id=str(world)) for world, cases in CASES.items()]
EVERY += [pytest.param((world, more), id=f"{world} more", marks=pytest.mark.matrix) for world, more in MORE.items()]


@pytest.fixture(scope="module", params=EVERY)
def parity(request, folder, tmp_path_factory):
    """The answers of the cases on so many ranks."""
    return run(folder, *request.param, tmp_path_factory.mktemp("parity"))


@pytest.fixture(scope="module")
def answers(folder, tmp_path_factory):
    """The answers of RUNS, on two ranks."""
    cases = [{"others": "qwen2 trained", "directory": str(folder / "checkpoints"), **each} for each in RUNS]
    return run(folder, 2, cases, tmp_path_factory.mktemp("answers"))


@pytest.mark.multi
def test_lora_is_pefts(parity):
    """Bounds are those of whole models (docs/reference/layouts.md), of which adapters are a part of the arithmetic."""
    for found in (found | {"name": name} for name, each in parity.items() for found in each):
        assert found["logits"] < 4e-6 and found["logprobs"] < 4e-6 and found["reference"] < 4e-6
        assert found["loss_forward"] < 2e-6 and found["loss"] < 2e-6 and found["grad_norm"] < 4e-6
        assert found["gradients"] < 4e-6 * max(1.0, found["largest_gradient"])
        assert found["weights"] < 4e-6 and found["moved"] > 5e-3 and found["names"] == 0.0
        assert found["merged"] < 1e-6 and found["base"] == 0.0
        assert 0 <= found["gradient_numbers"] < 1024 and found["optimizer_numbers"] <= 0


@pytest.mark.multi
@pytest.mark.parametrize("name", [case["name"] for case in RUNS if case["run"] == "checkpoints"])
def test_lora_checkpoints_hold_adapters_alone_and_resume_exactly_under_any_layout(answers, name):
    for found in answers[name]:
        assert found["stored"] and all(".lora." in key for key in found["stored"])
        assert found["written"] == 0.0 and found["loaded"] == 0.0 and found["moved"] > 0.0
        assert found["after"] == 0.0 if name == "same" else found["after"] < 1e-5


@pytest.mark.multi
def test_lora_checkpoints_of_other_settings_or_another_base_are_refused(answers):
    for found in answers["dp to tp"]:
        says = found["refused"]
        assert "lora.rank = 4, and " in says[0] and " has 3: set it to that" in says[0]
        assert "lora.alpha = 1.0, and " in says[1]
        assert "lora.targets = ['q_proj'], and " in says[2]
        assert "an adapter means nothing without its base; set model.path to that model" in says[3]
        assert "holds adapters alone, and the role trains a whole model" in says[4]


@pytest.mark.multi
@pytest.mark.parametrize("name", [case["name"] for case in RUNS if case["run"] == "refits"])
def test_lora_refits_bring_merged_weights_to_engines(answers, name):
    for found in answers[name]:
        assert found["equal"] == [True] * 4


@pytest.mark.multi
def test_lora_adapters_of_a_run_name_the_base_as_it_was_read(answers):
    """The base was digested anew for every refit of served adapters, and for every checkpoint."""
    for first, second in answers["digests"]:
        assert first == second and len(first) == 64


@pytest.mark.multi
def test_lora_begins_as_the_model_itself_with_the_same_numbers_in_every_layout(answers):
    for name, deviation in (
        ("fresh dp", 3**-0.5 * 64**-0.5),
        ("fresh tp", 3**-0.5 * 64**-0.5),
        ("fresh gaussian", 1 / 3),
    ):
        for found in answers[name]:
            assert found["zero"] == 0.0 and found["gap"] < 2e-6 and found["reference"] < 2e-6
            assert found["deviation"] == pytest.approx(deviation, rel=0.05) and found["moved"] > 0.0
    first, second = answers["fresh dp"][0], answers["fresh tp"][0]
    assert first["sums"] == second["sums"] and len(first["sums"]) == 4 * 7


@pytest.mark.multi
@pytest.mark.parametrize("name", [case["name"] for case in RUNS if case["run"] == "roles"])
def test_lora_roles_on_one_base_do_not_disturb_each_other(answers, name):
    for found in answers[name]:
        assert found["shared"] and found["apart"] > 1e-3
        assert found["adapters"] == found["merged"] == found["loaded"] == found["again"] == [0.0, 0.0]
        assert found["metrics"] == [True, True]
