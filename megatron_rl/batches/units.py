"""Groups rollouts by unit. An agent in an episode is one unit, which has several rollouts if the agent's transcript was
truncated during the episode. Every other rollout is a unit by itself.

A unit counts once in comparisons of rewards, in advantages from a critic, in means over rollouts, and in metrics. For
this purpose its rollouts are joined, and the results are then shared among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from megatron_rl.types import AGENT, EPISODE, STEP, TRAINED, Annotations, Rollout

T = TypeVar("T")


def members(rollouts: Sequence[Rollout]) -> list[list[int]]:
    """Returns the indices of the rollouts of each unit, in order. The units are in the order of their first rollouts.

    The rollouts must be from one iteration, because episodes are numbered within an iteration.
    """
    units: dict[object, list[int]] = {}
    for index, rollout in enumerate(rollouts):
        payload = rollout.payload
        named = EPISODE in payload and AGENT in payload
        units.setdefault((rollout.role, payload[EPISODE], payload[AGENT]) if named else index, []).append(index)
    return list(units.values())


def first_of(values: Sequence[T] | None, units: Sequence[Sequence[int]]) -> list[T] | None:
    """Returns the value of the first rollout of each unit; None without values. `values`: one value per rollout.
    `units`: see `members`.
    """
    return None if values is None else [values[unit[0]] for unit in units]


def join(rollouts: Sequence[Rollout], units: Sequence[Sequence[int]] | None = None) -> list[Rollout]:
    """Returns one rollout per unit (see `rejoined`). `units`: the result of `members`, if it is known already."""
    units = members(rollouts) if units is None else units
    return [rejoined([rollouts[i] for i in unit]) if len(unit) > 1 else rollouts[unit[0]] for unit in units]


def share(credited: Sequence[Rollout], rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Returns `rollouts` with the role, the advantages, the values and the reward TRAINED of their units.

    `credited`: one rollout per unit, in the order of `join`.
    """
    shared = list(rollouts)
    for joint, unit in zip(credited, members(rollouts), strict=True):
        for index, part in zip(unit, with_credit(joint, [rollouts[i] for i in unit]), strict=True):
            shared[index] = part
    return shared


def joined(samples: Sequence[Rollout]) -> Rollout:
    """Concatenates the samples of an agent into one rollout, for which advantages can be computed. The result cannot be
    trained on.
    """
    starts = np.cumsum([0, *(len(sample.tokens) for sample in samples[:-1])])
    spans = [sample.spans + np.array([start, start, 0, 0]) for sample, start in zip(samples, starts, strict=True)]
    return replace(
        samples[-1],
        tokens=np.concatenate([sample.tokens for sample in samples]),
        logprobs=np.concatenate([sample.logprobs for sample in samples]),
        spans=np.concatenate(spans),
        annotations={},
        advantages=None,
        values={name: np.concatenate([sample.values[name] for sample in samples]) for name in samples[0].values},
        experts=None,
    )


def rejoined(samples: Sequence[Rollout]) -> Rollout:
    """Concatenates the samples of an agent into one rollout, as `joined` does, and also their annotated turns."""
    starts = np.cumsum([0, *(len(sample.tokens) for sample in samples[:-1])])
    turns = [sample.annotations_of(STEP) for sample in samples]
    scores = [turn.scores for turn in turns if turn.scores is not None]
    ranges = np.concatenate([turn.ranges + start for turn, start in zip(turns, starts, strict=True)])
    annotations = Annotations(ranges, np.concatenate(scores) if len(scores) == len(turns) else None)
    return replace(joined(samples), annotations={STEP: annotations} if len(annotations) else {})


def with_credit(joint: Rollout, samples: Sequence[Rollout]) -> list[Rollout]:
    """Copies the role, the advantages, the values and the reward TRAINED of an agent's joined rollout to the agent's
    samples, and returns the new samples. `joint`: the joined rollout (see `joined`)."""
    ends, advantages, parts = np.cumsum([len(sample.tokens) for sample in samples]), joint.advantages, list[Rollout]()
    for sample, end in zip(samples, ends.tolist(), strict=True):
        tokens = slice(end - len(sample.tokens), end)
        parts.append(
            replace(
                sample,
                role=joint.role,
                rewards={**sample.rewards, **{n: joint.rewards[n] for n in (TRAINED,) if n in joint.rewards}},
                advantages=advantages[tokens] if isinstance(advantages, np.ndarray) else advantages,
                values={name: values[tokens] for name, values in joint.values.items()},
            )
        )
    return parts
