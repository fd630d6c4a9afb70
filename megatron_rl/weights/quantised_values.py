"""Quantises weights in blocks, and computes the weights from quantised values and scales.

With formats "fp8" and "mxfp8", values and scales equal those of transformers (FineGrainedFP8Config), NeMo-RL and verl.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_rl.weights.quantisation import Format

CHUNK = 1 << 22  # number of elements quantised at once, which limits the size of the temporary float32 tensors
TINY = 1e-35  # blocks whose largest magnitude is at most this become zeros, as their factor would overflow float32
FLOAT4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # the magnitudes of float4 (e2m1), indexed by code
# Bounds for rounding to the nearest code. A value exactly between two codes is rounded to the even code.
# If the higher of two codes is even, the bound is therefore the next number below the middle.
_MIDDLES = (FLOAT4[1:] + FLOAT4[:-1]) / 2
_BOUNDS = torch.where(torch.arange(7) % 2 == 0, _MIDDLES, torch.nextafter(_MIDDLES, torch.zeros(())))


def block_scales(weights: Tensor, form: Format) -> Tensor:
    """Returns the scales [block rows, block columns] of `weights` [rows, columns]. The first block begins at the first
    element."""
    return torch.cat([_factors(chunk, form)[1] for chunk in _chunks(weights, form)])


def quantise(weights: Tensor, form: Format) -> Tensor:
    """Returns the quantised values of `weights` [rows, columns] as uint8 [rows, columns / values in a byte]. The first
    block begins at the first element.
    """
    encoded = torch.empty((len(weights), -(-weights.shape[1] // form.packed)), dtype=torch.uint8, device=weights.device)
    row = 0
    for chunk in _chunks(weights, form):
        scaled = chunk * _factors(chunk, form)[0][:, None, :, None]
        scaled = scaled.clamp_(-form.largest, form.largest).flatten(2).flatten(0, 1)
        codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8) if form.bits == 8 else _to_float4(scaled)
        part = encoded[row : row + len(codes)]  # without the padding of the last blocks
        part.copy_(codes[: len(part), : encoded.shape[1]])
        row += len(part)
    return encoded


def dequantise(values: Tensor, scales: Tensor, form: Format, dtype: torch.dtype) -> Tensor:
    """Computes weights [rows, columns] from quantised values (uint8 or float8 [rows, bytes]) and the scales
    [block rows, block columns].
    """
    high, wide = form.block
    weights = torch.empty((len(values), values.shape[1] * form.packed), dtype=dtype, device=values.device)
    step = max(1, CHUNK // (high * max(1, weights.shape[1])))  # block rows
    for first in range(0, len(scales), step):
        part = values[first * high : (first + step) * high].contiguous().view(torch.uint8)
        numbers = part.view(torch.float8_e4m3fn).float() if form.bits == 8 else _from_float4(part)
        factor = scales[first : first + step].float() * form.second
        factor = factor.repeat_interleave(wide, 1)[:, : weights.shape[1]].repeat_interleave(high, 0)[: len(part)]
        weights[first * high : (first + step) * high] = numbers * factor
    return weights


def _chunks(weights: Tensor, form: Format) -> Iterator[Tensor]:
    """Yields `weights` in float32 chunks [block rows, rows of a block, block columns, columns of a block]. A chunk has
    one or more whole rows of blocks. Incomplete blocks are padded with zeros.
    """
    high, wide = form.block
    for part in weights.split(max(1, CHUNK // (high * max(1, weights.shape[1]))) * high):
        padded = pad(part.float(), (0, -part.shape[1] % wide, 0, -len(part) % high))
        yield padded.view(-1, high, padded.shape[1] // wide, wide)


def _factors(chunk: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    """Returns (factors, scales) of the blocks of a chunk, each [block rows, block columns]. Quantisation multiplies the
    weights of a block by the block's factor (float32). The scale, in the scale dtype of `form`, is stored to undo this.
    """
    largest = chunk.abs().amax((1, 3))
    factors = torch.where(largest > TINY, form.largest / largest, 1.0)
    inverse = factors.reciprocal()
    if form.scales == "float32":
        return factors, inverse
    if (
        form.scales == "float8_e8m0fnu"
    ):  # The scale is rounded up to a power of two, so that no quantised value exceeds the largest of the format.
        fraction, exponent = torch.frexp(inverse)
        power = torch.where(fraction == 0.5, exponent - 1, exponent).clamp(min=-126)
        inverse = torch.ldexp(torch.ones_like(inverse), power)
        return inverse.reciprocal(), inverse.to(torch.float8_e8m0fnu)
    scales = (inverse / form.second).clamp(2.0**-9, 448.0).to(torch.float8_e4m3fn)
    return (scales.float() * form.second).reciprocal(), scales


def _to_float4(values: Tensor) -> Tensor:
    """Returns `values` [rows, columns] rounded to float4 codes, two to a byte: uint8 [rows, columns / 2]."""
    codes = torch.bucketize(values.abs(), _BOUNDS.to(values.device)) + 8 * torch.signbit(values)
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)


def _from_float4(packed: Tensor) -> Tensor:
    """Returns the numbers of float4 codes, two to a byte: float32 [rows, 2 x bytes]."""
    table = torch.cat([FLOAT4, -FLOAT4]).to(packed.device)
    return torch.stack([table[(packed & 15).long()], table[(packed >> 4).long()]], -1).flatten(-2)
