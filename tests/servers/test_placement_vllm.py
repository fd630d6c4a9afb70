"""A Tango run whose two roles have ranks of their own, with a real vLLM server for each role.

Needs vLLM in an environment of its own: `make engines`, or another interpreter in MEGATRON_RL_VLLM_PYTHON.
"""

from __future__ import annotations

import json
from collections import Counter

import pytest
from conftest import program, tango_settings
from test_engines_vllm import PYTHON

from megatron_rl.run.metrics import read_metrics

pytestmark = [
    pytest.mark.servers, pytest.mark.multi, pytest.mark.slow, pytest.mark.matrix,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM: there is no {PYTHON}; `make engines` installs it"),
]  # fmt: skip
ROLES = ("generator", "verifier")


def test_placement_apart_trains_both_roles_and_sends_their_weights_to_servers(last_letter, tmp_path):
    """The generator has rank 0 and the verifier rank 1; each refit begins at the role's only rank."""
    program(
        "train", *tango_settings(last_letter, tmp_path, "apart"), "roles.generator.ranks=0-0",
        "roles.verifier.ranks=1-1", "engine.kind=vllm", f"engine.python={PYTHON}", "rollouts.max_staleness=1",
        "recipe.args.generator_updates=3", "evaluation.every=0",
    )  # fmt: skip
    run = tmp_path / "apart"
    rows = [row for row in read_metrics(run) if row.scope in ROLES]
    assert Counter(row.scope for row in rows) == {"generator": 3, "verifier": 2}
    gaps = [row.metrics["engine_gap"] for row in rows if row.metrics["staleness"] == 0]
    assert gaps and max(gaps) < 1e-3, "the servers have the trainer's weights"
    versions = {role: set[int]() for role in ROLES}
    for line in (run / "refits.jsonl").read_text().splitlines():
        versions[json.loads(line)["role"]].add(json.loads(line)["version"])
    assert versions == {"generator": {0, 1, 2, 3}, "verifier": {0, 1, 2}}
    for role in ROLES:
        start, end = last_letter / role / "model", run / "models" / role
        assert (start / "model.safetensors").read_bytes() != (end / "model.safetensors").read_bytes(), role
    assert not [*run.glob("engines/*.json")], "no server is left"
