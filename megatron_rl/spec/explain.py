"""Explains the numbers of a specification in sentences, for `megatron-rl check` and a run's log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_rl.config.base import read_object
from megatron_rl.config.evaluation import NO_SCALE
from megatron_rl.config.model import RoleConfig
from megatron_rl.models import registry
from megatron_rl.models.lora_targets import num_elements, owners
from megatron_rl.spec.rank_sets import words
from megatron_rl.spec.run_spec import RoleSpec, RunSpec, SftSpec, Spec


def explain(spec: Spec) -> list[str]:
    """Returns lines of text about each role: how the role's model is sharded over the ranks, and which modules get LoRA
    adapters."""
    if not isinstance(spec, RunSpec):
        return [f"the model: {_adapters(role)}" for role in spec.roles.values() if role.lora is not None]
    lines, sets = [], spec.role_ranks
    for name, role in spec.roles.items():
        if not role.has_policy:
            where = "own engines" if role.endpoint is None else role.endpoint.url
            shared = f"shares policy and engines with {role.same_as}"
            if role.head is not None:
                shared = f"a value head on the policy of {role.same_as}, value_coef {role.loss.value_coef}"
            fixed = f"no policy in the trainer; {where} answer with fixed weights"
            lines.append(f"{name}: {fixed if role.same_as is None else shared}")
            continue
        layout = role.layout
        cp = f" x cp {layout.cp}" if layout.cp > 1 else ""
        plain = layout.ep == 1 and layout.expert_tp == layout.tp
        experts = "" if plain else f", experts ep {layout.ep} x etp {layout.expert_tp}"
        ranks = sets[name]
        on = f"{len(ranks)} ranks" if len(ranks) == spec.cluster.ranks else ranks_text(ranks)
        lines.append(
            f"{name}: tp {layout.tp}{cp} x pp {layout.pp} x dp {len(ranks) // layout.model_ranks} on {on}{experts}; "
            f"micro-batches of up to {role.micro_batch_tokens * layout.cp} tokens per replica"
        )
        if role.lora is not None:
            owner = owners(spec.roles, sets).get(name, name)
            shared = "" if owner == name else f"; it is the copy that {owner} has"
            lines.append(f"{name}: {_adapters(role)}{shared}")
        if role.servers != name:
            lines.append(
                f"{name}: answers come from the servers of {role.servers}, which compute with adapters of both"
            )
        if role.tandem is not None:
            junior = role.tandem.junior or f"a frozen copy of {role.model.path}"
            lines.append(f"{name}: its rollouts are written together with {junior}, strategy {role.tandem.strategy}")
    return lines


def ranks_text(ranks: range) -> str:
    """Returns a range of ranks as text, such as `ranks 0-3` or `rank 4`."""
    return f"ranks {words(ranks)}" if len(ranks) > 1 else f"rank {ranks[0]}"


def node_notes(spec: Spec, ranks_per_node: int) -> Iterator[str]:
    """Yields a note for each role whose ranks are at least as many as the ranks of a node, but not all ranks of each
    node that they are on. Ranks are numbered node by node."""
    size = ranks_per_node
    for name, ranks in spec.role_ranks.items() if isinstance(spec, RunSpec) else ():
        inner = range(-(-ranks.start // size) * size, ranks.stop // size * size)
        outer = range(ranks.start // size * size, -(-ranks.stop // size) * size)
        if spec.roles[name].owner == name and size <= len(ranks) < len(outer):
            yield (
                f"roles.{name}.ranks = {words(ranks)} takes a part of a node of {size} ranks: its groups may "
                "span two nodes, and other roles use the node's network, too; give whole nodes, such as "
                + " or ".join(words(whole_nodes) for whole_nodes in (inner, outer) if whole_nodes)
            )


def explain_recipe(spec: RunSpec) -> list[str]:
    """Returns one line for each trained role: the number of prompts, samples and optimizer steps of one update.

    Adds a note if the reward declares no scale, for each role that is never trained in a run of this length, and for a
    role whose training ends before the training of any other role begins."""
    parts = spec.recipe.roles()
    trained = [name for name, part in parts.items() if part.trained]
    prompts, sets = spec.run.prompts_per_iteration, spec.role_ranks
    lines = [_update(spec.roles[name], prompts, parts[name].samples, len(sets[name])) for name in trained]
    iterations = [iteration for cycle in spec.loop.schedule for iteration in cycle]
    for name in trained:
        first = next((i for i, iteration in enumerate(iterations) if set(iteration) & {*trained} - {name}), None)
        trained_at = [i for i, iteration in enumerate(iterations) if name in iteration]
        if not trained_at:
            lines.append(f"note: {name} has no iteration in a run of this length: it is not trained")
        elif first is not None and trained_at[-1] < first:
            lines.append(
                f"note: {name} is trained in the first {len(trained_at)} iterations alone, before any other role is"
            )
    if spec.reward.threshold is None:
        lines.append(
            f"note: {NO_SCALE}. Without it, an answer is correct above 0.5 as long as all rewards are from 0 to 1, and "
            "no accuracy is reported otherwise"
        )
    return lines


def float32_notes(spec: Spec) -> list[str]:
    """Returns a note for each role that is trained in float32, the default of model.dtype. On GPUs, float32 is many
    times slower than bfloat16, and the weights take twice the memory."""
    names = {f"roles.{name}.": name for name in spec.trained_policies} if isinstance(spec, RunSpec) else {}
    names |= {"": "model"} if isinstance(spec, SftSpec) else {}
    slow = [place for place, name in names.items() if spec.roles[name].model.dtype == "float32"]
    return [f"{place}model.dtype is float32: set bfloat16 for training on GPUs" for place in slow]


def _update(role: RoleSpec, prompts: int, group_size: int, ranks: int) -> str:
    """Returns a text about one update of a role: P prompts x G samples per prompt = S samples, S / B optimizer steps
    with B samples each, and the maximum number of tokens."""
    samples = prompts * group_size
    batch = role.samples_per_optimizer_step or samples
    longest = samples * (role.max_prompt_tokens + role.sampling.max_tokens)
    replicas = ranks // role.layout.model_ranks
    steps, micro_batches = -(-samples // batch), -(-longest // (replicas * role.micro_batch_tokens))
    return (
        f"{role.name}: {prompts} prompts x {group_size} samples = {samples} samples per update; {samples} / {batch} = "
        f"{steps} optimizer steps; at most {longest} tokens, that is up to {micro_batches} micro-batches of "
        f"{role.micro_batch_tokens} tokens on each of {replicas} data-parallel replicas "
        f"(tp {role.layout.tp}, pp {role.layout.pp})"
    )


def _adapters(role: RoleConfig) -> str:
    """Returns a text about the LoRA adapters of a role: rank, target modules and, if known, the parameter count."""
    assert role.lora is not None
    text = f"trains adapters of rank {role.lora.rank} on {', '.join(role.lora.targets)}"
    file = Path(role.model.path) / "config.json"
    if not file.is_file():
        return text
    count = num_elements(registry.read(read_object(file), str(file)), role.lora)
    return f"{text}: {count / 1e6:.2f} million numbers; {role.model.path} stays as it is"
