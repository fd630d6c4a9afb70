"""Layers of Transformer Engine on a stand-in (tests/te_standin): under it are megatron-core's own wrappers and spec."""

from __future__ import annotations

import pytest
from emulated_ledger import allowed, grown
from emulated_server import Server
from test_emulated_runs import HALF, TWO, actor, check_actor, check_waits

SP, PP = {"tp": 2, "sequence_parallel": True}, {"pp": 2}
ACTORS = {
    "dense": actor("qwen2", **HALF),
    "head-norms-full": actor("qwen3", recompute="full", **HALF),
    "llama-selective": actor("llama", recompute="core_attn", **HALF),
    "experts": actor("qwen3_moe", **HALF),
    # With seed 0 the log-probs and gradients of these layers are off as where bfloat16 chooses another expert than
    # float32. With this seed they are as near as those of torch's layers.
    "mixtral": actor("mixtral", **HALF) | {"sizes": TWO | {"seed": 1}},
    "shared-expert": actor("qwen2_moe", **HALF),
    "tp": actor("qwen2", ranks=2, layout={"tp": 2}, **HALF),
    "sp": actor("qwen3", ranks=2, layout=SP, **HALF),
    "cp": actor("qwen2", ranks=2, layout={"cp": 2}, **HALF),
    "pp": actor("qwen2", ranks=2, layout={"pp": 2}, **HALF),
    "ep": actor("qwen3_moe", ranks=2, layout={"ep": 2}, **HALF),
    "head": actor("qwen3", ranks=2, layout=SP, head="score", **HALF),
}


@pytest.mark.parametrize("name", ACTORS)
def test_an_actor_on_fused_layers_gives_the_numbers_of_transformers(fused, name):
    found = fused.run("actor", **ACTORS[name])
    for errors in found.answers:
        check_actor(errors, half=True)
        assert errors["fused"] == 1.0 and errors["fused_sums"] == 1.0
    check_waits(found)


@pytest.mark.parametrize(
    ("family", "ranks", "layout"), [("qwen2", 1, {}), ("qwen3", 2, SP), ("qwen3_moe", 2, {"ep": 2}), ("llama", 2, PP)]
)
def test_fused_layers_compute_a_shared_prompt_once(fused, family, ranks, layout):
    """The project's own attention stands in them then, for Transformer Engine has none that could do it. The repeated
    form has Transformer Engine's."""
    found = fused.run("prefixes", ranks=ranks, family=family, dtype="bfloat16", layout=layout)
    for errors in found.answers:
        assert errors["fused"] and errors["shared_tokens"] > 0 and errors["flash"] > 0
        assert errors["logprobs"] < 0.1 and errors["grad_norm"] < 0.1
    check_waits(found)


def test_the_host_does_not_wait_for_fused_layers(fused):
    """Core's own rotary embedding read the lengths of packed sequences from the device in every layer."""
    case = ACTORS["dense"]
    two, four = fused.run("actor", **case), fused.run("actor", **(case | {"sizes": {"num_hidden_layers": 4}}))
    assert not grown(two.waits, four.waits, allowed(), by="layers")


def test_a_float32_model_keeps_the_torch_layers(fused):
    """Transformer Engine has no attention over packed sequences for it."""
    found = fused.run("actor", **actor("qwen2"))
    (errors,) = found.answers
    check_actor(errors, half=False)
    assert not errors["fused"]
    check_waits(found)


def test_routers_with_a_bias_are_right_beside_transformer_engine(fused):
    """gpt-oss has torch layers, and core's router takes Transformer Engine's product where the package is there. That
    read the bytes of the router's bfloat16 bias as float32."""
    found = fused.run("actor", **actor("gpt_oss", **HALF) | {"sizes": TWO | {"num_experts_per_tok": 4}})
    (errors,) = found.answers
    check_actor(errors, half=True)
    assert not errors["fused"]


def test_a_transformer_engine_that_cannot_be_imported_is_not_used(tmp_path_factory):
    """A model could not be built where the package was there, and its libraries were not."""
    packages = tmp_path_factory.mktemp("packages")
    (packages / "transformer_engine").mkdir()
    (packages / "transformer_engine/__init__.py").write_text("import transformer_engine_torch\n")
    server = Server(tmp_path_factory.mktemp("broken"), packages=packages)
    try:
        (answer,) = server.run("leave", family="qwen2", directory=str(packages / "checkpoint")).answers
    finally:
        server.close()
    assert answer["read"] == 1.0 and not answer["fused"]


@pytest.mark.parametrize(
    ("family", "ranks", "layout"), [("qwen3", 1, {}), ("qwen3_moe", 2, {"ep": 2}), ("qwen2", 2, SP)]
)
def test_a_checkpoint_of_fused_layers_is_that_of_torch_layers(fused, emulated, tmp_path, family, ranks, layout):
    """The converter reads it, and a rank without Transformer Engine goes on from it; and the other way round."""
    for number, (there, here) in enumerate([(fused, emulated), (emulated, fused)]):
        directory = str(tmp_path / f"checkpoint{number}")
        left = there.run("leave", ranks=ranks, family=family, directory=directory, layout=layout).answers[0]
        (come,) = here.run("come", family=family, directory=directory, weights=left["weights"]).answers
        assert left["read"] == 1.0 and come["same"] == 1.0
        assert left["fused"] == float(there is fused) and come["fused"] == float(here is fused)


@pytest.mark.parametrize(("family", "ranks", "layout"), [("qwen2", 1, {}), ("qwen3_moe", 1, {}), ("qwen3", 2, SP)])
def test_an_engine_takes_the_weights_of_fused_layers(fused, family, ranks, layout):
    found = fused.run("refit", ranks=ranks, family=family, dtype="bfloat16", layout=layout)
    for answer in found.answers:
        assert max(answer["gaps"]) < 0.1 and answer["version"] == 1
