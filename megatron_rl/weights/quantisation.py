"""Describes the quantised weights of engines: their formats, names, quantisation blocks and 2-D slices. No tensor data
is used here.

A Hugging Face tensor is quantised to two tensors: the quantised values, which keep the tensor's name, and the scales of
the blocks, whose name is the tensor's name + SCALES. A refit plan treats both tensors like any other parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from megatron_rl.config.base import refuse
from megatron_rl.models.partitions import Rect, Shape
from megatron_rl.models.registry import layer_rows
from megatron_rl.models.rows import EXPERT, HF_LAYER, Row
from megatron_rl.models.sizes import Sizes

# Suffix of the names of scales, as in DeepSeek's files. A weight is its quantised value times its scale.
SCALES = "_scale_inv"


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format of quantised weights: blocks of elements share one scale."""

    block: tuple[int, int]  # rows and columns of a block
    largest: float  # largest magnitude of a quantised value
    scales: str  # torch dtype of the scales
    bits: int = 8  # 8: float8_e4m3fn values. 4: float4 (e2m1) values, two per byte, the even column in the low bits
    # NVFP4 multiplies all scales of a tensor by a second scale, which usually depends on the tensor's largest value.
    # Here the second scale is a constant, so that a rank does not need the largest values of other ranks.
    # With nvfp4's constant, scales are normal float8_e4m3fn numbers if a block's maximum is between 0.0004 and 10.5.
    second: float = 1.0

    @property
    def packed(self) -> int:
        """Returns the number of values in a byte."""
        return 8 // self.bits

    @property
    def scale_bytes(self) -> int:
        return 4 if self.scales == "float32" else 1

    @property
    def limit(self) -> float:
        """Returns the largest magnitude of a weight that the format can represent. Larger weights are clipped."""
        return math.inf if self.scales != "float8_e4m3fn" else self.largest * 448.0 * self.second

    @property
    def bytes_per_element(self) -> float:
        """Returns the average number of bytes per weight, including the weight's share of the scale of its block."""
        return self.bits / 8 + self.scale_bytes / (self.block[0] * self.block[1])


# Formats by their value of engine.quantization: DeepSeek-V3's fp8, OCP's mxfp8, and NVIDIA's nvfp4.
FORMATS: Mapping[str, Format] = {
    "fp8": Format(block=(128, 128), largest=448.0, scales="float32"),
    "mxfp8": Format(block=(1, 32), largest=448.0, scales="float8_e8m0fnu"),
    "nvfp4": Format(block=(1, 16), largest=6.0, scales="float8_e4m3fn", bits=4, second=2.0**-8),
}

# OCP's mxfp4, the format of gpt-oss's files. Weights are read in this format, but never sent to engines in it.
MXFP4 = Format(block=(1, 32), largest=6.0, scales="float8_e8m0fnu", bits=4)


def is_quantised(row: Row) -> bool:
    """Checks whether a parameter is quantised in engines with quantised weights. The weights of linear layers are
    quantised. Embeddings, the output layer, norms, biases, routers and gates of shared experts keep the model's dtype.
    """
    return ".linear_" in row.name and row.sources[0].columns > 1


@lru_cache(maxsize=16)
def quantised_shapes(sizes: Sizes) -> Mapping[str, Shape]:
    """Returns {Hugging Face name: (rows, columns)} of the tensors that are quantised in engines."""
    return {
        HF_LAYER.format(layer) + source.name.replace(EXPERT, str(expert)): (source.rows, source.columns)
        for layer in range(sizes.num_layers)
        for row in layer_rows(sizes, layer)
        if is_quantised(row)
        for expert in range(row.experts or 1)
        for source in row.sources
    }


def left_out(sizes: Sizes) -> list[str]:
    """Returns the names of the linear layers that engines do not quantise (the output layer, routers and gates of
    shared experts), for an engine's `ignored_layers`.
    """
    return ["lm_head"] + [
        HF_LAYER.format(layer) + source.name.removesuffix(".weight")
        for layer in range(sizes.num_layers)
        for row in layer_rows(sizes, layer)
        if not is_quantised(row) and (row.name.startswith("mlp.router.") or row.name.endswith("gate_weight"))
        for source in row.sources
        if source.name.endswith(".weight")
    ]


def config_of(name: str, sizes: Sizes) -> dict[str, Any]:
    """Returns the `quantization_config` with which vLLM and SGLang hold a model's weights in the format `name`."""
    skipped = {"ignored_layers": left_out(sizes)}
    return {
        "quant_method": name,
        "activation_scheme": "dynamic",
        "weight_block_size": [*FORMATS[name].block],
        **skipped,
    }


def split(form: Format, rect: Rect) -> tuple[Rect, Rect]:
    """Converts a 2-D slice of an unquantised tensor to (2-D slice of the quantised values, 2-D slice of the scales).
    The given slice must consist of whole quantisation blocks (see `cut_blocks`).
    """
    (high, wide), packed = form.block, form.packed
    values = rect._replace(
        column=rect.column // packed, columns=-(-rect.columns // packed), at_column=rect.at_column // packed
    )
    return values, Rect(
        rect.tensor + SCALES, rect.row // high, rect.column // wide, -(-rect.rows // high), -(-rect.columns // wide),
        rect.at_row // high, rect.at_column // wide,
    )  # fmt: skip


def cut_blocks(form: Format, rect: Rect, shape: Shape) -> Iterator[str]:
    """Yields an error message for each dimension (rows, columns) in which the 2-D slice `rect` cuts through a
    quantisation block, so that ranks would share the block. `shape`: shape of the whole tensor.
    """
    parts = (
        ("rows", form.block[0], rect.row, rect.rows, rect.at_row, shape[0]),
        ("columns", form.block[1], rect.column, rect.columns, rect.at_column, shape[1]),
    )
    for what, block, first, count, at, end in parts:
        if first % block or at % block or ((first + count) % block and first + count != end):
            yield f"{rect.tensor}: {what} {first} to {first + count} (stored from {at}) divide blocks of {block} {what}"


def whole_tensors(rects: Iterable[Rect]) -> list[Rect]:
    """Joins a rank's 2-D slices of each Hugging Face tensor to one slice per tensor. Positions are given in the
    tensor's coordinates, independently of where the rank stores the slices.
    """
    slices_by_tensor: dict[str, list[Rect]] = {}
    for rect in rects:
        slices_by_tensor.setdefault(rect.tensor, []).append(rect)
    joined_slices = []
    for tensor, slices in slices_by_tensor.items():
        row, column = min(rect.row for rect in slices), min(rect.column for rect in slices)
        rows = max(rect.row + rect.rows for rect in slices) - row
        columns = max(rect.column + rect.columns for rect in slices) - column
        assert rows * columns == sum(rect.elements for rect in slices), f"{tensor} is not held in one piece: {slices}"
        joined_slices.append(Rect(tensor, row, column, rows, columns, row, column))
    return joined_slices


def sent(sizes: Sizes, form: Format, parameters: Sequence[tuple[str, Rect]]) -> list[tuple[str, Rect]]:
    """Returns the parameters of a trainer rank in the form in which a refit sends them. A quantised tensor is sent as
    values and scales, with the names and coordinates of Hugging Face tensors. Other parameters are unchanged. Raises
    ConfigError if the rank's part of a quantised tensor does not consist of whole quantisation blocks.
    """
    shapes = quantised_shapes(sizes)
    sent_parameters = [(name, rect) for name, rect in parameters if rect.tensor not in shapes]
    for rect in whole_tensors(rect for _, rect in parameters if rect.tensor in shapes):
        refuse(*cut_blocks(form, rect, shapes[rect.tensor]))
        sent_parameters += [(split_rect.tensor, split_rect) for split_rect in split(form, rect)]
    return sent_parameters


def held(
    sizes: Sizes, form: Format, parameters: Mapping[str, tuple[Shape, list[Rect]]]
) -> dict[str, tuple[Shape, list[Rect]]]:
    """Returns the parameters of an engine rank in the form in which a refit writes them. A quantised parameter becomes
    two parameters: the quantised values under the parameter's name, and their scales under name + SCALES. Other
    parameters are unchanged. `parameters` and the result are {name: (shape, 2-D slices of Hugging Face tensors)}.
    Raises ConfigError if the rank's part of a quantised tensor does not consist of whole quantisation blocks.
    """
    shapes, held_parameters = quantised_shapes(sizes), dict[str, tuple[Shape, list[Rect]]]()
    for name, (shape, rects) in parameters.items():
        if not rects or rects[0].tensor not in shapes:
            held_parameters[name] = shape, rects
            continue
        refuse(*(line for rect in rects for line in cut_blocks(form, rect, shapes[rect.tensor])))
        both = zip(*(split(form, rect) for rect in rects), strict=True)
        for suffix, split_rects in zip(("", SCALES), both, strict=True):
            ends = max(r.at_row + r.rows for r in split_rects), max(r.at_column + r.columns for r in split_rects)
            held_parameters[name + suffix] = ends, list(split_rects)
    return held_parameters
