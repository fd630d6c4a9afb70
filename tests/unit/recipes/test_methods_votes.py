"""Labels by majority vote, against the formulas of TTRL (verl/trainer/ppo/ttrl_utils.py of the release), by plain
loops."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from statistics import fmean

import pytest
from scripted_rollouts import TOKENIZER, context_of, ids, reader_of, roll_out
from toys import graded

from megatron_rl.data.problems import Problem
from megatron_rl.engines.protocol import Sampling
from megatron_rl.evaluation.draw import ProblemSet
from megatron_rl.evaluation.solve import Solver
from megatron_rl.recipes.dapo import Dapo
from megatron_rl.recipes.grpo import Grpo
from megatron_rl.recipes.online_dpo import OnlineDpo
from megatron_rl.recipes.solutions import solve
from megatron_rl.recipes.votes import elect
from megatron_rl.texts.tags import boxed
from megatron_rl.types import Outcome, Prompt

N = 8
agrees = graded(lambda response, payload: boxed(response) == payload["answer"])


def writes(text, j, sampling):
    """Some answers in a box, some texts without one."""
    said = random.Random(f"{sampling.seed}/{text}/{j}").choice(["3", "3", "4", "5", ""])
    return rf"so \boxed{{{said}}}" if said else "no idea"


def problems(*answers):
    return [
        Prompt(id=f"0/{i}", tokens=[i + 1], payload={"question": str(i)} | ({"answer": a} if a is not None else {}))
        for i, a in enumerate(answers)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_labels_rewards_and_metrics_are_those_of_ttrl(seed):
    """TTRL: the label is Counter(answers).most_common(1), answers that cannot be read have no vote, majority_ratio is
    the winner's count over all n outputs, and label_accuracy the mean over prompts of grade(label, ground truth)."""
    prompts = problems("3", "4", "5", "3", "3")
    solutions, m = solve(
        context_of(writes, grade=agrees), "generator", prompts, Sampling(max_tokens=50, n=N, seed=seed), voted=True
    )
    ratios, right = [], []
    for i, prompt in enumerate(prompts):
        own = solutions[i * N : (i + 1) * N]
        answers = [answer for s in own if (answer := boxed(s.text)) is not None]
        label, count = Counter(answers).most_common(1)[0]
        ratios.append(count / N)
        right.append(float(label == prompt.payload["answer"]))
        assert [s.rollout.rewards["outcome"] for s in own] == [float(boxed(s.text) == label) for s in own]
        assert {s.rollout.payload["answer"] for s in own} == {label}
    assert m["votes/share"] == pytest.approx(fmean(ratios)) and m["votes/labels_right"] == pytest.approx(fmean(right))


def test_the_first_of_equally_frequent_answers_wins_and_equal_numbers_are_one_answer():
    one = elect([r"\boxed{7}", r"\boxed{1/2}", "none", r"\boxed{0.5}", r"\boxed{7.0}"])
    assert one is not None and (one.answer, one.text, one.share) == ("7", r"\boxed{7}", 0.4)
    other = elect(["<answer>a</answer>", "<answer>b</answer>", "<answer>b</answer>"])
    assert other is not None and other.answer == "b"
    assert elect(["1", "the answer is 2"]) is None


def test_a_group_without_an_answer_has_the_least_reward_and_no_grading():
    asked = []

    def rule(response, payload):
        asked.append(response)
        return boxed(response) == payload["answer"]

    context = context_of(lambda text, j, s: "no idea", grade=graded(rule), lowest_reward=-1.0)
    solutions, m = solve(context, "generator", problems(None), Sampling(max_tokens=50, n=3), voted=True)
    assert [s.rollout.rewards["outcome"] for s in solutions] == [-1.0] * 3 and not asked
    assert m["votes/share"] == 0.0 and "votes/labels_right" not in m, "no known answer, no share of right labels"


def test_a_sample_that_is_replaced_is_graded_against_the_label_of_its_group():
    def script(text, j, s):
        return r"\boxed{4}" if s.n == 1 else [r"\boxed{3}", r"\boxed{3}", r"lost \boxed{4}"][j]

    grade = graded(lambda r, p: Outcome.ERROR if r.startswith("lost") else boxed(r) == p["answer"])
    solutions, m = solve(
        context_of(script, grade=grade), "generator", problems("3"), Sampling(max_tokens=50, n=3), voted=True
    )
    assert [s.rollout.rewards["outcome"] for s in solutions] == [1.0, 1.0, 0.0] and m["replaced/error"] == 1
    assert m["votes/share"] == pytest.approx(2 / 3) and m["votes/labels_right"] == 1.0


def test_a_reward_does_not_see_what_else_a_data_set_says_of_the_known_answer():
    hidden = {"answers": ["9"], "reward_model": {"ground_truth": "9"}, "ground_truth": "9"}
    prompts = [replace(p, payload={**p.payload, **hidden}) for p in problems("9")]
    seen = []
    grade = graded(lambda response, payload: seen.append(payload) or boxed(response) == payload["answer"])
    solve(context_of(writes, grade=grade), "generator", prompts, Sampling(max_tokens=50, n=N), voted=True)
    assert len(seen) == N + 1 and all(not hidden.keys() & payload.keys() for payload in seen[:N])


@pytest.mark.parametrize("kind", [Dapo, Grpo, OnlineDpo])
def test_recipes_learn_from_votes_where_known_answers_are_wrong_or_hidden(tmp_path, kind):
    """Evaluations use the known answers."""
    (tmp_path / "q.txt").write_text("Q{question}:")
    recipe = kind(updates=1, group_size=N, template=str(tmp_path / "q.txt"))
    context = context_of(writes, grade=agrees, voted=True)
    rollouts, m = roll_out(recipe, reader_of(4, answer="9"), context)
    assert m["votes/labels_right"] == 0.0 and m["votes/share"] > 0.3
    outcomes = [r.rewards["outcome"] for r in rollouts]
    assert m.get("outcome_of_all", sum(outcomes) / len(outcomes)) == pytest.approx(m["votes/share"])
    assert any(r.advantages > 0 for r in rollouts)
    assert recipe.evaluate(problems("9", "9"), context)["generator/accuracy"] == 0.0
    known, m = roll_out(recipe, reader_of(4, answer="9"), context_of(writes, grade=agrees))
    assert not any(r.rewards["outcome"] for r in known) and "votes/share" not in m


def test_a_thought_that_the_prompt_opened_is_told_from_the_answer_by_graders():
    told = []
    grade = graded(lambda response, payload: bool(told.append(response)))
    prompts = [Prompt(id=f"0/{i}", tokens=ids(text), payload={}) for i, text in enumerate(["Q<think>\n", "Q <think>."])]
    context, once = context_of(lambda *_: "hm", grade=grade), Sampling(max_tokens=50, n=1)
    solutions, _ = solve(context, "generator", prompts, once)
    assert told == [s.text for s in solutions] == ["<think>\nhm", "hm"]
    own = [Problem(row=i, values={"question": p.id}) for i, p in enumerate(prompts)]
    problem_set = ProblemSet(name="s", title="s", problems=own, prompts=[p.tokens for p in prompts])
    solver = Solver(engine=context.engines["generator"], tokenizer=TOKENIZER, sampling=once, grade=grade)
    assert [rows[0]["response"] for rows in solver(problem_set, range(2))] == told[2:] == told[:2]
