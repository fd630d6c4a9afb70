"""Where the weights of a refit land in a vLLM server on a GPU, on a pretended one in vLLM's own environment.

Needs vLLM in an environment of its own: `make engines`, or another interpreter in MEGATRON_RL_VLLM_PYTHON.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from limits import RUN_S
from ranks import ROOT

PYTHON = Path(os.environ.get("MEGATRON_RL_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
SCRIPT = """
import json

import emulated_cuda
emulated_cuda.install()

import torch
from emulated_device import allocated_bytes, is_pinned
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from megatron_rl.engines.vllm.worker import VllmLanding


class Layer(torch.nn.Module):
    def __init__(self, method, rows):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(rows, 8, device="cuda"))
        self.quant_method = method


model = torch.nn.ModuleDict({"plain": Layer(UnquantizedLinearMethod(), 16), "experts": Layer(object(), 1024)})
before = allocated_bytes()
landing = VllmLanding(model, None, torch.device("cuda:0"))
found = landing.parameters
print(json.dumps({
    "more": allocated_bytes() - before,
    "devices": {name: tensor.device.type for name, tensor in found.items()},
    "pinned": is_pinned(found["experts.weight"]),
    "in_place": found["plain.weight"].data_ptr() == model["plain"].weight.data_ptr(),
}))
"""

pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(not PYTHON.exists(), reason="no environment with vLLM: make engines"),
]


def test_the_experts_of_a_server_are_not_on_its_gpu_twice():
    """Those of a model with 30 billion parameters took 29 GB beside the memory that vLLM had taken for itself."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests/emulated")))
    done = subprocess.run(
        [PYTHON, "-c", SCRIPT], capture_output=True, text=True, timeout=RUN_S, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {
        "more": 0, "devices": {"plain.weight": "cuda", "experts.weight": "cpu"}, "pinned": True, "in_place": True
    }  # fmt: skip
