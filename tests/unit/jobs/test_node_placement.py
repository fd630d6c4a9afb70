"""What each node of a run's Slurm jobs holds, as `submit` and tools/launch.py print it; notes about parts of nodes."""

from __future__ import annotations

import pytest
from conftest import ROOT
from specs import spec_of

from megatron_rl.cluster import profile
from megatron_rl.config import files
from megatron_rl.config.base import ConfigError
from megatron_rl.config.schema import SftConfig, TrainConfig
from megatron_rl.jobs import submit
from megatron_rl.jobs.node_placement import placement
from megatron_rl.main import main
from megatron_rl.spec import automatic

A100 = profile.read("a100")
TANGO = """
roles: {generator: {model: {path: org/m}}, verifier: {model: {path: org/m}}}
recipe: {target: "megatron_rl.recipes.tango:Tango"}
data: {path: nowhere.jsonl}
run: {dir: /shared/runs, name: tango}
job: {nodes: 4}
"""
APART = ["roles.generator.ranks=0-23", "roles.verifier.ranks=8"]
MODEL = "model.path=Qwen/Qwen2.5-0.5B"
SERVERS = ["engine={kind: vllm, tp: 8, replicas: 2}"]
ENGINES = [
    "element 0-1 of the engines array: vllm servers of generator (8 GPUs each)",
    "element 2-3 of the engines array: vllm servers of verifier (8 GPUs each)",
]


@pytest.fixture
def config(tmp_path):
    """Returns the config of a Tango run on 4 nodes, with other settings."""
    file = tmp_path / "tango.yaml"
    file.write_text(TANGO)
    return lambda *settings: files.load(TrainConfig, [file], settings)


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        ([], ["node 0-3: generator (ranks 0-31), verifier (ranks 0-31)"]),
        (APART, ["node 0-2: generator (ranks 0-23)", "node 3: verifier (ranks 24-31)"]),
        (
            ["roles.generator.ranks=0-2", "roles.verifier.ranks=3-3"],
            ["node 0: generator (ranks 0-2), verifier (rank 3)", "node 1-3: no role"],
        ),
        (
            ["roles.generator.ranks=4-31", "roles.verifier.ranks=24-31"],
            [
                "node 0-2: generator (ranks 4-23)",
                "node 3: generator (ranks 24-31), verifier (ranks 24-31)",
                "note: roles.generator.ranks = 4-31 takes a part of a node of 8 ranks: its groups may span two nodes, "
                "and other roles use the node's network, too; give whole nodes, such as 8-31 or 0-31",
            ],
        ),
        (
            [*APART, "roles.verifier.ranks=24-31", "roles.judge={model: {path: org/j}, policy: none, ranks: 24-31}"],
            ["node 0-2: generator (ranks 0-23)", "node 3: verifier (ranks 24-31), judge (ranks 24-31)"],
        ),
    ],
)
def test_lines_of_the_trainers_nodes(config, settings, lines):
    """A frozen role is in the trainer's ranks if its engine is."""
    assert placement(spec_of(config(*settings), 32), A100) == lines


def test_servers_stand_where_the_batch_script_starts_them(config, monkeypatch):
    """An element of the array computes its role and replica from ROLES and REPLICAS of the script."""
    monkeypatch.chdir(ROOT)
    nodes = ["node 0-2: generator (ranks 0-23)", "node 3: verifier (ranks 24-31)"]
    planned = submit.plan_run(config(*APART, *SERVERS), A100, command="train", to_come=True)
    assert planned.placement == [*nodes, *ENGINES]
    script = planned.files["engines.sbatch"].splitlines()
    assert {"ROLES=(generator verifier)", "REPLICAS=2", "#SBATCH --array=0-3", "#SBATCH --gpus-per-node=8"} < {*script}
    roles = submit.plan_run(config("job.nodes=1", *SERVERS), A100, command="train", as_roles=True, to_come=True)
    assert roles.placement[1].startswith("element 1-2 of the roles array: vllm servers of generator")
    assert "#SBATCH --array=0-4" in roles.files["roles.sbatch"].splitlines()
    shared = submit.plan_run(
        config("engine={kind: vllm, colocate: true, replicas: 32, memory_share: 0.4}"), A100, command="train"
    )
    assert shared.placement[1:] == [
        "the trainer's GPUs, in turns with the trainer: vllm servers of generator, verifier"
    ]
    urls = "engine={kind: vllm, start: false, urls: {generator: ['http://n1:8000'], verifier: ['http://n2:8000']}}"
    assert placement(spec_of(config(urls), 32), A100)[1:] == ["engine.urls: vllm servers of generator, verifier"]


def test_ranks_that_the_plan_chooses_are_shown(config):
    settings = [f"roles.{role}.{own}" for role in ("generator", "verifier") for own in ("ranks=auto", MODEL)]
    settings += ["engine={kind: vllm, tp: 2, replicas: 2}", "job.nodes=2"]
    chosen = automatic.chosen(config(*settings), 16)
    planned = submit.plan_run(config(*settings), A100, command="train", to_come=True)
    assert planned.placement[:-2] == placement(spec_of(chosen, 16), A100)[:-2] != []
    assert "ranks: auto" in planned.files["config.yaml"], "the job chooses, or keeps what an earlier start chose"
    with pytest.raises(ConfigError, match="that are not auto"):
        submit.plan_run(config(*settings, "roles.verifier.ranks=all"), A100, command="train", to_come=True)


def test_a_sweep_says_what_all_its_runs_have_in_common(config):
    points = [({}, config(*SERVERS)), ({}, config(*APART, *SERVERS))]
    planned = submit.plan_sweep(config(), points, A100, command="train", to_come=True)
    assert planned.placement == [
        "node 0-3: generator (ranks 0-31), verifier (ranks 0-31) (of 000)",
        *ENGINES,
        "node 0-2: generator (ranks 0-23) (of 001)",
        "node 3: verifier (ranks 24-31) (of 001)",
    ]


def test_an_sft_run_has_one_model_on_all_nodes():
    sft = files.load(SftConfig, [ROOT / "examples/published/sft_qwen2.5_math_7b.yaml"])
    assert placement(spec_of(sft, 16), A100) == ["node 0-1: model (ranks 0-15)"]


def test_a_dry_run_prints_the_nodes(tmp_path, capsys):
    (tmp_path / "tango.yaml").write_text(TANGO)
    assert main(["submit", str(tmp_path / "tango.yaml"), *APART, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "# ---- node 0-2: generator (ranks 0-23)\n# ---- node 3: verifier (ranks 24-31)\n" in shown


@pytest.mark.parametrize(
    ("ranks", "words", "noted"),
    [
        ("0-11", ["--ranks=16"], True),
        ("0-7", ["--ranks=16"], False),  # a whole node
        ("6-9", ["--ranks=16"], False),  # less than a node
        ("0-11", ["launch.nproc=16"], False),  # all ranks are on this host
    ],
)
def test_check_notes_a_set_of_more_than_a_node_that_has_a_part_of_one(tmp_path, capsys, ranks, words, noted):
    (tmp_path / "tango.yaml").write_text(TANGO)
    settings = [f"roles.generator.ranks={ranks}", "job.nodes=2", *words]
    assert main(["check", str(tmp_path / "tango.yaml"), *settings, "--elsewhere"]) == 0
    shown = capsys.readouterr().out
    assert (f"# note: roles.generator.ranks = {ranks} takes a part of a node of 8 ranks" in shown) == noted
    assert not noted or "give whole nodes, such as 0-7 or 0-15" in shown
