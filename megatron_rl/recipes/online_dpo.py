"""Online DPO (arXiv 2402.04792): one model generates a group of samples per problem. The best and the worst sample of a
group become a preference pair.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from megatron_rl.config.base import ConfigError, Count
from megatron_rl.recipes.grpo import Grpo
from megatron_rl.recipes.solutions import GENERATOR
from megatron_rl.spec.run_spec import CheckedRun
from megatron_rl.training.iteration import CreditContext, Iteration, RecipeRole, RolloutsByRole
from megatron_rl.types import Rollout


@dataclass(frozen=True, kw_only=True)
class OnlineDpo(Grpo):
    """A recipe that trains the role `generator` on pairs of its own solutions, with a loss on pairs such as `dpo`
    (`roles.generator.loss.objective`). The outcomes that are compared may come from any grader.

    A problem whose solutions have the same outcome gives no pair. `group_size` 2 is the paper's setting.
    """

    group_size: Count = 2

    def roles(self) -> Mapping[str, RecipeRole]:
        return {name: replace(role, samples=2, gives=frozenset({"pairs"})) for name, role in super().roles().items()}

    def check(self, run: CheckedRun) -> None:
        super().check(run)
        if self.estimator != "grpo":
            raise ConfigError(f"recipe.args.estimator = {self.estimator!r}: pairs need no estimator; leave it out")

    def credit(self, iteration: Iteration, rollouts: RolloutsByRole, context: CreditContext) -> RolloutsByRole:
        groups: dict[str, list[Rollout]] = {}
        for rollout in rollouts[GENERATOR]:
            groups.setdefault(rollout.group, []).append(rollout)
        pairs = []
        for members in groups.values():
            ordered = sorted(members, key=lambda r: -r.rewards["outcome"])  # stable: equal outcomes stay in order
            if ordered[0].rewards["outcome"] > ordered[-1].rewards["outcome"]:
                pairs += [replace(ordered[0], advantages=1.0), replace(ordered[-1], advantages=-1.0)]
        every = [r.rewards["outcome"] for r in rollouts[GENERATOR]]
        shares = {"outcome_of_all": fmean(every), "alike": 1 - len(pairs) / 2 / len(groups)} if every else {}
        context.add_metrics(GENERATOR, shares)
        return {GENERATOR: pairs}
