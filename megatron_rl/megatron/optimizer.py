"""Builds the gradient buffers, the distributed optimizer (ZeRO-1) and the learning-rate schedule of one role."""

from __future__ import annotations

from typing import Any, cast

from megatron_rl.config.schema import RoleConfig
from megatron_rl.lib.timing import Timer
from megatron_rl.megatron import optimizer_checkpoint, platform

platform.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear  # noqa: E402

ENDLESS = 10**9  # a step count that no run reaches, for schedules that never change


def wrap(
    config: Any, chunks: list[Any], *, overlap: bool = False, late: bool = False, fused_sums: bool = False
) -> list[Any]:
    """Wraps each model chunk in Megatron's DistributedDataParallel, whose gradient buffers accumulate in float32.

    `overlap`: whether gradients are reduced over ranks while the last backward pass runs.
    `late`: whether an optimizer step leaves the new weights sharded over the data-parallel ranks. If so, call `gather`
    or `gather_late` after the step.
    `fused_sums`: whether Megatron-core's linear layers add weight gradients directly to the buffers, as Transformer
    Engine's layers always do.
    """
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=overlap, overlap_param_gather=late
    )
    wrapped = [DistributedDataParallel(config, ddp, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)]
    for chunk in wrapped if late else ():
        chunk.disable_forward_pre_hook(param_sync=False)
    if fused_sums:
        platform.sum_weight_gradients()
    for module in (module for chunk in wrapped for module in chunk.modules()):
        # Set per module, because with the setting in Megatron-core's config the output layer would need apex's kernel.
        if hasattr(module, "fuse_wgrad_accumulation"):
            cast(Any, module).fuse_wgrad_accumulation = True
        elif fused_sums and isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            module.gradient_accumulation_fusion = True
    # Without `no_sync_func`, Megatron-core would reduce gradients after every micro-batch.
    # The gradients of earlier micro-batches would then be counted repeatedly.
    if overlap:
        syncs = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
    return wrapped


def gather_late(chunks: list[Any]) -> None:
    """All-gathers the weights that an optimizer step left sharded, during the next forward pass: each module waits for
    its weights when it is called.

    Until `gather` is called, only the forward pass of a module may read the module's weights, and no code may change
    the weights. Collective.
    """
    for chunk in chunks:
        if not chunk.remove_forward_pre_hook_handles:
            chunk.enable_forward_pre_hook()


def gather(chunks: list[Any]) -> None:
    """All-gathers the weights that an optimizer step left sharded over the data-parallel ranks. Collective."""
    for chunk in chunks:
        if chunk.remove_forward_pre_hook_handles:
            chunk.disable_forward_pre_hook(param_sync=False)
        chunk.start_param_sync(force_sync=True)


def build(role: RoleConfig, config: Any, chunks: list[Any], *, group: Any, timer: Timer) -> tuple[Any, Any]:
    """Returns (optimizer, learning-rate schedule) of a role. Collective over `group`, the role's `Groups.whole`.
    `timer` measures the reduction of gradients over ranks.

    The optimizer is Adam with its state sharded over the data-parallel ranks. Norms and biases have no weight decay
    unless `decay_norms` is set.
    """
    settings = role.optimizer
    core_settings = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_eps=settings.eps,
        weight_decay=settings.weight_decay,
        clip_grad=settings.clip_grad,
        bf16=config.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=True,
    )
    overrides = {} if settings.decay_norms else None  # None: Megatron-core decays no norms and no biases
    with platform.as_world(group):
        optimizer = get_megatron_optimizer(core_settings, chunks, config_overrides=overrides)
    config.finalize_model_grads_func = timer.around("gradient_reduction", finalize_model_grads)
    config.grad_scale_func = optimizer.scale_loss
    initialize_state(optimizer)
    for part in parts(optimizer):
        platform.mend_saved_offsets(part.buffers)
        platform.write_own_rows(part, optimizer_checkpoint.sharded_rows)
    decay_steps = ENDLESS if settings.decay == "constant" else settings.decay_steps
    assert decay_steps is not None  # the config class Optimizer requires decay_steps if there is a decay
    scheduler = Schedule(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=settings.decay,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=ENDLESS,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        # a checkpoint restores the schedule's step, not its learning rates
        override_opt_param_scheduler=True,
    )
    return optimizer, scheduler


class Schedule(OptimizerParamScheduler):
    """Megatron-core's learning-rate schedule, extended by an exponential decay."""

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """Returns the learning rate of a parameter group at the current step.

        With exponential decay, between warm-up and the last decay step, the rate is
        max_lr * (min_lr / max_lr) ** (fraction of the decay steps that are done).
        """
        if self.lr_decay_style != "exponential" or not self.lr_warmup_steps <= self.num_steps <= self.lr_decay_steps:
            return super().get_lr(param_group)
        highest, lowest = param_group.get("max_lr", self.max_lr), param_group.get("min_lr", self.min_lr)
        share = (self.num_steps - self.lr_warmup_steps) / (self.lr_decay_steps - self.lr_warmup_steps)
        return highest * (lowest / highest) ** share


def parts(optimizer: Any) -> list[Any]:
    """Returns the optimizers that Megatron-core chains: one for dense parameters, and one for experts if the model has
    them."""
    return optimizer.chained_optimizers if hasattr(optimizer, "chained_optimizers") else [optimizer]


def initialize_state(optimizer: Any) -> None:
    """Allocates Adam's moments as zeros, so that a role can be saved and loaded before its first optimizer step.

    Runs Megatron-core's dummy step with learning rate 0, which changes no weights.
    """
    for part in parts(optimizer):
        groups = part.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = 0.0
        part._init_optimizer_states_with_dummy_values()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"], group["step"] = rate, 0


def adopt_rates(optimizer: Any, state: dict[Any, Any]) -> None:
    """Copies the maximum and minimum learning rate of a checkpoint into the optimizer's parameter groups.

    Call it before the optimizer state is loaded, because Megatron-core 0.19 matches the parameter groups of optimizer
    and checkpoint by these learning rates.
    """
    optimizers = parts(optimizer)
    states = [state] if len(optimizers) == 1 else [state[i] for i in range(len(optimizers))]
    for part, of_part in zip(optimizers, states, strict=True):
        saved = of_part.get("optimizer", {}).get("param_groups", [])
        for group in part.param_groups if saved else ():
            for name in ("max_lr", "min_lr"):
                if name in group and name in saved[0]:
                    group[name] = saved[0][name]


def apply_settings(role: RoleConfig, optimizer: Any, scheduler: Any) -> None:
    """Sets the learning rates, betas, epsilon, weight decay and gradient clipping to the role's settings, after a
    checkpoint was loaded or when another stage of the run begins."""
    settings = role.optimizer
    scheduler.max_lr, scheduler.min_lr = settings.lr, settings.min_lr
    scheduler.start_wd = scheduler.end_wd = settings.weight_decay
    for part in (optimizer, *parts(optimizer)):
        part.config.clip_grad = settings.clip_grad
    for group in optimizer.param_groups:
        group["betas"], group["eps"] = tuple(settings.betas), settings.eps
        for name, value in (("max_lr", settings.lr), ("min_lr", settings.min_lr)):
            if name in group:
                group[name] = value


def restart(optimizer: Any) -> None:
    """Sets Adam's moments and step counts to zero. The schedule of the learning rate continues."""
    for part in parts(optimizer):
        for state in part.optimizer.state.values():
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()
        for group in part.optimizer.param_groups:
            group["step"] = 0


def zero_grad(chunks: list[Any], optimizer: Any) -> None:
    """Sets all gradients to zero."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()


def checkpoint_metadata() -> dict[str, Any]:
    """Returns options for Megatron-core's sharded state dicts. With these options, optimizer state that was saved under
    one layout can be loaded under another layout. Call it inside `Groups.active()`."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
