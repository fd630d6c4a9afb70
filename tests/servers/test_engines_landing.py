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
import gc
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


told = {}
for staging in ("off", "host", "device"):
    model = landing = found = None
    gc.collect()
    model = torch.nn.ModuleDict({"plain": Layer(UnquantizedLinearMethod(), 16), "experts": Layer(object(), 1024)})
    before = allocated_bytes()
    landing = VllmLanding(model, None, torch.device("cuda:0"), staging)
    found = landing.parameters
    told[staging] = {
        "more": allocated_bytes() - before,
        "devices": {name: tensor.device.type for name, tensor in found.items()},
        "pinned": [is_pinned(tensor) for tensor in found.values() if tensor.device.type == "cpu"],
        "in_place": found["plain.weight"].data_ptr() == model["plain"].weight.data_ptr(),
    }
    del model["experts"]
    landing._staged.clear()  # vLLM's reload needs a model that vLLM has loaded
    found["plain.weight"].fill_(2.0)
    before = float(model["plain"].weight.detach().sum())
    landing.commit_refit(1)
    told[staging]["sums"] = [before, float(model["plain"].weight.detach().sum())]
print(json.dumps(told))
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
    assert found["off"] == {
        "more": 0, "devices": {"plain.weight": "cuda", "experts.weight": "cpu"}, "pinned": [True], "in_place": True,
        "sums": [256.0, 256.0],
    }  # fmt: skip
    beside = {"in_place": False, "sums": [128.0, 256.0]}
    devices = dict.fromkeys(("plain.weight", "experts.weight"), "cpu")
    assert found["host"] == {"more": 0, "devices": devices, "pinned": [True, True], **beside}
    more = 4 * (16 + 1024) * 8
    assert found["device"] == {"more": more, "devices": dict.fromkeys(devices, "cuda"), "pinned": [], **beside}
