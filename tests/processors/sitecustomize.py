"""Has Python programs compute as they would on another processor, the one in MEGATRON_RL_TEST_PROCESSOR. Python imports
this file when a program starts with its directory in PYTHONPATH.

The libraries' own switches mask instructions. vLLM asks torch what the processor has, and torch has no switch for its
answers: they are replaced when torch is imported. A feature that torch claims is not there: what needs its instructions
cannot run, what is decided by it can.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

MASKED = {  # by processor, the switches that mask instructions beyond those it has
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_CBWR": "AVX2",
        "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "OPENBLAS_CORETYPE": "Haswell",
    },
    "sse": {  # torch's own kernels without vectors; MKL and oneDNN with their narrowest ones
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_CBWR": "COMPATIBLE",
        "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "OPENBLAS_CORETYPE": "Nehalem",
    },
    "amx": {},
}
NO_AVX512 = {"_is_avx512_supported": False, "_is_avx512_bf16_supported": False, "_is_vnni_supported": False}
NO_AMX = {"_is_amx_tile_supported": False, "_is_amx_fp16_supported": False}
ANSWERS = {  # by processor, of functions of torch.cpu
    "avx2": NO_AVX512 | NO_AMX,
    "sse": NO_AVX512 | NO_AMX,  # vLLM's kernels need AVX2
    "amx": {"_is_amx_tile_supported": True},
}


class Finder(importlib.abc.MetaPathFinder):
    """Replaces answers of torch.cpu when it is imported."""

    def __init__(self, answers: dict[str, bool]) -> None:
        self._answers = answers

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name == "torch.cpu" else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_replace(module: ModuleType) -> None:
            execute(module)
            for function, answer in self._answers.items():
                setattr(module, function, lambda answer=answer: answer)

        spec.loader.exec_module = execute_and_replace
        return spec


if processor := os.environ.get("MEGATRON_RL_TEST_PROCESSOR"):
    os.environ.update(MASKED[processor])
    sys.meta_path.insert(0, Finder(ANSWERS[processor]))

# An environment's own file of this name, which this one hides, runs too.
elsewhere = [path for path in sys.path if path != os.path.dirname(__file__)]
hidden = importlib.machinery.PathFinder.find_spec(__name__, elsewhere)
if hidden is not None and hidden.loader is not None:
    other = importlib.util.module_from_spec(hidden)  # kept, as are modules
    hidden.loader.exec_module(other)
