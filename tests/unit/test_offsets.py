"""Text positions lead back to the sampled tokens: decoding over four kinds of tokenizers and any token ids."""

from __future__ import annotations

import itertools
import os
import random
import time

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megatron_rl.texts.text import Decoded, decode, decode_all

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
    """The Llama 2 and Gemma kind: `▁` for spaces, bytes as <0xE6> tokens, one leading space stripped."""
    words = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "▁日", "b", "</", "step", ">", "▁<step>"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return wrapped(tokenizer)


def sentence_piece() -> PreTrainedTokenizerFast:
    """The T5 kind: a decoder whose first token is read in another way than the others."""
    words = [*SPECIAL, "▁", "▁a", "▁日", "b", "</", "step", ">", "▁<step>", "語"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(SPECIAL)
    return wrapped(tokenizer)


def characters(found: Decoded) -> list[int]:
    """Counts the characters of the text that are whole after each token."""
    return [len(found.raw[:end].decode("utf-8", "ignore")) for end in found.ends]


KINDS = {
    "byte_level": byte_level,
    "word_level": word_level,
    "byte_fallback": byte_fallback,
    "sentence_piece": sentence_piece,
}
SPELT = ["▁a", "▁<step>", "b", "</", "step", ">", "▁a"]


@pytest.mark.parametrize("kind", KINDS)
def test_any_token_ids_decode_to_the_tokenizers_own_text(kind):
    tokenizer, rng = KINDS[kind](), random.Random(0)
    for _ in range(600):
        tokens = [
            rng.randrange(len(tokenizer) + 3) for _ in range(rng.randrange(25))
        ]  # three ids lie beyond the vocabulary
        found = decode(tokenizer, tokens)
        assert found.text == tokenizer.decode(tokens, skip_special_tokens=True)
        assert found.raw.decode("utf-8", "replace") == found.text
        ends = found.ends.tolist()
        assert len(ends) == len(tokens) and ends == sorted(ends)
        assert (ends[-1] if ends else 0) == len(found.raw)


@pytest.mark.parametrize("kind", KINDS)
def test_many_sequences_decode_as_each_does(kind):
    tokenizer, rng = KINDS[kind](), random.Random(1)
    sequences = [[rng.randrange(len(tokenizer) + 3) for _ in range(rng.randrange(25))] for _ in range(200)]
    assert decode_all(tokenizer, sequences) == [decode(tokenizer, tokens).text for tokens in sequences]


@pytest.mark.parametrize("kind", KINDS)
def test_an_end_counts_the_characters_that_are_already_settled(kind):
    """The whole characters before ends[i] are how far the text of tokens[:i + 1], or of fewer, agrees with the whole
    text (a byte-fallback decoder takes back what it has shown while a character is incomplete)."""
    tokenizer, rng = KINDS[kind](), random.Random(1)
    compared = 0
    for _ in range(200):
        tokens = [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(1, 25))]
        found = decode(tokenizer, tokens)
        text = found.text
        if "\ufffd" in text:  # which token an undecodable byte belongs to is a convention
            continue
        prefixes = [tokenizer.decode(tokens[: i + 1], skip_special_tokens=True) for i in range(len(tokens))]
        settled = [len(os.path.commonprefix([prefix, text])) for prefix in prefixes]
        assert characters(found) == list(itertools.accumulate(settled, max))
        compared += 1
    assert compared > 5


def test_a_character_split_over_tokens_ends_with_its_last_one():
    tokenizer = byte_level()
    tokens = [tokenizer.convert_tokens_to_ids(c) for c in "aæĹ¥b"]  # 日 is three bytes
    found = decode(tokenizer, tokens)
    assert (found.text, found.ends.tolist(), characters(found)) == ("a日b", [1, 2, 3, 4, 5], [1, 1, 1, 2, 3])
    assert found.tokens_of([(1, 4)]).tolist() == [[1, 4]]


def test_a_response_cut_inside_a_character_keeps_what_came_before_it():
    """The tail used to be dropped, whole characters included."""
    tokenizer = byte_level()
    tokens = tokenizer.encode("при日")[:-1]
    found = decode(tokenizer, tokens)
    assert found.text == tokenizer.decode(tokens) and found.text.startswith("при") and found.ends[-1] == len(found.raw)


def test_special_tokens_add_nothing():
    tokenizer = word_level()
    bos, eos, pad, a, b = (tokenizer.convert_tokens_to_ids(t) for t in ("<bos>", "<eos>", "<pad>", "a", "b"))
    found = decode(tokenizer, [bos, a, pad, b, eos, eos])
    assert (found.text, found.ends.tolist()) == ("a b", [0, 1, 1, 3, 3, 3])


def test_no_tokens():
    found = decode(byte_level(), [])
    assert (found.text, found.ends.tolist(), found.tokens_of([]).shape) == ("", [], (0, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_the_token_that_completes_a_closing_tag_is_the_steps_last(kind):
    """Every tokenizer spells `a <step> b </step> a` its own way; the span of the block is found in all of them."""
    tokenizer = KINDS[kind]()
    spelt = SPELT if kind in ("byte_fallback", "sentence_piece") else None
    tokens = tokenizer.convert_tokens_to_ids(spelt) if spelt else tokenizer.encode("a <step> b </step> a")
    found = decode(tokenizer, tokens)
    span = found.raw.index(b"<step>"), found.raw.index(b"</step>") + len(b"</step>")
    [[first, last]] = found.tokens_of([span]).tolist()
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
    found = decode(tokenizer, [lone] * 20_000)
    assert time.process_time() - start < 2.0 and len(found.text) == found.ends[-1] == 20_000


def test_a_token_that_is_added_later_is_read():
    tokenizer = byte_level()
    decode(tokenizer, [5])
    tokenizer.add_tokens(["<new>"])
    assert decode(tokenizer, [tokenizer.convert_tokens_to_ids("<new>")]).text == "<new>"
