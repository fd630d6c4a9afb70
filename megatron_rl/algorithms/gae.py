"""Computes advantages from the values of a critic: generalised advantage estimation (GAE, arXiv 1506.02438) over tokens
or turns, with an optional KL penalty in the reward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from megatron_rl.algorithms.advantages import PAPER_CREDIT, StepCredit, step_advantages, total_reward
from megatron_rl.algorithms.kl import VERL_CLAMP, kl_estimates
from megatron_rl.batches.units import first_of, join, members, share
from megatron_rl.config.base import CountOrZero, Share, config
from megatron_rl.config.model import Kl
from megatron_rl.lib.lazy_import import LazyModule
from megatron_rl.types import STEP, TRAINED, Rollout

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

FACTORS = (1e-6, 1e6)  # range of the factor by which `kl_target` changes kl_coef


@config
class Gae:
    """The arguments of the estimator `gae`: settings of advantages from a critic, and of a KL penalty in the reward."""

    gamma: Share = 1.0  # discount factor per action; an action is a token or a turn, see `level`
    lam: Share = 1.0  # lambda of GAE; with gamma = lam = 1, an advantage is the sum of later rewards minus the value
    # "token": each token is an action. "turn": each turn of an agent is an action. The value of a turn is the value of
    # its first token, the reward of a turn is the sum over its tokens, and all tokens get the advantage of their turn.
    level: Literal["token", "turn"] = "token"
    whiten: bool = True  # normalise the advantages to mean 0 and variance 1 over the trained tokens of the iteration
    critic_warmup: CountOrZero = 0  # number of a role's first iterations in which only the role's critic is trained
    # Coefficient of the KL divergence from the reference in the reward of each token; with `kl_target`, the coefficient
    # of the first iteration. (loss.kl_coef puts the KL divergence into the loss instead.)
    kl_coef: NonNegativeFloat = 0.0
    kl: Kl = "k1"  # estimator of the KL divergence per token, as in loss.kl; k3 is clamped at 10 as in verl
    # Target of the mean KL divergence per token. After each iteration, the coefficient is raised if the KL divergence
    # is above the target, and lowered if it is below (arXiv 1909.08593). null: the coefficient is fixed.
    kl_target: PositiveFloat | None = None
    kl_horizon: PositiveInt = 10_000  # number of rollouts in which `kl_target` changes the coefficient by at most 20 %

    def problems(self) -> Iterator[str]:
        """Yields an error message if `kl_target` cannot change the coefficient."""
        if self.kl_target is not None and not self.kl_coef:
            yield f"kl_target = {self.kl_target} with kl_coef = 0, which stays 0: give a kl_coef above 0"


@dataclass(frozen=True, kw_only=True)
class Credited:
    """The result of `assign_gae`: the rollouts on which a role and its critic are trained, and metrics."""

    policy: list[Rollout]  # [B] rollouts with advantages [T]
    critic: list[Rollout]  # [B] rollouts for the critic; their values are `old_value` [T] and `returns` [T]
    kl: float  # mean KL estimate of a unit's tokens, averaged over the units; 0 without a penalty
    num_units: int  # number of units (see units.py)
    metrics: Mapping[str, float]


def assign_gae(
    rollouts: Sequence[Rollout],
    settings: Gae,
    *,
    reward: str | Mapping[str, float],
    kl_coef: float = 0.0,
    weights: Sequence[float] | None = None,
) -> Credited:
    """Computes the advantages of [B] rollouts, and the returns that their critic learns.

    The rollouts must have the critic's values in `values["value"]` [T]. With a `kl_coef` above 0, the rollouts must
    also have the values `logprobs` and `reference_logprobs`. The reward of a token is -kl_coef times the token's KL
    estimate. The outcome is added to the reward of the last trained token. Tokens that are not in the loss are skipped:
    after the last token of a turn, the next action is the first token of the next turn, as in verl. The returns are the
    values plus the advantages before whitening. The rollouts of one agent in an episode are one sequence of actions.

    `reward`: name of the outcome reward, or {name: weight}. The outcome is stored as the reward TRAINED.
    `weights`: [B] factors on the advantages, applied after whitening.

    Raises ValueError for a reward that is missing or not finite.
    """
    if not rollouts:
        return Credited(policy=[], critic=[], kl=0.0, num_units=0, metrics={})
    units = members(rollouts)
    credited = _assigned(join(rollouts, units), settings, reward, kl_coef, first_of(weights, units))
    if len(units) == len(rollouts):
        return credited
    return replace(credited, policy=share(credited.policy, rollouts), critic=share(credited.critic, rollouts))


def _assigned(
    rollouts: Sequence[Rollout], settings: Gae, reward: str | Mapping[str, float], kl_coef: float,
    weights: Sequence[float] | None,
) -> Credited:  # fmt: skip
    """Computes the advantages and returns of [B] rollouts, one per unit (see `assign_gae`)."""
    outcomes = np.array([total_reward(rollout, reward) for rollout in rollouts])
    masks = [rollout.weights != 0 for rollout in rollouts]
    lengths = np.array([np.count_nonzero(mask) for mask in masks], np.int64)
    values = _gathered(rollouts, masks, "value")
    rewards, kl = np.zeros(len(values)), 0.0
    if kl_coef:
        pair = (torch.from_numpy(_gathered(rollouts, masks, key)) for key in ("logprobs", "reference_logprobs"))
        rewards = kl_estimates(settings.kl, *pair, clamp=VERL_CLAMP).numpy()
        kl = float(np.mean(_sums(rewards, lengths) / np.maximum(lengths, 1)))
        rewards *= -kl_coef
    rewards[np.cumsum(lengths)[lengths > 0] - 1] += outcomes[lengths > 0]
    if settings.level == "token":
        advantages = gae(rewards, values, lengths, gamma=settings.gamma, lam=settings.lam)
        returns = values + advantages
    else:
        advantages, returns = _over_turns(rewards, values, masks, settings)
    metrics = {"explained_variance": _explained(values, returns)}
    if settings.whiten:
        advantages = whiten(advantages)
    if weights is not None:
        advantages = advantages * np.repeat(np.asarray(weights, np.float64), lengths)
    policy, critic = [], []
    parts = (_scattered(flat, masks, lengths) for flat in (advantages, values, returns))
    for rollout, outcome, advantage, old, target in zip(rollouts, outcomes.tolist(), *parts, strict=True):
        policy.append(replace(rollout, rewards={**rollout.rewards, TRAINED: outcome}, advantages=advantage))
        critic.append(replace(rollout, values={"old_value": old, "returns": target}))
    return Credited(policy=policy, critic=critic, kl=kl, num_units=len(rollouts), metrics=metrics)


def gae(rewards: np.ndarray, values: np.ndarray, lengths: np.ndarray, *, gamma: float, lam: float) -> np.ndarray:
    """Computes A_t = r_t + gamma V_(t+1) - V_t + gamma lam A_(t+1) for the actions of B sequences. V and A are 0 after
    the last action of a sequence. Returns [N] float64.

    `rewards`, `values`: [N], the sequences one after another. `lengths`: [B], number of actions of each sequence.
    """
    ends = np.cumsum(lengths)
    advantages = np.zeros(len(values))  # first V_(t+1)
    advantages[:-1] = values[1:]
    advantages[ends[lengths > 0] - 1] = 0.0
    advantages *= gamma
    advantages += rewards
    advantages -= values
    # Loop over positions, counted backwards from the end of each sequence.
    # `order` lists the longest sequences first; the first `count` of them have an action at the loop's position.
    order = np.argsort(-lengths, kind="stable")
    last = ends[order] - 1
    active = np.searchsorted(-lengths[order], -np.arange(1, lengths.max(initial=0)))
    for position, count in enumerate(active.tolist(), start=1):
        at = last[:count] - position
        advantages[at] += gamma * lam * advantages[at + 1]
    return advantages


def whiten(values: np.ndarray) -> np.ndarray:
    """Returns (v - mean) / sqrt(variance + 1e-8) of [N] values, with the sample variance (n - 1), as verl's
    masked_whiten. (OpenRLHF divides by sqrt(max(population variance, 1e-8)).)
    """
    centred = values - values.sum() / max(len(values), 1)
    return centred / np.sqrt(np.square(centred).sum() / max(len(values) - 1, 1) + 1e-8)


def adapted(factor: float, kl: float, num_rollouts: int, settings: Gae) -> float:
    """Returns the factor on `settings.kl_coef` in the next iteration, from the mean KL divergence of this iteration's
    rollouts (adaptive controller, arXiv 1909.08593). Without a `kl_target`, returns the factor unchanged.

    The controller multiplies by 1 + error * num_rollouts / kl_horizon, with an error of at most 0.2. Iterations with
    more than kl_horizon rollouts apply this rule once for each kl_horizon rollouts, as the product would otherwise be 0
    or negative. The factor stays in the range FACTORS, so that it can always grow again.
    """
    if settings.kl_target is None:
        return factor
    error = float(np.clip(kl / settings.kl_target - 1, -0.2, 0.2))
    horizons, rest = divmod(num_rollouts, settings.kl_horizon)
    changed = factor * (1 + error) ** horizons * (1 + error * rest / settings.kl_horizon)
    return min(max(changed, FACTORS[0]), FACTORS[1])


def mix_steps(
    rollouts: Sequence[Rollout], *, alpha: float | Sequence[float], steps: StepCredit = PAPER_CREDIT
) -> list[Rollout]:
    """Mixes the advantages A of [B] rollouts with step advantages S: (1 - alpha) A + alpha S (Tango, arXiv 2505.15034,
    eq. 7). S is computed with the estimator "reinforce_pp": for each token the sum of the step rewards at or after the
    token, whitened over the trained tokens. If no rollout has scores on its reasoning steps, returns the rollouts
    unchanged. `alpha`: one number or [B].
    """
    if all(rollout.annotations_of(STEP).scores is None for rollout in rollouts):
        return list(rollouts)
    of_steps = step_advantages(rollouts, estimator="reinforce_pp", credit=steps)
    alphas = np.broadcast_to(alpha, len(rollouts))
    mixed = ((1 - a) * np.asarray(r.advantages) + a * s for r, s, a in zip(rollouts, of_steps, alphas, strict=True))
    return [
        replace(rollout, advantages=np.where(rollout.weights != 0, advantages, 0.0).astype(np.float32))
        for rollout, advantages in zip(rollouts, mixed, strict=True)
    ]


def _over_turns(
    rewards: np.ndarray, values: np.ndarray, masks: Sequence[np.ndarray], settings: Gae
) -> tuple[np.ndarray, np.ndarray]:
    """Computes advantages over turns. A turn is a run of consecutive trained tokens. Returns (advantages, returns),
    both [N] float64. Each token has the advantage and the return of its turn.
    """
    firsts = [mask & ~np.concatenate([[False], mask[:-1]]) for mask in masks]
    starts = np.flatnonzero(np.concatenate([first[mask] for first, mask in zip(firsts, masks, strict=True)]))
    turns = np.array([np.count_nonzero(first) for first in firsts], np.int64)
    turn_values = values[starts]
    summed = np.add.reduceat(rewards, starts) if len(starts) else rewards
    advantages = gae(summed, turn_values, turns, gamma=settings.gamma, lam=settings.lam)
    sizes = np.diff(starts, append=len(values))
    return np.repeat(advantages, sizes), np.repeat(turn_values + advantages, sizes)


def _gathered(rollouts: Sequence[Rollout], masks: Sequence[np.ndarray], name: str) -> np.ndarray:
    """Returns the values of all trained tokens, [N] float64. `name`: key of the values in Rollout.values."""
    trained = [rollout.values[name][mask] for rollout, mask in zip(rollouts, masks, strict=True)]
    return np.concatenate([np.empty(0), *trained])


def _scattered(flat: np.ndarray, masks: Sequence[np.ndarray], lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Splits the values [N] of all trained tokens by rollout. Yields one array [T] float32 per rollout, with 0 for
    tokens that are not trained.
    """
    for mask, trained in zip(masks, np.split(flat, np.cumsum(lengths)[:-1]), strict=True):
        values = np.zeros(len(mask), np.float32)
        values[mask] = trained
        yield values


def _sums(flat: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Sums the values [N] of all trained tokens by rollout. Returns [B]."""
    return np.array([part.sum() for part in np.split(flat, np.cumsum(lengths)[:-1])])


def _explained(values: np.ndarray, returns: np.ndarray) -> float:
    """Returns the explained variance, 1 - var(returns - values) / var(returns); 0 if all returns are equal."""
    variance = float(returns.var()) if len(returns) else 0.0
    rounding = 1e-12 * float(np.square(returns).mean()) if len(returns) else 0.0
    return 1.0 - float((returns - values).var()) / variance if variance > rounding else 0.0
