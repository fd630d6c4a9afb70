"""Decoding steps as CUDA graphs replay them, without CUDA: the step that would be captured runs again and again on the
same memory. What a capture refuses besides, waits of the host, is counted in tests/emulated."""

from __future__ import annotations

import gc
import random
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_cuda_graphs import FakeCuda
from tiny_models import make_model
from transformers import AutoModelForCausalLM

from megatron_rl.engines.batched_session import Row
from megatron_rl.engines.embedded import cuda_graphs
from megatron_rl.engines.embedded.cuda_graphs import padded_rows
from megatron_rl.engines.embedded.decoder import Decoder
from megatron_rl.engines.embedded.embedded_engine import EmbeddedEngine
from megatron_rl.engines.embedded.scheduler import ContinuousBatch
from megatron_rl.engines.embedded.stop_conditions import Ends
from megatron_rl.engines.protocol import Sampling, complete

GREEDY = Sampling(max_tokens=80, temperature=0.0)
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
PROMPTS = [[random.Random(n).randrange(96) for _ in range(n)] for n in (3, 50, 1, 17, 17, 8, 30)]


@pytest.fixture
def narrow(monkeypatch):
    """The cache grows several times while a few dozen tokens are sampled."""
    monkeypatch.setattr(cuda_graphs, "GROWTH", 64)


def loaded(directory, **settings):
    engine = EmbeddedEngine(directory, **settings)
    engine.load_pretrained()
    return engine


class Recorder(cuda_graphs.GraphRecorder):
    """Stands in for captures. A replay runs the step again, and looks whether shapes and addresses are as recorded."""

    def __init__(self):
        self.recorded, self.replayed = 0, 0

    def rehearse(self, run):
        run()

    def record(self, run):
        step, self.recorded = run.__self__, self.recorded + 1
        before = self.memory(step)

        def replay():
            self.replayed += 1
            run()
            assert self.memory(step) == before

        return replay

    @staticmethod
    def memory(step):
        held = [*step._layers, *step._held, step._state, *step.drawn]
        return [(one.data_ptr(), one.shape) for one in held]


class RowCounter:
    """Stands in for a decoder: computes nothing, and counts the rows of all decoding steps."""

    vocab, device = 4, torch.device("cpu")
    arch = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=4096), experts=0)
    weights = SimpleNamespace(layers=[None])

    def __init__(self):
        self.row_steps = 0

    def new_layer_cache(self, rows, width):
        return torch.zeros(1, rows, 1, width, 1)

    def turns_up_to(self, length):
        return []

    def prefill(self, tokens):
        return torch.zeros(*tokens.shape, self.vocab), [self.new_layer_cache(*tokens.shape)], []

    def decode(self, tokens, positions, cache, window):
        self.row_steps += len(tokens)
        return torch.zeros(len(tokens), self.vocab), []

    def logits(self, hidden):
        return hidden


@pytest.mark.parametrize(("family", "sizes"), [("qwen3", {}), ("gemma3_text", WINDOWS)])
def test_replayed_steps_draw_what_transformers_draws(tmp_path, narrow, family, sizes):
    directory = make_model(tmp_path, family, **sizes)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    engine, plain, recorder = loaded(directory, max_batch=3), loaded(directory, max_batch=3), Recorder()
    engine._recorder = recorder
    for prompt, (found,) in zip(PROMPTS, complete(engine, PROMPTS, GREEDY), strict=True):
        wanted = reference.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=GREEDY.max_tokens)
        assert found.tokens.tolist() == wanted[0, len(prompt) :].tolist()
    assert recorder.replayed > 100 and recorder.recorded < 12
    sampled = Sampling(max_tokens=20, n=3, seed=4, temperature=0.8, top_k=20)
    for own, others in zip(complete(engine, PROMPTS, sampled), complete(plain, PROMPTS, sampled), strict=True):
        for a, b in zip(own, others, strict=True):
            assert a.tokens.tolist() == b.tokens.tolist()
            assert a.logprobs == pytest.approx(b.logprobs, abs=2e-5)
            assert a.model_logprobs == pytest.approx(b.model_logprobs, abs=2e-5)


def test_rows_that_end_leave_and_others_come_without_a_change_of_memory(tmp_path, narrow):
    """Sequences end at token 7, at all times; waiting rows take their slots, and steps have ever fewer rows."""
    directory = make_model(tmp_path, "qwen2", eos_token_id=7, num_hidden_layers=2)
    engine, recorder = loaded(directory, max_batch=12), Recorder()
    engine._recorder = recorder
    sampling = Sampling(max_tokens=60, n=4, seed=1)
    found, wanted = (complete(e, PROMPTS, sampling) for e in (engine, loaded(directory, max_batch=12)))
    pairs = [pair for own, others in zip(found, wanted, strict=True) for pair in zip(own, others, strict=True)]
    assert all(a.tokens.tolist() == b.tokens.tolist() and a.stop is b.stop for a, b in pairs)
    assert len({len(a.tokens) for a, _ in pairs}) > 5 and recorder.replayed > recorder.recorded > 2


def test_a_cache_that_grows_is_not_held_by_the_steps_before(tmp_path, narrow, monkeypatch):
    """Steps held all old layers while the new ones were made: the cache was there twice."""
    engine, steps, alive = loaded(make_model(tmp_path, "qwen2", num_hidden_layers=1), max_batch=3), [], []
    new = Decoder.new_layer_cache

    class Weak(Recorder):
        def record(self, run):
            steps.append(weakref.ref(run.__self__))
            return lambda own=steps[-1]: own().run()

    def new_layer_cache(self, slots, columns):
        alive.append(sum(step() is not None for step in steps))
        return new(self, slots, columns)

    monkeypatch.setattr(Decoder, "new_layer_cache", new_layer_cache)
    engine._recorder = Weak()
    gc.disable()
    try:
        complete(engine, PROMPTS, GREEDY)
    finally:
        gc.enable()
    assert len(steps) > 2 and len(alive) > 2 and not any(alive)


def test_a_step_that_is_not_captured_is_run_as_it_is(tmp_path, caplog, monkeypatch):
    engine = loaded(make_model(tmp_path, "qwen2", num_hidden_layers=1), max_batch=3)
    wanted = [c.tokens.tolist() for (c,) in complete(engine, PROMPTS, GREEDY)]
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    cuda.fails_to_begin = 1
    engine._recorder = cuda_graphs.GraphRecorder()
    assert [c.tokens.tolist() for (c,) in complete(engine, PROMPTS, GREEDY)] == wanted
    assert caplog.text.count("decoding goes on without CUDA graphs") == 1


def test_a_step_has_few_numbers_of_rows():
    rows = [1, 2, 3, 4, 5, 8, 9, 64, 65, 128, 129, 224, 225, 256, 520, 1024]
    assert [padded_rows(n) for n in rows] == [1, 2, 4, 4, 8, 8, 16, 64, 80, 128, 160, 224, 256, 256, 640, 1024]


@pytest.mark.parametrize("count", [256, 1024])
def test_rows_of_varied_lengths_needed_many_captures(count):
    """Row counts were multiples of 8 and the cache grew by 64 columns. 256 rows needed 43 captures and 1,024 rows 101,
    each of which was replayed about 20 times: half of the gain of graphs was lost."""
    lengths = np.random.default_rng(0).lognormal(5.5, 0.8, count).clip(1, 1024).astype(int)
    rows = [Row(np.ones(64, int), i, 0, Sampling(max_tokens=n)) for i, n in enumerate(lengths.tolist())]
    decoder, recorder, ends = RowCounter(), Recorder(), Ends(set(), rows[0].sampling, None, RowCounter.vocab)
    batch = ContinuousBatch([decoder], rows, ends=ends, max_batch=256, recorder=recorder)
    assert [len(found.tokens) for found in batch.run()] == lengths.tolist()
    assert recorder.recorded <= 26 and recorder.replayed > 40 * recorder.recorded
    assert decoder.row_steps < 1.12 * lengths.sum()


def test_models_with_experts_and_engines_without_graphs_are_not_recorded(tmp_path, monkeypatch):
    experts = loaded(make_model(tmp_path / "experts", "qwen3_moe", num_hidden_layers=1))
    experts._recorder = recorder = Recorder()
    complete(experts, PROMPTS[:1], Sampling(max_tokens=5))
    assert recorder.recorded == 0
    dense = make_model(tmp_path / "dense", "qwen2", num_hidden_layers=1)
    gpu = torch.device("cuda")
    assert isinstance(EmbeddedEngine(dense, device=gpu)._recorder, cuda_graphs.GraphRecorder)
    assert EmbeddedEngine(dense, device=gpu, cuda_graphs=False)._recorder is None
    assert EmbeddedEngine(dense, device=torch.device("cpu"))._recorder is None
