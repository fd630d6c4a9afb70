"""Builds one rank's part of a Megatron model from the config of a Hugging Face model directory."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.batches.packed_batch import VALUE
from megatron_rl.config.schema import ConfigError, Layout, Model
from megatron_rl.megatron import platform, router_replay
from megatron_rl.megatron.attention import SDPAttention
from megatron_rl.megatron.joint_norm import set_joint_norms
from megatron_rl.megatron.kernels import choice, varlen
from megatron_rl.megatron.latent_attention import LatentAttention
from megatron_rl.megatron.parallel import Groups
from megatron_rl.megatron.torch_layers import ACTIVATIONS, Chosen, Head, NormedAddition, RMSNorm, choose
from megatron_rl.megatron.vocab_statistics import vocab_parallel_statistics
from megatron_rl.messages.world import all_gather
from megatron_rl.models import core_settings
from megatron_rl.models.partitions import padded_vocab
from megatron_rl.models.sizes import Routing
from megatron_rl.weights import parameter_mapping
from megatron_rl.weights.hf_model import Architecture

platform.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.extensions import transformer_engine  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.tensor_parallel import (  # noqa: E402
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.transformer_block import (  # noqa: E402
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig  # noqa: E402
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset  # noqa: E402

_log = logging.getLogger(__name__)


FULL_RECOMPUTE = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


class PolicyModel(Chosen, GPTModel):
    """Megatron-core's GPT model, whose last pipeline stage returns statistics of the next-token distributions at the
    labels, such as log-probs, instead of a loss. In a model with a head (one number per token in place of logits), the
    last stage returns the head's outputs at the positions before the labels."""

    temperature: float = 1.0
    true_vocab: int = 0
    # names of the statistics that the last stage returns, see batches/packed_batch.py
    statistic_names: tuple[str, ...] = ("logprobs",)
    # [n] for each label, the index of the hidden state that predicts the label, in the flattened hidden states [S * L]
    label_rows: Tensor | None = None
    # value head of a critic that shares this policy's model; None if no critic shares it, and before the last stage
    value_head: Head | None

    def add_value_head(self) -> None:
        """Adds a value head beside the output layer, if the chunk has the output layer."""
        if self.post_process:
            head = Head(self.config.hidden_size, self.config.params_dtype)
            self.value_head = head.to(next(self.parameters()).device)

    def _postprocess(
        self,
        hidden_states: Tensor,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: Tensor | None,
        *args: Any,
        **rest: Any,
    ) -> Tensor:
        """Returns the statistics of the n labels as a tensor [R, n] with one row per statistic (see
        vocab_parallel_statistics).

        `hidden_states` is [L, S, h]. `labels` is [n, 1], or [n, 1 + k] with the k candidates of each label after the
        label. The attribute `label_rows` has the index of each label's hidden state. Without labels, returns
        Megatron-core's logits [S, L, V/tp]. A model that has a head in place of the output layer returns the head's
        outputs instead.
        """
        if self.post_process and isinstance(self.output_layer, Head):
            return self._head_outputs(hidden_states, self.output_layer, labels)
        if labels is None or not self.post_process:
            return super()._postprocess(hidden_states, input_ids, position_ids, labels, *args, **rest)
        assert self.label_rows is not None
        hidden = hidden_states
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        chosen = hidden.transpose(0, 1).reshape(-1, hidden.shape[-1]).index_select(0, self.label_rows)
        if not self.config.sequence_parallel:
            # Megatron-core 0.16.1 all-reduces a copy of a non-contiguous gradient and discards it (mappings._reduce).
            # The gradient of `hidden` is not contiguous, so the tensor-parallel copy is applied to `chosen` instead.
            chosen = copy_to_tensor_model_parallel_region(chosen)
        if VALUE not in self.statistic_names:
            return self._vocab_statistics(chosen, labels, self.statistic_names)
        assert self.value_head is not None
        values = self.value_head.beside(chosen)
        others = tuple(name for name in self.statistic_names if name != VALUE)
        if not others:
            return values
        rows, at = self._vocab_statistics(chosen, labels, others), self.statistic_names.index(VALUE)
        return torch.cat([rows[:at], values, rows[at:]])

    def _vocab_statistics(self, chosen: Tensor, labels: Tensor, names: tuple[str, ...]) -> Tensor:
        """Returns the statistics `names` of the n labels as a tensor [R, n]. `chosen` [n, h]: the hidden states that
        predict the labels. `labels`: [n, 1] label ids, or [n, 1 + k] with k candidate ids after each label."""
        tied = self.share_embeddings_and_output_weights
        for wait in [] if self.output_layer is None else [*self.output_layer._forward_pre_hooks.values()]:
            # The output layer itself is not called, so its hooks are called here (see optimizer.gather_late).
            wait(self.output_layer, ())
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        assert weight is not None
        rank = parallel_state.get_tensor_model_parallel_rank()
        return vocab_parallel_statistics(
            chosen,
            weight,
            labels[:, 0],
            first_row=rank * weight.shape[0],
            vocab=self.true_vocab,
            temperature=self.temperature,
            group=parallel_state.get_tensor_model_parallel_group(),
            names=names,
            candidates=labels[:, 1:],
            triton=self.triton,
        )

    def _head_outputs(self, hidden: Tensor, head: Head, labels: Tensor | None) -> Tensor:
        """Returns the head's outputs [1, n] at the hidden states that precede the n labels. Without labels, returns the
        head's outputs [S, L, 1] at all hidden states [L, S, h].

        Every tensor-parallel rank computes the same outputs. Each rank therefore has the whole gradient with respect to
        the gathered hidden states, and keeps its own part of the gradient. Nothing is summed over the ranks.
        """
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        rows = hidden.transpose(0, 1)
        if labels is None:
            return head(rows)
        assert self.label_rows is not None and self.statistic_names == (VALUE,)
        return head(rows.reshape(-1, hidden.shape[-1]).index_select(0, self.label_rows)).T


def has_transformer_engine() -> bool:
    """Checks whether a GPU is present and Megatron-core was able to import Transformer Engine."""
    return torch.cuda.is_available() and transformer_engine.HAVE_TE


def uses_transformer_engine(arch: Architecture, dtype: str, *, adapted: bool = False) -> bool:
    """Checks whether a model uses Transformer Engine's layers. Otherwise the model uses the project's layers in torch
    operations (the torch layer spec).

    Even if Transformer Engine is available, the torch spec is used in three cases: in float32, because Transformer
    Engine has no float32 attention over packed sequences; for models for which Megatron-core has no Transformer Engine
    layers; and for `adapted` (LoRA) models, because adapters need the input of each linear module, and Transformer
    Engine computes the preceding norm inside the linear module.
    """
    torch_layers = adapted or dtype != "bfloat16" or core_settings.needs_own_layers(arch, arch.features)
    return has_transformer_engine() and not torch_layers


def uses_flash(arch: Architecture, model: Model, control: Any) -> bool:
    """Checks whether the project's torch layers compute the attention of packed sequences in one flash attention call.

    If flash attention is not available for packed bfloat16 rows on a GPU, the first rank of the gloo group `control`
    logs a warning. Raises ConfigError if the settings require flash attention and it is not available.
    """
    if model.attention_backend == "sdpa" or arch.features.sinks:
        return False
    problem = varlen.obstacle(arch.head_dim, model.dtype)
    if problem is not None and model.attention_backend == "flash":
        raise ConfigError(f"model.attention_backend = 'flash': {problem}; set it to auto or sdpa")
    slow = problem is not None and model.dtype == "bfloat16" and torch.cuda.is_available()
    if slow and dist.get_rank(control) == 0:
        _log.warning(
            "%s: packed rows attend by a call for each group of sequences of similar length, which is slower than one "
            "call of flash attention: %s",
            model.path,
            problem,
        )
    return problem is None


def uses_triton(model: Model, control: Any) -> bool:
    """Checks whether a model uses Triton kernels for log-probs and, in the project's torch layers, for gated
    activations and rotary embedding.

    Collective over `control`, a gloo group. Either all ranks use the kernels or no rank does, because the kernels split
    the work differently from torch's operations. Raises ConfigError if the settings require the kernels and some rank
    cannot run them.
    """
    if model.kernels == "torch" or (model.kernels == "auto" and not torch.cuda.is_available()):
        return False
    problems = all_gather(choice.obstacle(), control)
    rank, problem = next(((rank, text) for rank, text in enumerate(problems) if text is not None), (0, None))
    if problem is not None and model.kernels == "triton":
        raise ConfigError(f"model.kernels = 'triton': {problem} (rank {rank}); set it to auto or torch")
    if problem is not None and dist.get_rank(control) == 0:
        _log.warning(
            "%s: torch's operations are used in place of Triton kernels: %s (rank %d)", model.path, problem, rank
        )
    return problem is None


def uses_fused_sums(model: Model) -> bool:
    """Checks whether the linear layers of the project's torch layer spec add their weight gradients directly to the
    float32 gradient buffers."""
    return model.kernels != "torch" and torch.cuda.is_available()


def warn_of_slow_products(model: Model, control: Any) -> None:
    """Logs a warning, on the first rank of the gloo group `control`, if matrix products in `model.dtype` are far slower
    on this CPU than in float32."""
    if platform.multiplies_slowly(model.dtype) and dist.get_rank(control) == 0:
        _log.warning(
            "%s: this CPU multiplies matrices of %s tens of times more slowly than those of float32: better set "
            "model.dtype to float32",
            model.path,
            model.dtype,
        )


def check_fp8() -> None:
    """Raises ConfigError if this machine cannot compute 8-bit (fp8) matrix products, because a GPU that supports them
    or Transformer Engine is missing."""
    if not has_transformer_engine():
        raise ConfigError(
            "model.fp8 = true needs a GPU and Transformer Engine: install transformer-engine, or set it to false"
        )
    capability = torch.cuda.get_device_capability()
    if capability < (8, 9):
        name = torch.cuda.get_device_name()
        raise ConfigError(
            f"model.fp8 = true on {name} (compute capability {capability}), which has no 8-bit products: "
            "set it to false"
        )


def transformer_config(
    arch: Architecture, model: Model, groups: Groups, *, deterministic: bool = False, fused: bool = False
) -> TransformerConfig:
    """Returns Megatron-core's config for a model architecture under the parallel layout of `groups`.

    `fused` selects Transformer Engine's layers. Raises ConfigError if fp8 is requested and not available.
    """
    dtype = getattr(torch, model.dtype)
    settings = core_settings.architecture(arch, arch.features)
    settings |= core_settings.routed(arch, arch.features)
    settings["activation_func"] = ACTIVATIONS[arch.features.activation][0]
    if model.fp8:
        check_fp8()
    selective = dict(recompute_granularity="selective", recompute_modules=[*model.recompute_modules])
    kind = MLATransformerConfig if "multi_latent_attention" in settings else TransformerConfig
    return kind(
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=model.dtype == "bfloat16",
        use_cpu_initialization=platform.is_active(),
        bias_activation_fusion=fused,
        # Despite the setting's name, True makes Megatron-core use the activation module of the layer spec.
        use_te_activation_func=not fused,
        # With False, Megatron-core's rotary embedding would copy the sequence lengths to the host in every layer.
        apply_rope_fusion=fused,
        attention_softmax_in_fp32=False,
        # Do not free a stage's output after sending it if gloo may still read the output (`overlap_p2p` on a CPU).
        deallocate_pipeline_outputs=not (platform.is_active() and groups.layout.overlap_p2p),
        deterministic_mode=deterministic,
        fp8="hybrid" if model.fp8 else None,
        moe_grouped_gemm=bool(arch.experts) and fused,
        **settings,
        **_parallelism(groups.layout),
        **{"full": FULL_RECOMPUTE, "selective": selective}.get(model.recompute, {}),
    )


def _parallelism(layout: Layout) -> dict[str, Any]:
    """Returns the fields of Megatron-core's config that split the model over ranks."""
    return dict(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
        sequence_parallel=layout.sequence_parallel,
        variable_seq_lengths=layout.pp > 1,
        moe_token_dispatcher_type="alltoall",  # Megatron-core's default rejects variable lengths, even for dense models
        overlap_p2p_comm=layout.overlap_p2p,
        batch_p2p_comm=not layout.overlap_p2p,
    )


def build(
    arch: Architecture,
    config: TransformerConfig,
    *,
    temperature: float = 1.0,
    fused: bool = False,
    attends: bool = True,
    triton: bool = False,
) -> list[PolicyModel]:
    """Returns this rank's model chunks: one chunk, or `vpp` chunks. Call it inside `groups.active()`.

    `fused`: whether to use Transformer Engine's layers in place of the project's torch layers.
    `attends`: whether to use SDPAttention in Transformer Engine's layers too. The torch layers always use it.
    `triton`: whether to use Triton kernels in the modules that have such kernels.
    """
    chunks = []
    for stage in range(config.virtual_pipeline_model_parallel_size or 1):
        virtual: dict[str, Any] = {"vp_stage": stage} if config.virtual_pipeline_model_parallel_size else {}
        chunk = PolicyModel(
            config=config,
            transformer_layer_spec=_layer_spec(arch, config, virtual, fused=fused, attends=attends),
            vocab_size=padded_vocab(arch.vocab, config.tensor_model_parallel_size),
            max_sequence_length=arch.config.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **virtual),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **virtual),
            share_embeddings_and_output_weights=arch.tied,
            # SDPAttention applies the rotary embedding itself
            **({"position_embedding_type": "none"} if attends else core_settings.rotary(arch.features)),
            **virtual,
        )
        if arch.head is not None and chunk.post_process:
            chunk.output_layer = Head(arch.hidden, config.params_dtype)  # type: ignore[assignment]
        chunk.temperature, chunk.true_vocab, chunk.value_head = temperature, arch.vocab, None
        if arch.features.qk_norm_joint:
            set_joint_norms(chunk.decoder.layers, arch)
        _mark_experts(chunk)
        _prepare_routers(chunk, arch.features.routing)
        choose(chunk, triton=triton)
        _scale_embedding(chunk, arch.features.embedding_scale)
        if torch.cuda.is_available():
            chunk.cuda(torch.cuda.current_device())
        chunks.append(chunk)
    return chunks


def in_half(config: TransformerConfig, chunk: PolicyModel) -> Float16Module:
    """Returns the model chunk with trainable parameters converted to bfloat16. Frozen parameters keep their dtype."""
    kept = {parameter: parameter.detach().clone() for parameter in chunk.parameters() if not parameter.requires_grad}
    wrapped = Float16Module(config, chunk)
    for parameter, value in kept.items():
        parameter.data = value
    return wrapped


def named_parameters(chunks: list[Any]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yields (name with global layer and expert indices, parameter) for this rank's model chunks. The chunks may be
    wrapped by Megatron's gradient-buffer and half-precision modules."""
    for chunk in chunks:
        core: Any = unwrap(chunk)
        layers = {f"decoder.layers.{i}.": layer for i, layer in enumerate(core.decoder.layers)}
        for name, parameter in core.named_parameters():
            prefix = ".".join(name.split(".")[:3]) + "."
            if prefix not in layers:
                yield name, parameter
                continue
            layer, rest = layers[prefix], name[len(prefix) :]
            if parameter_mapping.is_expert(name):
                rest = parameter_mapping.renumber_expert(rest, by=layer.mlp.local_expert_indices[0])
            yield f"decoder.layers.{layer.layer_number - 1}.{rest}", parameter


def unwrap(chunk: Any) -> PolicyModel:
    """Returns the PolicyModel inside Megatron's wrappers for gradient buffers and half precision."""
    while not isinstance(chunk, PolicyModel):
        chunk = chunk.module
    return chunk


def _mark_experts(chunk: PolicyModel) -> None:
    """Marks expert parameters so that Megatron-core sums their gradients over the ranks that hold the same experts, and
    gives the expert parameters a separate optimizer.

    Megatron-core 0.16 does this only with expert parallelism (ep > 1). At ep = 1 with etp != tp, it would silently sum
    over the wrong ranks, the replicas of the dense parameters (core 0.19 also checks etp). Without the mark, optimizer
    state in a checkpoint could in both versions not be moved between ep = 1 and ep > 1.
    """
    for name, parameter in chunk.named_parameters():
        if parameter_mapping.is_expert(name):
            parameter.allreduce = False  # type: ignore[attr-defined]
            # With True, core would sum the gradient of an expert's bias over the tensor-parallel ranks twice.
            parameter.sequence_parallel = False  # type: ignore[attr-defined]
            # With False, the gradient norm would include the bias of the first tensor-parallel rank only.
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    for name, module in chunk.named_modules():
        if name.endswith(".linear_fc2") and parameter_mapping.is_expert(name) and chunk.config.add_bias_linear:
            # Copy the output, because core adds the bias in place, which autograd refuses for an output that is a view.
            module.register_forward_hook(lambda _module, _inputs, output: (output[0].clone(), output[1]))


def _prepare_routers(chunk: PolicyModel, routing: Routing | None) -> None:
    """Adds the expert bias and group-limited routing to the routers of a model chunk, if the model has them.

    The bias is a frozen parameter, so that it is loaded, saved and sent to engines like all other parameters.
    Megatron-core itself would register a buffer.
    """
    for _, router in router_replay.routers(chunk):
        assert routing is not None, "a model whose layers have experts has routers"
        if routing.biased:
            zeros = torch.zeros(router.num_experts, dtype=torch.float32)
            router.expert_bias = torch.nn.Parameter(zeros, requires_grad=False)
    if routing is not None and routing.groups > 1:
        router_replay.limit(chunk, routing)


def _scale_embedding(chunk: PolicyModel, scale: float) -> None:
    """Makes the first pipeline stage multiply token embeddings by `scale`, which is rounded to the dtype of the
    model."""
    if scale == 1.0 or not chunk.pre_process:
        return
    rounded = float(torch.tensor(scale, dtype=chunk.config.params_dtype))

    def scaled(_module: Any, _tokens: Any, embedded: Tensor) -> Tensor:
        return embedded * rounded

    chunk.embedding.register_forward_hook(scaled)


def _layer_spec(
    arch: Architecture, config: TransformerConfig, virtual: dict[str, int], *, fused: bool, attends: bool
) -> Any:
    """Returns the layer spec: Megatron-core's Transformer Engine spec if `fused`, otherwise the project's torch
    spec."""
    if fused:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=arch.experts or None, moe_grouped_gemm=bool(arch.experts), qk_layernorm=arch.features.qk_norm
        )
        if attends:
            cast(Any, spec).submodules.self_attention.submodules.core_attention = ModuleSpec(
                module=SDPAttention, params={"features": arch.features}
            )
        return spec
    first, count = get_transformer_layer_offset(config, **virtual), get_num_layers_to_build(config, **virtual)
    sparse = [arch.is_sparse(number) for number in range(first, first + count)]
    specs = {experts: _torch_layer(arch, config, experts=experts) for experts in {*sparse}}
    norm = cast(Any, RMSNorm)  # Megatron-core accepts classes here, although its type hint does not include them
    return TransformerBlockSubmodules(layer_specs=[specs[experts] for experts in sparse], layer_norm=norm)


def _torch_layer(arch: Architecture, config: TransformerConfig, *, experts: bool) -> Any:
    """Returns the layer spec with the project's torch modules, for a layer with experts if `experts`, otherwise for a
    dense layer."""
    latent = bool(arch.kv_rank)
    spec = get_gpt_layer_local_spec(
        num_experts=arch.experts if experts else None,
        normalization="RMSNorm",
        qk_layernorm=arch.features.qk_norm,
        multi_latent_attention=latent,
    )
    layer = cast(Any, spec)  # Megatron-core's type hint for the spec's submodules is `object`
    names = dict(layer.submodules.sharded_state_dict_keys_map)
    # Checkpoints use the name that the norm before the MLP has in Transformer Engine's layers, where the norm is a
    # separate module in layers with experts, and a part of fc1 in dense layers.
    names.pop("pre_mlp_layernorm.", None)
    layer.submodules.sharded_state_dict_keys_map = (
        names if experts else names | {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
    )
    mlp = _submodules(layer.submodules.mlp)
    for part in (_submodules(mlp.experts), _submodules(mlp.shared_experts)) if experts else (mlp,):
        part.activation_func = ACTIVATIONS[arch.features.activation][1]
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = ModuleSpec(module=SDPAttention, params={"features": arch.features})
    if latent:
        layer.submodules.self_attention = ModuleSpec(
            module=LatentAttention, params={"features": arch.features}, submodules=attention
        )
    _set_norms(layer.submodules, arch, config)
    return layer


def _set_norms(parts: Any, arch: Architecture, config: TransformerConfig) -> None:
    """Sets the norm modules that a model's features require in `parts`, the submodules of a layer's spec."""
    features, attention = arch.features, parts.self_attention.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm if features.norms_before else IdentityOp
    if features.norms_after:
        addition = ModuleSpec(module=NormedAddition, params={"config": config})
        parts.self_attn_bda = parts.mlp_bda = addition
    if features.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm


def _submodules(spec: Any) -> Any:
    """Returns the submodules of a module spec. In Megatron-core 0.19 the spec is a `functools.partial`."""
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules
