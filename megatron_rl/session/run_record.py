"""Reads the files of a run directory. Damaged files and lines are skipped, and a message about each is added to a
list."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.config.files import read_yaml
from megatron_rl.config.schema import ConfigError, Reward
from megatron_rl.evaluation.samples import read_samples
from megatron_rl.evaluation.statistics import Interval
from megatron_rl.lib.regular_files import read_text
from megatron_rl.lib.user_code import one_line
from megatron_rl.run import json_lines
from megatron_rl.run.checkpoint import read_json
from megatron_rl.run.metrics import MetricsRow, each_metric
from megatron_rl.run.run_directory import FAILED, RunDirectory
from megatron_rl.training.store import StoreError, iteration_files, read_rows


class RunRecord:
    """Reads the files of one run for the report and the status. Its methods do not raise for damaged files.

    `damage`: a message for every file that could not be read completely.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = RunDirectory(Path(directory))
        self.damage: list[str] = []
        self._config: Mapping[str, Any] | None = None

    def metrics(self) -> list[MetricsRow]:
        """Returns the rows of metrics.jsonl."""
        rows: list[MetricsRow] = []
        self.each_metric(rows.append)
        return rows

    def each_metric(self, take: Callable[[MetricsRow], object]) -> None:
        """Calls the function `take` once for each row of metrics.jsonl. If it raises ValueError, the row is recorded as
        damaged."""
        damage = each_metric(self.directory.path, take)
        if damage is not None:
            self.damage.append(damage)

    def each_refit(self, take: Callable[[dict[str, Any]], object]) -> None:
        """Calls the function `take` once for each line of refits.jsonl. Its argument is a dict with the name of the
        role under the key "role", and numbers under the other keys."""

        def refit(raw: Any) -> None:
            if not isinstance(raw["role"], str):
                raise TypeError("a refit is one of a role")
            take({"role": raw["role"], **{name: float(value) for name, value in raw.items() if name != "role"}})

        damage = json_lines.each(self.directory.refits, refit)
        if damage is not None:
            self.damage.append(damage)

    def summary(self) -> dict[str, Any]:
        """Returns the content of summary.json; {} if it is missing or damaged."""
        try:
            return self.directory.load_summary()
        except (OSError, *json_lines.UNREADABLE) as error:
            self.damage.append(f"{self.directory.summary} cannot be read ({one_line(error)}) and is left out")
            return {}

    def failed(self) -> str | None:
        """Returns the reason why the run's last start failed, or None if it did not fail."""
        reason = self.summary().get(FAILED)
        return reason if isinstance(reason, str) else None

    def best(self) -> list[dict[str, Any]]:
        """Returns the summary's entries about the best evaluations. An entry has the keys `iteration`, `metric`,
        `value` and `models` (directory of the exported models, or None). Damaged entries are left out."""
        kinds = {"iteration": int, "metric": str, "value": (int, float), "models": (str, type(None))}
        entries = self.summary().get("best")
        return [
            entry
            for entry in (entries if isinstance(entries, list) else [])
            if isinstance(entry, dict) and all(isinstance(entry.get(name), kind) for name, kind in kinds.items())
        ]

    def config_text(self) -> str:
        """Returns the text of config.yaml; "" if there is none."""
        try:
            path = self.directory.config
            return read_text(path, errors="replace") if path.exists() else ""
        except OSError as error:
            self.damage.append(f"{self.directory.config} cannot be read ({error.strerror}) and is left out")
            return ""

    def config(self) -> Mapping[str, Any]:
        """Returns the settings of config.yaml; {} if it is missing or damaged. The file is read only once."""
        if self._config is None:
            self._config = {}
            try:
                tree = read_yaml(self.directory.config) if self.directory.config.exists() else {}
                self._config = tree if isinstance(tree, Mapping) else {}
            except ConfigError as error:
                self.damage.append(f"{one_line(error)}: its settings are left out")
        return self._config

    def threshold(self) -> float | None:
        """Returns the reward above which an answer is considered correct: the midpoint of the run's `reward.range`.
        Returns None if the run declares no scale (see Reward.threshold). Returns NaN if labels come from majority
        votes, because a reward then says nothing about the known answer."""
        rollouts, section = self.config().get("rollouts"), self.config().get("reward")
        if isinstance(rollouts, Mapping) and rollouts.get("labels") == "votes":
            return math.nan
        section = section if isinstance(section, Mapping) else {}
        bounds, target = section.get("range"), str(section.get("target", ""))
        try:
            reward = Reward(target=target, range=(float(bounds[0]), float(bounds[1])) if bounds else None)
        except (ConfigError, LookupError, TypeError, ValueError):  # the config is damaged
            reward = Reward()
        return reward.threshold

    def evaluations(self) -> list[tuple[int, dict[str, Any], list[dict[str, Any]]]]:
        """Returns (number of finished iterations, metrics as returned by `_numbers`, rows of answers) for the first and
        for the last evaluation of the run. If the run has only one evaluation, the list has one item.
        Evaluations without graded answers have no result files and are left out."""
        paths = sorted(self.directory.evaluations.glob("iteration_*.json"))
        evaluations = []
        for path in dict.fromkeys([*paths[:1], *paths[-1:]]):
            try:
                content = read_json(path)
                evaluations.append(
                    (int(content["iteration"]), _numbers(content["sets"]), read_samples(path.with_suffix(".jsonl")))
                )
            except (OSError, *json_lines.UNREADABLE) as error:
                self.damage.append(f"{path} cannot be read ({one_line(error)}) and is left out")
        return evaluations

    def iteration_files(self) -> list[Path]:
        """Returns the files of rollouts in the order of iterations."""
        return iteration_files(self.directory.rollouts)

    def rollouts(self, path: Path) -> list[dict[str, Any]]:
        """Returns the rollouts in one of the `iteration_files`; [] if the file is damaged. Texts are None if the
        iteration was saved without texts (see run.save_rollouts_every)."""
        try:
            return read_rows(path)
        except StoreError as error:
            if str(error) not in self.damage:
                self.damage.append(str(error))
            return []

    def look(self) -> list[str]:
        """Reads all files except rollouts. Returns the messages in `damage` without duplicates."""
        self.each_metric(lambda _: None)
        self.each_refit(lambda _: None)
        for read in (self.summary, self.config):
            read()
        return list(dict.fromkeys(self.damage))


def _numbers(sets: Mapping[str, Any]) -> dict[str, Any]:
    """Parses `sets`, the content of an evaluation's result file. Returns {name of the set: {measure: (title, number of
    problems, {metric: Interval})}}. Raises KeyError, TypeError or ValueError if the content has another structure."""
    return {
        name: {
            measure: (
                str(entry["title"]),
                int(values["problems"]),
                {
                    metric: Interval(float(value), *map(float, values["intervals"][metric]))
                    for metric, value in values["metrics"].items()
                },
            )
            for measure, values in entry.items()
            if measure != "title"
        }
        for name, entry in sets.items()
    }


def read_points(path: Path) -> list[dict[str, Any]]:
    """Returns the content of sweep.json, [{"run": name of the run's directory, "changes": {setting: value}}]. Raises
    ConfigError if the file is damaged, because the runs of the sweep are then unknown."""
    try:
        points = read_json(path)
        if not all(isinstance(point["run"], str) and isinstance(point["changes"], dict) for point in points):
            raise TypeError("a point is a run and its changes")
    except (OSError, *json_lines.UNREADABLE) as error:
        raise ConfigError(
            f"{path} cannot be read ({one_line(error)}): name one of the runs below {path.parent} instead"
        ) from error
    return points
