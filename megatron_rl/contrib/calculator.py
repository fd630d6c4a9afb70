"""A calculator tool for models: exact arithmetic, with bounds on computing time and on the size of numbers."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Context, Decimal, Inexact, InvalidOperation
from fractions import Fraction
from typing import Any

from megatron_rl.config.base import ConfigError
from megatron_rl.environments.episode_types import Tool

ROUNDED_DIGITS = 15  # number of significant digits shown of a result without a finite decimal representation
MOST_DIGITS = 4000  # upper bound of max_digits; Python by default refuses to convert integers of over 4300 digits
# Number of bits per decimal digit: log2(10) = 3.32, rounded up. Rounded up, because a power that has more bits than
# max_digits * BITS_PER_DIGIT certainly has too many digits, and can be rejected before it is computed.
BITS_PER_DIGIT = 4
_BINARY: Mapping[type, Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: Mapping[type, Callable[[Fraction], Fraction]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class _Mistake(ValueError):
    """Raised for an expression that has no result. The message is shown to the model."""


@dataclass(kw_only=True)
class Calculator(Tool):
    """A tool that evaluates an expression of numbers, + - * / // % ** and parentheses. Numbers are fractions, so that
    0.1 + 0.2 is 0.3; only results of powers with a fractional exponent are rounded. For an invalid expression, the tool
    returns a text that begins with `error:`.
    """

    name: str = "calculator"
    max_characters: int = 500  # maximum length of an expression
    max_digits: int = 200  # maximum number of digits of the result and of all intermediate numbers

    description = "Evaluates an arithmetic expression of numbers with + - * / // % ** and parentheses."
    parameters = {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "for example (3 + 4) * 2 ** 10"}},
        "required": ["expression"],
    }

    def __post_init__(self) -> None:
        if not 1 <= self.max_digits <= MOST_DIGITS:
            raise ConfigError(f"args.max_digits = {self.max_digits}: give 1 to {MOST_DIGITS}")
        if self.max_characters < 1:
            raise ConfigError(f"args.max_characters = {self.max_characters}: give at least 1")

    def run(self, arguments: Mapping[str, Any]) -> str:
        expression = arguments.get("expression")
        if not isinstance(expression, str) or not expression.strip():
            return "error: give an expression as text"
        if len(expression) > self.max_characters:
            return f"error: the expression is longer than {self.max_characters} characters"
        source = expression.strip()
        try:
            return _shown(self._value(ast.parse(source, mode="eval").body, source), self.max_digits)
        except _Mistake as error:
            return f"error: {error}"
        except ZeroDivisionError:
            return "error: division by zero"
        except (SyntaxError, ValueError):  # ast.parse raises ValueError for a null byte
            return "error: this is no arithmetic expression"
        except (RecursionError, MemoryError):  # ast.parse raises these errors too
            return "error: the expression is nested too deeply"

    def _value(self, node: ast.expr, source: str) -> Fraction:
        match node:
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                return self._bounded(self._number(node, source))
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
                return _UNARY[type(op)](self._value(operand, source))
            case ast.BinOp(left=left, op=ast.Pow(), right=right):
                return self._bounded(self._power(self._value(left, source), self._value(right, source)))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return self._bounded(Fraction(_BINARY[type(op)](self._value(left, source), self._value(right, source))))
            case ast.BinOp(op=ast.BitXor()):
                raise _Mistake("^ is not known here; write ** for a power")
        raise _Mistake("only numbers, + - * / // % ** and parentheses are known here")

    def _number(self, node: ast.Constant, source: str) -> Fraction:
        """Returns the exact value of a number literal: 0.1 is one tenth."""
        if isinstance(node.value, int):
            return Fraction(node.value)
        try:
            written = Decimal(ast.get_source_segment(source, node) or "")
        except InvalidOperation:  # the exponent is outside the range of Decimal
            raise self._too_large() from None
        if abs(written.adjusted()) > self.max_digits:  # checked first, because Fraction writes out the exponent's zeros
            raise self._too_large()
        return Fraction(written)

    def _power(self, base: Fraction, exponent: Fraction) -> Fraction:
        if exponent.denominator != 1:
            return self._root(base, exponent)
        if base == 0 and exponent < 0:
            raise ZeroDivisionError
        if abs(base) in (0, 1):
            return base if exponent % 2 else abs(base) if exponent else Fraction(1)
        bits = max(base.numerator.bit_length(), base.denominator.bit_length()) - 1
        if bits * abs(exponent) > self.max_digits * BITS_PER_DIGIT:  # checked before the power is computed
            raise self._too_large()
        return base ** int(exponent)

    def _root(self, base: Fraction, exponent: Fraction) -> Fraction:
        if base < 0:
            raise _Mistake("a negative number has no power that is a fraction")
        try:
            return Fraction(repr(float(base) ** float(exponent)))
        except (OverflowError, ValueError):
            raise self._too_large() from None

    def _bounded(self, value: Fraction) -> Fraction:
        if max(abs(value.numerator), value.denominator) >= 10**self.max_digits:
            raise self._too_large()
        return value

    def _too_large(self) -> _Mistake:
        return _Mistake(f"a number has more than {self.max_digits} digits")


def _shown(value: Fraction, max_digits: int) -> str:
    """Returns a number as text: integers and finite decimals exactly, other numbers rounded to ROUNDED_DIGITS."""
    if value.denominator == 1:
        return str(value.numerator)
    exact = Context(prec=MOST_DIGITS)
    shown = exact.divide(Decimal(value.numerator), Decimal(value.denominator))
    if exact.flags[Inexact] or len(shown.as_tuple().digits) > max_digits:
        shown = Context(prec=ROUNDED_DIGITS).divide(Decimal(value.numerator), Decimal(value.denominator))
    shown = shown.normalize(Context(prec=MOST_DIGITS))
    return format(shown, "f") if abs(shown.adjusted()) <= 2 * ROUNDED_DIGITS else str(shown)
