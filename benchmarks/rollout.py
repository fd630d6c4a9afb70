"""Tokens per second of the rollout engines, each against what it is measured by, in one run.

The models are random and end a sequence with a fixed probability at every token, so that lengths are geometric, cut at
--max-tokens: their mean is about a third of the longest, as in rollouts of reasoning models. One thread, float32; both
sides are measured in turn, and a ratio is the median of the rounds'.

--engines embedded,transformers: tokens per CPU-second of the embedded engine against transformers' `generate`, same
model and same tokens. Our engine samples them at temperature 1 with log-probs of every token. Transformers must then
generate exactly the same tokens: a logits processor makes each row's next recorded token the argmax of a greedy
`generate`, which is cheaper than drawing it, and no log-probs are asked of it. Only recorded tokens are counted on
either side, not what `generate` pads finished rows with. Transformers gets all prompts at once, left-padded, or cut
into the batch size (of --batches) that was its fastest in a first round; every prompt is different, so that our
prefill shared between samples gains nothing. `equal` repeats the comparison with no end of sequence: all rows have one
length, and what remains is the speed of a step. The bar is 3 times, the goal 5.

--engines vllm: tokens per second of our pool over one real vLLM server, one HTTP request per prompt with --samples
completions, against vLLM's own `LLM.generate` in its own environment, same requests and seeds, log-probs on both
sides. The bar is 0.9. The model is the small one: vLLM's attention on a CPU wants heads of 32 at least. `ratio_cpu`:
of tokens per CPU-second of all processes.
"""

from __future__ import annotations

import argparse
import math
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import common
import served
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    Qwen2Config,
    Qwen3MoeConfig,
)

from megatron_rl.engines.embedded.embedded_engine import EmbeddedEngine
from megatron_rl.engines.protocol import Sampling, complete

PRESETS = {
    "tiny": dict(
        vocab_size=59,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    ),
    "small": dict(
        vocab_size=8192,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
    ),
    "experts": dict(
        vocab_size=8192,
        hidden_size=384,
        moe_intermediate_size=768,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
    ),
}
BARS = {
    "mixed/ratio": 3.0,
    "vllm/ratio": 0.9,
}  # the first of the tiny preset; small is bound by arithmetic, not by overhead
VLLM_PRESET = "small"
VLLM_PYTHON = Path(__file__).parent.parent / ".venv-vllm/bin/python"
EOS = 1
TOP = 20  # most likely tokens that are asked for beside each sampled one; `cpu_with_top_20`: CPU-seconds over without


class Recorded(LogitsProcessor):
    """Makes the next token of every row's recording the only one that can be chosen; pad rows choose EOS."""

    def __init__(self, recordings: list[list[int]], prompt_width: int) -> None:
        longest = max(map(len, recordings))
        self._tokens = torch.tensor([r + [EOS] * (longest - len(r)) for r in recordings])  # [B, T]
        self._prompt_width = prompt_width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.scatter_(1, self._tokens[:, input_ids.shape[1] - self._prompt_width, None], torch.inf)


def write_model(directory: Path, preset: str, eos_share: float) -> None:
    """A random model (Qwen2, with experts Qwen3-MoE) whose every next-token distribution gives EOS the probability
    `eos_share`, nearly."""
    torch.manual_seed(0)
    kind = Qwen3MoeConfig if "num_experts" in PRESETS[preset] else Qwen2Config
    config = kind(**PRESETS[preset], max_position_embeddings=2048, eos_token_id=EOS, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        # Feature 0 of the residual stream is a constant; the output row of EOS reads it alone, the other rows never.
        model.model.embed_tokens.weight[:, 0] = model.model.embed_tokens.weight.norm(dim=1).mean()
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            if kind is Qwen3MoeConfig:
                layer.mlp.experts.down_proj[:, 0] = 0
            else:
                layer.mlp.down_proj.weight[0] = 0
        model.lm_head.weight[:, 0] = 0
        model.lm_head.weight[EOS] = 0
        hidden = model.model(torch.randint(2, PRESETS[preset]["vocab_size"], (8, 64))).last_hidden_state
        others = torch.cat([model.lm_head.weight[:EOS], model.lm_head.weight[EOS + 1 :]])
        rest = (hidden @ others.T).logsumexp(-1).mean()
        model.lm_head.weight[EOS, 0] = (math.log(eos_share / (1 - eos_share)) + rest) / hidden[..., 0].mean()
    model.save_pretrained(directory)


def generate_recorded(
    model: PreTrainedModel, prompts: list[list[int]], recordings: list[list[int]], batch: int
) -> list[list[int]]:
    """Runs transformers' generate over the prompts, `batch` at a time, and returns what it generated."""
    completions = []
    for start in range(0, len(prompts), batch):
        part, recorded = prompts[start : start + batch], recordings[start : start + batch]
        width = max(map(len, part))
        tokens = torch.tensor([[0] * (width - len(p)) + p for p in part])
        seen = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in part])
        generated = model.generate(
            tokens,
            attention_mask=seen,
            do_sample=False,
            max_new_tokens=max(map(len, recorded)),
            use_cache=True,
            eos_token_id=EOS,
            pad_token_id=0,
            logits_processor=LogitsProcessorList([Recorded(recorded, width)]),
        )
        completions += [row[width : width + len(r)].tolist() for row, r in zip(generated, recorded, strict=True)]
    return completions


def cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def compare(
    directory: Path, prompts: list[list[int]], sampling: Sampling, *, batches: list[int], rounds: int
) -> dict[str, float]:
    """Measures both sides in turn. Raises RuntimeError when transformers generated other tokens than ours."""
    engine = EmbeddedEngine(directory, max_batch=len(prompts))
    engine.load_pretrained()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa").eval()
    recordings = [row[0].tokens.tolist() for row in complete(engine, prompts, sampling)]
    if generate_recorded(model, prompts, recordings, batches[0]) != recordings:
        raise RuntimeError("transformers did not generate the recorded tokens: the comparison is void")
    best = min(batches, key=lambda b: cpu_seconds(lambda: generate_recorded(model, prompts, recordings, b)))
    pairs, slower = [], []
    for _ in range(rounds):
        ours = cpu_seconds(lambda: complete(engine, prompts, sampling))
        pairs.append((ours, cpu_seconds(lambda: generate_recorded(model, prompts, recordings, best))))
        slower.append(cpu_seconds(lambda: complete(engine, prompts, replace(sampling, top=TOP))) / ours)
    lengths = [len(r) for r in recordings]
    return {
        "ours_tokens_per_cpu_s": sum(lengths) / statistics.median(a for a, _ in pairs),
        "transformers_tokens_per_cpu_s": sum(lengths) / statistics.median(b for _, b in pairs),
        "transformers_batch": best,
        "mean_length": statistics.fmean(lengths),
        "longest": max(lengths),
        "ratio": statistics.median(b / a for a, b in pairs),
        f"cpu_with_top_{TOP}": statistics.median(slower),
    }


def embedded_figures(args: argparse.Namespace) -> dict[str, float]:
    prompts = _prompts(args.preset, args.sequences)
    batches = [b for b in args.batches if b <= args.sequences] or [args.sequences]
    metrics: dict[str, float] = {}
    for kind, eos_share, tokens in (
        ("mixed", 3 / args.max_tokens, args.max_tokens),
        ("equal", 1e-9, args.max_tokens // 3),
    ):
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), args.preset, eos_share)
            figures = compare(Path(folder), prompts, Sampling(max_tokens=tokens), batches=batches, rounds=args.rounds)
        metrics |= {f"{kind}/{name}": value for name, value in figures.items()}
    return metrics


def vllm_figures(args: argparse.Namespace) -> dict[str, float]:
    prompts = _prompts(VLLM_PRESET, max(1, args.sequences // args.samples))
    sampling = Sampling(max_tokens=args.max_tokens, n=args.samples)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model", VLLM_PRESET, 3 / args.max_tokens)
        model = Path(folder) / "model"
        figures = served.compare(
            Path(folder), model, prompts, sampling, python=str(args.python), rounds=args.rounds, eos=EOS
        )
    return {f"vllm/{name}": value for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--engines", help="embedded,transformers (they go together), vllm, or all (default: vllm where --python exists)"
    )
    parser.add_argument(
        "--python", type=Path, default=VLLM_PYTHON, help="interpreter of the environment that has vLLM (make engines)"
    )
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        default="tiny",
        help="of embedded; tiny: 0.16 M parameters; small: 19 M; experts: 65 M, 8 experts, 2 for a token",
    )
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--samples", type=int, default=4, help="of one prompt, in a request to vLLM")
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=192,
        help="tokens of the longest sequence; end of sequence comes with 3 / this",
    )
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[256, 128, 64], help="batch sizes that transformers may choose from"
    )
    parser.add_argument("--rounds", type=int, default=5)
    common.add_arguments(parser)
    args = parser.parse_args()
    chosen = (
        set(args.engines.split(","))
        if args.engines
        else {"embedded", "transformers", *(["vllm"] if args.python.exists() else [])}
    )
    if chosen - {"embedded", "transformers", "vllm"} or ("embedded" in chosen) != ("transformers" in chosen):
        parser.error(
            f"--engines {args.engines}: give embedded,transformers (they are compared with each other), vllm, "
            "or all three"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server is ended on the way out
    torch.set_num_threads(1)
    metrics: dict[str, float] = {}
    if "embedded" in chosen:
        metrics |= embedded_figures(args)
    if "vllm" in chosen:
        metrics |= vllm_figures(args)
    bars = {
        name: bar for name, bar in BARS.items() if name in metrics and (name != "mixed/ratio" or args.preset == "tiny")
    }
    common.finish(metrics, bars, args)


def _prompts(preset: str, count: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(2, PRESETS[preset]["vocab_size"]) for _ in range(rng.randint(8, 32))] for _ in range(count)]


if __name__ == "__main__":
    main()
