"""Tandem's strategies: the paper's vectors, and what holds for every text (hypothesis)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import characters

from megatron_rl.algorithms.tandem_authors import Pen, Rule, boundaries, fingerprint, read_boundaries, replay, switches
from megatron_rl.config.base import ConfigError
from megatron_rl.texts.text import load_tokenizer

NONE = frozenset[int]()
STRATEGIES = ("bernoulli", "alternating", "chunk", "sentence", "word")
tokens = st.lists(st.integers(0, 20), max_size=80)
keys = st.integers(0, 2**62)
rules = st.builds(
    Rule,
    strategy=st.sampled_from(STRATEGIES),
    p=st.floats(0, 1),
    max_gap=st.integers(1, 9),
    chunk_size=st.integers(1, 5),
)
sets = st.frozensets(st.integers(0, 20), max_size=6)


def written(rule, ids, text, key=7):
    pen = Pen(rule, frozenset(ids), key)
    for token in text:
        pen.write(token)
    return pen


@pytest.mark.parametrize(
    "ids, max_gap, text, draws, count",
    [
        ({100}, 32, [1, 2, 100, 3], 2, 1),
        ((), 4, [1, 2, 3, 4, 5], 2, 1),
        ({7}, 3, [7, 1, 1, 1], 3, 0),
        ({7}, 3, [-1, 7, -1, 1, 1, 1, -1], 3, 0),  # placeholders neither count nor redraw
    ],
)
def test_the_word_rule_draws_as_in_the_papers_tests(ids, max_gap, text, draws, count):
    pen = written(Rule(max_gap=max_gap), ids, text)
    assert (pen.draws, pen.count) == (draws, count)


def replayed(*text):
    return replay(*text).tolist()


def test_alternating_chunk_and_sentence_by_hand():
    assert replayed(Rule(strategy="alternating"), NONE, 0, range(5)) == [True, False, True, False, True]
    assert replayed(Rule(strategy="chunk", chunk_size=2), NONE, 0, range(7)) == [
        True,
        True,
        False,
        False,
        True,
        True,
        False,
    ]
    assert replayed(Rule(strategy="sentence"), frozenset({9}), 0, [1, 9, 1, 1, 9, 9, 1]) == [
        True,
        True,
        False,
        False,
        False,
        True,
        False,
    ]


def test_the_token_that_opens_a_word_is_the_old_authors():
    """The redraw comes after it."""
    for key in range(50):
        authors = replayed(Rule(), frozenset({100}), key, [1, 1, 100, 1, 1])
        assert len(set(authors[:3])) == 1 and len(set(authors[3:])) == 1


def state(pen):
    return pen.senior, pen.count, pen.draws, pen.written


@settings(deadline=None)
@given(rules, sets, keys, st.lists(st.integers(-1, 20), max_size=80))
def test_twins_a_replay_is_the_live_path(rule, ids, key, text):
    """The two definitions of each strategy, token by token and vectorised, agree on every text."""
    half = len(text) // 2
    pen = written(rule, ids, text[:half], key)
    again = Pen(rule, frozenset(ids), key, text[:half])
    assert state(pen) == state(again)
    live = [pen.senior == pen.write(token) for token in text[half:]]
    assert all(live)
    assert replayed(rule, ids, key, text)[half:] == [again.write(token) for token in text[half:]]
    assert state(pen) == state(again)


@settings(deadline=None)
@given(rules, sets, keys, tokens, tokens)
def test_the_future_does_not_change_the_past(rule, ids, key, text, more):
    assert replayed(rule, ids, key, text + more)[: len(text)] == replayed(rule, ids, key, text)


@settings(deadline=None)
@given(rules, sets, keys, tokens, st.lists(st.integers(0, 80), max_size=5))
def test_placeholders_change_nothing(rule, ids, key, text, places):
    holed = list(text)
    for place in places:
        holed.insert(min(place, len(holed)), -1)
    authors = [a for a, t in zip(replayed(rule, ids, key, holed), holed, strict=True) if t >= 0]
    assert authors == replayed(rule, ids, key, text)


@settings(deadline=None)
@given(sets, keys, tokens, st.sampled_from(["bernoulli", "word"]))
def test_p_of_one_is_the_senior_alone_and_of_zero_the_junior(ids, key, text, strategy):
    assert all(replay(Rule(strategy=strategy, p=1.0), ids, key, text))
    assert not any(replay(Rule(strategy=strategy, p=0.0), ids, key, text))


@settings(deadline=None)
@given(sets, keys, tokens, st.integers(1, 9))
def test_between_boundaries_the_word_rule_keeps_the_author_for_at_most_max_gap_tokens(ids, key, text, max_gap):
    pen = Pen(Rule(max_gap=max_gap), ids, key)
    for token in text:
        before = pen.senior
        draws = pen.draws
        pen.write(token)
        assert pen.count < max_gap
        assert (pen.draws > draws) == (pen.count == 0)
        assert pen.senior == before or pen.draws > draws


@pytest.mark.parametrize("strategy", ["bernoulli", "word"])
@pytest.mark.parametrize("p", [0.2, 0.5, 0.8])
def test_the_seniors_share_is_p_and_a_redraw_changes_the_author_with_2pq(strategy, p):
    authors = [a for key in range(400) for a in replay(Rule(strategy=strategy, p=p), frozenset({1}), key, [1] * 50)]
    assert sum(authors) / len(authors) == pytest.approx(p, abs=0.02)
    assert switches(authors) / len(authors) == pytest.approx(2 * p * (1 - p), abs=0.02)


def test_texts_are_drawn_apart():
    firsts = [Pen(Rule(), NONE, key).senior for key in range(1000)]
    assert sum(firsts) == pytest.approx(500, abs=60)
    assert switches(firsts) == pytest.approx(500, abs=60)


SPLITMIX64 = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC, 0x1B39896A51A8749B)


def test_draws_are_the_published_numbers_of_splitmix64():
    """The authors of texts that were written before an update of this package must not change."""
    for place, bits in enumerate(SPLITMIX64):
        drawn = (bits >> 11) / 2**53
        assert not replayed(Rule(strategy="bernoulli", p=drawn), NONE, 0, range(5))[place]
        assert replayed(Rule(strategy="bernoulli", p=drawn + 2**-53), NONE, 0, range(5))[place]


@pytest.mark.parametrize("wrong", [{"strategy": "words"}, {"p": 1.5}, {"max_gap": 0}, {"chunk_size": 0}])
def test_nonsense_is_refused(wrong):
    with pytest.raises(ValueError):
        Rule(**wrong)


def byte_level(vocabulary):
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE({word: i for i, word in enumerate(vocabulary)}, []))
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


def test_boundaries_of_a_byte_level_tokenizer_are_what_opens_a_word_and_what_ends_with_an_empty_line():
    tokenizer = byte_level(["<eos>", "Ġa", "a", "Ġ", "ĊĊ", "Ċ", ".ĊĊ", "ĊĊa", "ĠĊĊ"])
    assert boundaries(tokenizer, Rule(strategy="word")) == {1, 3, 8}
    assert boundaries(tokenizer, Rule(strategy="sentence")) == {4, 6, 8}
    assert boundaries(tokenizer, Rule(strategy="bernoulli")) == NONE


def test_boundaries_of_single_characters_are_the_space_and_of_words_every_word(tmp_path):
    import task

    assert boundaries(characters(), Rule(strategy="word")) == set(characters().encode(" "))
    task.write_model(tmp_path, 0)
    words = load_tokenizer(tmp_path)
    assert boundaries(words, Rule(strategy="word")) == set(range(len(words))) - set(words.all_special_ids)


def test_boundaries_are_those_of_a_file_that_is_given(tmp_path):
    """As boundary_token_ids_path in the release: a JSON list, read in place of the vocabulary."""
    (tmp_path / "ids.json").write_text("[8, 1, 8]")
    for strategy in ("word", "sentence"):
        assert boundaries(characters(), Rule(strategy=strategy, boundary_ids=str(tmp_path / "ids.json"))) == {1, 8}


@pytest.mark.parametrize(
    ("content", "said"),
    [("[1, -2]", "no JSON list"), ('{"a": 1}', "no JSON list"), ("[]", "empty"), ("[9]", "has 9 tokens")],
)
def test_a_file_without_boundaries_is_refused(tmp_path, content, said):
    (tmp_path / "ids.json").write_text(content)
    with pytest.raises(ConfigError, match=f"tandem.boundary_ids = .*{said}"):
        read_boundaries(str(tmp_path / "ids.json"), 9)


def test_the_fingerprint_is_of_the_set():
    assert fingerprint([3, 1]) == fingerprint({1, 3}) != fingerprint({1})
