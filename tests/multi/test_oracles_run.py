"""Two optimizer steps of a run of TRL's GRPOTrainer, replayed by this project's actor (tests/oracles/trl_run)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from oracles import FOLDER, TRL_EPSILON
from ranks import run_ranks

from megatron_rl.algorithms.estimators import EPSILON, grpo

RUN = FOLDER / "trl_run"


@pytest.mark.multi
def test_oracles_weights_after_the_steps_of_trls_run_are_trls(tmp_path):
    answers = run_ranks(Path(__file__).parents[1] / "helpers/oracles_worker.py", 2, tmp_path / "ranks", str(RUN))
    for answer in answers:
        for name, found in answer.items():
            assert found["weights"] < 1e-4 and found["moved"] > 5e-3, name
            assert found["logprobs"] < 1e-5 and found["loss"] < 1e-5 and found["grad_norm"] < 1e-5, name
        assert all(answer[f"{layout}/2"]["clip_frac"] > 0.05 for layout in ("dp", "tp")), "the clip decides some tokens"


def test_oracles_advantages_of_trls_run_are_those_of_its_rewards():
    rollouts = json.loads((RUN / "record.json").read_text())["rollouts"]
    rewards = np.array([one["reward"] for one in rollouts])
    prompts = [str(one["prompt"]) for one in rollouts]
    groups = np.array([prompts.index(prompt) for prompt in prompts])
    std = np.array([rewards[groups == group].std(ddof=1) for group in groups])
    found = grpo(rewards, groups, np.ones(len(rewards), np.int64)) * (std + EPSILON) / (std + TRL_EPSILON)
    assert found == pytest.approx([one["advantage"] for one in rollouts], rel=1e-5, abs=1e-6)  # TRL's are float32
