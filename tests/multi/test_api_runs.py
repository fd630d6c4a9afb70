"""Trainers run: from a script, from the notebook of the docs, on one rank and on two, with callbacks that stop them."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from api_starts import forked_start
from conftest import ROOT, environment
from docs_pages import blocks_of
from limits import RUN_S
from transformers import TrainerCallback

from megatron_rl import Callback, RunFailed, Trainer
from megatron_rl.api import process
from megatron_rl.config.files import load
from megatron_rl.config.schema import TrainConfig
from megatron_rl.data.tiny import tiny_problems, write_tiny_model
from megatron_rl.main import main

# Whole prompts, as in TRL: short ones, so that an iteration takes little.
ROWS = [{"prompt": row["question"], "answer": row["answer"]} for row in tiny_problems(8)]
SETTINGS = {"updates": 3, "group_size": 4, "prompts_per_iteration": 4, "max_tokens": 8, "lr": 3e-3}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def make(model, tmp_path, monkeypatch):
    monkeypatch.setattr(process, "start", forked_start(tmp_path / "started"))

    def made(reward, dataset=None, **settings):
        return Trainer(model, reward, dataset or ROWS, **{"dir": tmp_path, "name": "run", **SETTINGS, **settings})

    return made


class Diary(Callback):
    """Writes down what it is told, in this process, and stops the run after some iterations."""

    def __init__(self, stop_at=None):
        self.told, self.lines, self.saved, self.stop_at = [], [], [], stop_at

    def on_train_begin(self, state):
        self.told.append(("begin", state.iteration, state.iterations))

    def on_iteration_end(self, state):
        self.told.append(("iteration", state.iteration, state.last["generator"]["reward/trained"]))
        if state.iteration == self.stop_at:
            state.stop()

    def on_log(self, state):
        self.lines.append(state.history[-1]["scope"])

    def on_save(self, state):
        self.saved.append(state.saved)
        assert (state.run / f"checkpoints/iteration_{state.saved:06d}").is_dir()

    def on_evaluate(self, state):
        self.told.append(("eval", state.cycle, state.last["eval"]["generator/accuracy"]))

    def on_train_end(self, state):
        self.told.append(("end", state.iteration))


def letters(answer):
    """Makes a reward of a closure, as notebooks have them."""

    def share(completions, **columns):
        return [
            (text.count(answer) / len(text) if text else 0.0, {"length_of_batch": len(completions)})
            for text in completions
        ]

    return share


def test_a_run_of_two_ranks_tells_callbacks_what_it_does_and_goes_on_after_a_stop(make):
    diary = Diary(stop_at=2)
    trainer = make([(letters("e"), 2.0), lambda response, payload: 0.5], ranks=2, callbacks=[diary],
                   eval_dataset=ROWS[:4])  # fmt: skip
    stopped = trainer.train()
    kinds = [entry[0] for entry in diary.told]
    assert kinds == ["begin", "eval", "iteration", "iteration", "end"] and diary.told[0] == ("begin", 0, 3)
    assert not stopped.finished and (stopped.models["generator"] / "model.safetensors").exists()
    history = [row for row in stopped.history if row["scope"] == "generator"]
    assert [row["reward/trained"] for row in history] == [entry[2] for entry in diary.told if entry[0] == "iteration"]
    row = history[0]
    assert row["reward/trained"] == pytest.approx(2.0 * row["reward/share"] + row["reward/lambda"])
    assert row["reward/lambda"] == 0.5 and row["reward/share/length_of_batch"] >= 1
    assert diary.saved[-1] == 2 and diary.lines[:2] == ["preflight", "eval"] and diary.lines[2:] == ["generator"] * 2
    diary.stop_at = 3  # after the last iteration there is nothing to stop
    finished = trainer.train()
    assert [entry[:2] for entry in diary.told[5:]] == [("begin", 2), ("iteration", 3), ("eval", 3), ("end", 3)]
    assert finished.finished and finished.metrics["iterations"] == 3 and len(finished.column("reward/trained")) == 3
    assert finished.column("generator/reward/trained") == finished.column("reward/trained", "generator")
    assert len(finished.column("generator/reward/trained")) == 3 and not finished.column("other/reward/trained")
    assert all(path.exists() for path in finished.paths.values()) and "model/generator" in finished.paths
    yaml = load(TrainConfig, [finished.paths["config"]])
    assert yaml == trainer.config.resolve(), "the run's own config is the Trainer's"


def test_callbacks_of_transformers_are_called_and_stop_the_run(make):
    told = []

    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            told.append((state.global_step, state.max_steps, args.output_dir))
            control.should_training_stop = state.global_step == 1
            return control

        def on_log(self, args, state, control, logs=None, **kwargs):
            assert logs is state.log_history[-1]
            told.append(logs["scope"])

        def on_save(self, args, state, control, **kwargs):
            told.append("save")

        def on_train_end(self, args, state, control, **kwargs):
            told.append("end")

    stopped = make(letters("e"), callbacks=[Stops()]).train()
    assert told == ["preflight", "generator", (1, 3, str(stopped.run)), "save", "end"] and not stopped.finished


@pytest.mark.matrix
def test_a_stop_that_is_asked_for_in_an_evaluation_acts_before_another_iteration(make):
    """It took another iteration, which a model that is good enough does not need."""

    class Enough(Diary):
        def on_evaluate(self, state):
            super().on_evaluate(state)
            if state.cycle == self.stop_at:
                state.stop()

        def on_iteration_end(self, state):
            self.told.append(("iteration", state.iteration))

    diary = Enough(stop_at=0)
    trainer = make(letters("e"), callbacks=[diary], eval_dataset=ROWS[:2], evaluation={"every": 1})
    begun = trainer.train()
    assert [entry[:2] for entry in diary.told] == [("begin", 0), ("eval", 0), ("end", 0)]
    assert not begun.finished and (begun.models["generator"] / "model.safetensors").exists()
    diary.stop_at, diary.told = 2, []
    stopped = trainer.train()
    order = [entry[:2] for entry in diary.told]
    assert order == [
        ("begin", 0),
        ("eval", 0),
        ("iteration", 1),
        ("eval", 1),
        ("iteration", 2),
        ("eval", 2),
        ("end", 2),
    ]
    assert not stopped.finished
    diary.stop_at, diary.told = None, []
    whole = trainer.train()
    assert [entry[:2] for entry in diary.told] == [("begin", 2), ("eval", 2), ("iteration", 3), ("eval", 3), ("end", 3)]
    assert whole.finished and [row["cycle"] for row in whole.history if row["scope"] == "eval"] == [-1, 0, 1, 2]


@pytest.mark.matrix
def test_the_yaml_file_of_a_trainer_gives_the_same_run(make, tmp_path, capsys):
    """With the callable reward in its file, by the command line, bit for bit."""
    trainer = make(letters("e"))
    own = trainer.train()
    shown = capsys.readouterr().out
    assert "iteration 1/3 (cycle 1)  generator" in shown and "done: " in shown
    written = trainer.config.to_yaml(tmp_path / "my.yaml")
    ended = process.run(["train", str(written), "run.name=again"], show=False)
    lines = [
        [(row["scope"], row["metrics"]) for row in map(json.loads, (tmp_path / name / "metrics.jsonl").open())]
        for name in ("run", "again")
    ]
    assert ended == 0 and lines[0] == lines[1] and len(own.column("reward/trained")) == 3


def test_the_trained_model_answers_and_is_measured(make, tmp_path):
    trainer = make(letters("e"), eval_dataset=ROWS[:3], lr=2e-2, updates=6)
    before = trainer.evaluate()
    trained = trainer.train()
    after = trainer.evaluate()
    assert 0.0 <= before["accuracy"] < after["accuracy"], "the model that is measured is the trained one"
    assert trained.metrics["generator_accuracy_end"] >= 0.0
    assert {"001.json", "002.json"} <= {path.name for path in (tmp_path / "run/evaluations").iterdir()}
    written = trainer.evaluate(n=4) and (tmp_path / "run/evaluations/003.jsonl").read_text().splitlines()
    drawn = {(row["id"], row["response"]) for row in map(json.loads, written)}
    assert len(written) == 12 and len(drawn) > 3, "several samples of a problem are not drawn greedily"
    answers = trainer.generate(["aaa", "bbb"], temperature=0.0)
    assert len(answers) == 2 and sum(map(len, answers)) and sum(text.count("e") for text in answers) > 0
    asked = trainer.generate([[{"role": "user", "content": "aaa"}], "bbb"], n=3, max_tokens=2)
    assert [len(group) for group in asked] == [3, 3] and all(len(text) <= 2 for group in asked for text in group)


def test_what_fails_in_a_run_is_raised_with_its_words(make, tmp_path):
    def broken(response, payload):
        raise LookupError("no such thing")

    with pytest.raises(RunFailed, match=r"gradings failed .*LookupError: no such thing") as caught:
        make(broken).train()
    assert caught.value.kind == "RewardFailure"
    with pytest.raises(RunFailed, match="every group of samples had equal rewards") as caught:
        make(lambda response, payload: 1.0, name="flat").train()
    assert caught.value.kind == "NothingTrained"

    class Bad(Callback):
        def on_iteration_end(self, state):
            raise ZeroDivisionError("in a callback")

    with pytest.raises(ZeroDivisionError, match="in a callback"):
        make(letters("e"), name="bad", callbacks=[Bad()]).train()
    saved = json.loads((tmp_path / "bad/summary.json").read_text())
    assert saved["iterations"] == 1 and not saved["finished"], "the run saved and left"


@pytest.fixture
def interrupts():
    """Python's own handler of Ctrl-C: a program that was started in the background of a shell has none."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_has_the_run_save_and_leave(make, tmp_path, interrupts):
    class Interrupted(Callback):
        def on_iteration_end(self, state):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        make(letters("e"), callbacks=[Interrupted()]).train()
    assert list((tmp_path / "run/checkpoints").iterdir()) and not (tmp_path / "run/models").exists()
    assert make(letters("e")).train().finished


def script(path, directory, *, timeout_s=RUN_S):
    done = subprocess.run(
        [sys.executable, str(path)], cwd=directory, env=environment(), capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def test_the_example_is_a_script_of_few_lines_that_learns(tmp_path):
    """It has no `if __name__` around what it does, and its reward stands in `__main__`."""
    path = ROOT / "examples/python_api/grpo.py"
    code = path.read_text().partition('"""\n\n')[2]
    assert len(code.splitlines()) <= 15 and f"```python\n{code}```" in (ROOT / "docs/how_to/python_api.md").read_text()
    said = script(path, tmp_path)
    [rewards] = re.findall(r"reward of each update: \[(.*)\]", said)
    curve = [float(word) for word in rewards.split(", ")]
    assert len(curve) == 12 and sum(curve[-4:]) > 1.5 * sum(curve[:4])
    assert said.count("iteration 1/12") == 1, "no process runs the script a second time"


def cells():
    page = json.loads((ROOT / "docs/tutorials/quickstart.ipynb").read_text())
    assert page["nbformat"] == 4 and all(not cell.get("outputs") for cell in page["cells"])
    return ["".join(cell["source"]) for cell in page["cells"] if cell["cell_type"] == "code"]


@pytest.mark.matrix
def test_the_notebook_of_the_docs_runs(tmp_path):
    """In a kernel where there is one; else its cells one after the other in `__main__`, as a kernel runs them."""
    try:
        import nbclient
        import nbformat
    except ImportError:
        text = "\n".join(f"exec(compile({cell!r}, 'cell', 'exec'), globals())" for cell in cells())
        (tmp_path / "cells.py").write_text(text)
        said = script(tmp_path / "cells.py", tmp_path)
    else:
        page = nbformat.read(ROOT / "docs/tutorials/quickstart.ipynb", as_version=4)
        nbclient.NotebookClient(page, timeout=int(RUN_S), resources={"metadata": {"path": tmp_path}}).execute()
        outputs = [output for cell in page.cells for output in cell.get("outputs", ())]
        said = "".join(output.get("text", "") for output in outputs)
        shown = [output["data"]["text/plain"] for output in outputs if output.output_type == "display_data"]
        trained = [text for text in shown if "iteration 8/8" in text]
        assert trained and all(len(text.splitlines()) <= process.LINES for text in shown), "one display for each run"
        assert not any("\x1b" in text for text in [said, *shown]), "no colours, and no movements of a cursor"
    assert "update 8 of 8: reward" in said and "reward/different/kinds [" in said
    assert load(TrainConfig, [tmp_path / "runs/quickstart/my.yaml"]).launch.nproc == 2


def test_python_blocks_of_the_page_run(tmp_path, monkeypatch):
    page = ROOT / "docs/how_to/python_api.md"
    blocks = [own.text for own in blocks_of(page) if own.language == "python" and not own.mark]
    assert len(blocks) == 3
    monkeypatch.chdir(tmp_path)
    for block in blocks[1:]:  # the first is the example
        exec(compile(block, "docs/how_to/python_api.md", "exec"), {})  # the page's own code
    assert (tmp_path / "my.yaml").exists()


@pytest.mark.parametrize("kind", ["tango", "agents"])  # the other tests train with GRPO
def test_the_tiny_config_of_init_trains(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["init", kind, "my.yaml", "--tiny", "tiny"]) == 0
    monkeypatch.setattr(process, "start", forked_start(tmp_path / "started"))
    shutil.copytree("tiny", tmp_path / "made")
    place = {"model": tmp_path / "made/model", "data": tmp_path / "made/data"}
    text = (
        Path("my.yaml")
        .read_text()
        .replace('"tiny/model"', str(place["model"]))
        .replace('"tiny/data"', str(place["data"]))
    )
    Path("my.yaml").write_text(text)
    result = Trainer(config="my.yaml", dir=tmp_path / "runs", iterations=2).train()
    assert result.finished and len(result.column("reward/trained")) >= 2
