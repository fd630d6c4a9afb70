r"""Grades responses by IFEval's 25 kinds of instructions that a program can check (arXiv 2311.07911).

The rules, with their exceptions, are those of the public evaluation code (google-research/instruction_following_eval),
so that every verdict is the same. There are two differences. If a problem lacks a value of an instruction, the public
code draws a random value, and this module raises an error. The detection of languages has a fixed seed here.

The packages that detect sentences, words and languages are optional. Without them, importing this module raises
ConfigError.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from megatron_rl.config.base import ConfigError
from megatron_rl.texts.tags import after_thinking

try:
    from langdetect import DetectorFactory, LangDetectException, detect
    from nltk.tokenize.destructive import NLTKWordTokenizer
    from punkt import sent_tokenize  # nltk's splitter of English sentences; the package includes the model
except ImportError as error:
    raise ConfigError(
        f"instructions cannot be graded ({error}): run `pip install 'megatron-rl[instructions]'`, or take another "
        "reward.target"
    ) from error

DetectorFactory.seed = 0  # fixed, because otherwise the detected language of a text may differ between calls
Check = Callable[..., bool]  # function (response, **values) -> whether the response follows an instruction
_OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_JSON_MARKS = ("```json", "```Json", "```JSON", "```")
_POSTSCRIPTS = {"P.P.S": r"p\.\s?p\.\s?s.*$", "P.S.": r"p\.\s?s\..*$"}


def grade(
    response: str,
    payload: Mapping[str, Any],
    *,
    mode: Literal["strict", "loose"] = "strict",
    credit: Literal["all", "share"] = "all",
) -> dict[str, float]:
    """Grades a response by whether it follows the instructions of its problem. payload["instruction_id_list"] has the
    kind of each instruction, such as "punctuation:no_comma", and payload["kwargs"] has a mapping of values for each
    instruction. Thoughts are removed from the response before it is graded (`after_thinking`).

    Returns the reward and the four metrics `strict`, `loose` (1.0 if all instructions are followed, else 0.0),
    `share_strict` and `share_loose` (share of the instructions that are followed). `mode` and `credit` select the
    metric that is the reward. The mode `loose` also accepts an instruction that the response only follows after its
    first line, its last line or its asterisks are removed. A problem without instructions has the reward 1. Raises
    ValueError for an unknown kind and for missing values.
    """
    answer = after_thinking(response)
    kinds, values = payload["instruction_id_list"], payload.get("kwargs")
    metrics: dict[str, float] = {}
    for name, texts in (("strict", [answer]), ("loose", loosened(answer))):
        verdicts = followed(texts, kinds, [{}] * len(kinds) if values is None else values)
        metrics |= {name: float(all(verdicts)), f"share_{name}": sum(verdicts) / len(verdicts) if verdicts else 1.0}
    return {"reward": metrics[mode if credit == "all" else f"share_{mode}"], **metrics}


def followed(texts: Sequence[str], kinds: Sequence[str], values: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Returns for each of [K] instructions whether the response follows it, which means that at least one variant of
    the response follows it. `texts`: the variants; a blank variant follows no instruction. `kinds` and `values`: the
    kind and the values of each instruction; values that are None are ignored. Raises ValueError for an unknown kind and
    for missing values.
    """
    check_of, verdicts = checks(), []
    for kind, raw_values in zip(kinds, values, strict=True):
        if kind not in check_of:
            raise ValueError(f"instruction_id_list: the kind {kind!r} is unknown; known are {', '.join(check_of)}")
        arguments = {name: value for name, value in raw_values.items() if value is not None}
        try:
            verdicts.append(any(bool(text.strip()) and check_of[kind](text, **arguments) for text in texts))
        except TypeError as error:
            raise ValueError(f"kwargs of {kind}, {arguments}, cannot be used: {error}") from error
    return verdicts


def loosened(response: str) -> list[str]:
    """Returns the variants of a response for the mode `loose`, in which it is enough if one variant follows an
    instruction."""
    lines = response.split("\n")
    cut = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    return [text for variant in (response, *cut) for text in (variant, variant.replace("*", ""))]


def checks() -> dict[str, Check]:
    """Returns {kind of instruction: function that checks whether a response follows the instruction}."""
    return {
        "keywords:existence": _existence,
        "keywords:frequency": _frequency,
        "keywords:forbidden_words": _forbidden_words,
        "keywords:letter_frequency": _letter_frequency,
        "language:response_language": lambda text, language: _language(text) in (None, language),
        "length_constraints:number_sentences": _number_sentences,
        "length_constraints:number_paragraphs": _number_paragraphs,
        "length_constraints:number_words": _number_words,
        "length_constraints:nth_paragraph_first_word": _nth_paragraph_first_word,
        "detectable_content:number_placeholders": _number_placeholders,
        "detectable_content:postscript": _postscript,
        "detectable_format:number_bullet_lists": _number_bullet_lists,
        "detectable_format:constrained_response": lambda text: any(option in text for option in _OPTIONS),
        "detectable_format:number_highlighted_sections": _number_highlighted_sections,
        "detectable_format:multiple_sections": _multiple_sections,
        "detectable_format:json_format": _json_format,
        "detectable_format:title": lambda text: any(t.strip("<>").strip() for t in re.findall(r"<<[^\n]+>>", text)),
        "combination:two_responses": _two_responses,
        "combination:repeat_prompt": _repeat_prompt,
        "startend:end_checker": _end_checker,
        "startend:quotation": lambda text: re.fullmatch(r'".*"', text.strip(), re.DOTALL) is not None,
        "change_case:capital_word_frequency": _capital_word_frequency,
        "change_case:english_capital": lambda text: text.isupper() and _language(text) in (None, "en"),
        "change_case:english_lowercase": lambda text: text.islower() and _language(text) in (None, "en"),
        "punctuation:no_comma": lambda text: "," not in text,
    }


def _compared(count: int, relation: str, number: float) -> bool:
    if relation not in ("less than", "at least"):
        raise ValueError(f"the relation {relation!r} of an instruction is neither 'less than' nor 'at least'")
    return count < number if relation == "less than" else count >= number


def _existence(text: str, keywords: Sequence[str]) -> bool:
    return all(re.search(word, text, re.IGNORECASE) for word in keywords)


def _frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return _compared(len(re.findall(keyword.strip(), text, re.IGNORECASE)), relation, frequency)


def _forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    return not any(re.search(rf"\b{word}\b", text, re.IGNORECASE) for word in forbidden_words)


def _letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _compared(Counter(text.lower())[letter.strip().lower()], let_relation, let_frequency)


def _number_sentences(text: str, num_sentences: int, relation: str) -> bool:
    return _compared(len(sent_tokenize(text)), relation, num_sentences)


def _number_paragraphs(text: str, num_paragraphs: int) -> bool:
    filled = [bool(part.strip()) for part in re.split(r"\s?\*\*\*\s?", text)]
    return all(filled[1:-1]) and sum(filled) == num_paragraphs


def _number_words(text: str, num_words: int, relation: str) -> bool:
    return _compared(len(re.findall(r"\w+", text)), relation, num_words)


def _nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = [part.strip() for part in text.split("\n\n")]
    count = sum(map(bool, paragraphs))
    if not (1 <= nth_paragraph <= count == num_paragraphs and paragraphs[nth_paragraph - 1]):
        return False
    word = paragraphs[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"""[.,?!'"]""", word)[0].lower() == first_word.lower()


def _number_placeholders(text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[.*?\]", text)) >= num_placeholders


def _postscript(text: str, postscript_marker: str) -> bool:
    marker = postscript_marker.strip()
    pattern = _POSTSCRIPTS.get(marker, rf"{marker.lower()}.*$")
    return re.search(pattern, text.lower(), re.MULTILINE) is not None


def _number_bullet_lists(text: str, num_bullets: int) -> bool:
    stars, dashes = (re.findall(pattern, text, re.MULTILINE) for pattern in (r"^[^\S\n]*\*[^\*].*$", r"^[^\S\n]*-.*$"))
    return len(stars) + len(dashes) == num_bullets


def _number_highlighted_sections(text: str, num_highlights: int) -> bool:
    single = [match.strip("*") for match in re.findall(r"\*[^\n\*]*\*", text)]
    double = [match[2:-2] for match in re.findall(r"\*\*[^\n\*]*\*\*", text)]
    return sum(bool(match.strip()) for match in single + double) >= num_highlights


def _multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.split(rf"\s?{section_spliter.strip()}\s?\d+\s?", text)) - 1 >= num_sections


def _json_format(text: str) -> bool:
    text = text.strip()
    for mark in _JSON_MARKS:
        text = text.removeprefix(mark)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):  # a text of thousands of nested brackets raises RecursionError
        return False
    return True


def _two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    filled = [part for part in parts if part]
    return all(parts[1:-1]) and len(filled) == 2 and filled[0] != filled[1]


def _repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _end_checker(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _capital_word_frequency(text: str, capital_frequency: int, capital_relation: str) -> bool:
    words = [word for sentence in sent_tokenize(text) for word in NLTKWordTokenizer().tokenize(sentence)]
    return _compared(sum(word.isupper() for word in words), capital_relation, capital_frequency)


def _language(text: str) -> str | None:
    """Returns the language of a text, such as "en"; None if the text has no letters from which to detect a language."""
    try:
        return detect(text)
    except LangDetectException:
        return None
