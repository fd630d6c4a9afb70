"""Grades answers of a model that searches its own memory (SSRL, arXiv 2508.10874): 0.9 * exact match + 0.1 * format
score.

The rules are those of the released code (TsinghuaC3I/SSRL 3009f21, verl/workers/reward_manager/naive.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megatron_rl.rewards import exact_match
from megatron_rl.texts.tags import block_texts

TURNS = 2  # number of thoughts (<think> blocks) required for the full format score
MAX_TURNS = 8  # maximum number of thoughts; the format score is 0 above it

_NAMES = ("think", "search", "information", "answer")
_TAG = re.compile(r"<(/?(?:think|search|information|answer))>")
_SEARCH = ["search", "/search", "information", "/information"]


def grade(response: str, payload: Mapping[str, Any]) -> float:
    """Returns 0.9 * exact match + 0.1 * format. The known answers are payload["answers"] if present, otherwise
    payload["answer"].
    """
    return 0.9 * exact_match.grade(response, payload) + 0.1 * search_format(response)


def search_format(response: str) -> float:
    """Returns the format score min(1, t / 2) * min(t, s + 1) / max(t, s + 1) of t thoughts and s searches, in [0, 1].

    The score is 0 for more than eight thoughts, and for a response that violates one of these rules. The response
    begins with a thought and ends with the answer. Each search is immediately followed by its information. No block is
    empty or repeats the template's placeholder ("your query"). A query is one line. There is no other text in angle
    brackets; every `<` counts as an opening bracket, also in `1 < 2`.
    """
    response = response.strip()
    tags = _TAG.findall(response)
    bracketed = (part.partition("<")[2] for part in response.split(">")[:-1])  # the texts between < and >
    if any(tag.removeprefix("/") not in _NAMES for tag in bracketed if tag):
        return 0.0
    if len(tags) < 4 or not _kept(response):
        return 0.0
    if tags[:2] != ["think", "/think"] or tags[-2:] != ["answer", "/answer"]:
        return 0.0
    if not (response.startswith("<think>") and response.endswith("</answer>")) or not _paired(tags[2:-2]):
        return 0.0
    thoughts, searches = tags.count("think"), tags.count("search")
    if searches != tags.count("information") or thoughts > MAX_TURNS:
        return 0.0
    return min(1.0, thoughts / TURNS) * min(thoughts, searches + 1) / max(thoughts, searches + 1)


def _kept(response: str) -> bool:
    """Returns whether the content of every block is allowed. The content may not be empty and may not contain the
    template's placeholder. A query may have only one line.
    """
    placeholder = {"think": "your thoughts", "search": "your query", "information": "your information"}
    for name in _NAMES:
        for content in block_texts(response, name):
            empty, copied = not content.strip(), placeholder.get(name, "your answer") in content.lower()
            if empty or copied or (name == "search" and "\n" in content):
                return False
    return True


def _paired(tags: list[str]) -> bool:
    """Returns whether every search block is closed and immediately followed by an information block. Other tags may be
    before and after such a pair of blocks.
    """
    at = 0
    while at < len(tags):
        if tags[at] == "search" and tags[at : at + 4] != _SEARCH:
            return False
        at += 4 if tags[at] == "search" else 1
    return True
