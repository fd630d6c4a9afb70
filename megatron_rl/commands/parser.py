"""Builds the parser of the command line `megatron-rl COMMAND ...` from the dataclasses in `arguments.py`."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl import __version__
from megatron_rl.commands import arguments
from megatron_rl.config.base import field_comments

DESCRIPTION = """Train several language models together by reinforcement learning on Megatron-core.

Settings come from YAML files, left to right, then from a.b=c arguments:
  megatron-rl train examples/miniatures/last_letter/tango.yaml run.seed=1
Ranks are those of torchrun or srun; else launch.nproc ranks are started here.
To begin: megatron-rl init grpo my.yaml --tiny tiny. From Python: from megatron_rl import Trainer."""
OF_SETTINGS = """

Settings come from YAML files, left to right, then from a.b=c words:
  megatron-rl {name} my.yaml run.seed=1
Common settings, all with --all, or those of a section, and their meaning:
  megatron-rl settings --command {name} [PREFIX]
What a config means, and what is wrong with it:
  megatron-rl check my.yaml"""
# {command: (class of the command's arguments, module of this package whose function `run` executes the command)}
COMMANDS: Mapping[str, tuple[type, str]] = {
    "train": (arguments.Train, "ranks"),
    "sft": (arguments.Sft, "ranks"),
    "generate": (arguments.Generate, "ranks"),
    "eval": (arguments.Eval, "ranks"),
    "check": (arguments.Check, "check"),
    "init": (arguments.Init, "init"),
    "settings": (arguments.Settings, "show_settings"),
    "plan": (arguments.Plan, "plan"),
    "convert": (arguments.Conversion, "conversions"),
    "data": (arguments.SplitData, "split_data"),
    "fetch": (arguments.Fetch, "fetch"),
    "submit": (arguments.Submit, "cluster"),
    "doctor": (arguments.Doctor, "cluster"),
    "status": (arguments.Status, "cluster"),
    "stop": (arguments.Stop, "cluster"),
    "logs": (arguments.Logs, "cluster"),
    "report": (arguments.Report, "report"),
    "watch": (arguments.Watch, "watch"),
    "drift": (arguments.Drift, "ranks"),
    "serve": (arguments.Serve, "serve"),
    "slice": (arguments.Slice, "cluster"),
}
ADVANCED = ("drift", "serve", "slice")  # commands that other commands run, or that few users need
FORMS: Mapping[str, Mapping[str, type]] = {
    "convert": {
        "to-hf": arguments.ToHf,
        "to-megatron": arguments.ToMegatron,
        "reshard": arguments.Reshard,
    },
    "data": {"split": arguments.SplitData},
}
FORMS_HELP = {
    "convert": "weights from one form into another: Hugging Face, Megatron, another layout",
    "data": "training and validation data from rows that were made elsewhere",
}


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Returns the parser of one command, or of all commands if `command` is None or unknown."""
    parser = argparse.ArgumentParser(
        prog="megatron-rl", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"megatron-rl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in [command] if command is not None and command in COMMANDS else COMMANDS:
        if name not in FORMS:
            _add_parser(commands, name, COMMANDS[name][0])
            continue
        subparser = commands.add_parser(name, help=FORMS_HELP[name])
        forms = subparser.add_subparsers(dest="form", required=True, metavar="FORM")
        for form, schema in FORMS[name].items():
            _add_parser(forms, form, schema)
    return parser


def _add_parser(commands: Any, name: str, schema: type) -> None:
    """Adds the parser of a command, or of a form of `convert` or `data`, to argparse's subparsers `commands`."""
    text, _, details = inspect.cleandoc(schema.__doc__ or "").partition("\n")
    more = OF_SETTINGS.format(name=name) if name in typing.get_args(arguments.Command) else ""
    parser = commands.add_parser(
        name,
        help=f"advanced: {text}" if name in ADVANCED else text,
        description=f"{textwrap.fill(text, 78)}\n{details}{more}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser, schema)


def add_arguments(parser: argparse.ArgumentParser, schema: type) -> None:
    """Adds an argument to the parser for each field of a dataclass in `arguments.py`."""
    comments, hints = field_comments(schema), typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        kind, default = hints[field.name], field.default
        if types.NoneType in typing.get_args(kind):
            kind = typing.get_args(kind)[0]
        options: dict[str, Any] = {"help": comments.get(field.name, "").replace("%", "%%")}
        optional = default is not dataclasses.MISSING or "required" in field.metadata
        positional = not optional or field.metadata.get("nargs") == "?"
        if typing.get_origin(kind) is list:
            kind = typing.get_args(kind)[0]
            options |= {"nargs": "+"} if positional or "nargs" in field.metadata else {"action": "append"}
            default = [] if default == () else default
        if kind is bool:
            options["action"] = "store_true"
        elif typing.get_origin(kind) is typing.Literal:
            options["choices"] = typing.get_args(kind)
        else:
            options["type"] = kind
        if isinstance(default, str | int | float | Path) and default is not False and default != "":
            options["help"] += f" (default: {default})"
        options |= {} if default is dataclasses.MISSING else {"default": default}
        metadata = dict(field.metadata)
        flags = metadata.pop("flags", [f"--{field.name.replace('_', '-')}"])
        if positional:
            parser.add_argument(field.name, **options | metadata)
        else:
            parser.add_argument(*flags, dest=field.name, **options | metadata)
