"""SSRL: the reward against the released code's values, and the tokens of the model's own search results out of loss."""

from __future__ import annotations

import numpy as np
import pytest
from fake_engines import ScriptedEngine
from judges import TOKENIZER, ids, problems, roll_out, said
from tokenizers import ByteLevelBPETokenizer
from toys import EOS
from transformers import PreTrainedTokenizerFast

from megatron_rl.contrib.ssrl import Ssrl, without_information
from megatron_rl.contrib.ssrl_reward import grade, search_format
from megatron_rl.engines.protocol import Sampling
from megatron_rl.rewards.grading_pool import Graded
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.types import NO_VERSION, Author, Outcome, Rollout, spans_of

T, S, I, A = "<think>t</think>", "<search>q</search>", "<information>i</information>", "<answer>Paris</answer>"

# Values of the released function (TsinghuaC3I/SSRL 3009f21, naive.py: format_reward) on these texts.
RELEASED = {
    T + A: 0.5,
    T + S + I + T + A: 1.0,
    T + S + I + T + S + I + T + A: 1.0,
    T + S + I + A: 0.25,
    T * 3 + A: 1 / 3,
    T * 8 + A: 0.125,
    T * 9 + A: 0.0,
    (T + S + I) * 7 + T + A: 1.0,
    (T + S + I) * 8 + T + A: 0.0,
    T + S + T + A: 0.0,
    T + I + T + A: 0.0,
    T + S + I + I + A: 0.0,
    T + S + I + T + "<b>" + A: 0.0,
    "<think>1 < 2</think>" + S + I + T + A: 0.0,
    "<think> </think>" + S + I + T + A: 0.0,
    T + "<search>a\nb</search>" + I + T + A: 0.0,
    T + "<search>Your query</search>" + I + T + A: 0.0,
    T + S + I + T + "<answer>your answer</answer>": 0.0,
    "<think>your query</think>" + S + I + T + A: 1.0,
    "So: " + T + A: 0.0,
    T + A + " end": 0.0,
    f" \n{T}\n{S} {I}\n{T}{A}\n": 1.0,
    T + "hm" + S + I + T + A: 1.0,
    T + S + I + T: 0.0,
    "<think>t" + A: 0.0,
    T + S + I + "<think>t" + A: 1.0,
    T + A + T + A: 0.5,
    f"<think>{S}{I}</think>" + A: 0.0,
    T + A + S + I: 0.0,
    "": 0.0,
}


@pytest.mark.parametrize("text", RELEASED)
def test_the_format_score_is_the_released_codes(text):
    assert search_format(text) == pytest.approx(RELEASED[text])


def test_the_reward_is_nine_parts_match_and_one_part_format():
    whole = T + S + I + T + A
    assert grade(whole, {"answer": "paris"}) == pytest.approx(1.0)
    assert grade(whole, {"answer": "Rome", "answers": ["Rome", "Paris"]}) == pytest.approx(1.0)
    assert grade(whole, {"answer": "Rome"}) == pytest.approx(0.1)
    assert grade(T + A, {"answer": "Paris"}) == pytest.approx(0.95)
    assert grade("<answer>Paris</answer>", {"answer": "Paris"}) == pytest.approx(0.9)
    assert grade("", {"answer": "Paris"}) == 0.0


def rollout_of(tokens, *parts):
    spans = spans_of(*(parts or [(3, Author.ENVIRONMENT, NO_VERSION), (len(tokens), Author.POLICY, 4)]))
    tokens = np.concatenate([np.full(3, 7), tokens])
    logprobs = np.concatenate([np.zeros(3), np.full(len(tokens) - 3, -1.0)])
    return Rollout(role="generator", group="g", tokens=tokens, logprobs=logprobs, spans=spans, advantages=0.5)


TEXTS = [
    T + S + I + T + A,
    f"{T}{S}<information>two\nlines, and é ü</information>\n\n{T}{S}\n{I} {T}{A}",
    T + A,
    "<information>never closed " + T,
    "<information></information>" * 2,
    "</information>" + T + I,
]


@pytest.fixture(scope="module")
def pieces():
    """A byte-level tokenizer with tokens that reach over the borders of tags."""
    core = ByteLevelBPETokenizer()
    core.train_from_iterator([text * 3 for text in TEXTS], vocab_size=330, min_frequency=2)
    return PreTrainedTokenizerFast(tokenizer_object=core._tokenizer)


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_of_information_are_not_trained_on(text, pieces):
    """Told by the tokenizer's own offsets: a token is masked that holds a character of a closed block."""
    encoded = pieces(text, return_offsets_mapping=True)
    inside, at = [False] * len(text), 0
    while (start := text.find("<information>", at)) >= 0 and (end := text.find("</information>", start)) >= 0:
        at = end + len("</information>")
        inside[start:at] = [True] * (at - start)
    wanted = [not any(inside[a:b]) for a, b in encoded["offset_mapping"]]
    before = rollout_of(encoded["input_ids"])
    after = without_information(before, pieces)
    assert after.trainable[3:].tolist() == wanted and not after.trainable[:3].any()
    assert (after.logprobs[3:] == np.where(wanted, -1.0, 0.0)).all() and (after.tokens == before.tokens).all()
    assert after.num_trainable == sum(wanted) and set(after.versions) <= {4}
    if text is TEXTS[0]:
        places = encoded["offset_mapping"]
        assert any(a < text.index("<information>") < b for a, b in places), "a token reaches over the border"
    if all(wanted):
        assert after is before


def test_versions_and_partners_stay_as_they_are_around_the_information():
    tokens = ids(T + I + A)
    own = len(tokens) - 20
    parts = [(3, Author.ENVIRONMENT, NO_VERSION), (10, Author.POLICY, 1), (own, Author.POLICY, 2)]
    after = without_information(rollout_of(tokens, *parts, (10, Author.PARTNER, NO_VERSION)), TOKENIZER)
    a, b = 3 + len(T), 3 + len(T) + len(I)
    assert after.spans.tolist() == [
        [0, 3, Author.ENVIRONMENT, NO_VERSION],
        [3, 13, Author.POLICY, 1],
        [13, a, Author.POLICY, 2],
        [a, b, Author.ENVIRONMENT, NO_VERSION],
        [b, 13 + own, Author.POLICY, 2],
        [13 + own, 23 + own, Author.PARTNER, NO_VERSION],
    ]


def test_an_iteration_trains_all_but_the_information(tmp_path):
    (tmp_path / "g.txt").write_text("{question}")
    texts = [T + S + I + T + A, T + A, T + S + I + T + A.replace("Paris", "Rome"), I]
    engine = ScriptedEngine(lambda p, key, j, sampling: [*ids(texts[j]), EOS], eos=EOS)

    def score(responses, payloads):
        return [Graded(Outcome.SCORE, grade(r, p)) for r, p in zip(responses, payloads, strict=True)]

    context = RolloutContext(
        engines={"generator": engine}, tokenizers={"generator": TOKENIZER},
        samplings={"generator": Sampling(max_tokens=4000)}, max_prompt_tokens={"generator": 100}, grade=score,
    )  # fmt: skip
    recipe = Ssrl(updates=2, group_size=4, template=str(tmp_path / "g.txt"))
    played, metrics = roll_out(recipe, ("generator",), problems(1, answer="Paris"), context)
    rollouts = played["generator"]
    rewards = np.array([1.0, 0.95, 0.1, 0.0])
    np.testing.assert_allclose([r.rewards["outcome"] for r in rollouts], rewards)
    np.testing.assert_allclose(
        [r.advantages for r in rollouts], (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    )
    assert [said(r) for r in rollouts] == [text.replace(I, "") for text in texts], "what it wrote and is trained on"
    assert TOKENIZER.decode(rollouts[0].tokens[rollouts[0].start :]) == texts[0] + "<eos>"
    total = sum(len(text) + 1 for text in texts)
    assert metrics["generator"]["information_share"] == pytest.approx(3 * len(I) / total)
    assert (
        "{question}" not in Ssrl(updates=1).prompt({"question": "Who?"}) and recipe.schedule() == [[("generator",)]] * 2
    )
