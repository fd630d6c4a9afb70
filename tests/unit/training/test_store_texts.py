"""The columns of the store that people read: texts, credit by reasoning step, and pieces of conversations."""

from __future__ import annotations

import math

import pytest
from test_store import ITERATION, bare, collected, decode, rollout

from megatron_rl.training import rollout_parquet
from megatron_rl.training.iteration import Collected, Iteration
from megatron_rl.training.store import (
    IterationStore,
    read_rows,
)
from megatron_rl.types import STEP, Annotations, Rollout, spans_of


def test_the_readable_columns_are_those_of_the_report(tmp_path):
    store = IterationStore(tmp_path, decode=decode)
    path = store.put(ITERATION, collected(rollout(), bare(), bare(advantages=0.5)), {})
    full, empty, one = read_rows(path)
    assert full == {
        "iteration": 12,
        "role": "generator",
        "group": "p1",
        "question": "Q?",
        "answer": "42",
        "prompt": "Q?",
        "text": "<step>a</step><step>b</step>!",
        "stop": "eos",
        "version": 4,
        "num_tokens": 4,
        "correct": True,
        "rewards": {"outcome": 1.0, "format": 0.25},
        "steps": ["<step>a</step>", "<step>b</step>"],
        "verdicts": [1, None],
        "step_rewards": [0.5, -0.5],
        "step_advantages": [1.5, 3.5],
        "advantage": 1.5,
        "review": "fine",
        "agent": None,
        "episode": None,
        "pieces": None,
    }
    assert (empty["text"], empty["advantage"], empty["verdicts"], empty["correct"]) == ("é<>&", None, None, None)
    assert (empty["steps"], empty["step_rewards"], empty["step_advantages"], one["advantage"]) == ([], [], [], 0.5)


def test_step_advantages_are_those_of_trained_tokens(tmp_path):
    """The last trained token of a step counts; a partner or an environment may have written the end of it, or all."""
    spans = spans_of((1, 2, -1), (2, 0, 0), (1, 1, -1), (2, 2, -1))
    changed = rollout(spans=spans, annotations={STEP: Annotations([(1, 4), (4, 6), (0, 1)])})
    number = rollout(spans=spans, annotations={STEP: Annotations([(1, 4), (4, 6)])}, advantages=0.5)
    untrained = rollout(spans=spans_of((6, 2, -1)), annotations={STEP: Annotations([(1, 4)])})
    path = IterationStore(tmp_path, decode=decode).put(ITERATION, collected(changed, number, untrained), {})
    assert [row["step_advantages"] for row in read_rows(path)] == [[1.5, 0.0, 0.0], [0.5, 0.0], [0.0]]


@pytest.mark.parametrize("verdicts", [[1, -1], [True, False], [1.0, 0]])
def test_verdicts_in_any_usual_form(tmp_path, verdicts):
    path = IterationStore(tmp_path, decode=decode).put(
        ITERATION, collected(rollout(payload={"verdicts": verdicts})), {}
    )
    assert read_rows(path)[0]["verdicts"] == [1, -1]


def test_rows_of_one_role(tmp_path):
    iteration = Iteration(cycle=0, index=0, roles=("a", "b"), number=0)
    by_role = {"a": [rollout(role="a")], "b": [bare(role="b"), bare(role="b")]}
    store = IterationStore(tmp_path, decode=decode)
    path = store.put(iteration, Collected(rollouts=by_role, metrics={}), {})
    assert [len(read_rows(path, role)) for role in ("a", "b", None)] == [1, 2, 3]


TALK = spans_of((2, 2, -1), (1, 0, 4), (2, 2, -1), (1, 0, 5))  # a prompt, an answer, a tool, an answer


def pieces(tmp_path, what: Rollout):
    [row] = read_rows(IterationStore(tmp_path, decode=decode).put(ITERATION, collected(what), {}))
    found = row["pieces"]
    return found and [(p["author"], p["tokens"], p["advantage"], p["text"]) for p in found]


def test_what_was_said_is_cut_by_author_with_the_advantage_of_each_answer(tmp_path):
    tokens, per_token = [1, 2, 7, 1, 2, 6], [9.0, 9.0, 0.5, 9.0, 9.0, -1.5]
    talk = {"tokens": tokens, "spans": TALK, "annotations": {}}
    said = [(0, 1, 0.5, "é<>&"), (2, 2, None, "Q?"), (0, 1, -1.5, "!")]
    assert pieces(tmp_path, rollout(**talk, advantages=per_token)) == said
    assert [p[2] for p in pieces(tmp_path, rollout(**talk, advantages=0.25))] == [0.25, None, 0.25]
    assert [p[2] for p in pieces(tmp_path, rollout(**talk, advantages=None))] == [None] * 3
    seated = rollout(payload={"agent": "solver-2", "episode": "7"}, advantages=None)
    assert pieces(tmp_path, seated) == [(0, 4, None, "<step>a</step><step>b</step>!")]
    [row] = read_rows(IterationStore(tmp_path, decode=decode).put(ITERATION, collected(seated), {}))
    assert (row["agent"], row["episode"]) == ("solver-2", "7")


def test_a_text_that_one_author_wrote_is_cut_only_where_nothing_else_shows_its_credit(tmp_path):
    assert pieces(tmp_path, rollout()) is None, "its steps have annotations"
    assert pieces(tmp_path, rollout(annotations={}, advantages=0.5)) is None
    assert pieces(tmp_path, rollout(annotations={}, advantages=[1.0, 2.0, 3.0, 3.0, 3.0, 3.0])) is None, (
        "a prompt has no credit"
    )
    tandem = spans_of((2, 2, -1), (1, 0, 4), (2, 1, -1), (1, 0, 4))
    assert pieces(tmp_path, rollout(annotations={}, spans=tandem, advantages=0.5)) is None
    found = pieces(tmp_path, rollout(annotations={}, advantages=[0.0, 0.0, 1.5, 1.5, math.nan, 2.5]))
    assert found == [
        (0, 2, 1.5, "<step>a</step><step>b"), (0, 1, None, "</step>"), (0, 1, 2.5, "!")
    ]  # fmt: skip


def test_credit_that_changes_with_every_token_of_a_long_text_is_left_out(tmp_path, monkeypatch):
    spans = spans_of((1, 2, -1), (4, 0, 0), (1, 2, -1), (4, 0, 0))
    long = rollout(
        tokens=[1] * 10, logprobs=[0.0] * 10, spans=spans, annotations={}, advantages=[float(i) for i in range(10)]
    )
    assert [p[1] for p in pieces(tmp_path, long)] == [1] * 9
    monkeypatch.setattr(rollout_parquet, "MAX_PIECES", 8)  # of the nine
    assert [p[:3] for p in pieces(tmp_path, long)] == [(0, 4, None), (2, 1, None), (0, 4, None)]
