"""What an engine's rank does when the trainer has given it up, and when a refit fails in the middle."""

from types import SimpleNamespace

import pytest
import torch
from hostile_engines import TOPOLOGY, staged_engine
from refit_worker import Engine

from megatron_rl.refit.engine_side import EngineSide
from megatron_rl.refit.exchange import RefitOrder
from megatron_rl.refit.refit_store import RefitStore
from megatron_rl.refit.store_messages import Go
from megatron_rl.refit.transport import RefitError


class Known(EngineSide):
    """A rank without a trainer that notes how it leaves and joins."""

    def __init__(self, told):
        self.done, self._rank, self._incarnation, self.version = [], 0, "mine", 3
        self._store = SimpleNamespace(
            peek=lambda key, kind: told,
            get=lambda key, kind, s: 5,
            has=lambda key, s: self.done.append(key) is not None,
        )

    def _leave(self):
        self.done.append("leave")

    def _join(self):
        self.done.append("join")


def test_an_engine_that_was_given_up_leaves_and_joins_before_it_looks_for_a_refit():
    for told, first in (("mine", []), ("another", ["leave", "join"]), (None, ["leave", "join"])):
        side = Known(told)
        assert side.take_part(0.0) is None
        assert side.done == [*first, "5/ticket"] and side.version == 3


def test_an_engine_whose_weights_were_half_written_holds_no_version():
    def fails(order, deadline, outcome):
        raise RefitError("a message did not come")

    for begins, version in ((lambda: None, None), (refuses, 3)):
        side = Known("mine")
        side._epoch, side._exchange, side._endpoint = 1, SimpleNamespace(run=fails), SimpleNamespace(begin_refit=begins)
        vote = side._vote(Go(engines={}, trainer=[], epoch=1, order=RefitOrder(version=4)), None)
        assert side.version == version and vote.error == ("a message did not come" if version is None else "busy")


def refuses():
    raise RefitError("busy")


@pytest.fixture
def store():
    made, _ = RefitStore.host("127.0.0.1")
    return made


@pytest.mark.parametrize("rank", [-1, 2])
def test_an_engine_rank_that_the_trainer_does_not_expect_is_refused_and_not_registered(store, rank):
    store.put("setup", {"topology": TOPOLOGY.to_json(), "settings": {}})
    with pytest.raises(ValueError, match=f"engine rank {rank}: the trainer expects 2 engine ranks"):
        EngineSide(store, rank, Engine(TOPOLOGY, 0), torch.device("cpu"))
    assert not store.has(f"hello/{rank}", 0)


def test_a_staged_engine_that_is_closed_has_ended_its_thread_and_its_connections(store):
    side, closed = staged_engine(store), []
    side._wiring = SimpleNamespace(close=lambda: closed.append(side._thread.is_alive()))
    side.close()
    assert closed == [False] and side._wiring is None
