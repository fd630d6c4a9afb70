"""Settings of several sources of training problems in one run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any

import pydantic

from megatron_rl.config.base import NotNegative, config, refuse
from megatron_rl.config.datasets import PromptSet
from megatron_rl.config.evaluation import Reward

SOURCES = "data.sources"  # the setting that names the sources


@config
class Source(PromptSet):
    """One of several sources of training problems."""

    # File, directory or hub name of the problems. Empty: the problems are the rows of `data.path` whose column
    # `data_source` contains the source's name, as in verl.
    path: str = ""
    # Relative frequency of this source. The fraction of the prompts that come from this source is weight / (sum of the
    # weights of all sources). 0: no prompts come from this source.
    weight: NotNegative = 1.0
    # Prompt template of this source: a text file with {question}, or the name of a packaged template.
    # null: the recipe's prompt template.
    template: str | None = None
    reward: Reward | None = None  # the function that grades answers to these problems; null: the run's `reward`


@config
class Sources:
    """Several sources of training problems. Each prompt of an iteration comes from one source."""

    sources: dict[str, Source]  # the sources by name
    path: str = ""  # data of the sources without a `path`; its rows have a column `data_source`

    def problems(self) -> Iterator[str]:
        """Yields an error message for each source with an invalid name or without data, for a `path` that no source
        uses, and if all weights are 0."""
        for name, source in self.sources.items():
            if not re.fullmatch(r"[\w./-]+", name):
                yield f"data.sources: {name!r}: name a source by letters, digits and . _ - /"
            if not (source.path or self.path):
                yield f"data.sources.{name} has no path: give one, or set data.path to data with a column data_source"
        if self.path and all(source.path not in ("", self.path) for source in self.sources.values()):
            yield f"data.path = {self.path!r}: every source has a path of its own; leave data.path out, or set it to ''"
        if not any(source.weight for source in self.sources.values()):
            yield "data.sources: no source has a weight above 0: give at least one"

    def __post_init__(self) -> None:
        """Gives each source without a path the path `data.path`, and a filter for the rows whose column `data_source`
        contains the source's name."""
        refuse(*self.problems())
        completed = {
            name: source if source.path else replace(
                source, path=self.path, filters={"data_source": name, **source.filters}
            )
            for name, source in self.sources.items()
        }  # fmt: skip
        object.__setattr__(self, "sources", completed)


def _kind(setting: Any) -> str:
    several = "sources" in setting if isinstance(setting, Mapping) else isinstance(setting, Sources)
    return "(sources)" if several else "(set)"


# The problems of a run: one set, or several sources
Data = Annotated[
    Annotated[PromptSet, pydantic.Tag("(set)")] | Annotated[Sources, pydantic.Tag("(sources)")],
    pydantic.Discriminator(_kind),
]
