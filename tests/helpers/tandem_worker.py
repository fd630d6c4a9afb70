"""Two trainer ranks (tp 2) and a real vLLM server with a junior: rollouts of every strategy, and refits, one of them
while requests run.

tandem_worker.py OUT CONFIG     under run_ranks; the run starts its server itself
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import urllib3
from engines_worker import GREEDY, ROLE, Directory, open_supervised, plain, prompts, wait_for
from layouts_worker import learn
from safetensors.torch import save_file

from megatron_rl.algorithms.tandem_authors import Rule
from megatron_rl.config import files as config_files
from megatron_rl.config.schema import TrainConfig
from megatron_rl.engines.pool.server_pool import Pool
from megatron_rl.engines.protocol import Sampling, TandemSampling, complete
from megatron_rl.megatron import parallel
from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.messages.commands import Commands
from megatron_rl.session.launch_ranks import place_from
from megatron_rl.session.run_setup import open_world
from megatron_rl.spec.resolve import engine_of

STRATEGIES = ("bernoulli", "alternating", "chunk", "sentence", "word", "given")  # given: word, ids from a file
IDS = Path(__file__).with_name("boundary_ids.json")
SEED = 4


def rule(strategy: str) -> Rule:
    if strategy == "given":
        return Rule(max_gap=5, boundary_ids=str(IDS))
    return Rule(strategy=strategy, max_gap=5, chunk_size=3)  # type: ignore[arg-type]


def drawn(strategy: str, **settings: Any) -> Sampling:
    return Sampling(**{"max_tokens": 40, "n": 3, "seed": SEED} | settings, tandem=TandemSampling(rule=rule(strategy)))


class Scenario:
    def __init__(
        self, world: Any, commands: Commands, policy: MegatronPolicy, run_engines: Any, output_path: Path
    ) -> None:  # fmt: skip
        self.commands = commands
        self.world, self.policy, self.out, self.vocab = world, policy, output_path, policy.arch.vocab
        self.pool: Pool | None = run_engines.engines.get(ROLE)
        self.refits, self.found = run_engines.refits, dict[str, Any]()

    def refit(self, version: int) -> None:
        self.commands.drive(self.refits[ROLE], version)

    def ask(self, name: str, sampling: Sampling, times: int = 1) -> None:
        def answer() -> None:
            assert self.pool is not None
            self.found[name] = plain(complete(self.pool, prompts(self.vocab) * times, sampling))

        self.commands.drive(answer)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """One of the server's own routes, on the driver."""
        assert self.pool is not None
        return self.pool.members.living()[0].server._http.call(method, path, body)

    def records(self) -> list[Any]:
        return self.call("POST", "/collective_rpc", {"method": "tandem_records"})["results"]

    def strategies(self, version: int) -> None:
        self.refit(version)
        self.keep_weights(f"v{version}")
        self.commands.drive(lambda: self.pool and self.records())
        for strategy in STRATEGIES:
            self.ask(f"{strategy}_v{version}", drawn(strategy))
            self.commands.drive(self.keep_records, f"{strategy}_v{version}")
        self.ask(f"greedy_v{version}", drawn("word", temperature=0.0))
        self.ask(f"alone_v{version}", GREEDY)

    def keep_records(self, name: str) -> None:
        [self.found[f"records_{name}"]] = self.records()

    def crowded(self) -> None:
        """More tokens than the cache holds: requests are preempted and begin again."""
        self.ask("crowded", drawn("word", max_tokens=150, n=8), times=3)
        self.commands.drive(self.keep_preemptions)

    def keep_preemptions(self) -> None:
        assert self.pool is not None
        server = self.pool.members.living()[0].server
        answer = urllib3.request("GET", f"{server.url}/metrics", headers=server._http._headers)
        lines = answer.data.decode().splitlines()
        self.found["preemptions"] = sum(
            float(line.split()[-1]) for line in lines if line.startswith("vllm:num_preemptions_total")
        )

    def refit_while_requests_run(self, version: int) -> None:
        def ask() -> None:
            assert self.pool is not None
            self.found["during"] = plain(
                complete(self.pool, prompts(self.vocab)[:3] * 4, drawn("word", max_tokens=150))
            )

        thread = threading.Thread(target=ask)
        learn(self.policy)
        self.world.barrier()
        if self.pool is not None:
            thread.start()
            wait_for("requests under way", lambda: all(m.load for m in self.pool.members.living()))
            time.sleep(0.3)
        self.refit(version)
        self.keep_weights(f"v{version}")
        if self.pool is not None:
            thread.join()

    def keep_weights(self, name: str) -> None:
        tensors = {n: t.detach().clone() for n, t in self.policy.export.weights()}
        if self.world.rank == 0:
            (self.out / name).mkdir(parents=True, exist_ok=True)
            save_file(tensors, self.out / name / "model.safetensors")


def main() -> None:
    answer, config_path = Path(sys.argv[1]), Path(sys.argv[2])
    config = config_files.load(TrainConfig, [config_path], [])
    with open_world(place_from(os.environ), answer.parent) as world, contextlib.ExitStack() as stack:
        role = config.roles[ROLE]
        policy = MegatronPolicy(role, parallel.create(role.layout))
        driver = Directory(config_path.parent)
        commands = Commands(world)
        run_engines = open_supervised(engine_of(config), world, commands, {ROLE: policy}, driver, stack)
        scenario = Scenario(world, commands, policy, run_engines, answer.parent)
        scenario.strategies(0)
        scenario.crowded()
        learn(policy)
        scenario.strategies(1)
        scenario.refit_while_requests_run(2)
        answer.write_text(json.dumps(scenario.found))


if __name__ == "__main__":
    main()
