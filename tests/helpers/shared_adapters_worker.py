"""Two trainer ranks (tp 2) with two roles on one frozen base, and one real vLLM server that computes with both roles'
adapters: `shared_adapters_worker.py OUT CONFIG` under run_ranks.
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

from engines_worker import GREEDY, Directory, open_supervised, plain, prompts, wait_for
from layouts_worker import learn
from safetensors.torch import save_file

from megatron_rl.config import files as config_files
from megatron_rl.config.schema import TrainConfig
from megatron_rl.engines.protocol import Sampling, complete
from megatron_rl.engines.server_registry import ServerRegistry
from megatron_rl.megatron import parallel
from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.messages.commands import Commands
from megatron_rl.session.launch_ranks import place_from
from megatron_rl.session.run_setup import open_world
from megatron_rl.spec.resolve import engine_of

ROLES = ("generator", "verifier")


class Shared:
    """The same steps on every rank; what only the driver sees goes into `found`."""

    def __init__(
        self, world: Any, commands: Commands, policies: dict[str, MegatronPolicy], run_engines: Any, output_path: Path
    ) -> None:  # fmt: skip
        self.commands = commands
        self.world, self.policies, self.run_engines, self.out = world, policies, run_engines, output_path
        self.vocab, self.found = policies[ROLES[0]].arch.vocab, dict[str, Any]()

    def refit(self, role: str, version: int) -> None:
        self.commands.drive(self.run_engines.refits[role], version)
        tensors = {name: tensor.detach().clone() for name, tensor in self.policies[role].export.weights()}
        if self.world.rank == 0:
            (self.out / f"{role}_v{version}").mkdir(parents=True, exist_ok=True)
            save_file(tensors, self.out / f"{role}_v{version}" / "model.safetensors")

    def ask(self, name: str) -> None:
        """Asks for greedy answers of both roles at once, and for scores."""

        def answer() -> None:
            answers: dict[str, Any] = {}
            threads = [
                threading.Thread(
                    target=lambda role=role: answers.update(
                        {role: plain(complete(self.run_engines.engines[role], prompts(self.vocab), GREEDY))}
                    )
                )
                for role in ROLES
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for role in ROLES:
                self.found[f"{name}_{role}"] = answers[role]
                scores = self.run_engines.engines[role].score(prompts(self.vocab))
                self.found[f"{name}_{role}_scores"] = [row.tolist() for row in scores]

        self.commands.drive(answer)

    def refit_while_the_other_role_writes(self, version: int) -> None:
        """The generator takes a version while the verifier's answers are under way."""
        thread = threading.Thread(target=self._write_much)
        learn(self.policies["generator"])
        self.world.barrier()
        if self.world.rank == 0:
            pool = self.run_engines.pools["verifier"]
            thread.start()
            wait_for("requests under way", lambda: any(member.load for member in pool.members.living()))
            time.sleep(0.3)  # for first tokens
        self.refit("generator", version)
        if self.world.rank == 0:
            pool = self.run_engines.pools["verifier"]
            self.found["left_at_refit"] = sum(member.load for member in pool.members.living())
            thread.join()
            self.found["failures"] = pool.failures

    def _write_much(self) -> None:
        pool = self.run_engines.pools["verifier"]
        many = prompts(self.vocab)[:3] * 12  # enough for a refit on a busy machine
        self.found["during"] = plain(complete(pool, many, Sampling(max_tokens=150, n=3, seed=5)))


def main() -> None:
    answer, config_path = Path(sys.argv[1]), Path(sys.argv[2])
    config = config_files.load(TrainConfig, [config_path], [])
    with open_world(place_from(os.environ), answer.parent) as world, contextlib.ExitStack() as stack:
        base: MegatronPolicy | None = None
        policies: dict[str, MegatronPolicy] = {}
        for seed, name in enumerate(ROLES):
            role = config.roles[name]
            policies[name] = MegatronPolicy(role, parallel.create(role.layout), seed=seed, base=base)
            base = base or policies[name]
        driver = Directory(config_path.parent)
        commands = Commands(world)
        run_engines = open_supervised(engine_of(config), world, commands, policies, driver, stack)
        shared = Shared(world, commands, policies, run_engines, answer.parent)
        for role in ROLES:
            learn(policies[role])
            shared.refit(role, 0)
        shared.ask("start")
        learn(policies["generator"])
        shared.refit("generator", 1)
        shared.ask("one_refitted")
        shared.refit_while_the_other_role_writes(2)
        shared.ask("end")
        if world.rank == 0:
            shared.found["servers"] = [listing.name for listing in ServerRegistry(config_path.parent / "engines").all()]
            shared.found["loads"] = sorted(run_engines.loads())
            shared.found["gigabytes"] = [refit["refit/gigabytes"] for refit in driver.refits]
        answer.write_text(json.dumps(shared.found))


if __name__ == "__main__":
    main()
