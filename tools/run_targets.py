"""Runs what `make test` leaves out, one target after the other, and prints a table of the results.

python tools/run_targets.py             # all of TARGETS, as `make test-more` does
python tools/run_targets.py NAME ...    # these alone, as `make test-more ONLY="NAME ..."` does

A target that fails does not stop the others. Each target's output goes to runs/test_more/NAME.log. The exit status is 1
when a target failed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

LOGS = Path("runs/test_more")
MINIATURES = (
    "rubric", "ssrl", "pairwise", "poker", "python", "search", "agent", "tango_agent", "evolve", "self_play",
    "reward_model", "gsm8k",
)  # fmt: skip
ALL_MARKS = '-m "matrix or not matrix"'
TARGETS: dict[str, str] = {  # name -> shell commands; the shortest first. `python` is that of .venv
    "docs": "make docs",
    # problems and scores of reasoning-gym
    "task-sets": (
        "make .venv-tasks/.ready && "
        ".venv-tasks/bin/python -m pytest tests/unit/environments/test_environments_generated.py -q"
    ),
    # environments of the library verifiers, played by the library itself
    "verifiers": (
        "make verifiers && python -m pytest tests/unit/environments/test_environments_verifiers.py "
        "tests/multi/test_environments_verifiers_program.py"
    ),
    # refits over NIXL (68 MB), with UCX over shared memory and TCP
    "nixl": (
        "make .venv-nixl/.ready && PYTHONPATH=$PWD/.venv-nixl:$PYTHONPATH "
        "python -m pytest tests/multi/test_refit.py tests/multi/test_refit_nixl.py -k nixl"
    ),
    "oracles": "make oracles",
    **{name: f"python examples/miniatures/{name}/run.py" for name in MINIATURES},
    # PPO and online DPO beside GRPO, on three seeds
    "last_letter-alone": (
        "python examples/miniatures/last_letter/compare.py --arms grpo ppo online_dpo --evaluate-every 10 "
        "--out runs/arms_alone --check"
    ),
    "demo-vllm": "make demo ENGINE=vllm",
    "demo-sglang": "make demo ENGINE=sglang",
    # SGLang's real server, on stubbed kernels
    "sglang": (
        "make engines-sglang && python -m pytest tests/servers/test_engines_sglang.py tests/servers/test_fp8_sglang.py"
    ),
    # dry runs, graphs and sweeps by NeMo-Run on this machine, and on real Slurm where it can be had
    "nemo-run": (
        "make nemo-run && make slurm && MEGATRON_RL_NEMO_PYTHON=$PWD/.venv-nemo/bin/python "
        f"python -m pytest tests/multi/test_nemo_run.py {ALL_MARKS}"
    ),
    # vLLM servers on another host than the trainer, in network namespaces (needs root)
    "hosts": "make engines && python -m pytest tests/multi/test_two_hosts.py -m matrix",
    # a real vLLM server of every model family, and of one in a package of its own
    "families": "make engines && python -m pytest tests/servers/test_engines_families.py -m matrix",
    # further real vLLM servers: latent attention, merged adapters, and starts that fail
    "servers": (
        "make engines && python -m pytest tests/servers/test_engines_latents.py tests/servers/test_lora_vllm.py "
        "tests/servers/test_engines_starts.py -m matrix"
    ),
    # the actor's tests on megatron-core 0.19.x
    "mcore-latest": (
        "make .venv-latest/.ready && "
        ".venv-latest/bin/python -m pytest tests/multi/test_layouts.py tests/multi/test_actor.py -q"
    ),
    # the pretended device in the versions of a GPU machine
    "gpu-kit-rehearsal": "make gpu-kit-rehearsal",
    # numbers and servers as on processors without AVX-512, without wide vectors, and with AMX
    "processors": (
        "make engines && make PROCESSOR=sse test-numbers && make PROCESSOR=avx2 test-numbers && "
        "python -m pytest tests/servers/test_engines_families.py tests/servers/test_engines_latents.py "
        f"tests/servers/test_engines_starts.py {ALL_MARKS} && "
        "python -m pytest tests/unit/project/test_processors.py -m matrix"
    ),
    # the wheel, outside of the checkout, submits to a real Slurm
    "wheel": f"make slurm && python -m pytest tests/multi/test_wheel.py {ALL_MARKS}",
    "fuzz": "make fuzz",
    "mutants": "make mutants",
    # runs killed at 200 random instants; 15 to 25 minutes on two cores
    # with a real server, too
    "durable": (
        "make engines && python -m pytest tests/multi/test_durable_runs.py tests/servers/test_durable_vllm.py "
        "-m matrix --durations=0"
    ),
    # the two tutorials whose runs take minutes
    "tutorials": "python -m pytest tests/multi/test_tutorials.py -m matrix",
    # further whole runs: from Python and notebooks, best models after resumes, full disks, a critic's values
    "runs": (
        "python -m pytest -m matrix tests/multi/test_api_runs.py tests/multi/test_changed_inputs.py "
        "tests/multi/test_critics_run.py tests/multi/test_evaluation_runs.py tests/multi/test_hostile_disk.py "
        "tests/multi/test_late_gathers.py tests/multi/test_retokenised_run.py tests/multi/test_sources_run.py"
    ),
    # on real Slurm: a sweep, a stop, the crash of an engine's node, and every command of the page on clusters
    "slurm-runs": (
        "make engines slurm && python -m pytest -m matrix tests/slurm/test_slurm_runs.py "
        "tests/slurm/test_slurm_engines.py tests/slurm/test_slurm_first_run.py"
    ),
    # plans with a search of their own
    "plans": "python -m pytest tests/unit/planning/test_plan_settings.py tests/multi/test_plan.py -m matrix",
    # every method cut in the middle or killed between checkpoints, and resumed, against the whole run
    "resume": (
        "python -m pytest tests/multi/test_resume_methods.py tests/multi/test_resume.py "
        "tests/multi/test_faults_kills.py -m matrix"
    ),
    # roles on ranks of their own with all that they can meet, and 20 kills of such runs each
    "placement": (
        "make engines && python -m pytest tests/multi/test_placement_pairs.py tests/multi/test_placement_runs.py "
        "tests/servers/test_placement_vllm.py -m matrix --durations=0"
    ),
    # every axis and every pair of axes on four ranks, packed and padded, dense and with experts
    "layouts": f"python -m pytest tests/multi/test_layouts.py tests/multi/test_lora.py {ALL_MARKS}",
    # a real model in the actor, the embedded engine and vLLM, against transformers
    "real-model": (
        "make real-model engines && python -m pytest tests/multi/test_real_model.py "
        "tests/servers/test_real_model_vllm.py -m matrix --durations=0"
    ),
    "soak": "make soak",
}
COUNTS = re.compile(r"^(?:=+ )?(\d+ (?:passed|failed|skipped|errors?|deselected).*?) in [\d.]+s", re.MULTILINE)


def main(names: list[str], targets: dict[str, str]) -> int:
    unknown = sorted(set(names) - set(targets))
    if unknown:
        sys.exit(f"no target {', '.join(unknown)}: give one of {', '.join(targets)}")
    LOGS.mkdir(parents=True, exist_ok=True)
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd(), **os.environ}
    environment["PATH"] = f"{Path('.venv/bin').absolute()}:{environment['PATH']}"
    rows = [("target", "result", "minutes", "tests")]
    for name in names or targets:
        log, start = LOGS / f"{name}.log", time.monotonic()
        print(f"{time.strftime('%H:%M:%S')} {targets[name]} > {log}", flush=True)
        with log.open("w") as file:
            command = ["bash", "-c", targets[name]]
            status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment).returncode
        counts = "; ".join(COUNTS.findall(log.read_text(errors="replace")))
        rows.append((name, "failed" if status else "passed", f"{(time.monotonic() - start) / 60:.1f}", counts))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip())
    return int(any(row[1] == "failed" for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], TARGETS))
