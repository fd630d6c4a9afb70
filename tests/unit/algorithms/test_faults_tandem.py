"""The senior's share of a tandem's tokens, as each strategy gives it to texts of the lengths at hand."""

import numpy as np
import pytest

from megatron_rl.algorithms.tandem_authors import Rule, replay
from megatron_rl.engines.protocol import EngineError, TandemSampling
from megatron_rl.training.rollouts import check_senior_share
from megatron_rl.types import NO_VERSION, Author, Rollout, spans_of

RULES = {
    "chunk": Rule(strategy="chunk"),  # 16 of the first 23 tokens are the senior's
    "alternating": Rule(strategy="alternating"),
    "bernoulli": Rule(strategy="bernoulli", p=0.8),
    "word": Rule(strategy="word"),
    "sentence": Rule(strategy="sentence"),
}


def texts(rule, lengths, *, invert=False, opens=frozenset({7})):
    """Rollouts of [S] texts whose authors are the rule's; `invert`: each other's."""
    rollouts = []
    for key, length in enumerate(lengths):
        tokens = np.random.default_rng(key).integers(1, 12, length)
        senior = replay(rule, opens, key, tokens) != invert
        parts = [(1, Author.POLICY if own else Author.PARTNER, 0 if own else NO_VERSION) for own in senior]
        rollouts.append(
            Rollout(role="g", group="g", tokens=tokens, logprobs=np.zeros(length), spans=spans_of(*parts))
        )  # fmt: skip
    return rollouts


@pytest.mark.parametrize("lengths", [[23] * 8, [22, 23, 23, 21], [3], [1, 1], [16, 16], [40, 5, 64], [500] * 4])
@pytest.mark.parametrize("name", RULES)
def test_cases_a_strategy_may_write_short_texts(name, lengths):
    """chunk: 16 of 23 tokens are the senior's by design, and the run stopped at a share of 0.71."""
    rule = RULES[name]
    check_senior_share(texts(rule, lengths), TandemSampling(rule=rule))
    if name in ("chunk", "alternating"):
        found = texts(rule, lengths)
        counted = sum(r.num_trainable for r in found) / sum(lengths)
        assert rule.senior_share(np.array(lengths)) == (pytest.approx(counted), 0.0)


@pytest.mark.parametrize("name", ["chunk", "bernoulli"])
def test_faults_a_mask_of_the_other_author_stops_the_run(name):
    rule = RULES[name]
    with pytest.raises(EngineError, match=f"not 0.[678].* which the strategy {name} gives texts of these lengths"):
        check_senior_share(texts(rule, [23] * 8, invert=True), TandemSampling(rule=rule))
    check_senior_share([], TandemSampling(rule=rule))
