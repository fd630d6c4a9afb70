"""Short names of recipes, and the settings that correspond to names of TRL (with transformers and peft) and of verl."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rl.config.base import Use, config, hint, refuse

# {short name of a recipe: its class}
RECIPES: Mapping[str, str] = {
    "grpo": "megatron_rl.recipes.grpo:Grpo",
    "dapo": "megatron_rl.recipes.dapo:Dapo",
    "ppo": "megatron_rl.recipes.ppo:Ppo",
    "online_dpo": "megatron_rl.recipes.online_dpo:OnlineDpo",
    "remax": "megatron_rl.contrib.remax:Remax",
    "lean_tango": "megatron_rl.recipes.tango:LeanTango",
    "tango": "megatron_rl.recipes.tango:Tango",
    "tandem": "megatron_rl.recipes.tandem:Tandem",
    "agents": "megatron_rl.recipes.agents:Agents",
    "rubric": "megatron_rl.contrib.rubric:Rubric",
    "pairwise": "megatron_rl.contrib.pairwise:Pairwise",
    "distil": "megatron_rl.recipes.distil:Distil",
}
_BATCH = "run.prompts_per_iteration (problems of an update); roles.*.micro_batch_tokens limits memory"
_RANKS = "the number of ranks that torchrun or srun starts, or launch.nproc on one host"
# {setting of TRL, transformers or peft: setting of this project}. `*` stands for a role. Where there is no setting with
# the same meaning, the value says what to do.
TRL: Mapping[str, str] = {
    "learning_rate": "roles.*.optimizer.lr",
    "weight_decay": "roles.*.optimizer.weight_decay",
    "max_grad_norm": "roles.*.optimizer.clip_grad",
    "warmup_steps": "roles.*.optimizer.warmup_steps",
    "warmup_ratio": "roles.*.optimizer.warmup_steps",
    "lr_scheduler_type": "roles.*.optimizer.decay",
    "beta": "roles.*.loss.kl_coef",
    "epsilon": "roles.*.loss.clip_low",
    "epsilon_high": "roles.*.loss.clip_high",
    "loss_type": "roles.*.loss.objective and roles.*.loss.aggregation",
    "num_generations": "recipe.args.group_size",
    "max_steps": "recipe.args.updates",
    "num_train_epochs": "recipe.args.updates, each on run.prompts_per_iteration problems",
    "per_device_train_batch_size": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "generation_batch_size": _BATCH,
    "steps_per_generation": "roles.*.samples_per_optimizer_step",
    "max_completion_length": "roles.*.sampling.max_tokens",
    "max_new_tokens": "roles.*.sampling.max_tokens",
    "max_prompt_length": "roles.*.max_prompt_tokens",
    "temperature": "roles.*.sampling.temperature",
    "top_p": "roles.*.sampling.top_p",
    "top_k": "roles.*.sampling.top_k",
    "model_name_or_path": "roles.*.model.path",
    "bf16": "roles.*.model.dtype",
    "fp16": "roles.*.model.dtype",
    "gradient_checkpointing": "roles.*.model.recompute",
    "peft_config": "roles.*.lora",
    "lora": "roles.*.lora",
    "r": "roles.*.lora.rank",
    "lora_r": "roles.*.lora.rank",
    "lora_alpha": "roles.*.lora.alpha",
    "target_modules": "roles.*.lora.targets",
    "lora_target_modules": "roles.*.lora.targets",
    "use_vllm": "engine.kind, with the value vllm",
    "vllm_mode": "engine.colocate",
    "vllm_tensor_parallel_size": "engine.tp",
    "vllm_gpu_memory_utilization": "engine.memory_share",
    "reward_funcs": "reward.target",
    "train_dataset": "data.path",
    "dataset_name": "data.path",
    "eval_dataset": "evaluation",
    "eval_strategy": "evaluation.every",
    "eval_steps": "evaluation.every",
    "save_steps": "run.save_every",
    "save_total_limit": "run.keep",
    "output_dir": "run.dir",
    "run_name": "run.name",
    "seed": "run.seed",
    "report_to": "sinks.wandb_project or sinks.tensorboard",
    "logging_steps": "no setting: every iteration is logged",
    "load_best_model_at_end": "evaluation",
}
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
VERL: Mapping[str, str] = {
    "actor_rollout_ref.model.path": "roles.*.model.path",
    "actor_rollout_ref.model.lora_rank": "roles.*.lora.rank",
    "actor_rollout_ref.model.lora_alpha": "roles.*.lora.alpha",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "roles.*.model.recompute",
    f"{_ACTOR}.optim.lr": "roles.*.optimizer.lr",
    f"{_ACTOR}.optim.weight_decay": "roles.*.optimizer.weight_decay",
    f"{_ACTOR}.optim.lr_warmup_steps": "roles.*.optimizer.warmup_steps",
    f"{_ACTOR}.ppo_mini_batch_size": "roles.*.samples_per_optimizer_step, in samples",
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": "roles.*.micro_batch_tokens, in tokens",
    f"{_ACTOR}.ppo_max_token_len_per_gpu": "roles.*.micro_batch_tokens",
    f"{_ACTOR}.use_kl_loss": "roles.*.loss.kl_coef",
    f"{_ACTOR}.kl_loss_coef": "roles.*.loss.kl_coef",
    f"{_ACTOR}.kl_loss_type": "roles.*.loss.kl",
    f"{_ACTOR}.clip_ratio": "roles.*.loss.clip_low and roles.*.loss.clip_high",
    f"{_ACTOR}.clip_ratio_low": "roles.*.loss.clip_low",
    f"{_ACTOR}.clip_ratio_high": "roles.*.loss.clip_high",
    f"{_ACTOR}.entropy_coeff": "roles.*.loss.entropy_coef",
    f"{_ACTOR}.loss_agg_mode": "roles.*.loss.aggregation",
    f"{_ACTOR}.megatron.tensor_model_parallel_size": "roles.*.layout.tp",
    f"{_ACTOR}.megatron.pipeline_model_parallel_size": "roles.*.layout.pp",
    f"{_ACTOR}.megatron.context_parallel_size": "roles.*.layout.cp",
    f"{_ACTOR}.megatron.expert_model_parallel_size": "roles.*.layout.ep",
    f"{_ROLLOUT}.n": "recipe.args.group_size",
    f"{_ROLLOUT}.name": "engine.kind",
    f"{_ROLLOUT}.temperature": "roles.*.sampling.temperature",
    f"{_ROLLOUT}.tensor_model_parallel_size": "engine.tp",
    f"{_ROLLOUT}.gpu_memory_utilization": "engine.memory_share",
    "critic.model.path": "roles.critic.model.path, with recipe.target=ppo",
    "critic.optim.lr": "roles.critic.optimizer.lr, with recipe.target=ppo",
    "algorithm.adv_estimator": "recipe.args.estimator",
    "algorithm.gamma": "recipe.args.estimator.args.gamma, with recipe.target=ppo",
    "algorithm.lam": "recipe.args.estimator.args.lam, with recipe.target=ppo",
    "algorithm.use_kl_in_reward": "recipe.args.estimator.args.kl_coef, with recipe.target=ppo",
    "data.train_files": "data.path",
    "data.val_files": "evaluation",
    "data.train_batch_size": "run.prompts_per_iteration",
    "data.max_prompt_length": "roles.*.max_prompt_tokens",
    "data.max_response_length": "roles.*.sampling.max_tokens",
    "custom_reward_function.path": "reward.target, as module:function",
    "custom_reward_function.name": "reward.target, as module:function",
    "trainer.total_epochs": "recipe.args.updates, each on run.prompts_per_iteration problems",
    "trainer.total_training_steps": "recipe.args.updates",
    "trainer.n_gpus_per_node": _RANKS,
    "trainer.nnodes": "job.nodes",
    "trainer.save_freq": "run.save_every",
    "trainer.test_freq": "evaluation.every",
    "trainer.logger": "sinks.wandb_project or sinks.tensorboard",
    "trainer.project_name": "sinks.wandb_project",
    "trainer.experiment_name": "run.name",
    "trainer.default_local_dir": "run.dir",
}


@config
class RecipeUse(Use):
    """A recipe: its class, and the arguments with which it is built."""

    target: str  # package.module:Class, or a short name: grpo, dapo, ppo, tango, ... (config/other_names.py has all)

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", RECIPES.get(self.target, self.target))
        refuse(*self.problems())

    def problems(self) -> Iterator[str]:
        """Yields an error message for a name that is no known short name and no package.module:Class, and for each
        argument that is not a finite number.
        """
        yield from super().problems()
        if self.target and ":" not in self.target:  # empty: a Config in Python that is not complete yet
            cure = hint(self.target, RECIPES, f"known: {', '.join(RECIPES)}.")
            yield f"target = {self.target!r} is no recipe; {cure} Others are named as package.module:Class"


def named_elsewhere(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yields (name, the setting that corresponds to it) for the names of TRL or verl in an unknown setting.

    `key`: dotted name of the unknown setting. `value`: its value; names may be nested in a mapping.
    """
    name = key.rpartition(".")[2]
    if found := VERL.get(key) or TRL.get(name):
        yield key, f"this is {'verl' if key in VERL else 'TRL'}'s name; here it is {found.replace('*', 'NAME')}"
    elif isinstance(value, Mapping):
        for inner, own in value.items():
            yield from named_elsewhere(f"{key}.{inner}", own)
