"""Asks a model for judgements. Used for a verifier in training, a frozen or served judge, evaluation and votes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from megatron_rl.engines.protocol import Completion, Engine, Sampling
from megatron_rl.evaluation.draw import limit
from megatron_rl.text import Decoded, decode
from megatron_rl.training.rollouts import from_completion
from megatron_rl.types import Prompt, Rollout

Item = TypeVar("Item")  # what is judged: a solution, a pair of answers, ...
Opinion = TypeVar("Opinion")  # what a judgement says, as it was read


@dataclass(frozen=True, kw_only=True)
class Question(Generic[Item, Opinion]):
    """One way to ask a model about an item and to read its answer."""

    prompt: Callable[[Item], Prompt | None]  # None: it cannot be asked about this item
    read: Callable[[Item, str], Opinion]  # item and text of the answer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judgement(Generic[Item, Opinion]):
    """One answer of a model about one item."""

    key: int  # of the item
    item: Item
    opinion: Opinion
    prompt: Prompt
    completion: Completion
    decoded: Decoded  # the answer's text
    version: int  # of the engine's weights, where the completion does not tell

    def rollout(self, role: str, *, partner_weight: float = 0.0) -> Rollout:
        """Returns the judgement as a rollout of `role`, to be trained on. The judgements of one item form a group."""
        return from_completion(
            self.prompt,
            self.completion,
            role=role,
            group=f"{self.key}:{self.prompt.id}",
            version=self.version,
            partner_weight=partner_weight,
        )


class Judging(Generic[Item, Opinion]):
    """A session in which a model is asked about items, each as soon as it is known. It works with any engine."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        sampling: Sampling,
        question: Question[Item, Opinion],
        *,
        context: int | None = None,
    ) -> None:
        """`sampling.n` judgements of each item. `context`: tokens of prompt and answer together; None: as many as the
        sampling allows."""
        self._engine, self._tokenizer, self._sampling = engine, tokenizer, sampling
        self._question, self._context = question, context
        self._asked: dict[int, tuple[Item, Prompt]] = {}
        self.session = engine.session()

    def ask(self, key: int, item: Item) -> bool:
        """Asks about an item. A draw depends on the seed, `key` and the sample alone. -> whether it could be asked:
        there is a prompt, and room for an answer. May be called at any time, also while answers are read."""
        prompt = self._question.prompt(item)
        if prompt is None:
            return False
        most = limit(len(prompt.tokens), self._sampling.max_tokens, self._context)
        if not most:
            return False
        self._asked[key] = (item, prompt)
        self.session.ask(key, prompt.tokens, replace(self._sampling, max_tokens=most))
        return True

    def answers(self) -> Iterator[tuple[int, list[Judgement[Item, Opinion]]]]:
        """Yields (key, the n judgements of its item), each when they are done, of all that could be asked."""
        for key, completions in self.session.answers():
            yield key, [self._judgement(key, completion) for completion in completions]

    def _judgement(self, key: int, completion: Completion) -> Judgement[Item, Opinion]:
        item, prompt = self._asked[key]
        decoded = decode(self._tokenizer, completion.tokens)
        return Judgement(
            key=key,
            item=item,
            opinion=self._question.read(item, decoded.text),
            prompt=prompt,
            completion=completion,
            decoded=decoded,
            version=self._engine.version,
        )


def judge_all(judging: Judging[Item, Opinion], items: Mapping[int, Item]) -> dict[int, list[Judgement[Item, Opinion]]]:
    """Asks about {key: item} and waits for the answers. Returns {key: judgements}, in the order of `items`; an empty
    list for an item that could not be asked about."""
    for key, item in items.items():
        judging.ask(key, item)
    found = dict(judging.answers())
    return {key: found.get(key, []) for key in items}
