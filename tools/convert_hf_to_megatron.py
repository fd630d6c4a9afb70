#!/usr/bin/env python3
"""Turns a Hugging Face directory into a Megatron distributed checkpoint (torch_dist). Needs no GPU and no ranks.

    python tools/convert_hf_to_megatron.py Qwen2.5-7B out/qwen --verify

megatron-core loads the result under any layout. It is for programs that start from Megatron checkpoints; the trainer
here reads Hugging Face directories itself. It holds weights, no optimizer, and config.json and tokenizer beside them,
where to-hf finds them. Memory holds one parameter at a time. An input that is missing, cut short, of another shape or
not finite is named, and then no output is left. This is the same as `megatron-rl convert to-megatron`.
"""

import sys

from megatron_rl.commands import conversions

if __name__ == "__main__":
    sys.exit(conversions.script("to-megatron", __doc__))
