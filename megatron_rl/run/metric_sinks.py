"""Sends a run's metrics, sample rollouts and models to TensorBoard, Weights & Biases and Prometheus."""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from megatron_rl.config.run import Sinks
from megatron_rl.lib.regular_files import read_text
from megatron_rl.run.atomic_files import write_text
from megatron_rl.run.metrics import MetricsRow, Sample, Sink
from megatron_rl.run.run_directory import WANDB_ID

SAMPLE_COLUMNS = ("iteration", "group", "prompt", "response", "rewards", "length")
HELPS = {  # {name of a Prometheus metric without its prefix: its HELP text}
    "iteration": "number of the newest iteration, from 1",
    "cycle": "number of the newest cycle, from 1",
    "metric": "metrics of the newest line of metrics.jsonl",
    "seconds": "seconds of the phases of the newest iteration",
    "speed": "rates of the newest update, and seconds of its parts",
    "engine": "what each engine server does: lives, serves, version of its weights, sequences and requests under way",
}
_NOT_FINITE = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}  # {Python's repr of a float: Prometheus' text for it}
_LABEL = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class TensorBoard(Sink):
    """A metrics sink that writes scalars `scope/metric` over iterations, and sample rollouts as texts, to TensorBoard
    files.

    `first_iteration`: iteration at which the run resumes. Points of an interrupted run at this and later iterations are
    hidden.
    """

    name = "tensorboard"

    def __init__(self, directory: Path, *, first_iteration: int = 0, num_samples: int = 0) -> None:
        self._directory = directory
        self._first_iteration = first_iteration
        self.num_samples = num_samples

    def open(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._directory), purge_step=self._first_iteration)

    def log(self, row: MetricsRow) -> None:
        for name, value in row.flat.items():
            self._writer.add_scalar(name, value, row.place[0])
        self._writer.flush()

    def show(self, iteration: int, scope: str, samples: Sequence[Sample]) -> None:
        """Writes each sample as a text. Prompts and responses are code blocks, so that they are not rendered as
        markup."""
        for place, sample in enumerate(samples):
            texts = [_as_code(sample.prompt), "---", _as_code(sample.response)]
            text = "\n\n".join([f"{sample.told_rewards}; {sample.length} tokens", *texts])
            self._writer.add_text(f"{scope}/rollout_{place}", text, iteration)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB(Sink):
    """A metrics sink that sends scalars `scope/metric`, the config, tables of sample rollouts, and references to the
    final models' directories to Weights & Biases.

    Scalars have a separate `iteration` axis, so that a resumed run may log earlier iterations again.
    """

    name = "wandb"

    def __init__(
        self, project: str, run_name: str, directory: Path, *, entity: str | None = None, tags: Sequence[str] = (),
        config: Mapping[str, Any] | None = None, num_samples: int = 0,
    ) -> None:  # fmt: skip
        self._project, self._entity, self._tags = project, entity, tuple(tags)
        self._run_name = run_name
        self._directory = directory
        self._config = dict(config or {})
        self.num_samples = num_samples

    def open(self) -> None:
        import wandb

        self._directory.mkdir(parents=True, exist_ok=True)
        kept = self._directory / WANDB_ID
        if not kept.exists():
            write_text(kept, uuid.uuid4().hex[:12])
        self._run = wandb.init(
            project=self._project, entity=self._entity, name=self._run_name, tags=self._tags, config=self._config,
            dir=str(self._directory), id=read_text(kept).strip(), resume="allow",
        )  # fmt: skip
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def log(self, row: MetricsRow) -> None:
        iteration, cycle = row.place
        self._run.log({**row.flat, "iteration": iteration, "cycle": cycle})

    def show(self, iteration: int, scope: str, samples: Sequence[Sample]) -> None:
        import wandb

        rows: list[Any] = [[iteration, s.group, s.prompt, s.response, s.told_rewards, s.length] for s in samples]
        table = wandb.Table(columns=list(SAMPLE_COLUMNS), data=rows)
        self._run.log({f"{scope}/rollouts": table, "iteration": iteration})

    def keep_model(self, role: str, directory: Path) -> None:
        """Logs a model as an artifact that refers to its directory. The model is not uploaded."""
        import wandb

        name = re.sub(r"[^\w.-]", "-", f"{self._run_name}-{role}")
        artefact = wandb.Artifact(name, type="model", metadata={"role": role, "path": str(directory.absolute())})
        artefact.add_reference(directory.absolute().as_uri(), checksum=False)
        self._run.log_artifact(artefact)

    def close(self) -> None:
        self._run.finish()


class Prometheus(Sink):
    """A metrics sink: an HTTP server that returns the newest metrics at GET /metrics in the text format of Prometheus.

    There is no authentication; texts of rollouts and settings are not served. Scopes and names of metrics are labels.
    """

    name = "prometheus"

    def __init__(self, host: str, port: int, *, say: Callable[[str], None] = lambda text: None) -> None:
        self._host, self._port, self._say = host, port, say
        self._rows: dict[str, MetricsRow] = {}  # {scope: its newest row}
        self._loads: Callable[[], Mapping[str, Mapping[str, float]]] = dict  # returns {server: {name: value}}
        self._change = threading.Lock()

    def open(self) -> None:
        """Starts the HTTP server. Raises OSError if the address cannot be used."""
        sink = self

        class Answer(BaseHTTPRequestHandler):
            # Timeout of a request in seconds; requests are served one at a time, so a stalled request blocks all others
            timeout = 2.0

            def do_GET(self) -> None:
                is_metrics = self.path.partition("?")[0] == "/metrics"
                body = sink.text().encode() if is_metrics else b"GET /metrics\n"
                self.send_response(200 if is_metrics else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """No-op: requests are not logged, because they arrive every few seconds."""

        self._server = HTTPServer((self._host, self._port), Answer)
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()
        self._say(f"metrics for Prometheus: http://{self._host}:{self.port}/metrics")

    @property
    def port(self) -> int:
        """Returns the port of the HTTP server."""
        return int(self._server.server_address[1])

    def watch(self, loads: Callable[[], Mapping[str, Mapping[str, float]]]) -> None:
        """Sets the function that returns the state of each engine server, {server: {name: value}}."""
        self._loads = loads

    def log(self, row: MetricsRow) -> None:
        with self._change:
            self._rows[row.scope] = row

    def text(self) -> str:
        """Returns the newest metrics of every scope in the text format of Prometheus."""
        with self._change:
            rows = dict(self._rows)
        parts: dict[str, list[tuple[dict[str, str], float]]] = {name: [] for name in HELPS}
        for scope, row in rows.items():
            iteration, cycle = row.place
            parts["iteration"].append(({"scope": scope}, float(iteration + 1)))
            parts["cycle"].append(({"scope": scope}, float(cycle + 1)))
            parts["metric"] += [({"scope": scope, "name": name}, value) for name, value in row.metrics.items()]
            parts["seconds"] += [({"scope": scope, "phase": name}, value) for name, value in row.time.items()]
            parts["speed"] += [({"scope": scope, "name": name}, value) for name, value in row.speed.items()]
        for server, loads in self._loads().items():
            parts["engine"] += [({"server": server, "name": name}, value) for name, value in loads.items()]
        lines: list[str] = []
        for name, samples in parts.items():
            lines += [f"# HELP megatron_rl_{name} {HELPS[name]}", f"# TYPE megatron_rl_{name} gauge"]
            for labels, value in samples:
                labels_text = ",".join(f'{label}="{text.translate(_LABEL)}"' for label, text in labels.items())
                lines.append(f"megatron_rl_{name}{{{labels_text}}} {_NOT_FINITE.get(repr(value), repr(value))}")
        return "\n".join(lines) + "\n"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def configured_sinks(
    settings: Sinks, logs: Path, *, run_name: str, config: Mapping[str, Any], first_iteration: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> list[Sink]:  # fmt: skip
    """Returns the sinks that the settings enable.

    `logs`: directory of the sinks' files. `config`: the run's complete config as plain values, for Weights & Biases.
    `first_iteration`: the iteration at which a resumed run continues. `say`: function that shows a message to the user,
    such as the address of the Prometheus sink.
    """
    chosen = list[Sink]()
    if settings.tensorboard:
        chosen.append(TensorBoard(logs / "tensorboard", first_iteration=first_iteration, num_samples=settings.samples))
    if settings.wandb_project is not None:
        chosen.append(
            WandB(
                settings.wandb_project, run_name, logs, entity=settings.wandb_entity, tags=settings.wandb_tags,
                config=config, num_samples=settings.samples,
            )
        )  # fmt: skip
    if settings.prometheus_port is not None:
        chosen.append(Prometheus(settings.prometheus_host, settings.prometheus_port, say=say))
    return chosen


def _as_code(text: str) -> str:
    """Returns a text as an indented Markdown code block."""
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])
