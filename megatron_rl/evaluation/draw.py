"""Turns the problems of a set into prompts, and draws completions from an engine under keys that the caller chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_rl.chat_template import ChatTokenizer, problem_text, tokenize
from megatron_rl.data.problems import Problem
from megatron_rl.engines.protocol import Completion, Engine, Sampling, Tokens
from megatron_rl.types import Stop

ROOM = 8  # tokens of the context that stay free


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemSet:
    """A set of problems with their prompts: prompts[i] are the tokens of problems[i]."""

    name: str
    title: str
    problems: Sequence[Problem]
    prompts: Sequence[Sequence[int]]


def prompt_tokens(tokenizer: Any, template: str, values: Mapping[str, Any], *, chat: bool) -> list[int]:
    """Returns the tokens of a problem's conversation, where the values have messages; else those of the filled
    template, with `chat` as a user's message in the tokenizer's chat template.

    Raises what chat.prompt_ids raises.
    """
    return tokenize(ChatTokenizer(tokenizer) if chat else tokenizer, problem_text(template, values))


def draw(engine: Engine, asks: Mapping[int, tuple[Tokens, Sampling]]) -> dict[int, list[Completion]]:
    """Asks an engine for {key: (prompt, sampling)} and waits for the answers. Returns {key: its n completions}, in
    the order of `asks`.

    A draw depends only on the seed, its key and its sample index.
    """
    session = engine.session()
    for key, (prompt, sampling) in asks.items():
        session.ask(key, prompt, sampling)
    found = dict(session.answers())
    return {key: found[key] for key in asks}


def draw_within(
    engine: Engine, prompts: Mapping[int, Tokens], sampling: Sampling, context: int | None
) -> dict[int, list[Completion]]:
    """Draws for {key: prompt} as `draw` does, with at most context - prompt - ROOM tokens each. A prompt that leaves
    no room gets empty completions that count as cut."""
    limits = {key: limit(len(prompt), sampling.max_tokens, context) for key, prompt in prompts.items()}
    asks = {key: (prompts[key], replace(sampling, max_tokens=most)) for key, most in limits.items() if most}
    found = draw(engine, asks) if asks else {}
    nothing = [Completion(tokens=np.empty(0), logprobs=np.empty(0), stop=Stop.LENGTH)] * sampling.n
    return {key: found.get(key, nothing) for key in prompts}


def limit(prompt: int, max_tokens: int, context: int | None) -> int:
    """Returns the largest number of tokens that an answer to a prompt of `prompt` tokens may have; 0 when the
    context leaves no room."""
    return max_tokens if context is None else max(0, min(max_tokens, context - prompt - ROOM))
