"""Faults of the tools that find settings: words that `settings` denied, useless hints, verl files without a command."""

from __future__ import annotations

import pytest

from megatron_rl.commands.settings import load
from megatron_rl.config.base import ConfigError
from megatron_rl.main import main

PLAIN = "roles: {generator: {model: {path: m}}}\nrecipe: {target: grpo, args: {updates: 1}}\n"


@pytest.mark.parametrize(
    ("word", "lines"),
    [
        ("wandb", ["sinks.wandb_project = null"]),
        ("tokens", ["roles.NAME.sampling.max_tokens = 2048", "roles.NAME.micro_batch_tokens = 8192"]),
        ("clip", ["roles.NAME.loss.clip_low = 0.2", "roles.NAME.optimizer.clip_grad = 1.0"]),
        ("batch", ["roles.NAME.micro_batch_tokens = 8192", "data.train_batch_size (verl)"]),
        ("early", ["evaluation.early_stop.patience = 3"]),
        ("tp", ["roles.NAME.layout.tp = 1"]),
        ("max_steps", ["max_steps (TRL)", "    here: recipe.args.updates"]),
        ("learning rate", ["learning_rate (TRL)", "roles.NAME.optimizer.lr = 1e-06"]),
        ("hub name", ['roles.NAME.model.path = ""']),
    ],
)
def test_faults_settings_are_found_by_words_of_names_descriptions_and_peers(capsys, word, lines):
    assert main(["settings", word]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line not in printed] == []
    assert "engine.attempts = 5" not in printed  # a part of a word, such as tp in attempts, is no word


def test_faults_settings_that_are_nowhere_are_denied(capsys):
    assert main(["settings", "zzz"]) == 2
    assert "has 'zzz' in its name or its description" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("data: {settings: gsm8k, sources: {a: {path: x}}}", "set data.sources.NAME.settings for each NAME in sources"),
        ("data: {setings: gsm8k, sources: {a: {path: x}}}", "data.setings: unknown key; known here: sources, path"),
        ("data: {path: x, setings: gsm8k}", "data.setings: unknown key; did you mean 'settings'?"),
        ("data: {sources: {a: {path: x, setings: y}}}", "data.sources.a.setings: unknown key; did you mean 'settings'"),
    ],
)
def test_faults_a_hint_names_no_key_that_is_refused_as_well(tmp_path, text, says):
    (tmp_path / "a.yaml").write_text(PLAIN + text)
    with pytest.raises(ConfigError) as caught:
        load([str(tmp_path / "a.yaml")])
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("actor_rollout_ref: {actor: {optim: {lr: 1.0}}}\ntrainer: {nnodes: 1}", "here it is roles.NAME.optimizer.lr"),
        ("data: {train_files: a}\nalgorithm: {adv_estimator: gae}", "verl's name; here it is recipe.args.estimator"),
        ("model: {path: m}\ndata: {train: a}\noutput_dir: b", "output_dir: unknown key; this is TRL's name"),
        ("roles: {}\noutput: a\nsets: []", "no command takes all of these keys: output, roles, sets"),
    ],
)
def test_faults_a_file_of_verl_or_trl_is_translated_without_a_command(tmp_path, text, says):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load([str(tmp_path / "a.yaml")])
    assert says in str(caught.value)
