"""Roles on ranks of their own in one world, against each role by itself in a world that has just the role's ranks."""

from __future__ import annotations

import placement_worker
import pytest
from forks import answers, start_ranks
from limits import RUN_S
from tiny_models import make_model

ROLES = {
    "first": {"ranks": [0, 1], "layout": {"tp": 2}, "family": "qwen2"},
    "single": {"ranks": [2, 2], "layout": {}, "family": "llama"},
    "stages": {"ranks": [2, 3], "layout": {"pp": 2}, "family": "qwen3"},
    "experts": {"ranks": [2, 3], "layout": {"ep": 2}, "family": "qwen2_moe"},
    "every": {"ranks": [0, 3], "layout": {"tp": 2}, "family": "qwen2"},
}


def ranks_of(role):
    first, last = ROLES[role]["ranks"]
    return range(first, last + 1)


@pytest.fixture(scope="module")
def placed(tmp_path_factory):
    """What each rank found of each role, {role: [answer of a rank, ...]}: in one world, and alone."""
    folder = tmp_path_factory.mktemp("placement")
    models = folder / "models"
    for role in ROLES.values():
        make_model(models / role["family"], role["family"])
    arguments = str(models), ROLES, ["first", "single"], "stages", ["first", "every"]
    found = answers(start_ranks(placement_worker.main, 4, folder, *arguments), folder, RUN_S)
    together = {name: [found[rank][0][name] for rank in ranks_of(name)] for name in ROLES}
    return together, {name: [found[rank][1][name] for rank in range(len(ranks_of(name)))] for name in ROLES}


@pytest.mark.multi
@pytest.mark.parametrize("role", ROLES)
def test_a_role_on_its_own_ranks_trains_and_saves_as_if_it_were_alone(placed, role):
    """Updates, weights, Adam moments, checkpoints and keys of parameter groups. The roles `first` and `single` have met
    in the middle of their updates: neither waits for the end of the other."""
    together, alone = placed
    assert len(together[role]) == len(alone[role]) == len(ranks_of(role))
    for place, (found, expected) in enumerate(zip(together[role], alone[role], strict=True)):
        assert {name: found[name] for name in expected} == expected
        assert found["loaded"] == found["saved"]
        assert found["saved"][0] != found["saved"][1], "the second update changed the weights"
        for files in found["files"]:
            assert f"__{place}_0.distcp" in files, "files are named by the place in the role's ranks"


@pytest.mark.multi
def test_a_refit_from_ranks_without_rank_0_brings_each_element_once(placed):
    for answer in placed[0]["stages"]:
        assert answer["refit"] == {"landings": [1, 1], "equal": True}


@pytest.mark.multi
def test_a_checkpoint_is_loaded_under_other_ranks(placed):
    for answer in placed[0]["every"]:
        assert answer["other_ranks"] == placed[0]["first"][0]["exported"] != answer["exported"]
