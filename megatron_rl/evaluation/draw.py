"""What measures share: a set's problems as prompts, and draws from any engine under indices of the caller's own choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from megatron_rl.data.problems import Problem
from megatron_rl.engines.base import Completion, Engine, Row, Sampling, Streaming
from megatron_rl.text import fill
from megatron_rl.training.rollouts import tokenize
from megatron_rl.types import Stop

ROOM = 8  # tokens of the context that stay free


@runtime_checkable
class Indexed(Protocol):
    """An engine whose caller names the indices that a draw depends on."""

    def generate_rows(self, rows: Sequence[Row], sampling: Sampling) -> list[Completion]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemSet:
    """One set, ready to be asked: prompts[i] is of problems[i]."""

    name: str
    title: str
    problems: Sequence[Problem]
    prompts: Sequence[Sequence[int]]


def prompt_tokens(tokenizer: Any, template: str, values: Mapping[str, str], *, chat: bool) -> list[int]:
    """The filled template as tokens; with `chat` as a user's message in the tokenizer's chat template. Raises ValueError without one."""
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
    """{index: prompt} -> {index: its n completions}. A draw depends on the seed, its index and its sample alone, whatever else is asked."""
    if isinstance(engine, Streaming):
        asked = engine.begin(sampling)
        for index, prompt in prompts.items():
            asked.ask(index, prompt)
        return dict(asked.answers())
    if isinstance(engine, Indexed):
        flat = engine.generate_rows(
            [(prompt, index, j) for index, prompt in prompts.items() for j in range(sampling.n)], sampling
        )
        return {index: flat[i * sampling.n : (i + 1) * sampling.n] for i, index in enumerate(prompts)}
    return dict(zip(prompts, engine.generate(list(prompts.values()), sampling) if prompts else [], strict=True))


def draw_within(
    engine: Engine, prompts: Mapping[int, Sequence[int]], sampling: Sampling, context: int | None
) -> dict[int, list[Completion]]:
    """As `draw`, with at most context - prompt - 8 tokens each; a prompt without room gets empty completions, cut."""
    limits = {index: limit(len(prompt), sampling.max_tokens, context) for index, prompt in prompts.items()}
    most = max(limits.values(), default=0)
    asked = {index: prompt for index, prompt in prompts.items() if limits[index]}
    found = draw(engine, asked, replace(sampling, max_tokens=most)) if asked else {}
    nothing = Completion(tokens=[], logprobs=[], stop=Stop.LENGTH)
    return {i: [cut(c, limits[i]) for c in found[i]] if i in found else [nothing] * sampling.n for i in prompts}


def limit(prompt: int, max_tokens: int, context: int | None) -> int:
    """Tokens that an answer may have; 0 without room."""
    return max_tokens if context is None else max(0, min(max_tokens, context - prompt - ROOM))


def cut(completion: Completion, length: int) -> Completion:
    """Its first `length` tokens: what a draw with that limit would have given."""
    if len(completion.tokens) <= length:
        return completion
    return Completion(tokens=completion.tokens[:length], logprobs=completion.logprobs[:length], stop=Stop.LENGTH)
