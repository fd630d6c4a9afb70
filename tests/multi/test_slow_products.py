"""A CPU without fast products of bfloat16 is named before a run spends hours on them."""

import logging
import platform as machine
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_rl.config.schema import Model
from megatron_rl.megatron import model as models
from megatron_rl.megatron import platform

CPUINFO = Path("/proc/cpuinfo")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="products of a GPU are fast in both")


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.skipif(not CPUINFO.exists() or machine.machine() != "x86_64", reason="reads the flags of x86 on Linux")
def test_bfloat16_is_slow_without_avx512():
    fast = torch.cpu._is_avx512_supported()  # no flag of the processor: `make PROCESSOR=avx2` hides AVX-512
    if "avx_ne_convert" in CPUINFO.read_text() and not fast:
        pytest.skip("releases of oneDNN differ in what they do on CPUs that convert bfloat16 and have no AVX-512")
    assert platform.multiplies_slowly("bfloat16") is not fast
    assert not platform.multiplies_slowly("float32")


def test_bfloat16_is_slow_where_torch_has_no_onednn(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert platform.multiplies_slowly("bfloat16") and not platform.multiplies_slowly("float32")


def test_a_model_in_bfloat16_is_warned_of_and_one_in_float32_is_not(alone, monkeypatch, caplog):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    with caplog.at_level(logging.WARNING):
        models.warn_of_slow_products(Model(path="m", dtype="float32"), alone)
        assert not caplog.text
        models.warn_of_slow_products(Model(path="m", dtype="bfloat16"), alone)
    assert "m: this CPU multiplies matrices of bfloat16" in caplog.text and "model.dtype to float32" in caplog.text


def test_nothing_is_said_where_products_are_fast(alone, monkeypatch, caplog):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    models.warn_of_slow_products(Model(path="m", dtype="bfloat16"), alone)
    assert not caplog.text
