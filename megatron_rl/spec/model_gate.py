"""Checks a model directory before a command loads it. Every command that loads models calls `check_model`, directly or
through `check_models`, so that all commands accept and refuse the same directories.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_rl.config.base import ConfigError, refusing
from megatron_rl.config.engines import Servers
from megatron_rl.config.model import Head, Lora, Model
from megatron_rl.run import file_checksums
from megatron_rl.spec.run_spec import EngineSpec, EvalSpec, RoleSpec, RunSpec, SftSpec, Spec
from megatron_rl.texts.text import TOKENIZER_FILES


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model that a command loads, and what the command loads it as."""

    model: Model
    head: Head | None = None  # what the model's head computes; None for a language model
    trained: bool = False  # whether the model is trained, in which case a head that the files lack is a new head
    lora: Lora | None = None  # settings of the LoRA adapter that is trained on the model
    has_weights: bool = True  # False if only servers on other hosts load the weights


def loaded_models(spec: Spec) -> list[LoadedModel]:
    """Returns the models that the command of a specification loads: those of the roles, and frozen juniors of Tandem
    RL."""
    trained = spec.policy_of if isinstance(spec, RunSpec) else spec.roles if isinstance(spec, SftSpec) else ()
    compared = isinstance(spec, EvalSpec) and "drift" in spec.config.measures  # embedded engines compare the models
    return models_of_roles(
        spec.roles.values(),
        trained=trained,
        remote=not compared and spec.engine is not None and _is_remote(spec.engine),
    )


def models_of_roles(
    roles: Iterable[RoleSpec], *, trained: Collection[str] = (), remote: bool = False
) -> list[LoadedModel]:
    """Returns the models of roles, and their juniors, without duplicates. `trained`: names of the trained roles.
    `remote`: whether engines on other hosts load the weights of roles that have no policy."""
    models = dict[LoadedModel, None]()
    for role in roles:
        if role.endpoint is not None or role.owner != role.name or not role.model.path:
            continue
        loaded = LoadedModel(
            model=role.model, head=role.head, trained=role.name in trained, lora=role.lora,
            has_weights=role.has_policy or not remote,
        )  # fmt: skip
        models[loaded] = None
        if role.tandem is not None and role.tandem.junior is not None:
            models[LoadedModel(model=Model(path=role.tandem.junior), has_weights=not remote)] = None
    return [*models]


def _is_remote(engine: EngineSpec) -> bool:
    """Checks whether the engines are servers that the run does not start."""
    settings = engine.settings
    return isinstance(settings, Servers) and (bool(settings.urls) or not settings.start)


def check_models(models: Iterable[LoadedModel], *, only_here: bool = False) -> None:
    """Calls `check_model` for each model, and compares the weight files with the directory's SHA256SUMS, if there is
    one.

    `only_here`: whether to skip models that are not in a local directory. Otherwise, models are downloaded from the
    Hugging Face Hub. Raises ConfigError for the first model that cannot be used.
    """
    for loaded in models:
        path = Path(loaded.model.path)
        if only_here and not path.is_dir():
            continue
        if path.is_dir() and loaded.has_weights:
            file_checksums.refuse(file_checksums.wrong_of(path))
        check_model(loaded)


def check_model(loaded: LoadedModel, *, cast: bool = True) -> None:
    """Raises ConfigError unless the model's files describe one complete model that this project computes as
    transformers does.

    The config.json must be supported. The tensors must be those that config.json asks for (`hf_model.check`, which
    explains `cast`). All tokens that the tokenizer, if there is one, uses must have an embedding row. A LoRA adapter
    must belong to the model. Only headers of weight files are read, and the adapter.
    """
    # Imported here because these imports take seconds, and the supervisor process of a server does not need them.
    from megatron_rl.texts.chat_template import tokenizer_of
    from megatron_rl.weights import hf_model, lora_adapters

    model, lora = loaded.model, loaded.lora
    with refusing(str, FileNotFoundError):
        directory = hf_model.local_directory(model.path)
        arch = hf_model.read_architecture(directory, loaded.head)
        if loaded.has_weights and model.init == "pretrained":
            hf_model.check(directory, arch, cast=cast, has_new_head=loaded.trained)
        tokenizer = hf_model.local_directory(model.tokenizer or model.path)
        if any((tokenizer / name).is_file() for name in TOKENIZER_FILES):
            tokenizer_of(replace(model, path=str(directory)))
    if lora is not None and lora.path is not None:
        lora_adapters.read(lora.path, arch, lora)
    if lora is not None and loaded.head == "score" and loaded.trained:
        ends, pad = hf_model.eos_tokens(directory, arch.config), arch.config.pad_token_id
        if pad is not None and pad in ends:
            raise ConfigError(
                f"{directory}/config.json: pad_token_id = {pad} is an end token, so that transformers and peft would "
                "read another score than the adapter was trained with: set it to null, or to a token that ends no text"
            )
