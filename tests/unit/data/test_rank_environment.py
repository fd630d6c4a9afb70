"""What ranks find in their environment before torch is imported, however they are started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from megatron_rl.data.tiny import write_tiny_model

# Stands in torch's place: writes what the process knows when torch is imported, and ends it.
TORCH = """
import json, os
from pathlib import Path
at_start = dict(v.split("=", 1) for v in Path("/proc/self/environ").read_text().split("\\0") if "=" in v)
name = "CUDA_DEVICE_MAX_CONNECTIONS"
told = json.dumps([os.environ.get(name), at_start.get(name)])
Path(os.environ["TOLD"], os.environ.get("RANK", "launcher")).write_text(told)
os._exit(0)
"""
# Runs the command as on a host with NVIDIA's driver, where ranks that it starts begin anew.
WITH_DRIVER = """
import sys
from pathlib import Path
from megatron_rl.commands import ranks
from megatron_rl.main import main
if __name__ == "__main__":
    ranks.DRIVERS = (Path("/dev/null"),)
    sys.exit(main())
"""
LAUNCHED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/environ is Linux's")


def told(place: Path, program: list[str], nproc: int, **variables: str) -> dict[str, list[str | None]]:
    """Runs supervised training up to the import of torch. Returns what each process found, now and at its start."""
    for folder in ("packages/torch", "told"):
        (place / folder).mkdir(parents=True)
    write_tiny_model(place / "model")
    (place / "packages/torch/__init__.py").write_text(TORCH)
    (place / "pairs.jsonl").write_text(json.dumps({"prompt": "a", "response": "b"}))
    words = ["sft", f"model.path={place}/model", f"data.train={place}/pairs.jsonl", f"launch.nproc={nproc}"]
    own = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_MAX_CONNECTIONS"}
    own |= {"PYTHONPATH": f"{place}/packages:{ROOT}", "TOLD": str(place / "told"), **variables}
    done = subprocess.run([sys.executable, *program, *words], env=own, cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return {file.name: json.loads(file.read_text()) for file in (place / "told").iterdir()}


def test_cuda_has_its_order_of_messages_before_torch_is_imported(tmp_path):
    """It was set after the first question for a GPU, when CUDA had read it."""
    module = ["-m", "megatron_rl.main"]
    assert told(tmp_path / "alone", module, 1)["launcher"][0] == "1"
    assert told(tmp_path / "torchrun", module, 2, **LAUNCHED)["0"][0] == "1"
    script = tmp_path / "with_driver.py"
    script.write_text(WITH_DRIVER)
    assert told(tmp_path / "started", [str(script)], 2) == {"0": ["1", "1"], "1": ["1", "1"]}


def test_cudas_order_of_messages_is_the_users_where_it_is_given(tmp_path):
    found = told(tmp_path, ["-m", "megatron_rl.main"], 2, **LAUNCHED, CUDA_DEVICE_MAX_CONNECTIONS="8")
    assert found == {"0": ["8", "8"]}
