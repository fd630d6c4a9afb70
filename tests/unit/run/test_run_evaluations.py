"""What an evaluation of a run leaves behind: the files, the answers in sinks, the best models and their record."""

import json
from types import SimpleNamespace

from megatron_rl.evaluation.samples import chosen_answers
from megatron_rl.run.checkpoint import Checkpoints
from megatron_rl.run.metrics import Sink, Tracker
from megatron_rl.run.run_directory import RunDirectory
from megatron_rl.session import evaluations


class Shown(Sink):
    """A sink that keeps what it is shown."""

    name, num_samples = "shown", 3

    def __init__(self):
        self.seen = []

    def show(self, iteration, scope, samples):
        self.seen.append((iteration, scope, [(one.prompt, one.response, one.rewards["correct"]) for one in samples]))


def answer(place, sample, score):
    return {
        "id": place, "row": f"0/{place}", "sample": sample, "question": f"q{place}", "response": f"r{score}",
        "score": score, "correct": score > 0.5, "outcome": "score", "key": str(score), "finished": True, "tokens": 3,
    }  # fmt: skip


ANSWERS = {"mine": {"generator": [[answer(0, 0, 1.0), answer(0, 1, 0.0)], [answer(1, 0, 0.0), answer(1, 1, 0.0)]]}}


def test_the_files_are_those_of_eval_and_hold_every_answer(tmp_path):
    directory = RunDirectory(tmp_path)
    sets = [SimpleNamespace(name="mine", title="Mine", k=(1, 2)), SimpleNamespace(name="other", title="Other", k=(1,))]
    evaluations.write_results(directory, sets, 12, ANSWERS, seed=1)
    content = json.loads((tmp_path / "evaluations/iteration_000012.json").read_text())
    own = content["sets"]["mine"]["solve"]
    assert content["iteration"] == 12 and own["metrics"]["pass@2"] == 0.5 and own["metrics"]["accuracy"] == 0.25
    low, high = own["intervals"]["pass@2"]
    assert low == 0.0 and high == 1.0
    lines = (tmp_path / "evaluations/iteration_000012.jsonl").read_text().splitlines()
    assert [json.loads(line)["response"] for line in lines] == ["r1.0", "r0.0", "r0.0", "r0.0"]
    evaluations.write_results(directory, sets, 13, {"mine": {}}, seed=1)
    assert not (tmp_path / "evaluations/iteration_000013.json").exists(), "a recipe without graded answers"


def test_sinks_get_correct_and_wrong_answers_of_each_set(tmp_path):
    sink = Shown()
    tracker = Tracker(tmp_path / "metrics.jsonl", [sink])
    tracker.log(0, "eval", {"generator/accuracy": 0.25}, iteration=12)
    evaluations.show_answers(tracker, 12, ANSWERS)
    assert sink.seen == [(11, "eval/mine", [("q0", "r1.0", 1.0), ("q0", "r0.0", 0.0), ("q1", "r0.0", 0.0)])]


def test_answers_are_chosen_from_both_kinds_where_there_are_both():
    right, wrong = [answer(i, 0, 1.0) for i in range(5)], [answer(i, 0, 0.0) for i in range(5)]
    assert [row["correct"] for row in chosen_answers([*right, *wrong], 4)] == [True, True, False, False]
    assert len(chosen_answers(right, 4)) == 4 and len(chosen_answers(wrong[:3], 4)) == 3
    assert [row["correct"] for row in chosen_answers([*right, wrong[0]], 4)] == [True, True, True, False]


def test_models_that_are_no_longer_the_best_go(tmp_path):
    directory, exported = RunDirectory(tmp_path), []
    checkpoints = Checkpoints(directory.checkpoints, keep=1)

    def export(place):
        place.mkdir(parents=True)
        exported.append(place.name)

    for number, best in (
        (0, [(0, 0.1)]),
        (2, [(2, 0.3), (0, 0.1)]),
        (4, [(4, 0.7), (2, 0.3)]),
        (6, [(4, 0.7), (2, 0.3)]),
    ):
        evaluations.keep_best(directory, number, best, export)
        checkpoints.write(number, lambda place: (place / "weights").write_text("1"))
        checkpoints.protected = frozenset(one[0] for one in best)
        evaluations.remove_surpassed(directory, checkpoints, best)
    assert exported == ["iteration_000002", "iteration_000004"], "the model that the run was given is not written again"
    assert checkpoints.newest().number == 6 and not checkpoints.path(0).exists()
    assert checkpoints.path(2).exists() and checkpoints.path(4).exists(), "checkpoints of the best stay"
    checkpoints.protected = frozenset([4])
    evaluations.remove_surpassed(directory, checkpoints, [(4, 0.7)])
    assert not checkpoints.path(2).exists() and checkpoints.path(4).exists()
    assert [path.name for path in directory.best.iterdir()] == ["iteration_000004"]
    first, given = evaluations.best_record(directory, "generator/accuracy", [(4, 0.7), (0, 0.1)])
    assert first["models"] == f"{tmp_path}/best/iteration_000004/models" and given["models"] is None
