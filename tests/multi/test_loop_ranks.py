"""The loop on two ranks: checkpoints, best models, the early stop, evaluations beside training and engines in the
trainer's GPUs, as on one rank. A run hung at its first checkpoint where a handler asked the driver in the world that
carried the command.
"""

from pathlib import Path

import loop_ranks_worker
import numpy as np
import pytest
from one_process import OneProcess
from ranks import run_ranks

WORKER = Path(__file__).parents[1] / "helpers" / "loop_ranks_worker.py"
pytestmark = pytest.mark.multi


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    path = tmp_path_factory.mktemp("template") / "question.txt"
    path.write_text("?{question}\n")
    return str(path)


@pytest.fixture(scope="module")
def ranks(template, tmp_path_factory):
    return run_ranks(WORKER, 2, tmp_path_factory.mktemp("ranks"), template)


@pytest.mark.parametrize("case", loop_ranks_worker.PLANS)
def test_two_ranks_do_what_one_rank_does(case, template, ranks, tmp_path):
    alone = loop_ranks_worker.run(case, OneProcess(), template, tmp_path)
    first, second = (rank[case] for rank in ranks)
    assert first["done"] == second["done"] == alone["done"] == (case != "exit")
    assert [line[:3] for line in first["lines"]] == [list(line[:3]) for line in alone["lines"]]
    for line, other in zip(first["lines"], alone["lines"], strict=True):
        assert line[3] == pytest.approx(other[3], rel=1e-4, abs=1e-6)
    assert second["lines"] == [], "the loop runs on the driver alone"
    np.testing.assert_allclose(np.array(first["table"]), np.array(alone["table"]), atol=1e-5)
    assert first["table"] == second["table"]
    for name in ("number", "updates", "evaluated", "saved", "best", "early_stop", "kept"):
        assert first["progress"][name] == as_json(alone["progress"][name])
    assert {name.replace("rank1", "rank0").replace("__1_0", "__0_0") for name in first["files"]} >= {
        *(name for name in alone["files"] if name.endswith((".distcp", "rank0", ".json")))
    }


def as_json(value):
    return [as_json(item) for item in value] if isinstance(value, list | tuple) else value


def test_the_best_model_and_its_checkpoint_are_kept_and_surpassed_ones_are_gone(ranks):
    for case, last in (("best", 4), ("colocated", 3)):
        files = ranks[0][case]["files"]
        exported = {name for name in files if name.startswith("best/")}
        assert exported == {f"best/iteration_000001/rank{rank}" for rank in (0, 1)}
        saved = {name.split("/")[1] for name in files if name.startswith("checkpoints/")}
        assert {"iteration_000001", f"iteration_{last:06d}"} <= saved and len(saved) == 3
        assert [record["iteration"] for said in ranks[0][case]["said"] for record in said["best"]][-1] == 1


def test_a_run_ends_early_and_a_run_that_is_asked_to_exit_saves_first(ranks):
    stopped, left = ranks[0]["early stop"], ranks[0]["exit"]
    assert stopped["progress"]["number"] == 3 and any("iteration_000003" in name for name in stopped["files"])
    assert left["progress"]["number"] == 2 and any("iteration_000002" in name for name in left["files"])


def test_an_error_of_the_loop_is_raised_on_every_rank(ranks):
    (kind, text), (other_kind, other_text) = (rank["failing"] for rank in ranks)
    assert (kind, other_kind) == ("NothingTrained", "DriverError") and text in other_text
