"""tools/launch.py by NeMo-Run itself, in its own environment: what it renders, runs here to the end, and runs on a real
Slurm cluster.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT
from limits import PROCESS_S, RUN_S
from slurm_cluster import Cluster

from megatron_rl.cluster import job_slices, profile
from megatron_rl.config import files as config_files
from megatron_rl.config.schema import SftConfig
from megatron_rl.jobs import submit
from megatron_rl.run.metrics import read_metrics

GOLDEN = Path(__file__).parents[1] / "golden/nemo_run"
GRAPH, SWEEP = "examples/nemo_run/sft_tango_eval.py", "examples/nemo_run/sweep.py"
VLLM = Path(os.environ.get("MEGATRON_RL_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
DONE = "SUCCEEDED"
QUICK = ["generator.steps=30", "generator.optimizer.decay_steps=40", "verifier.steps=10",
         "verifier.optimizer.decay_steps=40", "tango.recipe.args.generator_updates=2"]  # fmt: skip
SITE = f"""
time: "00:30:00"
warning_s: 120
ranks_per_node: 1
gpus_per_node: 0
cpus_per_rank: 1
environment: {{OMP_NUM_THREADS: "1", megatron_rl_Note: "it's $HOME, as written"}}
python: {sys.executable}
"""
TELL = "import os, pathlib, sys; pathlib.Path(sys.argv[1]).write_text(os.environ.get('megatron_rl_Note', ''))"

WAIT = """
import os, pathlib, signal, sys, time
base = pathlib.Path(sys.argv[1])
def leave(*_):
    (base / "left").touch()
    sys.exit(3)
signal.signal(signal.SIGTERM, leave)
(base / "started").write_text("yes")
while True:
    time.sleep(0.1)  # a signal just before signal.pause() would be lost
"""


@pytest.fixture(scope="module")
def nemo_python() -> str:
    """The interpreter that has NeMo-Run."""
    path = os.environ.get("MEGATRON_RL_NEMO_PYTHON", str(ROOT / ".venv-nemo/bin/python"))
    if not Path(path).exists():
        pytest.skip(
            f"no NeMo-Run: {path} is not there; `make nemo-run` makes it, or MEGATRON_RL_NEMO_PYTHON names another"
        )
    return path


@pytest.fixture
def launch(nemo_python, tmp_path):
    """Runs tools/launch.py from the repository's root -> what came of it."""

    def run(
        *words: str, cluster: Cluster | None = None, timeout_s: float = RUN_S, **more: str
    ) -> subprocess.CompletedProcess[str]:
        environment = (cluster.environment() if cluster is not None else dict(os.environ)) | more
        environment |= {"NEMORUN_HOME": str(tmp_path / "nemo"), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        environment.pop("PYTHONPATH", None)  # launch.py finds the project by itself
        return subprocess.run(
            [nemo_python, "tools/launch.py", *words],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    return run


@pytest.fixture
def site(tmp_path) -> Path:
    path = tmp_path / "site.yaml"
    path.write_text(SITE)
    return path


@pytest.fixture
def cluster(slurm) -> Iterator[Cluster]:
    yield slurm
    slurm.reset()


def definition(path: Path, tasks: str) -> Path:
    path.write_text(
        f"from experiments import Experiment, Program, Task\n\ndef experiment(options):\n    return {tasks}\n"
    )
    return path


def output_of(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout[-6000:] + done.stderr[-4000:]


def rendered(launch, tmp_path) -> dict[str, str]:
    """Dry runs by the golden file's name, with what differs from place to place named."""
    pyxis = tmp_path / "pyxis.yaml"
    pyxis.write_text(
        "account: lab\npartition: gpu\ngpu_type: a100\nmemory: '0'\nsetup: [module load slurm]\nsbatch: "
        "['--comment=a word']\nenvironment: {NCCL_DEBUG: 'INFO, all'}\npython: /opt/venv/bin/python\n"
        f"container: {{runtime: pyxis, image: /shared/a.sqsh, mounts: ['/shared:/shared', '{ROOT}:{ROOT}']}}\n"
    )
    words = {
        "graph_a100": [GRAPH, "--executor=slurm", "--profile=a100"],
        "graph_small_cpu": [GRAPH, "--small", "--executor=slurm", "--profile=cpu"],
        "graph_one_slice_pyxis": [
            GRAPH,
            "tango.job.slices=1",
            "tango.job.time=2-00:00:00",
            "--executor=slurm",
            f"--profile={pyxis}",
        ],
        "sweep_a100": [SWEEP, "--executor=slurm"],
        "graph_small_local": [GRAPH, "--small", "--profile=cpu"],
        "sweep_small_local": [SWEEP, "--small"],
    }
    found = {}
    for name, own in words.items():
        done = launch(*own, "--dryrun")
        assert done.returncode == 0, output_of(done)
        text = re.sub(r"^─.* Entering Experiment .*\n", "", done.stdout)
        found[name] = text.replace(str(tmp_path / "nemo"), "/home/me/.nemo_run").replace(
            str(ROOT), "/shared/megatron_rl"
        )
    return found


def test_dry_runs_are_as_the_golden_files_have_them(launch, tmp_path):
    """Run MEGATRON_RL_GOLDEN=write pytest tests/multi/test_nemo_run.py after a wanted change, and read the
    difference.
    """
    before = sorted(ROOT.glob("runs/*"))
    found = rendered(launch, tmp_path)
    if os.environ.get("MEGATRON_RL_GOLDEN") == "write":
        shutil.rmtree(GOLDEN, ignore_errors=True)
        GOLDEN.mkdir(parents=True)
        for name, text in found.items():
            (GOLDEN / name).write_text(text)
    assert {path.name: path.read_text() for path in GOLDEN.iterdir()} == found
    assert sorted(ROOT.glob("runs/*")) == before, "a dry run writes nothing"
    assert not list((tmp_path / "nemo").rglob("*.sh"))


@pytest.mark.matrix
def test_the_graph_runs_here_to_its_end(launch, site, tmp_path):
    done = launch(GRAPH, "--small", f"--profile={site}", f"--dir={tmp_path}", *QUICK)
    assert done.returncode == 0, output_of(done)
    assert done.stdout.splitlines()[-5:] == [
        f"{name}: {DONE}" for name in ("data", "generator", "verifier", "tango", "eval")
    ]
    base = tmp_path / "sft_tango_eval"
    assert job_slices.finished(base / "tango") and read_metrics(base / "tango")
    assert len((base / "eval/last_letter.jsonl").read_text().splitlines()) == 32
    assert (base / "generator/jobs/config.yaml").read_text() == as_submitted(base / "generator/jobs/config.yaml", site)


def as_submitted(path: Path, site: Path) -> str:
    """Returns what `megatron-rl submit` would write for this config."""
    plan = submit.plan_run(config_files.load(SftConfig, [path]), profile.read(str(site)), command="sft", to_come=True)
    return plan.files["config.yaml"]


@pytest.mark.slow
def test_what_comes_after_a_failed_task_is_not_started(launch, site, tmp_path):
    (tmp_path / "tell.py").write_text(TELL)
    (tmp_path / "fail.py").write_text("import sys; sys.exit(3)")
    after = {
        "good": [],
        "bad": [],
        "behind_bad": ["bad"],
        "behind_both": ["behind_bad", "good"],
        "behind_good": ["good"],
    }
    files = {name: "fail.py" if name == "bad" else "tell.py" for name in after}
    programs = [
        f"Program(name={n!r}, words=['{tmp_path}/{files[n]}', '{tmp_path}/{n}'], after={before})"
        for n, before in after.items()
    ]
    own = definition(tmp_path / "own.py", f"Experiment(name='own', tasks=[{', '.join(programs)}])")
    done = launch(str(own), f"--profile={site}", "--at-once=2")
    assert done.returncode == 1, output_of(done)
    states = dict(line.split(": ") for line in done.stdout.splitlines()[-5:])
    assert states == {
        "good": DONE,
        "bad": "FAILED",
        "behind_bad": "NOT STARTED",
        "behind_both": "NOT STARTED",
        "behind_good": DONE,
    }
    assert (tmp_path / "good").read_text() == "it's $HOME, as written" and (tmp_path / "behind_good").exists()
    assert not (tmp_path / "behind_bad").exists() and not (tmp_path / "behind_both").exists()


@pytest.mark.slow
def test_a_signal_reaches_the_task_and_nothing_more_is_started(nemo_python, site, tmp_path):
    (tmp_path / "wait.py").write_text(WAIT)
    words = f"['{tmp_path}/wait.py', '{tmp_path}']"
    programs = f"Program(name='a', words={words}), Program(name='b', words={words})"
    own = definition(tmp_path / "own.py", f"Experiment(name='own', tasks=[{programs}])")
    os.mkfifo(tmp_path / "started")
    process = subprocess.Popen(
        [nemo_python, "tools/launch.py", str(own), f"--profile={site}"],
        cwd=ROOT, env=os.environ | {"NEMORUN_HOME": str(tmp_path / "nemo")}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert (tmp_path / "started").read_text() == "yes"
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=PROCESS_S)[0].splitlines()
    assert process.returncode == 128 + signal.SIGTERM and said[-2:] == ["a: FAILED", "b: NOT STARTED"], said
    assert (tmp_path / "left").exists()


@pytest.mark.matrix  # make test-more ONLY=nemo-run
def test_a_sweep_runs_here_and_is_one_report(launch, site, tmp_path):
    done = launch(
        SWEEP,
        "--small",
        f"--profile={site}",
        f"--dir={tmp_path}",
        "rates.steps=2",
        "rates.launch.nproc=1",
        "--at-once=2",
    )
    assert done.returncode == 0, output_of(done)
    runs = json.loads((tmp_path / "sweep/rates/sweep.json").read_text())
    assert [run["changes"] for run in runs] == [
        {"optimizer.lr": lr, "run.seed": seed} for lr in (1e-3, 3e-3) for seed in (0, 1)
    ]
    losses = [read_metrics(tmp_path / "sweep/rates" / run["run"])[-1].metrics["loss"] for run in runs]
    assert len(set(losses)) == 4


@pytest.mark.matrix
def test_the_graph_runs_on_a_slurm_cluster_and_its_tango_as_a_chain_too(launch, cluster, site, tmp_path):
    """First by NeMo-Run, Tango on two nodes; then with Tango as an array through slurm/, and what is done is not done
    again.
    """
    words = [
        GRAPH,
        "--small",
        "--executor=slurm",
        f"--profile={site}",
        f"--dir={tmp_path}",
        *QUICK,
        "--wait",
        "--every=0.5",
    ]
    done = launch(*words, "tango.job.nodes=2", cluster=cluster)
    assert done.returncode == 0 and "all tasks are done" in done.stdout, output_of(done)
    base = tmp_path / "sft_tango_eval"
    assert len((base / "eval/last_letter.jsonl").read_text().splitlines()) == 32
    assert "iteration 1/" in "".join(path.read_text() for path in (base / "tango/logs").glob("log-*.out"))
    trained = (base / "generator/model/model.safetensors").stat().st_mtime_ns

    chain = ["tango.run.name=chain", "tango.job.slices=2", f"eval.model.path={base}/chain/models/generator"]
    done = launch(*words, *chain, f"eval.output={base}/chain_eval/last_letter.json", cluster=cluster)
    assert (
        done.returncode == 0
        and "tango is a chain of 2 slices" in done.stdout
        and "eval comes after 'tango'" in done.stdout
    ), output_of(done)
    assert len((base / "chain_eval/last_letter.jsonl").read_text().splitlines()) == 32
    assert len(job_slices.read(base / "chain")) == 1
    assert (base / "generator/model/model.safetensors").stat().st_mtime_ns == trained


@pytest.mark.matrix
def test_faults_of_the_submitting_shell_do_not_reach_a_job_of_nemo_run(launch, cluster, site, tmp_path):
    (tmp_path / "tell.py").write_text("import json, os, sys\njson.dump(dict(os.environ), open(sys.argv[1], 'w'))")
    words = f"['{tmp_path}/tell.py', '{tmp_path}/seen']"
    own = definition(tmp_path / "own.py", f"Experiment(name='own', tasks=[Program(name='a', words={words})])")
    hostile = {"SBATCH_PARTITION": "urgent", "SLURM_DISTRIBUTION": "cyclic", "RANK": "3", "NCCL_ALGO": "Tree"}
    done = launch(
        str(own), f"--profile={site}", "--executor=slurm", "--wait", "--every=0.5", cluster=cluster, **hostile
    )
    assert done.returncode == 0 and "NCCL_ALGO, " in done.stdout, output_of(done)
    seen = json.loads((tmp_path / "seen").read_text())
    assert not {"SBATCH_PARTITION", "RANK", "NCCL_ALGO"} & seen.keys() and seen["SLURM_JOB_PARTITION"] == "batch"


@pytest.mark.matrix
@pytest.mark.skipif(not VLLM.exists(), reason=f"no vLLM: there is no {VLLM}; `make engines` installs it")
def test_each_run_of_a_sweep_has_its_own_servers_on_a_slurm_cluster(launch, cluster, site, last_letter, tmp_path):
    settings = [
        "examples/miniatures/last_letter/grpo.yaml", f"run.dir={tmp_path}", "run.name=rates", "engine.kind=vllm",
        f"engine.python={VLLM}", f"roles.generator.model.path={last_letter}/generator/model",
        f"data.path={last_letter}/task/train.jsonl",
        f"evaluation.sets=[{{path: {last_letter}/task/test.jsonl, settings: last_letter}}]",
        "recipe.args.updates=2", "run.prompts_per_iteration=8",
    ]  # fmt: skip
    points = [{"run.seed": seed} for seed in (0, 1)]
    task = f"Task(name='rates', command='train', settings={settings}, points={points})"
    own = definition(tmp_path / "own.py", f"Experiment(name='own', tasks=[{task}])")
    done = launch(str(own), "--executor=slurm", f"--profile={site}", "--wait", "--every=1", cluster=cluster)
    assert done.returncode == 0 and "all tasks are done" in done.stdout, output_of(done)
    runs = [tmp_path / "rates" / name for name in ("000", "001")]
    servers = [(run / "jobs/engines").read_text().strip() for run in runs]
    assert len(set(servers)) == 2
    for run, job in zip(runs, servers, strict=True):
        assert job_slices.finished(run) and len(job_slices.read(run)) == 1
        assert len([row for row in read_metrics(run) if row.scope == "generator"]) == 2
        assert (run / f"logs/engines-{job}_0-r0.out").exists()
    rewards = [[row.metrics for row in read_metrics(run)] for run in runs]
    assert rewards[0] != rewards[1], "the seeds differ"


@pytest.mark.matrix
def test_a_failed_job_takes_what_waits_for_it_with_it(launch, cluster, site, tmp_path):
    """This is so by NeMo-Run's dependencies, and from there on by those of our own scripts; values of the profile's
    environment arrive as they are.
    """
    (tmp_path / "fail.py").write_text("import sys; sys.exit(3)")
    (tmp_path / "tell.py").write_text(TELL)
    model, data = tmp_path / "none", tmp_path / "none.jsonl"
    config = "examples/miniatures/last_letter/sft.yaml"
    sft = f"'{config}', 'run.dir={tmp_path}', 'model.path={model}', 'data.train={data}', 'steps=2'"
    own = definition(
        tmp_path / "own.py",
        f"Experiment(name='own', tasks=[Program(name='tell', words=['{tmp_path}/tell.py', '{tmp_path}/told']), "
        f"Program(name='bad', words=['{tmp_path}/fail.py'], after=['tell']), "
        f"Task(name='behind', command='sft', settings=[{sft}, 'run.name=behind'], after=['bad']), "
        f"Task(name='chain', command='sft', settings=[{sft}, 'run.name=chain', 'job.slices=2'], after=['bad'])])",
    )
    done = launch(str(own), "--executor=slurm", f"--profile={site}", "--wait", "--every=0.5", cluster=cluster)
    assert done.returncode == 1 and "not done: bad, behind, chain" in done.stdout, output_of(done)
    assert (tmp_path / "told").read_text() == "it's $HOME, as written"
    said = done.stdout.splitlines()
    assert any(line.endswith("bad: failed") for line in said)
    assert any(line.endswith("behind: cancelled") for line in said) and any(
        line.endswith("chain: cancelled") for line in said
    )
    assert not job_slices.read(tmp_path / "chain")


@pytest.mark.matrix
def test_what_sbatch_refuses_is_said_and_nothing_stays_submitted(launch, cluster, site, tmp_path):
    site.write_text(SITE + "partition: nowhere\n")
    done = launch(GRAPH, "--small", "--executor=slurm", f"--profile={site}", f"--dir={tmp_path}", cluster=cluster)
    assert done.returncode == 1 and "invalid partition" in done.stderr and "Traceback" not in done.stderr, output_of(
        done
    )
    assert not cluster.run("squeue", "--noheader")
