"""A pretrained model that knows English, SmolLM2-135M-Instruct from 4-bit weights: actor, engines, training.

`make test-more ONLY=real-model` fetches the model and runs this.
"""

from __future__ import annotations

import json
import subprocess
import sys

import conformance
import pytest
import torch
from conftest import ROOT, environment
from ranks import run_ranks
from test_layouts import CP, PP, SP, WORKER
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_rl.engines.embedded.embedded_engine import EmbeddedEngine
from megatron_rl.engines.protocol import Sampling, complete
from megatron_rl.texts.text import load_tokenizer

MODEL = ROOT / "runs/real_model/model"
pytestmark = [
    pytest.mark.matrix, pytest.mark.multi,
    pytest.mark.skipif(not (MODEL / "config.json").exists(), reason=f"no {MODEL}; `make real-model` makes it"),
]  # fmt: skip
CASES = {
    1: [{"name": "smollm2", "layout": {}}],
    2: [
        {"name": "smollm2-pp2", "layout": PP},
        {"name": "smollm2-cp2", "layout": CP},
        {"name": "smollm2-dp2", "layout": {}},
    ],
    3: [{"name": "smollm2-tp3sp", "layout": SP | {"tp": 3}}],  # it has 9 heads
}
# transformers in float32 is itself off from float64 on this batch: logits 4e-4, log-probs 1e-4, the norm of the
# gradients 1.3e-5 of itself, a gradient 5.6e-5 of the largest. The bounds are two to five times that.
BOUNDS = {
    **{"logits": 8e-4, "logprobs": 2e-4, "loss": 3e-5, "loss_forward": 3e-5, "entropy": 5e-5, "grad_norm": 1e-4},
    **{"names": 0.0, "swap": 0.0},
}
GRADIENTS = 2.5e-4  # largest error over largest gradient
QUESTIONS = ("What is the capital of France?", "Write one sentence about the sea.", "What is 2 + 2?")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(MODEL)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], tokenize=False, add_generation_prompt=True)
        for q in QUESTIONS
    ]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def test_its_tokenizer_keeps_texts_marks_and_single_digits(tokenizer):
    text = "Ünïcode, 2026 = 7 * 289.5\n\tand <|im_start|> is a mark 😀"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    pieces = [tokenizer.decode([i]) for i in ids]
    assert [piece for piece in pieces if piece.strip().isdigit()] == [*"20267289", "5"]
    assert "<|im_start|>" in pieces and tokenizer.eos_token == "<|im_end|>"
    assert AutoTokenizer.from_pretrained(MODEL)(text, add_special_tokens=False)["input_ids"] == ids


@pytest.mark.parametrize("world", CASES)
def test_the_actor_is_that_of_transformers(tmp_path, world):
    """Log-probs, every gradient, and the weights after an optimizer step."""
    cases = [case | {"model": MODEL.name, "budget": 128} for case in CASES[world]]
    for answer in run_ranks(WORKER, world, tmp_path, str(MODEL.parent), json.dumps(cases)):
        for case in cases:
            errors = answer[case["name"]]
            for what, bound in BOUNDS.items():
                assert errors[what] <= bound, f"{case['name']}: {what} is off by {errors[what]:.2e}, bound {bound}"
            relative = errors["gradients"] / errors["largest_gradient"]
            assert relative <= GRADIENTS, f"{case['name']}: gradients are off by {relative:.1e} of the largest"
            assert errors["moved"] > 5e-3, "the optimizer step changed nothing"


def test_the_embedded_engine_answers_as_transformers_does(prompts, tokenizer):
    engine = EmbeddedEngine(MODEL, tokenizer=tokenizer)
    engine.load_pretrained()
    judge = conformance.Judge(MODEL, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    texts = []
    found = complete(engine, prompts, Sampling(max_tokens=24, temperature=0.0))
    for prompt, [completion] in zip(prompts, found, strict=True):
        judge.check_greedy(prompt, completion)
        wanted = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt) :]
        assert completion.tokens.tolist() == wanted.tolist()
        texts.append(tokenizer.decode(completion.tokens))
    assert "Paris" in texts[0], texts
    drawn = complete(engine, prompts, Sampling(max_tokens=16, n=2, seed=4))
    for prompt, group in zip(prompts, drawn, strict=True):
        for completion in group:
            assert completion.logprobs == pytest.approx(judge.logprobs(prompt, completion), abs=conformance.NEAR)


def test_every_part_of_the_example_runs_and_a_second_call_goes_on_from_its_end(tmp_path):
    """Warm-up of both roles, GRPO, Tango with a verifier, the report and the table, with a few updates of each."""
    (tmp_path / "runs/real_model").mkdir(parents=True)
    (tmp_path / "runs/real_model/model").symlink_to(MODEL)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    command = [sys.executable, str(ROOT / "examples/studies/real_model/run.py"), "--quick"]
    shown, costs = [], []
    runs = tmp_path / "runs/real_model/quick"
    for _ in range(2):
        done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        shown.append(done.stdout[done.stdout.index("SmolLM2-135M-Instruct (4-bit weights)") :])
        costs.append((runs / "tango_0/cpu_seconds.jsonl").read_text())
    assert "right answers, sampled" in shown[0] and "verifier: F1 of final verdicts" in shown[0]
    assert "grpo_0, iteration 1: " in shown[0] and "tango_0, iteration " in shown[0], "a sample of each arm"
    assert shown[1] == shown[0]
    assert {path.name for path in runs.iterdir()} >= {"generator", "verifier", "grpo_0", "tango_0"}
    assert costs[0] and costs[1] == costs[0], "the second call trained nothing"
