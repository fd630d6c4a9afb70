"""Policies with a head: checkpoints cross layouts, and transformers and peft load what is exported, with the same
values."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from compare_checkpoints import compare
from layouts_worker import make_batch
from ranks import run_ranks
from safetensors.torch import load_file
from tiny_models import make_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from megatron_rl.conversion.convert import to_hf, to_megatron
from megatron_rl.conversion.reshard import reshard
from megatron_rl.conversion.weight_source import find
from megatron_rl.weights import hf_model
from megatron_rl.weights.rank_layouts import TrainerLayout

WORKER = Path(__file__).parents[1] / "helpers/heads_worker.py"
NAMES = ("value", "value_lora", "score")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    make_model(folder / "model", "qwen2", vocab_size=97, tie_word_embeddings=True, pad_token_id=5)
    make_model(folder / "untied_model", "qwen2", vocab_size=97)
    return folder


@pytest.fixture(scope="module")
def answers(folder):
    return run_ranks(WORKER, 2, folder / "ranks", str(folder))


def values_of(model, batch):
    """The values of a transformers classifier at every position that predicts a token in the loss; 0 elsewhere."""
    parts, cu = [], batch.cu_seqlens.tolist()
    with torch.no_grad():
        for a, b in zip(cu, cu[1:], strict=False):
            parts.append(model.score(model.model(batch.tokens[None, a:b]).last_hidden_state)[0, :, 0].float())
    return torch.where(batch.counted, torch.cat(parts), 0.0)


@pytest.mark.multi
@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_of_a_head_crosses_layouts(answers, name):
    for answer in answers:
        found, half = answer[name], name == "score"
        assert found["start"] == 0.0, "the values of a new head depend on the layout"
        assert found["weights"] <= (2e-2 if half else 2e-6) and found["metrics"] <= (2e-2 if half else 2e-6), found
        assert found["steps"] == 3 and found["head"] > 1e-2 and found["largest_head"] < 4 / 65
        assert (found["norms"] == 0.0) == ("lora" in name), "adapters leave the transformer as it is"


@pytest.mark.multi
def test_a_head_waits_for_weights_that_are_gathered_late(answers):
    assert [answer["overlapped"] < 1e-6 for answer in answers] == [True, True], answers


@pytest.mark.multi
def test_a_checkpoint_with_a_head_is_not_loaded_without_one_nor_the_other_way_round(answers):
    for answer in answers:
        without, language, adapters = answer["refused"]
        assert "checkpoint_value holds a model with a head, and the role's head is null: set head as it was" in without
        assert "untied holds a language model, and the role's head is value: set head as it was" in language
        assert "holds adapters alone, and the role trains a whole model" in adapters


@pytest.mark.multi
@pytest.mark.parametrize("name", ["shared_full", "shared_lora"])
def test_a_checkpoint_of_a_policy_that_a_critic_shares_crosses_layouts(folder, answers, name):
    """The checkpoint has the value head; engines and exported models do not."""
    for answer in answers:
        found = answer[name]
        assert found["loaded"] == 0.0 and found["moved"] > 1e-2
        assert found["weights"] < 2e-6 and found["head"] < 2e-6 and found["metrics"] < 2e-6, found
        assert found["exported"] == []
        without, plain = found["refused"]
        assert "holds a model with a value head beside its output layer, and the role's loss.value_coef is 0" in without
        assert "holds a model with no value head beside its output layer, and the role's loss.value_coef is ab" in plain
    _, told = AutoModelForCausalLM.from_pretrained(folder / f"{name}_model", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]


@pytest.mark.multi
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", [AutoModelForTokenClassification, AutoModelForSequenceClassification])
def test_both_classifiers_of_transformers_load_an_export_with_the_same_values(folder, answers, name, kind):
    model, told = kind.from_pretrained(folder / name, dtype=torch.float32, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    assert model.score.bias is None and model.config.pad_token_id == 5 and model.config.id2label == {0: name[:5]}
    wanted = "Qwen2ForTokenClassification" if "value" in name else "Qwen2ForSequenceClassification"
    assert json.loads((folder / name / "config.json").read_text())["architectures"] == [wanted]
    found = values_of(model.eval(), make_batch(97))
    ours = load_file(folder / f"values_{name}.safetensors")["values"]
    assert ours.abs().max() > 0.05
    assert (found - ours).abs().max() < (2e-2 if name == "score" else 2e-6)


@pytest.mark.multi
def test_peft_loads_an_adapter_with_its_head(folder, answers):
    from peft import PeftModel

    base = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, folder / "adapter_value_lora").merge_and_unload().eval()
    wanted = load_file(folder / "values_value_lora.safetensors")["values"]
    assert (values_of(model, make_batch(97)) - wanted).abs().max() < 2e-6
    again = load_file(folder / "again_0.safetensors")["values"]
    assert torch.equal(again, load_file(folder / "again_1.safetensors")["values"])
    assert (again - wanted).abs().max() < 2e-6, "lora.path did not load the head"


@pytest.mark.multi
def test_conversions_of_a_checkpoint_with_a_head(folder, answers, tmp_path):
    """To a Hugging Face directory and back, resharded, and with the adapter's own head; each compared."""
    model = folder / "model"
    source = find(folder / "checkpoint_score", model=model)
    assert source.head == "value", "neither config.json nor a config.yaml says what the head computes"
    said = to_hf(source, tmp_path / "hf", verify=True)
    assert said.startswith("logits differ from those of transformers by ")
    hf_model.check(tmp_path / "hf", hf_model.read_architecture(tmp_path / "hf", "score"))
    to_megatron(find(tmp_path / "hf"), tmp_path / "back", verify=True)
    assert all(row["equal"] for row in compare(find(tmp_path / "back"), find(tmp_path / "hf")))
    [_] = reshard(folder / "checkpoint_score", tmp_path / "cut", TrainerLayout(tp=2), model=model)
    assert all(row["equal"] for row in compare(find(tmp_path / "cut"), find(tmp_path / "hf")))
    merged = find(folder / "adapter_value_lora", model=model)
    assert "differ" in to_hf(merged, tmp_path / "merged", verify=True)
    found = compare(find(tmp_path / "merged"), find(folder / "value_lora"))
    assert max(row["largest"] for row in found) < 1e-6 and len(found) == len(hf_model.tensor_files(folder / "value"))


@pytest.mark.multi
def test_a_reward_model_reads_the_last_token_of_padded_rows(folder, answers):
    model = AutoModelForSequenceClassification.from_pretrained(folder / "score", dtype=torch.float32).eval()
    batch = make_batch(97)
    cu = batch.cu_seqlens.tolist()
    rows = [torch.where(batch.tokens[a:b] == 5, 6, batch.tokens[a:b]) for a, b in zip(cu, cu[1:], strict=False)]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=5)
    with torch.no_grad():
        together = model(padded, attention_mask=(padded != 5).long()).logits[:, 0]
        alone = [model.score(model.model(row[None]).last_hidden_state)[0, -1, 0] for row in rows]
    assert np.allclose(together, torch.stack(alone), atol=1e-5)
