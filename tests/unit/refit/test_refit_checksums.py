"""Tests checksums of a refit: the sums that a GPU computes, and digests of the host."""

from __future__ import annotations

import pytest
import torch
import xxhash

from megatron_rl.refit.checksums import CHUNK, Place, checksums, place_for

CPU = torch.device("cpu")
MIX, WRAP = 0x9E3779B97F4A7C15, 1 << 64


def summed(values: list[int]) -> int:
    """The sum of docs and code, by Python's whole numbers: factors without a pattern, one chunk after the other."""
    total = 0
    for start in range(0, len(values), CHUNK):
        part = 0
        for place, value in enumerate(values[start : start + CHUNK], 1):
            mixed = place * MIX % WRAP
            signed = mixed - WRAP if mixed >> 63 else mixed
            part += value * ((signed ^ (signed >> 29)) | 1)
        total = (total * MIX + part) % WRAP
    return total - WRAP if total >> 63 else total


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_a_gpus_checksum_is_the_sum_of_weighted_elements(dtype):
    values = torch.randn(37, 5).to(dtype)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    [found] = checksums([values], dtype, "device", CPU).tolist()
    assert found == summed(values.view(whole).flatten().tolist())


def test_a_hosts_checksum_is_xxh3_of_the_bytes():
    values = torch.randn(6, 7)
    [found] = checksums([values[:, 2:5]], torch.float32, "host", CPU).tolist()
    assert found % WRAP == xxhash.xxh3_64_intdigest(values[:, 2:5].contiguous().numpy().tobytes())


@pytest.mark.parametrize("place", ["host", "device"])
def test_a_checksum_sees_one_wrong_value_an_exchange_and_a_shift(place: Place):
    size = CHUNK + 3  # the last elements stand in a chunk of their own
    values = torch.arange(size, dtype=torch.float32)
    wrong = []
    for at in (0, 1, CHUNK - 1, CHUNK, size - 1):
        for bit in (1, -(1 << 31)):
            other = values.clone()
            other.view(torch.int32)[at] ^= bit
            wrong.append(other)
    for one, two in ((0, 1), (5, CHUNK + 1), (CHUNK, CHUNK + 2)):
        other = values.clone()
        other[[one, two]] = other[[two, one]]
        wrong.append(other)
    wrong += [values.roll(1), values.flip(0), torch.cat([values[CHUNK:], values[:CHUNK]])]
    right, *found = checksums([values, *wrong], torch.float32, place, CPU).tolist()
    assert right not in found and len({*found}) == len(found)
    [again] = checksums([torch.stack([values, values], 1)[:, 0]], torch.float32, place, CPU).tolist()
    assert again == right  # its elements do not lie side by side


def test_values_count_in_the_dtype_that_travels():
    values = torch.randn(9)
    for place in ("host", "device"):
        one = checksums([values], torch.bfloat16, place, CPU)
        assert torch.equal(one, checksums([values.bfloat16().float()], torch.bfloat16, place, CPU))


def test_a_trainer_on_a_gpu_has_its_gpu_compute_them():
    assert (place_for(torch.device("cuda:1")), place_for(torch.device("cpu"))) == ("device", "host")
