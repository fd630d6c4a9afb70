"""Nothing is learned from a failure: who is alone in its group after one gets no advantage, and moves no other's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from fake_engines import ScriptedEngine
from stages import credited
from test_recipes import Problems, iteration, solution, verification
from toys import EOS, characters, graded

from megatron_rl.algorithms.advantages import StepCredit, assign_advantages, step_advantages
from megatron_rl.algorithms.estimators import ESTIMATORS, UNGROUPED
from megatron_rl.config.schema import ConfigError, Use
from megatron_rl.contrib.evolve import Evolve
from megatron_rl.contrib.pairwise import Pairwise
from megatron_rl.contrib.remax import Remax
from megatron_rl.contrib.rubric import Rubric
from megatron_rl.contrib.self_play import SelfPlay
from megatron_rl.contrib.ssrl import Ssrl
from megatron_rl.engines.protocol import Sampling
from megatron_rl.environments.environment import Environment
from megatron_rl.environments.episode_runner import MOST_ANSWERS
from megatron_rl.environments.episode_types import EnvironmentFailure, EpisodeEnd, NextRequest
from megatron_rl.recipes.agents import Agents
from megatron_rl.recipes.curriculum import Curriculum
from megatron_rl.recipes.dapo import Dapo
from megatron_rl.recipes.grpo import Grpo
from megatron_rl.recipes.tandem import Tandem
from megatron_rl.recipes.tango import Tango
from megatron_rl.recipes.tango_agents import TangoAgents
from megatron_rl.training.collector import RolloutMaker
from megatron_rl.training.credit import CreditStage, RolloutError
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.types import STEP, Annotations, Author, Outcome, Prompt, Rollout, Stop, spans_of

TOKENIZER = characters()
OWN = f"{__name__}:as_it_is"
COMPARING = [*sorted(set(ESTIMATORS) - UNGROUPED), OWN]


def as_it_is(rewards, groups, tokens):
    """An estimator of a user's own."""
    return rewards + groups


def rollout(reward, *, group, tokens=4, steps=None, unjudged=0):
    count = unjudged if steps is None else len(steps)
    return Rollout(
        role="solver", group=group, tokens=range(tokens), logprobs=[0.0] * tokens, rewards={"outcome": reward},
        spans=spans_of((tokens, Author.POLICY, 0)),
        annotations={STEP: Annotations([(k, k + 1) for k in range(count)], steps)},
    )  # fmt: skip


GROUP = [rollout(1.0, group="a", tokens=3), rollout(0.25, group="a", tokens=5), rollout(0.0, group="a")]


@pytest.mark.parametrize("estimator", COMPARING)
@pytest.mark.parametrize("place", [0, 1, 3])
def test_cases_a_lone_survivor_learns_nothing_and_moves_nobody(estimator, place):
    """One grading of two had failed, and the other answer's reward was its advantage."""
    batch = [*GROUP[:place], rollout(1.0, group="alone", tokens=50), *GROUP[place:]]
    found = [r.advantages for r in assign_advantages(batch, reward="outcome", estimator=estimator)]
    assert found.pop(place) == 0.0
    assert found == [r.advantages for r in assign_advantages(GROUP, reward="outcome", estimator=estimator)]
    alone = assign_advantages([rollout(1.0, group=name) for name in "ab"], reward="outcome", estimator=estimator)
    assert [r.advantages for r in alone] == [0.0, 0.0]


@pytest.mark.parametrize("credit", [StepCredit(), StepCredit(span="own", baseline="step")])
@pytest.mark.parametrize("estimator", [name for name in COMPARING if name not in ("opmd", OWN)])
def test_cases_steps_of_one_judged_solution_are_compared_with_nothing(estimator, credit):
    pair = [rollout(1.0, group="a", steps=[0.5, -0.5]), rollout(0.0, group="a", steps=[-0.5, -0.5])]
    survivor = [rollout(1.0, group="b", steps=[0.5, -0.5]), rollout(0.0, group="b", unjudged=2)]
    found = [*step_advantages([*pair, *survivor], estimator=estimator, credit=credit)]
    assert [np.abs(values).max() for values in found[2:]] == [0.0, 0.0]
    for mine, whole in zip(step_advantages(pair, estimator=estimator, credit=credit), found[:2], strict=True):
        assert np.array_equal(mine, whole)


def test_faults_a_failed_verification_is_no_return_of_0_to_reinforce_pp():
    """Its solution had pulled the mean of all step returns, and learned minus that mean."""
    judged = [rollout(1.0, group="a", steps=[0.5, 0.5]), rollout(0.0, group="a", steps=[-0.5, 0.5])]
    found = [*step_advantages([*judged, rollout(0.0, group="a", unjudged=2)], estimator="reinforce_pp")]
    assert found[2] == 0.0
    for mine, whole in zip(step_advantages(judged, estimator="reinforce_pp"), found, strict=False):
        assert np.array_equal(mine, whole)
    without_steps = [*step_advantages([*judged, rollout(0.0, group="a")], estimator="reinforce_pp")]
    assert without_steps[2] < 0, "a solution without steps has the return 0, as released"


def test_faults_one_rollout_of_one_token_is_compared_with_nothing_by_reinforce_pp():
    [one] = assign_advantages([rollout(1.0, group="a", tokens=1)], reward="outcome", estimator="reinforce_pp")
    assert one.advantages == 0.0
    [values] = step_advantages([rollout(1.0, group="a", tokens=1, steps=[1.0])], estimator="reinforce_pp")
    assert np.abs(values).max() == 0.0


def test_faults_an_estimator_of_ones_own_wants_groups_of_two():
    with pytest.raises(ConfigError, match="group_size = 1: give at least 2"):
        Grpo(updates=1, group_size=1, estimator=OWN)


# --- Every place in which a failure could change what others learn. Of each problem there are two answers, a correct
# one and another. The problem `good` has a group that is whole. In that of `bad` the second answer fails in the named
# way.

FAILS = "lost"


@dataclass
class Task(Environment):
    """Ends with the first answer. One that says how it fails fails so."""

    def begin(self, task, seed):
        self.question = task["question"]
        role = "generator"
        return [NextRequest(agent=role, role=role, messages=[{"role": "user", "content": f"{self.question}:"}])]

    def step(self, said):
        match said.text:
            case "tool":
                raise EnvironmentFailure("the tool is away")
            case "late":
                return EpisodeEnd(outcome=Outcome.TIMEOUT, why="a sandbox was late")
            case "no reward":
                return EpisodeEnd(rewards={})
        return EpisodeEnd(answers={"generator": said.text})


def says(script):
    """An engine that says what `script` makes of (prompt, number of the sample). A sample in the place of another one
    has its number."""

    def answer(prompt, key, sample, sampling):
        number = sample if sampling.n > 1 else key // MOST_ANSWERS if key >= MOST_ANSWERS else key
        return [*TOKENIZER(script(TOKENIZER.decode(prompt), number, sampling))["input_ids"], EOS]

    return ScriptedEngine(answer, eos=EOS)


@dataclass(frozen=True)
class Place:
    """One way in which an answer fails in one recipe."""

    recipe: Callable[..., object]
    way: Outcome | None = Outcome.ERROR  # of its grading; None: it fails elsewhere
    fails: str = FAILS  # what the failing answer says
    other: Callable[[str, int, Sampling], str] = lambda prompt, j, sampling: ""  # a second model
    other_role: str = "verifier"
    limit: int = 10_000  # tokens of the second model's prompts
    role: str = "generator"


def judge_pair(prompt, j, sampling):
    """Says that paper beats stone, scissors beat paper and stone beats scissors."""
    first, second = (part[:5] for part in prompt.split("|")[1:])
    if FAILS in (first[:4], second[:4]):
        return "hm"
    beats = {("paper", "stone"), ("sciss", "paper"), ("stone", "sciss")}
    won = (first, second) in beats
    return f"<principles>p</principles>\n<critique>c</critique>\n<scores>{9 * won}, {9 * (not won)}</scores>"


def judge_criterion(prompt, j, sampling):
    return "hm" if FAILS in prompt else f"\\boxed{{{int('right' in prompt)}}}"


def judge_score(prompt, j, sampling):
    good = "<score>10</score>" if "right" in prompt or prompt.startswith("J2") else "<score>1</score>"
    return "hm" if FAILS in prompt else good


def verifies(prompt, j, sampling):
    return verification("+", "+") if "\\boxed{right}" in prompt else verification("-", "-")


def step(answer):
    return solution(1, answer)


STONE = ("stone", "paper", "scissors")
RUBRIC = [{"criterion": "c", "weight": 1.0}]
PLACES = {
    "grading raises": Place(lambda t: Grpo(updates=1, group_size=2, template=t["g"])),
    "grading is late": Place(lambda t: Grpo(updates=1, group_size=2, template=t["g"]), way=Outcome.TIMEOUT),
    "estimator of one's own": Place(lambda t: Grpo(updates=1, group_size=2, template=t["g"], estimator=OWN)),
    "batch": Place(lambda t: Grpo(updates=1, group_size=2, template=t["g"], estimator="batch")),
    "whitened": Place(lambda t: Grpo(updates=1, group_size=2, template=t["g"], estimator="reinforce_pp_baseline")),
    "opo": Place(lambda t: Grpo(updates=1, group_size=2, template=t["g"], estimator="opo")),
    "dapo": Place(lambda t: Dapo(updates=1, group_size=2, template=t["g"])),
    "tandem": Place(lambda t: Tandem(updates=1, group_size=2, template=t["g"])),
    "ssrl": Place(lambda t: Ssrl(updates=1, group_size=2, template=t["g"])),
    "remax, its baseline": Place(lambda t: Remax(updates=1, group_size=2, template=t["g"])),
    "tango": Place(lambda t: Tango(group_size=2, generator_template=t["g"], verifier_template=t["v"]),
                   fails=step(FAILS), other=verifies),
    "tango, no verification fits": Place(
        lambda t: Tango(group_size=2, generator_template=t["g"], verifier_template=t["v"]),
        fails=step(FAILS * 100), other=verifies, limit=300),
    "pairwise judge": Place(lambda t: Pairwise(updates=1, group_size=3, generator_template=t["g"],
                                               judge_template=t["pair"]), other=judge_pair, other_role="judge"),
    "rubric judge": Place(lambda t: Rubric(updates=1, group_size=2, generator_template=t["g"],
                                           judge_template=t["rubric"]), other=judge_criterion, other_role="judge"),
    "tool": Place(lambda t: Agents(updates=1, group_size=2, environment=Use(target=f"{__name__}:Task"),
                                   agents={"generator": 1}), fails="tool"),
    "episode is late": Place(lambda t: Agents(updates=1, group_size=2, environment=Use(target=f"{__name__}:Task"),
                                              agents={"generator": 1}), fails="late"),
    "episode without its reward": Place(
        lambda t: Agents(updates=1, group_size=2, environment=Use(target=f"{__name__}:Task"), agents={"generator": 1}),
        fails="no reward"),
    "episode's grading": Place(lambda t: Agents(updates=1, group_size=2, environment=Use(target=f"{__name__}:Task"),
                                                agents={"generator": 1})),
    "tango's episode": Place(
        lambda t: TangoAgents(group_size=2, environment=Use(target=f"{__name__}:Task"), verifier_template=t["v"]),
        fails="tool", other=lambda prompt, j, sampling: verification("+" if "right" in prompt else "-", "+")),
}  # fmt: skip


@pytest.fixture
def texts(tmp_path):
    own = {"g": "{question}:", "v": "{question} {solution} {num_steps}", "pair": "{question}|{first}|{second}",
           "rubric": "{question}|{criterion}|{response}|{tiers}"}  # fmt: skip
    for name, text in own.items():
        (tmp_path / name).write_text(text)
    return {name: str(tmp_path / name) for name in own}


def played(place, texts, questions):
    """Makes the rollouts of an iteration -> the rollouts of each question."""
    steps = place.fails.startswith("<think>")

    def writes(prompt, number, sampling):
        j, bad = number % 2, prompt.startswith("bad")
        if place.other is judge_pair:
            return FAILS if bad and number == 2 else STONE[number]
        if bad and (j == 1 or (sampling.temperature == 0 and place.recipe is PLACES["remax, its baseline"].recipe)):
            return place.fails
        answer = "wrong" if j else "right"
        return step(answer) if steps else answer

    def rule(response, payload):
        return place.way if FAILS in response and place.limit == 10_000 else float("right" in response)

    context = RolloutContext(
        engines={"generator": says(writes), place.other_role: says(place.other)},
        tokenizers=dict.fromkeys(["generator", place.other_role], TOKENIZER),
        samplings=dict.fromkeys(["generator", place.other_role], Sampling(max_tokens=4000)),
        max_prompt_tokens={"generator": 10_000, place.other_role: place.limit},
        grade=graded(rule),
    )
    prompts = [
        Prompt(id=q, tokens=TOKENIZER(f"{q}:")["input_ids"], payload={"question": q, "answer": "", "rubric": RUBRIC})
        for q in questions
    ]
    found = credited(place.recipe(texts), iteration(place.role), Problems(prompts), context)[place.role]
    return {q: [r for r in found if r.payload["question"] == q] for q in questions}


@pytest.mark.parametrize("name", PLACES)
def test_faults_no_place_learns_from_a_failure(name, texts):
    place = PLACES[name]
    found, alone = played(place, texts, ["good", "bad"]), played(place, texts, ["good"])
    assert len(found["good"]) == len(alone["good"]) == 2
    assert any(np.abs(r.advantages).max() > 0 for r in alone["good"]), "there is something to learn"
    for whole, mine in zip(found["good"], alone["good"], strict=True):
        assert np.array_equal(whole.advantages, mine.advantages), "a failure elsewhere moves nobody"
    if name == "tango, no verification fits":  # the answers themselves were graded: their steps alone are not compared
        right, wrong = found["bad"]
        assert np.ptp(right.advantages[right.trainable]) == 0 and wrong.advantages < 0
        return
    assert not any(FAILS in TOKENIZER.decode(r.response) for r in found["bad"])
    assert all(np.abs(r.advantages).max() == 0 for r in found["bad"])


def test_faults_an_aborted_sample_is_refused_before_it_is_trained_on(texts):
    """No session gives one; a user's own engine may."""

    class Aborting(ScriptedEngine):
        def one(self, *row):
            return replace(super().one(*row), stop=Stop.ABORTED)

    engine = Aborting(lambda *_: [1, 2], eos=EOS)
    context = RolloutContext(
        engines={"generator": engine}, tokenizers={"generator": TOKENIZER}, max_prompt_tokens={"generator": 100},
        samplings={"generator": Sampling(max_tokens=5)}, grade=graded(lambda *_: 1.0),
    )  # fmt: skip
    recipe = Grpo(updates=1, group_size=2, template=texts["g"])
    reader = Problems(1)
    reader.state_dict, reader.dropped = dict, 0
    collector = RolloutMaker(recipe=recipe, readers={"generator": reader}, context=context, prompts_per_iteration=1)
    made, _ = collector.make(iteration("generator"), {})
    with pytest.raises(RolloutError, match=r"rollout 0 \(group '0:p0'\) was cut off by its engine"):
        CreditStage(recipe).apply(iteration("generator"), made)


def test_faults_a_failed_grading_does_not_retire_a_problem_for_ever(texts):
    grade = graded(lambda response, payload: Outcome.ERROR if response == "x" else 1.0)
    recipe = Dapo(updates=1, group_size=2, template=texts["g"], curriculum=Curriculum(retire_at=0.9))
    for fails, rows in ((True, []), (False, [0])):
        writes = says(lambda prompt, j, sampling, fails=fails: "x" if j and fails else "y")
        context = RolloutContext(
            engines={"generator": writes}, tokenizers={"generator": TOKENIZER}, max_prompt_tokens={"generator": 100},
            samplings={"generator": Sampling(max_tokens=5)}, grade=grade,
        )  # fmt: skip
        prompt = Prompt(id="0/0", tokens=[1], payload={"question": "q"})
        credited(recipe, iteration("generator"), Problems([prompt]), context)
        assert recipe.state_dict().get("rows", []) == rows


def test_faults_a_lone_survivor_says_nothing_of_the_share_of_problems_with_signal(texts):
    """By that share Tango decides whether solutions are verified, and whether the verifier rests."""
    place = PLACES["tango"]
    signals = []
    for questions in (["good"], ["good", "bad"]):
        recipe = place.recipe(texts)
        played(replace(place, recipe=lambda _, recipe=recipe: recipe), texts, questions)
        signals.append(recipe.state_dict()["signal"])
    assert signals[0] == signals[1] > 0


def test_faults_players_without_a_verdict_are_compared_with_nobody(tmp_path):
    """Answers that could not be graded, and questions that no judge could mark, in self-play."""
    for name, text in {"p": "P", "s": "S {question}", "q": "J2 {question}", "a": "J {question} {answer}",
                       "r": "R {references}"}.items():  # fmt: skip
        (tmp_path / name).write_text(text)
    at = {name: str(tmp_path / name) for name in "psqar"}
    writes = {
        "proposer": lambda prompt, j, sampling: "<question>q</question> <answer>right</answer>",
        "solver": lambda prompt, j, sampling: "<answer>right</answer>" if j % 2 == 0 else FAILS,
        "judge": judge_score,
    }
    context = RolloutContext(
        engines={role: says(script) for role, script in writes.items()}, tokenizers=dict.fromkeys(writes, TOKENIZER),
        samplings=dict.fromkeys(writes, Sampling(max_tokens=400)), max_prompt_tokens=dict.fromkeys(writes, 1000),
        grade=graded(lambda response, payload: Outcome.ERROR if FAILS in response else 1.0),
    )  # fmt: skip
    task = Problems([Prompt(id="t", tokens=[1], payload={"question": "seed"})])
    roles = ("proposer", "solver")
    recipe = SelfPlay(updates=1, proposals=2, answers=2, proposer_template=at["p"], solver_template=at["s"])
    found = credited(recipe, replace(iteration("proposer"), roles=roles), task, context)
    assert [r.advantages for own in found.values() for r in own] == [0.0] * 4
    names = ("proposer", "reference", "solver", "question", "answer")
    templates = {f"{name}_template": at[letter] for name, letter in zip(names, "prsqa", strict=True)}
    recipe = Evolve(updates=1, answers=2, judgements=1, practice="proposed", estimator="grpo", **templates)
    found = credited(recipe, replace(iteration("proposer"), roles=(*roles, "judge")), task, context)
    assert [len(found[role]) for role in (*roles, "judge")] == [1, 1, 2]
    assert [r.advantages for role in roles for r in found[role]] == [0.0, 0.0]
