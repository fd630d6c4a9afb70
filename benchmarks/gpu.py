"""Measures this project on one GPU: `train` or `engine`, each in less than ten minutes, each with one JSON file.

train: forward and backward passes and updates of Qwen2 models of 0.5, 1.5 and 7 B parameters (random weights, made on
the device) over 4k and 16k packed tokens, of equal and of varied lengths: MFU against the maker's peak and against a
bfloat16 product of 8192^3 that is timed in the same run, tokens a second, peak memory; transformers' passes beside
them; the log-prob head over 8k x 152k; attention, also torch's own for varied lengths; passes by torch's SDPA with
cuDNN's attention on and off; the 15 kernels that take the most time.

engine: the embedded engine against transformers' `generate` (1.5 B parameters, 32 and 256 rows, 512 new tokens); 256
and 1,024 rollouts of varied lengths, with CUDA graphs and without; refits of an engine in another process on the same
GPU, against a plain copy on the device; sleep and wake.

What cannot be had is told as "not measured", with the reason, and so is what fails with an error, whose traceback is
printed. When the device cannot be used after an error, the run ends with what was measured. --tiny runs the same with
tiny models.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import traceback
from pathlib import Path

if __name__ == "__main__":  # as a run does (megatron_rl/main.py): CUDA reads it once, and imports may begin with CUDA
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

import common
import torch
from gpu_kit import engine, train
from gpu_kit.findings import Findings
from gpu_kit.subjects import FULL, SMALL

PARTS = {"train": (train.run, train.BARS, {}), "engine": (engine.run, engine.BARS, engine.LIMITS)}


def main(words: list[str] | None = None) -> None:
    """Measures one part and prints its table. Exits with a sentence where there is no GPU, and with status 1 where the
    run has not come to its end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--tiny", action="store_true", help="tiny models and few tokens; there are no bars")
    parser.add_argument("--minutes", type=float, default=8.0, help="no measurement begins after so many")
    common.add_arguments(parser)
    args = parser.parse_args(words)
    if not torch.cuda.is_available():
        parser.exit(2, "there is no CUDA device here: torch.cuda.is_available() is False\n")
    run, bars, limits = PARTS[args.part]
    bars, limits = ({}, {}) if args.tiny else (bars, limits)
    findings = Findings(bars, limits=limits, file=args.json, minutes=args.minutes)
    complete = False
    try:
        with tempfile.TemporaryDirectory() as folder:
            run(findings, SMALL if args.tiny else FULL, Path(folder))
        complete = True
    except Exception:  # what was measured is told all the same
        traceback.print_exc()
    findings.finish(args, complete=complete)
    if not complete:
        sys.exit(1)


if __name__ == "__main__":
    main()
