"""`megatron-rl sft`: fine-tunes one model on conversations, texts or preferences, or trains a reward model, with the
same policy class and losses as RL training.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import zipfile
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.algorithms.policy_loss import GIVEN_REFERENCE, PolicyLoss
from megatron_rl.algorithms.value_loss import loss_of
from megatron_rl.config.schema import ConfigError, SftData
from megatron_rl.data.epochs import EpochOrder
from megatron_rl.data.sft import mismatched, read_samples, rows_of_loss, sft_rollouts
from megatron_rl.lib.regular_files import regular
from megatron_rl.megatron import parallel
from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.messages.world import World
from megatron_rl.run.json_lines import UNREADABLE
from megatron_rl.run.profiling import memory_explained, profiled
from megatron_rl.run.run_directory import Interrupts
from megatron_rl.session.builders import peak_flops
from megatron_rl.session.launch_ranks import Place
from megatron_rl.session.run_setup import Driver, open_driver, open_world_for
from megatron_rl.session.saving import Saver
from megatron_rl.session.trained import export_model
from megatron_rl.spec.run_spec import SftSpec
from megatron_rl.texts.chat_template import tokenizer_of
from megatron_rl.texts.vocabulary import vocabulary_of
from megatron_rl.training.update import Trainee, evaluate, policy_logprobs, update
from megatron_rl.types import Rollout
from megatron_rl.weights.dist_checkpoint import refuse_code

Row = list[Rollout]  # the rollouts of one data row: one rollout, or two for a chosen and a rejected response
REFERENCE_CHUNK = 4096  # number of rollouts whose reference log-probs are computed in one pass
# loss metrics that compare the trainer with an engine; they are not shown, because `sft` has no engine
OF_ENGINES = ("ratio", "engine_gap", "engine_kl")
_log = logging.getLogger(__name__)


def run(spec: SftSpec, place: Place) -> int:
    """Implements `megatron-rl sft`: supervised fine-tuning with validation and checkpoints. Every rank calls it.

    Writes the model to `model` in the run directory, and with `lora` the adapter to `adapter`. Returns 0 if all steps
    are done, and 130 if a signal asked to exit (everything is saved).
    """
    with open_world_for(spec, place) as world:
        return _run(spec, place, world)


def _run(spec: SftSpec, place: Place, world: World) -> int:
    samples: list[Row] = []  # `samples` and `validation` are filled on the driver (rank 0) only
    validation: list[Row] = []
    role = spec.roles["model"]
    steps, validates = world.from_leader(_read, spec, samples, validation)
    policy = MegatronPolicy(
        role, parallel.create(role.layout), seed=spec.run.seed, deterministic=spec.run.deterministic
    )
    with (
        Interrupts(announce=place.rank == 0) as interrupts,
        open_driver(spec, world, place, total_iterations=steps) as driver,
    ):
        world.from_leader(driver.compare, spec.models, _told(spec.data, samples, validation))
        if driver.finished:
            return 0
        driver.say(
            f"{len(samples)} samples; {steps} steps of up to {spec.samples_per_step} samples; "
            f"{sum(len(rollout.tokens) for row in samples for rollout in row)} tokens"
        )
        done = 0
        if driver.resumed is not None:
            refuse_code(driver.resumed.path / "model")
            policy.state.load(driver.resumed.path / "model")
            done = driver.resumed.number
        driver_rows = (samples, validation) if world.rank == 0 else None
        with memory_explained(driver.directory.path, world.rank, {"model": policy.memory.held_bytes}):
            finished = _train(spec, world, driver, policy, (driver_rows, validates, range(done, steps)), interrupts)
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
    plan: tuple[tuple[list[Row], list[Row]] | None, bool, range], interrupts: Interrupts,
) -> bool:  # fmt: skip
    """Runs supervised training steps.

    `plan`: (samples, whether there is validation data, range of the steps to do). `samples` is (training samples,
    validation samples) on the driver (rank 0) and None on other ranks. Returns True if all steps are done. If a signal
    requests the exit, saves a checkpoint and returns False.
    """
    driver_rows, validates, todo = plan
    steps, role = todo.stop, spec.roles["model"]
    precomputed = spec.loss.precompute_ref_log_probs
    loss = PolicyLoss(role.loss, given_reference=True) if precomputed else loss_of(role)
    trainee = Trainee(policy=policy, loss=loss, peak_flops=peak_flops(spec.run, role.model.dtype))
    if precomputed:
        with driver.watch("reference_logprobs"):
            place, read = driver.directory.path / "reference_logprobs.npz", repr(sorted(driver.record.inputs.items()))
            with_reference(world, policy, driver_rows, place, inputs=read)

    samples, validation = driver_rows or ([], [])
    order = EpochOrder(len(samples), spec.samples_per_step, seed=spec.run.seed, shuffle=spec.data.shuffle)

    def drawn(step: int | None) -> list[Rollout] | None:
        """Returns the driver's rollouts of a step, or of the validation data if `step` is None. Collective."""
        rows = validation if step is None or driver_rows is None else [samples[i] for i in order.of_step(step)]
        rollouts = None if driver_rows is None else [rollout for row in rows for rollout in row]
        other_row = Row() if driver_rows is None else samples[0 if step is None else order.before(step)]
        return _with_kl(world, policy, rollouts, other_row, spec.data.max_tokens) if "kl" in loss.needs else rollouts

    saver = Saver(world, driver, policy.state, background=spec.run.async_save)
    driver.leave.begin()
    for step in todo:
        profile = profiled(spec.run.profile, driver.directory.path, iteration=step, rank=world.rank)
        with profile, driver.watch("train"):
            metrics = update(world, trainee, drawn(step))
        if validates and (step + 1 == steps or (spec.validate_every and (step + 1) % spec.validate_every == 0)):
            with driver.watch("validate"):
                scores = evaluate(world, trainee, drawn(None))
            metrics |= {f"validation_{name}": value for name, value in scores.items() if name == "loss" or "/" in name}
        driver.log(step, "sft", _shown(metrics), iteration=step)
        leave, last = world.broadcast(interrupts.requested or (world.rank == 0 and driver.leave())), step + 1 == steps
        if leave or last or (spec.run.save_every and (step + 1) % spec.run.save_every == 0):
            saver.save(step + 1, {"step": step + 1})
        saver.settle(wait=leave or last)
        if leave and not last:
            return False
    return True


def with_reference(
    world: World, policy: MegatronPolicy, driver_rows: tuple[list[Row], list[Row]] | None, place: Path, *, inputs: str
) -> None:
    """Adds the reference model's log-probs to the driver's training and validation rows, as the value GIVEN_REFERENCE
    of each token. Called by every rank. The log-probs are computed once and saved to the file `place` in the run
    directory. Later starts of the run read the file.

    `inputs`: description of the files that the run reads, including the model. If the description has changed, the
        log-probs are computed again.
    """
    rows = [] if driver_rows is None else [*driver_rows[0], *driver_rows[1]]
    rollouts, stored = [rollout for row in rows for rollout in row], list[np.ndarray]()
    digest = hashlib.sha256(f"{_digest(rows)} {inputs}".encode()).hexdigest()

    def missing() -> int:
        if place.exists():
            try:
                with open(place, "rb", opener=regular) as file, np.load(file) as kept:
                    stored.extend([kept["logprobs"]] if str(kept["digest"]) == digest else [])
            except (EOFError, zipfile.BadZipFile, *UNREADABLE) as error:
                _log.warning("%s is damaged, and is computed again: %s", place, error)
        return 0 if stored else len(rollouts)

    count, chunks = world.from_leader(missing), list[np.ndarray]()
    for start in range(0, count, REFERENCE_CHUNK):
        part = None if driver_rows is None else rollouts[start : start + REFERENCE_CHUNK]
        chunks += policy_logprobs(world, policy, part, reference=True) or []
    if driver_rows is None:
        return
    if not stored:
        stored.append(np.concatenate(chunks))
        partial = place.with_name(f".{place.name}")
        np.savez(partial, digest=digest, logprobs=stored[0])
        partial.replace(place)
    values = iter(np.split(stored[0], np.cumsum([len(rollout.tokens) for rollout in rollouts])[:-1]))
    for row in rows:
        row[:] = [dataclasses.replace(r, values={**r.values, GIVEN_REFERENCE: next(values)}) for r in row]


def _with_kl(
    world: World, policy: MegatronPolicy, rollouts: list[Rollout] | None, other_row: Row, max_tokens: int
) -> list[Rollout] | None:
    """Returns the driver's rollouts with an estimate of KL(policy || reference) as the value "kl" of each token. As in
    KTO, the estimate is the mean log-ratio of mismatched responses (see `data.sft.mismatched`), or 0 if the mean is
    negative. `other_row`: another row, whose responses are used if the rollouts are of a single row. Called by every
    rank.
    """
    others = None if rollouts is None else mismatched(rollouts, max_tokens, other_row=other_row)
    logprobs, reference = (policy_logprobs(world, policy, others, reference=which) for which in (False, True))
    if rollouts is None or logprobs is None or reference is None:
        return None
    gaps = [a.sum(dtype=np.float64) - b.sum(dtype=np.float64) for a, b in zip(logprobs, reference, strict=True)]
    kl = np.float32(max(0.0, np.mean(gaps)))
    return [dataclasses.replace(r, values={**r.values, "kl": np.full(len(r.tokens), kl)}) for r in rollouts]


def _shown(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics without those in OF_ENGINES. For unpaired responses, adds `rewards/margins` as TRL does:
    the mean reward of chosen responses minus the mean reward of rejected responses.
    """
    shown = {name: value for name, value in metrics.items() if name not in OF_ENGINES}
    if {"rewards/chosen", "rewards/rejected"} <= shown.keys():
        shown.setdefault("rewards/margins", shown["rewards/chosen"] - shown["rewards/rejected"])
    return shown


def _read(spec: SftSpec, samples: list[Row], validation: list[Row]) -> tuple[int, bool]:
    """Appends the training and validation samples to the lists `samples` and `validation`. Called on the driver (rank
    0).

    Returns (number of optimizer steps, whether there is validation data). Raises ConfigError if the loss needs more
    rows."""
    data, model, loss = spec.data, spec.roles["model"].model, loss_of(spec.roles["model"])
    tokenizer, kind = tokenizer_of(model), rows_of_loss(loss.needs)
    make = functools.partial(
        sft_rollouts, tokenizer=tokenizer, append_eos=data.append_eos, max_tokens=data.max_tokens,
        max_bad_share=data.max_bad_share, vocabulary=vocabulary_of(model, tokenizer),
    )  # fmt: skip
    samples += _by_row(make(read_samples(data, kind=kind)))
    if data.validation is not None:
        held_out = dataclasses.replace(data, train=data.validation)
        validation += _by_row(make(read_samples(held_out, split="validation", kind=kind)))
    if "kl" in loss.needs and len(samples) == 1:
        raise ConfigError(
            f"data.train = {data.train!r} has one row, and loss.objective = {spec.loss.objective!r} combines each "
            "prompt with the response of another row: give at least 2 rows"
        )
    return spec.num_steps(len(samples)), bool(validation)


def _by_row(rollouts: Sequence[Rollout]) -> list[Row]:
    """Collects the rollouts of each data row in one list. Rollouts of one row are adjacent and have the same group."""
    return [list(members) for _, members in groupby(rollouts, key=lambda rollout: rollout.group)]


def _told(data: SftData, samples: Sequence[Row], validation: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Returns a description of each data set, which is saved in the record of the run's inputs. The key is "rows of
    data.train" or "rows of data.validation". The value has the path, the row count and the sha256 of the rows."""
    descriptions = {}
    for name, path, rows in (("train", data.train, samples), ("validation", data.validation, validation)):
        descriptions[f"rows of data.{name}"] = {"path": path, "rows": len(rows), "sha256": _digest(rows)}
    return descriptions


def _digest(rows: Sequence[Row]) -> str:
    """Returns the sha256 of the rows' tokens, trained positions, advantages, and further inputs of the loss such as
    margins."""
    digest = hashlib.sha256()
    for rollout in (rollout for row in rows for rollout in row):
        digest.update(rollout.tokens.tobytes() + rollout.trainable.tobytes())
        digest.update(b"" if rollout.advantages is None else np.float64(rollout.advantages).tobytes())
        digest.update(b"".join(values.tobytes() for values in rollout.values.values()))
    return digest.hexdigest()
