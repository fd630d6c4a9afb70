"""Compares published runs of other trainers with what `megatron-rl plan` expects of the same model, layout and GPUs.

    python benchmarks/plan_published.py         # prints the table of docs/how_to/plan.md; it needs no network
    python benchmarks/plan_published.py --check # exits 1 when a row that was not fitted is off by more than 30 %

Rows marked `fitted` set the shares of planning/hardware.py and the constants of planning/compute.py; the others are the
check.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent)]

from common import add_arguments, finish  # noqa: E402

from megatron_rl.models.shape import Shape, read_shape  # noqa: E402
from megatron_rl.models.sizes import Sizes  # noqa: E402
from megatron_rl.planning import compute  # noqa: E402
from megatron_rl.planning.compute import EngineSetup, SequenceBatch  # noqa: E402
from megatron_rl.planning.hardware import parse_cluster  # noqa: E402
from megatron_rl.planning.memory import WHOLE, Actor, Precision  # noqa: E402
from megatron_rl.planning.workload import Draw  # noqa: E402
from megatron_rl.weights import counting  # noqa: E402
from megatron_rl.weights.counting import Parallel  # noqa: E402

BF16 = Precision.gpu("bfloat16")
FOUNDRY = "github.com/mosaicml/llm-foundry scripts/train/benchmarking/README.md @ 061f2c7"
AUTOMODEL = "github.com/NVIDIA-NeMo/Automodel docs/performance-summary.md @ 01926a5"
BRIDGE = "github.com/NVIDIA-NeMo/Megatron-Bridge docs/performance-summary-archive.md @ 0a25f91, 25.11"
NEMO_RL = "github.com/NVIDIA-NeMo/RL docs/about/performance-summary.md @ 06beed9, NeMo RL v0.4, on policy"
MT_NLG = "github.com/cli99/llm-analysis examples/megatron-turing-nlg/README.md (arXiv 2201.11990, section 2.4)"
SWEEP = "johnmusgrave.com/p/vllm-throughput-latency-sweep-on (vLLM 0.23)"
GPUSTACK = "github.com/gpustack/gpustack docs/performance-lab, vLLM 0.11: qwen3-8b/h100-latency.md, gpt-oss-20b/a100.md"
DISPATCH = "DeepEP: a token goes once to a node, beside computation"
WORST = 0.3
PROMPT = 130  # tokens of a problem of OpenMathInstruct-2 in its template: not published, assumed


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published run: its metric and ours."""

    what: str
    source: str
    unit: str
    published: float
    ours: float
    fitted: bool = False
    other: str = ""  # what it does that this project does not; such a row is shown and held to no bar


def mpt(name: str, layers: int, hidden: int, heads: int) -> Shape:
    """Returns the shape of an MPT: its feed-forward of four hidden sizes in two matrices counts as 8/3 in our three."""
    ffn = hidden * 8 // 3 // 8 * 8
    sizes = Sizes(
        family="llama", num_layers=layers, hidden=hidden, heads=heads, kv_heads=heads, head_dim=hidden // heads,
        ffn=ffn, vocab=50368, tied=True,
    )  # fmt: skip
    return Shape(name=name, sizes=sizes)


MODELS = {
    "7b": mpt("mpt-7b", 32, 4096, 32),
    "13b": mpt("mpt-13b", 40, 5120, 40),
    "30b": mpt("mpt-30b", 48, 7168, 56),
    "70b": mpt("mpt-70b", 80, 8192, 64),
}


def trained(
    shape: Shape, where: str, layout: Parallel, *, samples: int, length: int, micro: int, recompute: bool
) -> tuple[float, float]:
    """Returns (seconds of a step, tokens a second and GPU) of pre-training."""
    cluster = parse_cluster(where)
    batch = SequenceBatch(sequences=samples, length=length, micro_tokens=micro * length, full=True)
    seconds = compute.pass_seconds(
        Actor(shape, layout, BF16), cluster, batch, backward=True, recompute=[WHOLE] if recompute else ()
    )
    seconds += compute.optimizer_seconds(Actor(shape, layout, BF16), cluster)
    return seconds, batch.tokens / seconds / cluster.gpus


def foundry(
    model: str, where: str, numbers: tuple[int, int, int], *, recompute: bool, published: float, fitted: bool = False
) -> Row:
    """Returns a row of FOUNDRY. `numbers`: length, micro-batch size, global batch size."""
    length, micro, samples = numbers
    layout = Parallel(world=parse_cluster(where).gpus)
    _, rate = trained(MODELS[model], where, layout, samples=samples, length=length, micro=micro, recompute=recompute)
    what = f"MPT {model}, {where}, {length} tokens{', recomputed' if recompute else ''}"
    return Row(what=what, source=FOUNDRY, unit="tokens/s/GPU", published=published, ours=rate, fitted=fitted)


def grpo(
    model: str,
    where: str,
    numbers: tuple[int, int, float, int],
    tp: int,
    layout: dict[str, int],
    published: float,
    **kind: bool,
) -> Row:
    """Returns a row of NEMO_RL.

    `numbers`: samples, optimizer steps, mean and greatest length of prompt and completion.
    """
    samples, steps, mean, longest = numbers
    shape, cluster = read_shape(model), parse_cluster(where)
    parallel = Parallel(world=cluster.gpus, **layout, sequence_parallel=layout.get("tp", 1) > 1)
    batch = SequenceBatch(sequences=samples, length=mean, micro_tokens=longest, prompt=PROMPT)
    # two forward passes: the policy's before the update, and the reference's
    passed = 2 * compute.pass_seconds(Actor(shape, parallel, BF16), cluster, batch, backward=False)
    part = SequenceBatch(sequences=samples // steps, length=mean, micro_tokens=longest, prompt=PROMPT)
    recompute = () if shape.name == "llama-3.1-8b" else [WHOLE]
    passed += steps * compute.pass_seconds(
        Actor(shape, parallel, BF16), cluster, part, backward=True, recompute=recompute
    )
    passed += steps * compute.optimizer_seconds(Actor(shape, parallel, BF16), cluster)
    room = max(8e9, 0.6 * cluster.device.memory - 2 * counting.total(shape) / tp)
    # NeMo RL v0.4 has vLLM 0.11, which schedules beside the GPU only if it is told to
    engine = EngineSetup(replicas=cluster.gpus // tp, tp=tp, max_batch=256, kv_bytes=room, overlapped=False)
    draw = Draw(role="", samples=samples, prompt=PROMPT, response=mean - PROMPT, longest=longest - PROMPT)
    drawn = compute.rollout_cost(shape, engine, cluster, draw, width=2)
    sent = compute.refit_cost(Actor(shape, parallel, BF16), engine, cluster, place="elsewhere").seconds
    if "-v" in sys.argv:
        print(f"{model}: rollout {drawn.seconds:.0f} ({drawn.rows:.0f} rows), passes {passed:.0f}, refit {sent:.1f}")
    return Row(
        what=f"GRPO {shape.name}, {where}, {samples} samples of {mean:.0f}", source=NEMO_RL, unit="s/step",
        published=published, ours=drawn.seconds + passed + sent, **kind,
    )  # fmt: skip


def served(rows: int, published: float, **kind: bool) -> Row:
    """Returns a row of SWEEP: vLLM at a fixed number of requests under way, 1,024 tokens in and 128 out."""
    shape, cluster = read_shape("llama-3.1-8b"), parse_cluster("1x1xA100-40")
    engine = EngineSetup(replicas=1, tp=1, max_batch=rows, kv_bytes=18e9)
    draw = Draw(role="", samples=20 * rows, prompt=1024, response=128, longest=128)
    drawn = compute.rollout_cost(shape, engine, cluster, draw, width=2)
    what = f"vLLM llama-3.1-8b on one A100-40, {rows} requests at once"
    return Row(
        what=what, source=SWEEP, unit="tokens/s out", published=published, ours=20 * rows * 128 / drawn.seconds, **kind
    )


def decoded() -> list[Row]:
    """Returns the rows of GPUSTACK: a decoding step of vLLM, and what it gains by scheduling beside the GPU.

    The gain is the difference of the mean time between two tokens with and without `--async-scheduling`, 41.95 and
    36.85 ms, at 256 requests at once (vLLM's default on an A100; peak tokens a second times that time give as many). It
    does not depend on the model, where the GPU's part of a step is the longer one.
    """
    hopper, ampere = parse_cluster("1x1xH100"), parse_cluster("1x1xA100-80")
    waits = EngineSetup(replicas=1, tp=1, max_batch=256, kv_bytes=4e10, overlapped=False)
    small = compute.decode_step_seconds(read_shape("qwen3-8b"), waits, hopper, rows=4, context=343, width=2)
    model = read_shape("llama-3.1-8b")
    slow, quick = (
        compute.decode_step_seconds(model, engine, ampere, rows=256, context=320, width=2)
        for engine in (waits, replace(waits, overlapped=True))
    )
    return [
        Row(
            what="vLLM qwen3-8b on one H100, 4 requests at once", source=GPUSTACK, unit="ms/step", published=7.38,
            ours=1e3 * small,
        ),
        Row(
            what="vLLM on one A100-80, 256 requests, scheduled beside the GPU", source=GPUSTACK, unit="ms/step less",
            published=41.95 - 36.85, ours=1e3 * (slow - quick), fitted=True,
        ),
    ]  # fmt: skip


def mixtures() -> list[Row]:
    """Returns the rows of models with experts."""
    qwen = read_shape("qwen3-30b-a3b")
    _, experts = trained(qwen, "1x8xH100", Parallel(world=8, ep=8), samples=512, length=4096, micro=4, recompute=False)
    trillion, layout = read_shape("moe-1t"), Parallel(world=256, pp=8, vpp=4, ep=32)
    _, kimi = trained(trillion, "32x8xH100", layout, samples=512, length=4096, micro=1, recompute=True)
    _, small = trained(
        qwen, "2x8xH100", Parallel(world=16, pp=2, vpp=24, ep=8), samples=512, length=4096, micro=2, recompute=False
    )
    layout = Parallel(world=256, tp=2, pp=8, vpp=4, ep=32, sequence_parallel=True)
    _, large = trained(
        read_shape("qwen3-235b-a22b"), "32x8xH100", layout, samples=2048, length=4096, micro=1, recompute=False
    )
    return [
        Row(
            what="Qwen3-30B-A3B, 1x8xH100, ep8",
            source=AUTOMODEL,
            unit="tokens/s/GPU",
            published=12040,
            ours=experts,
            other=DISPATCH,
        ),
        Row(
            what="Qwen3-30B-A3B, 2x8xH100, pp2 ep8, FP8",
            source=BRIDGE,
            unit="tokens/s/GPU",
            published=5275,
            ours=small,
            other="FP8",
        ),
        Row(
            what="Qwen3-235B-A22B, 32x8xH100, tp2 pp8 ep32, FP8",
            source=BRIDGE,
            unit="tokens/s/GPU",
            published=1575,
            ours=large,
            other="FP8, and experts over four nodes",
        ),
        Row(
            what="Kimi K2 as our 1T model, 32x8xH100, ep32",
            source=AUTOMODEL,
            unit="tokens/s/GPU",
            published=924,
            ours=kimi,
            other=DISPATCH,
        ),
    ]


def rows() -> list[Row]:
    """Returns all rows, in the order of the table."""
    turing = Shape(name="mt-nlg-530b", sizes=mpt("530b", 105, 20480, 128).sizes)
    layout = Parallel(world=2240, tp=8, pp=35, sequence_parallel=False)
    turing_s, _ = trained(turing, "280x8xA100-80", layout, samples=1920, length=2048, micro=1, recompute=True)
    return [
        foundry("7b", "1x8xA100-80", (2048, 6, 96), recompute=False, published=4641, fitted=True),
        foundry("7b", "1x8xA100-80", (8192, 8, 128), recompute=True, published=3206),
        foundry("13b", "1x8xA100-80", (2048, 2, 48), recompute=False, published=2262),
        foundry("30b", "1x8xA100-80", (2048, 3, 504), recompute=True, published=916),
        foundry("70b", "8x8xA100-80", (2048, 8, 2048), recompute=True, published=410),
        foundry("7b", "1x8xH100", (2048, 6, 48), recompute=False, published=10643, fitted=True),
        foundry("13b", "8x8xH100", (2048, 2, 128), recompute=False, published=4800),
        foundry("70b", "8x8xH100", (2048, 8, 2048), recompute=True, published=1039),
        Row(what="MT-NLG 530B, 280x8xA100, tp8 pp35 dp8", source=MT_NLG, unit="s/step", published=60.1, ours=turing_s),
        *mixtures(),
        served(1, 75, fitted=True),
        served(8, 75 * 6.6),
        *decoded(),
        grpo("llama-3.1-8b", "2x8xH100", (2048, 4, 1060, 4096), 1, {"pp": 2}, 97.7, fitted=True),
        grpo("qwen3-32b", "4x8xH100", (2048, 4, 3206, 4096), 4, {"tp": 4, "pp": 4}, 393),
        grpo("qwen3-30b-a3b", "4x8xH100", (2048, 4, 3154, 4096), 4, {"tp": 2, "ep": 8}, 225, fitted=True),
        grpo("qwen3-235b-a22b", "16x8xH100", (512, 1, 5671, 8192), 16, {"tp": 2, "cp": 2, "ep": 16, "pp": 8}, 506),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-v", action="store_true", help="the parts of GRPO's steps")
    add_arguments(parser)
    args, published_rows = parser.parse_args(), rows()
    for row in published_rows:
        kind = "fitted" if row.fitted else row.other
        ratio = row.ours / row.published
        print(f"| {row.what} | {row.published:,.4g} {row.unit} | {row.ours:,.4g} | {ratio:.2f} | {kind} |")
    checked = {row.what: row.ours / row.published for row in published_rows}
    free = [row.what for row in published_rows if not row.fitted and not row.other]
    finish(checked, {name: 1 - WORST for name in free}, args, limits={name: 1 + WORST for name in free})


if __name__ == "__main__":
    main()
