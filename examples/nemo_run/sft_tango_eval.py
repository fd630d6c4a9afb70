"""Describes one graph of tasks: SFT of the generator, Tango from its model, and an evaluation of Tango's model.

.venv-nemo/bin/python tools/launch.py examples/nemo_run/sft_tango_eval.py --executor slurm --profile my_site.yaml
.venv-nemo/bin/python tools/launch.py examples/nemo_run/sft_tango_eval.py --small
"""

from __future__ import annotations

from experiments import Experiment, Options, Program, Task

GENERATOR, VERIFIER = "generator", "verifier"
LETTERS = "examples/miniatures/last_letter"


def experiment(options: Options) -> Experiment:
    return Experiment(name="sft_tango_eval", tasks=small(options.dir) if options.small else published(options.dir))


def published(out: str) -> list[Task | Program]:
    """Returns the runs of the shipped configs. Tango takes longer than one time limit, so it is a chain of slices."""
    return [
        Task(name="sft", command="sft", settings=["examples/published/sft_qwen2.5_math_7b.yaml", f"run.dir={out}"]),
        Task(
            name="tango",
            command="train",
            after=["sft"],
            settings=[
                "examples/published/tango_qwen2.5_7b.yaml",
                f"run.dir={out}",
                f"roles.generator.model.path={out}/sft_qwen2.5_math_7b/model",
                "engine={kind: embedded}",
                "roles.generator.model.recompute=full",
                "roles.verifier.model.recompute=full",
                "job.nodes=4",
                "job.slices=8",
            ],
        ),
        Task(
            name="math",
            command="eval",
            after=["tango"],
            settings=[
                f"model={{path: {out}/tango_qwen2.5_7b/models/{GENERATOR}, dtype: bfloat16}}",
                "template=tango_generator",
                "sets=[{name: math500, path: HuggingFaceH4/MATH-500, settings: math}]",
                "sampling.max_tokens=2048",
                f"output={out}/tango_qwen2.5_7b_eval/math.json",
            ],
        ),
    ]


def small(out: str) -> list[Task | Program]:
    """Returns the same graph for the last-letter task, with its data and an SFT of the verifier.

    It takes a minute on two ranks without GPUs.
    """
    base = f"{out}/sft_tango_eval"
    return [
        Program(name="data", words=["examples/nemo_run/last_letter_data.py", f"{base}/task"]),
        warm_up(base, GENERATOR, "task/model", steps=170, after="data"),
        warm_up(base, VERIFIER, f"{GENERATOR}/model", steps=100, after=GENERATOR),
        Task(
            name="tango",
            command="train",
            after=[GENERATOR, VERIFIER],
            settings=[
                f"{LETTERS}/tango.yaml",
                f"run.dir={base}",
                "run.name=tango",
                f"data.path={base}/task/train.jsonl",
                *(f"roles.{role}.model.path={base}/{role}/model" for role in (GENERATOR, VERIFIER)),
                f"evaluation.sets=[{{path: {base}/task/test.jsonl, settings: last_letter}}]",
                "evaluation.limit=32",
                "recipe.args.generator_updates=5",
                "recipe.args.warmup_updates=1",
                "recipe.args.balanced_per_class=8",
                "run.prompts_per_iteration=8",
                "run.save_every=1",
            ],
        ),
        Task(
            name="eval",
            command="eval",
            after=["tango"],
            settings=[
                f"model.path={base}/tango/models/{GENERATOR}",
                f"template={LETTERS}/prompts/{GENERATOR}.txt",
                f"sets=[{{path: {base}/task/test.jsonl, settings: last_letter}}]",
                "sampling.max_tokens=48",
                "reward.target=megatron_rl.contrib.last_letter:grade",
                f"output={base}/eval/last_letter.json",
                "launch.nproc=2",
            ],
        ),
    ]


def warm_up(base: str, role: str, start: str, *, steps: int, after: str) -> Task:
    return Task(
        name=role, command="sft", after=[after],
        settings=[
            f"{LETTERS}/sft.yaml", f"run.dir={base}", f"run.name={role}", f"model.path={base}/{start}",
            f"data.train={base}/task/{role}_sft.jsonl", f"steps={steps}", f"optimizer.decay_steps={steps}",
        ],
    )  # fmt: skip
