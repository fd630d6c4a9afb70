"""Self-play with checkable answers: rewards, the rule, and the proposers' advantages against the published formulas."""

from __future__ import annotations

import json
import re

import pytest
from fake_engines import ScriptedEngine
from toys import EOS, characters, graded

from megatron_rl.config.plugins import build
from megatron_rl.config.schema import ConfigError, Use
from megatron_rl.engines.base import Sampling
from megatron_rl.recipes.self_play import PROPOSER, SOLVER, SelfPlay, aimed
from megatron_rl.rewards.pool import RewardFailure
from megatron_rl.training.turns import Table, Turn
from megatron_rl.types import Outcome, Prompt

TOKENIZER = characters()
ROLES = (PROPOSER, SOLVER)
RULE = "test_methods_self_play:sum_is_right"
by_answer = graded(lambda response, payload: response == payload["answer"])


def ids(text):
    return TOKENIZER(text)["input_ids"]


def sum_is_right(response, payload):
    """A rule for the task: the question is a sum, and says what it comes to."""
    first, _, second = payload["question"].partition("+")
    return float(int(response) == int(first) + int(second))


def whole(question, answer):
    return f"let me see <question>{question}</question> <answer>{answer}</answer>"


# Three proposals of each of three tasks.
PROPOSALS = [
    [whole("1+1", "2"), whole("2+2", "4"), whole("3+3", "6")],
    ["no question", whole("4+4", "8"), "<question>5+5</question>"],
    [whole("6+6", "13"), whole("7+7", "fourteen"), whole("8+8", "16")],
]
SOLVED = {"1+1": 4, "2+2": 3, "3+3": 1, "4+4": 0, "6+6": 1, "7+7": 2, "8+8": 4}  # right answers of four


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


def table_of(proposer=lambda prompt, i, j: PROPOSALS[i][j], grade=by_answer, *, limit=10_000, **settings):
    return Table(
        engines={PROPOSER: says(proposer), SOLVER: says(solver)},
        tokenizers=dict.fromkeys(ROLES, TOKENIZER),
        samplings=dict.fromkeys(ROLES, Sampling(max_tokens=4000)),
        max_prompt_tokens=dict.fromkeys(ROLES, limit),
        grade=grade,
        **settings,
    )


class Tasks:
    def take(self, count=None):
        return [
            Prompt(id="task", tokens=ids(f"P {i}"), payload={"question": str(i), "topic": "sums"}) for i in range(3)
        ]


def play(recipe, table, number=0):
    found = recipe.play(Turn(step=0, index=0, roles=ROLES, number=number), Tasks(), table)
    assert list(found) == list(ROLES) and all(r.role == role for role, own in found.items() for r in own)
    return found


def recipe_of(texts, **args):
    return SelfPlay(updates=1, proposals=3, answers=4, **args, **texts)


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

    table = table_of()
    found = play(recipe_of(texts, aim=aim), table)
    accuracies = [1.0, 0.75, 0.25, None, 0.0, None, 0.0, 0.0, 1.0]  # 13 and fourteen are the answers that are wanted
    wanted = [0.0 if acc is None else published(acc) for acc in accuracies]
    assert earned(found) == pytest.approx(wanted)
    assert [aimed(aim, acc / 8) for acc in range(9)] == pytest.approx([published(acc / 8) for acc in range(9)])
    assert table.notes[PROPOSER] == {"questions": 7, "right": 7, "played": 7}
    assert len(found[SOLVER]) == 28 and found[SOLVER][0].payload == {
        "question": "1+1", "answer": "2", "topic": "sums", "correct": True, "grading": "score",
    }  # fmt: skip
    assert [r.advantages for r in found[SOLVER][4:8]] == pytest.approx([0.5, 0.5, 0.5, -1.5], abs=1e-5)  # std 0.5
    assert [r.advantages for r in found[SOLVER][:4]] == [0.0] * 4, (
        "answers to one question are compared with each other"
    )


def test_proposals_are_compared_with_those_of_the_same_task(texts):
    """prime-rl's hierarchical_grpo.py by plain loops: reward - mean of the task's proposals, no std."""
    found = play(recipe_of(texts), table_of())
    rewards = earned(found)
    for task in range(3):
        own = rewards[3 * task : 3 * task + 3]
        mean = sum(own) / 3
        advantages = [r.advantages for r in found[PROPOSER][3 * task : 3 * task + 3]]
        assert advantages == pytest.approx([reward - mean for reward in own], abs=1e-12)
    assert len({r.group for r in found[PROPOSER]}) == 3, "tasks of one id are different tasks"


def test_a_moving_average_is_used_before_a_reward_moves_it_and_is_resumed(texts):
    """prime-rl's rae.py (SPIRAL) by plain loops, over two turns with a checkpoint between them."""
    baseline, decay, recipe = 0.0, 0.9, recipe_of(texts, proposer_estimator="ema", ema_decay=0.9)
    for number in range(2):
        found = play(recipe, table_of(), number)
        for rollout in found[PROPOSER]:
            assert rollout.advantages == pytest.approx(rollout.rewards["total"] - baseline, abs=1e-12)
            baseline = decay * baseline + (1 - decay) * rollout.rewards["total"]
        state = json.loads(json.dumps(recipe.state_dict()))
        recipe = recipe_of(texts, proposer_estimator="ema", ema_decay=0.9)
        recipe.load_state_dict(state)
    assert baseline > 0.1 and recipe.state_dict() == {"baseline": pytest.approx(baseline)}


def test_one_proposal_of_a_task_with_grpo_has_its_reward_as_advantage(texts):
    """Search Self-Play as released: n 1, and verl's GRPO, which takes no mean of a group of one."""
    recipe = SelfPlay(updates=1, proposals=1, answers=4, proposer_estimator="grpo", **texts)
    found = play(recipe, table_of())
    assert [r.advantages for r in found[PROPOSER]] == pytest.approx(earned(found), abs=1e-5)


def test_the_rule_refuses_wrong_answers_before_the_solver_sees_them(texts):
    table = table_of()
    found = play(recipe_of(texts, rule=RULE, unparseable=-1.0), table)
    # no question, no answer and 6 + 6 = 13 earn -1; `fourteen`, on which the rule fails, is compared with nothing
    assert earned(found) == pytest.approx([0.0, 0.25, 0.75, -1.0, 1.0, -1.0, -1.0, 0.0])
    assert table.notes[PROPOSER] == {"questions": 7, "right": 5, "played": 5}
    asked = {TOKENIZER.decode(p) for p, _ in table.engines[SOLVER].asked}
    assert asked == {f"S {q}" for q in ("1+1", "2+2", "3+3", "4+4", "8+8")}
    alone = [r.advantages for r in found[PROPOSER][6:]]
    assert alone == pytest.approx([-0.5, 0.5])
    with pytest.raises(RewardFailure, match="9 of 9 gradings failed"):
        play(recipe_of(texts, rule=RULE), table_of(lambda p, i, j: whole("7+7", "fourteen"), max_failure_share=0.2))


def test_answers_without_a_grade_leave_their_group_and_a_proposal_without_any_leaves_too(texts):
    def rule(response, payload):
        late = payload["question"] == "1+1" or (payload["question"] == "2+2" and response == "?")
        return Outcome.TIMEOUT if late else response == payload["answer"]

    table = table_of(grade=graded(rule))
    found = play(recipe_of(texts), table)
    assert len(found[SOLVER]) == 28 - 5 and table.notes[SOLVER]["graded/timeout"] == 5
    assert earned(found)[:2] == [0.0, 0.75], "the accuracy is that of the graded answers: three of three, one of four"
    assert len(found[PROPOSER]) == 8 and sum(r.advantages for r in found[PROPOSER][:2]) == pytest.approx(0)


def test_a_proposal_that_is_alone_learns_nothing(texts):
    grade = graded(lambda response, payload: Outcome.ERROR if payload["question"] != "1+1" else 1.0)
    found = play(recipe_of(texts, aim="hard"), table_of(grade=grade))
    assert [(r.group[0], r.advantages) for r in found[PROPOSER]] == [("0", 0.0), ("1", 0.0), ("1", 0.0)]


def test_a_question_that_is_too_long_is_not_played(texts):
    table = table_of(lambda p, i, j: whole("1" * 30 + "+1", "2") if j == 0 else PROPOSALS[0][j], limit=20)
    found = play(recipe_of(texts), table)
    assert earned(found) == pytest.approx([0.0, 0.25, 0.75] * 3) and len(found[SOLVER]) == 6 * 4
    assert max(len(p) for p, _ in table.engines[SOLVER].asked) <= 20


def test_nothing_to_play_is_no_error(texts):
    found = play(recipe_of(texts, rule=RULE), table_of(lambda *_: "nothing"))
    assert earned(found) == [0.0] * 9 and found[SOLVER] == []


def test_evaluation_measures_the_solver(texts):
    problems = [Prompt(id=q, tokens=[1], payload={"question": q, "answer": "2"}) for q in ("1+1", "2+2")]
    figures = recipe_of(texts).evaluate(problems, table_of())
    assert figures == {"solver/accuracy_sampled": 0.5, "solver/accuracy_greedy": 0.5, "solver/num_problems": 2.0}


@pytest.mark.parametrize(
    "args, message",
    [
        ({"proposals": 1}, "proposals = 1: hierarchical compares the proposals of one task; give at least 2"),
        ({"answers": 1}, "answers = 1: give at least 2"),
        ({"aim": "easy"}, "args.aim = 'easy'"),
        ({"ema_decay": 2.0}, "ema_decay = 2.0: it is a share"),
        ({"proposer_estimator": "mean"}, "estimator 'mean'"),
        ({"rule": "no_such_module:rule"}, "plug-in 'no_such_module:rule': cannot import"),
        ({"solver_template": "none_such"}, "solver_template: no prompt template 'none_such'"),
    ],
)
def test_wrong_arguments_are_refused_with_their_name(args, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        build(Use(target="megatron_rl.recipes.self_play:SelfPlay", args={"updates": 1, **args}))
