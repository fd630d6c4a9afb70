"""Parses the settings on a command line, YAML files followed by a.b=c overrides, into a config."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.config import files as config_files
from megatron_rl.config import schema as configs
from megatron_rl.config.other_names import named_elsewhere

SCHEMAS: dict[str, Any] = {
    "train": configs.TrainConfig,
    "sft": configs.SftConfig,
    "generate": configs.GenerateConfig,
    "eval": configs.EvalConfig,
}
# The settings that most configs set, which `megatron-rl settings` lists without --all
COMMON: Mapping[str, tuple[str, ...]] = {
    "train": (
        "roles.NAME.model.path", "roles.NAME.model.dtype", "roles.NAME.model.recompute", "roles.NAME.same_as",
        "roles.NAME.policy", "roles.NAME.layout.tp", "roles.NAME.layout.pp", "roles.NAME.layout.cp",
        "roles.NAME.layout.ep", "roles.NAME.lora.rank", "roles.NAME.optimizer.lr",
        "roles.NAME.optimizer.warmup_steps", "roles.NAME.loss.objective", "roles.NAME.loss.clip_low",
        "roles.NAME.loss.clip_high", "roles.NAME.loss.kl_coef", "roles.NAME.loss.aggregation",
        "roles.NAME.sampling.max_tokens", "roles.NAME.sampling.temperature", "roles.NAME.chat",
        "roles.NAME.max_prompt_tokens", "roles.NAME.micro_batch_tokens", "roles.NAME.samples_per_optimizer_step",
        "recipe.target", "recipe.args", "data.path", "data.fields", "evaluation.sets", "evaluation.every",
        "engine.kind", "engine.replicas", "engine.tp", "engine.colocate", "reward.target", "run.name",
        "run.prompts_per_iteration", "run.save_every", "launch.nproc", "rollouts.max_staleness", "sinks.wandb_project",
    ),
    "sft": (
        "model.path", "model.dtype", "model.recompute", "data.train", "data.validation", "data.max_tokens",
        "loss.objective", "layout.tp", "layout.pp", "lora.rank", "optimizer.lr", "optimizer.warmup_steps",
        "samples_per_step", "steps", "epochs", "validate_every", "micro_batch_tokens", "run.name", "run.save_every",
        "launch.nproc", "sinks.wandb_project",
    ),
    "generate": (
        "model.path", "model.dtype", "data.path", "data.fields", "data.limit", "template", "chat", "output",
        "sampling.max_tokens", "sampling.temperature", "n", "keep_truncated", "reward.target", "engine.kind",
        "engine.replicas", "engine.tp", "launch.nproc", "job.nodes",
    ),
    "eval": (
        "model.path", "model.dtype", "sets", "data_dir", "limit", "template", "chat", "output", "sampling.max_tokens",
        "sampling.temperature", "n", "k", "measures", "reward.target", "engine.kind", "engine.replicas", "engine.tp",
        "launch.nproc",
    ),
}  # fmt: skip


def load(settings: Sequence[str], command: str | None = None) -> tuple[str, Any]:
    """Parses YAML files and overrides. Returns (name of the command that the settings are for, config of the command).

    If `command` is None, infers the command from the keys of the files. Raises ConfigError for a missing file, for keys
    that no command has, and for an invalid config. If a key that no command has is a name of TRL or verl, the message
    says which setting of the command with the most known keys it is here.
    """
    files, overrides = split(settings)
    if command is None:
        tree = config_files.read_top(files)
        unknown = {name: tree.keys() - {f.name for f in dataclasses.fields(s)} for name, s in SCHEMAS.items()}
        command = min(SCHEMAS, key=lambda name: len(unknown[name]))
        if unknown[command] and not any(
            [*named_elsewhere(key, tree[key])] for key in tree.keys() - {"recipe", "roles"}
        ):
            listed = ", ".join(sorted(tree))
            raise configs.ConfigError(f"no command takes all of these keys: {listed}; name one with --command")
    return command, config_files.load(SCHEMAS[command], files, overrides)


def split(settings: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Splits settings into (YAML files, overrides). Raises ConfigError for a missing file."""
    # a path of an existing file with '=' in it, such as runs/lr=1e-3/config.yaml, is a file and not an override
    overrides = [s for s in settings if "=" in s and not os.path.isfile(s)]
    files = [Path(s) for s in settings if s not in overrides]
    missing = [str(f) for f in files if not f.exists()]
    if missing:
        raise configs.ConfigError(f"no such config file: {', '.join(missing)} (an override has the form a.b=c)")
    return files, overrides
