"""Refits of an engine in another process on the same GPU, whose memory it opens by CUDA IPC."""

from __future__ import annotations

import gpu_rank
import numpy as np
import pytest
from gpu_kit import subjects
from gpu_kit.two_processes import pair
from layouts_worker import learn, logprobs_of, make_rollouts

pytest_plugins = ["gpu_rank"]
pytestmark = gpu_rank.MARKS


@pytest.fixture(params=["tiny", "1.5B"])
def policy(request, one_rank, tmp_path, scale):
    """A policy of tiny shapes, and one of 1.5 B parameters."""
    own = subjects.SMALL if request.param == "tiny" else scale
    directory = subjects.write_config(tmp_path / request.param, "1.5B", own)
    return subjects.make_policy(
        directory, recompute=subjects.RECOMPUTES[0], tokens=512, optimizer=True, lr=1e-2 if own.tiny else 1e-3
    )


def flat(scores, rollouts) -> np.ndarray:
    """Returns the log-probs of trained tokens of an engine's scores, one after the other."""
    starts = [int(rollout.spans[0][1]) for rollout in rollouts]
    return np.concatenate([one[start:] for one, start in zip(scores, starts, strict=True)])


def ours(policy, rollouts) -> np.ndarray:
    """Returns the policy's log-probs of the same tokens."""
    found, ends = logprobs_of(policy, rollouts).numpy(), np.cumsum([len(r.tokens) for r in rollouts])
    starts = [end - len(r.tokens) + int(r.spans[0][1]) - 1 for end, r in zip(ends, rollouts, strict=True)]
    return np.concatenate([found[start : end - 1] for start, end in zip(starts, ends, strict=True)])


def rms(values) -> float:
    return float(np.sqrt(np.square(values).mean()))


def test_an_engine_takes_every_version_also_after_it_was_killed(policy, tmp_path):
    """All bytes are compared (verify: full). Another process takes the killed one's place during the next refit."""
    rollouts = make_rollouts(policy.arch.vocab)
    texts = [rollout.tokens.tolist() for rollout in rollouts]
    weight_bytes = sum(p.numel() * p.element_size() for p in policy.export.shards().values())
    with pair(policy, tmp_path / "pair", verify="full", texts=texts) as engine:
        for version in range(3):
            if version == 2:
                engine.kill()
            metrics, now = engine.refit(version), ours(policy, rollouts)
            assert engine.kinds == ["cuda_ipc"]
            assert metrics["refit/gigabytes"] * 1e9 == pytest.approx(weight_bytes, rel=1e-6)
            assert metrics["refit/checked_slices"] > 0 and metrics["refit/failed_engines"] == 0
            apart = rms(flat(engine.scores(version), rollouts) - now)
            learn(policy)
            assert apart < 0.05 and apart < rms(ours(policy, rollouts) - now)  # the last version is farther away
