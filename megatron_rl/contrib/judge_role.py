"""Creates prompts for the role `judge`, and computes the rewards of the judge's answers if the judge is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.chat_template import tokenize
from megatron_rl.control_tokens import fill_quoting
from megatron_rl.evaluation.judging import Judgement
from megatron_rl.text import read_template
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.types import Prompt, Rollout

JUDGE = "judge"


def judge_prompt(
    context: RolloutContext, template: str, id: str, payload: Mapping[str, Any], /, **values: str
) -> Prompt | None:
    """Fills a judge's template with the problem's question and further values. Returns None if the prompt is too long;
    a prompt is never truncated.
    """
    tokenizer = context.tokenizers[JUDGE]
    text = fill_quoting(tokenizer, read_template(template), question=str(payload["question"]), **values)
    tokens = tokenize(tokenizer, text)
    return Prompt(id=id, tokens=tokens, payload=payload) if len(tokens) <= context.max_prompt_tokens[JUDGE] else None


def judge_rollout(
    context: RolloutContext, answer: Judgement[Any, Any], *, form: float, agrees: float | None, weight: float
) -> Rollout:
    """Converts an answer of the judge to a rollout that the judge can be trained on. Its rewards are `format`, `agrees`
    (if the correct answer is known) and total = weight * format + agrees.
    """
    known = {} if agrees is None else {"agrees": agrees}
    drawn = answer.rollout(JUDGE, partner_weight=context.partner_weights.get(JUDGE, 0.0))
    return drawn.with_rewards(total=weight * form + (agrees or 0.0), format=form, **known)
