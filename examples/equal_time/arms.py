"""The arms that are compared at equal time: what each is started with, beside the settings of its regime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DAPO, TANGO = "megatron_rl.recipes.dapo:Dapo", "megatron_rl.recipes.tango:Tango"
MAJORITY = "examples.equal_time.majority:MajorityGrpo"
FREE = "examples.equal_time.free_verdicts:FreeVerdicts"
MANY = 1000  # updates of an arm that is ended when its time is over
FROZEN = "recipe.args.train_verifier=false"
SMALL = "run.prompts_per_step=8"  # the regimes' own batches are of 32 problems


@dataclass(frozen=True)
class Arm:
    """A method with its settings."""

    config: str  # grpo or tango: the file of examples/last_letter
    settings: Sequence[str] = ()
    turns: int = 1  # of a step
    evaluate: int = 10  # turns between two evaluations
    # 0, or: it has the regime's warm-up and alpha, which falls over this many times the regime's number of updates.
    paper: int = 0


ARMS: Mapping[str, Arm] = {
    "grpo": Arm("grpo", [SMALL], evaluate=20),
    "grpo_dynamic": Arm("grpo", [SMALL, f"recipe.target={DAPO}", "recipe.args.dynamic_sampling={rounds: 10}"]),
    "grpo_majority": Arm("grpo", [SMALL, f"recipe.target={MAJORITY}"], evaluate=20),
    "grpo_32": Arm("grpo", evaluate=4),
    "tango": Arm("tango", [SMALL, f"recipe.target={TANGO}", "recipe.args.warmup_updates=0"], turns=10),
    "frozen": Arm("tango", [SMALL, f"recipe.target={TANGO}", FROZEN], turns=9),
    "free_verdicts": Arm(
        "tango", [SMALL, f"recipe.target={FREE}", FROZEN, "recipe.args.verifier_rests=false"], turns=9
    ),
    "tango_paper": Arm("tango", [SMALL], turns=4, evaluate=12, paper=4),
    "tango_paper_32": Arm("tango", turns=4, evaluate=4, paper=1),
}
