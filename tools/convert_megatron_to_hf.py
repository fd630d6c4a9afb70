#!/usr/bin/env python3
"""A run's checkpoint as a Hugging Face directory, loadable by transformers and vLLM as it stands. No GPU, no ranks.

    python tools/convert_megatron_to_hf.py runs/demo out/generator --role generator
    python tools/convert_megatron_to_hf.py runs/demo/checkpoints/step_000012 out/verifier --role verifier --dtype bfloat16 --verify

Reads whatever layout wrote the checkpoint. Memory holds one parameter. A conversion that is cut short leaves nothing that looks complete.
The same as `megatron-rl convert to-hf`.
"""

import sys

from megatron_rl.commands import conversions

if __name__ == "__main__":
    sys.exit(conversions.script("to-hf", __doc__))
