"""Plays episodes of environments of the library verifiers, which runs in a separate process with its own Python.

The library's agents send requests to the roles' engines through the token route (token_route.py), an HTTP server that
records the tokens, log-probs and weight versions. The library's traces define how the recorded answers form rollouts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config.base import ConfigError
from megatron_rl.engines.protocol import Sampling
from megatron_rl.environments.environment import EpisodeMaker, EpisodeSettings
from megatron_rl.environments.episode_types import AGENT, EnvironmentFailure, Episode
from megatron_rl.environments.line_process import LineProcess
from megatron_rl.environments.token_route import RoutedPlay, TokenRoute
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.types import NO_VERSION, Author, Outcome, Prompt, Rollout, spans_of

HOST = Path(__file__).with_name("verifiers_host.py")
REWARD = "reward"  # name of the reward that is the sum of an agent's rewards; all agents of an environment have it
START_S = 600.0  # timeout for loading the library and the task set, which may be on a slow disk or a network
LATE_S = 30.0  # seconds after an episode's timeout after which the library's process is considered hung
LOOK_S = 0.2  # seconds between two checks of the engines


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
    index: str = "index"  # field of a problem that contains the index of its task in the environment's task set
    paths: tuple[str, ...] = ()  # directories from which environments that are not installed are imported

    def __post_init__(self) -> None:
        self._running: _Running | None = None
        self._lock = threading.Lock()  # an evaluation may call `play` while a training iteration is in `play`
        if shutil.which(self.python) is None:
            raise ConfigError(
                f"python = {self.python}: there is no such program; `make verifiers` makes .venv-verifiers/bin/python"
            )
        taskset = self.environment.get("taskset")
        if not isinstance(taskset, Mapping) or not taskset.get("id"):
            raise ConfigError(f"environment.taskset = {taskset!r}: name the task set, such as {{id: reverse-text}}")
        if not self.agents:
            raise ConfigError("agents = {}: name the role of every agent, such as {agent: solver}")
        if unknown := set(self.renderers) - set(self.agents.values()):
            raise ConfigError(
                f"renderers.{min(unknown)}: the roles of the agents are {', '.join(self.agents.values())}"
            )

    def speaking_roles(self) -> Collection[str]:
        return tuple(self.agents.values())

    def play(
        self,
        context: RolloutContext,
        tasks: Sequence[Prompt],
        seeds: Sequence[int],
        samplings: Mapping[str, Sampling],
        settings: EpisodeSettings,
    ) -> list[Episode]:
        """Plays one episode of each task; see `EpisodeMaker.play`. The payload of a task contains its index in the task
        set under the key `self.index`.

        Raises ConfigError if the environment cannot be started or a task has no index.
        """
        indices = [self._index(task) for task in tasks]
        own = {role: samplings[role] for role in dict.fromkeys(self.agents.values())}
        with self._alone(context, own):
            running = self._started()
            with running.route.serving(context, own, seeds) as play:
                results = _Results(running, context, play, settings).of(indices)
                return [self._episode(play, task, result) for task, result in zip(tasks, results, strict=True)]

    @contextlib.contextmanager
    def _alone(self, context: RolloutContext, roles: Iterable[str]) -> Iterator[None]:
        """Context manager that holds the lock for `play`. While it waits for the lock, it updates the roles' engine
        servers.

        The thread that holds the lock may wait for a server that only the waiting thread can update to the current
        weights.
        """
        while not self._lock.acquire(timeout=LOOK_S):
            _look_after(context, roles)
        try:
            yield
        finally:
            self._lock.release()

    def _started(self) -> _Running:
        if self._running is None:
            told = {"environment": self.environment, "agents": self.agents, "paths": self.paths}
            self._running = _Running(self.python, told, self.renderers)
            weakref.finalize(self, self._running.close)  # also called at the exit of the program
        self._running.look()
        return self._running

    def _index(self, task: Prompt) -> int:
        index = task.payload.get(self.index)
        if type(index) is not int and not (isinstance(index, str) and index.isdecimal()):
            raise ConfigError(
                f"problem {task.id}: its {self.index} is {index!r}, and shall be the place of a task in the task set; "
                f"write data.path with verifiers_host.py --list, and set data.fields.{self.index}"
            )
        return int(index)

    def _episode(self, play: RoutedPlay, task: Prompt, result: Mapping[str, Any]) -> Episode:
        number, why = result["number"], result["why"]
        if why is None:
            try:
                return _scored(play, task, self.agents, result)
            except EnvironmentFailure as error:
                why = str(error)
        outcome = Outcome.TIMEOUT if result.get("timeout") else Outcome.ERROR
        return Episode(task=task, number=number, rollouts=(), outcome=outcome, why=why)


class _Running:
    """The resources that are kept between calls of `play`: the token route, the process, and a temporary directory.

    This object has no reference to its Verifiers object, so that it is closed when the Verifiers object is garbage
    collected.
    """

    def __init__(self, python: str, told: Mapping[str, Any], renderers: Mapping[str, Mapping[str, Any]]) -> None:
        """`python`: interpreter of the library. `told`: settings that are sent to the process. `renderers`: settings of
        the library renderers by role."""
        self._python, self._own, self._renderers = python, told, renderers
        self._directory = Path(tempfile.mkdtemp(prefix="megatron_rl_verifiers_"))
        self._process: LineProcess | None = None
        self.route = TokenRoute()
        self._owner = os.getpid()
        # A thread that generates rollouts ahead of training may call `ready` while the program exits
        self._closed = False

    def look(self) -> None:
        """Discards the process if it has ended since the last call. The next `ready` starts a new process."""
        if self._process is not None and self._process.ended:
            self.end()

    def ready(self, context: RolloutContext) -> LineProcess:
        """Returns the process, after starting it if it is not running.

        Raises ConfigError, with the end of the process's log, if the process does not start. Raises EnvironmentFailure
        if `close` was called before.
        """
        if self._closed:
            raise EnvironmentFailure("verifiers was closed while episodes were to be played")
        if self._process is None:
            words = [self._python, "-I", str(HOST)]
            try:
                self._process = LineProcess(words, self._directory / "log.txt")
                self._process.say(self._told(context, self._process))
                if self._process.hear(START_S) is None:
                    raise EOFError(f"it was not ready within {START_S:g} s")
            except (EOFError, OSError) as error:
                self.end()
                raise ConfigError(f"verifiers does not start ({' '.join(words)}): {error}") from error
        return self._process

    def end(self, grace_s: float = 0.0) -> None:
        """Ends the process, if any, after `grace_s` seconds. The next `ready` starts a new process."""
        process, self._process = self._process, None
        if process is not None:
            process.end(grace_s)

    def close(self) -> None:
        if os.getpid() != self._owner:  # a forked child must not close the parent's resources
            return
        self._closed = True
        self.end(grace_s=5.0)
        self.route.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _told(self, context: RolloutContext, process: LineProcess) -> dict[str, Any]:
        """Returns the first message to the process: its settings.

        Saves the tokenizers of the roles for the process, because their chat template may differ from the template in
        the model's directory.
        """
        clients = {}
        for role in self._own["agents"].values():
            directory = self._directory / "tokenizers" / role
            if not directory.exists():
                context.tokenizers[role].save_pretrained(directory)
            renderer = {"name": "default", **self._renderers.get(role, {})}
            clients[role] = {"renderer_model_name": str(directory), "renderer": renderer}
        scratch = tempfile.mkdtemp(prefix="host_", dir=self._directory)
        here = {"url": self.route.url, "token": self.route.token, "mark": process.mark, "directory": scratch}
        return {**self._own, **here, "clients": clients}


class _Results:
    """Collects the results of the episodes of one call of `play` from the process."""

    def __init__(self, running: _Running, context: RolloutContext, play: RoutedPlay, settings: EpisodeSettings) -> None:
        self._running, self._context, self._play, self._settings = running, context, play, settings
        self._deadlines: dict[int, float] = {}  # {index of a running episode: its deadline}
        self._found: dict[int, Mapping[str, Any]] = {}

    def of(self, indices: Sequence[int]) -> list[Mapping[str, Any]]:
        """Plays the tasks at these [E] indices of the task set. Returns [E] results. Exceptions of engines are
        raised."""
        waiting = deque(range(len(indices)))
        while len(self._found) < len(indices):
            _look_after(self._context, self._play.longest)
            process = self._running.ready(self._context)
            while waiting and len(self._deadlines) < self._settings.workers:
                self._begin(process, waiting.popleft(), indices)
            try:
                if (said := process.hear(LOOK_S)) is not None:
                    self._take(said)
            except EOFError as error:
                self._give_up(f"verifiers broke off: {error}")
            if self._play.failure is not None:
                self._running.end()
                raise self._play.failure
            if self._deadlines and min(self._deadlines.values()) < time.monotonic():
                self._give_up("verifiers hung in another episode")
        return [self._found[number] for number in range(len(indices))]

    def _take(self, said: Mapping[str, Any]) -> None:
        """Stores the result of a running episode. Raises EOFError if the message is not a result of a running
        episode."""
        number = said.get("number")
        if type(number) is not int or number not in self._deadlines:
            raise EOFError(f"it wrote a line of the episode {number!r}, which is not under way")
        del self._deadlines[number]
        self._found[number] = said

    def _begin(self, process: LineProcess, number: int, indices: Sequence[int]) -> None:
        timeout_s = self._settings.episode_timeout_s
        self._deadlines[number] = time.monotonic() + timeout_s + LATE_S
        session = self._play.session_id(number, "")
        process.say({"number": number, "task": indices[number], "session": session, "timeout_s": timeout_s})

    def _give_up(self, why: str) -> None:
        """Ends the process and fails all running episodes with the reason `why`. The next episode starts a new
        process."""
        self._running.end()
        for number, deadline in self._deadlines.items():
            late = deadline < time.monotonic()
            told = f"verifiers did not give it up after {self._settings.episode_timeout_s:g} s" if late else why
            self._found[number] = {"number": number, "timeout": late, "why": told}
        self._deadlines = {}


def _look_after(context: RolloutContext, roles: Iterable[str]) -> None:
    """Reports to the run's watchdog that the run is alive, and updates the engine servers of the roles as needed.

    Must be called in the thread that manages the servers, and not in a thread that reads answers.
    """
    context.watch.beat()
    for role in roles:
        context.engines[role].tend()


def _scored(play: RoutedPlay, task: Prompt, agents: Mapping[str, str], result: Mapping[str, Any]) -> Episode:
    """Converts a result of the process to an episode with rollouts.

    Raises EnvironmentFailure if the library's trace marks tokens as sampled that no engine sampled.
    """
    number, traces, rollouts = result["number"], result["traces"], []
    for trace in traces:
        agent = trace["session"].removeprefix(play.session_id(number, ""))
        payload = {**task.payload, AGENT: agent, "metrics": trace["metrics"]}
        rewards = {**trace["rewards"], REWARD: sum(trace["rewards"].values())}
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
    """Joins the recorded answers of one branch to a rollout.

    Token ranges that are trained in an earlier branch have the author ENVIRONMENT in this branch.
    """
    tokens = np.array(branch["tokens"], np.int32)
    logprobs, parts, done = np.zeros(len(tokens), np.float32), [], 0
    experts = answers[-1].experts
    for (start, end, new), answer in zip(branch["sampled"], answers, strict=True):
        parts.append((start - done, Author.ENVIRONMENT, NO_VERSION))
        if new:
            logprobs[start:end] = answer.logprobs[start:]
            parts += [(b - a, author, version) for a, b, author, version in answer.spans.tolist() if a >= start]
        else:
            parts.append((end - start, Author.ENVIRONMENT, NO_VERSION))
        done = end
    if experts is not None and done == len(tokens):  # the experts of each answer from the end of the previous answer
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
        experts=experts if done == len(tokens) else None,
    )
