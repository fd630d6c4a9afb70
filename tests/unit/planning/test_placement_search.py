"""The search for placements: sets of ranks, layouts and engines together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from plan_cases import case_of

from megatron_rl.config import files
from megatron_rl.config.schema import TrainConfig
from megatron_rl.main import main
from megatron_rl.planning import placements, search
from megatron_rl.planning import plan as plans
from megatron_rl.planning.schedule import simulated
from megatron_rl.planning.simulation import Schedule, SetSchedule
from megatron_rl.planning.tables import waits_text

EXAMPLES = Path(__file__).parents[3] / "examples/published"
THREE = EXAMPLES / "evolve_7b_3b_1.5b.yaml"
# short answers and small optimizer steps, which many ranks do not make faster
SHORT = [
    f"roles.{name}.{setting}"
    for name in ("proposer", "solver", "judge")
    for setting in ("samples_per_optimizer_step=8", "mean_tokens={prompt: 500, answer: 300}")
]


def load(file: Path, *settings: str) -> TrainConfig:
    return files.load(TrainConfig, [file], list(settings))


def test_placement_partitions_and_sizes_are_all_there():
    units = [("a",), ("b", "c"), ("d",)]
    found = {frozenset(map(frozenset, parts)) for parts in placements._partitions(units)}
    assert len(found) == 4 and all(any({"b", "c"} <= block for block in parts) for parts in found)
    four = [*placements._partitions([(name,) for name in "abcd"])]
    assert len(four) == 14
    assert [*placements._compositions(4, 2)] == [[1, 3], [2, 2], [3, 1]]
    everything = sum(len([*placements._compositions(n, len(parts))]) for parts in four for n in range(1, 8))
    assert everything + 7 == 399, "placements of four roles on 1 to 7 nodes"


def test_placement_search_separates_roles_whose_updates_are_too_small_for_all_ranks():
    case = case_of(load(THREE, *SHORT), "8x8xH100")
    found = search.search(case)
    assert not found[0].shared and any(proposal.shared for proposal in found)
    shared = next(proposal for proposal in found if proposal.shared)
    assert found[0].plan.cycle_s < 0.97 * shared.plan.cycle_s
    for proposal in found:
        assert not proposal.plan.problems and proposal.case.passes()
        again = case_of(load(THREE, *SHORT, *proposal.overrides), "8x8xH100")
        plan = simulated(again, plans.make(again))
        assert plan.cycle_s == pytest.approx(proposal.plan.cycle_s)
        assert [role.ranks for role in plan.roles] == [role.ranks for role in proposal.plan.roles]


def test_placement_search_prints_the_other_kind_beside_the_best():
    """All five best proposals have all roles on all ranks, where one role has nearly all the work."""
    found = search.search(case_of(load(EXAMPLES / "tango_32b_1.5b.yaml"), "4x8xH100"), keep=2)
    assert [proposal.shared for proposal in found] == [True, True, False]


def test_placement_a_critic_may_stand_on_a_part_of_its_actors_ranks():
    own = "engine={kind: vllm, replicas: 2, tp: 2, max_model_len: 4096}"
    case = case_of(load(EXAMPLES / "methods/ppo.yaml", own), "4x8xH100")
    [candidates] = [[*placements.Placements(search._variants).candidates(case, 5)]]
    sets = {tuple(role.ranks for role in candidate.case.roles.values()) for candidate in candidates}
    assert placements._actors(case, "critic") == {"generator"} and not placements._actors(case, "generator")
    assert ("0-15", "16-23") in sets or ("0-7", "8-23") in sets
    block = placements.Placements(search._variants)._block(case, ("generator", "critic"), 16)
    assert {block.choices["critic"].ranks for block in block} >= {16, 8}
    assert {block.choices["generator"].ranks for block in block} == {16}


def test_placement_plan_shows_the_sets_and_who_waits(capsys):
    words = ["plan", str(THREE), "--cluster", "6x8xH100"]
    words += [
        f"roles.{name}.ranks={ranks}" for name, ranks in zip(("proposer", "solver"), ("0-7", "8-15"), strict=True)
    ]
    words.append("roles.judge.ranks=16-23")
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "sets of ranks, simulated with rollouts.max_staleness 1" in shown and "ranks 0-7 wait " in shown
    assert main([*words, "--json"]) == 0
    sets = json.loads(capsys.readouterr().out)["sets"]
    assert [(one["ranks"], one["roles"]) for one in sets] == [
        ("0-7", ["proposer"]), ("8-15", ["solver"]), ("16-23", ["judge"])
    ]  # fmt: skip
    assert all(one["busy_s"] > 0 and 0 < one["idle"] < 1 for one in sets)


def test_placement_the_sentence_names_each_wait_and_its_share():
    sets = [
        SetSchedule(ranks="0-7", busy_s=1, idle=0.5, waits={"the engines": 0.3, "8-15": 0.2}),
        SetSchedule(ranks="8-15", busy_s=1, idle=0.0, waits={}),
    ]
    schedule = Schedule(
        max_staleness=0, iterations_per_hour=1, engines_idle=0.4, trainer_idle=0.2, staleness=[1.0], sets=sets,
        engines_wait={"8-15": 0.4},
    )  # fmt: skip
    assert waits_text(schedule) == (
        "ranks 0-7 wait 30% of the time for the engines and 20% of the time for ranks 8-15; "
        "the engines wait 40% of the time for ranks 8-15"
    )
