"""`megatron-rl check`: refuses a config that its command would refuse, without starting it, and says what its numbers
mean.

Torch is not imported, unless a plug-in of the config does so, and no tokenizer is loaded: `--deep` does both.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from megatron_rl.commands.settings import load
from megatron_rl.config import absent as absences
from megatron_rl.config import checks as config_checks
from megatron_rl.config import files as config_files
from megatron_rl.config import plugins, server_gpus, signal
from megatron_rl.config import schema as configs
from megatron_rl.session.launch import has_gpu


def run(args: argparse.Namespace) -> int:
    """Prints what the config's numbers mean. Returns 0; raises ConfigError for a wrong config."""
    command, config = load(args.settings, args.schema)
    ranks = args.ranks or config.launch.nproc
    config_checks.check(config, ranks, to_come=args.elsewhere)
    notes = _check_gpus(config, ranks, elsewhere=args.elsewhere)
    absent = absences.absent_files(config)
    if not args.elsewhere:
        absences.refuse(config)
    lines = config_checks.explain(config, ranks) + notes
    lines += _check_plugins(config, ranks, elsewhere=args.elsewhere, deep=args.deep)
    if args.deep:
        from megatron_rl.commands.check_models import check_models  # it imports torch

        check_models(config)
    lines += [f"note: {one}" for one in (absent if args.elsewhere else [a for a in absent if a.on_hub])]
    if args.show:
        print(config_files.dump(config), end="")
    for line in [*lines, *_check_data(config, deep=args.deep)]:
        print("# " + line)
    print(f"# {command}: the config is valid for {ranks} ranks")
    return 0


def _check_gpus(config: Any, ranks: int, *, elsewhere: bool) -> list[str]:
    """Returns a note on GPUs of servers that cannot be meant, where this host has none: the run may be for another one.

    Raises ConfigError for them where it has some, unless the run is for `elsewhere`. Of ranks that another launcher
    starts only the first one's GPU is known.
    """
    here = config.launch.nproc if ranks == config.launch.nproc else 1
    if has_gpu(os.environ) and not elsewhere:
        server_gpus.refuse(config, here)
    if isinstance(config, configs.TrainConfig) and not getattr(config.engine, "gpus", ()):
        return []  # right on a CPU, and a site's profile may start the servers elsewhere
    return [f"note: refused on a host with GPUs: {one}" for one in server_gpus.device_problems(config, here)]


def _check_plugins(config: Any, ranks: int, *, elsewhere: bool, deep: bool) -> list[str]:
    """Builds the recipe and the losses, looks at the reward, and returns lines on the recipe. With `deep` the reward is
    imported too."""
    if vars(config).get("reward") is not None:
        use = configs.Use(target=config.reward.target, args=config.reward.args)
        plugins.look_at(use)
        if deep:
            plugins.build(use)
    if isinstance(config, configs.EvalConfig):
        from megatron_rl.evaluation.benchmarks import benchmark

        for name in config.benchmarks:
            benchmark(name)
    if not isinstance(config, configs.TrainConfig):
        return []
    recipe = plugins.build(config.recipe)
    config_checks.check_recipe(config, recipe)
    learns = _check_losses(config)
    signal.check(config, recipe, learns)
    absent = absences.absent_recipe_files(recipe)
    if not elsewhere:
        absences.refuse(config, *absent)
    return [*config_checks.explain_recipe(config, recipe, ranks), *(f"note: {one}" for one in absent)]


def _check_data(config: Any, *, deep: bool) -> list[str]:
    """Returns what the data on this machine holds. Raises ConfigError for data that the command would refuse."""
    from megatron_rl.commands.check_data import data_lines

    return data_lines(config, deep=deep)


def _check_losses(config: configs.TrainConfig) -> frozenset[str]:
    """Returns the roles whose loss reads advantages. Raises ConfigError for a role whose objective, or an argument of
    it, cannot be used."""
    from megatron_rl.algorithms.losses import PolicyLoss

    found = set()
    for name, role in config.roles.items():
        try:
            if PolicyLoss(role.loss).uses_advantages:
                found.add(name)
        except configs.ConfigError as error:
            raise configs.ConfigError(f"roles.{name}: {error}") from error
    return frozenset(found)
