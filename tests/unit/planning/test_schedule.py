"""The simulated schedules of runs against closed forms, and the number that `auto` chooses for max_staleness."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from plan_cases import spec_of

from megatron_rl.commands.parser import build_parser
from megatron_rl.commands.plan import run as plan_command
from megatron_rl.config import files
from megatron_rl.config.base import ConfigError
from megatron_rl.config.schema import TrainConfig
from megatron_rl.planning.schedule import best_staleness, lengths, predicted
from megatron_rl.planning.simulation import Sample, SimulatedIteration, Station, simulate
from megatron_rl.run.run_directory import check_start
from megatron_rl.spec.automatic import chosen

EXAMPLES = Path(__file__).parents[3] / "examples/published"
PUBLISHED = EXAMPLES / "scalerl_qwen3_8b.yaml"
COLOCATED = EXAMPLES / "tango_qwen2.5_7b.yaml"


def station(places, **own):
    return Station(places=places, rates=[1.0] * (places + 1), **own)


def iteration(works, *, train_s, **own):
    samples = [Sample(visits=[(0, float(work))]) for work in works]
    return SimulatedIteration(samples=samples, train_s=train_s, **own)


def rates(stations, cycle, **own):
    return [simulate(stations, cycle, max_staleness=k, **own) for k in range(5)]


def test_without_staleness_an_iteration_takes_the_sum_of_its_phases():
    cycle = [iteration([3, 1, 1, 4], train_s=2, refit_s=0.5, grading_s=0.25)]
    # two places: 3 | 1, 1, 4 -> 6 seconds
    found = simulate([station(2)], cycle, max_staleness=0)
    assert found.iterations_per_hour == pytest.approx(3600 / 8.75)
    assert found.engines_idle == pytest.approx(1 - 9 / (2 * 8.75))
    assert found.trainer_idle == pytest.approx(1 - 2.5 / 8.75)
    assert found.staleness == [1.0]


@pytest.mark.parametrize("train_s", [0.5, 3.0])
def test_iterations_of_equal_lengths_take_as_long_as_the_slower_side(train_s):
    cycle = [iteration([2] * 4, train_s=train_s)]
    for k, found in enumerate(rates([station(4)], cycle)):
        seconds = 2 + train_s if k == 0 else max(2, train_s)
        assert found.iterations_per_hour == pytest.approx(3600 / seconds)
        assert found.engines_idle == pytest.approx(1 - 2 / seconds)
        assert found.trainer_idle == pytest.approx(1 - train_s / seconds)


def test_with_places_for_all_iterations_in_flight_no_sample_waits():
    """k + 1 iterations of the longest sample are trained in the time of one: the longest sample and the training."""
    for k, found in enumerate(rates([station(100)], [iteration([1, 1, 1, 9], train_s=1)])):
        assert found.iterations_per_hour == pytest.approx(3600 * (k + 1) / 10)
        assert found.staleness == [0.0] * k + [1.0]


def test_the_former_mode_gains_nothing_beyond_one_iteration_ahead():
    cycle = [iteration(lengths(3, 8, 64, seed=i), train_s=5) for i in range(4)]
    former = [one.iterations_per_hour for one in rates([station(32)], cycle, one_at_a_time=True)]
    assert former[1:] == pytest.approx([former[1]] * 4) and former[1] > 1.1 * former[0]


def test_no_work_is_lost_and_a_larger_staleness_is_never_slower():
    works = [lengths(3, 8, 64, seed=i) for i in range(6)]
    cycle = [iteration(own, train_s=6, refit_s=0.1) for own in works]
    found = rates([station(32)], cycle)
    for one in found:
        # all samples of the measured iterations, and not more: places x time x share = work
        worked = 32 * (1 - one.engines_idle) * 3600 / one.iterations_per_hour
        assert worked == pytest.approx(np.mean([own.sum() for own in works]), rel=0.12)
        assert 1 - one.trainer_idle == pytest.approx(6.1 * one.iterations_per_hour / 3600)
        assert sum(one.staleness) == pytest.approx(1) and len(one.staleness) == one.max_staleness + 1
    found = [one.iterations_per_hour for one in found]
    assert all(more > 0.999 * less for less, more in pairwise(found)) and found[4] > 1.5 * found[0]


def test_the_oldest_iteration_is_served_first():
    """The samples of the newer iteration wait although they came before the older iteration's second visits."""
    own = [Sample(visits=[(0, 1.0), (1, 1.0), (0, 1.0)]) for _ in range(4)]
    cycle = [SimulatedIteration(samples=own, train_s=1.0)]
    found = simulate([station(4), station(4, engine=False)], cycle, max_staleness=1)
    # each iteration takes 3 s of which the engine is free in the middle one, which the next iteration fills
    assert found.iterations_per_hour == pytest.approx(3600 / 2)
    assert found.engines_idle == pytest.approx(0)


def test_a_sample_that_is_reviewed_waits_for_the_solution_and_versions_are_those_of_its_policy():
    solution, review = Sample(visits=[(0, 2.0)], policy="a"), Sample(visits=[(1, 1.0)], policy="b", predecessor=0)
    cycle = [
        SimulatedIteration(samples=[solution, review], train_s=1.0, trained=["a"]),
        SimulatedIteration(samples=[solution, review], train_s=1.0, trained=["b"]),
    ]
    stations = [station(1), station(1)]
    assert simulate(stations, cycle, max_staleness=0).iterations_per_hour == pytest.approx(3600 / 4)
    ahead = simulate(stations, cycle, max_staleness=1)
    assert ahead.iterations_per_hour == pytest.approx(3600 / 2)
    assert ahead.staleness == [1.0, 0.0]  # the other policy is trained between


def test_a_refit_pauses_the_engines_and_not_the_tools():
    cycle = [SimulatedIteration(samples=[Sample(visits=[(0, 4.0)])], train_s=1.0, refit_s=1.0)]
    engines, tools = simulate([station(1)], cycle, max_staleness=1), [station(1, engine=False)]
    assert engines.iterations_per_hour == pytest.approx(3600 / 5)
    assert simulate(tools, cycle, max_staleness=1).iterations_per_hour == pytest.approx(3600 / 4)


@pytest.mark.parametrize(("mean", "longest"), [(3000, 8000), (9000, 32000), (12000, 128000), (50, 100), (99, 100)])
def test_lengths_have_the_mean_and_the_limit_of_the_config(mean, longest):
    found = lengths(mean, longest, 2000)
    assert found.mean() == pytest.approx(mean, rel=0.01) and found.max() == longest
    assert (found == longest).mean() == pytest.approx(0.01, abs=0.001)


def test_a_plan_scales_each_iteration_to_the_planned_seconds(capsys):
    arguments = ["plan", str(PUBLISHED), "rollouts.max_staleness=2", "--cluster", "4x8xA100-80"]
    plan_command(build_parser().parse_args([*arguments, "--json"]))
    told = json.loads(capsys.readouterr().out)
    alone = sum(told["phases_s"].values())
    found = {one["max_staleness"]: one for one in told["schedules"]}
    assert list(found) == [0, 1, 2, 3, 4] and told["max_staleness"] == 2
    assert found[0]["iterations_per_hour"] == pytest.approx(3600 / alone)
    generation = sum(told["phases_s"][name] for name in ("rollout generator", "reward"))
    assert found[0]["trainer_idle"] == pytest.approx(generation / alone)
    plan_command(build_parser().parse_args(["plan", str(PUBLISHED), "rollouts.max_staleness=auto"]))
    assert "(auto)" in capsys.readouterr().out


def choice(config):
    """Returns the config with the number that was chosen, and what was said of it."""
    said = list[str]()
    return chosen(config, 8, say=said.append), " ".join(said)


def config_of(file, *overrides):
    return files.load(TrainConfig, [file], [*overrides, "rollouts.max_staleness=auto"])


def test_auto_takes_the_smallest_number_within_5_percent_of_the_best(tmp_path):
    config, said = choice(config_of(PUBLISHED, f"run.dir={tmp_path}"))
    number = config.rollouts.ahead
    _, found, _ = predicted(spec_of(config))
    assert number == best_staleness(found) and f"takes {number}: " in said
    best = max(one.iterations_per_hour for one in found)
    near = [one.max_staleness for one in found if one.iterations_per_hour >= 0.95 * best]
    assert 0 < number == near[0]


def test_a_number_that_is_given_stays(tmp_path):
    config = files.load(TrainConfig, [PUBLISHED], ["rollouts.max_staleness=3"])
    assert choice(config) == (config, "")


@pytest.mark.parametrize("engine", ["embedded", "colocated"])
def test_auto_takes_0_for_engines_in_the_trainers_gpus(engine, tmp_path):
    overrides = ["engine={kind: embedded}"] if engine == "embedded" else []
    config, said = choice(config_of(COLOCATED, f"run.dir={tmp_path}", *overrides))
    assert config.rollouts.max_staleness == 0 and "share the trainer's GPUs" in said


def test_a_resumed_run_keeps_the_number_that_was_chosen(tmp_path):
    wanted = config_of(PUBLISHED, f"run.dir={tmp_path}")
    first, _ = choice(wanted)
    number = first.rollouts.ahead
    other = replace(first, rollouts=replace(first.rollouts, max_staleness=number + 1))
    wanted.directory.mkdir(parents=True)
    (wanted.directory / "config.yaml").write_text(files.dump(other))  # as another version of the package chose it
    again, said = choice(wanted)
    assert not check_start(wanted.run, files.dump(wanted))  # as `submit` does with the config as it is
    assert again == other and f"takes {number + 1}, because the run was started with this value" in said
    changed, said = choice(replace(wanted, run=replace(wanted.run, seed=wanted.run.seed + 1)))
    assert (
        changed.rollouts.max_staleness == number and "started with" not in said
    )  # another run, which nothing was saved of


def test_rates_that_cannot_be_predicted_are_refused(tmp_path):
    config = config_of(PUBLISHED, f"run.dir={tmp_path}", "roles.generator.model.path=no/such/model")
    with pytest.raises(ConfigError, match=r"max_staleness = auto: the rates cannot be predicted, set a number"):
        chosen(config, 8)
