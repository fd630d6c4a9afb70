"""Kuhn poker: an environment in which two agents play one hand of the three-card game, and exact evaluation of
policies.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.chat_template import USER
from megatron_rl.config.base import ConfigError
from megatron_rl.environments.environment import Environment
from megatron_rl.environments.episode_types import EpisodeEnd, NextRequest, Said
from megatron_rl.rewards.role_tags import last_inside
from megatron_rl.text import fill, read_template
from megatron_rl.types import Outcome

CARDS = "JQK"  # the cards (jack, queen, king), from lowest to highest
AGENTS = ("first", "second")
GAME_VALUE = -1 / 18  # expected chips of the first agent per hand in equilibrium (Kuhn 1950)
FOLDED = 1.0  # number of chips that an agent loses by folding
Actions = tuple[str, ...]  # all actions of a hand, in order
# The probability of a bet or call at each information set, named by card and previous actions, such as "K check bet".
PolicyTable = Mapping[str, float]


@dataclass(kw_only=True)
class KuhnPoker(Environment):
    """One hand of Kuhn poker (H. W. Kuhn, A Simplified Two-Person Poker, 1950) between the agents `first` and `second`.

    Each agent has put one chip into the pot and gets one of the cards J, Q and K, determined by the episode's seed. The
    first agent checks or bets a chip. After a check, the second agent also checks or bets. An agent that faces a bet
    folds or calls. The reward `chips` is the agent's profit in the hand; the other agent's loss is equal.

    An answer that is not a legal action ends the hand: its agent pays `illegal` chips to the other agent, and gets the
    reward `legal` 0.0 instead of 1.0. The other agent has no sample if it has not acted yet. Other implementations also
    penalise illegal actions: SPIRAL (arXiv 2506.24119, train_spiral.py at 75ea2ef) ends a game immediately, with -1.5
    for the erring agent and 0.5 for the other, where a game is worth 1. TextArena ends a game at the second error in a
    row, with -1 and 1.
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
    illegal: float = 2.0  # chips paid for an illegal action; a legally played hand costs at most 2

    def __post_init__(self) -> None:
        if not self.illegal >= FOLDED:
            raise ConfigError(
                f"args.illegal = {self.illegal}: give at least {FOLDED:g}, or it costs less than to fold, and pays off"
            )
        if self.tag is not None and not self.tag.isidentifier():
            raise ConfigError(f"args.tag = {self.tag!r}: give a word without brackets, such as action, or null")
        try:
            self._template = read_template(self.template)
        except FileNotFoundError as error:
            raise ConfigError(f"args.template: {error}") from None
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
            return EpisodeEnd(outcome=Outcome.ERROR, why=why)
        answer = said.text if self.tag is None else last_inside(said.text, self.tag) or ""
        action = answer.strip().lower()
        if action not in legal_actions(self._said):
            return self._over(-self.illegal if agent == 0 else self.illegal, erred=agent)
        self._said = (*self._said, action)
        won = chips_won(self._cards, self._said)
        return self._ask() if won is None else self._over(won)

    def speaking_roles(self) -> Collection[str]:
        return (self.first, self.second)

    def told(self, card: str, said: Actions) -> str:
        """Returns the message that asks the next agent for its action. `card`: card of this agent. `said`: actions of
        the hand so far.
        """
        agent, opening = AGENTS[len(said) % 2], len(said) < 2
        values = {"said": said[-1] if said else "nothing", "actions": ", ".join(legal_actions(said))}
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


def legal_actions(said: Actions) -> tuple[str, str]:
    """Returns the two legal actions of the agent that acts next. The second of them (bet or call) pays a chip."""
    return ("fold", "call") if said[-1:] == ("bet",) else ("check", "bet")


def chips_won(cards: Sequence[str], said: Actions) -> int | None:
    """Returns the chips that the first agent wins (the second agent loses the same number), or None if the hand is not
    over.
    """
    if said[-1:] == ("fold",):
        # the last action was a fold: after an even number of actions, the second agent folded and the first agent wins
        return 1 if len(said) % 2 == 0 else -1
    if said[-1:] != ("call",) and said != ("check", "check"):
        return None
    stake = 2 if said[-1] == "call" else 1
    return stake if CARDS.index(cards[0]) > CARDS.index(cards[1]) else -stake


def information_sets(agent: str) -> dict[str, tuple[str, Actions]]:
    """Returns the card and the previous actions of each of an agent's six information sets, by name."""
    said: list[Actions] = [(), ("check", "bet")] if agent == AGENTS[0] else [("check",), ("bet",)]
    return {_name(card, actions): (card, actions) for actions in said for card in CARDS}


def hand_value(first: PolicyTable, second: PolicyTable) -> float:
    """Returns the expected chips that the first agent wins per hand, over all deals and actions."""
    deals = list(itertools.permutations(CARDS, 2))
    return sum(_value(cards, (), (first, second)) for cards in deals) / len(deals)


def best_response(agent: str, against: PolicyTable) -> tuple[float, dict[str, float]]:
    """Returns the maximum expected chips per hand that an agent can win against the other agent's policy, and a policy
    that achieves it. A deterministic policy is always among the best, so all 64 deterministic policies are tried.
    """
    found = []
    for choices in itertools.product((0.0, 1.0), repeat=6):
        own = dict(zip(information_sets(agent), choices, strict=True))
        won = hand_value(own, against) if agent == AGENTS[0] else -hand_value(against, own)
        found.append((won, own))
    return max(found, key=lambda one: one[0])


def exploitability(first: PolicyTable, second: PolicyTable) -> float:
    """Returns the expected chips per hand of a best response, averaged over the two agents (NashConv / 2). This value
    is 0 if the policies are an equilibrium, and positive otherwise.
    """
    return (best_response(AGENTS[0], second)[0] + best_response(AGENTS[1], first)[0]) / 2


def equilibrium(alpha: float) -> dict[str, float]:
    """Returns an equilibrium of the game, for both agents.

    The first agent has one equilibrium policy for each `alpha`, the probability of a bet with the J. The second agent's
    policy is unique. Raises ValueError for an alpha outside [0, 1/3].
    """
    if not 0 <= alpha <= 1 / 3:
        raise ValueError(f"alpha = {alpha}: give a number from 0 to 1/3")
    first = {"J": alpha, "Q": 0.0, "K": 3 * alpha, "J check bet": 0.0, "Q check bet": alpha + 1 / 3, "K check bet": 1.0}
    checked = {"J check": 1 / 3, "Q check": 0.0, "K check": 1.0}
    return first | checked | {"J bet": 0.0, "Q bet": 1 / 3, "K bet": 1.0}


def average_policy(policies: Sequence[PolicyTable]) -> dict[str, float]:
    """Returns the policy whose expected result equals the average result of [T] policies of an agent (or of both),
    against any opponent.

    At an information set, each policy is weighted by the probability that the agent's own earlier actions lead there.
    """
    average = {}
    for name in policies[0]:
        card, *said = name.split()
        # probability that the agent's earlier action was a check
        weights = [1.0 - policy[card] if len(said) == 2 else 1.0 for policy in policies]
        total = sum(weights)
        named = sum(weight * policy[name] for weight, policy in zip(weights, policies, strict=True))
        # if no policy reaches the information set, any value is correct
        average[name] = named / total if total else 0.0
    return average


def _value(cards: tuple[str, ...], said: Actions, policies: tuple[PolicyTable, PolicyTable]) -> float:
    """Returns the expected chips that the first agent wins from this point of the hand on."""
    won = chips_won(cards, said)
    if won is not None:
        return float(won)
    agent = len(said) % 2
    share = policies[agent][_name(cards[agent], said)]
    without, paid = (_value(cards, (*said, action), policies) for action in legal_actions(said))
    return (1.0 - share) * without + share * paid


def _name(card: str, said: Actions) -> str:
    return " ".join((card, *said))
