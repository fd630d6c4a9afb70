"""Plays episodes of environments with the roles' engines. An environment processes each answer as soon as the answer
arrives, while engines still generate other answers."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from megatron_rl.config.base import ConfigError
from megatron_rl.engines.protocol import Completion, Sampling
from megatron_rl.environments.agent_conversation import AgentConversation
from megatron_rl.environments.dialogue import UNREADABLE, Dialogue, dialogue_of
from megatron_rl.environments.engine_answers import EngineAnswers
from megatron_rl.environments.episode_types import EnvironmentFailure, Episode, EpisodeEnd, NextRequest, Said
from megatron_rl.environments.validation import check_request, checked_end, checked_requests, failed, refused
from megatron_rl.lib.loop_thread import LoopThread
from megatron_rl.lib.user_code import told
from megatron_rl.texts.chat_template import system_of
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.types import AGENT, Outcome, Prompt

if TYPE_CHECKING:
    from megatron_rl.environments.environment import Environment, EpisodeSettings

# Maximum number of requests for answers in one episode.
# The key of a request to an engine is (index of the episode) x MOST_ANSWERS + (index of the request in the episode).
MOST_ANSWERS = 1 << 20
# Maximum number of characters per token. Messages are too long for a prompt, and are not tokenized, if they have more
# characters than MOST_CHARACTERS x (maximum number of tokens of the prompt).
MOST_CHARACTERS = 512
# Maximum number of requests per episode whose prompt is too long for an answer. An environment that ignores the missing
# answers could otherwise send such requests forever.
MOST_UNASKED = 100
_log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class _Underway:
    """The state of a running episode."""

    number: int  # index of the episode
    task: Prompt
    seed: int
    world: Environment
    agents: dict[str, AgentConversation] = field(default_factory=dict)
    # The pending requests, each with the future of its answer, in the order in which the environment expects the
    # answers. The future is None if the prompt was too long.
    expected: deque[tuple[NextRequest, Future[Completion] | None]] = field(default_factory=deque)
    num_requests: int = 0  # number of requests so far
    calls: int = 0  # number of tool calls so far
    unasked: int = 0  # number of requests whose prompt was too long for an answer
    too_long: str = ""  # description of the first prompt that was too long for an answer, with its number of tokens


class EpisodesPlay:
    """A runner of the episodes of one call of `Environment.play`.

    Each episode is a coroutine. All coroutines run in one event loop, which has its own thread. The caller's thread
    updates the engine servers while it waits. Each call of an environment's method runs in a new thread.
    """

    def __init__(
        self,
        environment: Environment,
        context: RolloutContext,
        samplings: Mapping[str, Sampling],
        settings: EpisodeSettings,
    ) -> None:
        """Raises ConfigError if a role's tokenizer does not support the dialogue."""
        self._environment, self._context, self._samplings, self._settings = environment, context, samplings, settings
        self._dialogues: dict[str, Dialogue] = {
            role: dialogue_of(settings.dialogue, context.tokenizers[role]) for role in samplings
        }
        self._workers = asyncio.Semaphore(settings.workers)
        self._answers = EngineAnswers(context, samplings)
        self._episodes: list[asyncio.Task[Episode]] = []

    def play(self, tasks: Sequence[Prompt], seeds: Sequence[int], numbers: Sequence[int]) -> list[Episode]:
        """Plays one episode of each of [E] tasks. Returns [E] episodes, in order. `numbers`: index of each episode.

        Raises ConfigError if an environment uses a role for which the recipe has no agent. Exceptions of engines are
        propagated. Every environment is closed, also after an error, unless a call of the environment hangs.
        """
        with contextlib.closing(LoopThread("episodes")) as thread:
            try:
                with self._answers.reading():
                    return self._answers.look_after(thread.start(self._play(tasks, seeds, numbers)))
            finally:  # after an error, all requests are cancelled, so each episode ends when it next awaits an answer
                thread.run(self._wait())

    async def _play(self, tasks: Sequence[Prompt], seeds: Sequence[int], numbers: Sequence[int]) -> list[Episode]:
        self._episodes = [
            asyncio.create_task(self._episode(number, task, seed))
            for number, task, seed in zip(numbers, tasks, seeds, strict=True)
        ]
        return await asyncio.gather(*self._episodes)

    async def _wait(self) -> None:
        """Waits until all episodes have ended, but at most `step_timeout_s` seconds."""
        if self._episodes:
            await asyncio.wait(self._episodes, timeout=self._settings.step_timeout_s)

    async def _episode(self, number: int, task: Prompt, seed: int) -> Episode:
        """Plays one episode and closes its environment."""
        running = _Underway(number=number, task=task, seed=seed, world=self._environment.copy())
        try:
            async with asyncio.timeout(None) as limit:
                over = await self._talk(running, limit)
        except TimeoutError:
            why = f"no end within episode_timeout_s = {self._settings.episode_timeout_s:g}"
            over = EpisodeEnd(outcome=Outcome.TIMEOUT, why=why, failure=None)
        finally:
            result = await self._call(running.world.close)
            if isinstance(result, EpisodeEnd):
                seconds = self._settings.step_timeout_s
                _log.warning("the environment of episode %d is not closed after %g s, and is left so", number, seconds)
            elif isinstance(result, Exception):
                _log.warning("an environment could not be closed", exc_info=result)
        return _result(running, over)

    async def _talk(self, running: _Underway, limit: asyncio.Timeout) -> EpisodeEnd:
        """Passes answers of the models to the environment until the environment ends the episode. Returns the
        EpisodeEnd.

        `limit`: the timeout of the episode. The time starts when the environment's `begin` is called in a new thread.
        """
        method, world = "begin", running.world
        payload = dict(running.task.payload)
        result = await self._call(lambda: world.begin(copy.deepcopy(payload), running.seed), limit)
        while not isinstance(result, EpisodeEnd):
            if isinstance(result, Exception):
                return failed(result)
            try:
                self._ask(running, checked_requests(result, of=method))
            except ConfigError:  # the error applies to all episodes
                raise
            except EnvironmentFailure as error:
                return refused(error)
            except UNREADABLE as error:
                return failed(error, prefix="its requests cannot be made: ")
            if not running.expected:
                return EpisodeEnd(
                    outcome=Outcome.ERROR, why="its environment asked nobody, and did not end the episode"
                )
            answer = await self._said(running)
            method, result = "step", await self._call(lambda answer=answer: world.step(answer))
        return result

    async def _call(self, job: Callable[[], object], limit: asyncio.Timeout | None = None) -> object:
        """Calls a method of an environment in a new thread, as soon as fewer than `workers` such calls are running.

        Returns the result of the call, or the exception that the call raised. If the call takes longer than the setting
        `step_timeout_s`, returns an EpisodeEnd with the outcome TIMEOUT; the hanging call no longer counts as running.
        `limit`: the timeout of the episode, whose time starts with this call; None: its time has started already.
        """
        loop, seconds = asyncio.get_running_loop(), self._settings.step_timeout_s
        done: asyncio.Future[object] = loop.create_future()

        def work() -> None:
            try:
                result = job()
            except Exception as error:  # any exception raised by an environment fails only its episode
                result = error
            except SystemExit as error:  # some libraries exit on failure; if uncaught, it ends the thread silently
                result = EnvironmentFailure(told(error))
            with contextlib.suppress(RuntimeError):  # raised if the call ended only after the loop was closed
                loop.call_soon_threadsafe(lambda: done.cancelled() or done.set_result(result))

        async with self._workers:
            if limit is not None:
                if self._answers.over:  # after an error, no further episode begins
                    raise asyncio.CancelledError
                limit.reschedule(loop.time() + self._settings.episode_timeout_s)
            threading.Thread(target=work, name="environment", daemon=True).start()
            await asyncio.wait([done], timeout=seconds)
        if done.done():
            return done.result()
        return EpisodeEnd(outcome=Outcome.TIMEOUT, why=f"its environment took longer than step_timeout_s = {seconds:g}")

    def _ask(self, running: _Underway, requests: Sequence[NextRequest]) -> None:
        """Sends requests of an episode to the engines. Raises EnvironmentFailure if a request is invalid."""
        for request in requests:
            spoke_as = {name: agent.role for name, agent in running.agents.items()}
            check_request(request, self._samplings, spoke_as, [pending.agent for pending, _ in running.expected])
            dialogue = self._dialogues[request.role]
            if request.agent not in running.agents:
                system = self._system(running.task, request.role)
                running.agents[request.agent] = AgentConversation(request.role, dialogue, request.tools, system=system)
            agent = running.agents[request.agent]
            sampling = self._sampling(running, request, agent, dialogue)
            key = running.number * MOST_ANSWERS + running.num_requests
            running.num_requests += 1
            room = self._context.max_prompt_tokens[request.role]
            texts = [text for message in request.messages if isinstance(text := message.get("content"), str)]
            characters = sum(map(len, texts))
            context = None if characters > room * MOST_CHARACTERS else agent.listen(request.messages)
            answer = None
            if context is None or len(context) > room:
                running.unasked += 1
                size = f"{characters} characters" if context is None else f"{len(context)} tokens"
                setting = f"roles.{request.role}.max_prompt_tokens = {room}"
                running.too_long = running.too_long or f"a prompt of agent {request.agent!r} has {size}, and {setting}"
            elif not len(context):
                raise EnvironmentFailure(
                    f"agent {request.agent!r} was told an empty text: its first NextRequest needs one"
                )
            else:
                answer = self._answers.ask(request.role, key, context, sampling, after=agent.last_key)
                agent.last_key = key
            running.expected.append((request, answer))
        if running.unasked > MOST_UNASKED:
            raise EnvironmentFailure(
                f"its agents were asked {running.unasked} times without room for an answer: end the episode where "
                "Said.stop is None"
            )

    def _system(self, task: Prompt, role: str) -> str | None:
        """Returns the system message of a role's agents, or None.

        For the first role, the system message of the problem's conversation is returned if there is one. Otherwise, and
        for other roles, the role's entry in the setting `system` is returned.
        """
        first = role == next(iter(self._samplings))
        system = system_of(task.payload.get("messages", ())) if first else None
        return self._settings.system.get(role) if system is None else system

    def _sampling(
        self, running: _Underway, request: NextRequest, agent: AgentConversation, dialogue: Dialogue
    ) -> Sampling:
        sampling = self._samplings[request.role]
        return replace(
            sampling,
            n=1,
            seed=self._context.seed_for(
                "answer", sampling.seed, running.seed, running.number, request.agent, agent.answers
            ),
            max_tokens=min(sampling.max_tokens, request.max_tokens or sampling.max_tokens),
            stop_strings=(*sampling.stop_strings, *request.stop),
            stop_tokens=(*sampling.stop_tokens, *dialogue.stop_tokens),
        )

    async def _said(self, running: _Underway) -> Said:
        """Waits for the answer to the oldest pending request. Returns the answer as `Environment.step` receives it."""
        request, answer = running.expected[0]
        completion = None if answer is None else await asyncio.wrap_future(answer)
        running.expected.popleft()
        if completion is None:
            return Said(agent=request.agent, text="", stop=None)
        reply = running.agents[request.agent].say(
            completion, task=running.task, context=self._context, sampling=self._samplings[request.role]
        )
        running.calls += len(reply.calls)
        return Said(
            agent=request.agent, text=reply.text, calls=reply.calls, stop=completion.stop, tokens=len(completion.tokens)
        )


def _result(running: _Underway, over: EpisodeEnd) -> Episode:
    """Returns an episode whose outcome is a failure, and which has no rollouts, if the environment's end is invalid."""
    try:
        over = checked_end(over, {name: agent.answers for name, agent in running.agents.items()})
    except EnvironmentFailure as error:
        over = refused(error)
    if over.outcome is not Outcome.SCORE and running.too_long:
        over = replace(over, why=f"{over.why} ({running.too_long})")
    rollouts = []
    if over.outcome is Outcome.SCORE:
        for name, agent in running.agents.items():
            payload = {**running.task.payload, **over.payload, AGENT: name}
            payload |= {"failure": over.why} if over.failure == "policy" else {}
            rewards = dict(over.rewards.get(name, {}))
            rollouts += [replace(r, payload=payload, rewards=rewards) for r in agent.rollouts()]
    agents = running.agents.values()
    return Episode(
        task=running.task,
        number=running.number,
        rollouts=rollouts,
        answers=over.answers,
        outcome=over.outcome,
        why=over.why,
        failure=over.failure,
        trace=over.trace,
        turns=sum(agent.answers for agent in agents),
        tool_calls=running.calls,
        cuts=sum(agent.cuts for agent in agents),
        observations={name: tuple(agent.observations) for name, agent in running.agents.items()},
    )
