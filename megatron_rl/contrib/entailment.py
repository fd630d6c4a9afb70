"""Trains the verifier of RLBFF (arXiv 2509.21319) by GRPO to judge whether a response fulfils a principle."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.base import Count
from megatron_rl.recipes.grpo import Grpo
from megatron_rl.recipes.solutions import GENERATOR, check_arguments, check_fields
from megatron_rl.spec.run_spec import CheckedRun
from megatron_rl.texts.text import fill, read_template


@dataclass(frozen=True, kw_only=True)
class Entailment(Grpo):
    """A recipe that trains the role `generator`, which is a verifier in this recipe, with the reward
    `megatron_rl.contrib.entailment_reward:grade`.

    A problem has the fields question, response and principle. Its answer is the label, yes or no. The trained model can
    be used as the judge of the recipe Rubric with judge_template: entailment_verifier.
    """

    allows_votes = False  # a vote may elect a verdict that is neither yes nor no
    group_size: Count = 8
    template: str = "entailment_verifier"  # template with {question}, {response}, {criterion}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_arguments(self, templates={"template": ["response", "criterion"]})

    def check(self, run: CheckedRun) -> None:
        reader = "the template"
        check_fields(run, GENERATOR, {"response": reader, "principle": reader}, held_out=True)

    def prompt(self, payload: Mapping[str, Any]) -> str:
        values = {"question": payload["question"], "response": payload["response"], "criterion": payload["principle"]}
        return fill(read_template(self.template), **{name: str(value) for name, value in values.items()})
