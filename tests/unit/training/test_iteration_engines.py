"""The engine that the rollouts of one iteration see answers as the engine that it wraps."""

import numpy as np
import torch
from fake_engines import TableEngine

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
