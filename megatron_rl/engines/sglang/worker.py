"""The code of this package that runs inside an SGLang server. It starts the server with token authentication, and makes
every tensor-parallel rank take part in refits (weight syncs).

python -m megatron_rl.engines.sglang.worker ARGUMENTS OF SGLANG'S LAUNCHER
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import pkgutil
import shutil
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_rl.engines import refit_worker
from megatron_rl.engines.auth_middleware import HEADER, TOKEN_FILE, Guard
from megatron_rl.engines.sglang.routes import Framed
from megatron_rl.lib.regular_files import read_own
from megatron_rl.messages.world import all_gather
from megatron_rl.refit.engine_side import EngineSide
from megatron_rl.refit.refit_store import Address

# Names of the two functions of SGLang that this module replaces by plugin hooks (sglang.srt.plugins).
UPDATE = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_tensor"
FREEZE = "sglang.srt.entrypoints.http_server._freeze_gc_after_server_warmup"
UP_S = 10.0
_log = logging.getLogger(__name__)


def main() -> None:
    """Runs SGLang's web server and tokenizer. Raises SystemExit for settings with which requests could bypass the token
    check.
    """
    from sglang.srt.entrypoints.http_server import app, launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()  # called before the arguments are parsed, because plugins may add allowed values of arguments
    arguments = prepare_server_args(sys.argv[1:])
    if (
        arguments.tokenizer_worker_num != 1
        or arguments.grpc_port is not None
        or os.environ.get("SGLANG_RUST_SERVER", "0") not in ("", "0")
    ):
        sys.exit(
            "SGLang's further web workers, its gRPC port and its Rust server ask nobody for the job's token: "
            "leave them out"
        )
    arguments.resolve_once()
    app.add_middleware(Framed)
    app.add_middleware(Guard)  # added last, because SGLang passes a request first to the last middleware
    _hook(FREEZE, _freeze_gc)
    # Ranks of one node find each other by a file: torch's TCP store would listen on all interfaces without a token.
    if arguments.nnodes == 1:
        os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{_meeting_place()}/ranks"
    try:
        launch_server(arguments, run_scheduler_process_func=run_rank)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def run_rank(*arguments: Any, **options: Any) -> None:
    """Runs SGLang's scheduler in the process of one rank, with this project's refits in place of SGLang's weight update
    from tensors.
    """
    from sglang.srt.managers.scheduler import run_scheduler_process

    _hook(UPDATE, Refits().update)
    run_scheduler_process(*arguments, **options)


class SglangLanding(refit_worker.Landing):
    """The parameters of an SGLang model, as the destination of a refit. It is used between /begin_weight_update, which
    restores the loaded form of the weights, and /end_weight_update, which processes the weights again.

    Without `staging`, plain layers are written in place, so the engine must not serve between `begin_refit` and
    `commit_refit`. SGLang may permute the rows of fused experts, which cannot be seen from their shape. Therefore the
    weights of fused experts, and all weights with `staging`, are received in separate tensors and copied to the model
    at the commit; SGLang permutes them again at /end_weight_update.
    """

    def __init__(self, model: nn.Module, staging: refit_worker.Staging) -> None:
        """Raises ValueError if SGLang cannot load the model's weights again."""
        from sglang.srt.layers.radix_attention import RadixAttention

        self._staged: list[tuple[nn.Parameter, Tensor]] = []
        parameters: dict[str, Tensor] = {}
        for prefix, layer in model.named_modules():
            if isinstance(layer, RadixAttention):
                # With quantised weights, the layer has scales of the KV cache. Refits do not replace them: they stay 1.
                continue
            if getattr(layer, "use_intel_amx_backend", False):
                raise ValueError(
                    f"{prefix} was packed for AMX: such weights cannot be replaced; use a GPU, or engine.kind = vllm"
                )
            in_place = _plain(layer) and staging == "off"
            for name, parameter in layer.named_parameters(recurse=False):
                data = parameter.data
                # Quantised weights are received on the host, because the GPU has no room for the model twice.
                place = staging if staging != "off" else "host" if data.itemsize == 1 else "device"
                own = data if in_place else refit_worker.beside(data.shape, data.dtype, data.device, place)
                parameters[f"{prefix}.{name}" if prefix else name] = own
                self._staged += [] if in_place else [(parameter, own)]
        # leaves out an output head that shares the embedding's weight
        super().__init__({name: parameters[name] for name, _ in model.named_parameters() if name in parameters})

    def commit_refit(self, version: int) -> None:
        for parameter, own in self._staged:
            parameter.data.copy_(own)


class Refits:
    """Replaces SGLang's weight update from tensors by weight syncs (refits). Instead of tensors, a request contains an
    order that engines.sglang.client.SglangServer has sent: to join a trainer, or to take part in a refit.
    """

    def __init__(self) -> None:
        self._side: EngineSide | None = None

    def update(self, updater: Any, named_tensors: Any, load_format: str | None = None) -> tuple[bool, str]:
        """Executes an order on every rank of a server. Returns (True, "done") or (False, the errors of all ranks), the
        same on all ranks. Errors are returned, not raised, because an exception would end SGLang.
        """
        from sglang.srt.runtime_context import get_parallel

        try:
            with torch.inference_mode(False), torch.no_grad():
                match named_tensors:
                    case {"verb": "join", "replica": int(replica), "address": [str(host), int(port), str(secret)]}:
                        self._join(updater, Address(host, port, secret), replica)
                    case {"verb": "take part", "version": int(version), "wait_s": float(wait_s)}:
                        refit_worker.take_part(self._side, version, wait_s)
                    case _:
                        raise ValueError("this server takes its weights in refits of megatron_rl alone")
            failure = None
        except (RuntimeError, ValueError, OSError) as error:
            failure = f"rank {updater.tp_rank}: {error}"
        told = [failure] if _tp_size() == 1 else all_gather(failure, get_parallel().tp_group.cpu_group)
        failures = [each for each in told if each is not None]
        if not failures:
            return True, "done"
        if updater.tp_rank == 0:
            _log.warning("an order was not carried out: %s", "; ".join(failures))
        return False, "; ".join(failures)

    def _join(self, updater: Any, address: Address, replica: int) -> None:
        if self._side is not None:
            self._side.close()
            self._side = None
        model = updater.get_model()
        self._side = refit_worker.join(
            address, functools.partial(SglangLanding, model), next(model.parameters()).device, replica=replica,
            tp=_tp_size(), tp_rank=updater.tp_rank,
        )  # fmt: skip


def _hook(target: str, stand_in: Any) -> None:
    """Replaces the function `target` of SGLang by `stand_in`. Raises RuntimeError if this version of SGLang has no such
    function, or if the replacement has no effect.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    try:
        own = pkgutil.resolve_name(target)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(f"this SGLang has no {target}: use a version of docs/reference/engines_sglang.md") from error
    HookRegistry.register(target, stand_in, HookType.REPLACE)
    HookRegistry.apply_hooks()
    if pkgutil.resolve_name(target) is own:
        raise RuntimeError(f"this SGLang keeps its own {target}: its log says why")


def _meeting_place() -> str:
    """Creates a temporary directory for the file by which this server's ranks find each other, and returns its path.
    Also removes the directories that ended processes created here, because SGLang ends by SIGKILL without cleaning up.
    """
    prefix = f"megatron_rl-{os.getuid()}-"
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another process removed the directory first, or the directory is in use
            if time.time() - left.stat().st_mtime > UP_S:
                _lock(left)
                shutil.rmtree(left)
    own = tempfile.mkdtemp(prefix=prefix)
    with contextlib.suppress(OSError):  # if the file system has no flock, the directory is never removed automatically
        _lock(own)
    return own


def _lock(directory: str | Path) -> None:
    """Locks a directory until this process ends. Raises OSError if another process holds the lock."""
    fcntl.flock(os.open(directory, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)


def _freeze_gc(arguments: Any) -> None:
    """Sends a request to SGLang's /freeze_gc route with the job's token. Replaces the request that SGLang sends to this
    route after it has started, because SGLang's request has no token.
    """
    token = read_own(Path(os.environ[TOKEN_FILE])).strip()
    request = urllib.request.Request(f"{arguments.url()}/freeze_gc", method="POST", headers={HEADER: token})
    end = time.monotonic() + UP_S
    while True:
        try:
            urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=UP_S).close()
            return
        except OSError as error:  # the port may not be open yet
            if time.monotonic() > end:
                _log.warning("the garbage collector was not told that what is there now stays: %s", error)
                return
        time.sleep(0.1)


def _tp_size() -> int:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_size


def _plain(layer: nn.Module) -> bool:
    """Returns whether SGLang uses the layer's parameters in the form in which they were loaded."""
    from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod

    method = getattr(layer, "quant_method", None)
    return method is None or type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


if __name__ == "__main__":
    main()
