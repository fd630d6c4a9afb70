"""metrics.jsonl, its sinks and the console."""

import io
import json
import logging
import math
import re
import socket
import struct
import urllib.error
import urllib.request

import pytest
import wandb_log

from megatron_rl.config.schema import Sinks
from megatron_rl.run import console as console_module
from megatron_rl.run.console import RunConsole, before_after, headline, line
from megatron_rl.run.metric_sinks import Prometheus, TensorBoard, WandB, configured_sinks
from megatron_rl.run.metrics import MetricsRow, Sample, Sink, Stopwatch, Tracker, read_metrics


class Recorder(Sink):
    """A sink that keeps what it gets."""

    name = "recorder"

    def __init__(self):
        self.rows = []
        self.events = []

    def open(self):
        self.events.append("open")

    def log(self, row):
        self.rows.append(row)

    def close(self):
        self.events.append("close")


class Broken(Recorder):
    name = "broken"

    def __init__(self, where):
        super().__init__()
        self.where = where
        self.calls = 0

    def open(self):
        if self.where == "open":
            self.calls += 1
            raise ConnectionError("no network")

    def log(self, row):
        self.calls += 1
        raise RuntimeError("disk full")


def test_times_are_held_apart_and_order_does_not_matter(tmp_path):
    files = []
    for seconds, names in ((1.0, ("b", "a")), (2.0, ("a", "b"))):
        tracker = Tracker(tmp_path / str(seconds) / "metrics.jsonl")
        tracker.log(3, "generator", {**{name: 0.1 for name in names}, "seconds/rollout": seconds}, iteration=7)
        raw = json.loads(tracker.path.read_text())
        assert raw.pop("time") == {"rollout": seconds}
        files.append(json.dumps(raw))
    assert files[0] == files[1]
    assert json.loads(files[0]) == {"iteration": 7, "cycle": 3, "scope": "generator", "metrics": {"a": 0.1, "b": 0.1}}


def test_floats_come_back_bit_for_bit(tmp_path):
    values = {"third": 1 / 3, "tiny": 5e-324, "minus_zero": -0.0, "large": 1.7976931348623157e308, "count": 12}
    Tracker(tmp_path / "metrics.jsonl").log(0, "generator", values, iteration=0)
    (row,) = read_metrics(tmp_path)
    for name, value in values.items():
        assert struct.pack("d", row.metrics[name]) == struct.pack("d", value)


def test_values_that_are_not_finite_are_strings_and_told_once(tmp_path, caplog):
    tracker = Tracker(tmp_path / "metrics.jsonl")
    with caplog.at_level(logging.WARNING):
        for iteration in range(3):
            tracker.log(0, "verifier", {"loss": math.nan, "grad_norm": math.inf, "low": -math.inf}, iteration=iteration)
    assert len(caplog.records) == 3  # one per metric
    raw = json.loads(tracker.path.read_text().splitlines()[0], parse_constant=pytest.fail)
    assert raw["metrics"] == {"grad_norm": "inf", "loss": "nan", "low": "-inf"}
    row = read_metrics(tmp_path)[2]
    assert math.isnan(row.metrics["loss"]) and row.metrics["grad_norm"] == math.inf


def test_a_value_that_is_no_number_is_refused_by_name(tmp_path):
    with pytest.raises(TypeError, match="'reward/x' is 'high'"):
        Tracker(tmp_path / "metrics.jsonl").log(0, "generator", {"reward/x": "high"}, iteration=0)


def test_resume_drops_later_iterations_and_a_half_written_line(tmp_path):
    tracker = Tracker(tmp_path / "metrics.jsonl")
    for iteration in range(5):
        tracker.log(iteration, "generator", {"loss": iteration}, iteration=iteration)
    whole = tracker.path.read_bytes().splitlines(keepends=True)
    tracker.path.write_bytes(b"".join(whole) + b'{"iteration": 2, "cycle"')
    assert [row.iteration for row in read_metrics(tmp_path)] == [0, 1, 2, 3, 4]
    assert tracker.truncate(3) == 3
    assert tracker.path.read_bytes() == b"".join(whole[:3])
    tracker.log(3, "generator", {"loss": 3}, iteration=3)
    assert tracker.path.read_bytes() == b"".join(whole[:4])
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_last_line_without_its_newline_is_not_kept(tmp_path):
    tracker = Tracker(tmp_path / "metrics.jsonl")
    tracker.log(0, "generator", {"loss": 1}, iteration=0)
    tracker.path.write_bytes(tracker.path.read_bytes().rstrip(b"\n"))
    assert tracker.truncate(9) == 1
    assert tracker.path.read_bytes() == b""


def test_hostile_damaged_line_is_left_out_and_named(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").write_text(
        'nonsense\n{"iteration": 0, "cycle": 0, "scope": "a", "time": {}, "metrics": {}}\n'
    )
    assert [row.iteration for row in read_metrics(tmp_path)] == [0]
    assert "metrics.jsonl: line 1 of 2 cannot be read" in caplog.text


@pytest.mark.parametrize(("where", "calls"), [("open", 1), ("log", 3)])
def test_a_broken_sink_is_counted_told_once_and_stops_nothing(tmp_path, caplog, where, calls):
    broken, good = Broken(where), Recorder()
    with caplog.at_level(logging.WARNING), Tracker(tmp_path / "metrics.jsonl", [broken, good]) as tracker:
        for iteration in range(3):
            tracker.log(iteration, "generator", {"loss": 1.0}, iteration=iteration)
    assert tracker.failures == {"broken": calls, "recorder": 0}
    assert broken.calls == calls  # a sink that could not be opened is not tried again
    assert len(caplog.records) == 1 and "broken" in caplog.text
    assert [row.iteration for row in good.rows] == [0, 1, 2]
    assert good.events == ["open", "close"]
    assert len(read_metrics(tmp_path)) == 3


def test_tensorboard_holds_every_scalar_of_the_resumed_run_once(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for first, last in ((0, 4), (2, 4)):  # killed after iteration 3, resumed at 2
        with Tracker(tmp_path / "metrics.jsonl", [TensorBoard(tmp_path / "tb", first_iteration=first)]) as tracker:
            tracker.truncate(first)
            for iteration in range(first, last):
                tracker.log(
                    iteration, "generator", {"loss": iteration + first / 100, "seconds/train": 1.0}, iteration=iteration
                )
            assert tracker.failures == {"tensorboard": 0}
    events = accumulator.EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"generator/loss", "generator/seconds/train"}
    assert [(e.step, round(e.value, 2)) for e in events.Scalars("generator/loss")] == [
        (0, 0.0),
        (1, 1.0),
        (2, 2.02),
        (3, 3.02),
    ]


SAMPLES = [
    Sample(
        group="0:a", prompt="1 + 1?", response="2 <script>alert(1)</script>\n# two", rewards={"outcome": 1.0}, length=2
    ),
    Sample(group="0:a", prompt="1 + 1?", response="3", rewards={"outcome": 0.0}, length=1),
]


def test_tensorboard_holds_samples_as_code(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with Tracker(tmp_path / "metrics.jsonl", [TensorBoard(tmp_path / "tb", num_samples=2)]) as tracker:
        assert tracker.num_samples == 2
        tracker.log(0, "generator", {"loss": 1.0}, iteration=7)
        tracker.show(7, "generator", SAMPLES)
        assert tracker.failures == {"tensorboard": 0}
    events = accumulator.EventAccumulator(str(tmp_path / "tb"), size_guidance={"tensors": 0})
    events.Reload()
    (first,) = events.Tensors("generator/rollout_0/text_summary")
    text = first.tensor_proto.string_val[0].decode()
    assert first.step == 7 and text.startswith("outcome 1; 2 tokens\n")
    assert "    2 <script>alert(1)</script>\n    # two" in text  # a block of code, and no markup


def test_sinks_without_texts_and_lines_alone_get_none(tmp_path):
    recorder = Recorder()
    with Tracker(tmp_path / "metrics.jsonl", [recorder]) as tracker:
        tracker.log(0, "generator", {"loss": 1.0}, iteration=0)
        tracker.show(0, "generator", SAMPLES)
        tracker.keep_model("generator", tmp_path)
        assert tracker.num_samples == 0 and tracker.failures == {"recorder": 0}


def test_wandb_gets_config_tags_tables_and_models_and_all_starts_are_one_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    for iteration in range(2):  # the second is the start after an interruption
        sink = WandB(
            "project", "name", tmp_path / "logs", entity="team", tags=["a", "b"], num_samples=2,
            config={"lr": 0.5, "run": {"seed": 3}},
        )  # fmt: skip
        with Tracker(tmp_path / "metrics.jsonl", [sink]) as tracker:
            tracker.log(0, "generator", {"loss": 1.0}, iteration=iteration)
            tracker.show(iteration, "generator", SAMPLES)
            tracker.keep_model("generator", tmp_path / "model")
            assert tracker.failures == {"wandb": 0}
    starts = sorted((tmp_path / "logs/wandb").glob("offline-run-*"))
    kept = (tmp_path / "logs/wandb_id").read_text()
    # two starts within one second differ in a number at the end
    assert len(starts) == 2 and all(re.fullmatch(rf".*-{kept}(-\d+)?", start.name) for start in starts)
    for iteration, start in enumerate(starts):
        records = list(wandb_log.read(start))
        (run,) = [r.run for r in records if r.WhichOneof("record_type") == "run"]
        assert (run.run_id, run.project, run.entity, run.display_name) == (kept, "project", "team", "name")
        assert sorted(run.tags) == ["a", "b"]
        settings = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert settings["lr"] == 0.5 and settings["run"] == {"seed": 3}
        history = [
            {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in r.history.item}
            for r in records
            if r.WhichOneof("record_type") == "history"
        ]
        assert any(row.get("generator/loss") == 1.0 and row["iteration"] == iteration for row in history)
        assert any("generator/rollouts" in "".join(row) for row in history)
        (table,) = start.rglob("*.table.json")
        assert json.loads(table.read_text())["data"][0][3] == SAMPLES[0].response
        artefacts = [r.request.log_artifact.artifact for r in records if r.request.HasField("log_artifact")]
        artefacts += [r.artifact for r in records if r.WhichOneof("record_type") == "artifact"]
        (model,) = [a for a in artefacts if a.type == "model"]
        (entry,) = model.manifest.contents
        assert model.name == "name-generator" and entry.ref == (tmp_path / "model/config.json").as_uri()


def test_prometheus_reads_the_newest_metrics_over_http(tmp_path):
    said = []
    sink = Prometheus("127.0.0.1", 0, say=said.append)
    with Tracker(tmp_path / "metrics.jsonl", [sink]) as tracker:
        for iteration in range(2):
            tracker.log(
                iteration // 2,
                "generator",
                {"reward/trained": iteration / 2, 'a"b\n': math.nan, "seconds/train": 1.5},
                iteration=iteration,
            )
        tracker.log(0, "verifier", {"loss": math.inf}, iteration=1)
        tracker.watch(lambda: {"generator_0": {"lives": 1.0, "sequences": 12.0}})
        assert said == [f"metrics for Prometheus: http://127.0.0.1:{sink.port}/metrics"]
        with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/other", timeout=10)
    lines = text.splitlines()
    assert 'megatron_rl_metric{scope="generator",name="reward/trained"} 0.5' in lines
    assert 'megatron_rl_metric{scope="generator",name="a\\"b\\n"} NaN' in lines
    assert 'megatron_rl_metric{scope="verifier",name="loss"} +Inf' in lines
    assert (
        'megatron_rl_iteration{scope="generator"} 2.0' in lines and 'megatron_rl_cycle{scope="generator"} 1.0' in lines
    )
    assert 'megatron_rl_seconds{scope="generator",phase="train"} 1.5' in lines
    assert 'megatron_rl_engine{server="generator_0",name="sequences"} 12.0' in lines
    assert lines.count("# TYPE megatron_rl_metric gauge") == 1
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=1)


def test_the_endpoint_for_prometheus_is_off_and_on_the_loopback_address_unless_asked_for():
    assert Sinks().prometheus_port is None and Sinks().prometheus_host == "127.0.0.1"


def test_a_silent_connection_keeps_nobody_from_the_figures(tmp_path):
    sink = Prometheus("127.0.0.1", 0)
    with Tracker(tmp_path / "metrics.jsonl", [sink]) as tracker:
        tracker.log(0, "generator", {"loss": 1.0}, iteration=0)
        with (
            socket.create_connection(("127.0.0.1", sink.port)),
            urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=20) as answer,
        ):
            assert b"megatron_rl_iteration" in answer.read()


def test_the_config_chooses_the_sinks(tmp_path):
    def chosen(sinks):
        return [sink.name for sink in configured_sinks(sinks, tmp_path, run_name="r", config={})]

    assert chosen(Sinks()) == []
    assert chosen(Sinks(tensorboard=True, wandb_project="p")) == ["tensorboard", "wandb"]
    assert chosen(Sinks(prometheus_port=0)) == ["prometheus"]


def test_stopwatch_adds_up_by_name_and_starts_again():
    watch = Stopwatch()
    with watch("rollout"), watch("reward"):
        pass
    watch.add("rollout", 10.0)
    taken = watch.take()
    assert set(taken) == {"seconds/rollout", "seconds/reward"}
    assert 10.0 <= taken["seconds/rollout"] < 11.0
    assert watch.take() == {}


def test_stopwatch_counts_what_raised():
    watch = Stopwatch()
    with pytest.raises(KeyError), watch("train"):
        raise KeyError
    assert "seconds/train" in watch.take()


def row(iteration=11, scope="generator", metrics=None, time=None):
    return MetricsRow(iteration=iteration, cycle=4, scope=scope, time=time or {}, metrics=metrics or {})


def test_plain_lines_when_no_terminal(tmp_path):
    stream = io.StringIO()
    with RunConsole(tmp_path / "logs/driver.log", 40, stream=stream) as console:
        console.log(
            row(metrics={"reward/outcome": 0.5, "loss": -0.0123, "alpha": 0.1}, time={"rollout": 2.0, "train": 1.5})
        )
        console.log(row(scope="eval", metrics={"generator/accuracy": 0.25}))
        logging.getLogger("megatron_rl.rewards").warning("3 of 9 gradings timed out")
    expected = [
        "iteration 12/40 (cycle 5)  generator  reward 0.500  loss -0.012  3.5 s",
        "after iteration 11  eval  generator/accuracy 0.250",
    ]
    expected.append("warning: 3 of 9 gradings timed out")
    assert stream.getvalue().splitlines() == expected
    logged = (tmp_path / "logs/driver.log").read_text().splitlines()
    assert [text.split(" ", 2)[2] for text in logged] == expected
    assert logging.getLogger("megatron_rl").handlers == []


def test_a_stream_that_is_no_terminal_gets_plain_lines_although_colours_are_forced(tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as ipykernel and CI do
    stream = io.StringIO()
    with RunConsole(tmp_path / "driver.log", 40, stream=stream) as console:
        console.log(row(0, metrics={"reward": 0.5}))
    assert stream.getvalue() == "iteration 1/40 (cycle 5)  generator  reward 0.500\n"


def test_a_terminal_gets_one_row_per_role_and_the_progress(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    with RunConsole(tmp_path / "driver.log", 40, stream=stream) as console:
        for iteration, reward in enumerate((0.0, 1.0)):
            console.log(row(iteration, metrics={"reward": reward}))
        console.log(row(2, scope="verifier", metrics={"reward": 0.75, "length": 33.0}))
    last = stream.getvalue().rsplit("role", 1)[1]
    assert "generator" in last and "1.000" in last and "0.100" in last  # last and smoothed reward
    assert "verifier" in last and "33.0" in last
    assert "3/40" in last
    assert len((tmp_path / "driver.log").read_text().splitlines()) == 3


class Terminal(io.StringIO):
    def isatty(self):
        return True


def screens(text):
    """The lines that a terminal was told to show, without colours and movements."""
    return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", part).rstrip() for part in re.split(r"[\r\n]+", text)]


@pytest.mark.parametrize("width", ["80", "200"])
def test_the_live_table_fits_80_columns_with_evaluations_and_the_time_to_go(tmp_path, monkeypatch, width):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", width)
    clock = iter(range(0, 10**6, 30))
    monkeypatch.setattr(console_module.time, "monotonic", lambda: float(next(clock)))
    stream = Terminal()
    every = {names[0]: -123.456 for names in console_module.COLUMNS.values()} | {"update": 12345.0}
    accuracy = "generator/a_metric_with_a_name_that_is_longer_than_any_table_has_room_for"
    with RunConsole(tmp_path / "driver.log", 40, stream=stream) as console:
        console.log(
            MetricsRow(iteration=0, cycle=0, scope="eval", time={}, metrics={"g/accuracy": 0.25, accuracy: 0.5})
        )
        for iteration in range(3):
            console.log(row(iteration, scope="a_role_with_a_name", metrics=every, time={"rollout": 12345.6}))
            console.log(row(iteration, scope="verifier", metrics=every))
        console.log(
            MetricsRow(iteration=3, cycle=2, scope="eval", time={}, metrics={"g/accuracy": 0.75, accuracy: 0.5})
        )
    lines = screens(stream.getvalue())
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    last = "\n".join(lines[-20:])
    assert re.search(r"evaluation +iteration 0 +iteration 3", last) and re.search(r"g/accuracy +0\.250 +0\.750", last)
    assert re.search(r"3/40 cycle 5 .* \d+ min to go", last), last
    assert "reward" in last and "update" in last


def test_the_table_of_the_end_has_the_metrics_before_and_after():
    before = {"g/accuracy": 0.25, "g/num_problems": 8.0}
    assert before_after(before, {"g/accuracy": 0.5, "g/num_problems": 8.0, "v/f1": 0.125}).splitlines() == [
        "held-out problems    before     after",
        "g/accuracy            0.250     0.500",
        "v/f1                      -     0.125",
    ]


def test_the_headline_takes_the_best_known_name():
    assert headline({"reward/a": 1.0, "reward/outcome": 2.0}) == {"reward": 2.0}
    assert headline({"reward/b": 1.0, "reward/a": 2.0}) == {"reward": 2.0}
    assert headline({"reward/outcome": 1.0, "reward/trained": 2.0}) == {"reward": 2.0}
    assert headline({"generator/accuracy": 1.0}) == {"generator/accuracy": 1.0}
    assert headline({"answers": 2.5, "tool_calls": 1.0, "length": 8.0}) == {"length": 8.0, "answers": 2.5}
    assert line(row(metrics={"kl_ref": 0.00001}), None) == "iteration 12 (cycle 5)  generator  kl 1.0e-05"
