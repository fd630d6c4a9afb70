"""`megatron-rl sft` with adapters (LoRA): its loss, gradients and step are peft's, and what it writes loads in peft."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import program
from safetensors.torch import load_file
from tiny_models import make_model
from toys import characters
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.multi
peft = pytest.importorskip("peft", reason="parity is measured against peft: pip install -e '.[dev]'")
PAIRS = [("abc", "cba"), ("hello", "olleh"), ("a", "a"), ("xyxy", "yxyx")]
RANK, ALPHA, LR = 3, 7.0, 0.1
TARGETS = ["q_proj", "v_proj", "down_proj"]
LAYOUTS = {"alone": {"launch": {"nproc": 1}}, "tp": {"layout": {"tp": 2}, "launch": {"nproc": 2}}}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model, pairs, and an adapter of random numbers that training starts from, as peft writes it."""
    place = tmp_path_factory.mktemp("lora_sft")
    tokenizer = characters()
    make_model(place / "model", "qwen2", vocab_size=len(tokenizer), eos_token_id=0)
    tokenizer.save_pretrained(place / "model")
    rows = [json.dumps({"prompt": prompt, "response": response}) for prompt, response in PAIRS]
    (place / "pairs.jsonl").write_text("\n".join(rows) + "\n")
    model = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32)
    settings = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, task_type="CAUSAL_LM")
    started, generator = peft.get_peft_model(model, settings), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in (p for p in started.parameters() if p.requires_grad):
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    started.save_pretrained(place / "start")
    return place


@pytest.fixture(scope="module", params=LAYOUTS)
def run(request, base):
    """One step on all pairs. With Adam's eps at 1 the step tells the gradient: lr g / (|g| + 1)."""
    settings = {
        "model": {"path": str(base / "model"), "dtype": "float32"},
        "data": {"train": str(base / "pairs.jsonl"), "shuffle": False, "max_tokens": 64},
        "lora": {"rank": RANK, "alpha": ALPHA, "targets": TARGETS, "path": str(base / "start")},
        "optimizer": {"lr": LR, "eps": 1.0, "weight_decay": 0.0, "clip_grad": 0.0},
        "samples_per_step": len(PAIRS), "steps": 1, "micro_batch_tokens": 64,
        "run": {"dir": str(base), "name": request.param}, **LAYOUTS[request.param],
    }  # fmt: skip
    file = base / f"{request.param}.json"
    file.write_text(json.dumps(settings))
    program("sft", file)
    return base / request.param


def loss_of(model):
    """The mean of -log p over the tokens of all responses and their ends, with transformers alone."""
    tokenizer, total, count = characters(), 0.0, 0
    for prompt, response in PAIRS:
        before = tokenizer.encode(prompt, add_special_tokens=False)
        told = [*tokenizer.encode(response, add_special_tokens=False), tokenizer.eos_token_id]
        logits = model(input_ids=torch.tensor([[*before, *told]])).logits[0, len(before) - 1 : -1]
        total = total - logits.log_softmax(-1)[range(len(told)), told].sum()
        count += len(told)
    return total / count


def adapted(base, adapter, **settings):
    model = AutoModelForCausalLM.from_pretrained(base / "model", dtype=torch.float32, attn_implementation="eager")
    return peft.PeftModel.from_pretrained(model, adapter, **settings)


def test_lora_sft_loss_gradients_and_step_are_pefts(run, base):
    model = adapted(base, base / "start", is_trainable=True)
    loss = loss_of(model)
    loss.backward()
    trained = {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}
    norm = torch.stack([p.grad.norm() for p in trained.values()]).norm()
    [row] = [json.loads(line)["metrics"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert abs(row["loss"] - loss.item()) < 2e-6 and abs(row["grad_norm"] - norm.item()) < 4e-6 * max(1, norm.item())
    start, after = (load_file(place / "adapter_model.safetensors") for place in (base / "start", run / "adapter"))
    assert after.keys() == start.keys() == trained.keys()
    for name, parameter in trained.items():
        step = (start[name] - after[name]) / LR
        gradient = step / (1 - step.abs())
        assert (gradient - parameter.grad).abs().max() < 4e-6 * max(1.0, parameter.grad.abs().max().item())
    torch.optim.AdamW(trained.values(), lr=LR, betas=(0.9, 0.999), eps=1.0, weight_decay=0.0).step()
    assert max((after[name] - p.detach()).abs().max().item() for name, p in trained.items()) < 1e-6
    assert max((after[name] - start[name]).abs().max().item() for name in start) > 1e-4


def test_lora_sft_writes_the_merged_model_and_the_adapter(run, base, tmp_path):
    """Each by itself gives the loss of the trained model; the base has not moved beyond its targets."""
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32, attn_implementation="eager")
        first, second = loss_of(adapted(base, run / "adapter")).item(), loss_of(merged).item()
        before = loss_of(adapted(base, base / "start")).item()
    assert abs(first - second) < 2e-6 and first < before - 1e-4
    was, now = (load_file(place / "model.safetensors") for place in (base / "model", run / "model"))
    changed = {name for name in was if not torch.equal(was[name], now[name])}
    assert changed == {name for name in was if any(f".{target}.weight" in name for target in TARGETS)}
    program("convert", "to-hf", run, tmp_path / "converted")  # from the newest checkpoint, which holds adapters alone
    converted = load_file(tmp_path / "converted/model.safetensors")
    assert max((converted[name] - now[name]).abs().max().item() for name in now) < 1e-6


def test_lora_sft_is_checked_as_training_is(base, tmp_path):
    file = tmp_path / "sft.yaml"
    file.write_text(
        f"model: {{path: {base}/model}}\ndata: {{train: {base}/pairs.jsonl}}\nlora: {{rank: 2, path: {base}/start}}\n"
    )
    refused = program("check", file, check=False)
    assert refused.returncode == 2 and "lora.rank = 2, and the adapter in lora.path" in refused.stderr
    said = program("check", file, "lora.path=null", "lora.rank=4").stdout
    assert "the model: trains adapters of rank 4 on q_proj, k_proj" in said
