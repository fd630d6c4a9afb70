"""tools/launch.py without NeMo-Run: how it reads definitions, and what it refuses before it starts anything."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from megatron_rl.cluster import profile

GRAPH = "examples/nemo_run/sft_tango_eval.py"


@pytest.fixture
def launch(monkeypatch, capsys):
    """Runs tools/launch.py from the repository's root, as an interpreter that has no NeMo-Run -> status, output,
    errors."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(sys.modules, "nemo_run", None)
    import launch

    def run(*words: str) -> tuple[int, str, str]:
        status = launch.main(words)
        return status, *capsys.readouterr()

    return run


def test_help_says_how_to_install_nemo_run(launch, capsys):
    with pytest.raises(SystemExit):
        launch("--help")
    shown = capsys.readouterr().out
    assert "make nemo-run" in shown and "TASK.a.b=c" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing.py"], "no definition nothing.py"),
        (["examples/miniatures/last_letter/sft.yaml"], "give one definition, a .py file"),
        (["tools/experiments.py"], "has no function experiment"),
        ([GRAPH, "--small", "tango.run.sede=1"], "task 'tango': .*did you mean 'seed'"),
        ([GRAPH, "tanga.run.seed=1"], "'tanga.run.seed=1': give TASK.a.b=c, with a task of sft, tango, math"),
        ([GRAPH, "--profile=b200"], "give one of a100, cpu"),
        ([GRAPH, "--small", "eval.output=null"], "task 'eval': no output"),
        (
            [GRAPH, "--small", "eval.output=runs/sft_tango_eval/tango/x.json"],
            "'tango' and 'eval' both have the directory",
        ),
        ([GRAPH, "--small", "--at-once=0"], "--at-once 0: give 1 or more"),
        ([GRAPH, "--executor=slurm", "tango.layout=3"], "task 'tango'"),
        ([GRAPH, "--executor=slurm", "sft.run.dir=runs/nemo_run"], "runs/nemo_run/.*take a path without it"),
        ([GRAPH, "--small"], "`make nemo-run`"),
        ([GRAPH, "--small", "--executor=slurm", "--profile=cpu"], "login node"),
    ],
)
def test_bad_input_is_named(launch, monkeypatch, words, message):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))  # which has no sbatch
    status, _, errors = launch(*words)
    assert status == 2 and re.search(message, errors), errors


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ("Experiment(name='x', tasks=[])", "an experiment without tasks"),
        (
            "Experiment(name='x', tasks=[Program(name='a', words=['a.py'], after=['b'])])",
            "waits for 'b', which is none of the tasks above",
        ),
        ("Experiment(name='x', tasks=[Program(name='a', words=['a.py'])] * 2)", "give each task a name of its own"),
        (
            "Experiment(name='x', tasks=[Task(name='a', command='serve', settings=[])])",
            "command 'serve': give one of train, sft, eval",
        ),
        ("[]", "returned list; return an experiments.Experiment"),
    ],
)
def test_bad_definitions_are_named(launch, tmp_path, tasks, message):
    path = tmp_path / "own.py"
    path.write_text(f"from experiments import *\n\ndef experiment(options):\n    return {tasks}\n")
    status, _, errors = launch(str(path))
    assert status == 2 and message in errors


def test_runs_of_a_sweep_have_servers_here_and_on_a_cluster(launch, tmp_path):
    """A sweep of runs with servers was refused everywhere."""
    import experiments

    data = experiments.Program(name="data", words=["makes_data.py"])
    rates = experiments.Task(
        name="rates", command="train", after=["data"], points=[{"run.seed": seed} for seed in range(2)],
        settings=["examples/miniatures/last_letter/grpo.yaml", f"run.dir={tmp_path}", "run.name=rates",
                  "engine.kind=vllm"],
    )  # fmt: skip
    graph = experiments.Experiment(name="own", tasks=[data, rates])
    here, there = experiments.for_local(graph)[1], experiments.for_slurm(graph, profile.read("cpu"))[1]
    assert [step.name for step in here.steps] == ["rates_000", "rates_001"] and not there.steps
    engines = [yaml.safe_load(one.submission.files["001.yaml"])["engine"] for one in (here, there)]
    assert [engine["start"] for engine in engines] == [True, False], "on the cluster jobs of their own start them"
    assert there.submission.scripts == ["sweep.sbatch", "000_engines.sbatch", "001_engines.sbatch"]


def test_evaluations_by_nemo_run_have_the_engine_of_the_site(launch, tmp_path):
    """They had the config's interpreter, which a site's image does not have."""
    import experiments

    settings = {"model": {"path": "m"}, "sets": [{"path": "d"}], "template": "t.txt", "engine": {"kind": "vllm"}}
    words = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
    task = experiments.Task(name="math", command="eval", settings=[*words, f"output={tmp_path}/eval/math.json"])
    site = replace(profile.read("cpu"), engine_python="/opt/vllm/bin/python")
    (planned,) = experiments.for_slurm(experiments.Experiment(name="own", tasks=[task]), site)
    config = yaml.safe_load(planned.submission.files["config.yaml"])
    assert planned.steps and config["engine"]["python"] == "/opt/vllm/bin/python"


def test_runs_on_a_cluster_say_what_each_node_holds(launch):
    """This is so for one job by NeMo-Run, and for a chain by the scripts of `submit`."""
    import experiments
    import launch as launcher

    sets = ["job.nodes=2", "roles.generator.ranks=0-1", "roles.verifier.ranks=2", "run.prompts_per_iteration=8"]
    tasks = [
        experiments.Task(
            name=name, command="train", after=["data"],
            settings=["examples/miniatures/last_letter/tango.yaml", f"run.name={name}", *sets, *more],
        )
        for name, more in (("job", []), ("chain", ["job.slices=2"]))
    ]  # fmt: skip
    data = experiments.Program(name="data", words=["makes_data.py"])
    graph = experiments.Experiment(name="own", tasks=[data, *tasks])
    planned = experiments.for_slurm(graph, replace(profile.read("cpu"), ranks_per_node=2))
    assert [bool(plan.steps) for plan in planned] == [True, True, False]
    nodes = ["node 0: generator (ranks 0-1)", "node 1: verifier (ranks 2-3)"]
    assert launcher._placement(planned) == [f"{name}: {line}" for name in ("job", "chain") for line in nodes]
