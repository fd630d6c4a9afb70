"""Critics for recipes. A critic is a role with a value head that learns to predict the returns of another role's
rollouts. The estimator `gae` computes the advantages of the other role from the critic's values.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_rl.algorithms.advantages import EstimatorName
from megatron_rl.algorithms.estimators import GAE, word_of
from megatron_rl.algorithms.gae import Gae, adapted, assign_gae
from megatron_rl.algorithms.value_loss import ValueLoss
from megatron_rl.batches.packed_batch import inputs_of_rollouts
from megatron_rl.config import files
from megatron_rl.config.base import Use, refuse
from megatron_rl.spec.run_spec import CheckedRun
from megatron_rl.texts.chat_template import check_models
from megatron_rl.training.iteration import CreditContext, Iteration, Recipe, RecipeRole, RolloutsByRole, Schedule, Score
from megatron_rl.types import Rollout


@dataclass(kw_only=True)
class Critics:
    """The critics of a recipe, and the factor on the KL coefficient of each role with a critic, which `kl_target`
    changes. The factors are saved with the recipe's state, the coefficient is a setting. Without critics, the methods
    change nothing.
    """

    critic_of: Mapping[str, str]  # {role: name of the critic that reads the rollouts of the role}
    settings: Gae = field(default_factory=Gae)

    def __post_init__(self) -> None:
        self.kl_factors = dict.fromkeys(self.critic_of, 1.0)  # current factor on settings.kl_coef by role

    @staticmethod
    def of(estimator: EstimatorName, critic_of: Mapping[str, str]) -> "Critics":
        """Returns the critics of a recipe. If the estimator is `gae`, these are the critics in `critic_of` ({role: name
        of the role's critic}), otherwise none. Raises ConfigError for invalid arguments of the estimator.
        """
        if word_of(estimator) != GAE:
            return Critics(critic_of={})
        args = estimator.args if isinstance(estimator, Use) else {}
        return Critics(critic_of=critic_of, settings=files.load(Gae, trees=[("estimator gae", args)]))

    def state_dict(self) -> dict[str, Any]:
        """Returns the factors on the KL coefficient, for the recipe's state."""
        return {"kl_factors": dict(self.kl_factors)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.kl_factors = {role: state["kl_factors"].get(role, 1.0) for role in self.critic_of}

    def roles(self, parts: Mapping[str, RecipeRole]) -> dict[str, RecipeRole]:
        """Returns the roles of a recipe and of its critics. `parts`: the roles of the recipe."""
        read = {
            role: replace(parts[role], reference=parts[role].trained and self.settings.kl_coef > 0)
            for role in self.critic_of
        }
        values = inputs_of_rollouts(ValueLoss.needs)
        critics = {self.critic_of[role]: replace(parts[role], head="value", gives=values) for role in read}
        return {**parts, **read, **critics}

    def schedule(self, schedule: Schedule) -> Schedule:
        """Returns a schedule in which the critic of a role is trained in every iteration that trains the role."""
        return [
            [(*roles, *(self.critic_of[role] for role in roles if role in self.critic_of)) for roles in cycle]
            for cycle in schedule
        ]

    def scores(self, iteration: Iteration) -> list[Score]:
        """Returns the requests for values and log-probs per token that `credit` needs in an iteration."""
        read = self._read(iteration)
        requests = [Score(role=role, name="value", by=critic) for role, critic in read.items()]
        if self.settings.kl_coef:
            requests += [Score(role=r, name=name, by=r) for r in read for name in ("logprobs", "reference_logprobs")]
        return requests

    def check(self, run: CheckedRun) -> None:
        """Raises ConfigError if a critic cannot read the rollouts of its role."""
        for role, critic in self.critic_of.items():
            check_models(run.roles[role].model, run.roles[critic].model, "a critic reads the tokens of its role")
        refuse(*self._sharing_problems(run), *self._too_short(run))

    def _sharing_problems(self, run: CheckedRun) -> Iterator[str]:
        """Yields error messages about the setting `same_as` of critics, by which a critic shares a policy's model."""
        for role, critic in self.critic_of.items():
            shared = run.roles[critic]
            if shared.shares_as_critic and shared.owner != run.roles[role].owner:
                yield (
                    f"roles.{critic}.same_as = {shared.same_as!r}, and {critic} reads the rollouts of {role}: name "
                    f"{run.roles[role].owner}, or give it a model of its own"
                )
            owner = run.roles[run.roles[role].owner]
            if owner.loss.value_coef and not shared.shares_as_critic:
                yield (
                    f"roles.{critic} has a model of its own, and {role} trains the policy of {run.roles[role].owner}, "
                    f"which learns values too (loss.value_coef): set roles.{critic}.same_as to {run.roles[role].owner}"
                )
            if shared.shares_as_critic and self.settings.critic_warmup:
                yield (
                    f"critic_warmup = {self.settings.critic_warmup} of the estimator gae, and {critic} shares the "
                    f"policy of {shared.same_as}, which the warm-up would change: set it to 0, or give {critic} a "
                    "model of its own"
                )

    def _too_short(self, run: CheckedRun) -> Iterator[str]:
        """Yields an error message for each critic that reads shorter prompts or responses than its role may have."""
        for role, critic in self.critic_of.items():
            critic_spec, read = run.roles[critic], run.roles[role]
            lengths = {
                "max_prompt_tokens": (critic_spec.max_prompt_tokens, read.max_prompt_tokens),
                "sampling.max_tokens": (critic_spec.sampling.max_tokens, read.sampling.max_tokens),
            }
            for setting, (limit, needed) in lengths.items():
                if limit < needed:
                    yield (
                        f"roles.{critic}.{setting} = {limit} is less than roles.{role}.{setting} = {needed}, and "
                        f"{critic} reads the rollouts of {role}: set it to {needed}"
                    )

    def credit(
        self,
        iteration: Iteration,
        rollouts: RolloutsByRole,
        context: CreditContext,
        *,
        reward: str | Mapping[str, float],
        weights: Sequence[float] | None = None,
        finish: Callable[[list[Rollout]], list[Rollout]] = list,
    ) -> dict[str, list[Rollout]]:
        """Returns the rollouts of each trained role with advantages, and the rollouts of the role's critic. While the
        critic warms up, the role has no rollouts to train on.

        `reward`, `weights`: see algorithms.gae.assign_gae. `finish`: function that is applied to the role's rollouts
            after the advantages are computed.
        """
        credited: dict[str, list[Rollout]] = {}
        for role, critic in self._read(iteration).items():
            factor = self.kl_factors[role]
            kl_coef = self.settings.kl_coef * (1.0 if self.settings.kl_target is None else factor)
            credit = assign_gae(rollouts[role], self.settings, reward=reward, kl_coef=kl_coef, weights=weights)
            self.kl_factors[role] = adapted(factor, credit.kl, credit.num_units, self.settings)
            warm = iteration.update(role) >= self.settings.critic_warmup
            credited[role] = finish(credit.policy) if warm else []
            credited[critic] = [replace(rollout, role=critic) for rollout in credit.critic]
            context.add_metrics(critic, credit.metrics)
            if kl_coef:
                context.add_metrics(role, {"kl_in_reward": credit.kl, "kl_coef": kl_coef})
        return credited

    def _read(self, iteration: Iteration) -> dict[str, str]:
        """Returns {role: critic} of the roles that an iteration trains."""
        return {role: critic for role, critic in self.critic_of.items() if role in iteration.roles}


class WithCritics(Recipe):
    """A recipe whose roles may have critics. The constructor of a subclass sets `_critics`. The methods `roles`,
    `schedule` and `credit` of a subclass call the methods with the same names of `_critics`.
    """

    _critics: Critics

    def check(self, run: CheckedRun) -> None:
        self._critics.check(run)

    def scores(self, iteration: Iteration) -> Sequence[Score]:
        return self._critics.scores(iteration)

    def state_dict(self) -> dict[str, Any]:
        return self._critics.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._critics.load_state_dict(state)
