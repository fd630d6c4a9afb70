"""Checks that every rollout engine must pass, whatever it is: against transformers and against the words of
engines/protocol.py.

Each check takes (engine, judge): an engine that holds the weights of the judge's model directory. `CHECKS` has them by
name.
"""

from __future__ import annotations

import math
import random
import threading
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_rl.engines.protocol import Completion, Engine, EngineError, Sampling, TopScores, complete
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

    def drawn_from(self, prompt: list[int], completion: Completion) -> torch.Tensor:
        """Returns the logits that each token of the completion was drawn from, [T, V]."""
        return self.logits([*prompt, *completion.tokens.tolist()])[len(prompt) - 1 : -1]

    def logprobs(self, prompt: list[int], completion: Completion, temperature: float = 1.0) -> np.ndarray:
        every = (self.drawn_from(prompt, completion) / temperature).log_softmax(-1)
        return _of(every, completion).numpy()

    def scores(self, tokens: list[int]) -> np.ndarray:
        """Returns the log-prob of every token given those before it, 0 for the first."""
        every = self.logits(tokens)[:-1].log_softmax(-1)
        return np.append(0.0, every.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()).astype(np.float32)

    def check_top(self, tokens: list[int], top: TopScores, k: int) -> None:
        """The k likeliest tokens at every place but the first, in order, with the log-probs that transformers gives."""
        assert (top.ids.dtype, top.top_logprobs.dtype) == (np.int32, np.float32)
        assert top.ids.shape == top.top_logprobs.shape == (len(tokens), k)
        assert not top.ids[0].any() and not top.top_logprobs[0].any()
        every = self.logits(tokens)[:-1].log_softmax(-1)
        top_logprobs = every.gather(1, torch.from_numpy(top.ids[1:]).long()).numpy()
        assert top.top_logprobs[1:] == pytest.approx(top_logprobs, abs=NEAR)
        assert top_logprobs == pytest.approx(every.topk(k).values.numpy(), abs=CLOSE)
        assert all(len(set(ids)) == k for ids in top.ids[1:].tolist())

    def check_greedy(self, prompt: list[int], completion: Completion) -> None:
        """Every token is the likeliest one, and has the log-prob that transformers gives it."""
        every = self.drawn_from(prompt, completion).log_softmax(-1)
        taken = _of(every, completion)
        assert (every.max(dim=-1).values - taken).max() < CLOSE, (prompt[:5], completion.tokens)
        assert not completion.logprobs.any(), "a greedy draw is from a point mass"
        if completion.model_logprobs is not None:
            assert completion.model_logprobs == pytest.approx(taken.numpy(), abs=NEAR)


def _of(every: torch.Tensor, completion: Completion) -> torch.Tensor:
    """[T, V] -> [T], the values of the completion's tokens."""
    return every.gather(1, torch.tensor(completion.tokens, dtype=torch.int64)[:, None])[:, 0]


def prompts(judge: Judge, lengths=(3, 50, 1, 17, 17, 8, 30, 200), seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    usable = [t for t in range(3, judge.vocab) if t not in judge.eos]
    return [[rng.choice(usable) for _ in range(n)] for n in lengths]


def texts(groups: list[list[Completion]]) -> list[list[int]]:
    """Returns the tokens of all completions, one after the other."""
    return [completion.tokens.tolist() for group in groups for completion in group]


def greedy_equals_transformers(engine: Engine, judge: Judge) -> None:
    some = prompts(judge)
    for prompt, group in zip(some, complete(engine, some, GREEDY), strict=True):
        [completion] = group
        judge.check_greedy(prompt, completion)
        assert completion.stop is (Stop.EOS if completion.tokens[-1] in judge.eos else Stop.LENGTH)


def greedy_with_several_samples_gives_them_all(engine: Engine, judge: Judge) -> None:
    [group] = complete(engine, prompts(judge)[:1], Sampling(max_tokens=5, temperature=0.0, n=3))
    assert len(group) == 3 and all(np.array_equal(c.tokens, group[0].tokens) for c in group)


def sampled_logprobs_equal_transformers(engine: Engine, judge: Judge) -> None:
    some = prompts(judge)
    for prompt, group in zip(some, complete(engine, some, Sampling(max_tokens=16, n=2, seed=4)), strict=True):
        assert len(group) == 2
        for completion in group:
            expected = judge.logprobs(prompt, completion)
            assert completion.logprobs == pytest.approx(expected, abs=NEAR)
            assert completion.model_logprobs == pytest.approx(expected, abs=NEAR)


def logprobs_are_of_the_distribution_sampled_from(engine: Engine, judge: Judge) -> None:
    some = prompts(judge)[:4]
    for prompt, [completion] in zip(
        some, complete(engine, some, Sampling(max_tokens=12, temperature=0.5, seed=1)), strict=True
    ):
        assert completion.logprobs == pytest.approx(judge.logprobs(prompt, completion, 0.5), abs=NEAR)
    [[single]] = complete(engine, some[:1], Sampling(max_tokens=8, top_k=1, seed=1))
    assert np.abs(single.logprobs).max() < 1e-6, "top_k = 1 leaves one token"


def truncation_keeps_what_it_should(engine: Engine, judge: Judge) -> None:
    some = prompts(judge)[:3]
    for prompt, group in zip(some, complete(engine, some, Sampling(max_tokens=8, top_k=3, n=4, seed=2)), strict=True):
        for c in group:
            every = judge.drawn_from(prompt, c)
            third = every.topk(3).values[:, -1]
            assert (_of(every, c) >= third - CLOSE).all()


def draws_differ_by_sample_prompt_and_seed_and_repeat(engine: Engine, judge: Judge) -> None:
    same = prompts(judge)[:1] * 2
    sampling = Sampling(max_tokens=12, n=3, seed=8)
    first = texts(complete(engine, same, sampling))
    assert len({tuple(t) for t in first}) > 3, "samples of a prompt, and of its copy, are drawn apart"
    assert texts(complete(engine, same, sampling)) == first
    assert texts(complete(engine, same, Sampling(max_tokens=12, n=3, seed=9))) != first


def sampling_follows_the_model(engine: Engine, judge: Judge) -> None:
    """400 first tokens against the model's own probabilities: total variation near what so many draws give."""
    [prompt] = prompts(judge, lengths=(6,))
    [group] = complete(engine, [prompt], Sampling(max_tokens=1, n=200, seed=21))
    [more] = complete(engine, [prompt], Sampling(max_tokens=1, n=200, seed=22))
    drawn = torch.bincount(torch.tensor([c.tokens[0] for c in group + more]), minlength=judge.vocab).float() / 400
    true = judge.logits(prompt)[-1].softmax(-1)
    expected = float((2 * true * (1 - true) / (math.pi * 400)).sqrt().sum() / 2)
    assert 0.5 * float((drawn - true).abs().sum()) < 1.5 * expected


def many_long_prompts_at_once_are_all_answered(engine: Engine, judge: Judge) -> None:
    """More prompt tokens than an engine takes in one step."""
    some = prompts(judge, lengths=(200,) * 40, seed=3)
    for prompt, group in zip(some, complete(engine, some, Sampling(max_tokens=3, n=2, seed=7)), strict=True):
        for c in group:
            assert c.logprobs == pytest.approx(judge.logprobs(prompt, c), abs=NEAR)


def stop_tokens_end_a_completion_and_stay(engine: Engine, judge: Judge) -> None:
    stops = tuple(t for t in range(3, judge.vocab, 3) if t not in judge.eos)
    ended = 0
    for group in complete(engine, prompts(judge), Sampling(max_tokens=40, stop_tokens=stops, n=2, seed=6)):
        for c in group:
            assert not set(c.tokens[:-1].tolist()) & (set(stops) | judge.eos)
            expected = Stop.STOP if c.tokens[-1] in stops else Stop.EOS if c.tokens[-1] in judge.eos else Stop.LENGTH
            assert c.stop is expected
            ended += c.stop is Stop.STOP
    assert ended


def stop_strings_end_with_the_token_that_completed_them(engine: Engine, judge: Judge) -> None:
    if judge.tokenizer is None:
        return
    some = prompts(judge)
    free = texts(complete(engine, some, Sampling(max_tokens=30, seed=5)))
    text = judge.tokenizer.decode(max(free, key=len)[2:4], skip_special_tokens=False)  # of one that did not end there
    for prompt, [c] in zip(
        some, complete(engine, some, Sampling(max_tokens=30, seed=5, stop_strings=(text,))), strict=True
    ):
        text_now = judge.tokenizer.decode(c.tokens, skip_special_tokens=False)
        text_before = judge.tokenizer.decode(c.tokens[:-1], skip_special_tokens=False)
        assert (text in text_now) == (c.stop is Stop.STOP) and text not in text_before, (prompt[:4], text_now)


def the_context_is_an_end(engine: Engine, judge: Judge) -> None:
    nearly, full = prompts(judge, lengths=(judge.context - 4, judge.context))
    [[a], [b]] = complete(engine, [nearly, full], Sampling(max_tokens=40, temperature=0.0))
    assert a.stop in (Stop.LENGTH, Stop.EOS) and len(a.tokens) <= 4
    assert b.stop is Stop.LENGTH and len(b.tokens) == len(b.logprobs) == 0


def nonsense_is_refused(engine: Engine, judge: Judge) -> None:
    for prompt, sampling in (
        ([judge.vocab + 5], GREEDY),
        ([], GREEDY),
        ([5], Sampling(max_tokens=3, top_p=0.0)),
        ([5], Sampling(max_tokens=3, temperature=-1.0)),
    ):
        with pytest.raises(ValueError):
            complete(engine, [prompt], sampling)


def arrays_have_their_types(engine: Engine, judge: Judge) -> None:
    [[c]] = complete(engine, prompts(judge)[:1], Sampling(max_tokens=5))
    assert (c.tokens.dtype, c.logprobs.dtype) == (np.int32, np.float32) and c.tokens.shape == c.logprobs.shape
    assert c.model_logprobs is None or c.model_logprobs.dtype == np.float32


def every_ask_has_its_own_sampling_and_key(engine: Engine, judge: Judge) -> None:
    short, long = prompts(judge)[1], prompts(judge)[3]
    sampling = Sampling(max_tokens=9, n=2, seed=11)
    session = engine.session()
    session.ask(-4, short, GREEDY)
    session.ask(1 << 40, long, sampling)
    session.ask(7, long, sampling)
    answers = dict(session.answers())
    session.close()
    assert {key: len(group) for key, group in answers.items()} == {-4: 1, 1 << 40: 2, 7: 2}
    judge.check_greedy(short, answers[-4][0])
    assert texts([answers[7]]) != texts([answers[1 << 40]])


def draws_do_not_depend_on_other_draws(engine: Engine, judge: Judge) -> None:
    """The draws of a key are the same whether its request is alone or one of several."""
    sampling = Sampling(max_tokens=9, n=2, seed=11)
    _check_alone(engine, 7, [(key, prompts(judge)[3], sampling) for key in (-4, 1 << 40, 7)])


def draws_do_not_depend_on_greedy_requests(engine: Engine, judge: Judge) -> None:
    greedy, drawn = (-4, prompts(judge)[1], GREEDY), (7, prompts(judge)[3], Sampling(max_tokens=9, n=2, seed=11))
    _check_alone(engine, 7, [greedy, drawn])


def _check_alone(engine: Engine, key: int, asks: list[tuple[int, list[int], Sampling]]) -> None:
    """The completions of `key` are the same with all requests as with this request alone."""
    texts_of = []
    for some in (asks, [ask for ask in asks if ask[0] == key]):
        session = engine.session()
        for ask in some:
            session.ask(*ask)
        texts_of.append(texts([dict(session.answers())[key]]))
        session.close()
    assert texts_of[0] == texts_of[1]


def more_may_be_asked_while_answers_are_read(engine: Engine, judge: Judge) -> None:
    """A conversation of three turns, each asked when the one before it is answered, and a fourth when all had ended."""
    session, conversations = engine.session(), {0: prompts(judge)[0]}
    session.ask(0, conversations[0], GREEDY)
    for key, [completion] in session.answers():
        if key < 2:
            conversations[key + 1] = [*conversations[key], *completion.tokens.tolist(), 5]
            session.ask(key + 1, conversations[key + 1], GREEDY, after=key)
        judge.check_greedy(conversations[key], completion)
    assert len(conversations) == 3
    assert list(session.answers()) == []
    session.ask(3, conversations[0], GREEDY, after=0)
    assert [key for key, _ in session.answers()] == [3]
    with pytest.raises(ValueError):
        session.ask(0, conversations[0], GREEDY)
    session.close()


def answers_wait_for_those_who_may_ask(engine: Engine, judge: Judge) -> None:
    """Another thread asks while this one reads; it begins to when the first answer is in."""
    session, some, first = engine.session(), prompts(judge), threading.Event()

    block = session.asking()
    block.__enter__()  # before the reader begins: it must not find the session idle
    session.ask(0, some[0], GREEDY)

    def asker() -> None:
        try:
            assert first.wait(60)
            session.ask(1, some[1], GREEDY)
        finally:
            block.__exit__(None, None, None)

    thread = threading.Thread(target=asker)
    thread.start()
    keys = []
    for key, _ in session.answers():
        keys.append(key)
        first.set()
    thread.join()
    assert keys == [0, 1]


def scores_are_those_of_transformers(engine: Engine, judge: Judge) -> None:
    some = prompts(judge)
    scored = engine.score(some)
    assert [len(scores) for scores in scored] == [len(tokens) for tokens in some]
    for tokens, scores in zip(some, scored, strict=True):
        assert scores.dtype == np.float32 and scores[0] == 0.0
        assert scores == pytest.approx(judge.scores(tokens), abs=NEAR)
    assert engine.score([]) == []


def a_full_context_can_be_scored(engine: Engine, judge: Judge) -> None:
    [full] = prompts(judge, lengths=(judge.context,))
    [scores] = engine.score([np.array(full, np.int32)])
    assert scores == pytest.approx(judge.scores(full), abs=NEAR)
    [top] = engine.score_top([full], 3)
    assert top.logprobs == pytest.approx(judge.scores(full), abs=NEAR)
    judge.check_top(full, top, 3)


def the_likeliest_tokens_are_those_of_transformers(engine: Engine, judge: Judge) -> None:
    some = prompts(judge)
    for k in (1, 4, judge.vocab):
        tops = engine.score_top(some, k)
        assert len(tops) == len(some)
        for tokens, top in zip(some, tops, strict=True):
            assert top.logprobs == pytest.approx(judge.scores(tokens), abs=NEAR)
            judge.check_top(tokens, top, k)
    assert engine.score_top([], 4) == []
    with pytest.raises((EngineError, ValueError)):
        engine.score_top(some, judge.vocab + 1)


def the_likeliest_tokens_come_with_drawn_ones(engine: Engine, judge: Judge) -> None:
    """They are of the distribution sampled from. Where it is cut, some have -inf, or all the values before the cut."""
    some = prompts(judge)[:4]
    for settings in ({}, {"temperature": 0.7}, {"top_k": 3}):
        sampling = Sampling(max_tokens=5, n=2, seed=3, top=4, **settings)
        for prompt, group in zip(some, complete(engine, some, sampling), strict=True):
            for completion in group:
                ids, logprobs = completion.top_ids, completion.top_logprobs
                assert ids is not None and logprobs is not None
                assert (ids.dtype, logprobs.dtype) == (np.int32, np.float32)
                assert ids.shape == logprobs.shape == (len(completion.tokens), 4)
                every = (judge.drawn_from(prompt, completion) / sampling.temperature).log_softmax(-1)
                theirs, kept = every.gather(1, torch.from_numpy(ids).long()).numpy(), np.isfinite(logprobs)
                shift = np.where(kept, logprobs, 0.0) - np.where(kept, theirs, 0.0)
                assert kept[:, 0].all() and np.abs(np.where(kept, shift - shift[:, :1], 0.0)).max() < NEAR
                if not sampling.truncated:
                    assert kept.all() and np.abs(shift).max() < NEAR
                    assert theirs == pytest.approx(every.topk(4).values.numpy(), abs=CLOSE)


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
        arrays_have_their_types,
        every_ask_has_its_own_sampling_and_key,
        draws_do_not_depend_on_other_draws,
        draws_do_not_depend_on_greedy_requests,
        more_may_be_asked_while_answers_are_read,
        answers_wait_for_those_who_may_ask,
        scores_are_those_of_transformers,
        a_full_context_can_be_scored,
        the_likeliest_tokens_are_those_of_transformers,
        the_likeliest_tokens_come_with_drawn_ones,
    )
}


def run_all(engine: Engine, judge: Judge) -> dict[str, str | None]:
    """Runs all checks -> for each None, or how it failed."""
    outcomes: dict[str, str | None] = {}
    for name, check in CHECKS.items():
        try:
            check(engine, judge)
            outcomes[name] = None
        except BaseException:
            outcomes[name] = traceback.format_exc()
    return outcomes
