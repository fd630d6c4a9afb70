"""Computes with peft what a policy with adapters must compute: `lora_reference.py FILE FOLDER MODELS`.

MODELS are [name of a model in FOLDER, name of the reference, targets]. Written in FOLDER/MODEL.REFERENCE are: start,
the adapter that training starts from, as peft writes it; reference.safetensors, with log-probs, logits, gradients, and
the weights after a step; merged, the model with the start merged into it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from layouts_worker import DECAY, LR, WeightedLogprobs, make_rollouts
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from megatron_rl.batches.data_parallel_split import tally
from megatron_rl.batches.packed_batch import Statistics, pack

RANK, ALPHA = 3, 7.0  # a rank that no number of ranks divides


def start(path: str, targets: list[str]):
    """Returns a peft model in float32 whose A and B are random numbers, so that the adapter changes every answer."""
    from peft import LoraConfig, get_peft_model  # here: ranks that read RANK and ALPHA start without it

    eager = {"experts_implementation": "eager"} if "moe" in Path(path).name else {}
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager", **eager)
    settings = LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=targets, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM"
    )
    model = get_peft_model(base, settings)
    g = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=g))
    return model.train()


def compute(folder: Path, path: str, targets: list[str]) -> None:
    """Writes what peft computes of one model."""
    model, loss_function = start(path, targets), WeightedLogprobs()
    model.save_pretrained(folder / "start")  # makes the directory
    rollouts = make_rollouts(model.config.vocab_size)
    batch, tallied = pack(rollouts), tally(rollouts)
    weights, denominator = loss_function.aggregate(tallied.weighted, tallied.groups)
    cu, logprobs, entropies, logits = batch.cu_seqlens.tolist(), [], [], []
    for a, b in zip(cu, cu[1:], strict=False):
        row = model(input_ids=batch.tokens[None, a:b]).logits[0].float()
        logits.append(row.detach())
        logp = row.log_softmax(-1)
        logprobs.append(logp.gather(1, batch.labels[a:b, None])[:, 0])
        entropies.append(-(logp.exp() * logp).sum(-1))
    live = torch.cat(logprobs)
    loss = loss_function(Statistics(live, torch.cat(entropies)), batch)[0] / denominator
    loss.backward()
    trained = {n.replace(".default", ""): p for n, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    tensors = {f"gradient/{name}": p.grad.clone() for name, p in trained.items()}
    norm = torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
    torch.optim.AdamW(trained.values(), lr=LR, betas=(0.9, 0.999), eps=1e-4, weight_decay=DECAY).step()
    tensors |= {f"after/{name}": p.detach() for name, p in trained.items()}
    tensors |= {"logits": torch.cat(logits), "logprobs": torch.where(batch.mask, live.detach(), 0.0)}
    tensors |= {"loss": loss.detach().double()[None], "norm": norm.double()[None]}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "reference.safetensors")
    start(path, targets).merge_and_unload().save_pretrained(
        folder / "merged"
    )  # with the names of files, expert by expert


def main() -> None:
    folder = Path(sys.argv[2])
    torch.set_num_threads(1)
    for model, name, targets in json.loads(sys.argv[3]):
        compute(folder / f"{model}.{name}", str(folder / model), targets)
    Path(sys.argv[1]).write_text("null")


if __name__ == "__main__":
    main()
