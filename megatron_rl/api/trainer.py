"""Trains a model from Python: `Trainer(model, reward, dataset).train()`."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from megatron_rl.api import data_files, process, push_to_hub
from megatron_rl.api.callbacks import Callback, RunState, take_event
from megatron_rl.api.config import Config, Settings
from megatron_rl.api.names import settings_of
from megatron_rl.api.recipes import fields_of, use_of
from megatron_rl.api.result import TrainResult, read_result
from megatron_rl.commands import check
from megatron_rl.commands.parser import build_parser
from megatron_rl.config import files as config_files
from megatron_rl.config import plugins
from megatron_rl.config.base import ConfigError, Use
from megatron_rl.config.evaluation import NO_SCALE
from megatron_rl.config.schema import EvalConfig, GenerateConfig, Run, TrainConfig
from megatron_rl.data.conversations import MESSAGES, QUESTION
from megatron_rl.rewards.reward_functions import CalledFunction
from megatron_rl.run.atomic_files import write_text

if TYPE_CHECKING:
    from transformers import TrainerCallback

_log = logging.getLogger(__name__)
INPUTS = "inputs"  # subdirectory of run.dir for the rows, reward functions and configs that Trainers write
_DEFAULT_DIR = Run().dir
_TEMPLATES = ("template", "generator_template")  # arguments of recipes that name the prompt template
# Settings of a problem set that are not copied from the training set to the held-out set.
_OF_THE_SET = ("path", "generated", "limit", "split", "file", "subset", "shuffle", "sources")


class Trainer:
    """A training run: a model, rewards, data, a recipe and settings.

    The constructor makes all checks of `megatron-rl check`. The run is the same as that of `megatron-rl train` with the
    YAML file of `config`.
    """

    config: Config  # the whole config; `config.to_yaml(path)` writes it

    def __init__(
        self,
        model: str | Path | Mapping[str, str | Path] | None = None,
        reward: data_files.Reward | None = None,
        dataset: data_files.Rows | str | Path | None = None,
        *,
        eval_dataset: data_files.Rows | str | Path | None = None,
        recipe: Any = None,
        config: Config | TrainConfig | Settings | str | Path | None = None,
        callbacks: Sequence[Callback | TrainerCallback] = (),
        **settings: Any,
    ) -> None:
        """Builds the config, checks it, and writes the given rows and reward functions to RUN.DIR/inputs.

        Args:
            model: A Hugging Face directory or hub name for all roles, or {role: directory or hub name}.
            reward: A function, or a list of functions or pairs (function, weight), see docs/how_to/python_api.md.
            dataset: The training problems: rows (a list of mappings, or a datasets.Dataset), a path or a hub name.
            eval_dataset: The held-out problems, in the same forms as `dataset`.
            recipe: A short name such as ppo (default: grpo), package.module:Class, or a recipe object.
            config: A YAML file's path, a mapping or a Config. All other arguments override it.
            callbacks: Callbacks that are called during `train`, also those of Transformers.
            settings: Short names (see config/other_names.yaml), sections (`run={"seed": 1}`), or dotted keys.

        Raises ConfigError for every config that `megatron-rl check` rejects.
        """
        process.refuse_ranks()
        self.callbacks = [_callback(callback) for callback in callbacks]
        base = _with_recipe(Config.of(config), recipe)
        target = base.get("recipe.target")
        overrides = settings_of(settings, target, ())
        built_recipe = plugins.build(Use(target=target, args=(base | overrides).get("recipe.args", {})))
        roles = list(built_recipe.roles())
        overrides = settings_of(settings, target, roles)
        directory = Path((base | overrides).get("run.dir", _DEFAULT_DIR)) / INPUTS
        paths = dict(model) if isinstance(model, Mapping) else {} if model is None else dict.fromkeys(roles, model)
        if unknown := [role for role in paths if role not in roles]:
            raise ConfigError(f"model names the role {unknown[0]!r}, and the recipe has {', '.join(roles)}")
        for role, path in paths.items():
            base = base | {"roles": {role: {"model": {"path": str(path)}}}}
        base, called = _with_rewards(base, overrides, reward, directory)
        merged = base | overrides
        merged = merged | _data(merged, overrides.get("evaluation.sets"), dataset, eval_dataset, directory)
        self.config = _named(merged | _of_columns(merged, called, target))
        self._file = directory / f"{self.config.get('run.name')}.yaml"
        self._write()
        with contextlib.redirect_stdout(io.StringIO()):
            check.run(build_parser().parse_args(["check", str(self._file), "--command", "train"]))

    def train(self, *, fresh: bool = False) -> TrainResult:
        """Trains until the end of the run, or until a callback stops it, in separate processes (as many as the setting
        `ranks`). Returns the result.

        A run that was interrupted or stopped continues from its newest checkpoint. `fresh`: generate the rollouts of
        the iterations after the checkpoint again, instead of using the saved rollouts. Raises ConfigError if the config
        is rejected, RunFailed with the run's error message if the run fails, and KeyboardInterrupt after an interrupted
        run has saved. Exceptions of callbacks are raised after the run has saved.
        """
        self._write()
        run = self.config.resolve().directory
        state = RunState(run=run, iterations=0)

        def on_event(event: process.Event) -> bool:
            take_event(state, event, self.callbacks)
            return state.stopping

        process.run(["train", str(self._file), *["--fresh"] * fresh], on_event)
        for callback in self.callbacks:
            callback.on_train_end(state)
        return read_result(run)

    def evaluate(
        self, dataset: data_files.Rows | str | Path | None = None, *, n: int | None = None,
        temperature: float | None = None,
    ) -> dict[str, float]:  # fmt: skip
        """Evaluates the model of the recipe's first role with the run's reward: the trained model or, before training,
        the initial model.

        `dataset`: the problems; None: the config's evaluation.sets. `n`: samples of each problem; None: evaluation.n
        for the config's sets, and 1 for `dataset`. `temperature`: None selects greedy decoding if n is 1, and
        evaluation.temperature otherwise. Returns `accuracy` (the fraction of correct answers), `reward` (the mean) and
        the other metrics of `megatron-rl eval`. `accuracy` is missing, with a warning, if `reward.range` is not set and
        a reward is outside of 0 to 1. The `accuracy` of greedy decoding is the metric that a training run calls
        accuracy_greedy. Raises ConfigError if there is no data or the recipe plays episodes of an environment,
        and RunFailed if the evaluation fails.
        """
        config = self.config.resolve()
        sets, run = self._asked(dataset), config.directory
        n = (config.evaluation.n if dataset is None else 1) if n is None else n
        default = 0.0 if n == 1 else config.evaluation.temperature
        number = len([*(run / "evaluations").glob("[0-9]*.json")]) + 1  # iteration_N.json files are not counted
        output = run / "evaluations" / f"{number:03d}.json"
        tree = self._model_settings() | {
            "sets": sets, "n": n, "limit": config.evaluation.limit, "template": self._template(), "output": str(output),
            "reward": self.config.get("reward", {}), "seed": config.run.seed,
            "data_dir": self.config.get("evaluation.data_dir"),
        }  # fmt: skip
        tree["sampling"] = tree["sampling"] | {"temperature": default if temperature is None else temperature}
        self._run("eval", EvalConfig, tree, output.with_suffix(".yaml"))
        metrics = json.loads(output.read_text(encoding="utf-8"))["metrics"]
        if config.reward.threshold is None and "accuracy" not in metrics:
            _log.warning("evaluate() returns no accuracy: %s", NO_SCALE)
        return metrics

    def generate(
        self, prompts: Sequence[str | Sequence[Mapping[str, str]]], *, n: int = 1, max_tokens: int | None = None,
        temperature: float | None = None,
    ) -> list[str] | list[list[str]]:  # fmt: skip
        """Generates answers with the model of the recipe's first role: the trained model or, before training, the
        initial model.

        A prompt is a text, which is formatted like a training problem, or a list of messages. Returns one text for
        each prompt, or a list of `n` texts for each prompt if n is above 1. Raises ConfigError if a prompt is invalid,
        and RunFailed if the generation fails.
        """
        config = self.config.resolve()
        if isinstance(prompts, str) or not prompts:
            raise ConfigError(f"prompts = {prompts!r}: give a list with at least one prompt")
        sampling = {"max_tokens": max_tokens, "temperature": temperature}
        with tempfile.TemporaryDirectory(prefix="megatron_rl_") as place:
            rows = [{"prompt": prompt} for prompt in self._put(prompts)]
            data = data_files.data_settings(rows, "prompts", Path(place)) | {"max_bad_share": 0.0}
            tree = self._model_settings() | {
                "data": data, "template": self._template(), "output": f"{place}/answers", "n": n,
                "seed": config.run.seed, "validation_share": 0.0, "keep_truncated": True,
            }  # fmt: skip
            tree["sampling"] = tree["sampling"] | {k: v for k, v in sampling.items() if v is not None}
            self._run("generate", GenerateConfig, tree, Path(place) / "generate.yaml")
            table = pq.read_table(f"{place}/answers/train.parquet", columns=["response"]).to_pylist()
        texts = [answer if isinstance(answer := row["response"], str) else answer[-1]["content"] for row in table]
        return texts if n == 1 else [texts[place : place + n] for place in range(0, len(texts), n)]

    def push_to_hub(self, repo: str, *, role: str | None = None, private: bool = True) -> str:
        """Uploads a trained model to the repository `owner/name` of the Hugging Face hub, and returns its address.

        The repository is created if necessary. `role`: the role whose model is uploaded; None: the first trained role.
        Raises ConfigError if no model is trained, the name is invalid, or this machine has no token or is offline.
        """
        models = read_result(self.config.resolve().directory).models
        if not models:
            raise ConfigError(f"no trained model in {self.config.get('run.name')}: call train() before push_to_hub")
        if role is not None and role not in models:
            raise ConfigError(f"role = {role!r}: trained are {', '.join(models)}")
        return push_to_hub.push(models[role or next(iter(models))], repo, private=private)

    def _write(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self.config.to_yaml(self._file)

    def _run(self, command: str, schema: Any, tree: Settings, file: Path) -> None:
        """Runs `megatron-rl eval` or `generate` with the settings `tree`. The command's output is shown only if the
        command fails."""
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, config_files.dump(config_files.load(schema, trees=[(command, tree)])))
        process.run([command, str(file)], show=False)

    def _model_settings(self) -> dict[str, Any]:
        """Returns the settings of the model for the commands `eval` and `generate`. The model is that of the recipe's
        first role: the trained model if there is one, otherwise the initial model."""
        config = self.config.resolve()
        role = next(iter(plugins.build(config.recipe).roles()))
        section, policy = self.config.get(f"roles.{role}", {}), config.roles[role].same_as or role
        trained = read_result(config.directory).models.get(policy)
        model = dict(self.config.get(f"roles.{policy}.model"))
        if trained is not None:
            model = {"path": str(trained)} | ({"dtype": model["dtype"]} if "dtype" in model else {})
        settings = {"model": model, "sampling": section.get("sampling", {}), "chat": section.get("chat", False)}
        return settings | {name: self.config.get(name, {}) for name in ("engine", "launch")}

    def _template(self) -> str | None:
        """Returns the path or name of the recipe's prompt template, or None if the recipe has no such argument. Raises
        ConfigError if the recipe plays episodes of an environment."""
        recipe = self.config.resolve().recipe
        arguments = fields_of(recipe.target)
        if "environment" in arguments:
            raise ConfigError(
                f"recipe {recipe.target} plays episodes of an environment, and this asks single questions: the "
                "metrics of its evaluations are in train()'s result"
            )
        named = [name for name in _TEMPLATES if name in arguments]
        return vars(plugins.build(recipe))[named[0]] if named else None

    def _asked(self, dataset: Any) -> list[Any]:
        """Returns the problem sets for a call of `evaluate`, in the format of the setting `sets` of `megatron-rl eval`.
        They are `dataset`, or the config's evaluation.sets if `dataset` is None. Raises ConfigError if both are
        missing.
        """
        held = self.config.get("evaluation.sets") or []
        if dataset is None:
            if not held:
                raise ConfigError("evaluate() has no data: give it a dataset, or the Trainer an eval_dataset")
            return held
        shared = {name: value for name, value in self.config.get("data").items() if name not in _OF_THE_SET}
        set_settings = data_files.data_settings(dataset, "eval", Path(self.config.resolve().run.dir) / INPUTS)
        return [{"name": "eval"} | shared | set_settings]

    def _put(self, prompts: Sequence[Any]) -> list[Any]:
        """Returns all prompts in the same form. They become conversations if any prompt is a conversation, or if the
        training problems are conversations (with several sources: the problems of the first source). Otherwise, all
        prompts stay texts."""
        source = self.config.get("data")
        source = {**source, **next(iter(source["sources"].values()))} if "sources" in source else source
        columns = data_files.prompt_columns(source, data_files.first_row(source) or {})
        trained = bool(source.get("chat")) or source.get("chat") is not False and MESSAGES in columns
        if not trained and all(isinstance(prompt, str) for prompt in prompts):
            return list(prompts)
        system = [] if source.get("system") is None else [{"role": "system", "content": source["system"]}]
        return [[*system, {"role": "user", "content": p}] if isinstance(p, str) else list(p) for p in prompts]


def _callback(callback: Any) -> Callback:
    """Returns a callback, or an object that calls a callback of Transformers. Raises ConfigError for other objects, and
    for a callback with a method that would never be called."""
    name = type(callback).__name__
    if not isinstance(callback, Callback):
        from megatron_rl.api.transformers_callbacks import TrainerCallback, TransformersCallback  # slow imports

        if not isinstance(callback, TrainerCallback):
            raise ConfigError(f"callbacks: {name} is no class of megatron_rl.Callback or transformers.TrainerCallback")
        return TransformersCallback(callback)
    expected, events = ([event for event in dir(owner) if event.startswith("on_")] for owner in (Callback, callback))
    if unknown := [event for event in events if event not in expected]:
        raise ConfigError(f"callbacks: {name}.{unknown[0]} is never called; there are {', '.join(expected)}")
    return callback


def _with_recipe(base: Config, recipe: Any) -> Config:
    """Returns the config `base` with the given recipe. The recipe's arguments in `base` are kept, unless `base` has
    another recipe. `recipe`: None selects the recipe of `base`, or grpo if `base` has no recipe."""
    former = base.get("recipe.target")
    if recipe is None and former is not None:
        return base
    section = use_of("grpo" if recipe is None else recipe)
    kept = base.get("recipe.args", {}) if former in (None, section["target"]) else {}
    return _without(base, "recipe", "args") | {"recipe": section | {"args": kept | section.get("args", {})}}


def _with_rewards(
    base: Config, overrides: Config, reward: data_files.Reward | None, directory: Path
) -> tuple[Config, list[CalledFunction]]:
    """Returns (config with the section `reward` of the given reward functions, the functions with their signatures).

    The check of reward functions before training is switched off, unless one of the configs sets preflight.reward or
    reward.answer_format.
    """
    if reward is None:
        return base, []
    section, called = data_files.reward_settings(reward, directory)
    base = _without(base, "reward", "args") | {"reward": section}
    explicit = any((base | overrides).get(key) is not None for key in ("preflight.reward", "reward.answer_format"))
    return base | ({"preflight.reward": False} if called and not explicit else {}), called


def _data(base: Config, sets: Sequence[Any] | None, dataset: Any, held_out: Any, directory: Path) -> Settings:
    """Returns the config sections `data` and `evaluation` for the given data sets. `dataset`: training problems.
    `held_out`: problems that become the first evaluation set, before the evaluation sets `sets`; they are read with the
    settings of the training problems."""
    sections: dict[str, Any] = {}
    data = base.get("data", {})
    if dataset is not None:
        sections["data"] = data = data | data_files.data_settings(dataset, "data", directory)
    if held_out is not None:
        shared = {name: value for name, value in data.items() if name not in _OF_THE_SET}
        set_settings = data_files.data_settings(held_out, "eval", directory)
        sections["evaluation"] = {"sets": [{"name": "eval"} | shared | set_settings, *(sets or [])]}
    return sections


def _of_columns(config: Config, called: Sequence[CalledFunction], target: str) -> Settings:
    """Returns the settings that follow from the columns of the problem sets. The first is `fields` of each set, with
    the columns that the reward functions need. The second is the template `plain`, if no template is set and the
    prompts are texts in a column `prompt`, which TRL passes to the model unchanged."""
    settings: dict[str, Any] = {}
    source, sets = config.get("data", {}), config.get("evaluation.sets") or []
    if called and source and (fields := data_files.column_fields(called, source, data_files.first_row(source))):
        settings["data.fields"] = fields
    path_sets = [entry for entry in sets if isinstance(entry, Mapping) and entry.get("path")]
    filled = {
        id(entry): {**entry, "fields": entry.get("fields", {}) | fields}
        for entry in path_sets
        if called and (fields := data_files.column_fields(called, entry, data_files.first_row(entry)))
    }
    if filled:
        settings["evaluation.sets"] = [filled.get(id(entry), entry) for entry in sets]
    source = config.get("data", {})
    open_template = "template" in fields_of(target) and config.get("recipe.args.template") is None
    if open_template and source.get("settings") is None and not source.get("chat"):
        row = data_files.first_row(source)
        if row is not None and data_files.prompt_columns(source, row).get(QUESTION) == "prompt":
            settings["recipe.args.template"] = "plain"
    return settings


def _without(config: Config, section: str, key: str) -> Config:
    """Returns a copy of a config without the key `key` of a section."""
    tree = config.settings
    if isinstance(tree.get(section), dict):
        tree[section].pop(key, None)
    return Config(tree)


def _named(config: Config) -> Config:
    """Returns the config with the setting run.name. If run.name is not set, it is set to the recipe's name and a
    digest of the settings, so that runs with different settings have different names."""
    if config.get("run.name") is not None:
        return config
    word = str(config.get("recipe.target")).rpartition(":")[2].lower()
    return config | {"run.name": f"{word}-{hashlib.sha256(str(config).encode()).hexdigest()[:8]}"}
