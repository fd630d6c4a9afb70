"""Generates rows of problems with reasoning-gym. The training split and the held-out split have no common problem."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_rl.config.base import refuse, refusing
from megatron_rl.config.data_settings import TEST, TRAIN, generated_name
from megatron_rl.config.schema import Generated, PromptSet
from megatron_rl.data.rows import DataError
from megatron_rl.rewards.reasoning_gym import COMPOSITE, GIVEN, digest, open_dataset, reference

HELD_OUT = 5  # on average, one of HELD_OUT questions belongs to the split `test`
# To get `size` problems of a split, _DRAWS[split] * size + _MORE problems are generated.
# This number is large enough unless many questions repeat. It depends only on the config, because some data sets of
# reasoning-gym generate other problems when their size changes.
_DRAWS = {TRAIN: 2, TEST: 2 * HELD_OUT}
_MORE = 100
# exceptions that reasoning-gym's data sets raise for arguments with which they cannot generate a problem
BROKEN = (AssertionError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def generated_rows(source: PromptSet) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (location, row) of the problems of a path `reasoning_gym:NAME`.

    A row has the keys question and entry and, if the data set has answers, the key answer. The grader generates the
    problem again from the entry. The rows depend only on NAME, data.generated and data.split. Generated problem i, also
    called draw i, is problem i of reasoning-gym's data set with the seed data.generated.seed. The SHA-256 of a question
    alone determines whether the question belongs to `test` or `train`, so the two splits have no question in common,
    even with other seeds, settings or data sets. The split `all` has all problems. Raises ConfigError if the data set
    cannot be made, and DataError if too few draws belong to the split.
    """
    settings = source.generated or Generated()
    name = generated_name(source.path) or ""
    refuse(*(f"data.generated.args.{key}: set data.generated.{key} instead" for key in GIVEN if key in settings.args))
    draws = settings.size if source.split not in _DRAWS else settings.size * _DRAWS[source.split] + _MORE
    args = {**settings.args, "size": draws, "seed": settings.seed}
    dataset = open_dataset(name, args)
    parts = dataset.datasets.values() if name == COMPOSITE else [dataset]
    # If a data set has no answers, the field `answer` is left out of all rows.
    answered = all(_draw(part, 0, source.path)["answer"] is not None for part in parts)
    yielded = 0
    for index in range(draws):
        item = _draw(dataset, index, source.path)
        question = item["question"]
        split = TEST if int(digest(question), 16) % HELD_OUT == 0 else TRAIN
        if source.split in _DRAWS and split != source.split:
            continue
        answer = {"answer": item["answer"]} if answered else {}
        yield (
            f"{source.path}[{index}]",
            {"question": question, **answer, "entry": reference(name, args, index, question)},
        )
        yielded += 1
        if yielded == settings.size:
            return
    raise DataError(
        f"only {yielded} of {draws} problems that {source.path} makes are of the split {source.split!r}, fewer than "
        f"data.generated.size = {settings.size}: its questions repeat; give a smaller size, or settings with more "
        "problems"
    )


def _draw(dataset: Any, index: int, path: str) -> dict[str, Any]:
    def say(error: Exception) -> str:
        return f"{path} cannot make problem {index} ({type(error).__name__}: {error}): look at data.generated.args"

    with refusing(say, *BROKEN):
        return dataset[index]
