"""Names, shapes and dtypes of the parameters of a real SGLang model with 8-bit weights, in the form in which weights
are loaded and which a refit restores. Kernels are stubbed: no weight is processed and no product computed.

Needs SGLang in an environment of its own: `make engines-sglang`, or another interpreter in MEGATRON_RL_SGLANG_PYTHON.
"""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from limits import RUN_S
from ranks import ROOT
from test_engines_sglang import PYTHON
from test_fp8_vllm import check_parameters
from tiny_models import make_model

from megatron_rl.cluster.host_address import free_port
from megatron_rl.models import registry
from megatron_rl.weights.quantisation import config_of

SCRIPT = """
import json, sys
import torch
from sglang.srt.plugins import load_plugins

load_plugins()
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import bootstrap
from sglang.srt.model_loader import loader
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from megatron_rl.engines.sglang.worker import SglangLanding

found = []
for path, kind, about in json.loads(sys.argv[1]):
    args = ServerArgs(
        model_path=path, device="cpu", dtype="bfloat16", quantization=kind, load_format="dummy",
        attention_backend="torch_native", sampling_backend="pytorch", disable_cuda_graph=True, skip_tokenizer_init=True,
        json_model_override_args=json.dumps({"quantization_config": about}),
    )
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    config, load = ModelConfig.from_server_args(args), LoadConfig(load_format="dummy")
    if not found:
        bootstrap.init_parallel_runtime(server_args=args, device="cpu", dist_port=int(sys.argv[2]))
    bootstrap.init_layer_runtime(model_config=config)
    torch.set_default_dtype(torch.bfloat16)
    model = loader._initialize_model(config, load, loader._get_quantization_config(config, load))
    found.append({n: [list(t.shape), str(t.dtype)] for n, t in SglangLanding(model, "host").parameters.items()})
print(json.dumps(found))
"""
# torch dtype in which SGLang holds the scales of each format
SCALES_OF = {"fp8": "float32", "mxfp8": "uint8"}
pytestmark = [
    pytest.mark.multi,
    pytest.mark.skipif(
        not PYTHON.exists(), reason=f"no SGLang: there is no {PYTHON}; `make engines-sglang` installs it"
    ),
]


def test_parameters_of_a_real_sglang_model_are_those_of_the_plan_fp8(tmp_path):
    shared = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 1}
    paths = (
        make_model(tmp_path / "dense", "qwen2", num_key_value_heads=2, **shared),
        make_model(tmp_path / "moe", "qwen3_moe", head_dim=64, moe_intermediate_size=128, **shared),
    )
    sizes = [registry.read(json.loads((path / "config.json").read_text())) for path in paths]
    given = [
        (str(path), form, config_of(form, own)) for form in SCALES_OF for path, own in zip(paths, sizes, strict=True)
    ]
    done = subprocess.run(
        [PYTHON, "-c", SCRIPT, json.dumps(given), str(free_port("127.0.0.1"))], capture_output=True, text=True,
        timeout=RUN_S, cwd=ROOT,
        env=os.environ | {
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    every = json.loads(done.stdout.splitlines()[-1])
    for (_, form, _), own, found in zip(given, sizes * 2, every, strict=True):
        check_parameters(own, found, form, SCALES_OF[form])
