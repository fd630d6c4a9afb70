"""IFEval's instructions: verdicts against the public checkers, and the grader over a problem's instructions."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import oracles
import pytest

from megatron_rl.rewards.instructions import checks, followed, grade, loosened

ORACLE = oracles.ifeval()
PUBLISHED = os.environ.get("IFEVAL_VERDICTS")  # published.json of tests/oracles/ifeval.py


@pytest.mark.parametrize("kind", checks())
def test_every_verdict_is_that_of_the_public_checker(kind):
    rows = [row for row in ORACLE["rows"] if row["kind"] == kind]
    assert rows
    for row in rows:
        for mode, variants in (("strict", lambda text: [text]), ("loose", loosened)):
            found = "".join("01"[followed(variants(text), [kind], [row["values"]])[0]] for text in ORACLE["texts"])
            apart = [text for text, a, b in zip(ORACLE["texts"], found, row[mode], strict=True) if a != b]
            assert not apart, (row["values"], mode, apart[:3])
            assert len(set(found)) == 2  # the texts decide about every rule


@pytest.mark.skipif(PUBLISHED is None, reason="make oracles IFEVAL=FOLDER gives the published prompts and responses")
def test_every_verdict_on_the_published_responses_is_that_of_the_public_checkers():
    rows = json.loads(Path(str(PUBLISHED)).read_text())
    assert len(rows) == 541
    for row in rows:
        own = grade(row["response"], row)
        for mode, variants in (("strict", [row["response"]]), ("loose", loosened(row["response"]))):
            told = followed(variants, row["instruction_id_list"], row["kwargs"])
            assert "".join("01"[one] for one in told) == row[mode], row["key"]
            assert own[mode] == float("0" not in row[mode])
            assert own[f"share_{mode}"] == Counter(row[mode])["1"] / len(row[mode])


PAYLOAD = {
    "instruction_id_list": ["punctuation:no_comma", "startend:quotation", "length_constraints:number_words"],
    "kwargs": [{}, {"num_words": None}, {"num_words": 2, "relation": "at least", "keywords": None}],
}


def test_reward_is_all_or_share_strict_or_loose():
    found = grade('*"one two"*', PAYLOAD)
    assert found == {"reward": 0.0, "strict": 0.0, "share_strict": 2 / 3, "loose": 1.0, "share_loose": 1.0}
    for mode, credit, reward in (("strict", "share", 2 / 3), ("loose", "all", 1.0), ("loose", "share", 1.0)):
        assert grade('*"one two"*', PAYLOAD, mode=mode, credit=credit)["reward"] == reward
    assert grade(" ", PAYLOAD, credit="share")["reward"] == 0.0
    assert grade("", {"instruction_id_list": []})["reward"] == 1.0


def test_thoughts_are_not_part_of_the_response():
    assert grade('<think>I, for one</think>\n"one two"', PAYLOAD)["reward"] == 1.0
    assert grade('<think>\n"one two"', PAYLOAD)["reward"] == 0.0, "a thought that is not closed is no answer"


@pytest.mark.parametrize(
    ("kinds", "values", "message"),
    [
        (["punctuation:no_coma"], [{}], "'punctuation:no_coma' is unknown"),
        (["keywords:existence"], [{}], "kwargs of keywords:existence, {}, cannot be used"),
        (["length_constraints:number_words"], [{"num_words": 3, "relation": "more"}], "'more' of an instruction"),
    ],
)
def test_unknown_kinds_and_missing_values_are_errors(kinds, values, message):
    with pytest.raises(ValueError, match=message):
        grade("text", {"instruction_id_list": kinds, "kwargs": values})
