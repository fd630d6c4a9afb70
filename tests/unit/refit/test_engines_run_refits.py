"""Refits of a pool's servers as a run makes them: all servers come to the weights, late ones too, and one that reaches
nobody is tried again.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fake_servers import ADDRESS, RunEngines, engines_in, expected, failed_at
from fake_vllm import PAUSE, UPDATE
from one_process import CommandsAtOnce, OneProcess
from safetensors.torch import save_file
from specs import problems as problems_of

from megatron_rl.config.schema import (
    Embedded,
    Model,
    PromptSet,
    RefitConfig,
    RoleConfig,
    Rollouts,
    TrainConfig,
    Use,
)  # fmt: skip
from megatron_rl.engines.protocol import EngineError, Sampling, complete
from megatron_rl.engines.vllm.settings import Vllm
from megatron_rl.messages.commands import Commands
from megatron_rl.refit.trainer_side import TrainerSide
from megatron_rl.refit.transport import RefitError
from megatron_rl.session.adapter_refit import AdapterFiles
from megatron_rl.session.pool_refit import PoolRefit
from megatron_rl.spec.resolve import engine_of

SAMPLING = Sampling(max_tokens=8, n=2, seed=5)
PROMPTS = [[i + 1, 4] for i in range(6)]


@pytest.fixture
def run_engines(tmp_path):
    with engines_in(tmp_path) as made:
        yield made


def right(groups) -> bool:
    return [[c.tokens.tolist() for c in group] for group in groups] == [
        expected(p, SAMPLING, i) for i, p in enumerate(PROMPTS)
    ]


class Side:
    """The trainer's side of a refit, which fails as often as it is told to."""

    address = ADDRESS

    def __init__(self, failures: int = 0) -> None:
        self.failures, self.calls = failures, []

    def __call__(self, version: int, replicas: list[int]) -> dict[str, float]:
        self.calls.append((version, list(replicas)))
        if len(self.calls) <= self.failures:
            raise RefitError("no engine answered")
        return {"refit/seconds": 0.5}


class Driver:
    def __init__(self) -> None:
        self.lines = []

    def refitted(self, metrics) -> None:
        self.lines.append(metrics)


def pool_refit(side, pool, driver, *, staging: str = "auto", commands: Commands | None = None) -> PoolRefit:
    """Returns the refit of a run with one trainer rank."""
    settings = RefitConfig(timeout_s=5.0, staging=staging)  # type: ignore[arg-type]
    return PoolRefit(commands or CommandsAtOnce(), "generator", [0], side, side.address, pool, driver, settings)


def test_the_runs_refits_bring_all_servers_to_the_weights_and_late_ones_after_them(run_engines: RunEngines):
    fakes = [run_engines.start(0)]
    pool, side, driver = run_engines.open(), Side(), Driver()
    refit = pool_refit(side, pool, driver)
    refit(7)
    fakes.append(run_engines.start(1))
    run_engines.living(2)
    assert right(complete(pool, PROMPTS, SAMPLING)) and side.calls == [(7, [0]), (7, [1])]
    assert all(line.pop("refit/pause_seconds") > 0 for line in driver.lines)
    assert driver.lines == [{"role": "generator", "version": 7, "refit/seconds": 0.5}] * 2
    fakes[1].fail(UPDATE, "error", "error")
    refit(8)
    assert fakes[1].version == "7" and driver.lines[2]["version"] == 8
    failed_at(pool, 1, -1e9)  # long ago
    assert right(complete(pool, PROMPTS, SAMPLING)) and len(side.calls) == 4
    assert len(driver.lines) == 3, "a refresh that failed was written down as one that went well"


def test_late_servers_come_to_the_weights_in_the_drivers_thread_and_in_no_other(run_engines: RunEngines):
    """The pool let only the thread that had made it send weights to late servers, and the driver is another thread."""
    run_engines.start(0)
    commands, pool, side = Commands(OneProcess()), run_engines.open(), Side()
    refit = pool_refit(side, pool, Driver(), commands=commands)

    def drive():
        refit(7)
        run_engines.start(1)
        run_engines.living(2)
        with ThreadPoolExecutor(1) as beside:  # as an episode
            assert right(beside.submit(complete, pool, PROMPTS, SAMPLING).result())
        assert side.calls == [(7, [0])]
        assert right(complete(pool, PROMPTS, SAMPLING))

    commands.drive(drive)
    assert side.calls == [(7, [0]), (7, [1])]


class StagedSide(TrainerSide):
    """A trainer's side whose servers write on while it sends. `during`: called meanwhile."""

    address = ADDRESS

    def __init__(self, during) -> None:
        self.during = during

    def __call__(self, version: int, replicas: list[int]) -> dict[str, float]:
        return self.during(version) or {"refit/seconds": 0.5}


def test_servers_write_with_their_weights_until_staged_ones_have_come_and_pause_only_then(run_engines: RunEngines):
    fakes, seen = [run_engines.start(i) for i in range(2)], []
    pool, driver = run_engines.open(), Driver()

    def during(version: int) -> None:
        if version == 2:
            assert right(complete(pool, PROMPTS, SAMPLING)) and pool.version == 1
            assert [fake.version for fake in fakes] == ["1", "1"]
        seen.append([fake.count(PAUSE) for fake in fakes])

    refit = pool_refit(StagedSide(during), pool, driver, staging="host")
    run_engines.living(2)
    refit(1)
    refit(2)
    assert seen == [[0, 0], [1, 1]] and [fake.version for fake in fakes] == ["2", "2"] and pool.version == 2
    assert all(0 < line["refit/pause_seconds"] < 5 for line in driver.lines) and len(driver.lines) == 2
    assert right(complete(pool, PROMPTS, SAMPLING))


def test_servers_write_on_with_their_weights_where_staged_ones_do_not_come(run_engines: RunEngines):
    fake, tries = run_engines.start(), []

    def during(version: int) -> None:
        tries.append(version)
        if tries.count(2) == 1 or version == 3:
            raise RefitError("no engine answered")

    pool, driver = run_engines.open(replicas=1), Driver()
    refit = pool_refit(StagedSide(during), pool, driver, staging="host")
    refit(1)
    refit(2)
    assert tries == [1, 2, 2] and fake.count(PAUSE) == 2 and fake.version == "2"
    with pytest.raises(EngineError, match="3 refits to version 3 reached no engine"):
        refit(3)
    assert fake.count(PAUSE) == 2 and pool.version == 2 and right(complete(pool, PROMPTS, SAMPLING))


def test_a_server_that_dies_between_staging_and_the_pause_is_out_and_the_other_goes_on(run_engines: RunEngines):
    fakes = [run_engines.start(i) for i in range(2)]
    pool, driver = run_engines.open(), Driver()
    during = lambda version: fakes[1].close() if version == 2 else None  # noqa: E731
    refit = pool_refit(StagedSide(during), pool, driver, staging="host")
    run_engines.living(2)
    refit(1)
    refit(2)
    assert right(complete(pool, PROMPTS, SAMPLING))
    assert [m.listing.replica for m in pool.members.serving()] == [0] and fakes[0].version == "2"


@pytest.mark.parametrize(
    ("engine", "ahead", "asked", "staging"),
    [
        (Vllm(), 0, "auto", "off"),
        (Vllm(), 1, "auto", "host"),
        (Vllm(), "auto", "auto", "host"),
        (Vllm(), 1, "off", "off"),
        (Vllm(), 0, "device", "device"),
        (Vllm(colocate=True), 0, "auto", "off"),
        (Embedded(), 0, "auto", "off"),
    ],
)
def test_servers_stage_by_default_where_they_write_during_refits(engine, ahead, asked, staging):
    config = TrainConfig(
        roles={"generator": RoleConfig(model=Model(path="m"))}, recipe=Use(target="megatron_rl.recipes.grpo:Grpo"),
        data=PromptSet(path="data.jsonl"), engine=engine, refit=RefitConfig(staging=asked),
        rollouts=Rollouts(max_staleness=ahead),
    )  # fmt: skip
    assert engine_of(config).refit.staging == staging
    if isinstance(engine, Embedded):
        refused = problems_of(replace(config, refit=RefitConfig(staging="host")), 1, to_come=True)
        assert any("refit.staging = 'host' with engine.kind = 'embedded'" in line for line in refused)


def test_a_refit_that_reaches_no_server_is_tried_again_and_then_ends_the_run(run_engines: RunEngines):
    fake = run_engines.start()
    pool, side, driver = run_engines.open(replicas=1), Side(failures=1), Driver()
    refit = pool_refit(side, pool, driver)
    fake.fail(UPDATE, "error")
    refit(1)
    assert len(side.calls) == 2 and len(driver.lines) == 1 and fake.version == "1"
    fake.fail(UPDATE, *["error"] * 3)
    with pytest.raises(EngineError, match="3 refits to version 2 reached no engine"):
        refit(2)


def test_the_seconds_of_an_adapters_refit_are_those_until_the_servers_have_it(run_engines: RunEngines, tmp_path):
    """They ended before the servers loaded the files; and for a server that joined later, they began with the write."""
    run_engines.start(0)
    pool, driver, times = run_engines.open(), Driver(), []

    def write(place) -> None:
        times.append(time.perf_counter())
        place.mkdir(parents=True)
        save_file({"a": torch.zeros(250)}, place / "adapter_model.safetensors")

    def end() -> int:
        reached = ended()
        times.append(time.perf_counter())
        return reached

    ended, pool.end_refit = pool.end_refit, end
    policy = SimpleNamespace(export=SimpleNamespace(write_adapter=write))
    files = AdapterFiles(OneProcess(), policy, tmp_path / "adapters")
    refit = pool_refit(files, pool, driver)
    for version in (1, 2, 3):
        refit(version)
    size = (tmp_path / "adapters/v3/adapter_model.safetensors").stat().st_size
    assert [line["refit/gigabytes"] for line in driver.lines] == [size / 1e9] * 3
    assert all(line["refit/seconds"] >= times[2 * k + 1] - times[2 * k] for k, line in enumerate(driver.lines))
    assert {place.name for place in (tmp_path / "adapters").iterdir()} == {"v2", "v3"}
    run_engines.start(1)
    run_engines.living(2)
    before = time.perf_counter()
    assert right(complete(pool, PROMPTS, SAMPLING)) and len(driver.lines) == 4
    assert driver.lines[3]["refit/seconds"] < time.perf_counter() - before
