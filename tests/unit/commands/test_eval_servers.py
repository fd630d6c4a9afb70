"""Evaluations by servers that they start or find. The servers are fakes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from fake_vllm import GENERATE, SAID, FakeVllm
from specs import spec_of
from tiny_models import make_model
from toys import EOS, characters

from megatron_rl.commands import evaluate
from megatron_rl.config import files as config_files
from megatron_rl.config.schema import ConfigError, EvalConfig
from megatron_rl.engines.server_process import StartError
from megatron_rl.session.launch_ranks import Place

ROOT = Path(__file__).parents[3]


@pytest.fixture
def fakes():
    made = [FakeVllm("secret") for _ in range(2)]
    yield made
    for fake in made:
        fake.close()


@pytest.fixture
def settings(tmp_path):
    model = make_model(tmp_path / "model", num_hidden_layers=1, vocab_size=97, eos_token_id=EOS)
    characters().save_pretrained(model)
    (tmp_path / "amc23.jsonl").write_text(
        "".join(json.dumps({"question": f"q{i}", "answer": i + 1}) + "\n" for i in range(3))
    )
    (tmp_path / "t.txt").write_text("{question}\n")
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/helpers/fake_vllm.py "$@"\n')
    (tmp_path / "python").chmod(0o755)
    return [
        f"model.path={model}", "sets=[amc23]", f"data_dir={tmp_path}", f"template={tmp_path}/t.txt",
        "sampling.max_tokens=8",
        f"output={tmp_path}/out/x.json", "engine.kind=vllm", "reward.workers=1", "reward.timeout_s=120",
    ]  # fmt: skip


def evaluated(tmp_path, *words):
    config = config_files.load(EvalConfig, [], words)
    assert evaluate.run(spec_of(config), Place(0, 1, 0, "127.0.0.1", 0), {"PATH": "/usr/bin:/bin"}) == 0
    return [json.loads(line)["response"] for line in (tmp_path / "out/x.jsonl").read_text().splitlines()]


def test_an_evaluation_starts_its_servers_and_ends_them(settings, tmp_path):
    responses = evaluated(tmp_path, *settings, f"engine.python={tmp_path}/python")
    assert len(responses) == 3 and all(responses)
    assert (tmp_path / "out/logs/engine_model_0.log").exists()


def test_an_evaluation_tells_why_its_server_did_not_start(settings, tmp_path, monkeypatch):
    config = config_files.load(EvalConfig, [], [*settings, f"engine.python={tmp_path}/python"])
    with pytest.raises(StartError, match=re.escape(SAID)):
        evaluate.run(spec_of(config), Place(0, 1, 0, "127.0.0.1", 0), {"PATH": "/usr/bin:/bin", "FAKE": "dies"})


def test_an_evaluation_finds_servers_that_run(settings, tmp_path, fakes):
    (tmp_path / "token").write_text("secret")
    words = [
        *settings,
        f"engine.urls={{model: ['{fakes[0].url}']}}",
        f"engine.token_file={tmp_path}/token",
        "engine.start=false",
    ]
    assert len(evaluated(tmp_path, *words)) == 3 and fakes[0].count(GENERATE) == 3
    with pytest.raises(ConfigError, match="engine.urls: generator, model: give servers for each of model"):
        evaluated(tmp_path, *settings, f"engine.urls={{generator: ['{fakes[0].url}']}}", "n=1", "seed=1")
