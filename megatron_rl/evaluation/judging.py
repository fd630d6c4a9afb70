"""Asks a model for judgements. The model is a verifier in training, or a frozen or served judge."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from megatron_rl.engines.protocol import Completion, Engine, Sampling
from megatron_rl.run.metrics import Stopwatch
from megatron_rl.texts.response_forms import read_response, response_answer
from megatron_rl.texts.text import Decoded, decode
from megatron_rl.training.rollouts import from_completion
from megatron_rl.types import Prompt, Rollout

Item = TypeVar("Item")  # the judged object, such as a solution or a pair of answers
Opinion = TypeVar("Opinion")  # the parsed content of a judgement, such as a verdict or a score


@dataclass(frozen=True, kw_only=True)
class Question(Generic[Item, Opinion]):
    """A pair of functions: `prompt` makes the prompt that asks a model to judge an item, `read` parses the model's
    answer."""

    prompt: Callable[[Item], Prompt | None]  # makes the prompt; returns None if no prompt can be made for the item
    read: Callable[[Item, str], Opinion]  # parses the text of an answer about an item
    # whether `read` gets the answer without the model's thoughts, see texts.tags.after_thinking
    answer_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judgement(Generic[Item, Opinion]):
    """One answer in which a model judges one item, such as a solution."""

    key: int  # key with which the caller requested the judgement
    item: Item
    opinion: Opinion
    prompt: Prompt
    completion: Completion
    decoded: Decoded  # the decoded text of the answer
    version: int  # version of the engine's weights; only used if the completion has no version

    def rollout(self, role: str, *, partner_weight: float = 0.0) -> Rollout:
        """Returns the judgement as a training rollout of `role`. The judgements of one item form a group."""
        return from_completion(
            self.prompt,
            self.completion,
            role=role,
            group=f"{self.key}:{self.prompt.id}",
            version=self.version,
            partner_weight=partner_weight,
        )


class Judging(Generic[Item, Opinion]):
    """A session in which a model judges items. Items may be added at any time. Any engine can be used."""

    def __init__(
        self, engine: Engine, tokenizer: Any, sampling: Sampling, question: Question[Item, Opinion]
    ) -> None:  # fmt: skip
        """Opens a session of the engine. `sampling.n`: number of judgements of each item."""
        self._engine, self._tokenizer, self._sampling, self._question = engine, tokenizer, sampling, question
        self._asked: dict[int, tuple[Item, Prompt]] = {}
        self.session = engine.session()

    def ask(self, key: int, item: Item) -> bool:
        """Requests the judgements of an item. Returns False if no prompt can be made for the item.

        The random numbers of a judgement only depend on the seed, `key` and the sample index. May be called at any
        time, also during the iteration over `answers`.
        """
        prompt = self._question.prompt(item)
        if prompt is not None:
            self._asked[key] = (item, prompt)
            self.session.ask(key, prompt.tokens, self._sampling)
        return prompt is not None

    def answers(self) -> Iterator[tuple[int, list[Judgement[Item, Opinion]]]]:
        """Yields (key, list of the judgements) for each requested item, as soon as all of its judgements are done."""
        for key, completions in self.session.answers():
            yield key, [self._judgement(key, completion) for completion in completions]

    def collect(self, watch: Stopwatch) -> dict[int, list[Judgement[Item, Opinion]]]:
        """Waits for the judgements of all requested items. Returns {key: judgements}. `watch` records the waiting
        time under the name "review"."""
        by_key: dict[int, list[Judgement[Item, Opinion]]] = {}
        with watch("review"):
            # each judgement is parsed as soon as it arrives, while the engine generates other judgements
            for key, judgements in self.answers():
                by_key[key] = judgements
                watch.beat()
        return by_key

    def _judgement(self, key: int, completion: Completion) -> Judgement[Item, Opinion]:
        item, prompt = self._asked[key]
        decoded = decode(self._tokenizer, completion.tokens)
        tokens = prompt.tokens, completion.tokens
        text = read_response(self._tokenizer, *tokens, decoded).text
        if self._question.answer_only:
            text = response_answer(self._tokenizer, *tokens)
        return Judgement(
            key=key,
            item=item,
            opinion=self._question.read(item, text),
            prompt=prompt,
            completion=completion,
            decoded=decoded,
            version=self._engine.version,
        )


def judge_all(judging: Judging[Item, Opinion], items: Mapping[int, Item]) -> dict[int, list[Judgement[Item, Opinion]]]:
    """Requests the judgements of several items and waits for them. `items`: {key: item}.

    Returns {key: list of the item's judgements}, in the order of `items`. The list is empty for an item for which
    `Judging.ask` returns False.
    """
    for key, item in items.items():
        judging.ask(key, item)
    by_key = dict(judging.answers())
    return {key: by_key.get(key, []) for key in items}
