"""Rollouts of a recipe for problems with a number as their question, from an engine that a script answers for."""

import random
import re

from fake_engines import ScriptedEngine
from stages import credited
from toys import EOS, characters, graded

from megatron_rl.data.problems import Problem, PromptReader
from megatron_rl.engines.protocol import Sampling
from megatron_rl.training.collector import ReaderSource
from megatron_rl.training.iteration import Iteration, RolloutContext

TOKENIZER = characters()
GROUP = 4
says_yes = graded(lambda response, payload: response.startswith("yes"))


def ids(text):
    return TOKENIZER(text)["input_ids"]


def reader_of(count, *, shuffle=False, **payload):
    problems = [Problem(row=i, values={"question": str(i), "answer": "yes", **payload}) for i in range(count)]
    encode = lambda values: ids(f"Q{values['question']}:")  # noqa: E731
    return PromptReader(problems, encode, seed=5, shuffle=shuffle, max_prompt_tokens=100)


def context_of(script, *, grade=says_yes, limit=1000, max_tokens=50, **settings):
    """A context whose engine answers (question text, sample, sampling) with the script's text."""
    answer = lambda p, key, j, sampling: [*ids(script(TOKENIZER.decode(p), j, sampling)), EOS]  # noqa: E731
    return RolloutContext(
        engines={"generator": ScriptedEngine(answer, eos=EOS)},
        tokenizers={"generator": TOKENIZER},
        samplings={"generator": Sampling(max_tokens=max_tokens)},
        max_prompt_tokens={"generator": limit},
        grade=grade,
        **settings,
    )


def iteration(number=0):
    return Iteration(cycle=number, index=0, roles=("generator",), number=number, updates={"generator": number})


def roll_out(recipe, reader, context, *, per_step=3, number=0):
    rollouts = credited(recipe, iteration(number), ReaderSource(reader, per_step), context)["generator"]
    return rollouts, context.metrics["generator"]


def rows_of(rollouts):
    """The rows of the problems of rollouts, each once, in order."""
    return list(dict.fromkeys(int(r.payload["question"]) for r in rollouts))


def by_row(rates):
    """A script that answers the first `rates[row]` of GROUP samples right."""

    def script(text, j, sampling):
        return "yes" if j < rates[int(re.match(r"Q(\d+)", text)[1])] else "no"

    return script


def lucky(text, j, sampling):
    """A script whose answers depend on the seed and on nothing else that could differ between two runs."""
    return "yes" if random.Random(f"{sampling.seed}/{text}/{j}").random() < 0.3 else "no"
