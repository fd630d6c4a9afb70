"""`megatron-rl fetch`: downloads models and data sets from the Hugging Face Hub to a shared folder."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from megatron_rl.commands.settings import load
from megatron_rl.config.evaluation import Sets, sets_of
from megatron_rl.config.schema import EvalConfig, TrainConfig


def run(args: argparse.Namespace) -> int:
    """Downloads models and data sets, one after the other. Returns 0. Raises ConfigError if a download fails."""
    from megatron_rl.data import hub_fetch

    settings = [word for word in args.what if "=" in word or Path(word).suffix in (".yaml", ".yml")]
    downloads = [hub_fetch.parse(word) for word in args.what if word not in settings]
    config = load(settings)[1] if settings else None
    named = [] if config is None else hub_fetch.wanted_by(config)
    sets, place = list[str](), ""
    if isinstance(config, EvalConfig):
        sets = _hub_sets(config.sets, config.data_dir)
    elif isinstance(config, TrainConfig):
        sets, place = _hub_sets(config.evaluation.sets, config.evaluation.data_dir), "evaluation."
    if settings and not (named or sets):
        print("the config names nothing of the hub: its models and data are files here")
    overrides = [f"{place}data_dir={args.to.absolute() / hub_fetch.DATASETS}"] if sets else []
    for download in [*downloads, *named, *(hub_fetch.Wanted(name=name, kind="dataset") for name in sets)]:
        done = hub_fetch.fetch(download, args.to.absolute())
        verb = "fetched" if done.new else "is here already:"
        print(f"{done.repo.name} {verb} {len(done.files)} files, {done.size / 1e9:.2f} GB, commit {done.commit[:12]}")
        print(f"  {done.folder}")
        overrides += [f"{key}={done.folder}" for key in download.keys]
    if overrides:
        print("with these overrides a run of this config reads from there:")
        print("  " + " \\\n  ".join(shlex.quote(override) for override in overrides))
    return 0


def _hub_sets(sets: Sets, data_dir: str | None) -> list[str]:
    """Returns the Hugging Face Hub names of the data sets that an evaluation reads, without duplicates.

    Leaves out data sets that are on this machine already: local files, and data sets in `data_dir`. Raises ConfigError
    for an unknown benchmark.
    """
    from megatron_rl.data.benchmarks import benchmark, source_of
    from megatron_rl.data.hub_fetch import on_hub

    names: list[str] = []
    for entry in sets_of(sets):
        name = entry.path or benchmark(entry.name).hub or ""
        is_local = False
        if data_dir is not None:
            place = Path(data_dir) / entry.path if entry.path else Path(source_of(benchmark(entry.name), data_dir).path)
            is_local = place.exists()
        names += [name] if on_hub(name) and not is_local else []
    return [*dict.fromkeys(names)]
