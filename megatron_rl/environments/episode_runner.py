"""Plays episodes of environments with the roles' engines: each answer is acted on while others are still written."""

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

LOOK_S = 0.5  # between two looks at the engines
MOST_ANSWERS = 1 << 20  # of one episode: an ask's key is the episode's number times this, and the answer's number
MOST_CHARACTERS = 512  # that one token stands for: a longer text has no room, and nobody waits for its tokens
MOST_UNASKED = 100  # times that an agent without room may be asked again; an environment that goes on has no end
WHOLE, CLOSING = -1, -2  # stamps of deadlines: of the whole episode, and of its `close`
Job = Callable[[], object]
_log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class _Underway:
    """An episode under way."""

    number: int
    task: Prompt
    seed: int
    world: Environment
    agents: dict[str, AgentConversation] = field(default_factory=dict)
    # requests whose answers are to come, and their keys
    expected: deque[tuple[NextRequest, int]] = field(default_factory=deque)
    arrived: dict[int, Completion | None] = field(default_factory=dict)  # by key; None: there was no room
    asked: int = 0  # answers so far
    calls: int = 0  # of tools
    unasked: int = 0  # requests of agents that had no room
    stamp: int = 0  # number of its calls of the environment; a result with an older one is late
    busy: bool = False  # a call is under way


class EpisodesPlay:
    """One call of `Environment.play`.

    The caller's thread keeps the state of all episodes. One thread per role reads the answers of its engine, and worker
    threads call the environments.
    """

    def __init__(
        self,
        environment: Environment,
        context: RolloutContext,
        samplings: Mapping[str, Sampling],
        settings: EpisodeSettings,
    ) -> None:
        self._environment, self._context, self._samplings, self._settings = environment, context, samplings, settings
        self._events: SimpleQueue[Callable[[], None]] = SimpleQueue()  # for the driver's thread to call
        self._workers = Workers(settings.workers)
        self._sessions: dict[str, Session] = {}
        self._dialogues: dict[str, Dialogue] = {}
        self._readers: list[threading.Thread] = []
        self._open = contextlib.ExitStack()  # the blocks in which sessions may be asked
        self._running: dict[int, _Underway] = {}
        self._done: dict[int, Episode] = {}
        self._closing: set[int] = set()  # episodes whose `close` is under way
        self._deadlines: list[tuple[float, int, int]] = []  # heap: time, episode, stamp

    def play(self, tasks: Sequence[Prompt], seeds: Sequence[int]) -> list[Episode]:
        """Plays one episode of each task. [E] -> [E], in order. Raises what an engine raises, and ConfigError for roles
        that the recipe has no agent for and for a dialogue that the tokenizer cannot have."""
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
                for role in self._sessions:  # its reader is another thread than the one that owns the servers
                    self._context.engines[role].tend()
            finished = True
        finally:
            self._leave(finished)
        return [self._done[number] for number in range(len(tasks))]

    def _take_event(self) -> None:
        """Waits for the next event or deadline, but not for long, and acts on it."""
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
        """Notes the deadline of a call of `close` that a worker has begun."""
        self._closing.add(number)
        heapq.heappush(self._deadlines, (time.monotonic() + self._settings.step_timeout_s, number, CLOSING))

    def _fail(self, error: BaseException) -> None:
        raise error

    def _call(self, running: _Underway, job: Job) -> None:
        """Has a worker call the environment of an episode."""
        running.stamp += 1
        running.busy = True
        number, stamp = running.number, running.stamp

        def work() -> None:
            self._events.put(partial(self._watch_call, number, stamp))
            try:
                result = job() if number in self._running else None  # it may have been given up meanwhile
            except Exception as error:  # whatever an environment raises is its episode's failure
                result = error
            except SystemExit as error:  # a library's way to give up; it would end the worker, and nobody would hear
                result = EnvironmentFailure(told(error))
            self._events.put(partial(self._take_result, number, stamp, result))

        self._workers.do((number, stamp), work)

    def _watch_call(self, number: int, stamp: int) -> None:
        """Notes the deadlines of a call that a worker has begun: waiting for a worker does not count."""
        running, now = self._running.get(number), time.monotonic()
        if running is None or running.stamp != stamp:
            return
        if stamp == 1:
            heapq.heappush(self._deadlines, (now + self._settings.episode_timeout_s, number, WHOLE))
        if running.busy:
            heapq.heappush(self._deadlines, (now + self._settings.step_timeout_s, number, stamp))

    def _expire(self) -> None:
        """Gives up the episodes whose deadlines have passed."""
        while self._deadlines and self._deadlines[0][0] <= time.monotonic():
            _, number, stamp = heapq.heappop(self._deadlines)
            if stamp == CLOSING:
                if number in self._closing:  # its place is given to another episode
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
        if running is None or running.stamp != stamp:  # it was given up
            return
        running.busy = False
        if isinstance(result, Exception):
            self._end(running, failed(result))
        elif isinstance(result, EpisodeEnd):
            self._end(running, result)
        else:
            try:
                self._speak(running, checked_requests(result, of="begin" if stamp == 1 else "step"))
            except ConfigError:  # no other episode can be played either
                raise
            except EnvironmentFailure as error:
                self._end(running, refused(error))
                return
            except UNREADABLE as error:
                self._end(running, failed(error, before="its requests cannot be made: "))
                return
            self._advance(running)

    def _speak(self, running: _Underway, requests: Sequence[NextRequest]) -> None:
        """Asks the engines for the answers to requests. Raises EnvironmentFailure for one that cannot be made."""
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
        """Returns the system message of a role's agents: for the first role that of the problem's own conversation,
        where it has one; else what `system` in the settings says."""
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
        """Gives the environment the first answer that it waits for, once it is there."""
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
        """Ends an episode; whatever of it is still to come is passed over."""
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
        """Closes the environment of an episode, in a worker."""
        self._events.put(partial(self._watch_closing, running.number))
        try:
            running.world.close()
        finally:
            self._events.put(partial(self._closing.discard, running.number))

    def _session(self, role: str) -> tuple[Session, Dialogue]:
        """Opens the role's session at its first request, and starts to read its answers."""
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
        except BaseException as error:  # the driver's thread raises it
            self._events.put(partial(self._fail, error))

    def _leave(self, finished: bool) -> None:
        """Closes sessions, environments and threads. Engines may work for all ranks together: their readers are waited
        for."""
        for running in self._running.values():  # after a failure
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
    """Runs jobs, each in a thread of its own and at most `most` at a time. A job that hangs can be given up."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: deque[tuple[object, Job]] = deque()
        self._running: set[object] = set()  # keys of the jobs that count
        self._change = threading.Condition()

    def do(self, key: Hashable, job: Job) -> None:
        """Runs a job as soon as there is a place."""
        with self._change:
            self._waiting.append((key, job))
            self._start()

    def leave(self, key: Hashable) -> None:
        """Gives the place of a job that has ended, or that hangs, to another job."""
        with self._change:
            self._running.discard(key)
            self._start()
            self._change.notify_all()

    def close(self, patience_s: float) -> None:
        """Waits until all jobs have ended or were given up, but at most `patience_s`."""
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
        except (Exception, SystemExit):  # calls of begin and step report their errors: this is one of `close`
            _log.warning("an environment could not be closed", exc_info=True)
        finally:
            self.leave(key)
