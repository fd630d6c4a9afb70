"""Weights that a disk damaged, models that are not on the disk yet, checksums beside training, damage that is said."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from damaged_runs import flip, make_run
from jinja2 import DictLoader, Environment
from one_process import OneProcess
from tiny_models import make_model
from toys import EOS, characters

from megatron_rl import main
from megatron_rl.api import by_value
from megatron_rl.cluster.rendezvous import write_private
from megatron_rl.config.model import Lora
from megatron_rl.config.schema import Model
from megatron_rl.data.rows import table_of, write_parquet
from megatron_rl.report import html_page
from megatron_rl.report.html_page import write_page
from megatron_rl.report.pages import write_report
from megatron_rl.run import file_checksums
from megatron_rl.run.atomic_files import write_text
from megatron_rl.run.checkpoint import MANIFEST, Checkpoints, known_digests
from megatron_rl.run.run_directory import RunDirectory
from megatron_rl.session import output_directory, run_setup, saving, train
from megatron_rl.session.output_directory import fresh
from megatron_rl.training.iteration import Collected, Iteration
from megatron_rl.training.store import IterationStore
from megatron_rl.weights import hf_model, lora_adapters
from megatron_rl.weights.hf_writer import Planned


class Disk:
    """What the disk is told, in order: ("push", path) and ("rename", path)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[tuple[str, Path]] = []
        fsync, replace, rename = os.fsync, os.replace, os.rename

        def pushed(descriptor: int) -> None:
            self.told.append(("push", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
            fsync(descriptor)

        def renamed(before: Any, after: Any, *, by: Any = replace, **options: Any) -> None:
            self.told.append(("rename", Path(after).resolve()))
            by(before, after, **options)

        monkeypatch.setattr(os, "fsync", pushed)
        monkeypatch.setattr(os, "replace", renamed)
        monkeypatch.setattr(os, "rename", lambda before, after, **o: renamed(before, after, by=rename, **o))

    def pushed_before(self, file: Path) -> set[Path]:
        """Returns what was pushed before the last rename to a file."""
        end = max(i for i, each in enumerate(self.told) if each == ("rename", file.resolve()))
        return {path for what, path in self.told[:end] if what == "push"}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    made = make_model(tmp_path_factory.mktemp("tiny") / "model", num_hidden_layers=1, vocab_size=97, eos_token_id=EOS)
    characters().save_pretrained(made)
    return Path(made)


def test_hostile_power_cut_after_the_end_of_a_run_finds_its_models(model, tmp_path, monkeypatch):
    """`finished: true` was on the disk before the models were."""
    disk, directory = Disk(monkeypatch), RunDirectory(tmp_path / "run")
    (tmp_path / "run").mkdir()
    role = SimpleNamespace(model=Model(path=str(model)))
    spec = SimpleNamespace(roles={"solver": role}, trained_policies=["solver"])
    tensors = dict(hf_model.read_tensors(model))
    planned = [Planned(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    export = SimpleNamespace(
        weights=lambda everywhere: iter(tensors.items()),
        planned=lambda: planned,
        head=None,
        write_adapter=lambda directory: None,
    )
    policy = SimpleNamespace(export=export, memory=SimpleNamespace(present=contextlib.nullcontext))
    quiet = {"done": lambda text: None, "say": lambda text: None, "tracker": None}
    driver = SimpleNamespace(directory=directory, summary=directory.update_summary, **quiet)
    world = OneProcess()
    progress = SimpleNamespace(number=1, last_evaluation={}, best=[])
    parts = SimpleNamespace(
        spec=spec, world=world, world_of=lambda name: world, driver=driver, policies={"solver": policy},
        progress=progress,
    )  # fmt: skip
    train._finish(parts, finished=True)  # type: ignore[arg-type]
    assert directory.read_summary()["finished"] is True
    pushed = disk.pushed_before(directory.summary)  # the files were pushed before their folder got its name
    before = {Path(str(path).replace("/.solver.partial", "/solver")) for path in pushed}
    made = [path for path in (tmp_path / "run/models").rglob("*")]
    assert {"model.safetensors", file_checksums.SUMS, "config.json", "tokenizer.json"} <= {path.name for path in made}
    assert {*made, tmp_path / "run/models", tmp_path / "run"} <= before


def test_hostile_a_writer_that_has_ended_leaves_the_files_of_the_next_one(tmp_path, monkeypatch):
    """Its temporary directory has its final name, so a directory with the temporary name is another process's."""
    monkeypatch.setattr(output_directory, "push", lambda paths: (tmp_path / ".out.partial").mkdir(exist_ok=True))
    with fresh(tmp_path / "out", wanted_bytes=1, replace=True) as folder:
        (folder / "a").write_bytes(b"a")
    assert (tmp_path / ".out.partial").is_dir() and (tmp_path / "out/a").is_file()


def test_hostile_power_cut_after_a_conversion_or_a_checkpoint_finds_all_of_it(tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    with fresh(tmp_path / "out", wanted_bytes=1) as folder:
        (folder / "part").mkdir()
        (folder / "part/a.safetensors").write_bytes(b"a")
        file_checksums.write_sums(folder / "part")
    before = {path.relative_to(tmp_path) for path in disk.pushed_before(tmp_path / "out") if path != tmp_path.parent}
    partial = Path(".out.partial")
    own = {partial / "part", partial / "part/a.safetensors", partial / "part" / file_checksums.SUMS}
    assert own <= before and partial in before and disk.told[-1] == ("push", tmp_path)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.write(1, lambda place: (place / "x.distcp").write_bytes(b"x") and None)
    names = {path.name for path in disk.pushed_before(checkpoints.path(1))}
    assert {"x.distcp", ".iteration_000001.tmp", f".{MANIFEST}.tmp"} <= names and disk.told[-1][0] == "push"


def spoil(source: Path, target: Path) -> Path:
    """Returns a copy of a model with checksums, and then one bit another."""
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    file_checksums.write_sums(target)
    data = bytearray((target / "model.safetensors").read_bytes())
    data[-7] ^= 1
    (target / "model.safetensors").write_bytes(data)
    return target


@pytest.mark.parametrize("command", ["train", "sft", "generate", "eval", "serve"])
def test_hostile_bit_in_the_weights_is_seen_by_every_command(command, model, tmp_path, capsys):
    """Only `train` and `convert` looked at the checksums."""
    bad = spoil(model, tmp_path / "bad")
    (tmp_path / "rows.jsonl").write_text('{"question": "q", "answer": "1", "prompt": "p", "response": "r"}\n' * 4)
    (tmp_path / "t.txt").write_text("ask {question}\n")
    run = {"dir": str(tmp_path), "name": "run"}
    args = {"updates": 1, "template": str(tmp_path / "t.txt")}
    rl = {
        "roles": {"generator": {"model": {"path": str(model)}, "tandem": {"junior": str(bad)}}},
        "recipe": {"target": "megatron_rl.recipes.grpo:Grpo", "args": args},
        "data": {"path": f"{tmp_path}/rows.jsonl"}, "run": run, "preflight": {"enabled": False},
    }  # fmt: skip
    served = rl | {"engine": {"kind": "vllm", "python": "/bin/true"}}
    data, template = {"path": f"{tmp_path}/rows.jsonl"}, {"template": str(tmp_path / "t.txt")}
    configs = {
        "train": rl,
        "serve": served,
        "sft": {"model": {"path": str(bad)}, "data": {"train": f"{tmp_path}/rows.jsonl"}, "run": run},
        "generate": {"model": {"path": str(bad)}, "output": f"{tmp_path}/out", "data": data, **template},
        "eval": {
            "model": {"path": str(model)},
            "junior": {"path": str(bad)},
            "measures": ["solve", "legibility"],
            "sets": [data],
            **template,
        },
    }
    (tmp_path / "config.yaml").write_text(json.dumps(configs[command]))
    words = ["--role=generator"] if command == "serve" else []
    status = main.main([command, str(tmp_path / "config.yaml"), *words])
    error = capsys.readouterr().err
    assert status == 2 and f"{bad}/model.safetensors is not what was written" in error, error


class Written:
    """A policy whose files are written at once."""

    def save(self, directory: Path, *, background: bool = False) -> None:
        (directory / "__0_0.distcp").write_bytes(os.urandom(1000))

    def saved(self, *, wait: bool) -> bool:
        return True


@pytest.fixture
def saver(tmp_path):
    leave = SimpleNamespace(saved=lambda seconds: None)
    driver = SimpleNamespace(checkpoints=Checkpoints(tmp_path / "checkpoints", keep=5), leave=leave)
    return saving.Saver(OneProcess(), driver, Written(), background=True)  # type: ignore[arg-type]


def test_checksums_of_a_checkpoint_in_the_background_hold_no_step_up(saver, monkeypatch):
    """They were computed in the loop of training when the writers had ended."""
    assert saver.save(1, {}) == 1, "the first one is waited for"
    go, plain = threading.Event(), saving.sum_up

    def slow(directory: Path, places: dict[str, int]) -> None:
        assert go.wait(30)
        plain(directory, places)

    monkeypatch.setattr(saving, "sum_up", slow)
    assert saver.save(2, {}) is None
    assert [saver.settle(wait=False) for _ in range(3)] == [None] * 3
    found = saver._driver.checkpoints.newest()
    assert found is not None and found.number == 1, "it does not count before it has its checksums"
    go.set()
    assert saver.settle(wait=True) == 2 and saver.settle(wait=True) is None
    assert saver.save(3, {}) is None
    while saver.settle(wait=False) is None:
        pass
    newest = saver._driver.checkpoints.newest()
    assert newest is not None and newest.number == 3
    assert file_checksums.wrong(newest.path, known_digests(newest.path)) == []


def test_hostile_disk_that_fails_under_the_checksums_is_said_in_our_words(saver, monkeypatch):
    saver.save(1, {})

    def fails(directory: Path, places: dict[str, int]) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(saving, "sum_up", fails)
    saver.save(2, {})
    with pytest.raises(saving.CheckpointError, match=r"checkpoint 2 cannot be written .*Input/output error"):
        saver.settle(wait=True)
    found = saver._driver.checkpoints.newest()
    assert found is not None and found.number == 1


def torn(data: bytes) -> bytes:
    return data[:300] + b"\0\xff{[" + data[360:-20]


def test_hostile_damage_is_said_at_the_end_of_a_run_and_beside_a_page(tmp_path, caplog):
    """The page of a sweep and the console said nothing of what was left out."""
    whole = make_run(tmp_path / "whole")
    (tmp_path / "sweep").mkdir()
    changes = {"metrics.jsonl": torn, "refits.jsonl": lambda data: data[:-5]}
    run = flip(whole, tmp_path / "sweep/one", changes)
    said: list[str] = []
    console: Any = SimpleNamespace(message=said.append)
    driver = SimpleNamespace(directory=RunDirectory(run), console=console, say=said.append)
    run_setup.Driver.done(driver, "the end")  # type: ignore[arg-type]
    assert said[-1] == "done: the end" and [line[:7] for line in said[:-1]] == ["damage:"] * 2
    assert "metrics.jsonl" in said[0] and "refits.jsonl" in said[1]
    (tmp_path / "sweep/sweep.json").write_text(json.dumps([{"run": "one", "changes": {"run.seed": 1}}]))
    for place in (run, tmp_path / "sweep"):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            page = write_report(place).read_text()
        assert '<section id="damage">' in page and "metrics.jsonl" in page
        assert "leaves out what is damaged" in caplog.text and "metrics.jsonl" in caplog.text
    caplog.clear()
    assert "damage" not in write_report(whole).read_text().split("<main>")[1].split("</section>")[0].lower()
    assert not caplog.text


NOTHING = Collected(rollouts={"a": []}, metrics={})
WRITERS = {  # {name: function that writes a file, given a directory}
    "store": lambda place: IterationStore(place).put(Iteration(cycle=0, index=0, roles=("a",), number=0), NOTHING, {}),
    "rendezvous": lambda place: write_private(place / "f", {}),
    "page": lambda place: write_page(place / "f", "x.html", {}),
    "reward": lambda place: by_value.write(len, place, "r"),
    "rows": lambda place: write_parquet(place / "f", table_of([{"a": 1}])),
    "adapter": lambda place: lora_adapters.write(place, {}, Lora(), "", ""),
    "text": lambda place: (place.mkdir(exist_ok=True), write_text(place / "f", "")),
}


@pytest.mark.parametrize("name", WRITERS)
def test_twins_every_file_is_replaced_atomically_and_durably(name, tmp_path, monkeypatch):
    """The rows, pages and rewards of a run were renamed before they were on the disk, and their writers followed
    links."""
    monkeypatch.setattr(html_page, "templates", lambda: Environment(loader=DictLoader({"x.html": ""})))
    WRITERS[name](tmp_path / "first")
    file = next(iter((tmp_path / "first").glob("*.safetensors")), None) or next((tmp_path / "first").glob("*"))
    place, secret = tmp_path / "second", tmp_path / "secret"
    place.mkdir()
    secret.write_text("kept")
    for temporary in (f".{file.name}.tmp", f".{file.name}.partial", f".{file.name}.{os.getpid()}.tmp"):
        (place / temporary).symlink_to(secret)
    disk, file = Disk(monkeypatch), place / file.name
    WRITERS[name](place)
    assert file.is_file() and secret.read_text() == "kept"
    assert [path.parent for path in disk.pushed_before(file) if path.name.startswith(f".{file.name}.")] == [place]
    assert ("push", place) in disk.told[disk.told.index(("rename", file)) :]
