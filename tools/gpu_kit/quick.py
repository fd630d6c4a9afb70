"""Takes the measurements of benchmarks/gpu.py in the order in which a short rental of a GPU needs them.

    PYTHONPATH=.gpu-kit/site:.:benchmarks python3 tools/gpu_kit/quick.py OUT.json --minutes 3 [--tiny]

First come the 1.5 B model over 16k tokens with its kernels, the 7 B model, rollouts with their kernels, refits, sleep,
the output layer and attention. Then comes what they are compared with: transformers' passes and `generate`, varied
lengths, 4k tokens, cuDNN's attention. OUT.json is written after every measurement.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from gpu_kit import clock, engine, subjects, train
from gpu_kit.findings import Findings
from gpu_kit.subjects import Scale
from gpu_kit.train import Case
from torch.profiler import ProfilerActivity, profile, supported_activities

from megatron_rl.engines.embedded.embedded_engine import EmbeddedEngine
from megatron_rl.engines.protocol import Sampling, complete

Measurement = tuple[str, Callable[[], Mapping[str, float]]]
DECODED = 128  # tokens of each row while kernels are recorded


def decode_profile(findings: Findings, scale: Scale, directory: Path, rows: int) -> dict[str, float]:
    """Records the kernels of a rollout of `rows` rows, its tokens per second, and how many CUDA graphs it captured."""
    model = subjects.transformers_model(directory).eval()
    embedded = EmbeddedEngine(directory, dtype=torch.bfloat16, max_batch=rows)
    embedded.load(model.named_parameters(), version=0)
    del model
    prompts = np.random.default_rng(0).integers(0, embedded.arch.vocab, (rows, scale.prompt)).tolist()
    new = min(scale.new, DECODED)
    recorder, captures = embedded._recorder, 0
    if recorder is not None:
        record = recorder.record

        def counted(step: Callable[[], None]) -> Callable[[], None] | None:
            nonlocal captures
            captures += 1
            return record(step)

        recorder.record = counted
    complete(embedded, prompts, Sampling(max_tokens=new))
    first, captures = captures, 0
    seconds = clock.wall_seconds(lambda: complete(embedded, prompts, Sampling(max_tokens=new)))
    figures = {
        "tokens_per_s": rows * new / seconds,
        "seconds": seconds,
        "captures": max(first, captures),
        "refused": bool(recorder is not None and getattr(recorder, "_refused", False)),
    }
    if ProfilerActivity.CUDA not in supported_activities():
        return figures
    with profile(activities=[ProfilerActivity.CUDA]) as taken:
        complete(embedded, prompts, Sampling(max_tokens=new))
        torch.cuda.synchronize()
    events = [e for e in taken.key_averages() if e.self_device_time_total > 0 and not e.is_user_annotation]
    top = sorted(events, key=lambda e: -e.self_device_time_total)[: train.TOP]
    findings.more[f"decode{rows}"] = [
        {"name": e.key[:120], "calls": e.count, "ms": e.self_device_time_total / 1e3} for e in top
    ]
    return figures | {"busy_s": sum(e.self_device_time_total for e in events) / 1e6}


def plan(findings: Findings, scale: Scale, folder: Path) -> Iterator[Measurement]:
    """Yields (name, measurement), the most wanted first."""
    directories = {name: subjects.write_config(folder / name, name, scale) for name in scale.models}
    long, short = scale.tokens[-1], scale.tokens[0]
    few, many = scale.rows[0], scale.rows[-1]
    small, seven = directories["1.5B"], directories["7B"]

    def ours(directory: Path, kind: str, tokens: int) -> Measurement:
        case = Case(scale, directory, kind=kind, tokens=tokens)
        return case.name, functools.partial(train._ours, findings, case)

    def theirs(directory: Path, kind: str, tokens: int) -> Measurement:
        case = Case(scale, directory, kind=kind, tokens=tokens)
        return f"{case.name}/transformers", functools.partial(train._theirs, findings, case)

    make = functools.partial(
        subjects.make_policy, small, recompute=subjects.RECOMPUTES[0], tokens=short, optimizer=True
    )
    cudnn = {"ours": False, "generate": True}
    yield "device", functools.partial(train._rates, scale)
    yield ours(small, "equal", long)
    yield "profile", functools.partial(train._profile, findings, scale, small, long)
    yield ours(seven, "equal", long)
    yield f"decode{few}", functools.partial(decode_profile, findings, scale, small, few)
    yield "refit", lambda: engine._refit(findings, scale, make(), folder / "refit", "off")
    yield "sleep", lambda: engine._sleep(make(), short)
    yield "head", functools.partial(train._head, findings, scale)
    yield "attention", functools.partial(train._attention, findings, scale, small, long)
    yield ours(small, "varied", long)
    yield theirs(small, "equal", long)
    yield f"rows{few}", functools.partial(engine._rollout, scale, small, few, cudnn)
    yield f"rows{many}", functools.partial(engine._rollout, scale, small, many, cudnn)
    yield f"varied{scale.varied_rows[0]}", functools.partial(engine.varied_rollout, scale, small, scale.varied_rows[0])
    yield f"decode{many}", functools.partial(decode_profile, findings, scale, small, many)
    yield "refit_verified", lambda: engine._refit(findings, scale, make(), folder / "verified", "full")
    yield ours(seven, "varied", long)
    yield ours(small, "varied", short)
    yield theirs(seven, "equal", long)
    yield "cudnn", functools.partial(train._cudnn, scale, small, short)


def main(words: list[str] | None = None) -> None:
    """Takes all measurements that begin within the minutes, and prints their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(words)
    scale = subjects.SMALL if args.tiny else subjects.FULL
    findings = Findings({}, file=args.out, minutes=args.minutes)
    try:
        with tempfile.TemporaryDirectory() as folder, subjects.one_rank():
            for name, measure in plan(findings, scale, Path(folder)):
                findings.take(name, measure)
    except Exception:  # the device is lost: what was measured is in the file
        traceback.print_exc()
    for name, value in findings.figures.items():
        print(f"{name:40s} {value:12.4g}")
    print("not measured:", findings.unmeasured)


if __name__ == "__main__":
    main()
