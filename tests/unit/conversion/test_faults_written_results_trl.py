"""Written models, adapters and reward models are loaded by TRL's trainers, whose losses are those of the values that
were trained.

Needs TRL in an environment of its own: `make oracles`, which runs this file.
"""

from __future__ import annotations

import json
import os
import subprocess

import peft
import pytest
import torch
from conftest import ROOT
from limits import RUN_S
from safetensors.torch import load_file
from smallest_forms import ORACLES
from test_faults_adapters import saved
from test_faults_written_results import with_head
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedTokenizerFast

from megatron_rl.conversion import convert
from megatron_rl.conversion.weight_source import find
from megatron_rl.data.tiny import write_tiny_model
from megatron_rl.weights import lora_adapters

pytestmark = pytest.mark.skipif(not (ROOT / ORACLES).exists(), reason=f"there is no {ORACLES}: `make oracles`")
# No text has a space: AutoTokenizer drops the spaces of this vocabulary of characters for the family qwen2.
PROMPT, CHOSEN, REJECTED = "say:", ("aaa", "b", "cc"), ("zz", "a", "yyyy")
SCRIPT = """
import json, sys
from datasets import Dataset
from peft import AutoPeftModelForCausalLM
from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

model, adapter, reward, scratch, rows = *sys.argv[1:5], json.loads(sys.argv[5])
common = dict(output_dir=scratch, use_cpu=True, bf16=False, report_to="none", per_device_eval_batch_size=8)
pairs, texts = Dataset.from_list(rows), Dataset.from_list([{k: r[k] for k in ("prompt", "completion")} for r in rows])
init = {"model_init_kwargs": {"dtype": "float32"}}
trainers = {"reward": RewardTrainer(reward, RewardConfig(**common, **init), train_dataset=pairs, eval_dataset=pairs)}
trainers["model"] = SFTTrainer(model, SFTConfig(**common, **init), train_dataset=texts, eval_dataset=texts)
adapted = AutoPeftModelForCausalLM.from_pretrained(adapter, dtype="float32")
trainers["adapter"] = SFTTrainer(adapted, SFTConfig(**common), train_dataset=texts, eval_dataset=texts)
print("\\n" + json.dumps({name: trainer.evaluate()["eval_loss"] for name, trainer in trainers.items()}))
"""


def nll(model, tokenizer):
    """Returns the mean of -log p over the tokens of all completions and their end tokens."""
    total, count, prompt = 0.0, 0, len(tokenizer(PROMPT)["input_ids"])
    for completion in CHOSEN:
        tokens = torch.tensor([tokenizer(PROMPT + completion + tokenizer.eos_token)["input_ids"]])
        with torch.no_grad():
            logprobs = model.eval()(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])
        total, count = total - logprobs[prompt - 1 :].sum().item(), count + len(logprobs) - prompt + 1
    return total / count


def preference_loss(directory, tokenizer):
    """Returns the mean of -log sigmoid(difference of the scores at the end tokens)."""
    model = AutoModelForTokenClassification.from_pretrained(directory, dtype=torch.float32).eval()

    def score(text):
        with torch.no_grad():
            return model(torch.tensor([tokenizer(PROMPT + text + tokenizer.eos_token)["input_ids"]])).logits[0, -1, 0]

    margins = [score(a) - score(b) for a, b in zip(CHOSEN, REJECTED, strict=True)]
    assert max(map(abs, margins)) > 1e-2
    return -torch.nn.functional.logsigmoid(torch.stack(margins)).mean().item()


def test_faults_written_results_are_loaded_by_trl_with_the_losses_of_what_was_trained(tmp_path):
    base = write_tiny_model(tmp_path / "base")
    theirs, model, adapter = saved(base, tmp_path / "theirs"), tmp_path / "model", tmp_path / "adapter"
    convert.to_hf(find(base), model)
    settings, tensors = lora_adapters.read_settings(theirs), load_file(theirs / "adapter_model.safetensors")
    lora_adapters.write(adapter, tensors, settings, str(model), lora_adapters.base_digest(model))
    convert.to_hf(find(with_head(base)), tmp_path / "reward")
    rows = [
        {"prompt": PROMPT, "completion": a, "chosen": a, "rejected": b} for a, b in zip(CHOSEN, REJECTED, strict=True)
    ]
    done = subprocess.run(
        [ROOT / ORACLES, "-P", "-c", SCRIPT, model, adapter, tmp_path / "reward", tmp_path / "out", json.dumps(rows)],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}, cwd=tmp_path,
        capture_output=True, text=True, timeout=RUN_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert found["model"] == pytest.approx(nll(plain, tokenizer), abs=2e-5)
    assert found["adapter"] == pytest.approx(nll(peft.PeftModel.from_pretrained(plain, theirs), tokenizer), abs=2e-5)
    assert abs(found["adapter"] - found["model"]) > 4e-4, "the adapter counts"
    assert found["reward"] == pytest.approx(preference_loss(tmp_path / "reward", tokenizer), abs=2e-5)
