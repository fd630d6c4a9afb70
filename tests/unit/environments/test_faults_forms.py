"""Faults of forms: thoughts, answers and calls of other families than <think>'s were read by <think>'s rule."""

from __future__ import annotations

import json

import pytest
from chats import CHATML, chat_tokenizer, harmony_tokenizer, said
from tiny_models import make_model

from megatron_rl.config.base import ConfigError
from megatron_rl.environments.dialogue import Exchange, dialogue_of
from megatron_rl.environments.episode_types import Call
from megatron_rl.main import main
from megatron_rl.texts.response_forms import form_for, read_response, response_answer, response_text
from megatron_rl.texts.text import decode

ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
CALL = '<|start|>assistant<|channel|>commentary to=functions.f <|message|>{"a": 1}<|call|>'


def ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("response", "text", "answer"),
    [
        ("<|channel|>final<|message|>a<|return|>", "a", "a"),
        (f"{ANALYSIS}hm<|end|>{FINAL}a<|return|>", "<think>\nhm\n</think>\n\na", "a"),
        (f"{ANALYSIS}hm<|end|><|start|>assistant{ANALYSIS}so<|end|>{FINAL}a", "<think>\nhm\nso\n</think>\n\na", "a"),
        (f"{ANALYSIS}hm", "<think>\nhm", ""),
        (f"{ANALYSIS}hm<|end|>", "<think>\nhm\n</think>\n\n", ""),
        (f"{ANALYSIS}hm<|end|>{CALL}", "<think>\nhm\n</think>\n\n", ""),
        ("<|channel|>commentary<|message|>I look.<|end|>" + CALL, "I look.", "I look."),
        ("no channel<|return|>", "no channel", "no channel"),
        (f"{ANALYSIS}final<|message|>a<|return|>", "<think>\nfinala\n</think>\n\n", ""),  # no way out of a thought
        ("", "", ""),
    ],
)
def test_faults_harmonys_channels_are_thoughts_answers_and_calls(response, text, answer):
    tokenizer = harmony_tokenizer()
    prompt = ids(
        tokenizer, tokenizer.apply_chat_template([said("user", "q")], add_generation_prompt=True, tokenize=False)
    )
    tokens = ids(tokenizer, response)
    assert response_text(tokenizer, prompt, tokens) == text
    assert response_answer(tokenizer, prompt, tokens) == answer
    expected = (("f", '{"a": 1}'),) if response.endswith("<|call|>") else ()
    assert read_response(tokenizer, prompt, tokens).calls == expected


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ("<|channel|>final<|message|>a", {"content": "a"}),
        (f"{ANALYSIS}hm<|end|>{FINAL}a", {"content": "a", "thinking": "hm"}),
        (ANALYSIS + "hm<|end|>" + CALL.removesuffix("<|call|>"), {"content": "", "thinking": "hm"}),
    ],
)
def test_cases_the_history_of_harmony_holds_the_familys_form(response, message):
    """The next prompt repeated an answer `a` as `...final<|message|>finala`."""
    tokenizer = harmony_tokenizer()
    dialogue = dialogue_of("chat", tokenizer)
    user, end = said("user", "q"), "<|call|>" if "to=functions" in response else "<|return|>"
    prompt, answer = dialogue.open([user], ()), ids(tokenizer, response + end)
    reply = dialogue.read(prompt, answer, ())
    calls = [Call(name="f", arguments={"a": 1})] if end == "<|call|>" else []
    assert list(reply.calls) == calls
    told = [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    assert reply.message == {"role": "assistant"} | message | ({"tool_calls": told} if calls else {})
    past, more = Exchange(prompt=prompt, answer=answer, history=[user, reply.message], tools=()), [said("user", "r")]
    between = dialogue.bridge(past, more)
    following = dialogue.open([user, reply.message, *more], ()) if between is None else [*prompt, *answer, *between]
    whole = tokenizer.apply_chat_template([user, reply.message, *more], add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(following) == whole and "finala" not in whole
    assert calls or "<|channel|>final<|message|>a<|end|><|start|>user<|message|>r<|end|>" in whole


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    ("opening", "closing"), [("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]"), ("<think>", "</think>")]
)
def test_faults_marks_of_other_families_are_read_special_or_not(opening, closing, special):
    """`decode` drops special tokens, and with them the marks of thoughts."""
    tokenizer = chat_tokenizer(CHATML + f"{{# {closing} #}}")
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": [opening, closing]})
    plain, opened = ids(tokenizer, "q"), ids(tokenizer, f"q{opening}\n")
    response = ids(tokenizer, f"{opening}hm{closing}a<|im_end|>")
    assert response_text(tokenizer, plain, response) == "<think>hm</think>a"
    assert response_answer(tokenizer, plain, response) == "a"
    rest = ids(tokenizer, f"hm{closing}a<|im_end|>")
    assert response_text(tokenizer, opened, rest) == "<think>\nhm</think>a"
    assert (
        response_answer(tokenizer, opened, rest) == "a"
        and response_answer(tokenizer, opened, ids(tokenizer, "hm")) == ""
    )
    assert read_response(tokenizer, plain, response).parts == (("hm", "a") if special else None)
    reply = dialogue_of("chat", tokenizer).read(opened, rest, ())
    assert reply.message["content"] == ("a" if special else decode(tokenizer, rest).text)


@pytest.mark.parametrize(
    ("template", "stated", "form"),
    [
        ("", None, ("<think>", "</think>")),
        ("{{ messages }}", None, ("<think>", "</think>")),
        ("{{ m.content.split('</think>')[-1] }}", None, ("<think>", "</think>")),
        ("{{ m.reasoning_content }}", None, None),
        ("{% if thinking %}Here is my thought process:{% endif %}", None, None),
        ("{{ m.reasoning_content }}", ("<a>", "</a>"), ("<a>", "</a>")),
    ],
)
def test_faults_a_template_with_unknown_marks_has_no_known_form(template, stated, form):
    found = form_for(template, (), stated)
    assert form == (None if found is None else (found.opening, found.closing))


UNKNOWN = CHATML + "{% if thinking %}Here is my thought process:{% endif %}"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), None),
        (("reward.target=megatron_rl.rewards.instructions:grade",), "reward (megatron_rl.rewards.instructions:grade)"),
        (
            (
                "reward.target=megatron_rl.rewards.reward_server:ServedRewardModel",
                "reward.args={url: 'http://a', reads: answer}",
            ),
            "reward (megatron_rl.rewards.reward_server:ServedRewardModel)",
        ),
        (("evaluation.sets=[ifeval]", "evaluation.every=1"), "evaluation.sets.ifeval"),
        (
            (
                "recipe={target: agents, args: {updates: 1, agents: {generator: 1}, dialogue: chat, "
                "environment: {target: 'test_check_deep:Talk'}, rewards: {empty: 1.0}}}",
            ),
            "recipe.args.dialogue = 'chat'",
        ),
        (("recipe={target: rubric, args: {updates: 1}}", "roles.judge.model.path=PATH"), "the judge reads answers"),
        (
            (
                "recipe={target: dapo, args: {updates: 1, reward_model: {weight: 0.5, reads: answer}}}",
                *("roles.reward.model.path=PATH", "roles.reward.head=score"),
            ),
            "recipe.args.reward_model.reads = 'answer'",
        ),
    ],
)
def test_faults_check_refuses_what_depends_on_an_unknown_form_and_names_the_cure(tmp_path, capsys, words, why):
    model = make_model(tmp_path / "model", num_hidden_layers=1, vocab_size=104, eos_token_id=2)
    chat_tokenizer(UNKNOWN).save_pretrained(model)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "1?", "answer": "2", "rubric": "r"}) + "\n")
    own = [
        *("recipe={target: grpo, args: {updates: 1}}", f"roles.generator.model.path={model}"),
        *(f"data.path={tmp_path}/rows.jsonl", f"run.dir={tmp_path}", *(w.replace("PATH", str(model)) for w in words)),
    ]
    capsys.readouterr()
    main(["check", *own])
    errors = capsys.readouterr().err
    cure = "roles.generator.model.thought_marks to the two texts that begin and end a thought"
    assert (why is None) == (cure not in errors), errors
    assert why is None or f"{why}" in errors
    main(["check", *own, "roles.generator.model.thought_marks=['<a>', '</a>']"])
    assert cure not in capsys.readouterr().err


def test_faults_a_dialogue_of_an_unknown_form_is_refused_where_check_could_not_see_the_files():
    with pytest.raises(ConfigError, match="model.thought_marks to the two texts"):
        dialogue_of("chat", chat_tokenizer(UNKNOWN))
    with pytest.raises(ConfigError, match="cannot be told from answers"):
        response_answer(chat_tokenizer(UNKNOWN), [5], [6])
