"""Converts problems to prompts, and samples completions from an engine for requests with given keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_rl.data.problems import Problem
from megatron_rl.engines.protocol import Completion, Engine, Sampling, Tokens, draw
from megatron_rl.texts.chat_template import ChatTokenizer, problem_text, tokenize
from megatron_rl.types import Stop

ROOM = 8  # number of tokens at the end of the context that are left unused


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemSet:
    """A set of problems with their prompts: `prompts[i]` has the token ids of `problems[i]`."""

    name: str
    title: str
    problems: Sequence[Problem]
    prompts: Sequence[Sequence[int]]


def prompt_tokens(tokenizer: Any, template: str, values: Mapping[str, Any], *, chat: bool) -> list[int]:
    """Returns the token ids of a problem's prompt.

    If `values` has the key "messages", the prompt is this conversation. Otherwise the prompt is the template filled
    with `values`; if `chat` is True, as a user message in the tokenizer's chat template. Raises the errors of
    chat_template.prompt_ids.
    """
    return tokenize(ChatTokenizer(tokenizer) if chat else tokenizer, problem_text(template, values))


def draw_within(
    engine: Engine, prompts: Mapping[int, Tokens], sampling: Sampling, context: int | None
) -> dict[int, list[Completion]]:
    """Samples completions for {key: prompt} as `draw` does, with at most as many tokens as the function `limit`
    returns.

    If a prompt leaves no space for an answer in the context, its completions are empty and have the stop reason
    Stop.LENGTH.
    """
    limits = {key: limit(len(prompt), sampling.max_tokens, context) for key, prompt in prompts.items()}
    asks = {key: (prompts[key], replace(sampling, max_tokens=most)) for key, most in limits.items() if most}
    completions = draw(engine, asks) if asks else {}
    nothing = [Completion(tokens=np.empty(0), logprobs=np.empty(0), stop=Stop.LENGTH)] * sampling.n
    return {key: completions.get(key, nothing) for key in prompts}


def limit(prompt: int, max_tokens: int, context: int | None) -> int:
    """Returns the maximum number of tokens of an answer: min(max_tokens, context - prompt - ROOM), and at least 0,
    where ROOM tokens of the context are left unused.

    `prompt`: number of tokens of the prompt. `context`: context length in tokens; None for no limit.
    """
    return max_tokens if context is None else max(0, min(max_tokens, context - prompt - ROOM))
