"""Runs on two hosts that share nothing but a cable and a directory."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import two_hosts
from conftest import ROOT, environment, tango_settings
from limits import RUN_S
from test_engines_vllm import PYTHON
from tiny_models import make_model
from toys import EOS, characters

PROGRAM = [sys.executable, "-m", "megatron_rl.main"]
CUT = [f"roles.{role}.layout.tp=2" for role in ("generator", "verifier")]
pytestmark = [pytest.mark.multi, pytest.mark.slow]


@pytest.fixture
def hosts():
    if why := two_hosts.missing():
        pytest.skip(f"no network namespaces: {why}")

    def run(*words: str) -> None:
        command = [sys.executable, "tests/helpers/two_hosts.py", *words]
        started = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            _, said = started.communicate(timeout=RUN_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
        assert started.returncode == 0, said[-4000:]

    return run


def check(run: Path, *roles: str) -> None:
    """Weights crossed over, and engines and trainer agree on what those are."""
    refits = [json.loads(line) for line in (run / "refits.jsonl").read_text().splitlines()]
    assert {row["role"] for row in refits} == {*roles} and all(row["refit/gigabytes"] > 0 for row in refits)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    gaps = [value for row in rows for name, value in row["metrics"].items() if "gap" in name]
    assert gaps and max(gaps) < 1e-4


@pytest.mark.matrix  # make test-more ONLY=hosts
def test_embedded_engines_on_two_hosts_get_each_the_other_hosts_shards(hosts, last_letter, tmp_path):
    """The models are cut over the hosts; every engine is whole."""
    hosts(*PROGRAM, "train", *tango_settings(last_letter, tmp_path, "run"), *CUT)
    check(tmp_path / "run", "generator", "verifier")


def test_a_teacher_has_servers_on_both_hosts_and_its_answers_come_from_all(hosts, tmp_path):
    """Servers were started on the first rank's host alone."""
    model = make_model(tmp_path / "model", num_hidden_layers=1, vocab_size=97, eos_token_id=EOS)
    characters().save_pretrained(model)
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps({"question": f"q{i}"}) + "\n" for i in range(12)))
    (tmp_path / "t.txt").write_text("ask {question}\n")
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/helpers/fake_vllm.py "$@"\n')
    (tmp_path / "python").chmod(0o755)
    settings = [
        f"model.path={model}", f"data.path={tmp_path}/problems.jsonl", f"template={tmp_path}/t.txt",
        f"output={tmp_path}/pairs", "sampling.max_tokens=8", "keep_truncated=true", "validation_share=0",
        "engine.kind=vllm", f"engine.python={tmp_path}/python", "engine.replicas=4", "job.nodes=2",
    ]  # fmt: skip
    hosts(*PROGRAM, "generate", *settings)
    assert pq.read_table(tmp_path / "pairs/train.parquet").num_rows == 12
    places = set()
    for number in range(4):
        said = (tmp_path / f"pairs/logs/engine_model_{number}.log").read_text()
        places |= {(number, host) for host in ("10.9.0.1", "10.9.0.2") if host in said}
    assert places == {(0, "10.9.0.1"), (1, "10.9.0.1"), (2, "10.9.0.2"), (3, "10.9.0.2")}


@pytest.mark.servers
@pytest.mark.matrix  # make test-more ONLY=hosts
@pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM: there is no {PYTHON}; `make engines` installs it")
def test_servers_on_another_host_than_the_trainer_get_its_weights(hosts, last_letter, tmp_path):
    settings = [
        "examples/miniatures/last_letter/grpo.yaml", f"roles.generator.model.path={last_letter}/generator/model",
        f"data.path={last_letter}/task/train.jsonl",
        f"evaluation.sets=[{{path: {last_letter}/task/test.jsonl, settings: last_letter}}]",
        "evaluation.limit=32", "recipe.args.updates=2", "run.prompts_per_iteration=8", f"run.dir={tmp_path}",
        "run.name=run", CUT[0], "engine.kind=vllm", f"engine.python={PYTHON}", "engine.start=false",
    ]  # fmt: skip
    serve = [*PROGRAM, "serve", *settings, "engine.host=cable1", "--role=generator"]
    hosts(*PROGRAM, "train", *settings, "engine.host=cable0", "launch.nproc=2", two_hosts.AND, *serve)
    check(tmp_path / "run", "generator")
