"""Conversations as prompts and as samples for fine-tuning: their tokens, the assistant's mask, special tokens once.

The masks are compared with transformers' return_assistant_tokens_mask, and with TRL's rule for completions, which is
written out here by plain loops.
"""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
from chats import CHATML, LLAMA, MARKED, STRICT, THINKING, UNMARKED, chat_tokenizer, said
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_rl.config.schema import ConfigError, Model
from megatron_rl.texts.chat_template import (
    ChatError,
    ChatTokenizer,
    UserText,
    conversation_tokens,
    problem_text,
    tokenize,
    tokenizer_of,
)

QUESTION = [said("system", "Be brief."), said("user", "1 + 1?")]


def text_of(tokenizer, tokens):
    return tokenizer.decode(tokens, skip_special_tokens=False)


def conversations(count, seed=0):
    """Random conversations, most with several turns of the assistant, some of them twice in a row."""
    rng = random.Random(seed)
    for _ in range(count):
        messages = [said("system", "s" * rng.randint(1, 4))] if rng.random() < 0.5 else []
        for _ in range(rng.randint(1, 4)):
            messages.append(said("user", "ask\n" * rng.randint(1, 3)))
            messages.append(said("assistant", "".join(rng.choices("ab \n<>", k=rng.randint(1, 9)))))
        yield messages


def test_a_conversation_ends_with_the_header_of_the_assistants_turn():
    tokenizer = chat_tokenizer()
    tokens = tokenize(tokenizer, UserText.within(QUESTION, "1 + 1?"))
    assert tokens == tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    assert text_of(tokenizer, tokens).endswith("<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n")


def test_an_assistants_last_turn_stays_open_as_in_trl():
    tokenizer, begun = chat_tokenizer(), [*QUESTION, said("assistant", "Let me think.")]
    tokens = tokenize(tokenizer, UserText.within(begun, "1 + 1?"))
    assert tokens == tokenizer.apply_chat_template(begun, continue_final_message=True, return_dict=False)
    assert text_of(tokenizer, tokens).endswith("<|im_start|>assistant\nLet me think.")


def test_the_begin_token_stands_once_before_a_rendered_conversation():
    """A Llama-like tokenizer adds it to every text, and its template writes it too."""
    tokenizer = chat_tokenizer(LLAMA, adds_begin=True)
    begin = tokenizer.bos_token_id
    for prompt in (tokenize(tokenizer, UserText("1 + 1?")), tokenize(ChatTokenizer(tokenizer), "1 + 1?")):
        assert prompt.count(begin) == 1 and prompt[0] == begin
        assert text_of(tokenizer, prompt) == (
            "<s><|start_header_id|>user<|end_header_id|>\n\n1 + 1?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n"
        )
    assert tokenize(tokenizer, "1 + 1?")[0] == begin, "a text has it as before"
    doubled = tokenizer(tokenizer.apply_chat_template(QUESTION, tokenize=False))["input_ids"]
    assert doubled[:2] == [begin, begin], "what is guarded against"
    tokens, written = conversation_tokens(tokenizer, [*QUESTION, said("assistant", "2")])
    assert (tokens == begin).sum() == 1 and text_of(tokenizer, tokens[written]) == "2<|eot_id|>"


def test_a_chat_tokenizer_is_the_tokenizer_in_everything_but_prompts():
    plain = chat_tokenizer()
    chat = ChatTokenizer(plain)
    assert tokenize(chat, "hello") == tokenize(plain, UserText("hello"))
    assert chat("hello")["input_ids"] == plain("hello")["input_ids"]
    assert chat.backend_tokenizer.get_vocab_size() == plain.backend_tokenizer.get_vocab_size()
    assert chat.eos_token_id == plain.eos_token_id


def test_a_users_text_is_a_text_that_keeps_its_conversation():
    text = UserText.within([*QUESTION, said("assistant", "2"), said("user", "And 2 + 2?")], "And 2 + 3?")
    assert text == "And 2 + 3?" and [m["content"] for m in text.messages] == ["Be brief.", "1 + 1?", "2", "And 2 + 3?"]
    again = pickle.loads(pickle.dumps(text))
    assert again.messages == text.messages and type(text.messages[-1]["content"]) is str
    with pytest.raises(ChatError, match="no user's message"):
        UserText.within([said("system", "s")], "q")


def test_a_problem_is_put_as_its_conversation_or_in_the_template():
    assert problem_text("Q: {question}", {"question": "why"}) == "Q: why"
    put = problem_text("Q: {question}", {"question": "why?", "messages": QUESTION})
    assert isinstance(put, UserText) and put.messages == [QUESTION[0], said("user", "why?")]


def test_a_tokenizer_without_a_template_is_refused_with_the_cure():
    with pytest.raises(ConfigError, match="no chat template: name a Jinja file by model.chat_template"):
        tokenize(chat_tokenizer(None), UserText("hello"))


def test_a_template_of_ones_own_comes_from_a_file(tmp_path):
    chat_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}!")
    own = tokenizer_of(Model(path=str(tmp_path), chat_template=str(tmp_path / "own.jinja")))
    assert text_of(own, tokenize(own, UserText("hello"))) == "hello!"
    assert text_of(own, tokenize(tokenizer_of(Model(path=str(tmp_path))), UserText("x"))).startswith("<|im_start|>")
    with pytest.raises(ConfigError, match=r"chat_template = 'no\.jinja' cannot be read"):
        tokenizer_of(Model(path=str(tmp_path), chat_template="no.jinja"))


def test_what_a_template_raises_names_the_roles():
    with pytest.raises(ChatError, match="does not render messages of user, user: roles must alternate"):
        tokenize(chat_tokenizer(STRICT), UserText("b", preceding=[said("user", "a")]))


@pytest.mark.parametrize("template", [MARKED, UNMARKED])
def test_masks_are_those_of_transformers(template):
    """With marks and, by prefixes, without them, over random conversations."""
    reference, tokenizer = chat_tokenizer(MARKED), chat_tokenizer(template)
    for messages in conversations(30):
        known = reference.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        tokens, written = conversation_tokens(tokenizer, messages)
        assert tokens.tolist() == known["input_ids"] and written.tolist() == [bool(m) for m in known["assistant_masks"]]
        parts = [f"{m['content']}<|im_end|>\n\n" for m in messages if m["role"] == "assistant"]
        assert text_of(tokenizer, tokens[written]) == "".join(parts)


@pytest.mark.parametrize("template", [CHATML, LLAMA, MARKED])
def test_the_masks_of_pairs_follow_trls_rule(template):
    """TRL's SFTTrainer trains on what stands behind the tokens of the prompt, rendered with the assistant's header."""
    tokenizer = chat_tokenizer(template, adds_begin=True)
    for messages in conversations(20, seed=1):
        prompt, completion = messages[:-1], messages[-1:]
        begun = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        whole = tokenizer.apply_chat_template(prompt + completion, return_dict=False)
        assert whole[: len(begun)] == begun
        tokens, written = conversation_tokens(tokenizer, messages, first=len(prompt))
        assert tokens.tolist() == whole
        assert written.tolist() == [False] * len(begun) + [True] * (len(whole) - len(begun))


def test_a_template_that_renders_turns_anew_is_refused_unless_it_has_marks():
    thoughts = [said("user", "a"), said("assistant", "<think>x</think>1"), said("user", "b"), said("assistant", "2")]
    with pytest.raises(ChatError, match="its first 2 messages in another way when message 3 follows.*generation"):
        conversation_tokens(chat_tokenizer(THINKING), thoughts)
    tokens, written = conversation_tokens(chat_tokenizer(THINKING), thoughts, first=3)
    assert text_of(chat_tokenizer(), tokens[written]) == "2<|im_end|>\n", "the last turn alone can be told"
    marked = THINKING.replace(
        "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>\n",
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content.split('</think>')[-1] }}<|im_end|>"
        "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}",
    )
    tokens, written = conversation_tokens(chat_tokenizer(marked), thoughts)
    assert text_of(chat_tokenizer(), tokens[written]) == "1<|im_end|>2<|im_end|>"


def test_a_token_across_the_border_of_a_turn_is_refused():
    """The header ends with a line break, and the answer begins with one: together they are one token."""
    core = Tokenizer(models.WordLevel({"\n\n": 0, "\n": 1, "a": 2, ":": 3, "?": 4}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+|[\s\S]"), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token=AddedToken("?", normalized=False))
    tokenizer.chat_template = (
        "{% for m in messages %}:\n{{ m.content }}{% endfor %}{% if add_generation_prompt %}:\n{% endif %}"
    )
    messages = [said("user", "a"), said("assistant", "a")]
    assert conversation_tokens(tokenizer, messages)[1].tolist() == [False] * 5 + [True]
    with pytest.raises(ChatError, match="in another way when message 2 follows"):
        conversation_tokens(tokenizer, [said("user", "a"), said("assistant", "\na")])


def test_a_conversation_without_an_assistants_tokens_is_refused():
    for template in (MARKED, CHATML):
        with pytest.raises(ChatError, match="nothing to train on"):
            conversation_tokens(
                chat_tokenizer(template), [*QUESTION, said("assistant", "2"), said("user", "?")], first=3
            )
    with pytest.raises(ChatError, match="begins with an assistant's turn"):
        conversation_tokens(chat_tokenizer(), [said("assistant", "2"), *QUESTION])


def test_the_first_token_is_never_trained_on():
    bare = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    tokens, written = conversation_tokens(chat_tokenizer(bare), [said("assistant", "abc")])
    assert len(tokens) == 3 and written.tolist() == [False, True, True]


def test_tools_go_to_the_template():
    template = "{% if tools %}{{ tools[0].name }};{% endif %}" + CHATML
    tools = [{"name": "calculator"}]
    tokens, written = conversation_tokens(
        chat_tokenizer(template), [said("user", "a"), said("assistant", "b")], tools=tools
    )
    assert text_of(chat_tokenizer(), tokens).startswith("calculator;<|im_start|>") and np.flatnonzero(written)[0] > 11
