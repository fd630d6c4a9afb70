"""SmolLM2-135M-Instruct, from 4-bit weights, on a real vLLM server on a CPU: its texts and log-probs are those of
transformers, before an update of the actor and after the refit that follows it.

`make test-more ONLY=real-model` fetches the model and runs this; vLLM comes from `make engines`.
"""

from __future__ import annotations

import json
import random

import conformance
import numpy as np
import pytest
import torch
from conftest import ROOT
from ranks import run_ranks
from test_engines_vllm import PYTHON, completions

from examples.studies.real_model import chains
from megatron_rl.texts.text import fill, load_tokenizer

MODEL = ROOT / "runs/real_model/model"
pytestmark = [
    pytest.mark.matrix, pytest.mark.servers, pytest.mark.multi,
    pytest.mark.skipif(not (MODEL / "config.json").exists(), reason=f"no {MODEL}; `make real-model` makes it"),
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM: there is no {PYTHON}; `make engines` installs it"),
]  # fmt: skip
# Weights and arithmetic are float32 on both sides. Log-probs of transformers itself are off by 1e-4 from float64.
NEAR = 2e-4
QUESTIONS = ("What is the capital of France?", "Write one sentence about the sea.", "What is 2 + 2?")
CONFIG = """
roles:
  generator:
    {{model: {{path: {model}}}, layout: {{pp: 2}}, optimizer: {{lr: 1e-4}}, micro_batch_tokens: 256}}
recipe: {{target: megatron_rl.recipes.grpo:Grpo, args: {{updates: 1}}}}
data: {{path: nowhere.jsonl}}
engine: {{kind: vllm, python: {python}, kv_cache_gib: 0.5, max_batch: 16, max_model_len: 512}}
run: {{dir: {base}, name: run}}
refit: {{timeout_s: 300, message_timeout_s: 60, verify: full}}
"""


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(MODEL)


@pytest.fixture(scope="module")
def asked(tokenizer):
    """Three prompts that the update does not see, one that it trains on, and the pairs of the update."""
    question = "7 + 5 - 3 ="
    template = (ROOT / "examples/studies/real_model/prompts/generator.txt").read_text()[:-1]
    chain = fill(template, question=question)
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], tokenize=False, add_generation_prompt=True)
        for q in QUESTIONS
    ]
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in [*texts, chain]]
    response = chains.solution(random.Random(0), question, wrong=0.0)
    return {"prompts": prompts, "pairs": [[chain, response]] * 4}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("real_model")


@pytest.fixture(scope="module")
def found(base, asked):
    (base / "run").mkdir()
    (base / "run/config.yaml").write_text(CONFIG.format(base=base, model=MODEL, python=PYTHON))
    (base / "asked.json").write_text(json.dumps(asked))
    worker = ROOT / "tests/helpers/real_model_worker.py"
    return run_ranks(worker, 2, base / "ranks", str(base / "run/config.yaml"), str(base / "asked.json"))[0]


@pytest.mark.parametrize("version", [0, 1])
def test_a_vllm_server_answers_as_transformers_does(base, asked, found, tokenizer, version):
    weights = base / f"ranks/v{version}"
    (weights / "config.json").write_text((MODEL / "config.json").read_text())
    judge, worst = conformance.Judge(weights, tokenizer), 0.0
    for prompt, (completion,) in zip(asked["prompts"], completions(found[f"greedy_v{version}"]), strict=True):
        wanted = judge.model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt) :]
        assert completion.tokens.tolist() == wanted.tolist(), tokenizer.decode(completion.tokens)
        assert completion.versions == [(0, version)]
        assert completion.model_logprobs == pytest.approx(judge.logprobs(prompt, completion), abs=NEAR)
    for prompt, group in zip(asked["prompts"], completions(found[f"drawn_v{version}"]), strict=True):
        assert len(group) == 3
        for completion in group:
            worst = max(worst, float(np.abs(completion.logprobs - judge.logprobs(prompt, completion)).max()))
    print(f"v{version}: log-probs of drawn tokens are off by {worst:.1e} at most")
    assert worst <= NEAR


def test_it_knows_english_and_an_update_changed_it(found, tokenizer):
    [first] = completions(found["greedy_v0"])[0]
    assert "Paris" in tokenizer.decode(first.tokens)
    assert found["greedy_v0"][-1] != found["greedy_v1"][-1], "the update changed nothing"
