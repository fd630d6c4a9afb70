"""Pairs of a known answer and an answer that a model gives, by what is right: math-verify alone is wrong on most."""

from __future__ import annotations

import math_verify
import pytest

from megatron_rl.rewards import math_answer
from megatron_rl.rewards.algebra_limits import CPU_S, TooLong, cpu_limit
from megatron_rl.rewards.math_answer import grade, grade_released

# The known answer, and an answer that is the same.
SAME = r"""
52_9 | 52_{\text{nine}}
52_9 | 52
1010_2 | 1010_{2}
\text{1A}_{16} | 1A_{16}
(52)_9 | 52_9
1\,234 | 1234
1234 | 1\,234
1234 | 1 234
1\ 234 | 1234
12\,345\,678 | 12345678
1\;234 | 1234
1~234 | 1234
10,\!000 | 10000
1\,000\,000 | 10^6
\{1,2,…,10\} | \{1,2,\ldots,10\}
\sin 30^\circ | \frac12
\frac12 | \sin 30^\circ
\sin 30^{\circ} | 0.5
60° | 60
60 | 60°
\tan 45^\circ | 1
\cos 60° | 1/2
1 | \tan(45^\circ)
\cos 20^\circ | \sin 70^\circ
20^\circ C | 20
0.\overline{3} | \frac13
\frac13 | 0.\overline{3}
0.\dot{3} | 1/3
0.\overline{12} | \frac{12}{99}
0.1\overline{6} | \frac16
0.\dot{1}\dot{2} | \frac{4}{33}
0.\dot{1}2\dot{3} | \frac{123}{999}
0.\overline{9} | 1
2.\overline{3} | \frac73
-0.\overline{3} | -\frac13
½ | \frac12
\frac12 | ½
0.5 | ½
2½ | \frac52
∞ | \infty
\infty | ∞
-5 | –5
１２ | 12
12 | １２
12 | ١٢
x² | x^2
x^2 | x²
x^{10} | x¹⁰
√2 | \sqrt{2}
\sqrt{2} | √2
2√3 | 2\sqrt{3}
\sqrt{12} | √12
\sqrt{12} | √(12)
\frac{\sqrt{3}}{2} | √3/2
3 \times 10^8 | 3×10⁸
3 \times 10^8 | 3·10^8
x ≤ 5 | x \le 5
¾ | 0.75
⅓ | \frac13
2 1/4 | \frac94
\frac94 | 2 1/4
-2 1/4 | -2.25
1 1/2 | 1.5
1.5 | 1 1/2
3 3/4 | 3.75
2\ 1/4 | 2.25
`73` | 73
73 | `73`
73 | **73**
73 | \text{73}
73 | \mathrm{73}
73 | 73.
\sqrt{1/n} | 1/\sqrt n
\sqrt{\frac1n} | \frac{1}{\sqrt n}
\frac{1}{\sqrt{n}} | \sqrt{\frac{1}{n}}
\frac{\sqrt n}{n} | \frac{1}{\sqrt n}
\sqrt{\frac{a}{b}} | \frac{\sqrt a}{\sqrt b}
\frac{\sqrt{a}}{\sqrt{b}} | \sqrt{\frac{a}{b}}
\sqrt{ab} | \sqrt a\sqrt b
\sqrt[3]{-8} | -2
\begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{pmatrix} 1 \\ 2 \end{pmatrix}
\emptyset | \varnothing
x=1,y=2 | (1,2)
f(x)=x^2 | f(t)=t^2
1<x<2 | 2>x>1
a<b<c | c>b>a
320000 | 3.2e5
6.02e23 | 6.02 \times 10^{23}
6.02 \times 10^{23} | 6.02 x 10^23
6.02 \times 10^{23} | 6.02*10^23
3.14 | 3,14
0.5 | .5
100 | 1e2
200\% | 2
15 | €15
15 | 15€
15 | £15
9.8 | 9.8 m/s
\$2.50 | 2.5
10:30 | 10:30
3:45 PM | 3:45 pm
\text{July } 4 | \text{July } 4
2024-01-02 | 2024-01-02
3:2 | 3 : 2
3\text{ to }2 | 3:2
A | (A)
\binom52 | 10
3^{2^2} | 81
5 | 5,
1:2:3 | 2:4:6
5 | \frac{25}{5}
(1,2) | \langle 1,2\rangle
\langle 1,2,3\rangle | (1,2,3)
\begin{cases} x=1 \\ y=2 \end{cases} | x=1,y=2
[-2,7] | -2 \le x \le 7
(2,\infty) | x>2
x\in(2,7) | 2<x<7
(-\infty,1)\cup(2,\infty) | x<1 \text{ or } x>2
x<1 \text{ or } x>2 | (-\infty,1)\cup(2,\infty)
2^{-1} | 0.5
10^-5 | 0.00001
\ln(ab) | \ln a + \ln b
2\ln x | \ln(x^2)
f(x) = 2x+1 | f(y) = 2y+1
5\text{ m/s} | 5 \text{ m}/\text{s}
5 m/s | 5
72^\circ\text{F} | 72
15^{\text{th}} | 15
3 | 3 red apples
1.5 million | 1500000
1500000 | 1.5 \text{ million}
\text{B} | B.
\begin{cases} 1 & x>0 \\ 0 & x\le 0 \end{cases} | \begin{cases} 0 & x\le 0 \\ 1 & x>0 \end{cases}
1+2+\cdots+n | 1+2+\ldots+n
\dbinom{5}{2} | 10
\frac{100!}{98!} | 9900
٣ | 3
５．５ | 5.5
3＋4 | 7
x₁ | x_1
(−1, 2） | (-1,2)
1⁄2 | \frac12
≥5 | \ge 5
x∈[0,1] | x\in[0,1]
5 ± 2 | 3, 7
a·b | ab
e² | e^2
½x | \frac{x}{2}
1½ | 1.5
0.3̅ | \frac13
0.(3) | \frac13
0.1\overline{63} | \frac{9}{55}
5 | \color{red}{5}
5 | {\color{red}5}
12 | 012
12 | 12e0
1 | 1.000
a_n = n | n
"""
# The known answer, and an answer that is another one.
OTHER = r"""
52_9 | 52_8
52 | 52_9
10_2 | 10_3
101_2 | 101_{10}
1\,234 | 235
1234 | 1\,235
1, 2, \ldots, 10 | 1, 3, \ldots, 10
\{1, 2, \ldots, n\} | \{1, 2, \ldots, n+1\}
1+2+\cdots+10 | 1+2+\cdots+11
2\cos 40^\circ | 2\cos 40
x \le 5 | x ≥ 5
\frac{2}{4} | 2 \frac14
\frac{21}{4} | 2 1/4
\begin{cases} x & x>0 \\ -x & x \le 0 \end{cases} | \begin{cases} x & x>0 \\ x & x \le 0 \end{cases}
\begin{cases} x & x>0 \\ -x & x \le 0 \end{cases} | x
(1,2) | \{1,2\}
\{1,2\} | (1,2)
1,2 | 1,2,2
1,2,2 | 1,2
16,3,1,1 | 16,3,1
16,3,1,1 | 16,3,3,1
-2,-2 | -2
1,1 | 1
\{1,2\} | \{1,2,3\}
\{1,2,3\} | \{1,2\}
(1,2,3) | \{1,2,3\}
5 | x=6
x \ne 3 | 3
5 | x \ge 5
1<x<2 | 1<x\le 2
320000 | 3.2 \times 10^{4}
3.2 \times 10^{-5} | 0.00032
6.02e23 | 6.03e23
0,5 | 0.5
3,14 | 3.14
3,14 | 314
1,234 | 1.234
0.001 | 0.0010001
0.12345678 | 0.12345679
15 cm | 15 m
15\text{ cm} | 15\text{ m}
15\text{ cm} | 15\text{ cm}^2
15\text{ cm}^2 | 15\text{ cm}^3
5 | 5\text{ or }6
15\text{ dollars} | 15\text{ euros}
5m | 5
10:30\text{ a.m.} | 10:30\text{ p.m.}
3:45 PM | 3:45 AM
2024-01-02 | 2021
3:2 | 5
2 | 3:2
A | a
\text{even} | \text{odd}
abc | cab
stop | spot
evil | live
no | on
x' | x
f'(x) | f(x)
f(2) | 2f
a^{\prime} | a
\angle ABC | \angle ACB
C | c
5 | 
5 | ?
5 | [5
5 | 5_2
5 | 5\text{ (or maybe 6)}
56 | 5\ 6
R^2-r^2 | 0
\pi(R^2-r^2) | \pi(r^2-R^2)
V_1 | v_1
A+a | 2a
10:30 | \frac13
3:45 | 1:15
1:2:3 | 1:3:2
1:2:3 | \frac16
5t | 5
5t | 5s
\frac12 t | \frac12
\frac{1}{2} g | \frac12
2x+3t | 2x+3
3c | 3
3d | 3
3 d | 3
2\sqrt2 h | 2\sqrt2
2ab | 2
2 ab | 2
0 | 10^{-8}
5 | 5,5
(1,2) | [1,2)
(1, -1), (-1, 1) | (\pm 1, \mp 1)
x=1, y=2, z=3 | (1,3,2)
x=1, y=2, z=3 | 3,2,1
x=1, y=2 | x=1
\mathbb{Z} | \mathbb{N}
\$5 | 5\text{ cents}
5\text{ cents} | \$5
5\text{ ft} | 5\text{ in}
5\text{ m}^2 | 5\text{ m}
5\text{ m/s} | 5\text{ km/h}
72^\circ\text{F} | 72^\circ\text{C}
5\text{ hours} | 5\text{ minutes}
2\text{ hours } 30\text{ minutes} | 2\text{ hours } 40\text{ minutes}
1.5\text{ million} | 1.5
1.5\text{ million} | 1.5\text{ billion}
5\text{ dozen} | 5
4\text{ July} | 4\text{ June}
(B) | (b)
\begin{array}{cc} 1 & 2 \end{array} | \begin{array}{cc} 1 & 3 \end{array}
f(x)=\begin{cases} 1 & x>0 \\ 0 & x\le 0 \end{cases} | f(x)=\begin{cases} 1 & x>0 \\ 2 & x\le 0 \end{cases}
0.1234\ldots | 0.1234
10^{10000} | 10^{9999}
\binom{100}{50} | \binom{100}{49}
11/2 | 1½
5 | 5\text{ or so}
5 | 5\text{ is wrong}
5 | 5?6
5 | \{5,6\}
5 | 5;5
5 | 6 \to 5
5 | 6 \implies 5
12 | 1\cdot2
12 | 1 2
12 | 1,2
12 | 1:2
xy | x+y
"""


@pytest.mark.parametrize(("pairs", "score"), [(SAME, 1.0), (OTHER, 0.0)])
def test_math_cases_are_graded_right(pairs, score):
    rows = [row.split(" | ") for row in pairs.strip().splitlines()]
    found = [(gold, answer) for gold, answer in rows if grade(f"So \\boxed{{{answer}}}.", {"answer": gold}) != score]
    assert not found


@pytest.mark.parametrize("known", ["the " + "quickbrownfox" * 6, r"\frac{1}{2} + " * 80 + "1"])
def test_math_cases_a_long_known_answer_is_read_as_the_release_reads_it(known):
    """Known answers of more than 1,000 characters, or with 60 letters in a row, were compared as texts."""
    other = f"{known} + 1" if "quick" not in known else "foxes"
    for graded in (grade, grade_released):
        assert graded(f"\\boxed{{{known}}}", {"answer": known}) == 1.0
        assert graded(f"\\boxed{{{other}}}", {"answer": known}) == 0.0
    if "frac" in known:
        assert grade(r"\boxed{41}", {"answer": known}) == grade_released(r"\boxed{41}", {"answer": known}) == 1.0


@pytest.mark.parametrize("grader", [grade, grade_released])
def test_math_cases_a_known_answer_that_takes_too_long_to_parse_is_cut_off(grader, monkeypatch):
    """The release's grader parsed known answers without a limit: 22 brackets took more than six seconds."""
    cut_off = []

    def parse(*arguments, **options):
        try:
            return math_verify.parse(*arguments, **options)
        except TooLong:
            cut_off.append(arguments[0])
            raise

    monkeypatch.setattr(math_answer, "parse", parse)
    monkeypatch.setattr(math_answer, "cpu_limit", lambda seconds=CPU_S: cpu_limit(seconds / 10))  # for fast processors
    known = "{" * 22 + "7" + "}" * 22
    assert grader(r"\boxed{7}", {"answer": known}) == 0.0
    assert f"\\boxed{{{known}}}" in cut_off


def test_math_cases_the_release_s_grader_keeps_its_verdicts():
    """math-verify's own mistakes, which the default grader does not make: runs of RL Tango's examples learn from it."""
    pairs = [
        ("52_9", "52_8", 1.0),
        (r"1\,234", "235", 1.0),
        ("5t", "5", 1.0),
        ("R^2-r^2", "0", 1.0),
        ("2 1/4", r"\frac94", 0.0),
    ]
    for gold, answer, score in pairs:
        assert grade_released(f"\\boxed{{{answer}}}", {"answer": gold}) == score
        assert grade(f"\\boxed{{{answer}}}", {"answer": gold}) == 1.0 - score


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        (r"\boxed{}", "5", 0.0),
        (r"It is 5. \boxed{}", "5", 0.0),
        (r"\boxed{\boxed{5}}", "5", 1.0),
        (r"\boxed{6} \boxed{\boxed{5}", "5", 1.0),
        (r"\boxed{3}, or rather \boxed{4}", "4", 0.0),
        (r"\boxed{5 apples and a remark that sympy cannot read}", "5", 0.0),
        (r"\fbox{5}", "5", 1.0),
        (r"\boxed{\text{1234567}}", "1234567.0", 1.0),
        (r"The answer is $(\frac{\log_{1}{0.5}}{{2}^{e}})!$.", "-123456.789", 0.0),  # sympy raises ZeroDivisionError
        (r"\boxed{(-1)!}", "2", 0.0),  # ValueError: gamma function pole
        (r"\boxed{\frac{x}{0}}", "2x", 0.0),  # TypeError: Cannot convert complex to float
        ("the share is 50%", "0.5", 1.0),
        ("the answer is $1\\,234$", "235", 0.0),
        ("the answer is $52_8$", "52_9", 0.0),
    ],
)
def test_math_cases_of_where_the_answer_stands(response, answer, score):
    assert grade(response, {"answer": answer}) == score
