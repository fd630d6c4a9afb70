"""Episodes of environments that we did not write, played by the library verifiers itself in its own Python environment.

The models are tiny and random, and speak some words that the environments look for.
"""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path
from typing import Any

import cut_runs
import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import torch
from chats import chat_tokenizer
from conftest import ROOT, program
from cut_runs import role, write_speakers
from fake_engines import ScriptedEngine
from refitted_servers import RefittedVllm
from safetensors.torch import load_file
from tiny_models import make_model
from transformers import AutoTokenizer

from megatron_rl.config.base import ConfigError
from megatron_rl.engines.embedded.embedded_engine import EmbeddedEngine
from megatron_rl.engines.protocol import Sampling
from megatron_rl.environments.environment import EpisodeSettings
from megatron_rl.environments.verifiers import HOST, Verifiers
from megatron_rl.run.metrics import read_metrics
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.training.store import iteration_files
from megatron_rl.types import Author, Outcome, Prompt, Rollout

PYTHON = Path(os.environ.get("MEGATRON_RL_VERIFIERS_PYTHON", ROOT / ".venv-verifiers/bin/python"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"there is no {PYTHON}: `make verifiers` makes it"),
]
WORLDS = ROOT / "tests/helpers/verifiers_worlds"  # environments of our own
CHAT = (
    "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
TOOL_MARKS = [
    "<|endoftext|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
]
FORM = ["<eos>", "<unk>", "<|im_start|>", "system", "user", "assistant"]
MOVES = ["[check]", "[bet]", "[fold]", "[call]", "I", "think"]
NAMES = ("one", "uno", "eins", "un")
CONTRACTS = [  # that a proposer may end with
    json.dumps({"problem": name, "answer": value}, separators=(",", ":")) for name in NAMES for value in (1, 2)
]
ANSWERS = ["1", "=1", "(1)", "1.", "2", "=2", "(2)", "2."]
SETTINGS = EpisodeSettings(episode_timeout_s=300.0, workers=2)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Whoever asks another machine is sent to a port that nobody listens at."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.setenv(name.lower(), "http://127.0.0.1:9")


def need(package: str) -> None:
    if not list(PYTHON.parents[1].glob(f"lib/*/site-packages/{package}")):
        pytest.skip(f"{package} is not installed beside {PYTHON}: `make verifiers` says why")


def speaker(base: Path, name: str, words: list[str]) -> Path:
    """Makes a random model that speaks `words`, with a chat template."""
    write_speakers(base, [name], [*FORM, *words])
    tokenizer = AutoTokenizer.from_pretrained(base / name)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(base / name)
    return base / name


def context_of(**directories: Path) -> RolloutContext:
    """Every role has weights and a tokenizer of its own."""
    tokenizers = {role: AutoTokenizer.from_pretrained(path) for role, path in directories.items()}
    engines = {role: EmbeddedEngine(path, tokenizer=tokenizers[role]) for role, path in directories.items()}
    for engine in engines.values():
        engine.load_pretrained()
    return RolloutContext(
        engines=engines, tokenizers=tokenizers, samplings={}, max_prompt_tokens=dict.fromkeys(engines, 480),
        grade=lambda *_: [],
    )  # fmt: skip


def play(maker: Verifiers, context: RolloutContext, places: list[int], *, tokens: int = 3, settings=SETTINGS):
    samplings = {role: Sampling(max_tokens=tokens, seed=7 + i) for i, role in enumerate(context.engines)}
    tasks = [Prompt(id=f"p{i}", tokens=[1], payload={"index": i}) for i in places]
    return maker.play(context, tasks, [100 + place for place in range(len(places))], samplings, settings)


@pytest.fixture
def maker():
    made = []

    def make(**settings) -> Verifiers:
        made.append(Verifiers(python=str(PYTHON), **settings))
        return made[-1]

    yield make
    for one in made:
        if one._host is not None:
            one._host.close()


def replies(context: RolloutContext, rollouts: list[Rollout]) -> list[str]:
    """The texts that an agent's model wrote, one for each answer."""
    tokenizer = context.tokenizers[rollouts[0].role]
    spans = [(r, a, b) for r in rollouts for a, b, author, _ in r.spans.tolist() if author == Author.POLICY]
    return [tokenizer.decode(r.tokens[a:b], skip_special_tokens=True) for r, a, b in spans]


def check_logprobs(context: RolloutContext, rollouts) -> None:
    """What is trained on is what the model gives for the whole conversation."""
    for rollout in rollouts:
        expected = context.engines[rollout.role].score([rollout.tokens])[0]
        assert rollout.num_trainable and rollout.versions == (0,)
        np.testing.assert_allclose(rollout.logprobs, np.where(rollout.trainable, expected, 0), atol=2e-4)


def hand(place: int, said: dict[int, list[str]]) -> tuple[int, int]:
    """Plays a hand of Kuhn poker by what both agents said -> player 0's chips, and the number of answers that it took.

    The rules are the textbook's; that an agent has two tries, the environment's.
    """
    cards = random.Random(place).sample(["J", "Q", "K"], 2)
    higher = 1 if "JQK".index(cards[0]) > "JQK".index(cards[1]) else -1
    waiting, done, count = {agent: list(texts) for agent, texts in said.items()}, [], 0
    while True:
        agent = len(done) % 2
        legal = {"fold", "call"} if done and done[-1] == "bet" else {"check", "bet"}
        for _ in range(2):
            text, count = waiting[agent].pop(0), count + 1
            found = [word for word in re.findall(r"\[(\w+)\]", text) if word in legal]
            if len(found) == 1:
                break
        else:
            return (1 if agent == 1 else -1), count
        done.append(found[0])
        if found[0] == "fold":
            return (1 if agent == 1 else -1), count
        if found[0] == "call":
            return 2 * higher, count
        if done == ["check", "check"]:
            return higher, count


def test_two_models_play_poker_over_several_turns(maker, tmp_path):
    need("kuhn_poker")
    context = context_of(a=speaker(tmp_path, "a", MOVES), b=speaker(tmp_path, "b", [*MOVES, "well"]))
    one = maker(environment={"taskset": {"id": "kuhn-poker"}}, agents={"player0": "a", "player1": "b"})
    episodes = play(one, context, [0, 1, 2, 3], tokens=1)  # of several words the tokenizer would make another one
    assert [(e.outcome, e.why) for e in episodes] == [(Outcome.SCORE, "")] * 4
    for place, episode in enumerate(episodes):
        agents = {number: [r for r in episode.rollouts if r.payload["agent"] == f"player{number}"] for number in (0, 1)}
        check_logprobs(context, episode.rollouts)
        said = {number: replies(context, own) for number, own in agents.items() if own}
        chips, count = hand(place, said)
        assert count == sum(map(len, said.values())) == episode.turns
        for number, own in agents.items():
            assert {r.role for r in own} <= {"ab"[number]}
            gained = float(chips * (1, -1)[number])
            assert all(r.rewards == {"payoff": gained, "reward": gained} for r in own)
    assert any(len(r.spans) > 2 for e in episodes for r in e.rollouts), "an agent that spoke twice has one rollout"
    again = play(one, context, [0, 1, 2, 3], tokens=1, settings=EpisodeSettings(episode_timeout_s=300.0, workers=1))
    for old, new in zip(episodes, again, strict=True):
        assert [r.tokens.tolist() for r in old.rollouts] == [r.tokens.tolist() for r in new.rollouts]


def test_a_proposer_is_paid_for_what_its_problem_does_to_the_solvers(maker, tmp_path):
    need("proposer_solver")
    inventor = speaker(tmp_path, "inventor", CONTRACTS)
    context = context_of(inventor=inventor, student=speaker(tmp_path, "student", [*ANSWERS, *NAMES]))
    agents = {"proposer": "inventor", "solver": "student"}
    one = maker(environment={"taskset": {"id": "proposer-solver"}, "n": 2}, agents=agents)
    episodes = play(one, context, [0, 1, 2, 3, 4, 5], tokens=1)
    good = [e for e in episodes if e.outcome is Outcome.SCORE]
    assert good and all(
        e.outcome is Outcome.ERROR and "did not end with the JSON contract" in e.why for e in episodes if e not in good
    )
    for episode in good:
        proposer, *solvers = episode.rollouts
        assert [r.payload["agent"] for r in episode.rollouts] == ["proposer", "solver", "solver-2"]
        check_logprobs(context, episode.rollouts)
        contract = json.loads(replies(context, [proposer])[0])
        right = [float(str(contract["answer"]) in replies(context, [solver])[0]) for solver in solvers]
        assert [solver.rewards for solver in solvers] == [{"correct": value, "reward": value} for value in right]
        rate = sum(right) / 2
        worth = 4 * rate * (1 - rate)
        assert proposer.rewards == {"learnability": worth, "reward": worth}
        assert proposer.payload["metrics"] == {"solve_rate": rate}


def test_one_agent_reverses_text(maker, tmp_path):
    """The data is a directory here, where its own is a hub's. The tags are words of the model."""
    need("reverse_text")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/train.jsonl").write_text("".join(json.dumps({"prompt": t}) + "\n" for t in ("aba", "xy")))
    words = ["<reversed_text>aba</reversed_text>", "<reversed_text>yx</reversed_text>"]
    context = context_of(solver=speaker(tmp_path, "solver", words))
    taskset = {"id": "reverse-text", "dataset_name": str(tmp_path / "rows")}
    episodes = play(
        maker(environment={"taskset": taskset}, agents={"agent": "solver"}), context, [0, 1, 0, 1, 7], tokens=1
    )
    assert episodes[4].outcome is Outcome.ERROR and "there is no task 7: the task set has 2" in episodes[4].why
    ratios = {("aba", words[0]): 1.0, ("xy", words[1]): 1.0}
    for episode, text in zip(episodes[:4], ["aba", "xy"] * 2, strict=True):
        [rollout] = episode.rollouts
        check_logprobs(context, [rollout])
        [said] = replies(context, [rollout])
        ratio = ratios.get((text, said), 0.0)
        assert rollout.rewards == {"lcs": ratio, "reward": ratio}


def test_an_environment_that_is_not_there_or_has_other_agents_is_refused(maker, tmp_path):
    context = context_of(solver=speaker(tmp_path, "solver", ["a"]))
    with pytest.raises(ConfigError, match="taskset 'nowhere' not found"):
        play(maker(environment={"taskset": {"id": "nowhere"}}, agents={"agent": "solver"}), context, [0])
    need("kuhn_poker")
    with pytest.raises(ConfigError, match="agents names agent, and the environment has player0, player1"):
        play(maker(environment={"taskset": {"id": "kuhn-poker"}}, agents={"agent": "solver"}), context, [0])


@pytest.mark.multi
def test_two_models_are_trained_on_the_same_hands(tmp_path):
    """Two ranks, embedded engines: each role's own weights change by its own share of the hands, in both updates."""
    need("kuhn_poker")
    for name in "ab":
        speaker(tmp_path, name, [move + end for move in MOVES[:4] for end in ("", "!", ".")])
    rows = [{"question": f"hand {i}", "index": i} for i in range(4)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    agents = {"player0": "a", "player1": "b"}
    world = {"python": str(PYTHON), "environment": {"taskset": {"id": "kuhn-poker"}}, "agents": agents}
    maker = {"target": "megatron_rl.environments.verifiers:Verifiers", "args": world}
    args = {"updates": 2, "environment": maker, "agents": {"a": 1, "b": 1}, "group_size": 2, "workers": 2}
    args |= {"rewards": {"payoff": 1.0}, "compared": "ema"}  # as SPIRAL does
    lengths = {"sampling": {"max_tokens": 2}, "max_prompt_tokens": 448, "micro_batch_tokens": 512}
    settings = {
        "roles": {name: role(tmp_path, model=name, **lengths) for name in "ab"},
        "recipe": {"target": "megatron_rl.recipes.agents:Agents", "args": args},
        "data": {"path": f"{tmp_path}/data.jsonl", "fields": {"question": "question", "index": "index"}},
        "reward": {"target": "open_centre_rewards:share_of_vowels", "workers": 1},
        "preflight": {"enabled": False},
        "run": {"dir": f"{tmp_path}/runs", "name": "hands", "prompts_per_iteration": 1},
        "launch": {"nproc": 2},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    program("train", tmp_path / "run.yaml")
    rows = read_metrics(tmp_path / "runs/hands")
    for name in "ab":
        own = [row.metrics for row in rows if row.scope == name]
        trained = [metrics for metrics in own if metrics["tokens"]]
        assert len(own) == 2 and trained, "an agent may have had no turn in a hand"
        assert all(f["engine_gap"] < 1e-5 and abs(f["reward/payoff"]) <= 2 for f in trained)
        before, after = (
            load_file(path / "model.safetensors") for path in (tmp_path / name, tmp_path / f"runs/hands/models/{name}")
        )
        assert any(not torch.equal(before[key], after[key]) for key in before)
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(HOST) in (p.info["cmdline"] or ())]


def crowd(base: Path, name: str, servers: list[RefittedVllm]) -> dict[str, Any]:
    """Returns a run of three iterations, with one collected ahead of training where there are servers."""
    taskset = {"taskset": {"id": "crowd"}, "max_concurrent_agents": None}
    agents = {"speaker": "a", "listener": "b"}
    world = {"python": str(PYTHON), "environment": taskset, "agents": agents, "paths": [str(WORLDS)]}
    maker = {"target": "megatron_rl.environments.verifiers:Verifiers", "args": world}
    args = {"updates": 3, "environment": maker, "agents": {"a": 1, "b": 3}, "group_size": 3, "rewards": {"small": 1.0}}
    lengths = {"sampling": {"max_tokens": 4}, "max_prompt_tokens": 190, "micro_batch_tokens": 256}
    roles = {each: role(base, model=each, **lengths) for each in agents.values()}
    settings = cut_runs.config(
        base, name, "megatron_rl.recipes.agents:Agents", roles, args=args | {"workers": 3}, prompts_per_iteration=1
    )
    settings["data"]["fields"] = {"question": "question", "index": "index"}
    return cut_runs.ahead(settings, base, 1, servers) if servers else settings


def assert_same_but_for_rounding(whole: Path, cut: Path) -> None:
    """Fails unless two runs with embedded engines are the same but for times and the last digits of log-probs.

    An embedded engine computes together what was asked at about the same time, and these digits depend on it. Nothing
    is trained on them here: the weights are the same to the last bit.
    """
    told = dict.fromkeys(("engine_gap", "engine_kl"), 0.0)  # what is figured from those digits
    first, second = ([(r.iteration, r.scope, r.metrics | told) for r in read_metrics(run)] for run in (whole, cut))
    assert first == second
    files = [iteration_files(run / "rollouts") for run in (whole, cut)]
    for ours, theirs in zip(*files, strict=True):
        one, other = pq.read_table(ours), pq.read_table(theirs)
        own, its = (context["logprobs"].combine_chunks().flatten().to_numpy() for context in (one, other))
        np.testing.assert_allclose(own, its, atol=1e-5)
        assert one.drop_columns("logprobs").equals(other.drop_columns("logprobs")), ours.name
    for name in "ab":
        model = f"models/{name}/model.safetensors"
        assert (whole / model).read_bytes() == (cut / model).read_bytes(), name


@pytest.mark.multi
@pytest.mark.parametrize(("ahead", "cut"), [(0, 2), (1, 1)])
def test_a_run_that_was_cut_goes_on_exactly(tmp_path, ahead, cut):
    """Its agents speak at the same time and are done in an order by chance; what they read has the order of a set."""
    tokenizer = chat_tokenizer()  # of characters
    for seed, name in enumerate("ab"):
        make_model(tmp_path / name, vocab_size=len(tokenizer), num_hidden_layers=1, seed=seed, **cut_runs.SMALL)
        tokenizer.save_pretrained(tmp_path / name)
    rows = [{"question": f"word {i}", "index": i} for i in range(4)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "token").write_text(cut_runs.TOKEN)
    servers = [RefittedVllm(cut_runs.TOKEN, vocab=len(tokenizer)) for _ in range(2 * ahead)]
    try:
        every = [("whole", None), ("cut", cut), ("cut", None)]
        cut_runs.run_all(tmp_path, [(crowd(tmp_path, name, servers), leave) for name, leave in every])
    finally:
        for server in servers:
            server.close()
    (cut_runs.assert_same if ahead else assert_same_but_for_rounding)(tmp_path / "runs/whole", tmp_path / "runs/cut")
    rows = [row for row in read_metrics(tmp_path / "runs/whole") if "staleness" in row.metrics]
    assert max(row.metrics["staleness"] for row in rows) == ahead
    trained = {row.iteration for row in rows if not row.metrics["skipped"]}
    assert min(trained) < cut <= max(trained), "there is something to learn before and after the cut"


def test_an_agent_calls_a_tool_and_reads_what_it_says(maker):
    """The model says what it is told to: a call, and then what the tool answered; and in another episode a call that
    nobody can read."""
    renderers = pytest.importorskip("renderers")
    tokenizer = chat_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": TOOL_MARKS})
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    call = '<tool_call>\n{"name": "calculator_multiply", "arguments": {"left": 6, "right": 7}}\n</tool_call>'

    def answer(prompt, key, sample, sampling):
        told = tokenizer.decode(prompt)
        said = call.replace("}}", "}") if "12 * 12" in told else "42" if "<tool_response>" in told else call
        return [*tokenizer(said, add_special_tokens=False)["input_ids"], end]

    context = RolloutContext(
        engines={"solver": ScriptedEngine(answer, eos=end)}, tokenizers={"solver": tokenizer}, samplings={},
        max_prompt_tokens={"solver": 4000}, grade=lambda *_: [],
    )  # fmt: skip
    one = maker(
        environment={"taskset": {"id": "product"}}, agents={"agent": "solver"}, paths=(str(WORLDS),),
        renderers={"solver": {"name": "qwen3", "enable_thinking": False}},
    )  # fmt: skip
    good, bad = play(one, context, [0, 1], tokens=200)
    assert [(e.outcome, e.why, e.turns, e.tool_calls, e.cuts) for e in (good, bad)] == [
        (Outcome.SCORE, "", 2, 1, 0), (Outcome.SCORE, "", 1, 0, 0),
    ]  # fmt: skip
    [rollout], [unread] = good.rollouts, bad.rollouts
    assert rollout.rewards == {"right": 1.0, "reward": 1.0} and unread.rewards == {"right": 0.0, "reward": 0.0}
    assert unread.tokens[unread.start :].tolist() == answer(unread.tokens[: unread.start], 0, 0, None)
    spans = rollout.spans.tolist()
    assert [author for _, _, author, _ in spans] == [Author.ENVIRONMENT, Author.POLICY] * 2
    opening, said, _, final = np.split(rollout.tokens, [end for _, end, *_ in spans[:-1]])
    assert (tokenizer.decode(said), tokenizer.decode(final)) == (f"{call}<|im_end|>", "42<|im_end|>")
    assert (rollout.logprobs == np.where(rollout.trainable, -1, 0)).all()
    [offered] = re.findall(r"<tools>\n(.*)\n</tools>", tokenizer.decode(opening))
    tool = json.loads(offered)
    assert tool["function"]["name"] == "calculator_multiply"
    assert tool["function"]["description"] == "Returns the product of two whole numbers."
    assert set(tool["function"]["parameters"]["required"]) == {"left", "right"}
    renderer = renderers.create_renderer(tokenizer, renderers.Qwen3RendererConfig(enable_thinking=False))
    question = [{"role": "user", "content": "What is 6 * 7?"}]
    assert opening.tolist() == renderer.render_ids(question, tools=[tool], add_generation_prompt=True)
    answered = [{"role": "tool", "content": "42"}]
    bridged = renderer.bridge_to_next_turn(opening.tolist(), said.tolist(), answered, tools=[tool])
    assert rollout.tokens[: spans[2][1]].tolist() == bridged.token_ids
