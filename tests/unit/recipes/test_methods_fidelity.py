r"""Inputs and results of RL Tango's released code (github.com/kaiwenzha/RL-Tango, 411ed83), and ours beside them.

Every result in this file was obtained by executing the release's own functions on the input that stands beside it;
each table names the file and the function. Where this project differs on purpose, the table holds both results
(docs/experiments/fidelity.md says why).
"""

from __future__ import annotations

import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_recipes import PAPER, context_of, paper_generator, per_token, roll_out, segments, texts, verification

from megatron_rl.algorithms.advantages import step_rewards
from megatron_rl.config import files
from megatron_rl.config.plugins import build
from megatron_rl.config.schema import ConfigError, GenerateConfig, SftConfig, TrainConfig
from megatron_rl.recipes.tango import Tango
from megatron_rl.rewards.verdicts import review
from megatron_rl.texts.tags import generator_format, step_texts

__all__ = ["texts"]  # a fixture

SOLUTION = "<think>\n<step>a</step>\n<step>b</step>\n<step>c</step>\n</think>\n<answer>\\boxed{7}</answer>"
BLOCKS = (
    "<step>Step 1 Analysis: x \\boxed{CORRECT}</step>\n<step>y \\boxed{CORRECT}</step>\n"
    "<step>z \\boxed{INCORRECT}</step>\n"
)
STEPS = f"<step_verification>\n{BLOCKS}</step_verification>\n"
WRONG = "<final_verification>\\boxed{INCORRECT}</final_verification>"
CORRECT = "<final_verification>\\boxed{CORRECT}</final_verification>"
THREE = (1 / 3, 1 / 3, -1 / 3)

# verl/workers/verifier_worker.py: VerifierActorRolloutWorker.extract_verification_result, one solution (SOLUTION, whose
# answer is wrong) and one verification of it. -> final verdict, correctness reward, format reward, step rewards.
VERIFICATIONS = {
    "as asked": (STEPS + WRONG, False, 1.0, 1.0, THREE),
    "text behind the end": (STEPS + WRONG + "\n\nHuman: and now", False, 1.0, 0.0, THREE),
    "text before the start": ("Sure!\n" + STEPS + WRONG, False, 1.0, 0.0, THREE),
    "the whole twice": (STEPS + WRONG + "\n" + STEPS + WRONG, False, 1.0, 1.0, THREE),
    "two final sections, the first agrees": (STEPS + WRONG + CORRECT, False, 1.0, 1.0, THREE),
    "two final sections, the second agrees": (STEPS + CORRECT + WRONG, True, 0.0, 1.0, THREE),
    "the first final section is no verdict": (
        STEPS + "<final_verification>no</final_verification>" + WRONG, False, 1.0, 0.2, THREE,
    ),
    "no opening tag of the steps": (BLOCKS + "</step_verification>\n" + WRONG, False, 1.0, 0.0, ()),
    "no closing tag of the steps": ("<step_verification>\n" + BLOCKS + WRONG, False, 1.0, 0.0, ()),
    "cut behind the last step": ("<step_verification>\n" + BLOCKS, None, 0.0, 0.0, ()),
    "cut behind the steps": (STEPS, None, 0.0, 0.0, THREE),
    "no final closing tag": (STEPS + WRONG[:-22], None, 0.0, 0.0, THREE),
    "a reason in the final section": (
        STEPS + "<final_verification>So \\boxed{INCORRECT}</final_verification>", None, 0.0, 0.0, THREE,
    ),
    "a full stop": (STEPS.replace("}</", "}. </") + WRONG.replace("}</", "}.\n</"), False, 1.0, 1.0, THREE),
    "box, lower case": (STEPS + "<FINAL_verification>\\box{incorrect}</final_verification>", False, 1.0, 0.0, THREE),
    "a step without verdict": (STEPS.replace("y \\boxed{CORRECT}", "y") + WRONG, False, 1.0, 0.2, ()),
    "text between steps": (STEPS.replace("</step>\n<", "</step> and <") + WRONG, False, 1.0, 0.6, THREE),
    "a verdict behind an unopened step": (
        STEPS.replace("<step>y", "y") + WRONG, False, 1.0, 0.0, (),
    ),
    "a step reopened": (STEPS.replace("y \\boxed", "y <step> \\boxed") + WRONG, False, 1.0, 1.0, THREE),
}  # fmt: skip

# verl/utils/reward_score/format.py: generator_format_reward. -> the release's score, ours.
SOLUTIONS = {
    SOLUTION: (1.0, 1.0),
    SOLUTION.replace("<step>b</step>\n", ""): (0.6, 0.6),
    SOLUTION.replace("\\boxed{7}", "7"): (0.2, 0.2),
    SOLUTION.replace("\\boxed{7}", "\\boxed{7}."): (0.2, 0.2),
    SOLUTION.replace("\\boxed{7}", "\\boxed{}"): (0.2, 0.2),
    SOLUTION.replace("\\boxed{7}", "\\boxed{7} \\boxed{8}"): (1.0, 0.2),
    SOLUTION.replace("step>", "Step>"): (0.2, 0.2),
    SOLUTION[: SOLUTION.index("</answer>")]: (0.0, 0.0),
}


@pytest.mark.parametrize("name", VERIFICATIONS)
def test_a_verification_is_read_and_rewarded_as_the_release_does(name):
    text, final, agrees, form, steps = VERIFICATIONS[name]
    num_steps = len(step_texts(SOLUTION))
    got = review(text, num_steps=num_steps, correct=False, generator_format=generator_format(SOLUTION))
    assert (got.final, float(got.agrees), got.format) == (final, agrees, form)
    assert got.reward == pytest.approx(agrees + 0.8 * form)
    # A verification with another number of verdicts than steps gives no step rewards.
    rewards = step_rewards(list(got.verdicts), num_steps)
    assert ([] if rewards is None else list(rewards)) == pytest.approx(list(steps))


@pytest.mark.parametrize("text", SOLUTIONS)
def test_the_format_of_a_solution(text):
    assert generator_format(text) == SOLUTIONS[text][1]


# verl/trainer/ppo/core_algos.py: compute_grpo_advantage and compute_rloo_advantage, on the group PAPER, whose first
# solution is correct. The final verdicts are those of the table. The outcome is what rl_tango_trainer.py passes:
# ground_truth_weight * graded + (1 - ground_truth_weight) * final verdict + generator_format_reward_weight * format.
# -> advantages of each step and of the end.
WEIGHTS = {
    "generator_format_reward_weight=0.5, grpo": (
        {"generator_format_weight": 0.5}, "+--",
        ([1.2163, 1.1689, 1.1214, 1.074, 1.0266], [-0.7165, -0.843, -0.6533],
         [-0.4998, -0.5472, -0.5947, -0.484, -0.3733]),
    ),
    "generator_format_reward_weight=0.5, rloo": (
        {"generator_format_weight": 0.5, "estimator": "rloo"}, "+--",
        ([1.6567, 1.49, 1.3233, 1.1567, 0.99], [-0.8522, -1.2967, -0.63], [-0.8044, -0.9711, -1.1378, -0.7489, -0.36]),
    ),
    "ground_truth_weight=0.75, grpo": (
        {"ground_truth_weight": 0.75}, "+?+",
        ([1.1985, 1.1511, 1.1037, 1.0562, 1.0088], [-0.7838, -0.9103, -0.7206],
         [-0.4147, -0.4622, -0.5096, -0.3989, -0.2882]),
    ),
    "alpha_schedule=none, outcome 0.5, process 0.2, grpo": (
        {"alpha_schedule": "none", "outcome_weight": 0.5, "process_weight": 0.2}, "+--",
        ([0.9568, 0.862, 0.7671, 0.6722, 0.5773], [-0.4152, -0.6681, -0.2887],
         [-0.5417, -0.6365, -0.7314, -0.51, -0.2887]),
    ),
    "alpha_schedule=none, outcome 0.5, process 0.2, rloo": (
        {"alpha_schedule": "none", "outcome_weight": 0.5, "process_weight": 0.2, "estimator": "rloo"}, "+--",
        ([1.8333, 1.5, 1.1667, 0.8333, 0.5], [-0.6944, -1.5833, -0.25], [-1.1389, -1.4722, -1.8056, -1.0278, -0.25]),
    ),
    "alpha_schedule=none, no solution has step rewards": (
        {"alpha_schedule": "none", "outcome_weight": 0.5, "process_weight": 0.2}, "",
        ([1.1547] * 5, [-0.5773] * 3, [-0.5773] * 5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_weights_of_a_generators_rewards(texts, name):
    args, finals, expected = WEIGHTS[name]

    def verify(prompt, i, j, sampling):
        return verification(PAPER[i][0], finals[i]) if finals else "what?"

    rollouts, _ = roll_out(Tango(group_size=3, **args, **texts), "generator", 1, context_of(paper_generator, verify))
    for rollout, own in zip(rollouts, expected, strict=True):
        assert segments(rollout) == pytest.approx(own, abs=1e-4)


def test_the_weights_of_a_verifiers_rewards():
    """rl_tango_trainer.py: V_correctness_reward * verifier_correctness_reward_weight + V_format_reward * its weight."""
    got = [
        review(text, num_steps=3, correct=False, generator_format=1.0, gamma=0.25, correctness=0.5).reward
        for text in (STEPS + WRONG, STEPS + CORRECT, STEPS)
    ]
    assert got == [0.75, 0.25, 0.0]


def test_a_generator_that_warms_up_learns_from_outcomes_alone(texts):
    """rl_tango_trainer.py, training_phase == "generator_warmup": no verification; alpha counts the updates after it."""
    recipe = Tango(group_size=3, generator_warmup_updates=2, **texts)
    alphas, asked = [], []
    for update in range(3):
        context = context_of(paper_generator, lambda p, i, j, s: verification(PAPER[i][0], "-"))
        rollouts, metrics = roll_out(recipe, "generator", 1, context, update=update)
        alphas.append(metrics["alpha"])
        asked.append(len(context.engines["verifier"].asked))
        if update < 2:
            ends = [per_token(rollout)[-1] for rollout in rollouts]
            assert ends == pytest.approx([1.1547, -0.5773, -0.5773], abs=1e-4)
            assert all(set(per_token(r)) <= {0.0, end} for r, end in zip(rollouts, ends, strict=True))
    assert alphas == [0.0, 0.0, 0.1] and asked == [0, 0, 3]


# rl_tango_trainer.py: RLTangoTrainer.fit, its modes with nothing trained: total_training_steps, generator_warmup_steps,
# verifier_warmup_steps, n_generator_steps, n_verifier_steps, initial_mode. -> G and V, for 9 updates in the cycles.
MODES = {
    (17, 2, 3, 3, 1, "generator"): "GGVVVGGGVGGGVGGGV",
    (17, 2, 3, 3, 1, "verifier"): "GGVVVVGGGVGGGVGGG",
    (15, 0, 1, 2, 1, "verifier"): "VVGGVGGVGGVGGVG",
}


@pytest.mark.parametrize("settings", MODES)
def test_the_order_of_updates(settings):
    _, warm, verifier_warm, generator, verifier, first = settings
    recipe = Tango(
        generator_updates=9, generator_warmup_updates=warm, warmup_updates=verifier_warm, initial_mode=first,
        generator_iterations=generator, verifier_iterations=verifier,
    )  # fmt: skip
    assert "".join(roles[0][0].upper() for cycle in recipe.schedule() for roles in cycle) == MODES[settings]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"outcome_weight": 0.5}, "outcome_weight = 0.5, process_weight = 1.0 with alpha_schedule = 'exponential'"),
        ({"alpha_schedule": "none", "outcome_weight": 0, "process_weight": 0}, "set one of them above 0"),
        ({"alpha_schedule": "none", "estimator": "gae"}, "the estimator gae, which mixes by alpha"),
    ],
)
def test_weights_that_nothing_reads_are_refused(texts, args, message):
    with pytest.raises(ConfigError, match=message):
        Tango(**args, **texts)


ROOT = Path(__file__).parents[3]
COMMANDS = {"train": TrainConfig, "sft": SftConfig, "generate": GenerateConfig}
FLAGS = (ROOT / "docs/experiments/fidelity.md").read_text().partition("## Flags and files")[2].split("\n### ")[1:]
OURS = re.compile(r"This project's command: `megatron-rl (\w+)`.*?examples/(published/\S+?\.yaml)\)", re.DOTALL)
# The last words of the flags that the releases' scripts set; of train/tandem_grpo.sh also its variables.
SCRIPTS = {
    "scripts/run_rl_tango.sh": (
        "adv_estimator train_files val_files train_batch_size max_prompt_length max_response_length "
        "filter_overlong_prompts truncation return_raw_chat apply_chat_template path enable_gradient_checkpointing "
        "use_remove_padding lr lr_warmup_steps_ratio ppo_mini_batch_size ppo_micro_batch_size_per_gpu use_kl_loss "
        "kl_loss_coef kl_loss_type entropy_coeff param_offload optimizer_offload log_prob_micro_batch_size_per_gpu "
        "tensor_model_parallel_size name gpu_memory_utilization max_num_batched_tokens n critic verifier_critic "
        "kl_ctrl ground_truth_weight generator_format_reward_weight generator_outcome_reward_weight "
        "generator_process_reward_weight alpha_schedule alpha_start alpha_min exp_target_frac enable trainable "
        "prompt_length response_length n_verifier_inference_rollouts temperature verifier_correctness_reward_weight "
        "verifier_format_reward_weight verifier_label_ema_decay reweight_verifier_rewards reweight_method "
        "generator_warmup_steps verifier_warmup_steps critic_warmup verifier_critic_warmup n_generator_steps "
        "n_verifier_steps initial_mode logger project_name experiment_name n_gpus_per_node nnodes save_freq test_freq "
        "val_generations_to_log_to_wandb val_verifications_to_log_to_wandb total_training_steps total_epochs "
        "resume_mode val_before_train VLLM_ATTENTION_BACKEND"
    ),
    "scripts/run_sft_generator.sh": (
        "nnodes node_rank master_addr master_port nproc_per_node train_batch_size train_files val_files prompt_key "
        "response_key max_length micro_batch_size_per_gpu apply_chat_template lr partial_pretrain default_local_dir "
        "project_name experiment_name total_epochs save_freq test_freq logger default_hdfs_dir"
    ),
    "scripts/run_sft_data_generation.sh": (
        "nnodes n_gpus_per_node batch_size path prompt_key n_samples output_path trust_remote_code temperature top_k "
        "top_p prompt_length response_length tensor_model_parallel_size gpu_memory_utilization"
    ),
    "train/tandem_grpo.sh": (
        "POLICY_MODEL JUNIOR_MODEL GPUS TRAIN_GPUS PROB_PRIMARY SELECTION MAX_GAP_TOKENS BOUNDARY_IDS_PATH FROZEN_GPU "
        "JR_TKN_WEIGHT LR CLIP_RATIO TRAIN_BATCH MINI_BATCH MAX_PROMPT MAX_RESPONSE ROLLOUT_N ROLLOUT_TEMP "
        "PPO_MAX_TOKEN TOTAL_EPOCHS TOTAL_STEPS TEST_FREQ SAVE_FREQ VAL_DO_SAMPLE VAL_TEMP VAL_TOP_P VAL_N "
        "ROLLOUT_GPU_UTIL ENFORCE_EAGER OFFLOAD EXP_NAME CKPT_DIR MAX_CKPT_KEEP VLLM_TANDEM_ALL_GPUS adv_estimator "
        "norm_adv_by_std_in_grpo use_kl_in_reward val_files filter_overlong_prompts truncation use_remove_padding "
        "enable_gradient_checkpointing use_fused_kernels attn_implementation use_torch_compile use_dynamic_bsz "
        "use_kl_loss entropy_coeff max_model_len tensor_model_parallel_size custom_reward_function logger "
        "val_before_train log_val_generations persist_hf_model"
    ),
}


def step(value: Any, name: str) -> Any:
    return value[name] if isinstance(value, dict) else getattr(value, name)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_of_a_released_script_has_a_row(script):
    [section] = [part for part in FLAGS if script in part.partition("\n")[0]]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
    named = {word for row in rows for flag in re.findall(r"`([^`]+)`", row[0]) for word in re.findall(r"\w+", flag)}
    assert set(SCRIPTS[script].split()) <= named
    assert all(len(row) == 4 and len(row[2]) > 2 for row in rows), "each has ours, or the reason"


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_values_of_the_table_of_flags_are_those_of_the_examples(script):
    [section] = [part for part in FLAGS if script in part.partition("\n")[0]]
    command, example = OURS.search(section).groups()
    config = files.load(COMMANDS[command], [ROOT / "examples" / example])
    recipe = build(config.recipe) if command == "train" else None
    here = [line.split(" | ")[2] for line in section.splitlines() if line.startswith("| `")]
    found = [pair for cell in here for pair in re.findall(r"`([a-z_.]+): ([^`]+)`", cell)]
    assert len(found) > 8
    for name, value in found:
        place, names = (recipe, name[12:]) if name.startswith("recipe.args.") else (config, name)
        own = reduce(step, names.split("."), place)
        wanted = yaml.safe_load(re.sub(r"^(\d)e", r"\1.0e", value))
        assert own == (tuple(wanted) if isinstance(wanted, list) else wanted), name
