"""One model on another model's text: alignment and sums against TRL's GOLD trainer (tests/oracles/trl_gold.json), and
rollouts rewritten in the tokens of another role."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_engines import ScriptedEngine, TableEngine
from fake_policy import TablePolicy
from stages import credited
from tokenizers import Tokenizer
from toys import EOS, characters, merging
from transformers import PreTrainedTokenizerFast

from megatron_rl.algorithms.corrections import correction_weights
from megatron_rl.batches.packed_batch import at, pack
from megatron_rl.config.schema import CorrectionConfig
from megatron_rl.engines.protocol import Sampling
from megatron_rl.recipes.distil import Distil
from megatron_rl.recipes.retokenised import Retokenised, align, retokenise, rewritten, score_texts
from megatron_rl.texts.text import decode
from megatron_rl.training.iteration import Iteration, RolloutContext
from megatron_rl.types import NO_VERSION, WRITTEN_BY, Author, Prompt, Rollout, Stop, spans_of

GOLD = json.loads((Path(__file__).parents[2] / "oracles/trl_gold.json").read_text())
ALPHABET = "abcdefgh? \n"
QUESTION = "{question}"
BAR = 1e-6


def gold_tokenizer(name):
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(GOLD["tokenizers"][name]), eos_token="<eos>")


def context_of(tokenizers, *, engines=None, max_tokens=100):
    """A context of roles with these tokenizers, whose engines say nothing and score every token with -1."""
    silent = {name: ScriptedEngine(lambda *_: [], eos=EOS) for name in tokenizers}
    return RolloutContext(
        engines=engines or silent, tokenizers=tokenizers, grade=lambda responses, payloads: [],
        samplings=dict.fromkeys(tokenizers, Sampling(max_tokens=max_tokens)),
        max_prompt_tokens=dict.fromkeys(tokenizers, 50),
    )  # fmt: skip


def written(role, tokens, *, prompt=(1, 2), logprobs=None, stop=Stop.EOS, **settings):
    logprobs = -1.0 - np.arange(len(tokens)) / 8 if logprobs is None else logprobs
    return Rollout(
        role=role, group="0:q", tokens=[*prompt, *tokens], logprobs=[*np.zeros(len(prompt)), *logprobs], stop=stop,
        spans=spans_of((len(prompt), Author.ENVIRONMENT, NO_VERSION), (len(tokens), Author.POLICY, 3)), **settings,
    )  # fmt: skip


def groups_of(first, second):
    """Chunks as two lists of the tokens in each."""
    return [
        [np.flatnonzero(side == chunk).tolist() for chunk in np.unique(first[first >= 0])] for side in (first, second)
    ]


@pytest.mark.parametrize("name", GOLD["rows"])
def test_oracles_chunks_and_their_log_probs_are_those_of_trls_gold_trainer(name):
    row = GOLD["rows"][name]
    context = context_of({side: gold_tokenizer(side) for side in row["tokens"]})
    student = written("student", row["tokens"]["student"], logprobs=row["logprobs"]["student"])
    own = retokenise(context, student, "teacher", "the")
    assert own is not None and own.tokens[own.start :].tolist() == row["tokens"]["teacher"]
    assert groups_of(own.source_chunks, own.chunks) == [row["groups"]["student"], row["groups"]["teacher"]]
    for side, chunks in (("student", own.source_chunks), ("teacher", own.chunks)):
        found = own.sums(chunks, np.array(row["logprobs"][side]))[np.unique(chunks)]
        np.testing.assert_allclose(found, row["sums"][side], rtol=BAR, atol=BAR)


def test_gold_rows_have_chunks_of_several_tokens_on_either_side():
    for side in ("student", "teacher"):
        assert any(len(group) > 1 for row in GOLD["rows"].values() for group in row["groups"][side])


def test_chunks_are_those_of_a_walk_over_both_texts():
    rng = np.random.default_rng(0)
    for _ in range(200):
        size = int(rng.integers(1, 30))
        cuts = [np.append(np.flatnonzero(rng.random(size - 1) < 0.4) + 1, size) for _ in range(2)]
        first, second = align(*cuts)
        common = sorted({*cuts[0].tolist()} & {*cuts[1].tolist()})
        for ends, found in zip(cuts, (first, second), strict=True):
            starts = [0, *ends[:-1].tolist()]
            assert found.tolist() == [sum(edge <= start for edge in common) for start in starts]
    assert [one.tolist() for one in align(np.array([2, 3, 5]), np.array([2, 5]), equal=4)] == [[0, -1, -1], [0, -1]]
    nothing = np.empty(0, np.int64)
    assert [len(one) for one in align(nothing, np.array([1]))] == [0, 1]


def test_a_token_without_bytes_before_unequal_texts_has_no_counterpart():
    plain, empty = np.array([1, 2]), np.array([1, 1, 2])
    assert [one.tolist() for one in align(plain, empty, equal=1)] == [[0, -1], [0, -1, -1]]
    assert [one.tolist() for one in align(empty, plain, equal=1)] == [[0, -1, -1], [0, -1]]
    assert [one.tolist() for one in align(empty, plain)] == [[0, 1, 1], [0, 1]]


def test_a_rewritten_rollout_has_the_text_and_the_log_probs_of_its_source():
    tokenizers = {"a": merging(ALPHABET, "abcd"), "b": characters(ALPHABET)}
    context = context_of(tokenizers)
    context.engines["b"].version = 7
    tokens = [*tokenizers["a"]("abecda?")["input_ids"], EOS]
    source = written("a", tokens, payload={"question": "ab"}, rewards={"outcome": 1.0})
    other = rewritten(context, source, "b", "ab?")
    assert other is not None and other.role == "b" and other.group == source.group and other.rewards == source.rewards
    assert tokenizers["b"].decode(other.tokens) == "ab?abecda?<eos>" and other.start == 3 and other.versions == (7,)
    assert other.payload == {"question": "ab", WRITTEN_BY: "a"} and other.trainable.sum() == len("abecda?") + 1
    p = source.logprobs[2:].tolist()
    assert len(tokens) == 6, "ab e cd a ? <eos>"
    wanted = [p[0] / 2] * 2 + [p[1]] + [p[2] / 2] * 2 + p[3:]
    np.testing.assert_allclose(other.logprobs, [0, 0, 0, *wanted], rtol=1e-6)
    back = rewritten(context, other, "a", "ab?")
    assert back is not None and back.start == 2 and back.tokens[2:].tolist() == tokens
    np.testing.assert_allclose(back.logprobs[back.start :], p, rtol=1e-6)


def test_a_correction_weighs_a_rewritten_rollout_by_the_ratio_of_both_models():
    tokenizers = {"a": merging(ALPHABET, "abcd"), "b": characters(ALPHABET)}
    source = written("a", [*tokenizers["a"]("abecda?")["input_ids"], EOS])
    other = rewritten(context_of(tokenizers), source, "b", "ab?")
    assert other is not None
    batch = pack([replace(other, advantages=1.0)])
    own = -torch.rand(len(batch.tokens), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gap = at(batch.mask, own - batch.engine_logprobs)
    theirs = float(source.logprobs[2:].sum(dtype=np.float64))
    ours = float(own[batch.mask].sum())
    for level, wanted in (("sequence", ours - theirs), ("geometric", (ours - theirs) / 8)):
        weights, _ = correction_weights(CorrectionConfig(kind="truncate", level=level, high=1e6), gap, batch)
        assert weights is not None
        np.testing.assert_allclose(weights[batch.mask], np.exp(wanted), rtol=BAR)


def test_a_character_that_is_cut_off_ends_the_text():
    context = context_of({name: gold_tokenizer(name) for name in ("student", "teacher")})
    tokens = context.tokenizers["student"]("the caf\u00e9")["input_ids"]
    assert decode(context.tokenizers["student"], tokens[:-1]).text.endswith("\ufffd"), (
        "the last character has two tokens"
    )
    own = retokenise(context, written("student", tokens[:-1], stop=Stop.LENGTH), "teacher", "the")
    assert context.tokenizers["teacher"].decode(own.tokens[own.start :]) == "the caf"
    assert own.source_chunks[-1] == -1 and own.chunks.min() >= 0 and own.source_chunks[:-1].min() >= 0
    told, _ = score_texts(context, [written("student", tokens[:-1], stop=Stop.LENGTH)], "teacher", lambda _: "the")
    assert told[0][-1] == np.float32(-1.0 - (len(tokens) - 2) / 8), "nothing is learned from the rest of the character"
    assert context.metrics["student"]["unaligned"] == 1 / (len(tokens) - 1)


def test_texts_that_do_not_fit_are_left_out():
    tokenizers = {"a": characters(), "b": characters(ALPHABET)}
    context = context_of(tokenizers, max_tokens=4)
    short, strange = (written("a", tokenizers["a"](text)["input_ids"], stop=Stop.LENGTH) for text in ("abc", "xyz"))
    assert rewritten(context, short, "b", "a") is not None
    assert rewritten(context, short, "b", "a" * 60) is None, "60 + 3 tokens, and 50 + 4 are allowed"
    assert rewritten(context, strange, "b", "a") is None, "the other tokenizer knows no x"
    told, gaps = score_texts(context, [short], "b", lambda _: "a" * 60)
    assert told[0].tolist() == short.logprobs.tolist() and not gaps[0].any()
    assert context.metrics["a"]["unaligned"] == 1.0
    turns = spans_of(
        (2, Author.ENVIRONMENT, -1), (1, Author.POLICY, 0), (1, Author.ENVIRONMENT, -1), (1, Author.POLICY, 0)
    )
    talk = Rollout(role="a", group="0:q", tokens=[1, 2, 3, 4, 5], logprobs=np.zeros(5), spans=turns)
    with pytest.raises(ValueError, match="'0:q' has several turns"):
        rewritten(context, talk, "b", "a")


def test_a_chunk_gives_its_difference_to_each_of_its_tokens():
    tokenizers = {"student": characters(ALPHABET), "teacher": merging(ALPHABET, "abcd")}
    context = context_of(tokenizers)
    student = written("student", [*tokenizers["student"]("eab")["input_ids"], EOS])
    [told], [gap] = score_texts(context, [student], "teacher", lambda _: "a")
    p = student.logprobs[2:].astype(np.float64)
    difference = [-1 - p[0], -1 - (p[1] + p[2]), -1 - (p[1] + p[2]), -1 - p[3]]  # the teacher says -1 to every token
    np.testing.assert_allclose(told[2:] - p, difference, rtol=1e-6)
    np.testing.assert_allclose(gap.sum(), p.sum() - -1 * 3, rtol=1e-6)
    assert context.metrics["student"]["unaligned"] == 0.0


class Problems:
    def take(self, count=None):
        return [Prompt(id=str(i), tokens=[5 + i, 6, 7], payload={"question": chr(35 + i) + "$%"}) for i in range(3)]


def test_with_equal_tokenizers_a_text_is_scored_as_its_tokens(tmp_path):
    (tmp_path / "q.txt").write_text(QUESTION)
    tokenizer, found = characters(), []
    for retokenised in (False, True):
        engines = {}
        for seed, name in enumerate(("student", "teacher")):
            engines[name] = TableEngine(97, tokenizer.eos_token_id)
            engines[name].load(TablePolicy(97, seed=seed).weights(), version=0)
        context = context_of(dict.fromkeys(engines, tokenizer), engines=engines)
        recipe = Distil(updates=1, group_size=4, retokenise=retokenised, template=str(tmp_path / "q.txt"))
        iteration = Iteration(cycle=0, index=0, roles=("student",), number=0)
        found.append((credited(recipe, iteration, Problems(), context)["student"], context.metrics["student"]))
    (plain, metrics), (text, own) = found
    for first, second in zip(plain, text, strict=True):
        assert first.tokens.tolist() == second.tokens.tolist()
        theirs, ours = (one.values["teacher_logprobs"][one.trainable] for one in (first, second))
        assert theirs.tobytes() == ours.tobytes()
    assert metrics["sampled_kl"] == pytest.approx(own["sampled_kl"], rel=1e-6)


def test_a_chunk_that_is_nowhere_sums_to_nothing():
    own = Retokenised(tokens=np.zeros(2, np.int32), start=1, chunks=np.array([-1]), source_chunks=np.array([-1, -1]))
    assert own.sums(own.chunks, np.ones(1)).tolist() == [0.0]
