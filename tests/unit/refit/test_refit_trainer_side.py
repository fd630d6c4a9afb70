"""What a trainer says of a refit, and which engines it sends differences."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hostile_engines import refits
from refit_worker import Engine, shards, whole_model
from test_faults_refit_weights import SIZES, group, topology

from megatron_rl.config.schema import RefitConfig
from megatron_rl.refit.trainer_side import TrainerSide
from megatron_rl.refit.transport import Mismatch, RefitError, TransportError
from megatron_rl.weights.rank_layouts import TrainerLayout

__all__ = ["group"]  # a fixture


def test_an_engine_that_is_left_out_is_named_with_the_reason_in_one_warning(caplog):
    with refits() as run:
        run.refit()
        assert not caplog.records
        run.refit(hello="odd", ready=5)
    [warning] = caplog.records
    assert "engine 1 is left out: it did not come to version 2 (engine rank 1 answered" in warning.getMessage()


def test_no_refit_is_faster_than_the_floor_that_it_is_measured_against(group):
    own = topology(None)
    side = TrainerSide(own, RefitConfig(), shards(own, 0, whole_model(SIZES, 0)), group=group, endpoint=Engine(own, 0))
    found = side(0)
    side.close()
    assert 0 < found["refit/floor_seconds"] < max(1.0, found["refit/seconds"])
    assert found["refit/ratio_to_floor"] == found["refit/seconds"] / found["refit/floor_seconds"]


@pytest.mark.parametrize(
    ("pays", "fresh", "base"),
    [(True, False, {0: 3}), (True, True, {}), (False, False, {}), (False, True, {})],
)
@pytest.mark.parametrize("kinds", [None, {"tcp"}, {"tcp", "nccl"}])
def test_differences_go_to_connected_engines_that_answered_with_a_version_and_not_over_nccl(pays, fresh, base, kinds):
    side: Any = SimpleNamespace(
        _delta_pays=pays, _wiring=kinds and SimpleNamespace(kinds=kinds), _settings=RefitConfig(verify="full"),
        _device=torch.device("cpu"),
    )  # fmt: skip
    call: Any = SimpleNamespace(versions={0: 3, 1: None, 2: 3}, locations=dict.fromkeys([0, 1]))
    order = TrainerSide._order(side, call, 4, fresh=fresh)
    assert (order.version, order.verify, order.sums_on, order.base) == (4, "full", "host", base)
    assert order.keeps_sent == (pays and kinds != {"tcp", "nccl"})


@pytest.mark.parametrize("wrong", ["lacks", "has more", "another size"])
def test_a_trainer_whose_ranks_or_parameters_are_not_those_of_its_layout_is_refused(group, wrong):
    own = topology(None)
    parameters = shards(own, 0, whole_model(SIZES, 0))
    last = sorted(parameters)[-1]
    if wrong == "lacks":
        del parameters[last]
        said = rf"rank 0 of .* lacks \['{last}'\], and has \[\] beyond its layout"
    elif wrong == "has more":
        parameters["odd"] = parameters[last]
        said = r"rank 0 of .* lacks \[\], and has \['odd'\] beyond its layout"
    else:
        own = replace(own, trainer=TrainerLayout(tp=2))
        said = "has 2 ranks, but the group has 1"
    with pytest.raises(ValueError, match=said):
        TrainerSide(own, RefitConfig(), parameters, group=group)


def test_a_trainer_that_no_engine_joins_says_where_it_waited_and_how_long(group):
    own = topology(None)
    side = TrainerSide(own, RefitConfig(timeout_s=0.2), shards(own, 0, whole_model(SIZES, 0)), group=group)
    with pytest.raises(RefitError, match=r"no engine has joined the store at 127\.0\.0\.1:\d+ in 0 s"):
        side(0)
    side.close()


@pytest.mark.parametrize("kind", [RefitError, TransportError, Mismatch])
def test_what_fails_on_the_first_rank_fails_as_the_same_error_on_all(group, kind):
    own = topology(None)
    side = TrainerSide(own, RefitConfig(), shards(own, 0, whole_model(SIZES, 0)), group=group)

    def fails():
        raise kind("the network is away")

    with pytest.raises(RefitError, match="the network is away") as caught:
        side._on_first_rank(fails)
    assert type(caught.value) is kind and side._on_first_rank(lambda: 3) == 3
    side.close()
