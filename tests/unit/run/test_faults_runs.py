"""Tests of faults of a run's start and end: names, passwords, stop files, and messages that led in a circle."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import task
from conftest import ROOT, environment, program

from megatron_rl.cluster.profile import Profile, read
from megatron_rl.cluster.slurm_job import Leave, job_from
from megatron_rl.config import files as config_files
from megatron_rl.config.schema import ConfigError, EvalConfig, GenerateConfig, Run, SftConfig, TrainConfig
from megatron_rl.data.tiny import write_tiny_model
from megatron_rl.jobs import doctor, submit
from megatron_rl.main import main
from megatron_rl.planning import totals
from megatron_rl.run.checkpoint import Checkpoints
from megatron_rl.run.run_directory import RunError, check_start, only_one, open_run

SFT = ROOT / "examples/miniatures/last_letter/sft.yaml"


def test_cases_of_a_run_that_failed_before_its_first_checkpoint_start_anew_by_the_same_command(tmp_path):
    """`auto` said "continue by run.resume=must", and `must` said "start with run.resume=auto"."""
    run = Run(dir=str(tmp_path), name="r")
    for number, config in enumerate(("lr: 1", "lr: 2", "lr: 3"), 1):
        directory = open_run(run, config)
        assert not directory.metrics.exists() and directory.config.read_text() == config
        directory.metrics.write_text(f"{number}\n")
        (directory.rollouts / "iteration").touch()
        (directory.logs / "wandb_id").write_text(f"{number}")
        (directory.path / "slices.jsonl").touch()
    for number in (1, 2):
        kept = directory.path / f"former.{number}"
        assert (kept / "config.yaml").read_text() == f"lr: {number}" and (kept / "metrics.jsonl").exists()
        assert (kept / "rollouts/iteration").exists() and (kept / "wandb_id").read_text() == f"{number}"
    assert (directory.path / "slices.jsonl").exists()
    assert open_run(run, "lr: 3").metrics.exists(), "the same config goes on"


def test_cases_of_what_messages_on_a_run_there_advise_lead_on(tmp_path):
    """Each start is refused, or goes on; what a refusal advises is tried until the run goes on."""

    def left(saved: bool, logged: bool, config: str | None) -> Run:
        run = Run(dir=str(tmp_path / f"{saved}{logged}{config}"), name="r")
        directory = open_run(run, config or "lr: 1")
        if saved:
            Checkpoints(directory.checkpoints).write(1, lambda path: (path / "x").write_text("x"))
        if logged:
            directory.metrics.write_text("{}\n")
        if config is None:
            directory.config.unlink()
        return run

    for saved in (False, True):
        for logged in (False, True):
            for config in (None, "lr: 1", "lr: 2"):
                there = left(saved, logged, config)
                for resume in ("auto", "must", "never"):
                    name, tried = there.name, []
                    while len(tried) < 4:
                        try:
                            check_start(Run(dir=there.dir, name=name, resume=resume), "lr: 2")
                            break
                        except RunError as error:
                            tried.append(str(error))
                            advice = str(error).rpartition("run.resume=")[2]
                            resume, name = (advice, name) if advice in ("auto", "must") else (resume, "other")
                    assert len(tried) < 3, tried


@pytest.mark.parametrize("name", [".", "..", "a/b", "/a", "x" * 300, "ä" * 140, "a\nb", "\x07", "-rf", " ", ""])
def test_cases_of_names_that_are_no_directory_are_refused_wherever_one_is_made(name, tmp_path, capsys):
    with pytest.raises(ConfigError, match="run.name"):
        Run(name=name)
    for setting in ("model.path=m", f"run.dir={tmp_path}"):
        words = [str(SFT), setting, f"run.name={json.dumps(name)}"]
        assert main(["submit", *words, "--profile=cpu", "--dry-run"]) == 2 and main(["sft", *words]) == 2
        assert "run.name" in capsys.readouterr().err
    if "/" not in name and name not in (".", ".."):  # these are paths
        for schema, given in ((GenerateConfig, name), (EvalConfig, f"{name}.json")):
            if given not in (" .json", ".json"):
                with pytest.raises(ConfigError, match="output"):
                    config_files.load(schema, [], [], trees=[("t", outputs(schema, given))])
    assert not [*tmp_path.iterdir()]


def outputs(schema: type, output: str) -> dict[str, object]:
    read = {"sets": [{"name": "d", "path": "d"}]} if schema is EvalConfig else {"data": {"path": "d"}}
    return {"model": {"path": "m"}, **read, "template": "t.txt", "output": output}


def test_faults_of_percent_signs_in_a_run_directory_are_no_fields_of_slurm(tmp_path):
    config = config_files.load(SftConfig, [SFT], [f"run.dir={tmp_path}", "run.name=lr%j"])
    script = submit.plan_run(config, read("cpu"), command="sft").files["train.sbatch"]
    assert f"--output={tmp_path}/lr%%j/logs/train-%A_%a.out" in script


@pytest.mark.parametrize(
    ("command", "setting"),
    [
        ("train", "engine={kind: vllm, urls: {generator: ['http://me:hunter2@n1:8000']}}"),
        ("train", "reward.args={url: 'https://hunter2@judge/v1'}"),
        ("sft", "data.train=http://me:hunter2@host/rows.jsonl"),
        ("sft", "model={path: ['http://me:hunter2@h']}"),
    ],
)
def test_faults_of_passwords_in_urls_are_refused_without_showing_them(command, setting, capsys, tmp_path):
    config = SFT if command == "sft" else ROOT / "examples/miniatures/last_letter/grpo.yaml"
    assert main([command, str(config), setting, f"run.dir={tmp_path}"]) == 2
    said = capsys.readouterr()
    assert "hunter2" not in said.err + said.out.replace(setting, "") and "***@" in said.err
    assert not [*tmp_path.iterdir()]
    with pytest.raises(ConfigError, match="environment.https_proxy"):
        config_files.load(Profile, [], ["environment={https_proxy: 'http://me:hunter2@proxy:3128'}"])


def test_faults_of_a_stop_file_that_outlives_the_run_that_obeyed_it(tmp_path):
    stop, said = tmp_path / "stop", []
    for variables, stays in (
        ({}, False),
        ({"SLURM_JOB_ID": "1"}, False),  # an interactive job
        ({"SLURM_JOB_ID": "1", "MEGATRON_RL_JOB_END": ""}, True),  # its batch script ends the chain by the file
    ):
        stop.touch()
        leave = Leave(tmp_path, job_from(variables), said.append)
        assert leave() and leave.asked()
        leave.done()
        assert stop.exists() is stays
    assert "goes on from here" in said[0]


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> list[str]:
    base = tmp_path_factory.mktemp("sft")
    task.write_model(base / "model", 0)
    (base / "rows.jsonl").write_text('{"prompt": "a b", "response": "b a"}\n' * 8)
    return [
        str(SFT), f"model.path={base}/model", f"data.train={base}/rows.jsonl", f"run.dir={base}", "run.name=r",
        "samples_per_step=2", "steps=3", "launch.nproc=1", "run.save_every=1",
    ]  # fmt: skip


def test_faults_of_a_stopped_run_on_a_laptop_that_would_not_go_on(settings):
    run = Path(settings[3].partition("=")[2]) / "r"
    run.mkdir()
    (run / "stop").touch()
    assert program("sft", *settings, check=False).returncode == 130
    assert Checkpoints(run / "checkpoints").newest().number == 1 and not (run / "stop").exists()
    program("sft", *settings)
    newest = Checkpoints(run / "checkpoints").newest()
    assert newest.number == 3
    found = sum(path.stat().st_size for path in newest.path.rglob("*") if path.is_file())
    role = config_files.load(SftConfig, [SFT], settings[1:]).trained
    planned, model = totals.saved_bytes(role, doctor._shape(role))
    assert planned == pytest.approx(found, rel=0.1)
    assert model == pytest.approx((run / "model/model.safetensors").stat().st_size, rel=0.01)


def test_faults_of_a_start_are_said_before_torch_is_imported(settings, tmp_path):
    """Half a minute passed before a run was told that its directory holds another config, or that it runs already."""
    settings = [*settings, f"run.dir={tmp_path}"]
    directory = open_run(Run(dir=str(tmp_path), name="r"), "seed: 1\n")
    Checkpoints(directory.checkpoints).write(1, lambda path: (path / "x").write_text("x"))
    code = "import sys; sys.modules['torch'] = None; from megatron_rl.main import main; sys.exit(main(sys.argv[1:]))"

    def said(*words: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-c", code, "sft", *settings, *words], cwd=ROOT, env=environment(), capture_output=True,
            text=True, timeout=60,
        )  # fmt: skip
        return done.returncode, done.stderr

    status, text = said()
    assert status == 2 and "holds a run with another config:\n  data.append_eos: (not set) -> True" in text
    with only_one(tmp_path / "busy"):
        status, text = said("run.name=busy")
    assert status == 1 and "is being run by process" in text


def test_faults_of_plug_ins_are_said_before_torch_is_imported(settings, tmp_path):
    model, data = settings[1].partition("=")[2], settings[2].partition("=")[2]
    words = [
        str(ROOT / "examples/miniatures/last_letter/grpo.yaml"), f"roles.generator.model.path={model}",
        f"data.path={data}",
        f"evaluation.sets=[{{path: {data}, settings: last_letter}}]", f"run.dir={tmp_path}",
    ]  # fmt: skip
    code = "import sys; sys.modules['torch'] = None; from megatron_rl.main import main; sys.exit(main(sys.argv[1:]))"
    for wrong, said in (("reward.target=nowhere:grade", "nowhere"), ("run.iterations=99999", "the recipe plans")):
        done = subprocess.run(
            [sys.executable, "-c", code, "train", *words, wrong], cwd=ROOT, env=environment(), capture_output=True,
            text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 2 and said in done.stderr, done.stderr


def test_faults_of_never_in_a_job_that_is_queued_again(tmp_path):
    """It refused its own run."""
    config = config_files.load(
        TrainConfig, [ROOT / "examples/miniatures/last_letter/grpo.yaml"], [f"run.dir={tmp_path}"]
    )
    never = config_files.load(SftConfig, [SFT], [f"run.dir={tmp_path}", "run.name=s", "run.resume=never"])
    assert "resume: auto" in submit.plan_run(never, read("cpu"), command="sft").files["config.yaml"]
    open_run(Run(dir=str(tmp_path), name="s"), "seed: 1\n")
    with pytest.raises(ConfigError, match="run.resume=never"):
        submit.plan_run(never, read("cpu"), command="sft")
    assert config.run.resume == "auto"


def test_cases_of_what_a_node_or_its_container_does_not_have_are_refused(tmp_path):
    words = [f"run.dir={tmp_path}/runs", "job.nodes=1", "engine.kind=vllm", "engine.colocate=false"]
    config = config_files.load(
        TrainConfig, [ROOT / "examples/published/tango_qwen2.5_7b.yaml"], [*words, "engine.tp=16"]
    )
    with pytest.raises(ConfigError, match="engine.tp = 16: a node of the profile has 8 GPUs"):
        submit.plan_run(config, read("a100"), command="train")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/rows.jsonl").touch()
    # a model of its own: the example's is there only in a checkout where the demo has run
    model = write_tiny_model(tmp_path / "model")
    words = [f"run.dir={tmp_path}/runs", f"data.train={tmp_path}/data/rows.jsonl", f"model.path={model}"]
    sft = config_files.load(SftConfig, [SFT], words)
    for mounts, hidden in (
        ([], ["the checkout", "this directory", "the run directory", "model.path", "data.train"]),
        ([f"{tmp_path}:/elsewhere", f"{ROOT}:{ROOT}"], ["the run directory", "model.path", "data.train"]),
        ([f"{ROOT}:{ROOT}:ro", f"{tmp_path}/runs:{tmp_path}/runs"], ["model.path", "data.train"]),
        ([f"{ROOT}", f"{tmp_path}/:{tmp_path}"], []),
    ):
        tree = {"runtime": "pyxis", "image": "i.sqsh", "mounts": mounts}
        site = config_files.load(Profile, [], [f"container={json.dumps(tree)}", "gpus_per_node=0"])
        if not hidden:
            submit.plan_run(sft, site, command="sft")
            continue
        with pytest.raises(ConfigError, match="container.mounts of the profile") as error:
            submit.plan_run(sft, site, command="sft")
        lines = [line.strip() for line in str(error.value).splitlines() if line.startswith("  ")]
        assert [line.rpartition(" ")[0] for line in lines] == hidden


def test_faults_of_a_locale_end_no_command(tmp_path):
    """A UnicodeEncodeError ended it when it printed a character that the terminal's encoding lacks."""
    words = ["check", str(SFT), "--elsewhere", f"model.path={tmp_path}/\u6f22", "data.train=x"]
    done = subprocess.run(
        [sys.executable, "-m", "megatron_rl.main", *words], cwd=ROOT, text=True, capture_output=True, timeout=60,
        env=environment() | {"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0 and "\\u6f22" in done.stdout, done.stderr
