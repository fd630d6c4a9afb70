"""Mathematical answers: other spellings of the known answer are right, near misses are wrong, and hostile ones cost
little."""

from __future__ import annotations

import logging
import math
import random
import signal
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from fuzzing import Tally, tally

from megatron_rl.rewards.math_answer import grade
from megatron_rl.rewards.math_cost_limit import too_costly

LIMIT_S = 5  # CPU seconds of one answer, as reward.timeout_s
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
    "%s**%s", "\\sum_{i=%s}^{%s} i", "\\int_{%s}^{%s} x dx", "%s_%s", "%s:%s", "%s \\pm %s",
    "\\begin{cases} %s & %s \\end{cases}",
]  # fmt: skip
UNITS = ["cm", "m", "kg", "dollars", "hours", "minutes", "square meters", "m/s", "degrees"]
WORDS = ["yes", "no", "stop", "spot", "even", "odd", "Evelyn", "Carla", "neither", "infinitely many"]
WIDE = str.maketrans("0123456789-", "０１２３４５６７８９−")
RAISED = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
Spelled = tuple[list[str], list[str]]  # spellings of one answer, near misses


class _Late(BaseException):
    """An answer takes longer than the limit; math-verify lets no other exception through."""


def integer(rng: random.Random) -> Spelled:
    n = rng.choice([rng.randrange(-20, 20), rng.randrange(1000, 10**7), rng.randrange(-(10**12), 10**12)]) or 3
    grouped = f"{n:,}"
    right = [str(n), f"{n}.0", str(n).translate(WIDE), f"`{n}`", rf"\text{{{n}}}", f"${n}$", f"x = {n}", f"{n}."]
    right += [grouped, grouped.replace(",", "{,}"), grouped.replace(",", r"\,"), grouped.replace(",", " ")]
    digits = str(abs(n))
    wrong = [
        str(n + 1),
        str(-n),
        str(n * 10),
        f"{n}.5",
        f"{n}, {n + 1}",
        f"{n}_7",
        rf"{n} \text{{ or }} {n + 1}",
        f"{n}x",
    ]
    wrong += [f"{n}, {n}", f"{n}!"] if abs(n) > 2 else []
    if len(set(digits)) > 1 and digits[::-1] != digits and n > 0:
        wrong.append(digits[::-1])
    return right, wrong


def decimal(rng: random.Random) -> Spelled:
    places, n = rng.randrange(1, 9), rng.randrange(1, 10**9) | 1
    text = f"{n // 10**places}.{n % 10**places:0{places}d}"
    value = Fraction(n, 10**places)
    other = f"{(n + 1) // 10**places}.{(n + 1) % 10**places:0{places}d}"
    right = [text, text + "0", f"{text} \\text{{ units}}"]
    if places <= 6:  # a fraction is compared to six decimals
        right.append(rf"\frac{{{value.numerator}}}{{{value.denominator}}}")
    return right, [other, f"-{text}", text.replace(".", ""), f"{n * 10 // 10**places}.{n * 10 % 10**places:0{places}d}"]


def fraction(rng: random.Random) -> Spelled:
    q = rng.randrange(2, 40)
    p = rng.choice([n for n in range(1, 3 * q) if math.gcd(n, q) == 1])
    right = [
        rf"\frac{{{p}}}{{{q}}}",
        f"{p}/{q}",
        rf"\dfrac{{{2 * p}}}{{{2 * q}}}",
        rf"\tfrac{{{p}}}{{{q}}}",
        f"{p}÷{q}",
    ]
    if p > q:
        right += [rf"{p // q}\frac{{{p % q}}}{{{q}}}", f"{p // q} {p % q}/{q}", rf"{p // q}\ {p % q}/{q}"]
    if p < 10 and q < 10:
        right.append(rf"\frac{p}{q}")
    wrong = [rf"\frac{{{p + 1}}}{{{q}}}", f"{p}/{q + 1}", f"-{p}/{q}", f"{p}{q}", f"{round(p / q, 3)}1", f"1 {p}/{q}"]
    wrong = [text for text in wrong if text != f"1 {p}/{q}" or p < q]
    return right, wrong + ([f"{q}/{p}"] if p > 1 else [str(q + 1)])


def recurring(rng: random.Random) -> Spelled:
    fixed, repeated = str(rng.randrange(10)) * rng.randrange(2), str(rng.randrange(1, 99))
    whole = rng.randrange(10)
    value = Fraction(int(f"{whole}{fixed}"), 10 ** len(fixed))
    value += Fraction(int(repeated), 10 ** len(fixed) * (10 ** len(repeated) - 1))
    text = rf"{whole}.{fixed}\overline{{{repeated}}}"
    dots = [rf"{whole}.{fixed}\dot{{{repeated}}}"] if len(repeated) == 1 else []
    right = [text, rf"\frac{{{value.numerator}}}{{{value.denominator}}}", f"{value}", *dots]
    return right, [f"{whole}.{fixed}{repeated}", rf"{whole}.{fixed}\overline{{{int(repeated) + 1}}}", rf"-{text}"]


def based(rng: random.Random) -> Spelled:
    base = rng.randrange(2, 10)
    digits = "".join(str(rng.randrange(base)) for _ in range(rng.randrange(2, 8))).lstrip("0") or "1"
    wrong = [f"{digits}_{base + 1}", f"{digits}0_{base}", f"1{digits}_{base}", f"-{digits}_{base}", f"{digits}_{{10}}"]
    return [f"{digits}_{base}", f"{digits}_{{{base}}}", f"({digits})_{base}"], wrong


def degrees(rng: random.Random) -> Spelled:
    n = rng.randrange(1, 180)
    return [str(n), f"{n}°", rf"{n}^\circ", rf"{n}^{{\circ}}", f"{n} degrees"], [
        rf"{n + 1}^\circ",
        rf"{n}\pi",
        f"-{n}°",
    ]


def sine(rng: random.Random) -> Spelled:
    n, name, other = rng.randrange(1, 89), *rng.choice([("sin", "cos"), ("cos", "sin"), ("tan", "cot")])
    right = [rf"\{name} {n}^\circ", rf"\{name}({n}°)", rf"\{name}{{{n}^{{\circ}}}}", rf"\{other} {90 - n}^\circ"]
    return right, [rf"\{name} {n + 1}^\circ", rf"\{name} {n}", rf"-\{name} {n}^\circ", rf"\{other} {91 - n}^\circ"]


def root(rng: random.Random) -> Spelled:
    a, b = rng.randrange(2, 12), rng.choice([2, 3, 5, 6, 7, 10, 11, 13])
    right = [
        rf"{a}\sqrt{{{b}}}",
        rf"\sqrt{{{a * a * b}}}",
        f"{a}√{b}",
        rf"\sqrt{b}\cdot{a}" if b < 10 else f"{a}√({b})",
    ]
    return right, [
        rf"{a}\sqrt{{{b + 1}}}",
        rf"{a + 1}√{b}",
        rf"\sqrt{{{a * b}}}",
        rf"-{a}\sqrt{{{b}}}",
        rf"{a}\sqrt[3]{{{b}}}",
    ]


def scientific(rng: random.Random) -> Spelled:
    e, m = rng.choice([-1, 1]) * rng.randrange(3, 25), rng.randrange(11, 100)
    text = f"{m // 10}.{m % 10}"
    powers = [rf"\times 10^{{{e}}}", rf"\cdot 10^{{{e}}}", f"×10{str(e).translate(RAISED)}", f"x 10^{{{e}}}"]
    wrong = [rf"{text} \times 10^{{{other}}}" for other in (e + 1, -e)] + [f"{text}1e{e}", f"-{text}e{e}", text]
    return [f"{text} {power}" for power in powers] + [f"{text}e{e}", rf"{m} \times 10^{{{e - 1}}}"], wrong


def elements(rng: random.Random, count: int) -> list[str]:
    """Returns different numbers, in different forms."""
    made = dict.fromkeys(
        rng.choice([str(rng.randrange(-9, 30)), rf"\frac{{1}}{{{rng.randrange(2, 9)}}}"]) for _ in range(40)
    )
    return [*made][:count]


def pair(rng: random.Random) -> Spelled:
    parts = elements(rng, rng.randrange(2, 5))
    other = [*parts[:-1], rf"{parts[-1]} + 1"]
    text = ",".join(parts)
    right = [f"({text})", rf"\left({', '.join(parts)}\right)", f"( {' , '.join(parts)} )"]
    wrong = [
        f"({','.join(parts[::-1])})",
        f"({','.join(other)})",
        rf"\{{{text}\}}",
        f"({text},7)",
        f"[{parts[0]},{parts[1]})",
    ]
    return right, [*wrong, f"({','.join(parts[1:])},{parts[0]})"]


def listed(rng: random.Random) -> Spelled:
    parts = elements(rng, rng.randrange(2, 6))
    mixed = rng.sample(parts, len(parts))
    right = [
        ", ".join(parts),
        ",".join(mixed),
        rf"\{{{','.join(mixed)}\}}",
        r" \text{ and } ".join(mixed),
        "; ".join(mixed),
    ]
    wrong = [
        ", ".join(parts[1:]),
        ", ".join([*parts, "77"]),
        ", ".join([*parts, parts[0]]),
        ", ".join([*parts[1:], "77"]),
    ]
    return right, [*wrong, f"[{', '.join(parts)}]", ", ".join([*parts[1:], parts[-1]])]


def interval(rng: random.Random) -> Spelled:
    low = rng.randrange(-9, 9)
    high, left, right_ = low + rng.randrange(1, 9), *rng.choice(["()", "[]", "[)", "(]"])
    flipped = {"(": "[", "[": "(", ")": "]", "]": ")"}
    text = f"{left}{low},{high}{right_}"
    wrong = [
        f"{flipped[left]}{low},{high}{right_}",
        f"{left}{low},{high}{flipped[right_]}",
        f"{left}{low},{high + 1}{right_}",
    ]
    far, other = (r"(-\infty,", f"{left}{high + 1},{high + 3}{right_}")
    if rng.random() < 0.5:
        return [text, rf"\left{left}{low}, {high}\right{right_}"], [
            *wrong,
            rf"\{{{low},{high}\}}",
            f"{far}{high}{right_}",
        ]
    return [rf"{text}\cup{other}", rf"{other} \cup {text}", f"{text}∪{other}"], [
        rf"{one}\cup{other}" for one in [*wrong[:2], f"{left}{low - 1},{high}{right_}"]
    ] + [text, other]


def matrix(rng: random.Random) -> Spelled:
    a, b, c, d = rng.sample(range(-9, 30), 4)
    forms = [rf"\begin{{{name}}} %s & %s \\ %s & %s \end{{{name}}}" for name in ("pmatrix", "bmatrix")]
    wrong = [(a, c, b, d), (a, b, c, d + 1), (b, a, d, c), (-a or 31, b, c, d)]
    return [form % (a, b, c, d) for form in forms], [forms[0] % cells for cells in wrong] + [f"({a},{b},{c},{d})"]


def signs(rng: random.Random) -> Spelled:
    a, b = rng.randrange(1, 20), rng.choice([r"\sqrt{2}", r"\sqrt{3}", str(rng.randrange(1, 9))])
    right = [rf"{a} \pm {b}", f"{a}±{b}", f"{a}+{b}, {a}-{b}", rf"\{{{a}-{b}, {a}+{b}\}}", rf"x = {a} \pm {b}"]
    return right, [f"{a}+{b}", f"{a}-{b}", rf"{a + 1} \pm {b}", rf"{a} \pm {b}, 77", rf"-{a} \pm {b}"]


def ratio(rng: random.Random) -> Spelled:
    parts = rng.sample([1, 2, 3, 4, 5, 7, 9], rng.randrange(2, 4))
    parts = parts if math.gcd(*parts) == 1 else [1, 2, 3]
    text = ":".join(map(str, parts))
    right = [text, " : ".join(map(str, parts)), ":".join(str(30 * part) for part in parts), text.replace(":", "∶")]
    return right, [
        ":".join(map(str, parts[::-1])),
        f"{text}:1",
        text.replace(":", ","),
        ":".join(map(str, [*parts[:-1], 11])),
    ]


def quantity(rng: random.Random) -> Spelled:
    n, (unit, other) = rng.randrange(2, 2000), rng.sample(UNITS, 2)
    right = [rf"{n}\text{{ {unit}}}", rf"{n} \mathrm{{~{unit}}}", f"{n} {unit}", rf"{n:,}\ \text{{{unit}}}"]
    return right, [
        rf"{n + 1}\text{{ {unit}}}",
        rf"{n}\text{{ {other}}}",
        rf"-{n}\text{{ {unit}}}",
        rf"{n}\text{{ {unit}}}^4",
    ]


def polynomial(rng: random.Random) -> Spelled:
    a, b, c = (rng.randrange(2, 12) for _ in range(3))
    x = rng.choice("xtnmsh")
    right = [f"{a}{x}^2+{b}{x}+{c}", f"{c}+{b}{x}+{a}{x}^2", f"{a}{x}²+{b}{x}+{c}", rf"{a} \cdot {x}^{{2}}+{c}+{b} {x}"]
    wrong = [
        f"{a}{x}^3+{b}{x}+{c}",
        f"{a}{x}^2-{b}{x}+{c}",
        f"{a}{x}^2+{b}+{c}",
        f"{a}{x}^2+{b}{x}",
        f"{a}{x}^2+{b}{x.upper()}+{c}",
    ]
    return right, [*wrong, f"{a + 1}{x}^2+{b}{x}+{c}"]


def chain(rng: random.Random) -> Spelled:
    low = rng.randrange(-9, 9)
    high = low + rng.randrange(1, 9)
    right = [rf"{low} < x \le {high}", f"{low}<x≤{high}", rf"{high} \ge x > {low}", rf"x \in ({low},{high}]"]
    return right, [
        rf"{low} \le x \le {high}",
        f"{low}<x<{high}",
        rf"{low} < x \le {high + 1}",
        rf"{low} > x \ge {high}",
    ]


def word(rng: random.Random) -> Spelled:
    one, other = rng.sample(WORDS, 2)
    return [one, rf"\text{{{one}}}", rf"\text{{{one.upper()}}}", rf"\mathrm{{{one}}}."], [
        other,
        rf"\text{{{other}}}",
        "0",
    ]


KINDS: dict[str, Callable[[random.Random], Spelled]] = {
    made.__name__: made
    for made in (
        *(
            integer,
            decimal,
            fraction,
            recurring,
            based,
            degrees,
            sine,
            root,
            scientific,
            pair,
            listed,
            interval,
            matrix,
        ),
        *(signs, ratio, quantity, polynomial, chain, word),
    )
}


def spelling(rng: random.Random) -> str:
    """Grades another spelling, or a near miss, of a random answer; near misses are wrong both ways round."""
    kind = rng.choice([*KINDS])
    right, wrong = KINDS[kind](rng)
    gold, miss = rng.choice(right), rng.random() < 0.5
    answer = rng.choice(wrong if miss else right)
    both = miss and "_" not in answer  # 52 may stand for 52_9, where the problem names the base
    for known, said in ((gold, answer), (answer, gold)) if both else ((gold, answer),):
        text = rng.choice(["\\boxed{%s}", "So $x$ is $\\boxed{%s}$.", "a $1$ b <answer>\\boxed{ %s }</answer>"]) % said
        if grade(text, {"answer": known}) != float(not miss):
            raise AssertionError(f"{kind}: {said!r} for {known!r} is graded {'right' if miss else 'wrong'}")
    return f"{kind} {'misses' if miss else 'spellings'}"


def expression(rng: random.Random, depth: int) -> str:
    """Returns a random expression whose forms are the ones that explode."""
    if depth == 0 or rng.random() < 0.2:
        return rng.choice(ATOMS)
    form = rng.choice(FORMS)
    return form % tuple(expression(rng, depth - 1) for _ in range(form.count("%s")))


def hostile(rng: random.Random) -> str:
    """Grades a hostile answer, in a response of several forms, against a known answer that it is not."""
    answer = expression(rng, rng.randrange(1, 5)) * rng.choice([1, 1, 1, 1, 40])
    if rng.random() < 0.1:
        answer = "".join(rng.choice("{}()[]^_!\\$,|&%a1½°√:") for _ in range(rng.randrange(1, 200)))
    text = rng.choice(["\\boxed{%s}", "The answer is $%s$.", "%s", "a $%s$ b \\boxed{-77/13}", "\\boxed{%s"]) % answer
    if grade(text, {"answer": "-123456.789"}) != 0.0:
        raise AssertionError(f"{text!r} is right")
    return "refused" if too_costly(answer) else "graded"


def fuzz(seed: int, count: int) -> Tally:
    """Tries spellings and near misses of random answers, and hostile answers."""
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def stop(signum: int, stack: object) -> None:
        raise _Late

    def limited(rng: random.Random) -> str:
        kind: Any = rng.choice([spelling, spelling, hostile])
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        try:
            return kind(rng)
        except _Late:
            if kind is spelling:
                raise AssertionError("a fair answer takes longer than the limit") from None
            return "late"  # reward.cut_off says what becomes of it
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    old = signal.signal(signal.SIGPROF, stop)
    try:
        return tally(seed, count, limited, timed=False)
    finally:
        signal.signal(signal.SIGPROF, old)
