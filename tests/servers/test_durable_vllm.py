"""A run with a real vLLM server that is killed while answers are on their way: no finished sample is asked for again
or written twice, each is trained on, and the stored iterations lead to the same weights.

Needs vLLM in an environment of its own: `make engines`, or another interpreter in MEGATRON_RL_VLLM_PYTHON.
"""

from __future__ import annotations

import random

import cut_runs
import pytest
from durable_runs import LOGGED, KilledRun, single, trained_again
from test_engines_vllm import PYTHON
from tiny_models import make_model

pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM: there is no {PYTHON}; `make engines` installs it"),
]


@pytest.mark.matrix  # make test-more ONLY=durable
def test_a_killed_run_with_a_real_server_loses_no_finished_sample(tmp_path):
    cut_runs.write_data(tmp_path, [])
    cut_runs.write_players(tmp_path)
    # heads of 32: the smallest on a CPU
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    make_model(tmp_path / cut_runs.PLAYERS[0], "qwen2", vocab_size=len(cut_runs.WORDS), **sizes)
    own = single(tmp_path, "served")
    own["run"] |= {"save_every": 2, "save_rollouts_every": 1}
    own |= {"engine": {"kind": "vllm", "python": str(PYTHON), "wait_s": 600.0}, "rollouts": {"max_staleness": 1}}
    run, rng = KilledRun(tmp_path, own), random.Random(0)
    run.kill("all", rng, None, after=LOGGED)
    assert run.written, "samples were written before the kill"
    run.finish()
    run.check()
    run.check_used()
    own["run"]["name"] = "again"
    trained_again(tmp_path, run, own)
