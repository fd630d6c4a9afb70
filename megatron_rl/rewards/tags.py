"""The generator's output: steps, answer and format (grammar of arXiv 2505.15034: think > step*, then answer > boxed)."""

from __future__ import annotations

import re

STEP = re.compile(r"<step>(.*?)</step>", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
MIN_STEPS = 3  # fewer cost 0.4 of the format score


def step_spans(text: str) -> list[tuple[int, int]]:
    """Character spans [start, end) of the step blocks, tags included, in order. Any text is allowed."""
    return [match.span() for match in STEP.finditer(text)]


def step_texts(text: str) -> list[str]:
    """What stands inside each step block."""
    return [match.group(1).strip() for match in STEP.finditer(text)]


def boxed(text: str) -> str | None:
    r"""Content of the last \boxed{...} with balanced braces; None when there is none."""
    start = text.rfind("\\boxed{")
    while start >= 0:
        depth = 0
        for i in range(start + 6, len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if depth == 0:
                return text[start + 7 : i].strip()
        start = text.rfind("\\boxed{", 0, start)
    return None


def generator_format(text: str) -> float:
    """How well the grammar is kept, in [0, 1]: for logging, and for the verifier's count gate (0.6).

    0 without an answer block; otherwise 1.0, minus 0.8 when the block is not exactly one boxed answer, minus 0.8 without steps or
    0.4 with fewer than three.
    """
    answer = _ANSWER.search(text)
    if answer is None:
        return 0.0
    body = answer.group(1).strip()
    score = 1.0
    if not (body.startswith("\\boxed{") and boxed(body) is not None and _closes_at_end(body)):
        score -= 0.8
    steps = len(step_spans(text))
    score -= 0.8 if steps == 0 else 0.4 if steps < MIN_STEPS else 0.0
    return min(1.0, max(0.0, score))


def _closes_at_end(body: str) -> bool:
    depth = 0
    for i, character in enumerate(body):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0 and character == "}":
            return i == len(body) - 1
    return False
