"""Estimators of evaluations: derived values, brute force on small cases, and properties that hold for any input."""

import itertools
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.evaluation import statistics as est
from megatron_rl.evaluation.confusion import Confusion, confusion, step_confusion


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [(8, 2, 1, 0.2500), (8, 2, 4, 0.7857), (32, 3, 16, 0.8871), (4, 1, 4, 1.0), (8, 0, 8, 0.0)],
)
def test_pass_at_k_vectors(n, c, k, expected):
    assert est.pass_at_k(n, c, k) == pytest.approx(expected, abs=5e-5)


def test_pass_at_k_is_that_of_the_published_estimator():
    """1 - prod(1 - k / i) over i from n - c + 1 to n, as HumanEval's evaluation computes it (arXiv 2107.03374)."""
    for n in range(1, 33):
        for c in range(n + 1):
            for k in range(1, n + 1):
                theirs = 1.0 if n - c < k else 1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1))
                assert est.pass_at_k(n, c, k) == pytest.approx(theirs, abs=1e-12)


@settings(deadline=None)
@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(numbers):
    n, c, k = numbers
    subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
    assert est.pass_at_k(n, c, k) == pytest.approx(fmean(float(any(s)) for s in subsets))


@settings(deadline=None)
@given(st.integers(1, 200), st.data())
def test_pass_at_k_rises_with_k_and_with_right_samples(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    value = est.pass_at_k(n, c, k)
    assert 0.0 <= value <= 1.0
    assert est.pass_at_k(n, c, 1) == pytest.approx(c / n)
    assert k == n or est.pass_at_k(n, c, k + 1) >= value - 1e-12
    assert c == n or est.pass_at_k(n, c + 1, k) >= value - 1e-12


@pytest.mark.parametrize("numbers", [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_refuses_what_has_no_meaning(numbers):
    with pytest.raises(ValueError, match="k must lie in 1..n"):
        est.pass_at_k(*numbers)


def test_majority_takes_the_most_frequent_answer_and_shares_ties():
    assert est.majority(["a", "b", "a"], [1.0, 0.0, 1.0]) == 1.0
    assert est.majority(["a", "b"], [1.0, 0.0]) == 0.5
    assert est.majority([None, None, "b"], [0.0, 0.0, 1.0]) == 1.0, "no answer has no vote"
    assert est.majority([None], [0.0]) == 0.0 and est.majority([], []) == 0.0


def test_the_verifier_decides_best_of_n_and_weighted_votes():
    assert est.best_of_n([0.0, 1.0, 0.0], [0.2, 0.9, 0.4]) == 1.0
    assert est.best_of_n([0.0, 1.0], [0.5, 0.5]) == 0.5 and est.best_of_n([], []) == 0.0
    assert est.weighted_vote(["a", "b", "b"], [1.0, 0.0, 0.0], [0.9, 0.2, 0.2]) == 1.0
    assert est.weighted_vote(["a", "b"], [1.0, 0.0], [0.0, 0.0]) == 0.0


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from([None, "a", "b", "c"]), st.booleans()), min_size=1), st.randoms())
def test_votes_do_not_depend_on_order_and_agree_with_equal_weights(samples, random):
    keys, scores = [k for k, _ in samples], [float(s) for _, s in samples]
    shuffled = list(samples)
    random.shuffle(shuffled)
    again = est.majority([k for k, _ in shuffled], [float(s) for _, s in shuffled])
    assert est.majority(keys, scores) == pytest.approx(again)
    assert est.majority(keys, scores) == pytest.approx(est.weighted_vote(keys, scores, [0.3] * len(keys)))
    assert est.best_of_n(scores, [1.0] * len(keys)) == pytest.approx(fmean(scores))


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_intervals_hold_their_mean_and_are_repeatable(values):
    found = est.mean_interval(values, resamples=200)
    assert found.low - 1e-9 <= found.value <= found.high + 1e-9 or len(set(values)) > 1
    assert min(values) - 1e-9 <= found.low <= found.high <= max(values) + 1e-9
    assert found == est.mean_interval(values, resamples=200)


def test_the_interval_is_that_of_the_normal_approximation_for_many_problems():
    rng = np.random.default_rng(1)
    values = (rng.random(900) < 0.4).astype(float)
    found = est.mean_interval(values.tolist())
    wide = 1.96 * values.std() / 30
    assert found.value == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - wide, abs=0.01) and found.high == pytest.approx(
        values.mean() + wide, abs=0.01
    )


def test_the_macro_mean_weighs_sets_equally():
    found = est.macro_interval([[1.0] * 100, [0.0]])
    assert (found.value, found.low, found.high) == (0.5, 0.5, 0.5)


def test_a_statistic_that_is_not_defined_gives_none():
    assert est.bootstrap(0, lambda rows: 1.0) is None and est.bootstrap(3, lambda rows: None) is None
    found = est.bootstrap(4, lambda rows: float((rows == 0).any()), resamples=100)
    assert found is not None and found.value == 1.0 and found.low == 0.0


def test_paired_tests_on_a_worked_example():
    first = dict.fromkeys("abcdefghij", 0.0) | {"x": 1.0, "other": 1.0}
    second = dict.fromkeys("abcdefgh", 1.0) | {"i": 0.0, "j": 0.0, "x": 0.0}
    found = est.paired(first, second)
    assert (found.problems, found.better, found.worse) == (11, 8, 1)
    assert found.difference.value == pytest.approx(7 / 11)
    assert found.p_mcnemar == pytest.approx(2 * (1 + 9) / 2**9)
    assert found.p_permutation == pytest.approx(found.p_mcnemar), "with 0/1 scores the sign-flip test is McNemar's"
    with pytest.raises(ValueError, match="no problem in common"):
        est.paired({"a": 1.0}, {"b": 1.0})


def test_equal_models_are_not_different():
    found = est.paired({"a": 0.25, "b": 1.0}, {"a": 0.25, "b": 1.0})
    assert found.p_permutation == 1.0 and found.p_mcnemar is None and found.difference.value == 0.0


def test_many_differences_are_tested_by_drawn_signs():
    rng = np.random.default_rng(0)
    assert est.sign_flip(rng.normal(0.0, 1.0, 200)) > 0.05
    assert est.sign_flip(rng.normal(0.5, 1.0, 200)) < 0.001


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1))
def test_calibration_counts_every_prediction_once(rows):
    found = est.calibration([c for c, _ in rows], [t for _, t in rows])
    assert found is not None and sum(b.count for b in found.bins) == len(rows)
    assert 0.0 <= found.ece <= 1.0 and 0.0 <= found.brier <= 1.0


def test_a_confidence_that_is_kept_is_calibrated():
    found = est.calibration([0.75] * 4, [True, True, True, False])
    assert found is not None and found.ece == pytest.approx(0.0) and found.brier == pytest.approx(0.1875)
    wrong = est.calibration([1.0, 1.0], [False, False])
    assert wrong is not None and wrong.ece == 1.0 and wrong.brier == 1.0
    assert est.calibration([], []) is None


def test_f1_is_the_harmonic_mean_of_the_class_accuracies():
    counts = confusion([(True, True), (True, False), (False, False), (None, False), (None, True), (True, True)])
    assert counts == Confusion(tp=2, fp=1, tn=2, fn=1) and counts.f1 == pytest.approx(2 / 3)
    assert confusion([(False, True), (True, False)]).f1 == 0.0 and confusion([(True, True)]).f1 is None
    assert step_confusion([[True, False], [True]], [[True, True], [True, True]]) == Confusion(
        tp=1, fn=1
    )  # the second is not aligned
