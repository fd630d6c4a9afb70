"""Supervised training reads every row once an epoch, and draws the order of an epoch once."""

from __future__ import annotations

import itertools
import random
import time

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from megatron_rl.config import files
from megatron_rl.config.schema import SftConfig
from megatron_rl.data.epochs import EpochOrder
from megatron_rl.spec.resolve import resolve


def spec_of(**settings):
    base = {"model": {"path": "org/model"}, "data": {"train": "rows.jsonl"}}
    return resolve(files.load(SftConfig, trees=[("sft.yaml", base | settings)]), 1)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    ("rows", "per_step", "sizes"), [(10, 4, [4, 4, 2]), (9, 3, [3] * 3), (2, 5, [2]), (5, 1, [1] * 5)]
)
def test_faults_an_epoch_trains_every_row_once(rows, per_step, sizes, shuffle):
    """Of 10 rows by 4, two were never trained on. The steps are those of torch's data loader, which Trainer uses."""
    order = EpochOrder(rows, per_step, seed=3, shuffle=shuffle)
    assert sizes == [len(batch) for batch in DataLoader(range(rows), batch_size=per_step)]
    steps = [order.of_step(step) for step in range(3 * len(sizes))]
    epochs = [list(itertools.chain(*steps[i : i + len(sizes)])) for i in range(0, len(steps), len(sizes))]
    assert [len(step) for step in steps] == sizes * 3
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)
    assert (epochs[0] == list(range(rows))) == (not shuffle or rows == 2 and epochs[0] == [0, 1])
    for step in random.Random(0).sample(range(len(steps)), len(steps)):  # wherever a resumed run begins
        again = EpochOrder(rows, per_step, seed=3, shuffle=shuffle)
        assert again.of_step(step) == order.of_step(step) == steps[step]
        if rows > 1:
            assert again.before(step) not in again.of_step(step) or len(steps[step]) == rows


@pytest.mark.parametrize(("epochs", "rows", "per_step"), [(1, 10, 4), (2, 10, 4), (0.5, 10, 4), (3, 9, 3)])
def test_faults_the_steps_of_a_run_are_those_of_transformers(tmp_path, epochs, rows, per_step):
    found = spec_of(epochs=epochs, samples_per_step=per_step).num_steps(rows)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=per_step, num_train_epochs=epochs, use_cpu=True
    )
    trainer = Trainer(model=torch.nn.Linear(1, 1), args=arguments, train_dataset=[{"x": i} for i in range(rows)])
    assert found == trainer.set_initial_training_values(arguments, trainer.get_train_dataloader())[-1]
    assert spec_of(epochs=0.1, samples_per_step=1).num_steps(30) == 3, "0.1 * 30 is above 3 in floating point"
    assert spec_of(steps=7, samples_per_step=per_step).num_steps(rows) == 7


def test_faults_the_order_of_an_epoch_is_drawn_once():
    """With a million rows, each step took half a second."""
    order = EpochOrder(300_000, 64, seed=0, shuffle=True)
    order.of_step(0)
    start = time.process_time()
    for step in range(1, 1000):
        order.of_step(step)
    assert time.process_time() - start < 0.5
