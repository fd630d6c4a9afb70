"""Recipes played with engines that say what they are told: schedules, credit by hand, dropped samples, measures."""

import json
import threading
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from fake_engines import ScriptedEngine
from stages import credited
from toys import EOS, characters, graded

from megatron_rl.config.plugins import build
from megatron_rl.config.schema import ConfigError, Use
from megatron_rl.engines.protocol import Sampling
from megatron_rl.recipes.grpo import Grpo
from megatron_rl.recipes.solutions import solve
from megatron_rl.recipes.tango import Tango
from megatron_rl.rewards.grading_pool import RewardFailure
from megatron_rl.texts.tags import boxed
from megatron_rl.training.iteration import Iteration, RolloutContext
from megatron_rl.training.rollouts import measure, without_signal
from megatron_rl.types import STEP, Author, Outcome, Prompt

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


def context_of(generator, verifier=None, *, grade=by_answer, verifier_limit=10_000, **settings):
    engines = {"generator": says(generator)} | ({"verifier": says(verifier)} if verifier else {})
    return RolloutContext(
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


class Problems:
    """A source that gives the same problems, as often as wanted."""

    def __init__(self, prompts):
        self.prompts = problems(prompts) if isinstance(prompts, int) else prompts
        self.prompts_per_iteration = len(self.prompts)

    def take(self, count=None, fits=lambda prompt: True, draw=None):
        return [*filter(fits, self.prompts)]


def iteration(role, number=0, update=0):
    return Iteration(cycle=0, index=0, roles=(role,), number=number, updates={role: update})


def roll_out(recipe, role, prompts, context, **at):
    """Makes the rollouts of an iteration -> its rollouts, and the metrics that the loop will log."""
    rollouts = credited(recipe, iteration(role, **at), Problems(prompts), context)
    assert list(rollouts) == [role]
    return rollouts[role], context.metrics[role] | measure(rollouts[role])


def per_token(rollout):
    """The advantage of each token; 0 where nothing is trained."""
    return np.where(rollout.trainable, rollout.advantages, 0.0).tolist()


def steps_of(rollout):
    return rollout.annotations_of(STEP).ranges.tolist()


def judged(rollout):
    return rollout.annotations_of(STEP).scores is not None


def segments(rollout):
    """Advantages of the first token of each step, of the last one of each step, and of the last token."""
    a = per_token(rollout)
    first, last = [a[start] for start, _ in steps_of(rollout)], [a[end - 1] for _, end in steps_of(rollout)]
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


def test_tango_vectors_through_a_whole_generator_iteration(texts):
    context = context_of(paper_generator, paper_verifier)
    rollouts, m = roll_out(Tango(group_size=3, **texts), "generator", 1, context)
    expected = [
        [1.2290, 1.1815, 1.1341, 1.0867, 1.0392],
        [-0.5829, -0.7094, -0.5196],
        [-0.6461, -0.6935, -0.7410, -0.6303, -0.5196],
    ]
    for rollout, values in zip(rollouts, expected, strict=True):
        assert segments(rollout) == pytest.approx(values, abs=1e-4)
        assert not any(rollout.advantages[: rollout.start])
        assert [TOKENIZER.decode(rollout.tokens[a:b]) for a, b in steps_of(rollout)][0] == "<step>#1 x</step>"
    assert [t.payload["verdicts"] for t in rollouts] == [[v == "+" for v in verdicts] for verdicts, _ in PAPER]
    assert rollouts[0].payload["review"].startswith("<step_verification>")
    assert [t.payload["correct"] for t in rollouts] == [True, False, False]
    assert (m["alpha"], m["steps_per_solution"], m["verdicts_match"]) == (0.1, pytest.approx(10 / 3), 1.0)
    assert [m[f"confusion/{c}"] for c in ("tp", "fp", "tn", "fn")] == [1, 0, 2, 0]
    assert m["predicted_positive"] == m["reward/outcome"] == pytest.approx(1 / 3)
    assert (m["samples"], m["finished"], without_signal(rollouts, "outcome"), without_signal(rollouts)) == (3, 1, 0, 0)
    asked, _ = context.engines["verifier"].asked[1]
    assert TOKENIZER.decode(asked) == f"Q 0 S {solution(2, 'no')} K 2"


def test_alpha_follows_the_generators_updates_and_not_the_iterations(texts):
    recipe = Tango(group_size=3, generator_updates=300, **texts)
    alphas = [
        roll_out(recipe, "generator", 1, context_of(paper_generator, paper_verifier), number=n, update=u)[1]["alpha"]
        for n, u in ((40, 0), (119, 60), (239, 150))
    ]
    assert alphas == pytest.approx([0.1, 0.0398, 0.01], abs=1e-4)


def test_a_sample_whose_verdict_count_differs_gets_no_step_rewards(texts):
    def verifier(prompt, i, j, sampling):  # a missing verdict swallows nothing but its own step
        return verification("+?-+" if i == 0 else PAPER[i][0], "+")

    rollouts, m = roll_out(Tango(group_size=3, **texts), "generator", 1, context_of(paper_generator, verifier))
    assert list(map(judged, rollouts)) == [False, True, True]
    assert segments(rollouts[0]) == pytest.approx([1.0392] * 5, abs=1e-4)
    assert m["verdicts_match"] == pytest.approx(2 / 3)


def test_without_any_step_reward_the_outcome_advantage_is_whole(texts):
    rollouts, m = roll_out(
        Tango(group_size=3, **texts), "generator", 1, context_of(paper_generator, lambda *_: "no idea")
    )
    assert segments(rollouts[0]) == pytest.approx([1.1547] * 5, abs=1e-4)
    assert [m[f"confusion/{c}"] for c in ("tp", "fp", "tn", "fn")] == [0, 0, 2, 1]  # unreadable: said incorrect


def test_a_verifier_prompt_that_is_too_long_is_dropped_and_never_cut(texts):
    limit = (
        len(ids(f"Q 0 S {solution(4, 'yes')} K 4")) - 2
    )  # the two longer solutions do not fit (no is shorter by one)
    context = context_of(paper_generator, lambda p, i, j, s: verification("+-", "-"), verifier_limit=limit)
    rollouts, m = roll_out(Tango(group_size=3, **texts), "generator", 1, context)
    assert m["reviews_dropped"] == 2 and list(map(judged, rollouts)) == [False, True, False]
    assert [TOKENIZER.decode(a) for a, _ in context.engines["verifier"].asked] == [f"Q 0 S {solution(2, 'no')} K 2"]
    assert "verdicts" not in rollouts[0].payload


@pytest.mark.parametrize("role", ["generator", "verifier"])
def test_a_sample_that_could_not_be_graded_leaves_its_group_and_is_not_judged(texts, role):
    """It used to have an outcome of 0, which its group learned from."""

    def rule(response, payload):
        return Outcome.TIMEOUT if "yes" in response else Outcome.ERROR if response.count("#") == 2 else 1.0

    def writes(prompt, i, j, sampling):
        return solution(j % 4 + 1, "yes" if j == 0 else "no")

    recipe = Tango(group_size=5, verifications=2, **texts)
    context = context_of(writes, lambda *_: verification("+", "+"), grade=graded(rule))
    rollouts, m = roll_out(recipe, role, 1, context)
    if role == "generator":  # of the five, the first cannot be graded, nor the second
        assert [len(steps_of(t)) for t in rollouts] == [3, 4, 1] and len({t.group for t in rollouts}) == 1
        assert (m["graded/timeout"], m["graded/error"], m["samples"], m["reward/outcome"]) == (2, 0, 3, 1.0)
        assert (m["replaced/timeout"], m["replaced/error"]) == (3, 1), "each was replaced twice, by the first text"
        assert without_signal(rollouts, "outcome") == 1.0 and list(map(judged, rollouts)) == [False, False, True]
        assert len(context.engines["verifier"].asked) == 3
        assert sum(m[f"confusion/{c}"] for c in ("tp", "fp", "tn", "fn")) == 3
        with pytest.raises(RewardFailure, match="2 of 5 gradings failed"):
            credited(recipe, iteration(role), Problems(1), replace(context, max_failure_share=0.2))
    else:  # there is but one, which cannot be graded
        assert (
            rollouts == [] and (m["graded/timeout"], m["samples"]) == (1, 0) and not context.engines["verifier"].asked
        )


def test_in_grpo_too_the_group_stays_when_a_sample_leaves(texts):
    grade = graded(lambda response, payload: Outcome.ERROR if "never" in response else "yes" in response)
    writes = ["yes", "no", "never", "no"]
    context = context_of(lambda p, i, j, s: solution(1, writes[j] if s.n > 1 else "never"), grade=grade)
    rollouts, m = roll_out(Grpo(updates=1, group_size=4, template=texts["generator_template"]), "generator", 2, context)
    assert [t.advantages for t in rollouts] == pytest.approx([1.1547, -0.5773, -0.5773] * 2, abs=1e-4)
    assert (m["graded/error"], m["samples"]) == (2, 6)
    assert all(t.payload["grading"] == "score" for t in rollouts)


def test_samples_are_graded_and_judged_while_others_are_written(texts):
    """An engine that gives its second answer only when the first one is graded and its verification is asked for."""
    judged = threading.Event()

    class Slow(ScriptedEngine):
        def session(self, priority=0, log=None):
            inner = super().session(priority, log)
            answers = inner.answers

            def slowly():
                for number, answer in enumerate(answers()):
                    assert number == 0 or judged.wait(10)
                    yield answer

            inner.answers = slowly
            return inner

    context = context_of(mixed_generator, mixed_verifier)
    slow = Slow(lambda p, i, j, s: [*ids(mixed_generator(p, i, j, s)), EOS], eos=EOS)
    context = replace(context, engines={**context.engines, "generator": slow})
    solutions, metrics = solve(
        context, "generator", problems(2), Sampling(max_tokens=4000), then=lambda place, solution: judged.set()
    )
    assert [s.correct for s in solutions] == [True, False] and metrics["steps_per_solution"] == 2.0


def test_an_error_of_the_grader_comes_through_and_ends_the_iteration():
    def broken(responses, payloads):
        raise RewardFailure("cannot be imported")

    start = time.monotonic()
    with pytest.raises(RewardFailure, match="cannot be imported"):
        solve(context_of(mixed_generator, grade=broken), "generator", problems(3), Sampling(max_tokens=4000))
    assert time.monotonic() - start < 10


def mixed_generator(prompt, i, j, sampling):
    return solution(2, "yes" if i == 0 else "no")


def mixed_verifier(prompt, i, j, sampling):
    """Sample 0 agrees and is well formed, sample 1 disagrees, sample 2 cannot be read."""
    right = "yes" in prompt
    return [verification("++", "+" if right else "-"), verification("++", "-" if right else "+"), "what?"][j]


def test_a_verifier_iteration_rewards_agreement_and_form_in_groups_of_one_solution(texts):
    recipe = Tango(verifications=3, **texts)
    rollouts, m = roll_out(recipe, "verifier", 4, context_of(mixed_generator, mixed_verifier))
    assert [t.rewards["verifier"] for t in rollouts] == pytest.approx([1.8, 0.8, 0.0] * 4)
    assert [t.payload["correct"] for t in rollouts] == [True, False, False] * 4 and {t.role for t in rollouts} == {
        "verifier"
    }
    assert sorted(Counter(t.group for t in rollouts).values()) == [3, 3, 3, 3]
    plain = [(r - 2.6 / 3) / 0.901850 for r in (1.8, 0.8, 0.0)]  # sample standard deviation of the three
    common, rare = 1 / 9**0.5, 1 / 3**0.5  # 9 rows of wrong solutions, 3 of right ones; the weights average 1
    scale = 12 / (9 * common + 3 * rare)
    expected = [a * rare * scale for a in plain] + [a * common * scale for a in plain] * 3
    assert [t.advantages for t in rollouts] == pytest.approx(expected, abs=1e-4)
    assert (m["samples"], m["reward/agrees"]) == (12, pytest.approx(1 / 3))
    assert [m[f"confusion/{c}"] for c in ("tp", "fp", "tn", "fn")] == [1, 3, 6, 2]
    assert m["verdicts_match"] == pytest.approx(2 / 3)
    assert m["reward/outcome"] == 0.25 and without_signal(rollouts, "verifier") == 0.0
    assert recipe.state_dict()["counts"] == {"correct": 3.0, "wrong": 9.0}


def test_a_verification_is_trained_on_whole_and_its_prompt_is_not(texts):
    rollouts, _ = roll_out(Tango(verifications=3, **texts), "verifier", 1, context_of(mixed_generator, mixed_verifier))
    first = rollouts[0]
    assert TOKENIZER.decode(first.tokens[: first.start]) == f"Q 0 S {solution(2, 'yes')} K 2"
    assert first.spans[:, 2].tolist() == [Author.ENVIRONMENT, Author.POLICY] and first.tokens[-1] == EOS
    assert [TOKENIZER.decode(first.tokens[a:b])[:6] for a, b in steps_of(first)] == ["<step>"] * 2
    assert first.payload["verdicts"] == [True, True] and first.payload["answer"] == "yes"


def test_class_counts_move_slowly_and_survive_a_checkpoint(texts):
    recipe = Tango(verifications=3, **texts)
    roll_out(recipe, "verifier", 4, context_of(mixed_generator, mixed_verifier))
    again = Tango(verifications=3, **texts)
    again.load_state_dict(json.loads(json.dumps(recipe.state_dict())))
    for r in (recipe, again):
        roll_out(r, "verifier", 1, context_of(mixed_generator, mixed_verifier), number=1)
    state = recipe.state_dict()
    assert state == again.state_dict() and state["counts"] == pytest.approx({"correct": 3.0, "wrong": 0.8 * 9})


def test_solutions_without_a_grade_are_left_out_of_a_verifier_iteration(texts):
    grade = graded(lambda response, payload: Outcome.ERROR if payload["question"] == "0" else 0.0)
    recipe = Tango(verifications=2, **texts)
    rollouts, m = roll_out(recipe, "verifier", 2, context_of(mixed_generator, mixed_verifier, grade=grade))
    assert len(rollouts) == 2 and m["graded/error"] == 1 and m["reward/outcome"] == 0.0
    nothing = graded(lambda response, payload: Outcome.ERROR)
    rollouts, m = roll_out(recipe, "verifier", 2, context_of(mixed_generator, mixed_verifier, grade=nothing))
    assert rollouts == [] and m["graded/error"] == 2


def test_draws_depend_on_the_iteration_and_role_alone(texts):
    def seeds(number, role="generator", run=0):
        context = context_of(paper_generator, paper_verifier, seed=run)
        roll_out(Tango(group_size=3, verifications=3, **texts), role, 1, context, number=number)
        return [context.engines[name].asked[0][1].seed for name in ("generator", "verifier")]

    assert seeds(5) == seeds(5) == seeds(5, "verifier")
    assert len({*seeds(5), *seeds(6), *seeds(5, run=1)}) == 6


def schedule(recipe):
    iterations = [roles for cycle in recipe.schedule() for roles in cycle]
    assert all(len(roles) == 1 for roles in iterations)
    return [role for [role] in iterations]


@pytest.mark.parametrize("role", ["generator", "verifier"])
def test_log_probs_are_asked_for_of_the_role_that_is_trained(texts, role):
    context = context_of(paper_generator, paper_verifier)
    roll_out(Tango(group_size=3, verifications=3, **texts), role, 1, context)
    asked = {name: context.engines[name].asked[0][1].logprobs for name in ("generator", "verifier")}
    assert asked == {name: name == role for name in asked}


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
    assert len(Tango(generator_updates=3, warmup_updates=0).schedule()) == 1


def test_a_frozen_role_has_no_iterations_and_the_other_keeps_its_own():
    frozen_verifier = Tango(generator_updates=7, warmup_updates=4, train_verifier=False)
    assert schedule(frozen_verifier) == ["generator"] * 7 and not frozen_verifier.roles()["verifier"].trained
    frozen_generator = Tango(generator_updates=7, warmup_updates=4, train_generator=False)
    both = Tango(generator_updates=7, warmup_updates=4)
    assert schedule(frozen_generator) == ["verifier"] * Counter(schedule(both))["verifier"] == ["verifier"] * 6
    assert list(frozen_generator.roles()) == list(both.roles()) == ["generator", "verifier"]
    with pytest.raises(ConfigError, match="both false"):
        Tango(train_generator=False, train_verifier=False)


def test_grpo_groups_are_the_samples_of_one_problem(texts):
    recipe = Grpo(updates=7, group_size=3, template=texts["generator_template"])
    same = [problems(1)[0]] * 2  # a small set meets itself in one batch
    rollouts, _ = roll_out(recipe, "generator", same, context_of(paper_generator))
    assert [t.advantages for t in rollouts] == pytest.approx([1.1547, -0.5773, -0.5773] * 2, abs=1e-4)
    assert len({t.group for t in rollouts}) == 2 and schedule(recipe) == ["generator"] * 7
    assert recipe.prompt({"question": "why?"}) == "Q why?"


def half_correct(prompt, i, j, sampling):
    """Greedy answers are right; of the sampled ones those of even problems, with one good and one bad step."""
    return solution(2, "yes" if sampling.temperature == 0 or i % 2 == 0 else "no")


def optimist(prompt, i, j, sampling):
    """Greedy: everything is right. Sampled: agrees with the answer, and calls the second step wrong."""
    return verification("++", "+") if sampling.temperature == 0 else verification("+-", "+" if "yes" in prompt else "-")


def test_evaluation_measures_both_players_by_hand(texts):
    recipe = Tango(balanced_per_class=3, step_labels="megatron_rl.contrib.last_letter:step_labels", **texts)
    held_out = problems(6, words=["fox", "cat"])
    context = context_of(half_correct, optimist)
    metrics = recipe.evaluate(held_out, context)
    assert metrics == {
        "generator/accuracy": 0.5,
        "generator/accuracy_greedy": 1.0,
        "generator/reward": 0.5,
        "generator/reward_greedy": 1.0,
        "generator/finished": 1.0,
        "generator/tokens": metrics["generator/tokens"],
        "generator/num_problems": 6.0,
        "verifier/num_correct": 3.0,
        "verifier/num_wrong": 3.0,
        "verifier/outcome_f1": 1.0,
        "verifier/aligned": 1.0,
        "verifier/predicted_positive": 0.5,
        "verifier/step_f1": 1.0,
        "verifier/outcome_f1_greedy": 0.0,
        "verifier/aligned_greedy": 1.0,
        "verifier/predicted_positive_greedy": 1.0,
        "verifier/step_f1_greedy": 0.0,
    }
    drawn = [s for _, s in context.engines["generator"].asked]
    drawn = [(s.temperature, s.top_p, s.n) for s in drawn]
    assert drawn == [(1.0, 1.0, 1)] * 6 + [(0.0, 0.9, 1)] * 6  # enough of both classes at once


def test_the_verification_set_is_drawn_once_and_kept(texts):
    held_out = problems(4)
    recipe = Tango(balanced_per_class=3, balanced_rounds=3, **texts)
    first = context_of(half_correct, optimist)
    recipe.evaluate(held_out, first)
    seeds = [s.seed for _, s in first.engines["generator"].asked]
    assert len(seeds) == 12  # two metrics, and one more round for the third of each class
    assert len(set(seeds[:8])) == len(set(seeds[8:])) == 1 and seeds[0] != seeds[8]
    later = Tango(balanced_per_class=3, balanced_rounds=3, **texts)
    better = context_of(lambda *_: solution(1, "yes"), optimist)  # the generator has changed; the set has not
    better.kept.update(json.loads(json.dumps(first.kept)))
    metrics = later.evaluate(held_out, better)
    assert (metrics["verifier/num_correct"], metrics["verifier/num_wrong"]) == (3, 3)
    assert len(better.engines["generator"].asked) == 8
    asked = [[TOKENIZER.decode(p) for p, _ in t.engines["verifier"].asked] for t in (first, better)]
    assert asked[0] == asked[1] and len(asked[0]) == 12 and all(a.endswith("K 2") for a in asked[0])


def test_a_class_that_cannot_be_found_gives_no_f1(texts):
    recipe = Tango(balanced_per_class=3, balanced_rounds=2, **texts)
    metrics = recipe.evaluate(problems(2), context_of(lambda *_: solution(1, "no"), optimist))
    assert (
        "verifier/outcome_f1" not in metrics
        and metrics["verifier/num_correct"] == 0
        and metrics["verifier/num_wrong"] == 3
    )


def test_settings_are_checked_by_name_value_and_cure(texts):
    recipe = build(Use(target="megatron_rl.recipes.tango:Tango", args={"alpha_schedule": "cosine", "group_size": 4}))
    assert {name: part.samples for name, part in recipe.roles().items()} == {"generator": 4, "verifier": 5}
    assert recipe.state_dict()["counts"] == {"correct": None, "wrong": None}
    with pytest.raises(ConfigError, match="group_siz"):
        build(Use(target="megatron_rl.recipes.tango:Tango", args={"group_siz": 4}))
    with pytest.raises(ConfigError, match="alpha_schedule"):
        build(Use(target="megatron_rl.recipes.tango:Tango", args={"alpha_schedule": "steep"}))
    with pytest.raises(ConfigError, match="group_size = 0: give at least 2"):
        Tango(group_size=0)
    with pytest.raises(ConfigError, match="updates = 0"):
        build(Use(target="megatron_rl.recipes.grpo:Grpo", args={"updates": 0}))
    with pytest.raises(ConfigError, match="fae.*grpo, dr_grpo"):
        Grpo(updates=1, estimator="fae")
    with pytest.raises(ConfigError, match="'gae' needs a critic.*use Ppo, Tango or Agents"):
        Grpo(updates=1, estimator="gae")
    with pytest.raises(ConfigError, match="alpha_start = 1.5"):
        build(Use(target="megatron_rl.recipes.tango:Tango", args={"alpha_start": 1.5}))
    for wrong in ({"alpha_min": 0.0}, {"class_weight_decay": 1.0}, {"verifier_template": "nowhere"}):
        with pytest.raises(ConfigError, match="floor = 0.0|decay = 1.0|nowhere"):
            build(Use(target="megatron_rl.recipes.tango:Tango", args=wrong))


def test_an_estimator_of_ones_own_is_named_in_the_config(texts):
    args = {"updates": 1, "group_size": 2, "estimator": f"{__name__}:raw", "template": texts["generator_template"]}
    recipe = build(Use(target="megatron_rl.recipes.grpo:Grpo", args=args))
    rollouts, _ = roll_out(recipe, "generator", 2, context_of(lambda p, i, j, s: solution(1, "yes" if i else "no")))
    assert [t.advantages for t in rollouts] == [0.0, 0.0, 2.0, 2.0]


def raw(rewards, groups, tokens):  # an estimator of a user's own
    return 2.0 * rewards
