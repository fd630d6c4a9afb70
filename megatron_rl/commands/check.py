"""`megatron-rl check`: validates a config, without torch where there is none, and says what its numbers mean."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_rl.commands.settings import load
from megatron_rl.config import checks as config_checks
from megatron_rl.config import files as config_files
from megatron_rl.config import schema as configs


def run(args: argparse.Namespace) -> int:
    """Prints what the config's numbers mean. Returns 0; raises ConfigError for a wrong config."""
    command, config = load(args.settings, args.schema)
    ranks = args.ranks or config.launch.nproc
    config_checks.check(config, ranks)
    absent = [f"note: {one}" for one in config_checks.absent_files(config)]
    lines = [*config_checks.explain(config, ranks), *_check_plugins(config, ranks), *absent]
    if args.show:
        print(config_files.dump(config), end="")
    for line in [*lines, *_check_data(config)]:
        print("# " + line)
    print(f"# {command}: the config is valid for {ranks} ranks")
    return 0


def _check_plugins(config: Any, ranks: int) -> list[str]:
    """Builds the recipe, the reward and the losses, which import torch, and returns lines on the recipe.

    Without torch, the only line says that they were not checked.
    """
    try:
        import torch  # noqa: F401
    except ImportError:
        return ["the arguments of recipe, reward and losses were not checked: torch is not installed here"]
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
    _check_losses(config)
    absent = [f"note: {one}" for one in config_checks.absent_recipe_files(recipe)]
    return [*config_checks.explain_recipe(config, recipe, ranks), *absent]


def _check_data(config: Any) -> list[str]:
    """Returns what the data on this machine holds; nothing without torch. Raises ConfigError for data that the command
    would refuse."""
    try:
        import torch  # noqa: F401
    except ImportError:
        return []
    from megatron_rl.commands.check_data import data_lines

    return data_lines(config)


def _check_losses(config: configs.TrainConfig) -> None:
    """Raises ConfigError for a role whose objective, or an argument of it, cannot be used."""
    from megatron_rl.algorithms.losses import PolicyLoss

    for name, role in config.roles.items():
        try:
            PolicyLoss(role.loss)
        except configs.ConfigError as error:
            raise configs.ConfigError(f"roles.{name}: {error}") from error
