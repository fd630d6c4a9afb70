"""A written reward model in a real vLLM pooling server: the reward function gets the scores that the trainer computes.

Needs vLLM in an environment of its own: `make engines`, or another interpreter in MEGATRON_RL_VLLM_PYTHON.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from chats import chat_tokenizer
from ranks import ROOT, run_ranks
from tiny_models import make_model, make_scored

from megatron_rl.cluster.host_address import free_port
from megatron_rl.config.schema import Reward
from megatron_rl.conversion import convert
from megatron_rl.conversion.weight_source import find
from megatron_rl.engines.http import Http
from megatron_rl.engines.kind import Command, ServerStart
from megatron_rl.engines.server_process import ServerProcess
from megatron_rl.engines.vllm.kind import command
from megatron_rl.engines.vllm.settings import Vllm
from megatron_rl.rewards.grading_pool import GradePool
from megatron_rl.texts.chat_template import ChatTokenizer, answered_ids

PYTHON = Path(os.environ.get("MEGATRON_RL_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
WORKER = ROOT / "tests/helpers/scores_worker.py"
pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM: there is no {PYTHON}; `make engines` installs it"),
]
END = "<|im_end|>"
# No text has a space: vLLM's tokenizer of the family qwen2 drops the spaces of this vocabulary of characters.
TOKENIZER = chat_tokenizer("{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}")
ASKED = ["2+2?", "why", "abc"]
ANSWERED = ["4.", "hm</think>because", "no"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("scored")
    # heads of 32: the smallest on a CPU
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    make_model(directory / "model", "qwen2", vocab_size=len(TOKENIZER), **sizes)
    scored = make_scored(directory / "model")
    TOKENIZER.save_pretrained(scored)
    convert.to_hf(find(scored), directory / "written")
    return directory / "written"


@pytest.fixture(scope="module")
def url(model, tmp_path_factory):
    base, port = tmp_path_factory.mktemp("server"), free_port("127.0.0.1")
    ours = command(
        Vllm(max_batch=8),
        ServerStart(python=str(PYTHON), model=model, dtype="float32", port=port, token_file=base / "key", on_gpu=False),
    )
    words = [
        str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "float32", "--runner", "pooling", "--convert", "classify", "--max-num-seqs",
        "8", "--enforce-eager",
    ]  # fmt: skip
    process = ServerProcess(Command(words, ours.environment), base / "server.log", os.environ, imports=base / "imports")
    address = f"http://127.0.0.1:{port}"
    try:
        process.wait_until(lambda: Http(address, {}).answers("/health"), 600)
        yield address
    finally:
        process.stop()


def graded(url, payloads, **args):
    reward = Reward(
        target="megatron_rl.rewards.reward_server:ServedRewardModel", workers=1, timeout_s=60.0, range=(-100.0, 100.0),
        args={"url": url, **args},
    )  # fmt: skip
    with GradePool(reward) as pool:
        found = pool.grade(ANSWERED, payloads)
    assert all(not one.detail for one in found), found
    return np.array([one.score for one in found])


def test_a_served_reward_model_gives_the_scores_of_the_trainer(model, url, tmp_path):
    texts = [{"question": text} for text in ASKED]
    talks = [{"question": text, "messages": [{"role": "user", "content": text}]} for text in ASKED]
    chat, answers = ChatTokenizer(TOKENIZER), [text.rpartition("</think>")[2].lstrip() for text in ANSWERED]
    read = [
        *(answered_ids(chat, *pair) for pair in zip(ASKED, ANSWERED, strict=True)),
        *(answered_ids(chat, *pair) for pair in zip(ASKED, answers, strict=True)),
        *(TOKENIZER(f"{asked}{answer}{END}")["input_ids"] for asked, answer in zip(ASKED, ANSWERED, strict=True)),
    ]
    [wanted] = run_ranks(WORKER, 1, tmp_path / "ranks", str(model), json.dumps(read))
    whole, parts, plain = np.split(np.array(wanted), 3)
    assert np.ptp(wanted) > 0.1, "the scores tell the texts apart"
    np.testing.assert_allclose(graded(url, talks, scale="none"), whole, atol=2e-5)
    np.testing.assert_allclose(graded(url, texts, scale="none", chat=True), whole, atol=2e-5)
    np.testing.assert_allclose(graded(url, talks, scale="none", reads="answer"), parts, atol=2e-5)
    np.testing.assert_allclose(graded(url, texts, end=END), 1 / (1 + np.exp(-plain)), atol=2e-5)
