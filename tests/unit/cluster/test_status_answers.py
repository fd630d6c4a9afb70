"""Tests `megatron-rl stop` and `status` of SFT data and evaluations, whose jobs take no iterations, with a fake
Slurm."""

from __future__ import annotations

import json

import pytest

from megatron_rl.config import files as config_files
from megatron_rl.config.files import tree_of
from megatron_rl.config.schema import GenerateConfig
from megatron_rl.main import main
from megatron_rl.run.checkpoint import write_json
from megatron_rl.session.generation_progress import mark_finished

RUNNING = "echo '17|x-generate|RUNNING|n1|1:00:00|None|N/A'"


@pytest.fixture
def data(tmp_path):
    """A directory that `submit` left; `of(script)` names what was submitted."""

    def of(script: str):
        jobs = tmp_path / "made/jobs"
        jobs.mkdir(parents=True)
        (jobs / script).touch()
        (jobs / "submitted.jsonl").write_text(json.dumps({"script": script, "job": "17", "time": 0}) + "\n")
        return tmp_path / "made"

    return of


@pytest.mark.parametrize("script", ["generate.sbatch", "eval.sbatch"])
@pytest.mark.parametrize("now", [[], ["--now"]])
def test_stop_cancels_jobs_that_run_and_speaks_of_no_iterations(data, fake_slurm, capsys, script, now):
    """It said that they leave after the iteration at hand, and they went on."""
    (answers, asked), made = fake_slurm, data(script)
    answers(squeue=RUNNING)
    assert main(["stop", str(made), *now]) == 0
    assert asked()[-1] == "scancel 17" and (made / "stop").exists()
    said = capsys.readouterr().out
    assert "its jobs are cancelled; finished parts of the answers are kept" in said and "iteration" not in said
    answers(squeue="true")
    assert main(["stop", str(made), *now]) == 0
    assert "no Slurm job of it waits or runs" in capsys.readouterr().out


def test_a_stopped_run_with_an_evaluation_beside_it_still_saves(data, fake_slurm, capsys):
    (answers, asked), made = fake_slurm, data("eval.sbatch")
    (made / "jobs/train.sbatch").touch()
    answers(squeue=RUNNING)
    assert main(["stop", str(made)]) == 0 and "saves and leaves" in capsys.readouterr().out
    assert not [line for line in asked() if line.startswith("scancel")]


def test_status_tells_the_parts_of_sft_data(data, fake_slurm, capsys):
    (answers, _), made = fake_slurm, data("generate.sbatch")
    answers(squeue=RUNNING)
    (made / "parts").mkdir()
    write_json(made / "parts/x_00000000.json", [])
    assert main(["status", str(made)]) == 0
    assert "running; parts of its answers written: 1" in capsys.readouterr().out
    (made / "parts/x_00000000.json").unlink()
    config = config_files.load(GenerateConfig, [], ["model.path=org/m", "data.path=d.jsonl", "output=elsewhere"])
    (made / "jobs/config.yaml").write_text(config_files.dump(config))
    mark_finished({**tree_of(config), "output": str(made), "seed": 7}, "digest", [])
    assert main(["status", str(made)]) == 0
    assert "written: 0" in capsys.readouterr().out, "what is complete is not what was submitted"
    mark_finished({**tree_of(config), "output": str(made)}, "digest", [])
    answers(squeue="true")
    assert main(["status", str(made)]) == 0
    said = capsys.readouterr().out
    assert "its SFT data are complete" in said and "iterations" not in said


def test_status_counts_evaluations_that_have_results(data, fake_slurm, capsys):
    made = data("eval.sbatch")
    for index in range(2):
        (made / f"jobs/00{index}.yaml").write_text(f"output: {made}/m{index}.json\n")
    (made / "m1.json").touch()
    assert main(["status", str(made)]) == 0
    assert "1 of 2 evaluations have their results" in capsys.readouterr().out
