"""Defaults of every objective, estimator and recipe, against the papers and releases that they are from."""

import dataclasses
import importlib
import inspect
import pkgutil

import pytest

from megatron_rl import contrib, recipes
from megatron_rl.algorithms import (
    advantages,
    class_weights,
    corrections,
    estimators,
    objectives,
    role_credit,
    tandem_authors,
)
from megatron_rl.config.model import CORRECTION_AHEAD, CorrectionConfig, TandemConfig
from megatron_rl.recipes import tango
from megatron_rl.training.iteration import Recipe

# TRL: docs/source/paper_index.md and GRPOConfig of 1.16; arXiv numbers elsewhere.
OBJECTIVES = {
    # 1707.06347, TRL's epsilon; off unless asked for: dual clip and the bound of StableReinforce (2505.02835)
    "clipped": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "ratio_bound": None},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "ratio_cap": None},  # 2507.18071 and TRL; verl caps at e^10
    "gmpo": {"clip_low": 0.4, "clip_high": 0.4},  # 2507.20673: (e^-0.4, e^0.4)
    "cispo": {"cap": 5.0},  # TRL's epsilon_high, a ratio and not a distance from 1
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},  # 2511.20347
    "dppo_tv": {"clip_low": 0.15, "clip_high": 0.15, "cap": 20.0},  # verl, examples/dppo_trainer; cap: its function's
    "dppo_kl": {"clip_low": 0.05, "clip_high": 0.05, "cap": 20.0},
    "vespo": {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0},  # 2602.10693 and TRL
    "reinforce": {"tau": 0.0},  # plain REINFORCE; OPMD sets 1 (2501.12599)
    "rover": {"temperature": 1.0},  # 2509.24981, Math/scripts/deepscaler/train/rover_qwen3_8b.sh
    "distilled": {"max_fall": None},  # off; prime-rl has 0.2
    "distilled_top_k": {
        "kl": "reverse",
        "forward_share": 0.5,
        "rest": "bucket",
    },  # TRL's loss_add_tail; NeMo-RL's weight
    "rl_plus": {"focus": 0.5},  # 2508.00222, rlplus_core_alg.py
    "dpo": {"beta": 0.1, "label_smoothing": 0.0},  # 2305.18290 and TRL
    "dpo_norm": {"beta": 5.0, "label_smoothing": 0.0},  # 2411.15124
    "ipo": {"beta": 0.1},  # TRL's beta, the paper's tau
    "simpo": {"beta": 2.0, "simpo_gamma": 0.5, "label_smoothing": 0.0},  # 2405.14734, simpo_config.py; TRL's gamma
    "bradley_terry": {"center_rewards_coefficient": 0.0},  # off, as in TRL's RewardConfig
    "a_lol": {"clip": 0.9},  # 2305.14718, the released ppo_clip
    "rwr": {"beta": 1.0},
    "kto": {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},  # 2402.01306 and TRL
}
ESTIMATORS = {
    "opmd": {"baseline": "mean", "tau": 1.0},  # Trinity-RFT, opmd_advantage.py
    "asymre": {"baseline_shift": -0.1},  # Trinity-RFT, asymre_advantage.py
    "w_reinforce": {"positive_weight": 0.1},  # 2506.01347
}
# Fields that are not here have no number of a paper: templates, and lengths of a run that every user sets.
RECIPES = {
    # 2505.15034, appendix, and the release's scripts
    "Tango": {
        "generator_updates": 300, "warmup_updates": 40, "generator_iterations": 3, "verifier_iterations": 1,
        "generator_warmup_updates": 0, "initial_mode": "generator", "outcome_weight": 1.0, "process_weight": 1.0,
        "correctness_weight": 1.0, "generator_format_weight": 0.0, "ground_truth_weight": 1.0, "group_size": 5,
        "verifications": 5, "alpha_start": 0.1, "alpha_min": 1e-3,
        "alpha_schedule": "exponential", "exp_target_frac": 1.0, "step_credit": advantages.StepCredit(),
        "reviewed": "all", "review_below": None, "verifier_rests": False, "greedy_verdicts": False,
        "estimator": "grpo", "format_weight": 0.8, "class_weight_decay": 0.8, "class_weights": "sqrt_inverse",
        "train_generator": True, "train_verifier": True, "balanced_per_class": 128, "balanced_rounds": 8,
    },
    "Reviewer": {"gamma": 0.8, "correctness": 1.0},  # 2505.15034
    "DynamicSampling": {"rounds": 10, "oversampling": 1},  # 2503.14476: at most 10 rounds
    "Curriculum": {"retire_at": 0.9, "rest_at": None, "rest_epochs": 1},  # 2510.13786
    "Hints": {"shares": (0.25, 0.5, 0.75)},  # 2507.10628
    # 2503.14476: at most -1; off unless asked for
    "Overlong": {"cache": 0, "penalty": 1.0, "leave_out_truncated": False},
    "Brevity": {"share": 0.2, "penalty": 0.2},  # 2505.18086: the size is this project's own
    "Remax": {"group_size": 1, "estimator": "reinforce"},  # 2310.10505: one sample, the greedy one as baseline
    "Evolve": {  # 2510.23595; the release's scripts
        "proposals": 1, "answers": 5, "judgements": 5, "practice": "pool", "reference_share": 0.5, "references": 1,
        "least_quality": 0.7, "estimator": "reinforce_pp",
    },
    "SelfPlay": {  # 2510.18821: n = 5, the accuracy missing is the reward, a question that cannot be read earns 0
        "answers": 5, "aim": "hard", "unparseable": 0.0, "cluster_distance": 0.0, "key": "proposed",
        "least_accuracy": 0.0, "most_accuracy": 1.0, "proposer_estimator": "hierarchical", "ema_decay": 0.95,
    },
    "Agents": {"group_size": 8, "compared": "task", "estimator": "grpo", "ema_decay": 0.95},  # 2506.24119: the decay
    "Pairwise": {"group_size": 8, "both_orders": False, "judge_warmup": 0, "judge_iterations": 0, "format_weight": 0.8},
    "Rubric": {"group_size": 8, "judgements": 1, "criteria": 4, "train_judge": False, "format_weight": 0.8},
    "Distil": {"group_size": 1, "top_k": 0, "retokenise": False},
    # 2603.02604; the release's hacpo_trainer.yaml
    "Hacpo": {"group_size": 8, "window": 5, "cross_clip": 0.2, "cross_clip_step": 0.025},
    "Entailment": {"group_size": 8},
    "Grpo": {"group_size": 5, "estimator": "grpo"},
    "Tandem": {"group_size": 8},  # 2606.28166
    "Ppo": {"group_size": 1},  # 1707.06347: a critic in place of a group
    "OnlineDpo": {"group_size": 2},  # 2402.04792
}  # fmt: skip
NUMBERS = {
    (estimators, "EPSILON"): 1e-6,  # beside a standard deviation: Tango's release and verl
    (advantages, "RLOO_STEP_SCALE"): 10.0,  # Tango's release, compute_rloo_advantage
    (class_weights, "EPSILON"): 1e-6,  # 2505.15034, eq. 9 and the release
    (corrections, "LOG_LIMIT"): 20.0,  # verl's bound of a log-ratio
    (objectives, "LEAST_WEIGHT"): 1e-8,  # VESPO's release
    (role_credit, "DECAY"): 0.95,  # SPIRAL, 2506.24119
    (tango, "SIGNAL_DECAY"): 0.8,  # docs/reference/methods.md: each iteration counts for a fifth
}


def defaults(function):
    """The arguments behind the first that every function of its kind has, with their defaults."""
    parameters = inspect.signature(getattr(function, "function", function)).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


@pytest.mark.parametrize(
    "found, wanted", [(objectives.WORDS, OBJECTIVES), (estimators.ESTIMATORS, ESTIMATORS)], ids=["losses", "estimators"]
)
def test_defaults_of_losses_and_estimators_are_those_of_their_papers(found, wanted):
    assert {name: own for name, function in found.items() if (own := defaults(function))} == wanted


def test_defaults_of_recipes_are_those_of_their_papers():
    modules = [
        importlib.import_module(f"{package.__name__}.{m.name}")
        for package in (recipes, contrib)
        for m in pkgutil.iter_modules(package.__path__)
    ]
    classes = {c.__name__: c for m in modules for c in vars(m).values() if inspect.isclass(c)}
    for name, wanted in RECIPES.items():
        fields = {field.name: field.default for field in dataclasses.fields(classes[name])}
        assert {field: fields[field] for field in wanted} == wanted, name
    packaged = {name for name, c in classes.items() if issubclass(c, Recipe) and not inspect.isabstract(c)}
    assert packaged - set(RECIPES) <= {"Dapo", "Ssrl", "TangoAgents"}, "their numbers are those of what they extend"


def test_numbers_of_the_algorithms_are_those_of_their_papers():
    assert {(module, name): getattr(module, name) for module, name in NUMBERS} == NUMBERS
    rule, tandem = tandem_authors.Rule(), TandemConfig()  # 2606.28166
    for found in (rule, tandem):
        assert (found.strategy, found.p, found.max_gap, found.chunk_size) == ("word", 0.5, 32, 16)
    assert tandem.junior_weight == 0.0
    tis = CorrectionConfig(kind="truncate", level="token", low=None, high=2.0)
    assert tis == CORRECTION_AHEAD  # TIS, verl's cap
    for function in (advantages.assign_advantages, advantages.step_advantages, advantages.step_rewards):
        own = defaults(function)
        assert own.get("estimator", "grpo") == "grpo" and own.get("steps", own.get("credit")) == advantages.PAPER_CREDIT
    assert defaults(advantages.step_advantages)["rloo_scale"] == 10.0
