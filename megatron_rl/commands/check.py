"""`megatron-rl check`: validates a config without starting the config's command, and explains the settings.

Without `--deep`, torch is not imported, unless a plug-in of the config imports it, and no tokenizer is loaded.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megatron_rl.commands.settings import load, split
from megatron_rl.config import files as config_files
from megatron_rl.config import plugins
from megatron_rl.config.base import Use
from megatron_rl.config.schema import RoleConfig, TrainConfig
from megatron_rl.session.launch_ranks import has_gpu
from megatron_rl.spec import automatic, missing_files
from megatron_rl.spec.explain import explain, explain_recipe, float32_notes, node_notes
from megatron_rl.spec.model_gate import check_models, loaded_models
from megatron_rl.spec.resolve import resolve
from megatron_rl.spec.run_spec import Host, RunSpec, Spec
from megatron_rl.spec.server_gpus import device_problems


def run(args: argparse.Namespace) -> int:
    """Validates a config and prints explanations of its settings. Returns 0. Raises ConfigError for an invalid
    config."""
    command, config = load(args.settings, args.schema)
    ranks, lines = args.ranks or config.launch.nproc, list[str]()
    config = automatic.chosen(config, ranks, say=lines.append)
    # If the number of ranks is not launch.nproc, torchrun or srun starts them, maybe on several hosts. This host then
    # counts as a host of one rank, because at least one rank must run on each host.
    host = Host(config.launch.nproc if ranks == config.launch.nproc else 1, has_gpu(os.environ))
    spec = resolve(config, ranks, to_come=args.elsewhere, host=None if args.elsewhere else host)
    lines += explain(spec) + gpu_notes(spec, host)
    if isinstance(spec, RunSpec):
        lines += explain_recipe(spec)
    if args.deep:
        rewards = spec.rewards.values() if isinstance(spec, RunSpec) else [spec.reward] if spec.reward else []
        for reward in rewards:
            plugins.build(Use(target=reward.target, args=reward.args))
        check_models(loaded_models(spec), only_here=True)
    lines += [f"note: {note}" for note in (float32_notes(spec) if host.gpus else [])]
    nodes = spec.cluster.job.nodes if args.ranks else 1  # without --ranks, all ranks are on this host
    lines += [f"note: {note}" for note in (node_notes(spec, ranks // nodes) if ranks % nodes == 0 else ())]
    lines += [f"note: {absent}" for absent in missing_files.absent_files(spec) if args.elsewhere or absent.on_hub]
    if isinstance(config, TrainConfig):
        lines += [f"note: {ignored}" for ignored in ignored_settings(config.roles, *split(args.settings))]
    if args.show:
        print(config_files.dump(config), end="")
    from megatron_rl.commands.check_data import all_here, data_lines

    lines += data_lines(spec, deep=args.deep)
    if args.deep and isinstance(spec, RunSpec):
        if all_here(spec):
            from megatron_rl.commands.check_trials import trial_lines  # imports torch

            lines += trial_lines(spec, starts_here=not args.elsewhere)
        else:
            lines.append("not tried: the reward and the prompts, as models or data are not on this machine")
    for line in lines:
        print("# " + line)
    print(f"# {command}: the config is valid for {ranks} ranks")
    return 0


def ignored_settings(roles: Mapping[str, RoleConfig], files: Sequence[Path], overrides: Sequence[str]) -> Iterator[str]:
    """Yields the settings in files and overrides that have no effect, because their role shares the policy of another
    role (`same_as`) and has other values there."""
    for name, settings in config_files.read_tree(TrainConfig, files, overrides)["roles"].items():
        role = config_files.tree_of(roles[name])
        for key, value in settings.items() if role["same_as"] else ():
            if value != role[key] and not (isinstance(value, Mapping) and value.items() <= (role[key] or {}).items()):
                yield (
                    f"roles.{name}.{key} has no effect, because {name} shares the policy of {role['same_as']} "
                    f"(same_as): set roles.{role['same_as']}.{key}, or leave it out"
                )


def gpu_notes(spec: Spec, host: Host) -> list[str]:
    """Returns notes about server GPU indices that would be rejected on a host with GPUs.

    The messages are notes and not errors, because the run may be intended for another host."""
    if isinstance(spec, RunSpec) and not getattr(spec.engine.settings, "gpus", ()):
        # engine.gpus may be empty: on a host without GPUs, or if a cluster profile starts the servers on other hosts
        return []
    return [f"note: refused on a host with GPUs: {problem}" for problem in device_problems(spec.engine, host.ranks)]
