"""Faults of rows: columns that were ignored, scores of another objective, prompts and end tokens that stood twice."""

from __future__ import annotations

import json

import pytest
from chats import CHATML, chat_tokenizer, said
from tiny_models import make_model

from megatron_rl.algorithms import objectives
from megatron_rl.config.schema import PromptSet, SftData
from megatron_rl.data.problems import columns_of, read_problems
from megatron_rl.data.rows import DataError
from megatron_rl.data.sft import read_samples, rows_of_loss, sft_rollouts
from megatron_rl.main import main

USER, GOOD, BAD = [said("user", "1+1?")], [said("assistant", "2")], [said("assistant", "3")]


def write(tmp_path, *rows):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "rows.jsonl")


def texts(tmp_path, row, kind="completion", tokenizer=None, **settings):
    """Returns (whole text, trained text, advantage) of each rollout of a row."""
    tokenizer = tokenizer or chat_tokenizer(CHATML)
    found = read_samples(SftData(train=write(tmp_path, row), **settings), kind=kind)
    rollouts = sft_rollouts(found, tokenizer, append_eos=True, max_tokens=500)
    return [(tokenizer.decode(r.tokens), tokenizer.decode(r.tokens[r.trainable]), r.advantages) for r in rollouts]


@pytest.mark.parametrize(
    ("objective", "expected"), [("rwr", 0.25), ("a_lol", 0.25), ("kto", 1.0), ("clipped", "leave one of them out")]
)
def test_faults_an_objective_reads_the_score_of_its_own_page(tmp_path, objective, expected):
    row = {"prompt": "1+1?", "response": "2", "label": True, "reward": 0.25}
    kind = rows_of_loss(objectives.find(objective, {}).needs)
    if isinstance(expected, str):
        with pytest.raises(DataError, match=expected):
            texts(tmp_path, row, kind)
    else:
        assert [advantage for *_, advantage in texts(tmp_path, row, kind)] == [expected]
        del row["label" if expected == 1.0 else "reward"]
        with pytest.raises(DataError, match=f"{'label' if expected == 1.0 else 'reward'} is None: give"):
            texts(tmp_path, row, kind)


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"prompt": USER, "chosen": USER + GOOD, "rejected": USER + BAD}, "pair"),
        ({"prompt": [said("system", "s"), *USER], "chosen": USER + GOOD, "rejected": USER + BAD}, "pair"),
        ({"prompt": "1+1?", "chosen": USER + GOOD, "rejected": USER + BAD}, "compared"),
        ({"prompt": "1+1?", "chosen": "1+1? 2", "rejected": "1+1? 3"}, "pair"),
        ({"prompt": USER, "completion": USER + GOOD}, "completion"),
        ({"prompt": USER, "completion": USER + GOOD, "label": True}, "labelled"),
    ],
)
def test_faults_a_prompt_that_the_responses_repeat_counts_once(tmp_path, row, kind):
    for whole, *_ in texts(tmp_path, row, kind):
        assert whole.count("1+1?") == 1, whole


def test_faults_a_prompt_that_one_response_alone_repeats_is_a_part_of_that_response(tmp_path):
    found = texts(tmp_path, {"prompt": "1+1?", "chosen": "1+1? 2", "rejected": "3"}, "pair")
    assert [whole.count("1+1?") for whole, *_ in found] == [2, 1]
    turns = {"prompt": USER + GOOD, "completion": GOOD + USER + GOOD}  # an assistant may say the same twice
    assert texts(tmp_path, turns)[0][0].count("assistant") == 3
    with pytest.raises(DataError, match="not among the first messages of chosen and rejected"):
        texts(tmp_path, {"prompt": "2+2?", "chosen": USER + GOOD, "rejected": USER + BAD}, "pair")


@pytest.mark.parametrize("response", ["2", "2<|im_end|>", "2<|im_end|>\n", "2 <|im_end|><|im_end|>", "2<s>"])
def test_faults_an_end_token_that_stands_in_the_text_gives_one_end(tmp_path, response):
    rows = [
        ({"prompt": "1+1?", "response": response}, "completion", "2<|im_end|>"),
        ({"prompt": "1+1?", "chosen": response, "rejected": "3"}, "pair", "2<|im_end|>"),
        ({"messages": [*USER, said("assistant", response)]}, "completion", "2<|im_end|>\n"),
        ({"prompt": USER, "chosen": [said("assistant", response)], "rejected": BAD}, "pair", "2<|im_end|>\n"),
    ]
    for row, kind, trained in rows:
        assert texts(tmp_path, row, kind)[0][1] == trained


def test_faults_a_begin_token_that_stands_in_the_prompt_gives_one_begin(tmp_path):
    tokenizer = chat_tokenizer(CHATML, adds_begin=True)
    for prompt in ("1+1?", "<s>1+1?"):
        assert texts(tmp_path, {"prompt": prompt, "response": "2"}, tokenizer=tokenizer)[0][0].count("<s>") == 1


@pytest.mark.parametrize(
    ("column", "says"),
    [
        *((name, "rename the column to 'tools'") for name in ("tool_defs", "functions")),
        ("system_prompt", "rename the column to 'system'"),
        *((name, f"{name!r} is not read") for name in ("images", "image", "history", "chat_template_kwargs")),
    ],
)
def test_faults_columns_that_would_change_a_sample_are_refused_in_all_forms(tmp_path, column, says):
    for row, kind in (
        ({"messages": USER + GOOD}, "completion"),
        ({"prompt": "1+1?", "response": "2"}, "completion"),
        ({"prompt": USER, "chosen": GOOD, "rejected": BAD}, "pair"),
        ({"prompt": "1+1?", "chosen": "2", "rejected": "3"}, "compared"),
        ({"prompt": "1+1?", "completion": "2", "label": True}, "labelled"),
        ({"prompt": "1+1?", "completions": ["2"], "labels": [True]}, "steps"),
    ):
        with pytest.raises(DataError, match=says):
            read_samples(SftData(train=write(tmp_path, row | {column: "x"})), kind=kind)
        assert read_samples(SftData(train=write(tmp_path, row | {column: None})), kind=kind)
    for row in ({"prompt": USER, "answer": "2"}, {"question": "1+1?", "answer": "2"}):
        for chat in (None, True):
            file = write(tmp_path, row | {column: "x"})
            with pytest.raises(DataError, match=says):
                read_problems(PromptSet(path=file, chat=chat))
            [found] = read_problems(PromptSet(path=file, chat=chat, fields={column: column}))  # a reward reads it
            assert found.values[column] == "x"


def test_faults_tools_and_system_beside_texts_are_refused_or_read(tmp_path):
    for column, value in (("tools", [{"name": "f"}]), ("system", "Be brief.")):
        with pytest.raises(DataError, match=f"'{column}' is not read beside texts"):
            texts(tmp_path, {"prompt": "1+1?", "response": "2", column: value})
    file = write(tmp_path, {"question": "1+1?", "system": "Be brief.", "answer": "2"})
    [found] = read_problems(PromptSet(path=file, chat=True, system="Be long."))
    assert found.values["messages"] == [said("system", "Be brief."), *USER]
    with pytest.raises(DataError, match="'tools' is not read: prompts are put without tools"):
        read_problems(PromptSet(path=write(tmp_path, {"question": "1+1?", "tools": [{"name": "f"}]})))


def test_faults_columns_that_nothing_reads_are_named_with_the_closest(tmp_path, capsys):
    make_model(tmp_path / "model", num_hidden_layers=1)
    row = {"prompt": "1+1?", "completion": "2", "label": True, "rewrd": 1.0, "depth": 3}
    own = [
        "--command",
        "sft",
        f"model.path={tmp_path}/model",
        f"data.train={write(tmp_path, row)}",
        "run.dir=" + str(tmp_path),
    ]
    assert main(["check", *own, "loss.objective=kto"]) == 0
    assert ", with labels; not read: `depth`, `rewrd`" in capsys.readouterr().out
    row = {"prompt": "1+1?", "chosen": "2", "rejected": "3", "margn": 1.0}
    own[3] = f"data.train={write(tmp_path, row)}"
    assert main(["check", *own, "loss.objective=bradley_terry"]) == 0
    assert "; not read: `margn` (did you mean 'margin'?)" in capsys.readouterr().out


def test_faults_columns_of_problems_are_passed_on_or_named(tmp_path):
    row = {"prompt": USER, "answer": "2", "level": 3, "answers": ["2"], "other": USER, "system": "s", "empty": None}
    assert columns_of(PromptSet(path=write(tmp_path, row)), 9) == ({"level"}, {"answers", "other"})
    preset = PromptSet(path=write(tmp_path, {"question": "1?", "answer": "#### 2", "level": 3}), settings="gsm8k")
    assert columns_of(preset, 9) == (set(), {"level"})
