"""Every parser of a model's text, and the pieces that texts are made of which are hard on parsers."""

from __future__ import annotations

from megatron_rl.contrib import last_letter, ssrl_reward
from megatron_rl.contrib.comparing import read_comparison
from megatron_rl.contrib.self_play import read_proposal
from megatron_rl.environments.python_tool import _FENCED
from megatron_rl.environments.tool_task import first_call
from megatron_rl.rewards import code_answer, exact_match, math_answer, role_tags, short_answer
from megatron_rl.rewards.answer_key import answer_key
from megatron_rl.rewards.code_cases import _BLOCK
from megatron_rl.rewards.verdicts import review
from megatron_rl.texts.tags import block_spans, boxed, generator_format, step_texts

PIECES = [
    "<search>", "</search>", "<answer>", "<information>", "<think>", "<score>", "<step>", "<question>", "<scores>",
    "<critique>", "<", "<a", "\\boxed{", "{", "}", "(", "```\n", "``` ", "\n\n", " ", "1", "1 ", "1/", ".", "$",
    "\\text{", "the ", "\\boxed{CORRECT}", "\\boxed{CORRECT} ", "<final_verification>", "<step_verification>",
    "<step>\\boxed{CORRECT}",
]  # fmt: skip
PARSERS = {
    "exact_match": lambda text: exact_match.grade(text, {"answer": "a"}),
    "ssrl": lambda text: ssrl_reward.grade(text, {"answer": "a"}),
    "label": lambda text: short_answer.grade_label(text, {"answer": "a", "choices": ["a", "b"]}),
    "text": lambda text: short_answer.grade_text(text, {"answer": "a, b"}),
    "last_letter": lambda text: last_letter.grade(text, {"answer": "a"}),
    "literal": lambda text: code_answer.grade_output(text, {"answer": "[1]"}),
    "mathematics": lambda text: math_answer.grade(text, {"answer": "7"}),
    "mathematics as released": lambda text: math_answer.grade_released(text, {"answer": "7"}),
    "votes": answer_key,
    "tags": lambda text: (boxed(text), generator_format(text), step_texts(text)),
    "bytes": lambda text: block_spans(text.encode(), "information"),
    "verdicts": lambda text: review(text, num_steps=3, correct=True, generator_format=1.0),
    "a whole review": lambda text: review(
        f"<step_verification>{text}</step_verification><final_verification>{text}</final_verification>",
        num_steps=3, correct=True, generator_format=1.0,
    ),
    "roles": lambda text: (role_tags.judged_score(text), role_tags.proposal_form(text), read_proposal(text)),
    "comparison": read_comparison,
    "tool calls": lambda text: first_call(text, ["search", "answer", "python"]),
    "python tool": _FENCED.fullmatch,
    "programs": _BLOCK.findall,
}  # fmt: skip
