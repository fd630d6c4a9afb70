"""Kuhn poker: an environment in which two agents play one hand of the three-card game."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.base import ConfigError, refusing
from megatron_rl.environments.environment import Environment
from megatron_rl.environments.episode_types import EpisodeEnd, NextRequest, Said
from megatron_rl.rewards.role_tags import last_inside
from megatron_rl.texts.chat_template import USER
from megatron_rl.texts.text import fill, read_template
from megatron_rl.types import Outcome

CARDS = "JQK"  # the cards (jack, queen, king), from lowest to highest
AGENTS = ("first", "second")
FOLDED = 1.0  # number of chips that an agent loses by folding
Actions = tuple[str, ...]  # all actions of a hand, in order


@dataclass(kw_only=True)
class KuhnPoker(Environment):
    """One hand of Kuhn poker (H. W. Kuhn, A Simplified Two-Person Poker, 1950) between the agents `first` and `second`.

    Each agent has put one chip into the pot and gets one of the cards J, Q and K, determined by the episode's seed. The
    first agent checks or bets a chip. After a check, the second agent also checks or bets. An agent that faces a bet
    folds or calls. The reward `chips` is the agent's profit in the hand; the other agent's loss is equal.

    An answer that is not a legal action ends the hand: its agent pays `illegal` chips to the other agent, and gets the
    reward `legal` 0.0 instead of 1.0. If the other agent has not acted yet, it gets no reward and no training sample.
    Other implementations also penalise illegal actions: SPIRAL (arXiv 2506.24119, train_spiral.py at 75ea2ef) ends a
    game immediately, with -1.5 for the erring agent and 0.5 for the other agent, where a game is worth 1. TextArena
    ends a game at the second error in a row, with -1 for the erring agent and 1 for the other agent.
    """

    first: str = "first"  # role whose model plays the agent `first`
    second: str = "second"  # role whose model plays the agent `second`; may be the same role
    # First message to an agent: a text file or a packaged prompt with {agent}, {card}, {actions} and {said}.
    # The placeholder {said} is the other agent's last action, or "nothing".
    template: str = "kuhn_poker"
    # message to the first agent when it acts for the second time
    answered: str = "\nThe other player says: {said}. Your actions are: {actions}.\n"
    # The action is inside the last <tag>...</tag> of the answer; null: the whole answer is the action.
    tag: str | None = "action"
    illegal: float = 2.0  # chips that an illegal action costs; in a legally played hand, an agent loses at most 2

    def __post_init__(self) -> None:
        if not self.illegal >= FOLDED:
            raise ConfigError(
                f"args.illegal = {self.illegal}: give at least {FOLDED:g}, or it costs less than to fold, and pays off"
            )
        if self.tag is not None and not self.tag.isidentifier():
            raise ConfigError(f"args.tag = {self.tag!r}: give a word without brackets, such as action, or null")
        with refusing(lambda error: f"args.template: {error}", FileNotFoundError):
            self._template = read_template(self.template)
        for name in ("{card}", "{said}"):
            if name not in self._template:
                raise ConfigError(f"args.template = {self.template!r}: it needs {name}, without which none can play")
        if "{said}" not in self.answered:
            raise ConfigError(f"args.answered = {self.answered!r}: it needs {{said}} where the other's action stands")

    def begin(self, task: Mapping[str, Any], seed: int) -> Sequence[NextRequest]:
        self._cards, self._said = deal(seed), ()
        return self._ask()

    def step(self, said: Said) -> Sequence[NextRequest] | EpisodeEnd:
        agent = len(self._said) % 2
        if said.stop is None:
            why = f"the agent {AGENTS[agent]} has no room for an answer: raise max_prompt_tokens of its role"
            return EpisodeEnd(outcome=Outcome.ERROR, why=why, failure=None)
        answer = said.text if self.tag is None else last_inside(said.text, self.tag) or ""
        action = answer.strip().lower()
        if action not in legal_actions(self._said):
            return self._over(-self.illegal if agent == 0 else self.illegal, erred=agent)
        self._said = (*self._said, action)
        won = chips_won(self._cards, self._said)
        return self._ask() if won is None else self._over(won)

    def speaking_roles(self) -> Collection[str]:
        return (self.first, self.second)

    def told(self, card: str, actions: Actions) -> str:
        """Returns the message that asks the next agent for its action. `card`: card of this agent. `actions`: actions
        of the hand so far.
        """
        agent, opening = AGENTS[len(actions) % 2], len(actions) < 2
        values = {"said": actions[-1] if actions else "nothing", "actions": ", ".join(legal_actions(actions))}
        return fill(self._template if opening else self.answered, agent=agent, card=card, **values)

    def _ask(self) -> Sequence[NextRequest]:
        agent = len(self._said) % 2
        text = self.told(self._cards[agent], self._said)
        role, stop = (self.first, self.second)[agent], [] if self.tag is None else [f"</{self.tag}>"]
        return [NextRequest(agent=AGENTS[agent], role=role, messages=[{"role": USER, "content": text}], stop=stop)]

    def _over(self, won: float, erred: int | None = None) -> EpisodeEnd:
        """Ends the hand.

        `won`: chips that the first agent wins. `erred`: index of the agent that gave an illegal action, or None.
        """
        spoke = AGENTS[:1] if erred == 0 and not self._said else AGENTS
        rewards = {
            agent: {"chips": float((won, -won)[place]), "legal": float(place != erred)}
            for place, agent in enumerate(spoke)
        }
        hand = {**dict(zip(AGENTS, self._cards, strict=True)), "actions": list(self._said)}
        return EpisodeEnd(rewards=rewards, payload={"hand": hand})


def deal(seed: int) -> tuple[str, str]:
    """Returns the cards of both agents. The six possible deals are equally likely."""
    first, second = random.Random(seed).sample(CARDS, 2)
    return first, second


def legal_actions(actions: Actions) -> tuple[str, str]:
    """Returns the two legal actions of the agent that acts next. The second action (bet or call) costs a chip."""
    return ("fold", "call") if actions[-1:] == ("bet",) else ("check", "bet")


def chips_won(cards: Sequence[str], actions: Actions) -> int | None:
    """Returns the chips that the first agent wins (the second agent loses the same number), or None if the hand is not
    over.
    """
    if actions[-1:] == ("fold",):
        # the last action was a fold: after an even number of actions, the second agent folded and the first agent wins
        return 1 if len(actions) % 2 == 0 else -1
    if actions[-1:] != ("call",) and actions != ("check", "check"):
        return None
    stake = 2 if actions[-1] == "call" else 1
    return stake if CARDS.index(cards[0]) > CARDS.index(cards[1]) else -stake
