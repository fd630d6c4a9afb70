"""Parses the output of the generator (the model that solves the problems): reasoning steps, answer and format.

The expected format is the one of arXiv 2505.15034: <step> blocks inside a <think> block, then an <answer> block with
a \\boxed{} answer.
"""

from __future__ import annotations

import re

THINK, THOUGHT_END = "<think>", "</think>"  # texts that begin and end a thought
MIN_STEPS = 3  # a solution with fewer <step> blocks, but at least one, loses 0.4 of the format score

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[\\{}]|[{}]")  # an escaped brace does not group
_JOINED = re.compile(r"\b(and|or)\b|,|;")  # what stands between boxes that are one answer, as in math-verify


def block_spans(text: str | bytes, tag: str, flags: int = 0) -> list[tuple[int, int]]:
    """Returns the spans [start, end) of the blocks <tag>...</tag>, tags included, in order of position.

    The offsets are in characters for a str and in bytes for UTF-8 bytes. Any text is allowed. `flags`: flags of `re`.

    A block extends from an opening tag to the next closing tag. An opening tag inside a block is part of the block's
    text, and a tag without its partner is ignored. The result is the same as with the regular expression
    `<tag>(.*?)</tag>`, but needs only linear time.
    """
    pattern = f"<(/?){re.escape(tag)}>"
    spans: list[tuple[int, int]] = []
    start: int | None = None  # start of the open block
    for match in re.finditer(pattern if isinstance(text, str) else pattern.encode(), text, flags):  # pyright: ignore
        if not match[1] and start is None:
            start = match.start()
        elif match[1] and start is not None:
            spans.append((start, match.end()))
            start = None
    return spans


def after_thinking(text: str) -> str:
    """Returns the answer in a response: the text after the last </think> without leading spaces, or the whole text if
    there is no thought. Returns "" if the last <think> is not closed, because the response then has no answer.
    """
    _, closed, answer = text.rpartition(THOUGHT_END)
    if THINK in answer:
        return ""
    return answer.lstrip() if closed else text


def block_texts(text: str, tag: str, flags: int = 0) -> list[str]:
    """Returns the unchanged text inside each block <tag>...</tag>. `flags`: flags of `re`."""
    return [text[start + len(tag) + 2 : end - len(tag) - 3] for start, end in block_spans(text, tag, flags)]


def between(text: str, opening: str, closing: str) -> str | None:
    """Returns the text between the first opening tag and the next closing tag; None if one of the tags is missing."""
    _, opened, rest = text.partition(opening)
    inside, closed, _ = rest.partition(closing)
    return inside if opened and closed else None


def step_spans(text: str | bytes) -> list[tuple[int, int]]:
    """Returns the spans [start, end) of the <step> blocks; see `block_spans`."""
    return block_spans(text, "step")


def step_texts(text: str) -> list[str]:
    """Returns the stripped text inside each <step> block."""
    return [block.strip() for block in block_texts(text, "step")]


def boxed(text: str) -> str | None:
    r"""Returns the content of the last \boxed{...} or \fbox{...} with balanced braces. If the last box is nested in
    another box, this is the inner box. Returns None if there is no box."""
    start, inside, end = max(_boxes(text), default=(0, 0, 0))
    return text[inside : end - 1].strip() if end else None


def joined_boxes(text: str) -> str | None:
    r"""Returns the content of the last box, joined by commas with the boxes shortly before it: `1,2` for `\boxed{1} and
    \boxed{2}`. Returns None if there is no box.

    The rule is that of math-verify (`extract_boxed_content`), by which mathematics is graded, for balanced braces.
    """
    contents: list[str] = []
    first = len(text)  # start of the earliest box so far
    for start, inside, end in sorted(_boxes(text), reverse=True):
        if end > first:  # the box contains the box behind it
            break
        content, between = text[inside : end - 1].strip(), text[end:first]
        different = bool(contents) and content != contents[-1] and _JOINED.search(between)
        if contents and len(between) >= 10 and not (different and len(between) < 70):
            break
        contents += [content] * (content not in contents[-1:])
        first = start
    return ",".join(reversed(contents)) if first < len(text) else None


def answer_text(text: str) -> str | None:
    r"""Returns the content of the last \boxed{} of a response. Without a box, returns the content of the last <answer>
    block. Returns None if there is neither a box nor an <answer> block.

    The closing tag of the <answer> block may be missing.
    """
    answer = boxed(text)
    if answer is None and "<answer>" in text:
        answer = text.rpartition("<answer>")[2].partition("</answer>")[0]
    return answer


def generator_format(text: str) -> float:
    r"""Returns the format score of a solution, in [0, 1]. It is used for logging and by `verdicts.verifier_format`.

    The score is 0 without an <answer> block. Otherwise the score starts at 1.0 and is reduced, but not below 0: by 0.8
    if the <answer> block is not exactly one non-empty \boxed{...}; by 0.8 without <step> blocks, and by 0.4 with one or
    two <step> blocks.
    """
    answer = between(text, "<answer>", "</answer>")
    if answer is None:
        return 0.0
    answer, tenths = answer.strip(), 10
    whole = any((start, end) == (0, len(answer)) for start, _, end in _boxes(answer))
    if not whole or not answer.startswith("\\boxed{") or not boxed(answer):
        tenths -= 8
    steps = len(step_spans(text))
    tenths -= 8 if steps == 0 else 4 if steps < MIN_STEPS else 0
    return max(0, tenths) / 10


def _boxes(text: str) -> list[tuple[int, int, int]]:
    r"""Returns (start, start of the content, end) of all balanced \boxed{...} and \fbox{...}, in one pass over the
    braces. Space may stand before the brace."""
    opened: list[tuple[int | None, int]] = []  # stack of open braces: (index of its box, or None; end of the brace)
    boxes: list[tuple[int, int, int]] = []
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "}":
            start, inside = opened.pop() if opened else (None, 0)
            if start is not None:
                boxes.append((start, inside, match.end()))
        elif token.endswith("{") and token != "\\{":
            opened.append((None if token == "{" else match.start(), match.end()))
    return boxes
