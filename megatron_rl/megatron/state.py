"""Saves and loads a role's model, optimizer and learning-rate schedule as distributed checkpoints."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from megatron_rl.config.schema import ConfigError
from megatron_rl.megatron import checkpoint_writers, optimizer, optimizer_checkpoint, platform
from megatron_rl.megatron import model as models
from megatron_rl.megatron.export import WeightExport
from megatron_rl.megatron.role_model import RoleModel
from megatron_rl.messages.world import broadcast
from megatron_rl.weights import dist_checkpoint, lora_adapters

platform.install()

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject  # noqa: E402
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata  # noqa: E402
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue  # noqa: E402

# Megatron-core 0.19 uses another package for background saves, unless `async_strategy` selects Megatron-core's writer.
_OWN_WRITER: dict[str, Any] = (
    {"async_strategy": "mcore"} if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters else {}
)


class PolicyState:
    """Saves and loads the checkpoints of one role. Every method is collective: all ranks of the role call it.
    Checkpoints of a role with LoRA adapters contain only the adapters and the role's head (if the role has one),
    without the base model."""

    def __init__(self, model: RoleModel, export: WeightExport) -> None:
        self._model, self._export = model, export
        self._saves = AsyncCallsQueue()

    def save(self, directory: Path, *, background: bool = False) -> None:
        """Saves model, optimizer and schedule as a distributed checkpoint that can be loaded under any layout.

        `directory` must be empty. With `background`, a separate process writes the current state to disk while training
        continues; `saved` reports when the write has finished. A LoRA adapter is also written to `directory`/adapter in
        peft's format.
        """
        model = self._model
        model.check_readable()
        with model.memory.awake(), model.active(), checkpoint_writers.one_save():
            state = optimizer_checkpoint.without_copies(self._sharded(loading=False))
            with platform.as_world(model.groups.whole):
                request = dist_checkpointing.save(state, str(directory), async_sharded_save=background, **_OWN_WRITER)
                if request is not None:
                    self._saves.schedule_async_request(request)
        self._export.write_adapter(directory / lora_adapters.DIRECTORY)

    def saved(self, *, wait: bool) -> bool:
        """Returns whether all saves started so far have been written to disk. With `wait`, waits for them first. Raises
        the exception of a writer process that failed."""
        with platform.as_world(self._model.groups.whole):
            self._saves.maybe_finalize_async_calls(blocking=wait)
        return not self._saves.get_num_unfinalized_calls()

    def load(self, directory: Path) -> None:
        """Loads model, optimizer state and the schedule's position from a checkpoint written by `save`.

        Learning rates, betas and weight decay keep the values of this role's settings. Raises ConfigError if only one
        of the checkpoint and the role has a head, or if the checkpoint's adapter has different LoRA settings or another
        base model.
        """
        model = self._model
        self._check_kind(directory)
        with model.memory.awake(), model.active():
            state_to_load = self._to_load(directory)
            with platform.as_world(model.groups.whole):
                loaded = dist_checkpointing.load(state_to_load, str(directory))
            # The cast is needed because `load` returns a pair for some values of its argument `strict`.
            state = cast(dict[str, Any], loaded)
            for i, chunk in enumerate(model.chunks):
                models.unwrap(chunk).load_state_dict(state[f"model{i}"], strict=False)
            if model.trainable:
                optimizer.adopt_rates(model.optimizer, state["optimizer"])
                model.optimizer.load_state_dict(state["optimizer"])
                optimizer.apply_settings(model.role, model.optimizer, model.scheduler)
                # reset, because Megatron-core adds the checkpoint's step count to the current count
                model.scheduler.num_steps = 0
                model.scheduler.load_state_dict(state["scheduler"])

    def _check_kind(self, directory: Path) -> None:
        """Raises ConfigError on every rank if only one of the checkpoint in `directory` and the role has a head, or if
        the checkpoint's adapter does not match the role's LoRA settings and base model.

        Without this check, Megatron-core would load an output layer's weight into a head, because Megatron-core accepts
        a different number of rows.
        """
        role, control, problem = self._model.role, self._model.groups.control, None
        adapter = directory / lora_adapters.DIRECTORY
        if dist.get_rank(control) == 0:
            problem = dist_checkpoint.head_difference(directory, role.head, beside=role.loss.value_coef > 0)
            if problem is None and (role.lora is not None or adapter.is_dir()):
                problem = lora_adapters.difference(adapter, role.lora, role.model.path)
        if problem := broadcast(problem, control):
            raise ConfigError(problem)

    def _to_load(self, directory: Path) -> dict[str, Any]:
        """Returns the sharded state dict that Megatron-core fills from the checkpoint in `directory`.

        Transformer Engine's extra state for 8-bit matrix products is omitted if the checkpoint does not contain this
        state, for example because a model with torch layers wrote the checkpoint.
        """
        state = self._sharded(loading=True)
        if self._model.fused:
            held = load_sharded_metadata(str(directory))
            for i in range(len(self._model.chunks)):
                parts = state[f"model{i}"].items()
                state[f"model{i}"] = {
                    name: part for name, part in parts if not isinstance(part, ShardedObject) or part.unique_key in held
                }
        return state

    def _sharded(self, *, loading: bool) -> dict[str, Any]:
        """Returns the role's state on this rank as Megatron-core's sharded state dict."""
        model, metadata, head = self._model, optimizer.checkpoint_metadata(), self._model.head()
        state: dict[str, Any] = {}
        for i, chunk in enumerate(model.chunks):
            sharded = models.unwrap(chunk).sharded_state_dict(metadata=metadata)
            trained = {name: shard for name, shard in sharded.items() if lora_adapters.is_adapter(name) or name in head}
            state[f"model{i}"] = sharded if model.adapters is None else trained
        if model.trainable:
            state["optimizer"] = model.optimizer.sharded_state_dict(dict(state), is_loading=loading, metadata=metadata)
            state["scheduler"] = model.scheduler.state_dict()
        return state
