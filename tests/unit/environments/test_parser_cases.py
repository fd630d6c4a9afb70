"""Every parser of a model's text takes time in proportion to its length.

Repeated delimiters without their partners took seconds for 64,000 characters, on the driver.
"""

from __future__ import annotations

import re
import time

import pytest
from parsers import PARSERS, PIECES

from megatron_rl.environments.tool_task import first_call
from megatron_rl.texts.tags import block_texts

CHARACTERS, SECONDS = 300_000, 2.0


@pytest.mark.parametrize("name", PARSERS)
def test_parser_cases_of_repeated_delimiters_take_time_in_proportion(name):
    for piece in PIECES[:: 6 if name.startswith("mathematics") else 1]:  # math-verify reads each slowly
        text = piece * (CHARACTERS // len(piece))
        start = time.process_time()
        PARSERS[name](text)
        assert time.process_time() - start < SECONDS, piece


@pytest.mark.parametrize(
    "text",
    [
        "<a>1</a><a>2</a>",
        "<a><a>1</a></a>",
        "</a><a>1</a>",
        "<a>1",
        "<a></a>",
        "<a>\n</a> <b>x</b> <a>2</a>",
        "<A>1</A><a>2</A>",
    ],
)
def test_parser_cases_find_the_blocks_that_a_lazy_pattern_finds(text):
    for flags in (0, re.IGNORECASE):
        assert block_texts(text, "a", flags) == re.findall("<a>(.*?)</a>", text, re.DOTALL | flags)
    lazy = re.search(r"<(a|b)>(.*?)</\1>", text, re.DOTALL)
    assert first_call(text, ["a", "b"]) == (None if lazy is None else (lazy[1], lazy[2]))
