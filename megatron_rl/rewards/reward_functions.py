"""Calls reward functions on single responses or on batches, and computes the weighted sum of several rewards.

Each worker process of rewards.grading_pool imports this module, so it only needs the standard library.
"""

from __future__ import annotations

import functools
import inspect
import math
import pickle
import pkgutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.lib.user_code import told, traceback_of

Item = tuple[str, Mapping[str, Any]]  # a response and the payload of its problem
PROMPTS, COMPLETIONS = "prompts", "completions"  # parameter names of a function that grades batches
# Parameters that TRL passes to reward functions. This module cannot pass them, because it only has texts.
UNKNOWN = ("completion_ids", "completions_ids", "prompt_ids", "trainer_state")
# names that users cannot give to rewards and metrics, because the training recipes use them
RESERVED = ("outcome", "trained")
REWARD = "reward"  # key of the reward in a mapping that a function returns; the other keys are metrics
# RESPONSE is a parameter of verl's reward functions (`compute_score`). A function with it is called as in verl.
# A function may return a mapping with the key SCORE, as in verl; the other values of the mapping need not be numbers.
RESPONSE, SCORE = "solution_str", "score"
VERL = {"data_source": "data_source", "ground_truth": "answer", "extra_info": "extra_info"}  # {parameter: column}
# errors of user code that end only the grading in which they are raised
GIVEN_UP = (Exception, SystemExit, KeyboardInterrupt)
# The largest absolute value of a reward or a margin. Losses are computed in float32, which ends at 3.4e38: squares and
# sums of such numbers stay finite.
LARGEST = 1e15
_OWN = ("messages", "prompt")  # keys of a payload that are not passed to batch functions as columns


class BatchFailed(Exception):
    """Raised when a reward function that grades batches fails on a batch of several items. The caller then grades each
    item alone to find the item that caused the error."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one grading. If `score` is None, `why` is the error message. `metrics` are additional numbers."""

    score: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    why: str = ""
    trace: str = ""  # the traceback, if the function raised an error


@dataclass(frozen=True, kw_only=True)
class Function:
    """The location of a reward function, and the weight of the function in a sum of several rewards."""

    target: str | None = None  # import path of the function, package.module:name
    pickled: str | None = None  # cloudpickle file of a function that cannot be imported, used instead of `target`
    weight: float = 1.0  # factor of the function's reward in the sum
    name: str = ""  # name of the reward in the metrics; if empty, the name of the function
    args: dict[str, Any] = field(default_factory=dict)  # additional keyword arguments for the function

    __pydantic_config__ = {"extra": "forbid"}  # an unknown key in a config is an error

    def load(self) -> Callable[..., Any]:
        """Imports or unpickles the function and returns it. Raises ValueError if the function cannot be imported or
        unpickled."""
        where = self.target if self.pickled is None else self.pickled
        if where is None or (self.target is not None and self.pickled is not None):
            raise ValueError(f"functions: {self.name or 'one of them'} needs either a target or a pickled file")
        try:
            function = pkgutil.resolve_name(where) if self.pickled is None else pickle.loads(Path(where).read_bytes())
        except GIVEN_UP as error:  # user code: an import or an unpickling may raise any error
            raise ValueError(f"the reward {where!r} cannot be loaded: {told(error)}") from error
        if not callable(function):
            raise ValueError(f"the reward {where!r} is a {type(function).__name__}, not a function")
        if isinstance(function, type):  # instances of the class are called
            return function(**self.args)
        return functools.partial(function, **self.args) if self.args else function


@dataclass(kw_only=True)
class RewardFunctions:
    """A plug-in for the setting `reward.target`: a reward that is the weighted sum of several reward functions.

    Each reward may be any finite number. If `reward.range` is set, the sum must lie in that range.
    """

    functions: tuple[Function, ...]

    def __post_init__(self) -> None:
        """Loads the reward functions. Raises ValueError for a function that cannot be loaded or called, and for a name
        that is reserved or repeated."""
        functions = tuple(entry if isinstance(entry, Function) else Function(**entry) for entry in self.functions)
        if not functions:
            raise ValueError("functions is empty: name at least one")
        called = tuple(CalledFunction.of(entry.load(), entry.name, weight=entry.weight) for entry in functions)
        names = [function.name for function in called]
        for name in names:
            if len(functions) > 1 and (names.count(name) > 1 or name in RESERVED):
                raise ValueError(f"functions: the name {name!r} is taken twice, or is a recipe's: give another `name`")
        self.functions = functions
        self.grader = Grader(called)  # calls the reward functions and computes the weighted sum


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledFunction:
    """A reward function and its calling convention, which is derived from the function's signature."""

    function: Callable[..., Any]
    name: str
    weight: float
    batched: bool  # whether the function grades a batch: it takes lists and returns a list
    waits: bool  # whether the function is a coroutine function
    by_name: bool  # whether the function is called with the parameters of verl's reward functions
    columns: tuple[str, ...]  # names of the required parameters of a batch function that are columns of the data set
    # names of the parameters that can be passed to the function; None if the function accepts any name (**kwargs)
    parameters: Collection[str] | None

    @classmethod
    def of(cls, function: Callable[..., Any], name: str = "", *, weight: float = 1.0) -> CalledFunction:
        """Returns the calling convention of a function, according to its signature.

        A function with a parameter named `completions` or `prompts` grades batches, as in TRL. A function with a
        parameter named `solution_str` is called as in verl. Any other function is called with a response and the
        problem's payload. `weight`: factor of the function's reward in the weighted sum of rewards. Raises ValueError
        if `weight` is not finite, or if the function cannot be called in any of these ways.
        """
        name, signature = name or name_of(function), inspect.signature(function)
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        named = {p.name: p.default is p.empty for p in signature.parameters.values() if p.kind in kinds}
        takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        batched, wrong = bool({PROMPTS, COMPLETIONS} & named.keys()), ""
        by_name = RESPONSE in named and not batched
        extra = [key for key, needed in named.items() if needed and key not in (RESPONSE, *VERL)]
        if not math.isfinite(weight):
            wrong = f"has the weight {weight}: give a finite number"
        elif unknown := [key for key in UNKNOWN if named.get(key)]:
            wrong = (
                f"has the parameter {unknown[0]!r}: rewards are given texts and columns of the data set; use "
                f"{COMPLETIONS}, or give the parameter a default"
            )
        elif by_name and extra:
            wrong = f"has the parameter {extra[0]!r}, which verl does not pass: give it a default, or give it in `args`"
        elif not batched and not by_name:
            try:
                signature.bind("response", {})
            except TypeError as error:
                wrong = (
                    f"cannot be called with (response, payload): {error}; write name(response, payload) for one "
                    f"response, name({PROMPTS}, {COMPLETIONS}, **columns) for a batch as in TRL, or "
                    f"name(data_source, {RESPONSE}, ground_truth, extra_info) as in verl"
                )
        if wrong:
            raise ValueError(f"the reward {name} {wrong}")
        plain = function
        while isinstance(plain, functools.partial):
            plain = plain.func
        waits = inspect.iscoroutinefunction(plain) or inspect.iscoroutinefunction(type(plain).__call__)
        required = (key for key, needed in named.items() if batched and needed and key not in (PROMPTS, COMPLETIONS))
        parameters = None if takes_all else named.keys() - {*UNKNOWN}
        return cls(
            function=function, name=name, weight=weight, batched=batched, waits=waits, by_name=by_name,
            columns=tuple(required), parameters=parameters,
        )  # fmt: skip

    def calls(self, items: Sequence[Item]) -> list[Callable[[], Any]]:
        """Returns the calls that grade B items: a single call if the function grades batches, otherwise B calls."""
        if self.batched:
            return [lambda: self.function(**self.batch(items))]
        if self.by_name:
            return [functools.partial(self.function, **self.named(*item)) for item in items]
        return [functools.partial(self.function, *item) for item in items]

    def named(self, response: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the keyword arguments with which verl calls a reward function on one response. Arguments that the
        function does not take are left out. A column that the problem does not have is passed as None."""
        values = {RESPONSE: response, **{name: payload.get(column) for name, column in VERL.items()}}
        return {name: value for name, value in values.items() if self.parameters is None or name in self.parameters}

    def batch(self, items: Sequence[Item]) -> dict[str, Any]:
        """Returns the keyword arguments of a call of the reward function on B items: prompts, completions and columns
        of the data set, each a list of length B.

        If a problem is a conversation, its prompt is the list of its messages and its completion is a list of one
        message, as in TRL; otherwise both are texts. Raises KeyError for a required column that no problem has.
        """
        payloads = [payload for _, payload in items]
        keys = dict.fromkeys(key for payload in payloads for key in payload if key not in _OWN)
        missing = [name for name in self.columns if name not in keys]
        if missing:
            raise KeyError(f"no column {missing[0]!r}; the problems have {', '.join(keys)}: name it in data.fields")
        columns = {key: [payload.get(key) for payload in payloads] for key in keys}
        columns[PROMPTS] = [payload.get("messages", payload.get("question")) for payload in payloads]
        columns[COMPLETIONS] = [
            [{"role": "assistant", "content": response}] if "messages" in payload else response
            for response, payload in items
        ]
        return {name: column for name, column in columns.items() if self.parameters is None or name in self.parameters}


class Grader:
    """A grader that calls one or several reward functions on responses."""

    def __init__(
        self, functions: Sequence[CalledFunction], *, bounds: tuple[float, float] | None = None
    ) -> None:  # fmt: skip
        """`bounds`: lowest and highest allowed score of each function. If None, any finite number is allowed."""
        self._functions, self._bounds = functions, bounds
        self.limits: tuple[float, float] | None = None  # lowest and highest allowed weighted sum; None for no limit
        # event loop of the coroutine functions; kept between batches, so that the functions' connections stay open
        self._loop: Any = None

    @property
    def together(self) -> bool:
        """Returns whether several items are graded in one call, so that a crash or a time-out cannot be attributed to
        one item."""
        return any(function.batched or function.waits for function in self._functions)

    def grade(self, items: Sequence[Item]) -> Iterator[Result]:
        """Grades B items, pairs (response, payload). Yields the B results in order.

        If no function takes batches or is a coroutine function, each result is yielded before the next item is graded.
        Raises MemoryError if a reward function raises it, and BatchFailed if a batch function raises an error on
        several items. An error on a single item becomes the result of that item.
        """
        batches = [list(items)] if self.together else [[item] for item in items]
        for batch in batches:
            # the call of a coroutine function only returns a coroutine, which starts when it is awaited
            values = [[_attempt(call) for call in function.calls(batch)] for function in self._functions]
            if any(function.waits for function in self._functions):
                values = self._awaited(values)
            columns = [
                _listed(function.name, returned[0], len(batch)) if function.batched else returned
                for function, returned in zip(self._functions, values, strict=True)
            ]
            for row in zip(*columns, strict=True):
                yield self._sum(row)

    def _awaited(self, columns: list[list[Any]]) -> list[list[Any]]:
        """Awaits all coroutines in `columns` concurrently. Returns `columns` with each coroutine replaced by the value
        that it returned, or by the error that it raised."""
        import asyncio  # imported here, because the import is slow and few reward functions are coroutine functions

        async def settled(value: Any) -> Any:
            try:
                return await value if inspect.isawaitable(value) else value
            except MemoryError:
                raise
            except GIVEN_UP as error:  # user code may raise any error
                return error

        async def together() -> list[list[Any]]:
            return await asyncio.gather(*(asyncio.gather(*map(settled, column)) for column in columns))

        if self._loop is None:
            self._loop = asyncio.Runner()
        return self._loop.run(together())

    def _sum(self, row: Sequence[Any]) -> Result:
        """Returns the result of one item: the weighted sum of its rewards, without functions that returned None. `row`:
        the value that each function returned for the item, or the error that the function raised."""
        total, parts, metrics = 0.0, 0, {}
        for function, value in zip(self._functions, row, strict=True):
            if isinstance(value, BaseException):
                return Result(None, why=told(value), trace=traceback_of(value))
            try:
                score, numbers = read_result(value, bounds=self._bounds)
            except ValueError as error:
                return Result(None, why=str(error) if len(row) == 1 else f"{function.name} {error}")
            if score is not None:
                total, parts = total + function.weight * score, parts + 1
                metrics |= {function.name: score} if len(row) > 1 else {}
            metrics |= {f"{function.name}/{name}" if len(row) > 1 else name: number for name, number in numbers.items()}
        if not parts:
            return Result(None, why="no reward function gave this response a reward")
        if not in_range(total):
            return Result(None, why=f"the rewards' sum {total:g} is beyond {LARGEST:g}")
        if self.limits is not None and not self.limits[0] <= total <= self.limits[1]:
            low, high = self.limits
            return Result(None, why=f"the rewards' sum {total:g} is outside of reward.range = [{low:g}, {high:g}]")
        return Result(total, metrics)


def read_result(
    value: Any, *, bounds: tuple[float, float] | None = None
) -> tuple[float | None, dict[str, float]]:  # fmt: skip
    """Splits the value that a reward function returned into (reward, metrics).

    The value is a number, (number, {metric: number}), a mapping with the key `reward` whose other values are metrics,
    or a mapping with the key `score`, as in verl. In verl's mapping, the other values that are numbers are metrics, and
    the rest is ignored. A reward of None means that the function gives no reward; it is only allowed without `bounds`.
    Raises ValueError for any other value.
    """
    metrics: Mapping[str, Any] = {}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        value, metrics = value
    elif isinstance(value, Mapping):
        if REWARD not in value and SCORE in value:
            numbers = {name: number for name, number in value.items() if name == SCORE or finite(number) is not None}
            value = {REWARD if name == SCORE else name: number for name, number in numbers.items()}
        if REWARD not in value:
            raise ValueError(f"returned a mapping with {', '.join(map(str, value)) or 'nothing'}: it needs {REWARD!r}")
        value, metrics = value[REWARD], {name: number for name, number in value.items() if name != REWARD}
    read = {str(name): finite(number) for name, number in metrics.items()}
    for name, number in read.items():
        if number is None or name in RESERVED:
            raise ValueError(f"returned the metric {name!r} = {metrics[name]!r}: metrics are finite numbers, none of "
                             f"them called {' or '.join(RESERVED)}")  # fmt: skip
    numbers_read = {name: number for name, number in read.items() if number is not None}
    if value is None and bounds is None:
        return None, numbers_read
    score = finite(value)
    if score is None or not in_range(score) or (bounds is not None and not bounds[0] <= score <= bounds[1]):
        expected = f"a finite number of at most {LARGEST:g}"
        if bounds is not None:
            expected = f"a number in reward.range = [{bounds[0]:g}, {bounds[1]:g}]"
        raise ValueError(f"returned {repr(value)[:100]}: a reward returns {expected}")
    return score, numbers_read


def name_of(function: Any) -> str:
    """Returns the name of a reward function for the metrics."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    name = function.__name__ if hasattr(function, "__name__") else type(function).__name__
    return name.strip("<>")


def in_range(number: float) -> bool:
    """Returns whether a number is from -LARGEST to LARGEST. NaN is not."""
    return abs(number) <= LARGEST


def finite(value: Any) -> float | None:
    """Returns the value as a finite float, or None for any other value. Accepts arrays and tensors of one element."""
    if isinstance(value, str | bytes):
        return None
    try:
        number = float(value.item() if hasattr(value, "item") else value)
    except Exception:  # a value of user code may raise anything: RuntimeError for a tensor of two elements
        return None
    return number if math.isfinite(number) else None


def _attempt(call: Callable[[], Any]) -> Any:
    """Calls a user's function. Returns the function's value, or the error that the function raised. A MemoryError is
    not returned but raised again."""
    try:
        return call()
    except MemoryError:
        raise
    except GIVEN_UP as error:  # user code may raise any error
        return error


def _listed(name: str, value: Any, count: int) -> list[Any]:
    """Converts the value that the batch function `name` returned, or the error that it raised, to a list of `count`
    entries, one for each item.

    If the value is not a list of `count` values, every entry is a ValueError. Raises BatchFailed if the function raised
    an error on several items.
    """
    if isinstance(value, BaseException):
        if count > 1:
            raise BatchFailed(name) from value
        return [value]
    try:
        values = None if isinstance(value, (str, Mapping)) else list(value)
    except TypeError:
        values = None
    if values is None or len(values) != count:
        what = f"{len(values)} values" if values is not None else f"a {type(value).__name__}"
        text = f"{name} returned {what} for {count} completions: return a list with one for each"
        return [ValueError(text)] * count
    return values
