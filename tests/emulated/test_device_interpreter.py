"""An actor whose Triton kernels run, as a GPU takes them: on the pretended device, by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from emulated_ledger import allowed, grown
from emulated_server import Server
from test_emulated_runs import HALF, KERNELS_OF_A_LAYER, TWO, actor, check_actor, check_waits

SP = {"tp": 2, "sequence_parallel": True}
ONE = {"num_hidden_layers": 1}  # layer: the interpreter is slow
ACTORS = {
    "dense": actor("qwen2", **HALF),
    "tp": actor("qwen3", ranks=2, layout=SP, **HALF) | {"sizes": ONE},
}


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("triton")
    server = Server(tmp_path_factory.mktemp("interpreted"), triton=True)
    yield server
    server.close()


@pytest.mark.parametrize("name", ACTORS)
def test_an_actor_with_triton_kernels_gives_the_numbers_of_transformers(interpreted, name):
    found = interpreted.run("actor", **ACTORS[name])
    for errors in found.answers:
        check_actor(errors, half=True)
        assert errors["triton"] > 0 and errors["fused_sums"] == 1.0
    check_waits(found)


def test_triton_kernels_take_the_place_of_several_and_no_layer_waits(interpreted):
    """Norms, rotary embeddings and gates are a kernel each, where torch has several."""
    one, two = (interpreted.run("actor", **(ACTORS["dense"] | {"sizes": sizes})) for sizes in (ONE, TWO))
    assert not grown(one.waits, two.waits, allowed(), by="layers")
    own = [two.kernels[part] - one.kernels[part] for part in ("statistics", "update")]
    assert all(kernels < 0.8 * plain for kernels, plain in zip(own, KERNELS_OF_A_LAYER["dense-bf16"], strict=True)), own
