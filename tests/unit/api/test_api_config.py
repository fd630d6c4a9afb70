"""The Python config and its YAML file, both ways; the commands that write configs and list settings."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import numpy as np
import pytest

from megatron_rl import Config, ConfigError
from megatron_rl.api.names import settings_of
from megatron_rl.api.recipes import use_of
from megatron_rl.api.trainer import _with_recipe
from megatron_rl.commands import init
from megatron_rl.commands.parser import ADVANCED, build_parser
from megatron_rl.commands.settings import COMMON, SCHEMAS
from megatron_rl.config.describe import settings_of as listed
from megatron_rl.config.evaluation import EvalConfig
from megatron_rl.config.files import dump, load
from megatron_rl.config.other_names import RECIPES, SHORT, TRL, VERL
from megatron_rl.config.plugins import find
from megatron_rl.config.schema import LossConfig, Optimizer, TrainConfig
from megatron_rl.data.tiny import write_tiny_model, write_tiny_problems
from megatron_rl.main import main
from megatron_rl.planning.workload import FILL
from megatron_rl.recipes.grpo import Grpo
from megatron_rl.texts.text import load_tokenizer
from megatron_rl.training.iteration import Recipe

ROOT = Path(__file__).parents[3]
EXAMPLES = [
    path
    for path in sorted((ROOT / "examples").rglob("*.yaml"))
    if {"roles", "recipe"} <= set(re.findall(r"^(\w+):", path.read_text(), re.MULTILINE))
]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_yaml_file_and_the_python_config_are_the_same_both_ways(path, tmp_path):
    yaml = load(TrainConfig, [path])
    config = Config.from_yaml(path)
    assert config.resolve() == yaml
    written = config.to_yaml(tmp_path / "written.yaml")
    assert load(TrainConfig, [written]) == yaml and Config.from_yaml(written) == config
    assert written.read_text() == dump(yaml), "what `check --print` shows"
    assert Config(yaml.__dict__).resolve() == yaml and Config.of(yaml) == config


def test_settings_may_be_nested_dotted_or_of_the_schema(tmp_path):
    file = tmp_path / "part.yaml"
    file.write_text("run: {seed: 1, iterations: 4}\nroles: {solver: {optimizer: {lr: 1e-4}}}\n")
    nested = Config(run={"seed": 1, "iterations": 4}, roles={"solver": {"optimizer": {"lr": 1e-4}}})
    dotted = Config({"run.seed": 1, "run.iterations": 4, "roles.solver.optimizer.lr": 1e-4})
    assert nested == dotted == Config.from_yaml(file) and hash(nested) == hash(dotted)
    assert nested.get("run.seed") == 1 and nested.get("run.name") is None and nested.get("run.name", "x") == "x"
    of_schema = Config(roles={"solver": {"optimizer": Optimizer(lr=1e-4)}})
    assert of_schema.get("roles.solver.optimizer.lr") == 1e-4
    both = nested | {"run.seed": 2}
    assert (both.get("run.seed"), both.get("run.iterations"), nested.get("run.seed")) == (2, 4, 1)
    nested.settings["run"]["seed"] = 3
    assert nested.get("run.seed") == 1, "what is handed out is a copy"
    assert Config.from_yaml(nested.to_yaml(tmp_path / "again.yaml")) == nested, "a part of a config is written as it is"
    assert Config.of(str(file)) == nested and Config.of({"run.seed": 1}) == Config(run={"seed": 1})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"run.sede": 1}, "run.sede: unknown key; did you mean 'seed'?"),
        ({"run": {"seed": "one"}}, 'run.seed = "one": give a whole number'),
        ({"roles": {"a": {"optimizer": {"lr": -1.0}}}}, "roles.a.optimizer.lr = -1.0"),
        ({"roles.a.loss.kl_clamp": 1.0, "roles.a.loss.kl": "k1"}, "loss.kl_clamp = 1.0 with loss.kl = 'k1'"),
        ({"roles": {"a": {"same_as": "a"}}}, "roles.a.same_as = 'a': name another role"),
        ({"evaluation": {"sets": [{"path": "x", "chat": "yes"}]}}, "evaluation.sets.0.chat"),
        ({"run.": 1}, "config key 'run.': it has the form a.b"),
        ({"run": {1: 2}}, "run.1: unknown key"),
        ({"data": {"filters": {"x": np.int64(3)}}}, "is a int64: give a number, a text"),
        ({"recipe": 3}, "recipe"),
    ],
)
def test_what_the_yaml_may_not_have_is_refused_at_once(settings, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        Config(settings)


def test_a_part_that_is_missing_is_named_when_the_whole_is_asked_for():
    with pytest.raises(ConfigError, match=r"roles: missing(.|\n)*|data: missing") as caught:
        Config(run={"seed": 1}).resolve()
    assert all(f"{name}: missing" in str(caught.value) for name in ("roles", "recipe", "data"))
    for wrong in (3, object()):
        with pytest.raises(ConfigError, match="give a Config, a mapping, or the path"):
            Config.of(wrong)
    with pytest.raises(ConfigError, match="no such config file"):
        Config.of("no/such.yaml")
    assert (
        LossConfig() == Config(roles={"a": {}}, recipe={"target": "a:B"}, data={"path": "x"}).resolve().roles["a"].loss
    )


def test_short_names_are_settings_that_exist():
    given = {"updates": 7, "lr": 0.5, "ranks": 2, "temperature": 0.25, "run": {"seed": 5}, "roles.b.chat": True}
    config = settings_of(given, RECIPES["tango"], ["a", "b"])
    assert config.settings == {
        "recipe": {"args": {"generator_updates": 7}},
        "launch": {"nproc": 2},
        "run": {"seed": 5},
        "roles": {
            "a": {"optimizer": {"lr": 0.5}, "sampling": {"temperature": 0.25}},
            "b": {"optimizer": {"lr": 0.5}, "sampling": {"temperature": 0.25}, "chat": True},
        },
    }
    known = {text.partition(" = ")[0] for text, _ in listed(TrainConfig)}
    for name, key in SHORT.items():
        assert key.startswith("recipe.args.") or key.replace("*", "NAME") in known, name
    for name, text in {**TRL, **VERL}.items():
        keys = re.findall(r"\b(?:roles|run|engine|reward|data|evaluation|launch|job|sinks)\.[\w.*]+", text)
        assert keys or text.startswith(("recipe.", "evaluation", "no setting:")), name
        assert {re.sub(r"^roles\.(\*|critic|verifier)", "roles.NAME", key) for key in keys} <= known, name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("num_generations", "this is TRL's name; here it is group_size (recipe.args.group_size)"),
        ("train_dataset", "here it is dataset"),
        ("peft_config", "here it is roles.*.lora"),
        ("per_device_train_batch_size", "here it is run.prompts_per_iteration"),
        ("learning_rate", "here it is lr (roles.*.optimizer.lr)"),
        ("load_best_model_at_end", "here it is evaluation.best"),
        ("push_to_hub", "here it is no setting: call Trainer.push_to_hub"),
        ("update", "did you mean 'updates'?"),
        ("xyzzy", "unknown setting; there are updates"),
    ],
)
def test_an_unknown_name_is_refused_with_the_one_that_is_meant(name, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        settings_of({name: 1}, RECIPES["grpo"], ["a"])


def test_names_of_verl_are_answered_alike_in_python_and_in_overrides(tmp_path):
    """The named ones with their setting, the others with the way to find it."""
    tree = {"actor": {"optim": {"lr": 1.0}}, "hybrid_engine": True}
    words = (
        "actor_rollout_ref.actor.optim.lr: this is verl's name; here it is roles.NAME.optimizer.lr",
        "actor_rollout_ref.hybrid_engine: this is verl's name; list the settings here by `megatron-rl settings`",
    )
    with pytest.raises(ConfigError) as caught:
        settings_of({"actor_rollout_ref": tree}, RECIPES["grpo"], ["a"])
    assert all(one in str(caught.value) for one in words)
    with pytest.raises(ConfigError) as caught:
        load(TrainConfig, [], ["recipe.target=grpo", f"actor_rollout_ref={json.dumps(tree)}"])
    assert all(one.replace(": this", ": unknown key; this") in str(caught.value) for one in words)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("learning_rate=1e-5", "learning_rate: unknown key; this is TRL's name; here it is roles.NAME.optimizer.lr"),
        ("roles.generator.lora.r=4", "r: unknown key; this is TRL's name; here it is roles.NAME.lora.rank"),
        ("trainer={save_freq: 2, nnodes: 3}", "trainer.nnodes: unknown key; this is verl's name; here it is job.nodes"),
        ("trainer={save_freq: 2, nnodes: 3}", "trainer.save_freq: unknown key; this is verl's name"),
        ("data.train_batch_size=4", "data.train_batch_size: unknown key; this is verl's name"),
        ("actor_rollout_ref.actor.optim.lr=1", "this is verl's name; here it is roles.NAME.optimizer.lr"),
        (
            "algorithm.alpha_start=0.5",
            "this is verl's name; here it is recipe.args.alpha_start, with recipe.target=tango",
        ),
        ("actor_rollout_ref.odd=1", "actor_rollout_ref.odd: unknown key; this is verl's name; list the settings here"),
        ("recipe.target=grppo", "target = 'grppo' is no recipe; did you mean 'grpo'?"),
    ],
)
def test_a_config_with_a_name_of_another_library_says_the_name_here(override, words):
    tree = {"recipe": {"target": "grpo"}, "roles": {"generator": {"model": {"path": "x"}}}, "data": {"path": "y"}}
    assert load(TrainConfig, trees=[("own", tree)]).recipe.target == RECIPES["grpo"]
    with pytest.raises(ConfigError, match=re.escape(words)):
        load(TrainConfig, overrides=[override], trees=[("own", tree)])


def test_a_train_config_given_to_eval_is_called_so():
    """Seven keys were unknown, and the first was to be 'data_dir'."""
    with pytest.raises(ConfigError, match="roles: unknown key; only configs of `train` have it; `eval` needs"):
        load(EvalConfig, trees=[("own", {"roles": {"generator": {"model": {"path": "x"}}}})])


def test_a_config_may_name_its_recipe_by_a_word_and_keeps_its_arguments_beside_the_same_recipe(tmp_path):
    (tmp_path / "my.yaml").write_text("recipe: {target: grpo, args: {updates: 15}}")
    for own in (tmp_path / "my.yaml", {"recipe": {"target": "grpo", "args": {"updates": 15}}}):
        config = Config.of(own)
        assert config.settings["recipe"] == {"target": RECIPES["grpo"], "args": {"updates": 15}}
        assert _with_recipe(config, "grpo").get("recipe.args.updates") == 15
        assert _with_recipe(config, "ppo").get("recipe.args") == {}


def test_recipes_are_words_names_or_objects():
    for word, target in RECIPES.items():
        assert issubclass(find(target), Recipe) and use_of(word) == {"target": target}
    made = use_of(Grpo(updates=3, group_size=4))
    assert made["target"] == RECIPES["grpo"] and made["args"]["updates"] == 3 and made["args"]["group_size"] == 4
    for wrong, words in (
        ("grpoo", "did you mean 'grpo'?"),
        (Grpo, "give a word"),
        (3, "give a word"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            use_of(wrong)
    own = type("Own", (Grpo,), {"__module__": "__main__"})
    with pytest.raises(ConfigError, match="put the class into a module"):
        use_of(own(updates=1))


@pytest.mark.parametrize("kind", sorted(path.stem for path in init.STARTS.glob("*.yaml")))
@pytest.mark.parametrize("which", ["hub", "own", "tiny"])
def test_check_accepts_every_config_that_init_writes(kind, which, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["init", kind, "configs/my.yaml"]
    if which == "own":
        words += ["--model", str(write_tiny_model("model")), "--data", str(write_tiny_problems("rows.jsonl", 8))]
    assert main([*words, *(["--tiny", "tiny"] if which == "tiny" else [])]) == 0
    assert main(["check", "configs/my.yaml"]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert "the config is valid for 1 ranks" in said and ("problems; prompts" in said) == (which != "hub")
    text = Path("configs/my.yaml").read_text()
    assert (
        "# if" not in text and "# end" not in text and "__" not in text and "megatron-rl train configs/my.yaml" in text
    )
    assert max(map(len, text.splitlines())) <= 120 and len(text.splitlines()) <= 60
    keys = [line for line in text.splitlines() if not line.startswith("#")]
    assert sum("#" in line for line in keys) >= 8, "it is commented"


def test_init_writes_over_nothing_and_says_what_contradicts(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "grpo", "my.yaml"]) == 0 and main(["init", "grpo", "my.yaml"]) == 2
    assert "my.yaml is there already" in capsys.readouterr().err
    assert main(["init", "tango", "my.yaml", "--force"]) == 0 and "Tango" in Path("my.yaml").read_text()
    assert main(["init", "grpo", "b.yaml", "--tiny", "t", "--model", "m"]) == 2
    assert "leave --model and --data out" in capsys.readouterr().err and not Path("b.yaml").exists()


@pytest.mark.parametrize("command", SCHEMAS)
def test_without_a_word_the_common_settings_are_listed(command, capsys):
    assert main(["settings", "--command", command]) == 0
    *lines, rest = capsys.readouterr().out.splitlines()
    names = [line.partition(" = ")[0] for line in lines if line and not line.startswith(" ")]
    assert sorted(names) == sorted(COMMON[command]) and len(names) <= 40 and "--all" in rest
    assert str(len(listed(SCHEMAS[command]))) in rest


@pytest.mark.parametrize("command", ["train", "sft", "generate", "eval", "init", "settings"])
def test_help_fits_a_screen(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        build_parser().parse_args([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 80
    if command in ("train", "sft", "generate", "eval"):
        assert f"megatron-rl settings --command {command}" in "\n".join(lines) and "--events" not in "\n".join(lines)


def test_advanced_commands_stand_last_in_the_help():
    texts = dict(re.findall(r"^ {4}(\w+) +(\S.*)$", build_parser().format_help(), re.MULTILINE))
    last = [*texts][-len(ADVANCED) :]
    assert sorted(last) == sorted(ADVANCED) and all(texts[name].startswith("advanced: ") for name in last)


def test_every_argument_of_every_command_has_a_help_text():
    """`report --rollouts` had lost its text, because its comment stood behind a closing bracket."""
    silent, left = [], [("", build_parser())]
    while left:
        name, parser = left.pop()
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                left += [(f"{name} {word}".strip(), parser) for word, parser in action.choices.items()]
            elif not action.help and name != "slice":  # `slice` is for the batch scripts
                silent.append(f"{name} {action.dest}")
            elif action.dest == "fill":
                assert f"(default: {FILL})" in action.help
    assert not silent


def test_settings_are_listed_by_their_beginning_or_a_word(capsys):
    def names(*words):
        assert main(["settings", *words]) == 0
        return [line.partition(" = ")[0] for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]

    everything = names("--all")
    assert len(everything) == len(listed(TrainConfig)) and "run.prompts_per_iteration" in everything
    run = names("run")
    assert set(run) == {name for name in everything if name.split(".")[0] == "run"} and "run.seed" in run
    assert names("roles.solver.layout") == names("roles.NAME.layout") and "roles.NAME.layout.tp" in names(
        "roles.x.layout"
    )
    assert "roles.NAME.optimizer.lr" in names("lr") and names("optimizer.lr")[0] == "roles.NAME.optimizer.lr"
    assert names("run.prompts") == ["run.prompts_per_iteration"]
    assert "epochs" in names("--command", "sft") and "optimizer.lr" in names("--command", "sft", "optimizer.lr")
    assert main(["settings", "no_such"]) == 2 and "no setting of train has 'no_such'" in capsys.readouterr().err
    main(["settings", "rollouts.mixed"])
    said = capsys.readouterr().out
    assert (
        said.startswith('rollouts.mixed = "keep"\n    What to do with a rollout')
        and max(map(len, said.splitlines())) <= 100
    )


def test_a_tiny_model_reads_capitals_as_small_letters_and_leaves_out_what_it_does_not_know(tmp_path):
    tokenizer = load_tokenizer(write_tiny_model(tmp_path))
    chat = [{"role": "user", "content": "Hi, Élan; 7!"}]
    text = tokenizer.decode(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
    assert text == "<|user|>hi, lan 7!<|end|><|assistant|>"
