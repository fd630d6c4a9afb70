"""Tests conversion of checkpoints against the trainer's own export and transformers; damaged ones are refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, environment, program, tango_settings
from limits import RUN_S
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_rl.config.schema import ConfigError
from megatron_rl.conversion import convert
from megatron_rl.conversion.weight_source import find
from megatron_rl.report.pages import write_report

pytestmark = [pytest.mark.multi, pytest.mark.slow]


@pytest.fixture(scope="module")
def run(last_letter, tmp_path_factory):
    """A finished Tango run: the generator over two tensor ranks (59 words padded to 60), the verifier over stages."""
    out = tmp_path_factory.mktemp("convert")
    program(
        "train", *tango_settings(last_letter, out, "run"), "roles.generator.layout.tp=2", "roles.verifier.layout.pp=3",
        "launch.nproc=6", "recipe.args.generator_updates=1", "recipe.args.warmup_updates=1", "evaluation.sets=[]",
    )  # fmt: skip
    return out / "run"


def tool(name, *arguments, status=0):
    command = [sys.executable, str(ROOT / "tools" / name), *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def to_hf(*arguments, status=0):
    done = program("convert", "to-hf", *map(str, arguments), check=False)
    assert done.returncode == status and "Traceback" not in done.stderr, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_weights_of_a_run_went_to_its_engines_along_a_plan(run):
    lines = [json.loads(line) for line in (run / "refits.jsonl").read_text().splitlines()]
    assert {(line["role"], line["version"]) for line in lines} >= {
        ("generator", 0),
        ("generator", 1),
        ("verifier", 0),
        ("verifier", 1),
    }
    assert all(line["refit/failed_engines"] == 0 and line["refit/checked_slices"] > 0 for line in lines)
    assert all(
        line["refit/gigabytes"] > 0 and line["refit/local_gigabytes"] > 0 and line["refit/floor_seconds"] > 0
        for line in lines
    )
    assert "Refits" in write_report(run).read_text()


def test_weights_of_a_converted_checkpoint_are_the_trained_model_bit_for_bit(run, tmp_path):
    for role in ("generator", "verifier"):
        target = tmp_path / role
        text = to_hf(run, target, "--role", role, "--verify", "--shard-gb", "0.0001")
        assert "verified bit for bit; logits differ from those of transformers by" in text
        exported = load_file(run / "models" / role / "model.safetensors")
        index = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
        found = {name: load_file(target / file)[name] for name, file in index.items()}
        assert len(set(index.values())) > 2 and found.keys() == exported.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in exported.items())
        ours, theirs = (AutoModelForCausalLM.from_pretrained(d) for d in (target, run / "models" / role))
        tokens = torch.arange(12)[None]
        assert torch.equal(ours(tokens).logits, theirs(tokens).logits)
    said = tool("compare_checkpoints.py", run, run / "models/generator", "--role", "generator")
    assert said.splitlines() == ["39 of 39 tensors are equal to the last bit"]
    said = tool("compare_checkpoints.py", run / "models/generator", run / "models/verifier", status=1)
    assert "0 of 39 tensors are equal" in said and "tensors that differ" in said
    text = tool("inspect_checkpoint.py", run, "--role", "verifier")
    assert "decoder.layers.self_attention.linear_qkv.weight" in text and "iteration_000002" in text


def test_weights_are_cast_to_a_dtype_that_is_written_into_the_config(run, tmp_path):
    convert.to_hf(find(run, role="generator"), tmp_path / "half", dtype=torch.bfloat16, verify=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert model.dtype == torch.bfloat16
    wanted = load_file(run / "models/generator/model.safetensors")
    assert all(torch.equal(t, wanted[n].bfloat16()) for n, t in load_file(tmp_path / "half/model.safetensors").items())


def test_weights_that_cannot_be_converted_are_refused_and_nothing_is_left(run, tmp_path):
    assert "name one by --role" in to_hf(run, tmp_path / "x", status=2)
    assert "no directory" in to_hf(tmp_path / "none", tmp_path / "x", status=2)
    (tmp_path / "there").mkdir()
    assert "exists" in to_hf(run, tmp_path / "there", "--role", "generator", status=2)
    newest = find(run, role="generator").path
    copy = tmp_path / "cut" / "generator"
    shutil.copytree(newest, copy)
    pieces = sorted(copy.glob("*.distcp"))
    pieces[0].write_bytes(pieces[0].read_bytes()[:-100])
    with pytest.raises(ConfigError, match="it was cut"):
        find(copy)
    pieces[0].unlink()
    with pytest.raises(ConfigError, match="is missing, which its .metadata lists"):
        find(copy)
    (copy / ".metadata").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="not a distributed checkpoint that can be read"):
        find(copy)
    other = tmp_path / "other"
    shutil.copytree(run / "models/generator", other)
    config = json.loads((other / "config.json").read_text())
    for change, says in (
        ({"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}, "holds no parameter decoder.layers.3"),
        ({"intermediate_size": 96}, "is the checkpoint another model"),
    ):
        (other / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ConfigError, match=says):
            convert.to_hf(find(newest, model=other), tmp_path / "x")
        assert not [p for p in tmp_path.iterdir() if p.name.startswith((".x", "x"))]
