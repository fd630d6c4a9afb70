"""The teacher's answers as SFT pairs: who is asked what, what is held out, what is set aside. The servers are fakes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from chats import CHATML, chat_tokenizer, said
from fake_vllm import GENERATE, FakeVllm
from specs import spec_of
from tiny_models import make_model
from toys import EOS, characters

from megatron_rl.commands import generate
from megatron_rl.config import files as config_files
from megatron_rl.config.schema import ConfigError, GenerateConfig, SftData
from megatron_rl.data.rows import DataError
from megatron_rl.data.sft import read_samples
from megatron_rl.rewards.grading_pool import RewardFailure
from megatron_rl.session.launch_ranks import Place

ROOT = Path(__file__).parents[3]
COUNT = 10


@pytest.fixture
def fake():
    made = FakeVllm("secret")
    yield made
    made.close()


@pytest.fixture
def settings(tmp_path):
    model = make_model(tmp_path / "model", num_hidden_layers=1, vocab_size=97, eos_token_id=EOS)
    tokenizer = characters()
    tokenizer.chat_template = "[{{ messages[0].content }}]{% if add_generation_prompt %}:{% endif %}"
    tokenizer.save_pretrained(model)
    rows = [{"question": f"q{i}" + "x" * i, "answer": str(i)} for i in range(COUNT)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "t.txt").write_text("ask {question}\n")
    (tmp_path / "token").write_text("secret")
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/helpers/fake_vllm.py "$@"\n')
    (tmp_path / "python").chmod(0o755)
    return [
        f"model.path={model}", f"data.path={tmp_path}/problems.jsonl", f"template={tmp_path}/t.txt",
        f"output={tmp_path}/pairs", "sampling.max_tokens=8", "validation_share=0.2",
    ]  # fmt: skip


def served(tmp_path, fake):
    return [
        "engine.kind=vllm", f"engine.urls={{model: ['{fake.url}']}}", f"engine.token_file={tmp_path}/token",
        "engine.start=false",
    ]  # fmt: skip


def generated(tmp_path, *words):
    """The rows of each file, by its name."""
    config = config_files.load(GenerateConfig, [], words)
    assert generate.run(spec_of(config), Place(0, 1, 0, "127.0.0.1", 0), {"PATH": "/usr/bin:/bin"}) == 0
    return {file.stem: pq.read_table(file).to_pylist() for file in (tmp_path / "pairs").glob("*.parquet")}


def test_a_server_answers_in_the_teachers_chat_template(settings, tmp_path, fake):
    found = generated(tmp_path, *settings, *served(tmp_path, fake), "chat=true", "keep_truncated=true")
    tokenizer = characters()
    asked = {tokenizer.decode(list(prompt)) for prompt in fake.prompts}
    assert asked == {f"[ask q{i}{'x' * i}]:" for i in range(COUNT)} and fake.count(GENERATE) == COUNT
    rows = found["train"] + found["validation"]
    assert len(found["validation"]) == 2 and "cut" not in found
    assert {row["prompt"] for row in rows} == {f"ask q{i}{'x' * i}" for i in range(COUNT)}
    assert all(row["response"] and row["question"] in row["prompt"] for row in rows)


def test_answers_that_were_cut_are_set_aside_unless_they_are_kept(settings, tmp_path, fake):
    aside = generated(tmp_path, *settings, *served(tmp_path, fake))
    kept = generated(tmp_path, *settings, *served(tmp_path, fake), "keep_truncated=true")
    assert aside["truncated"] and "truncated" not in kept
    assert sum(map(len, aside.values())) == sum(map(len, kept.values())) == COUNT
    assert len(kept["validation"]) == 2


def test_graders_see_the_thought_that_a_prompt_opened_and_pairs_do_not(settings, tmp_path, fake, monkeypatch):
    (tmp_path / "opened.py").write_text("def grade(response, payload): return float(response.startswith('<think>'))")
    monkeypatch.syspath_prepend(str(tmp_path))
    tokenizer = characters()
    tokenizer.chat_template = "[{{ messages[0].content }}]{% if add_generation_prompt %}<think>{% endif %}"
    tokenizer.save_pretrained(tmp_path / "model")
    reward = ["reward.target=opened:grade", "chat=true", "keep_truncated=true", "validation_share=0.0"]
    found = generated(tmp_path, *settings, *served(tmp_path, fake), *reward)
    assert len(found["train"]) == COUNT and not any("think" in row["response"] for row in found["train"])


def test_long_prompts_are_left_out(settings, tmp_path, fake, caplog):
    limit = len("ask q5xxxxx")
    words = [*settings, *served(tmp_path, fake), "keep_truncated=true", "data.max_bad_share=0.7"]
    found = generated(tmp_path, *words, f"max_prompt_tokens={limit}")
    assert {row["answer"] for row in found["train"] + found["validation"]} == {str(i) for i in range(6)}
    assert "4 of 10 rows" in caplog.text and f"tokens: raise max_prompt_tokens = {limit}" in caplog.text
    generated(tmp_path, *words, "chat=true", f"max_prompt_tokens={limit}")
    assert "7 of 10 rows" in caplog.text, "the chat template counts"
    with pytest.raises(DataError, match="max_prompt_tokens = 3: raise it"):
        generated(tmp_path, *words, "max_prompt_tokens=3", "data.max_bad_share=1.0")
    with pytest.raises(DataError, match="4 of 10 rows (.|\n)*more than max_bad_share = 0.01"):
        generated(tmp_path, *words, f"max_prompt_tokens={limit}", "data.max_bad_share=0.01")


def test_conversations_are_asked_as_they_are_and_become_pairs_of_messages(settings, tmp_path, fake):
    """An assistant's turn that the prompt began belongs to the response, and the pairs can be trained on."""
    asked = [[said("system", "s"), said("user", f"q{i}")] for i in range(3)] + [
        [said("user", "q"), said("assistant", "I")]
    ]
    rows = [{"prompt": prompt, "solution": "1", "answer": str(i)} for i, prompt in enumerate(asked)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [word for word in settings if not word.startswith(("template", "data.path", "validation_share"))]
    words += [f"data.path={tmp_path}/chats.jsonl", "validation_share=0.0", "keep_truncated=true"]
    tokenizer = chat_tokenizer(CHATML)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / "model" / name).unlink(missing_ok=True)
    tokenizer.save_pretrained(tmp_path / "model")
    found = generated(tmp_path, *words, *served(tmp_path, fake))["train"]
    texts = {tokenizer.decode(list(prompt)) for prompt in fake.prompts}
    assert "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n" in texts
    assert "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nI" in texts and len(texts) == 4
    assert [row["prompt"] for row in found] == [*asked[:3], asked[3][:1]]
    assert found[3]["response"][0]["content"].startswith("I") and {row["question"] for row in found} >= {"q0", "q"}
    samples = read_samples(SftData(train=f"{tmp_path}/pairs/train.parquet"))
    assert [(one.first, len(one.messages)) for one in samples] == [(2, 3)] * 3 + [(1, 2)]
    texts_only = [*words, *served(tmp_path, fake), f"data.path={tmp_path}/problems.jsonl"]
    with pytest.raises(ConfigError, match="template is null, and the problems are no conversations"):
        generated(tmp_path, *texts_only)


def test_the_servers_are_started_and_ended(settings, tmp_path):
    found = generated(
        tmp_path, *settings, "engine.kind=vllm", f"engine.python={tmp_path}/python", "keep_truncated=true"
    )
    assert sum(map(len, found.values())) == COUNT
    assert (tmp_path / "pairs/logs/engine_model_0.log").exists()


def test_a_teacher_without_a_chat_template_is_refused(settings, tmp_path, fake):
    characters().save_pretrained(tmp_path / "plain")
    with pytest.raises(
        ConfigError, match="no chat template: name a Jinja file by model.chat_template, or set chat to false"
    ):
        generated(
            tmp_path, *settings, *served(tmp_path, fake), "chat=true", f"model.tokenizer={tmp_path}/plain"
        )  # fmt: skip


def test_the_embedded_engine_answers_and_goes_on_from_its_parts(settings, tmp_path, monkeypatch):
    whole = generated(tmp_path, *settings)
    monkeypatch.setattr(generate, "CHUNK", 4)
    in_parts = generated(tmp_path, *settings)
    names = {row["question"] for rows in in_parts.values() for row in rows}
    assert names == {row["question"] for rows in whole.values() for row in rows} and len(names) == COUNT
    assert not (tmp_path / "pairs/parts").exists()


def test_trust_answers_that_nobody_graded_are_not_kept_silently(settings, tmp_path, fake, capsys):
    words = [*settings, *served(tmp_path, fake), "keep_truncated=true"]
    generated(tmp_path, *words)
    assert "no answer was graded, so that wrong ones are among the pairs" in capsys.readouterr().out
    graded = ["reward={target: 'bad_rewards:by_answer', workers: 1, max_failure_share: 1.0}"]
    found = generated(tmp_path, *words, *graded)
    rows = {name: {int(row["answer"]) for row in part} for name, part in found.items()}
    assert rows["wrong"] == {1, 4, 7} and rows["ungraded"] == {2, 5, 8}
    assert rows["train"] | rows["validation"] == {0, 3, 6, 9}
    said = capsys.readouterr().out
    assert "3 wrong answers stand in wrong.parquet, and 3 that could not be graded in ungraded.parquet" in said
    with pytest.raises(RewardFailure, match="3 of 10 gradings failed"):
        generated(tmp_path, *words, "reward={target: 'bad_rewards:by_answer', workers: 1}")


def killed_before_writing(tmp_path, monkeypatch, *words):
    """Has all parts of the answers written, and nothing else."""

    def killed(*_):
        raise RuntimeError("killed")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        patch.setattr(generate._Generation, "write", killed)
        generated(tmp_path, *words)


@pytest.mark.parametrize("changed", ["engine.memory_share=0.9", "engine.request_timeout_s=9.0", "validation_share=0.5"])
def test_parts_outlive_a_setting_that_decides_no_answer(settings, tmp_path, fake, monkeypatch, changed):
    """The first run's page advises engine.memory_share, and the teacher was asked everything again."""
    monkeypatch.setattr(generate, "CHUNK", 4)
    words = [*settings, *served(tmp_path, fake), "keep_truncated=true"]
    killed_before_writing(tmp_path, monkeypatch, *words)
    assert len(fake.prompts) == COUNT
    found = generated(tmp_path, *words, changed)
    assert len(fake.prompts) == COUNT and sum(map(len, found.values())) == COUNT


@pytest.mark.parametrize("changed", ["seed=1", "sampling.temperature=0.5", "n=2", "engine.max_model_len=90", "data"])
def test_parts_of_other_answers_are_not_taken(settings, tmp_path, fake, monkeypatch, changed):
    words = [*settings, *served(tmp_path, fake)]
    killed_before_writing(tmp_path, monkeypatch, *words)
    if changed == "data":
        problems = tmp_path / "problems.jsonl"
        problems.write_text(problems.read_text().replace("q0", "Q0"))
    before = len(fake.prompts)
    generated(tmp_path, *words, *([changed] if changed != "data" else []))
    assert len(fake.prompts) > before


def test_a_finished_output_is_not_asked_for_again(settings, tmp_path, fake, capsys):
    """A job that its time limit ended as the servers shut down began anew."""
    words = [*settings, *served(tmp_path, fake), "keep_truncated=true"]
    first = generated(tmp_path, *words)
    asked = len(fake.prompts)
    capsys.readouterr()
    assert generated(tmp_path, *words, "engine.memory_share=0.9") == first and len(fake.prompts) == asked
    assert "has all answers of this config already; remove" in capsys.readouterr().out
    (tmp_path / "pairs/validation.parquet").unlink()
    assert generated(tmp_path, *words).keys() == first.keys() and len(fake.prompts) == 2 * asked
    generated(tmp_path, *words, "validation_share=0.5")
    assert len(fake.prompts) == 3 * asked, "the files are others"
    problems = tmp_path / "problems.jsonl"
    problems.write_text(problems.read_text().replace('"answer": "0"', '"answer": "7"'))
    found = generated(tmp_path, *words, "validation_share=0.5")
    assert "7" in {row["answer"] for rows in found.values() for row in rows if row["question"] == "q0"}


def test_files_that_are_half_replaced_are_not_finished(settings, tmp_path, fake, monkeypatch):
    words = [*settings, *served(tmp_path, fake), "keep_truncated=true"]
    generated(tmp_path, *words)

    def full(*_):
        raise OSError("no space left")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space left"):
        patch.setattr(generate, "write_parquet", full)
        generated(tmp_path, *words, "seed=1")
    before = len(fake.prompts)
    generated(tmp_path, *words)
    assert len(fake.prompts) == before + COUNT


@pytest.mark.parametrize("content", [b"", b"5", b'[[["a"]]]', b"[" * 9999, b"\xff"])
def test_faults_a_damaged_part_of_the_answers_is_made_again(settings, tmp_path, fake, monkeypatch, content, caplog):
    monkeypatch.setattr(generate, "CHUNK", 4)
    words = [*settings, *served(tmp_path, fake), "keep_truncated=true"]
    killed_before_writing(tmp_path, monkeypatch, *words)
    first = min(tmp_path.rglob("parts/*.json"))
    first.write_bytes(content)
    found = generated(tmp_path, *words)
    assert len(fake.prompts) == COUNT + 4 and sum(map(len, found.values())) == COUNT
    assert "is damaged, and is made again" in caplog.text
