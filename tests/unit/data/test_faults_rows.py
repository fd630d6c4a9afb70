"""Rows that are left out are said, counted, and refused where they are many: prompts and samples that are too long."""

from __future__ import annotations

import json
import logging
import re

import pytest
from scripted_rollouts import by_row, context_of, reader_of
from specs import spec_of
from test_self_play import Tasks, recipe_of
from test_self_play import context_of as self_play_table
from test_self_play import texts as self_play_texts  # noqa: F401
from tiny_models import make_model
from toys import characters

from megatron_rl.commands import check_data
from megatron_rl.config import files as config_files
from megatron_rl.config.base import ConfigError
from megatron_rl.config.schema import GenerateConfig, SftConfig, TrainConfig
from megatron_rl.data.problems import MEASURED, Problem, PromptReader
from megatron_rl.data.rows import DataError
from megatron_rl.recipes.dapo import Dapo
from megatron_rl.session import builders
from megatron_rl.training.collector import RolloutMaker
from megatron_rl.training.iteration import Iteration

SETTING = "roles.generator.max_prompt_tokens"
__all__ = ["self_play_texts"]  # a fixture


def data_lines(config):
    return check_data.data_lines(spec_of(config), deep=True)


@pytest.fixture
def rows(tmp_path):
    """A model directory with a tokenizer of characters, and sixty rows of which every second one is long."""
    directory = make_model(tmp_path / "model", num_hidden_layers=1, vocab_size=104)
    characters().save_pretrained(directory)
    with (tmp_path / "rows.jsonl").open("w") as file:
        for i in range(60):
            question = "q" * (40 if i % 2 else 4)
            row = {"question": question, "answer": "2", "prompt": question, "response": question}
            file.write(json.dumps(row) + "\n")
    (tmp_path / "t.txt").write_text("{question}")
    return tmp_path


def train_config(rows, *words):
    return config_files.load(
        TrainConfig,
        [],
        [
            f"roles={{generator: {{model: {{path: {rows}/model}}, max_prompt_tokens: 20}}}}",
            "recipe.target=megatron_rl.recipes.grpo:Grpo", f"recipe.args={{updates: 1, template: {rows}/t.txt}}",
            f"data.path={rows}/rows.jsonl", *words,
        ],
    )  # fmt: skip


def read_for_a_run(config):
    """Reads prompts as every rank of a run does."""
    spec, tokenizers = spec_of(config), {"generator": characters()}
    limits = spec.prompt_limits("generator")
    return builders.prompts(spec.recipe, spec.data, spec.roles, tokenizers, limits, seed=spec.run.seed)


@pytest.mark.parametrize("held_out", [False, True])
def test_faults_long_prompts_do_not_vanish_without_a_word(rows, caplog, held_out):
    """30 of 60 were left out, of training and of evaluations, and nothing said so."""
    words = ["data.max_bad_share=0.6"]
    name = "data"
    if held_out:
        name = "evaluation.sets.rows"
    said = re.escape(f"30 of 60 rows of {name} ({rows}/rows.jsonl) cannot be used")
    cure = f"problem 1: its prompt has 40 tokens: raise {SETTING} = 20"

    def config_of(share):
        """A config whose set `name` may lack as many of its rows."""
        own = f"evaluation.sets=[{{path: {rows}/rows.jsonl, max_bad_share: {share}}}]"
        return train_config(rows, *words, own if held_out else f"data.max_bad_share={share}")

    few = config_of(0.4)
    with pytest.raises(ConfigError, match=f"{said}(.|\n)*more than max_bad_share = 0.4"):
        data_lines(few)
    with pytest.raises(DataError, match=f"{said}(.|\n)*more than max_bad_share = 0.4"):
        read_for_a_run(few)
    many = config_of(0.5)
    for look in (lambda: data_lines(many), lambda: read_for_a_run(many)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            look()
        assert any(re.match(said, text) and cure in text for text in caplog.messages)


def test_faults_a_large_set_is_measured_by_a_part_of_it():
    problems = [Problem(row=i, values={"n": 9 if i % 2 else 1}) for i in range(3 * MEASURED)]
    measured = []

    def encode(values):
        measured.append(values)
        return [1] * values["n"]

    reader = PromptReader(problems, encode, seed=0, shuffle=False, max_prompt_tokens=5)
    with pytest.raises(DataError, match=f"5000 of {MEASURED} rows"):
        reader.refuse_long(SETTING, 0.1, "data")
    assert len(measured) == MEASURED


def test_faults_prompts_that_an_iteration_leaves_out_are_a_metric_of_it(tmp_path):
    (tmp_path / "q.txt").write_text("Q{question}:")
    recipe = Dapo(updates=1, group_size=4, template=str(tmp_path / "q.txt"))
    reader = reader_of(4)
    fits = reader._encode
    reader._encode = lambda values: fits(values) + [1] * (200 if values["question"] in "13" else 0)
    collector = RolloutMaker(
        recipe=recipe, readers={"generator": reader}, context=context_of(by_row([1] * 4)), prompts_per_iteration=4
    )
    iteration = Iteration(cycle=0, index=0, roles=("generator",), number=0)
    metrics = collector.make(iteration, recipe.state_dict())[0].metrics["generator"]
    assert metrics["prompts_too_long"] == reader.dropped == 3


@pytest.mark.parametrize("kind", ["sft", "generate"])
def test_faults_samples_that_do_not_fit_are_refused_where_they_are_many(rows, kind, caplog):
    if kind == "sft":
        schema, words = SftConfig, [f"data.train={rows}/rows.jsonl", "data.max_tokens=20"]
        cure = "81 tokens: raise data.max_tokens = 20"
    else:
        schema = GenerateConfig
        words = [f"data.path={rows}/rows.jsonl", f"template={rows}/t.txt", "max_prompt_tokens=20", "output=x"]
        cure = "its prompt has 40 tokens: raise max_prompt_tokens = 20"
    words = [f"model.path={rows}/model", *words]
    with pytest.raises(ConfigError, match=f"30 of 60 rows of (.|\n)*{cure}(.|\n)*more than max_bad_share = 0.01"):
        data_lines(config_files.load(schema, [], words))
    with caplog.at_level(logging.WARNING):
        data_lines(config_files.load(schema, [], [*words, "data.max_bad_share=0.5"]))
    assert "30 of 60 rows" in caplog.text


def test_faults_held_out_problems_that_do_not_fit_the_solver_are_counted(self_play_texts):
    table = self_play_table(solver=lambda prompt, i, j: "?", limit=4)
    short, long = Tasks(answer="1").take(), Tasks(answer="1", question="12345").take()
    metrics = recipe_of(self_play_texts).evaluate([*short, *long], table)
    assert (metrics["solver/too_long"], metrics["solver/num_problems"]) == (3, 3)
