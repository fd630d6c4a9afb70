"""`megatron-rl fetch`, against a server that speaks the hub's API."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import COMMIT, NEWER, Repository, hub
from limits import PROCESS_S
from specs import spec_of

from megatron_rl.config.files import load
from megatron_rl.config.schema import ConfigError, EvalConfig, PromptSet, SftConfig, TrainConfig
from megatron_rl.data import hub_fetch as hub_data
from megatron_rl.data.hub_fetch import RECORD, Wanted, fetch, parse, wanted_by
from megatron_rl.data.problems import read_rows
from megatron_rl.evaluation.sets import read_sets
from megatron_rl.main import main
from megatron_rl.run import file_checksums

ROOT = Path(__file__).parents[3]
WEIGHTS = bytes(range(256)) * 400
MODEL = {
    "config.json": b'{"model_type": "qwen2"}',
    "tokenizer.json": b"{}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"a pickle",
    "modeling_own.py": b"code",
    "original/params.json": b"{}",
    RECORD: b'{"commit": "one that was never fetched"}',  # a file of the repository, which is not taken
}
DATA = {"README.md": b"---\n---\n", "data/train.parquet": WEIGHTS[:1000], "script.py": b"code"}
CONFIG = """
roles: {generator: {model: {path: org/tiny, tokenizer: org/words}}}
data: {path: org/rows}
evaluation: {sets: [{path: org/rows}]}
recipe: {target: "megatron_rl.recipes.grpo:Grpo", args: {updates: 1}}
"""


@pytest.fixture
def served(monkeypatch):
    repositories = {"models__org__tiny": Repository(MODEL), "datasets__org__rows": Repository(DATA)}
    repositories["models__org__words"] = Repository({**MODEL, "tokenizer.json": b'{"of": "words"}'})
    with hub(**repositories) as found:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", found.url)
        template = f"{found.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield found


def test_a_download_that_breaks_off_in_the_middle_is_taken_up_where_it_stood(served, tmp_path):
    """The command itself, with HF_ENDPOINT, as on a login node."""
    large = WEIGHTS * 120  # the library asks for the rest in steps of 10 MiB
    served.repositories["models/org/tiny"] = Repository({**MODEL, "model.safetensors": large})
    served.breaks["model.safetensors"] = len(large) - 1000
    words = [sys.executable, "-m", "megatron_rl.main", "fetch", "org/tiny", "--to", str(tmp_path)]
    environment = {**os.environ, "HF_ENDPOINT": served.url, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=PROCESS_S)
    assert done.returncode == 0, done.stderr
    ranges = [part for file, part in served.downloads() if file == "model.safetensors" and part]
    assert ranges and all(int(part.removeprefix("bytes=").rstrip("-")) > 0 for part in ranges), served.downloads()
    folder = tmp_path / "org/tiny"
    there = {path.name for path in folder.iterdir() if path.is_file()}
    assert there == {"config.json", "tokenizer.json", "model.safetensors", RECORD, file_checksums.SUMS}
    assert (folder / "model.safetensors").read_bytes() == large and not file_checksums.wrong_of(folder)
    record = json.loads((folder / RECORD).read_text())
    assert (record["repository"], record["commit"], record["hub"]) == ("org/tiny", COMMIT, served.url)
    assert record["files"]["model.safetensors"] == {
        "bytes": len(large),
        "sha256": file_checksums.digest(folder / "model.safetensors"),
    }
    assert f"commit {COMMIT[:12]}" in done.stdout and str(folder) in done.stdout


def test_a_config_is_fetched_and_the_overrides_are_those_that_it_needs(served, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(CONFIG)
    assert main(["fetch", str(tmp_path / "run.yaml"), "--to", str(tmp_path / "hub")]) == 0
    told = capsys.readouterr().out
    overrides = shlex.split(told.split("reads from there:\n")[1].replace("\\\n", " "))
    config = load(TrainConfig, [tmp_path / "run.yaml"], overrides)
    role = config.roles["generator"].model
    held = spec_of(config).sets["evaluation.sets.rows"]
    assert role.tokenizer is not None
    for path in (role.path, role.tokenizer, config.data.path, held.path):
        assert Path(path).is_relative_to(tmp_path) and (Path(path) / RECORD).is_file()
    assert (Path(config.data.path) / "data/train.parquet").read_bytes() == DATA["data/train.parquet"]
    assert not (Path(role.tokenizer) / "model.safetensors").exists(), "a tokenizer needs no weights"
    assert wanted_by(config) == [], "all of it is here now"


def row(**values: object) -> bytes:
    return json.dumps(values).encode() + b"\n"


BENCHMARKS = {  # in the forms of the hub: one file, a folder for each subset, a file that is named in the table
    "HuggingFaceH4/MATH-500": {"test.jsonl": row(problem="P", answer="1", solution="s")},
    "openai/gsm8k": {
        "README.md": b"---\nconfigs:\n- config_name: main\n  data_files:\n  - {split: test, path: main/test-*}\n"
        b"- config_name: socratic\n  data_files:\n  - {split: test, path: socratic/test-*}\n---\n",
        "main/test-00000.jsonl": row(question="Q", answer="#### 2"),
        "socratic/test-00000.jsonl": row(question="another", answer="#### 3"),
    },
    "voidful/StrategyQA": {
        "strategyqa_train.json": b"[" + row(question="P?", answer=True, facts=["F."]) + b"]",
        "strategyqa_train_paragraphs.json": b"[" + row(title="T") + b"]",
    },
    "cruxeval-org/cruxeval": {"data/cases.jsonl": row(code="def f(x): return x", input="1", output="1")},
}
EVAL = "model: {path: org/tiny}\nsets: [math500, gsm8k, strategyqa_train]\n"


def test_the_benchmarks_of_an_evaluation_are_fetched_and_read_where_they_lie(served, tmp_path, capsys):
    """`fetch` knew of models and problem sets alone: on nodes without a network an evaluation had no benchmarks."""
    pytest.importorskip("datasets")
    for name, files in BENCHMARKS.items():
        served.repositories[f"datasets/{name}"] = Repository(files)
    (tmp_path / "eval.yaml").write_text(EVAL)
    words, to = ["fetch", str(tmp_path / "eval.yaml")], ["--to", str(tmp_path / "hub")]
    assert main([*words, *to]) == 0
    overrides = shlex.split(capsys.readouterr().out.split("reads from there:\n")[1].replace("\\\n", " "))
    config = load(EvalConfig, [tmp_path / "eval.yaml"], overrides)
    assert config.data_dir == str(tmp_path / "hub/datasets") and config.model.path == str(tmp_path / "hub/org/tiny")
    found = {
        one.settings.name: [problem.values["answer"] for problem in one.problems]
        for one in read_sets(spec_of(config).evaluated)
    }
    assert found == {"math500": ["1"], "gsm8k": ["2"], "strategyqa_train": ["true"]}
    number = len(served.asked)
    assert main([*words, *overrides, *to]) == 0 and len(served.asked) == number
    assert "the config names nothing of the hub" in capsys.readouterr().out
    two = ["sets=[cruxeval,cruxeval_input]", "limit=1"]
    assert main([*words, *overrides, *two, *to]) == 0
    assert capsys.readouterr().out.count("cruxeval-org/cruxeval fetched") == 1, "both are of one data set"


def test_the_record_is_no_row_of_a_fetched_data_set(served, tmp_path):
    """`datasets` read FETCHED.json beside the rows of a data set whose files have no split in their names."""
    pytest.importorskip("datasets")
    served.repositories["datasets/org/plain"] = Repository(
        {"problems.json": b"[" + row(question="Q", answer="1") + b"]"}
    )
    folder = fetch(parse("dataset:org/plain"), tmp_path).folder
    [problem] = read_rows(PromptSet(path=str(folder)), lambda values: values)
    assert problem.values == {"question": "Q", "answer": "1"}


def test_what_is_there_needs_no_network(served, tmp_path, capsys):
    fetch(parse("org/tiny"), tmp_path)
    number = len(served.asked)
    again = fetch(parse("org/tiny"), tmp_path, endpoint="http://127.0.0.1:9")
    assert not again.new and again.commit == COMMIT and len(served.asked) == number
    assert main(["fetch", "org/tiny", "--to", str(tmp_path)]) == 0
    assert "is here already: 3 files" in capsys.readouterr().out
    (tmp_path / "org/tiny/model.safetensors").write_bytes(WEIGHTS[:10])
    (tmp_path / "org/tiny/model.safetensors").unlink()
    assert fetch(parse("org/tiny"), tmp_path).new, "a file is missing"


def test_a_folder_stays_at_its_commit_until_a_revision_is_named(served, tmp_path):
    fetch(parse("org/tiny"), tmp_path)
    served.repositories["models/org/tiny"] = Repository({**MODEL, "config.json": b"{}"}, commits=(COMMIT, NEWER))
    assert fetch(parse("org/tiny"), tmp_path).commit == COMMIT
    moved = fetch(parse("org/tiny@main"), tmp_path)
    assert moved.new and moved.commit == NEWER and (tmp_path / "org/tiny/config.json").read_bytes() == b"{}"


SHARDS = {f"train-0000{i}-of-00002.jsonl": row(question=q, answer="1") for i, q in enumerate("AB")}
WHOLE = {"train-00000-of-00001.jsonl": b"".join(SHARDS.values())}


def questions(folder: Path) -> list[str]:
    return [one.values["question"] for one in read_rows(PromptSet(path=str(folder), split="train"), lambda row: row)]


def cut_after(monkeypatch, *names: str) -> None:
    """Lets the next download end when it has brought these files."""
    whole = hub_data.snapshot_download

    def cut(name, *, allow_patterns, **settings):
        monkeypatch.setattr(hub_data, "snapshot_download", whole)
        if names:
            whole(name, allow_patterns=[*names], **settings)
        raise ConnectionError("cut")

    monkeypatch.setattr(hub_data, "snapshot_download", cut)


def test_files_that_another_revision_does_not_have_are_removed(served, tmp_path):
    """`datasets` reads every file of a folder: the rows of the old revision came twice."""
    pytest.importorskip("datasets")
    served.repositories["datasets/org/rows"] = Repository({**SHARDS, "own/kept.json": b"[]"})
    folder = fetch(parse("dataset:org/rows"), tmp_path).folder
    (folder / "notes.txt").write_text("the user's")
    (tmp_path / "outside.json").write_text("the user's")
    record = json.loads((folder / RECORD).read_text())
    record["files"] |= {"../../../outside.json": {}, str(tmp_path / "outside.json"): {}, "own": {}}
    (folder / RECORD).write_text(json.dumps(record))
    newer = Repository({**WHOLE, "own/kept.json": b"[]"}, commits=(COMMIT, NEWER))
    served.repositories["datasets/org/rows"] = newer
    assert set(fetch(parse("dataset:org/rows@main"), tmp_path).files) == newer.files.keys()
    assert questions(folder) == ["A", "B"] and (folder / "own/kept.json").is_file()
    assert (folder / "notes.txt").is_file() and (tmp_path / "outside.json").is_file()
    assert not fetch(parse("dataset:org/rows"), tmp_path).new


@pytest.mark.parametrize("brought", [[], ["model.safetensors"]])
def test_a_change_of_revision_that_was_cut_goes_on(served, tmp_path, monkeypatch, brought):
    """The old record stayed, and the sizes are the same: files of two commits were `here already`."""
    newer = {**MODEL, "model.safetensors": bytes(reversed(WEIGHTS)), "tokenizer.json": b"[]"}
    folder = fetch(parse("org/tiny"), tmp_path).folder
    served.repositories["models/org/tiny"] = Repository(newer, commits=(COMMIT, NEWER))
    cut_after(monkeypatch, *brought)
    with pytest.raises(ConfigError, match="give the same command again"):
        fetch(parse("org/tiny@main"), tmp_path)
    done = fetch(parse("org/tiny"), tmp_path)
    assert done.new and done.commit == NEWER and all((folder / n).read_bytes() == newer[n] for n in done.files)
    assert not fetch(parse("org/tiny"), tmp_path).new and not file_checksums.wrong_of(folder)


def test_what_downloads_that_were_cut_have_left_is_removed(served, tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    served.repositories["datasets/org/rows"] = Repository(SHARDS)
    cut_after(monkeypatch, "train-00000*")
    with pytest.raises(ConfigError, match="cut"):
        fetch(parse("dataset:org/rows"), tmp_path)
    newer = Repository({"train-00000-of-00003.jsonl": row(question="C", answer="1")}, commits=(COMMIT, NEWER))
    served.repositories["datasets/org/rows"] = newer
    cut_after(monkeypatch, "train-00000*")
    with pytest.raises(ConfigError, match="cut"):
        fetch(parse("dataset:org/rows@main"), tmp_path)
    served.repositories["datasets/org/rows"] = Repository(WHOLE, commits=(NEWER, "a" * 40))
    assert questions(fetch(parse("dataset:org/rows@main"), tmp_path).folder) == ["A", "B"]


def test_a_first_download_that_was_cut_goes_on_with_its_commit(served, tmp_path, monkeypatch):
    cut_after(monkeypatch, "config.json", "*.safetensors")
    with pytest.raises(ConfigError, match="cut"):
        fetch(parse("org/tiny"), tmp_path)
    served.repositories["models/org/tiny"] = Repository(MODEL, commits=(COMMIT, NEWER))
    done = fetch(Wanted(name="org/tiny", weights=False), tmp_path)
    assert done.new and done.commit == COMMIT and "model.safetensors" in done.files, "weights that are there are kept"


def test_a_name_without_a_kind_may_be_a_data_sets(served, tmp_path):
    assert fetch(parse("org/rows"), tmp_path).folder == tmp_path / "datasets/org/rows"
    assert not (tmp_path / "datasets/org/rows/script.py").exists()
    assert not fetch(parse("dataset:org/rows"), tmp_path).new


def test_a_file_that_came_damaged_is_removed(served, tmp_path):
    for name in ("model.safetensors", "config.json"):
        served.damaged = {name}
        with pytest.raises(ConfigError, match=f"{name} came damaged and was removed; .* give the same command again"):
            fetch(parse("org/tiny"), tmp_path / name)
        folder = tmp_path / name / "org/tiny"
        assert not (folder / name).exists() and "files" not in json.loads((folder / RECORD).read_text())
        served.damaged = set()
        assert fetch(parse("org/tiny"), tmp_path / name).new and (folder / name).read_bytes() == MODEL[name]


def test_a_name_that_cannot_be_had_is_told_with_the_cure(served, tmp_path):
    served.repositories["models/org/asks"] = Repository(MODEL, gated=True)
    served.repositories["models/org/pickled"] = Repository({n: c for n, c in MODEL.items() if n != "model.safetensors"})
    served.repositories["models/org/quantized"] = Repository({"model.gguf": b"GGUF"})
    for word, says in {
        "org/quantized": "org/quantized has no config.json: name a model of transformers, or a revision that has it",
        "org/none": "the hub shows no model and no data set org/none: look at the spelling; .*HF_TOKEN",
        "dataset:org/tiny": "the hub shows no data set org/tiny",
        "org/asks": "org/asks asks for consent: accept its terms on its page at the hub, .*HF_TOKEN",
        "org/tiny@v9": "org/tiny has no revision 'v9': give a branch",
        "org/pickled": "org/pickled has no .*safetensors",
        "org/bad--name..": "is no name of the hub",
    }.items():
        with pytest.raises(ConfigError, match=says):
            fetch(parse(word), tmp_path)
    for word in ("tiny", "space:org/tiny", "a/b/c"):
        with pytest.raises(ConfigError, match="give OWNER/NAME of the hub"):
            parse(word)


def test_a_hub_that_cannot_be_reached_is_told_with_the_cure(served, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"org/tiny could not be fetched .*HTTPS_PROXY or HF_ENDPOINT"):
        fetch(parse("org/tiny"), tmp_path, endpoint="http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE forbids to fetch it: unset it"):
        fetch(parse("org/tiny"), tmp_path)


def test_a_judge_behind_a_url_is_fetched_without_weights(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "roles:\n  writer: {model: {path: org/tiny}}\n  same: {same_as: writer}\n  drawn: {model: {path: org/r, init: "
        "random}}\n  judge: {policy: none, model: {path: org/judge}, endpoint: {url: 'https://judge.example/v1', "
        "model: j}}\n  pair: {model: {path: org/senior}, tandem: {junior: org/judge}}\n"
        "data: {path: reasoning_gym:chain_sum}\nrecipe: {target: 'a:B'}\n"
    )
    found = {each.name: each for each in wanted_by(load(TrainConfig, [tmp_path / "run.yaml"]))}
    assert {name: each.weights for name, each in found.items()} == {
        "org/tiny": True, "org/r": False, "org/judge": True, "org/senior": True,
    }  # fmt: skip
    assert found["org/judge"].keys == ("roles.judge.model.path", "roles.pair.tandem.junior")
    [sft] = [
        each
        for each in wanted_by(
            load(SftConfig, overrides=["model.path=a/b", "data.train=a/rows", "data.validation=v.jsonl"])
        )
        if each.kind == "dataset"
    ]
    assert sft == Wanted(name="a/rows", kind="dataset", keys=("data.train",))
