"""The twelve runs that `make golden` compares: their models, data and configs.

Models are random and speak a dozen words, among them all words that the methods look for, so that a random model earns
a reward now and then and every run has something to learn from. The configs use the names of this tree;
`renames.yaml` translates them for the other commit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SOLVER = [  # a solution's pieces, answers, and the scores of a judge
    *("<eos>", "a", "b", "<step>a</step>", "<step>b</step>", "<answer>\\boxed{a}</answer>"),
    *("<answer>\\boxed{b}</answer>", "<question>a</question>", "<question>b</question>", "<score>9</score>"),
    *("<score>1</score>", "<answer>a</answer>", "c", "d", "e"),
]
CALLER = ["<eos>", "a", "<calculator>1+1</calculator>", "<calculator>2*3</calculator>", "<answer>a</answer>", "b"]


def write_inputs(base: Path) -> None:
    """Writes models, data and templates into `base`. The same files serve both commits."""
    for seed, name in enumerate(("a", "b", "c")):
        _write_model(base / name, SOLVER, seed)
    _write_model(base / "caller", CALLER, 3)
    _write_model(base / "verifier", ["<eos>", "a", *_verifications()], 4)
    rows = [{"question": f"{c}?", "answer": "a" if i % 2 else "b"} for i, c in enumerate("abcdefghijklmnop")]
    (base / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = ("question", "answer", "solution", "num_steps", "references", "response")
    (base / "any.txt").write_text(" ".join(f"{{{name}}}" for name in fields[:2]) + " a")
    (base / "solve.txt").write_text("{question} a")
    (base / "verify.txt").write_text("{question} {solution} {num_steps} b")
    (base / "refer.txt").write_text("{references} {answer} a")


def configs(base: Path, urls: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns the config of each run by its name. `urls`: the server of the run that collects ahead of training."""
    solve = {"updates": 3, "group_size": 4, "template": f"{base}/solve.txt"}
    tango = {
        "generator_updates": 3, "warmup_updates": 1, "generator_iterations": 2, "group_size": 4, "verifications": 4,
        "alpha_start": 0.5, "generator_template": f"{base}/solve.txt", "verifier_template": f"{base}/verify.txt",
        "balanced_per_class": 4,
    }  # fmt: skip
    lean = {  # settings that cost less than the paper's
        "reviewed": "failed", "review_below": 0.25, "verifier_rests": True, "greedy_verdicts": True,
        "step_credit": {"span": "own", "baseline": "step"}, "alpha_min": 1.0,
    }  # fmt: skip
    pair = {"generator": _role(base, "a"), "verifier": _role(base, "verifier", tokens=3)}
    evolve = {f"{n}_template": f"{base}/any.txt" for n in ("proposer", "solver", "question", "answer")}
    evolve |= {"reference_template": f"{base}/refer.txt", "updates": 3, "proposals": 2, "answers": 2, "judgements": 1}
    tool = {"target": "megatron_rl.contrib.calculator:Calculator"}
    world = {"target": "megatron_rl.environments.tool_task:ToolTask"}
    world["args"] = {"tools": [tool], "template": f"{base}/solve.txt", "max_calls": 2}
    students = {"student": _role(base, "a", loss={"objective": "distilled_top_k"}), "teacher": _teacher(base)}
    servers = {"kind": "vllm", "urls": {"generator": list(urls)}, "start": False, "token_file": f"{base}/token"}
    dapo = solve | {"dynamic_sampling": {"rounds": 4}, "overlong": {"cache": 2, "penalty": 0.25}}

    def grpo(name: str, **layout: int) -> dict[str, Any]:
        return _config(base, name, "recipes.grpo:Grpo", {"generator": _role(base, "a", layout=layout)}, solve)

    ahead = grpo("staleness") | {"engine": servers, "rollouts": {"max_staleness": 2}}
    adapters = {"generator": _role(base, "a", lora={"rank": 4, "alpha": 8})}
    tandem = {"generator": _role(base, "a", tandem={"strategy": "word", "p": 0.5, "max_gap": 4})}
    agents = {"updates": 3, "group_size": 4, "environment": world}
    found = [
        grpo("grpo"),
        _config(base, "dapo", "recipes.dapo:Dapo", {"generator": _role(base, "a")}, dapo),
        _config(base, "tango", "recipes.tango:Tango", pair, tango),
        _config(base, "lean_tango", "recipes.tango:Tango", pair, lean | tango),
        _config(base, "tandem", "recipes.tandem:Tandem", tandem, solve),
        _config(base, "distil", "recipes.distil:Distil", students, solve | {"top_k": 4}),
        _config(base, "agents", "recipes.agents:Agents", {"agent": _role(base, "caller")}, agents),
        _config(base, "lora", "recipes.grpo:Grpo", adapters, solve),
        _config(base, "evolve", "contrib.evolve:Evolve", {n: _role(base, m) for n, m in _CAST.items()}, evolve),
        ahead,
        grpo("tp2", tp=2),
        grpo("pp2", pp=2),
    ]
    return {config["run"]["name"]: config for config in found}


_CAST = {"proposer": "a", "solver": "b", "judge": "c"}


def _config(base: Path, name: str, recipe: str, roles: Mapping[str, Any], args: Mapping[str, Any]) -> dict[str, Any]:
    data = {"path": f"{base}/data.jsonl", "fields": {n: n for n in ("question", "answer")}}
    return {
        "roles": roles,
        "recipe": {"target": f"megatron_rl.{recipe}", "args": args},
        "data": data,
        "evaluation": {"sets": [data | {"name": "held", "shuffle": False, "limit": 16}], "every": 0},
        "reward": {"target": "golden_rewards:grade", "workers": 1, "timeout_s": 120.0},
        "preflight": {"enabled": False},
        "run": {"name": name, "prompts_per_iteration": 8, "save_every": 0},
        "launch": {"nproc": 2},
    }


def _role(base: Path, model: str, *, tokens: int = 6, **settings: Any) -> dict[str, Any]:
    loss = {"kl_coef": 0.001} | settings.pop("loss", {})
    return {
        "model": {"path": f"{base}/{model}"}, "optimizer": {"lr": 0.01}, "loss": loss,
        "sampling": {"max_tokens": tokens}, "max_prompt_tokens": 64, "micro_batch_tokens": 128, **settings,
    }  # fmt: skip


def _teacher(base: Path) -> dict[str, Any]:
    return {"policy": "none", "model": {"path": f"{base}/b"}, "max_prompt_tokens": 64}


def _verifications() -> list[str]:
    """Returns whole verifications of one and two steps, one word each."""
    word = {"+": "\\boxed{CORRECT}", "-": "\\boxed{INCORRECT}"}
    return [
        f"<step_verification>{''.join(f'<step>{word[v]}</step>' for v in verdicts)}</step_verification>"
        f"<final_verification>{word[final]}</final_verification>"
        for verdicts in ("+", "-", "++", "+-", "-+", "--")
        for final in "+-"
    ]


def _write_model(directory: Path, words: Sequence[str], seed: int) -> None:
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[1]))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token=words[0]).save_pretrained(directory)
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(words) + len(words) % 2,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=None,
        )  # fmt: skip
    )
    model.save_pretrained(directory)
