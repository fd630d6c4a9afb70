"""A program that plays episodes of an environment of the library verifiers (0.4). It is run with a Python in which the
library is installed.

    python -I verifiers_host.py --list ENVIRONMENT COUNT [PATH ...]    writes the first COUNT tasks, one JSON line each
    python -I verifiers_host.py                                        plays episodes: JSON lines in, JSON lines out

Without -I, `import verifiers` would import verifiers.py in the directory of this file. The program imports nothing from
megatron_rl. The first input line contains the settings and is answered by {"ready": ...}. Every further line is an
episode to play and is answered by one line with the result. The program exits at the end of its standard input.
"""

import asyncio
import hashlib
import json
import logging
import math
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# Environment variable with the access token of the token route. The name contains API_KEY, because verifiers does not
# pass such variables to its subprocesses.
TOKEN_VARIABLE = "MEGATRON_RL_API_KEY"
LEAVE_S = 10.0  # grace period in seconds for running episodes after the standard input is closed


class Host:
    """A host of one environment of the library, which plays episodes of the environment's tasks."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """Loads the environment. Exits with a message if its agents differ from the agents in `settings`."""
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        _prepare(settings)
        self.env = load_environment(resolve_env_config(_with_agents(settings)))
        self._tasks: list[Any] = []
        self._coming = iter(self.env.taskset)
        self._roles = settings["agents"]

    def task(self, index: int) -> Any:
        """Returns the task with the index `index` in the environment's task set. Raises IndexError if there is no such
        task."""
        for task in self._coming if index >= len(self._tasks) else ():
            self._tasks.append(task)
            if index < len(self._tasks):
                break
        if not 0 <= index < len(self._tasks):
            raise IndexError(f"there is no task {index}: the task set has {len(self._tasks)}")
        return self._tasks[index]

    async def result(self, request: dict[str, Any]) -> dict[str, Any]:
        """Plays one episode and returns its result as a JSON object. Errors are returned as results, too."""
        session = request["session"]
        try:
            async with asyncio.timeout(request["timeout_s"]):
                episode = await self._play(request)
            if episode.ok:
                return {"session": session, "why": None, "traces": [_trace(trace) for trace in episode.traces]}
            errors = [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]
            messages = "; ".join(f"{error.type}: {error.message}" for error in errors)
            late, why = episode.is_timeout, messages or "it ended without saying why"
        except TimeoutError:
            late, why = True, f"it took longer than {request['timeout_s']:g} s"
        except Exception as error:
            late, why = False, f"{type(error).__name__}: {error}"
        return {"session": session, "timeout": late, "why": why}

    async def _play(self, request: dict[str, Any]) -> Any:
        from verifiers.v1.clients import ModelContext, TrainClientConfig
        from verifiers.v1.env import RunSlot

        agents: dict[str, int] = {}
        begun: dict[str, int] = {}

        def agent(trace: Any) -> None:
            """Sets the id of a trace before its first request. The id is sent as the header X-Session-ID."""
            name = trace.agent.name
            agents[name] = agents.get(name, 0) + 1
            trace.id = request["session"] + (name if agents[name] == 1 else f"{name}-{agents[name]}")
            begun[trace.id] = len(begun)

        # The library requires a default model and client. They are unused: every agent has a separate model and client.
        context = ModelContext(
            model=next(iter(self._roles.values())), client=TrainClientConfig(base_url="http://unused")
        )
        episode = await self.env.run_slot(RunSlot(self.task(request["task"])), context, on_trace=agent)
        episode.traces.sort(key=lambda trace: begun[trace.id])  # in the order in which the agents began
        return episode


def main() -> None:
    if sys.flags.hash_randomization:
        # Restarts the program with a fixed hash seed, so that Python sets have the same order when a run is resumed.
        # The order matters if an environment shows a set to a model. Omits -I, because -I ignores PYTHONHASHSEED.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        os.execve(sys.executable, [sys.executable, "-P", "-s", *sys.argv], environment | {"PYTHONHASHSEED": "0"})
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the output of environments must not be mixed with the protocol's lines
    if sys.argv[1:2] == ["--list"]:
        sys.path.extend(sys.argv[4:])
        return list_tasks(json.loads(sys.argv[2]), int(sys.argv[3]), stream)
    logging.basicConfig(level=logging.WARNING)
    settings = json.loads(sys.stdin.readline())
    asyncio.run(_serve(Host(settings), stream))


def list_tasks(environment: dict[str, Any], count: int, stream: Any) -> None:
    """Writes one JSON line {"index", "question"} for each task of an environment. The lines form a file for the setting
    `data.path` of a run.

    `environment`: the library's settings of the environment. `count`: maximum number of tasks.
    """
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    tasks = load_environment(resolve_env_config(environment)).taskset.take(count)
    for index, task in enumerate(tasks):
        question = task.data.prompt_text or task.data.name or str(index)
        stream.write(json.dumps({"index": index, "question": question}) + "\n")
    stream.flush()


async def _serve(host: Host, stream: Any) -> None:
    def say(line: dict[str, Any]) -> None:
        stream.write(json.dumps(line) + "\n")
        stream.flush()

    async def play(line: str) -> None:
        say(await host.result(json.loads(line)))

    async with host.env.serving():
        say({"ready": True})
        playing: set[asyncio.Task[None]] = set()
        reader = ThreadPoolExecutor(1)  # a separate thread, because calls of an environment may occupy all of asyncio's
        while line := await asyncio.get_running_loop().run_in_executor(reader, sys.stdin.readline):
            task = asyncio.create_task(play(line))
            playing.add(task)
            task.add_done_callback(playing.discard)
        leave = threading.Timer(LEAVE_S, os._exit, (1,))  # exits even if a running episode does not end
        leave.daemon = True
        leave.start()
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)


def _prepare(settings: dict[str, Any]) -> None:
    """Configures the library to work without a network, and to write its files to `settings["directory"]`."""
    from verifiers.v1.runtimes import subprocess as local

    os.environ.update(settings["mark"])
    os.environ[TOKEN_VARIABLE] = settings["token"]
    for name in ("NO_PROXY", "no_proxy"):  # keeps the library's clients from using a proxy for 127.0.0.1
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1,localhost")))
    sys.path.extend(settings["paths"])
    os.environ["PYTHONPATH"] = os.pathsep.join(settings["paths"])  # for the tool servers, which are subprocesses
    local.CACHE_DIR = Path(settings["directory"])
    scripts = Path(settings["directory"]) / "scripts"
    scripts.mkdir()

    async def prepare_uv_script(self: Any, script: Any, env: Any = None, *, activate: bool = True) -> list[str]:
        """Returns the command that runs a harness's script with this Python. Replaces the library's function, which
        queries a package registry for dependencies in every process, even if they are installed."""
        data = script.encode() if isinstance(script, str) else script
        path = scripts / f"{hashlib.sha256(data).hexdigest()}.py"
        if not path.exists():
            path.write_bytes(data)  # only one thread reads and writes the file, so no temporary file is needed
        return [sys.executable, "-I", str(path)]

    local.SubprocessRuntime.prepare_uv_script = prepare_uv_script


def _with_agents(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the environment's settings with a model, a client, a runtime and a harness for each agent.

    An agent without a runtime in the settings gets a subprocess on this machine instead of the library's default, its
    vendor's cloud. An agent without a harness gets the default harness of the task set. If this default is `bash`, the
    agent gets `null`, the harness without tools.
    """
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.runtimes import PrimeConfig
    from verifiers.v1.utils.loaders import default_harness_id, env_config_type

    environment, roles = dict(settings["environment"]), settings["agents"]
    taskset = environment.get("taskset", {}).get("id", "")
    declared = {
        name: field.default
        for name, field in env_config_type(taskset, environment.get("id", "")).model_fields.items()
        if isinstance(field.default, AgentConfig)
    }
    if set(declared) != set(roles):
        sys.exit(f"agents names {', '.join(roles) or 'none'}, and the environment has {', '.join(declared)}")
    usual = default_harness_id(taskset)
    for name, agent in declared.items():
        agent_settings = dict(environment.get(name, {}))
        if isinstance(agent.runtime, PrimeConfig):
            agent_settings.setdefault("runtime", {"type": "subprocess"})
        if agent.harness is None:
            agent_settings.setdefault("harness", {"id": "null" if usual == "bash" else usual})
        client = {"type": "train", "base_url": settings["url"] + "/v1", "api_key_var": TOKEN_VARIABLE}
        environment[name] = agent_settings | {"model": roles[name], "client": client | settings["clients"][roles[name]]}
    return environment


def _trace(trace: Any) -> dict[str, Any]:
    """Converts a trace, the record of one agent in an episode, to JSON values. Raises ValueError for a reward or metric
    that is not finite."""
    rewards = {name: float(reward.value) for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
    for name, value in (rewards | metrics).items():
        if not math.isfinite(value):
            raise ValueError(f"{trace.agent.name} got {name} = {value}")
    return {
        "session": trace.id,
        "agent": trace.agent.name,
        "trained": trace.agent.trainable,
        "rewards": rewards,
        "metrics": metrics,
        "turns": trace.num_turns,
        "tool_calls": len(trace.tool_messages),
        "branches": _branches(trace),
    }


def _branches(trace: Any) -> list[dict[str, Any]]:
    """Returns the branches (token sequences) of a trace, each with the ranges [start, end, new] that the model
    generated.

    `new` is true in the first branch that contains a range, and false in later branches. So tokens that several
    branches share are trained only once (as in prime-rl).
    """
    branches, seen = [], set()
    for branch in trace.branches:
        if not branch.trainable:
            continue
        tokens: list[int] = []
        sampled = []
        for node in branch.nodes:
            tokens += node.token_ids
            if count := sum(node.mask):
                if not all(node.mask[-count:]):
                    raise ValueError("verifiers put something behind what the model wrote in one message")
                sampled.append([len(tokens) - count, len(tokens), id(node) not in seen])
                seen.add(id(node))
        if any(new for _, _, new in sampled):
            branches.append({"tokens": tokens, "sampled": sampled})
    return branches


if __name__ == "__main__":
    main()
