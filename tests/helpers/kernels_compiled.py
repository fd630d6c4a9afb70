"""Compiles every Triton kernel for GPUs, of which none is needed: `kernels_compiled.py OUT.json FOLDER`.

OUT.json has the bytes of the machine's code of each kernel, in the forms in which a model in bfloat16 calls it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_rl.megatron.kernels import gates, head, norm, rope

HALF, WIDE, INT = "*bf16", "*fp32", "i32"
CAPABILITIES = (80, 90)  # A100, H100
STATISTICS = {"logits": HALF, "stats": WIDE, "scale": "fp32"}
GRADIENT = {"logits": HALF, "ids": "*i64", "scale": "fp32"} | dict.fromkeys(
    ("by_id", "logsums", "entropies", "by_entropies"), WIDE
)
# Kernel, types of its arguments where they are no integers, its constants, and warps.
KERNELS: list[tuple[Any, dict[str, str], dict[str, Any], int]] = [
    (head._statistics, STATISTICS, {"DOT": True, "TOTAL": True, "BLOCK": head.BLOCK}, head.WARPS),
    (head._statistics, STATISTICS, {"DOT": False, "TOTAL": False, "BLOCK": head.BLOCK}, head.WARPS),
    (head._gradient, GRADIENT, {"ENTROPY": True, "IDS": 4, "BLOCK": head.BLOCK}, head.WARPS),
    (head._gradient, GRADIENT, {"ENTROPY": False, "IDS": 1, "BLOCK": head.BLOCK}, head.WARPS),
    (gates._forward, {"x": HALF, "activation": HALF}, {"TANH": False, "BLOCK": gates.BLOCK}, gates.WARPS),
    (gates._backward, dict.fromkeys(("x", "grad", "back"), HALF), {"TANH": True, "BLOCK": gates.BLOCK}, gates.WARPS),
    (
        rope._turn,
        dict.fromkeys(("x", "turned", "cos", "sin"), HALF),
        {"BACK": False, "HEADS": 32, "HALF": 64},
        rope.WARPS,
    ),
    (
        rope._turn,
        dict.fromkeys(("x", "turned", "cos", "sin"), HALF),
        {"BACK": True, "HEADS": 8, "HALF": 32},
        rope.WARPS,
    ),
    (
        norm._forward,
        {"x": HALF, "weight": HALF, "normed": HALF, "factors": WIDE, "eps": "fp32"},
        {"FROM_ONE": True, "BLOCK": 4096},
        8,
    ),
    (
        norm._backward,
        dict.fromkeys(("x", "weight", "grad", "back"), HALF) | {"factors": WIDE, "sums": WIDE},
        {"FROM_ONE": True, "BLOCK": 4096},
        8,
    ),
]


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int, capability: int) -> int:
    """Returns the bytes of a kernel's code."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, INT) for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    return len(binary.asm["cubin"])


def main() -> None:
    sizes = {
        f"{kernel.__module__}.{kernel.__name__} {constants} {capability}": compiled(
            kernel, types, constants, warps, capability
        )
        for kernel, types, constants, warps in KERNELS
        for capability in CAPABILITIES
    }
    Path(sys.argv[1]).write_text(json.dumps(sizes))


if __name__ == "__main__":
    main()
