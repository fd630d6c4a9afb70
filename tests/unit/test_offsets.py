"""Tests decoding with offsets, by which text positions lead back to tokens, over three kinds of tokenizers."""

from __future__ import annotations

import itertools
import os
import random
import time

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megatron_rl.text import decode_all, decode_with_offsets, token_span

TEXT = "hello <step> one two </step> é ßü 日本語 語 🙂🙃 привет \\boxed{10} </step>\n\nnew line"


def wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )


SPECIAL = ["<bos>", "<eos>", "<pad>"]


def byte_level() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [TEXT] * 5, trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    tokenizer.add_tokens(["<tool call> 日"])  # not special, and not in the byte alphabet
    return wrapped(tokenizer)


def word_level() -> PreTrainedTokenizerFast:
    words = [*SPECIAL, "<step>", "</step>", "#1", "a", "b", "\\boxed{", "}", "日本"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(SPECIAL)
    return wrapped(tokenizer)


def byte_fallback() -> PreTrainedTokenizerFast:
    """Makes a tokenizer like Llama 2's and Gemma's: `▁` for spaces, <0xE6> for bytes, one leading space stripped."""
    words = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "▁日", "b", "</", "step", ">", "▁<step>"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return wrapped(tokenizer)


KINDS = {"byte_level": byte_level, "word_level": word_level, "byte_fallback": byte_fallback}


@pytest.mark.parametrize("kind", KINDS)
def test_any_token_ids_decode_to_the_tokenizers_own_text(kind):
    tokenizer, rng = KINDS[kind](), random.Random(0)
    for _ in range(600):
        tokens = [
            rng.randrange(len(tokenizer) + 3) for _ in range(rng.randrange(25))
        ]  # three ids lie beyond the vocabulary
        text, ends = decode_with_offsets(tokenizer, tokens)
        assert text == tokenizer.decode(tokens, skip_special_tokens=True)
        assert len(ends) == len(tokens) and ends == sorted(ends)
        assert (ends[-1] if ends else 0) == len(text)


@pytest.mark.parametrize("kind", KINDS)
def test_many_sequences_decode_as_each_does(kind):
    tokenizer, rng = KINDS[kind](), random.Random(1)
    sequences = [[rng.randrange(len(tokenizer) + 3) for _ in range(rng.randrange(25))] for _ in range(200)]
    assert decode_all(tokenizer, sequences) == [decode_with_offsets(tokenizer, tokens)[0] for tokens in sequences]


@pytest.mark.parametrize("kind", KINDS)
def test_an_end_counts_the_characters_that_are_already_settled(kind):
    """ends[i] is how far the text of tokens[:i + 1], or of fewer tokens, agrees with the whole text.

    A byte-fallback decoder takes back what it has shown while a character is incomplete.
    """
    tokenizer, rng = KINDS[kind](), random.Random(1)
    compared = 0
    for _ in range(200):
        tokens = [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(1, 25))]
        text, ends = decode_with_offsets(tokenizer, tokens)
        if "\ufffd" in text:  # which token an undecodable byte belongs to is a convention
            continue
        prefixes = [tokenizer.decode(tokens[: i + 1], skip_special_tokens=True) for i in range(len(tokens))]
        settled = [len(os.path.commonprefix([prefix, text])) for prefix in prefixes]
        assert ends == list(itertools.accumulate(settled, max))
        compared += 1
    assert compared > 5


def test_a_character_split_over_tokens_ends_with_its_last_one():
    tokenizer = byte_level()
    tokens = [tokenizer.convert_tokens_to_ids(c) for c in "aæĹ¥b"]  # 日 is three bytes
    assert decode_with_offsets(tokenizer, tokens) == ("a日b", [1, 1, 1, 2, 3])


def test_a_response_cut_inside_a_character_keeps_what_came_before_it():
    """The tail used to be dropped, whole characters included."""
    tokenizer = byte_level()
    tokens = tokenizer.encode("при日")[:-1]
    text, ends = decode_with_offsets(tokenizer, tokens)
    assert text == tokenizer.decode(tokens) and text.startswith("при") and ends[-1] == len(text)


def test_special_tokens_add_nothing():
    tokenizer = word_level()
    bos, eos, pad, a, b = (tokenizer.convert_tokens_to_ids(t) for t in ("<bos>", "<eos>", "<pad>", "a", "b"))
    assert decode_with_offsets(tokenizer, [bos, a, pad, b, eos, eos]) == ("a b", [0, 1, 1, 3, 3, 3])


def test_no_tokens():
    assert decode_with_offsets(byte_level(), []) == ("", [])


@pytest.mark.parametrize("kind", KINDS)
def test_the_token_that_completes_a_closing_tag_is_the_steps_last(kind):
    """Every tokenizer spells `a <step> b </step> a` its own way; the span of the block is found in all of them."""
    tokenizer = KINDS[kind]()
    spelt = {"byte_level": None, "word_level": None, "byte_fallback": ["▁a", "▁<step>", "b", "</", "step", ">", "▁a"]}[
        kind
    ]
    tokens = tokenizer.convert_tokens_to_ids(spelt) if spelt else tokenizer.encode("a <step> b </step> a")
    text, ends = decode_with_offsets(tokenizer, tokens)
    start, end = text.index("<step>"), text.index("</step>") + len("</step>")
    first, last = token_span(start, end, ends)
    assert tokenizer.decode(tokens[first:last]).strip().startswith("<step>") and tokenizer.decode(
        tokens[first:last]
    ).endswith("</step>")
    assert not tokenizer.decode(tokens[first : last - 1]).endswith("</step>")
    assert 0 < first < last < len(tokens)


def test_offsets_of_a_long_response_take_milliseconds():
    """Undecodable bytes used to make the window grow with every token."""
    tokenizer = byte_level()
    lone = tokenizer.convert_tokens_to_ids("æ")
    start = time.process_time()
    text, ends = decode_with_offsets(tokenizer, [lone] * 20_000)
    assert time.process_time() - start < 2.0 and len(text) == ends[-1] == 20_000
