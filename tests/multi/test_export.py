"""Exports of trained models: in shards, by a stream, with little memory on any rank, and whole or not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors import safe_open
from tiny_models import make_model
from transformers import AutoModelForCausalLM

from megatron_rl.config.schema import ConfigError
from megatron_rl.run.file_checksums import wrong_of
from megatron_rl.weights import hf_model, safetensors_headers

WORKER = Path(__file__).parents[1] / "helpers/export_worker.py"
LARGE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 60, "vocab_size": 500}
SHARD = 6 << 20  # of the large model: it makes some forty of them
SMALL = 20_000


def case(folder, model, *, layout, dtype="float32", shard_bytes=SMALL):
    target = str(folder / f"{model}_{'_'.join(layout)}")
    return {
        "model": str(folder / model), "target": target, "layout": layout, "dtype": dtype, "shard_bytes": shard_bytes
    }  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    make_model(folder / "large", "qwen2", **LARGE)
    make_model(folder / "tied", "qwen2", vocab_size=97, tie_word_embeddings=True)
    make_model(folder / "experts", "qwen3_moe", vocab_size=97)
    make_model(folder / "stacked", "gpt_oss", vocab_size=97)
    (folder / "tied/chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture(scope="module")
def answers(folder):
    cases = {
        "tied": case(folder, "tied", layout={"pp": 2}, dtype="bfloat16"),
        "experts": case(folder, "experts", layout={"ep": 2}),
        "stacked": case(folder, "stacked", layout={"ep": 2}),
        "tp": case(folder, "large", layout={"tp": 2}, shard_bytes=SHARD),
        "pp": case(folder, "large", layout={"pp": 2}, shard_bytes=SHARD),
        "again": case(folder, "tied", layout={"pp": 2}, dtype="bfloat16", shard_bytes=1 << 30),
    }
    return run_ranks(WORKER, 2, folder / "ranks", json.dumps(cases), "0")


@pytest.mark.multi
@pytest.mark.parametrize("layout", ["tp", "pp"])
def test_an_export_of_forty_shards_takes_the_memory_of_two_on_any_rank(folder, answers, layout):
    """Rank 0 held the whole model, and wrote it as one file."""
    files = list((folder / f"large_{layout}").glob("model-*.safetensors"))
    assert len(files) >= 40 and max(file.stat().st_size for file in files) <= SHARD + 10_000
    assert [answer[layout]["peak"] < 2 * SHARD for answer in answers] == [True, True], answers


@pytest.mark.multi
@pytest.mark.parametrize("name", ["tp", "pp", "experts", "stacked"])
def test_an_export_holds_the_weights_of_the_policy_and_loads(folder, answers, name):
    for answer in answers:
        assert answer[name]["same"] and answer[name]["names"]
    target = folder / (f"large_{name}" if name in ("tp", "pp") else f"{name}_ep")
    assert not wrong_of(target)
    hf_model.check(target, hf_model.read_architecture(target))
    assert (target / safetensors_headers.INDEX).is_file()
    if name == "stacked":  # transformers finds the tensors under its own names
        models = [AutoModelForCausalLM.from_pretrained(place).state_dict() for place in (target, folder / name)]
        assert all(torch.equal(models[0][key], tensor) for key, tensor in models[1].items())


@pytest.mark.multi
def test_an_export_replaces_an_older_one_with_dtype_and_side_files(folder, answers):
    """The older one had an index and several files; the embedding is written once."""
    target = folder / "tied_pp"
    assert [path.name for path in folder.glob("tied_pp*")] == ["tied_pp"] and answers[0]["again"]["same"]
    assert {path.name for path in target.iterdir()} == {
        "SHA256SUMS", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors"
    }  # fmt: skip
    with safe_open(target / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 (no mapping)
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    AutoModelForCausalLM.from_pretrained(target)


@pytest.mark.multi
def test_an_export_that_is_killed_leaves_no_directory_that_loads(folder, tmp_path):
    cases = {"tied": case(folder, "tied", layout={"tp": 2}) | {"target": str(tmp_path / "model")}}
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run_ranks(WORKER, 2, tmp_path / "killed", json.dumps(cases), "20")
    partial = tmp_path / ".model.partial"
    assert not (tmp_path / "model").exists() and [*partial.glob("*.safetensors")]
    with pytest.raises((ConfigError, FileNotFoundError)):
        safetensors_headers.read_directory(partial)
    with pytest.raises((OSError, ValueError)):
        AutoModelForCausalLM.from_pretrained(partial)
    run_ranks(WORKER, 2, tmp_path / "again", json.dumps(cases), "0")
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert not partial.exists()
