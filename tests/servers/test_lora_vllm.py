"""A role with adapters (LoRA) on a real vLLM server: merged into its weights, and computed beside the frozen model."""

from __future__ import annotations

from pathlib import Path

import conformance
import pytest
from engines_worker import prompts
from ranks import run_ranks
from safetensors.torch import load_file
from test_engines_experts import check_answers
from test_engines_vllm import PYTHON, VOCAB, completions
from tiny_models import make_model
from toys import characters

from megatron_rl.types import Stop

pytestmark = [
    pytest.mark.servers, pytest.mark.multi, pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM: there is no {PYTHON}; `make engines` installs it"),
]  # fmt: skip
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}  # of 32: vLLM's smallest on a CPU
CONFIG = """
roles:
  generator: {{model: {{path: {base}/model}}, layout: {{tp: 2}}, lora: {{rank: 4, alpha: 16}}, {more}}}
  {verifier}
recipe: {{target: megatron_rl.recipes.grpo:Grpo}}
data: {{path: nowhere.jsonl}}
engine: {{kind: vllm, python: {python}, kv_cache_gib: 0.25, max_batch: 16, adapters: {adapters}}}
run: {{dir: {base}, name: run}}
refit: {{timeout_s: 300, message_timeout_s: 60, verify: full}}
"""
MORE = "optimizer: {lr: 0.05}, micro_batch_tokens: 64"
VERIFIER = "verifier: {{model: {{path: {base}/model}}, layout: {{tp: 2}}, lora: {{rank: 2, alpha: 8}}, {more}}}"


def run(base, worker, *arguments, adapters, verifier=""):
    """Writes a model and a run's config below `base`, and runs a worker on two ranks. Returns what the driver found."""
    make_model(base / "model", "qwen2", vocab_size=VOCAB, eos_token_id=7, **HEADS)
    characters().save_pretrained(base / "model")
    (base / "run").mkdir()
    config, verifier = base / "run/config.yaml", verifier.format(base=base, more=MORE)
    config.write_text(CONFIG.format(base=base, python=PYTHON, adapters=adapters, more=MORE, verifier=verifier))
    helper = Path(__file__).parents[1] / "helpers" / worker
    return run_ranks(helper, 2, base / "ranks", str(config), *arguments)[0]


@pytest.mark.parametrize("adapters", ["served", pytest.param("merged", marks=pytest.mark.matrix)])
def test_lora_answers_of_vllm_are_those_of_the_merged_model(tmp_path, adapters):
    """Greedy answers, their log-probs and the log-probs of given text, at the start and after an update."""
    found = run(tmp_path, "engines_worker.py", "update", adapters=adapters)
    check_answers(tmp_path, found)
    served = [*(tmp_path / "run/engines").glob("adapters/generator/v*/adapter_model.safetensors")]
    assert len(served) == (2 if adapters == "served" else 0)
    assert all("lora_" in name for file in served for name in load_file(file))


def test_lora_roles_on_one_base_are_served_by_one_server(tmp_path):
    """One process has the base once and two adapters. A refit of one role neither changes what the other answers nor
    cuts it short."""
    found = run(tmp_path, "shared_adapters_worker.py", adapters="served", verifier=VERIFIER)
    assert found["servers"] == ["generator-0"] and found["loads"] == ["generator-0", "verifier@generator-0"]
    assert len(list((tmp_path / "run/logs").glob("engine_*.log"))) == 1
    assert max(found["gigabytes"]) < 1e-3 and len(found["gigabytes"]) == 4
    versions = {"start": (0, 0), "one_refitted": (1, 0), "end": (2, 0)}
    for name, of_each in versions.items():
        for role, version in zip(("generator", "verifier"), of_each, strict=True):
            weights = tmp_path / f"ranks/{role}_v{version}"
            (weights / "config.json").write_text((tmp_path / "model/config.json").read_text())
            judge = conformance.Judge(weights, characters())
            answers, scores = completions(found[f"{name}_{role}"]), found[f"{name}_{role}_scores"]
            for prompt, (completion,), own in zip(prompts(VOCAB), answers, scores, strict=True):
                judge.check_greedy(prompt, completion)
                assert completion.versions == [(0, version)]
                assert own == pytest.approx(judge.scores(prompt).tolist(), abs=conformance.NEAR)
    assert found["start_generator"] != found["start_verifier"] and found["start_generator"] != found["end_generator"]
    assert found["start_verifier"] == found["end_verifier"]
    during = [completion for group in completions(found["during"]) for completion in group]
    assert found["left_at_refit"] > 0 and found["failures"] == 0, "answers were under way when the refit was done"
    assert {tuple(completion.versions) for completion in during} == {((0, 0),)}
    assert all(completion.stop is not Stop.ABORTED for completion in during)
