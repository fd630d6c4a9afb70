"""The engine that the rollouts of one iteration see answers as the engine that it wraps."""

import time

import numpy as np
import torch
from fake_engines import TableEngine

from megatron_rl.engines.protocol import Sampling, draw
from megatron_rl.training.iteration_engines import IterationEngine, OpenSessions


def test_an_engine_of_an_iteration_scores_as_the_engine_that_it_wraps():
    engine, draw = TableEngine(vocab=5, eos=0), torch.Generator().manual_seed(0)
    engine.load([("table", torch.randn(25, 5, generator=draw))], version=7)
    wrapped, texts = IterationEngine(engine, 3, OpenSessions()), [np.array([1, 2, 3]), np.array([4, 1])]
    for scores, expected in zip(wrapped.score(texts), engine.score(texts), strict=True):
        np.testing.assert_array_equal(scores, expected)
    for top, expected in zip(wrapped.score_top(texts, 2), engine.score_top(texts, 2), strict=True):
        np.testing.assert_array_equal(top.ids, expected.ids)
        np.testing.assert_array_equal(top.top_logprobs, expected.top_logprobs)
    assert wrapped.version == 7


def test_a_session_of_an_iteration_tells_when_its_engine_generated():
    engine, times = TableEngine(vocab=5, eos=0), []
    engine.load([("table", torch.zeros(25, 5))], version=0)
    wrapped = IterationEngine(engine, 1, OpenSessions(), None, lambda *pair: times.append(pair))
    for round_number in range(2):
        began = time.monotonic()
        found = draw(wrapped, {key: (np.array([1, 2]), Sampling(n=2, max_tokens=3)) for key in (3, 7)})
        assert [*found] == [3, 7] and len(times) == round_number + 1
        assert began <= times[-1][0] <= times[-1][1] <= time.monotonic()
    session = wrapped.session()
    session.close()
    assert [*session.answers()] == [], "OpenSessions closes what the wrapper holds"
