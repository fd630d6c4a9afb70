"""Tests the batch scripts: their text, line by line; what shellcheck finds; and what they ask their run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from docs_pages import blocks
from tiny_models import make_model

from megatron_rl.cluster import job_slices, profile
from megatron_rl.cluster.host_address import own_address
from megatron_rl.cluster.job_slices import NextAction
from megatron_rl.cluster.slurm_job import SlurmJob
from megatron_rl.config import files as config_files
from megatron_rl.config.schema import ConfigError, EvalConfig, GenerateConfig, TrainConfig
from megatron_rl.jobs import submit
from megatron_rl.jobs.batch_script import ScriptShape, common_settings, script
from megatron_rl.main import main
from megatron_rl.run.checkpoint import Checkpoints, write_json
from megatron_rl.run.run_directory import RunDirectory
from megatron_rl.session.generation_progress import mark_finished

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parents[1] / "golden/slurm"
TANGO = ROOT / "examples/published/tango_qwen2.5_7b.yaml"
MOUNTS = ("/shared:/shared", f"{ROOT}:{ROOT}")
TEACHER = ROOT / "examples/published/generate_sft_llama3.1_70b.yaml"
JOB = SlurmJob(id="17_2", restart=1, node="n1", step=None, end=None, warning_s=None)
EVAL = {
    "model": {"path": "m"},
    "sets": [{"name": "d", "path": "d"}],
    "template": "t.txt",
    "output": "/shared/eval/m.json",
}


def tango(*overrides: str) -> TrainConfig:
    return config_files.load(
        TrainConfig,
        [TANGO],
        [
            "run.dir=/shared/runs",
            "run.name=tango",
            "job.nodes=1",
            "job.slices=1",
            "engine={kind: embedded}",
            *overrides,
        ],
    )


def plans(monkeypatch) -> dict[str, str]:
    """Every script of every shape, by the golden file's name."""
    monkeypatch.chdir(ROOT)
    a100, cpu = profile.read("a100"), profile.read("cpu")
    servers = ["engine.kind=vllm", "engine.tp=2", "engine.replicas=2"]
    sft = config_files.load(
        TrainConfig, [ROOT / "examples/miniatures/last_letter/grpo.yaml"], ["run.dir=/shared/runs", "run.name=letters"]
    )
    container = profile.Container(runtime="pyxis", image="/shared/megatron_rl.sqsh", mounts=MOUNTS)
    pyxis = config_files.load(profile.Profile, [], ["account=lab", "gpu_type=a100", 'setup=["module load slurm"]'])
    found = {
        "a100": submit.plan_run(tango("job.nodes=4", "job.slices=8"), a100, command="train", as_roles=False),
        "a100_vllm": submit.plan_run(
            tango("job.nodes=4", "job.slices=8", *servers), a100, command="train", as_roles=False
        ),
        "a100_roles": submit.plan_run(tango(*servers), a100, command="train", as_roles=True),
        "pyxis": submit.plan_run(
            tango("job.nodes=4"), replace_container(pyxis, container), command="train", as_roles=False
        ),
        "cpu_sweep": submit.plan_sweep(sft, [({"run.seed": n}, sft) for n in range(4)], cpu, command="train"),
        "a100_vllm_sweep": submit.plan_sweep(
            tango(*servers), [({"run.seed": n}, tango(*servers)) for n in range(2)], a100, command="train"
        ),
        "a100_generate": submit.plan_generate(
            config_files.load(GenerateConfig, [TEACHER], ["output=/shared/sft_data"]), a100
        ),
        "cpu_eval": submit.plan_eval(
            [config_files.load(EvalConfig, [], [f"{k}={json.dumps(v)}" for k, v in EVAL.items()])] * 2,
            cpu,
            Path("/shared/eval"),
        ),
    }
    return {f"{name}.{file}": plan.files[file] for name, plan in found.items() for file in plan.scripts}


def replace_container(site: profile.Profile, container: profile.Container) -> profile.Profile:
    return replace(site, container=container)


def test_scripts_are_rendered_as_the_golden_files_have_them(monkeypatch):
    """MEGATRON_RL_GOLDEN=write pytest tests/slurm/test_slurm_scripts.py writes them anew: then read the difference."""
    rendered = {name: text.replace(str(ROOT), "/shared/megatron_rl") for name, text in plans(monkeypatch).items()}
    if os.environ.get("MEGATRON_RL_GOLDEN") == "write":
        shutil.rmtree(GOLDEN)
        GOLDEN.mkdir()
        for name, text in rendered.items():
            (GOLDEN / name).write_text(text)
    assert {path.name: path.read_text() for path in GOLDEN.iterdir()} == rendered


def test_shellcheck_finds_nothing_in_the_scripts(monkeypatch, tmp_path):
    if shutil.which("shellcheck") is None:
        pytest.skip("no shellcheck: `make slurm` installs it, or says why it cannot")
    for name, text in plans(monkeypatch).items():
        (tmp_path / name).write_text(text)
    files = [*tmp_path.iterdir(), *profile.SHIPPED.glob("*.s*"), *(ROOT / "tools").rglob("*.sh")]
    done = subprocess.run(
        ["shellcheck", "-e", "SC2054", "-x", "-P", str(ROOT), *map(str, files)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_every_template_takes_the_settings_that_it_lists(tmp_path):
    shape = ScriptShape(template="train", name="x", ranks=1, gpus=0, time="1", array=None, logs=tmp_path)
    with pytest.raises(ConfigError, match="no setting NOTHING"):
        script(shape, profile.read("cpu"), {"NOTHING": "1"}, tmp_path)
    text = script(
        shape,
        profile.read("cpu"),
        common_settings(profile.read("cpu")) | {"CONFIG": "a path/it's.yaml"},
        tmp_path,
    )
    line = next(line for line in text.splitlines() if line.startswith("CONFIG="))
    said = subprocess.run(["bash", "-c", f'{line}; printf %s "$CONFIG"'], capture_output=True, text=True).stdout
    assert said == "a path/it's.yaml"


@pytest.mark.parametrize(
    ("overrides", "as_roles", "message"),
    [
        (["job.nodes=3"], False, "layout"),  # 24 ranks: 256 samples do not divide, or the layout says so
        ([], True, "servers are outside of the trainer"),
        (["engine.kind=vllm", "job.slices=2"], True, "elements are alike"),
        (["job.time=00:05:00"], False, "600 s before the end of 00:05:00 comes at the start"),
        (["job.time=four hours"], False, "HH:MM:SS"),
        (["engine.kind=vllm", "job.engine_time='2'"], False, "engine_time"),
    ],
)
def test_what_cannot_be_submitted_is_refused_before_it_is(overrides, as_roles, message):
    site = profile.read("a100")
    if message == "layout":
        site = config_files.load(profile.Profile, [], ["ranks_per_node=5"])
    with pytest.raises(ConfigError, match=message):
        submit.plan_run(tango(*overrides), site, command="train", as_roles=as_roles)


def test_time_limits_are_read_as_sbatch_reads_them():
    found = {
        "30": 1800,
        "30:15": 1815,
        "01:00:10": 3610,
        "2-1": 176400,
        "1-02:30": 95400,
        "1-00:00:01": 86401,
        "UNLIMITED": None,
    }
    assert {limit: submit.limit_seconds(limit) for limit in found} == found


def test_profiles_that_are_not_there_or_wrong_are_named(tmp_path):
    with pytest.raises(ConfigError, match="give one of a100, cpu"):
        profile.read("b200")
    (tmp_path / "mine.yaml").write_text("partitoin: gpu\n")
    with pytest.raises(ConfigError, match="partitoin"):
        profile.read(str(tmp_path / "mine.yaml"))


def test_a_sweep_file_gives_its_points(tmp_path):
    path = tmp_path / "grid.yaml"
    path.write_text("a.lr: [1e-3, 2]\nrun.seed: [0, 1]\n")
    assert submit.read_grid(path) == [{"a.lr": lr, "run.seed": seed} for lr in (1e-3, 2) for seed in (0, 1)]
    path.write_text("- {a: 1}\n- {b: x}\n")
    assert submit.read_grid(path) == [{"a": 1}, {"b": "x"}]
    for wrong in ("a: 1\n", "[]\n", "a: []\n", "- 3\n"):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match="mapping of settings to lists"):
            submit.read_grid(path)
    path.write_text(f"a: {list(range(40))}\nb: {list(range(40))}\n")
    with pytest.raises(ConfigError, match="1600 runs"):
        submit.read_grid(path)


def test_a_dry_run_prints_scripts_and_writes_nothing(tmp_path, capsys):
    assert main(["submit", str(TANGO), "job.nodes=4", f"run.dir={tmp_path}", "--profile", "a100", "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "#SBATCH --nodes=4" in told and "is float32" not in told
    more = [f"data.path={tmp_path}/none.jsonl", "roles.verifier.model.dtype=float32"]
    assert main(["submit", str(TANGO), *more, f"run.dir={tmp_path}", "--profile", "a100", "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert f"# ---- note: data = {tmp_path}/none.jsonl is not there yet" in told
    assert "# ---- note: roles.verifier.model.dtype is float32: set bfloat16" in told
    assert not [*tmp_path.iterdir()]


def test_servers_in_the_trainers_gpus_need_no_job_of_their_own(monkeypatch):
    monkeypatch.chdir(ROOT)
    config = config_files.load(TrainConfig, [TANGO], ["run.dir=/shared/runs"])
    planned = submit.plan_run(config, profile.read("a100"), command="train", as_roles=False)
    assert planned.scripts == ["train.sbatch"] and config.engine.colocate
    assert yaml.safe_load(planned.files["config.yaml"])["engine"]["start"] is True
    with pytest.raises(ConfigError, match="servers are outside of the trainer's job"):
        submit.plan_run(config, profile.read("a100"), command="train", as_roles=True)


def test_a_profile_says_where_the_engines_interpreter_is_on_its_site(monkeypatch):
    """The examples' engine.python won over the profile's, so that servers did not start in a container."""
    monkeypatch.chdir(ROOT)
    example = config_files.load(TrainConfig, [TANGO], ["run.dir=/shared/runs"])
    bare = profile.read("a100")
    assert example.engine.python == ".venv-vllm/bin/python"
    assert submit.for_site(example, bare, 64)[0].engine.python == str(ROOT / ".venv-vllm/bin/python")
    container = profile.Container(runtime="pyxis", image="/shared/megatron_rl.sqsh", mounts=MOUNTS)
    inside = replace(bare, container=container, python="/opt/trainer/bin/python", engine_python="/opt/vllm/bin/python")
    assert submit.for_site(example, inside, 64)[0].engine.python == "/opt/vllm/bin/python"
    planned = submit.plan_run(example, inside, command="train")
    assert yaml.safe_load(planned.files["config.yaml"])["engine"]["python"] == "/opt/vllm/bin/python"
    assert "PYTHON=/opt/trainer/bin/python\n" in planned.files["train.sbatch"]
    teacher = submit.plan_generate(config_files.load(GenerateConfig, [TEACHER]), inside)
    assert yaml.safe_load(teacher.files["config.yaml"])["engine"]["python"] == "/opt/vllm/bin/python"
    with pytest.raises(ConfigError, match="the container /shared/megatron_rl.sqsh and no engine_python: name the"):
        submit.for_site(example, replace(inside, engine_python=None), 64)
    words = [f"{name}={json.dumps(value)}" for name, value in EVAL.items()]
    asked = config_files.load(EvalConfig, [], [*words, 'engine={kind: vllm, urls: {model: ["http://n1:8000"]}}'])
    submit.plan_eval([asked], replace(inside, engine_python=None), Path("/shared/eval"))  # its servers run already


def test_the_first_run_shows_a_profile_with_a_container(tmp_path):
    page, mine = ROOT / "docs/how_to/cluster.md", tmp_path / "mine.yaml"
    [text] = [block.text for block in blocks("yaml") if block.page == page and block.mark == "not a config"]
    mine.write_text(text)
    shown = profile.read(str(mine))
    assert shown.container is not None and shown.container.runtime == "pyxis"
    assert (shown.python, shown.engine_python) == ("/opt/trainer/bin/python", "/opt/vllm/bin/python")


def test_a_teacher_is_one_job(tmp_path, capsys, fake_slurm):
    words = ["submit", str(TEACHER), f"output={tmp_path}/pairs", "--profile=cpu"]
    assert main(words) == 0
    assert f"submitted {tmp_path}/pairs/jobs/generate.sbatch: job 17" in capsys.readouterr().out
    assert yaml.safe_load((tmp_path / "pairs/jobs/config.yaml").read_text())["output"] == f"{tmp_path}/pairs"
    assert main([*words, "--shape=roles"]) == 2 and "which is one job" in capsys.readouterr().err


def test_sft_data_that_are_finished_are_not_submitted_again(tmp_path, capsys, fake_slurm):
    words = ["submit", str(TEACHER), f"output={tmp_path}/pairs", "--profile=cpu"]
    (tmp_path / "pairs").mkdir()
    (tmp_path / "pairs/train.parquet").touch()
    config = config_files.load(GenerateConfig, [TEACHER], [f"output={tmp_path}/pairs"])
    mark_finished(config_files.tree_of(config), "digest", ["train.parquet"])
    assert main(words) == 2
    assert f"{tmp_path}/pairs is finished" in capsys.readouterr().err
    assert main([*words, "--dry-run"]) == 0 and f"{tmp_path}/pairs is finished" in capsys.readouterr().out
    assert main([*words, "engine.memory_share=0.9"]) == 2, "no answer would be another one"
    assert not [line for line in fake_slurm[1]() if line.startswith("sbatch")]
    assert main([*words, "seed=7"]) == 0
    (tmp_path / "pairs/train.parquet").unlink()
    assert main(words) == 0


def test_without_sbatch_the_cure_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert main(["submit", str(TANGO), "job.nodes=4", f"run.dir={tmp_path}"]) == 2
    assert "login node" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


SERVED = ["job.nodes=4", "engine.kind=vllm", "engine.colocate=false"]


def test_a_second_submission_leaves_the_config_of_the_first_alone(tmp_path, capsys, fake_slurm):
    """Else the next slice of the first submission would start with the second's config."""
    answers, _ = fake_slurm
    words = ["submit", str(TANGO), "job.nodes=4", f"run.dir={tmp_path}", "run.name=a"]
    assert main(words) == 0
    before = (tmp_path / "a/jobs/config.yaml").read_text()
    answers(squeue="echo '17_[1-3]|a-train|PENDING||1:00:00|Resources|N/A'")
    assert main([*words, "run.seed=7"]) == 2
    assert "has jobs already: 17_[1-3] (pending)" in capsys.readouterr().err
    assert (tmp_path / "a/jobs/config.yaml").read_text() == before


def test_a_trainer_whose_engines_are_refused_is_taken_back(tmp_path, capsys, fake_slurm):
    answers, asked = fake_slurm
    answers(sbatch='case "$*" in *engines.sbatch*) echo "Invalid account" >&2; exit 1;; *) echo 17;; esac')
    answers(squeue="echo '17_0|a-train|PENDING||1:00:00|Resources|N/A'")
    assert main(["submit", str(TANGO), *SERVED, f"run.dir={tmp_path}", "run.name=a"]) == 1
    assert "Invalid account" in capsys.readouterr().err and asked()[-1] == "scancel 17"


def test_engines_learn_which_job_the_trainer_is(tmp_path, fake_slurm):
    answers, asked = fake_slurm
    answers(sbatch='case "$*" in *engines.sbatch*) echo 18;; *) echo 17;; esac')
    assert main(["submit", str(TANGO), *SERVED, f"run.dir={tmp_path}", "run.name=a"]) == 0
    assert [(tmp_path / "a/jobs" / name).read_text() for name in ("trainer", "engines")] == ["17\n", "18\n"]
    assert any("--dependency=after:17_0" in line for line in asked())


def test_each_run_of_a_sweep_has_engines_of_its_own(tmp_path, fake_slurm):
    """A sweep with servers outside of the trainer's GPUs was refused, and so was one with servers in them."""
    answers, asked = fake_slurm
    answers(sbatch='case "$*" in *000_engines.sbatch*) echo 18;; *001_engines.sbatch*) echo 19;; *) echo 17;; esac')
    grid, sweep = tmp_path / "grid.yaml", tmp_path / "rates"
    grid.write_text("run.seed: [0, 1]\n")
    words = ["submit", str(TANGO), f"run.dir={tmp_path}", "run.name=rates", "--sweep", str(grid)]
    assert main([*words, *SERVED]) == 0
    assert [(sweep / run / "jobs" / name).read_text() for run in ("000", "001") for name in ("trainer", "engines")] == [
        "17_0\n", "18\n", "17_1\n", "19\n",
    ]  # fmt: skip
    assert [f"--dependency=after:17_{n}" in line for n, line in enumerate(asked()[-2:])] == [True, True]
    assert yaml.safe_load((sweep / "jobs/001.yaml").read_text())["engine"]["start"] is False
    assert submit.jobs_of(sweep) == ["17", "18", "19"]
    assert main([*words, "job.nodes=4"]) == 0, "the example's servers stand in the trainer's GPUs"
    assert submit.jobs_of(sweep)[3:] == ["17"] and not (sweep / "000/jobs/engines").exists()


def test_runs_of_a_sweep_do_not_share_servers_that_run_already(capsys, tmp_path):
    (tmp_path / "grid.yaml").write_text("run.seed: [0, 1]\n")
    urls = "engine.urls={generator: ['http://n1:8000'], verifier: ['http://n2:8000']}"
    words = ["submit", str(TANGO), *SERVED, urls, "engine.start=false", "engine.replicas=1", "--dry-run"]
    assert main([*words, "--sweep", str(tmp_path / "grid.yaml")]) == 2
    told = capsys.readouterr().err
    assert all(
        f"would send their weights to {url}; leave urls out" in told for url in ("http://n1:8000", "http://n2:8000")
    )
    assert main(words) == 0
    assert "engines.sbatch" not in capsys.readouterr().out, "servers that run already are not started"


def test_a_finished_run_is_submitted_to_go_on_alone(tmp_path, capsys, fake_slurm):
    words = ["submit", str(TANGO), "job.nodes=4", f"run.dir={tmp_path}", "run.name=a"]
    (tmp_path / "a").mkdir()
    write_json(tmp_path / "a/summary.json", {"finished": True})
    Checkpoints(tmp_path / "a/checkpoints").write(1, lambda path: (path / "x").touch())
    assert main(words) == 2 and "is finished" in capsys.readouterr().err
    assert main([*words, "--dry-run"]) == 0 and "is finished: `submit`" in capsys.readouterr().out
    assert main([*words, "run.resume=must", "run.iterations=430"]) == 0
    assert not job_slices.finished(tmp_path / "a")


def test_evaluations_without_a_config_are_refused(capsys):
    assert main(["submit", "seed=1", "--profile=cpu", "--checkpoints", "m"]) == 2
    assert "at least one config" in capsys.readouterr().err
    assert main(["submit", str(TANGO), "--shape=roles", "--sweep=grid.yaml"]) == 2
    assert "give one of them" in capsys.readouterr().err


def test_a_run_whose_name_looks_like_an_override_reads_its_config(tmp_path, capsys):
    config = tmp_path / "lr=3e-4" / "config.yaml"
    config.parent.mkdir()
    config.write_text(TANGO.read_text())
    assert main(["slice", "where", str(config)]) == 0
    assert capsys.readouterr().out.startswith("/")


def test_paths_with_spaces_stay_one_word(tmp_path):
    shape = ScriptShape(template="train", name="x", ranks=1, gpus=0, time="1", array=None, logs=tmp_path / "my logs")
    text = script(shape, profile.read("cpu"), common_settings(profile.read("cpu")), tmp_path / "here now")
    assert (
        f"#SBATCH --chdir='{tmp_path}/here now'\n" in text
        and f"#SBATCH --output='{tmp_path}/my logs/train-%j.out'\n" in text
    )


def test_a_rank_that_left_is_no_fault_of_its_step(tmp_path, monkeypatch):
    """A step of one rank ends with 0 too: the chain would take 130 for a fault."""
    monkeypatch.setattr("megatron_rl.session.train.run", lambda config, place: 130)
    words = ["train", str(ROOT / "examples/miniatures/last_letter/grpo.yaml"), "launch.nproc=1", f"run.dir={tmp_path}"]
    make_model(tmp_path / "model")
    words += [f"roles.generator.model.path={tmp_path}/model"]
    words += [f"data.path={tmp_path}", f"evaluation.sets=[{{path: {tmp_path}}}]"]
    for name in ("RANK", "WORLD_SIZE", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    assert main(words) == 130
    for name, value in {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(words) == 0


def test_two_evaluations_never_write_one_file(tmp_path, capsys):
    config = tmp_path / "e.yaml"
    config.write_text("model: {path: x}\nsets: [{path: d}]\ntemplate: t.txt\n")
    assert (
        main(["submit", str(config), "--profile=cpu", "--checkpoints", "runs/a/models/generator", "runs/a/generator"])
        == 2
    )
    assert "two evaluations would write" in capsys.readouterr().err


def saved(run: Path, iterations: int) -> None:
    """Makes a complete checkpoint of `iterations` iterations."""
    from megatron_rl.run.checkpoint import Checkpoints

    checkpoints = Checkpoints(RunDirectory(run).checkpoints)
    (checkpoints.begin(iterations) / "weights").write_text("w")
    checkpoints.commit(iterations)


def test_slices_note_what_ended_them_and_decide_what_comes(tmp_path):
    def begin(restart: int) -> tuple[NextAction, str]:
        return job_slices.begin(tmp_path, job(restart), "n[1-2]", 3)

    def job(restart: int) -> SlurmJob:
        return SlurmJob(id="17_2", restart=restart, node="n1", step=None, end=None, warning_s=None)

    assert begin(0)[0] is NextAction.GO
    assert job_slices.end(tmp_path, job(0), 137) == (NextAction.AGAIN, "killed by signal 9")
    saved(tmp_path, 4)
    assert begin(1) == (NextAction.GO, "4 iterations are done")
    assert begin(2)[0] is NextAction.GO  # the start before it ended without a word
    assert job_slices.end(tmp_path, job(2), 0) == (NextAction.SLICE, "left in time, saved after 4 iterations")
    assert [s.cause for s in job_slices.read(tmp_path)] == [
        "killed by signal 9",
        job_slices.SILENT,
        "left in time, saved after 4 iterations",
    ]
    assert begin(3)[0] is NextAction.GO
    assert job_slices.end(tmp_path, job(3), 2)[0] is NextAction.STOPPED  # a wrong config stays wrong
    assert begin(4)[0] is NextAction.GO  # of three starts so far one was ended by its node, say
    assert job_slices.end(tmp_path, job(4), 1)[0] is NextAction.AGAIN
    word, why = begin(5)
    assert (
        word is NextAction.STOPPED and "4 starts made no progress beyond 4 iterations" in why and "left in time" in why
    )
    saved(tmp_path, 5)
    assert begin(5)[0] is NextAction.GO
    (tmp_path / "stop").touch()
    assert job_slices.end(tmp_path, job(5), 0)[0] is NextAction.STOPPED and begin(6)[0] is NextAction.STOPPED
    write_json(tmp_path / "summary.json", {"finished": True})
    assert begin(6)[0] is NextAction.DONE and job_slices.end(tmp_path, job(6), 0)[0] is NextAction.DONE


def test_a_chain_that_stalled_goes_on_when_it_is_submitted_again(tmp_path):
    """Starts of an earlier submission do not count, because what ended them has been mended."""
    for restart in range(9):  # three times as many as job.stalled, since they ended without a word
        assert job_slices.begin(tmp_path, replace(JOB, restart=restart), "n1", 3)[0] is NextAction.GO
    word, why = job_slices.begin(tmp_path, replace(JOB, restart=9), "n1", 3)
    assert word is NextAction.STOPPED and job_slices.read(tmp_path)[-1].cause == why, "`status` says so"
    assert job_slices.begin(tmp_path, replace(JOB, id="17_3", restart=0), "n1", 3)[0] is NextAction.STOPPED
    assert job_slices.begin(tmp_path, replace(JOB, id="18_0", restart=0), "n1", 3)[0] is NextAction.GO


def test_half_a_line_of_slices_is_left_out(tmp_path):
    job_slices.begin(tmp_path, JOB, "n1", 3)
    with (tmp_path / job_slices.FILE).open("a") as file:
        file.write('{"job": "17_2", "resta')
    assert [s.job for s in job_slices.read(tmp_path)] == ["17_2"]
    job_slices.begin(tmp_path, replace(JOB, id="17_3"), "n1", 3)
    assert [s.job for s in job_slices.read(tmp_path)] == ["17_2", "17_3"]


def test_a_rank_that_hangs_ends_although_nothing_can_be_written(tmp_path):
    (tmp_path / "file").touch()
    code = "import sys, time; from pathlib import Path; from megatron_rl.cluster.watchdog import Watchdog\n"
    code += "with Watchdog(Path(sys.argv[1]), 's', 0, 0.2).watching(): time.sleep(60)"
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "file"], cwd=ROOT, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == job_slices.HUNG and "nothing moved" in done.stderr


def test_addresses_of_this_host():
    assert own_address("127.0.0.1") == own_address("lo") == "127.0.0.1"
    assert own_address("auto").count(".") == 3
    with pytest.raises(ConfigError, match="ib7 is neither an address nor an interface .* lo"):
        own_address("ib7")


def test_status_of_what_is_no_run_says_so(tmp_path, capsys):
    assert main(["status", str(tmp_path)]) == 2
    assert "no run directory" in capsys.readouterr().err
