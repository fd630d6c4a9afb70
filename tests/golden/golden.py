"""Compares the runs of this tree with those of another commit, bit for bit: `make golden BASE=REV`.

Both sides run on this machine, one after the other, because the last bit of a result depends on the processor. What is
compared: metrics and trained weights of twelve runs (`golden_runs.py`), and the settings of the four commands. All
shipped configs must pass `megatron-rl check`. Names that changed between the two commits stand in `renames.yaml`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import golden_runs
import torch
import yaml
from safetensors.torch import load_file

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
COMMANDS = ("train", "sft", "generate", "eval")
# metrics that depend on time where rollouts are made ahead of training
TIMING = {"staleness", "version_lag", "mixed_versions", *(f"trained_late/{age}" for age in range(1, 5))}
AHEAD = "staleness"  # the run with servers
RENAMES: dict[str, dict[str, str]] = yaml.safe_load((HERE / "renames.yaml").read_text())


def main(words: Sequence[str]) -> int:
    """Prints one line for each comparison. Returns 1 when one of them failed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument("--only", nargs="*", help="names of runs; default: all of them")
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as directory, _checkout(args.base, Path(directory) / "base") as other:
        for table in other.glob("*/golden/renames.yaml"):  # names that had changed before that commit
            for section, names in yaml.safe_load(table.read_text()).items():
                RENAMES[section] = {name: old for name, old in RENAMES[section].items() if names.get(name) != old}
        out = Path(directory)
        (out / "inputs").mkdir()
        golden_runs.write_inputs(out / "inputs")
        (out / "inputs/token").write_text("5ecret" * 8)
        names = args.only or list(golden_runs.configs(out / "inputs", []))
        faults = _compare_settings(other) + _check_configs()
        for name in names:
            started = time.monotonic()
            sides = [_run(side, name, out, old=side is other) for side in (other, ROOT)]
            found = _compare_runs(*sides, name)
            told = f"{'differs' if found else 'the same, bit for bit'}; updates of {_updates(sides[1])}"
            print(f"{name:12} {told} ({time.monotonic() - started:.0f} s)", flush=True)
            faults += found
    for fault in faults:
        print(f"  {fault}")
    print(f"golden: {len(faults)} differences between {args.base} and this tree")
    return min(1, len(faults))


@contextmanager
def _checkout(revision: str, directory: Path) -> Iterator[Path]:
    """Checks a commit out into a directory of its own, and removes it at the end."""
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(directory), revision], check=True)
    try:
        yield directory
    finally:
        subprocess.run([*git, "remove", "--force", str(directory)], check=True)


def _environment(side: Path) -> dict[str, str]:
    paths = [side, HERE, side / "tests/helpers", side / "tests/servers"]
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}


def _run(side: Path, name: str, out: Path, *, old: bool) -> Path:
    """Trains one run by a checkout's code. Returns its run directory."""
    home = out / ("old" if old else "new")
    home.mkdir(exist_ok=True)
    with _servers(side, out) if name == AHEAD else _no_servers() as urls:
        config = golden_runs.configs(out / "inputs", urls)[name]
        config["run"]["dir"] = str(home)
        file = home / f"{name}.yaml"
        file.write_text(json.dumps(_old_names(_old_evaluation(config)) if old else config))
        command = [sys.executable, "-m", "megatron_rl.main", "train", str(file)]
        with (home / f"{name}.log").open("w") as log:
            done = subprocess.run(command, cwd=side, env=_environment(side), stdout=log, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(
            f"{name} by {'the other commit' if old else 'this tree'}:\n{(home / f'{name}.log').read_text()[-4000:]}"
        )
    return home / name


@contextmanager
def _servers(side: Path, out: Path) -> Iterator[list[str]]:
    command = [sys.executable, str(HERE / "serve.py"), str(out / "inputs/token"), str(len(golden_runs.SOLVER))]
    with subprocess.Popen(
        command, env=_environment(side), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        try:
            yield server.stdout.readline().split()
        finally:
            server.stdin.close()


@contextmanager
def _no_servers() -> Iterator[list[str]]:
    yield []


def _compare_runs(old: Path, new: Path, name: str) -> list[str]:
    """Returns the differences of two run directories: metrics line by line, and every trained tensor."""
    lines, others = _metrics(new, name), _metrics(old, name, RENAMES["metrics"])
    for own, other in zip(lines, others, strict=False):
        for key in RENAMES["added"] if own["scope"] == "eval" else ():
            if key not in other:
                own.pop(key, None)
    faults = [] if len(lines) == len(others) else [f"{name}: {len(others)} lines of metrics became {len(lines)}"]
    for number, (own, other) in enumerate(zip(lines, others, strict=False)):
        for key in sorted(own.keys() | other.keys()):
            if own.get(key) != other.get(key):
                faults.append(f"{name}: line {number}: {key} was {other.get(key)} and is {own.get(key)}")
    tensors, before = _weights(new), _weights(old)
    if not tensors or tensors.keys() != before.keys():
        faults.append(f"{name}: the trained tensors have other names")
    faults += [
        f"{name}: {key} differs" for key in tensors.keys() & before.keys() if not _same(tensors[key], before[key])
    ]
    return faults[:20]


def _updates(run: Path) -> str:
    """Counts the updates of each role, so that a run that compares nothing is seen."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    done = Counter(line["scope"] for line in lines if line["metrics"].get("skipped") == 0.0)
    return ", ".join(f"{role} {count}" for role, count in sorted(done.items())) or "none"


def _metrics(run: Path, name: str, renames: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Returns scope and metrics of each line, by this tree's names. In the run with rollouts ahead, evaluations run
    beside training, and their lines come last here."""
    news = {old: new for new, old in (renames or {}).items()}
    left_out = TIMING if name == AHEAD else set()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines.sort(key=lambda line: name == AHEAD and line["scope"] == "eval")
    return [
        {"scope": news.get(line["scope"], line["scope"])}
        | {news.get(key, key): value for key, value in line["metrics"].items() if news.get(key, key) not in left_out}
        for line in lines
    ]


def _weights(run: Path) -> dict[str, torch.Tensor]:
    files = sorted((run / "models").rglob("*.safetensors"))
    return {f"{f.parent.name}/{key}": value for f in files for key, value in load_file(f).items()}


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _old_evaluation(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config with the one set of its evaluations where the other commit has it."""
    if "evaluation.sets" not in RENAMES["changed"]:
        return {**config}
    own = {**config["evaluation"]}
    [held] = own.pop("sets")
    del held["name"]
    return {**config, "evaluation": own | {"prompts": held}}


def _old_names(value: Any, path: str = "") -> Any:
    """Returns a config with the names of the other commit."""
    if isinstance(value, Mapping):
        return {_old_key(path, k): _old_names(v, f"{path}{k}.") for k, v in value.items()}
    if isinstance(value, list):
        return [_old_names(v, path) for v in value]
    return _old_value(value) if isinstance(value, str) else value


def _old_key(path: str, key: str) -> str:
    """Returns the last part of the setting's old name; a renamed setting stays in its section."""
    return RENAMES["settings"].get(path + key, key).rpartition(".")[2]


def _old_value(text: str) -> str:
    for new, old in RENAMES["values"].items():
        if text == new or (new.endswith(".") and text.startswith(new)):
            return old + text.removeprefix(new)
    return text


def _settings(side: Path, command: str) -> dict[str, str]:
    """Returns every setting of a command with its default."""
    code = (  # not `megatron-rl settings`, which lists fewer settings on one of the sides
        "from megatron_rl.commands.settings import SCHEMAS\n"
        "from megatron_rl.config.describe import settings_of\n"
        f"for text, _ in settings_of(SCHEMAS[{command!r}]): print(text)"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=side, env=_environment(side), capture_output=True, text=True, check=True)
    lines = [line.partition(" = ") for line in done.stdout.splitlines()]
    return {name: default for name, _, default in lines}


def _compare_settings(other: Path) -> list[str]:
    """Returns settings that were removed, added or changed although `renames.yaml` does not say so."""
    news, faults = {old: new for new, old in RENAMES["settings"].items()}, []
    for command in COMMANDS:
        old, new = _settings(other, command), _settings(ROOT, command)
        kept = {news.get(name, name): default for name, default in old.items() if name not in RENAMES["removed"]}
        for name in sorted(kept.keys() | new.keys()):
            if not _may_change(command, name) and kept.get(name) != new.get(name):
                faults.append(f"setting {name} of {command}: was {kept.get(name)!r} and is {new.get(name)!r}")
    print(f"settings     {f'{len(faults)} differ' if faults else 'the same'}", flush=True)
    return faults


def _may_change(command: str, name: str) -> bool:
    """Returns whether the table has a setting, by its name or behind the name of the command, as changed. A name that
    ends in a dot stands for all that begin with it."""
    named = (name, f"{command} {name}")
    return any(
        one in named or (one.endswith(".") and any(own.startswith(one) for own in named)) for one in RENAMES["changed"]
    )


def _check_configs() -> list[str]:
    """Returns the shipped configs that `megatron-rl check` refuses."""
    files = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "examples").rglob("*.yaml"))
    code = "import sys; from golden import check_all; sys.exit(check_all(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, *files], cwd=ROOT, env=_environment(ROOT), capture_output=True, text=True
    )
    print(f"configs      {'some are refused' if done.returncode else f'all {len(files)} pass check'}", flush=True)
    return done.stderr.splitlines()[-20:] if done.returncode else []


def check_all(files: Sequence[str]) -> int:
    """Checks configs in this process. Returns the count of those that are refused."""
    from megatron_rl.main import main as command

    refused = 0
    for file in files:
        nodes = (yaml.safe_load(Path(file).read_text()).get("job") or {}).get("nodes", 1)
        if command(["check", file, "--elsewhere", "--ranks", str(max(32, 8 * nodes))]):
            print(f"{file}: refused by check", file=sys.stderr)
            refused += 1
    return refused


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
