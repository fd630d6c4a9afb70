"""Attention of packed rows by torch's flash attention for variable lengths, with the functions of several torches."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.attention.varlen as torchs
import torch.nn.functional as F

from megatron_rl.config.schema import ConfigError, Model
from megatron_rl.megatron import model as models
from megatron_rl.megatron.kernels import varlen

HEADS, GROUPS, SIZE = 4, 2, 8
CPU = torch.device("cpu")


def attended(query, key, value, ends, window_size, scale):
    """Attends by torch's plain operation, sequence after sequence: queries stand at the end of their keys."""
    out = []
    for a, b, c, d in zip(ends[0], ends[0][1:], ends[1], ends[1][1:], strict=False):
        q, k, v = (x.transpose(0, 1) for x in (query[a:b], key[c:d], value[c:d]))
        back = torch.arange(d - c - (b - a), d - c)[:, None] - torch.arange(d - c)
        seen = (back >= -window_size[1]) & ((back <= window_size[0]) | (window_size[0] < 0))
        out.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True))
    return torch.cat(out, dim=1).transpose(0, 1)


def of_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    """Has the arguments of torch 2.10."""
    raise AssertionError("it has no windows, and is not called")


def of_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)):
    """Has the arguments of torch 2.11, and takes grouped heads as they come."""
    return attended(query, key, value, (cu_seq_q.tolist(), cu_seq_k.tolist()), window_size, scale)


def of_2_12(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
    enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    """Has the arguments of torch 2.12 and 2.13, and refuses grouped heads of which it is not told."""
    if not enable_gqa and query.size(1) != key.size(1):
        raise ValueError("Expect query and key/value to have the same number of heads")
    return attended(query, key, value, (cu_seq_q.tolist(), cu_seq_k.tolist()), window_size, scale)


@pytest.fixture
def ampere(monkeypatch):
    """Makes torch see a GPU of compute capability 8.0."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))


@pytest.mark.parametrize("function", [of_2_11, of_2_12, torchs.varlen_attn])
def test_torch_2_11_has_attention_for_variable_lengths(monkeypatch, ampere, function):
    """Its function lacks `enable_gqa`, and was refused for that."""
    monkeypatch.setattr(torchs, "varlen_attn", function)
    assert varlen.obstacle(128, "bfloat16") is None


def test_torch_2_10_has_none_with_windows(monkeypatch, ampere):
    monkeypatch.setattr(torchs, "varlen_attn", of_2_10)
    assert str(varlen.obstacle(128, "bfloat16")).endswith(
        "no varlen_attn with window_size, which comes with torch 2.11"
    )


@pytest.mark.parametrize("groups", [HEADS, GROUPS])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("function", [of_2_11, of_2_12])
def test_each_torch_is_told_of_grouped_heads_as_it_wants(monkeypatch, function, window, groups):
    monkeypatch.setattr(torchs, "varlen_attn", function)
    draw = torch.Generator().manual_seed(0)
    counts = (5, 1, 7)
    query, key, value = (torch.randn(sum(counts), heads, SIZE, generator=draw) for heads in (HEADS, groups, groups))
    found = varlen.attend(query, key, value[..., :6], varlen.segments(counts, None, CPU), scale=0.3, window=window)
    wanted = []
    for q, k, v in zip(*(x.split(counts) for x in (query, key, value[..., :6])), strict=True):
        k, v = (x.repeat_interleave(HEADS // groups, dim=1) for x in (k, v))
        back = torch.arange(len(q))[:, None] - torch.arange(len(q))
        seen = (back >= 0) & (back < (window or len(q)))
        scores = (0.3 * torch.einsum("qhd,khd->hqk", q, k)).masked_fill(~seen, -torch.inf)
        wanted.append(torch.einsum("hqk,khv->qhv", scores.softmax(-1), v).flatten(1))
    assert torch.allclose(found, torch.cat(wanted), atol=1e-6)


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("dtype", "warns"), [("bfloat16", True), ("float32", False)])
def test_a_gpu_that_goes_without_it_is_warned_of_in_bfloat16(monkeypatch, ampere, alone, caplog, dtype, warns):
    """Somebody measured the slow form without knowing. In float32 no torch has another."""
    monkeypatch.setattr(torchs, "varlen_attn", of_2_10)
    arch: Any = SimpleNamespace(head_dim=128, features=SimpleNamespace(sinks=False))
    with caplog.at_level(logging.WARNING):
        assert not models.uses_flash(arch, Model(path="x", dtype=dtype), None)
    assert ("which comes with torch 2.11" in caplog.text) == warns
    with pytest.raises(ConfigError, match="set it to auto or sdpa"):
        models.uses_flash(arch, Model(path="x", dtype=dtype, attention_backend="flash"), None)


@pytest.mark.parametrize("settings", [{"attention_backend": "sdpa"}, {}])
def test_nobody_is_warned_who_asked_for_sdpa_or_has_no_gpu(caplog, settings, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arch: Any = SimpleNamespace(head_dim=128, features=SimpleNamespace(sinks=False))
    assert not models.uses_flash(arch, Model(path="x", dtype="bfloat16", **settings), None)
    assert not caplog.text
