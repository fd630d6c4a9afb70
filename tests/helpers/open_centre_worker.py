"""One rank of several runs, one after the other.

Arguments: OUT, where the statuses go, and RUNS, a JSON list of [config file, port, iterations after which the run is
asked to leave, or null].
"""

import functools
import json
import os
import pickle
import sys
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from unittest import mock

from megatron_rl.cluster.slurm_job import STOP
from megatron_rl.config import files
from megatron_rl.config.schema import TrainConfig
from megatron_rl.session import run_collection, train
from megatron_rl.session.launch_ranks import place_from
from megatron_rl.spec.resolve import resolve
from megatron_rl.training.collector import Collector


class Farthest(Collector):
    """Gives an iteration to the loop only when all that may be collected ahead of it was collected, so that a run does
    the same every time: an iteration is written by the oldest weights that are allowed. With the iteration
    `leave_after` (counted from 1) it asks the run to leave, as a user does by a file. Writes what is trained on, with
    advantages and scores, to RUN/credited, because the run's own files have iterations before scores and credit.
    """

    def __init__(self, *arguments, leave_after, **settings):
        super().__init__(*arguments, **settings)
        self._leave_after = leave_after

    def take(self, iteration, meanwhile=lambda: None):
        collected = super().take(iteration, meanwhile)
        wait([done for _, done in self._flights])
        if iteration.number + 1 == self._leave_after:
            (self._store.directory.parent / STOP).touch()
        return self._noted(iteration, collected) if collected.credited else collected

    def credit(self, iteration, scored):
        return self._noted(iteration, super().credit(iteration, scored))

    def _noted(self, iteration, credited):
        directory = self._store.directory.parent / "credited"
        directory.mkdir(exist_ok=True)
        (directory / f"{iteration.number:06d}.pickle").write_bytes(pickle.dumps(credited))
        return credited


def main(output_path, runs):
    place, statuses = place_from(os.environ), []
    for file, port, leave_after in json.loads(runs):
        config = files.load(TrainConfig, [Path(file)], [])
        spec = resolve(config, place.world_size)
        (config.directory / STOP).unlink(missing_ok=True)
        with mock.patch.object(run_collection, "Collector", functools.partial(Farthest, leave_after=leave_after)):
            statuses.append(train.run(spec, replace(place, port=port)))
    Path(output_path).write_text(json.dumps(statuses))


if __name__ == "__main__":
    main(*sys.argv[1:])
