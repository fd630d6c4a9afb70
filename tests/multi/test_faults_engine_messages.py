"""Messages of a refit that an engine or a trainer of another version, or an attacker, may send."""

from __future__ import annotations

import time

import pytest
from hostile_engines import READY, VOTE, refits, staged_engine

from megatron_rl.refit.refit_store import RefitStore
from megatron_rl.refit.transport import RefitError

LOCATION = READY["location"]
GO = {"engines": {}, "trainer": [LOCATION], "epoch": 1, "order": {"version": 1, "verify": "full", "sums_on": "host"}}


def test_faults_a_wrong_message_of_an_engine_costs_this_engine_and_not_the_run(caplog):
    """`ready = 5` ended the run by a TypeError, and so did an unknown key of a vote."""
    wrong_ready = [
        5,
        "x",
        [],
        {},
        READY | {"more": 1},
        READY | {"version": "3"},
        READY | {"location": 3},
        b"{",
        b"\xff",
    ]
    wrong_votes = [5, VOTE | {"more": 1}, VOTE | {"error": 4}, VOTE | {"probe": [1]}, b'{"sent": NaN}', b"[" * 9999]
    wrong_votes += [VOTE | change for change in ({"sent": 1 << 1100}, {"probe": [1, 1e300]}, {"seconds": -1.0})]
    with refits() as run:
        for ready in wrong_ready:
            assert run.refit(hello="odd", ready=ready)["refit/failed_engines"] == 1.0
            assert "answered the roll call wrongly: " in caplog.records[-1].getMessage()
            assert not run.store.has("hello/1", 0), "it has to register again"
        for vote in wrong_votes:
            assert run.refit(hello="odd", ready=READY, vote=vote, pulse={"odd": 1})["refit/failed_engines"] == 1.0
        ours = run.side._trainer_locations[0]
        assert run.refit(hello="odd", ready=READY | {"location": ours})["refit/failed_engines"] == 1.0
        assert "another process is at its location" in caplog.records[-1].getMessage()
        assert run.refit()["refit/failed_engines"] == 0.0


def test_faults_an_odd_message_of_the_trainer_ends_no_staged_engine(caplog):
    """The thread that receives refits died in silence, and the engine served its first weights for ever."""
    store, _ = RefitStore.host("127.0.0.1")
    side = staged_engine(store)
    odd = [5, {}, GO | {"engines": {"x": LOCATION}}, GO | {"trainer": []}, GO | {"order": {}}, GO | {"more": 1}]
    for number, go in enumerate(odd, start=1):
        store.put_together({f"{number}/ticket": True, f"{number}/go": go})
        store.get(f"{number}/ready/0", dict, 10.0)
        store.put_together({"next": number + 1, f"{number}/verdict": 7})
    end = time.monotonic() + 20.0
    while sum("is left out" in record.getMessage() for record in caplog.records) < len(odd) and time.monotonic() < end:
        time.sleep(0.05)
    assert side._thread.is_alive() and side.take_part(0.0) is None
    side.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_faults_an_engine_says_that_its_thread_of_refits_has_died():
    store, _ = RefitStore.host("127.0.0.1")
    side = staged_engine(store)
    side._await_go = None  # any error that nobody expects
    store.put("1/ticket", True)
    side._thread.join()
    with pytest.raises(RefitError, match="the thread that receives refits has failed"):
        side.take_part(0.0)
