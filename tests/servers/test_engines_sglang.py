"""A real SGLang server on stubbed kernels, of two ranks: it conforms, asks for the token, and takes an actor's weights
slice by slice.

Needs SGLang in an environment of its own: `make engines-sglang`, or another interpreter in MEGATRON_RL_SGLANG_PYTHON.
"""

from __future__ import annotations

import os
from pathlib import Path

import conformance
import conversations
import pytest
from engines_worker import prompts
from limits import RUN_S
from ranks import ROOT, run_ranks
from test_engines_vllm import VOCAB, check_greedy, check_writers, completions
from tiny_models import make_model
from toys import characters

from megatron_rl.cluster.host_address import free_port
from megatron_rl.engines.kind import ModelFacts, ServerStart
from megatron_rl.engines.pool.membership import Limits
from megatron_rl.engines.pool.server_pool import given
from megatron_rl.engines.protocol import Sampling
from megatron_rl.engines.server_process import ServerProcess
from megatron_rl.engines.sglang.client import SglangServer
from megatron_rl.engines.sglang.kind import command
from megatron_rl.engines.sglang.settings import Sglang
from megatron_rl.types import Stop

PYTHON = Path(os.environ.get("MEGATRON_RL_SGLANG_PYTHON", ROOT / ".venv-sglang/bin/python"))
CONFIG = """
roles: {{generator: {{model: {{path: {base}/model}}, optimizer: {{lr: 0.003}}, micro_batch_tokens: 64}}}}
recipe: {{target: megatron_rl.recipes.grpo:Grpo}}
data: {{path: nowhere.jsonl}}
engine: {{kind: sglang, python: {python}, tp: 2, kv_cache_gib: 0.02}}
run: {{dir: {base}, name: run}}
refit: {{timeout_s: 120, message_timeout_s: 20}}
"""
SEEDED = ["--enable-deterministic-inference"]  # only then does SGLang heed the seeds of requests
SEEDS = ("draws_differ_by_sample_prompt_and_seed_and_repeat", "draws_do_not_depend_on_other_draws")
LEFT_OUT = (
    *SEEDS,
    "draws_do_not_depend_on_greedy_requests",  # SGLang numbers tokens by their rank for a batch with a greedy request
    "a_full_context_can_be_scored",  # SGLang keeps a few tokens of the context back
)
pytestmark = [
    pytest.mark.multi,
    pytest.mark.skipif(
        not PYTHON.exists(), reason=f"no SGLang: there is no {PYTHON}; `make engines-sglang` installs it"
    ),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sglang")
    sizes = {
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }  # heads of 32 in both ranks: SGLang pads what it cannot share
    make_model(directory / "model", "qwen2", vocab_size=VOCAB, eos_token_id=7, **sizes)
    characters().save_pretrained(directory / "model")
    (directory / "run").mkdir()
    (directory / "run/config.yaml").write_text(CONFIG.format(base=directory, python=PYTHON))
    return directory


@pytest.fixture(scope="module")
def found(base):
    script, config = Path(__file__).parents[1] / "helpers" / "engines_sglang_worker.py", base / "run/config.yaml"
    return run_ranks(script, 1, base / "ranks", str(config))[0]


@pytest.fixture(scope="module")
def seeded(base):
    """An engine of a server that heeds seeds, of one rank. The stub's plugin lets such a server start without a GPU."""
    token, port = base / "token", free_port("127.0.0.1")
    token.write_text("a token of this test")
    settings = Sglang(python=str(PYTHON), kv_cache_gib=0.02, args=SEEDED)
    start = ServerStart(
        python=str(PYTHON), model=base / "model", dtype="float32", port=port, token_file=token, on_gpu=False,
        by_priority=True,
    )  # fmt: skip
    process = ServerProcess(command(settings, start), base / "seeded.log", os.environ, imports=base / "imports")
    facts = ModelFacts(ends=frozenset({0, 7}), vocab=VOCAB)
    server = SglangServer(f"http://127.0.0.1:{port}", token.read_text(), settings, 60, facts)
    try:
        process.wait_until(server.ready, RUN_S)
        engine = given("generator", [server], Limits.of(settings))
        yield engine
        engine.close()
    finally:
        process.stop()


@pytest.fixture(scope="module")
def judges(base, found):
    """transformers on the actor's weights, by version."""
    for directory in sorted((base / "ranks").glob("v*")):
        (directory / "config.json").write_text((base / "model/config.json").read_text())
    return {int(d.name[1:]): conformance.Judge(d, characters()) for d in sorted((base / "ranks").glob("v*"))}


@pytest.mark.parametrize("name", [name for name in conformance.CHECKS if name not in LEFT_OUT])
def test_sglang_conforms(found, name):
    assert found["conformance"][name] is None, found["conformance"][name]


@pytest.mark.parametrize("name", [*SEEDS, "sampled_logprobs_equal_transformers", "sampling_follows_the_model"])
def test_a_server_with_deterministic_inference_heeds_seeds(base, seeded, name):
    conformance.CHECKS[name](seeded, conformance.Judge(base / "model", characters()))


def test_answers_do_not_depend_on_the_priority_of_a_request(seeded):
    answers = []
    for priority in (0, 7):
        session = seeded.session(priority)
        for key in range(3):
            session.ask(key, [3 + key, 5], Sampling(max_tokens=8, n=2, seed=4))
        answers.append({key: [c.tokens.tolist() for c in own] for key, own in session.answers()})
    assert len(answers[0]) == 3 and answers[0] == answers[1]


def test_every_route_but_the_health_check_wants_the_token(found):
    refused = found["refusals"]
    assert set(refused["without_token"].values()) == {401} and set(refused["open"].values()) == {200}
    assert "refuses the job's token" in refused["wrong_token"]["said"]
    assert found["listeners"] == ["127.0.0.1"]


def test_an_update_out_of_turn_is_refused_at_once_and_the_server_lives(found):
    refused = found["refusals"]
    for name, says in (
        ("without_session", "must run between begin_weight_update"),
        ("without_join", "rank 0: this engine has not joined a trainer"),
        ("another_model", "down_proj.weight is [64, 64] in the engine and [64, 128] in the trainer's layout"),
    ):
        assert says in refused[name]["said"] and refused[name]["said"].startswith("RequestRefused"), refused[name]
        assert refused[name]["seconds"] < 20, refused[name]
    assert refused["version"] == -1


@pytest.mark.parametrize("version", [0, 1])
def test_greedy_after_a_refit_into_two_ranks_is_that_of_transformers(found, judges, version):
    """One prompt has 300 tokens that the prefix cache knew before the refit."""
    check_greedy(judges[version], found[f"greedy_v{version}"], version=version)
    assert found["greedy_v0"] != found["greedy_v1"] and found["versions"] == [1, 1]


@pytest.mark.parametrize("kind", conversations.SAMPLINGS)
def test_conversations_with_a_tool_are_what_transformers_reads_in_them(found, judges, kind):
    conversations.check(judges[1], found[f"episodes_{kind}"], kind, version=1)


def test_requests_that_a_refit_interrupts_go_on_with_the_new_weights(found, judges):
    """SGLang writes their caches anew: every token has exactly the log-prob that the version gives it which is said to
    have drawn it.
    """
    groups, mixed = completions(found["during_keep"]), 0
    assert [len(g) for g in groups] == [3] * 36
    for prompt, group in zip(prompts(VOCAB)[:3] * 12, groups, strict=True):
        for c in group:
            assert c.stop in (Stop.EOS, Stop.LENGTH)
            assert [v for _, v in c.versions] in ([1], [2], [1, 2])
            mixed += len(c.versions) > 1
            check_writers(judges, prompt, c, exact=True)
    assert mixed > 0
    check_greedy(judges[2], found["after_keep"], version=2)
    assert len(found["refits"]) == 3 and all(r["refit/checked_slices"] > 0 for r in found["refits"])


def test_the_token_is_in_no_log(base, found):
    token = (base / "run/engines/token").read_text()
    logs = [*base.glob("run/logs/*"), *base.glob("ranks/*.log")]
    assert len(token) == 64 and logs and not [log for log in logs if token in log.read_text()]
