"""Tests of the ranks of each role (spec.rank_sets)."""

import pytest

from megatron_rl.config.model import Model
from megatron_rl.spec.rank_sets import rank_sets
from megatron_rl.spec.run_spec import RoleSpec


def roles(**ranks):
    return {
        name: RoleSpec(name=name, owner=name, servers=name, model=Model(path="m"), ranks=value)
        for name, value in ranks.items()
    }


@pytest.mark.parametrize(
    ("settings", "sets"),
    [
        ({"a": "all", "b": "all"}, {"a": range(8), "b": range(8)}),
        ({"a": 2, "b": "4-7", "c": 2}, {"a": range(2), "b": range(4, 8), "c": range(2, 4)}),
        ({"a": "0-3", "b": "0-1", "c": "all"}, {"a": range(4), "b": range(2), "c": range(8)}),
        ({"a": "2-2", "b": 5}, {"a": range(2, 3), "b": range(3, 8)}),  # rank 0 is in no set
    ],
)
def test_ranks_of_roles(settings, sets):
    assert rank_sets(roles(**settings), 8) == (sets, [])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"a": "0-4", "b": "3-7"}, "overlap in a part"),
        ({"a": 6, "b": 4}, "not so many free ones"),
        ({"a": 0}, "not so many free ones"),
        ({"a": "4-8"}, "the ranks 0 to 7"),
        ({"a": "5-2"}, "the ranks 0 to 7"),
        ({"a": "half"}, "give all, a number, or a range"),
    ],
)
def test_refused_ranks(settings, message):
    assert message in " ".join(rank_sets(roles(**settings), 8)[1])


def test_a_shared_policy_has_the_ranks_of_its_owner():
    both = roles(a="0-3") | {"b": RoleSpec(name="b", owner="a", servers="a", model=Model(path="m"))}
    assert rank_sets(both, 8) == ({"a": range(4), "b": range(4)}, [])
    both["b"] = RoleSpec(name="b", owner="a", servers="a", model=Model(path="m"), ranks="4-7")
    assert "the role uses the policy of a" in rank_sets(both, 8)[1][0]
