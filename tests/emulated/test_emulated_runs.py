"""What this project does on a GPU, done on the pretended one: the numbers are those of transformers, no tensor is on a
wrong device, and the host waits for the device only where tests/emulated/allowed_waits.yaml says so.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import tango_settings
from emulated_ledger import allowed, grown, unlisted
from emulated_server import Outcome, Server

HALF = {"dtype": "bfloat16"}
TWO = {"num_hidden_layers": 2}
WINDOWS = TWO | {"layer_types": ["sliding_attention", "full_attention"]}


def actor(family: str, *, ranks: int = 1, recompute: str = "none", layout=None, **case) -> dict:
    """Returns the arguments of an actor's case. `recompute`: none, full, or the part of a layer."""
    whole = recompute in ("none", "full")
    settings = {"recompute": recompute} if whole else {"recompute": "selective", "recompute_modules": [recompute]}
    own = {"layout": layout or {}, "model_settings": settings, **case}
    return {"ranks": ranks, "family": family, "case": own, "sizes": WINDOWS if family == "gemma3_text" else TWO}


ACTORS = {
    "sinks-full": actor("gpt_oss", recompute="full"),
    "dense": actor("qwen2"),
    "dense-bf16": actor("qwen2", **HALF),
    "dense-full": actor("qwen3", recompute="full"),
    "dense-attention-again-bf16": actor("qwen3", recompute="core_attn", **HALF),
    "dense-mlp-again": actor("qwen2", recompute="mlp"),
    "windows-bf16": actor("gemma3_text", **HALF),
    "windows": actor("gemma3_text"),
    "joint-norms": actor("olmo2"),
    "experts": actor("qwen3_moe"),
    "experts-shared": actor("qwen2_moe"),
    "experts-again": actor("qwen3_moe", recompute="moe"),
    "experts-shared-again": actor("qwen2_moe", recompute="shared_experts"),
    "experts-full-bf16": actor("mixtral", recompute="full", **HALF),
    "latents": actor("deepseek_v3"),
    "latents-bf16": actor("deepseek_v3", **HALF)
    | {"sizes": TWO | {"qk_nope_head_dim": 16, "first_k_dense_replace": 2}},
    "latents-full": actor("deepseek_v2", recompute="full"),
    "tp": actor("qwen2", ranks=2, layout={"tp": 2, "sequence_parallel": True}),
    "pp": actor("qwen2", ranks=2, layout={"pp": 2}),
    "cp": actor("qwen2", ranks=2, layout={"cp": 2}),
    "cp-bf16": actor("qwen2", ranks=2, layout={"cp": 2}, **HALF),
    "dp": actor("qwen2", ranks=2, **HALF),
    "dp-overlap": actor("qwen2", ranks=2, optimizer={"overlap": True}, **HALF),
    "ep": actor("qwen3_moe", ranks=2, layout={"ep": 2}),
    "head-bf16": actor("qwen2", head="value", **HALF),
}
RECOMPUTED = [
    ("dense-mlp-again", "dense"), ("experts-again", "experts"), ("experts-shared-again", "experts-shared")
]  # fmt: skip
# Of a layer, in statistics and in updates. Packed float32 has no flash attention: each group of sequences of similar
# length has a call, and kernels that gather and scatter its rows. A call has a copy of the repeated keys, one of the
# values, and two sums of their gradients: without them a GPU has no fused kernel for grouped heads in float32. Experts
# (in float32, too) have a router and products of their own; latents have more products and norms in attention.
KERNELS_OF_A_LAYER = {
    "dense-bf16": (46, 417),
    "dense": (143, 1014),
    "experts": (221, 1668),
    "latents-bf16": (66, 633),
}
DENSE_ALONE = {"latents-bf16": {"first_k_dense_replace": 4}}
ENGINES = {"dense": ("qwen2", "float32"), "dense-bf16": ("qwen3", "bfloat16"), "experts": ("qwen3_moe", "float32")}
ENGINES |= {"windows-bf16": ("gemma3_text", "bfloat16")}
# In bfloat16 an engine may choose other experts than the trainer, where two are nearly as good: experts are compared in
# float32.
REFITS = {"experts": ("qwen3_moe", "float32", 1, {}), "bfloat16": ("qwen3", "bfloat16", 1, {})}
REFITS |= {"tp": ("qwen2", "bfloat16", 2, {"tp": 2, "sequence_parallel": True})}


def run_actor(emulated: Server, name: str) -> Outcome:
    return emulated.run("actor", **ACTORS[name])


def run_deeper(emulated: Server, name: str) -> Outcome:
    """Runs an actor's case with four layers of the same kinds instead of two."""
    sizes = ACTORS[name]["sizes"] | {"num_hidden_layers": 4}
    return emulated.run("actor", **(ACTORS[name] | {"sizes": sizes | DENSE_ALONE.get(name, {})}))


def check_actor(errors: dict[str, float], *, half: bool) -> None:
    """Checks one rank's answer of an actor's case."""
    assert errors["logprobs"] < (0.15 if half else 1e-5) and errors["reference"] < (0.15 if half else 1e-5)
    assert errors["gradients"] < (0.1 if half else 1e-5) and errors["loss"] < (0.05 if half else 1e-5)
    assert errors["weights"] < (0.03 if half else 2e-5)
    assert errors["swapped"] == 0.0, "the live weights are on the device twice"
    assert errors["loaded"] == errors["resumed"] == errors["resumed_loss"] == 0.0
    assert errors["asleep"] < 0.6 * errors["held"] and abs(errors["awake"] - errors["held"]) < 0.02 * errors["held"]
    assert errors["away"] < 0.1 * errors["held"], "weights too have left"  # tables of angles stay
    assert abs(errors["present"] - errors["asleep"]) < 0.02 * errors["held"], "weights alone are there"
    assert errors["saving"] < 1.02 * errors["held"], "a checkpoint takes memory on the device"


@pytest.mark.parametrize(("family", "dtype"), [("qwen3", "float32"), ("gemma3_text", "bfloat16")])
def test_shared_prompts_on_the_device(emulated, family, dtype):
    """In bfloat16 one call of flash attention has all samples of all prompts, here with windows shorter than these."""
    sizes, half = (WINDOWS if family == "gemma3_text" else TWO), dtype == "bfloat16"
    found = emulated.run("prefixes", family=family, dtype=dtype, sizes=sizes)
    (errors,) = found.answers
    bound = 0.1 if half else 1e-5
    assert errors["logprobs"] < bound and errors["grad_norm"] < bound and errors["shared_tokens"] > 0
    assert bool(errors["flash"]) == half
    check_waits(found)


def run_engine(emulated: Server, name: str) -> Outcome:
    family, dtype = ENGINES[name]
    return emulated.run("engine", family=family, dtype=dtype)


def run_refit(emulated: Server, name: str) -> Outcome:
    family, dtype, ranks, layout = REFITS[name]
    return emulated.run("refit", ranks=ranks, family=family, dtype=dtype, layout=layout)


def run_programs(emulated: Server, base: Any) -> Outcome:
    """SFT, an evaluation, and two iterations of Tango with an evaluation between them, on the last-letter task."""
    one = "launch.nproc=1"
    sft = [
        "sft", "examples/miniatures/last_letter/sft.yaml", f"model.path={base}/task/model", "steps=2",
        "samples_per_step=8",
        f"data.train={base}/task/generator_sft.jsonl", "run.dir=OWN", "run.name=sft", one, "model.dtype=bfloat16",
        "run.peak_tflops=100",
    ]  # fmt: skip
    evaluation = [
        "eval", f"model.path={base}/generator/model", 
        f"sets=[{{path: {base}/task/test.jsonl, settings: last_letter}}]",
        "template=examples/miniatures/last_letter/prompts/generator.txt", "sampling.max_tokens=40", one,
        "reward.target=megatron_rl.contrib.last_letter:grade", "output=OWN/eval.json",
    ]  # fmt: skip
    tango = [
        "train", *tango_settings(base, "OWN", "tango"), one, "recipe.args.generator_updates=1",
        "recipe.args.warmup_updates=0", "run.prompts_per_iteration=4", "evaluation.limit=4",
        "roles.verifier.sleep=true", "roles.generator.model.dtype=bfloat16",
    ]  # fmt: skip
    return emulated.run("programs", sft=sft, evaluation=evaluation, tango=tango)


def check_waits(found: Outcome) -> None:
    assert not unlisted(found.waits, allowed())


@pytest.mark.parametrize("name", ACTORS)
def test_an_actor_on_the_device(emulated, name):
    """It gives transformers' numbers, sleeps, wakes, is saved and loaded, and goes on as if it had not been."""
    found = run_actor(emulated, name)
    for errors in found.answers:
        check_actor(errors, half="dtype" in ACTORS[name]["case"])
        assert not errors["fused"] and errors["fused_sums"] == 1.0 and errors["unfused_attention"] == 0.0
        assert errors["flash"] == calls_of_flash(ACTORS[name]["case"]) * errors["micro_batches"]
    check_waits(found)


def test_torch_2_11_has_flash_attention_with_grouped_heads(emulated):
    """Its function does not know `enable_gqa`. Packed rows silently went without flash attention."""
    arguments = ACTORS["dense-bf16"]
    (errors,) = emulated.run("actor_of_torch_2_11", **arguments).answers
    check_actor(errors, half=True)
    assert errors["flash"] == calls_of_flash(arguments["case"]) * errors["micro_batches"]


def calls_of_flash(case: dict[str, Any]) -> int:
    """Returns how often a micro-batch of two layers calls flash attention: once a layer, and again to recompute."""
    if case.get("dtype") != "bfloat16":
        return 0
    settings = case["model_settings"]
    again = settings["recompute"] == "full" or "core_attn" in settings.get("recompute_modules", ())
    return 4 if again else 2


@pytest.mark.parametrize("part, whole", RECOMPUTED)
def test_recomputation_computes_its_part_again(emulated, part, whole):
    again, once = (run_actor(emulated, name).kernels for name in (part, whole))
    assert again["update"] > once["update"] and again["statistics"] == once["statistics"]


@pytest.mark.parametrize("name", KERNELS_OF_A_LAYER)
def test_no_kernel_is_added_to_a_layer(emulated, name):
    """The numbers are those of a layer, over all micro-batches: two passes over the rollouts, and three updates."""
    two, four = run_actor(emulated, name), run_deeper(emulated, name)
    of_a_layer = {part: (four.kernels[part] - two.kernels[part]) / 2 for part in ("statistics", "update")}
    statistics, update = KERNELS_OF_A_LAYER[name]
    assert of_a_layer["statistics"] <= statistics and of_a_layer["update"] <= update, of_a_layer


@pytest.mark.parametrize("name", [*KERNELS_OF_A_LAYER, "pp"])
def test_no_wait_is_added_to_a_layer(emulated, name):
    assert not grown(run_actor(emulated, name).waits, run_deeper(emulated, name).waits, allowed(), by="layers")


def test_no_wait_is_added_to_a_micro_batch(emulated):
    case = actor("qwen2", **HALF)
    one, more = (emulated.run("actor", **(case | {"case": case["case"] | {"budget": tokens}})) for tokens in (200, 40))
    assert [found.answers[0]["micro_batches"] for found in (one, more)] == [1, 3]
    assert not grown(one.waits, more.waits, allowed(), by="micro-batches")


def test_an_engine_has_no_wait_for_a_layer_and_no_more_kernels_in_it(emulated):
    """A step that is replayed is one launch on a GPU, and there, too, each kernel reads and writes all of its rows."""
    family, dtype = ENGINES["dense-bf16"]
    four = run_engine(emulated, "dense-bf16")
    two = emulated.run("engine", family=family, dtype=dtype, sizes=TWO)
    assert not grown(two.waits, four.waits, allowed(), by="layers")
    steps = {found.answers[0]["replays"] for found in (two, four)}
    assert len(steps) == 1 and (four.kernels["replayed"] - two.kernels["replayed"]) / 2 / steps.pop() <= 16


@pytest.mark.parametrize("name", ENGINES)
def test_the_embedded_engine_on_the_device(emulated, name):
    """It writes what it writes on a CPU, and waits once for every token."""
    found = run_engine(emulated, name)
    (answer,) = found.answers
    half = ENGINES[name][1] == "bfloat16"
    assert answer["scores"] < (0.1 if half else 1e-4)
    if not half:
        assert answer["greedy"] == answer["short"] == answer["long"] == 1.0
    assert answer["waits"]["long"] - answer["waits"]["short"] == 24
    # Steps of a dense model are replayed as graphs. No wait is allowed in that part, so that a GPU can capture them.
    assert (answer["replayed"] > 0) == (name != "experts")
    assert answer["unfused_attention"] == 0
    assert answer["growth"] < 1.3  # it was 1.5: the old cache and the new one, whole
    check_waits(found)


@pytest.mark.parametrize("name", REFITS)
def test_a_refit_of_an_engine_in_the_same_process(emulated, name):
    found, bound = run_refit(emulated, name), 1e-5 if REFITS[name][1] == "float32" else 0.1
    for answer in found.answers:
        assert max(answer["gaps"]) < bound and answer["version"] == 1
    check_waits(found)


@pytest.mark.parametrize("name", ["bfloat16", "tp"])
def test_no_wait_of_a_refit_is_added_to_a_layer(emulated, name):
    """The host waited for the checksum of each slice. Now the GPU computes them, and the host waits for a message's."""
    family, dtype, ranks, layout = REFITS[name]
    two, four = (
        emulated.run(
            "refit", ranks=ranks, family=family, dtype=dtype, layout=layout, sizes={"num_hidden_layers": layers}
        )
        for layers in (2, 4)
    )
    assert not grown(two.waits, four.waits, allowed(), by="layers")


def test_checksums_of_values_on_the_gpu_and_in_the_hosts_memory(emulated):
    """Experts of a vLLM server land in pinned memory, beside weights on the GPU, in one message. Nothing waits."""
    assert emulated.run("sums").answers == [{"device": "cuda", "same": True, "waits": 0}]


def test_a_refit_of_an_engine_in_another_process_on_the_same_gpu(emulated):
    """Messages lie in the GPU's memory, which the engine opens by a handle."""
    found = emulated.run("cuda_ipc", ranks=2)
    trainer, engine = found.answers
    assert trainer["kinds"] == ["cuda_ipc"] and trainer["version"] == engine["version"] == 2
    check_waits(found)


def test_training_from_supervised_data_to_tango_on_the_device(emulated, last_letter):
    found = run_programs(emulated, last_letter)
    [answer] = found.answers
    speed = answer.pop("speed")
    assert answer == {"sft": 0, "evaluation": 0, "tango": 0, "connections": 1, "cudnn_attention": 0}
    parts = {name.partition("/")[2]: seconds for name, seconds in speed.items() if name.startswith("seconds/")}
    # Reading events is no wait: there is no entry for it.
    assert parts.keys() == {"waiting", "scatter", "forward_backward", "gradient_reduction", "optimizer"}
    assert min(parts.values()) > 0
    assert speed["mfu"] == pytest.approx(speed["model_tflops"] / 100) and speed["tokens_per_second"] > 0
    check_waits(found)


def test_every_wait_that_is_allowed_happens(emulated, last_letter):
    """An entry whose code is gone would allow the next wait of that name."""
    runs = [run_actor(emulated, name) for name in ACTORS] + [run_engine(emulated, name) for name in ENGINES]
    runs += [run_refit(emulated, name) for name in REFITS]
    runs += [emulated.run("cuda_ipc", ranks=2), run_programs(emulated, last_letter)]
    happened = {(part, what, where) for found in runs for part, what, where, _ in found.waits}
    entries = {(part, entry["what"], entry["where"]) for entry in allowed() for part in entry["parts"]}
    assert not entries - happened, json.dumps(sorted(entries - happened), indent=1)
