"""What every rollout engine must do, whatever it is: checks against transformers and against the words of engines/base.py.

Each check takes (engine, judge): an engine that holds the weights of the judge's model directory. `CHECKS` has them by name.
"""

from __future__ import annotations

import math
import random
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_rl.engines.base import Completion, Sampling
from megatron_rl.types import Stop

GREEDY = Sampling(max_tokens=24, temperature=0.0)
NEAR = 1e-4
CLOSE = 2e-3  # two tokens whose log-probs are nearer than this may change places between float32 implementations


class Judge:
    """transformers on a model directory."""

    def __init__(self, directory: Path, tokenizer: Any = None) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.vocab, self.context = self.model.config.vocab_size, self.model.config.max_position_embeddings
        ends = self.model.config.eos_token_id
        self.eos = set(ends if isinstance(ends, list) else [ends] if ends is not None else [])
        self.tokenizer = tokenizer
        if tokenizer is not None:
            self.eos.add(tokenizer.eos_token_id)

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[T, V]"""
        return self.model(torch.tensor([tokens])).logits[0].float()

    def logprobs(self, prompt: list[int], completion: Completion, temperature: float = 1.0) -> list[float]:
        every = (self.logits(prompt + completion.tokens)[len(prompt) - 1 : -1] / temperature).log_softmax(-1)
        return every.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0].tolist()

    def check_greedy(self, prompt: list[int], completion: Completion) -> None:
        """Every token is the likeliest one, and has the log-prob that transformers gives it."""
        every = self.logits(prompt + completion.tokens)[len(prompt) - 1 : -1].log_softmax(-1)
        taken = every.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        assert (every.max(dim=-1).values - taken).max() < CLOSE, (prompt[:5], completion.tokens)
        assert completion.logprobs == [0.0] * len(completion.tokens), "a greedy draw is from a point mass"
        if completion.model_logprobs is not None:
            assert completion.model_logprobs == pytest.approx(taken.tolist(), abs=NEAR)


def prompts(judge: Judge, lengths=(3, 50, 1, 17, 17, 8, 30, 200), seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    usable = [t for t in range(3, judge.vocab) if t not in judge.eos]
    return [[rng.choice(usable) for _ in range(n)] for n in lengths]


def greedy_equals_transformers(engine: Any, judge: Judge) -> None:
    some = prompts(judge)
    for prompt, group in zip(some, engine.generate(some, GREEDY), strict=True):
        [completion] = group
        judge.check_greedy(prompt, completion)
        assert completion.stop is (Stop.EOS if completion.tokens[-1] in judge.eos else Stop.LENGTH)


def greedy_with_several_samples_gives_them_all(engine: Any, judge: Judge) -> None:
    [group] = engine.generate(prompts(judge)[:1], Sampling(max_tokens=5, temperature=0.0, n=3))
    assert len(group) == 3 and all(c.tokens == group[0].tokens for c in group)


def sampled_logprobs_equal_transformers(engine: Any, judge: Judge) -> None:
    some = prompts(judge)
    for prompt, group in zip(some, engine.generate(some, Sampling(max_tokens=16, n=2, seed=4)), strict=True):
        assert len(group) == 2
        for completion in group:
            wanted = judge.logprobs(prompt, completion)
            assert completion.logprobs == pytest.approx(wanted, abs=NEAR)
            assert completion.model_logprobs == pytest.approx(wanted, abs=NEAR)


def logprobs_are_of_the_distribution_sampled_from(engine: Any, judge: Judge) -> None:
    some = prompts(judge)[:4]
    for prompt, [completion] in zip(
        some, engine.generate(some, Sampling(max_tokens=12, temperature=0.5, seed=1)), strict=True
    ):
        assert completion.logprobs == pytest.approx(judge.logprobs(prompt, completion, 0.5), abs=NEAR)
    [[one]] = engine.generate(some[:1], Sampling(max_tokens=8, top_k=1, seed=1))
    assert one.logprobs == pytest.approx([0.0] * len(one.tokens), abs=1e-6), "top_k = 1 leaves one token"


def truncation_keeps_what_it_should(engine: Any, judge: Judge) -> None:
    some = prompts(judge)[:3]
    for prompt, group in zip(some, engine.generate(some, Sampling(max_tokens=8, top_k=3, n=4, seed=2)), strict=True):
        for c in group:
            every = judge.logits(prompt + c.tokens)[len(prompt) - 1 : -1]
            third = every.topk(3).values[:, -1]
            assert (every.gather(1, torch.tensor(c.tokens)[:, None])[:, 0] >= third - CLOSE).all()


def draws_differ_by_sample_prompt_and_seed_and_repeat(engine: Any, judge: Judge) -> None:
    same = prompts(judge)[:1] * 2
    sampling = Sampling(max_tokens=12, n=3, seed=8)
    first = [c.tokens for group in engine.generate(same, sampling) for c in group]
    assert len({tuple(t) for t in first}) > 3, "samples of a prompt, and of its copy, are drawn apart"
    assert [c.tokens for group in engine.generate(same, sampling) for c in group] == first
    other = [c.tokens for group in engine.generate(same, Sampling(max_tokens=12, n=3, seed=9)) for c in group]
    assert other != first


def sampling_follows_the_model(engine: Any, judge: Judge) -> None:
    """400 first tokens against the model's own probabilities: total variation near what so many draws give."""
    [prompt] = prompts(judge, lengths=(6,))
    [group] = engine.generate([prompt], Sampling(max_tokens=1, n=200, seed=21))
    [more] = engine.generate([prompt], Sampling(max_tokens=1, n=200, seed=22))
    drawn = torch.bincount(torch.tensor([c.tokens[0] for c in group + more]), minlength=judge.vocab).float() / 400
    true = judge.logits(prompt)[-1].softmax(-1)
    expected = float((2 * true * (1 - true) / (math.pi * 400)).sqrt().sum() / 2)
    assert 0.5 * float((drawn - true).abs().sum()) < 1.5 * expected


def many_long_prompts_at_once_are_all_answered(engine: Any, judge: Judge) -> None:
    """More prompt tokens than an engine takes in one step."""
    some = prompts(judge, lengths=(200,) * 40, seed=3)
    for prompt, group in zip(some, engine.generate(some, Sampling(max_tokens=3, n=2, seed=7)), strict=True):
        for c in group:
            assert c.logprobs == pytest.approx(judge.logprobs(prompt, c), abs=NEAR)


def stop_tokens_end_a_completion_and_stay(engine: Any, judge: Judge) -> None:
    stops = tuple(t for t in range(3, judge.vocab, 3) if t not in judge.eos)
    ended = 0
    for group in engine.generate(prompts(judge), Sampling(max_tokens=40, stop_tokens=stops, n=2, seed=6)):
        for c in group:
            assert not set(c.tokens[:-1]) & (set(stops) | judge.eos)
            wanted = Stop.STOP if c.tokens[-1] in stops else Stop.EOS if c.tokens[-1] in judge.eos else Stop.LENGTH
            assert c.stop is wanted
            ended += c.stop is Stop.STOP
    assert ended


def stop_strings_end_with_the_token_that_completed_them(engine: Any, judge: Judge) -> None:
    if judge.tokenizer is None:
        return
    some = prompts(judge)
    free = [c.tokens for [c] in engine.generate(some, Sampling(max_tokens=30, seed=5))]
    text = judge.tokenizer.decode(max(free, key=len)[2:4], skip_special_tokens=False)  # of one that did not end there
    for prompt, [c] in zip(
        some, engine.generate(some, Sampling(max_tokens=30, seed=5, stop_strings=(text,))), strict=True
    ):
        whole = judge.tokenizer.decode(c.tokens, skip_special_tokens=False)
        before = judge.tokenizer.decode(c.tokens[:-1], skip_special_tokens=False)
        assert (text in whole) == (c.stop is Stop.STOP) and text not in before, (prompt[:4], whole)


def the_context_is_an_end(engine: Any, judge: Judge) -> None:
    nearly, full = prompts(judge, lengths=(judge.context - 4, judge.context))
    [[a], [b]] = engine.generate([nearly, full], Sampling(max_tokens=40, temperature=0.0))
    assert a.stop in (Stop.LENGTH, Stop.EOS) and len(a.tokens) <= 4
    assert b.stop is Stop.LENGTH and b.tokens == []


def nonsense_is_refused(engine: Any, judge: Judge) -> None:
    for prompt, sampling in (
        ([judge.vocab + 5], GREEDY),
        ([], GREEDY),
        ([5], Sampling(max_tokens=3, top_p=0.0)),
        ([5], Sampling(max_tokens=3, temperature=-1.0)),
    ):
        with pytest.raises(ValueError):
            engine.generate([prompt], sampling)


CHECKS = {
    check.__name__: check
    for check in (
        greedy_equals_transformers,
        greedy_with_several_samples_gives_them_all,
        sampled_logprobs_equal_transformers,
        logprobs_are_of_the_distribution_sampled_from,
        truncation_keeps_what_it_should,
        draws_differ_by_sample_prompt_and_seed_and_repeat,
        sampling_follows_the_model,
        many_long_prompts_at_once_are_all_answered,
        stop_tokens_end_a_completion_and_stay,
        stop_strings_end_with_the_token_that_completed_them,
        the_context_is_an_end,
        nonsense_is_refused,
    )
}


def run_all(engine: Any, judge: Judge) -> dict[str, str | None]:
    """Check -> None, or how it failed."""
    out: dict[str, str | None] = {}
    for name, check in CHECKS.items():
        try:
            check(engine, judge)
            out[name] = None
        except BaseException:
            out[name] = traceback.format_exc()
    return out
