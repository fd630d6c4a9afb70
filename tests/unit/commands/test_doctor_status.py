"""Tests `megatron-rl doctor`, `status`, `stop` and `logs` on real directories and processes, with a fake Slurm."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, environment
from limits import PROCESS_S
from rich.console import Console
from specs import spec_of

from megatron_rl.cluster import job_slices, profile
from megatron_rl.cluster.profile import Profile
from megatron_rl.cluster.slurm_job import SlurmJob
from megatron_rl.config import files as config_files
from megatron_rl.config.schema import ConfigError, TrainConfig
from megatron_rl.engines.server_registry import Announcement, Listing, ServerRegistry
from megatron_rl.jobs import doctor, status, submit, versions
from megatron_rl.jobs.doctor import Check
from megatron_rl.main import main
from megatron_rl.run.checkpoint import Checkpoints, write_json
from megatron_rl.run.metrics import Tracker
from megatron_rl.run.run_directory import RunDirectory
from megatron_rl.session.server_connection import ENGINES

TANGO = ROOT / "examples/published/tango_qwen2.5_7b.yaml"
JOB = SlurmJob(id="17_0", restart=0, node="n1", step=None, end=None, warning_s=None)
ROLES = ("generator", "verifier")
IN_JOB = {"SLURM_JOB_ID": "17"}
QWEN = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
    "num_key_value_heads": 4, "num_hidden_layers": 28, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip


def tango(directory: Path, *overrides: str) -> TrainConfig:
    settings = [f"run.dir={directory}", "run.name=a", "engine={kind: embedded}", *overrides]
    return config_files.load(TrainConfig, [TANGO], settings)


def examine(
    config: TrainConfig | None, site: Profile | None = None, quick: bool = False, **words: str
) -> dict[str, Check]:
    return {
        check.what: check for check in doctor.examine(config and spec_of(config), site, quick=quick, environment=words)
    }


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """A function that installs an nvidia-smi which lists `count` GPUs, or fails."""
    place = tmp_path / "driver"
    place.mkdir()
    monkeypatch.setenv("PATH", str(place), prepend=os.pathsep)

    def shows(count: int, status: int = 0) -> None:
        (place / "nvidia-smi").write_text(
            f'#!/bin/bash\nfor i in $(seq {count}); do echo "A100, 81920 MiB, 550.1, 0"; done\nexit {status}\n'
        )
        (place / "nvidia-smi").chmod(0o755)

    return shows


def test_a_healthy_host_has_nothing_wrong(tmp_path):
    found = examine(tango(tmp_path, *(f"roles.{name}.model.path=org/a" for name in ROLES)), profile.read("cpu"))
    assert {
        "Python",
        "torch",
        "megatron-core",
        "transformers",
        "profile host",
        "run directory",
        "space there",
    } <= found.keys()
    assert [check for check in found.values() if check.verdict == "wrong"] == []
    assert not [*tmp_path.iterdir()], "it leaves nothing behind"


def test_a_local_path_that_is_not_there_is_wrong_and_a_hub_name_is_a_note(tmp_path):
    model = f"{tmp_path}/no_such_model"
    found = examine(
        tango(
            tmp_path,
            f"data.path={tmp_path}/no.jsonl",
            f"roles.verifier.model.path={model}",
            "roles.generator.model.path=org/a",
        ),
        quick=True,
    )
    lost = found["roles.verifier.model.path"]
    assert lost == Check(
        lost.what, f"{lost.what} = {model} is not there yet", "wrong", f"put it there, or mend {lost.what}"
    )
    assert found["data"].verdict == "wrong" and found["roles.generator.model.path"].verdict == "note"


def test_gpus_are_counted_against_what_the_job_was_given(gpus):
    site = profile.read("a100")
    gpus(8)
    assert examine(None, site, **IN_JOB)["GPUs"] == Check("GPUs", "8 x A100, 81920 MiB, 550.1, 0")
    gpus(7)
    lost = examine(None, site, **IN_JOB)["GPUs"]
    assert lost.verdict == "wrong" and "8 here" in lost.cure
    assert examine(None, site, **IN_JOB, SLURM_GPUS_ON_NODE="8")["GPUs"].verdict == "wrong"
    assert examine(None, site)["GPUs"].verdict == "ok", "a login node may have fewer"
    gpus(1)
    assert examine(None, site, **IN_JOB, SLURM_GPUS_ON_NODE="1")["GPUs"].verdict == "ok"
    gpus(0, status=9)
    assert "drain" in examine(None, site, **IN_JOB)["GPUs"].cure


def test_without_a_driver_only_a_job_that_wants_gpus_is_wrong(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert examine(None, profile.read("a100"), **IN_JOB)["GPUs"].verdict == "wrong"
    assert examine(None, profile.read("a100"))["GPUs"].verdict == "note"
    assert examine(None, profile.read("cpu"), **IN_JOB)["GPUs"].verdict == "note"
    assert examine(None, None)["Slurm"].verdict == "note"


def test_an_interface_that_is_not_there_is_wrong_within_a_job():
    site = replace(profile.read("cpu"), host="ib7")
    assert examine(None, site, **IN_JOB)["profile host"].verdict == "wrong"
    assert examine(None, site)["profile host"].verdict == "note"
    assert examine(None, GLOO_SOCKET_IFNAME="ib7,eth0", **IN_JOB)["GLOO_SOCKET_IFNAME"].verdict == "wrong"
    alone = examine(None, GLOO_SOCKET_IFNAME="lo", **IN_JOB)["GLOO_SOCKET_IFNAME"]
    assert alone.verdict == "note" and "other nodes do not reach this" in alone.cure


def test_a_run_directory_that_cannot_be_written_is_wrong(tmp_path):
    (tmp_path / "file").touch()
    found = examine(tango(tmp_path / "file"))["run directory"]
    assert found.verdict == "wrong" and "run.dir" in found.cure


def test_two_nodes_look_at_one_run_directory_at_a_time(tmp_path):
    """Two nodes with the same host name had the same probe file, and renamed each other's."""
    code = "import sys; from pathlib import Path; from megatron_rl.jobs.doctor import _files\n"
    code += "print([c for _ in range(60) for c in _files(Path(sys.argv[1]), True) if c.verdict == 'wrong'])"
    words = [sys.executable, "-c", code, str(tmp_path)]
    both = [subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=PROCESS_S)[0] for process in both] == ["[]\n", "[]\n"]
    assert not [*tmp_path.iterdir()]


def test_the_interpreter_of_the_engines_is_tried(tmp_path):
    def found(python: str) -> Check:
        return examine(tango(tmp_path, "engine.kind=vllm", f"engine.python={python}"))["engine.python"]

    assert found("/nowhere/python").verdict == "wrong"
    assert found(environment_with(tmp_path / "bare")).finding == f"{tmp_path}/bare/python has no vllm"
    ready = environment_with(tmp_path / "ready", vllm="0.32.1")
    assert found(ready) == Check("engine.python", f"{ready}: vllm 0.32.1")
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/bash\necho no such library >&2\nexit 1\n")
    broken.chmod(0o755)
    assert found(str(broken)).verdict == "wrong" and "no such library" in found(str(broken)).finding


def environment_with(directory: Path, **versions: str) -> str:
    """Makes an interpreter that finds packages of these versions, by their metadata alone. Returns its path."""
    for name, version in versions.items():
        place = directory / "packages" / f"{name}-{version}.dist-info"
        place.mkdir(parents=True)
        (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    directory.mkdir(exist_ok=True)
    python = directory / "python"
    python.write_text(f'#!/bin/bash\nPYTHONPATH={directory}/packages exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    return str(python)


def test_one_torch_and_one_nccl_for_trainer_and_engines(tmp_path, monkeypatch):
    """vLLM pins a torch, and torch pins an NCCL: where the trainer has others, NCCL refuses to connect them."""
    here = {"torch": "2.13.0", "nvidia-nccl-cu13": "2.29.7"}
    monkeypatch.setattr(doctor, "packages", lambda: here)

    def found(transport: str, torch: str, nccl: str) -> Check:
        python = environment_with(
            tmp_path / f"{torch}_{nccl}_{transport}", vllm="0.32.0", torch=torch, nvidia_nccl_cu13=nccl
        )
        words = ("engine.kind=vllm", f"engine.python={python}", f"refit.transport={transport}")
        return examine(tango(tmp_path, *words))["torch of trainer and engines"]

    assert found("auto", "2.13.0", "2.29.7") == Check("torch of trainer and engines", "2.13.0 in both, NCCL 2.29.7")
    older = found("auto", "2.11.0", "2.27.5")
    assert older.finding == "torch 2.13.0 here, 2.11.0 there; NCCL 2.29.7 here, 2.27.5 there"
    assert older.verdict == "note" and "TCP" in older.cure
    assert found("nccl", "2.13.0", "2.27.5").verdict == "wrong"


def test_transformer_engine_is_held_to_what_megatron_core_asks_for(tmp_path, monkeypatch):
    """The bound is read from the metadata of the megatron-core that is installed."""
    asked = versions.bounds("megatron-core", "transformer-engine")
    assert asked is not None and asked.specifier.contains("2.11.0") and not asked.specifier.contains("2.13.0")
    for version, verdict in (("2.11.0", "ok"), ("2.20.2", "note")):
        monkeypatch.setattr(doctor, "packages", lambda version=version: {"transformer-engine": version})
        assert examine(None)["transformer-engine"].verdict == verdict


def test_a_relative_engine_python_counts_from_the_checkout():
    site = profile.read("a100")
    for kind in ("vllm", "sglang"):
        servers = tango(Path("runs"), f"engine.kind={kind}").engine
        assert submit.engine_python(servers, site) == str(ROOT / f".venv-{kind}/bin/python")
        assert submit.engine_python(replace(servers, python="x/y"), site) == str(ROOT / "x/y")
        assert submit.engine_python(replace(servers, python="python3"), site) == "python3"


def test_the_interpreter_of_a_container_is_looked_for_in_the_job(tmp_path):
    """A login node cannot tell what an image holds, and said that it is wrong."""
    container = profile.Container(runtime="apptainer", image="/shared/x.sif")
    inside = replace(profile.read("a100"), container=container, engine_python="/opt/vllm/bin/python")
    config = tango(tmp_path, "engine.kind=vllm")
    assert examine(config, inside)["engine.python"] == Check(
        "engine.python", "/opt/vllm/bin/python, in the container", "note", "the run's job looks for it there"
    )
    assert examine(config, inside, **IN_JOB)["engine.python"].verdict == "wrong", "there is none here"
    unknown = examine(config, replace(inside, engine_python=None))["engine.python"]
    assert unknown.verdict == "wrong" and "no engine_python: name the interpreter in it" in unknown.cure


def test_faults_of_a_disk_that_holds_fewer_checkpoints_than_run_keep_are_wrong(tmp_path, monkeypatch):
    """A 7B role in bfloat16 saves 14 bytes a parameter: 100 GiB; only the first GiB of free space was looked at."""
    (tmp_path / "model").mkdir()
    write_json(tmp_path / "model/config.json", QWEN)
    words = [f"roles.{role}.model.path={tmp_path}/model" for role in ("generator", "verifier")]
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=600 * 2**30))
    found = examine(tango(tmp_path, *words, "run.keep=2"), profile.read("a100"))
    assert found["model of generator"].finding == "7.62 B parameters (qwen2)"
    wrong = found["space there"]
    assert wrong.verdict == "wrong" and "3 more checkpoints of 199 GiB" in wrong.finding and "run.keep" in wrong.cure
    assert examine(tango(tmp_path, *words, "run.keep=1"), profile.read("a100"))["space there"].verdict == "ok"


def test_faults_of_a_disk_for_the_model_of_a_hub_name_are_wrong_as_plan_says(tmp_path, monkeypatch):
    """doctor said "67 GiB free, ok" for a model that is not here, whose run takes 337 GB."""
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=67 * 2**30))
    words = [f"roles.{role}.model.path=Qwen/Qwen2.5-7B" for role in ("generator", "verifier")]
    wrong = examine(tango(tmp_path, *words, "run.keep=1"), profile.read("a100"))["space there"]
    assert wrong.verdict == "wrong" and "2 more checkpoints of 199 GiB" in wrong.finding
    words = [f"roles.{role}.model.path=org/a" for role in ("generator", "verifier")]
    unknown = examine(tango(tmp_path, *words), profile.read("a100"))["space there"]
    assert (
        unknown.verdict == "note"
        and unknown.finding == "67 GiB free; the run may need more: the size of org/a is unknown"
    )


@pytest.mark.parametrize(
    ("text", "said"), [('{"model_type": "gpt2"}', "'gpt2' is not supported"), ("half", "Expecting value")]
)
def test_a_model_that_cannot_be_read_is_one_line_of_the_table(tmp_path, text, said):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(text)
    found = examine(tango(tmp_path, f"roles.generator.model.path={tmp_path}/model"), profile.read("cpu"))
    assert found["model of generator"].verdict == "wrong" and said in found["model of generator"].finding
    assert "run directory" in found


def test_doctor_prints_what_is_wrong_last_and_says_so_by_its_status(tmp_path, capsys, monkeypatch):
    assert main(["doctor", "--profile=cpu", "--quick"]) == 0
    assert "checks passed" in capsys.readouterr().out
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    assert main(["doctor", "--quick"]) == 1
    said = capsys.readouterr().out
    assert "n7" in said and "ib7 is neither an address nor an interface" in said and "transformers" not in said


# ---- status, stop, logs


@pytest.fixture
def run(tmp_path) -> Path:
    """A run with two iterations of four done, one of them saved, by job 17."""
    directory = tmp_path / "a"
    (directory / "jobs").mkdir(parents=True)
    (directory / "logs").mkdir()
    RunDirectory(directory).config.write_text("seed: 1\n")
    (directory / "jobs" / submit.SUBMITTED).write_text(
        json.dumps({"script": "train.sbatch", "job": "17", "time": 0.0}) + '\n{"scr'
    )
    job_slices.begin(directory, JOB, "n[1-2]", 3)
    with Tracker(RunDirectory(directory).metrics) as tracker:
        for iteration in range(2):
            metrics = {"loss": 0.5, "reward/trained": 0.5, "staleness": 1.0, "seconds/play": 2.0, "seconds/train": 1.0}
            tracker.log(iteration, "generator", metrics, iteration=iteration)
        tracker.log(2, "eval", {"accuracy": 0.25}, iteration=2)
    checkpoints = Checkpoints(RunDirectory(directory).checkpoints)
    (checkpoints.begin(1) / "weights").write_text("w")
    checkpoints.commit(1)
    RunDirectory(directory).update_summary({"planned": 4})
    return directory


RUNNING = "echo '17_0|a-train|RUNNING|n[1-2]|0:50:00|None|2026-01-01T00:00:00'"


def shown(directory: Path, **options: float) -> str:
    console = Console(record=True, width=200, file=open(os.devnull, "w"))  # noqa: SIM115
    status.show(status.read(directory, **options), console)
    return console.export_text()


def test_a_running_run_is_shown_with_its_job_rate_and_last_figures(run, fake_slurm):
    answers, asked = fake_slurm
    answers(squeue=RUNNING)
    said = shown(run)
    assert "running; 2 of 4 iterations, 1 saved; 3.0 s an iteration, 0 min to go" in said
    assert "0:50:00" in said and "it runs, or has just ended" in said
    assert "generator at iteration 2 (cycle 2): loss 0.5, reward/trained 0.5, staleness 1" in said
    assert "eval after iteration 2: accuracy 0.25" in said
    assert any("--jobs=17 " in line for line in asked())


def test_a_run_whose_jobs_are_gone_ended_without_a_word(run, fake_slurm):
    answers, _ = fake_slurm
    for body in ("true", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"):
        answers(squeue=body)
        said = shown(run)
        assert status.NO_JOBS in said and "ended without a word" in said
    RunDirectory(run).update_summary({"finished": True})
    assert "finished; 2 of 4" in shown(run)


def test_a_busy_slurmctld_hides_the_jobs_alone(run, fake_slurm):
    answers, _ = fake_slurm
    answers(squeue="echo 'slurm_load_jobs error: Socket timed out' >&2; exit 1")
    said = shown(run)
    assert "what its jobs do is not known" in said and "Socket timed out" in said
    assert "1 saved" in said and "it runs, or has just ended" in said


def test_faults_status_prints_names_as_they_are_and_leaves_deep_files_out(run, fake_slurm):
    """`[/]` in a name ended in a MarkupError, and a file that is nested without end in a RecursionError."""
    answers, _ = fake_slurm
    answers(squeue=RUNNING)
    told = Listing(
        role="generator", replica=0, url="http://[/bold]:1", incarnation="a" * 10, log="", node="[red]n", job="[/]"
    )
    ServerRegistry(run / ENGINES).write(told)
    (run / ENGINES / "generator-1.json").write_text("[" * 100_000)
    with RunDirectory(run).metrics.open("a") as file:
        file.write("[" * 100_000 + "\n")
    odd = run.rename(run.with_name("run[red]"))
    said = shown(odd, look_s=0.0)
    assert all(text in said for text in ("http://[/bold]:1", "[red]n", "[/]", "run[red]", "damaged"))


def test_engines_that_beat_live_and_others_are_silent(run, fake_slurm):
    registry = ServerRegistry(run / ENGINES)
    alive = Listing(
        role="generator", replica=0, url="http://h:1", incarnation="aaaaaaaaaa", log="", node="n1", job="18_0"
    )
    registry.write(replace(alive, replica=1, incarnation="bbbbbbbbbb"))
    with Announcement(registry, alive, lambda: True, beat_s=0.02):
        found = dict((listing.name, lives) for listing, lives in status.read(run, look_s=0.5).engines)
    assert found == {"generator-0": True, "generator-1": False}
    assert "silent" in shown(run, look_s=0.0)


def test_stop_leaves_running_jobs_to_leave_and_survives_jobs_that_slurm_forgot(run, fake_slurm, capsys):
    answers, asked = fake_slurm
    answers(squeue=RUNNING, scancel="echo 'Invalid job id specified' >&2; exit 1")
    assert main(["stop", str(run)]) == 0
    assert (run / "stop").exists() and not [line for line in asked() if line.startswith("scancel")]
    answers(squeue=RUNNING.replace("RUNNING", "PENDING"))
    assert main(["stop", str(run)]) == 0 and asked()[-1] == "scancel --state=PENDING 17"
    assert main(["stop", str(run), "--now"]) == 0 and asked()[-1] == "scancel 17"
    assert "checkpoint has 1 iterations" in capsys.readouterr().out


def test_a_sweep_is_stopped_and_shown_run_by_run(run, fake_slurm, capsys):
    answers, _ = fake_slurm
    sweep = run.parent
    (run / "jobs" / submit.SUBMITTED).unlink()
    shutil.copytree(run, sweep / "001")
    run.rename(sweep / "000")
    write_json(sweep / "sweep.json", [{"run": f"{n:03d}", "changes": {"run.seed": n}} for n in range(2)])
    (sweep / "jobs").mkdir()
    (sweep / "jobs" / submit.SUBMITTED).write_text('{"script": "sweep.sbatch", "job": "17", "time": 0}\n')
    engines = RUNNING.replace("17_0", "18_1").replace("a-train", "a-000-engines")
    answers(squeue=f"{RUNNING.replace('a-train', 'a-sweep')}; {engines}")
    assert main(["status", str(sweep)]) == 0
    first, second = [line for line in capsys.readouterr().out.splitlines() if "run.seed" in line]
    assert "running" in first and "2 of 4" in first
    assert "running" not in second, "the second server of the first run is not the second run"
    (sweep / "001/config.yaml").unlink()
    assert main(["status", str(sweep)]) == 0 and "not begun" in capsys.readouterr().out
    assert main(["stop", str(sweep)]) == 0
    assert [(sweep / name / "stop").exists() for name in ("000", "001")] == [True, True]
    assert submit.runs_of(sweep) == [sweep / "000", sweep / "001"]


def test_logs_are_ends_of_the_files_asked_for(run, capsys):
    (run / "logs/train-17_0.out").write_text("one\ntwo\nthree\n")
    (run / "logs/engine_generator_0.log").write_bytes(b"caf\xe9\n")
    assert main(["logs", str(run), "--of", "train", "--lines", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["two", "three"]
    assert main(["logs", str(run), "--of", "train", "--lines", "0"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert main(["logs", str(run)]) == 0 and "caf\ufffd" in capsys.readouterr().out
    assert main(["logs", str(run / "none")]) == 2 and "no run directory" in capsys.readouterr().err


def test_following_ends_with_the_run(run, monkeypatch):
    monkeypatch.setattr(status, "FOLLOW_S", 0.01)
    log, found = run / "logs/train.out", list[str]()
    log.write_text("before\n")
    thread = threading.Thread(target=lambda: found.extend(status.follow(run, "train")))
    thread.start()
    deadline = time.monotonic() + PROCESS_S
    while thread.is_alive() and time.monotonic() < deadline:
        with log.open("a") as file:
            file.write("after\n")
        RunDirectory(run).update_summary({"finished": True})
        thread.join(0.05)
    assert not thread.is_alive() and set(found) <= {"train: after"}


def test_what_is_no_run_is_said(tmp_path):
    with pytest.raises(ConfigError, match="no run directory"):
        status.read(tmp_path / "none")
    with pytest.raises(ConfigError, match="no run directory"):
        status.stop(tmp_path / "none", now=False)


def test_doctor_names_a_recipe_that_cannot_be_built(tmp_path, capsys):
    """It ended with a traceback, and a job that was wrong everywhere was started again."""
    (tmp_path / "run.yaml").write_text(
        "roles: {generator: {model: {path: x}}}\ndata: {path: x.jsonl}\n"
        "recipe: {target: 'no_such_module:Recipe', args: {updates: 1}}\n"
    )
    assert main(["doctor", str(tmp_path / "run.yaml"), "--quick"]) == 2
    assert "cannot import no_such_module" in capsys.readouterr().err
