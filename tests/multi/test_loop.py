"""The loop with a policy that really learns: order of iterations, versions, resume, recorded iterations, refusals."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_policy import TablePolicy
from loops import TOKENIZER, VOCAB, Log, Questions, graded, make, train, without_engine
from ranks import run_ranks
from specs import spec_of

from megatron_rl.algorithms.policy_loss import PolicyLoss
from megatron_rl.algorithms.tandem_authors import Rule
from megatron_rl.config.schema import (
    CorrectionConfig,
    Debug,
    Evaluation,
    EvaluationSet,
    LossConfig,
    Model,
    Preflight,
    PromptSet,
    Reward,
    RoleConfig,
    Rollouts,
    Run,
    SamplingConfig,
    TandemConfig,
    TrainConfig,
    Use,
)
from megatron_rl.recipes.grpo import Grpo
from megatron_rl.recipes.online_dpo import OnlineDpo
from megatron_rl.run.metrics import Stopwatch
from megatron_rl.session import builders
from megatron_rl.session import train as session
from megatron_rl.training import loop, preflight
from megatron_rl.training.device_memory import DeviceMemory
from megatron_rl.types import Author, spans_of


@pytest.fixture
def template(tmp_path):
    path = tmp_path / "question.txt"
    path.write_text("?{question}\n")
    return str(path)


def test_grpo_learns_the_table(template, tmp_path):
    log = Log()
    setup, progress = make(template, log, tmp_path / "iterations")
    assert train(setup, loop.Plan(iterations=25, evaluate_every=10), progress)
    rewards = log.series("reward/outcome")
    assert sum(rewards[:3]) / 3 < 0.2 and sum(rewards[-3:]) / 3 > 0.9, rewards
    assert [(t, s) for t, s, scope, _ in log.lines if scope == "eval"] == [(0, 0), (10, 10), (20, 20), (25, 25)]
    metrics = progress.first_evaluation, progress.last_evaluation
    assert metrics[0]["generator/accuracy"] < 0.5 < metrics[1]["generator/accuracy"]
    assert progress.updates == {"generator": 25 - int(sum(log.series("skipped")))} and progress.number == 25
    assert set(log.series("version_lag")) == {0.0} and max(log.series("engine_gap")) < 1e-5


def test_online_dpo_trains_on_the_best_and_the_worst_of_each_group(template, tmp_path):
    log, recipe = Log(), OnlineDpo(updates=12, group_size=4, template=template)
    setup, progress = make(
        template, log, tmp_path / "iterations", recipe=recipe, loss=LossConfig(objective="dpo", kl_coef=0.0)
    )
    assert train(setup, loop.Plan(iterations=12, preflight=None), progress)
    outcomes, alike = log.series("outcome_of_all"), log.series("alike")
    assert np.mean(outcomes[:3]) + 0.3 < np.mean(outcomes[-3:]) and 0 < alike[0] < 1
    assert max(log.series("rewards/margins")) > 0 and log.series("reward/outcome")[0] == 0.5  # a 1 and a 0 in each pair
    assert log.series("loss")[0] == pytest.approx(math.log(2), rel=1e-5)  # the policy is its own reference


def test_a_run_says_what_takes_time(template, tmp_path):
    said = []
    setup, progress = make(template, Log(), tmp_path / "iterations")
    setup = replace(setup, say=said.append)
    train(setup, loop.Plan(iterations=1, preflight=None), progress)
    assert said == [
        "giving the engines the policies' weights",
        "evaluating 5 held-out problems after iteration 0",
        "writing the first rollouts",
        "evaluating 5 held-out problems after iteration 1",
    ]


def test_several_optimizer_steps_keep_the_first_ones_log_probs(template, tmp_path):
    log = Log()
    setup, progress = make(template, log, tmp_path / "iterations", samples_per_optimizer_step=32)
    train(setup, loop.Plan(iterations=2), progress)
    assert log.series("optimizer_steps") == [3.0, 3.0]
    assert all(abs(r - 1.0) > 1e-4 for r in log.series("ratio"))  # the later steps left the start
    assert max(log.series("engine_gap")) < 1e-5  # but the gap is measured at it


def lines_without_times(log):
    return json.dumps([(iteration, cycle, scope, m) for iteration, cycle, scope, m in log.lines])


@pytest.mark.parametrize("stop_after", [3, 4])  # an evaluation is due after 4
def test_a_run_stopped_and_resumed_writes_the_lines_of_the_whole_one(template, tmp_path, stop_after):
    whole, first, second = Log(), Log(), Log()
    plan = loop.Plan(iterations=8, evaluate_every=4, save_every=3)
    setup, progress = make(template, whole, tmp_path / "whole")
    train(setup, plan, progress)

    policy = TablePolicy(VOCAB, lr=0.3, seed=1)
    setup, progress = make(template, first, tmp_path / "cut", policy=policy, stop_after=stop_after)
    assert not train(setup, plan, progress)
    assert progress.number == stop_after and stop_after in first.saved
    policy.save(tmp_path)
    again = TablePolicy(VOCAB, lr=0.3, seed=1)
    again.load(tmp_path)
    state = first.saved[stop_after]["state"]
    resumed, progress = make(template, second, tmp_path / "cut", policy=again, state=state)
    assert train(resumed, plan, progress)
    second.lines = first.lines + second.lines
    assert lines_without_times(second) == lines_without_times(whole)
    assert torch.equal(again.table, whole.saved[8]["table"])


@dataclass(frozen=True, kw_only=True)
class Keeper(Grpo):
    """Grpo whose first evaluation keeps its metrics, which every later one returns."""

    def evaluate(self, prompts, context):
        return context.kept.setdefault("first", super().evaluate(prompts, context))


def test_what_an_evaluation_keeps_is_there_after_a_resume_also_with_iterations_collected_ahead(template, tmp_path):
    log, later = Log(), Log()
    plan = loop.Plan(iterations=6, evaluate_every=2, evaluate_at_start=False, save_every=1)
    recipe, policy = Keeper(updates=6, group_size=8, template=template), TablePolicy(VOCAB, lr=0.3, seed=1)
    parts = {"recipe": recipe, "policy": policy, "max_staleness": 2}
    setup, progress = make(template, log, tmp_path / "iterations", stop_after=3, **parts)
    assert not train(setup, plan, progress)
    setup.iterations.close()
    (first,) = [metrics for _, _, scope, metrics in log.lines if scope == "eval"]
    assert log.saved[3]["state"]["progress"]["kept"] == {"questions": {"first": first}}
    setup, progress = make(template, later, tmp_path / "iterations", state=log.saved[3]["state"], **parts)
    assert train(setup, plan, progress)
    setup.iterations.close()
    assert [metrics for _, _, scope, metrics in later.lines if scope == "eval"] == [first, first]


def test_a_run_that_was_killed_collects_no_iteration_twice(template, tmp_path):
    """The store has the iterations after the last checkpoint: the same rollouts are trained on again, without an engine
    asked.
    """
    whole, killed, second = Log(), Log(), Log()
    plan = loop.Plan(iterations=6, save_every=2, evaluate_at_start=False)
    setup, progress = make(template, whole, tmp_path / "whole")
    train(setup, plan, progress)

    policy = TablePolicy(VOCAB, lr=0.3, seed=1)
    setup, progress = make(template, killed, tmp_path / "cut", policy=policy)
    policy.save(tmp_path)  # the start: nothing of the killed run's updates is kept
    with pytest.raises(KeyboardInterrupt):
        stops = {"save": lambda number, state: None, "should_stop": _killed_at(progress, 3)}
        train(replace(setup, **stops), plan, progress)
    again = TablePolicy(VOCAB, lr=0.3, seed=1)
    again.load(tmp_path)
    asked: list[int] = []
    setup, progress = make(template, second, tmp_path / "cut", policy=again)
    engine = setup.context.engines["generator"]
    ask, engine.session = engine.session, lambda *own: (asked.append(progress.number), ask(*own))[1]
    train(setup, plan, progress)
    assert torch.equal(again.table, whole.saved[6]["table"])
    assert min(asked) >= 3, "iterations 0 to 2 were in the store"


def _killed_at(progress, number):
    def stop():
        if progress.number >= number:
            raise KeyboardInterrupt
        return False

    return stop


@pytest.mark.multi
def test_three_ranks_generate_exactly_what_one_does_and_learn_the_same(template, tmp_path):
    log = Log()
    setup, progress = make(template, log, tmp_path / "iterations")
    train(setup, loop.Plan(iterations=4, evaluate_every=2), progress)
    worker = Path(__file__).parents[1] / "helpers" / "loop_worker.py"
    ranks = run_ranks(worker, 3, tmp_path / "ranks", template)
    context = setup.trainees["generator"].policy.table.detach().numpy()
    for rank in ranks:
        np.testing.assert_allclose(np.array(rank["table"]), context, atol=1e-5)
    assert len({json.dumps(rank["table"]) for rank in ranks}) == 1
    alone = [[iteration, cycle, scope] for iteration, cycle, scope, _ in log.lines]
    assert [line[:3] for line in ranks[0]["lines"]] == alone
    rewards = [line[3]["reward/outcome"] for line in ranks[0]["lines"] if line[2] == "generator"]
    assert rewards == pytest.approx(log.series("reward/outcome"))


def test_a_role_that_sleeps_is_awake_only_for_its_updates(template, tmp_path):
    log = Log()
    setup, progress = make(template, log, tmp_path / "iterations", sleeps=True)
    setup.memory.start()
    assert setup.trainees["generator"].policy.asleep, "before the first iteration too"
    train(setup, loop.Plan(iterations=2, save_every=1), progress)
    assert setup.trainees["generator"].policy.asleep and sorted(log.saved) == [1, 2]


def test_an_iteration_without_signal_is_skipped_and_a_run_of_such_iterations_is_no_success(template, tmp_path):
    log = Log()
    nothing = graded(lambda response, payload: 0.0)
    setup, progress = make(template, log, tmp_path / "iterations", grade=nothing)
    with pytest.raises(
        loop.NothingTrained, match="2 iterations and no update.*groups_without_signal = 1, reward/trained = 0"
    ):
        train(setup, loop.Plan(iterations=2), progress)
    assert log.series("skipped") == [1.0, 1.0] and log.series("loss") == []
    assert log.series("groups_without_signal") == [1.0, 1.0]
    setup, progress = make(template, log, tmp_path / "more", grade=nothing)
    with pytest.raises(loop.NothingTrained, match="0 iterations"):
        train(setup, loop.Plan(iterations=0), progress)


@pytest.mark.parametrize(("entropy_coef", "moves"), [(0.0, False), (0.1, True)])
def test_an_iteration_without_signal_can_be_trained_on_as_the_release_does(template, tmp_path, entropy_coef, moves):
    """The release of RL Tango updates after every iteration (verl/trainer/ppo/rl_tango_trainer.py, _train_generator):
    equal rewards leave KL, entropy and the optimizer's own momentum and decay."""
    log = Log()
    setup, progress = make(template, log, tmp_path / "iterations", grade=graded(lambda response, payload: 0.0))
    trainee = setup.trainees["generator"]
    loss = PolicyLoss(LossConfig(kl_coef=0.0, entropy_coef=entropy_coef))
    setup = replace(setup, memory=DeviceMemory({"generator": replace(trainee, loss=loss)}))
    before = trainee.policy.table.detach().clone()
    assert train(setup, loop.Plan(iterations=2, train_without_signal=True), progress)
    assert log.series("skipped") == [0.0, 0.0] and progress.updates == {"generator": 2}
    assert torch.equal(trainee.policy.table, before) is not moves


def test_equal_rewards_that_are_no_round_numbers_are_no_signal(template, tmp_path):
    log = Log()
    recipe = Grpo(
        updates=1, group_size=8, estimator="rloo", template=template
    )  # its advantages here are 5.6e-17, not 0
    grade = graded(lambda response, payload: 0.1 + 0.2)
    setup, progress = make(template, log, tmp_path / "iterations", grade=grade, recipe=recipe)
    with pytest.raises(loop.NothingTrained):
        train(setup, loop.Plan(iterations=1), progress)
    assert log.series("skipped") == [1.0]


def test_recorded_iterations_train_the_same_model_without_an_engine(template, tmp_path):
    collected, replayed = Log(), Log()
    setup, progress = make(template, collected, tmp_path / "iterations")
    train(setup, loop.Plan(iterations=3), progress)
    setup, progress = make(template, replayed, tmp_path / "again", replay=tmp_path / "iterations")
    setup = without_engine(setup)
    train(setup, loop.Plan(iterations=3), progress)
    assert torch.equal(collected.saved[3]["table"], replayed.saved[3]["table"])
    assert replayed.series("reward/outcome") == collected.series("reward/outcome")
    setup, progress = make(template, Log(), tmp_path / "more", replay=tmp_path / "iterations")
    with pytest.raises(FileNotFoundError, match="iteration 3"):
        train(without_engine(setup), loop.Plan(iterations=4), progress)


@dataclass(frozen=True, kw_only=True)
class Late(Grpo):
    """Says of every rollout that the version before wrote half of it."""

    def rollout(self, iteration, source, context):
        found = super().rollout(iteration, source, context)
        out = []
        for r in found["generator"]:
            spans = r.spans.copy()
            spans[spans[:, 2] == 0, 3] -= 1
            out.append(replace(r, spans=spans))
        return {"generator": out}


def test_ages_are_in_updates_of_the_policy(template, tmp_path):
    log = Log()
    setup, progress = make(
        template, log, tmp_path / "iterations", recipe=Late(updates=2, group_size=8, template=template)
    )
    train(setup, loop.Plan(iterations=2), progress)
    assert log.series("version_lag") == [1.0, 1.0] and log.series("staleness") == [1.0, 1.0]


@dataclass(frozen=True, kw_only=True)
class Mixed(Grpo):
    """Says of every second rollout that the version before wrote its first token, with a log-prob that is far off."""

    def rollout(self, iteration, source, context):
        found = super().rollout(iteration, source, context)["generator"]
        return {"generator": [self.older(r) if i % 2 and r.length > 1 else r for i, r in enumerate(found)]}

    @staticmethod
    def older(rollout):
        first, last = rollout.start, len(rollout.tokens)
        spans = spans_of((first, Author.ENVIRONMENT, -1), (1, Author.POLICY, 3), (last - first - 1, Author.POLICY, 4))
        logprobs = rollout.logprobs.copy()
        logprobs[first] -= 5.0
        return replace(rollout, spans=spans, logprobs=logprobs)


def test_rollouts_of_several_versions_are_kept_or_scored_anew_or_dropped_as_the_plan_says(template, tmp_path):
    """`mixed` of a run: the metrics of the first update, whose rollouts are the same in all three."""
    found = {}
    for mixed in ("keep", "rescore", "drop"):
        log = Log()
        recipe = Mixed(updates=1, group_size=8, template=template)
        setup, progress = make(template, log, tmp_path / mixed, recipe=recipe)
        train(setup, loop.Plan(iterations=1, mixed=mixed, evaluate_at_start=False), progress)
        found[mixed] = {name: log.series(name)[0] for name in ("trained_tokens", "engine_gap", "mixed_versions")}
    share = found["keep"]["mixed_versions"]
    assert 0.2 < share < 0.5 and {own["mixed_versions"] for own in found.values()} == {share}
    tokens = {mixed: own["trained_tokens"] for mixed, own in found.items()}
    assert tokens["keep"] == tokens["rescore"] == tokens["drop"] + 2 * share * 80, "a mixed rollout has two tokens"
    assert found["keep"]["engine_gap"] > 0.5 and max(found[m]["engine_gap"] for m in ("rescore", "drop")) < 1e-5


@dataclass(frozen=True, kw_only=True)
class MixedPairs(Mixed, OnlineDpo):
    """Says so of every second rollout of the first five problems' alone."""

    def rollout(self, iteration, source, context):
        found, mixed = OnlineDpo.rollout(self, iteration, source, context)["generator"], range(1, 20, 2)
        return {"generator": [self.older(r) if i in mixed and r.length > 1 else r for i, r in enumerate(found)]}


def test_a_pair_that_loses_a_rollout_of_several_versions_is_left_out(template, tmp_path):
    tokens = {}
    for mixed in ("keep", "drop"):
        log, recipe = Log(), MixedPairs(updates=1, group_size=4, template=template)
        loss = LossConfig(objective="dpo", kl_coef=0.0)
        setup, progress = make(template, log, tmp_path / mixed, recipe=recipe, loss=loss)
        train(setup, loop.Plan(iterations=1, mixed=mixed, evaluate_at_start=False), progress)
        [tokens[mixed]] = log.series("trained_tokens")
    assert 0 < tokens["drop"] < tokens["keep"]


def test_the_loop_has_the_settings_of_its_config():
    """The plan of a run, each of whose settings differs from its default."""
    args = {"updates": 7}
    config = TrainConfig(
        roles={"generator": RoleConfig(model=Model(path="m"))},
        recipe=Use(target="megatron_rl.recipes.grpo:Grpo", args=args),
        data=PromptSet(path="d"),
        evaluation=Evaluation(sets=(EvaluationSet(name="held", path="h"),), every=3, at_start=False),
        run=Run(save_every=5, train_without_signal=True),
        rollouts=Rollouts(mixed="drop"),
        preflight=Preflight(num_prompts=2, max_logprob_gap=0.25),
        reward=Reward(target="r", wrong_answer="w", answer_format="f{answer}", range=(-1.0, 2.0)),
    )
    reader = SimpleNamespace(first=lambda count: Questions().take(count))
    models = SimpleNamespace(readers={"generator": reader}, held_out={})
    first = Questions().take(2)
    checks = preflight.PreflightPlan(
        settings=config.preflight, prompts=first, reward=config.reward, place="evaluation.sets: held"
    )
    plan = loop.Plan(
        iterations=7, evaluate_every=3, evaluate_at_start=False, save_every=5, preflight=checks, mixed="drop",
        train_without_signal=True, refits_wait=True,
    )  # fmt: skip

    def planned(config):
        return session._plan(SimpleNamespace(spec=spec_of(config), **vars(models)))

    assert [p.id for p in planned(config).preflight.prompts] == [p.id for p in first]
    models.held_out = {"held": first}
    assert planned(config) == plan
    for off in (replace(config, preflight=Preflight(enabled=False)), replace(config, debug=Debug(replay="run"))):
        assert planned(off) == replace(plan, preflight=None)


def test_recipes_play_with_the_settings_of_the_config():
    """The context of a run whose second role shares the first one's engine."""
    first = RoleConfig(
        model=Model(path="m"), max_prompt_tokens=7, sampling=SamplingConfig(max_tokens=5, temperature=0.5, top_k=3),
        tandem=TandemConfig(strategy="chunk", p=0.25, max_gap=9, chunk_size=4, junior_weight=0.125),
    )  # fmt: skip
    config = TrainConfig(
        roles={"a": first, "b": RoleConfig(same_as="a", max_prompt_tokens=9)},
        recipe=Use(target="r"),
        data=PromptSet(path="d"),
        run=Run(seed=11),
        reward=Reward(target="r", range=(-1.0, 4.0), max_failure_share=0.75),
        rollouts=Rollouts(labels="votes"),
    )
    engine, watch = object(), Stopwatch()
    spec, tokenizers = spec_of(config), {"a": TOKENIZER, "b": TOKENIZER}
    context = builders.context(
        spec.roles, spec.reward, spec.loop.rollouts, {"a": engine}, tokenizers, len, watch, seed=spec.run.seed
    )
    assert context.engines == {"a": engine, "b": engine} and context.max_prompt_tokens == {"a": 7, "b": 9}
    assert context.partner_weights == {"a": 0.125} and context.grade is len and context.watch is watch
    assert (context.seed, context.threshold, context.max_failure_share, context.voted) == (11, 1.5, 0.75, True)
    a, b = context.samplings["a"], context.samplings["b"]
    assert (a.max_tokens, a.temperature, a.top_k) == (5, 0.5, 3) and b.tandem is None
    assert a.tandem.rule == Rule(strategy="chunk", p=0.25, max_gap=9, chunk_size=4)


@pytest.mark.parametrize("staleness, high", [(0, None), (1, 2.0)])
def test_a_policy_is_trained_with_the_settings_of_its_role(staleness, high):
    role = RoleConfig(
        model=Model(path="m"), samples_per_optimizer_step=6, sleep=True, sampling=SamplingConfig(max_tokens=5),
        loss=LossConfig(kl_coef=0.25, aggregation="constant"),
    )  # fmt: skip
    config = TrainConfig(
        roles={"a": role}, recipe=Use(target="r"), data=PromptSet(path="d"), run=Run(peak_tflops=3.0),
        rollouts=Rollouts(max_staleness=staleness),
    )  # fmt: skip
    policy = object()
    found = builders.trainee(spec_of(config).roles["a"], config.run, policy)
    assert (found.policy, found.samples_per_optimizer_step) == (policy, 6)
    assert found.sleeps and found.peak_flops == 3e12
    correction = None if high is None else CorrectionConfig(kind="truncate", high=high)
    assert found.loss.config == replace(role.loss, max_tokens=5, correction=correction)
    own = replace(role, loss=replace(role.loss, max_tokens=8, correction=CorrectionConfig(kind="none")))
    kept = builders.trainee(spec_of(replace(config, roles={"a": own})).roles["a"], config.run, policy)
    assert kept.loss.config == own.loss
