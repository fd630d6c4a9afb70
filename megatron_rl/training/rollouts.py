"""Converts prompts and completions of an engine to rollouts, and computes the metrics that are logged for rollouts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from megatron_rl.algorithms.centering import ENGINE_CANDIDATES
from megatron_rl.batches.packed_batch import CANDIDATES
from megatron_rl.batches.units import join, members
from megatron_rl.engines.protocol import Completion, EngineError, Sampling, TandemSampling
from megatron_rl.training.iteration import EvaluationDraws, RolloutContext
from megatron_rl.types import NO_VERSION, SOURCE, Author, Prompt, Rollout, spans_of, spans_of_tokens

# allowed difference between the share of tokens that a tandem's senior generated and the expected share
SHARE_SLACK = 0.2
# The allowed difference is at least this number of standard deviations of the share, which may be more than SHARE_SLACK
# if there are few tokens.
SHARE_DEVIATIONS = 3.0
# An advantage with a smaller absolute value counts as 0, because it may be a rounding error: the computed mean of equal
# rewards may differ from the rewards by 1e-16, and an estimator such as grpo divides this by std + 1e-6 = 1e-6.
ROUNDING = 1e-6


def sample(context: RolloutContext, role: str, prompts: Sequence[Prompt], sampling: Sampling) -> list[Rollout]:
    """Samples n rollouts for each of P prompts. Returns [P * n] rollouts. The n rollouts of one prompt are adjacent and
    form a separate group, even if two prompts have the same id.
    """
    found = dict(drawn(context, role, prompts, sampling))
    return [rollout for i in range(len(prompts)) for rollout in found[i]]


def drawn(
    context: RolloutContext, role: str, prompts: Sequence[Prompt], sampling: Sampling
) -> Iterator[tuple[int, list[Rollout]]]:
    """Yields (index, the n rollouts of the prompt) as soon as all rollouts of a prompt are generated."""
    draws = Draws(context, role, sampling)
    for i, prompt in enumerate(prompts):
        draws.ask(i, prompt)
    yield from draws.answers()


class Draws:
    """A stream of rollouts for prompts that are submitted one after the other. All are sampled in one session with a
    role's engine.
    """

    def __init__(self, context: RolloutContext, role: str, sampling: Sampling) -> None:
        self._engine, self._role, self._sampling = context.engines[role], role, sampling
        self._weight = context.partner_weights.get(role, 0.0)
        self._asked: dict[int, tuple[Prompt, str]] = {}  # {index: (prompt, name of the group)}
        self.session = context.session(role)

    def ask(self, index: int, prompt: Prompt, *, group: int | None = None) -> None:
        """Requests the n rollouts of a prompt. `index` must differ between calls; it also identifies the rollouts'
        group, unless `group` is given.
        """
        self._asked[index] = prompt, f"{index if group is None else group}:{prompt.id}"
        self.session.ask(index, prompt.tokens, self._sampling)

    def answers(self) -> Iterator[tuple[int, list[Rollout]]]:
        """Yields (index, the n rollouts of the prompt) as soon as all rollouts of a prompt are generated.

        Raises EngineError if a completion of a tandem lacks the author of each token: all tokens would then be trained
        on as tokens of the senior.
        """
        for index, completions in self.session.answers():
            if self._sampling.tandem is not None and any(c.authors is None for c in completions):
                raise EngineError(
                    "an engine sent completions of a tandem without an author for each token: has it a junior at all?"
                )
            prompt, group = self._asked[index]
            about = {"role": self._role, "group": group, "version": self._engine.version}
            yield index, [from_completion(prompt, each, partner_weight=self._weight, **about) for each in completions]


def from_completion(
    prompt: Prompt, completion: Completion, *, role: str, group: str, version: int, partner_weight: float = 0.0
) -> Rollout:
    """Returns the rollout of a prompt and an engine's completion. Token ids and log-probs are those of the engine,
    unchanged. If the completion has the most likely tokens at each position, they are the values CANDIDATES and
    ENGINE_CANDIDATES, [T, k] each, with zeros at the tokens of the prompt.

    `version`: weight version of the engine, used if the completion does not contain versions. Raises EngineError if the
        number of authors differs from the number of tokens.
    """
    prompt_tokens = np.asarray(prompt.tokens, np.int32)
    authors, written = completion.authors, len(completion.tokens)
    if authors is not None and len(authors) != written:
        raise EngineError(
            f"group {group!r}: {len(authors)} authors for {written} tokens: an engine left tokens without an author"
        )
    values = {}
    if completion.top_ids is not None and completion.top_logprobs is not None:
        parts = {CANDIDATES: completion.top_ids, ENGINE_CANDIDATES: completion.top_logprobs}
        values = {
            name: np.concatenate([np.zeros((len(prompt_tokens), part.shape[1]), part.dtype), part])
            for name, part in parts.items()
        }
    return Rollout(
        role=role,
        group=group,
        tokens=np.concatenate([prompt_tokens, completion.tokens]),
        logprobs=np.concatenate([np.zeros(len(prompt_tokens), np.float32), completion.logprobs]),
        spans=_spans(len(prompt_tokens), completion, version),
        stop=completion.stop,
        payload=prompt.payload,
        partner_weight=partner_weight,
        values=values,
        experts=completion.experts,
    )


def continued(rollout: Rollout, turn: Rollout) -> Rollout:
    """Joins a rollout with the next turn of its conversation. The prompt of the turn must begin with all tokens of the
    rollout.

    The expert ids are those that the engine returned for the turn, because they cover the whole sequence.
    """
    ended, began = len(rollout.tokens), turn.start
    between = [(ended, began, Author.ENVIRONMENT, NO_VERSION)] if began > ended else []
    own = turn.spans[turn.spans[:, 0] >= began]
    return replace(
        turn,
        logprobs=np.concatenate([rollout.logprobs, turn.logprobs[ended:]]),
        values={name: np.concatenate([rollout.values[name], own[ended:]]) for name, own in turn.values.items()},
        spans=np.concatenate([rollout.spans, np.array(between, np.int32).reshape(-1, 4), own]),
    )


def _spans(before: int, completion: Completion, version: int) -> np.ndarray:
    """Returns the spans [K, 4] (see Rollout.spans) of a prompt followed by a completion. `before`: number of tokens of
    the prompt. Spans that the policy did not generate have NO_VERSION, because weight versions count the updates of the
    policy. Spans of the policy have the versions in the completion, or `version` if the completion has none.
    """
    written = len(completion.tokens)
    if completion.authors is None and len(completion.versions) <= 1:
        own = completion.versions[0][1] if completion.versions else version
        return spans_of((before, Author.ENVIRONMENT, NO_VERSION), (written, Author.POLICY, own))
    starts, kinds = np.array(list(completion.versions) or [(0, version)], np.int32).T
    starts = np.minimum(starts, written)
    starts[0] = 0
    versions = np.repeat(kinds, np.diff(starts, append=written))
    authors = np.full(written, Author.POLICY, np.int32)
    if completion.authors is not None:
        authors[~completion.authors] = Author.PARTNER
        versions[~completion.authors] = NO_VERSION
    asked = np.full(before, Author.ENVIRONMENT), np.full(before, NO_VERSION)
    return spans_of_tokens(*(np.concatenate(pair) for pair in zip(asked, (authors, versions), strict=True)))


def greedy(sampling: Sampling, *, seed: int) -> Sampling:
    """Returns sampling settings for one greedy completion by the model alone (without a tandem's junior)."""
    return replace(sampling, temperature=0.0, n=1, seed=seed, tandem=None, top=0)


def plain(sampling: Sampling, *, seed: int) -> Sampling:
    """Returns sampling settings for one completion from the model's unmodified distribution: temperature 1, no
    truncation, no tandem.
    """
    return replace(sampling, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, n=1, seed=seed, tandem=None, top=0)


def evaluated(sampling: Sampling, draws: EvaluationDraws, *, seed: int) -> Sampling:
    """Returns sampling settings for the samples of an evaluation, by the model alone (without a tandem's junior)."""
    return replace(
        sampling, temperature=draws.temperature, top_p=draws.top_p, top_k=draws.top_k, min_p=0.0, n=draws.n, seed=seed,
        tandem=None, top=0,
    )  # fmt: skip


def measure(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Returns the metrics that are logged for every role that generates. The rollouts of one agent in an episode count
    as one (see units.py).

    Means over rollouts: reward/NAME for each reward, and length (number of tokens generated by models). finished: share
    of rollouts that were not cut off. samples: number of rollouts. tokens: total number of generated tokens. If a
    partner generated tokens, also senior_share (share of the generated tokens that the senior generated) and switches
    (mean number of author changes per rollout). If the data has several sources, also the same metrics of each source,
    such as reward/outcome/math, and the share of correct answers among the rollouts of each source, such as
    accuracy/math. There is no accuracy if labels come from majority votes.
    """
    rollouts = join(rollouts)
    metrics = _measure(rollouts)
    for source in sorted({r.payload[SOURCE] for r in rollouts if SOURCE in r.payload}):
        own = [r for r in rollouts if r.payload.get(SOURCE) == source]
        found = _measure(own)
        # None: the scale of the rewards is unknown, or the label is a vote
        graded = [r.payload["correct"] for r in own if "correct" in r.payload]
        if graded and None not in graded:
            found["accuracy"] = fmean(map(float, graded))
        metrics |= {f"{name}/{source}": value for name, value in found.items()}
    return metrics


def sizes(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Returns the metrics samples (number of rollouts; those of one agent in an episode count as one) and tokens (total
    number of generated tokens).
    """
    return {"samples": float(len(members(rollouts))), "tokens": float(sum(rollout.length for rollout in rollouts))}


def _measure(rollouts: Sequence[Rollout]) -> dict[str, float]:
    if not rollouts:
        return sizes(rollouts)
    lengths = [rollout.length for rollout in rollouts]
    rewards: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, value in rollout.rewards.items():
            rewards[name].append(value)
    metrics = {f"reward/{name}": fmean(values) for name, values in sorted(rewards.items())}
    metrics |= {"length": fmean(lengths), "finished": fmean(float(r.stop.finished) for r in rollouts)}
    metrics |= sizes(rollouts)
    if any((r.spans[:, 2] == Author.PARTNER).any() for r in rollouts):
        metrics["senior_share"] = _senior_share(rollouts)
        written = [r.spans[r.spans[:, 2] != Author.ENVIRONMENT, 2] for r in rollouts]
        metrics["switches"] = fmean(int(np.count_nonzero(np.diff(authors))) for authors in written)
    return metrics


def ages_of(rollouts: Sequence[Rollout], version: int) -> dict[str, float]:
    """Returns metrics: the mean and the maximum age of the rollouts (number of updates of their policy since their
    oldest token was generated), the share of rollouts of each age above 0, and the share of rollouts generated by
    several weight versions. The rollouts of one agent in an episode count as one.
    """
    rollouts = join(rollouts)
    ages = [float(version - r.version) for r in rollouts if r.num_trainable] or [0.0]
    mixed = fmean(float(len(r.versions) > 1) for r in rollouts) if rollouts else 0.0
    late = {f"trained_late/{age:g}": count / len(ages) for age, count in sorted(Counter(ages).items()) if age}
    return {"version_lag": fmean(ages), "staleness": max(ages), "mixed_versions": mixed, **late}


def mean_reward(rollouts: Sequence[Rollout], reward: str) -> float:
    """Returns the mean of one reward; 0.0 if there are no rollouts."""
    return fmean(rollout.rewards[reward] for rollout in rollouts) if rollouts else 0.0


def check_senior_share(rollouts: Sequence[Rollout], tandem: TandemSampling | None) -> None:
    """Raises EngineError if the senior's share of the tokens differs too much from the share expected for the tandem's
    strategy and these text lengths. A large difference means that the engine's author mask, the record of which model
    generated each token, is wrong.
    """
    lengths = np.array([rollout.length for rollout in rollouts], np.int64)
    share = None if tandem is None else tandem.rule.senior_share(lengths)
    if tandem is None or share is None:
        return
    (expected, deviation), found = share, _senior_share(rollouts)
    slack = max(SHARE_SLACK, SHARE_DEVIATIONS * deviation)
    if abs(found - expected) > slack:
        raise EngineError(
            f"the senior wrote {found:.2f} of {lengths.sum()} tokens, not {expected:.2f} +- {slack:.2f}, which the "
            f"strategy {tandem.rule.strategy} gives texts of these lengths: the engine's author mask is wrong"
        )


def has_signal(rollouts: Iterable[Rollout], reward: str | None = None) -> bool:
    """Checks whether rollouts have something to learn from: an advantage whose absolute value is above ROUNDING.

    `reward`: name of a reward of the rollouts of one group, whose advantages are not computed yet. The differences of
    the reward from its mean are then used in place of advantages.
    """
    if reward is None:
        return any(r.advantages is not None and np.abs(r.advantages).max(initial=0.0) > ROUNDING for r in rollouts)
    rewards = np.array([rollout.rewards[reward] for rollout in rollouts] or [0.0])
    return bool(np.abs(rewards - rewards.mean()).max() > ROUNDING)


def without_signal(rollouts: Sequence[Rollout], reward: str | None = None) -> float:
    """Returns the share of groups with nothing to learn from (see `has_signal`); 0.0 if there are no groups."""
    groups: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        groups[rollout.group].append(rollout)
    return fmean(float(not has_signal(group, reward)) for group in groups.values()) if groups else 0.0


def _senior_share(rollouts: Sequence[Rollout]) -> float:
    """Returns the share of generated tokens that the trained model (a tandem's senior) generated; 0.0 if there are no
    generated tokens.
    """
    written = sum(rollout.length for rollout in rollouts)
    return sum(rollout.num_trainable for rollout in rollouts) / written if written else 0.0
