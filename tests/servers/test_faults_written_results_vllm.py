"""A written model and a written adapter are loaded by vLLM with default settings, and give the log-probs that were
trained. For reward models see test_reward_model_vllm.py.

Needs vLLM in an environment of its own: `make engines`, or another interpreter in MEGATRON_RL_VLLM_PYTHON.
"""

from __future__ import annotations

import json
import os
import subprocess

import peft
import pytest
import torch
from limits import RUN_S
from ranks import ROOT
from safetensors.torch import load_file
from test_engines_vllm import PYTHON, VOCAB
from test_faults_adapters import saved
from tiny_models import make_model
from toys import characters
from transformers import AutoModelForCausalLM

from megatron_rl.conversion import convert
from megatron_rl.conversion.weight_source import find
from megatron_rl.weights import lora_adapters

pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM: there is no {PYTHON}; `make engines` installs it"),
]
SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

model, adapter, texts = sys.argv[1], sys.argv[2], sys.argv[3:]
llm = LLM(
    model=model, dtype="float32", max_model_len=64, max_num_seqs=4, enforce_eager=True, enable_chunked_prefill=False,
    enable_lora=True, max_loras=1, max_lora_rank=8,
)
sampling, found = SamplingParams(max_tokens=1, prompt_logprobs=0), []
for lora in (None, LoRARequest("trained", 1, adapter)):
    for output in llm.generate(texts, sampling, lora_request=lora, use_tqdm=False):
        own = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        found.append([output.prompt_token_ids, [logprobs[token].logprob for token, logprobs in own]])
print("\\n" + json.dumps(found))
"""
ENVIRONMENT = {
    "VLLM_HOST_IP": "127.0.0.1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "TORCH_COMPILE_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}  # fmt: skip
TEXTS = ["say:aaa", "3+4=7", "why?no"]  # no text has a space: vLLM's tokenizer of the family qwen2 drops spaces


def logprobs_of(model, tokens):
    """Returns the log-prob of every token behind the first one."""
    with torch.no_grad():
        logprobs = model.eval()(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return [logprobs[place, token].item() for place, token in enumerate(tokens[1:])]


def test_faults_a_written_model_and_a_written_adapter_are_loaded_by_vllm_with_the_same_logprobs(tmp_path):
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}  # of 32: vLLM's smallest on a CPU
    base = make_model(tmp_path / "base", "qwen2", vocab_size=VOCAB, eos_token_id=7, **heads)
    characters().save_pretrained(base)
    theirs, model, adapter = saved(base, tmp_path / "theirs"), tmp_path / "model", tmp_path / "adapter"
    tensors = load_file(theirs / "adapter_model.safetensors")
    settings = lora_adapters.read_settings(theirs)
    convert.to_hf(find(base), model)
    lora_adapters.write(adapter, tensors, settings, str(model), lora_adapters.base_digest(model))
    done = subprocess.run(
        [PYTHON, "-P", "-c", SCRIPT, model, adapter, *TEXTS], env=os.environ | ENVIRONMENT, cwd=ROOT,
        capture_output=True, text=True, timeout=RUN_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    wanted = [logprobs_of(plain, tokens) for tokens, _ in found[: len(TEXTS)]]
    adapted = peft.PeftModel.from_pretrained(plain, theirs)
    wanted += [logprobs_of(adapted, tokens) for tokens, _ in found[len(TEXTS) :]]
    for text, (tokens, logprobs), own in zip(TEXTS * 2, found, wanted, strict=True):
        assert tokens == characters()(text)["input_ids"] and logprobs == pytest.approx(own, abs=1e-4)
    assert max(abs(a - b) for a, b in zip(wanted[0], wanted[len(TEXTS)], strict=True)) > 1e-2, "the adapter counts"
