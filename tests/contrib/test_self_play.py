"""Self-roll_out with checkable answers: rewards, the rule, and the proposers' advantages against the published
formulas."""

from __future__ import annotations

import json
import os
import re

import pytest
from fake_engines import ScriptedEngine
from stages import credited
from toys import EOS, characters, graded

from megatron_rl.config.plugins import build
from megatron_rl.config.schema import ConfigError, Use
from megatron_rl.contrib.proposals import aimed
from megatron_rl.contrib.self_play import PROPOSER, SOLVER, SelfPlay
from megatron_rl.engines.protocol import Sampling
from megatron_rl.rewards.grading_pool import RewardFailure
from megatron_rl.training.iteration import Iteration, RolloutContext
from megatron_rl.training.rollouts import measure
from megatron_rl.types import SOURCE, Outcome, Prompt

TOKENIZER = characters()
ROLES = (PROPOSER, SOLVER)
RULE = "test_self_play:sum_is_right"
by_answer = graded(lambda response, payload: response == payload["answer"])


def ids(text):
    return TOKENIZER(text)["input_ids"]


def sum_is_right(response, payload):
    """A rule for the task: the question is a sum, and says what it comes to."""
    first, _, second = payload["question"].partition("+")
    return float(int(response) == int(first) + int(second))


def leaves_its_process(response, payload):
    """The same rule; it says in which process it ran."""
    with open(payload["log"], "a") as log:
        log.write(f"{os.getpid()}\n")
    return sum_is_right(response, payload)


def whole(question, answer):
    return f"let me see <question>{question}</question> <answer>{answer}</answer>"


# Three proposals of each of three tasks.
PROPOSALS = [
    [whole("1+1", "2"), whole("2+2", "4"), whole("3+3", "6")],
    ["no question", whole("4+4", "8"), "<question>5+5</question>"],
    [whole("6+6", "13"), whole("7+7", "fourteen"), whole("8+8", "16")],
]
SOLVED = {"1+1": 4, "2+2": 3, "3+3": 1, "4+4": 0, "6+6": 1, "7+7": 2, "8+8": 4}  # correct answers of four


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "p").write_text("P {question}")
    (tmp_path / "s").write_text("S {question}")
    return {"proposer_template": str(tmp_path / "p"), "solver_template": str(tmp_path / "s")}


def solver(prompt, i, j):
    question = prompt.removeprefix("S ")
    first, _, second = question.partition("+")
    return str(int(first) + int(second)) if j < SOLVED[question] else "?"


def says(script):
    return ScriptedEngine(lambda p, i, j, sampling: [*ids(script(TOKENIZER.decode(p), i, j)), EOS], eos=EOS)


def context_of(
    proposer=lambda prompt, i, j: PROPOSALS[i][j], grade=by_answer, *, solver=solver, limit=10_000, **settings
):  # fmt: skip
    return RolloutContext(
        engines={PROPOSER: says(proposer), SOLVER: says(solver)},
        tokenizers=dict.fromkeys(ROLES, TOKENIZER),
        samplings=dict.fromkeys(ROLES, Sampling(max_tokens=4000)),
        max_prompt_tokens=dict.fromkeys(ROLES, limit),
        grade=grade,
        **settings,
    )


class Tasks:
    def __init__(self, **payload):
        self.payload = {"topic": "sums", **payload}

    def take(self, count=None):
        return [Prompt(id="task", tokens=ids(f"P {i}"), payload={"question": str(i), **self.payload}) for i in range(3)]


def roll_out(recipe, context, number=0, roles=ROLES, **payload):
    found = credited(recipe, Iteration(cycle=0, index=0, roles=roles, number=number), Tasks(**payload), context)
    assert list(found) == list(roles) and all(r.role == role for role, own in found.items() for r in own)
    return found


def recipe_of(texts, **args):
    return SelfPlay(updates=1, proposals=3, answers=4, **args, **texts)


@pytest.mark.parametrize(("rule", "known"), [(None, False), (RULE, True)])
def test_agreement_with_an_unchecked_answer_of_the_proposer_is_no_accuracy(texts, rule, known):
    """The accuracy of each source was the solver's agreement with answers that the proposer had made up."""
    found = roll_out(recipe_of(texts, rule=rule), context_of(), **{SOURCE: "sums"})
    assert {r.payload["correct"] is not None for r in found[SOLVER]} == {known}
    assert ("accuracy/sums" in measure(found[SOLVER])) == known


def earned(found):
    return [r.rewards["total"] for r in found[PROPOSER]]


@pytest.mark.parametrize("aim", ["hard", "middle", "even"])
def test_a_proposal_earns_what_the_solvers_accuracy_makes_of_it(texts, aim):
    def published(acc):  # ssp_ray_trainer.py:1338-1353 (right 1, left 0); R-Zero's caller_penalty.py
        if aim == "hard":
            return 1.0 - acc
        if aim == "middle":
            return 4.0 * (0.0 + acc) * (1.0 - acc) if 0 < acc < 1 else 0.0
        return min(acc, 1 - acc)

    context = context_of()
    found = roll_out(recipe_of(texts, aim=aim), context)
    accuracies = [1.0, 0.75, 0.25, None, 0.0, None, 0.0, 0.0, 1.0]  # 13 and fourteen are the answers that are wanted
    wanted = [0.0 if acc is None else published(acc) for acc in accuracies]
    assert earned(found) == pytest.approx(wanted)
    assert [aimed(aim, acc / 8) for acc in range(9)] == pytest.approx([published(acc / 8) for acc in range(9)])
    assert context.metrics[PROPOSER] == {"questions": 7, "correct": 7, "played": 7}
    assert len(found[SOLVER]) == 28 and found[SOLVER][0].payload == {
        "question": "1+1", "answer": "2", "topic": "sums", "correct": None, "grading": "score",
    }  # fmt: skip
    assert [r.advantages for r in found[SOLVER][4:8]] == pytest.approx([0.5, 0.5, 0.5, -1.5], abs=1e-5)  # std 0.5
    assert [r.advantages for r in found[SOLVER][:4]] == [0.0] * 4, (
        "answers to one question are compared with each other"
    )


def test_proposals_are_compared_with_those_of_the_same_task(texts):
    """prime-rl's hierarchical_grpo.py by plain loops: reward - mean of the task's proposals, no std."""
    found = roll_out(recipe_of(texts), context_of())
    rewards = earned(found)
    for task in range(3):
        own = rewards[3 * task : 3 * task + 3]
        mean = sum(own) / 3
        advantages = [r.advantages for r in found[PROPOSER][3 * task : 3 * task + 3]]
        assert advantages == pytest.approx([reward - mean for reward in own], abs=1e-12)
    assert len({r.group for r in found[PROPOSER]}) == 3, "tasks of one id are different tasks"


def test_a_moving_average_is_used_before_a_reward_moves_it_and_is_resumed(texts):
    """prime-rl's rae.py (SPIRAL) by plain loops, over two iterations with a checkpoint between them."""
    baseline, decay, recipe = 0.0, 0.9, recipe_of(texts, proposer_estimator="ema", ema_decay=0.9)
    for number in range(2):
        found = roll_out(recipe, context_of(), number)
        for rollout in found[PROPOSER]:
            assert rollout.advantages == pytest.approx(rollout.rewards["total"] - baseline, abs=1e-12)
            baseline = decay * baseline + (1 - decay) * rollout.rewards["total"]
        state = json.loads(json.dumps(recipe.state_dict()))
        recipe = recipe_of(texts, proposer_estimator="ema", ema_decay=0.9)
        recipe.load_state_dict(state)
    assert baseline > 0.1 and recipe.state_dict() == {"baselines": {PROPOSER: pytest.approx(baseline)}}


def test_one_proposal_of_a_task_has_its_reward_as_advantage(texts):
    """Search Self-Play as released: n 1, and verl's GRPO, which takes no mean of a group of one."""
    recipe = SelfPlay(updates=1, proposals=1, answers=4, proposer_estimator="reinforce", **texts)
    found = roll_out(recipe, context_of())
    assert [r.advantages for r in found[PROPOSER]] == earned(found)
    with pytest.raises(ConfigError, match="proposals = 1: grpo compares the proposals of one task"):
        SelfPlay(updates=1, proposals=1, answers=4, proposer_estimator="grpo", **texts)


def test_the_rule_refuses_wrong_answers_before_the_solver_sees_them(texts):
    context = context_of()
    found = roll_out(recipe_of(texts, rule=RULE, unparseable=-1.0), context)
    # no question, no answer and 6 + 6 = 13 earn -1; `fourteen`, on which the rule fails, is compared with nothing
    assert earned(found) == pytest.approx([0.0, 0.25, 0.75, -1.0, 1.0, -1.0, -1.0, 0.0])
    assert context.metrics[PROPOSER] == {"questions": 7, "correct": 5, "played": 5, "unchecked": 1}
    asked = {TOKENIZER.decode(p) for p, _ in context.engines[SOLVER].asked}
    assert asked == {f"S {q}" for q in ("1+1", "2+2", "3+3", "4+4", "8+8")}
    alone = [r.advantages for r in found[PROPOSER][6:]]
    assert alone == pytest.approx([-0.5, 0.5])
    with pytest.raises(RewardFailure, match="9 of 9 gradings failed"):
        roll_out(
            recipe_of(texts, rule=RULE), context_of(lambda p, i, j: whole("7+7", "fourteen"), max_failure_share=0.2)
        )


def test_the_rule_keeps_its_processes_from_iteration_to_iteration(texts, tmp_path):
    recipe = recipe_of(texts, rule="test_self_play:leaves_its_process", rule_workers=1)
    for number in range(3):
        roll_out(recipe, context_of(), number, log=str(tmp_path / "log"))
    processes = (tmp_path / "log").read_text().split()
    assert len(processes) == 3 * (7 + 1) and len(set(processes)) == 1
    process = int(processes[0])
    os.kill(process, 0)
    del recipe
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_a_rule_sees_the_tasks_payload_with_the_proposed_question(texts):
    recipe = recipe_of(texts, rule="test_self_play:is_about_sums")
    roll_out(recipe, context := context_of(), topic="sums")
    assert context.metrics[PROPOSER]["correct"] == 7
    roll_out(recipe, context := context_of(), topic="odes")
    assert context.metrics[PROPOSER]["correct"] == 0


def is_about_sums(response, payload):
    return float(payload["topic"] == "sums" and "+" in payload["question"])


def test_the_challenger_of_r_zero_pays_for_what_is_alike(texts):
    """caller_penalty.py:136-142: min(p, 1 - p), or -1 without a question, minus the share of the question's cluster."""
    said = ["a b c d e f ?", "a b c d e g ?", "p q r s t u ?", "v w x y z"]
    answers = {said[0]: 1, said[1]: 2, said[2]: 4}  # right of four

    def propose(prompt, i, j):
        place = 2 * i + j
        return whole(said[place], "7") if place < 3 else said[3] if place == 3 else "nothing"

    context = context_of(propose, solver=lambda p, i, j: "7" if j < answers[p.removeprefix("S ")] else "?")
    recipe = SelfPlay(
        updates=1, proposals=2, answers=4, aim="even", unparseable=-1.0, cluster_distance=0.5,
        proposer_estimator="grpo", **texts,
    )  # fmt: skip
    found = roll_out(recipe, context)
    wanted = [0.25 - 2 / 6, 0.5 - 2 / 6, 0.0 - 1 / 6, *[-1.0 - 1 / 6] * 3]  # two of six are alike
    assert earned(found) == pytest.approx(wanted)
    assert context.metrics[PROPOSER]["cluster_share"] == pytest.approx((2 + 2 + 4) / 36)
    advantages = [r.advantages for r in found[PROPOSER]]
    assert advantages[:2] == pytest.approx(
        [-(0.5**0.5), 0.5**0.5], abs=1e-4
    )  # of two: half their distance over their std
    assert advantages[4:] == [0.0, 0.0]


def test_rounds_train_one_role_after_the_other(texts):
    recipe = recipe_of(texts, proposer_iterations=2, solver_iterations=3)
    assert recipe.schedule() == [[(PROPOSER,)]] * 2 + [[(SOLVER,)]] * 3
    parts = recipe.roles()
    assert (parts[PROPOSER].samples, parts[PROPOSER].drawn) == (3, {PROPOSER: 3, SOLVER: 12})
    assert (parts[SOLVER].samples, parts[SOLVER].drawn) == (4, {PROPOSER: 1, SOLVER: 4})
    together, context = roll_out(recipe_of(texts), context_of()), context_of()
    alone = roll_out(recipe, context, roles=(PROPOSER,))
    assert [r.advantages for r in alone[PROPOSER]] == [r.advantages for r in together[PROPOSER]]
    assert all(sampling.logprobs for _, sampling in context.engines[PROPOSER].asked)
    assert not any(sampling.logprobs for _, sampling in context.engines[SOLVER].asked)
    alone = roll_out(recipe, context := context_of(), roles=(SOLVER,))
    assert len(context.engines[PROPOSER].asked) == 3 and {s.n for _, s in context.engines[PROPOSER].asked} == {1}
    assert {r.payload["question"] for r in alone[SOLVER]} == {"1+1", "6+6"}, "the first proposal of each task"


def test_the_solver_learns_from_questions_of_middling_accuracy_alone(texts):
    context = context_of()
    found = roll_out(recipe_of(texts, least_accuracy=0.25, most_accuracy=0.75), context)
    assert {r.payload["question"] for r in found[SOLVER]} == {"2+2", "3+3"} and len(found[SOLVER]) == 8
    assert context.metrics[SOLVER]["learned_from"] == 2 and len(found[PROPOSER]) == 9


def test_the_solvers_own_majority_takes_the_place_of_the_proposed_answer(texts):
    """R-Zero's start_vllm_server.py: the score of a question is the share of the answers that agree with the most
    frequent one in a box, over all answers."""
    said = {
        "1+1": ["2", "3", "3", ""],
        "2+2": ["", "", "", ""],
        "3+3": ["6", "6", "6", "6"],
        "4+4": ["1", "2", "3", ""],
    }

    def answer(prompt, i, j):
        own = said.get(prompt.removeprefix("S "), ["0"] * 4)[j]
        return rf"so \boxed{{{own}}}" if own else "no idea"

    def boxed_is_right(response, payload):
        assert payload["answer"], "nothing is graded that nobody answered"
        return rf"\boxed{{{payload['answer']}}}" in response

    context = context_of(grade=graded(boxed_is_right), solver=answer)
    found = roll_out(recipe_of(texts, key="majority", aim="even"), context)
    accuracies = [0.5, 0.0, 1.0, None, 0.25, None, 1.0, 1.0, 1.0]
    assert earned(found) == pytest.approx([0.0 if acc is None else min(acc, 1 - acc) for acc in accuracies])
    assert len(found[SOLVER]) == 28 and context.metrics[SOLVER]["graded/error"] == 0
    assert [(r.payload["answer"], r.rewards["outcome"]) for r in found[SOLVER][:4]] == [("3", s) for s in (0, 1, 1, 0)]
    assert [r.payload["correct"] for r in found[SOLVER]] == [None] * 28, "a vote is no correctness"


def test_answers_without_a_grade_leave_their_group_and_a_proposal_without_any_leaves_too(texts):
    def rule(response, payload):
        late = payload["question"] == "1+1" or (payload["question"] == "2+2" and response == "?")
        return Outcome.TIMEOUT if late else response == payload["answer"]

    context = context_of(grade=graded(rule))
    found = roll_out(recipe_of(texts), context)
    assert len(found[SOLVER]) == 28 - 4 and context.metrics[SOLVER]["graded/timeout"] == 4
    assert context.metrics[SOLVER]["replaced/timeout"] == 1, "of the question that has graded answers"
    assert earned(found)[:2] == [0.0, 0.75], "the accuracy is that of the graded answers: three of three, one of four"
    assert len(found[PROPOSER]) == 8 and sum(r.advantages for r in found[PROPOSER][:2]) == pytest.approx(0)


def test_a_proposal_that_is_alone_learns_nothing(texts):
    grade = graded(lambda response, payload: Outcome.ERROR if payload["question"] != "1+1" else 1.0)
    found = roll_out(recipe_of(texts, aim="hard"), context_of(grade=grade))
    assert [(r.group[0], r.advantages) for r in found[PROPOSER]] == [("0", 0.0), ("1", 0.0), ("1", 0.0)]


def test_a_question_that_is_too_long_is_not_played(texts):
    context = context_of(lambda p, i, j: whole("1" * 30 + "+1", "2") if j == 0 else PROPOSALS[0][j], limit=20)
    found = roll_out(recipe_of(texts), context)
    assert earned(found) == pytest.approx([0.0, 0.25, 0.75] * 3) and len(found[SOLVER]) == 6 * 4
    assert max(len(p) for p, _ in context.engines[SOLVER].asked) <= 20


def test_nothing_to_play_is_no_error(texts):
    found = roll_out(recipe_of(texts, rule=RULE), context_of(lambda *_: "nothing"))
    assert earned(found) == [0.0] * 9 and found[SOLVER] == []


def test_evaluation_measures_the_solver(texts):
    problems = [Prompt(id=q, tokens=[1], payload={"question": q, "answer": "2"}) for q in ("1+1", "2+2")]
    metrics = recipe_of(texts).evaluate(problems, context_of())
    kinds = {f"solver/{name}{kind}": 0.5 for name in ("accuracy", "reward") for kind in ("", "_greedy")}
    assert metrics == {**kinds, "solver/finished": 1.0, "solver/tokens": 2.0, "solver/num_problems": 2.0}


@pytest.mark.parametrize(
    "args, message",
    [
        ({"proposals": 1}, "proposals = 1: hierarchical compares the proposals of one task; give at least 2"),
        ({"answers": 1}, "answers = 1: give at least 2"),
        ({"aim": "easy"}, 'aim = "easy"'),
        ({"ema_decay": 2.0}, "ema_decay = 2.0: give a value less"),
        ({"ema_decay": 1.0}, "ema_decay = 1.0: give a value less than 1"),
        ({"key": "mine"}, 'key = "mine"'),
        (
            {"solver_iterations": 2},
            "proposer_iterations = 0, solver_iterations = 2: a round has iterations of both roles",
        ),
        ({"proposer_iterations": -1}, "proposer_iterations = -1: give a value greater"),
        ({"least_accuracy": 0.6, "most_accuracy": 0.5}, "least_accuracy = 0.6: give at most most_accuracy, 0.5"),
        ({"cluster_distance": 1.5}, "cluster_distance = 1.5: give a value less"),
        ({"proposer_estimator": "mean"}, "estimator 'mean'"),
        ({"rule": "no_such_module:rule"}, "plug-in 'no_such_module:rule': cannot import"),
        ({"solver_template": "none_such"}, "solver_template: no prompt template 'none_such'"),
    ],
)
def test_wrong_arguments_are_refused_with_their_name(args, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        build(Use(target="megatron_rl.contrib.self_play:SelfPlay", args={"updates": 1, **args}))


def test_a_vote_counts_gradings_that_fail_and_replaces_their_samples(texts):
    def rule(response, payload):
        return Outcome.TIMEOUT if response.endswith("{3}") else payload["answer"] in response

    def answer(prompt, i, j):
        return rf"\boxed{{{2 if j < 2 else j}}}"

    context = context_of(grade=graded(rule), solver=answer)
    found = roll_out(recipe_of(texts, key="majority"), context)
    assert context.metrics[SOLVER]["graded/timeout"] == 0 and len(found[SOLVER]) == 7 * 4
    assert context.metrics[SOLVER]["replaced/timeout"] == 7
    assert {r.rewards["outcome"] for r in found[SOLVER]} == {1.0} and earned(found)[:3] == [0.0] * 3
    with pytest.raises(RewardFailure, match="7 of 28 gradings failed"):
        roll_out(recipe_of(texts, key="majority"), context_of(grade=graded(rule), solver=answer, max_failure_share=0.2))
