"""Episodes of environments: played token for token, the same in whatever order answers come, and lost without harm."""

import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from chats import THINKING, chat_tokenizer
from fake_engines import ScriptedEngine, TableEngine
from toys import EOS, characters, graded

from megatron_rl.config.base import ConfigError
from megatron_rl.contrib.calculator import Calculator
from megatron_rl.engines.protocol import Sampling
from megatron_rl.environments.environment import Environment, EpisodeSettings
from megatron_rl.environments.episode_types import EnvironmentFailure, EpisodeEnd, NextRequest, Said
from megatron_rl.environments.validation import check_request
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.types import AGENT, Author, Outcome, Prompt, Stop

TEXT = characters()


def told(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def context_of(engines, *, tokenizer=TEXT, room=400, most=40, **settings):
    return RolloutContext(
        engines=engines,
        tokenizers=dict.fromkeys(engines, tokenizer),
        samplings=dict.fromkeys(engines, Sampling(max_tokens=most)),
        max_prompt_tokens=dict.fromkeys(engines, room),
        grade=graded(lambda response, payload: response == payload["answer"]),
        **settings,
    )


def play(environment, context, tasks=1, settings=None):
    prompts = [Prompt(id=f"0/{i}", tokens=[1, 2], payload={"question": f"q{i}"}) for i in range(tasks)]
    samplings = {role: own for role, own in context.samplings.items()}
    found = environment.play(context, prompts, list(range(tasks)), samplings, settings or EpisodeSettings())
    assert [one.number for one in found] == list(range(tasks))
    return found


def speaker(*texts, tokenizer=TEXT):
    """An engine that says one text after the other, each with its end."""
    rest = list(texts)
    return ScriptedEngine(lambda *_: [*told(tokenizer, rest.pop(0)), EOS], eos=EOS)


@dataclass
class Echo(Environment):
    """Says back what it hears, so many times; slow by chance."""

    turns: int = 3
    delay_s: float = 0.0
    quiet: bool = False  # it says how long the text was

    def begin(self, task: Mapping[str, Any], seed: int):
        self.left, self.rng = self.turns, random.Random(time.perf_counter_ns())
        return [
            NextRequest(agent="one", role="agent", messages=[{"role": "user", "content": str(task["question"]) + ":"}])
        ]

    def step(self, said: Said):
        time.sleep(self.rng.random() * self.delay_s)
        self.left -= 1
        if not self.left:
            return EpisodeEnd(rewards={"one": {"length": float(len(said.text))}}, answers={"one": said.text})
        heard = len(said.text) if self.quiet else said.text
        return [NextRequest(agent="one", role="agent", messages=[{"role": "user", "content": f"[{heard}]"}])]


def test_what_a_model_wrote_and_what_it_was_told_stand_in_one_sample_token_for_token():
    engine = speaker("ab", "c", "def")
    [one] = play(Echo(), replace(context_of({"agent": engine}), partner_weights={"agent": 0.25}))
    [rollout] = one.rollouts
    assert rollout.partner_weight == 0.25
    want = [*told(TEXT, "q0:ab"), EOS, *told(TEXT, "[ab]c"), EOS, *told(TEXT, "[c]def"), EOS]
    assert rollout.tokens.tolist() == want
    authors = "".join("EPe"[a] if a else "P" for a in rollout.authors)
    assert authors == "eee" + "PPP" + "eeee" + "PP" + "eee" + "PPPP"
    assert (rollout.logprobs[rollout.trainable] == -1).all() and (rollout.logprobs[~rollout.trainable] == 0).all()
    assert rollout.num_trainable == rollout.length == 9 and rollout.stop is Stop.EOS
    assert rollout.payload[AGENT] == "one" and rollout.rewards == {"length": 3.0} and one.answers == {"one": "def"}
    assert [prompt for prompt, _ in engine.asked] == [want[:3], want[:10], want[:15]]
    assert (one.turns, one.cuts, one.outcome) == (3, 0, Outcome.SCORE)


def table_engine():
    engine = TableEngine(vocab=96, eos=EOS)
    torch.manual_seed(3)
    engine.load([("table", torch.randn(96 * 96, 96))], version=4)
    return engine


def test_the_order_in_which_environments_answer_changes_nothing():
    runs = [
        play(Echo(delay_s=delay), context_of({"agent": table_engine()}, most=12, seed=7), 24)
        for delay in (0, 0.03, 0.03)
    ]
    for one, two in zip(runs[0], runs[1], strict=True):
        [a], [b] = one.rollouts, two.rollouts
        assert a.tokens.tolist() == b.tokens.tolist() and np.array_equal(a.logprobs, b.logprobs)
        assert a.rewards == b.rewards
    assert len({tuple(one.rollouts[0].response.tolist()) for one in runs[0]}) > 20
    assert {r.version for one in runs[0] for r in one.rollouts} == {4}
    other = play(Echo(), context_of({"agent": table_engine()}, most=12, seed=8), 24)
    assert other[0].rollouts[0].tokens.tolist() != runs[0][0].rollouts[0].tokens.tolist()


@dataclass
class Trouble(Echo):
    """Goes wrong in the episode number 1, in the named way."""

    way: str = "raises"
    closed: Any = None

    def begin(self, task, seed):
        self.bad = seed == 1
        if self.bad and self.way == "begin":
            raise EnvironmentFailure("no sandbox")
        if self.bad and self.way == "never begins":
            self.closed.wait(20)
        return super().begin(task, seed)

    def step(self, said):
        if self.bad and self.way == "raises":
            raise KeyError("lost")
        if self.bad and self.way == "hangs":
            self.closed.wait(20)
        if self.bad and self.way == "nobody":
            return []
        if self.bad and self.way == "agent":
            return EpisodeEnd(rewards={"three": {"length": 1.0}})
        if self.bad and self.way == "says":
            return EpisodeEnd(outcome=Outcome.TIMEOUT, why="the game's own clock")
        return super().step(said)

    def close(self):
        if self.bad:
            self.closed.set()


@pytest.mark.parametrize(
    ("way", "outcome", "why"),
    [
        ("begin", Outcome.ERROR, "EnvironmentFailure: no sandbox"),
        ("raises", Outcome.ERROR, "KeyError: 'lost'"),
        ("hangs", Outcome.TIMEOUT, "its environment took longer than step_timeout_s = 0.4"),
        ("never begins", Outcome.TIMEOUT, "its environment took longer than step_timeout_s = 0.4"),
        ("nobody", Outcome.ERROR, "its environment asked nobody, and did not end the episode"),
        ("agent", Outcome.ERROR, "it gives rewards to three, and no such agent spoke: those of this episode are one"),
        ("says", Outcome.TIMEOUT, "the game's own clock"),
    ],
)
def test_an_episode_that_goes_wrong_has_no_sample_and_harms_no_other(way, outcome, why):
    closed, start = threading.Event(), time.monotonic()
    settings = EpisodeSettings(step_timeout_s=0.4, workers=2)
    found = play(Trouble(way=way, closed=closed), context_of({"agent": table_engine()}, most=6), 4, settings)
    assert time.monotonic() - start < 15
    assert [len(one.rollouts) for one in found] == [1, 0, 1, 1]
    assert found[1].outcome is outcome and why in found[1].why
    assert closed.is_set()
    for _ in range(100):  # threads end a moment later
        if not [t for t in threading.enumerate() if t.name == "environment" or t.name.startswith("answers of")]:
            break
        time.sleep(0.02)
    else:
        pytest.fail(f"threads are left: {threading.enumerate()}")


HELLO = NextRequest(agent="one", role="agent", messages=[{"role": "user", "content": "hello"}])


def won(value):
    return EpisodeEnd(rewards={"one": {"won": value}})


@dataclass
class Mistaken(Echo):
    """Returns something from the first `begin` (then from no step) or `step` of the episode number 1."""

    at: str = "step"
    result: Any = None

    def begin(self, task, seed):
        self.bad = seed == 1
        return self.result if self.bad and self.at == "begin" else super().begin(task, seed)

    def step(self, said):
        return self.result if self.bad and self.at == "step" else super().step(said)


@pytest.mark.parametrize(
    ("at", "result", "why"),
    [
        (
            "begin",
            None,
            "its begin returned None: return a list of NextRequest, one for each agent that speaks next, or EpisodeEnd",
        ),
        ("begin", HELLO, "its begin returned NextRequest(agent='one'"),
        ("step", "go on", "its step returned 'go on': return a list of NextRequest"),
        (
            "begin",
            [replace(HELLO, messages=[{"role": "user"}])],
            "message 0 to agent 'one' has the content None: give a",
        ),
        (
            "begin",
            [replace(HELLO, messages=[{"content": "hello"}])],
            "message 0 to agent 'one' has no role: give it as",
        ),
        ("begin", [replace(HELLO, messages={"role": "user", "content": "a"})], "give a list of messages, such as [{"),
        ("begin", [replace(HELLO, messages=[])], "agent 'one' was told nothing: its first NextRequest needs a message"),
        (
            "begin",
            [HELLO, HELLO],
            "agent 'one' is asked again before it has answered: return one NextRequest for each agent",
        ),
        (
            "step",
            [replace(HELLO, role="other")],
            "has the role 'other', and had the role 'agent' before: an agent keeps",
        ),
        (
            "step",
            EpisodeEnd(rewards={"one": 1.0}),
            "the rewards of agent 'one' are 1.0: give them by name, such as {'one': {'",
        ),
        ("step", won("1.0"), "the reward 'won' of agent 'one' is '1.0': give a finite number"),
        ("step", won(None), "the reward 'won' of agent 'one' is None: give a finite number"),
        ("step", won(-1e39), "the reward 'won' of agent 'one' is -1e+39: give a finite number"),
        ("step", won(float("nan")), "the reward 'won' of agent 'one' is nan: give a finite number, or end the episode"),
        ("step", won(np.float32("inf")), "give a finite number"),
        ("step", EpisodeEnd(rewards=[1.0]), "EpisodeEnd.rewards is [1.0]: give a mapping"),
        ("step", EpisodeEnd(answers={"one": 7}), "EpisodeEnd.answers of agent 'one' is 7: give a text"),
        (
            "step",
            EpisodeEnd(payload={"board": object()}),
            "EpisodeEnd.payload cannot be kept as JSON (Object of type object is not",
        ),
    ],
)
def test_an_environments_mistake_costs_its_episode_and_the_reason_names_the_cure(at, result, why):
    context = context_of({"agent": table_engine(), "other": table_engine()}, most=6)
    found = play(Mistaken(at=at, result=result), context, 3)
    assert [(one.outcome, len(one.rollouts), one.answers != {}) for one in found] == [
        (Outcome.SCORE, 1, True), (Outcome.ERROR, 0, False), (Outcome.SCORE, 1, True)
    ]  # fmt: skip
    assert why in found[1].why


def test_rewards_may_be_any_numbers_and_an_answer_that_calls_needs_no_content():
    [one] = play(Mistaken(result=won(np.float32(0.5))), context_of({"agent": table_engine()}, most=3), 2)[1:]
    assert one.rollouts[0].rewards == {"won": 0.5} and type(one.rollouts[0].rewards["won"]) is float
    [one] = play(Mistaken(result=won(True)), context_of({"agent": table_engine()}, most=3), 2)[1:]
    assert one.rollouts[0].rewards == {"won": 1.0}
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    check_request(replace(HELLO, messages=[{"role": "assistant", "tool_calls": calls}]), ["agent"], {}, [])


def test_an_episode_whose_first_message_has_no_room_is_an_error():
    [one] = play(Echo(), context_of({"agent": table_engine()}, room=2))
    assert (one.outcome, one.rollouts) == (Outcome.ERROR, []) and "no agent had room for an answer" in one.why
    assert one.why.endswith("(a prompt of agent 'one' has 3 tokens, and roles.agent.max_prompt_tokens = 2)")


def test_an_environment_that_cannot_be_closed_is_warned_of_and_its_sample_stays(caplog):
    @dataclass
    class Stuck(Echo):
        def close(self):
            raise OSError("a process stays")

    [one] = play(Stuck(), context_of({"agent": table_engine()}, most=3))
    assert len(one.rollouts) == 1 and "a process stays" in caplog.text


def test_an_episode_has_an_end():
    settings = EpisodeSettings(episode_timeout_s=0.3)
    [one] = play(Echo(turns=50, delay_s=0.1), context_of({"agent": table_engine()}, room=10_000, most=3), 1, settings)
    assert one.outcome is Outcome.TIMEOUT and "episode_timeout_s = 0.3" in one.why and not one.rollouts


def test_a_conversation_without_room_is_told_so_and_keeps_what_it_has():
    @dataclass
    class Long(Echo):
        def step(self, said):
            if said.stop is None:
                assert (said.text, said.tokens) == ("", 0)
                return EpisodeEnd(rewards={"one": {"length": -1.0}})
            return super().step(said)

    [one] = play(Long(turns=9), context_of({"agent": speaker("abcd", "abcd", "abcd")}, room=16))
    [rollout] = one.rollouts
    assert rollout.rewards == {"length": -1.0} and one.turns == 2
    assert rollout.tokens.tolist() == [*told(TEXT, "q0:abcd"), EOS, *told(TEXT, "[abcd]abcd"), EOS]


@dataclass
class Duel(Environment):
    """Two agents of two roles write at the same time, twice; each hears the other."""

    def begin(self, task, seed):
        self.heard = []
        return [self._move(agent, "go ") for agent in ("left", "right")]

    def step(self, said):
        self.heard.append((said.agent, said.text))
        if len(self.heard) == 2:
            (left, one), (right, two) = self.heard
            return [self._move(left, f"<{two}>"), self._move(right, f"<{one}>")]
        if len(self.heard) == 4:
            assert [agent for agent, _ in self.heard] == ["left", "right", "left", "right"]
            return EpisodeEnd(rewards={"left": {"won": 1.0}, "right": {"won": 0.0}}, payload={"moves": 4})
        return []

    def _move(self, agent, text):
        return NextRequest(
            agent=agent,
            role={"left": "red", "right": "blue"}[agent],
            messages=[{"role": "user", "content": text}],
            stop=["!"],
        )


def test_two_roles_in_one_episode_have_a_sample_each():
    engines = {"red": speaker("r1", "r2"), "blue": speaker("b1", "b2")}
    [one] = play(Duel(), context_of(engines))
    red, blue = one.rollouts
    assert (red.role, red.payload[AGENT], red.rewards) == ("red", "left", {"won": 1.0})
    assert (blue.role, blue.payload[AGENT], blue.rewards) == ("blue", "right", {"won": 0.0})
    assert red.tokens.tolist() == [*told(TEXT, "go r1"), EOS, *told(TEXT, "<b1>r2"), EOS]
    assert red.payload["moves"] == 4 and one.turns == 4
    assert all(sampling.stop_strings == ("!",) and sampling.n == 1 for _, sampling in engines["red"].asked)


def test_the_thread_that_plays_looks_after_the_servers():
    """A pool brings a server that came back to the current weights in the thread that owns it, and nowhere else."""
    engine, player, tended = speaker("ab", "c", "def"), threading.get_ident(), threading.Event()
    engine.tend = lambda: tended.set() if threading.get_ident() == player else None
    generate = engine.generate_rows

    def when_tended(rows):
        assert tended.wait(20), "nobody looked after the server that the answer waits for"
        return generate(rows)

    engine.generate_rows = when_tended
    [one] = play(Echo(), context_of({"agent": engine}))
    assert one.outcome is Outcome.SCORE


def test_an_engine_that_fails_ends_the_play():
    def broken(*_):
        raise ValueError("the engine's own")

    before = threading.active_count()
    with pytest.raises(ValueError, match="the engine's own"):
        play(Echo(), context_of({"agent": ScriptedEngine(broken, eos=EOS)}), 3)
    for _ in range(100):
        if threading.active_count() <= before:
            return
        time.sleep(0.02)
    pytest.fail("threads are left")


def test_every_environment_is_closed_after_an_engine_failed():
    """The closing of environments that waited for a worker was cancelled, and their containers stayed."""
    begun, closed = [], []

    @dataclass
    class Container(Echo):
        def begin(self, task, seed):
            begun.append(self)
            while len(begun) > 2 and any(thread.name == "answers of agent" for thread in threading.enumerate()):
                time.sleep(0.01)  # until the engine has failed
            return super().begin(task, seed)

        def close(self):
            time.sleep(0.05)
            closed.append(self)

    def broken(*_):
        raise ValueError("the engine's own")

    with pytest.raises(ValueError, match="the engine's own"):
        engines = {"agent": ScriptedEngine(broken, eos=EOS)}
        play(Container(), context_of(engines), 6, EpisodeSettings(workers=2))
    assert len(closed) == 6 and len(begun) <= 4, "episodes begin although the engine has failed"


def test_every_environment_is_closed_after_an_episode_stopped_the_play():
    closed = []

    @dataclass
    class Container(Echo):
        def begin(self, task, seed):
            time.sleep(0.05)
            [request] = super().begin(task, seed)
            return [replace(request, role="nobody") if task["question"] == "q2" else request]

        def close(self):
            time.sleep(0.05)
            closed.append(self)

    with pytest.raises(ConfigError, match="speak with the role 'nobody'"):
        play(Container(), context_of({"agent": table_engine()}, most=3), 6, EpisodeSettings(workers=2))
    assert len(closed) == 6


def chat_speaker(tokenizer, *texts):
    rest = list(texts)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    return ScriptedEngine(lambda *_: [*told(tokenizer, rest.pop(0)), end], eos=end)


def test_a_chat_goes_on_as_its_template_would_render_the_whole():
    tokenizer = chat_tokenizer()
    [one] = play(
        Echo(),
        context_of({"agent": chat_speaker(tokenizer, "ab", "c", "def")}, tokenizer=tokenizer, room=2000),
        settings=EpisodeSettings(dialogue="chat"),
    )
    [rollout] = one.rollouts
    messages = [("user", "q0:"), ("assistant", "ab"), ("user", "[ab]"), ("assistant", "c"), ("user", "[c]")]
    whole = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in [*messages, ("assistant", "def")]], tokenize=False
    )
    assert rollout.tokens.tolist() == told(tokenizer, whole.rstrip("\n"))
    assert one.cuts == 0 and rollout.num_trainable == len(told(tokenizer, "abcdef")) + 3


def test_a_transcript_is_cut_where_the_template_forgets_what_the_model_thought():
    tokenizer = chat_tokenizer(THINKING)
    engine = chat_speaker(tokenizer, "ab</think>x", "c", "def")
    context = context_of({"agent": engine}, tokenizer=tokenizer, room=2000)
    [one] = play(Echo(quiet=True), context, settings=EpisodeSettings(dialogue="chat"))
    assert one.cuts == 1 and len(one.rollouts) == 2
    first, second = one.rollouts
    assert first.rewards == second.rewards == {"length": 3.0}
    assert "ab</think>x" in tokenizer.decode(first.tokens) and "ab</think>x" not in tokenizer.decode(
        second.tokens[: second.start]
    )
    assert second.num_trainable == len(told(tokenizer, "cdef")) + 2  # what was cut off is trained on once


@dataclass
class Asks(Environment):
    """Calls a tool of the model's choice, until it calls none."""

    def begin(self, task, seed):
        return self._move([{"role": "user", "content": "What is 6 * 7?"}], tools=[Calculator()])

    def step(self, said):
        if not said.calls:
            return EpisodeEnd(rewards={"one": {"right": float(said.text == "42")}})
        told_back = [
            {"role": "tool", "name": call.name, "content": Calculator().run(call.arguments or {})}
            for call in said.calls
        ]
        return self._move(told_back)

    def _move(self, messages, tools=()):
        return [NextRequest(agent="one", role="agent", messages=messages, tools=tools)]


def test_a_renderer_reads_calls_of_tools_and_goes_on_token_for_token():
    renderers = pytest.importorskip("renderers")
    tokenizer = chat_tokenizer()
    special = ["<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>"]
    tokenizer.add_special_tokens({"additional_special_tokens": [*special, "</tool_response>"]})
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6 * 7"}}\n</tool_call>'
    engine = chat_speaker(tokenizer, f"<think>\n\n</think>\n\n{call}", "<think>\n\n</think>\n\n42")
    context = context_of({"agent": engine}, tokenizer=tokenizer, room=4000, most=200)
    [one] = play(Asks(), context, settings=EpisodeSettings(dialogue="renderers:qwen3"))
    [rollout] = one.rollouts
    assert (one.outcome, one.why, rollout.rewards) == (Outcome.SCORE, "", {"right": 1.0})
    assert (one.turns, one.tool_calls, one.cuts) == (2, 1, 0)
    written = [tokenizer.decode(rollout.tokens[a:b]) for a, b, author, _ in rollout.spans if author == Author.POLICY]
    assert call in written[0] and written[1].endswith("42<|im_end|>")
    renderer = renderers.create_renderer(tokenizer, renderers.config_from_name("qwen3"))
    tools = [{key: getattr(Calculator(), key) for key in ("name", "description", "parameters")}]
    opening = renderer.render_ids(
        [{"role": "user", "content": "What is 6 * 7?"}], tools=tools, add_generation_prompt=True
    )
    assert rollout.tokens[: rollout.start].tolist() == opening
    first_answer = engine.asked[1][0][: len(opening) + len(told(tokenizer, written[0]))]
    bridged = renderer.bridge_to_next_turn(
        opening, first_answer[len(opening) :], [{"role": "tool", "name": "calculator", "content": "42"}], tools=tools
    )
    assert engine.asked[1][0] == bridged.token_ids
    assert set(renderer.get_stop_token_ids()) <= set(engine.asked[0][1].stop_tokens)
