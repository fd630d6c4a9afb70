"""One rank of test_loop_ranks.py: whole runs of the loop with real checkpoints; writes what this rank saw."""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist
from fake_policy import TablePolicy
from loops import VOCAB, Log, graded, make, train

from megatron_rl.config.evaluation import Best, EarlyStop
from megatron_rl.messages.world import DriverError, World
from megatron_rl.recipes.grpo import Grpo
from megatron_rl.run.checkpoint import Checkpoints
from megatron_rl.run.run_directory import RunDirectory
from megatron_rl.session.colocated_servers import ColocatedServers
from megatron_rl.session.run_checkpoints import RunCheckpoints
from megatron_rl.session.saving import PolicyFiles
from megatron_rl.training.device_memory import DeviceMemory
from megatron_rl.training.progress import NothingTrained, Plan

VALUES = [0.2, 0.7, 0.4, 0.3, 0.1]  # of the evaluations
BEST = Best(metric="generator/accuracy", keep=1)
PLANS = {
    "best": Plan(iterations=4, evaluate_every=1, save_every=2, best=BEST),
    "early stop": Plan(
        iterations=6, evaluate_every=1, save_every=1, early_stop=EarlyStop(metric="generator/accuracy", patience=2)
    ),
    "beside": Plan(iterations=4, evaluate_every=2, save_every=1, evaluate_beside=True),
    "colocated": Plan(iterations=3, evaluate_every=1, save_every=1, best=BEST),
    "exit": Plan(iterations=4, save_every=3),
}


@dataclass(frozen=True, kw_only=True)
class Scripted(Grpo):
    """Grpo whose evaluations have the metrics VALUES, one after the other, and ask the engine of all ranks too."""

    def evaluate(self, prompts, context):
        calls = context.kept["calls"] = context.kept.get("calls", -1) + 1
        return {**super().evaluate(prompts, context), "generator/accuracy": VALUES[calls]}


class Files:
    """The state of a policy, of which every rank writes a part."""

    def __init__(self, policy, rank):
        self.policy, self.rank = policy, rank

    def save(self, directory, *, background=False):
        assert not self.policy.away, "the weights are in host memory"
        (directory / f"__{self.rank}_0.distcp").write_bytes(self.policy.table.detach().numpy().tobytes())

    def saved(self, *, wait):
        return True


def run(case, world, template, folder):
    """Returns the metrics' lines, the table of the policy, and the files and the progress at the end of the run."""
    log, summaries, policy = Log(), [], TablePolicy(VOCAB, lr=0.3, seed=1)
    recipe = Scripted(updates=6, group_size=8, template=template)
    stop_after = 2 if case == "exit" else None
    setup, progress = make(
        template, log, folder / "rollouts", recipe=recipe, world=world, policy=policy, stop_after=stop_after
    )
    if case == "colocated":
        servers = ColocatedServers(setup.commands, {}, [], discarding=[], start_timeout_s=5.0)
        setup = replace(setup, memory=DeviceMemory(setup.trainees, colocated=True), engines=servers)
    directory = RunDirectory(folder)
    driver = SimpleNamespace(
        directory=directory, checkpoints=Checkpoints(directory.checkpoints, keep=2), summary=summaries.append,
        leave=SimpleNamespace(saved=lambda seconds: None),
    )  # fmt: skip

    def export(place):
        place.mkdir(parents=True, exist_ok=True)
        (place / f"rank{world.rank}").write_text(str(world.broadcast(progress.number)))

    def checkpoints(fleet):
        name = "generator"
        files = PolicyFiles(name, Files(policy, world.rank), world, driver.checkpoints, fleet.memory.weights)
        return RunCheckpoints(fleet, {name: files}, [name], driver, PLANS[case].best, export, background=True)

    done = train(setup, PLANS[case], progress, checkpoints)
    files = sorted(str(path.relative_to(folder)) for path in folder.glob("*/iteration_*/**/*") if path.is_file())
    return {
        "done": done, "lines": log.lines, "table": policy.table.tolist(), "files": files, "said": summaries,
        "progress": {} if world.rank else progress.state_dict(),
    }  # fmt: skip


def failing(world, template, folder):
    """Returns the name of the error with which a run without any signal ends on this rank."""
    setup, progress = make(template, Log(), folder, world=world, grade=graded(lambda response, payload: 0.0))
    try:
        train(setup, Plan(iterations=1, evaluate_at_start=False), progress)
    except (NothingTrained, DriverError) as error:
        return [type(error).__name__, str(error)]
    return None


def main(output_path, template):
    dist.init_process_group("gloo")
    world, folder = World(), Path(output_path).parent
    seen = {case: run(case, world, template, folder / case) for case in PLANS}
    seen["failing"] = failing(world, template, folder / "failing")
    world.barrier()
    Path(output_path).write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
