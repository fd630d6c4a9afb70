"""Real vLLM servers: they conform, take the weights of a tensor- and pipeline-parallel actor, and no rollout is lost
with one that dies.

Needs vLLM in an environment of its own: `make engines`, or another interpreter in MEGATRON_RL_VLLM_PYTHON.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import conformance
import conversations
import pytest
from engines_worker import LONG, prompts
from ranks import ROOT, run_ranks
from tiny_models import make_model
from toys import characters

from megatron_rl.engines.protocol import Completion
from megatron_rl.types import Stop

PYTHON = Path(os.environ.get("MEGATRON_RL_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
VOCAB = 97
ENDS = (0, 7)  # of the tokenizer and of the model's config
CONFIG = """
roles:
  generator:
    {{model: {{path: {base}/model}}, layout: {{tp: 2, pp: 2}}, optimizer: {{lr: 0.003}}, micro_batch_tokens: 64}}
recipe: {{target: megatron_rl.recipes.grpo:Grpo}}
data: {{path: nowhere.jsonl}}
engine: {{kind: vllm, python: {python}, replicas: 2, max_batch: 16}}
run: {{dir: {base}, name: run}}
refit: {{timeout_s: 120, message_timeout_s: 20}}
"""
pytestmark = [
    pytest.mark.servers, pytest.mark.multi,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM: there is no {PYTHON}; `make engines` installs it"),
]  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("engines")
    sizes = {
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }  # heads of 32: vLLM's smallest on a CPU
    make_model(directory / "model", "qwen2", vocab_size=VOCAB, eos_token_id=7, **sizes)
    characters().save_pretrained(directory / "model")
    (directory / "run").mkdir()
    (directory / "run/config.yaml").write_text(CONFIG.format(base=directory, python=PYTHON))
    return directory


@pytest.fixture(scope="module")
def found(base):
    script, config = Path(__file__).parents[1] / "helpers" / "engines_worker.py", base / "run/config.yaml"
    return run_ranks(script, 4, base / "ranks", str(config))[0]


@pytest.fixture(scope="module")
def judges(base, found):
    """transformers on the actor's weights, by version."""
    for directory in sorted((base / "ranks").glob("v*")):
        (directory / "config.json").write_text((base / "model/config.json").read_text())
    return {int(d.name[1:]): conformance.Judge(d, characters()) for d in sorted((base / "ranks").glob("v*"))}


def completions(rows) -> list[list[Completion]]:
    return [
        [
            Completion(**row | {"stop": Stop(row["stop"]), "versions": [(a, b) for a, b in row["versions"]]})
            for row in group
        ]
        for group in rows
    ]


def check_greedy(judge, rows, *, version: int, times: int = 1):
    for prompt, [completion] in zip(prompts(VOCAB) * times, completions(rows), strict=True):
        judge.check_greedy(prompt, completion)
        assert completion.versions == [(0, version)]


@pytest.mark.parametrize("name", conformance.CHECKS)
def test_vllm_conforms(found, name):
    assert found["conformance"][name] is None, found["conformance"][name]


@pytest.mark.parametrize("version", [0, 1])
def test_greedy_after_a_refit_from_a_tp2_pp2_actor_is_that_of_transformers(found, judges, version):
    """This holds for both replicas, with a prompt of 300 tokens that the prefix cache knew before the refit."""
    check_greedy(judges[version], found[f"greedy_v{version}"], version=version)
    for replica in (0, 1):
        check_greedy(judges[version], found[f"each_v{version}_{replica}"], version=version)


def test_an_update_changed_the_answers(found):
    assert found["greedy_v0"] != found["greedy_v1"]


@pytest.mark.parametrize("kind", conversations.SAMPLINGS)
def test_conversations_with_a_tool_are_what_transformers_reads_in_them(found, judges, kind):
    conversations.check(judges[1], found[f"episodes_{kind}"], kind, version=1)


@pytest.mark.parametrize("kind", conversations.SAMPLINGS)
def test_a_conversation_stays_with_the_server_that_holds_its_beginning(found, kind):
    """Their beginnings are all different: elsewhere a question would find nothing in the prefix cache."""
    hits = found[f"hits_{kind}"]
    [block] = set(found["block_sizes"])
    assert len(hits) == 2 and all(hits), "both servers have conversations"
    assert sum(hits) == conversations.cached(found[f"episodes_{kind}"], block)


def test_a_request_that_nobody_waits_for_is_dropped(found):
    assert 0 < found["written_for_nobody"] < 0.8 * LONG.n * LONG.max_tokens


@pytest.mark.parametrize("mode, version", [("abort", 2), ("wait", 3), ("keep", 4)])
def test_a_refit_while_requests_run_loses_none_and_says_who_wrote_what(found, judges, mode, version):
    groups = completions(found[f"during_{mode}"])
    assert [len(g) for g in groups] == [3] * 36
    mixed = 0
    for prompt, group in zip(prompts(VOCAB)[:3] * 12, groups, strict=True):
        for c in group:
            assert c.stop in (Stop.EOS, Stop.LENGTH) and len(c.logprobs) == len(c.tokens)
            assert len(c.tokens) == 150 or c.tokens[-1] in ENDS
            assert [v for _, v in c.versions] in ([version - 1], [version], [version - 1, version])
            mixed += len(c.versions) > 1
            check_writers(judges, prompt, c, exact=mode != "keep")
    assert mixed == 0 if mode == "wait" else mixed > 0
    check_greedy(judges[version], found[f"after_{mode}"], version=version)


def check_writers(judges, prompt, completion, *, exact: bool):
    """Every token has the log-prob that the version gives it which is said to have written it. In a kept request the
    first tokens after the refit may be read from a cache that the old weights wrote; of those, it is only wanted that
    they are no worse than a step apart.
    """
    ends = [start for start, _ in completion.versions[1:]] + [len(completion.tokens)]
    for (start, version), end in zip(completion.versions, ends, strict=True):
        wanted = judges[version].logprobs(prompt, completion)[start:end]
        if exact or version == completion.versions[0][1]:
            assert completion.logprobs[start:end] == pytest.approx(wanted, abs=1e-4)


def test_every_prompt_is_answered_when_a_replica_is_killed_in_the_middle(found):
    groups = completions(found["through_the_kill"])
    assert [len(g) for g in groups] == [3] * 24
    assert all(c.stop in (Stop.EOS, Stop.LENGTH) and len(c.tokens) for g in groups for c in g)
    assert found["requests_sent_again"] > 0


def test_a_replica_that_comes_back_serves_nothing_before_its_refit(found, judges):
    assert found["version_at_return"] == [None, -1]
    assert found["version_after"] == [4, 4, 4]
    check_greedy(judges[4], found["at_return"], version=4, times=2)
    for replica in (0, 1):
        check_greedy(judges[4], found[f"each_at_end_{replica}"], version=4)
    assert len(found["refits"]) == found["refits_before"] + 1


def test_the_token_is_in_no_log(base, found):
    token = (base / "run/engines/token").read_text()
    logs = [*base.glob("run/logs/*"), *base.glob("ranks/*.log")]
    assert len(token) == 64 and logs and not [log for log in logs if token in log.read_text()]


def test_no_server_is_left_behind(base, found):
    import psutil

    assert not [p.cmdline() for p in psutil.process_iter() if any(str(base) in word for word in _words(p))]


def _words(process) -> list[str]:
    import psutil

    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_weights_that_are_no_numbers_are_named_as_what_may_be_wrong(found):
    assert found["not_sent"].startswith("version 6 of the weights is not sent: ")
    assert found["no_numbers"].startswith("EngineError: a request failed 3 times: http")
    assert "sent an answer that is not vLLM's: log-probs that are not numbers: are the weights?" in found["no_numbers"]


def test_refits_are_measured(found):
    assert all(
        json.dumps(row) and row["refit/seconds"] > 0 and row["refit/checked_slices"] > 0 for row in found["refits"]
    )
