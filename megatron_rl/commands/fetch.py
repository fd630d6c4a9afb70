"""`megatron-rl fetch`: downloads models and data sets from the Hugging Face Hub to a shared folder."""

from __future__ import annotations

import argparse
import contextlib
import shlex
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.commands.settings import load
from megatron_rl.config.schema import ConfigError, EvalConfig


def run(args: argparse.Namespace) -> int:
    """Downloads the models and data sets, one after the other. Returns 0. Raises ConfigError if a download fails."""
    from megatron_rl.data import hub_fetch

    settings = [word for word in args.what if "=" in word or Path(word).suffix in (".yaml", ".yml")]
    wanted = [hub_fetch.parse(word) for word in args.what if word not in settings]
    config = load(settings)[1] if settings else None
    named = [] if config is None else hub_fetch.wanted_by(config)
    sets = _benchmark_sets(config.benchmarks, config.data_dir) if isinstance(config, EvalConfig) else []
    if settings and not (named or sets):
        print("the config names nothing of the hub: its models and data are files here")
    overrides = [f"data_dir={args.to.absolute() / hub_fetch.DATASETS}"] if sets else []
    for each in [*wanted, *named, *(hub_fetch.Wanted(name=name, kind="dataset") for name in sets)]:
        done = hub_fetch.fetch(each, args.to.absolute())
        verb = "fetched" if done.new else "is here already:"
        print(f"{done.wanted.name} {verb} {len(done.files)} files, {done.size / 1e9:.2f} GB, commit {done.commit[:12]}")
        print(f"  {done.folder}")
        overrides += [f"{key}={done.folder}" for key in each.keys]
    if overrides:
        print("with these overrides a run of this config reads from there:")
        print("  " + " \\\n  ".join(shlex.quote(override) for override in overrides))
    return 0


def _benchmark_sets(names: Sequence[str], data_dir: str | None) -> list[str]:
    """Returns the Hugging Face Hub names of the data sets of the benchmarks `names`, without duplicates.

    Returns an empty list if `data_dir` is set and has all of them. Raises ConfigError for an unknown benchmark.
    """
    from megatron_rl.evaluation.benchmarks import benchmark, source_of

    found = [benchmark(name) for name in names]
    if data_dir is not None:
        with contextlib.suppress(ConfigError):
            for one in found:
                source_of(one, data_dir)
            return []
    return [*dict.fromkeys(one.hub for one in found)]
