"""Groups of solutions to problems, and dynamic sampling, which samples more problems until there are enough groups
whose solutions have different outcomes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from megatron_rl.config.base import Count, config
from megatron_rl.engines.protocol import Sampling
from megatron_rl.recipes.solutions import Solution, solve
from megatron_rl.run.metrics import REPLACED
from megatron_rl.training.iteration import PromptSource, RolloutContext
from megatron_rl.training.rollouts import has_signal
from megatron_rl.types import Prompt

Metrics = dict[str, float]
COUNTS = ("graded/", REPLACED)  # name prefixes of metrics that are counts of gradings and of samples


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """One problem and its graded solutions. Samples that could not be graded are not included."""

    prompt: Prompt
    solutions: Sequence[Solution]
    drawn: int  # number of samples of the problem, including ungraded ones

    @property
    def success_rate(self) -> float | None:
        """Share of correct solutions among the graded solutions; None if no solution was graded."""
        return fmean(float(s.correct) for s in self.solutions) if self.solutions else None

    @property
    def has_signal(self) -> bool:
        """Whether the outcomes of the solutions differ by more than a rounding error. If they do not, all advantages
        are 0 and there is nothing to learn.
        """
        return has_signal((s.rollout for s in self.solutions), "outcome")

    def renamed(self, name: str) -> Group:
        """Returns the group with the group id of all rollouts set to `name`."""
        solutions = [replace(s, rollout=replace(s.rollout, group=name)) for s in self.solutions]
        return replace(self, solutions=solutions)


# function that samples one group per problem: (index of the round, problems) -> groups, metrics
Draw = Callable[[int, Sequence[Prompt]], tuple[list[Group], Metrics]]


def solve_groups(
    context: RolloutContext, role: str, prompts: Sequence[Prompt], sampling: Sampling
) -> tuple[list[Group], Metrics]:
    """Samples and grades n solutions of each of [P] prompts with recipes.solutions.solve. Returns [P] groups, and the
    metrics that `solve` returned.
    """
    solved: dict[int, Solution] = {}
    _, metrics = solve(context, role, prompts, sampling, then=solved.__setitem__)
    places = [range(i * sampling.n, (i + 1) * sampling.n) for i in range(len(prompts))]
    solutions = [[solved[place] for place in places_of_group if place in solved] for places_of_group in places]
    return [Group(prompt=p, solutions=s, drawn=sampling.n) for p, s in zip(prompts, solutions, strict=True)], metrics


@config
class DynamicSampling:
    """Settings of dynamic sampling: groups whose outcomes are all equal are skipped, and more problems are sampled
    instead (DAPO, arXiv 2503.14476, section 3.2).

    An update trains on the first run.prompts_per_iteration groups with different outcomes; further groups are
    discarded. If there are fewer such groups after `rounds` rounds of sampling, the update trains on the groups found.
    """

    rounds: Count = 10  # maximum number of sampling rounds; 1 means that skipped groups are not replaced (ScaleRL)
    # number of problems sampled per round for each group that an update trains on; 3 in DAPO's runs
    oversampling: Count = 1


def draw_groups(source: PromptSource, draw: Draw, dynamic: DynamicSampling | None) -> tuple[list[Group], Metrics]:
    """Takes problems from `source` and samples a group of solutions for each problem. Without `dynamic`, takes
    run.prompts_per_iteration problems once. With `dynamic`, takes problems in several rounds. Rollouts of later rounds
    get new group ids, so that no two problems have the same group id.

    Returns the groups to train on, and metrics: the metrics of `draw`, prompts_taken, rounds, and, over all sampled
    groups, outcome_of_all (mean outcome), alike (share of groups whose outcomes are all equal) and tokens_drawn.
    """
    num_prompts = source.prompts_per_iteration
    rounds, size = (1, num_prompts) if dynamic is None else (dynamic.rounds, num_prompts * dynamic.oversampling)
    kept: list[Group] = []
    drawn: list[Group] = []
    metrics: list[Metrics] = []
    for number in range(rounds):
        groups, draw_metrics = draw(number, source.take(size))
        if number > 0:
            groups = [g.renamed(f"{number}/{i}:{g.prompt.id}") for i, g in enumerate(groups)]
        drawn += groups
        metrics.append(draw_metrics)
        kept += groups if dynamic is None else [g for g in groups if g.has_signal]
        if len(kept) >= num_prompts:
            break
    metrics_of_all = merged(metrics) | {"prompts_taken": float(len(drawn)), "rounds": float(len(metrics))}
    if rollouts := [s.rollout for group in drawn for s in group.solutions]:
        metrics_of_all["outcome_of_all"] = fmean(rollout.rewards["outcome"] for rollout in rollouts)
        metrics_of_all["alike"] = fmean(float(not group.has_signal) for group in drawn)
        metrics_of_all["tokens_drawn"] = float(sum(rollout.length for rollout in rollouts))
    return kept[:num_prompts], metrics_of_all


def merged(metrics: Sequence[Mapping[str, float]]) -> Metrics:
    """Merges the metrics of several draws: counts (see COUNTS) are summed, other metrics are averaged."""
    names = dict.fromkeys(name for draw_metrics in metrics for name in draw_metrics)
    parts = {name: [draw_metrics[name] for draw_metrics in metrics if name in draw_metrics] for name in names}
    return {name: sum(values) if name.startswith(COUNTS) else fmean(values) for name, values in parts.items()}
