"""Names, shapes and dtypes of the parameters of a real vLLM model with 8-bit weights. Only vLLM's choice of a kernel is
replaced, because its 8-bit kernels for CPUs need AMX.

Needs vLLM in an environment of its own: `make engines`, or another interpreter in MEGATRON_RL_VLLM_PYTHON.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import pytest
import torch
from limits import RUN_S
from ranks import ROOT
from tiny_models import make_model

from megatron_rl.models import registry
from megatron_rl.models.sizes import Sizes
from megatron_rl.weights.counting import staging_bytes
from megatron_rl.weights.quantisation import SCALES, config_of, quantised_shapes
from megatron_rl.weights.rank_layouts import EngineLayout, differences, engine_parameters

PYTHON = Path(os.environ.get("MEGATRON_RL_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
SCRIPT = """
import json, sys, tempfile
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.kernels.linear.scaled_mm import cpu
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.model_executor.model_loader.utils import initialize_model
from megatron_rl.engines.vllm.worker import _layers

cpu.CPUFp8BlockScaledMMKernel.is_supported = classmethod(lambda cls, *more: (True, None))
cpu_moe.CPUExpertsFp8._supports_current_device = staticmethod(lambda: True)
torch.set_default_dtype(torch.bfloat16)
found = []
for path, about in json.loads(sys.argv[1]):
    config = EngineArgs(
        model=path, dtype="bfloat16", hf_overrides={"quantization_config": about}, load_format="dummy",
        enforce_eager=True, max_model_len=64, skip_tokenizer_init=True,
    ).create_engine_config()
    with set_current_vllm_config(config):
        if not found:
            init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/ranks", 0, "gloo")
            initialize_model_parallel(1)
        model = initialize_model(vllm_config=config)
    own = {}  # without the second names of shared parameters
    for layer, prefix in _layers(model):
        for name, one in layer.named_parameters(recurse=False):
            if not isinstance(layer, AttentionLayerBase):
                own.setdefault(id(one), (prefix + name, [list(one.shape), str(one.dtype)]))
    found.append(dict(own.values()))
print(json.dumps(found))
"""

pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(not PYTHON.exists(), reason="no environment with vLLM: make engines"),
]


def check_parameters(sizes: Sizes, found: Mapping[str, tuple[Sequence[int], str]], form: str, scales: str) -> None:
    """Compares the parameters of an engine's model, {name: (shape, torch dtype)}, with those of the plan.

    `scales`: torch dtype in which the engine holds the scales of the format `form`.
    """
    wanted = engine_parameters(sizes, EngineLayout(quantization=form), 0)
    assert not [*differences({n: shape for n, (shape, _) in wanted.items()}, {n: s for n, (s, _) in found.items()})]
    for name, (_, rects) in wanted.items():
        kind = "float32" if name.endswith("e_score_correction_bias") else "bfloat16"
        kind = (
            scales if name.endswith(SCALES) else "float8_e4m3fn" if rects[0].tensor in quantised_shapes(sizes) else kind
        )
        assert found[name][1] == f"torch.{kind}", name


def test_parameters_of_a_real_vllm_model_are_those_of_the_plan_fp8(tmp_path):
    shared = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128}
    paths = (
        make_model(tmp_path / "moe", "qwen3_moe", num_attention_heads=4, head_dim=64, num_hidden_layers=1, **shared),
        make_model(
            tmp_path / "latent", "deepseek_v3", num_hidden_layers=2, q_lora_rank=128, kv_lora_rank=96,
            topk_method="noaux_tc", **shared,
        ),
    )  # fmt: skip
    sizes = [registry.read(json.loads((path / "config.json").read_text())) for path in paths]
    given = [(str(path), config_of("fp8", own)) for path, own in zip(paths, sizes, strict=True)]
    done = subprocess.run(
        [PYTHON, "-c", SCRIPT, json.dumps(given)], capture_output=True, text=True, timeout=RUN_S, cwd=ROOT,
        env=os.environ | {
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "VLLM_HOST_IP": "127.0.0.1", "HF_HUB_OFFLINE": "1",
            "TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for own, found in zip(sizes, json.loads(done.stdout.splitlines()[-1]), strict=True):
        check_parameters(own, found, "fp8", "float32")
        # torch rounds pinned memory, in which servers receive new weights, up to powers of two
        sizes_of = {
            n: prod(shape) * getattr(torch, kind.removeprefix("torch.")).itemsize for n, (shape, kind) in found.items()
        }
        rounded = {n: 2 ** (size - 1).bit_length() for n, size in sizes_of.items()}
        layout = EngineLayout(quantization="fp8")
        assert staging_bytes(own, layout, 2, experts_only=False) == sum(rounded.values())
        experts = sum(size for n, size in rounded.items() if ".experts." in n)
        assert 0 < staging_bytes(own, layout, 2, experts_only=True) == experts
