#!/usr/bin/env python3
"""Turns a run's checkpoint into a Hugging Face directory for transformers and vLLM. Needs no GPU and no ranks.

    python tools/convert_megatron_to_hf.py runs/demo out/generator --role generator
    python tools/convert_megatron_to_hf.py runs/demo/checkpoints/iteration_000012 out/verifier --role verifier --verify

The checkpoint may be of any layout. Memory holds one parameter at a time. A conversion that is cut short leaves nothing
that looks complete. With --dtype bfloat16 the result is cast. This is the same as `megatron-rl convert to-hf`.
"""

import sys

from megatron_rl.commands import conversions

if __name__ == "__main__":
    sys.exit(conversions.script("to-hf", __doc__))
