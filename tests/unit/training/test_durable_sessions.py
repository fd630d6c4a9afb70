"""Sessions of all engines with a log of finished samples: what is known is answered from the log, and not asked for."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engines import ScriptedEngine
from fake_servers import engines_in, expected
from limits import PROCESS_S
from test_environments_verifiers import SAMPLINGS, Asker, asked, context_of, route

from megatron_rl.engines.protocol import Completion, Engine, Sampling
from megatron_rl.environments.token_route import GENERATE
from megatron_rl.training.iteration_engines import IterationEngine, OpenSessions
from megatron_rl.training.write_ahead import LogFile
from megatron_rl.types import Stop

__all__ = ["route"]  # a fixture
SAMPLING = Sampling(max_tokens=4, n=4, seed=3)
PROMPTS = {key: np.array([key + 1, 7, 9], np.int32) for key in range(5)}


def known(number: int) -> Completion:
    """A sample that no engine here would draw."""
    return Completion(tokens=[90 + number], logprobs=[-0.5], stop=Stop.STOP, versions=[(0, 1)])


@pytest.fixture(params=["rounds", "servers"])
def engine(request, tmp_path):
    """Yields an engine, and a function that counts the samples that it was asked for."""
    if request.param == "rounds":
        made = ScriptedEngine(lambda p, key, j, s: expected(p, s, key)[j], eos=0)
        rows, draw = [], made.generate_rows
        made.generate_rows = lambda some: rows.extend(some) or draw(some)
        yield made, lambda: len(rows)
        return
    with engines_in(tmp_path) as servers:
        fakes = [servers.start(replica) for replica in range(2)]
        counts = []
        for fake in fakes:
            write = fake._write
            fake._write = lambda prompt, params, write=write: counts.append(params["n"]) or write(prompt, params)
        yield servers.serving(2), lambda: sum(counts)


def answers(engine: Engine, path: Path, *keys: int) -> dict[int, list[list[int]]]:
    file = LogFile(path, "same")
    session = engine.session(0, file.samples("a"))
    for key in keys:
        session.ask(key, PROMPTS[key], SAMPLING)
    found = {key: [one.tokens.tolist() for one in group] for key, group in session.answers()}
    file.close()
    return found


def drawn(key: int) -> list[list[int]]:
    return expected(PROMPTS[key].tolist(), SAMPLING, key)


def write(path: Path, role: str, samples: dict[int, list[int]], sampling: Sampling = SAMPLING) -> None:
    """Writes samples: by key of the request, the indices of those that are finished."""
    file = LogFile(path, "same")
    log = file.samples(role)
    for key, own in samples.items():
        address, _ = log.known(key, PROMPTS[key], sampling)
        log.add([(address, j, known(j)) for j in own])
    file.close()


def test_durable_only_samples_without_a_record_are_asked_for(tmp_path, engine):
    made, count = engine
    write(tmp_path / "log", "a", {0: [0, 1, 2, 3], 1: [2], 2: [0, 3]})
    first = answers(made, tmp_path / "log", 0, 1, 2, 3)
    logged = {0: [0, 1, 2, 3], 1: [2], 2: [0, 3], 3: []}
    assert first == {k: [[90 + j] if j in own else drawn(k)[j] for j in range(4)] for k, own in logged.items()}
    assert count() == 0 + 3 + 2 + 4
    assert answers(made, tmp_path / "log", 3, 2, 4, 1, 0) == first | {4: drawn(4)}, "in any order"
    assert count() == 9 + 4
    assert answers(made, tmp_path / "log", *range(5)) == first | {4: drawn(4)} and count() == 13


@pytest.mark.parametrize(
    "change", [{"seed": 4}, {"max_tokens": 5}, {"temperature": 0.5}, {"stop_tokens": (1,)}, {"logprobs": False}]
)
def test_durable_a_record_of_another_request_is_none(tmp_path, change):
    made = ScriptedEngine(lambda p, key, j, s: expected(p, s, key)[j], eos=0)
    values = {"max_tokens": 4, "n": 4, "seed": 3}
    write(tmp_path / "log", "a", {0: [0, 1, 2, 3]}, Sampling(**(values | change)))
    write(tmp_path / "log", "b", {0: [0, 1, 2, 3]})
    assert answers(made, tmp_path / "log", 0) == {0: drawn(0)}


def test_durable_known_answers_come_while_others_may_still_ask(tmp_path, engine):
    """An agent whose answers are all known goes on, though no engine is busy and no request is outstanding."""
    made, count = engine
    write(tmp_path / "log", "a", {key: [0, 1, 2, 3] for key in range(3)})
    file, turn = LogFile(tmp_path / "log", "same"), threading.Semaphore(0)
    session = made.session(0, file.samples("a"))
    inside = threading.Event()

    def ask() -> None:
        with session.asking():
            inside.set()
            for key in range(3):
                session.ask(key, PROMPTS[key], SAMPLING)
                assert turn.acquire(timeout=PROCESS_S)

    agent = threading.Thread(target=ask)
    agent.start()
    assert inside.wait(PROCESS_S)
    found = []
    for key, group in session.answers():
        found.append((key, [one.tokens.tolist() for one in group]))
        turn.release()
    agent.join()
    assert found == [(key, [[90 + j] for j in range(4)]) for key in range(3)] and count() == 0
    file.close()


def test_durable_a_round_is_written_whole_or_not_at_all(tmp_path):
    """The log of a killed round is cut at many places: a sample of the round is known only if all of them are."""
    path = tmp_path / "log"
    made = ScriptedEngine(lambda p, key, j, s: expected(p, s, key)[j], eos=0)
    LogFile(path, "same").close()
    empty = path.stat().st_size
    whole = answers(made, path, 0, 1, 2)
    data = path.read_bytes()
    for size in (*range(empty, len(data), 97), len(data) - 1, len(data)):
        path.write_bytes(data[:size])
        file = LogFile(path, "same")
        assert file.recovered == (12 if size == len(data) else 0)
        file.close()
        assert answers(made, path, 0, 1, 2) == whole and path.read_bytes() == data, "it is the same round again"


def test_durable_answers_of_the_token_route_are_logged_too(tmp_path, route):
    """A library that plays in another process asks again after a kill, and gets what it got before."""
    rows: list[Any] = []
    context = context_of()
    for engine in context.engines.values():
        draw: Callable[..., Any] = engine.generate_rows
        engine.generate_rows = lambda some, draw=draw: rows.extend(some) or draw(some)

    def play(*prompts: list[int]) -> list[str]:
        file = LogFile(tmp_path / "log", "same")
        engines = {
            role: IterationEngine(engine, 0, OpenSessions(), file.samples(role))
            for role, engine in context.engines.items()
        }
        with route.serving(context_of(**engines), SAMPLINGS, [17]) as own:
            ask = Asker(route)
            found = [ask("POST", GENERATE, asked(p), own.session_id(0, "solver"))[1]["choices"] for p in prompts]
        file.close()
        return [json.dumps(one) for one in found]

    first = play([1, 2], [1, 2], [3, 4])
    assert len(rows) == 3 and len({*first}) > 1
    # a tool that says something else the second time leads to another prompt: the model is asked anew
    again = play([1, 2], [1, 2], [3, 5])
    assert again[:2] == first[:2] and len(rows) == 4
