"""Groups of solutions to problems, and dynamic sampling: problems are taken until enough groups have signal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from megatron_rl.config.schema import ConfigError, config
from megatron_rl.engines.protocol import Sampling
from megatron_rl.recipes.solutions import Solution, solve
from megatron_rl.training.iteration import PromptSource, RolloutContext
from megatron_rl.types import Prompt

Metrics = dict[str, float]
GRADED = "graded/"  # begins the names of metrics that are counts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """One problem and its graded solutions. Those that could not be graded are missing."""

    prompt: Prompt
    solutions: Sequence[Solution]
    drawn: int  # samples of the problem, graded or not

    @property
    def success_rate(self) -> float | None:
        """Share of the solutions that is correct; None where none was graded."""
        return fmean(float(s.correct) for s in self.solutions) if self.solutions else None

    @property
    def has_signal(self) -> bool:
        """Says whether outcomes differ, so that comparing them says something."""
        return len({s.rollout.rewards["outcome"] for s in self.solutions}) > 1

    def renamed(self, name: str) -> Group:
        """Returns the same with all rollouts in the group `name`."""
        solutions = [replace(s, rollout=replace(s.rollout, group=name)) for s in self.solutions]
        return replace(self, solutions=solutions)


Draw = Callable[[int, Sequence[Prompt]], tuple[list[Group], Metrics]]  # (number of the round, problems)


def solve_groups(
    context: RolloutContext, role: str, prompts: Sequence[Prompt], sampling: Sampling
) -> tuple[list[Group], Metrics]:
    """Samples and grades n solutions of each of [P] prompts, as recipes.solutions.solve does and with its metrics.
    -> [P] groups."""
    found: dict[int, Solution] = {}
    _, metrics = solve(context, role, prompts, sampling, then=found.__setitem__)
    places = [range(i * sampling.n, (i + 1) * sampling.n) for i in range(len(prompts))]
    solutions = [[found[place] for place in own if place in found] for own in places]
    return [Group(prompt=p, solutions=s, drawn=sampling.n) for p, s in zip(prompts, solutions, strict=True)], metrics


@config
class DynamicSampling:
    """Groups whose outcomes are all alike are left out, and more problems are taken in their place (DAPO, arXiv
    2503.14476, section 3.2).

    An update trains on run.prompts_per_iteration groups, the first that have signal; what was drawn beyond them is let
    go. After `rounds` it trains on those that there are.
    """

    rounds: int = 10  # of taking problems, at most; 1: nothing is taken in place of what is left out (ScaleRL)
    oversampling: int = 1  # problems that a round takes for each group that an update trains on; DAPO's runs have 3

    def __post_init__(self) -> None:
        for name in ("rounds", "oversampling"):
            if vars(self)[name] < 1:
                raise ConfigError(f"recipe.args.dynamic_sampling.{name} = {vars(self)[name]}: give at least 1")


def draw_groups(source: PromptSource, draw: Draw, dynamic: DynamicSampling | None) -> tuple[list[Group], Metrics]:
    """Takes problems and draws their groups: those of run.prompts_per_iteration, or as `dynamic` says. The rollouts of
    later rounds have groups of their own, so that no two problems share one.

    -> the groups to train on, and metrics: those of the rounds, prompts_taken, rounds, and of everything that was drawn
    outcome_of_all (mean), alike (share of the groups without signal) and tokens_drawn.
    """
    prompts = source.take()
    wanted = len(prompts)
    rounds, size = (1, wanted) if dynamic is None else (dynamic.rounds, wanted * dynamic.oversampling)
    if size > wanted:
        prompts = [*prompts, *source.take(size - wanted)]
    kept: list[Group] = []
    drawn: list[Group] = []
    metrics: list[Metrics] = []
    for number in range(rounds):
        groups, found = draw(number, prompts if number == 0 else source.take(size))
        if number > 0:
            groups = [g.renamed(f"{number}/{i}:{g.prompt.id}") for i, g in enumerate(groups)]
        drawn += groups
        metrics.append(found)
        kept += groups if dynamic is None else [g for g in groups if g.has_signal]
        if len(kept) >= wanted:
            break
    taken = {"prompts_taken": float(len(drawn)), "rounds": float(len(metrics))}
    return kept[:wanted], merged(metrics) | taken | _of_all(drawn)


def merged(metrics: Sequence[Mapping[str, float]]) -> Metrics:
    """Returns the metrics of several draws as those of one: counts of gradings are added up, others averaged."""
    names = dict.fromkeys(name for own in metrics for name in own)
    parts = {name: [own[name] for own in metrics if name in own] for name in names}
    return {name: sum(values) if name.startswith(GRADED) else fmean(values) for name, values in parts.items()}


def _of_all(groups: Sequence[Group]) -> Metrics:
    outcomes = [s.rollout.rewards["outcome"] for group in groups for s in group.solutions]
    if not outcomes:
        return {}
    alike = fmean(float(not group.has_signal) for group in groups)
    written = sum(s.rollout.length for group in groups for s in group.solutions)
    return {"outcome_of_all": fmean(outcomes), "alike": alike, "tokens_drawn": float(written)}
