"""Checks that the forms of thoughts are known for all models whose answers are read without their thoughts."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.evaluation import Reward
from megatron_rl.spec.run_spec import EvalSpec, GenerateSpec, RunSpec, SftSpec, Spec
from megatron_rl.texts.response_forms import form_problems

INSTRUCTIONS = "rewards.instructions:grade"  # the grader of IFEval, which grades answers alone
SERVED = "rewards.reward_server:ServedRewardModel"


def response_form_problems(spec: Spec) -> Iterator[str]:
    """Yields an error message for each reward, judge or dialogue that reads answers without thoughts, if the form of
    the model's responses is unknown."""
    if isinstance(spec, SftSpec):
        return
    if isinstance(spec, RunSpec):
        if spec.recipe is None:
            return
        roles = [*spec.recipe.roles()][:1]
        readers = [*spec.recipe.reads_answers().items()]
        rewards = spec.rewards | {f"evaluation.sets.{dataset.name}": dataset.reward for dataset in spec.data.held_out}
    else:
        roles, readers = ["model"], []
        evaluated = spec.evaluated if isinstance(spec, EvalSpec) else ()
        rewards = {f"sets.{dataset.name}": dataset.reward for dataset in evaluated}
        rewards |= {"reward": spec.reward} if isinstance(spec, GenerateSpec) and spec.reward else {}
    for setting, reward in rewards.items():
        readers += [(role, f"{setting} ({reward.target})") for role in roles if _reads_answers(reward)]
    for role, why in dict(readers).items():
        place = f"roles.{role}.model" if isinstance(spec, RunSpec) else "model"
        if role in spec.roles:
            yield from form_problems(spec.roles[role].model, place, why)


def _reads_answers(reward: Reward) -> bool:
    """Returns whether a reward function grades the answers alone, without the thoughts."""
    served = reward.target.endswith(SERVED) and reward.args.get("reads") == "answer"
    return served or reward.target.endswith(INSTRUCTIONS)
