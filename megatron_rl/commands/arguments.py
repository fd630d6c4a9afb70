"""The arguments of each command: one dataclass per command, from which `parser.py` builds the argument parser.

A field without a default is a positional argument; another field NAME is the option --NAME. The comment of a field is
the help text of the argument, and the docstring of a class is the help text of the command.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any, Literal, dataclass_transform

METAVAR = "CONFIG.yaml | a.b=c"
Command = Literal["train", "sft", "generate", "eval"]  # commands that have a config schema


def positive(text: str) -> int:
    """Parses an integer of at least 1. For use as the `type` of an argparse argument."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, 1 or more")
    return int(text)


def gigabytes(text: str) -> float:
    """Parses a number above 0. For use as the `type` of an argparse argument."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r}: give gigabytes, more than 0")
    return value


def numbers(text: str) -> tuple[int, ...]:
    """Parses comma-separated integers such as `0,1`. argparse converts a ValueError into a usage error."""
    return tuple(int(word) for word in text.split(","))


def share(text: str) -> float:
    """Returns a number between 0 and 1."""
    if not 0 < float(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: above 0 and below 1")
    return float(text)


def argument(default: Any = dataclasses.MISSING, **options: Any) -> Any:
    """Returns a dataclass field with options for argparse's `add_argument`. `flags`: the option's names, if they differ
    from the name of the field."""
    return dataclasses.field(default=default, metadata=options)


@dataclass_transform(kw_only_default=True, field_specifiers=(argument,))
class Arguments:
    """Base of the arguments of a command. Subclasses are dataclasses with keyword-only fields."""

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(kw_only=True)(cls)


class WithSettings(Arguments):
    """The arguments of a command that takes the settings of a run."""

    settings: list[str] = argument(metavar=METAVAR)  # YAML files, then overrides


class Train(WithSettings):
    """reinforcement learning of one or more roles by a recipe (Tango, GRPO)"""

    fresh: bool = False  # collect the iterations again that a run had collected when it stopped
    # path of the Unix socket of a parent program that receives the run's events
    events: str | None = argument(None, help=argparse.SUPPRESS)


class Sft(WithSettings):
    """supervised fine-tuning on prompt/response pairs; writes a Hugging Face directory"""


class Generate(WithSettings):
    """answers of a teacher model as SFT data (train and validation Parquet)"""


class Eval(Arguments):
    """measure a model on benchmarks or a problem set; grade given answers; compare results"""

    settings: list[str] = argument(metavar=METAVAR, nargs="*")  # YAML files, then overrides
    skip_done: bool = False  # do nothing when the file `output` exists already
    # grade these rows {id, answer, completion} instead of asking a model
    completions: Path | None = argument(None, metavar="FILE")
    # compare finished evaluations, each with the first
    compare: list[Path] | None = argument(None, metavar="NAME.json", nargs="+")
    out: Path | None = argument(None, metavar="DIR")  # directory for the grades or the comparison


class Drift(WithSettings):
    """check that engines and trainer agree: a `train` run at learning rate 0, its log-prob gaps"""

    updates: int = argument(5, type=positive)  # number of updates, each before a refit


class Check(WithSettings):
    """refuse a config that its command would refuse, without starting it, and say what its numbers mean"""

    schema: Command | None = argument(None, flags=["--command"])  # the command it is for (default: found from its keys)
    ranks: int | None = argument(None, type=positive)  # number of ranks it will run on (default: launch.nproc)
    deep: bool = False  # read all rows, show the first prompt, try the tokenizers, the reward and the environment
    # the run starts on another machine, or after a stage that makes its files: missing ones are named only
    elsewhere: bool = False
    show: bool = argument(False, flags=["--print"])  # print the resolved config too, all defaults filled in


class Init(Arguments):
    """write a commented config to begin with: grpo, tango or agents; or the profile of a Slurm cluster for `submit`"""

    kind: Literal["grpo", "tango", "agents", "profile"]  # the recipe, or profile
    file: str = argument(metavar="FILE.yaml")  # the file to write
    model: str | None = None  # a Hugging Face directory or hub name (default: Qwen/Qwen2.5-0.5B-Instruct)
    data: str | None = None  # rows, see docs/how_to/your_data.md (default: openai/gsm8k)
    # make a tiny model and problems in DIR, for a first run in seconds without a GPU
    tiny: str | None = argument(None, metavar="DIR")
    force: bool = False  # write over a file that is there


class Settings(Arguments):
    """list settings, their defaults and what they mean"""

    # the beginning of a dotted name, such as run or roles.NAME.loss, or a word in it, such as lr
    prefix: str = argument("", metavar="PREFIX", nargs="?")
    schema: Command = argument("train", flags=["--command"])  # the command whose settings are listed


class Plan(WithSettings):
    """memory, time, bottleneck and totals of `train`, `sft`, `generate` or `eval` on a named cluster, before any job

    Estimates the memory of each GPU by part, the seconds of each phase and the GPU-hours, and says what to change.
    Nothing is started; no GPU is needed.
      megatron-rl plan examples/published/tango_qwen2.5_7b.yaml --cluster 4x8xA100-80
      megatron-rl plan my.yaml --cluster 16x8xH100 --search engine.kind=vllm
    Exit status 1: it does not fit. docs/how_to/plan.md lists the devices, and says how far the figures can be trusted.
    """

    cluster: str | None = None  # NODESxGPUSxDEVICE (default: job.nodes and the engines' nodes, of 8 A100-80 each)
    search: bool = False  # propose the fastest layouts and engines that fit
    # sizes of a role's model: a config.json, or a public model's name
    shape: list[str] = argument((), metavar="ROLE=SOURCE")
    # mean lengths as a share of the longest allowed (default: 0.5)
    fill: list[str] = argument((), metavar="SHARE | ROLE=SHARE")
    # mean number of a role's samples per prompt of an iteration, in place of the recipe's number, such as
    # generator.verifier=1.5 if not every solution is verified
    draws: list[str] = argument((), metavar="ITERATION.ROLE=NUMBER")
    # number of rows of a data set that is not on this host: `data` of sft and generate, or a set of an evaluation
    rows: list[str] = argument((), metavar="NUMBER | SET=NUMBER")
    # a property of the episodes of a role that answers several times, in place of the recipe's estimate: answers, told
    # (tokens between two answers), tool_s (seconds of tools between two answers), calls_at_once
    episode: list[str] = argument((), metavar="ROLE.NAME=VALUE")
    json: bool = False  # print the figures as JSON, in bytes and seconds


class Serve(Arguments):
    """start one server of a run's rollouts and keep it alive (runs with engine.kind vllm, sglang)"""

    # settings of the run that it serves, with the same overrides
    settings: list[str] = argument(metavar=METAVAR)
    role: str = argument(required=True)  # the role whose model it serves
    replica: int = 0  # its number among engine.replicas
    # GPUs of this host for it (default: engine.gpus)
    gpus: tuple[int, ...] = argument((), type=numbers, metavar="0,1")
    with_parent: bool = False  # leave when standard input, a pipe from the process that started this, ends


class Fetch(Arguments):
    """download models and data sets of the Hugging Face hub, or all that a config names, to a shared folder

    Downloads on a host that has a network:
      megatron-rl fetch Qwen/Qwen2.5-7B dataset:openai/gsm8k --to /shared/hub
      megatron-rl fetch my_run.yaml --to /shared/hub
    For a config it prints the overrides with which a run reads from there. Benchmarks of an evaluation are fetched,
    too. A name may have a branch, tag or commit behind it (Qwen/Qwen2.5-7B@main); without one, what was fetched before
    stays as it is, and a download that was cut goes on. When a folder goes to another commit, fetched files that this
    one does not have are removed. Each folder gets .fetched.json, with the commit and the SHA-256 of every file. Only
    safetensors, JSON and the tokenizer's files of models are fetched.
    """

    # names on the hub, with or without @REVISION; or a config, with overrides
    what: list[str] = argument(metavar="OWNER/NAME | dataset:OWNER/NAME | CONFIG.yaml | a.b=c")
    to: Path = argument(required=True, metavar="DIR")  # the folder that gets them


class SplitData(Arguments):
    """divide rows that were made elsewhere into training and validation data

    Writes DIR/train.parquet and DIR/validation.parquet. Rows with the same prompt stay together, so that no prompt is
    in both files, and the order of rows stays as it is.
      megatron-rl data split pairs.jsonl --out data/pairs --share 0.05
    """

    # JSONL or Parquet file, directory of such files, or Hugging Face data set
    source: str = argument(metavar="FILE | DIR | OWNER/NAME")
    out: Path = argument(required=True, metavar="DIR")  # directory of the two files
    share: float = argument(0.02, type=share)  # fraction of the prompts whose rows become validation data
    seed: int = 0  # seed of the choice
    # key of the prompt in a row (default: the first of prompt, messages, conversations, question, problem in the row)
    by: str | None = None


class Report(Arguments):
    """write RUN/report.html: did it learn, curves, verdicts, times, rollouts; or compare several runs"""

    runs: list[Path] = argument(metavar="RUN")  # run directories, sweeps, NAME.json files of `megatron-rl eval`
    # the page (default: RUN/report.html; of several: comparison.html)
    out: Path | None = argument(None, flags=["-o", "--out"], metavar="FILE.html")
    # most rollouts that the page holds (default: 4000)
    rollouts: int | None = argument(None, type=positive, metavar="N")


class Watch(Arguments):
    """serve a run's report to a browser on this machine, and update it while the run goes on"""

    run: Path  # a run directory, or a sweep's
    port: int = 0  # its port on 127.0.0.1; 0 takes a free one


class Submit(Arguments):
    """write the batch scripts of a run, a sweep, SFT data or an evaluation for Slurm, and submit them

    A run becomes an array of the trainer's time slices and, with servers (engine.kind), an array of engines:
      megatron-rl submit examples/published/tango_qwen2.5_7b.yaml job.slices=8 --profile a100 --dry-run
      megatron-rl submit examples/published/sft_qwen2.5_math_7b.yaml --profile my_site.yaml
    SFT data by a teacher is one job:
      megatron-rl submit examples/published/generate_sft_llama3.1_70b.yaml --profile my_site.yaml
    A sweep is one run for each point of a grid, an evaluation one element for each checkpoint and config:
      megatron-rl submit CONFIG.yaml --sweep grid.yaml
      megatron-rl submit math.yaml gsm8k.yaml --checkpoints runs/a/models/generator runs/b/models/generator
    The scripts are packaged templates, filled in; docs/how_to/slurm.md explains each line.
    """

    # settings of `train`, `sft`, `generate` or, with --checkpoints, `eval`
    settings: list[str] = argument(metavar=METAVAR)
    profile: str = "a100"  # the site: a100, cpu, or a YAML file
    dry_run: bool = False  # print the scripts; write and submit nothing
    shape: Literal["chain", "roles"] = "chain"  # roles: trainer and engines as one array of single nodes
    # one run for each combination of {setting: [values]}, or for each entry of a list
    sweep: Path | None = argument(None, metavar="YAML")
    # evaluate each of these model directories by each config given
    checkpoints: list[str] | None = argument(None, nargs="+", metavar="MODEL")
    out: Path = Path("runs/eval")  # directory for the results of --checkpoints


class Doctor(Arguments):
    """check what a run needs of this host: versions, GPUs, network, files, memory, Slurm"""

    settings: list[str] = argument(metavar=METAVAR, nargs="*")  # settings of the run; without them, of any run
    profile: str | None = None  # the site: a100, cpu, or a YAML file
    quick: bool = False  # make only the checks that every node of a job makes as it starts; print only what is wrong
    # also run the smoke checks of tools/gpu_kit on the first GPU, which takes a minute; needs a checkout
    gpu: bool = False


class Status(Arguments):
    """a run's jobs, engines, iterations, rates, starts and what ended them"""

    run: Path  # a run directory, or a sweep's


class Stop(Arguments):
    """let a run save a checkpoint and leave, and cancel its pending jobs"""

    run: Path  # a run directory, or a sweep's
    now: bool = False  # cancel its jobs at once; progress since the last checkpoint is lost


class Logs(Arguments):
    """the ends of a run's logs"""

    run: Path  # a run directory
    of: str = ""  # only files with this in their name: train, engines, generator_0, stacks
    lines: int = 20  # number of lines of each file
    follow: bool = False  # then print new lines as they come


class Slice(Arguments):
    """what the batch scripts ask about their run; not for typing"""

    what: Literal["where", "begin", "end", "over"]
    settings: list[str] = argument(metavar="CONFIG.yaml")
    status: int = 0  # srun's exit status, for `end`


class Families(Arguments):
    """The argument that names user-defined model families."""

    # a user-defined model family, as in a config's `families`; may be given several times
    family: list[str] = argument((), metavar="MODULE:NAME")


class Conversion(Families):
    """The arguments that all forms of `convert` have."""

    source: Path  # a run directory (its newest checkpoint), a checkpoint, or a role's directory in one
    target: Path  # the directory to make; it must not exist


class OfCheckpoint(Conversion):
    """The arguments of a conversion that reads a checkpoint."""

    # which role's model, where a checkpoint holds several; without it `reshard` takes all roles and the run's state,
    # into a directory of the same name iteration_N
    role: str | None = None
    model: Path | None = None  # model directory the role started from (default: the one in the run's config.yaml)
    # read pickled parts that are more than data; whoever wrote the checkpoint can then run code here
    trust: bool = False


class WritesModel(Conversion):
    """The arguments of a conversion that writes the weights of one model."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = None  # cast the weights (default: as they are stored)
    shard_gb: float = argument(4.0, type=gigabytes)  # largest size of an output file
    # read the result back and compare bit for bit; `to-hf`: and logits against transformers, a merged adapter against
    # peft
    verify: bool = False


class ToHf(OfCheckpoint, WritesModel):
    """a run's checkpoint as a Hugging Face directory, loadable by transformers and vLLM as it stands"""


class ToMegatron(WritesModel):
    """a Hugging Face directory as a Megatron checkpoint, loadable under any layout"""

    source: Path  # a Hugging Face directory


class Reshard(OfCheckpoint):
    """a checkpoint, including the optimizer, written for another layout"""

    tp: int = argument(1, type=positive)  # tensor parallel ranks of the layout that will read it
    pp: int = argument(1, type=positive)  # pipeline stages of the layout that will read it
    ep: int = argument(1, type=positive)  # expert parallel ranks of the layout that will read it
    etp: int | None = argument(None, type=positive)  # ranks that share an expert (default: tp, as in a run's layout)
