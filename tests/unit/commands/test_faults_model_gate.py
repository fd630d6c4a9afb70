"""One gate for models: every command that loads a model directory accepts and refuses the same directories, in the same
words."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_fp8_checkpoints import FP8, eight_bit
from tiny_models import make_scored
from transformers import PreTrainedTokenizerFast

from megatron_rl import main
from megatron_rl.data.tiny import write_tiny_model, write_tiny_problems
from megatron_rl.models import registry
from megatron_rl.weights.hf_model import DirectoryTensors
from megatron_rl.weights.quantisation import quantised_shapes

HEAD, DOWN = "lm_head.weight", "model.layers.0.mlp.down_proj.weight"
DEEP = "check_deep"


class Directory:
    """A copy of a tiny model whose files a case changes."""

    def __init__(self, path):
        self.path = path

    def config(self, **changes):
        file = self.path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    def tensors(self, change):
        file = self.path / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    def tokenizer(self, **changes):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(self.path)
        tokenizer.add_special_tokens(changes)
        tokenizer.save_pretrained(self.path)

    def rope(self, kind, **more):
        """Sets the scaling of the rotary embedding for contexts that are longer than 64 tokens."""
        config = json.loads((self.path / "config.json").read_text())
        theta = config["rope_parameters"]["rope_theta"]
        self.config(rope_parameters={"rope_type": kind, "factor": 4.0, "rope_theta": theta, **more})

    def eight_bit(self, change_scales):
        """Replaces the weights of linear layers by 8-bit values, with scales that `change_scales` changes."""
        sizes = registry.read(json.loads((self.path / "config.json").read_text()))

        def quantise(tensors):
            for name in quantised_shapes(sizes):
                values, scales, _ = eight_bit(tensors[name].bfloat16())
                tensors |= {name: values, name + "_scale_inv": change_scales(scales)}

        self.tensors(quantise)
        self.config(quantization_config=FP8)


def reward_model(model):
    model.tensors(lambda t: t.update({"score.weight": t.pop(HEAD)[:1].clone()}))


LONG = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 64}
REFUSED = {
    "a tied config with a head of its own": (
        lambda m: m.config(tie_word_embeddings=True),
        "lm_head.weight is not the embedding, but config.json says tie_word_embeddings: set it to false",
    ),
    "longrope": (lambda m: m.rope("longrope", **LONG), "rope_type 'longrope' is not supported: default, linear, yarn"),
    "dynamic": (lambda m: m.rope("dynamic"), "set it to default if no sequence is longer than max_position_embeddings"),
    "no head": (
        lambda m: m.tensors(lambda t: t.pop(HEAD)),
        "holds no tensor 'lm_head.weight', which its config.json asks for: set tie_word_embeddings",
    ),
    "no layer": (
        lambda m: m.tensors(lambda t: t.pop(DOWN)),
        f"holds no tensor '{DOWN}', which its config.json asks for: the directory is not complete",
    ),
    "another shape": (
        lambda m: m.tensors(lambda t: t.update({DOWN: t[DOWN][:, :-2].contiguous()})),
        f"{DOWN} is [64, 126], but config.json requires [64, 128]: is it another model's?",
    ),
    "another model": (
        lambda m: m.tensors(lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)})),
        "1 tensors have no place in a qwen2 model, e.g. model.layers.0.self_attn.q_norm.weight",
    ),
    "an end token without a row": (
        lambda m: m.tokenizer(eos_token="<|im_end|>"),
        "eos_token of the tokenizer is token 60 ('<|im_end|>'), and the embedding of ",
    ),
    "a family that is not known": (lambda m: m.config(model_type="gpt2"), "model_type 'gpt2' is not supported"),
    "8-bit weights with whole scales": (
        lambda m: m.eight_bit(lambda scales: scales.to(torch.int32)),
        "Only 8-bit values (F8_E4M3) with one scale (F32, BF16, F16, F8_E8M0) per 128 x 128 block can be read",
    ),
    "a reward model": (reward_model, "holds score.weight, the head of a reward model or a critic, and no text can be"),
    "a git-lfs pointer": (
        lambda m: (m.path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
        "is a git-lfs pointer, not the file itself",
    ),
    "no weights": (lambda m: (m.path / "model.safetensors").unlink(), "safetensors"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("gate") / "base")


@pytest.fixture
def model(base, tmp_path):
    return Directory(shutil.copytree(base, tmp_path / "model"))


@pytest.fixture
def doors(base, tmp_path, capsys):
    """Returns {command: function that runs the command with a model directory and returns (status, errors)}."""
    rows = write_tiny_problems(tmp_path / "rows.jsonl", 4)
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "a", "response": "b"}\n' * 4)
    preferences = tmp_path / "preferences.jsonl"
    preferences.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 4)
    (tmp_path / "ask.txt").write_text("ask {question}\n")
    run = {"dir": str(tmp_path / "runs"), "name": "run"}
    data, ask = {"path": str(rows)}, {"template": str(tmp_path / "ask.txt")}
    short = {"sampling": {"max_tokens": 2}, "max_prompt_tokens": 24}

    def train(path, recipe="grpo", args=None, **roles):
        roles = {name: {"model": {"path": str(p)}, **short, **more} for name, (p, more) in roles.items()}
        return {
            "roles": {"generator": {"model": {"path": str(path)}, **short}} | roles, "data": data, "run": run,
            "recipe": {"target": recipe, "args": {"updates": 1, **ask, **(args or {})}},
            "preflight": {"enabled": False}, "reward": {"target": "megatron_rl.rewards.tiny_task:grade"},
        }  # fmt: skip

    def tandem(path):
        config = train(base)
        config["roles"]["generator"]["tandem"] = {"junior": str(path)}
        return config

    one_set = {"sets": [data], **ask, "reward": {"target": "megatron_rl.rewards.tiny_task:grade"}}
    configs = {
        "train": ("train", train),
        DEEP: ("check", train),
        "train, as junior": ("train", tandem),
        "check, as junior": ("check", tandem),
        "sft": ("sft", lambda path: {"model": {"path": str(path)}, "data": {"train": str(pairs)}, "run": run}),
        "generate": (
            "generate",
            lambda path: {"model": {"path": str(path)}, "data": data, "output": str(tmp_path / "answers"), **ask,
                          "sampling": {"max_tokens": 2}},
        ),
        "eval": ("eval", lambda path: {"model": {"path": str(path)}, "sampling": {"max_tokens": 2}, **one_set}),
        "eval, as verifier": (
            "eval",
            lambda path: {"model": {"path": str(base)}, "verifier": {"model": {"path": str(path)}},
                          "sampling": {"max_tokens": 2}, **one_set},
        ),
        "serve": ("serve", lambda path: train(path) | {"engine": {"kind": "vllm", "python": "/bin/true"}}),
    }  # fmt: skip

    def settle(words):
        capsys.readouterr()
        try:
            status = main.main(words)
        except SystemExit as error:
            status = error.code
        return status, capsys.readouterr().err

    def start(name, path):
        command, config = configs[name]
        (tmp_path / "config.yaml").write_text(json.dumps(config(path)))
        more = {"serve": ["--role=generator"], "check": ["--deep"]}.get(command, [])
        return settle([command, str(tmp_path / "config.yaml"), *more])

    def convert(form, path):
        return settle(["convert", form, str(path), str(tmp_path / form)])

    doors = {name: lambda path, name=name: start(name, path) for name in configs}
    doors |= {form: lambda path, form=form: convert(form, path) for form in ("to-hf", "to-megatron")}
    return doors


@pytest.mark.parametrize("case", REFUSED)
def test_faults_a_model_that_is_refused_at_one_door_is_refused_at_every_door(case, model, doors):
    """`eval` and `generate` took models that `train` and `check --deep` refused, with log-probs 0.55 off."""
    change, says = REFUSED[case]
    change(model)
    for door, start in doors.items():
        if case == "a reward model" and door in ("to-hf", "to-megatron"):
            continue  # a conversion keeps the head
        status, errors = start(model.path)
        assert (status, says in errors) == (2, True), f"{door}: status {status}\n{errors}"
        assert "Traceback" not in errors, f"{door}: {errors}"


def test_faults_a_reward_model_of_ones_own_passes_check_as_it_does_train(base, tmp_path, capsys):
    """`check --deep` called score.weight a tensor of another model. A frozen reward model without a head got a random
    one."""
    scored = make_scored(shutil.copytree(base, tmp_path / "model"))
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy2(base / name, scored / name)
    rows = write_tiny_problems(tmp_path / "rows.jsonl", 4)
    (tmp_path / "ask.txt").write_text("ask {question}\n")
    args = {"updates": 1, "reward_model": {"weight": 1.0, "scale": "sigmoid"}, "template": str(tmp_path / "ask.txt")}
    short = {"sampling": {"max_tokens": 2}, "max_prompt_tokens": 64}
    for command, reward, says in (
        ("check", scored, "the config is valid"),
        ("check", base, "holds no tensor 'score.weight': a role with a head that is not trained needs a trained head"),
        ("train", base, "holds no tensor 'score.weight': a role with a head that is not trained needs a trained head"),
    ):
        config = {
            "roles": {
                "generator": {"model": {"path": str(base)}, **short},
                "reward": {"model": {"path": str(reward)}, "head": "score", **short},
            },
            "recipe": {"target": "dapo", "args": args},
            "data": {"path": str(rows)}, "run": {"dir": str(tmp_path), "name": "run"},
            "reward": {"target": "megatron_rl.rewards.tiny_task:grade"}, "preflight": {"enabled": False},
        }  # fmt: skip
        (tmp_path / "config.yaml").write_text(json.dumps(config))
        more = ["--deep"] * (command == "check")
        status = main.main([command, str(tmp_path / "config.yaml"), *more])
        told = "".join(capsys.readouterr())
        assert says in told and status == (0 if reward == scored else 2), told


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu])
def test_faults_8_bit_weights_are_read_with_scales_of_every_published_dtype(kind, model):
    """Scales in bfloat16 ended in a RuntimeError of torch."""
    plain, scaled = load_file(model.path / "model.safetensors"), {}
    model.eight_bit(lambda scales: scaled.setdefault(len(scaled), scales.to(kind)))
    stored, tensors = load_file(model.path / "model.safetensors"), DirectoryTensors(model.path)
    for name in tensors.stored:
        if (scales := stored.get(name + "_scale_inv")) is None:
            assert torch.equal(tensors.whole(name), plain[name])
            continue
        factor = scales.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
        wanted = stored[name].float() * factor[: stored[name].shape[0], : stored[name].shape[1]]
        assert torch.equal(tensors.whole(name), wanted.bfloat16()) and wanted.abs().max() > 0.01
