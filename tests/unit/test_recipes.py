"""Recipes played with engines that say what they are told: schedules, credit by hand, dropped samples, measures, templates."""

import json
import re
from collections import Counter
from dataclasses import replace

import pytest
from toys import EOS, characters, graded, streaming

from megatron_rl.algorithms.losses import PolicyLoss
from megatron_rl.config.plugins import build
from megatron_rl.config.schema import ConfigError, LossConfig, Use
from megatron_rl.engines.base import Sampling
from megatron_rl.engines.fake import ScriptedEngine, TablePolicy
from megatron_rl.evaluation.confusion import Confusion, confusion, step_confusion
from megatron_rl.recipes.base import solve
from megatron_rl.recipes.grpo import Grpo
from megatron_rl.recipes.tango import Tango
from megatron_rl.rewards.pool import Outcome, RewardFailure
from megatron_rl.rewards.tags import boxed, generator_format, step_spans
from megatron_rl.rewards.verdicts import review
from megatron_rl.text import fill, read_template
from megatron_rl.training import loop
from megatron_rl.training.turns import Players, Turn
from megatron_rl.types import Prompt
from megatron_rl.world import OneProcess

TOKENIZER = characters()
by_answer = graded(lambda response, payload: boxed(response) == payload["answer"])


def ids(text):
    return TOKENIZER(text)["input_ids"]


def solution(steps, answer):
    """A solution with `steps` steps, the k-th of them `#k x`."""
    blocks = "\n".join(f"<step>#{k + 1} x</step>" for k in range(steps))
    return f"<think>\n{blocks}\n</think>\n<answer>\\boxed{{{answer}}}</answer>"


def verification(verdicts, final):
    """`+` and `-` verdicts and a final one; `?` is a step or a final section without verdict."""
    word = {"+": "\\boxed{CORRECT}", "-": "\\boxed{INCORRECT}", "?": "unclear"}
    blocks = "\n".join(f"<step>Step {k + 1} Analysis: seen. {word[v]}</step>" for k, v in enumerate(verdicts))
    return (
        f"<step_verification>\n{blocks}\n</step_verification>\n<final_verification>{word[final]}</final_verification>"
    )


def says(script):
    """An engine that answers (prompt text, prompt index, sample index, sampling) with the script's text and ends it."""
    return ScriptedEngine(lambda p, i, j, sampling: [*ids(script(TOKENIZER.decode(p), i, j, sampling)), EOS], eos=EOS)


@pytest.fixture
def texts(tmp_path):
    """Short templates, so that a prompt can be read in a test."""
    (tmp_path / "g.txt").write_text("Q {question}\n")
    (tmp_path / "v.txt").write_text("Q {question} S {solution} K {num_steps}\n")
    return {"generator_template": str(tmp_path / "g.txt"), "verifier_template": str(tmp_path / "v.txt")}


def players(generator, verifier=None, *, grade=by_answer, verifier_limit=10_000, **settings):
    engines = {"generator": says(generator)} | ({"verifier": says(verifier)} if verifier else {})
    return Players(
        engines=engines,
        tokenizers=dict.fromkeys(engines, TOKENIZER),
        samplings={name: Sampling(max_tokens=4000, top_p=0.9) for name in engines},
        max_prompt_tokens={"generator": 10_000, "verifier": verifier_limit},
        grade=grade,
        **settings,
    )


def problems(count, **payload):
    return [
        Prompt(id=f"p{i}", tokens=ids(f"Q {i}"), payload={"question": str(i), "answer": "yes", **payload})
        for i in range(count)
    ]


def turn(role, number=0, update=0):
    return Turn(step=0, index=0, role=role, number=number, update=update)


def segments(trajectory):
    """Advantages of the first token of each step, of the last one of each step, and of the last token."""
    a = trajectory.advantages
    first, last = [a[start] for start, _ in trajectory.steps], [a[end - 1] for _, end in trajectory.steps]
    assert first == last, "one step, one value"
    return [*first, a[-1]]


PAPER = (
    ("++++", "yes"),
    ("+-", "no"),
    ("++--", "no"),
)  # verdicts and answers of the worked example, one group of three


def paper_generator(prompt, i, j, sampling):
    verdicts, answer = PAPER[j]
    return solution(len(verdicts), answer)


def paper_verifier(prompt, i, j, sampling):
    return verification(PAPER[i][0], "+" if PAPER[i][1] == "yes" else "-")


def test_tango_vectors_through_a_whole_generator_turn(texts):
    with_players = players(paper_generator, paper_verifier)
    played = Tango(group_size=3, **texts).play(turn("generator"), problems(1), with_players)
    expected = [
        [1.2290, 1.1815, 1.1341, 1.0867, 1.0392],
        [-0.5829, -0.7094, -0.5196],
        [-0.6461, -0.6935, -0.7410, -0.6303, -0.5196],
    ]
    for trajectory, values in zip(played.trajectories, expected, strict=True):
        assert segments(trajectory) == pytest.approx(values, abs=1e-4)
        assert not any(trajectory.advantages[: trajectory.prompt_length])
        assert [TOKENIZER.decode(trajectory.tokens[a:b]) for a, b in trajectory.steps][0] == "<step>#1 x</step>"
    assert [t.payload["verdicts"] for t in played.trajectories] == [
        [v == "+" for v in verdicts] for verdicts, _ in PAPER
    ]
    assert played.trajectories[0].payload["review"].startswith("<step_verification>")
    m = played.metrics
    assert (m["alpha"], m["steps_per_solution"], m["verdicts_match"]) == (0.1, pytest.approx(10 / 3), 1.0)
    assert [m[f"confusion/{c}"] for c in ("tp", "fp", "tn", "fn")] == [1, 0, 2, 0] and m[
        "predicted_positive"
    ] == pytest.approx(1 / 3)
    assert (m["samples"], m["finished"], m["groups_without_signal"]) == (3, 1.0, 0.0)
    assert m["reward/outcome"] == pytest.approx(1 / 3)
    [(asked, _)] = with_players.engines["verifier"].asked
    assert TOKENIZER.decode(asked[1]) == f"Q 0 S {solution(2, 'no')} K 2"


def test_alpha_follows_the_generators_updates_and_not_the_turns(texts):
    recipe = Tango(group_size=3, generator_updates=300, **texts)
    alphas = [
        recipe.play(
            turn("generator", number=n, update=u), problems(1), players(paper_generator, paper_verifier)
        ).metrics["alpha"]
        for n, u in ((40, 0), (119, 60), (239, 150))
    ]
    assert alphas == pytest.approx([0.1, 0.0398, 0.01], abs=1e-4)


def test_a_sample_whose_verdict_count_differs_gets_no_step_rewards(texts):
    def verifier(prompt, i, j, sampling):
        return verification(
            "+?-+" if i == 0 else PAPER[i][0], "+"
        )  # a missing verdict swallows nothing but its own step

    played = Tango(group_size=3, **texts).play(turn("generator"), problems(1), players(paper_generator, verifier))
    assert [bool(t.step_rewards) for t in played.trajectories] == [False, True, True]
    assert segments(played.trajectories[0]) == pytest.approx([1.0392] * 5, abs=1e-4)
    assert played.metrics["verdicts_match"] == pytest.approx(2 / 3)


def test_without_any_step_reward_the_outcome_advantage_is_whole(texts):
    played = Tango(group_size=3, **texts).play(
        turn("generator"), problems(1), players(paper_generator, lambda *_: "no idea")
    )
    assert segments(played.trajectories[0]) == pytest.approx([1.1547] * 5, abs=1e-4)
    assert [played.metrics[f"confusion/{c}"] for c in ("tp", "fp", "tn", "fn")] == [
        0,
        0,
        2,
        1,
    ]  # unreadable: said incorrect


def test_a_verifier_prompt_that_is_too_long_is_dropped_and_never_cut(texts):
    limit = (
        len(ids(f"Q 0 S {solution(4, 'yes')} K 4")) - 1
    )  # the two longer solutions do not fit (no is shorter by one)
    with_players = players(paper_generator, lambda p, i, j, s: verification("+-", "-"), verifier_limit=limit - 1)
    played = Tango(group_size=3, **texts).play(turn("generator"), problems(1), with_players)
    assert played.metrics["reviews_dropped"] == 2 and [bool(t.step_rewards) for t in played.trajectories] == [
        False,
        True,
        False,
    ]
    [(asked, _)] = with_players.engines["verifier"].asked
    assert [TOKENIZER.decode(a) for a in asked] == [f"Q 0 S {solution(2, 'no')} K 2"]
    assert "verdicts" not in played.trajectories[0].payload


def test_a_grading_that_fails_is_an_outcome_of_zero_and_counted(texts):
    grade = graded(
        lambda response, payload: (
            Outcome.TIMEOUT if "yes" in response else Outcome.ERROR if response.count("#") == 2 else 1.0
        )
    )
    played = Tango(group_size=3, **texts).play(
        turn("generator"), problems(1), players(paper_generator, paper_verifier, grade=grade)
    )
    assert [t.rewards["outcome"] for t in played.trajectories] == [0.0, 0.0, 1.0]
    assert (played.metrics["graded/timeout"], played.metrics["graded/error"]) == (1, 1)
    assert sum(played.metrics[f"confusion/{c}"] for c in ("tp", "fp", "tn", "fn")) == 1  # only what was graded
    with pytest.raises(RewardFailure, match="2 of 3 gradings failed"):
        strict = players(paper_generator, paper_verifier, grade=grade, max_failure_share=0.5)
        Tango(group_size=3, **texts).play(turn("generator"), problems(1), strict)


def mixed_generator(prompt, i, j, sampling):
    return solution(2, "yes" if i == 0 else "no")


def mixed_verifier(prompt, i, j, sampling):
    """Sample 0 agrees and is well formed, sample 1 disagrees, sample 2 cannot be read."""
    right = "yes" in prompt
    return [verification("++", "+" if right else "-"), verification("++", "-" if right else "+"), "what?"][j]


def test_a_verifier_turn_rewards_agreement_and_form_in_groups_of_one_solution(texts):
    recipe = Tango(verifications=3, **texts)
    played = recipe.play(turn("verifier"), problems(4), players(mixed_generator, mixed_verifier))
    assert (
        [t.rewards["verifier"] for t in played.trajectories]
        == [1.8, 0.8, 0.0] * 4
        == pytest.approx([1.8, 0.8, 0.0] * 4)
    )
    assert sorted(Counter(t.group for t in played.trajectories).values()) == [3, 3, 3, 3]
    plain = [(r - 2.6 / 3) / 0.901850 for r in (1.8, 0.8, 0.0)]  # sample standard deviation of the three
    common, rare = 1 / 9**0.5, 1 / 3**0.5  # 9 rows of wrong solutions, 3 of right ones; the weights average 1
    scale = 12 / (9 * common + 3 * rare)
    expected = [a * rare * scale for a in plain] + [a * common * scale for a in plain] * 3
    assert [t.advantages[-1] for t in played.trajectories] == pytest.approx(expected, abs=1e-4)
    m = played.metrics
    assert (m["samples"], m["reward/agrees"]) == (12, pytest.approx(1 / 3))
    assert [m[f"confusion/{c}"] for c in ("tp", "fp", "tn", "fn")] == [1, 3, 6, 2] and m[
        "verdicts_match"
    ] == pytest.approx(2 / 3)
    assert m["reward/outcome"] == 0.25 and m["groups_without_signal"] == 0.0
    assert recipe.state_dict()["right"] == 3.0 and recipe.state_dict()["wrong"] == 9.0


def test_class_counts_move_slowly_and_survive_a_checkpoint(texts):
    recipe = Tango(verifications=3, **texts)
    recipe.play(turn("verifier"), problems(4), players(mixed_generator, mixed_verifier))
    again = Tango(verifications=3, **texts)
    again.load_state_dict(json.loads(json.dumps(recipe.state_dict())))
    for r in (recipe, again):
        r.play(turn("verifier", number=1), problems(1), players(mixed_generator, mixed_verifier))
    assert recipe.state_dict() == again.state_dict() and recipe.state_dict()["right"] == pytest.approx(
        0.8 * 3 + 0.2 * 3
    )
    assert recipe.state_dict()["wrong"] == pytest.approx(0.8 * 9)


def test_solutions_without_a_grade_are_left_out_of_a_verifier_turn(texts):
    grade = graded(lambda response, payload: Outcome.ERROR if payload["question"] == "0" else 0.0)
    recipe = Tango(verifications=2, **texts)
    played = recipe.play(turn("verifier"), problems(2), players(mixed_generator, mixed_verifier, grade=grade))
    assert len(played.trajectories) == 2 and played.metrics["graded/error"] == 1
    nothing = graded(lambda response, payload: Outcome.ERROR)
    empty = recipe.play(turn("verifier"), problems(2), players(mixed_generator, mixed_verifier, grade=nothing))
    assert empty.trajectories == [] and empty.metrics["graded/error"] == 2


def test_draws_depend_on_the_turn_and_role_alone(texts):
    def seeds(number, role="generator", run=0):
        with_players = players(paper_generator, paper_verifier, seed=run)
        Tango(group_size=3, verifications=3, **texts).play(turn(role, number=number), problems(1), with_players)
        return [with_players.engines[name].asked[0][1].seed for name in ("generator", "verifier")]

    assert seeds(5) == seeds(5) == seeds(5, "verifier")
    assert len({*seeds(5), *seeds(6), *seeds(5, run=1)}) == 6


def schedule(recipe):
    return [role for step in range(recipe.num_steps()) for role in recipe.turns(step)]


@pytest.mark.parametrize("role", ["generator", "verifier"])
def test_log_probs_are_asked_for_of_the_player_whose_turn_it_is(texts, role):
    with_players = players(paper_generator, paper_verifier)
    Tango(group_size=3, verifications=3, **texts).play(turn(role), problems(1), with_players)
    asked = {name: with_players.engines[name].asked[0][1].logprobs for name in ("generator", "verifier")}
    assert asked == {name: name == role for name in asked}


def test_a_review_reads_the_same_whether_its_steps_are_marked_or_not(texts):
    with_players = players(paper_generator, paper_verifier)
    tango = Tango(group_size=3, verifications=3, **texts)
    draws = replace(with_players.samplings["generator"], n=3, seed=0)
    solutions = solve(with_players, "generator", problems(1), draws)
    marked, plain = (
        tango._reviewer().review(
            with_players, solutions, replace(with_players.samplings["verifier"], n=1, seed=0, logprobs=on)
        )
        for on in (True, False)
    )
    for [one], [other] in zip(marked, plain, strict=True):
        assert (one.text, one.review, one.trajectory.rewards) == (other.text, other.review, other.trajectory.rewards)
        assert one.trajectory.steps and not other.trajectory.steps


def test_the_published_schedule_has_440_updates():
    roles = schedule(Tango())
    assert roles[:40] == ["verifier"] * 40 and roles[40:48] == ["generator", "generator", "generator", "verifier"] * 2
    assert Counter(roles) == {"generator": 300, "verifier": 140}
    assert [i + 1 for i, r in enumerate(roles) if r == "generator"][59] == 119 and [
        i + 1 for i, r in enumerate(roles) if r == "generator"
    ][199] == 306


def test_a_last_cycle_is_cut_to_the_generators_updates():
    assert schedule(Tango(generator_updates=5, warmup_updates=1)) == [
        "verifier",
        *["generator"] * 3,
        "verifier",
        *["generator"] * 2,
    ]
    assert schedule(Tango(generator_updates=2, warmup_updates=0)) == ["generator", "generator"]
    assert Tango(generator_updates=3, warmup_updates=0).turns(1) == []


def test_a_frozen_player_has_no_turns_and_the_other_keeps_its_own():
    frozen_verifier = Tango(generator_updates=7, warmup_updates=4, train_verifier=False)
    assert schedule(frozen_verifier) == ["generator"] * 7 and frozen_verifier.trained == ("generator",)
    frozen_generator = Tango(generator_updates=7, warmup_updates=4, train_generator=False)
    both = Tango(generator_updates=7, warmup_updates=4)
    assert schedule(frozen_generator) == ["verifier"] * Counter(schedule(both))["verifier"] == ["verifier"] * 6
    assert frozen_generator.roles == both.roles == ("generator", "verifier")
    with pytest.raises(ConfigError, match="both false"):
        Tango(train_generator=False, train_verifier=False)


def test_grpo_groups_are_the_samples_of_one_problem(texts):
    recipe = Grpo(updates=7, group_size=3, template=texts["generator_template"])
    same = [
        Prompt(id="p0", tokens=ids("Q 0"), payload={"question": "0", "answer": "yes"})
    ] * 2  # a small set meets itself in one batch
    played = recipe.play(turn("generator"), same, players(paper_generator))
    assert [t.advantages[-1] for t in played.trajectories] == pytest.approx([1.1547, -0.5773, -0.5773] * 2, abs=1e-4)
    assert len({t.group for t in played.trajectories}) == 2 and schedule(recipe) == ["generator"] * 7
    assert recipe.generator_prompt({"question": "why?"}) == "Q why?"


def half_right(prompt, i, j, sampling):
    """Greedy answers are right; of the sampled ones those of even problems, with one good and one bad step."""
    return solution(2, "yes" if sampling.temperature == 0 or i % 2 == 0 else "no")


def optimist(prompt, i, j, sampling):
    """Greedy: everything is right. Sampled: agrees with the answer, and calls the second step wrong."""
    return verification("++", "+") if sampling.temperature == 0 else verification("+-", "+" if "yes" in prompt else "-")


def test_evaluation_measures_both_players_by_hand(texts):
    recipe = Tango(balanced_per_class=3, step_labels="megatron_rl.rewards.last_letter:step_labels", **texts)
    held_out = problems(6, words=["fox", "cat"])
    with_players = players(half_right, optimist)
    figures = recipe.evaluate(held_out, with_players, 1)
    assert figures == {
        "generator/accuracy_sampled": 0.5, "generator/accuracy_greedy": 1.0, "generator/num_problems": 6.0,
        "verifier/num_right": 3.0, "verifier/num_wrong": 3.0,
        "verifier/outcome_f1": 1.0, "verifier/aligned": 1.0, "verifier/predicted_positive": 0.5, "verifier/step_f1": 1.0,
        "verifier/outcome_f1_greedy": 0.0, "verifier/aligned_greedy": 1.0, "verifier/predicted_positive_greedy": 1.0,
        "verifier/step_f1_greedy": 0.0,
    }  # fmt: skip
    drawn = [s for _, s in with_players.engines["generator"].asked]
    assert [(s.temperature, s.top_p, s.n) for s in drawn] == [
        (1.0, 1.0, 1),
        (0.0, 0.9, 1),
    ]  # enough of both classes at once


def test_the_verification_set_is_drawn_once_and_kept(texts):
    held_out = problems(4)
    recipe = Tango(balanced_per_class=3, balanced_rounds=3, **texts)
    first = players(half_right, optimist)
    recipe.evaluate(held_out, first, 1)
    assert len(first.engines["generator"].asked) == 3  # two figures, and one more round for the third of each class
    seeds = [s.seed for _, s in first.engines["generator"].asked]
    assert seeds[0] == seeds[1] != seeds[2]
    later = Tango(balanced_per_class=3, **texts)
    later.load_state_dict(json.loads(json.dumps(recipe.state_dict())))
    better = players(lambda *_: solution(1, "yes"), optimist)  # the generator has changed; the set has not
    figures = later.evaluate(held_out, better, 1)
    assert (figures["verifier/num_right"], figures["verifier/num_wrong"]) == (3, 3) and len(
        better.engines["generator"].asked
    ) == 2
    asked = [TOKENIZER.decode(p) for p in better.engines["verifier"].asked[0][0]]
    assert asked == [TOKENIZER.decode(p) for p in first.engines["verifier"].asked[0][0]] and all(
        a.endswith("K 2") for a in asked
    )
    with pytest.raises(ValueError, match="held-out problem 'p0' .* is gone"):
        later.evaluate(problems(4)[1:], better, 1)


def test_a_class_that_cannot_be_found_gives_no_f1(texts):
    recipe = Tango(balanced_per_class=3, balanced_rounds=2, **texts)
    figures = recipe.evaluate(problems(2), players(lambda *_: solution(1, "no"), optimist), 1)
    assert (
        "verifier/outcome_f1" not in figures
        and figures["verifier/num_right"] == 0
        and figures["verifier/num_wrong"] == 3
    )


def test_f1_is_the_harmonic_mean_of_the_class_accuracies():
    counts = confusion([(True, True), (True, False), (False, False), (None, False), (None, True), (True, True)])
    assert counts == Confusion(tp=2, fp=1, tn=2, fn=1) and counts.f1 == pytest.approx(2 / 3)
    assert confusion([(False, True), (True, False)]).f1 == 0.0 and confusion([(True, True)]).f1 is None
    assert step_confusion([[True, False], [True]], [[True, True], [True, True]]) == Confusion(
        tp=1, fn=1
    )  # the second is not aligned


def test_settings_are_checked_by_name_value_and_cure(texts):
    recipe = build(Use(target="megatron_rl.recipes.tango:Tango", args={"alpha_schedule": "cosine", "group_size": 4}))
    assert recipe.group_sizes == {"generator": 4, "verifier": 5} and recipe.state_dict() == {
        "right": None,
        "wrong": None,
        "balanced": None,
    }
    with pytest.raises(ConfigError, match="group_siz"):
        build(Use(target="megatron_rl.recipes.tango:Tango", args={"group_siz": 4}))
    with pytest.raises(ConfigError, match="alpha_schedule"):
        build(Use(target="megatron_rl.recipes.tango:Tango", args={"alpha_schedule": "steep"}))
    with pytest.raises(ConfigError, match="group_size = 0: give at least 2"):
        Tango(group_size=0)
    with pytest.raises(ConfigError, match="updates = 0"):
        Grpo(updates=0)


@pytest.mark.parametrize("name", ["tango_generator", "grpo_generator"])
def test_the_packaged_generator_prompts_show_a_perfect_answer(name):
    text = fill(read_template(name), question="How many?")
    example = re.search(r"Assistant: (<think>.*?</answer>)", text, re.DOTALL).group(1)
    assert generator_format(example) == 1.0 and boxed(example) == "9" and len(step_spans(example)) == 3
    assert text.endswith("User: How many?\nAssistant:") and "{question}" not in text


def test_the_packaged_verifier_prompt_has_the_papers_order_and_a_perfect_example():
    text = fill(read_template("tango_verifier"), question="Why {solution}?", solution="SOLVED", num_steps="7")
    places = [
        text.index(part)
        for part in (
            "verification assistant",
            "Problem:\nWhy {solution}?",
            "Assistant's Solution:\nSOLVED",
            "7 <step>",
            "Remember",
        )
    ]
    assert places == sorted(places) and text.endswith("Your Verification:\n") and "exactly 7 step analyses" in text
    [example] = re.findall(
        r"good verification of it is:\n(<step_verification>.*?</final_verification>)", text, re.DOTALL
    )
    read = review(example, num_steps=2, correct=True, generator_format=1.0)
    assert (read.verdicts, read.final, read.format, read.reward) == ((True, True), True, 1.0, 1.8)


def test_the_loop_plays_tango_by_turns_and_refits_the_role_that_learned(texts):
    lines, saved = [], []
    vocabulary = len(TOKENIZER)
    with_players = players(lambda p, i, j, s: solution(2, "yes" if (i + j) % 2 else "no"), mixed_verifier)
    roles = {}
    for name in ("generator", "verifier"):
        policy = TablePolicy(vocabulary)
        refit = streaming(policy, with_players.engines[name])
        roles[name] = loop.Role(
            policy=policy, loss=PolicyLoss(LossConfig(kl_coef=0.001)), refit=refit, needs_reference=True
        )
    recipe = Tango(
        generator_updates=4,
        generator_turns=2,
        warmup_updates=1,
        group_size=2,
        verifications=3,
        balanced_per_class=2,
        **texts,
    )
    setup = loop.Setup(
        world=OneProcess(), roles=roles, recipe=recipe, players=with_players, held_out=problems(2),
        data=dict.fromkeys(roles, Endless()),
        hooks=loop.Hooks(log=lambda step, scope, m, *, turn: lines.append((turn, step, scope, m)), save=saved.append),
    )  # fmt: skip
    progress = loop.Progress()
    assert loop.train(setup, loop.Plan(steps=recipe.num_steps(), prompts_per_step=2, save_every=2), progress)
    g, v = "generator", "verifier"
    assert [(turn, step, scope) for turn, step, scope, _ in lines] == [
        (0, 0, "eval"), (0, 0, v), (1, 1, g), (2, 1, g), (3, 1, v), (4, 2, g), (5, 2, g), (6, 2, v), (7, 3, "eval"),
    ]  # fmt: skip
    assert (
        progress.updates == {g: 4, v: 3}
        and [with_players.engines[name].version for name in (g, v)] == [4, 3]
        and saved == [4, 7]
    )
    assert all(m["version_lag"] == 0 and m["kl_ref"] >= 0 for _, _, scope, m in lines if scope != "eval")
    assert [m["alpha"] for _, _, scope, m in lines if scope == g] == pytest.approx(
        [0.1, 0.0316, 0.01, 0.00316], rel=0.01
    )


class Endless:
    """The same problems, as often as wanted."""

    def take(self, count):
        return problems(count)
