"""What a Trainer makes of its arguments, and what it refuses before anything runs."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

import datasets
import numpy as np
import pytest
from transformers import TrainerCallback

from megatron_rl import Callback, Config, ConfigError, Trainer
from megatron_rl.api import process, push_to_hub
from megatron_rl.commands import check
from megatron_rl.commands.parser import build_parser
from megatron_rl.config.files import load
from megatron_rl.config.schema import TrainConfig
from megatron_rl.data.problems import read_problems
from megatron_rl.data.tiny import tiny_problems, write_tiny_model
from megatron_rl.recipes.grpo import Grpo

SETTINGS = {"updates": 2, "group_size": 4, "prompts_per_iteration": 2, "max_tokens": 8}
ROWS, HELD_OUT = tiny_problems(8)[:4], tiny_problems(8)[4:]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def make(model, tmp_path):
    """Makes a Trainer on the tiny model whose files are in the test's directory."""

    def made(reward="megatron_rl.rewards.tiny_task:grade", dataset=None, **settings):
        own = {"preflight": {"reward": False}} if isinstance(reward, str) else {}
        whole = {"dir": tmp_path, **SETTINGS, **own, **settings}
        return Trainer(model, reward, ROWS if dataset is None else dataset, **whole)

    return made


def test_a_trainer_is_the_run_of_its_yaml_file(make, model, tmp_path):
    trainer = make(lr=1e-3, seed=3, ranks=2, recipe="grpo")
    written = trainer.config.to_yaml(tmp_path / "my.yaml")
    config = load(TrainConfig, [written])
    assert trainer.config.resolve() == config and Config.from_yaml(written) == trainer.config
    role = config.roles["generator"]
    assert (role.model.path, role.optimizer.lr, role.sampling.max_tokens) == (str(model), 1e-3, 8)
    assert (config.recipe.target, config.recipe.args["updates"]) == ("megatron_rl.recipes.grpo:Grpo", 2)
    assert (config.launch.nproc, config.run.seed, config.run.prompts_per_iteration) == (2, 3, 2)
    assert (tmp_path / "inputs" / f"{config.run.name}.yaml").read_text() == written.read_text()
    assert Trainer(config=written).config == trainer.config, "a file alone is the same run"
    assert Trainer(config=config).config == trainer.config


def test_what_is_given_wins_over_the_config_and_the_run_is_named_after_all_of_it(make, tmp_path):
    file = tmp_path / "base.yaml"
    file.write_text(
        "recipe: {target: 'megatron_rl.recipes.tango:Tango', args: {generator_updates: 9}}\n"
        "run: {seed: 1}\nreward: {timeout_s: 9.0, target: a:b, args: {x: 1}}\n"
    )
    first = make(config=file, recipe=Grpo(updates=5, group_size=4), updates=3)
    config = first.config.resolve()
    assert (config.recipe.args["updates"], "generator_updates" in config.recipe.args) == (3, False)
    assert (config.run.seed, config.reward.timeout_s, config.reward.args) == (1, 9.0, {})
    assert re.fullmatch(r"grpo-[0-9a-f]{8}", config.run.name)
    assert make(config=file, recipe=Grpo(updates=5, group_size=4), updates=3).config == first.config
    assert make(config=file, recipe="grpo", seed=2).config.resolve().run.name != config.run.name
    assert make(name="mine").config.resolve().run.name == "mine"
    with contextlib.redirect_stdout(io.StringIO()):  # its roles stay those of the recipe in the file
        assert set(make(config=file, updates=1).config.resolve().roles) == {"generator", "verifier"}


def test_rows_of_all_kinds_become_the_same_problems(make, tmp_path):
    rows = [{"question": "one", "answer": "1", "words": ["a"]}, {"question": "two", "answer": "2"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = (rows, datasets.Dataset.from_list(rows), tuple(rows), tmp_path / "rows.jsonl")
    trainers = [make(dataset=own, eval_dataset=own) for own in given]
    found = [[p.values for p in read_problems(t.config.resolve().data)] for t in trainers]
    assert all(problems == found[0] for problems in found) and found[0][0]["question"] == "one"
    [held] = trainers[0].config.resolve().evaluation.sets
    assert held.title == "eval" and not held.shuffle and len(read_problems(held)) == 2
    again = make(dataset=[{**row, "score": np.float32(1.5), "ids": np.arange(2)} for row in rows])
    [line, _] = Path(again.config.resolve().data.path).read_text().splitlines()
    assert json.loads(line)["score"] == 1.5 and json.loads(line)["ids"] == [0, 1]


def test_trls_rows_are_asked_as_trl_asks_them(make):
    raw = make(dataset=[{"prompt": "say a"}, {"prompt": "say b"}]).config.resolve()
    assert raw.recipe.args["template"] == "plain"
    assert [p.values for p in read_problems(raw.data)] == [{"question": "say a"}, {"question": "say b"}]
    chat = make(dataset=[{"prompt": [{"role": "user", "content": "say a"}]}]).config.resolve()
    assert "template" not in chat.recipe.args and "messages" in read_problems(chat.data)[0].values
    own = make(dataset=[{"prompt": "say a"}], **{"recipe.args.template": "boxed_answer"}).config.resolve()
    assert own.recipe.args["template"] == "boxed_answer"
    assert "template" not in make(dataset=ROWS).config.resolve().recipe.args


def test_rewards_get_the_columns_that_they_name(make):
    rows = [{"prompt": "say a", "word": "a", "task": 1}]

    def named(completions, word, task=None):
        return [1.0] * len(completions)

    def greedy(completions, **columns):
        return [1.0] * len(completions)

    def single(response, payload):
        return 1.0

    assert make(named, rows).config.resolve().data.fields == {"word": "word", "task": "task"}
    assert make([single, greedy], rows).config.resolve().data.fields == {"word": "word", "task": "task"}
    assert make(single, rows).config.resolve().data.fields == {}
    mapped = make(named, rows, eval_dataset=rows, config={"data.fields": {"word": "task"}}).config.resolve()
    assert mapped.data.fields == {"word": "task", "task": "task"}
    assert mapped.evaluation.sets[0].fields == mapped.data.fields
    with pytest.raises(ConfigError, match=r"reward named: its parameter 'word' is no column of .*prompt, task"):
        make(named, [{"prompt": "a", "task": 1}])


BEST = {"metric": "generator/accuracy"}


@pytest.mark.parametrize(
    "given",
    [
        {"evaluation": {"best": BEST}, "evaluate_every": 2},
        {"evaluate_every": 2, "evaluation": {"best": BEST}},
        {"evaluation.best.metric": "generator/accuracy", "evaluate_every": 2},
        {"config": {"evaluation": {"best": BEST}}, "evaluate_every": 2},
        {"config": {"evaluation.best": BEST, "evaluation.every": 2}},
    ],
)
def test_all_arguments_are_merged_before_they_are_checked(make, given):
    evaluation = make(eval_dataset=HELD_OUT, **given).config.resolve().evaluation
    assert (evaluation.best.metric, evaluation.every, len(evaluation.sets)) == ("generator/accuracy", 2, 1)
    with pytest.raises(ConfigError, match=r"evaluation.best without evaluation.sets"):
        make(**given)


def test_an_eval_dataset_stands_beside_other_sets(make, tmp_path):
    held = tmp_path / "held.jsonl"
    held.write_text("".join(json.dumps(row) + "\n" for row in HELD_OUT))
    sets = {"sets": [{"path": str(held)}]}
    both = make(eval_dataset=HELD_OUT, evaluation=sets | {"best": BEST}, evaluate_every=1).config.resolve().evaluation
    assert [one.title for one in both.sets] == ["eval", "held"]
    alone = make(eval_dataset=HELD_OUT, config={"evaluation": sets}).config.resolve().evaluation
    assert [one.title for one in alone.sets] == ["eval"], "an argument wins over the config"


def test_the_preflight_tries_functions_where_the_form_of_an_answer_is_known(make):
    def reward(response, payload):
        return float(payload["answer"] in response)

    assert not make(reward).config.resolve().preflight.reward
    assert make(reward, config={"reward.answer_format": "{answer}"}).config.resolve().preflight.reward
    assert make(reward, preflight={"reward": True}).config.resolve().preflight.reward
    assert make(preflight={"reward": True}).config.resolve().preflight.reward


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lr": -1.0}, "optimizer.lr = -1.0"),
        ({"group_size": 1}, "recipe.args.group_size = 1: give at least 2"),
        ({"max_prompt_tokens": 9000}, "micro_batch_tokens = 8192 is less than max_prompt_tokens"),
        ({"ranks": 3, "roles.generator.layout.tp": 2}, "does not divide 3 ranks"),
        ({"config": {"recipe.args.template": "none_of_this_name"}}, "no prompt template 'none_of_this_name'"),
        ({"model": "/no/such/model"}, "no /no/such/model/config.json"),
        ({"model": {"solver": "x"}}, "model names the role 'solver'"),
        ({"updates": 0}, "updates = 0: give a value greater than or equal to 1"),
        ({"reward": "megatron_rl.rewards.tiny_task:grad"}, "did you mean 'grade'?"),
        ({"dataset": "/no/such/rows.jsonl"}, "/no/such/rows.jsonl"),
        ({"dataset": []}, "data has no rows"),
        ({"dataset": [{"text": "a"}] * 3}, "no question"),
        ({"dataset": [{"prompt": [{"role": "user"}]}]}, "prompt.0 has no content"),
        ({"dataset": {"train": ROWS}}, "one split of a data set"),
        ({"dataset": ["a"]}, "row 0 is a str"),
        ({"dataset": [{"prompt": "a", "image": object()}]}, "row 0, column 'image' (object) has no form in JSON"),
        ({"dataset": [{"prompt": "a", "x": float("nan")}]}, "column 'x'"),
        ({"iterations": 5}, "run.iterations = 5, but the recipe plans 2 iterations"),
        ({"recipe": "no_recipe"}, "recipe 'no_recipe' is not known"),
        ({"callback": []}, "did you mean"),
    ],
)
def test_what_check_refuses_is_refused_when_a_trainer_is_made(make, model, given, words, tmp_path):
    whole = {
        "model": model,
        "reward": "megatron_rl.rewards.tiny_task:grade",
        "dataset": ROWS,
        "dir": tmp_path,
    } | SETTINGS
    with pytest.raises(ConfigError, match=re.escape(words)):
        Trainer(**whole | {"preflight": {"reward": False}} | given)


def test_the_words_are_those_of_check(make, tmp_path, model, capsys):
    trainer = make()
    file = trainer.config.to_yaml(tmp_path / "wrong.yaml")
    overrides = ["roles.generator.micro_batch_tokens=100", "recipe.args.group_size=1"]
    said = []
    for override in overrides:
        with pytest.raises(ConfigError) as caught:
            check.run(build_parser().parse_args(["check", str(file), override]))
        said.append(str(caught.value))
    for words, given in zip(said, ({"micro_batch_tokens": 100}, {"group_size": 1}), strict=True):
        with pytest.raises(ConfigError) as caught:
            make(**given)
        assert str(caught.value) == words


def test_a_callback_that_would_never_be_called_is_refused(make):
    class Steps(Callback):
        def on_step_end(self, state): ...

    with pytest.raises(
        ConfigError, match=r"Steps\.on_step_end is never called; there are on_evaluate, on_iteration_end"
    ):
        make(callbacks=[Steps()])

    class Begins(TrainerCallback):
        def on_step_begin(self, args, state, control, **others):
            pass

    with pytest.raises(ConfigError, match=r"Begins\.on_step_begin is never called; there are on_train_begin"):
        make(callbacks=[Begins()])
    with pytest.raises(ConfigError, match=r"callbacks: int is no class of megatron_rl\.Callback or transformers"):
        make(callbacks=[1])


def test_one_rank_of_several_is_no_place_for_a_trainer(make, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE = 2 ranks.*ranks=..."):
        make()


class FakeHub:
    """The hub, as far as an upload speaks with it."""

    def __init__(self, error=None):
        self.calls, self._error = [], error

    def create_repo(self, repo, **settings):
        self.calls.append((repo, settings))
        if self._error is not None:
            raise self._error
        return f"https://hub.example/{repo}"

    def upload_folder(self, **settings):
        self.calls.append(settings)


def test_an_upload_says_what_stands_in_its_way(make, model, tmp_path, monkeypatch):
    trainer = make(name="up")
    with pytest.raises(ConfigError, match="no trained model in up: call train"):
        trainer.push_to_hub("me/model")
    trained = write_tiny_model(tmp_path / "up/models/generator")
    with pytest.raises(ConfigError, match="trained are generator"):
        trainer.push_to_hub("me/model", role="verifier")
    monkeypatch.setattr(push_to_hub, "get_token", lambda: None)
    monkeypatch.setattr(push_to_hub.constants, "HF_HUB_OFFLINE", False)
    for repo, words in (("me/model", "hf auth login"), ("model", "owner/name"), ("a b/c", "push_to_hub('a b/c')")):
        with pytest.raises(ConfigError, match=re.escape(words)):
            trainer.push_to_hub(repo)
    monkeypatch.setattr(push_to_hub, "get_token", lambda: "token")
    fake = FakeHub()
    monkeypatch.setattr(push_to_hub, "HfApi", lambda: fake)
    assert trainer.push_to_hub("me/model") == "https://hub.example/me/model"
    assert fake.calls[0] == ("me/model", {"private": True, "exist_ok": True})
    assert (fake.calls[1]["repo_id"], fake.calls[1]["folder_path"]) == ("me/model", trained)
    monkeypatch.setattr(push_to_hub, "HfApi", lambda: FakeHub(OSError("no route")))
    with pytest.raises(ConfigError, match="cannot be reached: no route"):
        trainer.push_to_hub("me/model")
    monkeypatch.setattr(push_to_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        trainer.push_to_hub("me/model")


def test_questions_that_cannot_be_asked_are_refused(make):
    trainer = make()
    for prompts in ("one text", []):
        with pytest.raises(ConfigError, match="give a list with at least one prompt"):
            trainer.generate(prompts)
    with pytest.raises(ConfigError, match=r"evaluate\(\) has no data"):
        trainer.evaluate()


def test_a_command_that_fails_says_why(capsys):
    with pytest.raises(ConfigError, match="no such config file: no_such.yaml"):
        process.run(["check", "no_such.yaml"], show=False)
    assert capsys.readouterr().out == ""
