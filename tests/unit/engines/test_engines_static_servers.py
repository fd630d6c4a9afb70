"""Servers at given URLs: they are listed while they answer, and come back as somebody else."""

from __future__ import annotations

import pytest
import specs as config_checks
from fake_servers import LOOK_S, ROLE, TOKEN, RunEngines, engines_in, until

from megatron_rl.config import files as config_files
from megatron_rl.config.schema import ConfigError, TrainConfig
from megatron_rl.engines.protocol import Sampling, complete
from megatron_rl.engines.static_servers import Addresses
from megatron_rl.engines.vllm.settings import Vllm
from megatron_rl.session.server_connection import connect


@pytest.fixture
def run_engines(tmp_path):
    with engines_in(tmp_path) as made:
        yield made


def addresses(run_engines: RunEngines, urls: list[str]) -> Addresses:
    return Addresses(run_engines.registry, ROLE, urls, connect(Vllm(), TOKEN, 5.0), look_s=LOOK_S)


def test_a_server_at_a_url_serves_and_one_that_was_away_takes_the_weights_anew(run_engines: RunEngines):
    process = run_engines.start_process(0)
    (announced,) = run_engines.registry.read(ROLE)
    url = announced.url
    run_engines.beats[0].clear()  # from here on nobody announces it but the run itself
    other = "http://127.0.0.1:9"  # nobody is there
    listed = addresses(run_engines, [url, other])
    try:
        until("its listing", lambda: run_engines.registry.read(ROLE)[0].incarnation != announced.incarnation)
        first = run_engines.registry.read(ROLE)[0].incarnation
        pool = run_engines.open()
        run_engines.living(1)
        assert run_engines.refit(1) == 1
        assert len(complete(pool, [[1, 2]], Sampling(max_tokens=4))[0]) == 1
        process.kill()
        until("it to be gone", lambda: not run_engines.registry.read(ROLE))
        port = url.rpartition(":")[2]
        again = run_engines.start_process_at(port)
        until(
            "a new incarnation",
            lambda: any(listing.incarnation != first for listing in run_engines.registry.read(ROLE)),
        )
        assert again.poll() is None
        until("no weights that count", lambda: not pool.members.serving())
    finally:
        listed.close()
    assert not run_engines.registry.read(ROLE), "the listings go with the run"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["engine.kind=vllm", "engine.start=false", "engine.urls={generator: [http://a]}", "engine.replicas=2"],
            "give 2",
        ),
        (["engine.kind=vllm", "engine.start=false", "engine.urls={judge: [http://a]}"], "for each of generator"),
        (["engine.kind=vllm", "engine.urls={generator: [http://a]}"], "engine.start=false"),
        (["engine.kind=sglang", "roles.generator.sampling.top_p=0.9"], "under a top_k"),
    ],
)
def test_settings_of_servers_that_cannot_be_are_refused_by_check(overrides, message):
    with pytest.raises(ConfigError, match=message):
        config_checks.check(config_files.load(TrainConfig, ["examples/miniatures/last_letter/grpo.yaml"], overrides), 2)
