"""A trainer of one rank and one real SGLang server of two: what it refuses, whether it conforms, refits, and one while
requests run.

engines_sglang_worker.py OUT CONFIG     under run_ranks; the run starts its server itself
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import urllib3
from engines_worker import ROLE, Directory, Scenario, open_supervised, wait_for

from megatron_rl.config import files as config_files
from megatron_rl.config.schema import RefitConfig, TrainConfig
from megatron_rl.engines.kind import ModelFacts
from megatron_rl.engines.sglang.client import SglangServer
from megatron_rl.megatron import parallel
from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.messages.commands import Commands
from megatron_rl.models.sizes import Sizes
from megatron_rl.refit.refit_store import RefitStore
from megatron_rl.refit.topology import Topology
from megatron_rl.session.launch_ranks import place_from
from megatron_rl.session.run_setup import open_world
from megatron_rl.spec.resolve import engine_of
from megatron_rl.weights.rank_layouts import EngineLayout, TrainerLayout

CONTROL = (
    "/pause_generation",
    "/begin_weight_update",
    "/update_weights_from_tensor",
    "/update_weights_from_disk",
    "/flush_cache",
)


def outcome(function: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
    """Returns what a call raised, and how long it took."""
    start = time.monotonic()
    try:
        answer = function(*arguments, **options)
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    return {"said": answer, "seconds": time.monotonic() - start}


def refusals(server: SglangServer, config: TrainConfig) -> dict[str, Any]:
    """Returns what a server refuses that has joined nobody yet."""
    engine: Any = config.engine
    stranger = SglangServer(server.url, "not the token", engine, 10, ModelFacts(vocab=97))
    order = base64.b64encode(pickle.dumps({"verb": "take part", "version": 0, "wait_s": 1.0})).decode()
    body = {"serialized_named_tensors": [order] * 2, "flush_cache": False}
    with urllib3.PoolManager(timeout=20) as nobody:
        return {
            "without_token": {
                p: nobody.request("POST", server.url + p, json={}).status
                for p in (*CONTROL, "/generate", "/v1/completions")
            },
            "open": {path: nobody.request("GET", server.url + path).status for path in ("/ping", "/health")},
            "wrong_token": outcome(stranger.version),
            "without_session": outcome(server._http.call, "POST", "/update_weights_from_tensor", body),
            "without_join": outcome(server.update, 0, 1.0),
            "another_model": another_model(server),
            "version": server.version(),
        }


def another_model(server: SglangServer) -> dict[str, Any]:
    """A store whose trainer has a model of other sizes."""
    sizes = Sizes(
        family="qwen2", num_layers=4, hidden=64, heads=2, kv_heads=2, head_dim=32, ffn=256, vocab=97, tied=False
    )
    topology = Topology(sizes=sizes, trainer=TrainerLayout(), engines=EngineLayout(tp=2), dtype="float32")
    store, address = RefitStore.host("127.0.0.1")
    store.put("setup", {"topology": topology.to_json(), "settings": asdict(RefitConfig())})
    return outcome(server.join, *address, 0)


def listeners(port: str) -> list[str]:
    """Addresses that the server's processes listen at."""
    [server] = [p for p in psutil.process_iter(["cmdline"]) if _has_port(p.info["cmdline"] or [], port)]
    addresses = set()
    for process in [server, *server.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            addresses |= {c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    return sorted(addresses)


def _has_port(words: list[str], port: str) -> bool:
    return "--port" in words and words[words.index("--port") + 1] == port


def main() -> None:
    answer, config_path = Path(sys.argv[1]), Path(sys.argv[2])
    config = config_files.load(TrainConfig, [config_path], [])
    with open_world(place_from(os.environ), answer.parent) as world, contextlib.ExitStack() as stack:
        role = config.roles[ROLE]
        policy = MegatronPolicy(role, parallel.create(role.layout))
        driver = Directory(config_path.parent)
        commands = Commands(world)
        run_engines = open_supervised(engine_of(config), world, commands, {ROLE: policy}, driver, stack)
        scenario = Scenario(world, commands, policy, run_engines, answer.parent, policy.arch.vocab)
        scenario.driver = driver
        pool = scenario.pool
        assert pool is not None
        wait_for("the server", lambda: len(pool.members.living()) == 1)
        [member] = pool.members.living()
        scenario.found["refusals"] = refusals(member.server, config)  # type: ignore[arg-type]
        scenario.found["listeners"] = listeners(member.listing.url.rpartition(":")[2])
        scenario.conforms(Path(role.model.path))
        scenario.greedy_before_and_after_an_update()
        scenario.episodes()
        scenario.found["versions"] = [member.server.version(), pool.version]
        scenario.refit_while_requests_run("keep", 2)
        scenario.found["refits"] = driver.refits
        answer.write_text(json.dumps(scenario.found))


if __name__ == "__main__":
    main()
