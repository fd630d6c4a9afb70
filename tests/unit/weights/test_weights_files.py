"""Model directories with a fault: each is refused with its file and tensor, and nothing is made of it."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_model

from megatron_rl.config.schema import ConfigError
from megatron_rl.conversion import convert
from megatron_rl.conversion.weight_source import find, read_sizes
from megatron_rl.weights import hf_model, safetensors_headers
from megatron_rl.weights.hf_writer import HfWriter, Planned
from megatron_rl.weights.parameter_mapping import Rect

SINGLE, FIRST, SECOND = "model.safetensors", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
NORM, UP, HEAD, EMBEDDING = (
    "model.norm.weight",
    "model.layers.1.mlp.up_proj.weight",
    "lm_head.weight",
    "model.embed_tokens.weight",
)


def sharded(folder, **overrides):
    """Makes a model in two files with an index."""
    make_model(folder, "llama", num_hidden_layers=2, vocab_size=59, **overrides)
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    names = sorted(tensors)
    halves = {FIRST: names[: len(names) // 2], SECOND: names[len(names) // 2 :]}
    for file, own in halves.items():
        save_file({name: tensors[name] for name in own}, folder / file, metadata={"format": "pt"})
    index = {name: file for file, own in halves.items() for name in own}
    (folder / safetensors_headers.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def rewrite(change):
    """Returns a function that changes the tensors of the file that holds all of them, or of the second of two files."""

    def apply(folder):
        file = folder / (SINGLE if (folder / SINGLE).exists() else SECOND)
        tensors = load_file(file)
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})

    return apply


def configure(**changes):
    """Returns a function that changes keys of config.json."""

    def apply(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return apply


def cut(file, keep):
    """Returns a function that keeps the first `keep` bytes of a file."""
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:keep])


def index(change):
    """Returns a function that changes the weight map of the index."""

    def apply(folder):
        tree = json.loads((folder / safetensors_headers.INDEX).read_text())
        change(tree["weight_map"])
        (folder / safetensors_headers.INDEX).write_text(json.dumps(tree))

    return apply


def all_of(*changes):
    return lambda folder: [change(folder) for change in changes]


def nan(tensors):
    tensors[NORM][3] = float("nan")


BAD = {
    "cut in its data": (cut(SECOND, -100), f"{SECOND} has .* bytes and cannot be read .*: it was cut"),
    "cut in its header": (cut(SECOND, 200), f"{SECOND} has 200 bytes and cannot be read"),
    "git-lfs pointer": (
        lambda f: (f / SECOND).write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 4976698672\n"
        ),
        f"{SECOND} is a git-lfs pointer, not the file itself: run `git lfs pull`",
    ),
    "empty": (cut(SECOND, 0), f"{SECOND} has 0 bytes"),
    "no safetensors": (
        lambda f: (f / SECOND).write_bytes((20).to_bytes(8, "little") + b"x" * 200),
        f"{SECOND} has 208 bytes and cannot be read .* no safetensors file",
    ),
    "too long": (
        lambda f: (f / SECOND).write_bytes((f / SECOND).read_bytes() + b"more"),
        f"{SECOND} has .* bytes and cannot be read .* is damaged",
    ),
    "missing file": (lambda f: (f / SECOND).unlink(), f"{SECOND} is missing, which .* lists for model.layers.0"),
    "index of another file": (index(lambda m: m.update({NORM: FIRST})), f"{FIRST} holds no tensor {NORM}, which"),
    "index of nothing": (
        index(lambda m: m.update({NORM: "gone.safetensors"})),
        f"gone.safetensors is missing, which .* lists for {NORM}",
    ),
    "broken index": (lambda f: (f / safetensors_headers.INDEX).write_text("{"), "index.json cannot be read"),
    "missing tensor": (index(lambda m: m.pop(UP)), f"holds no tensor '{UP}', which its config.json asks for"),
    "unknown tensor": (
        all_of(rewrite(lambda t: t.update(extra=torch.zeros(3))), index(lambda m: m.update(extra=SECOND))),
        "1 tensors have no place .* extra",
    ),
    "another shape": (
        rewrite(lambda t: t.update({UP: t[UP][:64]})),
        rf"{SECOND}: {UP} is \[64, 64\], but config.json requires \[128, 64\]",
    ),
    "matrix for a vector": (
        rewrite(lambda t: t.update({NORM: t[NORM][None]})),
        rf"{NORM} is \[1, 64\], but config.json requires \[64\]",
    ),
    "two dtypes": (
        rewrite(lambda t: t.update({NORM: t[NORM].bfloat16()})),
        f"several dtypes: .*{NORM} in .*{SECOND} is BF16",
    ),
    "quantised": (rewrite(lambda t: t.update({UP: t[UP].to(torch.int8)})), f"{SECOND}: {UP} is I8, not one of"),
    "unknown architecture": (configure(model_type="gpt2"), "model_type 'gpt2' is not supported"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
    "tied, but the head differs": (configure(tie_word_embeddings=True), f"{FIRST}: {HEAD} is not the embedding"),
    "not tied, and no head": (index(lambda m: m.pop(HEAD)), f"holds no tensor '{HEAD}', .*set tie_word_embeddings"),
    "not finite": (rewrite(nan), f"{SECOND}: {NORM} holds numbers that are not finite"),
}


@pytest.mark.parametrize("case", BAD)
def test_weights_of_a_bad_directory_are_refused_and_nothing_is_left(tmp_path, case):
    spoil, says = BAD[case]
    spoil(sharded(tmp_path / "model"))
    for make in (convert.to_megatron, convert.to_hf):
        with pytest.raises(ConfigError, match=says):
            make(find(tmp_path / "model"), tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    "case", ["cut in its data", "missing file", "index of another file", "missing tensor", "another shape"]
)
def test_weights_of_a_bad_directory_are_refused_by_the_actors_reader(tmp_path, case):
    spoil, says = BAD[case]
    spoil(sharded(tmp_path / "model"))
    with pytest.raises(ConfigError, match=says):
        hf_model.check(tmp_path / "model", read_sizes(tmp_path / "model"), cast=True)


def test_weights_that_lie_in_no_file_are_told_by_the_first_of_them(tmp_path):
    """The shard of another model lacks thousands of tensors: the message had a line for each."""
    folder = sharded(tmp_path / "model")
    index(lambda m: m.update({name: FIRST for name, file in m.items() if file == SECOND}))(folder)
    with pytest.raises(ConfigError) as error:
        safetensors_headers.read_directory(folder)
    assert str(error.value).count("\n") == 0 and "holds no tensor" in str(error.value)


def test_weights_of_a_directory_without_any_are_refused(tmp_path):
    make_model(tmp_path)
    (tmp_path / SINGLE).unlink()
    with pytest.raises(FileNotFoundError, match="holds no model.safetensors"):
        hf_model.tensor_files(tmp_path)


def test_weights_of_several_dtypes_are_cast_where_one_is_named(tmp_path):
    folder = sharded(tmp_path / "model")
    BAD["two dtypes"][0](folder)
    convert.to_hf(find(folder), tmp_path / "out", dtype=torch.bfloat16, verify=True)
    assert {t.dtype for t in load_file(tmp_path / "out" / SINGLE).values()} == {torch.bfloat16}


def test_weights_of_a_tied_model_may_hold_the_embedding_twice(tmp_path):
    folder = make_model(tmp_path / "model", "qwen2", tie_word_embeddings=True)
    rewrite(lambda t: t.update({HEAD: t[EMBEDDING].clone()}))(folder)
    convert.to_hf(find(folder), tmp_path / "out", verify=True)
    assert HEAD not in load_file(tmp_path / "out" / SINGLE)


def test_weights_are_read_as_views_of_the_file(tmp_path):
    tensors = hf_model.DirectoryTensors(make_model(tmp_path, "qwen2"))
    whole = tensors.whole(UP)
    part = tensors.read(Rect(UP, 5, 7, 11, 13, 0, 0))
    assert part.data_ptr() == whole.data_ptr() + (5 * whole.shape[1] + 7) * whole.itemsize


def test_weights_are_written_in_any_order_and_only_as_planned(tmp_path):
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.randn(4, 2)}
    writer = HfWriter(tmp_path, [Planned(n, tuple(t.shape), t.dtype) for n, t in tensors.items()], shard_bytes=80)
    with pytest.raises(KeyError):
        writer.write("d", tensors["a"])
    writer.write_all((name, tensors[name]) for name in "cab")
    found = dict(hf_model.read_tensors(tmp_path))
    assert found.keys() == tensors.keys() and all(torch.equal(found[n], t) for n, t in tensors.items())
    assert len({stored.file for stored in safetensors_headers.read_directory(tmp_path).values()}) == 2
    with pytest.raises(ValueError, match="was planned"):
        HfWriter(tmp_path, [Planned("a", (3, 5), torch.float32)]).write("a", torch.zeros(5, 3))


def test_weights_without_the_last_tensor_do_not_load(tmp_path):
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(40)}
    planned = [Planned(n, tuple(t.shape), t.dtype) for n, t in tensors.items()]
    with pytest.raises(KeyError, match="b"):
        HfWriter(tmp_path, planned, shard_bytes=80).write_all([("a", tensors["a"]), ("other", tensors["b"])])
    with pytest.raises(FileNotFoundError):
        safetensors_headers.read_directory(tmp_path)
