"""A set's problems as prompts, and draws from any engine under keys of the caller's own choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_rl.data.problems import Problem
from megatron_rl.engines.base import Completion, Engine, Sampling, Tokens
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
    """Fills the template -> its tokens; with `chat` as a user's message in the tokenizer's chat template.

    Raises ValueError for a tokenizer without a chat template.
    """
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


def draw(engine: Engine, asks: Mapping[int, tuple[Tokens, Sampling]]) -> dict[int, list[Completion]]:
    """Asks {key: (prompt, sampling)} and waits. -> {key: its n completions}, in the order of `asks`.

    A draw depends on the seed, its key and its sample alone, whatever else is asked.
    """
    session = engine.session()
    for key, (prompt, sampling) in asks.items():
        session.ask(key, prompt, sampling)
    found = dict(session.answers())
    return {key: found[key] for key in asks}


def draw_within(
    engine: Engine, prompts: Mapping[int, Tokens], sampling: Sampling, context: int | None
) -> dict[int, list[Completion]]:
    """Draws for {key: prompt} as `draw` does, with at most context - prompt - ROOM tokens each. A prompt without
    room gets empty completions, cut."""
    limits = {key: limit(len(prompt), sampling.max_tokens, context) for key, prompt in prompts.items()}
    asks = {key: (prompts[key], replace(sampling, max_tokens=most)) for key, most in limits.items() if most}
    found = draw(engine, asks) if asks else {}
    nothing = [Completion(tokens=np.empty(0), logprobs=np.empty(0), stop=Stop.LENGTH)] * sampling.n
    return {key: found.get(key, nothing) for key in prompts}


def limit(prompt: int, max_tokens: int, context: int | None) -> int:
    """Returns the number of tokens that an answer to a prompt of so many tokens may have; 0 without room."""
    return max_tokens if context is None else max(0, min(max_tokens, context - prompt - ROOM))
