"""The Megatron model of one role: optimizer steps, validation losses and per-token statistics over micro-batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.algorithms.value_loss import loss_of
from megatron_rl.batches.micro_batches import Cost, Prefixes, Shares, micro_batches
from megatron_rl.batches.packed_batch import CANDIDATES, BatchLoss, by_name, num_rows, statistics_needed
from megatron_rl.batches.replica_batch import Work
from megatron_rl.config.schema import RoleConfig
from megatron_rl.megatron import model as models
from megatron_rl.megatron import offload, optimizer, work_checks
from megatron_rl.megatron import pipeline_pass as core_step
from megatron_rl.megatron.attention import Context, RotaryTable
from megatron_rl.megatron.export import WeightExport
from megatron_rl.megatron.parallel import Groups
from megatron_rl.megatron.role_model import RoleModel
from megatron_rl.megatron.state import PolicyState
from megatron_rl.messages.world import Replicas, broadcast
from megatron_rl.models.shape import Shape

EIGHT_BIT_UNIT = 16  # Transformer Engine's 8-bit matrix products need a row count that is a multiple of this value


class MegatronPolicy(RoleModel):
    """A role's model on this rank, which can be trained and can compute per-token statistics. Every method is
    collective unless its docstring says otherwise: all ranks of `groups` call it in the same order.

    `memory` moves tensors between device and host memory. `state` saves and loads checkpoints. `export` provides the
    weights for inference engines and files. A policy with `trainable=False` has no optimizer and no gradient buffers.
    The reference policy has the policy's initial weights (`model.path`) until `reset_reference` is called. One copy of
    the reference weights is kept in host memory and is swapped in for a forward pass.
    """

    def __init__(
        self, role: RoleConfig, groups: Groups, *, trainable: bool = True, seed: int = 0, deterministic: bool = False,
        base: MegatronPolicy | None = None,
    ) -> None:  # fmt: skip
        super().__init__(role, groups, trainable=trainable, seed=seed, deterministic=deterministic, base=base)
        self.export = WeightExport(self)
        self.state = PolicyState(self, self.export)
        self._shape = Shape(name=role.model.path, sizes=self.arch, features=self.arch.features)
        self._rotary = RotaryTable(self.arch) if self.attends else None
        self._flash = self.attends and models.uses_flash(self.arch, role.model, groups.control)
        self._cost = Cost.of_model(self.arch, self.arch.features.experts_per_token)
        self._reference: list[Tensor] | None = None
        if trainable and "reference" in loss_of(role).needs:
            self.keep_reference()

    def keep_reference(self) -> None:
        """Copies the current weights to host memory, as the weights of the reference policy."""
        self._reference = offload.host_copies([p.detach() for p in self.trained()])

    def reset_reference(self) -> None:
        """Makes the current weights the weights of the reference policy, and sets the optimizer's moments to zero. The
        weights must be on the device. Not collective."""
        with self.memory.awake():
            self._reference = None  # frees the old copy before `keep_reference` allocates a new one
            self.keep_reference()
            optimizer.restart(self.optimizer)

    def adopt(self, role: RoleConfig) -> None:
        """Changes to the settings that the role has in another stage of the run. Takes effect for the sampling
        temperature and for the optimizer settings that may change during a run. Not collective."""
        self.role, self._temperature = role, role.sampling.temperature or 1.0
        if self.trainable:
            optimizer.apply_settings(role, self.optimizer, self.scheduler)

    @property
    def replicas(self) -> Replicas:
        """The places of each data-parallel replica of the model: indices into the role's ranks."""
        return self.groups.replicas

    @property
    def replays(self) -> bool:
        """True if router replay is on: training uses, for each token, the experts that the engine chose."""
        return self.role.router_replay

    @property
    def shares_prefixes(self) -> bool:
        """True if a prompt that several rollouts share is computed only once."""
        return self.role.shared_prefixes

    def shares(self, lengths: np.ndarray, prefixes: Prefixes | None = None, groups: np.ndarray | None = None) -> Shares:
        """Distributes sequences of the given lengths [S] over the data-parallel replicas and over micro-batches of each
        replica. Not collective."""
        layout = self.role.layout
        return micro_batches(
            lengths,
            max_tokens=self.role.micro_batch_tokens * layout.cp,
            replicas=self.groups.dp_size,
            multiple=layout.pp if layout.vpp else 1,  # required by the interleaved pipeline schedule
            cost=self._cost,
            prefixes=prefixes,
            groups=groups,
        )

    def update(self, work: Work, step: int, loss: BatchLoss) -> dict[str, float]:
        """Runs one optimizer step on this replica's sequences of `work.steps[step]`, and returns metrics over all
        replicas.

        Call it for the steps of `work` in order, because with `optimizer.overlap` only the last step leaves whole
        weights on every rank.

        Returns a dict of metrics: the metrics of the loss (StepTotals.means), `grad_norm`, `lr`, the numbers of tokens
        and micro-batches, and the imbalance of replicas and micro-batches (batches/micro_batches.py). With router
        replay, `replayed` is the share of tokens for which the engine's choice of experts is known. With shared
        prefixes, `shared_tokens` is the number of prompt tokens that were not computed again.

        Raises RuntimeError if the policy is not trainable or its optimizer state is in host memory, ValueError if the
        step has no trained token, and FloatingPointError if the gradient norm is not finite.
        """
        if not self.trainable:
            raise RuntimeError("this policy was built with trainable=False: it has no optimizer")
        if self.memory.asleep:
            raise RuntimeError("this policy sleeps: call memory.wake() before update()")
        if (totals := work.steps[step]).denominator <= 0:
            raise ValueError("the optimizer step has no trained token: nothing to update on")
        with self.active():
            optimizer.zero_grad(self.chunks, self.optimizer)
            names, scale = statistics_needed(loss.needs), self.groups.dp_size / totals.denominator
            with self.timer("forward_backward"):
                results = self._run(work, step, core_step.Pass(names=names, loss=loss, scale=scale, backward=True))
            self.scheduler.step(increment=1)
            lr = self.optimizer.param_groups[0]["lr"]
            with self.timer("optimizer"):
                finite, grad_norm, _ = self.optimizer.step()
                finite = finite and (grad_norm is None or np.isfinite(float(grad_norm)))
                self.gather_weights(steps_left=len(work.steps) - step - 1 if finite else 0)
        if not finite:
            raise FloatingPointError(
                f"gradient norm {grad_norm}: not a finite number; look at advantages and log-probs of this update"
            )
        sums = self._sum_over_replicas(results, work.flops(step, self._shape, self.role.lora))
        return totals.means(sums) | {
            "grad_norm": float(grad_norm or 0.0),
            "lr": float(lr),
            "trained_tokens": totals.trained_tokens,
            **({"replayed": totals.replayed} if self.replays else {}),
            **({"shared_tokens": totals.shared_tokens} if self.role.shared_prefixes else {}),
            "replica_imbalance": totals.replica_imbalance,
            "micro_batch_imbalance": totals.micro_batch_imbalance,
            "packed_tokens": totals.packed_tokens,
            "micro_batches": float(totals.micro_batches),
        }

    def statistics(
        self, work: Work, names: Sequence[str] = ("logprobs",), *, reference: bool = False
    ) -> dict[str, Tensor]:
        """Computes statistics, such as log-probs, of the labels in this replica's sequences. Uses the reference weights
        if `reference`, otherwise the current weights.

        Returns {name: float32 tensor on the CPU}. A tensor is [N], or [N, k] for `candidate_logprobs`. Values are 0 at
        positions that are not in the loss. Only the ranks of the last pipeline stage get the tensors; other ranks get
        an empty dict.
        """
        candidates = work.flat.values.get(CANDIDATES)
        rows = num_rows(names, 0 if candidates is None else candidates.shape[1])
        into = torch.zeros(rows, work.num_tokens, device=next(self.chunks[0].parameters()).device)
        self.check_readable()
        with self.active(), self._weights_in_use(reference), torch.no_grad():
            self._run(work, None, core_step.Pass(names=tuple(names), into=into))
        return by_name(names, into.cpu()) if self.groups.is_last_stage else {}

    def evaluate(self, work: Work, loss: BatchLoss) -> dict[str, float]:
        """Returns the metrics of the loss on `work` (StepTotals.means) without updating weights, for validation. `work`
        must have exactly one optimizer step."""
        with self.active(), torch.no_grad():
            results = self._run(work, 0, core_step.Pass(names=statistics_needed(loss.needs), loss=loss))
        return work.steps[0].means(self._sum_over_replicas(results))

    def _run(self, work: Work, step: int | None, what: core_step.Pass) -> list[dict[str, Any]]:
        """Runs the micro-batches of optimizer step `step` of `work`, or all micro-batches if `step` is None, through
        this rank's pipeline stage."""
        work_checks.check(work, self.arch, self.role.model.path)
        micros = work.micros(step)
        longest = max(1, *(micro.end - micro.start for micro in micros))
        return core_step.run(
            self.chunks, self._micro_batches(work, step), count=len(micros), longest=longest, what=what
        )

    def _micro_batches(self, work: Work, step: int | None) -> Iterator[core_step.MicroBatch]:
        """Yields this rank's micro-batches of one optimizer step, or of all steps if `step` is None. Each micro-batch
        is created when it is requested."""
        layout = self.role.layout
        context = Context(layout.cp, self.groups.cp.rank(), self.groups.cp)
        parts, part = (layout.tp, self.groups.tp.rank()) if layout.sequence_parallel else (1, 0)
        unit = EIGHT_BIT_UNIT if self.role.model.fp8 else 1
        cut = core_step.RankPart(parts=parts, part=part, context=context, unit=unit, flash=self._flash)
        like = next(models.unwrap(self.chunks[0]).parameters())
        micros, balance = work.micros(step), 0.0
        if step is not None and (coefficient := self.role.model.router_aux_loss):
            # Megatron-core divides by the number of micro-batches, and averages gradients over the replicas.
            balance = coefficient * len(micros) * self.groups.dp_size / work.steps[step].packed_tokens
        for micro in micros:
            batch = work.batch(micro)
            yield core_step.make_micro_batch(
                batch, self._rotary, cut=cut, like=like, start=micro.start, balance=balance
            )

    def _sum_over_replicas(
        self, results: list[dict[str, Any]], counted: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Returns {name: sum over all data-parallel replicas}, the same on every rank. The arguments `results` and
        `counted` are used on one rank of each replica (see `Groups.reports`), and ignored on other ranks."""
        totals = dict(counted or {}) if self.groups.reports else {}
        pairs = [pair for result in results if self.groups.reports for pair in result.items()]
        values = torch.stack([value.double() for _, value in pairs]).tolist() if pairs else []
        for (name, _), value in zip(pairs, values, strict=True):
            totals[name] = totals.get(name, 0.0) + value
        names = broadcast(sorted(totals), self.groups.control, source=self.replicas.reporters[0])
        sums = torch.tensor([totals.get(name, 0.0) for name in names], dtype=torch.float64)
        dist.all_reduce(sums, group=self.groups.control)
        return dict(zip(names, sums.tolist(), strict=True))

    @contextlib.contextmanager
    def _weights_in_use(self, reference: bool) -> Iterator[None]:
        """Context manager that makes the model use the reference weights inside the block, if `reference` is True. When
        the block ends, the policy's weights are restored bit for bit. Raises RuntimeError if the policy has no
        reference weights."""
        if not reference:
            yield
            return
        if self._reference is None:
            raise RuntimeError(
                "no reference is kept: nothing needs one (loss.kl_coef is 0), or the policy is not trainable"
            )
        with offload.swapped(self.trained(), self._reference):
            yield
