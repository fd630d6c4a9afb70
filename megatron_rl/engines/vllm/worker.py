"""The part of a refit (weight sync) that runs inside vLLM's worker processes. vLLM loads this module through
`--worker-extension-cls`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.attention.attention import set_default_quant_scales
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from megatron_rl.algorithms.tandem_authors import Rule, fingerprint
from megatron_rl.engines import refit_worker
from megatron_rl.engines.vllm.tandem import Authors, TandemForCausalLM
from megatron_rl.refit.engine_side import EngineSide
from megatron_rl.refit.refit_store import Address

BACKEND = "megatron_rl"
# part of vLLM's names of expert parameters, which is removed because the names in refits do not have this part
ROUTED = ".routed_experts"
_log = logging.getLogger(__name__)


@dataclass
class Join(WeightTransferInitInfo):
    """The parameters of a request to join a trainer: the address of the trainer's refit store, and the replica index of
    this engine.
    """

    host: str = ""
    port: int = 0
    secret: str = field(default="", repr=False)
    replica: int = 0


@dataclass
class TakePart(WeightTransferUpdateInfo):
    """The parameters of a request to take part in one weight sync (refit). `wait_s`: maximum seconds until the trainer
    begins the refit.
    """

    version: int = -1
    wait_s: float = field(default=60.0)


class VllmLanding(refit_worker.Landing):
    """The parameters of a vLLM model, as the destination of a refit.

    On a GPU, plain layers are written in place, so the engine must not serve between `begin_refit` and `commit_refit`.
    With `staging`, plain layers are received in staging memory and copied in `commit_refit`. Parameters that vLLM
    repacks after loading (every linear layer on a CPU, fused experts) are received in host memory, or in staging
    memory, and passed to vLLM's layerwise reload in `commit_refit`. Until then, the model keeps the old values of these
    parameters.
    """

    def __init__(
        self, model: nn.Module, model_config: Any, device: torch.device, staging: refit_worker.Staging
    ) -> None:
        self._model, self._model_config = model, model_config
        # The layers are collected now, because shared parameters become separate objects during a reload.
        self._layers = [*_layers(model)]
        self._staged: dict[str, Tensor] = {}
        self._copied: list[tuple[Tensor, Tensor]] = []  # (parameter of a plain layer, its staging memory)
        landing: dict[str, Tensor] = {}
        # parameters that two layers share: {name of the parameter in the second layer: its name in the first layer}
        self._same: dict[str, str] = {}
        first: dict[int, str] = {}
        for layer, prefix in self._layers:
            if isinstance(layer, AttentionLayerBase):
                # vLLM computes parameters of attention layers from other parameters, after loading and after a reload.
                # With quantised weights, a server starts with random scales of the KV cache, which must be 1.
                if hasattr(layer, "_k_scale"):
                    set_default_quant_scales(layer)
                continue
            loadable = layerwise.get_layerwise_info(layer).restore_metadata[0]
            live = dict(layer.named_parameters(recurse=False))
            for name in loadable.keys() | live.keys():
                if name in live and first.setdefault(id(live[name]), prefix + name) != prefix + name:
                    self._same[prefix + name] = first[id(live[name])]
                    continue
                shape = loadable.get(name, live.get(name))
                assert shape is not None
                plain = device.type != "cpu" and _plain(layer)
                if plain and staging == "off":
                    landing[prefix + name] = live[name].data
                    continue
                # By default, receive new values in host memory, because vLLM reserved no GPU memory for a second copy.
                landing[prefix + name] = own = refit_worker.beside(shape.shape, shape.dtype, device, staging)
                if plain:
                    self._copied.append((live[name].data, own))
                else:
                    self._staged[prefix + name] = own
        # vLLM's name of the scales is weight_scale for mxfp8 and weight_scale_inv for fp8
        renamed = {f"{name}_inv" if name.endswith("weight_scale") else name: own for name, own in landing.items()}
        super().__init__(renamed)

    def commit_refit(self, version: int) -> None:
        """Copies and reloads the parameters that were not received in place. If vLLM raises an exception, the model is
        in an undefined state afterwards.
        """
        with torch.no_grad():
            for parameter, own in self._copied:
                parameter.copy_(own)
            if self._staged:
                self._reload()

    def _reload(self) -> None:
        layerwise.initialize_layerwise_reload(self._model)
        originals = []
        for layer, prefix in self._layers:
            for name in dict(layer.named_parameters(recurse=False)):
                staged = self._staged.get(self._same.get(prefix + name, prefix + name))
                if staged is None:
                    continue
                parameter = getattr(layer, name)
                originals.append((parameter, layerwise._get_original_loader(parameter)))
                # Use the loader that only copies, because the received tensor is already the shard of this rank.
                parameter.weight_loader = default_weight_loader
                layerwise.make_online_process_loader(layer, name)(parameter, staged)
        layerwise.finalize_layerwise_reload(self._model, self._model_config)
        for layer, _ in self._layers:
            kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
            # vLLM 0.32 packs experts for its CPU kernels only when it loads a model.
            if kernel is not None and next(layer.parameters(recurse=False)).device.type == "cpu":
                kernel.fused_experts.process_weights_after_loading(layer)
        for parameter, loader in originals:
            parameter.weight_loader = loader


class RefitBackend(WeightTransferEngine[Join, TakePart]):
    """The part of a weight sync (refit) that runs in a vLLM worker. `init_transfer_engine` joins the trainer's refit
    store; `update_weights` takes part in one refit.
    """

    init_info_cls, update_info_cls = Join, TakePart
    supports_draft_weight_update = False
    _side: EngineSide | None = None

    def init_transfer_engine(self, init_info: Join) -> None:
        """Joins the trainer's refit store (the key-value store of weight syncs). Raises ValueError if the trainer's
        model or parallel layout does not match this engine, and TransportError if the trainer does not answer.
        """
        self.shutdown()
        trained = self.model.senior if isinstance(self.model, TandemForCausalLM) else self.model
        self._side = refit_worker.join(
            Address(init_info.host, init_info.port, init_info.secret),
            functools.partial(VllmLanding, trained, self.model_config, self.device), self.device,
            replica=init_info.replica, tp=self.parallel_config.world_size, tp_rank=self.parallel_config.rank,
        )  # fmt: skip

    def start_weight_update(self) -> None: ...

    def finish_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Takes part in one weight sync (refit). Raises RuntimeError if the trainer did not commit the requested
        version on this rank.
        """
        info = self.parse_update_info(update_info)
        refit_worker.take_part(self._side, info.version, info.wait_s)

    def receive_weights(self, update_info: TakePart) -> None:
        raise NotImplementedError("update_weights does it: there is nothing to synchronize afterwards")

    def shutdown(self) -> None:
        if self._side is not None:
            self._side.close()
            self._side = None


def _layers(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yields every layer of a model and the prefix of the layer's parameter names. A head that shares the embedding's
    weight gets the prefix of the embedding.
    """
    embedding = next((n for n, _ in model.named_parameters() if n.endswith("embed_tokens.weight")), "")
    shared = dict(model.named_parameters(remove_duplicate=False))
    tied = "lm_head.weight" in shared and shared["lm_head.weight"] is shared.get(embedding)
    for name, layer in model.named_modules():
        if name == "lm_head" and tied:
            yield layer, embedding.removesuffix("weight")
        else:
            yield layer, f"{name.replace(ROUTED, '')}." if name else ""


def _plain(layer: nn.Module) -> bool:
    """Returns whether vLLM uses the layer's parameters in the form in which they were loaded. The result is valid only
    for parameters on a GPU, because on a CPU vLLM repacks linear layers.
    """
    method = getattr(layer, "quant_method", None)
    return method is None or type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


class Extension:
    """A mixin of vLLM's worker class, with methods that /collective_rpc can call. Importing this module registers
    RefitBackend as a weight transfer backend.
    """

    model_runner: Any

    def take_adapter(self, name: str, number: int, directory: str) -> bool:
        """Loads a LoRA adapter before any request uses it, so that an invalid adapter is detected now."""
        # `load_inplace` replaces an earlier adapter with the same id. A server may outlive a trainer, and the restarted
        # trainer writes different weights under the same version number.
        return bool(self.model_runner.add_lora(LoRARequest(name, number, directory, load_inplace=True)))

    def tandem_boundaries(self, rule: Mapping[str, Any]) -> str | None:
        """Returns the fingerprint of the boundary tokens that this server uses for Tandem RL, or None if the server has
        no Tandem RL model.
        """
        found = self._authors()
        return None if found is None else fingerprint(found.boundaries(Rule(**rule)))

    def tandem_records(self, keep: bool = True) -> dict[str, list[bool]]:
        """Returns the authors of the tokens of recorded requests, which began after the last call: {seed of a request:
        author of each token except the last token (True for the senior)}. `keep`: whether requests that begin after
        this call are recorded. Used in tests.
        """
        found = self._authors()
        if found is None:
            return {}
        kept, found.kept, found.keep = found.kept, {}, keep
        return {str(key): authors for key, authors in kept.items()}

    def _authors(self) -> Authors | None:
        return next((p for p in self.model_runner.input_batch.logitsprocs.all if isinstance(p, Authors)), None)


WeightTransferEngineFactory.register_engine(BACKEND, RefitBackend)
