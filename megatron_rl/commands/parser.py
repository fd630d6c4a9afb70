"""Builds the parser of the command line `megatron-rl COMMAND ...`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_rl.commands import cluster, conversions, fetch, plan
from megatron_rl.commands.settings import METAVAR, SCHEMAS, positive
from megatron_rl.config.describe import describe

DESCRIPTION = """Co-train a generator and a verifier by reinforcement learning on Megatron-core.

Settings come from YAML files, left to right, then from a.b=c arguments:
  megatron-rl train examples/last_letter/tango.yaml run.seed=1 roles.generator.optimizer.lr=2e-4
Ranks are those of torchrun or srun; without one of these, launch.nproc ranks are started here."""
HELP = {
    "train": "reinforcement learning of one or more roles by a recipe (Tango, GRPO)",
    "sft": "supervised fine-tuning on prompt/response pairs; writes a Hugging Face directory",
    "generate": "answers of a teacher model as SFT data (train and validation Parquet)",
    "eval": "measure a model on benchmarks or a problem set; grade given answers; compare results",
}


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="megatron-rl", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in HELP:
        _add_run_command(commands, name)
    _add_drift(commands)
    _add_check(commands)
    plan.add_parser(commands)
    convert = commands.add_parser(
        "convert", help="weights from one form into another: Hugging Face, Megatron, another layout"
    )
    forms = convert.add_subparsers(dest="form", required=True, metavar="FORM")
    for name, text in conversions.HELP.items():
        conversions.add_arguments(forms.add_parser(name, help=text, description=text), name)
    _add_serve(commands)
    fetch.add_parser(commands)
    cluster.add_parsers(commands)
    report = commands.add_parser(
        "report", help="write RUN/report.html: curves, time, lengths, verdicts, sample rollouts"
    )
    report.add_argument("run", type=Path, help="a run directory, or a sweep's")
    report.add_argument("--png", type=Path, help="also draw the main curves into this file")
    return parser


def _add_run_command(commands: Any, name: str) -> None:
    """Adds a command that runs on ranks: train, sft, generate or eval."""
    text = HELP[name]
    parser = commands.add_parser(
        name,
        help=text,
        description=text + "\n\n" + describe(SCHEMAS[name]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    nargs = "*" if name == "eval" else "+"
    parser.add_argument("settings", nargs=nargs, metavar=METAVAR, help="YAML files, then overrides")
    if name == "eval":
        _add_evaluation_arguments(parser)
    if name == "train":
        parser.add_argument(
            "--fresh", action="store_true", help="play the turns again that a run had played when it stopped"
        )


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
    parser = commands.add_parser("check", help="validate a config without torch and say what its numbers mean")
    parser.add_argument("settings", nargs="+", metavar=METAVAR)
    parser.add_argument(
        "--command", dest="schema", choices=SCHEMAS, help="the command it is for (default: found from its keys)"
    )
    parser.add_argument("--ranks", type=positive, help="number of ranks it will run on (default: launch.nproc)")
    parser.add_argument(
        "--print", action="store_true", dest="show", help="print the resolved config too, all defaults filled in"
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
        "--with-parent",
        action="store_true",
        help="leave when standard input, a pipe from the process that started this, ends",
    )
