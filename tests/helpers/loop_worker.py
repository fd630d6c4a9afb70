"""One rank of a GRPO run on the context policy; rank r writes its lines of metrics and its final context."""

import json
import sys
from pathlib import Path

import torch.distributed as dist
from loops import Log, make, train

from megatron_rl.messages.world import World
from megatron_rl.training import loop


def main(output_path, template):
    dist.init_process_group("gloo")
    log, world = Log(), World()
    setup, progress = make(template, log, Path(output_path).parent / "iterations", world=world)
    train(setup, loop.Plan(iterations=4, evaluate_every=2), progress)
    Path(output_path).write_text(
        json.dumps({"lines": log.lines, "table": setup.trainees["generator"].policy.table.tolist()})
    )
    world.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
