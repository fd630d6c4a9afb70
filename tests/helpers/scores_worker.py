"""Runs on one rank: the trainer's scores of texts under a reward model.

`scores_worker.py OUT MODEL TEXTS`: TEXTS is a JSON list of lists of token ids; OUT gets the score of each, read at its
last token.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from one_process import OneProcess

from megatron_rl.config.schema import Model, RoleConfig
from megatron_rl.data.scored_texts import scored_rollout
from megatron_rl.megatron import parallel
from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.training.update import token_scores


def main() -> None:
    output_path, path, texts = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    role = RoleConfig(model=Model(path=path), head="score")
    policy = MegatronPolicy(role, parallel.create(role.layout), trainable=False)
    rollouts = [scored_rollout("reward", str(number), tokens) for number, tokens in enumerate(texts)]
    scores = token_scores(OneProcess(), policy, rollouts, ["value"])
    assert scores is not None
    output_path.write_text(json.dumps([float(row["value"][-1]) for row in scores]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
