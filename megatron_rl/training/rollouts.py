"""Prompts + engine -> trajectories, what is measured on them, and their record as JSON lines."""

from __future__ import annotations

import base64
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl.algorithms.authors import switches
from megatron_rl.engines.base import Completion, Engine, EngineError, Sampling, Streaming, Tandem
from megatron_rl.types import Prompt, Stop, Trajectory

ROWS = 2  # the form of a trajectory's row; another one is not read
_NUMBERS = {
    "tokens": "<i4",
    "trainable": "?",
    "logprobs": "<f8",
    "advantages": "<f8",
}  # in a row as bytes: they are many
SHARE_SLACK = 0.2  # of a tandem's tokens, by which the senior's share may miss what is expected


def sample(engine: Engine, prompts: Sequence[Prompt], sampling: Sampling) -> list[Trajectory]:
    """[P] prompts -> [P * n] trajectories. The n of one prompt are adjacent and share a group of their own, whatever its id."""
    draws = Draws(engine, sampling)
    for i, prompt in enumerate(prompts):
        draws.ask(i, prompt)
    found = dict(draws.collect())
    return [t for i in range(len(prompts)) for t in found[i]]


class Draws:
    """Trajectories of prompts that become known one after the other: an engine that streams begins at once, others at the end.

    The only place where completions become training sequences: token ids and log-probs are the engine's, untouched.
    """

    def __init__(self, engine: Engine, sampling: Sampling) -> None:
        self._engine, self._sampling = engine, sampling
        self._prompts: dict[int, Prompt] = {}
        self._asked = engine.begin(sampling) if isinstance(engine, Streaming) else None

    def ask(self, index: int, prompt: Prompt) -> None:
        """`index`: another one for every prompt; names its group."""
        self._prompts[index] = prompt
        if self._asked is not None:
            self._asked.ask(index, prompt.tokens)

    def collect(self) -> Iterator[tuple[int, list[Trajectory]]]:
        """(index, its n trajectories) of every prompt that was asked, each when it is done."""
        if self._asked is not None:
            answers = self._asked.answers()
        else:
            prompts = [p.tokens for p in self._prompts.values()]
            answers = zip(self._prompts, self._engine.generate(prompts, self._sampling) if prompts else [], strict=True)
        for index, completions in answers:
            yield self._read(index, completions)

    def _read(self, index: int, completions: Sequence[Completion]) -> tuple[int, list[Trajectory]]:
        """Raises EngineError for a tandem's completion that does not say who wrote what: it would be trained on as the senior's own."""
        prompt, tandem = self._prompts[index], self._sampling.tandem is not None
        start = len(prompt.tokens)
        if tandem and any(c.authors is None or len(c.authors) != len(c.tokens) for c in completions):
            raise EngineError(
                "an engine sent completions of a tandem without an author for each token: has it a junior at all?"
            )
        own = [c.authors if tandem and c.authors is not None else [True] * len(c.tokens) for c in completions]
        return index, [
            Trajectory(
                group=f"{index}:{prompt.id}",
                tokens=[*prompt.tokens, *c.tokens],
                trainable=[False] * start + list(mine),
                logprobs=[0.0] * start + [value if on else 0.0 for value, on in zip(c.logprobs, mine, strict=True)],
                version=min((version for _, version in c.versions), default=self._engine.version),
                stop=c.stop,
                payload=prompt.payload,
                versions=[(start + at, version) for at, version in c.versions] if len(c.versions) > 1 else [],
                start=start if tandem else None,
                other_weight=0.0 if self._sampling.tandem is None else self._sampling.tandem.junior_weight,
                experts=c.experts,
            )
            for c, mine in zip(completions, own, strict=True)
        ]


def tokenize(tokenizer: Any, text: str) -> list[int]:
    """A prompt text -> token ids, with the special tokens that the tokenizer puts around a text (Llama's begin token)."""
    return list(tokenizer(text)["input_ids"])


def greedy(sampling: Sampling, *, seed: int) -> Sampling:
    """One completion, always the likeliest token; of the model alone."""
    return replace(sampling, temperature=0.0, n=1, seed=seed, tandem=None)


def plain(sampling: Sampling, *, seed: int) -> Sampling:
    """One completion from the model's own distribution: alone, temperature 1, nothing truncated."""
    return replace(sampling, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, n=1, seed=seed, tandem=None)


def measure(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Means every recipe logs: reward/*, length (sampled tokens), finished (share not cut), samples, tokens; of a tandem senior_share (of
    the sampled tokens) and switches (of the author, per sample). Empty for none."""
    if not trajectories:
        return {"samples": 0.0, "tokens": 0.0}
    lengths = [len(t.response) for t in trajectories]
    names = sorted({name for t in trajectories for name in t.rewards})
    rewards = {f"reward/{name}": fmean(t.rewards[name] for t in trajectories if name in t.rewards) for name in names}
    return (
        rewards
        | {
            "length": fmean(lengths),
            "finished": fmean(float(t.stop.finished) for t in trajectories),
            "samples": float(len(trajectories)),
            "tokens": float(sum(lengths)),
        }
        | _authors(trajectories)
    )


def _authors(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Of a tandem's trajectories. Empty for others, and where nothing was written."""
    parts = [t.trainable[t.prompt_length :] for t in trajectories if t.start is not None]
    written = sum(map(len, parts))
    return {"senior_share": sum(map(sum, parts)) / written, "switches": fmean(map(switches, parts))} if written else {}


def check_senior_share(trajectories: Sequence[Trajectory], tandem: Tandem | None) -> None:
    """Raises EngineError when the senior wrote a share of the tokens that its strategy does not give: the mask is wrong then."""
    expected = None if tandem is None else tandem.rule.senior_share
    found = _authors(trajectories).get("senior_share")
    if expected is not None and found is not None and abs(found - expected) > SHARE_SLACK:
        raise EngineError(
            f"the senior wrote {found:.2f} of {sum(len(t.response) for t in trajectories)} tokens, not {expected:g} +- {SHARE_SLACK}: "
            "either the engine's author mask is wrong, or there are too few tokens for the strategy's turns (raise run.prompts_per_step)"
        )


def without_signal(trajectories: Sequence[Trajectory], reward: str) -> float:
    """Share of groups whose `reward` is the same for all members: nothing to compare. 0.0 for no groups."""
    values: dict[str, set[float]] = defaultdict(set)
    for t in trajectories:
        values[t.group].add(t.rewards[reward])
    return fmean(float(len(v) == 1) for v in values.values()) if values else 0.0


def trajectories_to_jsonl(trajectories: Sequence[Trajectory]) -> str:
    """One JSON object per line and trajectory, exact to the last bit; what has a value per token is base64 of an array's bytes. Raises
    TypeError for a payload that is not JSON."""
    return "".join(json.dumps(_to_json(t)) + "\n" for t in trajectories)


def trajectories_from_jsonl(text: str) -> list[Trajectory]:
    """What `trajectories_to_jsonl` wrote. Raises ValueError with the line number for anything else."""
    out = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            out.append(_from_json(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"line {number} is not a trajectory ({error}): {line[:80]!r}") from error
    return out


def _to_json(trajectory: Trajectory) -> dict[str, Any]:
    row = {f.name: getattr(trajectory, f.name) for f in fields(trajectory)}
    row |= {name: base64.b64encode(np.array(row[name], kind).tobytes()).decode() for name, kind in _NUMBERS.items()}
    row["experts"] = None if trajectory.experts is None else _packed(trajectory.experts)
    return row | {
        "stop": trajectory.stop.value,
        "payload": dict(trajectory.payload),
        "rewards": dict(trajectory.rewards),
    }


def _from_json(row: Mapping[str, Any]) -> Trajectory:
    own = {f.name: row[f.name] for f in fields(Trajectory)}
    own |= {name: np.frombuffer(base64.b64decode(row[name]), kind).tolist() for name, kind in _NUMBERS.items()}
    pairs = {name: [(a, b) for a, b in row[name]] for name in ("steps", "versions")}
    experts = row.get("experts")
    return Trajectory(
        **own | {"stop": Stop(row["stop"]), "experts": None if experts is None else _unpacked(experts)} | pairs
    )


def _packed(values: Tensor) -> dict[str, Any]:
    """int16 as JSON."""
    return {"shape": [*values.shape], "int16": base64.b64encode(values.contiguous().numpy().tobytes()).decode()}


def _unpacked(row: Mapping[str, Any]) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(row["int16"])), dtype=torch.int16).view(row["shape"])
