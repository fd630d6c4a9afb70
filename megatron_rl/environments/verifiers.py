"""Plays episodes of environments of the library verifiers. The library runs in a separate process with its own Python.

The library's agents send requests to the roles' engines through the token route (token_route.py), an HTTP server that
records the tokens, log-probs and weight versions. The library returns traces, records of what each agent did. The
traces determine how the recorded answers are joined to rollouts.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config.base import ConfigError, refuse
from megatron_rl.engines.protocol import Sampling
from megatron_rl.environments.environment import EpisodeMaker, EpisodeSettings
from megatron_rl.environments.episode_types import EnvironmentFailure, Episode
from megatron_rl.environments.line_process import LineProcess
from megatron_rl.environments.token_route import RoutedPlay, TokenRoute
from megatron_rl.lib.loop_thread import LoopThread
from megatron_rl.rewards.reward_functions import LARGEST, in_range
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.types import AGENT, NO_VERSION, Author, Outcome, Prompt, Rollout, spans_of

HOST = Path(__file__).with_name("verifiers_host.py")
REWARD = "reward"  # name of the reward that is the sum of an agent's other rewards; every agent has this reward
START_S = 600.0  # timeout for loading the library and the task set, which may be on a slow disk or a network
_OPENING = threading.Lock()  # lock, held while a Verifiers object looks up or creates its _Host
# seconds after an episode's timeout; if the library has not ended the episode by then, its process is considered hung
LATE_S = 30.0


@dataclass(kw_only=True)
class Verifiers(EpisodeMaker):
    """An environment of the library verifiers 0.4.

    The first `play` starts the library's process. The process ends when this object is deleted.
    """

    python: str  # Python interpreter of the library's environment: .venv-verifiers/bin/python (`make verifiers`)
    environment: Mapping[
        str, Any
    ]  # the library's settings: {taskset: {id: ...}}, and settings of the environment class
    agents: Mapping[str, str]  # {agent of the environment: role whose model generates the agent's answers}
    # {role: settings of the library renderers}, such as {solver: {name: qwen3}}. Default: the tokenizer's chat
    # template, which does not parse tool calls.
    renderers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # name of the problem field that contains the index of the problem's task in the environment's task set
    index: str = "index"
    paths: tuple[str, ...] = ()  # directories from which environments that are not installed are imported

    def __post_init__(self) -> None:
        self._host: _Host | None = None
        refuse(*self._problems())

    def _problems(self) -> Iterator[str]:
        if shutil.which(self.python) is None:
            yield f"python = {self.python}: there is no such program; `make verifiers` makes .venv-verifiers/bin/python"
        taskset = self.environment.get("taskset")
        if not isinstance(taskset, Mapping) or not taskset.get("id"):
            yield f"environment.taskset = {taskset!r}: name the task set, such as {{id: reverse-text}}"
        if not self.agents:
            yield "agents = {}: name the role of every agent, such as {agent: solver}"
        if unknown := set(self.renderers) - set(self.agents.values()):
            yield f"renderers.{min(unknown)}: the roles of the agents are {', '.join(self.agents.values())}"

    def speaking_roles(self) -> Collection[str]:
        return tuple(self.agents.values())

    def play(
        self,
        context: RolloutContext,
        tasks: Sequence[Prompt],
        seeds: Sequence[int],
        samplings: Mapping[str, Sampling],
        settings: EpisodeSettings,
        numbers: Sequence[int] | None = None,
    ) -> list[Episode]:
        """Plays one episode of each task; see `EpisodeMaker.play`. The payload of a task contains, under the key
        `self.index`, the index of the task in the task set.

        Raises ConfigError if the environment cannot be started or a task has no index.
        """
        indices = [self._index(task) for task in tasks]
        agent_samplings = {role: samplings[role] for role in dict.fromkeys(self.agents.values())}
        with _OPENING:
            if self._host is None:
                host_settings = {"environment": self.environment, "agents": self.agents, "paths": self.paths}
                self._host = _Host(self.python, host_settings, self.renderers)
                weakref.finalize(self, self._host.close)  # also called at the exit of the program
            host = self._host
        with host.route.serving(context, agent_samplings, seeds, numbers) as play:
            results = play.look_after(host.thread.start(host.results(context, play, indices, settings)))
            episodes = [self._episode(play, n, *pair) for n, pair in enumerate(zip(tasks, results, strict=True))]
            return [replace(episode, number=number) for episode, number in zip(episodes, play.numbers, strict=True)]

    def _index(self, task: Prompt) -> int:
        index = task.payload.get(self.index)
        if type(index) is not int and not (isinstance(index, str) and index.isdecimal()):
            raise ConfigError(
                f"problem {task.id}: its {self.index} is {index!r}, and shall be the place of a task in the task set; "
                f"write data.path with verifiers_host.py --list, and set data.fields.{self.index}"
            )
        return int(index)

    def _episode(self, play: RoutedPlay, number: int, task: Prompt, result: Mapping[str, Any]) -> Episode:
        why = result["why"]
        if why is None:
            try:
                return _scored(play, number, task, self.agents, result["traces"])
            except EnvironmentFailure as error:  # malformed trace; not played again, as the trace would be the same
                return Episode(task=task, number=number, rollouts=(), outcome=Outcome.ERROR, why=str(error))
        if result.get("timeout"):  # the time limit of the whole episode was exceeded
            return Episode(task=task, number=number, rollouts=(), outcome=Outcome.TIMEOUT, why=why)
        # An episode that reaches a turn or token limit of the library ends with rewards, not with an error. An error is
        # a failure of a provider, a harness, a tool server, a sandbox or the task's code.
        return Episode(
            task=task, number=number, rollouts=(), outcome=Outcome.ERROR, why=why, failure="infrastructure"
        )  # fmt: skip


class _Host:
    """The resources of one Verifiers object: the process of the library verifiers, the token route, and a temporary
    directory. Concurrent calls of `Verifiers.play` share them.

    A _Host has no reference to the Verifiers object. Therefore the Verifiers object can be garbage collected, which
    closes the _Host. The coroutines of a _Host run in the event loop of its attribute `thread`.
    """

    def __init__(self, python: str, settings: Mapping[str, Any], renderers: Mapping[str, Mapping[str, Any]]) -> None:
        """`python`: interpreter that has the library installed. `settings`: settings that are sent to the process.
        `renderers`: {role: settings of the library renderers}."""
        self._python, self._own, self._renderers = python, settings, renderers
        self._directory = Path(tempfile.mkdtemp(prefix="megatron_rl_verifiers_"))
        self._process: LineProcess | None = None
        self._reader: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._pending: dict[str, asyncio.Future[Mapping[str, Any]]] = {}  # {session id of an episode: its result}
        self.route, self.thread = TokenRoute(), LoopThread("verifiers")
        self._owner = os.getpid()
        # `results` checks this flag, because a thread that generates rollouts ahead of training may call it after
        # `close`
        self._closed = False

    async def results(
        self, context: RolloutContext, play: RoutedPlay, indices: Sequence[int], settings: EpisodeSettings
    ) -> list[Mapping[str, Any]]:
        """Plays one episode of each of [E] tasks. Returns [E] results, in order. `indices`: index of each task.

        Raises ConfigError, with the end of the process's log, if the library's process does not start. Raises
        EnvironmentFailure if `close` was called before.
        """
        workers = asyncio.Semaphore(settings.workers)

        async def one(number: int, task: int) -> Mapping[str, Any]:
            session, timeout_s = play.session_id(number, ""), settings.episode_timeout_s
            async with workers:
                process = await self._ready(context, play)
                future = self._pending[session] = asyncio.get_running_loop().create_future()
                process.say({"session": session, "task": task, "timeout_s": timeout_s})
                await asyncio.wait([future], timeout=timeout_s + LATE_S)
                if not future.done():
                    late = {"timeout": True, "why": f"verifiers did not give it up after {timeout_s:g} s"}
                    future.set_result(late)
                    await self._end(process, "verifiers hung in another episode")
                return future.result()

        return await asyncio.gather(*(one(number, task) for number, task in enumerate(indices)))

    def close(self) -> None:
        if os.getpid() != self._owner:  # a forked child must not close the parent's resources
            return
        self._closed = True
        if not self.thread.loop.is_closed():
            self.thread.run(self._end(self._process, "verifiers was closed", grace_s=5.0))
            self.thread.close()
        self.route.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _ready(self, context: RolloutContext, play: RoutedPlay) -> LineProcess:
        """Returns the library's process. Starts the process if it is not running. Raises CancelledError if the requests
        of `play` are already cancelled, so that no further episode begins after an error."""
        async with self._starting:
            if play.over:
                raise asyncio.CancelledError
            if self._process is not None and self._process.ended:
                await self._end(self._process, "verifiers ended")
            if self._closed:
                raise EnvironmentFailure("verifiers was closed while episodes were to be played")
            if self._process is None:
                words = [self._python, "-I", str(HOST)]
                process = LineProcess(self._directory / "log.txt")
                try:
                    await process.start(words)
                    try:
                        process.say(self._told(context, process))
                        await asyncio.wait_for(process.hear(), START_S)
                    except BaseException:
                        await process.end(0.0)
                        raise
                except (EOFError, OSError) as error:  # also TimeoutError
                    why = str(error) or f"it was not ready within {START_S:g} s"
                    raise ConfigError(f"verifiers does not start ({' '.join(words)}): {why}") from error
                self._process, self._reader = process, asyncio.create_task(self._read(process))
            return self._process

    async def _read(self, process: LineProcess) -> None:
        """Reads the results that the process sends until the process ends. Sets the futures in `_pending`."""
        try:
            while True:
                message = await process.hear()
                future = self._pending.pop(str(message.get("session")), None)
                if future is None:
                    raise EOFError(f"it wrote a line of the episode {message.get('session')}, which is not under way")
                future.set_result(message)
        except EOFError as error:
            await self._end(process, f"verifiers broke off: {error}")

    async def _end(self, process: LineProcess | None, why: str, grace_s: float = 0.0) -> None:
        """Ends the library's process. Its running episodes get a failed result. `why`: reason in these results.
        `grace_s`: time in seconds that the process has to end by itself. No-op if `process` is not the current process,
        because another coroutine may have ended it already."""
        if process is None or process is not self._process:
            return
        self._process, pending, self._pending = None, self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_result({"timeout": False, "why": why})
        await process.end(grace_s)

    def _told(self, context: RolloutContext, process: LineProcess) -> dict[str, Any]:
        """Returns the first message to the process, which contains its settings.

        Saves the roles' tokenizers to files that the process loads. The process does not load the tokenizers from the
        models' directories, because a role's chat template may differ from the template in the model's directory.
        """
        clients = {}
        for role in self._own["agents"].values():
            directory = self._directory / "tokenizers" / role
            if not directory.exists():
                context.tokenizers[role].save_pretrained(directory)
            renderer = {"name": "default", **self._renderers.get(role, {})}
            clients[role] = {"renderer_model_name": str(directory), "renderer": renderer}
        scratch = tempfile.mkdtemp(prefix="host_", dir=self._directory)
        connection = {"url": self.route.url, "token": self.route.token, "mark": process.mark, "directory": scratch}
        return {**self._own, **connection, "clients": clients}


def _scored(
    play: RoutedPlay, number: int, task: Prompt, agents: Mapping[str, str], traces: Sequence[Mapping[str, Any]]
) -> Episode:  # fmt: skip
    """Converts the traces that the library returned for one episode to an Episode with rollouts.

    Raises EnvironmentFailure if a trace marks tokens as sampled that no engine sampled.
    """
    rollouts = []
    for trace in traces:
        agent = trace["session"].removeprefix(play.session_id(number, ""))
        payload = {**task.payload, AGENT: agent, "metrics": trace["metrics"]}
        rewards = {**trace["rewards"], REWARD: sum(trace["rewards"].values())}
        if wrong := [name for name, value in rewards.items() if not in_range(value)]:
            raise EnvironmentFailure(f"agent {agent!r} got the reward {wrong[0]!r} = {rewards[wrong[0]]}: not a finite "
                                     f"number of at most {LARGEST:g}")  # fmt: skip
        for branch in trace["branches"] if trace["trained"] else ():
            role, group = agents[trace["agent"]], f"{number}:{task.id}"
            answers = list(_answers(play, number, agent, branch))
            rollouts.append(_rollout(branch, answers, role, group, payload, rewards))
    return Episode(
        task=task,
        number=number,
        rollouts=rollouts,
        turns=sum(trace["turns"] for trace in traces),
        tool_calls=sum(trace["tool_calls"] for trace in traces),
        cuts=sum(max(0, len(trace["branches"]) - 1) for trace in traces),
    )


def _answers(play: RoutedPlay, number: int, agent: str, branch: Mapping[str, Any]) -> Iterator[Rollout]:
    """Yields the recorded answer for each token range that the trace marks as sampled. Raises EnvironmentFailure if
    there is no recorded answer."""
    tokens = np.array(branch["tokens"], np.int32)
    for start, end, _ in branch["sampled"]:
        answer = play.answer(number, agent, tokens[:end], start)
        if answer is None:
            raise EnvironmentFailure(
                f"agent {agent}: the trace shows tokens {start} to {end} as sampled, and no engine sampled them there"
            )
        yield answer


def _rollout(
    branch: Mapping[str, Any], answers: Sequence[Rollout], role: str, group: str, payload: Mapping[str, Any],
    rewards: Mapping[str, float],
) -> Rollout:  # fmt: skip
    """Joins the recorded answers of one branch to a rollout. A branch is a token sequence of a trace.

    A token range that is also in an earlier branch is trained there. In this branch it has the author ENVIRONMENT, so
    that it is not trained twice.
    """
    tokens = np.array(branch["tokens"], np.int32)
    logprobs, parts, done = np.zeros(len(tokens), np.float32), [], 0
    experts = answers[-1].experts
    values = {name: np.zeros((len(tokens), *own.shape[1:]), own.dtype) for name, own in answers[-1].values.items()}
    for (start, end, new), answer in zip(branch["sampled"], answers, strict=True):
        parts.append((start - done, Author.ENVIRONMENT, NO_VERSION))
        if new:
            logprobs[start:end] = answer.logprobs[start:]
            for name, own in answer.values.items():
                values[name][start:end] = own[start:]
            parts += [(b - a, author, version) for a, b, author, version in answer.spans.tolist() if a >= start]
        else:
            parts.append((end - start, Author.ENVIRONMENT, NO_VERSION))
        done = end
    # the routed experts of a token come from the first answer whose prompt or answer tokens include the token
    if experts is not None and done == len(tokens):
        experts = experts.copy()
        for answer in reversed(answers[:-1]):
            if answer.experts is not None:
                experts[: len(answer.experts)] = answer.experts
    return Rollout(
        role=role,
        group=group,
        tokens=tokens,
        logprobs=logprobs,
        spans=spans_of(*parts, (len(tokens) - done, Author.ENVIRONMENT, NO_VERSION)),
        stop=answers[-1].stop,
        payload=payload,
        rewards=rewards,
        partner_weight=answers[-1].partner_weight,
        values=values,
        experts=experts if done == len(tokens) else None,
    )
