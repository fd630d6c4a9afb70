"""Servers in the trainer's GPUs: who has the memory when, over whole iterations of Tango, and servers that do not
sleep."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import SimpleNamespace

import pytest
from fake_policy import TablePolicy
from fake_servers import ADDRESS, ROLE, TOKEN, engines_in, until
from fake_vllm import FakeVllm
from loops import Setup, train
from one_process import CommandsAtOnce, OneProcess
from test_recipes import TOKENIZER, context_of, mixed_verifier, problems, solution
from test_tango_run import Reader
from toys import streaming

from megatron_rl.algorithms.policy_loss import PolicyLoss
from megatron_rl.config.schema import (
    LossConfig,
)
from megatron_rl.engines.http import ServerLost
from megatron_rl.engines.pool.server_pool import Pool
from megatron_rl.engines.protocol import EngineError, Sampling, complete
from megatron_rl.engines.server_registry import Listing
from megatron_rl.engines.vllm.settings import Vllm
from megatron_rl.messages.commands import Commands
from megatron_rl.recipes.tango import Tango
from megatron_rl.session.colocated_servers import ColocatedServers, start_servers
from megatron_rl.session.control_protocol import HELD, HOLD, RELEASE, SERVES, SETTLE, ControlChannel, ControlClient
from megatron_rl.session.server_connection import connect
from megatron_rl.session.server_supervisors import Supervisor
from megatron_rl.training import loop
from megatron_rl.training.collector import Collector, RolloutMaker, upcoming
from megatron_rl.training.credit import CreditStage
from megatron_rl.training.device_memory import DeviceMemory, EngineTurns, leaving
from megatron_rl.training.held_out_sets import HeldOutSet
from megatron_rl.training.iteration import EvaluationDraws
from megatron_rl.training.store import IterationStore
from megatron_rl.training.update import Trainee

G, V = "generator", "verifier"
MEMORY_ROUTES = ("/sleep", "/wake_up", "/update_weights")


@pytest.fixture
def run_engines(tmp_path):
    with engines_in(tmp_path) as made:
        yield made


class Watched(TablePolicy):
    """A policy that looks at the servers whenever it is used, and writes down what happens."""

    def __init__(self, name, fakes, events):
        super().__init__(len(TOKENIZER))
        self.name, self._fakes, self._events = name, fakes, events

    def update(self, work, step, loss):
        assert not self.away and all(fake.sleeping == {"weights", "kv_cache"} for fake in self._fakes.values())
        self._events.append(f"train {self.name}")
        return super().update(work, step, loss)


class _GpuPools:
    """Pools of one fake server for each role."""

    def __init__(self, tmp_path, stack):
        self.fakes, self.pools = {}, {}
        for name in (G, V):
            (tmp_path / name).mkdir()
            run_engines = stack.enter_context(engines_in(tmp_path / name))
            self.fakes[name] = run_engines.start()
            self.pools[name] = run_engines.open(replicas=1, colocate=True)
            run_engines.living(1)

    def refit(self, name, version):
        assert self.pools[name].begin_refit(version, ADDRESS, wait_s=5.0) == [0]
        assert self.pools[name].end_refit() == 1


def _played(context, policies, fakes, events):
    """Has the context's engines look at the memory whenever they are asked: all policies away, all servers awake."""
    for name, engine in context.engines.items():
        asked = engine.session

        def session(priority=0, log=None, asked=asked, name=name):
            assert all(policy.away and policy.asleep for policy in policies.values()), "a policy beside engines"
            assert not any(fake.sleeping for fake in fakes.values()), "an engine was asked that sleeps"
            events.append(f"play {name}")
            return asked(priority, log)

        engine.session = session


def test_over_whole_iterations_of_tango_the_trainer_and_awake_servers_never_hold_memory_together(tmp_path):
    for name, text in (("g", "Q {question}\n"), ("v", "Q {question} S {solution} K {num_steps}\n")):
        (tmp_path / f"{name}.txt").write_text(text)
    recipe = Tango(
        generator_updates=2, generator_iterations=2, warmup_updates=1, group_size=2, verifications=3,
        balanced_per_class=2,
        generator_template=str(tmp_path / "g.txt"), verifier_template=str(tmp_path / "v.txt"),
    )  # fmt: skip
    context = context_of(lambda p, i, j, s: solution(2, "yes" if (i + j) % 2 else "no"), mixed_verifier)
    events, saved = [], []
    with contextlib.ExitStack() as stack:
        gpus = _GpuPools(tmp_path, stack)
        policies = {name: Watched(name, gpus.fakes, events) for name in (G, V)}
        _played(context, policies, gpus.fakes, events)
        trainees, refits = {}, {}
        for name in recipe.roles():
            streams = streaming(policies[name], context.engines[name])

            def refit(version, name=name, streams=streams):
                assert not policies[name].away and policies[name].asleep
                assert all("kv_cache" in fake.sleeping for fake in gpus.fakes.values())
                gpus.refit(name, version)
                streams(version)
                events.append(f"refit {name}")

            loss = PolicyLoss(LossConfig(kl_coef=0.001))
            trainees[name] = Trainee(policy=policies[name], loss=loss)

            def resident(version, name=name, refit=refit):
                with leaving(policies[name].memory):
                    refit(version)

            refits[name] = resident
        commands = Commands(OneProcess())
        servers = ColocatedServers(commands, gpus.pools, [], discarding=[G, V], start_timeout_s=5.0)
        progress = loop.Progress()
        maker = RolloutMaker(
            recipe=recipe, readers=dict.fromkeys(trainees, Reader(2)), context=context, prompts_per_iteration=2
        )
        iterations = upcoming(recipe.schedule(), progress.state_dict())
        store = IterationStore(tmp_path / "rollouts")
        collector = Collector(maker, CreditStage(recipe), iterations, store, max_staleness=0)
        setup = Setup(
            commands=commands, memory=DeviceMemory(trainees, colocated=True), refits=refits, engines=servers,
            policy_of={name: name for name in trainees},
            recipe=recipe, context=context, 
            held_out=[HeldOutSet(name="held", prompts=problems(2), draws=EvaluationDraws())],
            iterations=collector,
            log=lambda cycle, scope, m, *, iteration: None, save=lambda number, state: saved.append(number),
        )  # fmt: skip
        assert train(setup, loop.Plan(iterations=sum(map(len, recipe.schedule()))), progress)
        assert [fake.crashed for fake in gpus.fakes.values()] == ["", ""]
        assert [fake.version for fake in gpus.fakes.values()] == [str(progress.updates[name]) for name in (G, V)]
        routes = [path for path in gpus.fakes[G].seen if path in MEMORY_ROUTES]
    assert events[:2] == [f"refit {G}", f"refit {V}"] and saved == [4]
    iterations = [(event, after) for event, after in zip(events, events[1:], strict=False) if event.startswith("train")]
    assert [event for event, _ in iterations] == [f"train {V}", f"train {G}", f"train {G}", f"train {V}"]
    assert all(after == event.replace("train", "refit") for event, after in iterations)
    # asleep, weights back, taken, all awake; and in an iteration that trains the verifier asleep and awake
    assert routes[:4] == ["/sleep", "/wake_up", "/update_weights", "/wake_up"]
    assert routes.count("/update_weights") == 1 + progress.updates[G] == 3


def test_servers_that_get_weights_drop_theirs_and_the_others_keep_them(tmp_path):
    with contextlib.ExitStack() as stack:
        gpus = _GpuPools(tmp_path, stack)
        servers = ColocatedServers(CommandsAtOnce(), gpus.pools, [], discarding=[G, V], start_timeout_s=5.0)
        servers.sleep([G, V])
        gpus.refit(G, 1)
        gpus.refit(V, 1)
        servers.wake()
        servers.sleep([G])
        assert gpus.fakes[G].dropped and not gpus.fakes[V].dropped
        assert not gpus.pools[G].members.serving() and gpus.pools[V].members.serving()
        gpus.refit(G, 2)
        servers.wake()
        assert not any(fake.dropped or fake.sleeping or fake.crashed for fake in gpus.fakes.values())
        sampling = Sampling(max_tokens=3)
        assert [c.versions for [c] in complete(gpus.pools[V], [[1, 2]], sampling)] == [[(0, 1)]]
        assert [c.versions for [c] in complete(gpus.pools[G], [[1, 2]], sampling)] == [[(0, 2)]]


def test_engines_that_took_weights_sleep_again_while_another_policy_of_the_iteration_trains():
    """The first policy's engine kept its new weights on the device in the update of the second one."""
    events = []

    class Engines:
        def sleep(self, refitted):
            events.append(("sleep", sorted(refitted)))

        def wake(self):
            events.append(("wake", []))

    turns = EngineTurns(Engines(), lambda: events.append(("offload", [])))
    turns.generate()  # as they do already: nothing happens
    for name in (G, V):
        turns.clear([G, V])
        events.append((f"train {name}", []))
        with turns.refit(name):
            events.append((f"refit {name}", []))
    turns.clear()
    turns.clear()  # they sleep already: nothing happens
    events.append(("save", []))  # a checkpoint
    turns.generate()
    with turns.refit(G):  # without an update before it: the engines still generate
        events.append((f"refit {G}", []))
    assert events == [
        ("sleep", [G, V]), (f"train {G}", []), (f"refit {G}", []),
        ("sleep", [V]), (f"train {V}", []), (f"refit {V}", []),
        ("sleep", []), ("save", []), ("offload", []), ("wake", []), ("sleep", []), (f"refit {G}", []),
    ]  # fmt: skip


def test_engines_that_generate_again_take_every_weight_sync_anew():
    """`refitted` names only policies whose engine gets new weights before it wakes: it may drop the old ones."""
    slept = []
    engines = SimpleNamespace(sleep=lambda refitted: slept.append([*refitted]), wake=lambda: None)
    turns = EngineTurns(engines, lambda: None)  # type: ignore[arg-type]
    for _ in range(2):
        turns.clear([G])
        with turns.refit(G):
            pass
        turns.generate()
    assert slept == [[G], [G]]


def test_engines_elsewhere_have_no_turns():
    turns = EngineTurns(None, lambda: pytest.fail("policies were moved away"))
    turns.generate()
    turns.clear([G])
    with turns.refit(G):
        turns.clear()


@pytest.mark.parametrize(("colocated", "sleeps"), [(False, False), (False, True), (True, False)])
def test_a_policy_is_on_the_device_only_while_it_is_needed(colocated, sleeps):
    policy = TablePolicy(len(TOKENIZER))
    trainee = Trainee(policy=policy, loss=PolicyLoss(LossConfig(kl_coef=0.0)), sleeps=sleeps)
    memory = DeviceMemory({G: trainee}, colocated=colocated)
    memory.start()
    between = (colocated or sleeps, colocated)  # without gradients and optimizer state, without weights
    assert (policy.asleep, policy.away) == between
    with memory.train(G):
        assert (policy.asleep, policy.away) == (False, False)
    assert policy.asleep == (colocated or sleeps)
    with memory.weights(G):
        assert not policy.away
    assert (policy.asleep, policy.away) == between
    memory.offload()
    assert policy.asleep and policy.away


def test_the_fake_fails_as_a_gpu_would_where_the_order_is_wrong():
    fake = FakeVllm(TOKEN)
    listing = Listing(role=ROLE, replica=0, url=fake.url, incarnation="", log="")
    server = connect(Vllm(colocate=True), TOKEN, 5.0)(listing)
    server.sleep(discard=True)
    server.update(1, 1.0)  # before its weights are back
    assert fake.crashed == "an update of weights that are not there"
    server.close(), fake.close()


def test_a_server_that_cannot_sleep_is_out_and_its_supervisor_is_told_to_end_it(run_engines):
    fake = run_engines.start()
    pool: Pool = run_engines.serving(1, colocate=True, replicas=1)
    fake.fail("/sleep", "error")
    listing = pool.members.living()[0].listing
    assert pool.sleep([listing.incarnation], discard=False) == []
    assert not pool.members.serving() and "could not be put to sleep" in pool.members.known()


def test_a_server_that_hangs_on_the_way_to_sleep_is_given_up_in_time(run_engines):
    fake = run_engines.start()
    client = connect(Vllm(colocate=True), TOKEN, 0.2)
    pool = run_engines.open(connector=client, colocate=True, replicas=1)
    run_engines.living(1)
    fake.fail("/sleep", "hang")
    assert pool.sleep([], discard=True) == []
    assert "no answer within 0.2 s" in pool.members.known()


def test_a_server_that_does_not_wake_does_not_serve(run_engines):
    fake = run_engines.start()
    pool = run_engines.serving(1, colocate=True, replicas=1)
    pool.sleep([], discard=False)
    fake.fail("/wake_up", "shape")
    pool.wake()
    assert not pool.members.serving() and "could not be woken" in pool.members.known()


def test_a_server_that_was_just_listed_is_put_to_sleep_too(run_engines):
    """It was started again while the trainer waited: it is awake, and the pool has not seen a sign of its life yet."""
    pool = run_engines.open(replicas=1, colocate=True)
    fake = run_engines.start()
    [listing] = run_engines.registry.read(ROLE)
    assert pool.sleep([listing.incarnation], discard=True) == [listing.incarnation]
    assert fake.sleeping == {"weights", "kv_cache"}


def test_the_only_server_that_comes_back_in_an_iteration_gets_the_weights_while_all_others_sleep(run_engines):
    fake = run_engines.start()
    pool = run_engines.serving(1, colocate=True, replicas=1)
    calls = run_engines.refreshes()
    ColocatedServers(CommandsAtOnce(), {ROLE: pool}, [], discarding=[ROLE], start_timeout_s=5.0)
    run_engines.beats[0].clear()
    run_engines.announce(fake.url)  # another incarnation
    fake.version = "default"
    until("the new server", lambda: pool.members.living() and not pool.members.serving())
    [[answer]] = complete(pool, [[1, 2, 3]], Sampling(max_tokens=4))
    assert calls == [[0]] and answer.versions == [(0, 1)] and not fake.crashed
    asked = [path for path in fake.seen if path in MEMORY_ROUTES]
    assert asked[-4:] == ["/sleep", "/wake_up", "/update_weights", "/wake_up"]


def test_without_a_living_server_the_refit_is_left_to_those_that_come_back(run_engines):
    pool = run_engines.open(replicas=1, colocate=True)
    assert pool.begin_refit(3, ADDRESS, wait_s=1.0) == [] and pool.version == 3


def test_a_server_that_dies_asleep_does_not_keep_the_refit_waiting(run_engines):
    """It was still listed as living when the refit began, and nothing could start another one before its end."""
    fake = run_engines.start()
    pool: Pool = run_engines.serving(1, colocate=True, replicas=1)
    assert len(pool.sleep([m.listing.incarnation for m in pool.members.living()], discard=True)) == 1
    fake.close()
    assert pool.begin_refit(2, ADDRESS, wait_s=5.0) == []
    assert pool.members.version == 2


class _Supervised:
    """A supervisor of a test: its orders come over a socket, and `line` is the run's end of it."""

    role, name, log = ROLE, f"{ROLE}-0", "a log"

    def __init__(self):
        own, self.other = socket.socketpair()
        self.line, self.orders = ControlClient(own), ControlChannel(threading.Event())
        self.orders.listen(self.other.fileno())

    def ended(self):
        return False


@pytest.fixture
def supervised():
    found = _Supervised()
    yield found
    found.line.close()
    assert found.orders.stop.wait(10)
    found.other.close()


def test_a_supervisor_finishes_a_start_before_it_says_that_nothing_starts(supervised):
    line, orders = supervised.line, supervised.orders
    line.say(SETTLE)
    with pytest.raises(TimeoutError):  # as it has begun to start one
        line.answer(0.05)
    orders.serves("abc")
    assert line.answer(10) == [SERVES, "abc"]


def test_a_supervisor_ends_a_server_that_is_awake_and_starts_none_until_it_is_released(supervised):
    line, orders = supervised.line, supervised.orders
    started = threading.Event()

    def serve():
        with orders.start():
            started.set()

    with orders.start():
        orders.serves("awake")
        line.say(SETTLE)
        assert line.answer(10) == [SERVES, "awake"]
        line.say(HOLD, "asleep")
        until("the order", lambda: orders.unwanted)
    assert line.answer(10) == [HELD]
    thread = threading.Thread(target=serve)
    thread.start()
    assert not started.wait(0.05)
    line.say(RELEASE)
    thread.join(10)
    assert started.is_set() and not orders.unwanted


def test_a_server_that_sleeps_is_left_alone(supervised):
    with supervised.orders.start():
        supervised.orders.serves("asleep")
        supervised.line.say(SETTLE)
        assert supervised.line.answer(10) == [SERVES, "asleep"]
        supervised.line.say(HOLD, "other", "asleep")
        assert supervised.line.answer(10) == [HELD]
        assert not supervised.orders.unwanted


def test_each_rank_starts_the_servers_whose_first_gpu_is_its_own_role_after_role(tmp_path, monkeypatch):
    """A server of the next role starts once the start before is over, or has taken too long."""
    events = []

    def answer(name: str) -> None:
        events.append(f"{name} answers")
        raise TimeoutError

    def make(run, role, replica, *, gpus):
        name = f"{role}-{replica}"
        line = SimpleNamespace(
            say=lambda order: events.append(f"{name} {order}"), answer=lambda timeout_s: answer(name)
        )
        return SimpleNamespace(name=name, line=line)

    monkeypatch.setattr("megatron_rl.session.colocated_servers.Supervisor", make)
    engines = SimpleNamespace(directory=tmp_path, server_roles=[G, V])
    started = {}
    for rank in range(6):
        start_servers(engines, Vllm(colocate=True, replicas=2, tp=2), rank, started.setdefault(rank, []))
    names = {rank: [supervisor.name for supervisor in own] for rank, own in started.items()}
    assert names == {0: [f"{G}-0", f"{V}-0"], 1: [], 2: [f"{G}-1", f"{V}-1"], 3: [], 4: [], 5: []}
    assert events[:6] == [f"{role}-0 {event}" for role in (G, V) for event in ("settle", "answers", "release")]


def test_a_supervisor_that_does_not_answer_keeps_the_trainer_from_the_gpu(supervised, monkeypatch):
    monkeypatch.setattr("megatron_rl.session.colocated_servers.MARGIN_S", 0.05)
    servers = ColocatedServers(CommandsAtOnce(), {}, [supervised], discarding=[], start_timeout_s=0.0)  # type: ignore[list-item]
    with pytest.raises(EngineError, match="generator-0 neither sleeps nor ends"):
        servers.sleep([])


def test_the_end_of_the_line_tells_a_supervisor_to_leave():
    own, other = socket.socketpair()
    orders = ControlChannel(threading.Event())
    orders.listen(other.fileno())
    ControlClient(own).close()
    assert orders.stop.wait(10)
    other.close()


def test_a_run_that_dies_with_an_answer_unread_tells_its_supervisor_to_leave():
    """The kernel then says that the line was reset, in place of its end."""
    own, other = socket.socketpair()
    orders = ControlChannel(threading.Event())
    with orders.start():
        pass  # a server that has ended
    orders.listen(other.fileno())
    ControlClient(own.dup()).say(HOLD, "one")
    until("an answer", lambda: _unread(own))
    own.close()
    assert orders.stop.wait(5.0)
    other.close()


def _unread(own):
    """Returns the first byte that is there to be read, and leaves it there."""
    own.setblocking(False)
    try:
        return own.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return b""


def test_supervisors_hear_orders_over_their_standard_input(tmp_path, monkeypatch):
    """A real process, which cannot start a server because of its config, and says that it has none."""
    (tmp_path / "config.yaml").write_text("roles: {}\nrecipe: {target: a.b:C}\ndata: {path: x}\nrun: {name: none}\n")
    supervisor = Supervisor(tmp_path, ROLE, 0, gpus=[1, 2])
    supervisor.line.say(SETTLE)
    assert supervisor.line.answer(60) == []  # it ended
    supervisor.ask_to_leave()
    supervisor.wait(10)
    assert "embedded" in supervisor.log.read_text()


def test_a_server_that_says_that_it_still_sleeps_is_lost():
    fake = FakeVllm(TOKEN)
    server = connect(Vllm(colocate=True), TOKEN, 5.0)(
        Listing(role=ROLE, replica=0, url=fake.url, incarnation="", log="")
    )
    server.sleep(discard=False)
    server.pause()
    assert fake.sleeping == {"kv_cache"}
    server.resume()  # nothing may be written before the cache is there
    assert fake.count("/resume") == 0
    fake.fail("/wake_up", "shape")
    with pytest.raises(ServerLost):
        server.wake()
    server.wake()
    server.wake()  # it is awake
    assert not fake.sleeping
    server.close(), fake.close()
