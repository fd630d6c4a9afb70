"""Exact values of policies of Kuhn poker: what a pair of them wins, and what a best response gains against them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from megatron_rl.contrib.kuhn_poker import AGENTS, CARDS, Actions, chips_won, legal_actions

GAME_VALUE = -1 / 18  # expected chips of the first agent per hand in equilibrium (Kuhn 1950)
# The probability of a bet or call at each information set, named by card and previous actions, such as "K check bet".
PolicyTable = Mapping[str, float]


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
