"""Tells what each node of a run's Slurm jobs holds: the roles of the trainer's ranks, and the inference servers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_rl.cluster.profile import Profile
from megatron_rl.config.schema import Embedded, Servers
from megatron_rl.spec.explain import node_notes, ranks_text
from megatron_rl.spec.run_spec import Spec, TrainingSpec


class ServerJobs(NamedTuple):
    """The servers of a run that are started by separate jobs, which are elements of a job array: first all replicas of
    the first role, then those of the next role."""

    roles: Sequence[str]  # names of the roles that have servers
    replicas: int  # number of servers of each role
    gpus: int  # number of GPUs that the job of one server requests

    @property
    def number(self) -> int:
        """Returns the number of servers."""
        return len(self.roles) * self.replicas

    @property
    def settings(self) -> dict[str, str | Sequence[str]]:
        """Returns the settings of the batch script, from which slurm/job.sh computes an element's role and replica."""
        return {"ROLES": self.roles, "REPLICAS": str(self.replicas)}


def server_jobs(spec: Spec, profile: Profile) -> ServerJobs | None:
    """Returns the servers that separate jobs start, or None if the run has no such servers."""
    settings = None if spec.engine is None else spec.engine.settings
    if spec.engine is None or not isinstance(settings, Servers) or settings.colocate or settings.urls:
        return None
    return ServerJobs(spec.engine.server_roles, settings.replicas, settings.tp if profile.gpus_per_node else 0)


def placement(spec: TrainingSpec, profile: Profile, *, array: str = "engines") -> list[str]:
    """Returns one line for each group of nodes of the trainer, a note for each role that has a part of a node, and one
    line for the servers of each role.

    `array`: name of the template whose job array has the servers. With `roles`, element 0 of the array is the trainer.
    Example: ["node 0-2: generator (ranks 0-23)", "node 3: verifier (ranks 24-31)",
    "element 0-1 of the engines array: vllm servers of generator (8 GPUs each)"].
    """
    size = profile.ranks_per_node
    lines = [*_trainer_lines(spec, size), *(f"note: {note}" for note in node_notes(spec, size))]
    settings, servers = None if spec.engine is None else spec.engine.settings, server_jobs(spec, profile)
    if spec.engine is None or not isinstance(settings, Servers) or not spec.engine.server_roles:
        return lines
    if servers is None:
        where = "the trainer's GPUs, in turns with the trainer" if settings.colocate else "engine.urls"
        return [*lines, f"{where}: {settings.kind} servers of {', '.join(spec.engine.server_roles)}"]
    each = f" ({servers.gpus} GPUs each)" if servers.gpus else ""
    for index, name in enumerate(servers.roles):
        first = index * servers.replicas + (array == "roles")
        elements = _numbers("element", range(first, first + servers.replicas))
        lines.append(f"{elements} of the {array} array: {settings.kind} servers of {name}{each}")
    return lines


def _trainer_lines(spec: TrainingSpec, ranks_per_node: int) -> Iterator[str]:
    """Yields one line for each group of consecutive nodes whose ranks hold the same roles. Slurm numbers the ranks node
    by node."""
    embedded = spec.engine is not None and isinstance(spec.engine.settings, Embedded)
    sets = dict[str, range]()
    for name, ranks in spec.role_ranks.items():
        owner = spec.roles[spec.roles[name].owner]
        if owner.has_policy or (embedded and owner.endpoint is None):
            sets[name] = ranks

    def held(node: int) -> list[str]:
        ranks = {*range(node * ranks_per_node, (node + 1) * ranks_per_node)}
        return [name for name, role_ranks in sets.items() if not ranks.isdisjoint(role_ranks)]

    for names, group in itertools.groupby(range(spec.cluster.ranks // ranks_per_node), held):
        nodes = [*group]
        first, end = nodes[0] * ranks_per_node, (nodes[-1] + 1) * ranks_per_node
        parts = [
            f"{name} ({ranks_text(range(max(first, sets[name].start), min(end, sets[name].stop)))})" for name in names
        ]
        yield f"{_numbers('node', nodes)}: {', '.join(parts) or 'no role'}"


def _numbers(noun: str, numbers: Sequence[int]) -> str:
    """Returns a range of numbers as text, such as `node 0-2` or `node 3`."""
    return f"{noun} {numbers[0]}" + (f"-{numbers[-1]}" if len(numbers) > 1 else "")
