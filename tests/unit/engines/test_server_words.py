"""The command lines of servers: what settings become in vLLM's, and words of the user's that no server gets."""

from __future__ import annotations

import pytest

from megatron_rl.config import files
from megatron_rl.config.schema import ConfigError, EvalConfig, TrainConfig
from megatron_rl.engines.kind import ServerStart, kind_of
from megatron_rl.engines.sglang.settings import Sglang
from megatron_rl.engines.vllm.settings import Vllm

EVAL = ["model.path=m", "sets=[{path: d}]"]
TRAIN = ["roles={a: {model: {path: m}}}", "recipe={target: 'a.b:C'}", "data.path=d"]


def words(settings, tmp_path, *, on_gpu=True, **own):
    start = ServerStart(
        python="python", model=tmp_path, dtype="bfloat16", port=9, token_file=tmp_path / "token", on_gpu=on_gpu, **own
    )
    return kind_of(settings).command(settings, start).words


def test_expert_parallelism_is_on_vllms_command_line(tmp_path):
    found = words(Vllm(host="10.1.2.3", tp=4, expert_parallel=True, max_model_len=100, args=("--seed", "1")), tmp_path)
    assert "--enable-expert-parallel" in found
    for name, value in (
        ("--host", "10.1.2.3"),
        ("--port", "9"),
        ("--tensor-parallel-size", "4"),
        ("--max-model-len", "100"),
    ):
        assert found[found.index(name) + 1] == value
    assert found[-2:] == ["--seed", "1"] and "--api-key" not in found
    assert "--enable-expert-parallel" not in words(Vllm(tp=4), tmp_path)


def test_expert_parallelism_of_vllm_without_a_gpu_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="engine.expert_parallel without a GPU"):
        words(Vllm(tp=2, expert_parallel=True), tmp_path, on_gpu=False)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("word", ["--data-parallel-size", "-dp", "--dp-size", "--dp", "--data_parallel_size=2"])
@pytest.mark.parametrize(("schema", "more"), [(EvalConfig, EVAL), (TrainConfig, TRAIN)])
def test_copies_of_a_model_inside_a_server_are_refused(kind, word, schema, more):
    """A refit reached one of them."""
    name = word.partition("=")[0].replace("_", "-")
    with pytest.raises(ConfigError, match=f"engine.args has {name}: .* set engine.replicas to the number of copies"):
        files.load(schema, [], [*more, f"engine.kind={kind}", f"engine.args=['{word}', '2']"])


@pytest.mark.parametrize("kind", [Vllm, Sglang])
def test_other_words_of_the_user_stay_in_their_place(kind, tmp_path):
    assert words(kind(args=("--dp-like", "--data-parallel-size-of-nothing")), tmp_path)[-2] == "--dp-like"
