"""The program `megatron-rl`: reads a config, starts ranks when no launcher did, and runs one command."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.commands import cluster, conversions, plan
from megatron_rl.config import checks as config_checks
from megatron_rl.config import files as config_files
from megatron_rl.config import schema as configs
from megatron_rl.config.base import field_comments
from megatron_rl.session import launch

LEFT = 130  # of a run that was asked to save and leave
DESCRIPTION = """Co-train a generator and a verifier by reinforcement learning on Megatron-core.

Settings come from YAML files, left to right, then from a.b=c arguments:
  megatron-rl train examples/last_letter/tango.yaml run.seed=1 roles.generator.optimizer.lr=2e-4
Ranks are those of torchrun or srun; without one of these, launch.nproc ranks are started here."""

SCHEMAS: dict[str, Any] = {
    "train": configs.TrainConfig,
    "sft": configs.SftConfig,
    "generate": configs.GenerateConfig,
    "eval": configs.EvalConfig,
}
DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}  # of libraries under torch
HELP = {
    "train": "reinforcement learning of one or more roles by a recipe (Tango, GRPO)",
    "sft": "supervised fine-tuning on prompt/response pairs; writes a Hugging Face directory",
    "generate": "answers of a teacher model as SFT data (train and validation Parquet)",
    "eval": "measure a model on benchmarks or a problem set; grade given answers; compare results",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit status: 0 done, 1 failed, 2 wrong config or arguments, 130 interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    args, rest = parser.parse_known_args(words)
    if rest and (not hasattr(args, "settings") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.settings += rest  # settings behind an option
    try:
        if args.command == "report":
            return _report(args)
        if args.command == "check":
            return _check(args)
        if args.command == "plan":
            return plan.run(args, _load)
        if args.command == "serve":
            return _serve(args)
        if args.command == "convert":
            return conversions.run(args.form, args)
        if args.command in cluster.NAMES:
            return cluster.run(args, _load)
        if args.command == "eval" and (args.completions or args.compare):
            return _grade_or_compare(args)
        if not args.settings:
            raise configs.ConfigError(
                "give a config: model.path=..., benchmarks=[gsm8k] and where their data is, or a YAML file"
            )
        return _run(args, words)
    except configs.ConfigError as error:
        print(f"megatron-rl {args.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-rl", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in HELP.items():
        sub = commands.add_parser(
            name, help=text, description=text + "\n\n" + _settings(SCHEMAS[name]), formatter_class=_RAW
        )
        sub.add_argument(
            "settings",
            nargs="*" if name == "eval" else "+",
            metavar="CONFIG.yaml | a.b=c",
            help="YAML files, then overrides",
        )
        if name == "eval":
            _evaluation_arguments(sub)
    drift = commands.add_parser(
        "drift", help="whether the engines keep to the trainer: a run at learning rate 0, its log-prob gaps"
    )
    drift.add_argument("settings", nargs="+", metavar="CONFIG.yaml | a.b=c", help="of a `train` run")
    drift.add_argument("--updates", type=_positive, default=5, help="updates, each with a refit behind it (default: 5)")
    check = commands.add_parser("check", help="validate a config without torch and say what its numbers mean")
    check.add_argument("settings", nargs="+", metavar="CONFIG.yaml | a.b=c")
    check.add_argument(
        "--command", dest="schema", choices=SCHEMAS, help="the command it is for (default: found from its keys)"
    )
    check.add_argument("--ranks", type=_positive, help="number of ranks it will run on (default: launch.nproc)")
    check.add_argument(
        "--print", action="store_true", dest="show", help="print the resolved config too, all defaults filled in"
    )
    plan.add_parser(commands)
    convert = commands.add_parser(
        "convert", help="weights from one form into another: Hugging Face, Megatron, another layout"
    )
    forms = convert.add_subparsers(dest="form", required=True, metavar="FORM")
    for name, text in conversions.HELP.items():
        conversions.add_arguments(forms.add_parser(name, help=text, description=text), name)
    serve = commands.add_parser(
        "serve", help="start one server of a run's rollouts and keep it alive (runs with engine.kind vllm, sglang)"
    )
    serve.add_argument(
        "settings", nargs="+", metavar="CONFIG.yaml | a.b=c", help="of the run that it serves, with the same overrides"
    )
    serve.add_argument("--role", required=True, help="whose model")
    serve.add_argument("--replica", type=int, default=0, help="which of engine.replicas (default: 0)")
    serve.add_argument(
        "--with-parent",
        action="store_true",
        help="leave at the end of standard input, a pipe from whoever started this",
    )
    cluster.add_parsers(commands)
    report = commands.add_parser(
        "report", help="write RUN/report.html: curves, time, lengths, verdicts, sample rollouts"
    )
    report.add_argument("run", type=Path, help="a run directory, or a sweep's")
    report.add_argument("--png", type=Path, help="also draw the main curves into this file")
    return parser


def _evaluation_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--skip-done", action="store_true", help="do nothing where `output` is there already")
    parser.add_argument(
        "--completions",
        type=Path,
        metavar="FILE",
        help="grade these rows {id, answer, completion} instead of asking a model",
    )
    parser.add_argument(
        "--compare", type=Path, nargs="+", metavar="NAME.json", help="compare finished evaluations, each with the first"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where grades or the comparison go")


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, 1 or more")
    return int(text)


_RAW = argparse.RawDescriptionHelpFormatter


def _settings(schema: Any) -> str:
    """Returns every setting with its default and its comment in the config's source, for --help."""
    return "\n".join(["settings, their defaults and what they mean:", *_lines(schema, "")])


def _lines(schema: Any, prefix: str, made: Any = None) -> list[str]:
    """`made`: the instance that stands when the section is not given; None where each field has its own default."""
    comments, hints, out = field_comments(schema), typing.get_type_hints(schema), []
    for field in dataclasses.fields(schema):
        comment = comments.get(field.name)
        inside = [
            kind for kind in (hints[field.name], *typing.get_args(hints[field.name])) if dataclasses.is_dataclass(kind)
        ]
        place = f"{prefix}{field.name}{'.NAME' if typing.get_origin(hints[field.name]) is dict and inside else ''}"
        default = getattr(made, field.name) if made is not None else _default(field)
        if inside:
            out += [f"  {place}: {comment}"] if comment else []
            if len(inside) > 1:
                out.append(f"  {place}.kind = " + " | ".join(json.dumps(kind.kind) for kind in inside))
            for kind in inside:
                lines = _lines(kind, f"{place}.", default if isinstance(default, kind) else None)
                out += [
                    line
                    for line in lines
                    if line not in out and not (len(inside) > 1 and line.startswith(f"  {place}.kind "))
                ]
        else:
            value = "" if default is dataclasses.MISSING else f" = {json.dumps(default)}"
            out.append(f"  {place}{value}{'  # ' + comment if comment else ''}")
    return out


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _split(settings: Sequence[str]) -> tuple[list[Path], list[str]]:
    overrides = [s for s in settings if "=" in s and not os.path.isfile(s)]  # runs/lr=1e-3/config.yaml is a file
    files = [Path(s) for s in settings if s not in overrides]
    missing = [str(f) for f in files if not f.exists()]
    if missing:
        raise configs.ConfigError(f"no such config file: {', '.join(missing)} (an override has the form a.b=c)")
    return files, overrides


def _load(settings: Sequence[str], schema: str | None = None) -> tuple[str, Any]:
    """-> the command that the files are for, and the config."""
    files, overrides = _split(settings)
    schema = schema or _guess_schema(files)
    return schema, config_files.load(SCHEMAS[schema], files, overrides)


def _check(args: argparse.Namespace) -> int:
    schema, config = _load(args.settings, args.schema)
    ranks = args.ranks or config.launch.nproc
    config_checks.check(config, ranks)
    lines = [*config_checks.explain(config, ranks), *_check_plugins(config, ranks), *config_checks.absent_files(config)]
    if args.show:
        print(config_files.dump(config), end="")
    for line in lines:
        print("# " + line)
    print(f"# {schema}: the config is valid for {ranks} ranks")
    return 0


def _check_plugins(config: Any, ranks: int) -> list[str]:
    """Builds the recipe and the reward, which import torch; where there is none, says that they were not checked."""
    try:
        import torch  # noqa: F401
    except ImportError:
        return ["the arguments of recipe and reward were not checked: torch is not installed here"]
    from megatron_rl.config import plugins

    if hasattr(config, "reward"):
        plugins.build(configs.Use(target=config.reward.target, args=config.reward.args))
    if isinstance(config, configs.EvalConfig):
        from megatron_rl.evaluation.benchmarks import benchmark

        for name in config.benchmarks:
            benchmark(name)
    if not isinstance(config, configs.TrainConfig):
        return []
    recipe = plugins.build(config.recipe)
    config_checks.check_recipe(config, recipe)
    return config_checks.explain_recipe(config, recipe, ranks)


def _guess_schema(files: Sequence[Path]) -> str:
    """The command whose schema has all the files' keys; the first that fits."""
    keys = config_files.read_keys(files)
    for name, schema in SCHEMAS.items():
        if keys <= {f.name for f in dataclasses.fields(schema)}:
            return name
    raise configs.ConfigError(f"no command takes all of these keys: {', '.join(sorted(keys))}; name one with --command")


def _report(args: argparse.Namespace) -> int:
    from megatron_rl.run.directory import SWEEP
    from megatron_rl.run.report import write_figure, write_report
    from megatron_rl.run.report_sweep import write_sweep_report

    if not args.run.is_dir():
        raise configs.ConfigError(f"no run directory {args.run}")
    if (args.run / SWEEP).exists():
        print(write_sweep_report(args.run))
        return 0
    print(write_report(args.run))
    if args.png:
        print(write_figure(args.run, args.png))
    return 0


def _serve(args: argparse.Namespace) -> int:
    from megatron_rl.engines.base import EngineError
    from megatron_rl.session import serving as serve

    config = config_files.load(configs.TrainConfig, *_split(args.settings))
    try:
        return serve.run(
            config, role=args.role, replica=args.replica, with_parent=args.with_parent, environment=os.environ
        )
    except EngineError as error:
        print(f"megatron-rl serve: {error}", file=sys.stderr)
        return 1


def _grade_or_compare(args: argparse.Namespace) -> int:
    """`eval` without a model."""
    from megatron_rl.commands import offline
    from megatron_rl.rewards.pool import RewardFailure

    if args.out is None or (args.completions and args.compare):
        raise configs.ConfigError("give --out DIR, and one of --completions FILE and --compare A.json B.json ...")
    if args.compare:
        return offline.compare_results(args.compare, args.out)
    grading = config_files.load(configs.GradingConfig, *_split(args.settings))
    try:
        return offline.grade_completions(grading, args.completions, args.out)
    except RewardFailure as error:
        print(f"megatron-rl eval: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace, words: list[str]) -> int:
    files, overrides = _split(args.settings)
    config = config_files.load(SCHEMAS["train" if args.command == "drift" else args.command], files, overrides)
    try:
        place = launch.place_from(os.environ)
    except ValueError as error:
        raise configs.ConfigError(str(error)) from error
    if args.command == "eval" and args.skip_done and config.output and Path(config.output).exists():
        print(f"{config.output} is there: nothing to do")
        return 0
    config_checks.check(config, place.world_size if place else config.launch.nproc)
    if place is None and config.launch.nproc > 1:
        return launch.start_ranks(words, config.launch.nproc, os.environ)
    if isinstance(config, configs.TrainConfig | configs.SftConfig) and config.run.deterministic:
        os.environ.update(DETERMINISTIC)
    place = place or launch.Place(0, 1, 0, "127.0.0.1", 0, launch.job_from(os.environ))
    if args.command == "train":
        from megatron_rl.commands.train import run
    elif args.command == "drift":
        from megatron_rl.commands import drift

        run = functools.partial(drift.run, updates=args.updates)
    elif args.command == "sft":
        from megatron_rl.commands.sft import run
    elif args.command == "generate":
        from megatron_rl.commands.generate import run
    else:
        from megatron_rl.commands import evaluate

        run = functools.partial(evaluate.run, environment=os.environ)
    from megatron_rl import errors

    try:
        status = run(config, place)
        in_step = place.job is not None and place.job.step is not None
        return (
            0 if status == LEFT and in_step else status
        )  # srun ends the other ranks for any status but 0, and slurm/job.sh sees a fault
    except errors.EXPECTED as error:
        if place.local_rank == 0 and not isinstance(error, errors.DriverError):
            where = f"rank {place.rank}: " if place.rank else ""
            print(f"megatron-rl {args.command}: {where}{error}", file=sys.stderr)
        return 2 if isinstance(error, configs.ConfigError) else 1


if __name__ == "__main__":
    sys.exit(main())
