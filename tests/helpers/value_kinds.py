"""Kinds of values that a known answer or a response may have, and all graders, for tests of every pair of kinds."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from megatron_rl.contrib import entailment_reward, last_letter, ssrl_reward
from megatron_rl.contrib.comparing import read_comparison
from megatron_rl.contrib.self_play import read_proposal
from megatron_rl.environments.tool_task import first_call
from megatron_rl.recipes.votes import elect
from megatron_rl.rewards import (
    code_answer,
    exact_match,
    instructions,
    math_answer,
    repetition,
    role_tags,
    short_answer,
    verdicts,
)
from megatron_rl.rewards.algebra_limits import CPU_S
from megatron_rl.texts import tags

MOST_S = 10 * CPU_S  # processor time of one grading, on a loaded machine, too
MATRIX = r"\begin{%s}%s&%s\\%s&%s\end{%s}"
JUNK = "{}()[]^_!\\$,;|&%~#'\"`:=<>+-*/.aix0579½√°²∞π×÷\x00\x07\x1b\u202e\u200b\ufeff\ud800🙂中\n\t"


def number(rng: random.Random) -> str:
    return rng.choice(["0", "-0", "7", "-12", "3.5", "-.25", "1,234", "1e5", "1" * rng.randrange(20, 60)])


def matrix(rng: random.Random) -> str:
    kind = rng.choice(["pmatrix", "bmatrix", "vmatrix", "array", "matrix"])
    cells = [rng.choice([str(rng.randrange(-9, 10)), "x", r"\frac12", "0"]) for _ in range(4)]
    return MATRIX % (kind, *cells, kind)


def junk(rng: random.Random) -> str:
    return "".join(rng.choices(JUNK, k=rng.randrange(1, 80)))


def nested(rng: random.Random) -> str:
    depth = rng.choice([3, 12, 22, 30, 300, 5000])
    opening, closing = rng.choice(
        [("(", ")"), ("{", "}"), ("[", "]"), (r"\sqrt{", "}"), (r"\frac{1}{", "}"), (r"\{", r"\}"), ('{"a":', "}")]
    )
    return opening * depth + "1" + closing * rng.choice([depth, depth, depth - 1, 0])


def malformed(rng: random.Random) -> str:
    return rng.choice(
        [
            r"\frac{1}",
            r"\frac",
            r"\sqrt[",
            r"\begin{pmatrix}1&2",
            r"\left(1",
            "x_{",
            "1^",
            r"\text{",
            r"\binom{1}",
            "{}",
        ]
        + [
            r"\boxed{",
            r"\frac{1}{0}",
            "1/0",
            "0^{-1}",
            r"\log 0",
            r"\log_1 2",
            "(-1)!",
            r"\infty-\infty",
            r"\sqrt",
            "{,}",
        ]
        + [r"\int_0^1", r"\sum_{i=1}^{n}", r"\lim_{x\to0}\frac{\sin x}{x}", r"\frac{d}{dx}x^2", r"\det", r"x \pmod 0"]
    )


def huge(rng: random.Random) -> str:
    return rng.choice(
        [
            "10^{10000000}",
            "10⁹⁹⁹⁹⁹⁹⁹⁹⁹",
            "9^9^9^9",
            "9**9**9",
            "100!!",
            "(10!)!",
            "2^{2^{2^{2^{2}}}}",
            "1e999999",
            "9" * 5000,
        ]
        + [r"\binom{10^9}{10^8}", "(x+y+z)^{300}", "(1+\\sqrt2+\\sqrt3)^{99}", "7^{7000}", "5 million million million"]
        + [
            r"\begin{pmatrix}x&y\\z&w\end{pmatrix}^{200}",
            r"\begin{pmatrix}1&2\\3&4\end{pmatrix}^{9999}",
            "2^{x^{2^{x^2}}}",
        ]
        + [r"\sum_{k=1}^{2000} \frac{1}{k^{x}}", r"\int_0^1 e^{-x^{x^x}} dx", "x^{9999}+x^{9998}+1", "a" * 3000]
    )


KINDS: Mapping[str, Callable[[random.Random], str]] = {
    "number": number,
    "fraction": lambda rng: rng.choice(
        [r"\frac{3}{4}", "3/4", "2 1/4", "½", r"\dfrac{-1}{x}", r"0.\overline{3}", "1:2:3"]
    ),
    "matrix": matrix,
    "product of matrices": lambda rng: matrix(rng) + rng.choice(["", r"\cdot ", "+", "-", "*"]) + matrix(rng),
    "expression of a matrix": lambda rng: rng.choice(["2%s", "%s^2", "%s^{-1}", "%s^T", "%s+1", "x%s", r"\frac{%s}{2}"])
    % matrix(rng),
    "set": lambda rng: rng.choice(
        [r"\{1,2\}", r"\{x\mid x>1\}", r"\emptyset", r"\{1,\{2\}\}", r"\mathbb{R}", r"\{\}"]
    ),
    "interval": lambda rng: rng.choice(["[0,1)", r"(-\infty,2]", r"(0,1)\cup(2,3]", "[1,0]", r"(x,\infty)", "[,]"]),
    "tuple": lambda rng: rng.choice(
        ["(1,2)", "(a,b,c)", "((1,2),(3,4))", "(1,)", "1,2,3", r"1,2,\ldots,9", r"(\pm1,\mp2)"]
    ),
    "equation": lambda rng: rng.choice(
        ["x=1", "x=1,y=2", "x^2+y^2=1", "a<b<c", r"x\ne 2", "f(x)=2x", "x=", "=", r"x\ge1>y"]
    ),
    "system": lambda rng: r"\begin{cases} x & x>0 \\ -x & x\le 0 \end{cases}",
    "unit": lambda rng: rng.choice(
        [r"5\text{ cm}", "5 m/s", r"\$5", "5€", "3:45 pm", "60°", r"9.8\text{ m}/\text{s}^2", "°"]
    ),
    "percentage": lambda rng: rng.choice(["50%", r"50\%", "50 percent", r"x\%", "%", r"\frac{1}{2}\%"]),
    "text": lambda rng: rng.choice(
        ["yes", r"\text{Evelyn}", "C", "(B)", "stop", "the answer is 3", "no one or 2", ""]
    ),
    "function": lambda rng: rng.choice(
        [r"\sin x", r"\ln(ab)", "f(x)", r"\arctan 2", r"|x|", r"\gamma^2-1", r"\lfloor x\rfloor"]
    ),
    "complex": lambda rng: rng.choice(
        ["1+2i", "e^{i\\pi}", r"\sqrt{-1}", "i", r"\overline{z}", r"\operatorname{Re} z"]
    ),
    "infinity": lambda rng: rng.choice(
        [r"\infty", r"-\infty", "∞", r"\frac{1}{\infty}", r"\infty!!", r"\text{undefined}"]
    ),
    "radical": lambda rng: rng.choice(
        [r"\sqrt{2+\sqrt{3+\sqrt{5}}}", r"\sqrt[3]{-8}", "√√2", r"\sqrt{x^2}", r"\sqrt[0]{2}"]
    ),
    "power": lambda rng: rng.choice(
        ["2^{2024}", "x^{y^{z}}", "e^{-x}", "2^{-1000}", "0^0", "(-8)^{1/3}", "10^-5", "x²³"]
    ),
    "based": lambda rng: rng.choice(["52_9", "101_2", r"1A_{16}", "x_1", r"52_{\text{nine}}", "5_", "_5"]),
    "calculus": lambda rng: rng.choice(
        [r"\int x dx", r"\sum_{i=1}^{10} i", r"\frac{d}{dx} x", r"\prod_{i=1}^{5} i", r"\lim x"]
    ),
    "json": lambda rng: rng.choice(
        ['{"a": [1, null]}', "[NaN]", '"\\ud800"', "{'a': 1}", "[1, 2", "1e400", "{1: {2}}"]
    ),
    "literal": lambda rng: rng.choice(
        ["[1, 'a']", "{[1]: 2}", "b'x'", "1 if x else 2", "-" * 500 + "1", "a" + ".b" * 900, "f'{'"]
    ),
    "malformed": malformed,
    "huge": huge,
    "nested": nested,
    "junk": junk,
}  # fmt: skip
RESPONSES = (
    "%s", r"\boxed{%s}", "<answer>%s</answer>", "The answer is $%s$.", "Answer: %s", "So %s or 3\n#### %s",
    r"<think>%s</think>\boxed{%s}", "```json\n%s\n```", "<scores>%s, %s</scores>", "<score>%s</score>",
    r"<step_verification><step>%s</step></step_verification><final_verification>\boxed{%s}</final_verification>",
    "<search>%s</search>", r"\text{%s}", r"\boxed{%s} and \boxed{%s}", "<answer>%s",
)  # fmt: skip


def _with_answer(grade: Callable[..., float]) -> Callable[[str, str], Any]:
    return lambda response, answer: grade(response, {"answer": answer})


GRADERS: Mapping[str, Callable[[str, str], Any]] = {
    "math": _with_answer(math_answer.grade),
    "math as released": _with_answer(math_answer.grade_released),
    "text": _with_answer(short_answer.grade_text),
    "label": lambda response, answer: short_answer.grade_label(response, {"answer": answer, "choices": [answer, "a"]}),
    "exact match": _with_answer(exact_match.grade),
    "literal": _with_answer(code_answer.grade_output),
    "last letter": _with_answer(last_letter.grade),
    "ssrl": _with_answer(ssrl_reward.grade),
    "repetition": _with_answer(repetition.grade),
    "entailment": lambda response, answer: entailment_reward.grade(response, {"answer": "yes"}),
    "instructions": lambda response, answer: instructions.grade(
        response,
        {
            "instruction_id_list": [kind for kind in instructions.checks() if kind in PLAIN_INSTRUCTIONS],
            "kwargs": None,
        },
        mode="loose",
    ),
    "votes": lambda response, answer: elect([response, answer, response]),
    "verdicts": lambda response, answer: verdicts.review(response, num_steps=3, correct=True, generator_format=1.0),
    "tags": lambda response, answer: (tags.boxed(response), tags.generator_format(response), tags.step_texts(response)),
    "roles": lambda response, answer: (
        role_tags.judged_score(response), role_tags.proposal_form(response), read_proposal(response)
    ),
    "comparison": lambda response, answer: read_comparison(response),
    "tool calls": lambda response, answer: first_call(response, ["search", "answer"]),
}  # fmt: skip
# kinds of instructions that need no values
PLAIN_INSTRUCTIONS = frozenset(
    {
        *("detectable_format:json_format", "detectable_format:title", "detectable_format:constrained_response"),
        *("combination:two_responses", "startend:quotation", "punctuation:no_comma", "change_case:english_capital"),
        *("change_case:english_lowercase",),
    }
)
# The known answer of a row is the data's, so an empty one, or one that the released grader cannot parse, is refused.
REFUSED = "cannot be read: mend or drop this problem"


def respond(rng: random.Random, kind: str) -> str:
    """Returns a response with a value of a kind, in one of several forms."""
    return rng.choice(RESPONSES).replace("%s", KINDS[kind](rng))


def grade_pair(grader: str, response: str, answer: str) -> str:
    """Grades a response to a known answer. Returns the outcome. Raises AssertionError if the grader raises an error or
    takes long. The known answer comes from the data, and may be refused."""
    start = time.process_time()
    try:
        GRADERS[grader](response, answer)
    except ValueError as error:
        if REFUSED in str(error):
            return "refused"
        raise AssertionError(f"{grader} fails: {response!r} for {answer!r}") from error
    except Exception as error:
        raise AssertionError(f"{grader} fails: {response!r} for {answer!r}") from error
    assert time.process_time() - start < MOST_S, f"{grader} takes long: {response!r} for {answer!r}"
    return "graded"
