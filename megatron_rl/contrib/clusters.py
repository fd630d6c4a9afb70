"""Clusters similar texts, to measure how repetitive the questions of R-Zero's challenger are (arXiv 2508.05004).

The released code (Chengsong-Huang/R-Zero 5699329, examples/reward_function/caller_penalty.py) uses BLEU from nltk and
clusters from scikit-learn. The functions here return the same numbers, with one exception: if several pairs of clusters
have exactly the same distance, these functions may first join another pair than scikit-learn.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

ORDERS = (1, 2, 3, 4)  # lengths n of the n-grams used by BLEU
NONE_SHARED = 0.1  # replaces 0 as the number of shared n-grams of a length, as in nltk's SmoothingFunction().method1


def cluster_shares(texts: Sequence[str], distance: float) -> list[float]:
    """Returns, for each of [N] texts, the share of all texts that are in the same cluster, including the text itself:
    [N] numbers in (0, 1].

    Clusters are joined while the mean BLEU distance between their texts is below `distance` (average linkage).
    """
    labels = _clusters(bleu_distances(texts), distance)
    sizes = Counter(labels)
    return [sizes[label] / len(texts) for label in labels]


def bleu_distances(texts: Sequence[str]) -> np.ndarray:
    """Returns 1 - BLEU of each pair of texts: float64 [N, N], symmetric, 0 on the diagonal.

    In each pair, the text with the lower index is the hypothesis of BLEU, and the other text is the only reference.
    Words are separated by whitespace. A pair without a common word has distance 1, and so does any pair with an empty
    text.
    """
    words = [text.split() for text in texts]
    lengths = np.array([len(text_words) for text_words in words], np.float64)
    shared = [_shared_ngrams(words, order) for order in ORDERS]
    # for each n-gram order: the number of n-grams of each text, at least 1
    counted = [np.maximum(lengths - order + 1, 1.0) for order in ORDERS]
    logs = [
        np.log(np.where(matches > 0, matches, NONE_SHARED) / count[:, None])
        for matches, count in zip(shared, counted, strict=True)
    ]
    hypothesis, reference = np.maximum(lengths, 1.0)[:, None], lengths[None, :]
    brevity = np.where(hypothesis > reference, 0.0, 1.0 - reference / hypothesis)
    bleu = np.where(shared[0] > 0, np.exp(brevity + sum(logs) / len(ORDERS)), 0.0)
    later = np.triu(1.0 - bleu, k=1)
    return later + later.T


def _shared_ngrams(words: Sequence[Sequence[str]], order: int) -> np.ndarray:
    """Returns the number of n-grams that each pair of texts shares, [N, N]; the diagonal is not used. An n-gram that
    occurs a times in one text and b times in the other is counted min(a, b) times.
    """
    # n-gram -> [(index of a text, number of occurrences in the text)]
    places: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)
    for i, text_words in enumerate(words):
        for ngram, count in Counter(zip(*(text_words[k:] for k in range(order)), strict=False)).items():
            places[ngram].append((i, count))
    shared = np.zeros((len(words), len(words)))
    for occurrences in places.values():
        if len(occurrences) > 1:
            texts, counts = np.array(occurrences).T
            shared[np.ix_(texts, texts)] += np.minimum.outer(counts, counts)
    return shared


def _clusters(distances: np.ndarray, limit: float) -> list[int]:
    """Joins the two nearest clusters repeatedly while their distance is below `limit`. `distances`: [N, N] distances of
    the texts. Returns the cluster label of each text, [N].

    Uses the nearest-neighbour chain algorithm, which finds pairs of clusters that are each other's nearest neighbours.
    With average linkage, a joined cluster is never nearer to a third cluster than the nearer of its two parts was. So
    pairs of mutual nearest neighbours may be joined in any order, and a cluster that has no other cluster within the
    limit will never have one.
    """
    near, sizes, labels = distances.copy(), np.ones(len(distances)), np.arange(len(distances))
    np.fill_diagonal(near, np.inf)
    growing, chain = list(range(len(distances))), list[int]()
    while growing:
        tip = chain[-1] if chain else growing[0]
        chain = chain or [tip]
        nearest = int(near[tip].argmin())
        if not near[tip, nearest] < limit:
            growing.remove(tip)
            near[tip] = near[:, tip] = np.inf
            chain.pop()
        elif len(chain) > 1 and near[tip, chain[-2]] == near[tip, nearest]:
            neighbour = chain[-2]
            joined = (sizes[tip] * near[tip] + sizes[neighbour] * near[neighbour]) / (sizes[tip] + sizes[neighbour])
            near[tip] = near[:, tip] = joined
            near[neighbour] = near[:, neighbour] = np.inf
            sizes[tip] += sizes[neighbour]
            labels[labels == labels[neighbour]] = labels[tip]
            growing.remove(neighbour)
            chain.clear()
        else:
            chain.append(nearest)
    return labels.tolist()
