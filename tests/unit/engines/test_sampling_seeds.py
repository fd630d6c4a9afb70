"""Draws follow the distribution that is named, and nothing but (seed, prompt, sample, position) decides them."""

import math

import pytest
import torch

from megatron_rl.engines.embedded.token_sampling import draw, processed, uniforms
from megatron_rl.engines.protocol import Sampling
from megatron_rl.engines.sampling_seeds import check, stream_key

DRAWS = 20_000
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0])


def draws(sampling, *, over="positions"):
    """DRAWS tokens from LOGITS, of one row at many positions or of many rows at one position."""
    logits = LOGITS.expand(DRAWS, -1)
    if over == "positions":
        keys, positions = torch.full((DRAWS,), stream_key(sampling.seed, 0, 0)), torch.arange(DRAWS)
    else:
        keys = torch.tensor([stream_key(sampling.seed, i // 8, i % 8) for i in range(DRAWS)])
        positions = torch.full((DRAWS,), 11)
    return draw(logits, sampling, keys, positions)


def chi_square(tokens, probabilities):
    """Returns chi-square in standard deviations above its mean."""
    kept = probabilities > 0
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    assert counts[~kept].sum() == 0, "a token that was cut is drawn"
    expected = probabilities[kept].double() * len(tokens)
    freedom = int(kept.sum()) - 1
    return (((counts[kept] - expected) ** 2 / expected).sum().item() - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("over", ["positions", "rows"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.5, "top_k": 5, "top_p": 0.9},
    ],
    ids=str,
)
def test_draws_follow_the_distribution_by_chi_square(settings, over):
    sampling = Sampling(max_tokens=1, seed=5, **settings)
    tokens, logprobs, model_logprobs, *_ = draws(sampling, over=over)
    wanted = processed(LOGITS[None], sampling)[0]
    assert chi_square(tokens, wanted.exp()) < 4
    torch.testing.assert_close(logprobs, wanted[tokens])
    torch.testing.assert_close(model_logprobs, LOGITS.log_softmax(-1)[tokens])


def test_a_wrong_distribution_fails_the_chi_square():
    tokens, *_ = draws(Sampling(max_tokens=1))
    assert chi_square(tokens, (LOGITS * 1.05).softmax(-1)) > 4


def test_truncation_keeps_what_it_says():
    p = LOGITS.softmax(-1)  # sorted: .50 .18 .11 .07 .04 .02 .003

    def kept(**settings):
        return int(processed(LOGITS[None], Sampling(max_tokens=1, **settings)).isfinite().sum())

    assert kept(top_k=3) == 3
    assert kept(top_k=99) == len(p)
    assert kept(top_p=float(p[0]) + 0.01) == 2  # the fewest whose sum reaches top_p
    assert kept(top_p=1e-6) == 1
    assert kept(min_p=0.2) == int((p >= 0.2 * p[0]).sum())
    assert kept(min_p=1.0) == 1
    cut = processed(LOGITS[None], Sampling(max_tokens=1, temperature=0.7, top_k=4, top_p=0.9, min_p=0.05))
    torch.testing.assert_close(cut.exp().sum(), torch.tensor(1.0))


def test_greedy_takes_the_largest_and_is_certain():
    tokens, logprobs, model_logprobs, *_ = draw(
        LOGITS[None], Sampling(max_tokens=1, temperature=0.0), torch.tensor([1]), torch.tensor([1])
    )
    assert tokens.tolist() == [0] and logprobs.tolist() == [0.0]
    torch.testing.assert_close(model_logprobs, LOGITS.log_softmax(-1)[:1])


def test_streams_are_uniform_and_not_correlated():
    keys = torch.tensor([stream_key(3, i, j) for i in range(100) for j in range(10)])
    table = torch.stack([uniforms(keys, torch.full_like(keys, position)) for position in range(40)])  # [40, 1000]
    assert table.min() >= 0 and table.max() < 1
    assert chi_square((table.flatten() * 64).long(), torch.full((64,), 1 / 64)) < 4
    centred = table - 0.5
    for one, other in (
        (centred[1:], centred[:-1]),
        (centred[:, 1:], centred[:, :-1]),
        (centred[:, 10:], centred[:, :-10]),
    ):
        correlation = (one * other).mean() * 12
        assert abs(correlation) < 4 / math.sqrt(one.numel())
    assert len(set(table.flatten().tolist())) == table.numel()


def test_a_stream_is_named_by_seed_prompt_and_sample():
    keys = [stream_key(seed, i, j) for seed in (-1, 0, 1, 2**63) for i in range(20) for j in range(20)]
    assert len(set(keys)) == len(keys)
    assert stream_key(1, 2, 3) == stream_key(1, 2, 3)
    # The first outputs of splitmix64 from state 1234567, as published with the reference code.
    state = torch.tensor([1234567])
    wanted = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [int(uniforms(state, torch.tensor([n])) * 2**53) for n in (1, 2, 3)] == [w >> 11 for w in wanted]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 2.0),
        ("n", 0),
    ],
)
def test_impossible_settings_are_refused_by_name_and_value(name, value):
    with pytest.raises(ValueError, match=rf"sampling\.{name} = {value}: give"):
        check(Sampling(**{"max_tokens": 8, name: value}))


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty string"):
        check(Sampling(max_tokens=8, stop_strings=("x", "")))
