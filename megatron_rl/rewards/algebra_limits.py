"""Keeps a model's text from failing a calculation of sympy: errors and long calculations mean that there is no result.

sympy, and what it uses, raise errors of many unrelated classes for expressions that they do not support, such as a
product of two matrices in a numeric comparison.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from mpmath.libmp import NoConvergence
from sympy.core.function import PoleError
from sympy.matrices.exceptions import MatrixError
from sympy.polys.polyerrors import BasePolynomialError

CPU_S = 2.0  # processor time that the comparison of one answer may take, which is below the default of reward.timeout_s
AGAIN_S = 0.05  # processor time after which TooLong is raised again in a calculation that goes on
NO_RESULT = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError),
    *(BasePolynomialError, MatrixError, NoConvergence, PoleError),
)  # errors of sympy; a RecursionError is a RuntimeError


class TooLong(BaseException):
    """A calculation takes more processor time than allowed. Not a subclass of Exception or of math-verify's
    TimeoutException, because sympy and math-verify catch these and go on."""


@contextlib.contextmanager
def cpu_limit(seconds: float = CPU_S) -> Iterator[None]:
    """Raises TooLong inside the block when this process has used `seconds` of processor time (user time) in it.

    TooLong is raised again until the block ends, because Python swallows it in a finaliser (`__del__`) and in callbacks
    of the garbage collector. The limit needs a signal, which Python delivers in the main thread. In other threads there
    is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    ended = False

    def stop(number: int, frame: FrameType | None) -> None:
        if not ended:
            raise TooLong(f"more than {seconds:g} s of processor time")

    former = signal.signal(signal.SIGVTALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, AGAIN_S)
        yield
    finally:
        ended = True  # first: a signal that is raised here would leave the timer on
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, former)
