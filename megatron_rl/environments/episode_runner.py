"""Plays episodes of environments with the roles' engines. An environment processes an answer as soon as it arrives,
while other answers are still generated."""

from __future__ import annotations

import contextlib
import copy
import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from megatron_rl.chat_template import system_of
from megatron_rl.config.base import ConfigError
from megatron_rl.engines.protocol import Completion, Sampling, Session
from megatron_rl.environments.agent_conversation import AgentConversation
from megatron_rl.environments.dialogue import UNREADABLE, Dialogue, dialogue_of
from megatron_rl.environments.episode_types import AGENT, EnvironmentFailure, Episode, EpisodeEnd, NextRequest, Said
from megatron_rl.environments.validation import check_request, checked_end, checked_requests, failed, refused
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.types import Outcome, Prompt
from megatron_rl.user_code import told

if TYPE_CHECKING:
    from megatron_rl.environments.environment import Environment, EpisodeSettings

LOOK_S = 0.5  # seconds between two checks of the engines
# Maximum number of answers in one episode. The key of a request is (index of the episode) x MOST_ANSWERS + index of the
# answer.
MOST_ANSWERS = 1 << 20
# Maximum characters per token. A text with more characters per available token cannot fit into the prompt and is not
# tokenized.
MOST_CHARACTERS = 512
# Maximum number of requests per episode for which the prompt is too long. If an environment went on after this, its
# episode would never end.
MOST_UNASKED = 100
# Stamps (instead of a number of calls) of the deadlines of the whole episode and of its `close`
WHOLE, CLOSING = -1, -2
Job = Callable[[], object]
_log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class _Underway:
    """The state of a running episode."""

    number: int  # index of the episode
    task: Prompt
    seed: int
    world: Environment
    agents: dict[str, AgentConversation] = field(default_factory=dict)
    # (request, key) of the pending requests, in the order in which the environment expects the answers
    expected: deque[tuple[NextRequest, int]] = field(default_factory=deque)
    # {key: completion} of answers that were not passed to the environment yet; the completion is None if the prompt was
    # too long
    arrived: dict[int, Completion | None] = field(default_factory=dict)
    asked: int = 0  # number of requests so far
    calls: int = 0  # number of tool calls so far
    unasked: int = 0  # number of requests whose prompt was too long for an answer
    stamp: int = 0  # number of calls of the environment so far; a result with an older stamp is ignored
    busy: bool = False  # whether a call of the environment is running


class EpisodesPlay:
    """One call of `Environment.play`.

    The caller's thread manages the state of all episodes. One thread per role receives the answers of its engine, and
    worker threads call the environments.
    """

    def __init__(
        self,
        environment: Environment,
        context: RolloutContext,
        samplings: Mapping[str, Sampling],
        settings: EpisodeSettings,
    ) -> None:
        self._environment, self._context, self._samplings, self._settings = environment, context, samplings, settings
        self._events: SimpleQueue[Callable[[], None]] = SimpleQueue()  # callbacks that the driver's thread runs
        self._workers = Workers(settings.workers)
        self._sessions: dict[str, Session] = {}
        self._dialogues: dict[str, Dialogue] = {}
        self._readers: list[threading.Thread] = []
        self._open = contextlib.ExitStack()  # the open `session.asking()` blocks
        self._running: dict[int, _Underway] = {}
        self._done: dict[int, Episode] = {}
        self._closing: set[int] = set()  # indices of the episodes whose `close` is running
        self._deadlines: list[tuple[float, int, int]] = []  # heap of (time, index of the episode, stamp)

    def play(self, tasks: Sequence[Prompt], seeds: Sequence[int]) -> list[Episode]:
        """Plays one episode of each of [E] tasks. Returns [E] episodes, in order.

        Raises ConfigError if an environment uses a role for which the recipe has no agent, or if the tokenizer does not
        support the dialogue. Exceptions of engines pass through.
        """
        finished = False
        try:
            for number, (task, seed) in enumerate(zip(tasks, seeds, strict=True)):
                running = _Underway(number=number, task=task, seed=seed, world=self._environment.copy())
                self._running[number] = running
                self._call(
                    running, lambda own=running: own.world.begin(copy.deepcopy(dict(own.task.payload)), own.seed)
                )
            while self._running:
                self._take_event()
                self._context.watch.beat()
                # Only this thread may update the engine servers; the threads that read answers may not.
                for role in self._sessions:
                    self._context.engines[role].tend()
            finished = True
        finally:
            self._leave(finished)
        return [self._done[number] for number in range(len(tasks))]

    def _take_event(self) -> None:
        """Waits for the next event or deadline, at most LOOK_S seconds, and processes it."""
        self._expire()
        if not self._running:
            return
        wait_s = min(LOOK_S, self._deadlines[0][0] - time.monotonic()) if self._deadlines else LOOK_S
        try:
            act = self._events.get(timeout=max(0.0, wait_s))
        except Empty:
            return
        act()

    def _take_answer(self, key: int, completion: Completion) -> None:
        running = self._running.get(key // MOST_ANSWERS)
        if running is not None:
            running.arrived[key] = completion
            self._advance(running)

    def _watch_closing(self, number: int) -> None:
        """Registers the deadline of a call of `close` that a worker has started."""
        self._closing.add(number)
        heapq.heappush(self._deadlines, (time.monotonic() + self._settings.step_timeout_s, number, CLOSING))

    def _fail(self, error: BaseException) -> None:
        raise error

    def _call(self, running: _Underway, job: Job) -> None:
        """Runs a call of an episode's environment in a worker thread."""
        running.stamp += 1
        running.busy = True
        number, stamp = running.number, running.stamp

        def work() -> None:
            self._events.put(partial(self._watch_call, number, stamp))
            try:
                # None if the episode was ended while the call waited for a worker
                result = job() if number in self._running else None
            except Exception as error:  # any exception of an environment is a failure of its episode
                result = error
            except SystemExit as error:  # some libraries exit on failure; SystemExit would silently end the thread
                result = EnvironmentFailure(told(error))
            self._events.put(partial(self._take_result, number, stamp, result))

        self._workers.do((number, stamp), work)

    def _watch_call(self, number: int, stamp: int) -> None:
        """Registers the deadlines of a call of the environment that a worker thread has started. The time that the call
        waited for a worker thread is excluded."""
        running, now = self._running.get(number), time.monotonic()
        if running is None or running.stamp != stamp:
            return
        if stamp == 1:
            heapq.heappush(self._deadlines, (now + self._settings.episode_timeout_s, number, WHOLE))
        if running.busy:
            heapq.heappush(self._deadlines, (now + self._settings.step_timeout_s, number, stamp))

    def _expire(self) -> None:
        """Ends the episodes whose deadlines have passed, with the outcome TIMEOUT."""
        while self._deadlines and self._deadlines[0][0] <= time.monotonic():
            _, number, stamp = heapq.heappop(self._deadlines)
            if stamp == CLOSING:
                if number in self._closing:  # `close` hangs: its worker slot is freed for another episode
                    self._closing.remove(number)
                    self._workers.leave((number, CLOSING))
                    seconds = self._settings.step_timeout_s
                    _log.warning(
                        "the environment of episode %d is not closed after %g s, and is left so", number, seconds
                    )
                continue
            running = self._running.get(number)
            if running is None or (stamp != WHOLE and not (running.busy and running.stamp == stamp)):
                continue
            if stamp == WHOLE:
                why = f"no end within episode_timeout_s = {self._settings.episode_timeout_s:g}"
            else:
                why = f"its environment took longer than step_timeout_s = {self._settings.step_timeout_s:g}"
            self._workers.leave((number, running.stamp))
            self._end(running, EpisodeEnd(outcome=Outcome.TIMEOUT, why=why))

    def _take_result(self, number: int, stamp: int, result: object) -> None:
        running = self._running.get(number)
        if running is None or running.stamp != stamp:  # the episode was ended meanwhile
            return
        running.busy = False
        if isinstance(result, Exception):
            self._end(running, failed(result))
        elif isinstance(result, EpisodeEnd):
            self._end(running, result)
        else:
            try:
                self._speak(running, checked_requests(result, of="begin" if stamp == 1 else "step"))
            except ConfigError:  # the error applies to all episodes
                raise
            except EnvironmentFailure as error:
                self._end(running, refused(error))
                return
            except UNREADABLE as error:
                self._end(running, failed(error, before="its requests cannot be made: "))
                return
            self._advance(running)

    def _speak(self, running: _Underway, requests: Sequence[NextRequest]) -> None:
        """Sends requests of an episode to the engines. Raises EnvironmentFailure if a request is invalid."""
        for request in requests:
            spoke_as = {name: agent.role for name, agent in running.agents.items()}
            check_request(request, self._samplings, spoke_as, [asked.agent for asked, _ in running.expected])
            session, dialogue = self._session(request.role)
            if request.agent not in running.agents:
                system = self._system(running.task, request.role)
                running.agents[request.agent] = AgentConversation(request.role, dialogue, request.tools, system=system)
            agent = running.agents[request.agent]
            sampling = self._sampling(running, request, agent, dialogue)
            key = running.number * MOST_ANSWERS + running.asked
            running.asked += 1
            running.expected.append((request, key))
            room = self._context.max_prompt_tokens[request.role]
            texts = [text for message in request.messages if isinstance(text := message.get("content"), str)]
            context = None if sum(map(len, texts)) > room * MOST_CHARACTERS else agent.listen(request.messages)
            if context is None or len(context) > room:
                running.arrived[key] = None
                running.unasked += 1
            elif not len(context):
                raise EnvironmentFailure(
                    f"agent {request.agent!r} was told an empty text: its first NextRequest needs one"
                )
            else:
                session.ask(key, context, sampling, after=agent.last_key)
                agent.last_key = key
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
        own = system_of(task.payload.get("messages", ())) if first else None
        return self._settings.system.get(role) if own is None else own

    def _sampling(
        self, running: _Underway, request: NextRequest, agent: AgentConversation, dialogue: Dialogue
    ) -> Sampling:
        own = self._samplings[request.role]
        return replace(
            own,
            n=1,
            seed=self._context.seed_for("answer", own.seed, running.seed, running.number, request.agent, agent.answers),
            max_tokens=min(own.max_tokens, request.max_tokens or own.max_tokens),
            stop_strings=(*own.stop_strings, *request.stop),
            stop_tokens=(*own.stop_tokens, *dialogue.stop_tokens),
        )

    def _advance(self, running: _Underway) -> None:
        """Passes the answer to the oldest pending request to the environment, if the answer has arrived."""
        if running.busy:
            return
        if not running.expected:
            self._end(
                running,
                EpisodeEnd(outcome=Outcome.ERROR, why="its environment asked nobody, and did not end the episode"),
            )
            return
        request, key = running.expected[0]
        if key not in running.arrived:
            return
        running.expected.popleft()
        completion, agent = running.arrived.pop(key), running.agents[request.agent]
        if completion is None:
            said = Said(agent=request.agent, text="", stop=None)
        else:
            reply = agent.say(
                completion, task=running.task, context=self._context, sampling=self._samplings[request.role]
            )
            said = Said(
                agent=request.agent,
                text=reply.text,
                calls=reply.calls,
                stop=completion.stop,
                tokens=len(completion.tokens),
            )
            running.calls += len(reply.calls)
        self._call(running, lambda: running.world.step(said))

    def _end(self, running: _Underway, over: EpisodeEnd) -> None:
        """Ends an episode and stores its result. Answers and results that arrive later are ignored."""
        del self._running[running.number]
        try:
            over = checked_end(over, {name: agent.answers for name, agent in running.agents.items()})
        except EnvironmentFailure as error:
            over = refused(error)
        rollouts = []
        if over.outcome is Outcome.SCORE:
            for name, agent in running.agents.items():
                payload = {**running.task.payload, **over.payload, AGENT: name}
                rewards = dict(over.rewards.get(name, {}))
                rollouts += [replace(r, payload=payload, rewards=rewards) for r in agent.rollouts()]
        agents = running.agents.values()
        self._done[running.number] = Episode(
            task=running.task,
            number=running.number,
            rollouts=rollouts,
            answers=over.answers,
            outcome=over.outcome,
            why=over.why,
            trace=over.trace,
            turns=sum(agent.answers for agent in agents),
            tool_calls=running.calls,
            cuts=sum(agent.cuts for agent in agents),
            told={name: tuple(agent.told) for name, agent in running.agents.items()},
        )
        self._workers.do((running.number, CLOSING), lambda: self._close(running))

    def _close(self, running: _Underway) -> None:
        """Closes the environment of an episode. Runs in a worker thread."""
        self._events.put(partial(self._watch_closing, running.number))
        try:
            running.world.close()
        finally:
            self._events.put(partial(self._closing.discard, running.number))

    def _session(self, role: str) -> tuple[Session, Dialogue]:
        """Returns the role's engine session and dialogue. The first call opens the session and starts its reader."""
        if role not in self._sessions:
            session = self._sessions[role] = self._context.session(role)
            self._dialogues[role] = dialogue_of(self._settings.dialogue, self._context.tokenizers[role])
            self._open.enter_context(session.asking())
            reader = threading.Thread(target=self._read, args=(session,), name=f"answers of {role}", daemon=True)
            self._readers.append(reader)
            reader.start()
        return self._sessions[role], self._dialogues[role]

    def _read(self, session: Session) -> None:
        try:
            for key, [completion] in session.answers():
                self._events.put(partial(self._take_answer, key, completion))
        except BaseException as error:  # raised again in the driver's thread
            self._events.put(partial(self._fail, error))

    def _leave(self, finished: bool) -> None:
        """Closes environments, sessions and threads. Waits for the threads that read answers, because a call of an
        engine may involve all ranks.

        `finished`: whether all episodes ended; if not, open requests are cancelled first.
        """
        for running in self._running.values():  # not empty only after a failure
            self._workers.do((running.number, CLOSING), running.world.close)
        self._open.close()
        if not finished:
            for session in self._sessions.values():
                session.close()
        self._workers.close(self._settings.step_timeout_s)
        for session in self._sessions.values():
            session.close()
        for reader in self._readers:
            reader.join()


class Workers:
    """Runs each job in a separate thread, at most `most` jobs at a time. The slot of a job that hangs can be freed."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: deque[tuple[object, Job]] = deque()
        self._running: set[object] = set()  # keys of the jobs that occupy a slot
        self._change = threading.Condition()

    def do(self, key: Hashable, job: Job) -> None:
        """Queues a job, which is started when a slot is free."""
        with self._change:
            self._waiting.append((key, job))
            self._start()

    def leave(self, key: Hashable) -> None:
        """Frees the slot of a job that has ended or that hangs."""
        with self._change:
            self._running.discard(key)
            self._start()
            self._change.notify_all()

    def close(self, patience_s: float) -> None:
        """Waits until no job is queued or occupies a slot, at most `patience_s` seconds."""
        with self._change:
            self._change.wait_for(lambda: not self._running and not self._waiting, patience_s)

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._most:
            key, job = self._waiting.popleft()
            self._running.add(key)
            threading.Thread(target=self._work, args=(key, job), name="environment", daemon=True).start()

    def _work(self, key: Hashable, job: Job) -> None:
        try:
            job()
        except (Exception, SystemExit):  # only `close` can raise here; jobs of begin and step catch their errors
            _log.warning("an environment could not be closed", exc_info=True)
        finally:
            self.leave(key)
