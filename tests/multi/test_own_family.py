"""A model family in a package of a user's own (tests/helpers/own_family.py): planned, converted, and trained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT, environment, program
from cut_runs import config, role, write_data
from ranks import run_ranks
from safetensors.torch import load_file
from test_layouts import CP, SP, VPP, check
from tiny_models import make_model
from toys import characters

from megatron_rl.config.schema import Model, PromptSet, RoleConfig, Run, TrainConfig, Use
from megatron_rl.engines import user_families
from megatron_rl.engines.server_process import StartError
from megatron_rl.engines.vllm.settings import Vllm
from megatron_rl.run.metrics import read_metrics
from megatron_rl.session import server_connection
from megatron_rl.spec.resolve import engine_of

pytestmark = pytest.mark.multi
FAMILY = "own_family:FAMILY"
WORKER = Path(__file__).parents[1] / "helpers" / "own_family_worker.py"
CASES = {
    1: [{"name": "seed_oss", "layout": {}, "loss": "policy"}],
    2: [
        {"name": "seed_oss-tp2sp", "layout": SP},
        {"name": "seed_oss-pp2vpp2", "layout": VPP},
        {"name": "seed_oss-cp2", "layout": CP},
    ],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("own_family")
    no_dropout = {"attention_dropout": 0.0, "residual_dropout": 0.0}  # transformers' is on by default
    make_model(directory / "seed_oss", "seed_oss", vocab_size=97, head_dim=16, **no_dropout)
    characters().save_pretrained(directory / "seed_oss")
    (directory / "template.txt").write_text("{question}")
    write_data(directory, [])
    return directory


@pytest.fixture(scope="module")
def settings(base):
    """The file of a run of one update on two ranks."""
    roles = {"generator": role(base, model="seed_oss", layout={"tp": 2})}
    args = {"updates": 1, "group_size": 4, "template": f"{base}/template.txt"}
    own = config(base, "run", "megatron_rl.recipes.grpo:Grpo", roles, args=args)
    preflight = {"reward": False, "max_logprob_gap": 1e-5}
    file = base / "run.yaml"
    file.write_text(yaml.safe_dump(own | {"families": [FAMILY], "preflight": preflight}))
    return file


@pytest.fixture(scope="module")
def trained(settings, base):
    program("train", settings)
    return base / "runs/run"


@pytest.mark.parametrize(("world", "case"), [(world, case) for world, cases in CASES.items() for case in cases])
def test_its_actor_is_that_of_transformers(base, tmp_path, world, case):
    """Log-probs, every gradient, and the weights after an optimizer step."""
    words = str(base), json.dumps([case | {"model": "seed_oss"}])
    check(run_ranks(WORKER, world, tmp_path, *words), case["name"])


def test_an_update_reaches_its_engine_and_its_model(trained, base):
    """The preflight before training has compared the log-probs of trainer and embedded engine."""
    rows = [row.metrics for row in read_metrics(trained) if "grad_norm" in row.metrics]
    assert len(rows) == 1 and rows[0]["grad_norm"] > 0
    before, after = (load_file(d / "model.safetensors") for d in (base / "seed_oss", trained / "models/generator"))
    assert before.keys() == after.keys() and any(not torch.equal(before[name], after[name]) for name in before)
    assert json.loads((trained / "models/generator/config.json").read_text())["model_type"] == "seed_oss"
    versions = {json.loads(line)["version"] for line in (trained / "refits.jsonl").read_text().splitlines()}
    assert versions == {0, 1}


def test_its_checkpoint_is_converted_both_ways(trained, base, tmp_path):
    own = "--family", FAMILY
    text = program("convert", "to-hf", trained, tmp_path / "hf", "--verify", *own).stdout
    assert "verified bit for bit; logits differ from those of transformers by" in text
    program("convert", "to-megatron", tmp_path / "hf", tmp_path / "ck", "--verify", *own)
    program("convert", "reshard", tmp_path / "ck", tmp_path / "cut", "--tp", "2", "--model", tmp_path / "hf", *own)
    program("convert", "to-hf", tmp_path / "cut", tmp_path / "again", "--model", tmp_path / "hf", "--verify", *own)
    wanted = load_file(trained / "models/generator/model.safetensors")
    for made in ("hf", "again"):
        found = load_file(tmp_path / made / "model.safetensors")
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    tools = [["compare_checkpoints.py", trained, tmp_path / "hf"], ["plan_refit.py", "--model", base / "seed_oss"]]
    for name, *words in tools:
        words += ["--trainer", "tp2", "--engine", "tp2"] if name.startswith("plan") else []
        command = [sys.executable, str(ROOT / "tools" / name), *map(str, words), *own]
        done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_it_is_checked_and_planned(settings, base):
    assert "the config is valid" in program("check", settings).stdout
    for shape in ([], ["--shape", "generator=ByteDance-Seed/Seed-OSS-36B-Instruct"]):
        done = program("plan", settings, "--cluster", "1x8xH100-80", *shape, check=False)
        assert done.returncode in (0, 1) and not done.stderr, done.stderr


def test_without_its_name_it_is_refused_with_the_cure(settings, base, tmp_path):
    done = program("check", settings, "families=[]", check=False)
    assert done.returncode == 2 and "model_type 'seed_oss' is not supported" in done.stderr
    assert "families of your own that `families` names" in done.stderr
    done = program("convert", "to-megatron", base / "seed_oss", tmp_path / "ck", check=False)
    assert done.returncode == 2 and "--family" in done.stderr


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("nowhere:FAMILY", "families: plug-in 'nowhere:FAMILY': cannot import nowhere"),
        ("own_family:FAMILIES", "did you mean 'FAMILY'?"),
        ("own_family:NOTHING", "families: own_family:NOTHING is a int: name an instance of a subclass of"),
        ("own_family:SeedOss", "families: own_family:SeedOss is a type: name an instance"),
        ("own_family:TWIN", "the model_type 'qwen2', which the family in megatron_rl.models.qwen2 has already"),
    ],
)
def test_a_name_that_is_no_family_is_refused(settings, named, says):
    done = program("check", settings, f"families=[{named}]", check=False)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_server_knows_it_by_its_environment():
    """A server reads no config: the names come in its environment, and the sizes from the trainer."""
    code = """
import json, sys
from megatron_rl.engines import user_families
from megatron_rl.models.sizes import Sizes
from megatron_rl.weights.rank_layouts import EngineLayout, engine_parameters
sizes = Sizes(**json.loads(sys.argv[1]))
try:
    engine_parameters(sizes, EngineLayout(), 0)
except KeyError as error:
    print(error)
user_families.learn()
print(len(engine_parameters(sizes, EngineLayout(), 0)))
"""
    sizes = {"num_layers": 2, "hidden": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "ffn": 64, "vocab": 97}
    words = [sys.executable, "-c", code, json.dumps(sizes | {"family": "seed_oss", "tied": False})]
    told = environment() | user_families.variables([FAMILY])
    done = subprocess.run(words, cwd=ROOT, env=told, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["'seed_oss'", str(2 * 7 + 3)]


def test_serve_tells_its_server_the_name(base, tmp_path):
    """The server is a program that writes its environment."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec env > {tmp_path}/environment\n")
    python.chmod(0o755)
    roles = {"generator": RoleConfig(model=Model(path=str(base / "seed_oss")))}
    engine = Vllm(python=str(python))
    config = TrainConfig(
        roles=roles, recipe=Use(target="x:y"), data=PromptSet(path="x"), engine=engine, families=(FAMILY,),
        run=Run(dir=str(tmp_path)),
    )  # fmt: skip
    server = server_connection.HostServer(engine_of(config), engine, "generator", 0, {"PATH": os.environ["PATH"]})
    with pytest.raises(StartError, match="ended with status 0"), server.running():
        pass
    assert f"{user_families.VARIABLE}={FAMILY}\n" in (tmp_path / "environment").read_text()
