"""The position of a run in its schedule, and messages about iterations from which nothing was learned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_rl.training.iteration import Iteration

# Names of metrics that a message shows to explain why an iteration had nothing to learn from.
TELLING = (
    "groups_without_signal", "alike", "groups_alike", "reward/trained", "outcome_of_all", "samples", "rounds",
    "ungraded", "graded/timeout", "graded/error",
)  # fmt: skip


@dataclass(kw_only=True)
class Progress:
    """The current position of a run, saved as JSON values in checkpoints. The training loop updates the position.
    `kept` and `last_metrics` exist on the driver only; all other fields are the same on every rank.
    """

    cycle: int = 0
    index: int = 0  # number of finished iterations of the current cycle
    number: int = 0  # number of finished iterations in the run
    iterations: dict[str, int] = field(default_factory=dict)  # number of finished iterations that trained each role
    # number of executed updates of each policy, which is also its weight version
    updates: dict[str, int] = field(default_factory=dict)
    evaluated: int = -1  # number of finished iterations at the last evaluation
    saved: int = -1  # number of finished iterations at the last checkpoint
    first_evaluation: dict[str, float] = field(default_factory=dict)
    last_evaluation: dict[str, float] = field(default_factory=dict)
    # (number of finished iterations, value) of the best evaluations, the best first
    best: list[tuple[int, float]] = field(default_factory=list)
    # (best value of the metric of evaluation.early_stop so far, number of evaluations since the best value)
    early_stop: tuple[float, int] | None = None
    # {name of a set: RolloutContext.kept, the JSON values that evaluations store for later evaluations}
    kept: dict[str, Any] = field(default_factory=dict)
    # metrics of each role's last iteration; empty on other ranks than the driver
    last_metrics: dict[str, dict[str, float]] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "last_metrics"}

    @property
    def cycles_begun(self) -> int:
        """Number of cycles in which at least one iteration is finished."""
        return self.cycle + (self.index > 0)

    def iteration_done(self, iteration: Iteration) -> None:
        self.cycle, self.index, self.number = iteration.cycle, iteration.index + 1, iteration.number + 1
        for role in iteration.roles:
            self.iterations[role] = self.iterations.get(role, 0) + 1


def never_learned(progress: Progress, policy_of: Mapping[str, str]) -> list[str]:
    """Returns a sentence for each trained role that had iterations but whose policy had no update."""
    idle = [
        role for role, name in policy_of.items() if progress.iterations.get(role) and not progress.updates.get(name)
    ]
    return [
        f"{role} never learned: {progress.iterations[role]} iterations and no update, as every group of its samples "
        f"had equal rewards, or was left out, or as only its critic was trained{_last_metrics(progress, [role])}"
        for role in idle
    ]


def _last_metrics(progress: Progress, roles: Iterable[str]) -> str:
    """Returns a text in brackets with metrics of the last iteration of each role. The metrics are those named in
    TELLING, which show why there was nothing to learn from. Returns an empty text if there are none.
    """
    shown = {
        role: ", ".join(f"{name} = {found[name]:.4g}" for name in TELLING if name in found)
        for role in roles
        if (found := progress.last_metrics.get(role))
    }
    metrics = "; ".join(f"{role}: {text}" for role, text in shown.items() if text)
    return f" (the last iteration's metrics: {metrics})" if metrics else ""


def why_nothing(progress: Progress) -> str:
    """Returns the message of a run in which no iteration had anything to learn from. The message names possible reasons
    and gives the relevant metrics of the last iteration.
    """
    told = _last_metrics(progress, progress.last_metrics)
    return (
        f"{progress.number} iterations and no update: every group of samples had equal rewards, or was left out{told}. "
        "Where the reward is the least there is, the model solves nothing, or the reward does not understand its "
        "answers; where it is the greatest, the problems are too easy; where graded/error or graded/timeout counts, "
        "the reward failed. The answers stand in the run's rollouts: megatron-rl report RUN"
    )
