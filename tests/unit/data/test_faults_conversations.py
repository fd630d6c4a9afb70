"""Faults of conversations: what a chat template or a reader left out without a word, and turns without an end."""

import json

import numpy as np
import pytest
from chats import CHATML, LLAMA, MARKED, STRICT, chat_tokenizer, said

from megatron_rl.config.schema import PromptSet, SftData
from megatron_rl.data.problems import read_problems
from megatron_rl.data.rows import DataError
from megatron_rl.data.sft import read_samples, sft_rollouts
from megatron_rl.texts.chat_template import ChatError, UserText, conversation_tokens, tokenize
from megatron_rl.texts.vocabulary import Vocabulary

USER = [said("user", "1 + 1?")]
ENDED = [*USER, said("assistant", "2")]
OPEN = (  # a turn ends where the next one begins
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
CALLING = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and m.tool_calls %}{% for c in m.tool_calls %}{% set f = c.function or c %}"
    "{{ f.name }}({{ f.arguments | tojson }}){% endfor %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ONLY = CHATML.replace(  # roles that the template does not know are skipped
    "{{ m.content }}", "{% if m.role in ('user', 'assistant') %}{{ m.content }}{% endif %}"
)
CALL = {"type": "function", "function": {"name": "read", "arguments": '{"f": "a"}'}}


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rollout(tmp_path, row, template=CHATML, **settings):
    """The one rollout of one row for fine-tuning."""
    tokenizer = chat_tokenizer(template)
    samples = read_samples(SftData(train=jsonl(tmp_path / "s.jsonl", row)))
    [found] = sft_rollouts(samples, tokenizer, append_eos=True, max_tokens=500, **settings)
    return found, tokenizer


def trained_texts(tmp_path, row, template=CHATML, **settings):
    """The texts of a row's turns that are trained on."""
    found, tokenizer = rollout(tmp_path, row, template, **settings)
    return [tokenizer.decode(found.tokens[a:b]) for a, b, author, _ in found.spans if author == 0]


def refused(call, *args, **settings):
    with pytest.raises((DataError, ChatError)) as caught:
        call(*args, **settings)
    return str(caught.value)


def knows(*ends):
    return Vocabulary(path="m", rows=None, ends=frozenset(ends), special=frozenset({2}), without_row={})


def test_cases_a_template_that_ends_no_turn_is_refused_for_fine_tuning(tmp_path):
    twice = {"messages": [*ENDED, said("user", "2+2"), said("assistant", "4")]}
    tokenizer = chat_tokenizer()
    end = tokenizer.eos_token_id
    text = refused(rollout, tmp_path, twice, OPEN, vocabulary=knows(end))
    assert f"ends no assistant's turn with a token at which the model stops (ids {end})" in text and "s.jsonl:1" in text
    assert trained_texts(tmp_path, twice, vocabulary=knows(end)) == ["2<|im_end|>\n", "4<|im_end|>\n"]
    closed = OPEN.replace("{% endfor %}", "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}", 1)
    assert trained_texts(tmp_path, twice, closed, vocabulary=knows(end)) == ["2<|im_end|>", "4<|im_end|>"]
    marks = "{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>"  # the end stands outside of them
    outside = MARKED.replace("{% generation %}{{ m.content }}<|im_end|>\n\n{% endgeneration %}", marks)
    assert "within {% generation %} marks" in refused(rollout, tmp_path, twice, outside, vocabulary=knows(end))
    assert end == 2 and trained_texts(tmp_path, twice, vocabulary=knows(0)), (
        "a special token that stop_strings can name"
    )
    lone = Vocabulary(path="m", rows=None, ends=frozenset({0}), special=frozenset({0}), without_row={})
    assert "never learn to stop" in refused(rollout, tmp_path, twice, vocabulary=lone)
    samples = read_samples(SftData(train=str(tmp_path / "s.jsonl")))
    assert sft_rollouts(samples, chat_tokenizer(OPEN), append_eos=False, max_tokens=99, vocabulary=lone)


@pytest.mark.parametrize("call", [CALL, CALL["function"]], ids=["nested", "flat"])
def test_cases_arguments_of_a_call_in_json_text_are_parsed(tmp_path, call):
    turns = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}, said("tool", "x")]
    row = {"messages": [*turns, said("assistant", "2")]}
    assert trained_texts(tmp_path, row, CALLING)[0] == 'read({"f": "a"})<|im_end|>\n'
    [problem] = read_problems(PromptSet(path=jsonl(tmp_path / "p.jsonl", {"prompt": [*turns, *USER]})))
    prompt = tokenize(chat_tokenizer(CALLING), UserText.within(problem.values["messages"], "1 + 1?"))
    assert 'read({"f": "a"})<|im_end|>' in chat_tokenizer().decode(prompt)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [("{", "are not JSON"), ("[1]", "are no JSON object"), (3, "are no JSON object"), ('"x"', "are no JSON object")],
)
def test_cases_arguments_that_are_no_object_are_refused_by_key(tmp_path, arguments, why):
    call = {"function": {"name": "read", "arguments": arguments}}
    row = {"messages": [*USER, {"role": "assistant", "tool_calls": [call]}]}
    text = refused(rollout, tmp_path, row, CALLING)
    assert "messages.1.tool_calls.0: the arguments" in text and why in text
    empty = {"messages": [*USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}]}
    assert trained_texts(tmp_path, empty, CALLING) == ["f({})<|im_end|>\n"]
    odd = {"messages": [*USER, {"role": "assistant", "tool_calls": "f()"}]}
    assert "messages.1.tool_calls is 'f()', not a list" in refused(rollout, tmp_path, odd, CALLING)


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize("said_so", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"loss": False}], ids=str)
def test_cases_a_turn_of_weight_0_is_not_trained_on(tmp_path, template, said_so):
    bad, good = said("assistant", "3") | said_so, said("assistant", "2") | {"weight": 1, "train": True}
    row = {"messages": [*USER, bad, said("user", "sure?"), good]}
    plain = {"messages": [*ENDED[:1], said("assistant", "3"), said("user", "sure?"), said("assistant", "2")]}
    found, whole = rollout(tmp_path, row, template)[0], rollout(tmp_path, plain, template)[0]
    assert np.array_equal(found.tokens, whole.tokens)
    assert [text.strip() for text in trained_texts(tmp_path, row, template)] == ["2<|im_end|>"]
    assert "no message of an assistant to train on" in refused(rollout, tmp_path, {"messages": [*USER, bad]}, template)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (said("assistant", "2") | {"weight": 0.5}, "messages.1.weight is 0.5: a turn is trained on (1, true) or not"),
        (said("assistant", "2") | {"train": "no"}, "messages.1.train is 'no'"),
        (said("user", "2") | {"train": True}, "turns of assistants alone are trained on"),
        (said("assistant", "2") | {"prefix": True}, "message 2, of role assistant has 'prefix'"),
        (said("assistant", "2") | {"reasoning_content": "1 and 1"}, "message 2, of role assistant has 'reasoning_con"),
        (said("assistant", "2") | {"name": "Ann"}, "message 2, of role assistant has 'name', which the chat template"),
        (said("assistant", "") | {"tool_calls": [CALL]}, "message 2, of role assistant has 'tool_calls'"),
        (said("assistant", " "), "messages.1.content is empty"),
        ({"from": "gpt", "value": "2", "mood": "glad"}, "message 2, of role assistant has 'mood'"),
    ],
    ids=str,
)
def test_cases_a_key_of_a_message_is_read_or_refused_by_name(tmp_path, message, why):
    text = refused(rollout, tmp_path, {"messages": [*USER, message, said("assistant", "2")]})
    assert "s.jsonl:1" in text and why in text, text


def test_cases_keys_that_a_template_writes_or_that_say_nothing_are_taken(tmp_path):
    thinking = CHATML.replace("{{ m.content }}", "{{ m.reasoning_content or '' }}|{{ m.content }}")
    thought = said("assistant", "2") | {"reasoning_content": "1 and 1", "tool_calls": [], "refusal": None}
    row = {"messages": [said("tool", "x") | {"name": "f", "tool_call_id": "1"}, *USER, thought]}
    assert trained_texts(tmp_path, row, thinking) == ["1 and 1|2<|im_end|>\n"]
    spoken = {"conversations": [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2", "weight": 1}]}
    assert trained_texts(tmp_path, spoken) == ["2<|im_end|>\n"]


def test_cases_a_prompts_messages_are_read_or_refused_by_name_too(tmp_path):
    for message, why in (
        (said("user", "1?") | {"name": "Ann"}, "message 1, of role user has 'name'"),
        (said("user", "1?") | {"mood": "glad"}, "has 'mood'"),
    ):
        [problem] = read_problems(PromptSet(path=jsonl(tmp_path / "p.jsonl", {"prompt": [message]})))
        text = refused(tokenize, chat_tokenizer(), UserText(problem.values["question"], (message,)))
        assert why in text
    weighed = [*USER, said("assistant", "3") | {"weight": 0}, *USER]
    [problem] = read_problems(PromptSet(path=jsonl(tmp_path / "p.jsonl", {"prompt": weighed})))
    assert [set(message) for message in problem.values["messages"]] == [{"role", "content"}] * 3


def test_cases_messages_that_a_template_drops_are_refused():
    """Templates of some models skip roles that they do not know, and write no text beside a call."""
    for messages, template, why in (
        (
            [said("system", "Be brief."), *ENDED],
            ONLY,
            "content of message 1, of role",
        ),
        (
            [*ENDED[:1], said("system", "Now."), ENDED[1]],
            ONLY,
            "message 2, of role s",
        ),
        ([*USER, said("assistant", "I look.") | {"tool_calls": [CALL["function"]]}], CALLING, "message 2, of role ass"),
    ):
        assert why in refused(conversation_tokens, chat_tokenizer(template), messages)
    assert conversation_tokens(chat_tokenizer(LLAMA), [said("user", " a\n"), said("assistant", "b\n")])[1].any()
    quoted = CHATML.replace("{{ m.content }}", "{{ m.content | tojson if m.role == 'tool' else m.content }}")
    assert conversation_tokens(chat_tokenizer(quoted), [*USER, said("tool", 'a "b"\n'), ENDED[1]])[1].any()


def test_cases_columns_of_a_row_that_change_a_conversation_are_read_or_refused(tmp_path):
    found, tokenizer = rollout(tmp_path, {"messages": ENDED, "system": "Be brief."})
    assert tokenizer.decode(found.tokens).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    pair = {"prompt": USER, "completion": ENDED[1:], "system": "Be brief."}
    assert trained_texts(tmp_path, pair) == ["2<|im_end|>\n"]
    two = {"messages": [said("system", "Be long."), *ENDED], "system": "Be brief."}
    assert "two system messages" in refused(rollout, tmp_path, two)
    for column in ("chat_template_kwargs", "images"):
        assert f"{column!r} is not read" in refused(rollout, tmp_path, {"messages": ENDED, column: {"a": 1}})
        assert f"{column!r} is not read" in refused(problems, tmp_path, {"prompt": USER, column: {"a": 1}})
    assert problems(tmp_path, {"prompt": USER, "system": "s", "images": []})[0]["messages"][0] == said("system", "s")
    assert "'tools' is not read: prompts" in refused(problems, tmp_path, {"prompt": USER, "tools": [{"name": "f"}]})


def problems(tmp_path, row):
    return [problem.values for problem in read_problems(PromptSet(path=jsonl(tmp_path / "p.jsonl", row)))]


def test_cases_tools_that_a_template_does_not_write_are_refused(tmp_path):
    tools = [{"name": "f", "parameters": {"a": {"type": "string"}, "b": None}}]  # Parquet puts the null there
    for given in (tools, json.dumps(tools[0] and [{"name": "f"}])):
        assert "does not write 'tools'" in refused(rollout, tmp_path, {"messages": ENDED, "tools": given})
    found, tokenizer = rollout(tmp_path, {"messages": ENDED, "tools": tools}, CALLING)
    assert tokenizer.decode(found.tokens).startswith('[{"name": "f", "parameters": {"a": {"type": "string"}}}]')


def test_cases_a_strict_templates_own_refusal_is_kept():
    assert "roles must alternate" in refused(conversation_tokens, chat_tokenizer(STRICT), [*USER, *ENDED])
