"""Conversions between Hugging Face and Megatron: exact, killed, on a full disk, and read by core."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compare_checkpoints import compare
from conftest import ROOT, environment, program
from ranks import run_ranks
from tiny_models import LATENT, make_model
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_rl.commands import conversions
from megatron_rl.config.schema import ConfigError
from megatron_rl.conversion import convert, parity, reshard
from megatron_rl.conversion.dist_writer import DistWriter
from megatron_rl.conversion.weight_source import find, read_sizes
from megatron_rl.main import main
from megatron_rl.models.registry import families
from megatron_rl.run.checkpoint import damage, seal
from megatron_rl.session.output_directory import fresh
from megatron_rl.weights import hf_model
from megatron_rl.weights.dist_checkpoint import DistCheckpoint, whole_names
from megatron_rl.weights.dist_names import counts, places
from megatron_rl.weights.hf_writer import HfWriter
from megatron_rl.weights.rank_layouts import TrainerLayout

TINY = {
    **{
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 59,
    },
    **{"intermediate_size": 48, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
    **{"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
}
STATES = ("optimizer.state.param.", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")


def tiny(folder, family, *, tied=False, dtype=torch.float32):
    """Makes a tiny model directory of a family."""
    full_attention = {"sliding_window": None} if family in ("mistral", "mixtral") else {}
    latent = LATENT | {"num_hidden_layers": 3, "num_experts": 8, "num_local_experts": 8} if "deepseek" in family else {}
    config = AutoConfig.for_model(family, **(TINY | full_attention | latent), tie_word_embeddings=tied)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    return folder


def with_optimizer(model, folder, *, masters=1.0):
    """Makes a checkpoint of `model` with an optimizer's state.

    Masters are the weights times `masters`; moments are other numbers.
    """
    convert.to_megatron(find(model), folder)
    checkpoint, sizes = DistCheckpoint(folder), read_sizes(model)
    whole = folder.with_name("whole")
    whole.mkdir()
    with DistWriter(whole) as writer:
        for number, name in enumerate(whole_names(sizes)):
            weight, place = checkpoint.parameter(name), next(places(name))
            for prefix, state in zip(
                ("", *STATES), (weight, weight * masters, weight + number, weight * number), strict=True
            ):
                stacked = state[(None,) * len(place.at)]
                offsets = (*place.at, *(0,) * weight.dim())
                writer.add(prefix + place.key, (*counts(sizes, place), *weight.shape), offsets, stacked)
        for key, data in checkpoint.objects():
            writer.add_bytes(key, data)
        writer.finish({"optimizer": {"step": 3}})
    shutil.copy(folder / "config.json", whole)
    shutil.rmtree(folder)
    return whole.rename(folder)


@pytest.mark.parametrize("family", sorted(families()))
@pytest.mark.parametrize("tied", [False, True])
def test_weights_go_to_megatron_and_back_bit_for_bit(tmp_path, family, tied):
    model = tiny(tmp_path / "model", family, tied=tied, dtype=torch.bfloat16 if tied else torch.float32)
    convert.to_megatron(find(model), tmp_path / "ck", verify=True)
    convert.to_hf(find(tmp_path / "ck"), tmp_path / "back", shard_bytes=8_000)
    rows = compare(find(model), find(tmp_path / "back"))
    assert len(rows) == len(hf_model.tensor_files(model)) and all(row["equal"] for row in rows)
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto").state_dict()
    read = AutoModelForCausalLM.from_pretrained(model, dtype="auto").state_dict()
    assert read.keys() == written.keys() and all(torch.equal(read[name], own) for name, own in written.items())
    assert len([*(tmp_path / "back").glob("*.safetensors")]) > 2
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto").dtype == (
        torch.bfloat16 if tied else torch.float32
    )


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen2", {"tp": 2, "pp": 2}),
        ("llama", {"tp": 4}),
        ("qwen2_moe", {"tp": 2, "ep": 2, "dp": 2}),
        ("mixtral", {"tp": 2, "etp": 2}),
    ],
)
def test_weights_and_moments_of_another_layout_are_the_same(tmp_path, family, layout):
    """Every rank's file holds that rank's pieces, and the 59 words are padded for tp.

    There and back gives the same checkpoint.
    """
    if family == "llama":
        config = {**TINY, "num_key_value_heads": 4}
        AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config)).save_pretrained(tmp_path / "model")
    else:
        tiny(tmp_path / "model", family, tied=family == "qwen2")
    model = tmp_path / "model"
    start = with_optimizer(model, tmp_path / "ck")
    reshard.reshard(start, tmp_path / "cut", TrainerLayout(**layout))
    reshard.reshard(tmp_path / "cut", tmp_path / "again", TrainerLayout())
    first, cut, again, sizes = (*map(DistCheckpoint, (start, tmp_path / "cut", tmp_path / "again")), read_sizes(model))
    for name in whole_names(sizes):
        for prefix in ("", *STATES):
            wanted = first.parameter(name, prefix)
            assert torch.equal(cut.checked(sizes, name, prefix)[: len(wanted)], wanted)
            assert torch.equal(again.parameter(name, prefix), wanted)
    embedding = cut.parameter("embedding.word_embeddings.weight", STATES[1])
    assert len(embedding) == 60 and not embedding[59:].any()
    ranks = layout.get("tp", 1) * layout.get("pp", 1) * layout.get("dp", 1)
    files = {int(file.name.split("_")[2]) for file in (tmp_path / "cut").glob("*.distcp")}
    assert files <= set(range(ranks)) and len(files) >= min(ranks, layout.get("tp", 1) * layout.get("pp", 1))
    assert torch.load(tmp_path / "cut/common.pt") == {"optimizer": {"step": 3}}
    assert dict(cut.objects()) == dict(first.objects())


@pytest.mark.parametrize(
    ("words", "etp"), [("--tp 2", 2), ("--tp 2 --etp 1", 1), ("--etp 4", 4), ("--ep 2 --etp 2", 2)]
)
def test_weights_of_experts_are_cut_by_etp_which_is_tp_if_not_said(tmp_path, words, etp):
    convert.to_megatron(find(tiny(tmp_path / "model", "qwen3_moe")), tmp_path / "ck")
    assert main(["convert", "reshard", str(tmp_path / "ck"), str(tmp_path / "cut"), *words.split()]) == 0
    stored = FileSystemReader(tmp_path / "cut").read_metadata().state_dict_metadata
    [columns] = {
        c.sizes[-1] for key, s in stored.items() if "experts" in key and "linear_fc2.weight" in key for c in s.chunks
    }
    assert columns == TINY["moe_intermediate_size"] // etp
    assert all(row["equal"] for row in compare(find(tmp_path / "ck"), find(tmp_path / "cut")))


def test_weights_without_experts_are_cut_by_tp_alone(tmp_path):
    convert.to_megatron(find(tiny(tmp_path / "model", "qwen2")), tmp_path / "ck")
    assert main(["convert", "reshard", str(tmp_path / "ck"), str(tmp_path / "cut"), "--tp", "2"]) == 0
    assert main(["convert", "reshard", str(tmp_path / "ck"), str(tmp_path / "x"), "--tp", "2", "--etp", "2"]) == 2


def test_weights_that_the_optimizer_does_not_belong_to_are_not_cut_anew(tmp_path):
    start = with_optimizer(tiny(tmp_path / "model", "qwen3"), tmp_path / "ck", masters=1.01)
    with pytest.raises(ConfigError, match="the optimizer's own copy of .* is not the weight"):
        reshard.reshard(start, tmp_path / "cut", TrainerLayout(tp=2))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ck", "model"]


def test_weights_of_a_whole_run_checkpoint_are_cut_anew_with_its_state(tmp_path):
    step = tmp_path / "run/checkpoints/iteration_000012"
    for role in ("one", "two"):
        with_optimizer(tiny(tmp_path / f"model_{role}", "llama"), tmp_path / role)
        shutil.copytree(tmp_path / role, step / role)
    (step / "state.json").write_text('{"iterations": 12}')
    seal(step, 12)
    with pytest.raises(ConfigError, match="call it iteration_000012"):
        reshard.reshard(tmp_path / "run", tmp_path / "x", TrainerLayout(tp=2))
    made = tmp_path / "new/iteration_000012"
    assert main(["convert", "reshard", str(tmp_path / "run"), str(made), "--tp", "2", "--pp", "2"]) == 0
    assert damage(made) is None and json.loads((made / "state.json").read_text()) == {"iterations": 12}
    assert all(row["equal"] for role in ("one", "two") for row in compare(find(made, role=role), find(step, role=role)))


def test_weights_in_parts_that_are_refused_by_a_layout(tmp_path):
    convert.to_megatron(find(tiny(tmp_path / "model", "qwen2")), tmp_path / "ck")
    for layout, says in (
        (
            TrainerLayout(tp=4),
            "num_key_value_heads = 2 of .* is not divisible by tp = 4: the nearest that works is tp = 2",
        ),
        (
            TrainerLayout(pp=3),
            "num_hidden_layers = 2 of .* is not divisible by pp x vpp = 3: the nearest that works is pp x vpp = 2",
        ),
    ):
        with pytest.raises(ConfigError, match=says):
            reshard.reshard(tmp_path / "ck", tmp_path / "cut", layout)
    with pytest.raises(ConfigError, match="is a Hugging Face directory, which has no layout"):
        reshard.reshard(tmp_path / "model", tmp_path / "cut", TrainerLayout(), role="x")
    with pytest.raises(ConfigError, match="is a checkpoint already"):
        convert.to_megatron(find(tmp_path / "ck"), tmp_path / "cut")
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="there exists"):
        convert.to_megatron(find(tmp_path / "model"), tmp_path / "there")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ck", "model", "there"]


def in_child(arguments: list[object], log: Path, prepare: Callable[[], object]) -> tuple[int, str]:
    """Runs `megatron-rl convert` in a fork after `prepare`.

    Returns (exit status, or minus the signal that ended it; what it wrote to standard error).
    """
    child = os.fork()
    if child == 0:
        try:
            sys.stderr = log.open("w", buffering=1)
            prepare()
            os._exit(main(["convert", *map(str, arguments)]))
        finally:
            traceback.print_exc()
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), log.read_text()


def killed_at(writer: Any, method: str, call: int) -> Callable[[], None]:
    """Returns a function that makes the writer's method kill the process with SIGKILL at its `call`-th call."""

    def prepare() -> None:
        original, calls = getattr(writer, method), []

        def counted(*args: Any, **rest: Any) -> None:
            calls.append(1)
            if len(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            original(*args, **rest)

        setattr(writer, method, counted)

    return prepare


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    """Returns {form of conversion: an input for it}."""
    folder = tmp_path_factory.mktemp("forms")
    convert.to_megatron(find(make_model(folder / "model", "qwen3", vocab_size=59)), folder / "ck")
    return {"to-hf": folder / "ck", "to-megatron": folder / "model", "reshard": folder / "ck"}


@pytest.mark.parametrize("form", ["to-hf", "to-megatron", "reshard"])
def test_weights_of_a_killed_conversion_do_not_look_complete_and_the_next_one_succeeds(forms, tmp_path, form):
    prepare = killed_at(HfWriter, "write", 9) if form == "to-hf" else killed_at(DistWriter, "add", 9)
    words, log = [form, forms[form], tmp_path / "made/out"], tmp_path / "log"
    assert in_child(words, log, prepare)[0] == -signal.SIGKILL
    assert [p.name for p in (tmp_path / "made").iterdir()] == [".out.partial"] and any(
        (tmp_path / "made/.out.partial").iterdir()
    )
    assert main(["convert", *map(str, words)]) == 0
    assert [p.name for p in (tmp_path / "made").iterdir()] == ["out"]
    assert all(row["equal"] for row in compare(find(forms["to-hf"]), find(tmp_path / "made/out")))


@pytest.mark.parametrize("form", ["to-hf", "to-megatron", "reshard"])
def test_weights_that_the_disk_does_not_take_leave_nothing(forms, tmp_path, form):
    """A file may not grow beyond 60 kB, which gives the same kind of error as a full disk."""
    words = [form, forms[form], tmp_path / "made/out"]
    status, said = in_child(
        words, tmp_path / "log", lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
    )
    assert status == 2 and "could not be written" in said and "Traceback" not in said, said
    assert not [*(tmp_path / "made").iterdir()]


def test_weights_that_do_not_fit_the_disk_are_not_begun(forms, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match="choose another disk"):
        convert.to_megatron(find(forms["to-megatron"]), tmp_path / "out")
    assert not [*tmp_path.iterdir()]


def test_weights_are_verified_by_their_logits_too(forms, tmp_path, monkeypatch):
    said = convert.to_hf(find(forms["to-hf"]), tmp_path / "hf", verify=True)
    assert "logits differ from those of transformers by" in said
    spoilt = tmp_path / "spoilt"
    shutil.copytree(tmp_path / "hf", spoilt)
    config = json.loads((spoilt / "config.json").read_text())
    (spoilt / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    same, _ = parity.logits_gap(forms["to-hf"], tmp_path / "hf")
    make_model(tmp_path / "other", "qwen3", vocab_size=59, seed=5)
    other, largest = parity.logits_gap(forms["to-hf"], tmp_path / "other")
    assert same < 1e-5 and other > 0.1 * largest
    for family in ("mixtral", "qwen2_moe", "qwen3_moe", "mistral", "gemma3_text", "olmo2", "deepseek_v3", "gpt_oss"):
        model = tiny(tmp_path / family, family)
        convert.to_megatron(find(model), tmp_path / f"{family}_megatron")
        gap, largest = parity.logits_gap(tmp_path / f"{family}_megatron", model)
        assert gap < 1e-5 * largest, family
    monkeypatch.setattr(parity.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    assert "of memory are free" in str(parity.obstacle(read_sizes(forms["to-megatron"])))


def test_weights_conversions_of_the_command(forms, tmp_path):
    no_torch = (
        "import runpy, sys; sys.modules['torch'] = None; sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    for words in ([ROOT / "megatron_rl/main.py", "convert", form] for form in forms):
        command = [sys.executable, "-c", no_torch, *map(str, words), "--help"]
        done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
        assert "output directory" in done.stdout
    text = program(
        "convert",
        "to-megatron",
        forms["to-megatron"],
        tmp_path / "ck",
        "--dtype",
        "bfloat16",
        "--shard-gb",
        "0.0001",
        "--verify",
    )
    assert "verified bit for bit" in text.stdout and len([*(tmp_path / "ck").glob("*.distcp")]) > 2
    assert set(dtype for _, dtype in find(tmp_path / "ck").shapes().values()) == {"bfloat16"}
    done = program("convert", "to-hf", tmp_path / "none", tmp_path / "x", check=False)
    assert done.returncode == 2 and "megatron-rl convert: no directory" in done.stderr


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Returns what two ranks of megatron-core make of checkpoints that the tools wrote, with 59 words each."""
    folder = tmp_path_factory.mktemp("loaded")
    imported = []
    for name, tied in (("qwen2", False), ("qwen3", True), ("gemma3_text", True), ("olmo2", False)):
        model, other = (
            make_model(folder / f"{name}{seed}", name, vocab_size=59, tie_word_embeddings=tied, seed=seed)
            for seed in (0, 1)
        )
        convert.to_megatron(find(model), folder / f"{name}_ck")
        case = {"name": name, "model": str(model), "other": str(other), "checkpoint": str(folder / f"{name}_ck")}
        imported.append(case | {"layouts": [{}, {"tp": 2}, {"pp": 2}]})
    layouts = [{"pp": 2}, {"tp": 2, "sequence_parallel": True, "ep": 2, "etp": 1}]
    for family in ("deepseek_v3", "gpt_oss"):
        case = {"name": family, "checkpoint": str(folder / f"{family}_ck"), "layouts": layouts}
        for what, seed in (("model", 0), ("other", 1)):
            case[what] = str(make_model(folder / f"{family}{seed}", family, vocab_size=59, seed=seed))
        convert.to_megatron(find(Path(case["model"])), folder / f"{family}_ck")
        imported.append(case)
    resharded = [
        {"name": "tp1_to_tp2", "model": str(folder / "qwen20"), "vocab": 59, "from": {}, "to": {"tp": 2}},
        {"name": "pp2_to_tp2", "model": str(folder / "qwen20"), "vocab": 59, "from": {"pp": 2}, "to": {"tp": 2}},
        {"name": "tied", "model": str(folder / "qwen30"), "vocab": 59, "from": {"tp": 2}, "to": {}},
        {"name": "layers_differ", "model": str(folder / "deepseek_v30"), "vocab": 59, "from": {"pp": 2}, "to": {}},
        {"name": "sinks", "model": str(folder / "gpt_oss0"), "vocab": 59, "from": {"pp": 2}, "to": {}},
        {"name": "norms", "model": str(folder / "olmo20"), "vocab": 59, "from": {"tp": 2}, "to": {"pp": 2}},
    ]
    cases = json.dumps({"imported": imported, "resharded": resharded})
    return run_ranks(Path(__file__).parents[1] / "helpers" / "convert_worker.py", 2, folder / "ranks", cases)


@pytest.mark.multi
def test_weights_converted_are_loaded_by_core_under_every_layout_bit_for_bit(loaded):
    for answer in loaded:
        assert len(answer["imported"]) == 16 and all(answer["imported"].values()), answer["imported"]


@pytest.mark.multi
def test_weights_resharded_train_on_as_if_nothing_had_happened(loaded):
    for answer in loaded:
        assert len(answer["resharded"]) == 6
        for name, gaps in answer["resharded"].items():
            assert gaps["loaded"] == 0.0 and gaps["lr"] == 0.0, name
            assert gaps["loss"] < 1e-6 and gaps["grad_norm"] < 1e-5 and gaps["after"] < 1e-5, (name, gaps)


def test_weights_that_two_processes_convert_to_one_place_come_from_the_first(tmp_path):
    with fresh(tmp_path / "out", wanted_bytes=0) as folder:
        (folder / "file").touch()
        with pytest.raises(ConfigError, match="another process is writing"), fresh(tmp_path / "out", wanted_bytes=0):
            pass
    assert (tmp_path / "out/file").exists() and [p.name for p in tmp_path.iterdir()] == ["out"]


def test_weights_of_an_interrupted_conversion_leave_nothing_and_say_so(tmp_path, capsys):
    def convert_and_stop(command, args):
        with fresh(args.target, wanted_bytes=0):
            signal.raise_signal(signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversions, "_run", convert_and_stop)
        with pytest.raises(SystemExit) as ended:
            conversions.run(SimpleNamespace(form="to-hf", target=tmp_path / "out"))
    assert (
        ended.value.code == 128 + signal.SIGTERM
        and "nothing was left" in capsys.readouterr().err
        and not [*tmp_path.iterdir()]
    )
