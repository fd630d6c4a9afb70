"""A role's trained model: Megatron-core behind the few verbs that the loop calls."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_rl.algorithms.losses import PolicyLoss
from megatron_rl.batches.batch import CANDIDATES, BatchLoss, by_name, num_rows, statistics_needed
from megatron_rl.batches.cutting import Cost, Prefixes, Shares, micro_batches
from megatron_rl.batches.work import COUNTED, Work
from megatron_rl.config.schema import ConfigError, RoleConfig
from megatron_rl.megatron import export, lora, offload, optim, platform, replay, saved_state, work_checks, writers
from megatron_rl.megatron import model as models
from megatron_rl.megatron import step as core_step
from megatron_rl.megatron.attention import Context, RotaryTable
from megatron_rl.megatron.parallel import Groups
from megatron_rl.models.adapters import adapter_problems
from megatron_rl.models.divisibility import Axes, trainer_problems
from megatron_rl.models.setting_limits import prefix_problems, setting_problems
from megatron_rl.planning.shapes import Shape
from megatron_rl.refit.base import ParameterPart
from megatron_rl.timing import Timer
from megatron_rl.weights import adapters, copies, hf, rectangles
from megatron_rl.weights.layouts import TrainerLayout
from megatron_rl.world import Replicas, broadcast

platform.install()

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject  # noqa: E402
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata  # noqa: E402
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue  # noqa: E402

# Core 0.19 writes in the background by another package unless it is told not to.
_OWN_WRITER: dict[str, Any] = (
    {"async_strategy": "mcore"} if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters else {}
)
EIGHT_BIT_UNIT = 16  # rows by which Transformer Engine's 8-bit products divide
# Fields of core's config that belong to a role's optimizer, where roles share a model.
_OF_ROLE = ("finalize_model_grads_func", "grad_scale_func", "no_sync_func")


class MegatronPolicy:
    """One model on this rank's part of a layout. Every method is collective: all ranks of the world call it in the same
    order.

    A policy that is not trainable has no optimizer and no gradient buffers. The reference is the policy's own start
    (`model.path`), kept once in host memory and swapped in for a forward pass.

    With adapters (`role.lora`) the model itself is frozen: optimizer, checkpoints and the reference hold adapters
    alone. `base`: another policy with adapters, of the same model and layout, whose model this one computes with.
    """

    def __init__(
        self,
        role: RoleConfig,
        groups: Groups,
        *,
        trainable: bool = True,
        seed: int = 0,
        deterministic: bool = False,
        base: MegatronPolicy | None = None,
    ) -> None:
        self.role, self.groups, self.trainable = role, groups, trainable
        self.timer = Timer(cuda=torch.cuda.is_available())
        self.arch = hf.read_architecture(role.model.path)
        self._check_settings()
        self._shape = Shape(name=role.model.path, sizes=self.arch, features=self.arch.features)
        self._attends = not self._fused or role.shared_prefixes  # Transformer Engine has no attention for these
        self._rotary = RotaryTable(self.arch) if self._attends else None
        self._flash = self._attends and models.uses_flash(self.arch, role.model, packed=role.packed)
        self._cost = Cost.of_model(self.arch, self.arch.features.experts_per_token)
        with groups.active():
            if base is None:
                self.config, self._model = self._build(seed, deterministic=deterministic)
            else:
                self.config, self._model = base.config, base._model
                vars(self.config).update(dict.fromkeys(_OF_ROLE))
            self._adapters = self._attach(seed) if role.lora is not None else None
            self.chunks: list[Any] = list(self._model)
            if trainable:
                sums = models.uses_fused_sums(role.model)
                self.chunks = optim.wrap(
                    self.config, self.chunks, overlap=role.optimizer.overlap, late=self._gathers_late, fused_sums=sums
                )
                self.optimizer, self.scheduler = optim.build(role, self.config, self.chunks, timer=self.timer)
        self._steps_left = 0  # of an update under way, whose weights are not whole before the last one
        self._calls = {name: vars(self.config).get(name) for name in _OF_ROLE}
        self._asleep, self._placed = False, offload.Weights(self.chunks)
        self._saves = AsyncCallsQueue()
        self._reference: list[Tensor] | None = None
        if trainable and "reference" in PolicyLoss(role.loss).needs:
            self._reference = offload.host_copies([p.detach() for p in self._trained()])

    @property
    def replicas(self) -> Replicas:
        """The ranks that hold each replica of the model."""
        return self.groups.replicas

    @property
    def replays(self) -> bool:
        """True when tokens are trained with the experts that the engine chose."""
        return self.role.router_replay

    @property
    def shares_prefixes(self) -> bool:
        """True when the prompt of several rollouts is computed once."""
        return self.role.shared_prefixes

    def shares(self, lengths: np.ndarray, prefixes: Prefixes | None = None) -> Shares:
        """Cuts sequences of [S] lengths into micro-batches for the replicas. Not collective."""
        if not self.role.packed:
            lengths = np.full(len(lengths), lengths.max())
        layout = self.role.layout
        return micro_batches(
            lengths,
            max_tokens=self.role.micro_batch_tokens * layout.cp,
            replicas=self.groups.dp_size,
            multiple=layout.pp if layout.vpp else 1,  # the interleaved schedule goes round by round over the stages
            cost=self._cost,
            prefixes=prefixes,
        )

    def update(self, work: Work, step: int, loss: BatchLoss) -> dict[str, float]:
        """One optimizer step on the replica's share of `work.steps[step]`, after those before it: with
        `optimizer.overlap` weights are not whole again before the last one. Returns means over all replicas: `loss` by
        the step's denominator, other sums per trained token; grad_norm, lr, numbers of tokens and micro-batches, how
        uneven these are (batches/cutting.py); with router replay `replayed`, the share of tokens whose experts are
        given; with shared prefixes `shared_tokens`, which are not computed again. Raises FloatingPointError when the
        gradient is not finite."""
        if not self.trainable:
            raise RuntimeError("this policy was built with trainable=False: it has no optimizer")
        if self._asleep:
            raise RuntimeError("this policy sleeps: call wake() before update()")
        totals = work.steps[step]
        if totals.denominator <= 0:
            raise ValueError("the optimizer step has no trained token: nothing to update on")
        with self._active():
            optim.zero_grad(self.chunks, self.optimizer)
            names, scale = statistics_needed(loss.needs), self.groups.dp_size / totals.denominator
            with self.timer("forward_backward"):
                results = self._run(work, step, core_step.Pass(names=names, loss=loss, scale=scale, backward=True))
            self.scheduler.step(increment=1)
            lr = self.optimizer.param_groups[0]["lr"]
            with self.timer("optimizer"):
                finite, grad_norm, _ = self.optimizer.step()
                finite = finite and (grad_norm is None or np.isfinite(float(grad_norm)))
                self._steps_left = len(work.steps) - step - 1 if finite and self._gathers_late else 0
                if self._steps_left:
                    optim.gather_late(self.chunks)
                elif self._gathers_late:
                    optim.gather(self.chunks)
        if not finite:
            raise FloatingPointError(
                f"gradient norm {grad_norm}: not a finite number; look at advantages and log-probs of this update"
            )
        sums = self._sum_over_replicas(results, work.flops(step, self._shape, self.role.lora))
        by = {"loss": totals.denominator, **dict.fromkeys(COUNTED, 1.0)}
        means = {name: value / by.get(name, totals.trained_tokens) for name, value in sums.items()}
        return means | {
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
        """Statistics of every label in the loss, 0 elsewhere: [N] float32 on CPU by name, [N, k] of candidates, of this
        replica's work, on the ranks of the last stage; nothing on the others."""
        candidates = work.flat.values.get(CANDIDATES)
        rows = num_rows(names, 0 if candidates is None else candidates.shape[1])
        into = torch.zeros(rows, work.num_tokens, device=next(self.chunks[0].parameters()).device)
        self._check_whole()
        with self._active(), self._weights_in_use(reference), torch.no_grad():
            self._run(work, None, core_step.Pass(names=tuple(names), into=into))
        return by_name(names, into.cpu()) if self.groups.is_last_stage else {}

    def loss(self, work: Work, loss: BatchLoss) -> float:
        """Mean loss of `work`, which is one step, without an update (validation)."""
        with self._active(), torch.no_grad():
            results = self._run(work, 0, core_step.Pass(names=statistics_needed(loss.needs), loss=loss))
        return self._sum_over_replicas(results)["loss"] / work.steps[0].denominator

    def weights(self, *, bucket_mib: float = 64, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Stream of (Hugging Face name, full tensor on CPU), the same on every rank, cast to `dtype` when it is given.
        Collective: consume it to the end. Beside the tensor that it yields it holds one bucket of about `bucket_mib`
        MiB. Adapters are merged into the weights."""
        self._placed.check()
        self._check_whole()
        named = [*self.shards().items()]
        return export.weights(self.arch, named, self.groups, bucket_mib=bucket_mib, dtype=dtype, read=self._merged)

    def adapter(self) -> dict[str, Tensor]:
        """The whole adapter by peft's names, on CPU, the same on every rank; nothing without `role.lora`.
        Collective."""
        if self._adapters is None or self.role.lora is None:
            return {}
        named, rank = [(n, p.detach()) for n, p in self._adapters.named.items()], self.role.lora.rank
        shapes = adapters.shapes(self.arch, self.role.lora)
        stream = export.weights(self.arch, named, self.groups, bucket_mib=64, dtype=None, rank=rank)
        return {name: tensor.reshape(shapes[name]).clone() for name, tensor in stream}

    def added(self, name: str, part: ParameterPart) -> Tensor | None:
        """Returns what adapters add to a part of one of `shards`, float32; None where it is nothing. Not collective."""
        return None if self._adapters is None else self._adapters.added(name, *part)

    @property
    def trainer_layout(self) -> TrainerLayout:
        """The rectangles that the ranks hold, for the plan of a refit."""
        layout = self.role.layout
        return TrainerLayout(
            tp=layout.tp,
            pp=layout.pp,
            dp=self.groups.copies,
            ep=layout.ep,
            etp=layout.expert_tp if self.arch.experts else 1,
            vpp=layout.vpp or 1,
            fused=self._fused,
        )

    def shards(self) -> dict[str, Tensor]:
        """This rank's parameters by name, with global layer numbers: the memory itself, which updates change in
        place. Adapters are not among them: `added` tells what they change."""
        named = models.named_parameters(self.chunks)
        return {name: parameter.detach() for name, parameter in named if not adapters.is_adapter(name)}

    def save(self, directory: Path, *, background: bool = False) -> None:
        """Writes model, optimizer and schedule as a distributed checkpoint; loads under any layout. `directory` must be
        empty.

        In the `background` a process of its own writes what stands now, while training goes on; `saved` tells when it
        has. Of a policy with adapters these are what is written, and in `directory`/adapter once more as peft has them.
        """
        self._check_whole()
        with self._awake(), self._active(), writers.one_save():
            state = saved_state.without_copies(self._sharded_state(loading=False))
            request = dist_checkpointing.save(state, str(directory), async_sharded_save=background, **_OWN_WRITER)
            if request is not None:
                self._saves.schedule_async_request(request)
        self.write_adapter(directory / adapters.DIRECTORY)

    def write_adapter(self, directory: Path) -> None:
        """Writes the adapter as peft does, on the first rank; nothing without `role.lora`. Collective."""
        tensors = self.adapter()
        if tensors and self.role.lora is not None and dist.get_rank(self.groups.control) == 0:
            adapters.write(directory, tensors, self.role.lora, self.role.model.path, self._base_digest)

    @functools.cached_property
    def _base_digest(self) -> str:
        """The digest of the files of the frozen model, as they are when it is first asked for. Not collective."""
        return adapters.base_digest(self.role.model.path)

    def saved(self, *, wait: bool) -> bool:
        """Tells whether all that `save` began is written; with `wait` it is. Raises what a writer raised."""
        self._saves.maybe_finalize_async_calls(blocking=wait)
        return not self._saves.get_num_unfinalized_calls()

    def load(self, directory: Path) -> None:
        """Takes model, optimizer state and the schedule's place from `save`; rates, betas and decay are those of this
        role's settings. Raises ConfigError for adapters of other settings, or of another base."""
        self._check_base(directory / adapters.DIRECTORY)
        with self._awake(), self._active():
            loaded = dist_checkpointing.load(self._state_to_load(directory), str(directory))
            state = cast(dict[str, Any], loaded)  # not the pair that it returns when asked for its strictness' findings
            for i, chunk in enumerate(self.chunks):
                models.unwrap(chunk).load_state_dict(state[f"model{i}"], strict=False)
            if self.trainable:
                optim.adopt_rates(self.optimizer, state["optimizer"])
                self.optimizer.load_state_dict(state["optimizer"])
                optim.apply_settings(self.role, self.optimizer)
                self.scheduler.num_steps = 0  # core adds the checkpoint's to it
                self.scheduler.load_state_dict(state["scheduler"])

    def sleep(self, *, weights: bool = False) -> None:
        """Frees gradients and moves the optimizer's state to host memory until `wake`. Forward passes, weights and
        saving still work; where the `weights` go too, not before `wake` or `present`."""
        if self.trainable and not self._asleep:
            offload.sleep(self.chunks, self.optimizer)
            self._asleep = True
        if weights:
            self._placed.sleep()

    def wake(self) -> None:
        """Undoes `sleep`."""
        self._placed.wake()
        if self.trainable:
            offload.wake(self.chunks, self.optimizer)
            self._asleep = False

    def present(self) -> contextlib.AbstractContextManager[None]:
        """Has the weights on the device in the block; they leave again where they were away."""
        return self._placed.present()

    def _check_whole(self) -> None:
        """Raises RuntimeError between two optimizer steps of an update whose weights are gathered late."""
        if self._steps_left:
            raise RuntimeError(f"an update is under way: {self._steps_left} optimizer steps of it are left to be taken")

    def _check_settings(self) -> None:
        role, path = self.role, self.role.model.path
        problems = trainer_problems(self.arch, Axes.of(role.layout), path)
        problems += setting_problems(self.arch, self.arch.features, role.model, path, router_replay=role.router_replay)
        problems += adapter_problems(self.arch, role, path) + prefix_problems(role)
        if problems:
            raise ConfigError("\n  ".join(problems))

    def _check_base(self, directory: Path) -> None:
        """Raises ConfigError, on every rank, unless the adapter in a checkpoint is one of these settings and base."""
        own, problem = self.role.lora, None
        if own is None and not directory.is_dir():
            return
        if dist.get_rank(self.groups.control) == 0:
            problem = adapters.difference(directory, own, self.role.model.path)
        if problem := broadcast(problem, self.groups.control):
            raise ConfigError(problem)

    @property
    def _fused(self) -> bool:
        """Tells whether layers are Transformer Engine's."""
        return models.uses_transformer_engine(self.arch, self.role.model.dtype, adapted=self.role.lora is not None)

    def _build(self, seed: int, *, deterministic: bool) -> tuple[Any, list[Any]]:
        """Makes the model of this rank with its weights. Returns core's config and the chunks, in their dtype."""
        role, fused, attends = self.role, self._fused, self._attends
        models.warn_of_slow_products(role.model, self.groups.control)
        config = models.transformer_config(self.arch, role.model, self.groups, deterministic=deterministic, fused=fused)
        triton = models.uses_triton(role.model, self.groups.control)
        cores = models.build(
            self.arch, config, temperature=self._temperature, fused=fused, attends=attends, triton=triton
        )
        self._fill(cores, seed)
        for core in cores if role.router_replay else ():
            replay.install(core)
        chunks = [models.in_half(config, c) for c in cores] if config.bf16 else [*cores]
        if role.lora is not None:
            lora.freeze(cores)  # only now: what is not trained would stay float32
        return config, chunks

    def _attach(self, seed: int) -> lora.RoleAdapters:
        """Makes this role's adapters for the frozen model."""
        assert self.role.lora is not None
        cores = [models.unwrap(chunk) for chunk in self._model]
        own = lora.RoleAdapters(cores, self.arch, self.role.lora, self.groups.shard)
        own.fill(seed)
        return own

    @property
    def _gathers_late(self) -> bool:
        """Tells whether the new weights of an optimizer step are gathered beside the next one's forward pass. Adapters
        are small, and read by no module of theirs that could wait."""
        return self.role.optimizer.overlap and self.role.lora is None

    @property
    def _temperature(self) -> float:
        return self.role.sampling.temperature or 1.0

    @contextlib.contextmanager
    def _active(self) -> Iterator[None]:
        """Makes core see this policy's layout in the block, and the model this role's adapters."""
        self._placed.check()
        with self.groups.active():
            if self._adapters is not None:
                self._adapters.show()
                vars(self.config).update(self._calls)
                for chunk in self._model:
                    models.unwrap(chunk).temperature = self._temperature
            yield

    def _trained(self) -> list[torch.nn.Parameter]:
        """Returns the parameters that updates change: the adapters, or the whole model."""
        if self._adapters is not None:
            return [*self._adapters.named.values()]
        return [p for _, p in models.named_parameters(self.chunks)]

    def _merged(self, name: str, parameter: Tensor) -> Tensor:
        """Returns a parameter of the model with what the adapters add."""
        rows, columns = parameter.shape[0], parameter.shape[1] if parameter.dim() > 1 else 1
        more = self.added(name, ParameterPart(0, 0, rows, columns))
        return parameter if more is None else more.add_(parameter).to(parameter.dtype)

    def _fill(self, cores: list[models.PolicyModel], seed: int) -> None:
        """Copies this rank's shards out of the Hugging Face weights (or out of a seeded transformers
        initialisation)."""
        if self.role.model.init == "random":
            torch.manual_seed(seed)
            made = copies.by_expert(
                AutoModelForCausalLM.from_config(self.arch.config, dtype=torch.float32).state_dict(), self.arch
            )

            def read(rect: rectangles.Rect) -> Tensor:
                return copies.from_tensor(made[rect.tensor], rect)
        else:
            hf.check(self.role.model.path, self.arch, cast=True)
            read = hf.DirectoryTensors(self.role.model.path).read
        for name, parameter in models.named_parameters(cores):
            copies.fill(parameter, rectangles.megatron(self.arch, name, self.groups.shard)[1], read)

    def _run(self, work: Work, step: int | None, what: core_step.Pass) -> list[dict[str, Any]]:
        """Runs the micro-batches of one optimizer step of `work`, or of all, through this rank's stage."""
        work_checks.check(work, self.arch, self.role.model.path)
        micros = work.micros(step)
        longest = max(1, *(micro.end - micro.start for micro in micros))
        return core_step.run(
            self.chunks, self._micro_batches(work, step), count=len(micros), longest=longest, what=what
        )

    def _micro_batches(self, work: Work, step: int | None) -> Iterator[core_step.MicroBatch]:
        """Makes this rank's micro-batches one after the other."""
        layout = self.role.layout
        context = Context(layout.cp, self.groups.cp_rank, self.groups.cp)
        parts, part = (layout.tp, self.groups.tp_rank) if layout.sequence_parallel else (1, 0)
        unit = EIGHT_BIT_UNIT if self.role.model.fp8 else 1
        cut = core_step.Cut(self.role.packed, parts=parts, part=part, context=context, unit=unit, flash=self._flash)
        like = next(models.unwrap(self.chunks[0]).parameters())
        for micro in work.micros(step):
            batch = work.batch(micro)
            yield core_step.make_micro_batch(batch, self._rotary, cut=cut, like=like, start=micro.start)

    def _sum_over_replicas(
        self, results: list[dict[str, Any]], counted: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Sums by name, the same on every rank. A replica's own sums are those of its reporting rank, `counted` too."""
        own = dict(counted or {}) if self.groups.reports else {}
        pairs = [pair for result in results if self.groups.reports for pair in result.items()]
        values = torch.stack([value.double() for _, value in pairs]).tolist() if pairs else []
        for (name, _), value in zip(pairs, values, strict=True):
            own[name] = own.get(name, 0.0) + value
        source = dist.get_group_rank(self.groups.control, self.replicas.reporters[0])
        names = broadcast(sorted(own), self.groups.control, source=source)
        sums = torch.tensor([own.get(name, 0.0) for name in names], dtype=torch.float64)
        dist.all_reduce(sums, group=self.groups.control)
        return dict(zip(names, sums.tolist(), strict=True))

    @contextlib.contextmanager
    def _awake(self) -> Iterator[None]:
        """Wakes a sleeping policy for the block."""
        asleep = self._asleep
        if asleep:
            self.wake()
        yield
        if asleep:
            self.sleep()

    @contextlib.contextmanager
    def _weights_in_use(self, reference: bool) -> Iterator[None]:
        """Exchanges the reference's weights for the live ones in the block, which come back bit for bit."""
        if not reference:
            yield
            return
        if self._reference is None:
            raise RuntimeError(
                "no reference is kept: the role's loss needs none (loss.kl_coef is 0), or the policy is not trainable"
            )
        with offload.swapped(self._trained(), self._reference):
            yield

    def _state_to_load(self, directory: Path) -> dict[str, Any]:
        """Returns what `load` asks a checkpoint for. What Transformer Engine keeps beside weights, for 8-bit products,
        is left out where the checkpoint has none of it: torch's layers have written it."""
        state = self._sharded_state(loading=True)
        if self._fused:
            held = load_sharded_metadata(str(directory))
            for i in range(len(self.chunks)):
                whole = state[f"model{i}"].items()
                state[f"model{i}"] = {
                    name: part for name, part in whole if not isinstance(part, ShardedObject) or part.unique_key in held
                }
        return state

    def _sharded_state(self, *, loading: bool) -> dict[str, Any]:
        metadata = optim.checkpoint_metadata()
        state: dict[str, Any] = {}
        for i, chunk in enumerate(self.chunks):
            whole = models.unwrap(chunk).sharded_state_dict(metadata=metadata)
            state[f"model{i}"] = whole if self._adapters is None else lora.only_adapters(whole)
        if self.trainable:
            state["optimizer"] = self.optimizer.sharded_state_dict(dict(state), is_loading=loading, metadata=metadata)
            state["scheduler"] = self.scheduler.state_dict()
        return state
