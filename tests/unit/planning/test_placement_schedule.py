"""The simulated schedules of roles on ranks of their own, against times that were worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from plan_cases import case_of, spec_of

from megatron_rl.config import files
from megatron_rl.config.schema import TrainConfig
from megatron_rl.planning import plan as plans
from megatron_rl.planning.case import own_cluster
from megatron_rl.planning.phases import SetWork
from megatron_rl.planning.schedule import predicted, schedules, simulated
from megatron_rl.planning.simulation import ENGINES, Sample, SimulatedIteration, Simulation, Station, simulate

LEFT, RIGHT, BOTH = range(8), range(8, 12), range(12)


def work(ranks: range, policy: str, update_s: float, **own) -> SetWork:
    return SetWork(ranks=ranks, policies=[policy], update_s=update_s, paused=[policy], **own)


def station(role: str) -> Station:
    return Station(places=1, rates=[1.0, 1.0], role=role)


def iteration(*sets: SetWork, rollout_s: float = 4.0, grading_s: float = 0.0) -> SimulatedIteration:
    samples = [Sample(visits=[(place, rollout_s)], policy=policy) for place, policy in enumerate("ab")]
    return SimulatedIteration(
        samples=samples, trained=[policy for one in sets for policy in one.policies], sets=sets, grading_s=grading_s
    )


def found(cycle, k, stations=("a", "b")):
    schedule = simulate([station(role) for role in stations], cycle, max_staleness=k)
    return schedule, pytest.approx(3600 / schedule.iterations_per_hour)


def test_placement_two_disjoint_sets_of_one_iteration_update_at_the_same_time():
    schedule, seconds = found([iteration(work(LEFT, "a", 3.0), work(RIGHT, "b", 5.0))], 0)
    assert seconds == 4 + 5
    left, right = schedule.sets
    assert (left.ranks, right.ranks) == ("0-7", "8-11")
    assert left.busy_s == pytest.approx(3) and right.busy_s == pytest.approx(5)
    assert left.idle == pytest.approx(1 - 3 / 9) and right.idle == pytest.approx(1 - 5 / 9)
    assert schedule.trainer_idle == pytest.approx(1 - (8 * 3 + 4 * 5) / (12 * 9))
    assert left.waits == pytest.approx({ENGINES: 4 / 9, "8-11": 2 / 9}) and right.waits == pytest.approx(
        {ENGINES: 4 / 9}
    )
    assert schedule.engines_idle == pytest.approx(5 / 9) and sum(schedule.engines_wait.values()) == pytest.approx(5 / 9)


def test_placement_a_shared_set_updates_one_role_after_the_other():
    schedule, seconds = found([iteration(work(BOTH, "a", 3.0), work(BOTH, "b", 5.0))], 0)
    assert seconds == 4 + 8
    assert schedule.sets[0].idle == schedule.trainer_idle == pytest.approx(4 / 12)


def test_placement_a_nested_set_waits_for_the_commands_before_its_own():
    """The update of the whole set waits for that of a part, as commands run in the order of posting."""
    schedule, seconds = found([iteration(work(LEFT, "a", 3.0, refit_s=1.0), work(BOTH, "b", 5.0))], 0)
    # update a 3 s, update b 5 s on all ranks, and the refit of a, which was posted behind both updates, 1 s
    assert seconds == 4 + 3 + 5 + 1
    inner, outer = schedule.sets
    assert inner.idle == pytest.approx(1 - 9 / 13) and outer.idle == pytest.approx(1 - (5 + 4 * 8 / 12) / 13)


@pytest.mark.parametrize(("k", "seconds"), [(0, 4 + 3 + 4 + 5), (1, 9.0), (2, 8.0)])
def test_placement_iterations_of_different_roles_overlap_with_staleness(k, seconds):
    """One iteration trains a, the next one b. With k = 1, the rollouts of an iteration that trains b begin after
    the refit of the earlier one: 4 + 5 s for two iterations. With k = 2 the engines bound the rate: 4 s for each."""
    cycle = [iteration(work(LEFT, "a", 3.0)), iteration(work(RIGHT, "b", 5.0))]
    schedule, per_iteration = found(cycle, k)
    assert per_iteration == seconds / 2
    if not k:
        assert schedule.sets[0].waits[ENGINES] == pytest.approx(8 / 16)
        assert schedule.sets[0].waits["8-11"] == pytest.approx(5 / 16)
    shared = [iteration(work(BOTH, "a", 3.0)), iteration(work(BOTH, "b", 5.0))]
    assert found(shared, k)[1] == seconds / 2, "a shared set is busy for 8 s of two iterations, too"


@pytest.mark.parametrize(("k", "apart", "shared"), [(0, 1 + 8, 1 + 10), (1, 8.0, 10.0), (2, 8.0, 10.0)])
def test_placement_the_busiest_set_bounds_the_rate(k, apart, shared):
    cycle = [iteration(work(LEFT, "a", 2.0), work(RIGHT, "b", 8.0), rollout_s=1.0)]
    schedule, seconds = found(cycle, k)
    assert seconds == apart
    assert schedule.sets[0].waits.get("8-11", 0) > 0.6 and schedule.sets[1].idle == pytest.approx(1 - 8 / apart)
    assert found([iteration(work(BOTH, "a", 2.0), work(BOTH, "b", 8.0), rollout_s=1.0)], k)[1] == shared


def test_placement_updates_wait_for_all_scores_of_their_iteration():
    """Set a scores for 2 s, set b for 6 s; the credit needs both, so that a waits for b."""
    cycle = [iteration(work(LEFT, "a", 3.0, scores_s=2.0), work(RIGHT, "b", 1.0, scores_s=6.0), rollout_s=1.0)]
    schedule, seconds = found(cycle, 0)
    assert seconds == 1 + 6 + 3
    assert schedule.sets[0].waits == pytest.approx({ENGINES: 1 / 10, "8-11": 4 / 10})
    assert schedule.sets[1].waits == pytest.approx({ENGINES: 1 / 10, "0-7": 2 / 10})


def test_placement_a_refit_pauses_the_engines_of_its_roles_alone():
    cycle = [iteration(work(LEFT, "a", 1.0, refit_s=2.0), work(RIGHT, "b", 1.0), rollout_s=6.0)]
    assert found(cycle, 1)[1] == 6 + 2, "the samples of a, which pause for 2 s of each iteration"
    paused = [replace(cycle[0], sets=[replace(one, paused=None) for one in cycle[0].sets])]
    assert found(paused, 1)[1] == 8
    only_b = [iteration(work(LEFT, "a", 1.0), work(RIGHT, "b", 1.0, refit_s=0.0), rollout_s=6.0)]
    assert found(only_b, 1)[1] == 6


@pytest.mark.parametrize(("k", "seconds"), [(0, 2 + 3 + 4 + 5), (1, 9.0), (2, 9.0)])
def test_placement_embedded_engines_generate_on_their_roles_ranks(k, seconds):
    """a writes for 2 s and b reads it for 3 s; then a learns for 4 s and b for 5 s at the same time. With staleness, b
    is busy for 3 + 5 s of each iteration, a for 2 + 4 s. The order of commands leaves b idle for a second."""
    sets = [work(LEFT, "a", 4.0), work(RIGHT, "b", 5.0)]
    one = SimulatedIteration(samples=(), trained=["a", "b"], sets=sets, generated=[(LEFT, 2.0), (RIGHT, 3.0)])
    schedule, per_iteration = found([one], k, stations=())
    if not k:
        assert per_iteration == 2 + 3 + 5
        assert schedule.engines_idle == pytest.approx(1 - (8 * 2 + 4 * 3) / (12 * 10))
    else:
        assert 8 <= 3600 / schedule.iterations_per_hour <= seconds


def test_placement_the_simulation_says_when_each_policy_generates_learns_and_syncs():
    sets = [work(BOTH, "a", 3.0, scores_s=1.0), work(BOTH, "b", 5.0, refit_s=2.0)]
    run = Simulation([station("a"), station("b")], [iteration(*sets)], 0, one_at_a_time=False)
    run.until(2)
    assert run.ends == pytest.approx([15, 30])
    assert [span[1:] for span in sorted(run.spans) if span.iteration == 1] == [
        ("a", "generation", 15, 19), ("a", "refit", 28, 28), ("a", "scores", 19, 20), ("a", "update", 20, 23),
        ("b", "generation", 15, 19), ("b", "refit", 28, 30), ("b", "update", 23, 28),
    ]  # fmt: skip
    shared = SetWork(ranks=BOTH, policies=["a", "b"], update_s=8.0, shares={"a": 1.0, "b": 3.0})
    embedded = SimulatedIteration(samples=(), sets=[shared], generated=[(LEFT, 2.0), (RIGHT, 3.0)], writers=["a", "b"])
    run = Simulation([], [embedded], 0, one_at_a_time=False)
    run.until(1)
    assert [span[1:] for span in run.spans if span.kind != "refit"] == [
        ("a", "generation", 0, 2), ("b", "generation", 2, 5), ("a", "update", 5, 7), ("b", "update", 7, 13),
    ]  # fmt: skip


@pytest.mark.parametrize("staleness", [0, 2])
def test_placement_a_predicted_timeline_begins_with_a_cycle_and_has_its_rate(staleness):
    config = files.load(
        TrainConfig, ["examples/published/tango_32b_1.5b.yaml"], [f"rollouts.max_staleness={staleness}"]
    )
    _, found, timeline = predicted(spec_of(config), "H100")
    assert (
        json.loads(json.dumps(timeline)) == timeline
        and timeline["ends"][0] == 0
        and len(timeline["ends"]) == timeline["cycle"] + 9
    )
    trained = [(i, role) for i, role, phase, *_ in sorted(timeline["intervals"]) if phase == "training" and i >= 0]
    kinds = [role for _, role in trained][: timeline["cycle"]]
    assert {*kinds} == {"generator", "verifier"} and [role for _, role in trained[timeline["cycle"] :]][:2] == kinds[:2]
    [schedule] = [one for one in found if one.max_staleness == staleness]
    rate = 3600 * timeline["cycle"] / timeline["ends"][timeline["cycle"]]
    assert rate == pytest.approx(schedule.iterations_per_hour, rel=0.1)


THREE = "examples/published/evolve_three_qwen2.5_3b.yaml"


def three(*settings: str):
    return case_of(files.load(TrainConfig, [THREE], ["engine.colocate=false", *settings]), "8x8xA100-80")


def test_placement_all_roles_on_all_ranks_have_the_figures_of_before():
    """The figures are those of the commit before roles could have ranks of their own."""

    config = files.load(TrainConfig, ["examples/published/scalerl_qwen3_8b.yaml"])
    spec = spec_of(config)
    case = case_of(config, own_cluster(spec.engine, spec.cluster))
    plan = plans.make(case)
    assert [plan.peak(role) for role in plan.roles] == [71761843986.432]
    assert simulated(case, plan).cycle_s == pytest.approx(423.80757927573364, rel=1e-12)
    figures = [(one.iterations_per_hour, one.engines_idle, one.trainer_idle) for one in schedules(case, plan)]
    assert figures[0] == pytest.approx((4.628444725317935, 0.5248792070936239, 0.6111102186617658), rel=1e-12)
    assert figures[1] == pytest.approx((6.713159032303846, 0.2599584631588364, 0.43594898435735285), rel=1e-12)
    plan = plans.make(three("engine.replicas=2"))
    [iteration_plan] = plan.iterations
    assert len(iteration_plan.sets) == 1 and iteration_plan.hidden == 0
    assert plan.cycle_s == sum(iteration_plan.phases.values())
    explicit = plans.make(three("engine.replicas=2", *(f"roles.{role}.ranks=0-47" for role in plan_roles(plan))))
    assert explicit == plan


def plan_roles(plan: plans.RunPlan) -> list[str]:
    return [role.name for role in plan.roles]


def test_placement_memory_and_time_are_those_of_the_roles_ranks():
    together = plans.make(three("engine.replicas=2"))
    case = three(
        "engine.replicas=2", *(f"roles.{role}.ranks={at}" for role, at in SETS.items()), "rollouts.max_staleness=1"
    )
    plan = simulated(case, plans.make(case))
    for role, shared in zip(plan.roles, together.roles, strict=True):
        assert role.parallel.dp == 8 and shared.parallel.dp == 24
        assert plan.peak(role) == plan.reserve + role.embedded + role.training.peak, "no other role is on its GPUs"
        assert together.peak(shared) > together.reserve + shared.training.peak
    [own] = plan.iterations
    assert [part.ranks for part in own.sets] == [range(0, 16), range(16, 32), range(32, 48)]
    assert [part.policies for part in own.sets] == [["proposer"], ["solver"], ["judge"]]
    schedule = schedules(case, plan)[1]
    assert plan.cycle_s == pytest.approx(3600 / schedule.iterations_per_hour) and len(schedule.sets) == 3


SETS = {"proposer": "0-15", "solver": "16-31", "judge": "32-47"}


def test_placement_the_fullest_gpu_of_nested_sets_holds_all_its_roles():
    case = three("engine.replicas=2", "roles.proposer.ranks=0-15", "roles.solver.ranks=16-31")
    plan = plans.make(case)
    proposer, solver, judge = plan.roles
    assert plan.peak(judge) == plan.reserve + max(proposer.asleep, solver.asleep) + judge.training.peak
    assert plan.peak(proposer) == plan.reserve + judge.asleep + proposer.training.peak
    assert plans.make_or_none(three("engine.replicas=2", "roles.proposer.ranks=40-55")) is None
