"""Gemma 3 on a real vLLM server: its answers are those of transformers, before an update of the actor and after it."""

from __future__ import annotations

import pytest
from test_engines_experts import check_before_and_after_an_update
from test_engines_vllm import PYTHON

pytestmark = [
    pytest.mark.servers, pytest.mark.multi, pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM: there is no {PYTHON}; `make engines` installs it"),
]  # fmt: skip


def test_gemma_3_answers_with_the_weights_of_a_tensor_parallel_actor(tmp_path):
    """Two heads of 32, vLLM's smallest on a CPU. A prompt of 300 tokens reaches far beyond the window of 20."""
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 20}
    check_before_and_after_an_update(tmp_path, "gemma3_text", "{tp: 2}", **sizes)
