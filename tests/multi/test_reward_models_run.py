"""`megatron-rl sft` trains a reward model on two ranks, and a run of GRPO is rewarded by it."""

from __future__ import annotations

import json
import random

import pytest
import torch
from conftest import program
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from megatron_rl.data.tiny import write_tiny_model, write_tiny_problems
from megatron_rl.run.metrics import read_metrics
from megatron_rl.training.store import iteration_files, read_rows

pytestmark = pytest.mark.multi


def preferences(count, seed):
    """Pairs of answers of 8 letters. The one with the larger share of the requested letter is preferred."""
    rng, rows = random.Random(seed), []
    for _ in range(count):
        letter, others = rng.choice("abc"), "defgh"
        answers = []
        for share in rng.sample(range(9), 2):
            own = [letter] * share + [rng.choice(others) for _ in range(8 - share)]
            rng.shuffle(own)
            answers.append((share, "".join(own)))
        (least, rejected), (most, chosen) = sorted(answers)
        rows.append({"prompt": letter * 3, "chosen": chosen, "rejected": rejected, "margin": (most - least) / 8})
    return rows


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trains a reward model. -> the directory of the run"""
    base = tmp_path_factory.mktemp("reward")
    write_tiny_model(base / "model")
    for name, count, seed in (("train", 512, 0), ("validation", 64, 1)):
        (base / f"{name}.jsonl").write_text("\n".join(map(json.dumps, preferences(count, seed))))
    config = {
        "model": {"path": str(base / "model")},
        "data": {"train": str(base / "train.jsonl"), "validation": str(base / "validation.jsonl"), "max_tokens": 16},
        "loss": {"objective": "bradley_terry", "objective_args": {"center_rewards_coefficient": 0.01}},
        "optimizer": {"lr": 3e-3}, "samples_per_step": 32, "epochs": 2, "micro_batch_tokens": 512,
        "run": {"dir": str(base), "name": "reward"}, "launch": {"nproc": 2},
    }  # fmt: skip
    (base / "reward.json").write_text(json.dumps(config))
    program("sft", base / "reward.json")
    return base


def scores(directory, texts):
    """The scores as transformers loads the model by default, in one padded batch."""
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    batch = tokenizer([text + tokenizer.eos_token for text in texts], return_tensors="pt", padding=True)
    with torch.no_grad():
        return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0].tolist()


def test_reward_models_prefer_as_their_data_do(trained):
    last = [row.metrics for row in read_metrics(trained / "reward") if row.scope == "sft"][-1]
    assert last["validation_rewards/accuracies"] >= 0.95 and last["validation_rewards/margins"] > 0.5
    rows = preferences(32, 2)
    chosen, rejected = (
        scores(trained / "reward/model", [row["prompt"] + row[side] for row in rows]) for side in ("chosen", "rejected")
    )
    assert sum(a > b for a, b in zip(chosen, rejected, strict=True)) >= 0.95 * len(rows)


def test_reward_models_scores_are_the_rewards_of_grpo(trained):
    write_tiny_problems(trained / "problems.jsonl", 32)
    own = {"optimizer": {"lr": 3e-3}, "sampling": {"max_tokens": 8}, "max_prompt_tokens": 8, "micro_batch_tokens": 512}
    config = {
        "roles": {
            "generator": {"model": {"path": str(trained / "model")}, "loss": {"kl_coef": 0.0}, **own},
            "reward": {"model": {"path": str(trained / "reward/model")}, "head": "score", **own},
        },
        "recipe": {
            "target": "megatron_rl.recipes.dapo:Dapo",
            "args": {"updates": 3, "group_size": 4, "template": "plain", "reward_model": {"weight": 0.75}},
        },
        "data": {"path": str(trained / "problems.jsonl")},
        "reward": {"target": "megatron_rl.rewards.tiny_task:grade", "answer_format": "{answer}"},
        "run": {"dir": str(trained), "name": "grpo", "prompts_per_iteration": 8, "save_rollouts_every": 1},
        "launch": {"nproc": 2},
    }  # fmt: skip
    (trained / "grpo.json").write_text(json.dumps(config))
    program("train", trained / "grpo.json")

    lines = [row.metrics for row in read_metrics(trained / "grpo") if row.scope == "generator"]
    assert len(lines) == 3 and all("reward/reward_model" in line and not line["skipped"] for line in lines)
    rows = [row for file in iteration_files(trained / "grpo/rollouts") for row in read_rows(file, "generator")]
    assert len(rows) == 3 * 32
    wanted = scores(trained / "reward/model", [row["prompt"] + row["text"] for row in rows])
    assert [row["rewards"]["reward_model"] for row in rows] == pytest.approx(wanted, abs=1e-4)
    for row in rows:
        mixed = 0.25 * row["rewards"]["outcome"] + 0.75 * row["rewards"]["reward_model"]
        assert row["rewards"]["trained"] == pytest.approx(mixed)


def test_pairs_a_reward_model_trained_with_adapters_is_pefts_and_its_merged_model(tmp_path):
    peft = pytest.importorskip("peft")
    write_tiny_model(tmp_path / "model")
    sizes = tmp_path / "model/config.json"  # a base whose end token is its token for padding is refused
    sizes.write_text(json.dumps(json.loads(sizes.read_text()) | {"pad_token_id": None}))
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, preferences(64, 0))))
    config = {
        "model": {"path": str(tmp_path / "model")}, "data": {"train": str(tmp_path / "train.jsonl"), "max_tokens": 16},
        "loss": {"objective": "bradley_terry"}, "lora": {"rank": 4, "alpha": 8}, "optimizer": {"lr": 1e-2},
        "samples_per_step": 32, "steps": 3, "micro_batch_tokens": 512, "run": {"dir": str(tmp_path), "name": "reward"},
    }  # fmt: skip
    (tmp_path / "reward.json").write_text(json.dumps(config))
    program("sft", tmp_path / "reward.json")
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=1, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "reward/adapter").eval()
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward/model", dtype=torch.float32).eval()
    for model in (adapted, merged):
        model.config.pad_token_id = None
    tokens = torch.randint(5, 40, (3, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, wanted = (torch.cat([m(input_ids=row[None]).logits for row in tokens]) for m in (merged, adapted))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    assert wanted.std() > 0.01
