"""A model with attention through a latent on a real vLLM server: its answers are those of transformers, before an
update of the actor and after it.
"""

from __future__ import annotations

from pathlib import Path

import conformance
import pytest
from engines_worker import prompts
from ranks import run_ranks
from test_engines_experts import CONFIG
from test_engines_vllm import PYTHON, VOCAB, completions
from tiny_models import make_model
from toys import characters

pytestmark = [
    pytest.mark.servers, pytest.mark.multi, pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM: there is no {PYTHON}; `make engines` installs it"),
]  # fmt: skip
SIZES = {"hidden_size": 128, "moe_intermediate_size": 64, "intermediate_size": 128}
# vLLM's kernel for CPUs knows no other sizes of the latent. It reads the routing from keys that transformers leaves
# out.
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "head_dim": 64}
ROUTING = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}


def test_latents_and_biases_of_experts_reach_the_server(tmp_path):
    """vLLM makes further matrices of the projection up, and must make them anew after an update."""
    make_model(tmp_path / "model", "deepseek_v3", vocab_size=VOCAB, eos_token_id=7, **SIZES, **LATENT, **ROUTING)
    characters().save_pretrained(tmp_path / "model")
    (tmp_path / "run").mkdir()
    config = tmp_path / "run/config.yaml"
    config.write_text(CONFIG.format(base=tmp_path, python=PYTHON))
    worker = Path(__file__).parents[1] / "helpers" / "engines_worker.py"
    found = run_ranks(worker, 2, tmp_path / "ranks", str(config), "update", timeout_s=300)[0]
    for version in (0, 1):
        weights = tmp_path / f"ranks/v{version}"
        (weights / "config.json").write_text((tmp_path / "model/config.json").read_text())
        judge = conformance.Judge(weights, characters())
        for prompt, (completion,) in zip(prompts(VOCAB), completions(found[f"greedy_v{version}"]), strict=True):
            judge.check_greedy(prompt, completion)
