"""Four trainer ranks (tp 2 x pp 2) and real servers of a role's rollouts: refits, pauses, a killed replica and its
return.

engines_worker.py OUT CONFIG     under run_ranks; the run starts its servers itself
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import conformance
import conversations
import numpy as np
import psutil
import torch
import urllib3
from layouts_worker import learn
from limits import PROCESS_S, RUN_S
from toys import characters

from megatron_rl.cluster.watchdog import Watchdog
from megatron_rl.config import files as config_files
from megatron_rl.config.schema import TrainConfig
from megatron_rl.engines.auth_middleware import HEADER
from megatron_rl.engines.pool.server_pool import Pool, given
from megatron_rl.engines.protocol import Completion, Sampling, complete
from megatron_rl.engines.vllm.routes import PATH as GENERATE
from megatron_rl.lib.frames import pack
from megatron_rl.megatron import parallel
from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.messages.commands import Commands
from megatron_rl.refit.weight_limits import NonFiniteWeights
from megatron_rl.run.run_directory import RunDirectory
from megatron_rl.session.launch_ranks import place_from
from megatron_rl.session.open_engines import RunEngines, Supervised, open_engines
from megatron_rl.session.run_setup import open_world
from megatron_rl.spec.resolve import engine_of
from megatron_rl.spec.run_spec import EngineSpec
from megatron_rl.texts.text import load_tokenizer
from megatron_rl.types import Stop
from megatron_rl.weights.hf_writer import HfWriter

ROLE = "generator"
GREEDY = Sampling(max_tokens=12, temperature=0.0)
LONG = Sampling(max_tokens=480, n=16)


class Directory:
    """Stands in for the driver of a run: where it is, its watchdog, which does not watch, and what its refits were."""

    def __init__(self, path: Path) -> None:
        self.directory, self.refits = RunDirectory(path), []
        self.watch = Watchdog(path, "this", 0, after_s=0)

    def refitted(self, metrics: dict[str, Any]) -> None:
        self.refits.append(metrics)


def open_supervised(
    engines: EngineSpec, world: Any, commands: Commands, policies: dict[str, MegatronPolicy], driver: Any,
    stack: contextlib.ExitStack,
) -> RunEngines:  # fmt: skip
    """Opens the engines as a training run does."""
    models = {name: role.model for name, role in engines.opened.items()}
    tokenizers = {name: load_tokenizer(model.tokenizer or model.path) for name, model in models.items()}
    return open_engines(engines, tokenizers, world, commands, stack, servers=Supervised(driver), sources=policies)


def prompts(vocab: int) -> list[list[int]]:
    """Short ones, and one that fills several blocks of a prefix cache."""
    g = torch.Generator().manual_seed(5)
    return [torch.randint(3, vocab, (n,), generator=g).tolist() for n in (3, 9, 1, 300)]


def plain(groups: list[list[Completion]]) -> list[list[dict[str, Any]]]:
    """Returns completions as JSON values."""
    return [[{name: _plain(value) for name, value in asdict(c).items()} for c in group] for group in groups]


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.value if isinstance(value, Stop) else value


def wait_for(what: str, condition) -> None:
    end = time.monotonic() + RUN_S
    while not condition():
        assert time.monotonic() < end, f"{what} did not come"
        time.sleep(0.1)


class Scenario:
    """The same steps on every rank; what only the driver sees goes into `found`."""

    def __init__(
        self, world: Any, commands: Commands, policy: MegatronPolicy, run_engines: Any, output_path: Path, vocab: int
    ) -> None:  # fmt: skip
        self.world, self.commands, self.policy, self.out, self.vocab = world, commands, policy, output_path, vocab
        self.pool: Pool | None = run_engines.engines.get(ROLE)
        self.refits, self.found = run_engines.refits, dict[str, Any]()

    def refit(self, version: int) -> None:
        self.commands.drive(self.refits[ROLE], version)

    def everybody_is_there(self) -> None:
        def wait() -> None:
            wait_for("both servers", lambda: self.pool is not None and len(self.pool.members.living()) == 2)

        self.commands.drive(wait)

    def conforms(self, directory: Path) -> None:
        """One server with the weights that it was started with, before any refit."""

        def check() -> None:
            assert self.pool is not None
            server = self.pool.members.living()[0].server
            pool = given(ROLE, [server], replace(self.pool.members.limits, servers=1))
            self.found["conformance"] = conformance.run_all(pool, conformance.Judge(directory, characters()))

        self.commands.drive(check)

    def greedy_before_and_after_an_update(self) -> None:
        for version in (0, 1):
            if version:
                learn(self.policy)
            self.refit(version)
            self.keep_weights(f"v{version}")
            self.ask(f"greedy_v{version}", lambda pool: complete(pool, prompts(self.vocab), GREEDY))
            self.commands.drive(self.each_server, f"each_v{version}")
            self.commands.drive(self.score, f"scores_v{version}")

    def each_server(self, name: str) -> None:
        """Greedy answers of every replica by itself."""
        assert self.pool is not None
        for member in self.pool.members.living():
            answers = [
                asyncio.run(member.server.generate(np.array(p, np.int32), GREEDY, seed=0, timeout_s=PROCESS_S))
                for p in prompts(self.vocab)
            ]
            self.found[f"{name}_{member.listing.replica}"] = plain(answers)

    def score(self, name: str) -> None:
        """Log-probs of every token of the prompts."""
        assert self.pool is not None
        self.found[name] = [scores.tolist() for scores in self.pool.score(prompts(self.vocab))]

    def episodes(self) -> None:
        """Conversations with a tool, and what the servers found of them in their prefix caches. Only vLLM tells."""

        def play() -> None:
            assert self.pool is not None
            urls = [member.server.url for member in self.pool.members.living()]
            for kind in conversations.SAMPLINGS:
                hits_before = [self.metric(url, "prefix_cache_hits_total") for url in urls]
                self.found[f"episodes_{kind}"] = conversations.play(self.pool, kind)
                hits_after = [self.metric(url, "prefix_cache_hits_total") for url in urls]
                self.found[f"hits_{kind}"] = [b - a for a, b in zip(hits_before, hits_after, strict=True)]
            self.found["block_sizes"] = [self.setting(url, "block_size") for url in urls]

        self.commands.drive(play)

    def given_up(self) -> None:
        """A request whose client goes while it runs is dropped: the server does not write all that it would have."""

        def give_up() -> None:
            assert self.pool is not None
            server = self.pool.members.living()[0].server
            tokens_before = self.metric(server.url, "generation_tokens_total")
            parameters = {"n": LONG.n, "max_tokens": LONG.max_tokens, "ignore_eos": True, "seed": 1}
            request = pack(parameters, {"tokens": np.full(9, 5, np.int32)})
            with contextlib.closing(http.client.HTTPConnection(server.url.removeprefix("http://"))) as client:
                client.request("POST", GENERATE, request, {HEADER: self.token()})
                wait_for("its first tokens", lambda: self.metric(server.url, "generation_tokens_total") > tokens_before)
            wait_for("the end of what nobody waits for", lambda: self.metric(server.url, "num_requests_running") == 0)
            self.found["written_for_nobody"] = self.metric(server.url, "generation_tokens_total") - tokens_before

        self.commands.drive(give_up)

    def token(self) -> str:
        return (self.driver.directory.path / "engines/token").read_text()

    def metric(self, url: str, name: str) -> float:
        """Returns one of vLLM's own metrics."""
        return sum(float(line.split()[-1]) for line in self.metrics(url) if line.startswith(f"vllm:{name}{{"))

    def setting(self, url: str, name: str) -> int | None:
        """Returns one of the settings of vLLM's cache; None of another server."""
        values = re.findall(rf"vllm:cache_config_info\{{.*\b{name}=\"(\d+)\"", "\n".join(self.metrics(url)))
        return int(values[0]) if values else None

    def metrics(self, url: str) -> list[str]:
        text = urllib3.request("GET", f"{url}/metrics", headers={HEADER: self.token()}).data.decode()
        return text.splitlines()

    def refit_while_requests_run(self, mode: str, version: int) -> None:
        def ask() -> None:
            assert self.pool is not None
            many = prompts(self.vocab)[:3] * 12
            self.found[f"during_{mode}"] = plain(complete(self.pool, many, Sampling(max_tokens=150, n=3, seed=version)))

        thread = threading.Thread(target=ask)
        learn(self.policy)
        self.world.barrier()  # every rank is ready for the refit, which must find requests under way
        if self.pool is not None:
            for member in self.pool.members.living():
                member.server._pause = mode
            begun = time.monotonic()
            complete(self.pool, prompts(self.vocab)[:3], Sampling(max_tokens=1))
            one_token_s = time.monotonic() - begun  # on this machine, with all that runs beside
            thread.start()
            wait_for("requests under way", lambda: all(m.load for m in self.pool.members.living()))
            time.sleep(max(0.3, 3 * one_token_s))  # for first tokens
        self.refit(version)
        self.keep_weights(f"v{version}")
        if self.pool is not None:
            thread.join()
        self.ask(f"after_{mode}", lambda pool: complete(pool, prompts(self.vocab), GREEDY))

    def killed_in_the_middle(self) -> None:
        """One server's whole process group, by SIGKILL, while both work; then it comes back with the weights that it
        was started with.
        """

        def kill() -> None:
            assert self.pool is not None
            wait_for("work on both", lambda: all(m.load for m in self.pool.members.living()))
            victim = self.pool.members.living()[0].listing
            self.found["killed"] = victim.replica
            port = victim.url.rpartition(":")[2]
            for process in psutil.process_iter(["cmdline"]):
                words = process.info["cmdline"] or []
                if "--port" in words and words[words.index("--port") + 1] == port:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)

        def batch() -> None:
            assert self.pool is not None
            thread = threading.Thread(target=kill)
            thread.start()
            many = prompts(self.vocab)[:3] * 8
            self.found["through_the_kill"] = plain(complete(self.pool, many, Sampling(max_tokens=100, n=3, seed=9)))
            thread.join()
            self.found["requests_sent_again"] = self.pool.failures

        self.commands.drive(batch)

    def back_with_old_weights(self) -> None:
        def back() -> None:
            assert self.pool is not None
            wait_for("the killed server's return", lambda: len(self.pool.members.living()) == 2)
            [member] = [m for m in self.pool.members.living() if m.listing.replica == self.found["killed"]]
            self.found["version_at_return"] = [member.state.version, member.server.version()]
            self.found["refits_before"] = len(self.driver.refits)
            self.found["at_return"] = plain(complete(self.pool, prompts(self.vocab) * 2, GREEDY))
            wait_for(
                "its refit",
                lambda: (
                    complete(self.pool, prompts(self.vocab)[:1], GREEDY) and member.state.version == self.pool.version
                ),
            )
            self.found["version_after"] = [member.state.version, member.server.version(), self.pool.version]
            self.each_server("each_at_end")

        self.commands.drive(back)

    def weights_that_are_no_numbers(self, version: int) -> None:
        """Spoils the weights: finite ones that overflow in the model are sent, and no server answers anything of use
        after them; NaN are not sent, which ends the run."""
        shards = self.policy.export.shards().values()
        for tensor in shards:
            tensor.detach().fill_(1.0 if tensor.dim() > 1 else 1e38)
        self.refit(version)

        def ask() -> None:
            assert self.pool is not None
            try:
                complete(self.pool, prompts(self.vocab), Sampling(max_tokens=10, n=2))
            except RuntimeError as error:
                self.found["no_numbers"] = f"{type(error).__name__}: {error}"

        self.commands.drive(ask)
        for tensor in shards:
            tensor.detach().fill_(torch.nan)
        try:
            self.refit(version + 1)
        except NonFiniteWeights as error:
            self.found["not_sent"] = str(error)

    def ask(self, name: str, question) -> None:
        def answer() -> None:
            assert self.pool is not None
            self.found[name] = plain(question(self.pool))

        self.commands.drive(answer)

    def keep_weights(self, name: str) -> None:
        """Writes a Hugging Face directory, for the judge."""
        tensors, planned = dict(self.policy.export.weights()), self.policy.export.planned()
        if self.world.rank == 0:
            (self.out / name).mkdir(parents=True, exist_ok=True)
            HfWriter(self.out / name, planned).write_all(tensors.items())


def main() -> None:
    answer, config_path = Path(sys.argv[1]), Path(sys.argv[2])
    config = config_files.load(TrainConfig, [config_path], [])
    engines = engine_of(config)  # also registers the config's model families
    with open_world(place_from(os.environ), answer.parent) as world, contextlib.ExitStack() as stack:
        role = config.roles[ROLE]
        policy = MegatronPolicy(role, parallel.create(role.layout))
        driver = Directory(config_path.parent)
        commands = Commands(world)
        run_engines = open_supervised(engines, world, commands, {ROLE: policy}, driver, stack)
        scenario = Scenario(world, commands, policy, run_engines, answer.parent, policy.arch.vocab)
        scenario.driver = driver
        if sys.argv[3:] == ["update"]:
            scenario.greedy_before_and_after_an_update()
            answer.write_text(json.dumps(scenario.found))
            return
        scenario.everybody_is_there()
        scenario.conforms(Path(role.model.path))
        scenario.greedy_before_and_after_an_update()
        scenario.episodes()
        scenario.given_up()
        for version, mode in enumerate(("abort", "wait", "keep"), start=2):
            scenario.refit_while_requests_run(mode, version)
        scenario.killed_in_the_middle()
        scenario.back_with_old_weights()
        scenario.found["refits"] = [*driver.refits]
        scenario.weights_that_are_no_numbers(5)
        answer.write_text(json.dumps(scenario.found))


if __name__ == "__main__":
    main()
