"""A set's problems as prompts, and draws from any engine under keys of the caller's own choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_rl.data.problems import Problem
from megatron_rl.engines.base import Completion, Engine, Sampling
from megatron_rl.text import fill
from megatron_rl.training.rollouts import tokenize
from megatron_rl.types import Stop

ROOM = 8  # tokens of the context that stay free


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemSet:
    """One set, ready to be asked: prompts[i] puts problems[i]."""

    name: str
    title: str
    problems: Sequence[Problem]
    prompts: Sequence[Sequence[int]]


def prompt_tokens(tokenizer: Any, template: str, values: Mapping[str, str], *, chat: bool) -> list[int]:
    """Returns the filled template as tokens; with `chat` as a user's message in the tokenizer's chat template. Raises ValueError without one."""
    text = fill(template, **values)
    if not chat:
        return tokenize(tokenizer, text)
    if not tokenizer.chat_template:
        raise ValueError(
            "chat = true, but the tokenizer has no chat template: set chat=false, or give model.tokenizer one"
        )
    shown = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )
    return list(tokenizer(shown, add_special_tokens=False)["input_ids"])


def draw(engine: Engine, prompts: Mapping[int, Sequence[int]], sampling: Sampling) -> dict[int, list[Completion]]:
    """Draws {key: prompt} -> {key: its n completions}. A draw depends on the seed, its key and its sample alone, whatever else is
    asked."""
    session = engine.session()
    for key, prompt in prompts.items():
        session.ask(key, prompt, sampling)
    return dict(session.answers())


def draw_within(
    engine: Engine, prompts: Mapping[int, Sequence[int]], sampling: Sampling, context: int | None
) -> dict[int, list[Completion]]:
    """Draws as `draw` does, with at most context - prompt - 8 tokens each; a prompt without room gets empty completions, cut."""
    limits = {index: limit(len(prompt), sampling.max_tokens, context) for index, prompt in prompts.items()}
    most = max(limits.values(), default=0)
    asked = {index: prompt for index, prompt in prompts.items() if limits[index]}
    found = draw(engine, asked, replace(sampling, max_tokens=most)) if asked else {}
    nothing = Completion(tokens=np.empty(0), logprobs=np.empty(0), stop=Stop.LENGTH)
    return {i: [cut(c, limits[i]) for c in found[i]] if i in found else [nothing] * sampling.n for i in prompts}


def limit(prompt: int, max_tokens: int, context: int | None) -> int:
    """Returns the number of tokens that an answer may have; 0 without room."""
    return max_tokens if context is None else max(0, min(max_tokens, context - prompt - ROOM))


def cut(completion: Completion, length: int) -> Completion:
    """Returns the first `length` tokens of a completion: what a draw with that limit would have given."""
    if len(completion.tokens) <= length:
        return completion
    return Completion(tokens=completion.tokens[:length], logprobs=completion.logprobs[:length], stop=Stop.LENGTH)
