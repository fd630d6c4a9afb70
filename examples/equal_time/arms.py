"""The arms that are compared at equal time: what each is started with, beside the settings of its regime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TANGO, DAPO = "megatron_rl.recipes.tango:Tango", "megatron_rl.recipes.dapo:Dapo"
MANY = 1000  # updates of an arm that is ended when its time is over
# What differs from the paper: credit of a step's own tokens, compared with the same step of the other solutions; only
# solutions of problems that no sample solved are verified, and these learn from verdicts alone.
OWN_STEPS = ("recipe.args.step_credit={span: own, baseline: step}",)
FAILED = ("recipe.args.reviewed=failed", "recipe.args.alpha_start=1.0", "recipe.args.alpha_min=1.0")
FROZEN = ("recipe.args.train_verifier=false",)


@dataclass(frozen=True)
class Arm:
    """A method with its settings."""

    config: str  # grpo or tango: the file of examples/last_letter
    settings: Sequence[str] = ()
    paper_schedule: bool = False  # it has the regime's number of updates, over which alpha falls


ARMS: Mapping[str, Arm] = {
    "grpo": Arm("grpo"),
    "grpo_dynamic": Arm("grpo", (f"recipe.target={DAPO}", "recipe.args.dynamic_sampling={rounds: 10}")),
    "tango_paper": Arm("tango", paper_schedule=True),
    "frozen_paper": Arm("tango", FROZEN, paper_schedule=True),
    "tango_failed": Arm("tango", FAILED),
    "tango_own": Arm("tango", OWN_STEPS, paper_schedule=True),
    "tango": Arm("tango", (*OWN_STEPS, *FAILED)),
    "frozen_verifier": Arm("tango", (*OWN_STEPS, *FAILED, *FROZEN)),
}
