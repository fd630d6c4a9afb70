"""Trainer ranks with a pretrained model, and a real vLLM server of it: answers before an update and after the refit.

real_model_worker.py OUT CONFIG ASKED     under run_ranks; ASKED is JSON: {"prompts": [[token, ...], ...], "pairs":
[[prompt, response], ...]}
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

from engines_worker import ROLE, Directory, Scenario, open_supervised

from megatron_rl.algorithms.policy_loss import PolicyLoss
from megatron_rl.config import files as config_files
from megatron_rl.config.schema import LossConfig, TrainConfig
from megatron_rl.data.sft import TextPair, sft_rollouts
from megatron_rl.engines.protocol import Sampling, complete
from megatron_rl.megatron import parallel
from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.messages.commands import Commands
from megatron_rl.session.launch_ranks import place_from
from megatron_rl.session.run_setup import open_world
from megatron_rl.spec.resolve import engine_of
from megatron_rl.texts.text import load_tokenizer
from megatron_rl.training.update import Trainee, update

GREEDY = Sampling(max_tokens=24, temperature=0.0)
DRAWN = Sampling(max_tokens=24, n=3, seed=4)


def main() -> None:
    answer, config_path, request = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())
    config = config_files.load(TrainConfig, [config_path], [])
    role = config.roles[ROLE]
    pairs = [TextPair(prompt=prompt, response=response) for prompt, response in request["pairs"]]
    samples = sft_rollouts(pairs, load_tokenizer(role.model.path), append_eos=True, max_tokens=256)
    with open_world(place_from(os.environ), answer.parent) as world, contextlib.ExitStack() as stack:
        policy = MegatronPolicy(role, parallel.create(role.layout))
        driver = Directory(config_path.parent)
        commands = Commands(world)
        run_engines = open_supervised(engine_of(config), world, commands, {ROLE: policy}, driver, stack)
        scenario = Scenario(world, commands, policy, run_engines, answer.parent, policy.arch.vocab)
        for version in (0, 1):
            if version:
                loss = PolicyLoss(LossConfig(objective="nll", kl_coef=0.0))
                update(world, Trainee(policy=policy, loss=loss), samples if world.rank == 0 else None)
            scenario.refit(version)
            scenario.keep_weights(f"v{version}")
            for name, sampling in (("greedy", GREEDY), ("drawn", DRAWN)):
                scenario.ask(
                    f"{name}_v{version}", lambda pool, sampling=sampling: complete(pool, request["prompts"], sampling)
                )
        answer.write_text(json.dumps(scenario.found))


if __name__ == "__main__":
    main()
