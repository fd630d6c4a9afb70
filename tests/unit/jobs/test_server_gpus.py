"""GPUs that engine.gpus names for servers: numbers that cannot be meant are refused before anything starts."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from specs import check, spec_of

from megatron_rl.cluster.profile import Profile
from megatron_rl.config import files
from megatron_rl.config.schema import ConfigError, EvalConfig, GenerateConfig, TrainConfig
from megatron_rl.jobs import submit
from megatron_rl.main import main
from megatron_rl.session.launch_ranks import Place, has_gpu, ranks_on_host, visible_gpus
from megatron_rl.session.server_connection import check_gpus, cuda_variables
from megatron_rl.spec import server_gpus
from megatron_rl.spec.resolve import engine_of
from megatron_rl.spec.run_spec import Host

TRAIN = """
roles: {generator: {model: {path: org/m}}, verifier: {model: {path: org/m}}}
recipe: {target: "megatron_rl.recipes.tango:Tango"}
data: {path: nowhere.jsonl}
engine: {kind: vllm}
"""
OTHERS = {
    "eval": (EvalConfig, ["model.path=org/m", "sets=[{path: nowhere.jsonl}]", "engine.kind=vllm"]),
    "generate": (GenerateConfig, ["model.path=org/m", "data.path=nowhere.jsonl", "output=x", "engine.kind=vllm"]),
}


def device_problems(config, ranks_here):
    return server_gpus.device_problems(spec_of(config).engine, ranks_here)


@pytest.fixture
def gpus_here(tmp_path, monkeypatch):
    """Has the commands find GPUs on this host."""
    driver = tmp_path / "bin" / "nvidia-smi"
    driver.parent.mkdir()
    driver.write_text("#!/bin/sh\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(driver.parent), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def no_gpus_here(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def train(tmp_path):
    """Makes a training config from overrides."""
    file = tmp_path / "train.yaml"
    file.write_text(TRAIN)
    return lambda *overrides: files.load(TrainConfig, [file], overrides)


def other(name, *overrides):
    schema, words = OTHERS[name]
    return files.load(schema, [], [*words, *overrides])


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(
    ("gpus", "says"),
    [
        ("[0, 1, 2]", r"engine.gpus = \[0, 1, 2\]: 4 are needed \(models x engine.replicas x engine.tp\)"),
        ("[0, 1, 2, 1]", r"engine.gpus = \[0, 1, 2, 1\]: \[1\] stand there twice"),
        ("[0, 1, 2, -1]", "engine.gpus.3 = -1: give a value greater than or equal to 0"),
    ],
)
def test_numbers_without_a_trainer_are_checked_as_with_one(name, gpus, says):
    """They were sliced: servers got fewer GPUs than engine.tp, or none, or the same as others."""
    more = ["engine.replicas=2", "engine.tp=2"]
    with pytest.raises(ConfigError, match=says):
        check(other(name, *more, f"engine.gpus={gpus}"), 1)
    check(other(name, *more, "engine.gpus=[3, 2, 1, 0]"), 1)


def test_each_model_of_an_evaluation_has_servers_of_its_own():
    more = ["junior.path=org/j", "verifier.model.path=org/m", "engine.replicas=2"]  # the verifier is the model itself
    with pytest.raises(ConfigError, match="4 are needed"):
        check(other("eval", *more, "engine.gpus=[0, 1, 2]"), 1)
    check(other("eval", *more, "engine.gpus=[0, 1, 2, 3]"), 1)


def test_servers_that_run_already_need_no_numbers():
    check(other("eval", "engine.replicas=2", "engine.gpus=[0]", "engine.urls={model: [http://a, http://b]}"), 1)


@pytest.mark.parametrize("name", OTHERS)
def test_several_servers_without_numbers_are_refused_where_there_are_gpus(name):
    """All of them took GPU 0."""
    [problem] = device_problems(other(name, "engine.replicas=2", "engine.tp=2"), 1)
    assert "all 2 servers would take the first GPU. Name 4 GPUs (models x engine.replicas x engine.tp)" in problem
    assert not device_problems(other(name, "engine.tp=2"), 1), "a server alone takes the first GPUs"


@pytest.mark.parametrize("name", OTHERS)
def test_the_commands_refuse_them_too(name, gpus_here, capsys):
    _, words = OTHERS[name]
    for said in (["check", f"--command={name}"], [name]):
        assert main([*said, *words, "engine.replicas=2"]) == 2
        assert "engine.gpus is empty: all 2 servers" in capsys.readouterr().err


def test_check_only_notes_them_where_there_is_no_gpu(no_gpus_here):
    from megatron_rl.commands.check import gpu_notes

    [note] = gpu_notes(spec_of(other("eval", "engine.replicas=2")), Host(1, False))
    assert note.startswith("note: refused on a host with GPUs: engine.gpus is empty")


def test_a_job_of_an_evaluation_is_refused_before_it_is_queued(tmp_path):
    config = other("eval", "engine.replicas=2", "output=x.json")
    profile = replace(Profile(), gpus_per_node=8)
    with pytest.raises(ConfigError, match="engine.gpus is empty: all 2 servers"):
        submit.plan_eval([config], profile, tmp_path)
    submit.plan_eval([config], replace(profile, gpus_per_node=0), tmp_path)


@pytest.mark.parametrize("name", OTHERS)
def test_numbers_that_no_node_of_the_profile_has_are_refused_before_the_queue(name, tmp_path):
    """The servers failed on the node, after hours in the queue."""

    def plan(gpus: int, *more: str):
        config = other(name, "engine.replicas=2", "engine.tp=2", f"output={tmp_path}/x.json", *more)
        profile = replace(Profile(), gpus_per_node=gpus)
        return (
            submit.plan_eval([config], profile, tmp_path) if name == "eval" else submit.plan_generate(config, profile)
        )

    with pytest.raises(ConfigError, match=r"a node of the profile has 4 GPUs, counted from 0, and not \[4, 5\]"):
        plan(4, "engine.gpus=[2, 3, 4, 5]")
    for gpus in (0, 6):
        plan(gpus, "engine.gpus=[2, 3, 4, 5]")
    plan(4, "engine.gpus=[0, 1, 2, 3]")
    plan(4, "engine.gpus=[2, 3, 4, 5]", "engine.urls={model: [http://a, http://b]}")


def test_too_few_numbers_of_a_run_are_refused_by_check(train):
    with pytest.raises(ConfigError, match=r"engine.gpus = \[1\]: 2 are needed \(roles x"):
        check(train("engine.gpus=[1]"), 1)
    check(train("engine.gpus=[1]", "engine.start=false"), 1)  # each server has a config of its own


def test_servers_are_not_put_beside_the_trainers_ranks(train):
    """Both held memory of the same GPU all the time."""
    config = train("engine.gpus=[1, 2]", "launch.nproc=2")
    [problem] = device_problems(config, 2)
    assert "[1] are the trainer's as well (its ranks have GPUs 0 to 1)" in problem
    assert "Name GPUs from 2 on" in problem and "engine.colocate to true" in problem
    assert "rank 0 has GPU 0" in device_problems(train("engine.gpus=[1, 0]"), 1)[0]
    assert not device_problems(train("engine.gpus=[2, 3]"), 2)
    assert not device_problems(train("engine.gpus=[0, 1]", "engine.start=false"), 2), "they may be on another host"


def test_the_run_refuses_them_before_it_starts_its_ranks(train, gpus_here, tmp_path, capsys):
    config = str(tmp_path / "train.yaml")
    for said in (["check"], ["train"]):
        assert main([*said, config, "engine.gpus=[1, 2]", "launch.nproc=2"]) == 2
        assert "[1] are the trainer's as well" in capsys.readouterr().err


def test_a_run_without_numbers_is_refused_by_check_as_by_the_run(train, gpus_here, tmp_path, capsys):
    """check took what the run refused, when its ranks had begun."""
    config = str(tmp_path / "train.yaml")
    for said in (["check"], ["train"]):
        assert main([*said, config, "engine.gpus=[]"]) == 2
        assert "engine.gpus is empty: every server would take the first GPU" in capsys.readouterr().err
    assert not device_problems(train("engine.gpus=[]", "engine.start=false"), 1)


def test_ranks_on_the_first_host_are_told_by_the_launcher():
    place = Place(0, 16, 0, "a", 1)
    assert ranks_on_host(None, 3, {}) == 3
    assert ranks_on_host(place, 1, {}) == 1, "only this rank itself is known"
    assert ranks_on_host(place, 1, {"LOCAL_WORLD_SIZE": "8"}) == 8
    assert ranks_on_host(place, 1, {"SLURM_STEP_TASKS_PER_NODE": "4(x3),2(x2)"}) == 4
    assert ranks_on_host(replace(place, rank=9, local_rank=1), 1, {"SLURM_STEP_TASKS_PER_NODE": "8,4(x2)"}) == 2


def test_gpus_are_counted_among_those_that_the_process_sees():
    """GPU 0 of a job that has 4 and 5 was GPU 0 of the host, which is another job's."""
    assert cuda_variables((0, 1), {}) == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert cuda_variables((1,), {"CUDA_VISIBLE_DEVICES": "4,5"}) == {"CUDA_VISIBLE_DEVICES": "5"}
    assert cuda_variables((0,), {"CUDA_VISIBLE_DEVICES": "GPU-8f2a"}) == {"CUDA_VISIBLE_DEVICES": "GPU-8f2a"}
    assert cuda_variables((), {"CUDA_VISIBLE_DEVICES": "4,5"}) == {}
    with pytest.raises(ConfigError, match="names GPU 2: CUDA_VISIBLE_DEVICES = 4,5 has 2"):
        cuda_variables((0, 2), {"CUDA_VISIBLE_DEVICES": "4,5"})


@pytest.mark.parametrize("listed", ["", "-1", "NoDevFiles", "0,1", "1,-1,2", "GPU-8f2a,GPU-9", "4,5,x"])
def test_twins_the_gpus_that_a_command_sees_are_those_that_torch_sees(listed, gpus_here, monkeypatch):
    """`-1` means no GPU to torch, and meant one to the commands that start ranks and servers."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    parsed = [str(device) for device in torch.cuda._parse_visible_devices()]
    assert visible_gpus(os.environ) == parsed and has_gpu(os.environ) == bool(parsed)
    assert visible_gpus({}) is None and has_gpu({})


def test_a_run_does_not_start_all_its_servers_on_the_gpu_of_its_first_rank(tmp_path, monkeypatch):
    """Without engine.gpus every server of every role did."""
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "run.yaml").write_text(
        TRAIN.replace(", verifier: {model: {path: org/m}}", "").replace("vllm}", "vllm, replicas: 3}")
    )
    run = files.load(TrainConfig, [tmp_path / "run.yaml"])
    with pytest.raises(ConfigError, match="engine.gpus is empty: .* Name 3 GPUs"):
        check_gpus(engine_of(run), {})
    check_gpus(engine_of(run), {"CUDA_VISIBLE_DEVICES": ""})
    check_gpus(engine_of(replace(run, engine=replace(run.engine, gpus=(2, 3, 4)))), {})
