"""The arguments of each command: one dataclass per command, from which `parser.py` builds the argument parser.

A field without a default is a positional argument; a field NAME with a default is the option --NAME. The comment of a
field is the help text of the argument, and the docstring of a class is the help text of the command.
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
    """Parses a number of gigabytes above 0. For use as the `type` of an argparse argument."""
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
    """Parses a number above 0 and below 1. For use as the `type` of an argparse argument."""
    if not 0 < float(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: above 0 and below 1")
    return float(text)


def argument(default: Any = dataclasses.MISSING, **options: Any) -> Any:
    """Returns a dataclass field with options for argparse's `add_argument`. `flags`: the names of the command-line
    option, if they differ from --NAME for a field NAME."""
    return dataclasses.field(default=default, metadata=options)


@dataclass_transform(kw_only_default=True, field_specifiers=(argument,))
class Arguments:
    """Base class of the arguments of one command. Subclasses become dataclasses with keyword-only fields."""

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(kw_only=True)(cls)


class WithSettings(Arguments):
    """The arguments of a command that reads a config: YAML files and overrides."""

    settings: list[str] = argument(metavar=METAVAR)  # YAML files, then overrides


class Train(WithSettings):
    """train one or more models by reinforcement learning with a recipe, such as Tango or GRPO"""

    fresh: bool = False  # discard the rollouts that a stopped run stored and did not train on
    # path of the Unix socket of a parent program that receives the run's events
    events: str | None = argument(None, help=argparse.SUPPRESS)


class Sft(WithSettings):
    """supervised fine-tuning on prompt/response pairs; writes a Hugging Face directory"""


class Generate(WithSettings):
    """generate responses of a teacher model as SFT data (Parquet files for training and validation)"""


class Eval(Arguments):
    """measure a model on benchmarks or a problem set; grade given answers; compare results"""

    settings: list[str] = argument(metavar=METAVAR, nargs="*")  # YAML files, then overrides
    skip_done: bool = False  # do nothing if the file of the setting `output` exists already
    # grade the completions in the rows {id, answer, completion} of this file; no model generates answers
    completions: Path | None = argument(None, metavar="FILE")
    # compare finished evaluations, each with the first one in the list
    compare: list[Path] | None = argument(None, metavar="NAME.json", nargs="+")
    out: Path | None = argument(None, metavar="DIR")  # directory for the output of --completions or --compare


class Drift(WithSettings):
    """check that the log-probs of engines and trainer agree, by a `train` run at learning rate 0"""

    updates: int = argument(5, type=positive)  # number of updates, each followed by a refit


class Check(WithSettings):
    """report errors in a config, without starting the command that the config is for, and explain the settings"""

    # command that the config is for (default: inferred from the keys of the config)
    schema: Command | None = argument(None, flags=["--command"])
    ranks: int | None = argument(None, type=positive)  # number of ranks of the run (default: launch.nproc)
    # also read all rows, show the first prompt, and try the tokenizers, the reward and the environment
    deep: bool = False
    # do not report missing files as errors, because the run starts on another machine, or after a stage that writes its
    # files
    elsewhere: bool = False
    show: bool = argument(False, flags=["--print"])  # also print the resolved config, with all defaults filled in


class Init(Arguments):
    """write a commented starter config (grpo, tango or agents), or a profile of a Slurm cluster for `submit`"""

    kind: Literal["grpo", "tango", "agents", "profile"]  # recipe of the starter config; profile: a cluster profile
    file: str = argument(metavar="FILE.yaml")  # the file to write
    model: str | None = None  # a Hugging Face directory or hub name (default: Qwen/Qwen2.5-0.5B-Instruct)
    data: str | None = None  # data file or hub name, see docs/how_to/your_data.md (default: openai/gsm8k)
    # write a tiny model and problems to DIR, for a first run in seconds without a GPU
    tiny: str | None = argument(None, metavar="DIR")
    force: bool = False  # overwrite the file if it exists


class Settings(Arguments):
    """list settings, their defaults and what they mean"""

    # beginning of a setting's dotted name, such as run or roles.NAME.loss, or words in its name, in its description, or
    # in its name in TRL or verl, such as lr or "learning rate"
    prefix: str = argument("", metavar="PREFIX", nargs="?")
    all: bool = False  # list all settings; without PREFIX, only the settings that most configs set are listed
    schema: Command = argument("train", flags=["--command"])  # the command whose settings are listed


class Plan(WithSettings):
    """estimate memory, time, bottleneck and totals of `train`, `sft`, `generate` or `eval` on a cluster

    Estimates the memory of a GPU by component, the seconds of each phase, and the GPU-hours. Suggests what to change.
    No job is started, and no GPU is needed.
      megatron-rl plan examples/published/tango_qwen2.5_7b.yaml --cluster 4x8xA100-80
      megatron-rl plan my.yaml --cluster 16x8xH100 --search engine.kind=vllm
    The exit status is 1 if the command does not fit in memory. docs/how_to/plan.md lists the devices, and states how
    accurate the estimates are.
    """

    cluster: str | None = None  # NODESxGPUSxDEVICE (default: job.nodes plus engine nodes, with 8 A100-80 each)
    search: bool = False  # propose the fastest layouts and engines that fit
    # source of the sizes of a role's model: path of a config.json, or name of a public model
    shape: list[str] = argument((), metavar="ROLE=SOURCE")
    # mean length of prompts and answers as a share of the maximum length (default: 0.5)
    fill: list[str] = argument((), metavar="SHARE | ROLE=SHARE")
    # mean number of samples that a role generates per prompt of an iteration; replaces the recipe's number.
    # Example: generator.verifier=1.5 if the verifier checks only a part of the generator's solutions
    draws: list[str] = argument((), metavar="ITERATION.ROLE=NUMBER")
    # number of rows of a data set that is not on this host. SET: `data` (sft, generate), or name of an evaluation set
    rows: list[str] = argument((), metavar="NUMBER | SET=NUMBER")
    # estimate for the episodes of a role that answers several times; replaces the recipe's estimate. Names: answers,
    # told (tokens between two answers), tool_s (seconds of tools between two answers), calls_at_once (of the
    # environment), bounded (true: max_prompt_tokens limits all tokens before each answer)
    episode: list[str] = argument((), metavar="ROLE.NAME=VALUE")
    json: bool = False  # print the estimates as JSON, in bytes and seconds


class Serve(Arguments):
    """start one inference server of a run with engine.kind vllm or sglang, and restart the server if it dies"""

    # settings of the run, with the same overrides as in the run's command
    settings: list[str] = argument(metavar=METAVAR)
    role: str = argument(required=True)  # role whose model the server loads
    replica: int = 0  # index of the server among engine.replicas
    # indices of the GPUs that the server uses on this host (default: engine.gpus)
    gpus: tuple[int, ...] = argument((), type=numbers, metavar="0,1")
    with_parent: bool = False  # exit when standard input, a pipe from the parent process, is closed


class Fetch(Arguments):
    """download models and data sets from the Hugging Face hub, or all that a config names, to a shared folder

    Run the command on a host with a network:
      megatron-rl fetch Qwen/Qwen2.5-7B dataset:openai/gsm8k --to /shared/hub
      megatron-rl fetch my_run.yaml --to /shared/hub
    For a config, the command prints the overrides with which a run reads the downloaded files. The benchmarks of an
    evaluation are downloaded, too. A name may end in a branch, tag or commit (Qwen/Qwen2.5-7B@main). Without one, a
    complete download is left unchanged, and an interrupted download is resumed. If a folder is updated to another
    commit, downloaded files that the new commit does not have are removed. Each folder gets a file .fetched.json with
    the commit and the SHA-256 of every file. Of a model, only safetensors, JSON and tokenizer files are downloaded.
    """

    # names on the hub, each optionally with @REVISION; or a config and its overrides
    what: list[str] = argument(metavar="OWNER/NAME | dataset:OWNER/NAME | CONFIG.yaml | a.b=c")
    to: Path = argument(required=True, metavar="DIR")  # folder for the downloads


class SplitData(Arguments):
    """split existing rows into training and validation data

    Writes DIR/train.parquet and DIR/validation.parquet. Rows with the same prompt go to the same file, so that no
    prompt is in both files. The order of the rows is kept.
      megatron-rl data split pairs.jsonl --out data/pairs --share 0.05
    """

    # JSONL or Parquet file, directory of such files, or Hugging Face data set
    source: str = argument(metavar="FILE | DIR | OWNER/NAME")
    out: Path = argument(required=True, metavar="DIR")  # directory for the two files
    share: float = argument(0.02, type=share)  # fraction of the prompts whose rows become validation data
    seed: int = 0  # random seed of the split
    # key of the prompt in a row (default: the first existing key of prompt, messages, conversations, question, problem)
    by: str | None = None


class Report(Arguments):
    """write RUN/report.html: whether the run learned, curves, verdicts, times, rollouts; or compare several runs"""

    runs: list[Path] = argument(metavar="RUN")  # directories of runs and sweeps
    # HTML file to write (default: RUN/report.html; for several runs: comparison.html)
    out: Path | None = argument(None, flags=["-o", "--out"], metavar="FILE.html")
    # maximum number of rollouts on the page (default: 4000)
    rollouts: int | None = argument(None, type=positive, metavar="N")


class Watch(Arguments):
    """serve a run's report to a browser on this machine, and update it while the run goes on"""

    run: Path  # directory of a run or of a sweep
    port: int = 0  # port on 127.0.0.1; 0 selects a free port


class Submit(Arguments):
    """write the batch scripts of a run, a sweep, SFT data or an evaluation for Slurm, and submit them

    A run becomes a job array of consecutive trainer jobs (time slices). With servers (engine.kind), it also becomes a
    job array of engines:
      megatron-rl submit examples/published/tango_qwen2.5_7b.yaml job.slices=8 --profile a100 --dry-run
      megatron-rl submit examples/published/sft_qwen2.5_math_7b.yaml --profile my_site.yaml
    SFT data by a teacher is one job:
      megatron-rl submit examples/published/generate_sft_llama3.1_70b.yaml --profile my_site.yaml
    A sweep is one run for each point of a grid. Evaluations are a job array with one element for each pair of a
    checkpoint and a config:
      megatron-rl submit CONFIG.yaml --sweep grid.yaml
      megatron-rl submit math.yaml gsm8k.yaml --checkpoints runs/a/models/generator runs/b/models/generator
    The scripts are made from packaged templates; docs/how_to/cluster.md explains each line.
    """

    # settings of `train`, `sft`, `generate` or, with --checkpoints, `eval`
    settings: list[str] = argument(metavar=METAVAR)
    profile: str = "a100"  # profile of the cluster: a100, cpu, or a YAML file
    dry_run: bool = False  # print the scripts, and what each node holds; write and submit nothing
    # chain: a job array of trainers and a job array of engines; roles: one job array of a trainer and engines
    shape: Literal["chain", "roles"] = "chain"
    # file that defines the sweep: {setting: [values]} for all combinations, or a list with one entry per run
    sweep: Path | None = argument(None, metavar="YAML")
    # evaluate each of these model directories with each given config
    checkpoints: list[str] | None = argument(None, nargs="+", metavar="MODEL")
    out: Path = Path("runs/eval")  # directory for the results of --checkpoints


class Doctor(Arguments):
    """check whether this host has what a run needs: versions, GPUs, network, files, Slurm"""

    # settings of the run; without settings, only what every run needs is checked
    settings: list[str] = argument(metavar=METAVAR, nargs="*")
    profile: str | None = None  # profile of the cluster: a100, cpu, or a YAML file
    quick: bool = False  # run only the checks that every node of a job runs when it starts; print only problems
    # also run the smoke checks of tools/gpu_kit on the first GPU, which takes a minute; needs a checkout
    gpu: bool = False


class Status(Arguments):
    """show a run's jobs, engines, iterations, rates, starts, and why each start ended"""

    run: Path  # directory of a run or of a sweep


class Stop(Arguments):
    """let a run save a checkpoint and exit, and cancel the run's pending jobs"""

    run: Path  # directory of a run or of a sweep
    now: bool = False  # cancel all jobs of the run at once; progress since the last checkpoint is lost


class Logs(Arguments):
    """print the last lines of a run's log files"""

    run: Path  # a run directory
    of: str = ""  # only files whose name contains this text, such as train, engines, generator_0, stacks
    lines: int = 20  # number of lines of each file
    follow: bool = False  # afterwards, print new lines as they are written


class Slice(Arguments):
    """answer a question of a batch script about the script's run; not meant for users"""

    what: Literal["where", "begin", "end", "over"]
    settings: list[str] = argument(metavar="CONFIG.yaml")
    status: int = 0  # srun's exit status, for `end`


class Families(Arguments):
    """The argument that names user-defined model families."""

    # a user-defined model family, as in a config's `families`; may be given several times
    family: list[str] = argument((), metavar="MODULE:NAME")


class Conversion(Families):
    """The arguments that all forms of `convert` have."""

    source: Path  # run directory (the newest checkpoint is used), checkpoint, or a role's directory in a checkpoint
    target: Path  # output directory, which must not exist


class OfCheckpoint(Conversion):
    """The arguments of a conversion that reads a checkpoint."""

    # role whose model is converted, if the checkpoint has several roles. Without a role, `reshard` copies all roles and
    # the run's state to a directory with the same name iteration_N
    role: str | None = None
    # directory of the model from which the role's training started (default: the directory in the run's config.yaml)
    model: Path | None = None
    # also load pickled objects other than plain data. The author of the checkpoint can then run code on this machine
    trust: bool = False


class WritesModel(Conversion):
    """The arguments of a conversion that writes the weights of one model."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = None  # dtype of the output (default: the stored dtype)
    shard_gb: float = argument(4.0, type=gigabytes)  # maximum size of an output file, in GB
    # read the result back and compare it bit for bit. `to-hf` also compares logits with transformers, and a merged
    # adapter with peft
    verify: bool = False


class ToHf(OfCheckpoint, WritesModel):
    """convert a run's checkpoint to a Hugging Face directory that transformers and vLLM can load"""


class ToMegatron(WritesModel):
    """convert a Hugging Face directory to a Megatron checkpoint that can be loaded with any parallel layout"""

    source: Path  # a Hugging Face directory


class Reshard(OfCheckpoint):
    """copy a checkpoint, including the optimizer state, for another parallel layout"""

    tp: int = argument(1, type=positive)  # number of tensor parallel ranks of the new layout
    pp: int = argument(1, type=positive)  # number of pipeline stages of the new layout
    ep: int = argument(1, type=positive)  # number of expert parallel ranks of the new layout
    etp: int | None = argument(None, type=positive)  # number of ranks that share one expert (default: tp)
