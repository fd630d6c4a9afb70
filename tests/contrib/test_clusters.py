"""BLEU distances and clusters against their definitions by plain loops, and against nltk and scikit-learn."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.contrib.clusters import bleu_distances, cluster_shares

RECORDED = Path(__file__).parents[1] / "golden" / "bleu_clusters.json"


def bleu(hypothesis, reference):
    """Papineni et al. 2002 with one reference; 0.1 in the place of 0 shared n-grams, and 0 where no word is shared."""
    if not hypothesis:
        return 0.0
    logs = []
    for n in range(1, 5):
        own = Counter(tuple(hypothesis[i : i + n]) for i in range(len(hypothesis) - n + 1))
        other = Counter(tuple(reference[i : i + n]) for i in range(len(reference) - n + 1))
        shared = sum(min(count, other[ngram]) for ngram, count in own.items())
        if n == 1 and shared == 0:
            return 0.0
        logs.append(math.log((shared or 0.1) / max(1, sum(own.values()))))
    brevity = 1.0 if len(hypothesis) > len(reference) else math.exp(1 - len(reference) / len(hypothesis))
    return brevity * math.exp(sum(logs) / 4)


def clustered(distances, limit):
    """Joins the nearest two clusters, by the mean of all distances between them, until none are below the limit."""
    clusters = [[i] for i in range(len(distances))]
    while len(clusters) > 1:
        pairs = itertools.combinations(range(len(clusters)), 2)
        mean = {(a, b): np.mean([distances[i][j] for i in clusters[a] for j in clusters[b]]) for a, b in pairs}
        (a, b), least = min(mean.items(), key=lambda item: item[1])
        if least >= limit:
            break
        clusters[a] += clusters.pop(b)
    return clusters


def texts_of(seed, count=24):
    rng = random.Random(seed)
    kinds = [[rng.choice("abcdefghijklmnop") for _ in range(rng.randint(3, 14))] for _ in range(5)]
    out = []
    for _ in range(count):
        words = list(rng.choice(kinds))
        for _ in range(rng.randint(0, 6)):
            words[rng.randrange(len(words))] = rng.choice("abcdefghijklmnopqrstuvwxyz")
        out.append(" ".join(words[: rng.randint(1, len(words))] if rng.random() < 0.3 else words))
    return [*out, "", "", "x", out[0]]


@pytest.mark.parametrize("seed", range(4))
def test_distances_and_clusters_are_those_of_their_definition(seed):
    texts = texts_of(seed)
    words = [text.split() for text in texts]
    found = bleu_distances(texts)
    assert found.shape == (28, 28) and (found == found.T).all() and not found.diagonal().any()
    for i, j in itertools.combinations(range(len(texts)), 2):
        assert found[i, j] == pytest.approx(1 - bleu(words[i], words[j]), abs=1e-12)
    for limit in (0.2, 0.5, 0.8):
        shares = [0.0] * len(texts)
        for cluster in clustered(found, limit):
            for i in cluster:
                shares[i] = len(cluster) / len(texts)
        assert cluster_shares(texts, limit) == pytest.approx(shares)
    assert len(set(cluster_shares(texts, 0.5))) > 1


def test_the_released_codes_numbers():
    """nltk 3.9.1 and scikit-learn 1.7.0, called as R-Zero's caller_penalty.py does."""
    for case in json.loads(RECORDED.read_text()):
        found = bleu_distances(case["texts"])
        assert found[np.triu_indices(len(found), 1)] == pytest.approx(case["distances"], abs=1e-12)
        assert cluster_shares(case["texts"], 0.5) == pytest.approx(case["shares"])


def test_texts_that_are_all_alike_or_all_different():
    assert cluster_shares(["a b c d e"] * 5, 0.5) == [1.0] * 5
    assert cluster_shares(["a b", "c d", "e f", ""], 0.5) == [0.25] * 4
    assert cluster_shares([], 0.5) == []
