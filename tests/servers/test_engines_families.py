"""Every family on a real vLLM server: its answers are those of transformers, before an update of the actor and after
it.

`make test` runs Gemma 3 here, Qwen2 in test_engines_vllm.py and Qwen3-MoE in test_engines_experts.py;
`make test-more ONLY=families` runs the rest.
"""

from __future__ import annotations

import pytest
from processors import as_on
from test_engines_experts import check_before_and_after_an_update
from test_engines_vllm import PYTHON

pytestmark = [
    pytest.mark.servers, pytest.mark.multi, pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM: there is no {PYTHON}; `make engines` installs it"),
]  # fmt: skip
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}  # vLLM's smallest on a CPU
EXPERTS = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.matrix
def test_gemma_3_answers_with_the_weights_of_a_tensor_parallel_actor(tmp_path, monkeypatch):
    """A prompt of 300 tokens reaches far beyond the window of 20. The server has no AVX-512, and takes vLLM's kernels
    for AVX2.
    """
    as_on(monkeypatch, "avx2")
    check_before_and_after_an_update(tmp_path, "gemma3_text", "{tp: 2}", **HEADS, sliding_window=20)


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "olmo2"])
def test_dense_families_answer_with_the_weights_of_a_tensor_parallel_actor(tmp_path, family):
    check_before_and_after_an_update(tmp_path, family, "{tp: 2}", **HEADS)


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_families_with_experts_answer_with_the_weights_of_an_expert_parallel_actor(tmp_path, family):
    check_before_and_after_an_update(tmp_path, family, "{ep: 2}", **EXPERTS)


@pytest.mark.matrix
def test_sinks_and_biases_of_experts_reach_the_server(tmp_path):
    """The windows of every second layer are shorter than the longest prompt."""
    sizes = {"head_dim": 32, "intermediate_size": 64, "sliding_window": 20}
    check_before_and_after_an_update(tmp_path, "gpt_oss", "{ep: 2}", **EXPERTS, **sizes)


@pytest.mark.matrix
def test_a_family_of_a_users_own_is_known_to_the_server(tmp_path):
    """vLLM has no model of its own for it and runs that of transformers, whose projections it joins."""
    own = ["own_family:FAMILY"]
    no_dropout = {"attention_dropout": 0.0, "residual_dropout": 0.0}
    check_before_and_after_an_update(tmp_path, "seed_oss", "{tp: 2}", families=own, **HEADS, **no_dropout)
