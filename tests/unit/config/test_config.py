"""Reading configs: merging, strictness, messages that name place, value and cure; and the checks between settings."""

import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal, get_args, get_type_hints

import pydantic
import pytest
import specs as config_checks
import yaml
from example_home import make_home

from megatron_rl.commands.check import ignored_settings
from megatron_rl.config.base import field_comments
from megatron_rl.config.files import dump, load, read_top
from megatron_rl.config.schema import (
    ConfigError,
    EvalConfig,
    GenerateConfig,
    GradingConfig,
    Rollouts,
    SftConfig,
    TrainConfig,
    config,
)
from megatron_rl.engines.vllm.settings import Vllm
from megatron_rl.recipes.tango import Tango
from megatron_rl.spec.missing_files import absent_files
from megatron_rl.training.iteration import RecipeRole

BASE = {
    "roles": {"a": {"model": {"path": "org/a"}}, "b": {"model": {"path": "org/b"}, "layout": {"tp": 2}}},
    "recipe": {"target": "megatron_rl.recipes.grpo:Grpo", "args": {"updates": 3}},
    "data": {"path": "problems.jsonl"},
}
EXAMPLES = sorted((Path(__file__).parents[3] / "examples").rglob("*.yaml"))


@config
class Small:
    kind: Literal["small"] = "small"
    size: int = 1


@config
class Large:
    kind: Literal["large"] = "large"
    size: int = 100
    rate: float = 0.5


@config
class Choice:
    engine: Annotated[Small | Large, pydantic.Field(discriminator="kind")] = field(default_factory=Small)
    pattern: dict[str, str] = field(default_factory=dict)


@pytest.fixture
def base(tmp_path):
    file = tmp_path / "base.yaml"
    file.write_text(yaml.safe_dump(BASE))
    return file


def write(path, text):
    path.write_text(text)
    return path


def refusal(schema, files, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load(schema, files, overrides)
    return str(caught.value)


def test_files_left_to_right_then_overrides(tmp_path, base):
    second = write(tmp_path / "second.yaml", "run: {seed: 1, name: second}\nroles: {b: {layout: {pp: 2}}}\n")
    third = write(tmp_path / "third.yaml", "run: {seed: 2}\n")
    read = load(TrainConfig, [base, second, third], ["run.iterations=7", "roles.a.optimizer.betas=[0.9, 0.95]"])
    assert (read.run.seed, read.run.name, read.run.iterations, read.run.keep) == (2, "second", 7, 2)
    assert (read.roles["b"].layout.tp, read.roles["b"].layout.pp) == (2, 2), "roles merge per key"
    assert read.roles["a"].optimizer.betas == (0.9, 0.95), "lists become tuples"


def test_base_files_are_read_first_relative_to_the_file(tmp_path, base):
    (tmp_path / "below").mkdir()
    write(tmp_path / "other.yaml", "run: {seed: 4, name: other}\n")
    file = write(tmp_path / "below" / "run.yaml", "base: [../base.yaml, ../other.yaml]\nrun: {seed: 5}\n")
    read = load(TrainConfig, [file])
    assert (read.run.seed, read.run.name) == (5, "other")
    assert read_top([file]).keys() == {"roles", "recipe", "data", "run"}


def test_base_files_in_a_circle_are_refused(tmp_path):
    write(tmp_path / "one.yaml", "base: two.yaml\n")
    write(tmp_path / "two.yaml", "base: one.yaml\n")
    assert "one.yaml -> two.yaml -> one.yaml" in refusal(TrainConfig, [tmp_path / "one.yaml"])


def test_a_missing_base_names_the_file_that_wants_it(tmp_path):
    message = refusal(TrainConfig, [write(tmp_path / "one.yaml", "base: gone.yaml\n")])
    assert "gone.yaml" in message and "one.yaml" in message


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "1.0e-6", "+1e-6", ".000001"])
def test_exponents_without_a_point_are_numbers(base, text):
    assert load(TrainConfig, [base], [f"roles.a.optimizer.lr={text}"]).roles["a"].optimizer.lr == 1e-6


@pytest.mark.parametrize("text", ["12:30", "2024-01-01", "010", "no", "on", "1e-6x", "0x"])
def test_text_stays_text(base, text):
    assert load(TrainConfig, [base], [f"run.name={text}"]).run.name == text


@pytest.mark.parametrize("value", ["2.5", "'2'", "true", "1e3", "010", "null", "[2]", "two"])
def test_an_int_is_only_an_int(base, value):
    message = refusal(TrainConfig, [base], [f"roles.a.layout.tp={value}"])
    assert "roles.a.layout.tp = " in message and "give a whole number" in message


@pytest.mark.parametrize(
    ("override", "cure"),
    [
        ("run.name=3", "put it in quotes"),
        ("preflight.enabled=1", "give true or false"),
        ("preflight.enabled=no", "give true or false"),
        ("roles.a.optimizer.lr='1e-6'", "give a number"),
        ("roles.a.optimizer.lr=.nan", "give a finite number"),
        ("roles.a.loss.kl_clamp=.inf", "give a finite number"),
        ("roles.a.model.dtype=float16", "choose 'float32' or 'bfloat16'"),
        ("roles.a.sampling.stop_strings=stop", "give a list"),
        ("preflight=3", "give a mapping of keys"),
    ],
)
def test_wrong_values_name_override_key_and_cure(base, override, cure):
    message = refusal(TrainConfig, [base], [override])
    assert f"override {override!r}: {override.split('=')[0]} = " in message and cure in message


def test_all_problems_at_once_each_with_its_source(tmp_path, base):
    file = write(tmp_path / "mine.yaml", "run: {sed: 3}\nroles: {b: {layout: {tp: 0}}, c: {sleep: true}}\nzzz: 1\n")
    lines = refusal(TrainConfig, [base, file], ["evaluation.every=x"]).split("\n  ")
    assert sorted(lines) == sorted(
        [
            f"{file}: run.sed: unknown key; did you mean 'seed'?",
            f"{file}: roles.b.layout.tp = 0: give a value greater than or equal to 1",
            f"{file}: zzz: unknown key; known here: roles, families, recipe, data, evaluation, engine, reward, run, "
            "launch, refit, rollouts, "
            "preflight, stages, debug, sinks, job",
            "override 'evaluation.every=x': evaluation.every = \"x\": "
            "give a whole number, without quotes, leading zeros or a decimal point",
        ]
    )


@pytest.mark.parametrize(
    ("role", "cure"),
    [
        ("{sleep: true}", "roles.c.model.path is empty"),
        ("{same_as: nobody}", "roles.c.same_as = 'nobody': name another role"),
        ("{same_as: a, tandem: {}}", "that role's engines hold no junior"),
        ("{model: {path: x}, endpoint: {url: 'http://a', model: b}}", "set policy to none"),
        (
            "{model: {path: x}, tandem: {strategy: chunk}, sampling: {max_tokens: 16}}",
            "before the junior's first token",
        ),
    ],
)
def test_a_role_without_weights_of_its_own_is_told_what_it_lacks(tmp_path, base, role, cure):
    file = write(tmp_path / "mine.yaml", f"roles: {{c: {role}}}\n")
    with pytest.raises(ConfigError, match=cure):
        config_checks.check(load(TrainConfig, [base, file], []), 2)


def test_a_role_that_shares_a_policy_takes_its_owners_model_and_keeps_its_own_sampling(tmp_path, base):
    file = write(tmp_path / "mine.yaml", "roles: {c: {same_as: a, sampling: {max_tokens: 7}}}\n")
    config = load(TrainConfig, [base, file], [])
    shared, owner = config.roles["c"], config.roles["a"]
    assert (shared.model, shared.layout, shared.loss) == (owner.model, owner.layout, owner.loss)
    assert shared.sampling.max_tokens == 7 and not shared.has_policy


def test_faults_check_names_the_settings_of_a_shared_role_that_have_no_effect(tmp_path, base):
    """A learning rate of a role that shares a policy was dropped in silence."""
    role = "{same_as: a, sampling: {max_tokens: 7}, optimizer: {lr: 0.5}, layout: {tp: 1}, micro_batch_tokens: 64}"
    file = write(tmp_path / "mine.yaml", f"roles: {{c: {role}}}\n")
    words = ["roles.c.shared_prefixes=true", "roles.c.sampling.temperature=0.5"]
    config = load(TrainConfig, [base, file], words)
    found = [note.split(" ", 1) for note in ignored_settings(config.roles, [base, file], words)]
    assert [name for name, _ in found] == [
        f"roles.c.{name}" for name in ("optimizer", "micro_batch_tokens", "shared_prefixes")
    ]
    assert found[0][1].endswith("c shares the policy of a (same_as): set roles.a.optimizer, or leave it out")
    written = write(tmp_path / "whole.yaml", dump(config))
    assert not [*ignored_settings(load(TrainConfig, [written], []).roles, [written], [])]


def test_duplicate_keys_are_refused(tmp_path):
    file = write(tmp_path / "twice.yaml", "run:\n  seed: 1\n  name: x\n  seed: 2\n")
    assert refusal(TrainConfig, [file]) == f"{file}, line 2: seed is given twice; keep one"


@pytest.mark.parametrize(
    "text",
    [
        "- 1\n",
        "false\n",
        "a: [\n",
        "base: 3\n",
        "base: [3]\n",
        "a: !!python/object:os.system {}\n",
        "a: !!binary aGk=\n",
    ],
)
def test_files_that_are_no_config_are_config_errors(tmp_path, text):
    assert "bad.yaml" in refusal(TrainConfig, [write(tmp_path / "bad.yaml", text)])


def test_a_binary_file_is_a_config_error(tmp_path):
    (tmp_path / "bad.yaml").write_bytes(b"\xff\xfe\x00run")
    assert "cannot be read: 'utf-8' codec" in refusal(TrainConfig, [tmp_path / "bad.yaml"])


@pytest.mark.parametrize("override", ["run.seed", "=3", "run..seed=3", "run.seed=[", ".run=3"])
def test_malformed_overrides_are_named(base, override):
    assert repr(override) in refusal(TrainConfig, [base], [override])


def test_a_new_kind_drops_the_old_variants_keys(tmp_path):
    file = write(tmp_path / "choice.yaml", "engine: {kind: large, rate: 0.1}\n")
    assert load(Choice, [file], ["engine.kind=small"]).engine == Small()
    assert load(Choice, [file], ["engine.size=7"]).engine == Large(size=7, rate=0.1)


def test_keys_without_a_kind_are_the_defaults_and_dropped_with_it(tmp_path):
    file = write(tmp_path / "choice.yaml", "engine: {size: 9}\n")
    assert load(Choice, [file]).engine == Small(size=9)
    assert load(Choice, [file], ["engine.kind=large"]).engine == Large(), "9 was the small one's size"
    assert "override 'engine.rate=0.1': engine.rate: unknown key" in refusal(Choice, [file], ["engine.rate=0.1"])


def test_errors_inside_a_variant_do_not_name_the_variant_as_a_key():
    assert ": engine.rat: unknown key; did you mean 'rate'?" in refusal(Choice, [], ["engine={kind: large, rat: 1}"])
    assert "choose a kind among 'small', 'large'" in refusal(Choice, [], ["engine.kind=medium"])


def test_a_key_called_kind_in_a_free_mapping_drops_nothing():
    assert load(Choice, [], ["pattern={kind: x, other: y}", "pattern.kind=z"]).pattern == {"kind": "z", "other": "y"}


@pytest.mark.parametrize(
    "name",
    [
        "1e-6",
        "012",
        "12:30",
        "no",
        "null",
        "",
        " a ",
        "two\nlines",
        "é: #\U0001f600",
        "'",
        "~",
        "2024-01-01",
        "1_000",
        "0x1F",
    ],
)
def test_a_dumped_config_reads_back_equal(tmp_path, base, name):
    args = {"updates": 3, "rate": 1e-7, "big": 1e22, "list": [1, 2.0, None, name]}
    read = load(
        TrainConfig,
        [base],
        [f"recipe.args={json.dumps(args)}", "roles.a.optimizer.eps=1e-8"],
    )
    again = load(TrainConfig, [write(tmp_path / "resolved.yaml", dump(read))])
    assert again == read and again.recipe.args["list"][-1] == name
    assert dump(again) == dump(read)
    assert yaml.safe_load(dump(read))["recipe"]["args"]["list"][-1] == name, "other readers of YAML see the same text"


@pytest.mark.parametrize("layout", [{"tp": 3}, {"pp": 2, "tp": 2}, {"tp": 4}])
def test_ranks_must_be_a_multiple_of_the_layout(base, layout):
    read = load(TrainConfig, [base], [f"roles.a.layout={json.dumps(layout)}"])
    with pytest.raises(ConfigError, match=r"roles\.a.*does not divide 2 ranks"):
        config_checks.check(read, 2)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("layout={sequence_parallel: true}", "set tp above 1"),
        ("layout={pp: 2, vpp: 2}", "overlap_p2p"),
        ("layout={vpp: 2}", "at least 2"),
        ("optimizer.decay=linear", "decay_steps"),
        ("optimizer={decay: exponential, decay_steps: 9}", "a constant factor never reaches 0"),
    ],
)
def test_impossible_settings_are_refused_when_read(base, override, says):
    message = refusal(TrainConfig, [base], [f"roles.a.{override}"])
    assert "roles.a." in message and says in message


@pytest.mark.parametrize(
    ("override", "cure"),
    [
        ("roles.a.sampling.temperature=-0.5", "greater than or equal to 0"),
        ("roles.a.sampling.top_p=1.5", "less than or equal to 1"),
        ("roles.a.optimizer.lr=-1e-6", "greater than or equal to 0"),
        ("roles.a.micro_batch_tokens=0", "greater than 0"),
        ("data.limit=0", "greater than 0"),
        ("data.max_bad_share=5", "less than or equal to 1"),
        ("launch.nproc=0", "greater than 0"),
        ("run.keep=0", "greater than 0"),
    ],
)
def test_values_out_of_range_are_refused(base, override, cure):
    key, _, value = override.partition("=")
    message = refusal(TrainConfig, [base], [override])
    assert f"{key} = {value}: " in message.replace("-1e-06", "-1e-6") and f"give a value {cure}" in message


@pytest.mark.parametrize(
    "override", ["run.iterations=0", "run.prompts_per_iteration=0", "roles.a.samples_per_optimizer_step=0"]
)
def test_a_run_that_trains_nothing_is_refused(base, override):
    with pytest.raises(ConfigError, match=override.split("=")[0] + " = 0"):
        config_checks.check(load(TrainConfig, [base], [override]), 2)


def test_what_the_numbers_mean(base):
    class Both:
        def roles(self):
            return {"b": RecipeRole(samples=5), "a": RecipeRole(samples=5)}

    config = load(TrainConfig, [base], ["roles.b.samples_per_optimizer_step=64", "run.prompts_per_iteration=32"])
    line, whole, *_ = config_checks.explain_recipe(config_checks.spec_of(config, 8, recipe=Both()))
    assert line == (
        "b: 32 prompts x 5 samples = 160 samples per update; 160 / 64 = 3 optimizer steps; at most 655360 tokens, that "
        "is up to 20 micro-batches of 8192 tokens on each of 4 data-parallel replicas (tp 2, pp 1)"
    )
    assert "160 / 160 = 1 optimizer steps" in whole


def test_sft_configs_read_and_check(tmp_path):
    file = write(tmp_path / "sft.yaml", "model: {path: org/a}\ndata: {train: pairs.jsonl}\nsteps: 0\n")
    with pytest.raises(ConfigError, match="steps = 0: give a value greater than 0"):
        config_checks.check(load(SftConfig, [file]), 1)


@pytest.mark.parametrize("file", EXAMPLES, ids=[str(f.relative_to(f.parents[1])) for f in EXAMPLES])
def test_shipped_configs_are_valid(file, capsys, monkeypatch, tmp_path):
    from megatron_rl.main import main

    if file.stem.startswith("search"):
        pytest.importorskip("bm25s")
    monkeypatch.chdir(make_home(tmp_path))
    ranks = "128" if file.stem == "dapo_qwen2.5_32b" else "64"  # 16 nodes x 8 GPUs, 16 servers of 8 GPUs
    assert main(["check", str(file), "--ranks", ranks, "--elsewhere"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    "package, setting", [("wandb", "sinks.wandb_project=mine"), ("tensorboard", "sinks.tensorboard=true")]
)
def test_a_sink_whose_package_is_missing_is_refused_before_the_run(base, monkeypatch, package, setting):
    read = load(TrainConfig, [base], [setting])
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else found(name))
    with pytest.raises(ConfigError, match=rf"{setting.partition('=')[0]} = .*: the package {package} is not installed"):
        config_checks.check(read, 2)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == package else found(name))
    config_checks.check(read, 2)


def test_reading_and_checking_leaves_torch_out(base):
    code = (
        "import sys; from megatron_rl.config import files, schema; from megatron_rl.spec.resolve import specify;"
        f"specify(files.load(schema.TrainConfig, [{str(base)!r}]), 2);"
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3]
    )
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_a_section_that_is_touched_keeps_the_defaults_of_its_command():
    """SFT keeps its own learning rate, and an evaluation stays greedy, whatever else of the section is set."""
    sft = load(SftConfig, [], ["model.path=m", "data.train=d.jsonl", "optimizer.weight_decay=0.5", "run.dir=x"])
    assert (sft.optimizer.lr, sft.optimizer.weight_decay, sft.run.name, sft.run.save_every) == (5e-6, 0.5, "sft", 100)
    graded = load(
        EvalConfig, [], ["model.path=m", "sets=[{path: d.jsonl}]", "template=t.txt", "sampling.max_tokens=48"]
    )
    assert (graded.sampling.temperature, graded.sampling.max_tokens) == (0.0, 48)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("data.settings=gsm9k", "data.settings = 'gsm9k' is unknown"),
        ("data.answer_pattern='(['", "is not a regular expression"),
        ("roles.generatr={model: {path: x/y}}", "roles.generatr is not one of its roles"),
    ],
)
def test_data_and_roles_are_checked_before_a_job_is_queued(change, says):
    files = [Path(__file__).parents[3] / "examples/published/tango_qwen2.5_7b.yaml"]
    with pytest.raises(ConfigError, match=re.escape(says)):
        config = load(TrainConfig, files, ["engine.colocate=false", change])
        config_checks.check(config, 32)
        config_checks.check_recipe(config, Tango())


def test_files_that_are_not_there_yet_are_named():
    files = [Path(__file__).parents[3] / "examples/published/tango_qwen2.5_7b.yaml"]
    notes = absent_files(
        config_checks.spec_of(load(TrainConfig, files, ["data.path=nofile.jsonl", "debug.replay=no/such/dir"]))
    )
    assert [note.on_hub for note in notes] == [False, True, False, True, False]
    assert [*map(str, notes)] == [
        "roles.generator.model.path = runs/sft_qwen2.5_math_7b/model is not there yet",
        "roles.verifier.model.path = Qwen/Qwen2.5-7B is no directory here, so it is taken for a hub name",
        "data = nofile.jsonl is not there yet",
        "evaluation.sets.math500 = HuggingFaceH4/MATH-500 is no directory here, so it is taken for a hub name",
        "debug.replay = no/such/dir is not there yet",
    ]


@pytest.mark.parametrize("command", [TrainConfig, SftConfig, GenerateConfig, EvalConfig, GradingConfig])
def test_every_setting_has_a_comment_for_the_help(command):
    """The comments of settings are their documentation: `--help` prints them."""

    def without(schema):
        comments, hints = field_comments(schema), get_type_hints(schema)
        for name in (f.name for f in dataclasses.fields(schema)):
            if name not in comments:
                yield f"{schema.__name__}.{name}"
            for kind in (hints[name], *get_args(hints[name])):
                if dataclasses.is_dataclass(kind):
                    yield from without(kind)

    assert list(without(command)) == []


def test_a_comment_of_several_lines_stands_above_its_setting():
    comment = field_comments(TrainConfig)["engine"], field_comments(Rollouts)["mixed"], field_comments(Vllm)["tp"]
    assert comment[0] == "The engine that writes rollouts."
    assert comment[1].startswith("What to do with a rollout") and comment[1].endswith("out of the update.")
    assert comment[2] == "tensor-parallel ranks of one server"  # inherited
