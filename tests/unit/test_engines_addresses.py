"""Servers at given URLs: they are listed while they answer, and come back as somebody else."""

from __future__ import annotations

import pytest
import specs as config_checks
from fake_fleet import LOOK_S, ROLE, TOKEN, Fleet, fleet_in, until

from megatron_rl.config import files as config_files
from megatron_rl.config.schema import ConfigError, TrainConfig
from megatron_rl.engines.addresses import Addresses
from megatron_rl.engines.base import Sampling, complete
from megatron_rl.engines.vllm.settings import Vllm
from megatron_rl.session.servers import connect


@pytest.fixture
def fleet(tmp_path):
    with fleet_in(tmp_path) as made:
        yield made


def addresses(fleet: Fleet, urls: list[str]) -> Addresses:
    return Addresses(fleet.roster, ROLE, urls, connect(Vllm(), TOKEN, 5.0), look_s=LOOK_S)


def test_a_server_at_a_url_serves_and_one_that_was_away_takes_the_weights_anew(fleet: Fleet):
    process = fleet.start_process(0)
    (announced,) = fleet.roster.read(ROLE)
    url = announced.url
    fleet.beats[0].clear()  # from here on nobody announces it but the run itself
    other = "http://127.0.0.1:9"  # nobody is there
    listed = addresses(fleet, [url, other])
    try:
        until("its listing", lambda: fleet.roster.read(ROLE)[0].incarnation != announced.incarnation)
        first = fleet.roster.read(ROLE)[0].incarnation
        pool = fleet.open()
        fleet.living(1)
        assert fleet.refit(1) == 1
        assert len(complete(pool, [[1, 2]], Sampling(max_tokens=4))[0]) == 1
        process.kill()
        until("it to be gone", lambda: not fleet.roster.read(ROLE))
        port = url.rpartition(":")[2]
        again = fleet.start_process_at(port)
        until("a new incarnation", lambda: any(listing.incarnation != first for listing in fleet.roster.read(ROLE)))
        assert again.poll() is None
        until("no weights that count", lambda: not pool.members.serving())
    finally:
        listed.close()
    assert not fleet.roster.read(ROLE), "the listings go with the run"


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
