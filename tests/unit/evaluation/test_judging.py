"""The one way to ask a judge, of any role and with any engine, as items become known; and votes."""

from __future__ import annotations

import numpy as np
import pytest
from fake_engines import ScriptedEngine
from toys import EOS, characters

from megatron_rl.engines.protocol import Sampling
from megatron_rl.evaluation.draw import draw_within
from megatron_rl.evaluation.judging import Judging, Question, judge_all
from megatron_rl.evaluation.votes import Weigher
from megatron_rl.texts.chat_template import tokenize
from megatron_rl.types import Author, Prompt

TOKENIZER = characters()


def ids(text):
    return tokenize(TOKENIZER, text)


def says(script):
    """An engine that answers (prompt text, sample) with the script's text and ends it."""
    return ScriptedEngine(lambda p, key, j, sampling: [*ids(script(TOKENIZER.decode(p), j)), EOS], eos=EOS)


def which_is_longer(pair):
    """A pairwise question; equal answers are not asked about."""
    first, second = pair
    return None if first == second else Prompt(id=first, tokens=ids(f"{first} or {second}?"), payload={"first": first})


def judging(engine, n=2):
    question = Question(
        prompt=which_is_longer, read=lambda pair, text: pair["AB".index(text)] if text in "AB" else None
    )
    return Judging(engine, TOKENIZER, Sampling(max_tokens=9, n=n, seed=3), question)


def longer(prompt, j):
    first, second = prompt.removesuffix("?").split(" or ")
    return "A" if len(first) > len(second) else "B" if j == 0 else "hm"


def test_a_pair_is_judged_by_a_judge_that_is_no_verifier():
    pairs = {7: ("long one", "short"), 2: ("same", "same"), 5: ("a", "bb")}
    found = judge_all(judging(says(longer)), pairs)
    assert list(found) == [7, 2, 5] and found[2] == []
    assert [[j.opinion for j in found[key]] for key in (7, 5)] == [["long one"] * 2, ["bb", None]]
    assert found[5][1].decoded.text == "hm" and found[5][1].item == ("a", "bb")


def test_items_may_become_known_while_answers_are_read():
    asked = judging(says(longer), n=1)
    assert asked.ask(0, ("aa", "b")) and not asked.ask(1, ("x", "x"))
    found = {}
    for key, [judgement] in asked.answers():
        found[key] = judgement.opinion
        if key < 30:
            asked.ask(key + 10, (judgement.opinion + "c", "b"))
    assert found == {0: "aa", 10: "aac", 20: "aacc", 30: "aaccc"}


def test_a_judgement_becomes_a_rollout_of_the_judge():
    engine = says(longer)
    engine.version = 4
    [one, two] = judge_all(judging(engine), {7: ("a", "bb")})[7]
    rollout = two.rollout("judge", partner_weight=0.5)
    assert (rollout.role, rollout.group, rollout.partner_weight) == ("judge", "7:a", 0.5)
    assert rollout.group == one.rollout("judge").group and rollout.payload == {"first": "a"}
    assert rollout.spans[:, 2:].tolist() == [[Author.ENVIRONMENT, -1], [Author.POLICY, 4]]
    assert TOKENIZER.decode(rollout.response) == "hm<eos>" and (rollout.logprobs[rollout.start :] == -1).all()


@pytest.mark.parametrize(("context", "most"), [(None, 9), (1000, 9), (20, 4), (16, None), (4, None)])
def test_an_answer_has_the_room_that_the_context_leaves(context, most):
    """A prompt of 8 tokens; 8 more stay free."""
    engine = says(longer)
    found = draw_within(engine, {0: ids("a or bb?")}, Sampling(max_tokens=9), context)
    assert len(ids("a or bb?")) == 8 and [s.max_tokens for _, s in engine.asked] == ([] if most is None else [most])
    assert bool(len(found[0][0].tokens)) == (most is not None)


def test_votes_are_the_share_that_calls_a_solution_right():
    """An unreadable vote does not, nor does one that finds no room."""
    verdict = "<final_verification>\\boxed{CORRECT}</final_verification>"
    engine = says(lambda prompt, j: "hm" if "wrong" in prompt and j < 3 else verdict)
    weigher = Weigher(
        engine=engine,
        tokenizer=TOKENIZER,
        template="{question}|{solution}|{num_steps}",
        sampling=Sampling(max_tokens=99, n=4),
        context=150,
    )
    asked = {3: ("q", "<step>a</step>"), 1: ("q", "wrong"), 2: ("q", "x" * 150)}
    assert weigher.weigh(asked) == {3: 1.0, 1: 0.25, 2: 0.0}
    assert TOKENIZER.decode(engine.asked[0][0]) == "q|<step>a</step>|1"


def test_a_verifier_that_answers_yes_or_no_weighs_by_its_probability_of_yes():
    """In an engine that scores: each token's log-prob depends on the token and the length of the text before it."""

    class Scoring:
        def score(self, sequences):
            return [np.array([0.0, *(-(t % 7) / (i + 1) for i, t in enumerate(s[1:]))], np.float32) for s in sequences]

    weigher = Weigher(
        engine=Scoring(), tokenizer=TOKENIZER, template="{question}|{solution}?", sampling=Sampling(max_tokens=9),
        context=40, answers=("yes", "no"),
    )  # fmt: skip
    found = weigher.weigh({5: ("q", "a"), 2: ("q", "x" * 30), 1: ("qq", "bb")})
    assert found[2] == 0.0 and [*found] == [5, 2, 1]
    for index, text in ((5, "q|a?"), (1, "qq|bb?")):
        before = len(ids(text))
        sums = [sum(-(t % 7) / (before + i) for i, t in enumerate(ids(answer))) for answer in ("yes", "no")]
        assert found[index] == pytest.approx(np.exp(sums[0]) / np.exp(sums).sum(), rel=1e-6)
