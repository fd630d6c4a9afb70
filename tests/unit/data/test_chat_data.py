"""Rows of TRL, verl and ShareGPT as prompts and as samples for fine-tuning; what is refused, and what check says."""

from __future__ import annotations

import json
import logging
from datetime import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chats import CHATML, MARKED, STRICT, THINKING, chat_tokenizer, said
from specs import spec_of
from tiny_models import make_model

from megatron_rl.commands import check_data, evaluate
from megatron_rl.config import files as config_files
from megatron_rl.config import sources
from megatron_rl.config.schema import (
    ConfigError,
    EvalConfig,
    Evaluation,
    EvaluationSet,
    GenerateConfig,
    PromptSet,
    Reward,
    RoleConfig,
    SftConfig,
    SftData,
    TrainConfig,
)
from megatron_rl.contrib.entailment import Entailment
from megatron_rl.contrib.rubric import Rubric
from megatron_rl.data.problems import PromptReader, fields_of, read_problems
from megatron_rl.data.rows import DataError
from megatron_rl.data.sft import Conversation, TextPair, read_samples, sft_rollouts
from megatron_rl.evaluation.sets import read_sets as read_eval_sets
from megatron_rl.main import main
from megatron_rl.recipes.dapo import Dapo
from megatron_rl.recipes.grpo import Grpo
from megatron_rl.recipes.solutions import question_text
from megatron_rl.recipes.tango import Tango
from megatron_rl.spec.evaluated_sets import evaluated_sets
from megatron_rl.texts.chat_template import tokenize
from megatron_rl.training.prompts import asked_tokenizers, encoder, read_sets

USER = [said("user", "1 + 1?")]
VERL = {
    "data_source": "openai/gsm8k", "prompt": USER, "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {"split": "train", "index": 0},
}  # fmt: skip
ENDED = [*USER, said("assistant", "2")]


def data_lines(config):
    return check_data.data_lines(spec_of(config), deep=True)


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(tmp_path, *rows, **settings):
    """The values of the rows as problems."""
    return [dict(p.values) for p in read_problems(PromptSet(path=jsonl(tmp_path / "p.jsonl", *rows), **settings))]


def refused(call, *args, **settings):
    with pytest.raises((DataError, ConfigError)) as caught:
        call(*args, **settings)
    return str(caught.value)


def test_verls_parquet_is_read_as_it_is(tmp_path):
    """The rows that verl's examples/data_preprocess/gsm8k.py writes, with a second one that has no system message."""
    rows = [VERL, {**VERL, "prompt": [said("system", "s"), *USER]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    problems = read_problems(PromptSet(path=str(tmp_path / "train.parquet")))
    assert dict(problems[0].values) == {
        "question": "1 + 1?", "answer": "2", "messages": USER, "data_source": "openai/gsm8k",
        "extra_info": {"split": "train", "index": 0}, "ability": "math", "reward_model": VERL["reward_model"],
    }  # fmt: skip
    tokenizer = chat_tokenizer()
    encode = encoder(Grpo(updates=1), tokenizer)
    for problem, row in zip(problems, rows, strict=True):
        as_verl = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        assert encode(problem.values) == as_verl


def test_further_columns_are_values_of_a_problem_and_may_be_absent(tmp_path):
    plain = {key: VERL[key] for key in ("prompt", "reward_model")} | {"level": 3, "tests": {"inputs": ["1"]}}
    odd = {"talk": USER, "grading": "of the run", "correct": True, "written_by": "human", "answers": ["1", "2", "3"]}
    found = read(tmp_path, VERL, plain | odd)
    assert found[0]["extra_info"]["index"] == 0 and found[0]["ability"] == "math"
    kept = {"question", "answer", "messages", "reward_model", "level", "tests"}
    assert set(found[1]) == kept and found[1]["tests"] == {"inputs": ["1"]}, "names of a run are left out"
    (tmp_path / "t.txt").write_text("Level {level}: {question}")
    [text] = read(tmp_path, {"question": "1 + 1?", "answer": "2", "level": 3})
    assert question_text(str(tmp_path / "t.txt"), text) == "Level 3: 1 + 1?", "templates get them too"
    pq.write_table(pa.Table.from_pylist([{**text, "when": datetime(2026, 1, 1)}]), tmp_path / "p.parquet")
    [dated] = read_problems(PromptSet(path=str(tmp_path / "p.parquet")))
    assert dated.values == text, "a column that no field names makes no bad row"


FORMS = [  # a row -> where its prompt and answer are found, and whether it is a conversation
    ({"prompt": USER, "answer": "2"}, ("prompt", "answer"), True),
    ({"prompt": USER, "question": "original", "ground_truth": "2"}, ("prompt", "ground_truth"), True),
    ({"messages": USER, "answer": "2"}, ("messages", "answer"), True),
    ({"conversations": [{"from": "human", "value": "1 + 1?"}], "answer": "2"}, ("conversations", "answer"), True),
    ({"prompt": "1 + 1?", "answer": "2"}, ("prompt", "answer"), False),
    ({"question": "1 + 1?", "prompt": "Q", "answer": "2"}, ("question", "answer"), False),
    ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]}], "answer": 2},
     ("prompt", "answer"), True),
    (VERL, ("prompt", "reward_model.ground_truth"), True),
]  # fmt: skip


@pytest.mark.parametrize(("row", "keys", "chat"), FORMS)
def test_forms_are_found_as_the_peers_find_them(tmp_path, row, keys, chat):
    [values] = read(tmp_path, row)
    assert values["question"] == "1 + 1?" and values["answer"] == "2"
    assert values.get("messages") == (USER if chat else None)
    fields = fields_of(PromptSet(path=str(tmp_path / "p.jsonl")))
    assert (fields.get("messages" if chat else "question"), fields["answer"]) == keys


def test_a_prompt_only_set_has_no_answers(tmp_path):
    assert read(tmp_path, {"prompt": USER}) == [{"question": "1 + 1?", "messages": USER}]
    mixed = refused(read, tmp_path, {"prompt": USER, "answer": "2"}, {"prompt": USER})
    assert (
        "p.jsonl:2: no answer (from 'answer'); the row has prompt: name keys by the setting fields of this data"
        in mixed
    )


def test_the_configs_fields_win(tmp_path):
    row = {"prompt": USER, "talk": [said("user", "3?")], "text": "4?", "answer": "2", "gold": "3"}
    assert read(tmp_path, row, fields={"messages": "talk", "answer": "gold"})[0]["question"] == "3?"
    assert read(tmp_path, row, fields={"question": "text"}) == [{"question": "4?", "answer": "2", "gold": "3"}]
    assert read(tmp_path, row, fields={"question": "prompt.0.content"})[0].get("messages") is None
    eurus = {**VERL, "prompt": [said("system", "s"), *USER]}
    as_text = read(tmp_path, eurus, settings="eurus2_rl")
    assert as_text == [{"question": "1 + 1?", "answer": "2"}]
    as_chat = read(tmp_path, eurus, settings="eurus2_rl", fields={"messages": "prompt"})
    assert as_chat == [{"question": "1 + 1?", "answer": "2", "messages": eurus["prompt"]}]


def test_questions_become_conversations_and_get_a_system_message(tmp_path):
    row = {"question": "1 + 1?", "answer": "2"}
    assert "messages" not in read(tmp_path, row)[0]
    assert read(tmp_path, row, chat=True)[0]["messages"] == USER
    assert read(tmp_path, row, chat=True, system="Be brief.")[0]["messages"] == [said("system", "Be brief."), *USER]
    own = [said("system", "mine"), *USER]
    chats = read(tmp_path, {"prompt": USER}, {"prompt": own}, system="Be brief.")
    assert [values["messages"][0]["content"] for values in chats] == ["Be brief.", "mine"]
    assert "set data.chat to true" in refused(read, tmp_path, row, system="Be brief.")


def test_conversations_can_be_put_as_texts(tmp_path):
    rows = [{"prompt": [said("system", "s"), *USER], "answer": "2"}]
    assert read(tmp_path, *rows, chat=False) == [{"question": "1 + 1?", "answer": "2"}]
    assert "set data.chat to true" in refused(read, tmp_path, *rows, chat=False, system="s")
    longer = [*ENDED, said("user", "And 2 + 2?")]
    assert "more turns than a user's" in refused(read, tmp_path, {"prompt": longer, "answer": "4"}, chat=False)


def test_a_suffix_is_cut_from_the_users_message(tmp_path):
    [values] = read(tmp_path, {"prompt": [said("user", "1 + 1? Boxed.")], "answer": "2"}, remove_suffix=" Boxed.")
    assert values["question"] == "1 + 1?" and values["messages"] == USER


def test_an_assistants_last_turn_is_gone_on_with_where_it_is_a_prompts(tmp_path):
    assert read(tmp_path, {"prompt": ENDED, "answer": "2"})[0]["messages"] == ENDED
    whole = {"messages": ENDED, "answer": "2"}
    said_so = refused(read, tmp_path, whole)
    assert "'messages' ends with an assistant's turn: cut it off, or set data.fields={messages: messages}" in said_so
    assert read(tmp_path, whole, fields={"messages": "messages"})[0]["messages"] == ENDED


BAD = [
    ([*USER, "text"], "prompt.1 is 'text', not a message"),
    ([said("user", "a"), {"role": "user"}], "prompt.1 has no content; it has role"),
    ([said("user", "a"), {"from": "human", "text": "b"}], "prompt.1 has no content; it has role, text"),
    ([said("user", "a"), said("bot", "b")], "prompt.1.role is 'bot': give one of system, developer, user"),
    ([said("user", 3)], "prompt.0.content is 3, not text"),
    ([said("user", [{"type": "image", "url": "x"}])], "prompt.0.content is a list, not text"),
    ([said("user", "\ud800")], "prompt.0.content has a lone surrogate"),
    ([said("user", " ")], "the content of prompt.0, the last user's message, is empty"),
    ([said("user", "a"), said("system", "s")], "the last message of 'prompt' is a system's"),
    ([said("tool", "a")], "'prompt': the conversation has no user's message"),
    ([], "'prompt' is an empty list, not a list of messages"),
    ("text", "'prompt' is 'text', not a list of messages"),
]


@pytest.mark.parametrize(("prompt", "why"), BAD, ids=[why[:40] for _, why in BAD])
def test_malformed_messages_are_named_by_row_and_key(tmp_path, prompt, why):
    text = refused(read, tmp_path, {"prompt": USER, "answer": "2"}, {"prompt": prompt, "answer": "2"})
    assert "p.jsonl:2: " in text and why in text, text


@pytest.mark.parametrize(
    "recipe", [Grpo(updates=1), Dapo(updates=1), Tango(), Rubric(updates=1)], ids=lambda r: type(r).__name__
)
def test_every_recipe_that_asks_the_question_puts_the_conversation(tmp_path, recipe):
    path, tokenizer = jsonl(tmp_path / "p.jsonl", {"prompt": USER, "answer": "2"}), chat_tokenizer()
    problems = read_sets({"data": PromptSet(path=path)}, recipe, tokenizer)["data"]
    encode = encoder(recipe, tokenizer)
    reader = PromptReader(problems, encode, seed=0, shuffle=False, max_prompt_tokens=100)
    [prompt] = reader.take(1)
    expected = "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(prompt.tokens, skip_special_tokens=False) == expected
    json.dumps(prompt.payload)
    hinted = encode({**prompt.payload, "question": "1 + 1? It begins with t."})  # as recipes.hints asks
    assert "It begins with t.<|im_end|>" in tokenizer.decode(hinted, skip_special_tokens=False)
    text = {"question": "1 + 1?", "answer": "2"}
    assert encode(text) == tokenizer(recipe.prompt(text))["input_ids"], "texts stay as they were"


def test_a_recipe_with_a_template_of_its_own_says_what_to_set(tmp_path):
    path = jsonl(tmp_path / "p.jsonl", {"prompt": USER, "answer": "yes", "response": "r", "principle": "p"})
    fields = {"response": "response", "principle": "principle"}
    sets = {"data": PromptSet(path=path, fields=fields)}
    text = refused(read_sets, sets, Entailment(updates=1), chat_tokenizer())
    assert "set data.chat to false, and roles.generator.chat to true" in text
    texts = {"data": PromptSet(path=path, fields=fields, chat=False)}
    assert read_sets(texts, Entailment(updates=1), chat_tokenizer())["data"][0].values["principle"] == "p"


def test_a_model_is_measured_as_it_is_trained(tmp_path):
    train = PromptSet(path=jsonl(tmp_path / "train.jsonl", {"prompt": USER, "answer": "2"}))
    test = jsonl(tmp_path / "test.jsonl", {"question": "1 + 1?", "answer": "2"})
    recipe, tokenizer, place = Grpo(updates=1), chat_tokenizer(), "evaluation.sets.mine"

    def read(**settings):
        held = evaluated_sets([EvaluationSet(**settings)], Evaluation(), Reward())
        return read_sets({"data": train, place: held[0].source}, recipe, tokenizer, held_out=held)

    text = refused(read, name="mine", path=test)
    assert (
        "evaluation.sets.mine holds texts, and data conversations: set `chat` of evaluation.sets.mine to true" in text
    )
    for chat in (True, False):
        assert ("messages" in read(name="mine", path=test, chat=chat)[place][0].values) == chat


def test_a_template_that_refuses_some_problems_is_found_before_training(tmp_path):
    twice = [*USER, said("user", "2 + 2?")]
    path = jsonl(tmp_path / "p.jsonl", {"prompt": USER}, {"prompt": USER}, {"prompt": twice})
    text = refused(read_sets, {"data": PromptSet(path=path)}, Grpo(updates=1), chat_tokenizer(STRICT))
    assert "data, problem 2: the chat template does not render messages of user, user: roles must alternate" in text


def test_other_roles_are_asked_in_their_chat_templates(tmp_path):
    model = {"path": "models/x"}
    roles = {"generator": {"model": model}, "verifier": {"model": model, "chat": True}}
    config = config_files.load(
        TrainConfig, [], [f"roles={json.dumps(roles)}", "recipe.target=a.b:C", "data.path=x.jsonl"]
    )
    tokenizer = chat_tokenizer()
    found = asked_tokenizers(config.roles, {"generator": tokenizer, "verifier": tokenizer})
    assert found["generator"] is tokenizer
    shown = tokenizer.decode(tokenize(found["verifier"], "Judge this."), skip_special_tokens=False)
    assert shown == "<|im_start|>user\nJudge this.<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(ConfigError, match=r"roles.verifier.chat = true, but the tokenizer has no chat template"):
        asked_tokenizers(config.roles, {"verifier": chat_tokenizer(None)})
    assert not RoleConfig().chat


def samples(tmp_path, *rows, **settings):
    return read_samples(SftData(train=jsonl(tmp_path / "s.jsonl", *rows), **settings))


def test_samples_for_fine_tuning_in_all_forms(tmp_path):
    answer = [said("assistant", "2")]
    whole = Conversation(messages=ENDED, first=0, where=f"{tmp_path}/s.jsonl:1")
    pair = Conversation(messages=ENDED, first=1, where=f"{tmp_path}/s.jsonl:1")
    assert samples(tmp_path, {"messages": ENDED}) == [whole]
    assert samples(
        tmp_path, {"conversations": [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}]}
    ) == [whole]
    assert samples(tmp_path, {"talk": ENDED}, messages_field="talk") == [whole]
    assert samples(tmp_path, {"prompt": USER, "completion": answer}) == [pair]
    assert samples(tmp_path, {"ask": USER, "say": answer}, prompt_field="ask", response_field="say") == [pair]
    assert samples(tmp_path, {"prompt": "p", "completion": "c"}) == [TextPair(prompt="p", response="c")]
    assert samples(tmp_path, {"prompt": "p", "prompt_id": "x", "messages": ENDED}) == [whole], "as UltraChat has it"
    [tooled] = samples(tmp_path, {"messages": ENDED, "tools": '[{"name": "f"}]'})
    assert tooled.tools == [{"name": "f"}]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"messages": USER}, "no message of an assistant"),
        ({"messages": [*USER, {"role": "assistant"}]}, "messages.1 has no content"),
        ({"messages": "text"}, "'messages' is 'text', not a list of messages"),
        ({"messages": ENDED, "tools": "{"}, "'tools' must be a list of JSON schemas, and is not JSON"),
        ({"other": 1}, "no messages; the row has other"),
    ],
)
def test_bad_samples_are_named_by_row(tmp_path, row, why):
    text = refused(samples, tmp_path, {"messages": ENDED}, row)
    assert "s.jsonl:2: " in text and why in text, text


def test_the_loss_is_on_assistants_turns_alone(tmp_path):
    turns = [said("system", "s"), *ENDED, said("user", "3?"), said("assistant", "33")]
    [rollout] = sft_rollouts(samples(tmp_path, {"messages": turns}), chat_tokenizer(), append_eos=True, max_tokens=200)
    tokenizer = chat_tokenizer()
    assert tokenizer.decode(rollout.tokens, skip_special_tokens=False) == tokenizer.apply_chat_template(
        turns, tokenize=False
    )
    kept = [rollout.tokens[a:b] for a, b, author, _ in rollout.spans if author == 0]
    assert [tokenizer.decode(part, skip_special_tokens=False) for part in kept] == ["2<|im_end|>\n", "33<|im_end|>\n"]
    pair = samples(tmp_path, {"prompt": turns[:-1], "completion": turns[-1:]})
    [last] = sft_rollouts(pair, tokenizer, append_eos=True, max_tokens=200)
    assert np.array_equal(last.tokens, rollout.tokens) and last.num_trainable == len(kept[1])
    marked = sft_rollouts(pair, chat_tokenizer(MARKED), append_eos=True, max_tokens=200)[0]
    assert tokenizer.decode(marked.tokens[marked.trainable], skip_special_tokens=False) == "33<|im_end|>\n\n"


def test_rows_that_a_template_renders_anew_are_counted_and_named(tmp_path, caplog):
    thoughts = [said("user", "a"), said("assistant", "<think>x</think>1"), said("user", "b"), said("assistant", "2")]
    found = samples(tmp_path, *[{"messages": ENDED}] * 3, {"messages": thoughts})
    tokenizer, limits = chat_tokenizer(THINKING), {"append_eos": True, "max_tokens": 200}
    text = refused(sft_rollouts, found, tokenizer, **limits, max_bad_share=0.01)
    assert "1 of 4 rows" in text and "s.jsonl:4: the chat template renders its first 2 messages in another way" in text
    with caplog.at_level(logging.WARNING):
        assert len(sft_rollouts(found, tokenizer, **limits, max_bad_share=0.3)) == 3
    assert "1 of 4 rows" in caplog.text and "were dropped" not in caplog.text
    assert "no chat template" in refused(sft_rollouts, found, chat_tokenizer(None), **limits)


def test_an_evaluation_asks_conversations_as_they_are(tmp_path):
    path = jsonl(tmp_path / "mine.jsonl", {"prompt": USER, "answer": "2"})
    config = config_files.load(EvalConfig, [], ["model.path=models/x", f"sets=[{{path: {path}}}]"])
    tokenizer = chat_tokenizer()
    [source] = read_eval_sets(spec_of(config).evaluated)
    asked = evaluate.Evaluation(config, evaluate.OpenModels({}, {}, {config.model: tokenizer})).problems(source)
    assert asked.prompts == [tokenizer.apply_chat_template(USER, add_generation_prompt=True, return_dict=False)]
    texts = config_files.load(EvalConfig, [], ["model.path=models/x", f"sets=[{{path: {path}, chat: false}}]"])
    [source] = read_eval_sets(spec_of(texts).evaluated)
    [prompt] = (
        evaluate.Evaluation(texts, evaluate.OpenModels({}, {}, {texts.model: tokenizer})).problems(source).prompts
    )
    assert "<|im_start|>" not in tokenizer.decode(prompt, skip_special_tokens=False)


def test_a_verifier_of_an_evaluation_is_asked_in_its_chat_template():
    words = ["model.path=models/x", "sets=[{path: x.jsonl}]", "verifier.model.path=models/v"]
    for chat in (True, False):
        config = config_files.load(EvalConfig, [], [*words, f"verifier.chat={str(chat).lower()}"])
        assert config.verifier is not None
        judge, tokenizer = config.verifier.model, chat_tokenizer()
        weigher = evaluate.Evaluation(config, evaluate.OpenModels({judge: None}, {}, {judge: tokenizer})).weigher()
        tokens = weigher._prompt("1 + 1?", "<step>2</step>")
        shown = tokenizer.decode(tokens, skip_special_tokens=False)
        assert shown.startswith("<|im_start|>user\n") == shown.endswith("<|im_start|>assistant\n") == chat
        assert "<step>2</step>" in shown


@pytest.fixture
def model(tmp_path):
    directory = make_model(tmp_path / "model", num_hidden_layers=1, vocab_size=104)
    chat_tokenizer(CHATML).save_pretrained(directory)
    return directory


def lines(schema, *words):
    return data_lines(config_files.load(schema, [], words))


def train_words(model, path, *words):
    return [
        f"roles={{generator: {{model: {{path: {model}}}}}}}", "recipe.target=megatron_rl.recipes.grpo:Grpo",
        "recipe.args={updates: 1}", f"data.path={path}", *words,
    ]  # fmt: skip


def test_check_says_what_it_found(model, tmp_path):
    pq.write_table(pa.Table.from_pylist([VERL, {**VERL, "prompt": ENDED}]), tmp_path / "verl.parquet")
    texts = jsonl(tmp_path / "texts.jsonl", {"question": "1 + 2?", "answer": "3"})
    found = lines(
        TrainConfig, *train_words(model, tmp_path / "verl.parquet"), f"evaluation.sets=[{{path: {texts}, chat: true}}]"
    )
    assert found == [
        "data: 2 problems; prompts: column `prompt`, messages, rendered with the tokenizer's chat template; 1 end with "
        "an assistant's turn, which the model goes on with; answers: column `reward_model.ground_truth`; for "
        "templates, rewards and environments: `ability`, `data_source`, `extra_info`",
        "evaluation.sets.texts: 1 problems; prompts: column `question`, text, as the user's message, rendered with the "
        "tokenizer's chat template; answers: column `answer`",
    ]
    [line] = lines(TrainConfig, *train_words(model, texts))
    assert "prompts: column `question`, text, in the text template; answers" in line
    [line] = lines(TrainConfig, *train_words(model, texts, "roles.generator.chat=true"))
    assert "text, in the text template as a user's message, rendered with the tokenizer's chat template" in line
    [line] = lines(TrainConfig, *train_words("no/model", tmp_path / "verl.parquet"))
    assert "rendered with the tokenizer's chat template (not tried: no/model is not here)" in line
    assert lines(TrainConfig, *train_words(model, "gone.jsonl")) == []


def test_check_refuses_what_training_would_refuse(model, tmp_path):
    chats = jsonl(tmp_path / "chats.jsonl", {"prompt": USER, "answer": "2"})
    (tmp_path / "strict.jinja").write_text("{{ raise_exception('no system') }}")
    own = f"roles.generator.model.chat_template={tmp_path}/strict.jinja"
    assert "data, problem 0: the chat template does not render" in refused(
        lines, TrainConfig, *train_words(model, chats, own)
    )
    (model / "chat_template.jinja").unlink()
    assert "no chat template" in refused(lines, TrainConfig, *train_words(model, chats))
    for schema, more in ((EvalConfig, []), (GenerateConfig, ["output=x"])):
        source = f"sets=[{{path: {chats}}}]" if schema is EvalConfig else f"data.path={chats}"
        words = [f"model.path={model}", source, *more]
        assert "no chat template" in refused(lines, schema, *words)
    bad = jsonl(tmp_path / "bad.jsonl", {"prompt": [{"role": "user"}], "answer": "2"})
    assert "prompt.0 has no content" in refused(lines, TrainConfig, *train_words(model, bad))
    ended = jsonl(tmp_path / "ended.jsonl", {"messages": ENDED})
    assert "no chat template" in refused(lines, SftConfig, f"model.path={model}", f"data.train={ended}")


def test_the_command_prints_what_it_found_and_fails_with_the_row(model, tmp_path, capsys):
    (tmp_path / "own.jinja").write_text(CHATML)
    words = ["roles.generator.max_prompt_tokens=100", f"roles.generator.model.chat_template={tmp_path}/own.jinja"]
    chats = jsonl(tmp_path / "chats.jsonl", VERL)
    assert main(["check", *train_words(model, chats, *words), "--ranks", "1", "--deep"]) == 0
    line = (
        f"# data: 1 problems; prompts: column `prompt`, messages, rendered with the file {tmp_path}/own.jinja; answers"
    )
    assert line in capsys.readouterr().out
    bad = jsonl(tmp_path / "bad.jsonl", VERL, {**VERL, "prompt": [said("bot", "a")]})
    assert main(["check", *train_words(model, bad, *words), "--ranks", "1", "--deep"]) == 2
    assert f"{bad}:2: prompt.0.role is 'bot'" in capsys.readouterr().err


def test_iterations_collected_with_another_chat_template_are_not_taken_from_the_store(tmp_path):
    (tmp_path / "own.jinja").write_text(CHATML)
    own = str(tmp_path / "own.jinja")
    assert sources.sources({"model": {"chat_template": own}}) == {"model.chat_template": tmp_path / "own.jinja"}


def test_check_counts_the_tokens_that_fine_tuning_trains_on(model, tmp_path):
    ended = jsonl(tmp_path / "ended.jsonl", *[{"messages": ENDED}] * 2)
    [line] = lines(SftConfig, f"model.path={model}", f"data.train={ended}")
    tokens, trained = len(chat_tokenizer().apply_chat_template(ENDED, return_dict=False)), len("2e\n")
    assert line == (
        "data.train: 2 samples: conversations, with the loss on the assistant's turns; 2 are usable, "
        f"and {2 * trained} of {2 * tokens} tokens are trained on"
    )
    texts = jsonl(tmp_path / "texts.jsonl", {"prompt": "p", "completion": "c"})
    assert "1 samples: pairs of texts" in lines(SftConfig, f"model.path={model}", f"data.train={texts}")[0]
