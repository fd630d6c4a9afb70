#!/usr/bin/env python3
"""A Hugging Face directory as a Megatron distributed checkpoint (torch_dist), which megatron-core loads under any layout. No GPU, no ranks.

    python tools/convert_hf_to_megatron.py Qwen2.5-7B out/qwen --verify

For programs that start from Megatron checkpoints; the trainer here reads Hugging Face directories itself. Weights alone, no optimizer;
config.json and tokenizer lie beside them, so that to-hf finds them. Memory holds one parameter. What is missing, cut, of another shape or
not finite is named, and nothing is left. The same as `megatron-rl convert to-megatron`.
"""

import sys

from megatron_rl.commands import conversions

if __name__ == "__main__":
    sys.exit(conversions.script("to-megatron", __doc__))
