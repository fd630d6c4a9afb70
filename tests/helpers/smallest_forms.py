"""The smallest form of every benchmark and every tool: how it runs within seconds, or which test runs it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
ORACLES = ".venv-oracles/bin/python"


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a program runs in a test: by its arguments, in a test of its own, or as a part of another program.

    In the arguments, {out} stands for a folder to write into, {rows} for a folder with a data set, and {models} for a
    folder with the models of the last-letter task.
    """

    words: tuple[str, ...] | None = None  # arguments; None for a program that runs in a test of its own or as a part
    prints: str = ""  # text that the output must contain
    status: int | None = 0  # expected exit status; None if it depends on the machine
    python: str = ""  # interpreter of another environment; the test is skipped without it
    test: str = ""  # file of the test that runs the program
    part_of: str = ""  # file that imports this file, or starts it
    skip: str = ""  # reason why no test can run the program


def _oracle(*words: str) -> Form:
    return Form(words=words or ("{out}/found.json",), python=ORACLES)


BENCHMARKS = {
    "attention.py": Form(words=("--rounds", "1")),
    "common.py": Form(part_of="benchmarks/store.py"),
    "convert.py": Form(words=("--layers", "1", "--hidden", "128", "--shard-gb", "0.005")),
    "data_path.py": Form(words=("--only", "grpo/2/0.1", "--rounds", "1")),
    "episodes.py": Form(words=("--episodes", "4", "--turns", "2", "--faulty", "20", "--python", "none")),
    "gpu.py": Form(test="tests/emulated/kit_cases.py"),
    "gpu_kit": Form(part_of="benchmarks/gpu.py"),
    "grading.py": Form(words=("--data", "{rows}")),
    "import_export.py": Form(words=("--layers", "1", "--rounds", "1")),
    "loop_overhead.py": Form(
        words=("--engines", "embedded", "--models", "{models}", "--prompts", "8", "--iterations", "3")
    ),
    "memory.py": Form(words=("--tokens", "512", "--vocab", "2000", "--hidden", "64", "--layers", "1")),
    "placement.py": Form(words=("--runs", "apart", "--iterations", "5", "--seconds", "0.1")),
    "plan_memory.py": Form(words=("--cases", "1")),
    "plan_published.py": Form(words=()),
    "recovery.py": Form(skip="it needs a Slurm cluster of four nodes, and minutes for each fault"),
    "refit.py": Form(words=("--gigabytes", "0.01", "--rounds", "1", "--bucket-mib", "1")),
    "report.py": Form(words=("--iterations", "100", "--rollouts", "100")),
    "rollout.py": Form(
        words=("--engines", "embedded,transformers", "--sequences", "4", "--max-tokens", "8", "--rounds", "1")
    ),
    "served.py": Form(part_of="benchmarks/rollout.py"),
    "shared_prefixes.py": Form(words=("--model", "{models}/generator/model", "--workloads", "equal", "--rounds", "1")),
    "soak.py": Form(test="tests/multi/test_hostile_soak.py"),
    "soaking": Form(part_of="benchmarks/soak.py"),
    "soaking/clock": Form(part_of="benchmarks/soaking/runs.py"),
    "staged.py": Form(part_of="benchmarks/refit.py"),
    "start.py": Form(words=("--rounds", "1", "--models", "{models}")),
    "store.py": Form(words=("--rollouts", "16", "--tokens", "512")),
    "tail.py": Form(words=("--speed", "20", "--iterations", "1")),
    "tandem.py": Form(
        words=("--engines", "embedded", "--preset", "tiny", "--sequences", "32", "--max-tokens", "32", "--rounds", "1")
    ),
    "train_step.py": Form(words=("--sequences", "4", "--rows", "2", "--rounds", "1", "--preset", "tiny")),
    "vllm_offline.py": Form(part_of="benchmarks/served.py"),
}
TOOLS = {
    "compare_checkpoints.py": Form(test="tests/multi/test_convert.py"),
    "docs/hooks.py": Form(test="tests/unit/project/test_docs_site.py"),
    "engines/needs.py": Form(words=("pytest",), prints="pluggy"),
    "engines/wheels.py": Form(skip="it asks a package index for the metadata of wheels, and tests use no network"),
    "experiments.py": Form(test="tests/unit/cluster/test_launch_experiments.py"),
    "gpu_kit/check.py": Form(words=(), prints="torch", status=None),
    "gpu_kit/quick.py": Form(test="tests/emulated/kit_cases.py"),
    "gpu_kit/smoke.py": Form(test="tests/emulated/kit_cases.py"),
    "house.py": Form(test="tests/unit/project/test_house.py"),
    "inspect_checkpoint.py": Form(test="tests/multi/test_convert.py"),
    "launch.py": Form(test="tests/unit/cluster/test_launch_experiments.py"),
    "plan_refit.py": Form(test="tests/multi/test_own_family.py"),
    "real_model/convert.py": Form(skip="it reads a wheel of 93 MB, which `make real-model` fetches"),
    "run_targets.py": Form(test="tests/unit/project/test_run_targets.py"),
}
EQUIPMENT = {  # of the tests themselves
    "golden": Form(part_of="tests/golden/golden.py"),
    "golden/golden.py": Form(skip="it runs two commits one after the other, for a quarter of an hour: `make golden`"),
    "mutants/mutants.py": Form(test="tests/unit/project/test_mutants.py"),
    "mutants/mutants_places.py": Form(part_of="tests/mutants/mutants.py"),
    "mutants/mutants_probe.py": Form(part_of="tests/mutants/mutants.py"),
    "oracles/ifeval.py": _oracle(),
    "oracles/released.py": _oracle(),
    "oracles/table.py": Form(words=(), prints="pass_at_k"),
    "oracles/tiny.py": Form(part_of="tests/oracles/trl_run.py"),
    "oracles/trl_dpo_run.py": _oracle("{out}"),
    "oracles/trl_gold.py": _oracle(),
    "oracles/trl_losses.py": _oracle(),
    "oracles/trl_preferences.py": _oracle(),
    "oracles/trl_rewards.py": _oracle(),
    "oracles/trl_run.py": _oracle("{out}"),
    "oracles/verl_functions.py": _oracle(),
}
