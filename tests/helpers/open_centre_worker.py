"""One rank of several runs, one after the other.

Arguments: OUT, where the statuses go, and RUNS, a JSON list of [config file, port].
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from megatron_rl.config import checks, files
from megatron_rl.config.schema import TrainConfig
from megatron_rl.session.launch import place_from
from megatron_rl.session.train import run


def main(out, runs):
    place, statuses = place_from(os.environ), []
    for file, port in json.loads(runs):
        config = files.load(TrainConfig, [Path(file)], [])
        checks.check(config, place.world_size)
        statuses.append(run(config, replace(place, port=port)))
    Path(out).write_text(json.dumps(statuses))


if __name__ == "__main__":
    main(*sys.argv[1:])
