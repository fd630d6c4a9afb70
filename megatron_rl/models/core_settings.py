"""Computes the Megatron-core settings that follow from a model's sizes and features, as plain values.

The settings have the names of the fields of Megatron-core's TransformerConfig. A setting whose value is a function is
given by the function's name, which megatron/model.py replaces by the function.
"""

from __future__ import annotations

from typing import Any

from megatron_rl.config.schema import ConfigError
from megatron_rl.models.sizes import Features, Sizes

ROTARY = ("default", "llama3")  # kinds of rotary embedding that Megatron-core computes


def architecture(sizes: Sizes, features: Features) -> dict[str, Any]:
    """Returns Megatron-core's settings for the shapes and the arithmetic of a model's layers, as a dict. The activation
    is given by name."""
    return dict(
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden,
        num_attention_heads=sizes.heads,
        num_query_groups=sizes.kv_heads,
        kv_channels=sizes.head_dim,
        ffn_hidden_size=sizes.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=features.norm_eps,
        # False for norms over all heads jointly: core would wrongly sum the gradients of these norms over ranks
        qk_layernorm=features.qk_norm,
        gated_linear_unit=True,
        activation_func=features.activation,
        add_bias_linear=features.bias,
        add_qkv_bias=features.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        layernorm_zero_centered_gamma=features.norm_from_one,
        softmax_scale=features.softmax_scale,
        **_latent(sizes),
    )


def _latent(sizes: Sizes) -> dict[str, Any]:
    """Returns Megatron-core's settings of multi-head latent attention, or an empty dict if the model has another kind
    of attention.

    Megatron-core's rotary embedding is not used. The project's layers rotate queries and keys, and scale the scores.
    """
    if not sizes.kv_rank:
        return {}
    return dict(
        multi_latent_attention=True,
        kv_lora_rank=sizes.kv_rank,
        q_lora_rank=sizes.q_rank or None,
        qk_head_dim=sizes.head_dim - sizes.rope_dim,
        qk_pos_emb_head_dim=sizes.rope_dim,
        v_head_dim=sizes.value_dim,
        rope_type="rope",
    )


def needs_own_layers(sizes: Sizes, features: Features) -> bool:
    """Checks whether a model needs this project's layers because Megatron-core's layers do not support its
    architecture.

    Megatron-core's layers do not support norms at other positions than before attention and feed-forward, norms over
    all heads together, several kinds of attention in one model, or rotary embeddings whose kind is not in `ROTARY`.
    Megatron-core's latent attention with Transformer Engine is not used either, for two reasons. Without sequence
    parallelism, it does not sum the gradient of the shared key over tensor-parallel ranks. And it has no separate
    epsilon for the norms of the latents.
    """
    moved = features.norms_after or not features.norms_before
    unsupported_rotary = any(kind.rotary.kind not in ROTARY for kind in features.kinds)
    return moved or features.qk_norm_joint or len(features.kinds) > 1 or unsupported_rotary or bool(sizes.kv_rank)


def routed(sizes: Sizes, features: Features) -> dict[str, Any]:
    """Returns Megatron-core's settings of the experts and their router, or an empty dict for a dense model.

    No token is dropped. Megatron-core's load-balancing losses are off, because they count padding and depend on how
    sequences are split into micro-batches; see megatron/load_balancing.py.

    For model families that renormalise softmax scores, Megatron-core is set to choose the experts first and then
    compute a softmax over the chosen experts only. The result is the same: the softmax does not change which scores are
    the k largest, and a softmax over all experts, divided by its sum over the chosen experts, is a softmax over the
    chosen experts.

    Expert groups and expert biases are not passed to Megatron-core. megatron/router_replay.py limits the choice to
    groups instead, because core always scores a group by the sum of its k / groups_chosen best experts. A bias is not
    passed, because core's load balancing would change the bias.

    Raises ConfigError if a router could not learn, because it chooses one expert per token with renormalised scores.
    """
    routing = features.routing
    if routing is None:
        return {}
    if routing.renormalised and routing.chosen == 1:
        raise ConfigError(
            f"num_experts_per_tok = 1 with renormalised probabilities ({sizes.family}): the router's only probability "
            "is always 1 and it gets no gradient; Megatron-core refuses it"
        )
    shared = (
        dict(moe_shared_expert_intermediate_size=sizes.shared_ffn, moe_shared_expert_gate=routing.shared_gate)
        if sizes.shared_ffn
        else {}
    )
    return dict(
        num_moe_experts=sizes.experts,
        moe_ffn_hidden_size=sizes.expert_ffn,
        moe_router_topk=routing.chosen,
        moe_router_pre_softmax=routing.scores == "softmax" and not routing.renormalised,
        moe_router_score_function=routing.scores,
        moe_router_topk_scaling_factor=None if routing.scale == 1.0 else routing.scale,
        # If layers differ, Megatron-core must write checkpoints layer by layer, which it does if this is a list.
        moe_layer_freq=[int(sizes.is_sparse(n)) for n in range(sizes.num_layers)] if sizes.dense_layers else 1,
        moe_router_dtype="fp32",  # dtype of the router's logits and probabilities, also in a bfloat16 model
        moe_router_load_balancing_type="none",
        **shared,
    )


def rotary(features: Features) -> dict[str, Any]:
    """Returns Megatron-core's settings of the rotary embedding, for a model that Megatron-core's own layers can
    compute."""
    rotary_kind = features.kinds[0].rotary
    return {
        "position_embedding_type": "rope",
        "rotary_base": int(rotary_kind.theta),
        "rope_scaling": rotary_kind.kind == "llama3",
        "rope_scaling_factor": rotary_kind.factor,
    }
