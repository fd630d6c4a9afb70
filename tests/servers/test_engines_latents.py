"""A model with attention through a latent on a real vLLM server: its answers are those of transformers, before an
update of the actor and after it.
"""

from __future__ import annotations

import pytest
from processors import as_on
from test_engines_experts import check_before_and_after_an_update
from test_engines_vllm import PYTHON

pytestmark = [
    pytest.mark.servers, pytest.mark.multi, pytest.mark.slow, pytest.mark.matrix,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM: there is no {PYTHON}; `make engines` installs it"),
]  # fmt: skip
SIZES = {"hidden_size": 128, "moe_intermediate_size": 64, "intermediate_size": 128}
# vLLM's kernel for CPUs knows no other sizes of the latent. It reads the routing from keys that transformers leaves
# out.
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "head_dim": 64}
ROUTING = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}


def test_latents_and_biases_of_experts_reach_the_server(tmp_path, monkeypatch):
    """vLLM makes further matrices of the projection up, and must make them anew after an update.

    The server takes the processor for one with AMX. There vLLM preferred kernels that refuse float32 weights.
    """
    as_on(monkeypatch, "amx")
    check_before_and_after_an_update(tmp_path, "deepseek_v3", "{ep: 2}", **SIZES, **LATENT, **ROUTING)
