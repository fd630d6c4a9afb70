"""Grades answers to problems of several sources, each with the reward function of its source."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megatron_rl.config.evaluation import Reward
from megatron_rl.rewards.grading_pool import Graded, GradePool
from megatron_rl.types import SOURCE

Grade = Callable[[Sequence[str], Sequence[Mapping[str, Any]]], list[Graded]]


class GradePools:
    """The pools of worker processes of several reward functions. Equal reward settings share one pool."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        """`stack`: when the caller closes this stack, the worker processes are ended."""
        self._stack, self._pools = stack, dict[str, GradePool]()

    def of(self, reward: Reward) -> GradePool:
        """Returns the pool of a reward function. The pool starts its workers at the first grading, or when `start` is
        called."""
        if (key := repr(reward)) not in self._pools:
            self._pools[key] = self._stack.enter_context(GradePool(reward))
        return self._pools[key]


def by_source(graders: Mapping[str, Grade], default: Grade) -> Grade:
    """Returns a grader that grades each answer with the grader of the problem's source. `graders`: {source: grader};
    the payload of a problem contains the name of its source. `default` grades answers to problems of other sources. The
    graders run concurrently; each grades all answers to problems of its sources in one call.
    """
    if not graders:
        return default

    def grade(responses: Sequence[str], payloads: Sequence[Mapping[str, Any]]) -> list[Graded]:
        places: dict[Grade, list[int]] = defaultdict(list)
        for i, payload in enumerate(payloads):
            places[graders.get(payload.get(SOURCE, ""), default)].append(i)
        gradings: dict[int, Graded] = {}
        with ThreadPoolExecutor(max(1, len(places))) as threads:
            calls = {
                grader: threads.submit(grader, [responses[i] for i in indices], [payloads[i] for i in indices])
                for grader, indices in places.items()
            }
            for grader, call in calls.items():
                gradings |= zip(places[grader], call.result(), strict=True)
        return [gradings[i] for i in range(len(responses))]

    return grade
