"""Maps Hugging Face tensors, Megatron parameters and engine parameters to each other, as lists of rectangles.

A parameter as one rank holds it is a list of `Rect`s. Each says which rectangle of which Hugging Face tensor lies where
in the parameter. An import copies along them in one direction and an export in the other; a refit intersects the
rectangles of two layouts. 1-D tensors count as [n, 1]. Everything here is arithmetic on names and numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from megatron_rl.config.schema import ConfigError
from megatron_rl.weights.sizes import FAMILIES, Sizes

Shape = tuple[int, int]  # rows, columns


class Rect(NamedTuple):
    """A rectangle of a Hugging Face tensor, and the place of the same size that it has in a parameter.

    tensor[row : row + rows, column : column + columns] lies at parameter[at_row :, at_column :].
    """

    tensor: str
    row: int
    column: int
    rows: int
    columns: int
    at_row: int
    at_column: int

    @property
    def elements(self) -> int:
        """Returns the number of elements."""
        return self.rows * self.columns


class Shard(NamedTuple):
    """The part of every parameter that a rank holds: `rank` of `tp`, or of experts `expert_rank` of `expert_tp`."""

    tp: int = 1
    rank: int = 0
    expert_tp: int = 1
    expert_rank: int = 0


WHOLE = Shard()
_NORMS = {  # names of the local layer spec, and Transformer Engine's fused names
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
}
_HEAD_NORMS = {
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(?:linear_(fc[12])\.weight(\d+)|local_experts\.(\d+)\.linear_(fc[12])\.weight)")
_EXPERT_NUMBER = re.compile(r"(mlp\.experts\.(?:linear_fc[12]\.weight|local_experts\.))(\d+)")


def padded_vocab(vocab: int, tp: int, multiple: int = 1) -> int:
    """Returns the rows of the embedding, rounded up to a multiple of `multiple` * tp: ranks hold equal parts."""
    step = multiple * tp
    return -(-vocab // step) * step


def hf_shapes(sizes: Sizes) -> dict[str, Shape]:
    """Returns {tensor: (rows, columns)} of all tensors in the model's Hugging Face directory."""
    family, d, h = FAMILIES[sizes.family], sizes.head_dim, sizes.hidden
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (sizes.vocab, h), "model.norm.weight": (h, 1)}
    if not sizes.tied:
        shapes["lm_head.weight"] = (sizes.vocab, h)
    for layer in range(sizes.num_layers):
        prefix = f"model.layers.{layer}."
        for part, heads in (("q", sizes.heads), ("k", sizes.kv_heads), ("v", sizes.kv_heads)):
            shapes[f"{prefix}self_attn.{part}_proj.weight"] = (heads * d, h)
            if family.qkv_bias:
                shapes[f"{prefix}self_attn.{part}_proj.bias"] = (heads * d, 1)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (h, sizes.heads * d)
        if family.qk_norm:
            shapes |= {prefix + name: (d, 1) for name in _HEAD_NORMS.values()}
        shapes |= {prefix + name: (h, 1) for name in _NORMS.values()}
        if family.experts is None:
            shapes |= _mlp_shapes(f"{prefix}mlp.", ("gate_proj", "up_proj", "down_proj"), sizes.ffn, h)
            continue
        shapes[f"{prefix}{family.experts}.gate.weight"] = (sizes.experts, h)
        for expert in range(sizes.experts):
            shapes |= _mlp_shapes(f"{prefix}{family.experts}.experts.{expert}.", family.parts, sizes.expert_ffn, h)
        if family.shared is not None:
            shapes |= _mlp_shapes(
                f"{prefix}{family.shared}.", ("gate_proj", "up_proj", "down_proj"), sizes.shared_ffn, h
            )
            shapes[f"{prefix}{family.shared}_gate.weight"] = (1, h)
    return shapes


def _mlp_shapes(prefix: str, parts: Sequence[str], ffn: int, hidden: int) -> dict[str, Shape]:
    gate, up, down = (f"{prefix}{part}.weight" for part in parts)
    return {gate: (ffn, hidden), up: (ffn, hidden), down: (hidden, ffn)}


def is_sharded(name: str) -> bool:
    """Says whether tensor-parallel ranks hold different parts of this Megatron parameter.

    Otherwise each holds the whole.
    """
    return not (
        "layernorm" in name or name.endswith(("layer_norm_weight", "router.weight", "shared_experts.gate_weight"))
    )


def is_expert(name: str) -> bool:
    """Says whether this Megatron parameter belongs to one expert of a router.

    Expert-parallel ranks hold different parameters of this kind.
    """
    return ".mlp.experts." in name


def expert_number(name: str) -> int:
    """Returns the number of the expert that this Megatron parameter belongs to. Raises KeyError where there is none."""
    found = _EXPERT_NUMBER.search(name)
    if found is None:
        raise KeyError(f"the Megatron parameter {name!r} names no expert")
    return int(found[2])


def renumber_expert(name: str, *, by: int) -> str:
    """Returns the name of an expert's parameter with `by` added to its expert number.

    This turns a rank's own number into the global one.
    """
    return _EXPERT_NUMBER.sub(lambda found: found[1] + str(int(found[2]) + by), name)


def megatron(sizes: Sizes, name: str, shard: Shard = WHOLE, *, vocab_multiple: int = 1) -> tuple[Shape, list[Rect]]:
    """Returns (shape on this rank, rectangles) of a Megatron parameter, named with global layer and expert numbers.

    Elements that no rectangle covers are padding of the vocabulary. Raises KeyError for a name without a Hugging Face
    tensor.
    """
    h, tp, rank = sizes.hidden, shard.tp, shard.rank
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        tensor = "lm_head.weight" if name == "output_layer.weight" and not sizes.tied else "model.embed_tokens.weight"
        rows = padded_vocab(sizes.vocab, tp, vocab_multiple) // tp
        return (rows, h), stacked([(tensor, 0, sizes.vocab)], rank * rows, rows, h)
    if name == "decoder.final_layernorm.weight":
        return _whole("model.norm.weight", h, 1)
    match = _LAYER.fullmatch(name)
    if match is None:
        raise KeyError(f"no Hugging Face tensor is known for the Megatron parameter {name!r}")
    prefix, part = f"model.layers.{match[1]}.", match[2]
    if part in _NORMS:
        return _whole(prefix + _NORMS[part], h, 1)
    if part in _HEAD_NORMS and sizes.qk_norm:
        return _whole(prefix + _HEAD_NORMS[part], sizes.head_dim, 1)
    if part == "self_attention.linear_qkv.weight" or part == "self_attention.linear_qkv.bias" and sizes.qkv_bias:
        return _qkv(sizes, prefix, part.rpartition(".")[2], shard)
    if part == "self_attention.linear_proj.weight":
        return _columns(f"{prefix}self_attn.o_proj.weight", h, sizes.heads * sizes.head_dim, tp, rank)
    found = _mlp(sizes, prefix, part, shard)
    if found is None:
        raise KeyError(f"no Hugging Face tensor is known for the Megatron parameter {name!r} of a {sizes.family} model")
    return found


def _mlp(sizes: Sizes, prefix: str, part: str, shard: Shard) -> tuple[Shape, list[Rect]] | None:
    """Returns (shape, rectangles) of a feed-forward parameter, or None for a name that this family does not have."""
    family, h, tp, rank = FAMILIES[sizes.family], sizes.hidden, shard.tp, shard.rank
    dense = [f"{prefix}mlp.{p}_proj.weight" for p in ("gate", "up", "down")]
    if family.experts is None:
        return _fc(part.removeprefix("mlp.linear_"), dense, sizes.ffn, h, tp, rank)
    if part == "mlp.router.weight":
        return _whole(f"{prefix}{family.experts}.gate.weight", sizes.experts, h)
    if match := _EXPERT.fullmatch(part):
        fc, expert = (match[1], match[2]) if match[1] else (match[4], match[3])
        names = [f"{prefix}{family.experts}.experts.{expert}.{p}.weight" for p in family.parts]
        return _fc(f"{fc}.weight", names, sizes.expert_ffn, h, shard.expert_tp, shard.expert_rank)
    if family.shared is not None:
        if part == "mlp.shared_experts.gate_weight":
            return _whole(f"{prefix}{family.shared}_gate.weight", 1, h)
        names = [f"{prefix}{family.shared}.{p}_proj.weight" for p in ("gate", "up", "down")]
        return _fc(part.removeprefix("mlp.shared_experts.linear_"), names, sizes.shared_ffn, h, tp, rank)
    return None


def _fc(part: str, names: Sequence[str], ffn: int, hidden: int, tp: int, rank: int) -> tuple[Shape, list[Rect]] | None:
    """Returns (shape, rectangles) of a fully connected layer.

    fc1 is [gate of this rank; up of this rank], not a cut of their concatenation. fc2 is cut by columns.
    """
    own = ffn // tp
    if part == "fc1.weight":
        return (2 * own, hidden), [Rect(names[i], rank * own, 0, own, hidden, i * own, 0) for i in (0, 1)]
    return _columns(names[2], hidden, ffn, tp, rank) if part == "fc2.weight" else None


def _qkv(sizes: Sizes, prefix: str, kind: str, shard: Shard) -> tuple[Shape, list[Rect]]:
    """Returns (shape, rectangles) of the fused query, key and value.

    For each key/value head there stand its query heads, its key and its value, end to end. A rank holds one run of
    these rows, which may cut through such a group when there are fewer key/value heads than ranks.
    """
    d, per_group = sizes.head_dim, sizes.heads // sizes.kv_heads * sizes.head_dim
    rows, columns = (sizes.heads + 2 * sizes.kv_heads) * d // shard.tp, sizes.hidden if kind == "weight" else 1
    segments = []
    for group in range(sizes.kv_heads):
        segments.append((f"{prefix}self_attn.q_proj.{kind}", group * per_group, per_group))
        segments += [(f"{prefix}self_attn.{part}_proj.{kind}", group * d, d) for part in "kv"]
    return (rows, columns), stacked(segments, shard.rank * rows, rows, columns)


def stacked(segments: Iterable[tuple[str, int, int]], first: int, rows: int, columns: int) -> list[Rect]:
    """Returns the rectangles of rows [first, first + rows) of segments that are laid end to end.

    A segment is (tensor, its first row, its number of rows). Rows beyond the last segment are padding.
    """
    out, place = [], 0
    for tensor, row, count in segments:
        low, high = max(first, place), min(first + rows, place + count)
        if low < high:
            out.append(Rect(tensor, row + low - place, 0, high - low, columns, low - first, 0))
        place += count
    return out


def _whole(tensor: str, rows: int, columns: int) -> tuple[Shape, list[Rect]]:
    """Returns (shape, rectangles) of a parameter that is one whole tensor."""
    return (rows, columns), [Rect(tensor, 0, 0, rows, columns, 0, 0)]


def _columns(tensor: str, rows: int, columns: int, tp: int, rank: int) -> tuple[Shape, list[Rect]]:
    """Returns (shape, rectangles) of a parameter that is cut by columns."""
    own = columns // tp
    return (rows, own), [Rect(tensor, 0, rank * own, rows, own, 0, 0)]


def megatron_names(
    sizes: Sizes, layers: Iterable[int], experts: Iterable[int], *, first: bool, last: bool, fused: bool
) -> list[str]:
    """Returns the names of the parameters that a rank holds with these global `layers` and `experts`.

    `first` and `last` say whether it is the first or last pipeline stage. A tied model has a copy of the embedding as
    output layer on a last stage that is not the first. `fused`: names have Transformer Engine's spelling.
    """
    family, names = FAMILIES[sizes.family], []
    if first:
        names.append("embedding.word_embeddings.weight")
    chosen = list(experts)
    for layer in layers:
        p = f"decoder.layers.{layer}."
        names.append(p + ("self_attention.linear_qkv.layer_norm_weight" if fused else "input_layernorm.weight"))
        names.append(p + "self_attention.linear_qkv.weight")
        names += [p + "self_attention.linear_qkv.bias"] if family.qkv_bias else []
        names += [p + name for name in _HEAD_NORMS] if family.qk_norm else []
        names.append(p + "self_attention.linear_proj.weight")
        names.append(
            p + ("mlp.linear_fc1.layer_norm_weight" if fused and family.experts is None else "pre_mlp_layernorm.weight")
        )
        if family.experts is None:
            names += [p + "mlp.linear_fc1.weight", p + "mlp.linear_fc2.weight"]
            continue
        names.append(p + "mlp.router.weight")
        spelling = "mlp.experts.linear_{fc}.weight{e}" if fused else "mlp.experts.local_experts.{e}.linear_{fc}.weight"
        names += [p + spelling.format(fc=fc, e=e) for e in chosen for fc in ("fc1", "fc2")]
        if family.shared is not None:
            names += [p + f"mlp.shared_experts.{n}" for n in ("linear_fc1.weight", "linear_fc2.weight", "gate_weight")]
    if last:
        names.append("decoder.final_layernorm.weight")
        names += ["output_layer.weight"] if not (sizes.tied and first) else []
    return names


def engine(sizes: Sizes, tp: int, rank: int, *, expert_parallel: bool = False) -> dict[str, tuple[Shape, list[Rect]]]:
    """Returns {name: (shape, rectangles)} of rank `rank` of a vLLM or SGLang engine.

    q, k and v of the rank's heads are one parameter (key/value heads are repeated when there are fewer than ranks), and
    so are gate and up. Experts are stacked in [E_local, ...] parameters, whose leading two dimensions are joined here.
    With `expert_parallel` a rank holds a run of whole experts, otherwise a slice of every expert.

    The vocabulary is padded to 64; and to 64 per rank where the ranks do not divide that (SGLang's rule; vLLM does not
    start then).
    """
    family, h, d = FAMILIES[sizes.family], sizes.hidden, sizes.head_dim
    even = padded_vocab(sizes.vocab, 1, 64)
    vocab = (padded_vocab(sizes.vocab, tp, 64) if even % tp else even) // tp
    out = {
        "model.embed_tokens.weight": (
            (vocab, h),
            stacked([("model.embed_tokens.weight", 0, sizes.vocab)], rank * vocab, vocab, h),
        )
    }
    if not sizes.tied:
        out["lm_head.weight"] = ((vocab, h), stacked([("lm_head.weight", 0, sizes.vocab)], rank * vocab, vocab, h))
    out["model.norm.weight"] = _whole("model.norm.weight", h, 1)
    q_rows, kv_rows = sizes.heads // tp * d, max(1, sizes.kv_heads // tp) * d
    kv_first = rank * sizes.kv_heads // tp * d
    for layer in range(sizes.num_layers):
        prefix = f"model.layers.{layer}."
        for kind, columns in (("weight", h), ("bias", 1)) if family.qkv_bias else (("weight", h),):
            parts, place = [], 0
            for part, row, rows in (("q", rank * q_rows, q_rows), ("k", kv_first, kv_rows), ("v", kv_first, kv_rows)):
                parts.append(Rect(f"{prefix}self_attn.{part}_proj.{kind}", row, 0, rows, columns, place, 0))
                place += rows
            out[f"{prefix}self_attn.qkv_proj.{kind}"] = ((place, columns), parts)
        out[f"{prefix}self_attn.o_proj.weight"] = _columns(
            f"{prefix}self_attn.o_proj.weight", h, sizes.heads * d, tp, rank
        )
        for name in [*_NORMS.values()][::2]:
            out[prefix + name] = _whole(prefix + name, h, 1)
        if family.qk_norm:
            out |= {prefix + name: _whole(prefix + name, d, 1) for name in _HEAD_NORMS.values()}
        if family.experts is None:
            out |= _engine_mlp(f"{prefix}mlp.", sizes.ffn, h, tp, rank)
            continue
        out[f"{prefix}{family.experts}.gate.weight"] = _whole(f"{prefix}{family.experts}.gate.weight", sizes.experts, h)
        out |= _engine_experts(sizes, f"{prefix}{family.experts}.experts.", tp, rank, expert_parallel)
        if family.shared is not None:
            out |= _engine_mlp(f"{prefix}{family.shared}.", sizes.shared_ffn, h, tp, rank)
            out[f"{prefix}{family.shared}_gate.weight"] = _whole(f"{prefix}{family.shared}_gate.weight", 1, h)
    return out


def _engine_mlp(prefix: str, ffn: int, hidden: int, tp: int, rank: int) -> dict[str, tuple[Shape, list[Rect]]]:
    """Returns {name: (shape, rectangles)} of a feed-forward without experts on an engine rank."""
    own = ffn // tp
    halves = [
        Rect(f"{prefix}{part}_proj.weight", rank * own, 0, own, hidden, i * own, 0)
        for i, part in enumerate(("gate", "up"))
    ]
    return {
        f"{prefix}gate_up_proj.weight": ((2 * own, hidden), halves),
        f"{prefix}down_proj.weight": _columns(f"{prefix}down_proj.weight", hidden, ffn, tp, rank),
    }


def _engine_experts(
    sizes: Sizes, prefix: str, tp: int, rank: int, expert_parallel: bool
) -> dict[str, tuple[Shape, list[Rect]]]:
    """Returns {name: (shape, rectangles)} of the experts of a layer on an engine rank."""
    gate, up, down = FAMILIES[sizes.family].parts
    h, cut, cut_rank = sizes.hidden, (1, tp)[not expert_parallel], (0, rank)[not expert_parallel]
    own = sizes.expert_ffn // cut
    here = (
        range(rank * sizes.experts // tp, (rank + 1) * sizes.experts // tp) if expert_parallel else range(sizes.experts)
    )
    w13, w2 = [], []
    for place, e in enumerate(here):
        for i, part in enumerate((gate, up)):
            w13.append(Rect(f"{prefix}{e}.{part}.weight", cut_rank * own, 0, own, h, (2 * place + i) * own, 0))
        w2.append(Rect(f"{prefix}{e}.{down}.weight", 0, cut_rank * own, h, own, place * h, 0))
    return {f"{prefix}w13_weight": ((len(here) * 2 * own, h), w13), f"{prefix}w2_weight": ((len(here) * h, own), w2)}


def check_complete(names: Iterable[str], sizes: Sizes) -> None:
    """Raises ConfigError for tensors that have no place in the model: without them it would be another model."""
    known = {*hf_shapes(sizes), "lm_head.weight"}  # a tied model's file may hold the head too
    left = sorted(n for n in names if n not in known and not n.endswith("rotary_emb.inv_freq"))
    if left:
        raise ConfigError(
            f"{len(left)} tensors have no place in a {sizes.family} model, e.g. {', '.join(left[:5])}: "
            "is it another model?"
        )


def check_coverage(sizes: Sizes, rects: Iterable[Rect]) -> None:
    """Raises ValueError unless the rectangles of all ranks together hold every element of every tensor once.

    Equal rectangles are replicas and count as one. Others may not overlap.
    """
    by_tensor: dict[str, set[tuple[int, int, int, int]]] = {}
    for rect in rects:
        by_tensor.setdefault(rect.tensor, set()).add((rect.row, rect.column, rect.rows, rect.columns))
    shapes = hf_shapes(sizes)
    unknown, missing = sorted(by_tensor.keys() - shapes.keys()), sorted(shapes.keys() - by_tensor.keys())
    if unknown or missing:
        raise ValueError(f"the model has no tensors {unknown[:5]}; nobody holds the tensors {missing[:5]}")
    for tensor, boxes in by_tensor.items():
        rows, columns = shapes[tensor]
        if any(r < 0 or c < 0 or r + n > rows or c + m > columns for r, c, n, m in boxes):
            raise ValueError(f"{tensor} [{rows}, {columns}]: a rectangle lies outside of it")
        held = sum(n * m for _, _, n, m in boxes)
        if held != rows * columns or _any_overlap(boxes):
            raise ValueError(
                f"{tensor} [{rows}, {columns}]: its ranks hold {held} of {rows * columns} elements, or overlap"
            )


def _any_overlap(boxes: Iterable[tuple[int, int, int, int]]) -> bool:
    """Says whether two of the (row, column, rows, columns) boxes overlap."""
    ordered = sorted(boxes)
    for i, (row, column, rows, columns) in enumerate(ordered):
        for other_row, other_column, _, other_columns in ordered[i + 1 :]:
            if other_row >= row + rows:
                break
            if other_column < column + columns and column < other_column + other_columns:
                return True
    return False


def padding(shape: Shape, rects: Sequence[Rect]) -> int:
    """Returns the number of elements of a parameter that no rectangle covers."""
    return shape[0] * shape[1] - sum(rect.elements for rect in rects)


def by_tensor(parameters: Mapping[str, tuple[Shape, Sequence[Rect]]]) -> dict[str, list[tuple[str, Rect]]]:
    """Returns {tensor: [(parameter, rectangle)]} from {parameter: (shape, rectangles)}."""
    out: dict[str, list[tuple[str, Rect]]] = {}
    for name, (_, rects) in parameters.items():
        for rect in rects:
            out.setdefault(rect.tensor, []).append((name, rect))
    return out
