"""Advantages: every vector of the paper's method, each estimator against its formula, and the credit of steps."""

import dataclasses
import json
import random
from statistics import fmean

import numpy as np
import pytest
import torch

from megatron_rl.algorithms.advantages import assign_advantages, step_advantages, step_rewards
from megatron_rl.algorithms.class_weights import ClassCounts
from megatron_rl.algorithms.estimators import find_estimator
from megatron_rl.config.schema import ConfigError
from megatron_rl.training.rollouts import measure
from megatron_rl.types import NO_VERSION, STEP, Annotations, Author, Rollout, spans_of

PROMPT, SIZE, TAIL = 3, 2, 2  # tokens of the prompt, of a reasoning step, and after the last one
ESTIMATORS = ("grpo", "dr_grpo", "batch", "rloo", "reinforce_pp")
PAPER = (("++++", 1.0), ("+-", 0.0), ("++--", 0.0))  # verdicts and outcome of one group, tango.md 1.13


def solution(verdicts, reward, *, group="g", num_steps=None):
    """A prompt, a step of SIZE tokens per verdict (or `num_steps` steps), and TAIL tokens after the last step."""
    steps = len(verdicts) if num_steps is None else num_steps
    response = steps * SIZE + TAIL
    ranges = [(PROMPT + k * SIZE, PROMPT + (k + 1) * SIZE) for k in range(steps)]
    return Rollout(
        role="generator",
        group=group,
        tokens=range(PROMPT + response),
        logprobs=[0.0] * (PROMPT + response),
        spans=spans_of((PROMPT, Author.ENVIRONMENT, NO_VERSION), (response, Author.POLICY, 0)),
        annotations={STEP: Annotations(ranges, step_rewards([v == "+" for v in verdicts], steps))},
        rewards={"outcome": reward},
    )


def step_scores(rollout):
    scores = rollout.annotations_of(STEP).scores
    return [] if scores is None else scores.tolist()


def steps_of(rollout):
    return rollout.annotations_of(STEP).ranges.tolist()


def per_token(values, rollout):
    """One number for all tokens, or an array -> a list with a number per token."""
    return np.broadcast_to(values, len(rollout.tokens)).tolist()


def given(rollout):
    """The advantage of every token of a rollout; 0 where nothing is trained."""
    return [float(a) for a in np.where(rollout.trainable, rollout.advantages, 0.0)]


def estimated(rewards, groups, estimator="grpo", tokens=None):
    numbers = np.unique(groups, return_inverse=True)[1]
    sizes = np.ones(len(rewards), np.int64) if tokens is None else np.asarray(tokens)
    return find_estimator(estimator)(np.asarray(rewards, np.float64), numbers, sizes).tolist()


def step_values(rollouts, **settings):
    found = [*step_advantages(rollouts, **settings)]
    return [per_token(values, r) for values, r in zip(found, rollouts, strict=True)]


def segments(values, rollout):
    """One value per step, then that of the tail; every token of a segment must agree."""
    bounds = [start for start, _ in steps_of(rollout)] + [len(values) - TAIL, len(values)]
    parts = [values[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    assert all(len(set(part)) == 1 for part in parts)
    return [part[0] for part in parts]


def paper_group():
    return [solution(verdicts, reward) for verdicts, reward in PAPER]


def random_batch(seed, *, groups=4):
    """Groups of 1 to 5 in mixed order; some rollouts without step rewards."""
    draw = random.Random(seed)
    out = []
    for g in range(groups):
        for _ in range(draw.randint(1, 5)):
            verdicts = "".join(draw.choice("+-") for _ in range(draw.randint(0, 6)))
            missing = len(verdicts) + 1 if draw.random() < 0.2 else None
            out.append(solution(verdicts, draw.choice((0.0, 0.3, 1.0)), group=f"g{g}", num_steps=missing))
    draw.shuffle(out)
    return out


def test_vectors_outcome_advantages_of_the_paper_group():
    assert estimated([1.0, 0.0, 0.0], ["g"] * 3) == pytest.approx([1.1547, -0.5773, -0.5773], abs=1e-4)


def test_vectors_step_rewards_of_the_paper_group_have_mean_0_1_and_sample_std_0_3162():
    rewards = [r for t in paper_group() for r in step_scores(t)]
    assert rewards == [0.25] * 4 + [0.5, -0.5] + [0.25, 0.25, -0.25, -0.25]
    assert torch.tensor(rewards).mean().item() == pytest.approx(0.1) and torch.tensor(
        rewards
    ).std().item() == pytest.approx(0.3162, abs=1e-4)


def test_vectors_step_advantages_of_the_paper_group():
    group = paper_group()
    found = [segments(a, t) for a, t in zip(step_values(group), group, strict=True)]
    assert found[0] == pytest.approx([1.8974, 1.4230, 0.9487, 0.4743, 0], abs=1e-4)
    assert found[1] == pytest.approx([-0.6325, -1.8974, 0], abs=1e-4)
    assert found[2] == pytest.approx([-1.2649, -1.7392, -2.2136, -1.1068, 0], abs=1e-4)
    assert [row[-1] for row in found] == [0.0, 0.0, 0.0]  # exactly: there is no step to come
    z = [[a - b for a, b in zip(row, row[1:], strict=False)] for row in found]
    assert z[0] == pytest.approx([0.4743] * 4, abs=1e-4)
    assert z[1] == pytest.approx([1.2649, -1.8974], abs=1e-4)
    assert z[2] == pytest.approx([0.4743, 0.4743, -1.1068, -1.1068], abs=1e-4)


def test_vectors_mixed_advantages_of_the_paper_group():
    found = [segments(given(t), t) for t in assign_advantages(paper_group(), reward="outcome", alpha=0.1)]
    assert found[0] == pytest.approx([1.2290, 1.1815, 1.1341, 1.0867, 1.0392], abs=1e-4)
    assert found[1] == pytest.approx([-0.5829, -0.7094, -0.5196], abs=1e-4)
    assert found[2] == pytest.approx([-0.6461, -0.6935, -0.7410, -0.6303, -0.5196], abs=1e-4)


@pytest.mark.parametrize(("verdict", "sign"), [("+", 1), ("-", -1)])
def test_vectors_step_count_pressure(verdict, sign):
    group = [solution(verdict * k, 1.0) for k in (3, 6, 9)]
    first = [a[PROMPT] for a in step_values(group)]
    assert first == pytest.approx([sign * 6.18, 0, -sign * 6.18], abs=5e-3)


@pytest.mark.parametrize(
    ("right", "wrong", "weights"), [(128, 1152, (2.5, 0.8333)), (256, 1024, (1.6667, 0.8333)), (640, 640, (1.0, 1.0))]
)
def test_vectors_class_weights(right, wrong, weights):
    labels = [True] * right + [False] * wrong
    found = ClassCounts().updated(labels, 0.8).weights(labels)
    assert (found[0], found[-1]) == pytest.approx(weights, abs=1e-4)
    assert len(set(found)) == len(set(weights)) and fmean(found) == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(5))
def test_estimators_equal_their_formulas(seed):
    """Each against tensors: GRPO's std is torch's default (n - 1), RLOO's baseline is averaged over the others one by
    one."""
    draw = random.Random(seed)
    groups = [draw.choice("abc") for _ in range(20)] + ["a", "b", "c"] * 2
    rewards = [draw.random() for _ in groups]
    every = torch.tensor(rewards, dtype=torch.float64)
    found = {name: estimated(rewards, groups, estimator=name) for name in ("grpo", "dr_grpo", "batch", "rloo")}
    for i, group in enumerate(groups):
        own = torch.tensor([r for r, g in zip(rewards, groups, strict=True) if g == group], dtype=torch.float64)
        others = [rewards[j] for j in range(len(groups)) if groups[j] == group and j != i]
        centred = rewards[i] - own.mean().item()
        assert found["grpo"][i] == pytest.approx(centred / (own.std().item() + 1e-6))
        assert found["dr_grpo"][i] == pytest.approx(centred)
        assert found["batch"][i] == pytest.approx(centred / (every.std().item() + 1e-6))
        assert found["rloo"][i] == pytest.approx(rewards[i] - fmean(others))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("reward", [0.1, 1.8, 1 / 3])
def test_equal_rewards_give_exactly_zero_and_not_rounding_noise(estimator, reward):
    """The loop skips an update whose advantages are all 0.0; the mean of [0.1, 0.1, 0.1] is not 0.1 in floats."""
    group = [solution("++-", reward), solution("+++", reward), solution("+", reward)]
    found = assign_advantages(group, reward="outcome", estimator=estimator)
    assert {a for t in found for a in given(t)} == {0.0}
    steps = assign_advantages([solution("+++", reward)] * 3, reward="outcome", estimator=estimator, alpha=0.5)
    if estimator != "reinforce_pp":  # whose step returns differ along the tokens
        assert {a for t in steps for a in given(t)} == {0.0}


def test_equal_rewards_give_exactly_zero_whatever_a_rollout_without_trained_tokens_got():
    estimate = find_estimator("reinforce_pp")
    assert not estimate(np.array([0.1, 0.1, 0.1, 1.0]), np.zeros(4), np.array([3, 3, 3, 0])).any()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_order_of_rollouts_does_not_matter(estimator, seed):
    batch = random_batch(seed)
    order = random.Random(seed).sample(range(len(batch)), len(batch))
    straight = assign_advantages(batch, reward="outcome", estimator=estimator, alpha=0.3)
    shuffled = assign_advantages([batch[i] for i in order], reward="outcome", estimator=estimator, alpha=0.3)
    for place, i in enumerate(order):
        assert given(shuffled[place]) == pytest.approx(given(straight[i]), abs=1e-9)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_groups_do_not_touch_each_other(estimator):
    batch = random_batch(7)
    whole = assign_advantages(batch, reward="outcome", estimator=estimator, alpha=0.3)
    for group in {t.group for t in batch}:
        alone = assign_advantages(
            [t for t in batch if t.group == group], reward="outcome", estimator=estimator, alpha=0.3
        )
        if any(step_scores(t) for t in alone):  # without any step reward the batch is not mixed
            assert [given(t) for t in alone] == [given(t) for t in whole if t.group == group]


def test_step_sets_are_normalised_over_their_group_without_the_zeros_between_steps():
    batch = random_batch(3)
    found = step_values(batch)
    for t, values in zip(batch, found, strict=True):
        own = torch.tensor([r for u in batch if u.group == t.group for r in step_scores(u)], dtype=torch.float64)
        for position, value in enumerate(values):
            to_come = [
                r
                for (_, end), r in zip(steps_of(t), step_scores(t), strict=bool(step_scores(t)))
                if end - 1 >= position
            ]
            z = [(r - own.mean().item()) / (own.std().item() + 1e-6) for r in to_come] if len(own) > 1 else to_come
            assert value == pytest.approx(sum(z), abs=1e-5)


def test_rloo_steps_leave_one_out_of_the_step_set_and_are_scaled_by_ten():
    group = paper_group()
    rewards = [r for t in group for r in step_scores(t)]
    last = [rewards[3], rewards[5], rewards[9]]  # of each solution: its last step's segment holds that step alone
    expected = [r - (sum(rewards) - r) / (len(rewards) - 1) for r in last]
    for scale, found in (
        (10.0, step_values(group, estimator="rloo")),
        (1.0, step_values(group, estimator="rloo", rloo_scale=1.0)),
    ):
        assert [segments(a, t)[-2] for a, t in zip(found, group, strict=True)] == pytest.approx(
            [scale * e for e in expected]
        )


def test_batch_steps_are_centred_by_group_and_divided_by_the_std_of_all_steps():
    batch = [solution(v, 1.0, group=g) for v, g in (("+-", "a"), ("+--", "a"), ("+++", "b"), ("+-+", "b"))]
    rewards = {g: [r for t in batch if t.group == g for r in step_scores(t)] for g in "ab"}
    std = torch.tensor(rewards["a"] + rewards["b"], dtype=torch.float64).std().item() + 1e-6
    found = [segments(a, t)[-2] for a, t in zip(step_values(batch, estimator="batch"), batch, strict=True)]
    assert found == pytest.approx([(step_scores(t)[-1] - fmean(rewards[t.group])) / std for t in batch])


def test_reinforce_pp_step_returns_run_over_tokens_not_over_the_verification_axis():
    """The released code's time loop had the length of the wrong axis (1): its step returns stayed 0 and the step term
    vanished."""
    group = paper_group()
    raw = []
    for t in group:
        at = dict(zip([end - 1 for _, end in steps_of(t)], step_scores(t), strict=True))
        raw.append(
            [sum(at.get(later, 0.0) for later in range(position, len(t.tokens))) for position in range(len(t.tokens))]
        )
    valid = torch.tensor([r for row, t in zip(raw, group, strict=True) for r in row[PROMPT:]], dtype=torch.float64)
    found = step_values(group, estimator="reinforce_pp")
    for row, values in zip(raw, found, strict=True):
        expected = (torch.tensor(row, dtype=torch.float64) - valid.mean()) / (valid.std() + 1e-6)
        assert values[PROMPT:] == pytest.approx(expected[PROMPT:].tolist())
    assert segments(raw[2], group[2]) == [0.0, -0.25, -0.5, -0.25, 0.0]
    mixed, outcome = (
        assign_advantages(group, reward="outcome", estimator="reinforce_pp", alpha=a) for a in (0.5, None)
    )
    assert [given(t) for t in mixed] != [[0.5 * a for a in given(t)] for t in outcome]


def test_reinforce_pp_outcomes_are_whitened_over_tokens_so_that_long_answers_count_more():
    group = [solution("++++", 1.0), solution("+", 0.0), solution("+-", 0.0, group="other")]
    found = assign_advantages(group, reward="outcome", estimator="reinforce_pp")
    valid = torch.tensor([t.rewards["outcome"] for t in group for on in t.trainable if on], dtype=torch.float64)
    for t in found:
        expected = (t.rewards["outcome"] - valid.mean().item()) / (valid.std().item() + 1e-6)
        assert given(t) == pytest.approx([0.0] * PROMPT + [expected] * (len(t.tokens) - PROMPT))
    whole = torch.tensor([a for t in found for a in given(t)[PROMPT:]], dtype=torch.float64)
    assert whole.mean().item() == pytest.approx(0.0, abs=1e-9) and whole.std().item() == pytest.approx(1.0, abs=1e-5)


def test_without_any_step_reward_the_outcome_keeps_its_whole_weight():
    bare = [solution("", reward, num_steps=2) for reward in (1.0, 0.0, 0.0)]
    assert [given(t) for t in assign_advantages(bare, reward="outcome", alpha=0.4)] == [
        given(t) for t in assign_advantages(bare, reward="outcome")
    ]
    [one, *_] = assign_advantages([bare[0], solution("+-", 0.0), solution("+", 0.0)], reward="outcome", alpha=0.4)
    assert given(one)[PROMPT:] == pytest.approx([0.6 * 1.1547] * (2 * SIZE + TAIL), abs=1e-4)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_untrained_tokens_get_exactly_zero_inside_the_response_too(estimator):
    holes = [
        dataclasses.replace(
            t,
            spans=[
                (i, i + 1, Author.POLICY if i >= PROMPT and i % 3 else Author.ENVIRONMENT, 0)
                for i in range(len(t.tokens))
            ],
        )
        for t in paper_group()
    ]
    for t in assign_advantages(holes, reward="outcome", estimator=estimator, alpha=0.3):
        assert t.advantages.dtype == np.float32 and len(t.advantages) == len(t.tokens)
        assert all((a == 0.0) != on for a, on in zip(t.advantages, t.trainable, strict=True))


def test_a_partners_tokens_have_an_advantage_when_they_weigh_something():
    spans = spans_of((PROMPT, Author.ENVIRONMENT, NO_VERSION), (4, Author.PARTNER, NO_VERSION), (6, Author.POLICY, 0))
    group = [dataclasses.replace(solution("++++", r), spans=spans) for r in (1.0, 0.0)]
    for weight in (0.0, 0.5):
        weighed = [dataclasses.replace(t, partner_weight=weight) for t in group]
        for t in assign_advantages(weighed, reward="outcome", alpha=0.3):
            assert not t.advantages[:PROMPT].any() and t.advantages[PROMPT + 4 :].all()
            assert t.advantages[PROMPT : PROMPT + 4].all() == (weight > 0)


def test_only_advantages_change_and_the_reward_that_they_compare_is_noted():
    before = paper_group()
    after = assign_advantages(before, reward="outcome", alpha=0.1)
    kept = [field.name for field in dataclasses.fields(Rollout) if field.name not in ("advantages", "rewards")]
    for old, new in zip(before, after, strict=True):
        assert old.advantages is None and new.rewards == {**old.rewards, "trained": old.rewards["outcome"]}
        assert all(np.array_equal(getattr(old, name), getattr(new, name)) for name in kept)


def test_a_reward_for_the_whole_rollout_is_one_number():
    found = assign_advantages(paper_group(), reward="outcome")
    assert all(isinstance(t.advantages, float) for t in found)
    mixed = assign_advantages([*paper_group(), solution("+", 1.0, num_steps=2)], reward="outcome", alpha=0.5)
    assert [isinstance(t.advantages, float) for t in mixed] == [False, False, False, True]


def longest_runs(rewards, groups, tokens):
    """An estimator of a user's own."""
    return rewards * tokens + 1000.0 * groups


def test_an_estimator_of_ones_own_is_named_by_its_module():
    group = [*paper_group(), *[solution("+", 0.5, group="other")] * 2]
    found = assign_advantages(group, reward="outcome", estimator=f"{__name__}:longest_runs")
    assert [t.advantages for t in found] == [10.0, 0.0, 0.0, *[1000.0 + 0.5 * 4] * 2]


@pytest.mark.parametrize("wrong", [lambda r, g, t: r[:1], lambda r, g, t: r / 0.0])
def test_an_estimator_must_give_one_finite_number_per_reward(wrong, monkeypatch):
    monkeypatch.setitem(globals(), "longest_runs", wrong)
    with pytest.raises(ValueError, match="longest_runs.*one finite number per reward"), np.errstate(all="ignore"):
        assign_advantages(paper_group(), reward="outcome", estimator=f"{__name__}:longest_runs")


def test_weights_multiply_a_rollouts_advantages():
    plain, weighted = (assign_advantages(paper_group(), reward="outcome", weights=w) for w in (None, [2.0, 0.5, 1.0]))
    for t, u, w in zip(plain, weighted, (2.0, 0.5, 1.0), strict=True):
        assert given(u) == pytest.approx([w * a for a in given(t)])
    with pytest.raises(ValueError, match="2 weights for 3 rollouts"):
        assign_advantages(paper_group(), reward="outcome", weights=[1.0, 1.0])


def test_rewards_can_be_a_weighted_sum():
    group = [t.with_rewards(format=f) for t, f in zip(paper_group(), (0.0, 0.5, 1.0), strict=True)]
    found = assign_advantages(group, reward={"outcome": 1.0, "format": 0.8}, estimator="dr_grpo")
    assert [given(t)[-1] for t in found] == pytest.approx([1.0 - 2.2 / 3, 0.4 - 2.2 / 3, 0.8 - 2.2 / 3])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_refused_before_it_spoils_its_group(value):
    with pytest.raises(ValueError, match=f"group 'bad'.*'outcome' is {value}"):
        assign_advantages([*paper_group(), solution("+", value, group="bad")], reward="outcome")


def test_a_missing_reward_names_what_there_is():
    with pytest.raises(ValueError, match=r"group 'g' has no reward 'verifier'.*outcome"):
        assign_advantages(paper_group(), reward="verifier")


@pytest.mark.parametrize("end", [0, 40])
def test_a_step_that_ends_outside_the_tokens_is_refused(end):
    """An end of 0 would put the reward on the last token, by Python's negative index."""
    t = dataclasses.replace(solution("+", 1.0), annotations={STEP: Annotations([(0, end)], [1.0])})
    with pytest.raises(ValueError, match=f"a step ends at token {end}, but the rollout has"):
        [*step_advantages([t])]


@pytest.mark.parametrize("alpha", [-0.1, 1.5, float("nan")])
def test_alpha_outside_0_to_1_is_refused(alpha):
    """Also without rollouts, by which a recipe checks its arguments before the run."""
    for rollouts in (paper_group(), []):
        with pytest.raises(ValueError, match="alpha"):
            assign_advantages(rollouts, reward="outcome", alpha=alpha)


def test_alphas_may_be_an_array():
    group = paper_group()
    alphas = np.linspace(0.0, 1.0, len(group))
    found, wanted = (assign_advantages(group, reward="outcome", alpha=own) for own in (alphas, alphas.tolist()))
    assert [given(rollout) for rollout in found] == [given(rollout) for rollout in wanted]


def test_an_unknown_estimator_is_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match="geo.*grpo, dr_grpo, batch, rloo, reinforce_pp"):
        assign_advantages(paper_group(), reward="outcome", estimator="geo")


def test_a_sample_that_could_not_be_graded_leaves_its_group_and_the_group_stays():
    """Groups may have unequal size: the others are compared among themselves."""
    whole = [solution("", reward, group=g) for g in "ab" for reward in (1.0, 0.0, 0.0)]
    for estimator in ("grpo", "dr_grpo", "rloo"):
        found = assign_advantages(whole[:-1], reward="outcome", estimator=estimator)
        alone = assign_advantages(whole[3:-1], reward="outcome", estimator=estimator)
        full = assign_advantages(whole[:3], reward="outcome", estimator=estimator)
        assert [t.advantages for t in found] == [t.advantages for t in (*full, *alone)]


def test_roles_are_compared_apart_also_where_their_groups_have_one_name():
    agents = [dataclasses.replace(t, role=role) for role in ("a", "b") for t in paper_group()]
    found = assign_advantages(agents, reward="outcome")
    assert [t.advantages for t in found[:3]] == [t.advantages for t in found[3:]]
    assert found[0].advantages == pytest.approx(1.1547, abs=1e-4)


def test_no_rollouts_have_no_advantages():
    assert [assign_advantages([], reward="outcome", estimator=e, alpha=0.1) for e in ESTIMATORS] == [[]] * len(
        ESTIMATORS
    )


@pytest.mark.parametrize(
    ("verdicts", "num_steps", "expected"),
    [
        ([True, False], 2, [0.5, -0.5]),
        ([True], 2, None),
        ([True, True, False], 2, None),
        ([], 0, None),
        ([False] * 4, 4, [-0.25] * 4),
    ],
)
def test_the_count_gate_of_step_rewards(verdicts, num_steps, expected):
    found = step_rewards(verdicts, num_steps)
    assert (found if found is None else found.tolist()) == expected


def test_class_counts_move_by_the_decay_and_include_the_batch_at_hand():
    first = ClassCounts().updated([True] * 30 + [False] * 10, 0.8)
    second = first.updated([True] * 10 + [False] * 30, 0.8)
    assert (first.correct, first.wrong) == (30.0, 10.0) and (second.correct, second.wrong) == pytest.approx(
        (26.0, 14.0)
    )
    right, wrong = second.weights([True, False])
    assert right / wrong == pytest.approx((14 / 26) ** 0.5, rel=1e-5) and right + wrong == pytest.approx(2.0)


def test_class_counts_survive_a_checkpoint_as_plain_json():
    counts = ClassCounts().updated([True, False, False], 0.8).updated([True], 0.8)
    assert ClassCounts(**json.loads(json.dumps(dataclasses.asdict(counts)))) == counts
    assert ClassCounts(**json.loads(json.dumps(dataclasses.asdict(ClassCounts())))) == ClassCounts()


def test_an_absent_class_leaves_the_other_at_weight_1_and_comes_back_finite():
    counts = ClassCounts().updated([False] * 40, 0.8)
    assert counts.weights([False] * 40) == pytest.approx([1.0] * 40)
    labels = [True] + [False] * 39
    weights = counts.updated(labels, 0.8).weights(labels)
    assert weights[0] / weights[1] == pytest.approx((39.8 / 0.2) ** 0.5, rel=1e-4) and fmean(weights) == pytest.approx(
        1.0
    )
    assert counts.weights([True, False])[0] == pytest.approx(2.0, abs=1e-4)  # never counted: finite all the same


def test_an_empty_batch_does_not_wipe_the_class_counts():
    counts = ClassCounts().updated([True, False], 0.8)
    assert (
        counts.updated([], 0.8) == counts
        and ClassCounts().updated([], 0.8) == ClassCounts()
        and counts.weights([]) == []
    )


def test_the_compared_reward_is_kept_by_the_name_that_metrics_and_console_show():
    rollouts = [
        dataclasses.replace(solution("+", 0.0), rewards={"outcome": o, "length": b}) for o, b in ((1, 4), (0, 2))
    ]
    credited = assign_advantages(rollouts, reward={"outcome": 1.0, "length": 0.25}, estimator="dr_grpo")
    assert [r.rewards for r in credited] == [
        {"outcome": 1, "length": 4, "trained": 2.0},
        {"outcome": 0, "length": 2, "trained": 0.5},
    ]
    assert [r.advantages for r in credited] == [0.75, -0.75]
    assert measure(credited)["reward/trained"] == 1.25


def test_class_weights_of_the_inverse_counts_and_off():
    """RL Tango's reweight_method inverse, and reweight_verifier_rewards false."""
    labels = [True] * 3 + [False]
    counts = ClassCounts().updated(labels, 0.8)
    raw = [1 / 3.000001] * 3 + [1 / 1.000001]
    assert counts.weights(labels, "inverse") == pytest.approx([4 * w / sum(raw) for w in raw], rel=1e-12)
    assert counts.weights(labels, "off") == [1.0] * 4
