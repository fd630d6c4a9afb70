"""Hostile mathematical answers: each is refused, or graded in little time; none of them is right."""

from __future__ import annotations

import logging
import random
import signal

from fuzzing import Tally, tally

from megatron_rl.rewards.cheap import too_costly
from megatron_rl.rewards.math_answer import grade

LIMIT_S = 5  # of one answer, as reward.timeout_s
ATOMS = [
    "1",
    "2",
    "7",
    "10",
    "99",
    "x",
    "n",
    "\\pi",
    "0.5",
    "10000000",
    "999999999999",
    "-3",
    "e",
    "i",
    "\\infty",
    "\\alpha",
]
FORMS = [
    "{%s}^{%s}", "%s^%s", "(%s)!", "%s!", "%s!!", "\\frac{%s}{%s}", "\\sqrt{%s}", "\\sqrt[%s]{%s}", "\\binom{%s}{%s}",
    "(%s+%s)", "(%s)(%s)", "%s,%s", "\\left(%s\\right)^{%s}", "\\log_{%s}{%s}", "\\{%s,%s\\}", "|%s|", "%s e%s",
    "%s**%s",
]  # fmt: skip


class _Late(BaseException):
    """An answer takes longer than the limit; math-verify lets no other exception through."""


def expression(rng: random.Random, depth: int) -> str:
    """Returns a random expression whose forms are the ones that explode."""
    if depth == 0 or rng.random() < 0.2:
        return rng.choice(ATOMS)
    form = rng.choice(FORMS)
    return form % tuple(expression(rng, depth - 1) for _ in range(form.count("%s")))


def fuzz(seed: int, count: int) -> Tally:
    """Grades answers in responses of several forms against a known answer that none of them is."""
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def stop(signum: int, stack: object) -> None:
        raise _Late

    def one(rng: random.Random) -> str:
        answer = expression(rng, rng.randrange(1, 5)) * rng.choice([1, 1, 1, 1, 40])
        if rng.random() < 0.1:
            answer = "".join(rng.choice("{}()[]^_!\\$,|&%a1") for _ in range(rng.randrange(1, 200)))
        text = (
            rng.choice(["\\boxed{%s}", "The answer is $%s$.", "%s", "a $%s$ b \\boxed{-77/13}", "\\boxed{%s"]) % answer
        )
        try:
            known = "-123456.789"
            score = grade(text, {"answer": known})
        except _Late:
            return "late"  # reward.cut_off says what becomes of it
        if score != 0.0:
            raise AssertionError(f"{text!r} is right")
        return "refused" if too_costly(answer) else "graded"

    old = signal.signal(signal.SIGALRM, stop)

    def limited(rng: random.Random) -> str:
        signal.alarm(LIMIT_S)
        try:
            return one(rng)
        finally:
            signal.alarm(0)

    try:
        return tally(seed, count, limited)
    finally:
        signal.signal(signal.SIGALRM, old)
