#!/usr/bin/env python3
"""Cuts a checkpoint, optimizer included, anew for another layout. Needs no GPU and no ranks.

    python tools/reshard_checkpoint.py runs/demo/checkpoints/iteration_000048 out/iteration_000048 --tp 2
    python tools/reshard_checkpoint.py runs/demo out/generator --role generator --tp 2

To go on with a run from the result, let it replace the directory of the same name under runs/NAME/checkpoints, and set
the roles' layout.* in the config to the new layout.

megatron-core loads a checkpoint of any layout by itself, also with a vocabulary that tp does not divide. But a rank
reads whole every piece of which it needs a part, so that tp 8 reads eight times what tp 1 wrote. After this tool every
rank of the new layout has a file of its own, which holds its pieces and nothing else. The vocabulary of weights,
moments and float32 masters is padded as the new layout needs. The tool also checks two things that core does not: that
no tensor is unknown or of another shape, and that the optimizer's masters are the weights. Without --role every role is
cut for the same layout. This is the same as `megatron-rl convert reshard`.
"""

import sys

from megatron_rl.commands import conversions

if __name__ == "__main__":
    sys.exit(conversions.script("reshard", __doc__))
