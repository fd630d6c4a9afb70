"""A context with a generator and a judge that say what they are told, in the order of asking or the other way round."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fake_engines import ScriptedEngine
from stages import credited
from toys import EOS, characters

from megatron_rl.engines.protocol import SampleLog, Sampling
from megatron_rl.training.iteration import Iteration, RolloutContext
from megatron_rl.types import Prompt

TOKENIZER = characters()


def ids(text):
    return TOKENIZER(text)["input_ids"]


class Backwards(ScriptedEngine):
    """Gives the answers that came last first."""

    def session(self, priority: int = 0, log: SampleLog | None = None) -> Any:
        session = super().session(log=log)
        answers = session.answers

        def backwards() -> Iterator[Any]:
            yield from reversed(list(answers()))

        session.answers = backwards
        return session


def says(script, kind=ScriptedEngine):
    """An engine that answers (prompt text, key, sample) with the script's text and ends it."""
    return kind(lambda p, key, j, sampling: [*ids(script(TOKENIZER.decode(p), key, j)), EOS], eos=EOS)


def context_of(*, limit=10_000, backwards=False, seed=0, grade=lambda responses, payloads: [], **scripts):
    kind = Backwards if backwards else ScriptedEngine
    engines = {name: says(script, kind) for name, script in scripts.items()}
    return RolloutContext(
        engines=engines,
        tokenizers=dict.fromkeys(engines, TOKENIZER),
        samplings={name: Sampling(max_tokens=4000) for name in engines},
        max_prompt_tokens=dict.fromkeys(engines, 10_000) | {"judge": limit},
        grade=grade,
        seed=seed,
    )


class PromptSource:
    """Gives the same problems, as often as wanted."""

    def __init__(self, prompts):
        self.prompts = prompts

    def take(self, count=None):
        return self.prompts


def problems(count, **payload):
    return [Prompt(id=f"p{i}", tokens=ids(f"Q{i}"), payload={"question": f"Q{i}", **payload}) for i in range(count)]


def roll_out(recipe, roles, prompts, context, number=0):
    """Makes the rollouts of an iteration -> its rollouts by role, and the metrics that it left."""
    iteration = Iteration(cycle=0, index=0, roles=roles, number=number)
    return credited(recipe, iteration, PromptSource(prompts), context), context.metrics


def asked(context, role):
    """The prompts that a role was asked, in the order of their keys."""
    engine = context.engines[role]
    return [
        TOKENIZER.decode(p) for _, (p, _) in sorted(zip(engine.keys, engine.asked, strict=True), key=lambda x: x[0])
    ]


def said(rollout):
    return TOKENIZER.decode(rollout.response).removesuffix("<eos>")
