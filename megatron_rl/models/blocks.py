"""Builds the rows (parameter descriptions) that many families share: norms, attention, feed-forward, experts,
embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_rl.models.partitions import (
    ByColumns,
    ByRows,
    EngineHeads,
    EngineVocabulary,
    Partition,
    QueryGroups,
    Source,
    Vocabulary,
    Whole,
)
from megatron_rl.models.rows import EXPERT, OuterRows, Row
from megatron_rl.models.sizes import Sizes

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
OUTPUT = "output_layer.weight"  # Megatron name of the weight of the output layer or of the head that replaces it
VALUE_HEAD = "value_head.weight"  # Megatron name of the weight of a value head beside an output layer
SCORE, BIAS = "score.weight", "score.bias"  # names of a head's weight and bias in Hugging Face classifier files
PARTS = ("gate_proj", "up_proj", "down_proj")


def norm(name: str, tensor: str, width: int, *, fused: str | None = None) -> Row:
    """Returns the `Row` (description of a Megatron parameter) for a norm's weight [width]. The weight is replicated on
    every rank."""
    return single(name, tensor, (width, 1), Whole(), fused=fused)


def single(name: str, tensor: str, shape: tuple[int, int], partition: Partition, **more: Any) -> Row:
    """Returns the `Row` (description of a Megatron parameter) for a parameter that is made of one Hugging Face tensor
    [rows, columns]. In engines, the parameter has the name of this tensor."""
    return Row(**{"name": name, "sources": (Source(tensor, *shape),), "partition": partition, "engine": tensor, **more})


def joint_norm(part: str, width: int) -> Row:
    """Returns the `Row` (description of a Megatron parameter) for the weight [width] of a norm over all query heads, or
    over all key heads, jointly.

    `part`: "q" for the norm of queries, "k" for the norm of keys.

    The trainer's ranks shard the weight as they shard the heads. Every engine rank holds the whole weight, because
    engines gather the heads before the norm.
    """
    tensor = f"self_attn.{part}_norm.weight"
    return single(f"self_attention.{part}_layernorm.weight", tensor, (width, 1), ByRows(), engine_partition=Whole())


def attention(
    sizes: Sizes, *, bias: bool = False, head_norms: bool = False, joint_norms: bool = False, norm_before: bool = True
) -> list[Row]:
    """Returns the `Row`s (descriptions of Megatron parameters) of self-attention: the norm before attention,
    query/key/value as one parameter, and the output projection.

    `bias`: whether query, key and value have a bias.
    `head_norms`: whether queries and keys are normalised per head.
    `joint_norms`: whether queries and keys are normalised over all heads together.
    `norm_before`: whether there is a norm before attention.
    """
    h, d = sizes.hidden, sizes.head_dim
    heads = (sizes.heads, sizes.kv_heads, sizes.head_dim)

    def joined(kind: str, columns: int) -> Row:
        parts = (("q", sizes.heads), ("k", sizes.kv_heads), ("v", sizes.kv_heads))
        return Row(
            name=f"self_attention.linear_qkv.{kind}",
            sources=tuple(Source(f"self_attn.{part}_proj.{kind}", count * d, columns) for part, count in parts),
            partition=QueryGroups(*heads),
            engine=f"self_attn.qkv_proj.{kind}",
            engine_partition=EngineHeads(*heads),
        )

    first = "input_layernorm.weight"
    input_norm = norm(first, first, h, fused="self_attention.linear_qkv.layer_norm_weight")
    rows = [*([input_norm] if norm_before else []), joined("weight", h)]
    rows += [joined("bias", 1)] if bias else []
    if head_norms:
        rows += [norm(f"self_attention.{p}_layernorm.weight", f"self_attn.{p}_norm.weight", d) for p in ("q", "k")]
    if joint_norms:
        rows += [joint_norm("q", sizes.heads * d), joint_norm("k", sizes.kv_heads * d)]
    output_projection = "self_attn.o_proj.weight"
    return [*rows, single("self_attention.linear_proj.weight", output_projection, (h, sizes.heads * d), ByColumns())]


def latent_attention(sizes: Sizes) -> list[Row]:
    """Returns the `Row`s (descriptions of Megatron parameters) of multi-head latent attention: the norm before
    attention, the projections, and the norms of the latents.

    Every rank holds the whole down projections (to the latents). The up projections (from the latents) are sharded by
    heads. Engines join the two down projections into one parameter if queries have a latent too.
    """
    h, heads, down = sizes.hidden, sizes.heads, "kv_a_proj_with_mqa"

    def projection(
        part: str, tensor: str, shape: tuple[int, int], partition: Partition, engine: str | None = None
    ) -> Row:
        name, engine = f"self_attention.linear_{part}.weight", f"self_attn.{engine or tensor}.weight"
        return single(name, f"self_attn.{tensor}.weight", shape, partition, engine=engine)

    def latent_norm(part: str, width: int) -> Row:
        return norm(f"self_attention.{part}_layernorm.weight", f"self_attn.{part}_a_layernorm.weight", width)

    rows = [norm("input_layernorm.weight", "input_layernorm.weight", h)]
    if sizes.q_rank:
        down = "fused_qkv_a_proj"
        rows += [
            projection("q_down_proj", "q_a_proj", (sizes.q_rank, h), Whole(), down),
            latent_norm("q", sizes.q_rank),
            projection("q_up_proj", "q_b_proj", (heads * sizes.head_dim, sizes.q_rank), ByRows()),
        ]
    else:
        rows.append(projection("q_proj", "q_proj", (heads * sizes.head_dim, h), ByRows()))
    up_rows = heads * (sizes.head_dim - sizes.rope_dim + sizes.value_dim)
    return [
        *rows,
        projection("kv_down_proj", "kv_a_proj_with_mqa", (sizes.kv_rank + sizes.rope_dim, h), Whole(), down),
        latent_norm("kv", sizes.kv_rank),
        projection("kv_up_proj", "kv_b_proj", (up_rows, sizes.kv_rank), ByRows()),
        projection("proj", "o_proj", (h, heads * sizes.value_dim), ByColumns()),
    ]


def feed_forward(sizes: Sizes, *, norm_name: str = "post_attention_layernorm.weight") -> list[Row]:
    """Returns the `Row`s (descriptions of Megatron parameters) of a dense feed-forward layer and of the norm before it.
    `norm_name`: the name of the norm in Hugging Face."""
    fused = "mlp.linear_fc1.layer_norm_weight"
    return [
        norm("pre_mlp_layernorm.weight", norm_name, sizes.hidden, fused=fused),
        *gated("mlp", "mlp", sizes.ffn, sizes.hidden),
    ]


def gated(module: str, tensors: str, ffn: int, hidden: int) -> list[Row]:
    """Returns the `Row`s (descriptions of Megatron parameters) of a gated feed-forward module.

    `module`: the name of the module in Megatron.
    `tensors`: the prefix of the names of the module's Hugging Face tensors.
    """
    gate, up, down = (f"{tensors}.{part}.weight" for part in PARTS)
    return [
        Row(
            name=f"{module}.linear_fc1.weight",
            sources=(Source(gate, ffn, hidden), Source(up, ffn, hidden)),
            partition=ByRows(),
            engine=f"{tensors}.gate_up_proj.weight",
        ),
        single(f"{module}.linear_fc2.weight", down, (hidden, ffn), ByColumns()),
    ]


def experts(sizes: Sizes, *, module: str = "mlp", parts: Sequence[str] = PARTS) -> list[Row]:
    """Returns the `Row`s (descriptions of Megatron parameters) of the norm before a router, of the router, and of the
    experts.

    `module`: the name of the module that contains router and experts in Hugging Face files.
    `parts`: the names of an expert's gate, up and down projection in Hugging Face files.

    In memory, the transformers library stacks the experts in a module that is called `mlp` in every family.
    """
    h, count, width = sizes.hidden, sizes.experts, sizes.expert_ffn
    gate, up, down = (f"{module}.experts.{EXPERT}.{part}.weight" for part in parts)
    router = f"{module}.gate.weight"
    return [
        norm("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", h),
        single("mlp.router.weight", router, (count, h), Whole(), in_memory="mlp.gate.weight"),
        Row(
            name=f"mlp.experts.local_experts.{EXPERT}.linear_fc1.weight",
            fused=f"mlp.experts.linear_fc1.weight{EXPERT}",
            sources=(Source(gate, width, h), Source(up, width, h)),
            partition=ByRows(),
            engine=f"{module}.experts.w13_weight",
            in_memory="mlp.experts.gate_up_proj",
            experts=count,
        ),
        single(
            f"mlp.experts.local_experts.{EXPERT}.linear_fc2.weight",
            down,
            (h, width),
            ByColumns(),
            fused=f"mlp.experts.linear_fc2.weight{EXPERT}",
            engine=f"{module}.experts.w2_weight",
            in_memory="mlp.experts.down_proj",
            experts=count,
        ),
    ]


def expert_bias(sizes: Sizes, *, module: str = "mlp.gate") -> Row:
    """Returns the `Row` (description of a Megatron parameter) for the bias [experts] that a router adds to its scores
    when it chooses experts."""
    tensor = f"{module}.e_score_correction_bias"
    return single("mlp.router.expert_bias", tensor, (sizes.experts, 1), Whole(), float32=True)


def shared_expert(sizes: Sizes, *, module: str = "mlp.shared_expert", gate: bool = True) -> list[Row]:
    """Returns the `Row`s (descriptions of Megatron parameters) of a shared expert, which processes every token, and of
    the gate [1, hidden] that scales the output of the shared expert.

    `gate`: whether the shared expert has a gate.
    """
    rows = gated("mlp.shared_experts", module, sizes.shared_ffn, sizes.hidden)
    if not gate:
        return rows
    return [*rows, single("mlp.shared_experts.gate_weight", f"{module}_gate.weight", (1, sizes.hidden), Whole())]


def ends(sizes: Sizes) -> OuterRows:
    """Returns the `Row`s (descriptions of Megatron parameters) of the embedding, the final norm and the output
    layer."""
    shape, partitions = (sizes.vocab, sizes.hidden), (Vocabulary(), EngineVocabulary())
    embedding = single(
        "embedding.word_embeddings.weight", EMBEDDING, shape, partitions[0], engine_partition=partitions[1]
    )
    copied: dict[str, Any] = {"engine": None, "copy": True} if sizes.tied else {}
    tensor = EMBEDDING if sizes.tied else HEAD
    head = single(OUTPUT, tensor, shape, partitions[0], engine_partition=partitions[1], **copied)
    return OuterRows(first=(embedding,), last=(norm("decoder.final_layernorm.weight", NORM, sizes.hidden), head))


def head(sizes: Sizes) -> Row:
    """Returns the `Row` (description of a Megatron parameter) of a head: a weight [1, hidden], replicated on every rank
    of the last pipeline stage. Engines do not have this parameter."""
    return single(OUTPUT, SCORE, (sizes.outputs, sizes.hidden), Whole(), engine=None)
