"""Gradings that failed are repeated, and samples and episodes that failed without the policy's fault are replaced."""

from __future__ import annotations

import functools
import io
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from fake_engines import ScriptedEngine
from toys import EOS, characters, graded
from written_rewards import grading_by

from megatron_rl.config import plugins
from megatron_rl.config.schema import Use
from megatron_rl.engines.protocol import Sampling
from megatron_rl.environments.environment import Environment
from megatron_rl.environments.episode_types import EnvironmentFailure, EpisodeEnd, NextRequest
from megatron_rl.recipes.answers import accuracies
from megatron_rl.recipes.episode_rollouts import OverEpisodes
from megatron_rl.recipes.replacement import to_replace
from megatron_rl.recipes.solutions import solve
from megatron_rl.rewards.grading_pool import RewardFailure
from megatron_rl.run.console import RunConsole
from megatron_rl.run.metrics import MetricsRow
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.types import Outcome, Prompt

TOKENIZER = characters()
REWARD = """
import pathlib, time
notes = pathlib.Path({path!r})
def grade(response, payload):
    with (notes / (response[:4] + payload.get("question", ""))).open("a") as note:
        note.write("x")
    times = (notes / (response[:4] + payload.get("question", ""))).stat().st_size
    if response.startswith("late") or "hang" in payload:
        time.sleep(60)
    if response.startswith("lost") or (response.startswith("once") and times == 1):
        raise OSError("the server is away")
    return float(response.startswith("good"))
"""


@pytest.fixture
def reward(tmp_path, monkeypatch):
    """Makes pools of workers that run REWARD -> (pool, number of gradings of a text)."""
    with grading_by("flaky_rewards", REWARD, tmp_path, monkeypatch, workers=2) as pool:
        yield pool, lambda text: sum(path.stat().st_size for path in tmp_path.glob(f"{text}*"))


def test_a_grading_that_failed_is_repeated_once(reward):
    pool, times = reward
    found = pool.grade(["good", "once", "lost", "late", "bad"], [{}] * 5)
    assert [one.outcome.value for one in found] == ["score", "score", "error", "timeout", "score"]
    assert [one.repeated for one in found] == [False, True, True, True, False]
    assert [times(text) for text in ("good", "once", "lost", "late", "bad")] == [1, 2, 2, 2, 1]


def test_a_reward_that_fails_on_everything_is_asked_once(reward):
    pool, times = reward
    assert {one.outcome for one in pool.grade(["lost"] * 20, [{}] * 20)} == {Outcome.ERROR}
    assert times("lost") == 20


def context_of(say, grade, **settings) -> RolloutContext:
    """A context whose engine says `say(question, random generator of the sample, sampling)`."""

    def answer(prompt, key, sample, sampling):
        rng = random.Random(f"{sampling.seed}/{key}/{sample}")
        return [*TOKENIZER(say(TOKENIZER.decode(prompt), rng, sampling))["input_ids"], EOS]

    return RolloutContext(
        engines={"generator": ScriptedEngine(answer, eos=EOS)}, tokenizers={"generator": TOKENIZER},
        samplings={"generator": Sampling(max_tokens=50, seed=3)}, max_prompt_tokens={"generator": 100}, grade=grade,
        **settings,
    )  # fmt: skip


def problems(*questions):
    tokens = [TOKENIZER(q)["input_ids"] for q in questions]
    return [Prompt(id=f"0/{q}", tokens=t, payload={"question": q}) for q, t in zip(questions, tokens, strict=True)]


def test_samples_that_cannot_be_graded_are_replaced_by_samples_of_the_same_prompt(reward):
    """A tenth of the texts fails always, a tenth once. Every group is whole in the end, and each seed is another."""
    words = ["good", "bad", "good", "bad", "good", "bad", "good", "bad", "lost", "once"]
    context = context_of(lambda q, rng, s: rng.choice(words) + str(rng.random())[:6], reward[0].grade)
    own = Sampling(max_tokens=50, seed=3, n=10)
    heard: Counter[int] = Counter()
    solutions, m = solve(context, "generator", problems(*"abcd"), own, lambda place, s: heard.update([place]))
    engine = context.engines["generator"]
    assert heard == Counter(range(40)) and [s.rollout.group for s in solutions] == [
        f"{i}:0/{q}" for i, q in enumerate("abcd") for _ in range(10)
    ]
    assert not any(s.text.startswith("lost") for s in solutions) and m["graded/error"] == 0
    replaced = [sampling for _, sampling in engine.asked if sampling.n == 1]
    assert (
        m["replaced/error"] == len(replaced) >= 2
        and m["graded/repeated"] >= 2 * len(replaced)
        and len({s.text for s in solutions}) == 40
    )
    assert {sampling.seed for sampling in replaced} == {
        context.seed_for(3, "replaced", number) for number in range(len({s.seed for s in replaced}))
    }
    again = context_of(lambda q, rng, s: rng.choice(words) + str(rng.random())[:6], reward[0].grade)
    texts = [s.text for s in solve(again, "generator", problems(*"abcd"), own)[0]]
    assert texts == [s.text for s in solutions], "neither the order nor the time of gradings matters"


def test_a_problem_that_cannot_be_graded_is_not_sampled_again(reward):
    context = context_of(lambda q, rng, s: "lost" if q == "b" else "good", reward[0].grade)
    solutions, m = solve(context, "generator", problems(*"abc"), Sampling(max_tokens=50, n=3))
    assert len(solutions) == 6 and m["graded/error"] == 3 and len(context.engines["generator"].asked) == 3
    assert not any(name.startswith("replaced/") for name in m)


def test_too_many_failures_end_the_run_before_anything_is_sampled_again(reward):
    script = {"a": "good", "b": "lost", "c": "good", "d": "lost", "e": "bad"}
    context = context_of(lambda q, rng, s: script[q] if s.seed == 7 else "good", reward[0].grade, max_failure_share=0.3)
    with pytest.raises(RewardFailure, match="2 of 5 gradings failed"):
        solve(context, "generator", problems(*"abcde"), Sampling(max_tokens=50, seed=7))
    assert len(context.engines["generator"].asked) == 5
    context = context_of(lambda q, rng, s: script[q] if s.seed == 7 else "good", reward[0].grade, max_failure_share=0.4)
    solutions, m = solve(context, "generator", problems(*"abcde"), Sampling(max_tokens=50, seed=7))
    assert [s.correct for s in solutions] == [True] * 4 + [False] and m["replaced/error"] == 2


def test_a_sample_is_replaced_twice_at_most_and_a_greedy_one_never(reward):
    context = context_of(lambda q, rng, s: "lost" if q == "a" else "good", reward[0].grade)
    solutions, m = solve(context, "generator", problems(*"ab"), Sampling(max_tokens=50))
    assert len(solutions) == 1 and (m["replaced/error"], m["graded/error"]) == (2, 1)
    greedy = Sampling(max_tokens=50, temperature=0.0)
    assert "replaced/error" not in solve(context, "generator", problems(*"ab"), greedy)[1]
    metrics, _ = accuracies(context, "generator", problems(*"ab"))
    assert metrics["generator/replaced"] == 2 and metrics["generator/ungraded"] == 1


@pytest.mark.parametrize(
    ("failed", "size", "expected"),
    [([5, 1], 4, [1, 5]), ([0, 1, 2, 3, 5], 4, [5]), (range(8), 4, []), (range(8), 1, []), ([6, 0], 1, [0, 6])],
)
def test_what_a_new_sample_cannot_cure_is_not_replaced(failed, size, expected):
    assert to_replace(list(failed), count=8, group_size=size) == expected


@dataclass
class Task(Environment):
    """Ends with the first answer, a number. In the episodes whose answers `bad` lists it fails, in the named way."""

    way: str = "tool"
    bad: Any = ()
    once: bool = False  # an answer fails only the first time that it is seen
    seen: Counter[str] = field(default_factory=Counter)  # shared by the copies

    def begin(self, task, seed):
        return [NextRequest(agent="one", role="generator", messages=[{"role": "user", "content": task["question"]}])]

    def step(self, said):
        self.seen[said.text] += 1
        end = EpisodeEnd(answers={"one": said.text}, rewards={"one": {"right": 1.0}})
        if not self.bad(said.text) or (self.once and self.seen[said.text] > 1):
            return end
        match self.way:
            case "tool":
                raise EnvironmentFailure("the search server is away")
            case "code":
                raise KeyError("lost")
            case "late":
                time.sleep(2.5)
            case "says late":
                return EpisodeEnd(outcome=Outcome.TIMEOUT, why="a sandbox was late")
            case "policy":
                raise EnvironmentFailure("its program crashed", kind="policy")
            case "policy, rewarded":
                return EpisodeEnd(
                    outcome=Outcome.TIMEOUT, why="turns", failure="policy", answers=end.answers,
                    rewards={"one": {"right": 0.25}},
                )  # fmt: skip
            case "hopeless":
                return EpisodeEnd(outcome=Outcome.ERROR, why="no room", failure=None)
            case "mistake":
                return "nonsense"
        return end


def recipe_of(way, bad, *, once=False, args=()):
    args = {"environment": {"target": f"{__name__}:Task"}, "rewards": {"right": 1.0, "outcome": 1.0}} | dict(args)
    recipe = plugins.build(Use(target=f"{__name__}:Recipe", args=args))
    recipe.build_maker({"generator": 1}, ["generator"], key="agents")
    recipe._maker = Task(way=way, bad=bad, once=once)
    return recipe


def episodes_of(way, bad, *, once=False, each=10, questions="ab", args=(), grade=lambda r, p: 1.0, **settings):
    """Plays episodes whose agents say random numbers -> (result, number of times that each text was seen, context)."""
    recipe = recipe_of(way, bad, once=once, args=args)
    context = context_of(lambda q, rng, s: str(rng.randint(100_000, 999_999)), graded(grade), **settings)
    own = {"generator": Sampling(max_tokens=50, seed=5)}
    found = recipe.play_episodes(context, problems(*questions), [11, 12], own, per_problem=each)
    return found, recipe._maker.seen, context


@dataclass(kw_only=True)
class Recipe(OverEpisodes):
    """Plays episodes."""


def texts(found):
    return [TOKENIZER.decode(r.response[:-1]) for r in found.rollouts]


def unlucky(text):
    return int(text) % 5 == 0


@functools.cache
def whole():
    """The episodes if none fails, and how many of them are unlucky."""
    found, _, _ = episodes_of("tool", lambda text: False)
    failing = sum(map(unlucky, texts(found)))
    assert len(set(texts(found))) == 20 and 2 <= failing <= 6
    return found, failing


@pytest.mark.parametrize("way", ["tool", "code", "says late"])
def test_an_episode_that_failed_once_is_the_same_when_it_is_played_again(way):
    intact, failing = whole()
    found, seen, _ = episodes_of(way, unlucky, once=True, args={"step_timeout_s": 1.0} if way == "late" else {})
    assert texts(found) == texts(intact) and [r.group for r in found.rollouts] == [r.group for r in intact.rollouts]
    assert found.metrics == intact.metrics | {"episodes/repeated": failing}
    assert {seen[text] for text in texts(intact) if unlucky(text)} == {2}


@pytest.mark.parametrize(
    ("way", "reason"), [("tool", "tool"), ("code", "tool"), ("says late", "timeout"), ("late", "timeout")]
)
def test_an_episode_that_fails_again_is_replaced_by_one_of_the_same_problem(way, reason):
    intact, failing = whole()
    found, seen, _ = episodes_of(way, unlucky, args={"step_timeout_s": 1.0} if way == "late" else {})
    assert not any(map(unlucky, texts(found))) and [r.group for r in found.rollouts] == [
        r.group for r in intact.rollouts
    ]
    stayed = [one == other for one, other in zip(texts(found), texts(intact), strict=True)]
    assert stayed == [not unlucky(text) for text in texts(intact)] and len(set(texts(found))) == 20
    assert found.metrics[f"replaced/{reason}"] >= failing and found.metrics["episodes/error"] == 0
    assert [r.payload["episode"] for r in found.rollouts] == [str(i) for i in range(20)]


@pytest.mark.parametrize("way", ["hopeless", "mistake"])
def test_an_episode_that_would_fail_again_leaves_its_group_and_is_not_played_again(way):
    intact, failing = whole()
    found, seen, _ = episodes_of(way, unlucky)
    assert texts(found) == [text for text in texts(intact) if not unlucky(text)] and set(seen.values()) == {1}
    assert found.metrics == intact.metrics | {"episodes/error": failing}


def test_an_episode_that_takes_too_long_as_a_whole_is_not_played_again():
    intact, failing = whole()
    found, seen, _ = episodes_of("late", unlucky, args={"episode_timeout_s": 1.0})
    assert set(seen.values()) == {1} and found.metrics["episodes/timeout"] == failing
    assert not any(name.startswith("replaced") for name in found.metrics)


def test_what_the_policy_failed_is_an_outcome_with_the_least_reward_or_the_one_that_the_environment_gives():
    intact, failing = whole()
    found, seen, _ = episodes_of("policy", unlucky, lowest_reward=-1.0)
    assert texts(found) == texts(intact) and set(seen.values()) == {1}
    for text, rollout in zip(texts(found), found.rollouts, strict=True):
        assert dict(rollout.rewards) == (
            {"right": -1.0, "outcome": -1.0} if unlucky(text) else {"right": 1, "outcome": 1}
        )
        assert ("failure" in rollout.payload) == unlucky(text)
    assert found.metrics == intact.metrics | {"episodes/policy": failing}
    found, _, _ = episodes_of("policy, rewarded", unlucky, lowest_reward=-1.0)
    given = {(r.rewards["right"], r.rewards["outcome"], r.payload.get("failure")) for r in found.rollouts}
    assert given == {(1.0, 1.0, None), (0.25, 1.0, "turns")}, "its text is graded as any other"


def test_a_single_episode_that_failed_is_played_again_with_the_same_seeds():
    intact, _, _ = episodes_of("tool", lambda text: False, each=1, questions="a")
    found, seen, _ = episodes_of("tool", lambda text: True, once=True, each=1, questions="a")
    assert texts(found) == texts(intact) and set(seen.values()) == {2}
    assert found.metrics == intact.metrics | {"episodes/repeated": 1}


def test_an_episode_whose_text_cannot_be_graded_is_replaced():
    intact, failing = whole()
    found, _, _ = episodes_of("none", lambda text: False, grade=lambda r, _: Outcome.ERROR if unlucky(r) else 1.0)
    assert len(found.rollouts) == 20 and not any(map(unlucky, texts(found)))
    assert found.metrics["replaced/error"] >= failing


def test_an_answer_whose_reward_is_the_threshold_is_not_correct():
    args = {"rewards": {"outcome": 1.0}}
    for reward, accuracy in ((0.5, 0.0), (0.75, 1.0)):
        grade = functools.partial(lambda given, r, _: given, reward)
        _, _, context = episodes_of("none", lambda text: False, grade=grade, args=args, threshold=0.5)
        recipe = recipe_of("none", lambda text: False, args=args)
        metrics, _ = recipe.measure_episodes(context, problems("a"))
        for suffix in ("", "_greedy"):
            found = metrics[f"generator/reward{suffix}"], metrics[f"generator/accuracy{suffix}"]
            assert found == (reward, accuracy)


def test_an_environment_that_always_fails_ends_the_run_after_one_episode_each():
    asked = []
    with pytest.raises(RewardFailure, match="20 of 20 episodes failed"):
        episodes_of("tool", lambda text: asked.append(text) or True, max_failure_share=0.05)
    assert len(asked) == 20


def test_failures_of_episodes_are_counted_after_the_second_try():
    _, failing = whole()
    found, _, _ = episodes_of("tool", unlucky, once=True, max_failure_share=0.05)
    assert len(found.rollouts) == 20
    with pytest.raises(RewardFailure, match=f"{failing} of 20 episodes failed .0 time-outs"):
        episodes_of("tool", unlucky, max_failure_share=0.05)


def test_the_console_line_says_what_was_replaced(tmp_path):
    intact, failing = whole()
    out = io.StringIO()
    found, _, _ = episodes_of("tool", unlucky)
    more = {"replaced/timeout": 30.0, **found.metrics}
    with RunConsole(tmp_path / "log", 9, stream=out) as console:
        for metrics in (more, intact.metrics, {"replaced/error": 1.0}):
            console.log(MetricsRow(iteration=3, cycle=0, scope="generator", time={"rollout": 2.0}, metrics=metrics))
    count = int(found.metrics["replaced/tool"])
    first, second, third = out.getvalue().splitlines()
    assert first.endswith(f"  2.0 s  {30 + count} samples replaced (30 timeout, {count} tool)")
    assert "replaced" not in second and third.endswith("1 sample replaced (1 error)")
    assert "samples replaced (30 timeout" in (tmp_path / "log").read_text()
