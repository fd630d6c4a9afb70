"""Models with experts on a real vLLM server: its answers are those of transformers, before an update of the actor and
after it.
"""

from __future__ import annotations

from pathlib import Path

import conformance
import pytest
from engines_worker import prompts
from ranks import run_ranks
from test_engines_vllm import PYTHON, VOCAB, completions
from tiny_models import make_model
from toys import characters

pytestmark = [
    pytest.mark.servers, pytest.mark.multi, pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM: there is no {PYTHON}; `make engines` installs it"),
]  # fmt: skip
CONFIG = """
roles:
  generator: {{model: {{path: {base}/model}}, layout: {{ep: 2}}, optimizer: {{lr: 0.003}}, micro_batch_tokens: 64}}
recipe: {{target: megatron_rl.recipes.grpo:Grpo}}
data: {{path: nowhere.jsonl}}
engine: {{kind: vllm, python: {python}, kv_cache_gib: 0.25, max_batch: 16}}
run: {{dir: {base}, name: run}}
refit: {{timeout_s: 300, message_timeout_s: 60, verify: full}}
"""


def test_experts_reach_the_server_whole_and_packed_as_it_wants_them(tmp_path):
    """An actor with its experts over two ranks. vLLM packs experts on a CPU when it loads them, and forgets to when it
    reloads them.
    """
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    make_model(tmp_path / "model", "qwen3_moe", vocab_size=VOCAB, eos_token_id=7, **sizes)
    characters().save_pretrained(tmp_path / "model")
    (tmp_path / "run").mkdir()
    config = tmp_path / "run/config.yaml"
    config.write_text(CONFIG.format(base=tmp_path, python=PYTHON))
    found = run_ranks(
        Path(__file__).parents[1] / "helpers" / "engines_worker.py",
        2,
        tmp_path / "ranks",
        str(config),
        "update",
        timeout_s=500,
    )[0]
    for version in (0, 1):
        weights = tmp_path / f"ranks/v{version}"
        (weights / "config.json").write_text((tmp_path / "model/config.json").read_text())
        judge = conformance.Judge(weights, characters())
        for prompt, (completion,) in zip(prompts(VOCAB), completions(found[f"greedy_v{version}"]), strict=True):
            judge.check_greedy(prompt, completion)
