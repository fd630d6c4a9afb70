"""Faults of files that are each fine and do not fit each other: a tokenizer, a config and the weights beside them."""

import json
import re
import shutil
from contextlib import nullcontext
from datetime import UTC, date, datetime
from decimal import Decimal
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from specs import spec_of
from tiny_models import make_model
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from megatron_rl.commands import check_data, evaluate, generate, sft
from megatron_rl.config import files as config_files
from megatron_rl.config.schema import ConfigError, EvalConfig, GenerateConfig, Model, PromptSet, SftConfig, TrainConfig
from megatron_rl.data.problems import read_problems
from megatron_rl.data.rows import DataError
from megatron_rl.data.tiny import write_tiny_model
from megatron_rl.engines.embedded.embedded_engine import EmbeddedEngine
from megatron_rl.engines.protocol import Sampling
from megatron_rl.evaluation.sets import read_sets
from megatron_rl.main import main
from megatron_rl.megatron import work_checks
from megatron_rl.recipes.distil import Distil
from megatron_rl.texts.chat_template import tokenizer_of
from megatron_rl.texts.vocabulary import vocabulary_of
from megatron_rl.weights import hf_model
from megatron_rl.weights.hf_model import read_architecture

TABLES = ("lm_head.weight", "model.embed_tokens.weight")


def data_lines(config):
    return check_data.data_lines(spec_of(config), deep=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("faults_files") / "base")


def copied(base, tmp_path, *, eos=None, extra=(), fewer=0, config=(), generation=None):
    """Returns a copy of a model whose tokenizer has other special or further tokens, or whose embedding has fewer rows,
    with further keys in config.json and generation_config.json."""
    there = tmp_path / "model"
    shutil.copytree(base, there)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(there)
    if eos:
        tokenizer.add_special_tokens(eos)
    tokenizer.add_tokens([*extra])
    tokenizer.save_pretrained(there)
    told = json.loads((there / "config.json").read_text())
    told["vocab_size"] -= fewer
    (there / "config.json").write_text(json.dumps(told | dict(config)))
    if generation is not None:
        (there / "generation_config.json").write_text(json.dumps(generation))
    if fewer:
        weights = load_file(there / "model.safetensors")
        cut = {name: t[: told["vocab_size"]].contiguous() if name in TABLES else t for name, t in weights.items()}
        save_file(cut, there / "model.safetensors", metadata={"format": "pt"})
    return there


def rows_of(base):
    return json.loads((base / "config.json").read_text())["vocab_size"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"eos": {"eos_token": "<|im_end|>"}}, "eos_token of the tokenizer is token {rows} ('<|im_end|>')"),
        ({"eos": {"pad_token": "<pad>"}}, "pad_token of the tokenizer is token {rows} ('<pad>')"),
        ({"config": {"eos_token_id": 1000}}, "eos_token_id of config.json is token 1000"),
        ({"generation": {"eos_token_id": [0, 1000]}}, "eos_token_id of generation_config.json is token 1000"),
    ],
    ids=str,
)
def test_cases_a_token_in_use_without_a_row_of_the_embedding_is_refused(base, tmp_path, change, why):
    there = copied(base, tmp_path, **change)
    said = why.format(rows=rows_of(base))
    with pytest.raises(ConfigError, match=re.escape(f"{said}") + ".*resize the embedding"):
        tokenizer_of(Model(path=str(there)))


def test_cases_a_token_of_the_chat_template_without_a_row_is_refused(base, tmp_path):
    there = copied(base, tmp_path, extra=["<iteration>", "<unused>"])
    assert tokenizer_of(Model(path=str(there))).convert_tokens_to_ids("<unused>") == rows_of(base) + 1
    (tmp_path / "own.jinja").write_text("{% for m in messages %}<iteration>{{ m.content }}{% endfor %}")
    with pytest.raises(ConfigError, match=f"a token of the chat template is token {rows_of(base)} \\('<iteration>'\\)"):
        tokenizer_of(Model(path=str(there), chat_template=str(tmp_path / "own.jinja")))


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def words_of(schema, there, data):
    """Settings of a config whose one set of data is a file, and whose one model is a directory."""
    model = f"model.path={there}"
    return {
        SftConfig: [model, f"data.train={data}"],
        EvalConfig: [model, f"sets=[{{path: {data}}}]"],
        GenerateConfig: [model, f"data.path={data}", "output=x"],
        TrainConfig: [
            f"roles={{generator: {{model: {{path: {there}}}}}}}", "recipe.target=megatron_rl.recipes.grpo:Grpo",
            "recipe.args={updates: 1}", f"data.path={data}",
        ],
    }[schema]  # fmt: skip


@pytest.mark.parametrize("schema", [SftConfig, EvalConfig, GenerateConfig, TrainConfig])
def test_cases_a_token_of_the_data_without_a_row_is_refused_by_check_and_others_pass(base, tmp_path, schema):
    """The token stands in the last row: the first ones alone would pass."""
    there = copied(base, tmp_path, extra=["<extra>"])
    rows = [{"messages" if schema is SftConfig else "prompt": [{"role": "user", "content": "abc"}], "answer": "a"}] * 3
    if schema is SftConfig:
        rows = [{"messages": [*row["messages"], {"role": "assistant", "content": "a"}]} for row in rows]
    good = config_files.load(schema, [], words_of(schema, there, jsonl(tmp_path / "good.jsonl", *rows)))
    assert len(data_lines(good)) == 1
    text = json.dumps(rows[-1]).replace("abc", "ab<extra>")
    bad: Any = config_files.load(
        schema, [], words_of(schema, there, jsonl(tmp_path / "bad.jsonl", *rows, json.loads(text)))
    )
    with pytest.raises((DataError, ConfigError), match=f"token {rows_of(base)} \\('<extra>'\\), and the embedding of"):
        data_lines(bad)
    tokenizer = tokenizer_of(Model(path=str(there)))
    with pytest.raises(DataError, match="a prompt has token|its prompt has token|cannot be used"):
        if schema is EvalConfig:
            evaluate.Evaluation(bad, evaluate.OpenModels({}, {}, {bad.model: tokenizer})).problems(
                read_sets(spec_of(bad).evaluated)[0]
            )
        elif schema is GenerateConfig:
            generate.asked_of(spec_of(bad), tokenizer, read_problems(bad.data))
        else:
            raise DataError("cannot be used: the others read their data as check does")


def test_cases_fine_tuning_refuses_tokens_without_rows_at_check_and_at_start(base, tmp_path, capsys):
    """With two tensor ranks such a run went to its end: each rank took the token for one of the other."""
    there = copied(base, tmp_path, fewer=3)
    data = jsonl(tmp_path / "rows.jsonl", {"prompt": "ab", "response": "\\{}"}, {"prompt": "ab", "response": "a"})
    words = [f"model.path={there}", f"data.train={data}", "samples_per_step=2", "steps=1"]
    assert main(["check", "--command", "sft", *words, "--ranks", "1", "--deep"]) == 2
    rows = rows_of(base)
    why = f"{data}:1: it has token {rows - 1} ('\\\\'), and the embedding of {there} has {rows - 3} rows"
    told = capsys.readouterr().err
    assert why in told and "1 of 2 rows" in told
    with pytest.raises(DataError, match=re.escape(why)):
        sft._read(spec_of(config_files.load(SftConfig, [], words)), [], [])


def test_cases_work_with_tokens_without_rows_is_refused_on_every_rank(base):
    """Whoever wrote the tokens: a store of rollouts, an engine, an environment."""
    arch = read_architecture(base)
    flat = SimpleNamespace(tokens=np.array([0, arch.vocab - 1], np.int32), experts=None, values={})
    work_checks.check(cast(Any, SimpleNamespace(flat=flat)), arch, "m")
    for token in (arch.vocab, -1):
        flat.tokens[0] = token
        with pytest.raises(ValueError, match=f"the embedding of m has {arch.vocab} rows"):
            work_checks.check(cast(Any, SimpleNamespace(flat=flat)), arch, "m")


def test_cases_stop_tokens_without_a_row_are_refused(base):
    engine = EmbeddedEngine(base)
    for stop in (rows_of(base), -1):
        with pytest.raises(ValueError, match=f"stop_tokens holds token {stop}"):
            engine.check_ask(np.array([5]), Sampling(max_tokens=2, stop_tokens=(stop,)), 0)


def test_cases_the_ends_of_a_model_are_those_of_its_three_files(base, tmp_path):
    there = copied(base, tmp_path, config={"eos_token_id": [1, 2]}, generation={"eos_token_id": 3})
    tokenizer = tokenizer_of(Model(path=str(there)))
    assert vocabulary_of(Model(path=str(there)), tokenizer).ends == {0, 1, 2, 3}


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"])
def test_cases_stacked_experts_are_read_as_save_pretrained_writes_them(tmp_path, family):
    """A state_dict of transformers 5, saved as it stands, was "another model's"."""
    apart = make_model(tmp_path / "apart", family)
    stacked = shutil.copytree(apart, tmp_path / "stacked")
    for file in stacked.glob("model*"):
        file.unlink()
    weights = AutoModelForCausalLM.from_pretrained(apart).state_dict()
    assert any(name.endswith("experts.gate_up_proj") for name in weights)
    save_file({name: t.contiguous() for name, t in weights.items()}, stacked / "model.safetensors")
    sizes = read_architecture(apart)
    hf_model.check(stacked, sizes)
    wanted, found = dict(hf_model.read_tensors(apart)), dict(hf_model.read_tensors(stacked))
    assert wanted.keys() == found.keys() and all(torch.equal(wanted[name], found[name]) for name in wanted)
    bent = {name: t[:1].contiguous() if "gate_up" in name else t.contiguous() for name, t in weights.items()}
    save_file(bent, stacked / "model.safetensors")
    with pytest.raises(ConfigError, match=r"gate_up_proj is \[1, .*config.json requires"):
        hf_model.check(stacked, sizes)


def test_cases_several_sets_of_weights_in_one_directory_are_refused(base, tmp_path):
    there = shutil.copytree(base, tmp_path / "model")
    sizes, weights = read_architecture(there), load_file(there / "model.safetensors")
    for name in ("consolidated.safetensors", "pytorch_model.bin"):  # transformers takes model.safetensors, too
        (there / name).write_bytes(b"")
    hf_model.check(there, sizes)
    index = there / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(weights, "model.safetensors")}))
    hf_model.check(there, sizes)
    save_file(weights, there / "model-00001-of-00001.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(weights, "model-00001-of-00001.safetensors")}))
    with pytest.raises(ConfigError, match=r"two sets of weights, model.safetensors and the files that .*index"):
        hf_model.check(there, sizes)
    (there / "model.safetensors").unlink()
    hf_model.check(there, sizes)
    (there / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds a model and an adapter"):
        hf_model.check(there, sizes)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (datetime(2026, 1, 2, tzinfo=UTC), "extra_info.when is the datetime 2026-01-02"),
        (date(2026, 1, 2), "extra_info.when is the date 2026-01-02"),
        (b"abc", "extra_info.when is the bytes b'abc'"),
        (Decimal("1.5"), "extra_info.when is the Decimal 1.5"),
        (float("nan"), "extra_info.when is the float nan"),
        ([{"a": [{"b": Decimal("2.5")}]}], "extra_info.when.0.a.0.b is the Decimal 2.5"),
    ],
    ids=str,
)
def test_cases_values_that_json_does_not_know_are_refused_by_row_and_key(tmp_path, value, why):
    """Parquet in verl's form: such a value was a TypeError at the first grading."""
    row = {"prompt": [{"role": "user", "content": "1?"}], "reward_model": {"ground_truth": "1"}}
    nested = {"index": 0, "gone": None, "scores": [{"a": [1, 2.5, True]}]}
    rows = [{**row, "extra_info": {**nested, "when": value}}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "bad.parquet")
    with pytest.raises(DataError, match=re.escape("bad.parquet:1: " + why)):
        read_problems(PromptSet(path=str(tmp_path / "bad.parquet")))
    pq.write_table(pa.Table.from_pylist([{**row, "extra_info": nested, "unused": value}]), tmp_path / "good.parquet")
    [problem] = read_problems(PromptSet(path=str(tmp_path / "good.parquet")))
    assert problem.values["extra_info"] == nested


def test_cases_check_deep_compares_weights_with_the_config_beside_them(base, tmp_path, capsys):
    """config.json says fewer layers, other heads, or rows that the embedding does not have."""
    data = jsonl(tmp_path / "rows.jsonl", {"prompt": "ab", "response": "a"})
    cases = [
        ({"vocab_size": rows_of(base) + 4}, "config.json requires [64, 64]"),
        ({"num_key_value_heads": 4}, "config.json requires"),
        ({"num_hidden_layers": 3}, "contradicts itself"),
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, "holds no tensor"),
        ({"num_hidden_layers": 1, "layer_types": ["full_attention"]}, "model.layers.1"),
        ({"tie_word_embeddings": True}, "is not the embedding"),
    ]
    for number, (told, why) in enumerate(cases):
        there = copied(base, tmp_path / str(number), config=told)
        words = [f"model.path={there}", f"data.train={data}", "samples_per_step=1", "steps=1"]
        assert main(["check", "--command", "sft", *words, "--ranks", "1", "--deep"]) == 2, told
        assert why in (shown := capsys.readouterr().err), shown


def test_cases_models_that_share_token_ids_need_one_vocabulary(base, tmp_path):
    other = shutil.copytree(base, tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    swapped = text.replace('"a": 4', '"?": 4', 1).replace('"b": 5', '"a": 5', 1).replace('"?": 4', '"b": 4', 1)
    (other / "tokenizer.json").write_text(swapped)
    more = copied(base, tmp_path, extra=["<more>"])
    data = jsonl(tmp_path / "p.jsonl", {"question": "a", "answer": "a"})
    for junior, differs in ((other, True), (more, False)):
        words = words_of(TrainConfig, base, data)
        tandem = config_files.load(TrainConfig, [], [*words, f"roles.generator.tandem.junior={junior}"])
        student = {"model": {"path": str(base)}, "loss": {"objective": "distilled"}}
        roles = "roles=" + json.dumps({"student": student, "teacher": {"model": {"path": str(junior)}}})
        distil = config_files.load(TrainConfig, [], [roles, *words[1:]])
        for call in (lambda c=tandem: data_lines(c), lambda c=distil: Distil(updates=1).check(spec_of(c).checked)):
            with pytest.raises(ConfigError, match="vocabularies differ in 2 tokens") if differs else nullcontext():
                call()
