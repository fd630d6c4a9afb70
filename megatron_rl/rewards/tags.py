"""Parses the generator's output: reasoning steps, answer and format.

The grammar is that of arXiv 2505.15034: think > step*, then answer > boxed.
"""

from __future__ import annotations

import re

MIN_STEPS = 3  # fewer steps cost 0.4 of the format score

_BRACES = re.compile(r"\\boxed\{|\\[\\{}]|[{}]")  # an escaped brace groups nothing


def block_spans(text: str | bytes, tag: str, flags: int = 0) -> list[tuple[int, int]]:
    """Returns the spans [start, end) of the blocks <tag>...</tag>, tags included, in order: in characters of a str, in
    bytes of UTF-8. Any text is allowed. `flags`: of `re`.

    A block reaches from an opening tag to the next closing one. An opening tag inside a block is part of its text, and
    a tag without its partner makes no block, as in `<tag>(.*?)</tag>`; but the time grows with the length alone.
    """
    pattern = f"<(/?){re.escape(tag)}>"
    spans: list[tuple[int, int]] = []
    start: int | None = None  # of the block that is open
    for found in re.finditer(pattern if isinstance(text, str) else pattern.encode(), text, flags):  # pyright: ignore
        if not found[1] and start is None:
            start = found.start()
        elif found[1] and start is not None:
            spans.append((start, found.end()))
            start = None
    return spans


def block_texts(text: str, tag: str, flags: int = 0) -> list[str]:
    """Returns the text inside each block <tag>...</tag>, as it stands. `flags`: of `re`."""
    return [text[start + len(tag) + 2 : end - len(tag) - 3] for start, end in block_spans(text, tag, flags)]


def step_spans(text: str | bytes) -> list[tuple[int, int]]:
    """Returns the spans of the step blocks, as `block_spans` does."""
    return block_spans(text, "step")


def step_texts(text: str) -> list[str]:
    """Returns the text inside each step block, stripped."""
    return [block.strip() for block in block_texts(text, "step")]


def boxed(text: str) -> str | None:
    r"""Returns the content of the last \boxed{...} with balanced braces, the innermost of nested ones; None without
    one."""
    start, end = max(_boxes(text), default=(0, 0))
    return text[start + len("\\boxed{") : end - 1].strip() if end else None


def answer_text(text: str) -> str | None:
    r"""Returns the content of the last \boxed{}, else of the last <answer> block; None without one.

    The <answer> block may lack its closing tag.
    """
    found = boxed(text)
    if found is None and "<answer>" in text:
        found = text.rpartition("<answer>")[2].partition("</answer>")[0]
    return found


def generator_format(text: str) -> float:
    r"""Returns how well the grammar is kept, in [0, 1], for logging and for the verifier's count gate.

    The score is 0 without an answer block; otherwise 1.0, minus 0.8 when the block is not exactly one \boxed{...} with
    something in it, minus 0.8 without steps or 0.4 with fewer than three.
    """
    _, opened, rest = text.partition("<answer>")
    answer, closed, _ = rest.partition("</answer>")
    if not (opened and closed):
        return 0.0
    answer = answer.strip()
    tenths = 10
    if (0, len(answer)) not in _boxes(answer) or not boxed(answer):
        tenths -= 8
    steps = len(step_spans(text))
    tenths -= 8 if steps == 0 else 4 if steps < MIN_STEPS else 0
    return max(0, tenths) / 10


def _boxes(text: str) -> list[tuple[int, int]]:
    r"""Returns the spans of the balanced \boxed{...}, in one pass over the braces."""
    opened: list[int | None] = []  # start of each open brace's box; None: a plain brace
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
