"""Builds the Megatron model of one role on this rank from a Hugging Face directory, and makes it the active model of
Megatron-core, which has one active layout at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_rl.config.base import refuse
from megatron_rl.config.schema import RoleConfig
from megatron_rl.lib.timing import Timer
from megatron_rl.megatron import load_balancing, lora, offload, optimizer, platform, router_replay
from megatron_rl.megatron import model as models
from megatron_rl.megatron.parallel import Groups
from megatron_rl.models.blocks import OUTPUT, SCORE, VALUE_HEAD
from megatron_rl.models.divisibility import trainer_problems
from megatron_rl.models.lora_targets import adapter_problems
from megatron_rl.models.setting_limits import prefix_problems, setting_problems
from megatron_rl.weights import hf_model, parameter_mapping, tensor_copies
from megatron_rl.weights.lora_adapters import is_adapter

platform.install()

# Fields of Megatron-core's config object that each role's optimizer sets.
# Because roles with adapters can share this object, the fields are set again when a role with adapters becomes active.
_OF_ROLE = ("finalize_model_grads_func", "grad_scale_func", "no_sync_func")


class RoleModel:
    """This rank's part of a role's model: Megatron-core's config, the model chunks, and the LoRA adapters if the role
    has them.

    A trainable role also has gradient buffers, an optimizer and a learning-rate schedule. In a role with adapters, the
    base model is frozen. `base`: the model of another role with adapters and the same path, layout and ranks, whose
    weights this role shares; None if the role does not share weights. The constructor is collective (all ranks of
    `groups` call it) and raises ConfigError for settings that the model does not support.
    """

    def __init__(
        self, role: RoleConfig, groups: Groups, *, trainable: bool = True, seed: int = 0, deterministic: bool = False,
        base: RoleModel | None = None,
    ) -> None:  # fmt: skip
        self.role, self.groups, self.trainable = role, groups, trainable
        self.timer = Timer(cuda=torch.cuda.is_available())
        self.arch = hf_model.read_architecture(role.model.path, role.head)
        path = role.model.path
        problems = trainer_problems(self.arch, role.layout, path)
        problems += setting_problems(self.arch, self.arch.features, role.model, path, router_replay=role.router_replay)
        refuse(*problems, *adapter_problems(self.arch, role, path), *prefix_problems(role))
        adapted = role.lora is not None
        self.fused = models.uses_transformer_engine(self.arch, role.model.dtype, adapted=adapted)
        self.attends = not self.fused or role.shared_prefixes  # Transformer Engine has no attention for shared prefixes
        self._temperature = role.sampling.temperature or 1.0
        self.optimizer: Any = None
        self.scheduler: Any = None
        with groups.active():
            if base is None:
                self.config, self._model = self._build(seed, deterministic=deterministic)
            else:
                self.config, self._model = base.config, base._model
                vars(self.config).update(dict.fromkeys(_OF_ROLE))
            for core in map(models.unwrap, self._model) if role.router_replay else ():
                router_replay.install(core)
            self.chunks: list[Any] = list(self._model)
            self.adapters: lora.RoleAdapters | None = None
            if role.lora is not None:
                cores = [models.unwrap(chunk) for chunk in self._model]
                self.adapters = lora.RoleAdapters(cores, self.arch, role.lora, groups.shard)
                # A value head beside the output layer is not part of adapter files.
                self.adapters.fill(seed, [] if role.head is None else self.head().values())
            if trainable:
                sums = models.uses_fused_sums(role.model)
                self.chunks = optimizer.wrap(
                    self.config, self.chunks, overlap=role.optimizer.overlap, late=self._gathers_late, fused_sums=sums
                )
                self.optimizer, self.scheduler = optimizer.build(
                    role, self.config, self.chunks, group=groups.whole, timer=self.timer
                )
        self._calls = {name: vars(self.config).get(name) for name in _OF_ROLE}
        self._steps_left = 0
        self.memory = offload.PolicyMemory(self.chunks, self.optimizer)

    @property
    def _gathers_late(self) -> bool:
        """True if the new weights of an optimizer step are all-gathered during the next step's forward pass.

        False for adapters: adapters are small, and no forward hook could wait for the adapters' weights, because
        adapter modules are not called.
        """
        return self.role.optimizer.overlap and self.adapters is None

    def named(self) -> dict[str, torch.nn.Parameter]:
        """Returns this rank's model parameters by name, with global layer indices. Adapters and a value head beside the
        output layer are left out, because engines and exported models do not have them."""
        named = models.named_parameters(self.chunks)
        return {name: parameter for name, parameter in named if not is_adapter(name) and name != VALUE_HEAD}

    def trained(self) -> list[torch.nn.Parameter]:
        """Returns this rank's parameters that training changes: the adapters and the head if the role has adapters,
        otherwise the whole model."""
        if self.adapters is not None:
            return [*self.adapters.named.values(), *self.head().values()]
        return [p for _, p in models.named_parameters(self.chunks)]

    def head(self) -> dict[str, torch.nn.Parameter]:
        """Returns {Megatron name: weight} of the role's head, which is in place of the output layer or beside the
        output layer. Returns an empty dict if the role has no head, and on a rank that does not belong to the last
        pipeline stage."""
        head_name = VALUE_HEAD if self.role.head is None else OUTPUT
        return {name: p for name, p in models.named_parameters(self.chunks) if name == head_name}

    def gather_weights(self, *, steps_left: int) -> None:
        """All-gathers the new weights that an optimizer step with `optimizer.overlap` leaves sharded over the
        data-parallel ranks. No-op without `optimizer.overlap`, or if the role has LoRA adapters.

        If `steps_left` is positive, the weights are gathered module by module during the next forward pass. If
        `steps_left` is 0, the weights are gathered now.
        """
        self._steps_left = steps_left if self._gathers_late else 0
        if self._gathers_late:
            (optimizer.gather_late if steps_left else optimizer.gather)(self.chunks)

    def check_readable(self) -> None:
        """Raises RuntimeError if the weights cannot be read now, because the weights are in host memory, or because
        each rank has only a shard of the new weights (between two optimizer steps with `optimizer.overlap`)."""
        self.memory.check_present()
        if self._steps_left:
            raise RuntimeError(f"an update is under way: {self._steps_left} optimizer steps of it are left to be taken")

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Context manager that makes this role's layout, adapters and sampling temperature active for the block.

        Raises RuntimeError while the weights are in host memory.
        """
        self.memory.check_present()
        with self.groups.active():
            if self.adapters is not None:
                self.adapters.show()
                vars(self.config).update(self._calls)
            for chunk in self._model:
                models.unwrap(chunk).temperature = self._temperature
            yield

    def _build(self, seed: int, *, deterministic: bool) -> tuple[Any, list[Any]]:
        """Builds this rank's model chunks and loads their weights. Returns Megatron-core's config and the chunks,
        converted to the model's dtype."""
        role, fused = self.role, self.fused
        models.warn_of_slow_products(role.model, self.groups.control)
        config = models.transformer_config(self.arch, role.model, self.groups, deterministic=deterministic, fused=fused)
        triton = models.uses_triton(role.model, self.groups.control)
        cores = models.build(
            self.arch, config, temperature=self._temperature, fused=fused, attends=self.attends, triton=triton
        )
        for core in cores if role.loss.value_coef else ():
            core.add_value_head()
        self._fill(cores, seed)
        for core in cores if self.arch.experts else ():  # also without a loss: roles with adapters share the model
            load_balancing.install(core)
        chunks = [models.in_half(config, c) for c in cores] if config.bf16 else [*cores]
        if role.lora is not None:
            # Freeze after `in_half`, because `in_half` does not convert frozen parameters to bfloat16.
            lora.freeze(cores, kept=(VALUE_HEAD if role.head is None else OUTPUT,))
        return config, chunks

    def _fill(self, cores: list[models.PolicyModel], seed: int) -> None:
        """Sets the initial values of this rank's parameters. They are loaded from the Hugging Face weights; with
        `model.init = "random"`, the transformers library generates them from a seed. A head that the files do not have
        is drawn at random."""
        if self.role.model.init == "random":
            torch.manual_seed(seed)
            tensors_by_name = tensor_copies.by_expert(
                AutoModelForCausalLM.from_config(self.arch.config, dtype=torch.float32).state_dict(), self.arch
            )

            def read(rect: parameter_mapping.Rect) -> Tensor:
                return tensor_copies.from_tensor(tensors_by_name[rect.tensor], rect)
        else:
            hf_model.check(self.role.model.path, self.arch, cast=True)
            read, tensors_by_name = (tensors := hf_model.DirectoryTensors(self.role.model.path)).read, tensors.stored
        for name, parameter in models.named_parameters(cores):
            rects = [] if name == VALUE_HEAD else parameter_mapping.megatron(self.arch, name, self.groups.shard)[1]
            if not rects or (rects[0].tensor == SCORE and SCORE not in tensors_by_name):
                _fill_new_head(parameter, seed)
            else:
                tensor_copies.fill(parameter, rects, read)


def _fill_new_head(weight: Tensor, seed: int) -> None:
    """Initializes the weight [1, hidden] of a head that is missing in the model's files.

    The weight is drawn from a normal distribution with standard deviation 1 / (hidden + 1), as in OpenRLHF. The outputs
    are then close to 0, but the transformer receives gradients from the first step on, unlike with a weight of zeros.
    The values do not depend on the parallel layout.
    """
    drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        weight.copy_(drawn / (weight.shape[1] + 1))
