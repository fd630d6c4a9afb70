"""Builds the parser of the command line `megatron-rl COMMAND ...`."""

from __future__ import annotations

import argparse
import functools
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_rl.commands import cluster
from megatron_rl.commands.settings import METAVAR, SCHEMAS, positive

DESCRIPTION = """Co-train a generator and a verifier by reinforcement learning on Megatron-core.

Settings come from YAML files, left to right, then from a.b=c arguments:
  megatron-rl train examples/miniatures/last_letter/tango.yaml run.seed=1
Ranks are those of torchrun or srun; else launch.nproc ranks are started here.
To begin: megatron-rl init grpo my.yaml. From Python: from megatron_rl import Trainer."""
RUN_DESCRIPTION = """{help}

Settings come from YAML files, left to right, then from a.b=c words:
  megatron-rl {name} my.yaml run.seed=1
All settings, or those of a section, with their defaults and meaning:
  megatron-rl settings --command {name} [PREFIX]
What a config means, and what is wrong with it:
  megatron-rl check my.yaml"""
HELP = {
    "train": "reinforcement learning of one or more roles by a recipe (Tango, GRPO)",
    "sft": "supervised fine-tuning on prompt/response pairs; writes a Hugging Face directory",
    "generate": "answers of a teacher model as SFT data (train and validation Parquet)",
    "eval": "measure a model on benchmarks or a problem set; grade given answers; compare results",
}


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Returns the parser of one command, or of all commands if `command` is None or unknown.

    For one command, the modules of the other commands are not imported."""
    parser = argparse.ArgumentParser(
        prog="megatron-rl", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    adders: dict[str, Callable[[Any], None]] = {name: functools.partial(_add_run_command, name=name) for name in HELP}
    adders |= {"drift": _add_drift, "check": _add_check, "init": _add_init, "settings": _add_settings}
    adders |= {"plan": _add_plan, "convert": _add_convert, "serve": _add_serve}
    adders["fetch"] = _add_fetch
    adders |= {**dict.fromkeys(cluster.NAMES, cluster.add_parsers), "report": _add_report}
    for add in dict.fromkeys([adders[command]] if command in adders else adders.values()):
        add(commands)
    return parser


def _add_plan(commands: Any) -> None:
    from megatron_rl.commands import plan

    plan.add_parser(commands)


def _add_fetch(commands: Any) -> None:
    from megatron_rl.commands import fetch

    fetch.add_parser(commands)


def _add_convert(commands: Any) -> None:
    from megatron_rl.commands import conversions

    convert = commands.add_parser(
        "convert", help="weights from one form into another: Hugging Face, Megatron, another layout"
    )
    forms = convert.add_subparsers(dest="form", required=True, metavar="FORM")
    for name, text in conversions.HELP.items():
        conversions.add_arguments(forms.add_parser(name, help=text, description=text), name)


def _add_run_command(commands: Any, name: str) -> None:
    """Adds the argument parser of a command that runs on one or several ranks: train, sft, generate or eval."""
    text = HELP[name]
    parser = commands.add_parser(
        name,
        help=text,
        description=RUN_DESCRIPTION.format(help=textwrap.fill(text, 78), name=name),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    nargs = "*" if name == "eval" else "+"
    parser.add_argument("settings", nargs=nargs, metavar=METAVAR, help="YAML files, then overrides")
    if name == "eval":
        _add_evaluation_arguments(parser)
    if name == "train":
        parser.add_argument(
            "--fresh", action="store_true", help="collect the iterations again that a run had collected when it stopped"
        )
        # --events: path of the Unix socket of a parent program that receives the run's events
        parser.add_argument("--events", help=argparse.SUPPRESS)


def _add_evaluation_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--skip-done", action="store_true", help="do nothing when the file `output` exists already")
    parser.add_argument(
        "--completions",
        type=Path,
        metavar="FILE",
        help="grade these rows {id, answer, completion} instead of asking a model",
    )
    parser.add_argument(
        "--compare", type=Path, nargs="+", metavar="NAME.json", help="compare finished evaluations, each with the first"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="directory for the grades or the comparison")


def _add_drift(commands: Any) -> None:
    parser = commands.add_parser(
        "drift", help="check that engines and trainer agree: a run at learning rate 0, its log-prob gaps"
    )
    parser.add_argument("settings", nargs="+", metavar=METAVAR, help="settings of a `train` run")
    parser.add_argument(
        "--updates", type=positive, default=5, help="number of updates, each before a refit (default: 5)"
    )


def _add_check(commands: Any) -> None:
    parser = commands.add_parser(
        "check",
        help="refuse a config that its command would refuse, without starting it, and say what its numbers mean",
    )
    parser.add_argument("settings", nargs="+", metavar=METAVAR)
    parser.add_argument(
        "--command", dest="schema", choices=SCHEMAS, help="the command it is for (default: found from its keys)"
    )
    parser.add_argument("--ranks", type=positive, help="number of ranks it will run on (default: launch.nproc)")
    parser.add_argument(
        "--deep", action="store_true", help="read all rows, try chat templates with the tokenizer, import the reward"
    )
    parser.add_argument(
        "--elsewhere",
        action="store_true",
        help="the run starts on another machine, or after a stage that makes its files: missing ones are named only",
    )
    parser.add_argument(
        "--print", action="store_true", dest="show", help="print the resolved config too, all defaults filled in"
    )


def _add_init(commands: Any) -> None:
    from megatron_rl.commands import init

    parser = commands.add_parser("init", help="write a commented config to begin with: grpo, tango or agents")
    parser.add_argument("kind", choices=init.KINDS, help="the recipe")
    parser.add_argument("file", metavar="FILE.yaml", help="the file to write")
    parser.add_argument("--model", help=f"a Hugging Face directory or hub name (default: {init.HUB['model']})")
    parser.add_argument("--data", help=f"rows, see docs/your_data.md (default: {init.HUB['data']})")
    parser.add_argument(
        "--tiny", metavar="DIR", help="make a tiny model and problems in DIR, for a first run in seconds without a GPU"
    )
    parser.add_argument("--force", action="store_true", help="write over a file that is there")


def _add_settings(commands: Any) -> None:
    parser = commands.add_parser("settings", help="list settings, their defaults and what they mean")
    parser.add_argument(
        "prefix", nargs="?", default="", metavar="PREFIX",
        help="the beginning of a dotted name, such as run or roles.NAME.loss, or a word in it, such as lr",
    )  # fmt: skip
    parser.add_argument(
        "--command", dest="schema", choices=SCHEMAS, default="train", help="the command whose settings are listed"
    )


def _add_report(commands: Any) -> None:
    parser = commands.add_parser(
        "report", help="write RUN/report.html: did it learn, curves, verdicts, times, rollouts; or compare several runs"
    )
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="run directories, sweeps, NAME.json files of `megatron-rl eval`",
    )
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        metavar="FILE.html",
        help="the page (default: RUN/report.html; of several: comparison.html)",
    )
    parser.add_argument(
        "--rollouts", type=positive, metavar="N", help="most rollouts that the page holds (default: 4000)"
    )
    parser.add_argument(
        "--png", type=Path, metavar="FILE.png", help="also draw the main curves of one run as a picture"
    )


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser(
        "serve", help="start one server of a run's rollouts and keep it alive (runs with engine.kind vllm, sglang)"
    )
    parser.add_argument(
        "settings", nargs="+", metavar=METAVAR, help="settings of the run that it serves, with the same overrides"
    )
    parser.add_argument("--role", required=True, help="the role whose model it serves")
    parser.add_argument("--replica", type=int, default=0, help="its number among engine.replicas (default: 0)")
    parser.add_argument(
        "--gpus", type=_numbers, default=(), metavar="0,1", help="GPUs of this host for it (default: engine.gpus)"
    )
    parser.add_argument(
        "--with-parent",
        action="store_true",
        help="leave when standard input, a pipe from the process that started this, ends",
    )


def _numbers(text: str) -> tuple[int, ...]:
    """Parses comma-separated integers such as `0,1`. argparse converts a ValueError into a usage error."""
    return tuple(int(word) for word in text.split(","))
