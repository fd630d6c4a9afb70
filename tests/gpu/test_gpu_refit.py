"""Refits of an engine in another process on the same GPU, whose memory it opens by CUDA IPC."""

from __future__ import annotations

import gpu_rank
import numpy as np
import pytest
import torch
from gpu_kit import subjects
from gpu_kit.two_processes import pair
from layouts_worker import learn, logprobs_of, make_rollouts

pytest_plugins = ["gpu_rank"]
pytestmark = gpu_rank.MARKS


@pytest.fixture(params=["tiny", "1.5B"])
def policy(request, one_rank, tmp_path, scale):
    """A policy of tiny shapes, and one of 1.5 B parameters."""
    name = request.param
    directory = subjects.write_config(tmp_path / name, "1.5B", subjects.SMALL if name == "tiny" else scale)
    return subjects.make_policy(directory, recompute=subjects.RECOMPUTES[0], tokens=512, optimizer=True)


def gap(policy, scores, rollouts) -> float:
    """Returns the root mean square of the differences between the engine's log-probs and the policy's."""
    ours, place, found = logprobs_of(policy, rollouts).numpy(), 0, []
    for rollout, theirs in zip(rollouts, scores, strict=True):
        count, prompt = len(rollout.tokens), int(rollout.spans[0][1])
        found.append(theirs[prompt:] - ours[place + prompt - 1 : place + count - 1])
        place += count
    return float(np.sqrt(np.square(np.concatenate(found)).mean()))


def test_an_engine_takes_every_version_also_after_it_was_killed(policy, tmp_path):
    """All bytes are compared (verify: full). Another process takes the killed one's place during the next refit."""
    rollouts = make_rollouts(policy.arch.vocab)
    texts = [rollout.tokens.tolist() for rollout in rollouts]
    weight_bytes = sum(p.numel() * p.element_size() for p in policy.shards().values())
    with pair(policy, tmp_path / "pair", verify="full", texts=texts) as engine:
        for version in range(3):
            if version == 2:
                engine.kill()
            figures = engine.refit(version)
            assert engine.kinds == ["cuda_ipc"]
            assert figures["refit/gigabytes"] * 1e9 == pytest.approx(weight_bytes, rel=1e-6)
            assert figures["refit/checked_slices"] > 0 and figures["refit/failed_engines"] == 0
            assert gap(policy, engine.scores(version), rollouts) < 0.05
            policy.optimizer.param_groups[0]["lr"] = 1e-2
            learn(policy)
    assert torch.isfinite(logprobs_of(policy, rollouts)).all()
