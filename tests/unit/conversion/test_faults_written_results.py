"""What is written is read by the programs that it is for, as their users load it: with default settings, and with the
values that were trained."""

from __future__ import annotations

import json
import shutil

import peft
import pytest
import torch
from chats import CHATML, chat_tokenizer
from safetensors.torch import load_file
from test_faults_adapters import saved
from tiny_models import FAMILIES, make_model, make_scored
from toys import characters
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from megatron_rl.config.model import Lora, Model
from megatron_rl.config.schema import ConfigError
from megatron_rl.conversion import convert
from megatron_rl.conversion.weight_source import find
from megatron_rl.data.tiny import write_tiny_model
from megatron_rl.session.output_directory import describe_head
from megatron_rl.spec.model_gate import LoadedModel, check_model
from megatron_rl.weights import lora_adapters

TEXTS = ["say a: aaa", "say a: zz", "say b: b", "x"]


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "seed_oss"])
def test_faults_a_written_model_of_every_family_is_loaded_by_transformers_with_the_same_logits(tmp_path, family):
    model = make_model(tmp_path / "model", family, num_hidden_layers=2, **LAYERS.get(family, {}))
    convert.to_hf(find(model), tmp_path / "written")
    tokens = torch.arange(3, 19)[None]
    with torch.no_grad():
        wanted, found = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()(tokens).logits
            for path in (model, tmp_path / "written")
        )
    assert torch.equal(wanted, found) and found.std() > 0.05
    check_model(LoadedModel(model=Model(path=str(tmp_path / "written"))))


LAYERS = {"gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]}}


def padded_with_eos(path):
    """A tokenizer whose padding token is its end token, as that of Qwen2.5's base models and of `write_tiny_model`."""
    return write_tiny_model(path)


def not_padded(path):
    """A tokenizer without a padding token, as those of Llama."""
    write_tiny_model(path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(path)
    config = json.loads((path / "config.json").read_text()) | {"pad_token_id": None}
    (path / "config.json").write_text(json.dumps(config))
    return path


def padded(path):
    """A tokenizer with a padding token of its own, and a config.json that names the end token."""
    write_tiny_model(path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    tokenizer.pad_token = "<|system|>"
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize("make", [padded_with_eos, not_padded, padded])
@pytest.mark.parametrize("head", ["score", "value"])
def test_faults_a_reward_model_is_read_at_its_end_token(tmp_path, make, head):
    """A sequence classifier skips tokens that equal pad_token_id: it read the token before the end token, where another
    score stands (-5.7 trained, +6.7 as loaded)."""
    scored = with_head(make(tmp_path / "model"))
    if head == "value":
        describe_head(scored, "value")
    convert.to_hf(find(scored), tmp_path / "written")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "written", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "written")
    end = tokenizer.eos_token
    assert model.config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    backbone = AutoModel.from_pretrained(tmp_path / "written", dtype=torch.float32).eval()
    weight = load_file(scored / "model.safetensors")["score.weight"].float()
    with torch.no_grad():
        wanted = []
        for text in TEXTS:
            ids = tokenizer(text + end, return_tensors="pt")["input_ids"]
            assert ids[0, -1] == tokenizer.eos_token_id
            wanted.append((backbone(ids).last_hidden_state[0, -1] @ weight[0]).item())
            assert model(ids).logits.item() == pytest.approx(wanted[-1], abs=1e-5)
            another = (backbone(ids).last_hidden_state[0, -2] @ weight[0]).item()
            assert abs(another - wanted[-1]) > 1e-3, "the token before has another score"
        for side in ("left", "right"):
            batch = tokenizer([text + end for text in TEXTS], return_tensors="pt", padding=True, padding_side=side)
            positions = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
            found = model(**batch, position_ids=positions).logits[:, 0]
            assert found.tolist() == pytest.approx(wanted, abs=1e-4), side
        values = AutoModelForTokenClassification.from_pretrained(tmp_path / "written", dtype=torch.float32).eval()
        assert values(ids).logits[0, -1, 0].item() == pytest.approx(wanted[-1], abs=1e-5)
    check_model(LoadedModel(model=Model(path=str(tmp_path / "written")), head=head))


def with_head(base):
    """Returns a reward model with the tokenizer of `base`, and with the padding of its config.json."""
    scored = make_scored(base)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy2(base / name, scored / name)
    return scored


def test_faults_a_reward_model_without_a_token_for_padding_refuses_batches(tmp_path):
    model = make_model(tmp_path / "model", num_hidden_layers=1, vocab_size=97, eos_token_id=0, pad_token_id=0)
    characters().save_pretrained(model)
    convert.to_hf(find(with_head(model)), tmp_path / "written")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "written").eval()
    wanted = AutoModelForTokenClassification.from_pretrained(tmp_path / "written").eval()
    ids = torch.tensor([[5, 6, 7, 0]])
    assert loaded(ids).logits.item() == pytest.approx(wanted(ids).logits[0, -1].item(), abs=1e-6)
    with pytest.raises(ValueError, match="no padding token"):
        loaded(ids.repeat(2, 1))


def test_faults_an_adapter_whose_base_would_be_read_at_another_token_is_refused(tmp_path):
    base, lora = write_tiny_model(tmp_path / "model"), Lora(rank=4, alpha=8, targets=("q_proj",))
    loaded = LoadedModel(model=Model(path=str(base)), head="score", trained=True, lora=lora)
    with pytest.raises(ConfigError, match="pad_token_id = 0 is an end token, so that transformers and peft would read"):
        check_model(loaded)
    check_model(LoadedModel(model=Model(path=str(base)), head="score", trained=True))
    not_padded(base)
    check_model(loaded)


def test_faults_adapters_are_loaded_by_peft_with_the_values_of_the_merged_model(tmp_path):
    base = make_model(tmp_path / "base")
    theirs = saved(base, tmp_path / "theirs")
    settings = lora_adapters.read_settings(theirs)
    own = tmp_path / "own"
    tensors = load_file(theirs / "adapter_model.safetensors")
    lora_adapters.write(own, tensors, settings, str(base), lora_adapters.base_digest(base))
    convert.to_hf(find(own), tmp_path / "merged")
    tokens = torch.arange(3, 19)[None]
    with torch.no_grad():
        found = peft.AutoPeftModelForCausalLM.from_pretrained(own, dtype=torch.float32).eval()(tokens).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()(tokens).logits
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()(tokens).logits
    assert (found - merged).abs().max() < 1e-4 < (found - plain).abs().max()


def test_faults_tokenizer_template_and_generation_config_are_written_as_they_were(tmp_path):
    model = make_model(tmp_path / "model", num_hidden_layers=1, vocab_size=104, eos_token_id=2)
    tokenizer = chat_tokenizer(CHATML)
    tokenizer.save_pretrained(model)
    GenerationConfig(eos_token_id=[2, 5], temperature=0.6, do_sample=True).save_pretrained(model)
    convert.to_hf(find(model), tmp_path / "written", dtype=torch.bfloat16)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "written")
    assert loaded.dtype == torch.bfloat16 and loaded.generation_config.eos_token_id == [2, 5]
    assert loaded.generation_config.temperature == 0.6
    again = PreTrainedTokenizerFast.from_pretrained(tmp_path / "written")
    messages = [{"role": "user", "content": "1+1?"}]
    rendered = [t.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) for t in (tokenizer, again)]
    assert rendered[0] == rendered[1] and again("1+1?")["input_ids"] == tokenizer("1+1?")["input_ids"]
