"""The table of benchmarks: their data sets, the conversion of a row to a question and an answer, and their graders."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rl.config.schema import ConfigError, PromptSet
from megatron_rl.data.problems import Problem, read_rows
from megatron_rl.data.rows import DataError
from megatron_rl.texts.tags import boxed

DataRow = Mapping[str, Any]
Values = Mapping[str, Any]

MATH = "megatron_rl.rewards.math_answer:grade"
LABEL = "megatron_rl.rewards.short_answer:grade_label"
SHORT = "megatron_rl.rewards.short_answer:grade_text"
CODE_OUTPUT = "megatron_rl.rewards.code_answer:grade_output"
CODE_INPUT = "megatron_rl.rewards.code_answer:grade_input"
INSTRUCTIONS = "megatron_rl.rewards.instructions:grade"
# RL Tango's prompt template for all benchmarks: its training prompt without the word "mathematical"
# RL Tango's released code has this template in data_preprocess/prepare_eval_benchmarks.py (generate_prompt).
GENERAL = "tango_general"
PROCESSBENCH = {"gsm8k": "GSM8K", "math": "MATH", "olympiadbench": "OlympiadBench", "omnimath": "Omni-MATH"}
ASK_OUTPUT = "What does f({input}) return? Answer with a Python literal."
ASK_INPUT = (
    "Find arguments with which f returns {output}. Answer with the arguments as Python literals, separated by commas, "
    "without the function's name."
)
TABLE_ROWS = 400  # maximum number of rows of a table that is part of a question


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A named set of problems that a generator solves or, if `judged` is True, a named set of solutions that a verifier
    judges."""

    name: str
    title: str
    hub: str | None  # name of the data set on the Hugging Face hub; None: the rows can only be read from `data_dir`
    # Function that converts a row to the question, the answer and other values for the grader.
    # The function returns None for a row that does not belong to the benchmark.
    read: Callable[[DataRow], Values | None]
    grader: str = MATH
    template: str = GENERAL
    split: str = "test"
    subset: str | None = None
    file: str | None = None  # name of the only file of the data set that is read; None for all files of the split
    folder: str | None = None  # name of the local file or folder with the rows; None if it is the benchmark's name
    judged: bool = False


def benchmarks() -> dict[str, Benchmark]:
    """Returns all benchmarks by name: mathematics problems, other problems, and solutions for a verifier."""
    crux, bench = "cruxeval-org/cruxeval", "Qwen/ProcessBench"
    output, arguments = partial(_crux, ask=ASK_OUTPUT), partial(_crux, ask=ASK_INPUT)
    yes_no = partial(_with_facts, words={"true": "yes", "false": "no"})
    true_false = partial(_with_facts, words={"yes": "true", "no": "false"})  # as in RL Tango's released code
    rows = [
        Benchmark("math500", "MATH-500", "HuggingFaceH4/MATH-500", _plain),
        Benchmark("aime24", "AIME 2024", "Maxwell-Jia/AIME_2024", _plain, split="train"),
        Benchmark("aime25", "AIME 2025", "yentinglin/aime_2025", _plain, split="train"),
        Benchmark("aime26", "AIME 2026", "MathArena/aime_2026", _plain, split="train"),
        Benchmark("amc23", "AMC 2023", "math-ai/amc23", _plain),
        Benchmark("amc24", "AMC 2024", "rawsh/2024_AMC12", _plain, split="train"),
        Benchmark("amc25", "AMC 2025", None, _plain),
        Benchmark("math_beyond", "MATH-Beyond", "brendel-group/MATH-Beyond", _plain),
        Benchmark("ifeval", "IFEval", "google/IFEval", _ifeval, grader=INSTRUCTIONS, template="plain", split="train"),
        Benchmark("minerva_math", "Minerva", "math-ai/minervamath", _plain),
        Benchmark("olympiadbench", "OlympiadBench", "knoveleng/OlympiadBench", _plain, split="train"),
        Benchmark("gsm8k", "GSM8K", "openai/gsm8k", _gsm8k, subset="main"),
        Benchmark("svamp", "SVAMP", "ChilleD/SVAMP", _svamp),
        Benchmark("boardgameqa", "BoardgameQA", "tasksource/Boardgame-QA", _boardgame, grader=LABEL),
        Benchmark("cruxeval", "CRUXEval (output)", crux, output, grader=CODE_OUTPUT),
        Benchmark("cruxeval_input", "CRUXEval (input)", crux, arguments, grader=CODE_INPUT, folder="cruxeval"),
        Benchmark("strategyqa", "StrategyQA (test)", "ChilleD/StrategyQA", yes_no, grader=LABEL),
        Benchmark(  # StrategyQA as in Table 1 of RL Tango's paper (arXiv 2505.15034), with 2,290 problems
            "strategyqa_train", "StrategyQA (train)", "voidful/StrategyQA", true_false, grader=LABEL,
            split="train", file="strategyqa_train.json",
        ),
        Benchmark("tablebench", "TableBench", "Multilingual-Multimodal-NLP/TableBench", _table, grader=SHORT),
        *(
            Benchmark(
                f"processbench_{subset}", f"ProcessBench {title}", bench, solution, split=subset,
                folder="processbench", template="tango_verifier", judged=True,
            )
            for subset, title in PROCESSBENCH.items()
        ),
    ]  # fmt: skip
    return {row.name: row for row in rows}


def benchmark(name: str) -> Benchmark:
    """Returns the benchmark with this name. Raises ConfigError for an unknown name."""
    table = benchmarks()
    if name not in table:
        raise ConfigError(f"sets: {name!r} is unknown; known are {', '.join(table)}; a set of your own has a `path`")
    return table[name]


def source_of(bench: Benchmark, data_dir: str | None, *, limit: int | None = None) -> PromptSet:
    """Returns the location from which a benchmark's rows are read.

    Without `data_dir`, the location is the data set on the hub. Otherwise it is the first of these that exists in
    `data_dir`: a folder NAME, a file NAME.jsonl or NAME.parquet, or a folder with the data set's name on the hub, as
    created by `megatron-rl fetch`. If none exists, the location is NAME.jsonl. Raises ConfigError if `data_dir` is None
    and the benchmark is not on the hub. `limit`: maximum number of problems.
    """
    name = bench.folder or bench.name
    if data_dir is None:
        if bench.hub is None:
            raise ConfigError(
                f"{bench.name} is not on the hub: put {name}.jsonl into a directory, and name it data_dir"
            )
        return PromptSet(path=bench.hub, split=bench.split, subset=bench.subset, file=bench.file, limit=limit)
    base = Path(data_dir)
    places = [base / name, base / f"{name}.jsonl", base / f"{name}.parquet"]
    places += [] if bench.hub is None else [base / bench.hub]
    place = next((p for p in places if p.exists()), None)
    if place is None:  # no error: another job may write the file later, or it may be on another host
        return PromptSet(path=str(places[1]), split=bench.split, subset=bench.subset, file=bench.file, limit=limit)
    # Only a folder from `megatron-rl fetch` is known to have the split names of the hub. In any other folder, the files
    # whose names begin with `test` are read, if there are any.
    not_from_hub = place.is_dir() and (bench.hub is None or place != base / bench.hub)
    tests = not_from_hub and any(re.match(r"test([-_.]|$)", p.stem) for p in place.iterdir())
    split = "test" if tests else bench.split
    return PromptSet(path=str(place), split=split, subset=bench.subset, file=bench.file, limit=limit)


def read_benchmark(bench: Benchmark, source: PromptSet) -> list[Problem]:
    """Reads all problems of a benchmark from `source`, the location of its rows. Raises the errors of
    data.problems.read_rows."""
    return read_rows(source, bench.read)


def solution(row: DataRow) -> Values:
    """Converts a row of a data set to a solution that a verifier judges: `question`, `steps`, `label`, `correct` and
    `step_labels`.

    `label` is the index of the first wrong step, from 0, or -1 if no step is wrong. `step_labels` is a list of whether
    each step is correct, or None if the row has no such list. `correct` is whether the final answer is correct; if the
    row has no such field, it is whether no step is wrong. Raises DataError for a malformed row.
    """
    steps: Any = row.get("steps")
    label: Any = row.get("label")
    labels, wrong = row.get("step_labels"), ""
    if labels is not None:
        label = next((i for i, correct in enumerate(labels) if not correct), -1)
    if not isinstance(steps, (list, tuple)) or not steps or not all(isinstance(step, str) for step in steps):
        wrong = f"steps is {str(steps)[:60]!r}: give a list of texts, one or more"
    elif labels is not None and len(labels) != len(steps):
        wrong = f"{len(labels)} step_labels for {len(steps)} steps: give one for each"
    elif type(label) is not int or not -1 <= label < len(steps):
        wrong = f"label is {label!r}: give the first wrong step, 0 to {len(steps) - 1}, or -1 for none"
    if wrong:
        raise DataError(wrong)
    correct = row.get("final_answer_correct", row.get("correct"))
    values = {
        "question": _first(row, "question", "problem"),
        "steps": list(steps),
        "label": label,
        "answer": str(label),
    }
    return values | {"correct": label < 0 if correct is None else bool(correct), "step_labels": labels}


def _plain(row: DataRow) -> Values:
    """Converts a row to a question and its answer. The columns may have any of several usual names.

    If the row has no answer, the last \\boxed{} of its solution is used. Raises DataError for a row without a question,
    and for a row with neither an answer nor a boxed answer in a solution.
    """
    question = _first(row, "question", "problem", "Question", "Problem")
    context = row.get("context")
    answer = next(
        (row[name] for name in ("answer", "final_answer", "Answer") if row.get(name) not in (None, "", [])), None
    )
    if answer is None:
        answer = boxed(str(row.get("solution") or row.get("Solution") or ""))
    if isinstance(answer, (list, tuple)):
        answer = ", ".join(map(str, answer))
    return {"question": f"{context}\n{question}" if context else question, "answer": _gold(answer)}


def _gold(answer: Any) -> str:
    """Converts a known answer to LaTeX that math-verify parses: 27.0 -> 27, 4.5e33 -> 4.5 \\times 10^{33}, without $.

    Raises DataError for an empty answer.
    """
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    text = str(answer if answer is not None else "").replace("$", "").strip()
    text = re.sub(r"(?<![\w.])(-?\d+)\.(?=$|/|,|\s)", r"\1", text)  # 3./2 -> 3/2
    number = re.fullmatch(r"(-?\d+(?:\.\d+)?)[eE]([+-]?\d+)", text)
    if number:
        text = rf"{number[1]} \times 10^{{{int(number[2])}}}"
    if not text:
        raise DataError("there is no answer")
    return text


def _gsm8k(row: DataRow) -> Values:
    _, mark, answer = str(row.get("answer", "")).rpartition("####")
    return {"question": _first(row, "question"), "answer": _gold(answer.replace(",", "") if mark else None)}


def _ifeval(row: DataRow) -> Values:
    """Converts a row of IFEval to the fields of a problem: the question, and the instructions for which the grader
    checks whether a response follows them."""
    kinds = row.get("instruction_id_list")
    if not isinstance(kinds, list) or not kinds:
        raise DataError(f"instruction_id_list is {str(kinds)[:60]!r}: give a list of the names of instructions")
    return {"question": _first(row, "prompt"), "instruction_id_list": kinds, "kwargs": row.get("kwargs")}


def _svamp(row: DataRow) -> Values:
    body, question = _first(row, "Body").strip(), _first(row, "Question").strip()
    body = body if body.endswith((".", "?", "!", ",")) else f"{body}."
    answer = row.get("Answer")
    if isinstance(answer, str) and re.fullmatch(r"-?\d+\.0+", answer):
        answer = float(answer)
    return {"question": f"{body} {question}", "answer": _gold(answer)}


def _boardgame(row: DataRow) -> Values:
    choices = ["proved", "disproved", "unknown"]
    example = _first(row, "example", "question")
    ask = (
        'Is the statement in question "proved", "disproved" or "unknown" by the rules? '
        "Answer with one of these three words."
    )
    return {
        "question": f"{example}\n{ask}",
        "answer": _one_of(row.get("label", row.get("answer")), choices),
        "choices": choices,
    }


def _with_facts(row: DataRow, words: Mapping[str, str]) -> Values:
    """Converts a row with a yes-or-no question, facts about the question, and its answer.

    `words`: maps an answer in the row, such as "true", to the word that the question asks for, such as "yes".
    """
    facts, choices = row.get("facts") or [], list(words.values())
    shown = facts if isinstance(facts, str) else "\n".join(map(str, facts))
    question = f'{_first(row, "question")} Answer with "{choices[0]}" or "{choices[1]}".'
    answer = str(row.get("answer")).lower()
    return {
        "question": f"Facts:\n{shown}\n\nQuestion: {question}" if shown else question,
        "answer": _one_of(words.get(answer, answer), choices),
        "choices": choices,
    }


def _table(row: DataRow) -> Values | None:
    """Converts a row of the benchmark TableBench, a question about a table.

    Returns None for a row that is not of the type NumericalReasoning or FactChecking with the direct prompt (DP).
    """
    if row.get("qtype") not in ("NumericalReasoning", "FactChecking") or row.get("instruction_type", "DP") != "DP":
        return None
    table = row.get("table")
    if isinstance(table, str):
        try:
            table = json.loads(table)
        except (ValueError, RecursionError) as error:
            raise DataError(f"the table is not JSON: {error}") from error
    if not isinstance(table, Mapping) or not {"columns", "data"} <= set(table):
        raise DataError("the table has no columns and data")
    lines = [table["columns"], *table["data"][:TABLE_ROWS]]
    shown = "\n".join(" | ".join(map(str, line)) for line in lines)
    question = f"Table:\n{shown}\n\nQuestion: {_first(row, 'question')}\nGive the answer alone, as short as possible."
    if (answer := row.get("answer")) is None or not str(answer).strip():
        raise DataError("there is no answer")
    return {"question": question, "answer": str(answer)}


def _crux(row: DataRow, ask: str) -> Values:
    code, argument, output = (_first(row, name) for name in ("code", "input", "output"))
    question = f"Here is a Python function.\n\n{code}\n\n{ask.format(input=argument, output=output)}"
    return {"question": question, "answer": output, "code": code, "input": argument}


def _one_of(value: Any, choices: Iterable[str]) -> str:
    text = str(value).strip().lower()
    if text not in choices:
        raise DataError(f"the label is {value!r}, not one of {', '.join(choices)}")
    return text


def _first(row: DataRow, *names: str) -> str:
    """Returns the first non-empty text of a row in the columns `names`. Raises DataError if there is none."""
    for name in names:
        value = row.get(name)
        if isinstance(value, str) and value.strip():
            return value
    raise DataError(f"no text under {' or '.join(names)}; the row has {', '.join(map(str, row))}")
