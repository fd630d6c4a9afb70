"""Parses the output of the generator (the model that solves the problems): reasoning steps, answer and format.

The expected format is the one of arXiv 2505.15034: <step> blocks inside a <think> block, then an <answer> block with
a \\boxed{} answer.
"""

from __future__ import annotations

import re

THINK = "<think>"  # text that opens a thought
MIN_STEPS = 3  # a solution with fewer <step> blocks, but at least one, loses 0.4 of the format score

_BRACES = re.compile(r"\\boxed\{|\\[\\{}]|[{}]")  # an escaped brace does not group


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
    for found in re.finditer(pattern if isinstance(text, str) else pattern.encode(), text, flags):  # pyright: ignore
        if not found[1] and start is None:
            start = found.start()
        elif found[1] and start is not None:
            spans.append((start, found.end()))
            start = None
    return spans


def after_thinking(text: str) -> str:
    """Returns the answer in a response: the text after the last </think> without leading spaces, or the whole text if
    there is no thought. Returns "" if the last <think> is not closed, because the response then has no answer.
    """
    _, closed, answer = text.rpartition("</think>")
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
    r"""Returns the content of the last \boxed{...} with balanced braces. If the last box is nested in another box, this
    is the inner box. Returns None if there is no box."""
    start, end = max(_boxes(text), default=(0, 0))
    return text[start + len("\\boxed{") : end - 1].strip() if end else None


def answer_text(text: str) -> str | None:
    r"""Returns the content of the last \boxed{} of a response. Without a box, returns the content of the last <answer>
    block. Returns None if there is neither a box nor an <answer> block.

    The closing tag of the <answer> block may be missing.
    """
    found = boxed(text)
    if found is None and "<answer>" in text:
        found = text.rpartition("<answer>")[2].partition("</answer>")[0]
    return found


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
    if (0, len(answer)) not in _boxes(answer) or not boxed(answer):
        tenths -= 8
    steps = len(step_spans(text))
    tenths -= 8 if steps == 0 else 4 if steps < MIN_STEPS else 0
    return max(0, tenths) / 10


def _boxes(text: str) -> list[tuple[int, int]]:
    r"""Returns the spans of all balanced \boxed{...}, in one pass over the braces."""
    opened: list[int | None] = []  # stack of open braces: the index of its \boxed, or None for a brace of no box
    boxes: list[tuple[int, int]] = []
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "}":
            start = opened.pop() if opened else None
            if start is not None:
                boxes.append((start, match.end()))
        elif token.endswith("{") and token != "\\{":
            opened.append(None if token == "{" else match.start())
    return boxes
