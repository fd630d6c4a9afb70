"""Reads how models play Kuhn poker from the log-probs of their engines, at every evaluation of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.plugins import build
from megatron_rl.engines.base import Engine
from megatron_rl.environments.kuhn_poker import (
    SEATS,
    Actions,
    KuhnPoker,
    exploitability,
    hand_value,
    information_sets,
    legal_actions,
)
from megatron_rl.recipes.agents import Agents
from megatron_rl.training.turns import Table
from megatron_rl.types import Prompt


@dataclass(kw_only=True)
class MeasuredPlay(Agents):
    """Agents that play Kuhn poker. An evaluation plays no hand: it computes what the models' policies are, and what
    they are worth."""

    def evaluate(self, prompts: Sequence[Prompt], table: Table) -> dict[str, float]:
        """Returns the probability of a bet or call at each information set, as `first/K check bet`; the least share of
        a seat's answers that are legal, as `first/legal`; the chips that the first seat wins in a hand; and the
        exploitability."""
        game: KuhnPoker = build(self.environment)
        policies, figures = {}, {}
        for seat, role in zip(SEATS, (game.first, game.second), strict=True):
            policies[seat], legal = read_policy(table.engines[role], table.tokenizers[role], game, seat)
            figures |= {f"{seat}/{name}": share for name, share in policies[seat].items()} | {f"{seat}/legal": legal}
        both = (policies["first"], policies["second"])
        return figures | {"chips": hand_value(*both), "exploitability": exploitability(*both)}


def read_policy(engine: Engine, tokenizer: Any, game: KuhnPoker, seat: str) -> tuple[dict[str, float], float]:
    """Returns the probability of a bet or call among the two legal answers at each of the seat's information sets, and
    the least probability that both together have at one of them. An answer is the word and the end of the sequence."""
    sets = information_sets(seat)
    contexts = [_context(tokenizer, game, card, said) for card, said in sets.values()]
    asked = [
        (context, _answer(tokenizer, action))
        for context, (_, said) in zip(contexts, sets.values(), strict=True)
        for action in legal_actions(said)
    ]
    scores = engine.score([context + answer for context, answer in asked])
    shares = [math.exp(one[-len(answer) :].sum()) for one, (_, answer) in zip(scores, asked, strict=True)]
    pairs = list(zip(shares[::2], shares[1::2], strict=True))
    policy = {name: paid / (without + paid) for name, (without, paid) in zip(sets, pairs, strict=True)}
    return policy, min(map(sum, pairs))


def _context(tokenizer: Any, game: KuhnPoker, card: str, said: Actions) -> list[int]:
    """Returns the tokens that the dialogue `text` has before an answer: all that the seat was told, and said."""
    if len(said) < 2:
        return _ids(tokenizer, game.told(card, said))
    opening = _ids(tokenizer, game.told(card, ())) + _answer(tokenizer, said[0])
    return opening + _ids(tokenizer, game.told(card, said))


def _answer(tokenizer: Any, action: str) -> list[int]:
    return [*_ids(tokenizer, action), tokenizer.eos_token_id]


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]
