"""A role with adapters (LoRA) on a real vLLM server: merged into its weights, and computed beside the frozen model."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks
from safetensors.torch import load_file
from test_engines_experts import check_answers
from test_engines_vllm import PYTHON, VOCAB
from tiny_models import make_model
from toys import characters

pytestmark = [
    pytest.mark.servers, pytest.mark.multi, pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM: there is no {PYTHON}; `make engines` installs it"),
]  # fmt: skip
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}  # of 32: vLLM's smallest on a CPU
CONFIG = """
roles:
  generator:
    model: {{path: {base}/model}}
    layout: {{tp: 2}}
    lora: {{rank: 4, alpha: 16}}
    optimizer: {{lr: 0.05}}
    micro_batch_tokens: 64
recipe: {{target: megatron_rl.recipes.grpo:Grpo}}
data: {{path: nowhere.jsonl}}
engine: {{kind: vllm, python: {python}, kv_cache_gib: 0.25, max_batch: 16, adapters: {adapters}}}
run: {{dir: {base}, name: run}}
refit: {{timeout_s: 300, message_timeout_s: 60, verify: full}}
"""


@pytest.mark.parametrize("adapters", ["served", "merged"])
def test_lora_answers_of_vllm_are_those_of_the_merged_model(tmp_path, adapters):
    """Greedy answers, their log-probs and the log-probs of given text, at the start and after an update."""
    make_model(tmp_path / "model", "qwen2", vocab_size=VOCAB, eos_token_id=7, **HEADS)
    characters().save_pretrained(tmp_path / "model")
    (tmp_path / "run").mkdir()
    config = tmp_path / "run/config.yaml"
    config.write_text(CONFIG.format(base=tmp_path, python=PYTHON, adapters=adapters))
    worker = Path(__file__).parents[1] / "helpers" / "engines_worker.py"
    found = run_ranks(worker, 2, tmp_path / "ranks", str(config), "update", timeout_s=380)[0]
    check_answers(tmp_path, found)
    served = [*(tmp_path / "run/engines").glob("adapters/generator/v*/adapter_model.safetensors")]
    assert len(served) == (2 if adapters == "served" else 0)
    assert all("lora_" in name for file in served for name in load_file(file))
