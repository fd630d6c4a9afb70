"""A tandem in a real, unpatched vLLM server: authors and their log-probs are true, also where requests are preempted,
and a refit reaches the senior alone.

Needs vLLM in an environment of its own: `make engines`, or another interpreter in MEGATRON_RL_VLLM_PYTHON.
"""

from __future__ import annotations

import os
from pathlib import Path

import conformance
import numpy as np
import pytest
from engines_worker import prompts
from ranks import ROOT, run_ranks
from tandem_worker import SEED, STRATEGIES, rule
from tiny_models import make_model
from toys import characters

from megatron_rl.algorithms.tandem_authors import boundaries, replay
from megatron_rl.engines import sampling_seeds
from megatron_rl.engines.protocol import Completion
from megatron_rl.types import Stop

PYTHON = Path(os.environ.get("MEGATRON_RL_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
VOCAB = 97
CONFIG = """
roles:
  generator:
    model: {{path: {base}/senior}}
    tandem: {{junior: {base}/junior}}
    layout: {{tp: 2}}
    optimizer: {{lr: 0.003}}
    micro_batch_tokens: 64
recipe: {{target: megatron_rl.recipes.tandem:Tandem}}
data: {{path: nowhere.jsonl}}
engine:
  {{kind: vllm, python: {python}, max_batch: 16, start_timeout_s: 1200,
    args: [--block-size, "32", --num-gpu-blocks-override, "20"]}}
run: {{dir: {base}, name: run}}
refit: {{timeout_s: 120, message_timeout_s: 20}}
"""
pytestmark = [
    pytest.mark.servers, pytest.mark.multi,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM: there is no {PYTHON}; `make engines` installs it"),
]  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tandem")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}  # of 32: vLLM's smallest on a CPU
    make_model(directory / "senior", vocab_size=VOCAB, eos_token_id=7, hidden_size=64, **heads)
    make_model(
        directory / "junior", vocab_size=VOCAB, eos_token_id=7, seed=1, hidden_size=64, num_hidden_layers=2, **heads
    )
    characters().save_pretrained(directory / "senior")
    (directory / "run").mkdir()
    (directory / "run/config.yaml").write_text(CONFIG.format(base=directory, python=PYTHON))
    return directory


@pytest.fixture(scope="module")
def found(base):
    script, config = Path(__file__).parents[1] / "helpers" / "tandem_worker.py", base / "run/config.yaml"
    return run_ranks(script, 2, base / "ranks", str(config))[0]


@pytest.fixture(scope="module")
def judges(base, found):
    """transformers on the senior's weights by version, and on the junior's."""
    for directory in (base / "ranks").glob("v*"):
        (directory / "config.json").write_text((base / "senior/config.json").read_text())
    seniors = {int(d.name[1:]): conformance.Judge(d, characters()) for d in sorted((base / "ranks").glob("v*"))}
    return seniors | {"junior": conformance.Judge(base / "junior", characters())}


def completions(rows):
    return [
        [Completion(**row | {"stop": Stop(row["stop"]), "versions": list(map(tuple, row["versions"]))}) for row in g]
        for g in rows
    ]


def replayed(strategy, place, sample, tokens):
    key = sampling_seeds.request_seed(SEED, place) + sample
    return replay(rule(strategy), boundaries(characters(), rule(strategy)), key, tokens).tolist()


def check(judges, version, prompt, completion, *, model_logprobs=False):
    """Each token has the log-prob that its author gives it."""
    senior, junior = judges[version].logprobs(prompt, completion), judges["junior"].logprobs(prompt, completion)
    wanted = np.where(completion.authors, senior, junior)
    assert (completion.model_logprobs if model_logprobs else completion.logprobs) == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_token_has_its_authors_log_prob_after_a_refit_of_the_senior_alone(found, judges, strategy, version):
    """One prompt has 300 tokens, which the prefix cache knows of both models."""
    for place, (prompt, group) in enumerate(
        zip(prompts(VOCAB), completions(found[f"{strategy}_v{version}"]), strict=True)
    ):
        for j, c in enumerate(group):
            check(judges, version, prompt, c)
            assert c.authors.tolist() == replayed(strategy, place, j, c.tokens.tolist())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_replay_is_what_the_server_did(found, strategy):
    """The server's own record, of every token that another one followed."""
    records = found[f"records_{strategy}_v0"]
    groups = completions(found[f"{strategy}_v0"])
    assert len(records) == sum(map(len, groups))
    for place, group in enumerate(groups):
        for j, c in enumerate(group):
            kept = records[str(sampling_seeds.request_seed(SEED, place) + j)]
            assert len(c.tokens) - len(kept) in (0, 1) and kept == c.authors[: len(kept)].tolist()


@pytest.mark.parametrize("version", [0, 1])
def test_greedy_texts_are_their_authors_likeliest_tokens(found, judges, version):
    for prompt, group in zip(prompts(VOCAB), completions(found[f"greedy_v{version}"]), strict=True):
        assert len(group) == 3
        for c in group:
            check(judges, version, prompt, c, model_logprobs=True)
    assert any(
        len({tuple(c.tokens.tolist()) for c in group}) > 1 for group in completions(found[f"greedy_v{version}"])
    ), "authors differ by sample"


@pytest.mark.parametrize("version", [0, 1])
def test_without_a_tandem_the_server_answers_as_the_senior_alone(found, judges, version):
    for prompt, [c] in zip(prompts(VOCAB), completions(found[f"alone_v{version}"]), strict=True):
        judges[version].check_greedy(prompt, c)
        assert c.authors is None


def test_requests_that_were_preempted_keep_their_authors(found, judges):
    groups = completions(found["crowded"])
    assert found["preemptions"] > 0
    for place, (prompt, group) in enumerate(zip(prompts(VOCAB) * 3, groups, strict=True)):
        for j, c in enumerate(group[:3]):
            check(judges, 0, prompt, c)
            assert c.authors.tolist() == replayed("word", place, j, c.tokens.tolist())


def test_a_text_that_a_refit_cut_goes_on_with_the_same_authors(found, judges):
    mixed = 0
    for place, (prompt, group) in enumerate(zip(prompts(VOCAB)[:3] * 4, completions(found["during"]), strict=True)):
        for j, c in enumerate(group):
            assert c.authors.tolist() == replayed("word", place, j, c.tokens.tolist())
            mixed += len(c.versions) > 1
            ends = [start for start, _ in c.versions[1:]] + [len(c.tokens)]
            junior = judges["junior"].logprobs(prompt, c)
            for (start, version), end in zip(c.versions, ends, strict=True):
                senior = judges[version].logprobs(prompt, c)
                wanted = np.where(c.authors, senior, junior)
                assert c.logprobs[start:end] == pytest.approx(wanted[start:end], abs=1e-4)
    assert mixed
