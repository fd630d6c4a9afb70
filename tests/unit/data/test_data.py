"""Problems and pairs from files and data sets, bad rows, the reader's order and place, rows of SFT."""

import json
import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_rl.config.data_settings import settings_table
from megatron_rl.config.schema import ConfigError, PromptSet, SftData
from megatron_rl.data.problems import Problem, PromptReader, read_problems
from megatron_rl.data.rows import DataError, table_of, write_parquet
from megatron_rl.data.sft import TextPair, read_samples, sft_rollouts
from megatron_rl.types import Stop

GSM8K = Path(__file__).parents[4] / "shared" / "data" / "gsm8k"
SUFFIX = "\n\nPresent the answer in LaTex format: \\boxed{Your answer}"


def jsonl(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def plain(count):
    return [{"question": f"q{i}", "answer": str(i)} for i in range(count)]


def values(source):
    return [dict(p.values) for p in read_problems(source)]


def message(call, *args, **settings):
    with pytest.raises((DataError, ConfigError)) as caught:
        call(*args, **settings)
    return str(caught.value)


def test_jsonl_and_parquet_give_the_same_problems(tmp_path):
    rows = [{"question": "a", "answer": 1}, {"question": "b", "answer": 2}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    from_lines = read_problems(PromptSet(path=jsonl(tmp_path / "p.jsonl", rows)))
    assert from_lines == read_problems(PromptSet(path=str(tmp_path / "p.parquet")))
    assert [(p.row, p.values) for p in from_lines] == [
        (0, {"question": "a", "answer": "1"}),
        (1, {"question": "b", "answer": "2"}),
    ]


def test_fields_reach_inside_lists_and_mappings(tmp_path):
    row = {
        "prompt": [{"content": "system"}, {"content": "what?"}],
        "gold": {"answer": 27.5},
        "tags": ["x"],
        "unused": 1,
    }
    fields = {"question": "prompt.1.content", "answer": "gold.answer", "tags": "tags"}
    assert values(PromptSet(path=jsonl(tmp_path / "p.jsonl", [row]), fields=fields)) == [
        row | {"question": "what?", "answer": "27.5"}
    ]


def test_filters_limit_and_null_values(tmp_path):
    rows = [{"question": f"q{i}", "answer": "1", "meta": {"level": i % 2}, "note": None} for i in range(10)]
    source = PromptSet(
        path=jsonl(tmp_path / "p.jsonl", rows), filters={"meta.level": 1}, limit=3, fields={"note": "note"}
    )
    assert [(v["question"], v["note"]) for v in values(source)] == [("q1", None), ("q3", None), ("q5", None)]


def test_filters_that_nothing_passes_are_refused(tmp_path):
    source = PromptSet(path=jsonl(tmp_path / "p.jsonl", plain(3)), filters={"ability": "math"})
    assert "none of the 3 rows" in message(read_problems, source)


@pytest.mark.parametrize(
    ("pattern", "text", "answer"),
    [
        (r"#### (\S+)", "#### 1 and then #### 2", "2"),
        (r"\d+", "1 2 33", "33"),
        (r"(\d+)(px|em)", "5px 6em", "6"),
        (r"####\s*(.*)", "#### (1,000, 2)", "(1,000, 2)"),
    ],
)
def test_the_last_match_is_the_answer_as_it_stands(tmp_path, pattern, text, answer):
    source = PromptSet(path=jsonl(tmp_path / "p.jsonl", [{"question": "q", "answer": text}]), answer_pattern=pattern)
    assert values(source)[0]["answer"] == answer


def test_a_pattern_that_is_no_regular_expression(tmp_path):
    source = PromptSet(path=jsonl(tmp_path / "p.jsonl", plain(1)), answer_pattern="(")
    assert "answer_pattern = '('" in message(read_problems, source)


BAD = [
    ('{"question": "q"', "not JSON"),
    ("[1]", "not a JSON object"),
    ('{"question": "q"}', "no answer (from 'answer'); the row has question"),
    ('{"question": " ", "answer": "1"}', "the question is empty"),
    ('{"question": "q", "answer": ""}', "the answer is empty"),
    ('{"question": "q", "answer": null}', "is None, not text"),
    ('{"question": "q", "answer": NaN}', "is nan, not text"),
    ('{"question": "q", "answer": ["2"]}', "such as answer.0"),
    ('{"question": 3, "answer": "1"}', "the question (from 'question') is 3, not text"),
    ('{"question": "\\ud800", "answer": "1"}', "lone surrogate"),
]


@pytest.mark.parametrize(("line", "why"), BAD, ids=[why for _, why in BAD])
def test_a_bad_row_is_named_by_file_and_line(tmp_path, line, why):
    path = jsonl(tmp_path / "p.jsonl", [*plain(2), "", line])
    said = message(read_problems, PromptSet(path=path, max_bad_share=0.3))
    assert f"{path}:4: " in said and why in said and "1 of 3 rows" in said and "max_bad_share = 0.3" in said


def test_bytes_that_are_no_text_make_one_bad_row(tmp_path):
    (tmp_path / "p.jsonl").write_bytes(
        b'\xef\xbb\xbf{"question": "q", "answer": "1"}\r\n{"question": "\xff", "answer": "1"}\n'
    )
    said = message(read_problems, PromptSet(path=str(tmp_path / "p.jsonl")))
    assert "p.jsonl:2: not UTF-8" in said and "1 of 2 rows" in said


def test_bad_rows_below_the_limit_are_counted_and_left_out(tmp_path, caplog):
    path = jsonl(tmp_path / "p.jsonl", [*plain(4), *["{"] * 7])
    with caplog.at_level(logging.WARNING):
        problems = read_problems(PromptSet(path=path, max_bad_share=0.7))
    assert len(problems) == 4
    assert "7 of 11 rows" in caplog.text and caplog.text.count("not JSON") == 5 and "and 2 more" in caplog.text


def test_a_directory_is_read_by_split(tmp_path):
    for name, count in (("train-00000-of-00002", 1), ("train-00001-of-00002", 2), ("test", 3)):
        jsonl(tmp_path / f"{name}.jsonl", plain(count))
    assert len(read_problems(PromptSet(path=str(tmp_path)))) == 3
    assert len(read_problems(PromptSet(path=str(tmp_path), split="test"))) == 3


def test_a_directory_without_the_split_is_not_read_whole(tmp_path):
    """Test problems must not become training problems because a split was misspelt."""
    jsonl(tmp_path / "train.jsonl", plain(1))
    jsonl(tmp_path / "test.jsonl", plain(1))
    assert "no files of the split 'tset'; there are train, test" in message(
        read_problems, PromptSet(path=str(tmp_path), split="tset")
    )


def test_a_directory_whose_names_tell_no_split_is_read_whole(tmp_path):
    jsonl(tmp_path / "algebra.jsonl", plain(1))
    jsonl(tmp_path / "geometry.jsonl", plain(2))
    assert len(read_problems(PromptSet(path=str(tmp_path)))) == 3


@pytest.mark.parametrize("path", ["gone.jsonl", "a/b/c", "./gone", "/gone/away"])
def test_no_data_at_a_path(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    assert f"no data at {path}" in message(read_problems, PromptSet(path=path))


def test_a_broken_parquet_file(tmp_path):
    (tmp_path / "p.parquet").write_bytes(b"PAR1 no")
    assert "p.parquet cannot be read as Parquet" in message(read_problems, PromptSet(path=str(tmp_path / "p.parquet")))


READY = {
    "eurus2_rl": (
        {
            "prompt": [{"content": "s"}, {"content": "1 + 1?" + SUFFIX}],
            "reward_model": {"ground_truth": "2"},
            "ability": "math",
        },
        {"question": "1 + 1?", "answer": "2"},
    ),
    "eurus2_sft": (
        {
            "conversations": [{"from": "human", "value": "1 + 1?" + SUFFIX}, {"from": "gpt", "value": "two"}],
            "task": "Math",
        },
        {"question": "1 + 1?", "answer": "two"},
    ),
    "deepscaler": ({"problem": "1 + 1?", "answer": "2", "solution": "s"}, {"question": "1 + 1?", "answer": "2"}),
    "gsm8k": (
        {"question": "1 + 1?", "answer": "#### 5 so\n#### -1,234.5"},
        {"question": "1 + 1?", "answer": "-1234.5"},
    ),
    "math": ({"problem": "1 + 1?", "answer": "(1,2)", "level": 1}, {"question": "1 + 1?", "answer": "(1,2)"}),
    "solutions": (
        {"problem": "1 + 1?", "steps": ["two"], "label": -1},
        {"question": "1 + 1?", "answer": "-1", "steps": ["two"], "label": -1},
    ),
    "last_letter": (
        {"question": "q", "answer": "ab", "words": ["xa", "yb"], "more": 1},
        {"question": "q", "answer": "ab", "words": ["xa", "yb"]},
    ),
}


@pytest.mark.parametrize("name", settings_table())
def test_ready_made_settings(tmp_path, name):
    row, expected = READY[name]
    other = {**row, "ability": "code", "task": "Coding"}
    rows = [row, other] if settings_table()[name].filters else [row]
    assert values(PromptSet(path=jsonl(tmp_path / "p.jsonl", rows), settings=name)) == [expected]


def test_a_configs_own_fields_win_over_the_settings(tmp_path):
    row = {"question": "q", "answer": "#### 1,2", "text": "mine", "ability": "code"}
    path = jsonl(tmp_path / "p.jsonl", [row])
    mine = PromptSet(
        path=path, settings="gsm8k", fields={"question": "text"}, answer_commas=True, answer_pattern="#+ (.*)"
    )
    assert values(mine) == [{"question": "mine", "answer": "1,2"}]
    code = PromptSet(
        path=path, settings="eurus2_rl", fields={"question": "text", "answer": "answer"}, filters={"ability": "code"}
    )
    assert values(code) == [{"question": "mine", "answer": "#### 1,2"}]


def test_unknown_settings_name_the_known_ones(tmp_path):
    assert "known are eurus2_rl" in message(read_problems, PromptSet(path="x", settings="gsm9k"))


def test_hugging_face_data_sets_from_disk(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="the Hugging Face datasets library is an extra")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    row, expected = READY["eurus2_rl"]
    saved = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list([row] * 3), "test": datasets.Dataset.from_list([row])}
    )
    saved.save_to_disk(tmp_path / "saved")
    assert values(PromptSet(path=str(tmp_path / "saved"), settings="eurus2_rl")) == [expected] * 3
    assert "has no split 'tset'; there are train, test" in message(
        read_problems, PromptSet(path=str(tmp_path / "saved"), split="tset")
    )
    (tmp_path / "clone" / "data").mkdir(parents=True)
    saved["train"].to_parquet(tmp_path / "clone" / "data" / "train-00000-of-00001.parquet")
    assert values(PromptSet(path=str(tmp_path / "clone"), settings="eurus2_rl")) == [expected] * 3
    assert "split 'test'" in message(read_problems, PromptSet(path=str(tmp_path / "clone"), split="test"))


def test_gsm8k_itself():
    if not GSM8K.is_dir():
        pytest.skip(f"no GSM8K text at {GSM8K}")
    problems = read_problems(PromptSet(path=str(GSM8K), settings="gsm8k", max_bad_share=0.0))
    assert len(problems) == 7473 and problems[0].values["answer"] == "72"
    assert len(read_problems(PromptSet(path=str(GSM8K), settings="gsm8k", split="test", max_bad_share=0.0))) == 1319
    assert all(float(p.values["answer"]) is not None for p in problems)


def problems_of(count):
    return [Problem(i, row) for i, row in enumerate(plain(count))]


def encode(row):
    return [1] * (int(row["answer"]) + 1)


def reader_of(count, *, seed=0, shuffle=True, longest=10**6):
    return PromptReader(problems_of(count), encode, seed=seed, shuffle=shuffle, max_prompt_tokens=longest)


def ids(prompts):
    return [p.id for p in prompts]


def test_every_epoch_goes_once_through_all_in_its_own_order():
    reader = reader_of(20)
    epochs = [ids(reader.take(20)) for _ in range(3)]
    orders = [[i.split("/")[1] for i in epoch] for epoch in epochs]
    assert [{i.split("/")[0] for i in epoch} for epoch in epochs] == [{"0"}, {"1"}, {"2"}]
    assert all(sorted(map(int, order)) == list(range(20)) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert ids(reader_of(20).take(60)) == sum(epochs, []), "deterministic, however it is cut"
    assert ids(reader_of(20, seed=1).take(20)) != epochs[0]


def test_the_order_is_the_same_on_every_machine_and_python():
    assert ids(reader_of(6, seed=3).take(8)) == ["0/1", "0/2", "0/5", "0/0", "0/3", "0/4", "1/5", "1/2"]


def test_without_shuffling_rows_keep_their_order():
    assert ids(reader_of(3, shuffle=False).take(5)) == ["0/0", "0/1", "0/2", "1/0", "1/1"]


def test_prompts_carry_tokens_and_the_mapped_values():
    prompt = reader_of(3, shuffle=False).take(3)[2]
    assert prompt.tokens == [1, 1, 1] and prompt.payload == {"question": "q2", "answer": "2"}


def test_long_prompts_are_dropped_and_counted():
    reader = reader_of(6, longest=4, shuffle=False)
    assert ids(reader.take(5)) == ["0/0", "0/1", "0/2", "0/3", "1/0"] and reader.dropped == 2
    reader.take(4)
    assert reader.dropped == 4, "again in the next epoch"


def test_all_prompts_too_long_is_an_error():
    with pytest.raises(DataError, match="every prompt is longer than max_prompt_tokens = 0"):
        reader_of(3, longest=0).take(1)


@pytest.mark.parametrize("seed", range(20))
def test_two_misses_in_a_row_over_the_epochs_end_are_not_a_data_set_of_misses(seed):
    """One of two problems fits: orders (fits, long), (long, fits) miss twice running."""
    assert len(reader_of(2, seed=seed, longest=1).take(30)) == 30


def test_encoding_is_lazy():
    seen = []

    def count(row):
        seen.append(row["question"])
        return [1]

    reader = PromptReader(problems_of(100), count, seed=0, shuffle=True, max_prompt_tokens=5)
    reader.take(3)
    assert len(seen) == 3


@pytest.mark.parametrize("before", [0, 1, 7, 8, 20])
def test_resume_goes_on_exactly(before):
    whole = reader_of(8, longest=6)
    whole.take(before)
    state = json.loads(json.dumps(whole.state_dict()))
    again = reader_of(8, longest=6)
    again.load_state_dict(state)
    assert again.take(25) == whole.take(25) and again.dropped == whole.dropped
    assert again.state_dict() == whole.state_dict()


def test_a_place_in_other_data_is_the_next_epoch_of_theirs():
    """Whether a run may go on with other data is decided before, by its record of inputs."""
    whole = reader_of(8)
    whole.take(11)
    changed = [*problems_of(7), Problem(7, {"question": "other", "answer": "7"})]
    others = [reader_of(7), reader_of(8, seed=1), reader_of(8, shuffle=False)]
    for other in (*others, PromptReader(changed, encode, seed=0, shuffle=True, max_prompt_tokens=9)):
        other.load_state_dict(json.loads(json.dumps(whole.state_dict())))
        assert {prompt.id.partition("/")[0] for prompt in other.take(7)} == {"2"}


def test_first_begins_anew():
    reader = reader_of(5)
    first = reader.take(7)
    assert reader.first(7) == first


def test_no_problems_is_an_error():
    with pytest.raises(DataError, match="no problems"):
        reader_of(0)


def pairs(*texts):
    return [TextPair(prompt=prompt, response=response) for prompt, response in texts]


def test_columns_of_later_rows_are_written_too(tmp_path):
    """pyarrow takes the columns from the first row alone."""
    write_parquet(tmp_path / "new" / "rows.parquet", table_of([{"a": 1}, {"a": 2, "b": [0.5]}]))
    assert pq.read_table(tmp_path / "new" / "rows.parquet").to_pylist() == [{"a": 1, "b": None}, {"a": 2, "b": [0.5]}]
    assert [f.name for f in (tmp_path / "new").iterdir()] == ["rows.parquet"]


def test_pairs_round_trip_and_bad_ones_are_refused(tmp_path):
    rows = [{"prompt": "p0", "response": "r0"}, {"prompt": "p1", "response": "r1"}]
    write_parquet(tmp_path / "train.parquet", table_of(rows))
    assert read_samples(SftData(train=str(tmp_path / "train.parquet"))) == pairs(("p0", "r0"), ("p1", "r1"))
    path = jsonl(tmp_path / "pairs.jsonl", [*rows, {"prompt": "p2"}, {"prompt": "", "response": "r"}])
    said = message(read_samples, SftData(train=path))
    assert f"{path}:3: no response" in said and f"{path}:4: the prompt is empty" in said and "2 of 4 rows" in said
    assert len(read_samples(SftData(train=path, max_bad_share=0.5))) == 2


def test_pairs_from_named_fields_and_a_split(tmp_path):
    jsonl(tmp_path / "train.jsonl", [{"chat": [{"text": "p"}], "out": "r"}])
    jsonl(tmp_path / "validation.jsonl", [{"chat": [{"text": "v"}], "out": "s"}])
    data = SftData(train=str(tmp_path), prompt_field="chat.0.text", response_field="out")
    assert read_samples(data) == pairs(("p", "r")) and read_samples(data, split="validation") == pairs(("v", "s"))


@pytest.fixture
def tokenizer():
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1, "a": 2, "b": 3, "c": 4}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>")


def test_sft_trains_the_response_and_its_end_alone(tokenizer):
    (sample,) = sft_rollouts(pairs(("a b", "c a")), tokenizer, append_eos=True, max_tokens=5)
    assert sample.tokens.tolist() == [2, 3, 4, 2, 1]
    assert sample.trainable.tolist() == [False, False, True, True, True]
    assert sample.advantages is None and sample.stop is Stop.EOS
    assert sft_rollouts(pairs(("a b", "c a")), tokenizer, append_eos=False, max_tokens=5)[0].tokens.tolist() == [
        2,
        3,
        4,
        2,
    ]


def test_sft_drops_long_pairs_whole_and_says_how_many(tokenizer, caplog):
    with caplog.at_level(logging.WARNING):
        limits = {"append_eos": True, "max_tokens": 4}
        three = pairs(("a", "b"), ("a b c", "a b c"), ("b", "c"))
        kept = sft_rollouts(three, tokenizer, **limits, max_bad_share=0.4)
    assert [r.tokens.tolist() for r in kept] == [[2, 3, 1], [3, 4, 1]] and "1 of 3 rows" in caplog.text
    with pytest.raises(DataError, match="sample 1: it has 7 tokens: raise data.max_tokens = 4\nthat is more than"):
        sft_rollouts(three, tokenizer, **limits, max_bad_share=0.3)
    with pytest.raises(DataError, match="no sample is left"):
        sft_rollouts(pairs(("a b c", "a b c")), tokenizer, **limits, max_bad_share=1.0)


def test_sft_without_an_end_token_is_refused(tokenizer):
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="no EOS token"):
        sft_rollouts(pairs(("a", "b")), tokenizer, append_eos=True, max_tokens=4)
