"""Comparison within a group: outcomes by hand, the judge's bias for a place, what leaves, a judge that learns."""

from dataclasses import replace

import numpy as np
import pytest
from judges import asked, context_of, problems, roll_out, said

from megatron_rl.config.plugins import build
from megatron_rl.config.schema import ConfigError, Use
from megatron_rl.contrib.comparing import Comparison, read_comparison
from megatron_rl.contrib.pairwise import Pairwise


@pytest.fixture
def texts(tmp_path):
    """Short templates, so that a prompt can be read in a test."""
    (tmp_path / "g.txt").write_text("Q {question}")
    (tmp_path / "j.txt").write_text("{question}|{first}|{second}")
    return {"generator_template": str(tmp_path / "g.txt"), "judge_template": str(tmp_path / "j.txt")}


def comparison(first, second):
    return f"<principles>be long</principles>\n<critique>seen</critique>\n<scores>{first}, {second}</scores>"


def writes(prompt, key, j):
    """A word whose length depends on the problem and the sample: the best one of problem k is sample k."""
    return "abcdefghij"[: 1 + (j - key) % 5]


def prefers_long(prompt, key, j):
    _, first, second = prompt.split("|")
    return comparison(len(first), len(second))


def prefers_first(prompt, key, j):
    """Puts whatever stands first three points higher than its length."""
    _, first, second = prompt.split("|")
    return comparison(len(first) + 3, len(second))


@pytest.mark.parametrize(
    ("text", "scores", "form"),
    [
        (comparison(6, 4.5), (6, 4.5), 1.0),
        (f" {comparison(0, 10)}\n", (0, 10), 1.0),
        (comparison(10.5, 3), None, 0.0),
        (comparison(-1, 3), None, 0.0),
        (comparison("six", 3), None, 0.0),
        ("<scores>3,2</scores>", (3, 2), 0.0),
        (f"Well. {comparison(3, 2)}", (3, 2), 0.0),
        (f"{comparison(3, 2)} <scores>2, 3</scores>", (2, 3), 0.0),
        (comparison(3, 2).replace("be long", " "), (3, 2), 0.0),
        (comparison(3, 2).replace("critique", "remark"), (3, 2), 0.0),
        ("<scores>3, 2", None, 0.0),
        ("<scores>3</scores>", None, 0.0),
        ("<scores>1, 2, 3</scores>", None, 0.0),
        ("", None, 0.0),
    ],
)
def test_scores_are_read_from_the_last_block_and_form_is_strict(text, scores, form):
    assert read_comparison(text) == Comparison(scores, form)


@pytest.mark.parametrize("both", [False, True])
def test_each_response_is_compared_with_the_reference_of_its_group(texts, both):
    """Over several iterations every outcome is the sign of the difference in length to one response of the group."""
    recipe = Pairwise(updates=1, group_size=5, both_orders=both, **texts)
    references = set()
    for number in range(12):
        context = context_of(generator=writes, judge=prefers_long)
        played, metrics = roll_out(recipe, ("generator",), problems(3), context, number)
        alike = 0
        for i in range(3):
            own = {said(r): r for r in played["generator"] if r.group == f"{i}:p{i}"}
            words = [writes("", i, j) for j in range(5)]
            [reference] = set(words).intersection(
                *[set(p.split("|")[1:]) for p in asked(context, "judge") if p.startswith(f"Q{i}")]
            )
            references.add((i, reference))
            wanted = {word: 1.0 if len(word) > len(reference) else -1.0 for word in words if word != reference}
            if len(set(wanted.values())) == 1:
                alike += 1
                assert not own, "all outcomes are alike"
            else:
                assert {word: r.advantages for word, r in own.items()} == wanted
                assert all(r.rewards["margin"] == len(word) - len(reference) for word, r in own.items())
        assert metrics["generator"]["groups_alike"] == alike and metrics["generator"]["ungraded"] == 0
        assert len(context.engines["judge"].asked) == 3 * 4 * (2 if both else 1)
    assert len(references) > 10, "references are drawn anew"


def test_advantages_are_whole_numbers_that_nothing_divides(texts):
    context = context_of(generator=lambda prompt, key, j: "ab" if j % 4 else "abc", judge=prefers_long)
    played, _ = roll_out(Pairwise(updates=1, group_size=8, **texts), ("generator",), problems(6), context)
    assert {type(r.advantages) for r in played["generator"]} == {float}
    assert {r.advantages for r in played["generator"]} == {1.0, -1.0}
    for r in played["generator"]:
        assert r.advantages == r.rewards["outcome"] == (1.0 if said(r) == "abc" else -1.0), "a tie is no victory"


def test_a_bias_for_the_first_place_is_cancelled_by_asking_in_both_orders(texts):
    def wins(judge, both, number):
        recipe = Pairwise(updates=1, group_size=5, both_orders=both, **texts)
        context = context_of(generator=writes, judge=judge)
        played, metrics = roll_out(recipe, ("generator",), problems(3), context, number)
        return {(r.group, said(r)): r.advantages for r in played["generator"]}, metrics["generator"]

    for number in range(5):
        fair, biased = wins(prefers_long, True, number), wins(prefers_first, True, number)
        assert fair[0] == biased[0], "added scores of both orders"
        assert fair[1]["first_wins"] == 0.5 and biased[1]["first_wins"] > 0.5
    single = [wins(prefers_first, False, number)[0] for number in range(5)]
    assert single != [wins(prefers_long, False, number)[0] for number in range(5)], "one order alone is deceived"


def test_a_single_order_is_drawn_by_chance(texts):
    """A judge that sees nothing but the place gives a response +1 as often as -1."""
    recipe = Pairwise(updates=1, group_size=9, **texts)
    context = context_of(generator=lambda prompt, key, j: "abcdefghi"[j], judge=lambda *_: comparison(1, 0))
    iterations = [roll_out(recipe, ("generator",), problems(10), context, number)[0] for number in range(5)]
    outcomes = np.array([r.advantages for played in iterations for r in played["generator"]])
    assert len(outcomes) > 300 and abs(outcomes.mean()) < 0.15


@pytest.mark.parametrize(("both", "left"), [(False, 3), (True, 3)])
def test_a_comparison_that_cannot_be_read_leaves_its_group(texts, both, left):
    """With both orders, one that cannot be read is enough: the other alone would have the judge's bias."""

    def silent_about_three(prompt, key, j):
        _, first, second = prompt.split("|")
        unread = first == "abc" if both else "abc" in (first, second)
        return "hm" if unread else prefers_long(prompt, key, j)

    recipe = Pairwise(updates=1, group_size=5, both_orders=both, **texts)
    for number in range(10):
        context = context_of(generator=lambda prompt, key, j: "abcdefghij"[: 1 + j], judge=silent_about_three)
        played, metrics = roll_out(recipe, ("generator",), problems(1), context, number)
        pairs = [tuple(p.split("|")[1:]) for p in asked(context, "judge")]
        [reference] = set(pairs[0]).intersection(*map(set, pairs))
        if reference == "abc":
            assert played["generator"] == [] and metrics["generator"]["ungraded"] == 4
        else:
            assert metrics["generator"]["ungraded"] == 1 and "abc" not in map(said, played["generator"])
            assert len(played["generator"]) in (0, left) and metrics["generator"]["unreadable"] == 1


def test_a_pair_that_is_too_long_is_not_asked_about(texts):
    context = context_of(generator=writes, judge=prefers_long, limit=len("Q0|abc|abcd"))
    played, metrics = roll_out(Pairwise(updates=1, group_size=5, **texts), ("generator",), problems(4), context)
    assert 0 < len(context.engines["judge"].asked) < 16
    assert metrics["generator"]["ungraded"] == 16 - len(context.engines["judge"].asked)
    assert metrics["generator"]["unreadable"] == 0


@pytest.mark.parametrize("roles", [("generator",), ("judge",)])
def test_nothing_depends_on_the_order_of_the_answers(texts, roles):
    def keyed(prompt, key, j):  # the answer depends on the key, as a real engine's draws do
        return comparison((7 * key + j) % 5, (3 * key + 2 * j) % 4) if key % 6 else "hm"

    recipe = Pairwise(updates=1, group_size=6, both_orders=True, judge_iterations=1, judgements=3, **texts)
    prompts = [*problems(3), *problems(3, answer="good", rejected="bad")]
    found = []
    for backwards in (False, True):
        context = context_of(generator=writes, judge=keyed, backwards=backwards)
        played, metrics = roll_out(recipe, roles, prompts, context)
        rows = [(r.role, r.group, said(r), r.advantages, dict(r.rewards)) for r in played[roles[0]]]
        found.append((rows, metrics))
    assert found[0] == found[1] and found[0][0]


def test_a_judge_learns_known_preferences_and_the_form(texts):
    def unsure(prompt, key, j):
        """Of four judgements: right, right without the form, wrong, and one that cannot be read."""
        _, first, second = prompt.split("|")
        right = comparison(9 * (first == "good"), 9 * (second == "good"))
        wrong = comparison(9 * (first != "good"), 9 * (second != "good"))
        return [right, right.replace("critique", "remark"), wrong, "hm"][j]

    settings = {"judge_iterations": 2, "judge_warmup": 1, "judgements": 4, "format_weight": 0.5, "both_orders": True}
    recipe = Pairwise(updates=2, **settings, **texts)
    assert recipe.schedule() == [[("judge",)], *[[("generator",), ("judge",), ("judge",)]] * 2]
    assert recipe.roles()["judge"].trained and not Pairwise(updates=1, **texts).roles()["judge"].trained
    context = replace(context_of(generator=writes, judge=unsure), partner_weights={"judge": 0.25})
    played, metrics = roll_out(recipe, ("judge",), problems(3, answer="good", rejected="bad"), context)
    judged = played["judge"]
    assert {r.partner_weight for r in judged} == {0.25}
    assert all(0 <= seconds < 60 for seconds in context.watch.take().values())
    assert list(played) == ["judge"] and len(judged) == 3 * 2 * 4 and len({r.group for r in judged}) == 3 * 2
    assert [r.rewards["total"] for r in judged] == [1.5, 1.0, 0.5, 0.0] * 6
    spread = np.array([1.5, 1.0, 0.5, 0.0])
    np.testing.assert_allclose([r.advantages for r in judged[:4]], (spread - 0.75) / (spread.std(ddof=1) + 1e-6))
    assert metrics["judge"]["unreadable"] == 6 and metrics["judge"]["form"] == 0.5
    assert not context.engines["generator"].asked and {s.n for _, s in context.engines["judge"].asked} == {4}
    assert sorted(asked(context, "judge")) == sorted(
        [f"Q{i}|good|bad" for i in range(3)] + [f"Q{i}|bad|good" for i in range(3)]
    )


def test_without_a_label_a_judge_learns_the_form_on_two_responses(texts):
    recipe = Pairwise(updates=1, judge_iterations=1, judgements=2, **texts)
    context = context_of(generator=writes, judge=lambda p, key, j: "hm" if j else prefers_long(p, key, j))
    played, _ = roll_out(recipe, ("judge",), problems(2), context)
    assert [r.rewards["total"] for r in played["judge"]] == [0.8, 0.0] * 2
    assert all("agrees" not in r.rewards for r in played["judge"])
    shown = [set(p.split("|")[1:]) for p in asked(context, "judge")]
    assert shown == [{"a", "ab"}, {"abcde", "a"}]


def test_evaluation_measures_victories_and_the_judge(texts):
    context = context_of(generator=lambda prompt, key, j: "abcd" if key else "a", judge=prefers_first)
    recipe = Pairwise(updates=1, **texts)
    held_out = [*problems(2, answer="abc", rejected="ab"), *problems(1)]
    metrics = recipe.evaluate(held_out, context)
    assert (metrics["generator/win_rate"], metrics["judge/accuracy"]) == (0.5, 1.0)
    assert metrics["judge/first_wins"] == 1.0 and metrics["judge/unreadable"] == 0.0
    assert recipe.evaluate(problems(2), context) == {}


def test_draws_depend_on_the_run_and_the_iteration_alone(texts):
    def seeds(number, run=0):
        context = context_of(generator=writes, judge=prefers_long, seed=run)
        roll_out(Pairwise(updates=1, **texts), ("generator",), problems(2), context, number)
        return [context.engines[name].asked[0][1].seed for name in ("generator", "judge")], asked(context, "judge")

    assert seeds(5) == seeds(5), "references and orders too"
    assert seeds(5) != seeds(6) and seeds(5) != seeds(5, run=1)
    assert Pairwise(updates=1, **texts).state_dict() == {}, "it remembers nothing from iteration to iteration"


def test_settings_are_checked_by_name_and_cure():
    for args, message in [
        ({"updates": 0}, "updates = 0"),
        ({"group_size": 2}, "group_size = 2: give at least 3"),
        ({"judgements": 1, "judge_iterations": 1}, "judgements = 1: give at least 2"),
        ({"judge_iterations": -1}, "judge_iterations = -1"),
        ({"judge_template": "nowhere"}, "judge_template: no prompt"),
        ({"format_weight": -1.0}, "format_weight = -1.0"),
    ]:
        with pytest.raises(ConfigError, match=message):
            build(Use(target="megatron_rl.contrib.pairwise:Pairwise", args={"updates": 1, **args}))
