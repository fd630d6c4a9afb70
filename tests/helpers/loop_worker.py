"""One rank of a GRPO run on the table policy; rank r writes its lines of metrics and its final table."""

import json
import sys
from pathlib import Path

import torch.distributed as dist
from test_loop import Log, make

from megatron_rl.training import loop
from megatron_rl.world import TorchWorld


def main(out, template):
    dist.init_process_group("gloo")
    log, world = Log(), TorchWorld()
    setup = make(template, log, world=world)
    loop.train(setup, loop.Plan(steps=4, prompts_per_step=7, evaluate_every=2), loop.Progress())
    Path(out).write_text(json.dumps({"lines": log.lines, "table": setup.roles["generator"].policy.table.tolist()}))
    world.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
