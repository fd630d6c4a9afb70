"""The arms that are compared at equal time: what each is started with, beside the settings of its regime."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DAPO, TANGO = "megatron_rl.recipes.dapo:Dapo", "megatron_rl.recipes.tango:Tango"
MAJORITY = "examples.studies.equal_time.majority:MajorityGrpo"
HERE = "examples.studies.equal_time"
MANY = 1000  # updates of an arm that is ended when its time is over
FROZEN = "recipe.args.train_verifier=false"
SMALL = "run.prompts_per_iteration=8"  # the regimes' own batches are of 32 problems
# The settings of Tango that cost less than the paper's (docs/reference/methods.md, "Tango's two settings").
LEAN: Mapping[str, Any] = {
    "generator_iterations": 9,
    "reviewed": "failed",
    "review_below": 0.25,
    "verifier_rests": True,
    "greedy_verdicts": True,
    "step_credit": {"span": "own", "baseline": "step"},
    "alpha_start": 1.0,
    "alpha_min": 1.0,
}
LEAN_SETTINGS = tuple(f"recipe.args.{name}={json.dumps(value)}" for name, value in LEAN.items())
OWN = (SMALL, f"recipe.target={TANGO}", *LEAN_SETTINGS, "recipe.args.warmup_updates=0")
CHANCE = "recipe.args.greedy_verdicts=false"


@dataclass(frozen=True)
class Arm:
    """A method with its settings."""

    config: str  # grpo or tango: the file of examples/miniatures/last_letter
    settings: Sequence[str] = ()
    evaluate: int = 10  # iterations between two evaluations
    # 0, or: it has the regime's warm-up and alpha, which falls over this many times the regime's number of updates.
    paper: int = 0
    verifier: str = ""  # a name of verifiers.VERIFIERS; empty: that of the regimes


def arm_of(target: str, *settings: str, verifier: str = "") -> Arm:
    """Returns Tango's arm with another recipe."""
    own = [SMALL, f"recipe.target={HERE}.{target}", *LEAN_SETTINGS, "recipe.args.warmup_updates=0", *settings]
    return Arm("tango", own, verifier=verifier)


ARMS: Mapping[str, Arm] = {
    "grpo": Arm("grpo", [SMALL], evaluate=20),
    "grpo_dynamic": Arm("grpo", [SMALL, f"recipe.target={DAPO}", "recipe.args.dynamic_sampling={rounds: 10}"]),
    "grpo_majority": Arm("grpo", [SMALL, f"recipe.target={MAJORITY}"], evaluate=20),
    "grpo_32": Arm("grpo", evaluate=4),
    "tango": Arm("tango", OWN),
    "frozen": Arm("tango", [SMALL, f"recipe.target={TANGO}", *LEAN_SETTINGS, FROZEN]),
    "tango_paper": Arm("tango", [SMALL], evaluate=12, paper=4),
    "tango_paper_32": Arm("tango", evaluate=4, paper=1),
}

# Means measured one by one (docs/experiments/last_letter.md), and the most that a better or cheaper verifier could win.
TRIED: Mapping[str, Arm] = {
    "by_chance": Arm("tango", [*OWN, CHANCE]),
    "scored": arm_of("own_verdicts:ScoredTango"),
    "together": arm_of("together:TogetherTango", verifier="pairs"),
    "reusing": arm_of("means:ReusingTango"),
    "trusted": arm_of("means:TrustedTango"),
    "dynamic": arm_of("means:DynamicTango"),
    "one_layer": Arm("tango", OWN, verifier="one_layer"),
    "two_layers": Arm("tango", OWN, verifier="two_layers"),
    "free_verdicts": Arm(
        "tango",
        [
            *(SMALL, f"recipe.target={HERE}.own_verdicts:FreeVerdicts", *LEAN_SETTINGS),
            *(FROZEN, "recipe.args.verifier_rests=false"),
        ],
    ),
}
