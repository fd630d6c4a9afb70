"""Rubrics: the reward by hand, what a judge's answer gives, responses that leave, a judge that learns, entailment."""

import math
from dataclasses import replace

import numpy as np
import pytest
from judges import TOKENIZER, asked, context_of, ids, problems, roll_out, said

from megatron_rl.config.plugins import build
from megatron_rl.config.schema import ConfigError, Use
from megatron_rl.contrib import entailment_reward
from megatron_rl.contrib.entailment import Entailment
from megatron_rl.contrib.rubric import Criterion, Rubric, read_rubric, rubric_reward, saturated
from megatron_rl.rewards.grading_pool import Graded, RewardFailure
from megatron_rl.training.rollouts import measure
from megatron_rl.types import Author, Outcome

RUBRIC = [
    {"criterion": "vowel", "weight": 2.0},
    {"criterion": "long", "weight": 1.0, "saturation": 0.5, "tiers": ["short", "middling", "long"]},
    {"criterion": "clean", "weight": 0.0, "veto": True},
]


@pytest.fixture
def texts(tmp_path):
    """Short templates, so that a prompt can be read in a test."""
    (tmp_path / "g.txt").write_text("Q {question}")
    (tmp_path / "j.txt").write_text("{question}|{criterion}|{tiers}|{response}")
    return {"generator_template": str(tmp_path / "g.txt"), "judge_template": str(tmp_path / "j.txt")}


WORDS = ["", "xx", "ae", "aexxxx", "ae@xxxx"]  # the responses to each problem, by sample


def writes(prompt, key, j):
    return WORDS[j]


def judges(prompt, key, j):
    """Knows every criterion exactly."""
    _, criterion, _, response = prompt.split("|")
    score = {
        "vowel": int(any(c in "aeiou" for c in response)),
        "long": min(2, len(response) // 2),
        "clean": int("@" not in response),
    }[criterion]
    return f"I say \\boxed{{{score}}}"


def by_hand(word):
    """The reward of a word: two for a vowel, one for length with its saturation from 0.5 on, nothing with an @."""
    if "@" in word:
        return 0.0
    half = min(2, len(word) // 2) / 2
    curve = half if half <= 0.5 else 0.5 + 0.5 * (1 - math.exp(-(half - 0.5) / 0.5))
    return 2.0 * any(c in "aeiou" for c in word) + curve


def test_the_reward_is_the_weighted_sum_of_saturated_scores():
    criteria = read_rubric({"rubric": RUBRIC})
    assert rubric_reward(criteria, [1, 0.5, 1]) == 2.5
    assert rubric_reward(criteria, [0.25, 1, 0.5]) == pytest.approx(0.5 + 1 - 0.5 / math.e)
    assert rubric_reward(criteria, [1, 1, 0.49]) == 0.0, "a failed veto"
    assert rubric_reward(criteria, [0, 0, 1]) == 0.0


def test_returns_diminish_beyond_the_threshold_alone():
    scores = np.linspace(0, 1, 101)
    values = np.array([saturated(s, 0.6) for s in scores])
    steps = np.diff(values)
    np.testing.assert_allclose(values[:61], scores[:61])
    assert (steps > 0).all() and (np.diff(steps[60:]) < 0).all() and steps[60] == pytest.approx(0.01, rel=0.02)
    assert [saturated(s, 1.0) for s in (0.0, 0.3, 1.0)] == [0.0, 0.3, 1.0]


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("so \\boxed{2}", 1.0),
        ("\\boxed{0} or rather \\boxed{1}.", 0.5),
        ("\\boxed{yes}", 1.0),
        ("\\boxed{No}", 0.0),
        ("\\boxed{3}", None),
        ("\\boxed{-1}", None),
        ("\\boxed{1.5}", None),
        ("\\boxed{\u00b2}", None),
        ("\\boxed{}", None),
        ("2", None),
        ("", None),
    ],
)
def test_a_score_is_the_number_of_a_tier_in_the_last_box(answer, score):
    assert Criterion("c", tiers=("bad", "fair", "good")).read(answer) == score


@pytest.mark.parametrize(
    ("rubric", "message"),
    [
        (None, "name its column by data.fields"),
        ([], "it is a list of criteria"),
        ("text", "it is a list of criteria"),
        ([{"criterion": "a"}, {"weight": 1.0}], "criterion 1 .*criterion"),
        ([{"criterion": "a", "wieght": 1.0}], "criterion 0 .*wieght"),
        ([{"criterion": "a", "weight": -1.0}], "weight of at least 0"),
        ([{"criterion": "a", "weight": "1"}], "criterion 0"),
        ([{"criterion": "a", "saturation": 0.0}], "saturation above 0"),
        ([{"criterion": "a", "tiers": ["one"]}], "two tiers"),
        ([{"criterion": "a", "veto": "yes"}], "true or false"),
        (["a"], "criterion 0"),
    ],
)
def test_a_rubric_that_cannot_be_used_is_refused_by_number(rubric, message):
    with pytest.raises(ValueError, match=message):
        read_rubric({"rubric": rubric})


def test_fields_that_are_null_have_their_defaults():
    """Parquet gives every row of a column the same fields."""
    assert read_rubric({"rubric": [{"criterion": "a", "veto": None, "tiers": None}]}) == [Criterion("a")]


def test_thoughts_are_not_judged_and_an_open_thought_is_no_answer(texts):
    """One prompt opens a thought, as some chat templates do; the judge thinks, too."""
    words = {
        "Q0": ["<think>ae</think>xx", "<think>xx</think>\nae", "<think>ae", "ae"],
        "Q1<think>\n": ["ae</think>xx", "ae"] * 2,
    }

    def thinks(prompt, key, j):
        return f"<think>\\boxed{{0}} or \\boxed{{1}}?</think>{judges(prompt, key, j)}"

    context = context_of(generator=lambda prompt, key, j: words[prompt][j], judge=thinks)
    given = problems(2, rubric=[RUBRIC[0], {**RUBRIC[2], "weight": 1.0}])
    given[1] = replace(given[1], tokens=[*given[1].tokens, *ids("<think>\n")])
    played, metrics = roll_out(Rubric(updates=1, group_size=4, **texts), ("generator",), given, context)
    assert [r.rewards["outcome"] for r in played["generator"]] == [1.0, 3.0, 0.0, 3.0] + [1.0, 0.0] * 2
    assert [q.rpartition("|")[2] for q in asked(context, "judge")[::2]] == ["xx", "ae", "ae", "xx", "xx"]
    assert metrics["generator"] == {"ungraded": 0, "unasked": 0, "unreadable": 0}
    silent = context_of(generator=writes, judge=lambda prompt, key, j: f"<think>{judges(prompt, key, j)}")
    _, metrics = roll_out(Rubric(updates=1, group_size=5, **texts), ("generator",), problems(1, rubric=RUBRIC), silent)
    assert metrics["generator"]["unreadable"] == 15, "a box in an open thought is no judgement"


def test_rules_multiply_the_reward_and_a_failed_check_of_rules_leaves_its_group(texts):
    found = {
        "": Graded(Outcome.SCORE, 0.5),
        "xx": Graded(Outcome.ERROR, detail="lost"),
        "ae": Graded(Outcome.SCORE, 0.0),
    }
    kept = lambda text: found.get(text, Graded(Outcome.SCORE, 1.0, metrics={"strict": 1.0}))  # noqa: E731
    grade = lambda responses, payloads: [kept(text) for text in responses]  # noqa: E731
    context = context_of(generator=writes, judge=judges, grade=grade)
    played, metrics = roll_out(
        Rubric(updates=1, group_size=5, rules=True, **texts), ("generator",), problems(1, rubric=RUBRIC), context
    )
    rollouts = played["generator"]
    assert [said(r) for r in rollouts] == [WORDS[0], *WORDS[2:]] and metrics["generator"]["ungraded"] == 1
    factors = [0.5, 0.0, 1.0, 1.0]
    assert [r.rewards["rules"] for r in rollouts] == factors and rollouts[2].rewards["strict"] == 1.0
    wanted = [by_hand(said(r)) * factor for r, factor in zip(rollouts, factors, strict=True)]
    assert [r.rewards["outcome"] for r in rollouts] == pytest.approx(wanted)
    broken = replace(context, grade=lambda responses, payloads: [found["xx"]] * len(responses), max_failure_share=0.5)
    with pytest.raises(RewardFailure, match="lost"):
        roll_out(
            Rubric(updates=1, group_size=5, rules=True, **texts), ("generator",), problems(1, rubric=RUBRIC), broken
        )


def test_responses_are_rewarded_by_their_rubrics(texts):
    context = context_of(generator=writes, judge=judges)
    recipe = Rubric(updates=3, group_size=5, **texts)
    assert recipe.schedule() == [[("generator",)]] * 3 and not recipe.roles()["judge"].trained
    played, metrics = roll_out(recipe, ("generator",), problems(2, rubric=RUBRIC), context)
    assert list(played) == ["generator"]
    rollouts = played["generator"]
    rewards = [by_hand(word) for word in WORDS]
    assert [said(r) for r in rollouts] == WORDS * 2
    assert [r.rewards["outcome"] for r in rollouts] == pytest.approx(rewards * 2)
    centred = np.array(rewards) - np.mean(rewards)
    np.testing.assert_allclose([r.advantages for r in rollouts], [*centred / (np.std(rewards, ddof=1) + 1e-6)] * 2)
    assert rollouts[3].payload["scores"] == [1.0, 1.0, 1.0]
    measured = measure(rollouts)
    assert measured["reward/vetoed"] == 0.2 and measured["reward/fulfilled"] == pytest.approx((1 + 2 + 3 + 3 + 2) / 15)
    assert metrics["generator"] == {"ungraded": 0, "unasked": 0, "unreadable": 0}
    questions = asked(context, "judge")
    assert len(questions) == 2 * 5 * 3 and questions[3 * 3 + 1] == "Q0|long|0: short\n1: middling\n2: long|aexxxx"
    assert all(not sampling.logprobs for _, sampling in context.engines["judge"].asked), "a frozen judge needs none"


def test_a_response_that_cannot_be_judged_leaves_its_group_and_is_counted(texts):
    def mumbles(prompt, key, j):
        return "hm" if "|long|" in prompt and prompt.endswith("|ae") else judges(prompt, key, j)

    limit = len("Q0|clean|0: It is not fulfilled.\n1: It is fulfilled.|aexxxx")  # one more does not fit
    context = context_of(generator=writes, judge=mumbles, limit=limit)
    played, metrics = roll_out(
        Rubric(updates=1, group_size=5, **texts), ("generator",), problems(2, rubric=RUBRIC), context
    )
    rollouts = played["generator"]
    assert [said(r) for r in rollouts] == ["", "xx", "aexxxx"] * 2 and len({r.group for r in rollouts}) == 2
    rewards = [by_hand(word) for word in ("", "xx", "aexxxx")]
    want = (np.array(rewards) - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-6)
    np.testing.assert_allclose([r.advantages for r in rollouts], [*want] * 2)
    assert metrics["generator"] == {"ungraded": 4, "unasked": 2 * 2, "unreadable": 2}
    silent = context_of(generator=writes, judge=lambda *_: "hm")
    played, metrics = roll_out(
        Rubric(updates=1, group_size=5, **texts), ("generator",), problems(2, rubric=RUBRIC), silent
    )
    assert played["generator"] == [] and metrics["generator"]["ungraded"] == 10


def test_nothing_depends_on_the_order_of_the_answers(texts):
    args = {"updates": 1, "group_size": 5, "judgements": 2, "train_judge": True, **texts}
    own = [RUBRIC, RUBRIC[:1], RUBRIC[1:]]  # of unequal lengths
    prompts = [problems(3, rubric=rubric)[i] for i, rubric in enumerate(own)]

    def keyed(prompt, key, j):  # the answer depends on the key, as a real engine's draws do
        return f"\\boxed{{{(7 * key + j) % 3 % 2}}}"

    found = []
    for backwards in (False, True):
        context = context_of(generator=writes, judge=keyed, backwards=backwards)
        played, metrics = roll_out(Rubric(**args), ("generator", "judge"), prompts, context)
        rows = [(r.role, r.group, said(r), r.advantages, dict(r.rewards)) for part in played.values() for r in part]
        found.append((rows, metrics))
        assert sorted(context.engines["judge"].keys) == list(range(5 * (3 + 1 + 2)))
    assert found[0] == found[1]


def gold(response, payload):
    """Known scores of two of the criteria."""
    return [float(any(c in "aeiou" for c in response)), None, float("@" not in response)]


def test_a_judge_that_is_trained_earns_form_and_agreement(texts):
    def unsure(prompt, key, j):
        """Of four judgements one is right, one cannot be read, one is wrong, and one says nothing of a tier."""
        right = judges(prompt, key, j)
        wrong = "\\boxed{1}" if "{0}" in right else "\\boxed{0}"
        return [right, "hm", wrong, "\\boxed{9}"][j]

    args = {"labels": f"{__name__}:gold", "train_judge": True, "judgements": 4, "format_weight": 0.5}
    recipe = Rubric(updates=1, group_size=5, **args, **texts)
    assert recipe.schedule() == [[("generator", "judge")]] and recipe.roles()["judge"].samples == 5 * 4 * 4
    context = context_of(generator=writes, judge=unsure)
    played, metrics = roll_out(recipe, ("generator", "judge"), problems(1, rubric=RUBRIC), context)
    judged = played["judge"]
    assert len(judged) == 5 * 3 * 4 and len({r.group for r in judged}) == 5 * 3, "a group is one criterion's judgements"
    assert [r.rewards["total"] for r in judged[:4]] == [1.5, 0.0, 0.5, 0.0], "labelled: agreement and form"
    assert [r.rewards["total"] for r in judged[4:8]] == [0.5, 0.0, 0.5, 0.0], "without a label: form alone"
    assert "agrees" not in judged[4].rewards and judged[0].rewards["agrees"] == 1.0
    spread = np.array([1.5, 0.0, 0.5, 0.0])
    want = (spread - 0.5) / (spread.std(ddof=1) + 1e-6)
    np.testing.assert_allclose([r.advantages for r in judged[:4]], want)
    assert judged[0].spans[:, 2].tolist() == [Author.ENVIRONMENT, Author.POLICY]
    assert TOKENIZER.decode(judged[0].tokens[: judged[0].start]).startswith("Q0|vowel|")
    assert metrics["generator"]["unreadable"] == 5 * 3 * 2 and metrics["generator"]["ungraded"] == 0
    scores = played["generator"][0].payload["scores"]
    assert scores == [0.5, 0.25, 0.5], "the mean of the judgements that can be read"
    assert all(sampling.logprobs for _, sampling in context.engines["judge"].asked)


def test_evaluation_measures_drawn_and_greedy_responses(texts):
    context = context_of(generator=lambda prompt, key, j: ["ae", "ae@"][key], judge=judges)
    metrics = Rubric(updates=1, group_size=5, **texts).evaluate(problems(2, rubric=RUBRIC), context)
    assert metrics["generator/reward_greedy"] == metrics["generator/reward"] == pytest.approx(2.5 / 2)
    assert metrics["generator/vetoed_greedy"] == 0.5 and metrics["generator/ungraded"] == 0
    temperatures = {role: [s.temperature for _, s in context.engines[role].asked] for role in ("generator", "judge")}
    assert temperatures == {"generator": [1, 1, 0, 0], "judge": [0] * 12}


def test_draws_depend_on_the_run_and_the_iteration_alone(texts):
    def seeds(number, run=0):
        context = context_of(generator=writes, judge=judges, seed=run)
        roll_out(Rubric(updates=1, group_size=5, **texts), ("generator",), problems(1, rubric=RUBRIC), context, number)
        return [context.engines[name].asked[0][1].seed for name in ("generator", "judge")]

    assert seeds(5) == seeds(5) and len({*seeds(5), *seeds(6), *seeds(5, run=1)}) == 6
    assert Rubric(updates=1, **texts).state_dict() == {}, "it remembers nothing from iteration to iteration"


def test_settings_are_checked_by_name_and_cure(texts):
    target = "megatron_rl.contrib.rubric:Rubric"
    for args, message in [
        ({"updates": 0}, "updates = 0"),
        ({"group_size": 1}, "group_size = 1: give at least 2"),
        ({"judgements": 1, "train_judge": True}, "judgements = 1: give at least 2"),
        ({"judge_template": "nowhere"}, "judge_template: no prompt"),
        ({"labels": f"{__name__}:no"}, "no 'no'"),
        ({"train_judge": True, "judgements": 2, "format_weight": 0.0}, "format_weight = 0.0: give more than 0"),
        ({"format_weight": -1.0}, "format_weight = -1.0"),
    ]:
        with pytest.raises(ConfigError, match=message):
            build(Use(target=target, args={"updates": 1, **args}))


def test_an_entailment_verifier_is_graded_by_its_label():
    for text, label, score in [
        ("It is. \\boxed{yes}", "yes", 1.0),
        ("\\boxed{Yes}", "True", 1.0),
        ("\\boxed{no}", "0", 1.0),
        ("\\boxed{no} \\boxed{yes}", "no", 0.0),
        ("yes", "yes", 0.0),
        ("", "no", 0.0),
        ("\\boxed{maybe}", "no", 0.0),
    ]:
        assert entailment_reward.grade(text, {"answer": label}) == score
    with pytest.raises(ValueError, match="'partly': give yes or no"):
        entailment_reward.grade("\\boxed{yes}", {"answer": "partly"})


def test_an_entailment_verifier_reads_the_rubric_judges_prompt():
    """What it is trained on is, word for word, what it is asked as the judge of a rubric."""
    payload = {
        "question": "Write {tiers}.",
        "response": "{criterion} Ho.",
        "principle": "It is short.",
        "answer": "yes",
    }
    text = Entailment(updates=1).prompt(payload)
    assert "Write {tiers}." in text and "{criterion} Ho." in text and "It is short." in text
    context = context_of(generator=lambda *_: "{criterion} Ho.", judge=lambda *_: "\\boxed{yes}")
    recipe = Rubric(updates=1, group_size=2, judge_template="entailment_verifier")
    prompts = problems(1, rubric=[{"criterion": "It is short."}])
    prompts[0].payload["question"] = "Write {tiers}."
    played, _ = roll_out(recipe, ("generator",), prompts, context)
    assert asked(context, "judge") == [text] * 2 and [r.rewards["outcome"] for r in played["generator"]] == [1.0, 1.0]
