#!/usr/bin/env python3
"""A checkpoint, optimizer included, cut anew for another layout. No GPU, no ranks.

    python tools/reshard_checkpoint.py runs/demo/checkpoints/step_000048 out/step_000048 --tp 2
    python tools/reshard_checkpoint.py runs/demo out/generator --role generator --tp 2

A run goes on from the result when it replaces the directory of the same name under runs/NAME/checkpoints and the roles' layout.* in
the config say the new layout.

What it is good for: megatron-core loads a checkpoint of any layout by itself, also with a vocabulary that tp does not divide. But a rank
reads every piece that it needs a part of whole, so that tp 8 reads what tp 1 wrote eight times. Here every rank of the target layout gets
a file of its own that holds its pieces and nothing else, and the vocabulary's padding is that of the target, of weights, moments and
float32 masters. On the way it is checked what core does not look at: that nothing is unknown or of another shape, and that the
optimizer's masters are the weights. Without --role every role is cut for the same layout. The same as `megatron-rl convert reshard`.
"""

import sys

from megatron_rl.commands import conversions

if __name__ == "__main__":
    sys.exit(conversions.script("reshard", __doc__))
