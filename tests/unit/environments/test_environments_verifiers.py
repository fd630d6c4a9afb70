"""Episodes of a library in another process, against the token route: what is asked, recorded, joined, and goes wrong.

The process here is one of ours that plays by rote (fake_verifiers); tests/multi has the library's own.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import fake_verifiers
import numpy as np
import psutil
import pytest
import torch
from fake_engines import TableEngine
from toys import characters

from megatron_rl.config.plugins import build
from megatron_rl.config.schema import ConfigError, Use
from megatron_rl.engines.protocol import EngineError, Sampling
from megatron_rl.environments import verifiers
from megatron_rl.environments.environment import EpisodeSettings
from megatron_rl.environments.episode_types import EnvironmentFailure
from megatron_rl.environments.token_route import GENERATE, MODELS, SESSION, TokenRoute
from megatron_rl.environments.verifiers import Verifiers
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.types import Author, Outcome, Prompt, Stop

VOCAB, VERSION = 12, 3
ROLES = {"proposer": "inventor", "solver": "student"}  # by agent
SAMPLINGS = {role: Sampling(max_tokens=6, seed=5 + i) for i, role in enumerate(ROLES.values())}
SETTINGS = EpisodeSettings(episode_timeout_s=60.0, workers=4)


def engine(seed: int) -> TableEngine:
    made = TableEngine(VOCAB, eos=0)
    context = torch.randn(VOCAB * VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))
    made.load([("table", context)], version=VERSION)
    return made


def context_of(**engines) -> RolloutContext:
    own = {role: engine(i) for i, role in enumerate(ROLES.values())} | engines
    return RolloutContext(
        engines=own, tokenizers=dict.fromkeys(own, characters()), samplings=SAMPLINGS,
        max_prompt_tokens=dict.fromkeys(own, 40), grade=lambda *_: [],
    )  # fmt: skip


class Asker:
    """A client of the route, with one connection."""

    def __init__(self, route: TokenRoute, *, token: str | None = None) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", int(route.url.rpartition(":")[2]), timeout=30)
        self._headers = {"Authorization": f"Bearer {token or route.token}"}

    def __call__(self, method: str, path: str, body: object = None, session: str = "", **headers: str):
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        self._connection.request(method, path, data, {**self._headers, SESSION: session, **headers})
        answer = self._connection.getresponse()
        return answer.status, json.loads(answer.read())


def asked(tokens, role="student", **sampling) -> dict[str, object]:
    return {"model": role, "token_ids": tokens, "sampling_params": {"stop_token_ids": [0], "logprobs": 1, **sampling}}


@pytest.fixture
def route():
    made = TokenRoute()
    yield made
    made.close()


def test_an_answer_has_the_clients_form_and_the_record_the_engines_numbers(route):
    context = replace(context_of(), partner_weights={"student": 0.25})
    with route.serving(context, SAMPLINGS, [17]) as play:
        status, said = Asker(route)("POST", GENERATE, asked([1, 2]), play.session_id(0, "solver"))
    [choice] = said["choices"]
    assert status == 200 and set(choice) == {"index", "token_ids", "finish_reason", "logprobs"}
    tokens = choice["token_ids"]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{t}" for t in tokens]
    whole = np.array([1, 2, *tokens], np.int32)
    answer = play.answer(0, "solver", whole, 2)
    assert answer is not None and answer.role == "student" and answer.versions == (VERSION,)
    assert answer.partner_weight == 0.25
    expected = context.engines["student"].score([whole])[0][2:]
    assert answer.logprobs[2:].tolist() == expected.tolist()  # bit for bit
    assert np.float32([entry["logprob"] for entry in choice["logprobs"]["content"]]).tolist() == expected.tolist()
    assert choice["finish_reason"] == ("stop" if tokens[-1] == 0 else "length")
    for other in (whole[:-1], np.append(whole[:-1], whole[-1] + 1)):
        assert play.answer(0, "solver", other, 2) is None
    assert play.answer(0, "solver", whole, 3) is None and play.answer(0, "other", whole, 2) is None


def test_draws_do_not_depend_on_the_order_of_arrival(route):
    context, agents = context_of(), ["a", "b", "c"]

    def told(order, threads):
        def one(agent):
            ask = Asker(route)
            return [ask("POST", GENERATE, asked([1, 2]), play.session_id(1, agent))[1] for _ in range(3)]

        with route.serving(context, SAMPLINGS, [17, 18]) as play, ThreadPoolExecutor(threads) as pool:
            return dict(zip(order, pool.map(one, order), strict=True))

    first = told(agents, 1)
    assert told(agents[::-1], 3) == first
    texts = [json.dumps(answer["choices"]) for answers in first.values() for answer in answers]
    assert len(set(texts)) > 3, "other agents and later requests draw anew"


def test_programs_of_one_agents_that_ask_at_the_same_time_draw_the_same_in_any_order(route):
    context, prompts = context_of(), [[1, 2], [3, 4], [5, 6]]

    def told(order):
        ask = Asker(route)
        with route.serving(context, SAMPLINGS, [17]) as play:
            session = play.session_id(0, "solver")
            return {str(prompt): ask("POST", GENERATE, asked(prompt), session)[1]["choices"] for prompt in order}

    assert told(prompts) == told(prompts[::-1])


def test_a_agents_next_question_names_the_one_before_it(route):
    """So that a pool prefers the server which holds the beginning of the conversation."""
    context, seen = context_of(), []
    session = context.engines["student"].session()
    ask = session.ask

    def noted(key, tokens, sampling, *, after=None):
        seen.append((key, after))
        ask(key, tokens, sampling, after=after)

    session.ask, context.engines["student"].session = noted, lambda: session
    with route.serving(context, SAMPLINGS, [1]) as play:
        own = Asker(route)
        for agent in ("a", "b", "a", "b"):
            assert own("POST", GENERATE, asked([1, 2]), play.session_id(0, agent))[0] == 200
    (a, none), (b, nothing), (_, after_a), (_, after_b) = seen
    assert none is nothing is None and (after_a, after_b) == (a, b)


def test_the_sampling_is_the_roles(route):
    context, given = context_of(), {}

    def check_ask(tokens, sampling, key):
        given.update(sampling=sampling)

    context.engines["student"].check_ask = check_ask
    with route.serving(context, SAMPLINGS, [1]) as play:
        session, ask = play.session_id(0, "s"), Asker(route)
        body = asked([1, 2], max_tokens=2, temperature=9.0, top_p=0.1, seed=99, stop_token_ids=[0, 7])
        _, said = ask("POST", GENERATE, body, session)
        assert given["sampling"] == Sampling(max_tokens=2, seed=6, stop_tokens=(0, 7))
        assert len(said["choices"][0]["token_ids"]) <= 2
        ask("POST", GENERATE, asked([1, 2], max_tokens=1000), session)
        assert given["sampling"].max_tokens == 6
        assert ask("GET", MODELS)[1]["data"] == [{"id": role, "max_model_len": 40} for role in SAMPLINGS]


@pytest.mark.parametrize(
    ("status", "path", "body", "says"),
    [
        (400, GENERATE, b"{", "Invalid JSON"),
        (400, GENERATE, [1], "the body = [1]: Input should be an object"),
        (404, GENERATE, asked([1], role="nobody"), "the roles are inventor, student"),
        (400, GENERATE, asked([]), "token_ids"),
        (400, GENERATE, asked("12"), "token_ids"),
        (400, GENERATE, asked([1, True]), "token_ids.1 = True"),
        (400, GENERATE, asked([1, -1]), "token_ids.1 = -1"),
        (400, GENERATE, asked([1] * 41), "maximum context length is 40 tokens"),
        (400, GENERATE, {"model": "student", "token_ids": [1, 2]}, "sampling_params"),
        (400, GENERATE, asked([1, 2], max_tokens=0), "max_tokens = 0"),
        (400, GENERATE, asked([1, 2], max_tokens=True), "max_tokens = True"),
        (400, GENERATE, asked([1, 2], max_tokens="3"), "max_tokens = '3'"),
        (400, GENERATE, asked([1, 2], stop_token_ids=list(range(100))), "stop_token_ids"),
        (400, GENERATE, asked([1]), "the table needs two"),  # what an engine refuses
        (400, GENERATE, asked([1, 2]) | {"features": {}}, "text alone"),
        (404, "/v1/chat/completions", {}, "there is"),
    ],
)
def test_a_wrong_request_is_refused_and_the_next_one_answered(route, status, path, body, says):
    with route.serving(context_of(), SAMPLINGS, [1]) as play:
        ask, session = Asker(route), play.session_id(0, "s")
        found, said = ask("POST", path, body, session)
        assert found == status and says in said["error"]["message"]
        assert (said["error"]["code"] == "context_length_exceeded") == ("context" in says)
        assert ask("POST", GENERATE, asked([1, 2]), session)[0] == 200


def test_who_asks_must_have_the_token_and_a_living_episode(route):
    with route.serving(context_of(), SAMPLINGS, [1]) as play:
        session = play.session_id(0, "s")
        for wrong in ("0" * 64, "é"):
            assert Asker(route, token=wrong)("POST", GENERATE, asked([1, 2]), session)[0] == 401
            assert Asker(route, token=wrong)("GET", MODELS)[0] == 401
        huge = Asker(route)("POST", GENERATE, None, session, **{"Content-Length": str(1 << 40)})
        assert huge[0] == 413
        assert Asker(route)("POST", GENERATE, asked([1, 2]), play.session_id(1, "s"))[0] == 400
        assert Asker(route)("POST", GENERATE, asked([1, 2]), "0.0.")[0] == 400
    assert Asker(route)("POST", GENERATE, asked([1, 2]), session)[0] == 409


def test_an_engine_that_fails_is_told_to_both_sides(route):
    context = context_of()

    def generate_rows(rows):
        raise EngineError("no server left")

    context.engines["student"].generate_rows = generate_rows
    with route.serving(context, SAMPLINGS, [1]) as play:
        assert Asker(route)("POST", GENERATE, asked([1, 2]), play.session_id(0, "s"))[0] == 503
        assert isinstance(play.failure, EngineError)


def test_a_play_that_ends_lets_nobody_wait(route):
    context, inside = context_of(), threading.Event()
    go = threading.Event()

    def generate_rows(rows):
        inside.set()
        assert go.wait(30)
        return []

    context.engines["student"].generate_rows = generate_rows
    with ThreadPoolExecutor(1) as pool:
        with route.serving(context, SAMPLINGS, [1]) as play:
            answer = pool.submit(Asker(route), "POST", GENERATE, asked([1, 2]), play.session_id(0, "s"))
            assert inside.wait(30)
            threading.Timer(0.2, go.set).start()
        assert answer.result()[0] == 503


@pytest.fixture
def maker(monkeypatch, tmp_path):
    """Makes a Verifiers over the process that plays by rote, and sees to it that it ends."""
    monkeypatch.setattr(verifiers, "HOST", Path(fake_verifiers.__file__))
    made = []

    def make(*plays, **settings) -> Verifiers:
        own = {"taskset": {"id": "t"}, "plays": plays, "child": str(tmp_path / "child"), **settings}
        made.append(Verifiers(python=sys.executable, environment=own, agents=ROLES))
        return made[-1]

    yield make
    for one in made:
        if one._host is not None:
            one._host.close()


def play(maker: Verifiers, context: RolloutContext, places, settings: EpisodeSettings = SETTINGS):
    tasks = [Prompt(id=f"p{i}", tokens=[1], payload={"index": i}) for i in places]
    return maker.play(context, tasks, [100 + i for i in range(len(places))], SAMPLINGS, settings)


def test_rollouts_are_made_of_the_engines_own_numbers(maker):
    context, one = context_of(), maker("single", "single", "branches", "untrained")
    episodes = play(one, context, [0, 1, 0, 2, 3])
    assert [e.number for e in episodes] == list(range(5)) and {e.outcome for e in episodes} == {Outcome.SCORE}
    for episode in episodes[:3]:
        assert [r.payload["agent"] for r in episode.rollouts] == list(ROLES)
        assert [r.role for r in episode.rollouts] == list(ROLES.values()) and episode.turns == 2
        for rollout in episode.rollouts:
            assert rollout.spans[:, 2:].tolist() == [[Author.ENVIRONMENT, -1], [Author.POLICY, VERSION]]
            expected = context.engines[rollout.role].score([rollout.tokens])[0]
            assert rollout.logprobs.tolist() == [0.0, 0.0, *expected[2:].tolist()]
            assert rollout.rewards == {"right": rollout.length, "reward": rollout.length}
            assert rollout.payload["metrics"] == {"seen": 1.0}
            assert rollout.stop is (Stop.EOS if rollout.tokens[-1] == 0 else Stop.LENGTH)
    assert [r.payload["agent"] for r in episodes[4].rollouts] == ["solver"], "an agent that is not trained leaves none"
    again = play(one, context, [0, 1, 0, 2, 3])
    for old, new in zip(episodes, again, strict=True):
        assert [r.tokens.tolist() for r in old.rollouts] == [r.tokens.tolist() for r in new.rollouts]
    assert one._host._process is not None, "one process serves all calls"


def test_an_episode_that_is_played_again_with_its_number_gets_the_same_answers(maker):
    one, context = maker("single", "single"), context_of()
    whole = play(one, context, [0, 1])
    task = whole[1].task
    [again] = one.play(context, [task], [101], SAMPLINGS, SETTINGS, [1])
    assert again.number == 1 and [r.tokens.tolist() for r in again.rollouts] == [
        r.tokens.tolist() for r in whole[1].rollouts
    ]
    [other] = one.play(context, [task], [101], SAMPLINGS, SETTINGS, [2])
    assert other.rollouts[0].tokens.tolist() != whole[1].rollouts[0].tokens.tolist()


def test_what_branches_share_is_trained_on_once(maker):
    context = context_of()
    [episode] = play(maker("branches"), context, [0])
    first, second = episode.rollouts
    shared = next(i for i, (a, b) in enumerate(zip(first.tokens, second.tokens, strict=False)) if a != b)
    assert episode.cuts == 1 and episode.turns == 4
    expected = context.engines["inventor"].score([first.tokens, second.tokens])
    assert first.trainable.tolist() == [False] * 2 + [True] * (shared - 2) + [False] * 2 + [True] * (
        len(first.tokens) - shared - 2
    )
    assert second.trainable.tolist() == [False] * (shared + 2) + [True] * (len(second.tokens) - shared - 2)
    for rollout, scores in zip((first, second), expected, strict=True):
        assert rollout.logprobs.tolist() == np.where(rollout.trainable, scores, 0).tolist()


def test_a_broken_episode_is_no_zero_and_the_process_starts_again(maker, tmp_path):
    one = maker("single", "fail", "slow", "lie", "die", "babble")
    alone = EpisodeSettings(episode_timeout_s=60.0, workers=1)
    episodes = play(one, context_of(), [0, 1, 2, 3, 4, 5, 0], alone)
    error, late, good = Outcome.ERROR, Outcome.TIMEOUT, Outcome.SCORE
    assert [e.outcome for e in episodes] == [good, error, late, error, error, error, good]
    says = ["", "reward broke", "late", "no engine sampled them there", "no memory left", "no line of its protocol", ""]
    assert all(text in episode.why for text, episode in zip(says, episodes, strict=True))
    assert all(bool(e.rollouts) == (e.outcome is good) for e in episodes)
    again = "infrastructure"  # another attempt may succeed; a trace that is no record of what was sampled stays so
    assert [e.failure for e in episodes] == [None, again, None, None, again, again, None]
    child = int((tmp_path / "child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_line_of_an_episode_that_is_not_under_way_costs_those_that_are_and_not_the_run(maker):
    episodes = play(maker("stray", "single"), context_of(), [0, 1], EpisodeSettings(episode_timeout_s=60.0, workers=1))
    assert [one.outcome for one in episodes] == [Outcome.ERROR, Outcome.SCORE]
    assert "it wrote a line of the episode 99, which is not under way" in episodes[0].why


def test_a_process_that_hangs_is_ended_and_nothing_is_left(maker, monkeypatch):
    monkeypatch.setattr(verifiers, "LATE_S", 0.5)
    one = maker("hang", "single")
    [late, good] = play(one, context_of(), [0, 1], EpisodeSettings(episode_timeout_s=0.5, workers=1))
    assert late.outcome is Outcome.TIMEOUT and "did not give it up after 0.5 s" in late.why
    assert good.outcome is Outcome.SCORE
    process, directory = one._host._process._process, one._host._directory
    one._host.close()
    assert process.returncode is not None and not directory.exists()


def test_an_iteration_that_is_collected_ahead_when_the_program_ends_starts_no_process_anew(maker, tmp_path):
    one = maker("hang", "single")
    with ThreadPoolExecutor(1) as thread:
        ahead = thread.submit(play, one, context_of(), [0, 1], EpisodeSettings(episode_timeout_s=60.0, workers=1))
        end = time.monotonic() + 20
        while not (tmp_path / "child").exists() and time.monotonic() < end:
            time.sleep(0.01)
        one._host.close()
        with pytest.raises(EnvironmentFailure, match="verifiers was closed"):
            ahead.result(20)
    assert one._host._process is None


def test_a_process_that_ended_between_two_calls_costs_no_episode(maker):
    one = maker("single")
    play(one, context_of(), [0])
    process = one._host._process
    psutil.Process(process._process.pid).terminate()
    end = time.monotonic() + 20
    while not process.ended and time.monotonic() < end:  # a zombie whose other threads still end is not waited for yet
        time.sleep(0.01)
    assert play(one, context_of(), [0])[0].outcome is Outcome.SCORE


def test_an_engines_failure_is_raised(maker):
    context = context_of()

    def generate_rows(rows):
        raise EngineError("no server left")

    context.engines["student"].generate_rows = generate_rows
    with pytest.raises(EngineError, match="no server left"):
        play(maker("single"), context, [0])


def test_no_episode_begins_after_an_engine_failed(maker, tmp_path):
    """The other episodes of the failed call were played, and disturbed those of the next call."""
    context, one = context_of(), maker("single", "hang")

    def generate_rows(rows):
        raise EngineError("no server left")

    context.engines["student"].generate_rows = generate_rows
    with pytest.raises(EngineError, match="no server left"):
        play(one, context, [0, 1], EpisodeSettings(episode_timeout_s=60.0, workers=1))
    assert [episode.outcome for episode in play(one, context_of(), [0])] == [Outcome.SCORE]
    assert not (tmp_path / "child").exists() and not one._host._pending


def tended_by_this_thread(engine: TableEngine) -> threading.Event:
    """Makes the engine's answers wait until this thread has looked after it."""
    owner, tended, generate = threading.get_ident(), threading.Event(), engine.generate_rows
    engine.tend = lambda: tended.set() if threading.get_ident() == owner else None

    def generate_rows(rows):
        assert tended.wait(20), "nobody looked after the server that the answer waits for"
        return generate(rows)

    engine.generate_rows = generate_rows
    return tended


def test_the_thread_that_plays_looks_after_the_servers(maker):
    context = context_of()
    tended_by_this_thread(context.engines["student"])
    [one] = play(maker("single"), context, [0])
    assert one.outcome is Outcome.SCORE


def test_an_evaluation_that_waits_for_an_iteration_collected_ahead_looks_after_the_servers(maker):
    context, one = context_of(), maker("single")
    tended = tended_by_this_thread(context.engines["student"])
    with ThreadPoolExecutor(1) as thread:
        ahead = thread.submit(play, one, context, [0])
        [evaluated] = play(one, context, [0])
        [played] = ahead.result(20)
    assert tended.is_set() and played.outcome is evaluated.outcome is Outcome.SCORE


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"python": "/nowhere/python"}, "make verifiers"),
        ({"environment": {"id": "x"}}, "environment.taskset = None"),
        ({"agents": {}}, "agents = {}"),
        ({"renderers": {"nobody": {"name": "qwen3"}}}, "renderers.nobody"),
    ],
)
def test_settings_that_cannot_be_are_refused_at_once(change, says):
    good = {"python": sys.executable, "environment": {"taskset": {"id": "t"}}, "agents": ROLES}
    assert build(Use(target="megatron_rl.environments.verifiers:Verifiers", args=good)) == Verifiers(**good)
    with pytest.raises(ConfigError, match=says):
        build(Use(target="megatron_rl.environments.verifiers:Verifiers", args={**good, **change}))


def test_a_python_that_is_gone_when_the_run_begins_is_named(maker, tmp_path):
    """The error was an AttributeError of the process that had not been started."""
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    one = maker("single")
    one.python = str(python)  # as where the environment of Python is built anew during the run
    python.unlink()
    with pytest.raises(ConfigError, match=r"verifiers does not start \(.*/python .*No such file"):
        play(one, context_of(), [0])


def test_what_only_the_run_can_tell_is_refused_with_the_cure(maker):
    with pytest.raises(ConfigError, match="there is no such task set"):
        play(maker("single", refuses=True), context_of(), [0])
    prompt = Prompt(id="p", tokens=[1], payload={"index": "first"})
    with pytest.raises(ConfigError, match="its index is 'first'"):
        maker("single").play(context_of(), [prompt], [0], SAMPLINGS, SETTINGS)
    assert list(maker("single").speaking_roles()) == list(ROLES.values()), "a recipe compares them with its agents"
