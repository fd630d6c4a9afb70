"""Calls reward functions, one at a time or in batches, and adds up several by their weights.

A worker of rewards.grading_pool imports this file and little else, so that it stands on the standard library alone.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import numbers
import pickle
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.user_code import told, traceback_of

Item = tuple[str, Mapping[str, Any]]  # a response and its problem's payload
PROMPTS, COMPLETIONS = "prompts", "completions"  # parameters of a function that grades batches
UNKNOWN = ("completion_ids", "completions_ids", "prompt_ids", "trainer_state")  # TRL has them; texts alone come here
RESERVED = ("outcome", "trained")  # rewards that recipes name so
REWARD = "reward"  # the key of a function's result that is its reward; other keys are metrics
GIVEN_UP = (Exception, SystemExit, KeyboardInterrupt)  # whatever user code raises; sys.exit ends its grading alone
_OWN = ("messages", "prompt")  # of a payload: no columns of their own


class BatchFailed(Exception):
    """A batch function raised an error on a batch of several items. The caller grades each item alone to find the
    item that caused the error."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one grading. If `score` is None, `why` says what went wrong. `metrics` are further numbers."""

    score: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    why: str = ""
    trace: str = ""  # the traceback, where the function raised


@dataclass(frozen=True, kw_only=True)
class Function:
    """Where one of several reward functions is found, and its weight in the sum."""

    target: str | None = None  # its name as package.module:name
    pickled: str | None = None  # instead: a file that cloudpickle wrote, for a function that no module holds
    weight: float = 1.0  # factor of its reward in the sum
    name: str = ""  # name in the metrics; empty: the function's own
    args: dict[str, Any] = field(default_factory=dict)  # further keyword arguments for it

    __pydantic_config__ = {"extra": "forbid"}  # of its entry in a config

    def load(self) -> Callable[..., Any]:
        """Returns the function. Raises ValueError, which says why the function cannot be used."""
        where = self.target if self.pickled is None else self.pickled
        if where is None or (self.target is not None and self.pickled is not None):
            raise ValueError(f"functions: {self.name or 'one of them'} needs either a target or a pickled file")
        try:
            found = _imported(where) if self.pickled is None else pickle.loads(Path(where).read_bytes())
        except GIVEN_UP as error:  # the border to user code: whatever an import or an unpickling raises is told
            raise ValueError(f"the reward {where!r} cannot be loaded: {told(error)}") from error
        if not callable(found):
            raise ValueError(f"the reward {where!r} is a {type(found).__name__}, not a function")
        return functools.partial(found, **self.args) if self.args else found


@dataclass(frozen=True, kw_only=True)
class RewardFunctions:
    """A plug-in for `reward.target`: the weighted sum of reward functions, which may be any finite number."""

    functions: tuple[Function, ...]

    def __post_init__(self) -> None:
        """Loads the functions. Raises ValueError for those that cannot be used."""
        given = tuple(one if isinstance(one, Function) else Function(**one) for one in self.functions)
        if not given:
            raise ValueError("functions is empty: name at least one")
        called = tuple(CalledFunction.of(one.load(), one.name, weight=one.weight) for one in given)
        names = [one.name for one in called]
        for name in names:
            if len(given) > 1 and (names.count(name) > 1 or name in RESERVED):
                raise ValueError(f"functions: the name {name!r} is taken twice, or is a recipe's: give another `name`")
        object.__setattr__(self, "functions", given)
        object.__setattr__(self, "_grader", Grader(called))

    @property
    def grader(self) -> Grader:
        """Returns the grader that calls these functions."""
        return vars(self)["_grader"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledFunction:
    """A reward function and how to call it, as read from its signature."""

    function: Callable[..., Any]
    name: str
    weight: float
    batched: bool  # it takes lists, and returns one
    waits: bool  # it is a coroutine function
    parameters: tuple[str, ...]  # that a batch is passed by
    takes_all: bool  # it has **columns

    @classmethod
    def of(cls, function: Callable[..., Any], name: str = "", *, weight: float = 1.0) -> CalledFunction:
        """Reads the signature of a function.

        A function with a parameter named `completions` or `prompts` grades batches. Any other function is called with a
        response and its payload. Raises ValueError for a function that cannot be called in either way.
        """
        name = name or name_of(function)
        if not math.isfinite(weight):
            raise ValueError(f"the reward {name} has the weight {weight}: give a finite number")
        parameters = inspect.signature(function).parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        named = {p.name: p for p in parameters if p.kind in kinds}
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        batched = bool({PROMPTS, COMPLETIONS} & named.keys())
        unknown = [n for n in UNKNOWN if n in named and named[n].default is inspect.Parameter.empty]
        if unknown:
            raise ValueError(
                f"the reward {name} has the parameter {unknown[0]!r}: rewards are given texts and columns of the data "
                f"set; use {COMPLETIONS}, or give the parameter a default"
            )
        if not batched:
            try:
                inspect.signature(function).bind("response", {})
            except TypeError as error:
                raise ValueError(
                    f"the reward {name} cannot be called with (response, payload): {error}; write "
                    f"name(response, payload) for one response, or name({PROMPTS}, {COMPLETIONS}, **columns) for "
                    "a batch"
                ) from None
        return cls(
            function=function, name=name, weight=weight, batched=batched, waits=_waits(function),
            parameters=tuple(n for n in named if n not in UNKNOWN), takes_all=takes_all,
        )  # fmt: skip

    @property
    def columns(self) -> tuple[str, ...]:
        """Returns the names of the required parameters that are columns of the data set.

        The tuple is empty for a function that takes one response.
        """
        if not self.batched:
            return ()
        given = inspect.signature(self.function).parameters
        own = [n for n in self.parameters if n not in (PROMPTS, COMPLETIONS)]
        return tuple(n for n in own if given[n].default is inspect.Parameter.empty)

    def batch(self, items: Sequence[Item]) -> dict[str, Any]:
        """Returns the keyword arguments of one call on [B] items: prompts, completions, and columns, each a list of B.

        Of a problem that is a conversation the prompt is its messages and the completion a list with one message, as in
        TRL; else both are texts. Raises KeyError for a column that no problem has.
        """
        payloads = [payload for _, payload in items]
        known = dict.fromkeys(key for payload in payloads for key in payload if key not in _OWN)
        missing = [name for name in self.columns if name not in known]
        if missing:
            raise KeyError(f"no column {missing[0]!r}; the problems have {', '.join(known)}: name it in data.fields")
        columns = {key: [payload.get(key) for payload in payloads] for key in known}
        columns[PROMPTS] = [payload.get("messages", payload.get("question")) for payload in payloads]
        columns[COMPLETIONS] = [_completion(response, payload) for response, payload in items]
        return {name: values for name, values in columns.items() if self.takes_all or name in self.parameters}


class Grader:
    """Grades responses with one reward function or several."""

    def __init__(
        self, functions: Sequence[CalledFunction], *, bounds: tuple[float, float] | None = None
    ) -> None:  # fmt: skip
        """`bounds`: the lowest and the highest score that are allowed. None allows any finite number."""
        self._functions, self._bounds = functions, bounds
        self.limits: tuple[float, float] | None = None  # of the sum
        self._loop: Any = None  # of functions that wait, kept from batch to batch with what they opened in it

    @property
    def together(self) -> bool:
        """Returns whether a batch is graded in one call, so that an error cannot be assigned to one item."""
        return any(one.batched or one.waits for one in self._functions)

    def grade(self, items: Sequence[Item]) -> Iterator[Result]:
        """Yields the result of each of [B] items, in order.

        If no function takes batches or is a coroutine function, each result is yielded before the next item is graded.
        Raises MemoryError, and BatchFailed when a batch function raises an error on several items. An error on a single
        item becomes the result of that item.
        """
        batches = [list(items)] if self.together else [[item] for item in items]
        for batch in batches:
            columns = [self._values(one, batch) for one in self._functions if not one.waits]
            columns = self._in_order(columns, self._waited(batch))
            for row in zip(*columns, strict=True):
                yield self._sum(row)

    def _in_order(self, direct: list[list[Any]], waited: list[list[Any]]) -> list[list[Any]]:
        first, second = iter(direct), iter(waited)
        return [next(second if one.waits else first) for one in self._functions]

    def _values(self, one: CalledFunction, batch: Sequence[Item]) -> list[Any]:
        """Calls one function. Returns [B] values that it returned or errors that it raised."""
        if not one.batched:
            return [_attempt(one.function, *item) for item in batch]
        return _listed(one, _attempt(lambda: one.function(**one.batch(batch))), len(batch))

    def _waited(self, batch: Sequence[Item]) -> list[list[Any]]:
        """Calls all coroutine functions concurrently. Returns for each function what `_values` returns."""
        waiting = [one for one in self._functions if one.waits]
        if not waiting:
            return []
        import asyncio  # slow to import, and few rewards wait

        async def one_of(call: Callable[[], Awaitable[Any]]) -> Any:
            try:
                return await call()
            except MemoryError:
                raise
            except GIVEN_UP as error:  # the border to user rewards
                return error

        async def values(one: CalledFunction) -> Any:
            if one.batched:
                return await one_of(lambda: one.function(**one.batch(batch)))
            calls = [one_of(functools.partial(one.function, *item)) for item in batch]
            return list(await asyncio.gather(*calls))

        async def together() -> list[Any]:
            return list(await asyncio.gather(*map(values, waiting)))

        if self._loop is None:
            self._loop = asyncio.Runner()
        found = zip(waiting, self._loop.run(together()), strict=True)
        return [_listed(one, value, len(batch)) if one.batched else value for one, value in found]

    def _sum(self, row: Sequence[Any]) -> Result:
        """Returns the weighted sum of the rewards of one item. Functions that returned None are left out."""
        total, parts, metrics = 0.0, 0, {}
        for one, value in zip(self._functions, row, strict=True):
            if isinstance(value, BaseException):
                return Result(None, why=told(value), trace=traceback_of(value))
            try:
                score, own = read_result(value, bounds=self._bounds)
            except ValueError as error:
                return Result(None, why=str(error) if len(row) == 1 else f"{one.name} {error}")
            if score is not None:
                total, parts = total + one.weight * score, parts + 1
                metrics |= {one.name: score} if len(row) > 1 else {}
            metrics |= {f"{one.name}/{name}" if len(row) > 1 else name: number for name, number in own.items()}
        if not parts:
            return Result(None, why="no reward function gave this response a reward")
        if self.limits is not None and not self.limits[0] <= total <= self.limits[1]:
            low, high = self.limits
            return Result(None, why=f"the rewards' sum {total:g} is outside of reward.range = [{low:g}, {high:g}]")
        return Result(total, metrics)


def read_result(
    value: Any, *, bounds: tuple[float, float] | None = None
) -> tuple[float | None, dict[str, float]]:  # fmt: skip
    """Returns the reward and the metrics in a value that a reward function returned.

    The value is a number, (number, {metric: number}), or a mapping with the key `reward`. None means that the function
    gives no reward. Raises ValueError for any other value.
    """
    metrics: Mapping[str, Any] = {}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        value, metrics = value
    elif isinstance(value, Mapping):
        if REWARD not in value:
            raise ValueError(f"returned a mapping with {', '.join(map(str, value)) or 'nothing'}: it needs {REWARD!r}")
        value, metrics = value[REWARD], {name: own for name, own in value.items() if name != REWARD}
    read = {str(name): _number(own) for name, own in metrics.items()}
    for name, own in read.items():
        if own is None or name in RESERVED:
            raise ValueError(f"returned the metric {name!r} = {metrics[name]!r}: metrics are finite numbers, none of "
                             f"them called {' or '.join(RESERVED)}")  # fmt: skip
    numbers_read = {name: own for name, own in read.items() if own is not None}
    if value is None and bounds is None:
        return None, numbers_read
    score = _number(value)
    if score is None or (bounds is not None and not bounds[0] <= score <= bounds[1]):
        wanted = "a finite number"
        if bounds is not None:
            wanted = f"a number in reward.range = [{bounds[0]:g}, {bounds[1]:g}]"
        raise ValueError(f"returned {repr(value)[:100]}: a reward returns {wanted}")
    return score, numbers_read


def name_of(function: Any) -> str:
    """Returns the name of a reward function for the metrics."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    name = function.__name__ if hasattr(function, "__name__") else type(function).__name__
    return name.strip("<>")


def _number(value: Any) -> float | None:
    """Returns the value as a finite float, or None for any other value. Accepts arrays and tensors of one element."""
    if hasattr(value, "item") and not isinstance(value, numbers.Real):
        try:
            value = value.item()
        except (TypeError, ValueError, RuntimeError):  # of several numbers
            return None
    try:
        number = float(value) if isinstance(value, numbers.Real) else math.nan
    except OverflowError:  # a whole number of hundreds of digits
        return None
    return number if math.isfinite(number) else None


def _imported(target: str) -> Any:
    module, _, name = target.partition(":")
    return vars(importlib.import_module(module))[name]


def _waits(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _completion(response: str, payload: Mapping[str, Any]) -> Any:
    return [{"role": "assistant", "content": response}] if "messages" in payload else response


def _attempt(call: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the value that a user's function returns, or the error that it raises. Only raises MemoryError."""
    try:
        return call(*arguments)
    except MemoryError:
        raise
    except GIVEN_UP as error:  # the border to user rewards
        return error


def _listed(one: CalledFunction, value: Any, count: int) -> list[Any]:
    """Returns the [B] results of a batch function; an error for each item if the function did not return a list of B.

    Raises BatchFailed if the function raised an error on several items.
    """
    if isinstance(value, BaseException):
        if count > 1:
            raise BatchFailed(one.name) from value
        return [value]
    try:
        found = None if isinstance(value, (str, Mapping)) else list(value)
    except TypeError:
        found = None
    if found is None or len(found) != count:
        what = f"{len(found)} values" if found is not None else f"a {type(value).__name__}"
        text = f"{one.name} returned {what} for {count} completions: return a list with one for each"
        return [ValueError(text)] * count
    return found
