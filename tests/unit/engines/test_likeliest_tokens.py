"""The k most likely tokens at each position that engines return beside the sampled token (Sampling.top)."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_servers import Asked, engines_in, until
from fake_vllm import FakeVllm, likeliest
from test_sglang_client import answer, stub  # noqa: F401 (a fixture)
from tiny_models import make_model
from transformers import AutoModelForCausalLM

from megatron_rl.algorithms.centering import ENGINE_CANDIDATES
from megatron_rl.batches.packed_batch import CANDIDATES
from megatron_rl.engines.embedded import token_sampling
from megatron_rl.engines.embedded.embedded_engine import EmbeddedEngine
from megatron_rl.engines.http import ServerLost
from megatron_rl.engines.kind import ModelFacts
from megatron_rl.engines.protocol import EngineError, Sampling, complete, empty
from megatron_rl.engines.vllm import routes
from megatron_rl.engines.vllm.client import VllmServer
from megatron_rl.engines.vllm.settings import Vllm
from megatron_rl.training.rollouts import continued, from_completion
from megatron_rl.types import Prompt

TOP = 5
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5], [8]]


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.7}, {"top_k": 3}, {"temperature": 1.3, "top_p": 0.5, "min_p": 0.01}]
)
def test_embedded_engine_returns_the_head_of_the_distribution_that_it_samples_from(tmp_path, settings):
    directory = make_model(tmp_path, "qwen2")
    engine = EmbeddedEngine(directory, max_batch=4)
    engine.load_pretrained()
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    sampling = Sampling(max_tokens=6, n=2, seed=2, top=TOP, **settings)
    plain = complete(engine, PROMPTS, replace(sampling, top=0))
    for prompt, group, others in zip(PROMPTS, complete(engine, PROMPTS, sampling), plain, strict=True):
        for own, other in zip(group, others, strict=True):
            assert own.tokens.tolist() == other.tokens.tolist() and other.top_ids is None, "the same draws without"
            with torch.no_grad():
                logits = reference(torch.tensor([[*prompt, *own.tokens.tolist()]])).logits[0, len(prompt) - 1 : -1]
            logprobs = (logits / settings.get("temperature", 1.0)).log_softmax(-1)
            ids = logprobs.topk(TOP).indices
            kept = np.isfinite(own.top_logprobs)
            assert own.top_ids[kept].tolist() == ids.numpy()[kept].tolist() and own.top_ids.dtype == np.int32
            assert kept[:, 0].all() and (settings.get("top_k", 0) == 0 or (kept.sum(-1) == 3).all())
            # cut sampling renormalises what is left: by the same factor for all tokens of a position
            shift = own.top_logprobs - logprobs.gather(1, ids).numpy()
            assert np.abs((shift - shift[:, :1])[kept]).max() < 2e-5
            if not {"top_k", "top_p"} & settings.keys():
                assert kept.all() and np.abs(shift).max() < 2e-5
            for place, token in enumerate(own.tokens):
                found = own.top_ids[place] == token
                assert not found.any() or own.top_logprobs[place][found] == pytest.approx(own.logprobs[place], abs=1e-6)


def test_pool_joins_the_likeliest_tokens_of_what_a_refit_cuts(tmp_path):
    sampling = Sampling(max_tokens=8, n=2, seed=5, top=TOP)
    with engines_in(tmp_path) as run_engines:
        fake = run_engines.start()
        fake.stall_after = 3
        asked = Asked(run_engines.serving(replicas=1), PROMPTS, sampling)
        until("requests under way", lambda: fake.running == len(PROMPTS))
        run_engines.refit(2)
        fake.release()
        for group in asked.result():
            for c in group:
                whole = likeliest(c.tokens, TOP)
                assert c.versions == [(0, 1), (3, 2)] and c.top_ids.tolist() == whole["top_ids"].tolist()
                assert c.top_logprobs.tolist() == whole["top"].tolist() and np.isneginf(c.top_logprobs[:, -1]).all()


def test_answers_with_other_numbers_of_likeliest_tokens_are_a_failure(tmp_path):
    with engines_in(tmp_path) as run_engines:
        fake: FakeVllm = run_engines.start()
        pool = run_engines.serving(replicas=1, attempts=1)
        fake.fail("/megatron_rl/generate", "top")
        with pytest.raises(EngineError, match=r"likeliest tokens are int32 \(4, 4\)"):
            complete(pool, PROMPTS[:1], Sampling(max_tokens=4, top=TOP))


def test_sglang_is_asked_for_flat_arrays(stub):  # noqa: F811
    ids, logprobs = np.array([[5, 1], [6, 2]], np.int32), np.array([[-0.5, -1.5], [-0.25, -2.0]], np.float32)

    def about(shape, ids=ids):
        return {
            "output_top_logprobs_val_flat_b64": base64.b64encode(logprobs.tobytes()).decode(),
            "output_top_logprobs_idx_flat_b64": base64.b64encode(ids.tobytes()).decode(),
            "output_top_logprobs_shape": shape,
        }

    def ask(server):
        tokens = np.array([1, 2], np.int32)
        return asyncio.run(server.generate(tokens, Sampling(max_tokens=9, top=2), seed=40, timeout_s=5))

    one = stub(generate=[answer(**about([2, 2]))])
    [c] = ask(one.client())
    assert c.top_ids.tolist() == ids.tolist() and c.top_logprobs.tolist() == logprobs.tolist()
    [body] = one.bodies("/generate")
    assert body["top_logprobs_num"] == 2
    assert body["return_flat_raw_output_top_logprobs"] and body["return_flat_raw_top_logprobs_b64"]
    for broken, says in (
        (answer(), r"likeliest tokens are object \(\)"),
        (answer(**about([1, 4])), r"likeliest tokens are int32 \(1, 4\)"),
        (answer(**about([2, 2], ids + 97)), "tokens from 98 to 103"),
    ):
        with pytest.raises(ServerLost, match=says):
            ask(stub(generate=[broken]).client())


def test_rollouts_have_zeros_where_the_engine_sampled_nothing():
    sampling = Sampling(max_tokens=2, top=2)
    turns = [
        replace(
            empty(sampling), tokens=np.array(tokens), logprobs=np.array([-1.0, -2.0]),
            top_ids=np.array([[t, t + 1] for t in tokens]), top_logprobs=np.array([[-1.0, -2.0], [-0.5, -np.inf]]),
        )
        for tokens in ((11, 12), (13, 14))
    ]  # fmt: skip
    first = from_completion(Prompt(id="a", tokens=[1, 2, 3]), turns[0], role="r", group="g", version=0)
    second = from_completion(Prompt(id="a", tokens=[1, 2, 3, 11, 12, 7]), turns[1], role="r", group="g", version=0)
    joint = continued(first, second)
    assert joint.values[CANDIDATES].tolist() == [[0, 0]] * 3 + [[11, 12], [12, 13], [0, 0], [13, 14], [14, 15]]
    assert joint.values[ENGINE_CANDIDATES][3:5].tolist() == [[-1.0, -2.0], [-0.5, -np.inf]]
    nothing = from_completion(Prompt(id="a", tokens=[1, 2]), empty(sampling), role="r", group="g", version=0)
    assert nothing.values[CANDIDATES].shape == (2, 2), "a prompt that fills the context has a row for each token"


def test_draws_hold_no_memory_of_the_whole_vocabulary():
    """Tensors of a step are kept until the completions are built."""
    logits, keys = torch.randn(4, 1000), torch.arange(4)
    for top in (0, 3):
        for held in token_sampling.draw(logits, Sampling(max_tokens=1, top=top), keys, keys):
            assert held.untyped_storage().nbytes() <= held.numel() * held.element_size()


@pytest.mark.parametrize("told", [None, SimpleNamespace(logprobs=[], token_ids=[])])
def test_completion_without_tokens_has_arrays_without_rows(told):
    """vLLM's answer to a request that is aborted in its queue."""
    output = SimpleNamespace(
        token_ids=[], logprobs=told, routed_experts=None, finish_reason="abort", stop_reason=None, weight_versions=[]
    )
    about, part = routes._told(output)
    server = VllmServer("http://127.0.0.1:1", "t", Vllm(), 5, ModelFacts(vocab=97))
    part.setdefault("logprobs", np.empty(0, np.float32))
    completion = server._drawn(about, part, Sampling(max_tokens=4, top=3), 2, 4)
    assert completion.top_ids.shape == completion.top_logprobs.shape == (0, 3)


def test_requests_without_log_probs_have_no_likeliest_tokens(tmp_path):
    sampling = Sampling(max_tokens=4, top=3, logprobs=False)
    with engines_in(tmp_path) as run_engines:
        run_engines.start()
        [[completion]] = complete(run_engines.serving(replicas=1), PROMPTS[:1], sampling)
        assert completion.top_ids is None
    assert empty(sampling).top_ids is None
