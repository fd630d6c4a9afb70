"""A real vLLM server, as anybody starts it, behind its OpenAI-compatible URL: the engine conforms, and scores.

Needs vLLM in an environment of its own: `make engines`, or another interpreter in MEGATRON_RL_VLLM_PYTHON.
"""

from __future__ import annotations

import os
from pathlib import Path

import conformance
import pytest
from ranks import ROOT
from tiny_models import make_model
from toys import characters

from megatron_rl.cluster.host_address import free_port
from megatron_rl.config.schema import ConfigError, EndpointConfig
from megatron_rl.engines.kind import Command, ServerStart
from megatron_rl.engines.openai import OpenAiServer, open_endpoint
from megatron_rl.engines.protocol import Sampling, complete
from megatron_rl.engines.server_process import ServerProcess
from megatron_rl.engines.vllm.kind import command
from megatron_rl.engines.vllm.settings import Vllm
from megatron_rl.types import Stop

PYTHON = Path(os.environ.get("MEGATRON_RL_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
VOCAB = 97
pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM: there is no {PYTHON}; `make engines` installs it"),
]
KEY, ENDS = "sk-of-this-test", (0, 7)
# The endpoint tells the model's log-probs at temperature 1, and scores no sequence that fills its context.
LEFT_OUT = (
    "logprobs_are_of_the_distribution_sampled_from",
    "a_full_context_can_be_scored",
    "the_likeliest_tokens_come_with_drawn_ones",
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("openai")
    sizes = {
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }  # heads of 32: the smallest on a CPU
    make_model(directory / "model", "qwen2", vocab_size=VOCAB, eos_token_id=7, **sizes)
    characters().save_pretrained(directory / "model")
    (directory / "key").write_text(KEY)
    return directory


@pytest.fixture(scope="module")
def endpoint(base):
    """vLLM's own server: without the routes, the guard and the log-probs' mode of a run's servers."""
    port = free_port("127.0.0.1")
    ours = command(
        Vllm(max_batch=16),
        ServerStart(
            python=str(PYTHON), model=base / "model", dtype="float32", port=port, token_file=base / "key", on_gpu=False
        ),
    )
    words = [
        str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(base / "model"),
        "--served-model-name", "judge", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
        "--generation-config", "vllm", "--max-logprobs", "-1",
        "--max-num-seqs", "16", "--enforce-eager", "--no-enable-chunked-prefill",
    ]  # fmt: skip
    start = Command(words, {**ours.environment, "VLLM_API_KEY": KEY})
    process = ServerProcess(start, base / "server.log", os.environ, imports=base / "imports")
    settings = EndpointConfig(url=f"http://127.0.0.1:{port}/v1", model="judge", key_file=str(base / "key"))
    try:
        probe = OpenAiServer(settings, characters(), ends=ENDS, key=KEY)
        process.wait_until(probe.ready, 600)
        probe.close()
        yield settings
    finally:
        process.stop()


@pytest.fixture(scope="module")
def engine(endpoint):
    made = open_endpoint("judge", endpoint, characters(), ends=ENDS, environment={})
    yield made
    made.close()


@pytest.fixture(scope="module")
def judge(base):
    return conformance.Judge(base / "model", characters())


@pytest.mark.parametrize("name", [name for name in conformance.CHECKS if name not in LEFT_OUT])
def test_an_endpoint_conforms(engine, judge, name):
    conformance.CHECKS[name](engine, judge)


def test_text_prompts_and_answers_are_those_of_the_token_ids(endpoint, engine, judge):
    """Only the tokenizer of the role is between them, and only of greedy answers something is known."""
    by_text = open_endpoint(
        "judge",
        EndpointConfig(
            url=endpoint.url, model="judge", key_variable="JUDGE_KEY", token_prompts=False, extensions=False, attempts=1
        ),
        characters(), ends=ENDS, environment={"JUDGE_KEY": KEY},
    )  # fmt: skip
    prompt = characters().encode("hello")
    sampling = Sampling(max_tokens=8, temperature=0.0)
    [[one]], [[other]] = complete(by_text, [prompt], sampling), complete(engine, [prompt], sampling)
    by_text.close()
    ended = other.stop is Stop.EOS  # by a token that is not in the text
    text = characters().decode(other.tokens[: len(other.tokens) - ended].tolist(), skip_special_tokens=True)
    assert characters().decode(one.tokens.tolist(), skip_special_tokens=True) == text and one.model_logprobs is None
    assert one.stop is other.stop


def test_a_wrong_key_is_a_matter_of_the_config(endpoint, base):
    (base / "wrong").write_text("sk-wrong")
    wrong = EndpointConfig(url=endpoint.url, model="judge", key_file=str(base / "wrong"))
    stranger = open_endpoint("judge", wrong, characters(), ends=ENDS, environment={})
    with pytest.raises(ConfigError, match="refuses the API key"):
        complete(stranger, [[5]], Sampling(max_tokens=2))
    stranger.close()
