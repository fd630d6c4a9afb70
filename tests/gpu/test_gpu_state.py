"""Precision, checkpoints and sleep of a bfloat16 model of 0.5 B parameters on one CUDA device."""

from __future__ import annotations

import gpu_rank
import pytest
import torch
from gpu_kit import subjects
from gpu_numbers import by_transformers, gradients_of, optimizer_state, rms
from layouts_worker import learn, logprobs_of, make_rollouts
from transformers import AutoModelForCausalLM

from megatron_rl.models.shape import read_shape
from megatron_rl.planning import memory
from megatron_rl.planning.memory import Actor, MicroBatchLoad, Precision
from megatron_rl.weights.counting import Parallel

pytest_plugins = ["gpu_rank"]
pytestmark = gpu_rank.MARKS
LIMIT = 1.5  # times transformers' own error in bfloat16
TOKENS = 512  # of a micro-batch


@pytest.fixture
def policy(one_rank, tmp_path, scale):
    directory = subjects.write_config(tmp_path / "model", "0.5B", scale)
    return subjects.make_policy(directory, recompute=subjects.RECOMPUTES[0], tokens=TOKENS, optimizer=True)


def weights_are(policy, expected) -> bool:
    return all(torch.equal(tensor, expected[name]) for name, tensor in policy.export.weights())


def test_bfloat16_is_as_near_to_float32_as_transformers(policy):
    """All sides compute on the device, with the policy's weights."""
    rollouts = make_rollouts(policy.arch.vocab)
    model = AutoModelForCausalLM.from_config(policy.arch.config, dtype=torch.float32, attn_implementation="sdpa")
    left_out = model.load_state_dict({n: t.float() for n, t in policy.export.weights()}, strict=False)
    assert not left_out.unexpected_keys and {*left_out.missing_keys} <= {"lm_head.weight"}  # it is tied
    exact, exact_gradients = by_transformers(model.to("cuda"), rollouts)
    theirs, their_gradients = by_transformers(model.to(torch.bfloat16), rollouts)
    ours, our_gradients = logprobs_of(policy, rollouts), gradients_of(policy, rollouts)
    error = rms([theirs - exact])
    assert 0 < rms([ours - exact]) <= LIMIT * error
    assert our_gradients.keys() == exact_gradients.keys()
    found, allowed = (
        rms(side[name] - exact_gradients[name] for name in side) for side in (our_gradients, their_gradients)
    )
    assert 0 < found <= LIMIT * allowed


def test_a_checkpoint_is_loaded_as_it_was_saved(policy, tmp_path):
    """Where neither Transformer Engine nor apex is, Adam is the project's own: its moments come back too."""
    learn(policy)
    before, state = dict(policy.export.weights()), optimizer_state(policy)
    (tmp_path / "checkpoint").mkdir()
    policy.state.save(tmp_path / "checkpoint")
    first = learn(policy)
    assert not all(torch.equal(*pair) for pair in zip(state, optimizer_state(policy), strict=True))
    policy.state.load(tmp_path / "checkpoint")
    assert weights_are(policy, before)
    assert all(torch.equal(*pair) for pair in zip(state, optimizer_state(policy), strict=True))
    second = learn(policy)  # attention's backward pass on a GPU sums in no fixed order
    assert second["loss"] == pytest.approx(first["loss"], rel=1e-4)
    assert second["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-3)


def test_sleep_frees_what_the_plan_says_and_wake_brings_all_back(policy):
    learn(policy)
    before, state = dict(policy.export.weights()), optimizer_state(policy)
    shape = read_shape(str(policy.role.model.path))
    load = MicroBatchLoad(tokens=TOKENS)
    said = memory.training(Actor(shape, Parallel(world=1), Precision.gpu("bfloat16")), load, stage=0)
    held = torch.cuda.memory_allocated()
    policy.memory.sleep()
    assert held - torch.cuda.memory_allocated() >= 0.95 * (said.gradients + said.optimizer)
    assert logprobs_of(policy, make_rollouts(policy.arch.vocab)).isfinite().all()
    policy.memory.wake()
    assert abs(torch.cuda.memory_allocated() - held) < 0.02 * held
    assert weights_are(policy, before)
    assert all(torch.equal(*pair) for pair in zip(state, optimizer_state(policy), strict=True))
    assert learn(policy)["grad_norm"] > 0
