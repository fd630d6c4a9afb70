"""Describes a sweep over learning rates and seeds: one array on Slurm, one run after the other on this machine.

`megatron-rl report` draws its results.

.venv-nemo/bin/python tools/launch.py examples/nemo_run/sweep.py --executor slurm --profile my_site.yaml
.venv-nemo/bin/python tools/launch.py examples/nemo_run/sweep.py --small
"""

from __future__ import annotations

from experiments import Experiment, Options, Program, Task


def experiment(options: Options) -> Experiment:
    return Experiment(name="sweep", tasks=small(options.dir) if options.small else published(options.dir))


def published(out: str) -> list[Task | Program]:
    """Returns GRPO runs from the SFT generator, whose model sft_tango_eval.py has made."""
    settings = ["examples/published/grpo_qwen2.5_7b.yaml", f"run.dir={out}", "run.name=rates", "job.nodes=4"]
    points = grid("roles.generator.optimizer.lr", (5e-7, 1e-6, 2e-6), seeds=2)
    return [Task(name="rates", command="train", settings=settings, points=points)]


def small(out: str) -> list[Task | Program]:
    """Returns SFT runs on the last-letter task."""
    base = f"{out}/sweep"
    settings = [
        "examples/miniatures/last_letter/sft.yaml", f"run.dir={base}", "run.name=rates",
        f"model.path={base}/task/model",
        f"data.train={base}/task/generator_sft.jsonl", "data.shuffle=true", "steps=40", "optimizer.decay_steps=40",
        "optimizer.warmup_steps=5",
    ]  # fmt: skip
    return [
        Program(name="data", words=["examples/nemo_run/last_letter_data.py", f"{base}/task"]),
        Task(
            name="rates",
            command="sft",
            settings=settings,
            points=grid("optimizer.lr", (1e-3, 3e-3), seeds=2),
            after=["data"],
        ),
    ]


def grid(setting: str, rates: tuple[float, ...], *, seeds: int) -> list[dict[str, float]]:
    """Returns the points of the sweep: every rate with every seed."""
    return [{setting: rate, "run.seed": seed} for rate in rates for seed in range(seeds)]
