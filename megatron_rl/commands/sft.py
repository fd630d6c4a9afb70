"""`megatron-rl sft`: fine-tunes one model on conversations or pairs, with the same policy class as RL training."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import random
from collections.abc import Sequence
from typing import Any

from megatron_rl.algorithms.policy_loss import CompletionLoss
from megatron_rl.chat_template import tokenizer_of
from megatron_rl.config.schema import ConfigError, SftData
from megatron_rl.conversion.trained import export_model
from megatron_rl.data.sft import read_samples, sft_rollouts
from megatron_rl.megatron import parallel
from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.run.run_directory import Interrupts
from megatron_rl.session.builders import peak_flops
from megatron_rl.session.launch_ranks import Place
from megatron_rl.session.run_setup import Driver, Saver, open_driver, open_world_for
from megatron_rl.spec.run_spec import SftSpec
from megatron_rl.training.update import Trainee, mean_loss, update
from megatron_rl.types import Rollout
from megatron_rl.vocabulary import vocabulary_of
from megatron_rl.weights.dist_checkpoint import refuse_code
from megatron_rl.world import World


def run(spec: SftSpec, place: Place) -> int:
    """Implements `megatron-rl sft`: supervised fine-tuning with validation and checkpoints. Every rank calls it.

    Writes the model to `model` in the run directory, and with `lora` the adapter to `adapter`. Returns 0 if all steps
    are done, and 130 if a signal asked to exit (everything is saved).
    """
    with open_world_for(spec, place) as world:
        return _run(spec, place, world)


def _run(spec: SftSpec, place: Place, world: World) -> int:
    samples: list[Rollout] = []  # `samples` and `validation` are filled on the driver (rank 0) only
    validation: list[Rollout] = []
    role = spec.roles["model"]
    steps, validates = world.from_driver(_read, spec, samples, validation)
    policy = MegatronPolicy(
        role, parallel.create(role.layout), seed=spec.run.seed, deterministic=spec.run.deterministic
    )
    with (
        Interrupts(announce=place.rank == 0) as interrupts,
        open_driver(spec, world, place, total_iterations=steps) as driver,
    ):
        world.from_driver(driver.compare, spec.models, _told(spec.data, samples, validation))
        if driver.finished:
            return 0
        driver.say(
            f"{len(samples)} samples; {steps} steps of {spec.samples_per_step} samples; "
            f"{sum(len(s.tokens) for s in samples)} tokens"
        )
        done = 0
        if driver.resumed is not None:
            refuse_code(driver.resumed.path / "model")
            policy.state.load(driver.resumed.path / "model")
            done = driver.resumed.number
        own = (samples, validation) if world.rank == 0 else None
        finished = _train(spec, world, driver, policy, (own, validates, range(done, steps)), interrupts)
        if finished:
            export_model(world, policy.export, role.model, driver.directory.path / "model")
            policy.export.write_adapter(driver.directory.path / "adapter")
            driver.summary({"finished": True, "steps": steps, "model": str(driver.directory.path / "model")})
            driver.done(f"the model is in {driver.directory.path / 'model'}")
        else:
            driver.say("saved; the same command goes on from there")
    return 0 if finished else 130


def _train(
    spec: SftSpec, world: World, driver: Driver, policy: MegatronPolicy,
    plan: tuple[tuple[list[Rollout], list[Rollout]] | None, bool, range], interrupts: Interrupts,
) -> bool:  # fmt: skip
    """Runs supervised training steps.

    `plan`: (samples, whether there is validation data, range of the steps to do). The samples are (training samples,
    validation samples) on the driver (rank 0) and None on other ranks. Returns True if all steps are done, and False if
    a signal asked to exit (after saving).
    """
    own, validates, todo = plan
    steps, speed = todo.stop, peak_flops(spec.run, spec.roles["model"].model.dtype)
    trainee = Trainee(policy=policy, loss=CompletionLoss(), peak_flops=speed)
    saver = Saver(world, driver, {"model": policy.state}, background=spec.run.async_save)
    driver.leave.begin()
    for step in todo:
        with driver.watch("train"):
            metrics = update(world, trainee, None if own is None else samples_of(own[0], step, spec))
        if validates and (step + 1 == steps or (spec.validate_every and (step + 1) % spec.validate_every == 0)):
            with driver.watch("validate"):
                metrics["validation_loss"] = mean_loss(world, trainee, None if own is None else own[1])
        driver.log(step, "sft", metrics, iteration=step)
        leave = world.broadcast(interrupts.requested or (world.rank == 0 and driver.leave()))
        last = step + 1 == steps
        if leave or last or (spec.run.save_every and (step + 1) % spec.run.save_every == 0):
            saver.save(step + 1, {"step": step + 1})
        saver.settle(wait=leave or last)
        if leave and not last:
            return False
    return True


def _read(spec: SftSpec, samples: list[Rollout], validation: list[Rollout]) -> tuple[int, bool]:
    """Appends the training and validation samples to the lists `samples` and `validation`. Called on the driver (rank
    0).

    Returns (number of optimizer steps, whether there is validation data). Raises ConfigError if the settings result in
    zero steps."""
    data, model = spec.data, spec.roles["model"].model
    tokenizer = tokenizer_of(model)
    make = functools.partial(
        sft_rollouts, tokenizer=tokenizer, append_eos=data.append_eos, max_tokens=data.max_tokens,
        max_bad_share=data.max_bad_share, vocabulary=vocabulary_of(model, tokenizer),
    )  # fmt: skip
    samples += make(read_samples(data))
    if data.validation is not None:
        held_out = dataclasses.replace(data, train=data.validation)
        validation += make(read_samples(held_out, split="validation"))
    steps = spec.steps or round(spec.epochs * len(samples) / spec.samples_per_step)
    if steps < 1:
        raise ConfigError(
            f"{len(samples)} samples, {spec.epochs} epochs, samples_per_step {spec.samples_per_step}: "
            "that makes zero steps; lower samples_per_step"
        )
    return steps, bool(validation)


def _told(data: SftData, samples: Sequence[Rollout], validation: Sequence[Rollout]) -> dict[str, dict[str, Any]]:
    """Returns information about each data set for the record of the run's inputs: a dictionary with path, row count and
    sha256, under the key "rows of SETTING"."""
    told = {}
    for name, path, rows in (("train", data.train, samples), ("validation", data.validation, validation)):
        digest = hashlib.sha256()
        for row in rows:
            digest.update(row.tokens.tobytes() + row.trainable.tobytes())
        told[f"rows of data.{name}"] = {"path": path, "rows": len(rows), "sha256": digest.hexdigest()}
    return told


def samples_of(samples: Sequence[Rollout], step: int, spec: SftSpec) -> list[Rollout]:
    """Returns the samples of one optimizer step. Each pass over the data (epoch) has a different, deterministic
    order."""
    wanted = range(step * spec.samples_per_step, (step + 1) * spec.samples_per_step)
    orders: dict[int, list[int]] = {}
    for epoch in {i // len(samples) for i in wanted}:
        orders[epoch] = list(range(len(samples)))
        if spec.data.shuffle:
            random.Random(f"{spec.run.seed}/{epoch}").shuffle(orders[epoch])
    return [samples[orders[i // len(samples)][i % len(samples)]] for i in wanted]
