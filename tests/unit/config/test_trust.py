"""Metrics and checks that a person relies on: columns by one meaning each, rewards within their range, configs that are
refused before a run as the run would refuse them, and errors that name the metric which shows the fault."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from chats import CHATML
from conftest import ROOT, environment
from specs import spec_of
from tiny_models import make_model

from megatron_rl.config import files as config_files
from megatron_rl.config import hub_cache, plugins
from megatron_rl.config.schema import ConfigError, Reward, TrainConfig, Use
from megatron_rl.jobs import doctor
from megatron_rl.main import main
from megatron_rl.rewards.grading_pool import GradePool
from megatron_rl.run.console import COLUMNS, ROLE, SECONDS, SMOOTH, line
from megatron_rl.run.metrics import MetricsRow
from megatron_rl.spec import missing_files
from megatron_rl.training.preflight import PreflightFailure, check_reward
from megatron_rl.types import Outcome, Prompt

PAYLOAD = {"question": "1 + 1?", "answer": "2"}
HEAVY = ("torch", "transformers", "pyarrow", "sympy", "jinja2", "megatron.core")


@pytest.fixture
def words(tmp_path):
    """Settings of a run of GRPO whose files are all here."""
    model = make_model(tmp_path / "model", num_hidden_layers=1)
    rows = [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "recipe.target=megatron_rl.recipes.grpo:Grpo", "recipe.args.updates=3", f"roles.generator.model.path={model}",
        f"data.path={tmp_path}/rows.jsonl", f"run.dir={tmp_path}/runs",
    ]  # fmt: skip


def fresh(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the program in a process that has imported nothing, and lets it say which libraries it imported."""
    code = (
        "import sys; from megatron_rl.main import main\nstatus = main(sys.argv[1:])\n"
        f"print('imported', [name for name in {HEAVY!r} if name in sys.modules]); sys.exit(status)"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, env=environment(), capture_output=True, text=True
    )


def test_every_column_of_the_console_is_defined_in_the_docs_and_no_other():
    page = (ROOT / "docs/explanation/concepts.md").read_text()
    context = page.partition("## The console's columns")[2].partition("\n## ")[0]
    defined = re.findall(r"^\| `([a-z]+)` \|", context, re.MULTILINE)
    assert sorted(defined) == sorted([*COLUMNS, SMOOTH, SECONDS, ROLE])
    assert len({*defined}) == len(defined)
    for word in ("Iteration", "Cycle", "Update"):
        assert len(re.findall(rf"^\*\*{word}\.\*\*", page, re.MULTILINE)) == 1


def test_a_line_shows_iteration_cycle_and_update_all_counted_from_one():
    row = MetricsRow(iteration=11, cycle=4, scope="generator", time={}, metrics={"update": 9.0, "reward/trained": 0.5})
    assert line(row, 40) == "iteration 12/40 (cycle 5)  generator  update 9  reward 0.500"
    done = MetricsRow(iteration=12, cycle=5, scope="eval", time={}, metrics={"generator/accuracy": 0.25})
    assert line(done, 40) == "after iteration 12  eval  generator/accuracy 0.250"


def test_a_reward_within_its_range_is_a_score_and_one_beyond_is_named():
    wide = Reward(target="bad_rewards:reward", workers=1, range=(-1.0, 3.0))
    with GradePool(wide) as pool:
        two, one, nan = pool.grade(["two", "2", "nan"], [PAYLOAD] * 3)
    assert (two.outcome, two.score, two.correct) == (Outcome.SCORE, 2.0, True)
    assert (one.outcome, one.score, one.correct) == (Outcome.SCORE, 1.0, False)  # the middle is no right answer
    assert nan.outcome is Outcome.ERROR and "returned nan" in nan.detail
    with GradePool(Reward(target="bad_rewards:reward", workers=1)) as pool:
        (two,) = pool.grade(["two"], [PAYLOAD])
    assert two.outcome is Outcome.ERROR and not two.correct
    assert two.detail == "returned 2.0: a reward returns a number in reward.range = [0, 1]"


def test_the_preflight_refuses_a_reward_beyond_its_range_with_the_value():
    prompts = [Prompt(id="0", tokens=[1], payload=PAYLOAD)]
    args = {"scale": 2.0}
    with (
        GradePool(Reward(target="bad_rewards:scaled", args=args, workers=1)) as pool,
        pytest.raises(
            PreflightFailure, match=r"no score to the known correct answer .*returned 2\.0: .* reward\.range = \[0, 1\]"
        ),
    ):
        check_reward(pool.grade, prompts, "3", "{answer}")
    with GradePool(Reward(target="bad_rewards:scaled", args=args, workers=1, range=(0.0, 2.0))) as pool:
        found = check_reward(pool.grade, prompts, "3", "{answer}", bounds=(0.0, 2.0))
    assert found == {"preflight/reward_correct": 2.0, "preflight/reward_wrong": 0.0}


def test_a_cut_off_answer_gets_the_least_score_of_the_range():
    settings = Reward(
        target="bad_rewards:reward", workers=1, timeout_s=0.5, range=(-1.0, 1.0), answer_format="{answer}"
    )
    with GradePool(settings) as pool:
        (late,) = pool.grade(["loop"], [PAYLOAD])
    assert (late.outcome, late.score, late.by_response) == (Outcome.SCORE, -1.0, True)


@pytest.mark.parametrize("bounds", ["[1.0, 0.0]", "[1.0, 1.0]"])
def test_a_range_without_room_is_refused(words, bounds):
    with pytest.raises(ConfigError, match=r"reward\.range = \[1\.0, .*give the least score"):
        config_files.load(TrainConfig, [], [*words, f"reward.range={bounds}"])


def test_check_imports_none_of_the_heavy_libraries(words):
    done = fresh("check", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("imported []\n") and "5 problems" in done.stdout


def test_check_deep_tries_what_needs_them(words, tmp_path, capsys):
    (tmp_path / "own.jinja").write_text(CHATML)
    chat = ["data.chat=true", f"roles.generator.model.chat_template={tmp_path}/own.jinja"]
    assert main(["check", *words, *chat]) == 0
    assert "not tried: give --deep" in capsys.readouterr().out
    (tmp_path / "own.jinja").write_text("{{ raise_exception('never') }}")
    assert main(["check", *words, *chat]) == 0
    capsys.readouterr()
    assert main(["check", *words, *chat, "--deep"]) == 2
    assert "the chat template does not render" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("roles.generator.model.path={tmp}/none", "roles.generator: no {tmp}/none/config.json"),
        ("roles.generator.model.tokenizer={tmp}/none", "roles.generator.model.tokenizer = {tmp}/none is not there"),
        ("data.path={tmp}/none.jsonl", "data = {tmp}/none.jsonl is not there"),
        ("data.path={tmp}/bad.jsonl", "1 of 1 rows of {tmp}/bad.jsonl cannot be used"),
        ("evaluation.sets=[{{path: {tmp}/none.jsonl}}]", "evaluation.sets.none = {tmp}/none.jsonl is not there"),
        ("engine.kind=vlm", "engine.kind"),
        ("engine={{kind: vllm, python: {tmp}/python}}", "engine.python = {tmp}/python is not there"),
        ("engine={{kind: vllm, python: null}}", "starts on another machine, give `check` the option --elsewhere"),
        ("recipe.args.group_sise=4", "did you mean 'group_size'"),
        ("recipe.args.group_size=1", "recipe.args.group_size = 1: give at least 2"),
        ("roles.generator.sampling.temperature=0.0", "sampling.temperature = 0: all 5 samples of a problem"),
        ("roles.generator.sampling.top_k=1", "sampling.top_k = 1: all 5 samples of a problem"),
        (
            "recipe.args.group_size=1 recipe.args.estimator=reinforce_pp run.prompts_per_iteration=1",
            "there is one alone",
        ),
        ("reward.target=megatron_rl.rewards.math_answer:grad", "did you mean 'grade'"),
        ("reward.args.nonsense=1", "unknown argument 'nonsense'"),
        ("reward.target=no_such_module:grade", "cannot import no_such_module"),
        ("reward.range=[0.0,2.0] recipe.args.estimator=w_reinforce", "scale the reward to [0, 1]"),
        ("refit.transport=nixl", "refit.transport = 'nixl': the package nixl is not installed here"),
        ("roles.generator.loss.objective=clip", "loss.objective = 'clip': it is one of"),
    ],
)
def test_check_refuses_what_training_would_refuse(words, tmp_path, capsys, change, says):
    (tmp_path / "bad.jsonl").write_text("nonsense\n")
    changes = re.split(r" (?=[a-z._]+=)", change.format(tmp=tmp_path))
    assert main(["check", *words, *changes]) == 2
    assert says.format(tmp=tmp_path) in capsys.readouterr().err


def test_missing_files_are_notes_where_the_run_starts_elsewhere(words, tmp_path, capsys):
    lost = [f"data.path={tmp_path}/none.jsonl", f"roles.generator.model.path={tmp_path}/runs/sft/model"]
    assert main(["check", *words, *lost]) == 2
    capsys.readouterr()
    assert main(["check", *words, *lost, "--elsewhere"]) == 0
    said = capsys.readouterr().out
    assert f"note: data = {tmp_path}/none.jsonl is not there yet" in said and "runs/sft/model is not there yet" in said


@pytest.mark.parametrize("command", ["train", "drift"])
def test_a_run_refuses_missing_files_before_it_imports_anything_heavy(words, tmp_path, command):
    done = fresh(command, *words, f"data.path={tmp_path}/none.jsonl")
    assert done.returncode == 2 and "none.jsonl is not there: put it there, or mend data" in done.stderr
    assert "torch" not in done.stdout.rpartition("imported")[2]
    assert done.stdout.startswith(f"megatron-rl {command}: reading")


def test_a_folder_of_that_name_makes_a_path_local(words, tmp_path, monkeypatch):
    monkeypatch.setattr(hub_cache, "cache", lambda: tmp_path / "hub")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for path, on_hub in (("models/none", False), ("org/none", True)):
        config = config_files.load(TrainConfig, [], [*words, f"roles.generator.model.path={path}"])
        (found,) = missing_files.absent_files(spec_of(config))
        assert found.on_hub is on_hub and (found.problem is None) is on_hub
    assert "hf download models/none" in str(missing_files.Absent("m", "models/none").problem)
    (tmp_path / "hub/models--models--none/snapshots/abc").mkdir(parents=True)
    config = config_files.load(TrainConfig, [], [*words, "roles.generator.model.path=models/none"])
    assert [one.on_hub for one in missing_files.absent_files(spec_of(config))] == [True]


def test_offline_a_name_that_the_cache_lacks_is_refused_with_the_cure(words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(hub_cache, "cache", lambda: tmp_path / "hub")
    monkeypatch.setattr(hub_cache, "offline", lambda: True)
    named = "roles.generator.model.path=org/model"
    assert main(["check", *words, named]) == 2
    said = capsys.readouterr().err
    assert "HF_HUB_OFFLINE is set" in said and str(tmp_path / "hub") in said and "same HF_HOME" in said
    (tmp_path / "hub/models--org--model/snapshots/abc").mkdir(parents=True)
    assert main(["check", *words, named]) == 0


def test_doctor_fails_for_missing_local_paths_and_tells_of_the_hub(words, tmp_path, monkeypatch):
    monkeypatch.setattr(hub_cache, "cache", lambda: tmp_path / "hub")
    monkeypatch.setattr(hub_cache, "has_token", lambda: False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()

    def found(*more: str, **variables: str) -> dict[str, doctor.Check]:
        config = config_files.load(TrainConfig, [], [*words, *more])
        return {
            one.what: one
            for one in doctor.examine(config and spec_of(config), None, quick=False, environment=variables)
        }

    assert found("roles.generator.model.path=models/none")["roles.generator.model.path"].verdict == "wrong"
    named = found("roles.generator.model.path=org/model")
    assert named["roles.generator.model.path"].verdict == "note"
    assert "hf download org/model" in named["roles.generator.model.path"].cure
    assert named["HF_HOME"].verdict == "note" and "all nodes see" in named["HF_HOME"].cure
    assert named["hub token"].verdict == "note" and "HF_TOKEN" in named["hub token"].cure
    assert found("roles.generator.model.path=org/model", HF_HOME="/x")["HF_HOME"].verdict == "ok"
    monkeypatch.setattr(hub_cache, "offline", lambda: True)
    assert found("roles.generator.model.path=org/model")["roles.generator.model.path"].verdict == "wrong"
    assert "HF_HOME" not in found()


def test_a_function_is_looked_for_without_its_import(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine_trust.py").write_text(
        "import nothing_of_this_name\ntry:\n    from math import sin\nexcept ImportError:\n    sin = None\n"
        "later = [x for x in ()]\ndef grade(response, payload, *, strict=True):\n    def inner():\n        pass\n"
    )
    plugins.look_at(Use(target="mine_trust:grade", args={"strict": False}))
    for name in ("sin", "later"):
        plugins.look_at(Use(target=f"mine_trust:{name}"))
    for use, says in (
        (Use(target="mine_trust:grad"), "did you mean 'grade'"),
        (Use(target="mine_trust:inner"), "has no 'inner'"),
        (Use(target="mine_trust:grade", args={"strickt": 1}), "did you mean 'strict'"),
        (Use(target="mine_trust"), "it has the form package.module:name"),
    ):
        with pytest.raises(ConfigError, match=re.escape(says)):
            plugins.look_at(use)
    with pytest.raises(ConfigError, match="nothing_of_this_name"):
        plugins.build(Use(target="mine_trust:grade"))


@pytest.mark.parametrize("name", ["sin", "tangent", "math", "os", "counted", "Later"])
def test_any_name_that_a_module_gives_something_is_found_without_its_import(name, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    Path("mine_names.py").write_text(
        "import nothing_of_this_name\nfrom math import sin, tan as tangent\nimport math, os.path\n"
        "counted: int = 3\nif counted:\n    class Later:\n        inner = 1\n"
    )
    plugins.look_at(Use(target=f"mine_names:{name}"))
    with pytest.raises(ConfigError, match="has no 'inner'"):
        plugins.look_at(Use(target="mine_names:inner"))


@pytest.mark.parametrize(
    ("module", "error"),
    [
        (b"from nothing_of_this_name import *", ConfigError),
        (b"def grade(response, payload) return 1.0", SyntaxError),
        (b"name = '\xff'", SyntaxError),
        (b"name = '\0'", (SyntaxError, ValueError)),
    ],
)
def test_a_module_whose_names_cannot_be_read_is_left_to_its_import(module, error, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    Path("mine_unread.py").write_bytes(module)
    plugins.look_at(Use(target="mine_unread:grade"))
    with pytest.raises(error):
        plugins.build(Use(target="mine_unread:grade"))
