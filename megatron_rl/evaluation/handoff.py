"""Hand-off: two models generate one answer in turns, and the answer is graded as one text. This is the protocol of
Tandem RL's release (arXiv 2606.28166).

The first model begins. A turn ends after a double newline, which stays in the text; then the other model continues from
the prompt and the text so far. The two models share the token budget. A chain, which is one such answer, ends when the
budget is used up, when a turn is cut by length, when a turn stops for any reason other than the double newline, or
after `max_rounds` rounds of one turn of each model (eval/handoff.py of the release, run_all_rounds). The key of
a turn's request to the engine is 1000 * problem index + sample index + number of tokens generated so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megatron_rl.engines.protocol import Completion, Engine, Sampling
from megatron_rl.evaluation.draw import ProblemSet, draw, limit
from megatron_rl.evaluation.samples import Sample
from megatron_rl.evaluation.solve import Grade, answer_of, decoded, sample_of
from megatron_rl.types import Stop

SWITCH = "\n\n"
PROBLEM_STRIDE = 1000
MAX_ROUNDS = 150  # a round is one turn of each model
HANDOFF = "handoff"


@dataclass(slots=True)
class Chain:
    """One answer that two models generate in turns, and its state."""

    prompt: np.ndarray  # token ids of the prompt, int32
    first_index: int  # key of the first turn's request to the engine; the key determines the random numbers
    budget: int  # maximum number of tokens of the answer
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    logprobs: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    # token count of each turn; the first model generates turns 0, 2, 4, ...
    turns: list[int] = field(default_factory=list)
    stop: Stop | None = None  # reason why the answer ended; None while it is not finished

    @property
    def index(self) -> int:
        """Returns the key of the next turn's request to the engine, which determines the random numbers of the turn."""
        return self.first_index + len(self.tokens)

    @property
    def left(self) -> int:
        return self.budget - len(self.tokens)

    @property
    def completion(self) -> Completion:
        return Completion(tokens=self.tokens, logprobs=self.logprobs, stop=self.stop or Stop.LENGTH)


@dataclass(frozen=True, kw_only=True)
class HandOff:
    """Two models that generate each answer in turns, `sampling.n` answers for each problem of a set.

    The models must have the same vocabulary.
    """

    engines: tuple[Engine, Engine]
    tokenizer: Any
    sampling: Sampling
    grade: Grade
    context: int | None = None
    max_rounds: int = MAX_ROUNDS
    measure: str = field(default=HANDOFF, init=False)

    def __call__(self, problems: ProblemSet, places: Sequence[int]) -> list[list[Sample]]:
        """Returns `sampling.n` graded answers (samples) for each of the problems with the indices `places`.

        The field `turns` of a sample has the token count of each turn.
        """
        chains = {
            (place, j): Chain(
                np.asarray(problems.prompts[place], np.int32),
                place * PROBLEM_STRIDE + j,
                limit(len(problems.prompts[place]), self.sampling.max_tokens, self.context),
            )
            for place in places
            for j in range(self.sampling.n)
        }
        write(list(chains.values()), self.engines, self.tokenizer, self.sampling, max_rounds=self.max_rounds)
        texts = decoded(
            self.tokenizer, [(problems.prompts[place], chain.completion) for (place, _), chain in chains.items()]
        )
        graded = self.grade(texts, [problems.problems[place].values for place, _ in chains])
        groups: dict[int, list[Sample]] = {place: [] for place in places}
        for ((place, j), chain), text, grade in zip(chains.items(), texts, graded, strict=True):
            row = sample_of(problems, place, j, self.measure) | answer_of(text, chain.completion, grade)
            groups[place].append(row | {"turns": chain.turns})
        return [groups[place] for place in places]


def write(
    chains: Sequence[Chain], engines: Sequence[Engine], tokenizer: Any, sampling: Sampling, *, max_rounds: int =
    MAX_ROUNDS,
) -> None:  # fmt: skip
    """Generates all chains (answers that two models generate in turns) to their end, and changes the chains in place.
    Each of the two engines has at most `max_rounds` turns in a chain.

    All chains have their n-th turn at the same time, so that this turn is one batch for one engine.
    """
    for number in range(max_rounds * len(engines)):
        for chain in chains:
            if chain.stop is None and chain.left <= 0:
                chain.stop = Stop.LENGTH
        going = [chain for chain in chains if chain.stop is None]
        if not going:
            return
        turns = _draw_turn(engines[number % len(engines)], going, sampling)
        for chain, turn in zip(going, turns, strict=True):
            chain.tokens = np.concatenate([chain.tokens, turn.tokens])
            chain.logprobs = np.concatenate([chain.logprobs, turn.logprobs])
            chain.turns.append(len(turn.tokens))
            text = str(tokenizer.decode(turn.tokens, skip_special_tokens=False))
            if turn.stop is not Stop.STOP or SWITCH not in text:
                chain.stop = turn.stop
    for chain in chains:
        chain.stop = chain.stop or Stop.LENGTH


def _draw_turn(engine: Engine, chains: Sequence[Chain], sampling: Sampling) -> list[Completion]:
    """Generates the next turn of each chain with an engine. Returns one completion for each chain. Chains with the same
    engine key are sent in separate sessions, because a session accepts each key only once."""
    one_turn = replace(sampling, n=1, stop_strings=(*sampling.stop_strings, SWITCH))
    turns: dict[int, Completion] = {}
    waiting = list(range(len(chains)))
    while waiting:
        places: dict[int, int] = {}
        for place in waiting:
            places.setdefault(chains[place].index, place)
        asks = {
            index: (np.concatenate([chain.prompt, chain.tokens]), replace(one_turn, max_tokens=chain.left))
            for index, chain in ((index, chains[place]) for index, place in places.items())
        }
        turns |= {places[index]: turn for index, [turn] in draw(engine, asks).items()}
        waiting = [place for place in waiting if place not in turns]
    return [turns[place] for place in range(len(chains))]
