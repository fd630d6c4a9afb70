"""Reads how models play Kuhn poker from the log-probs of their engines, at every evaluation of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from examples.miniatures.poker.equilibria import exploitability, hand_value, information_sets
from megatron_rl.config.plugins import build
from megatron_rl.contrib.kuhn_poker import AGENTS, Actions, KuhnPoker, legal_actions
from megatron_rl.engines.protocol import Engine
from megatron_rl.recipes.agents import Agents
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.types import Prompt


@dataclass(kw_only=True)
class MeasuredPlay(Agents):
    """Agents that play Kuhn poker. An evaluation plays no hand: it computes what the models' policies are, and what
    they are worth."""

    def evaluate(self, prompts: Sequence[Prompt], context: RolloutContext) -> dict[str, float]:
        """Returns the probability of a bet or call at each information set, as `first/K check bet`; the least share of
        an agent's answers that are legal, as `first/legal`; the chips that the first agent wins in a hand; and the
        exploitability."""
        game: KuhnPoker = build(self.environment)
        policies, metrics = {}, {}
        for agent, role in zip(AGENTS, (game.first, game.second), strict=True):
            policies[agent], legal = read_policy(context.engines[role], context.tokenizers[role], game, agent)
            metrics |= {f"{agent}/{name}": share for name, share in policies[agent].items()} | {f"{agent}/legal": legal}
        both = (policies["first"], policies["second"])
        return metrics | {"chips": hand_value(*both), "exploitability": exploitability(*both)}


def read_policy(engine: Engine, tokenizer: Any, game: KuhnPoker, agent: str) -> tuple[dict[str, float], float]:
    """Returns the probability of a bet or call among the two legal answers at each of the agent's information sets, and
    the least probability that both together have at one of them. An answer is the word and the end of the sequence."""
    sets = information_sets(agent)
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
    """Returns the tokens that the dialogue `text` has before an answer: all that the agent was told, and said."""
    if len(said) < 2:
        return _ids(tokenizer, game.told(card, said))
    opening = _ids(tokenizer, game.told(card, ())) + _answer(tokenizer, said[0])
    return opening + _ids(tokenizer, game.told(card, said))


def _answer(tokenizer: Any, action: str) -> list[int]:
    return [*_ids(tokenizer, action), tokenizer.eos_token_id]


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]
