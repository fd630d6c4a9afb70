"""`megatron-rl generate`: generates SFT data from a teacher model's responses to a problem set.

Prompt/response pairs are written to train.parquet and validation.parquet. Responses that were truncated at
sampling.max_tokens are written to truncated.parquet instead, because training on truncated responses would teach the
model to stop in the middle. If keep_truncated is set, truncated responses are treated like other responses. With a
`reward`, wrong responses are written to wrong.parquet, and responses that cannot be graded to ungraded.parquet.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import shutil
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pydantic
from rich.progress import track

from megatron_rl.config.data_settings import resolve
from megatron_rl.config.schema import ConfigError, GenerateConfig
from megatron_rl.data.conversations import ANSWER, MESSAGES, QUESTION
from megatron_rl.data.problems import Problem, read_problems
from megatron_rl.data.rows import BadRow, DataError, refuse, table_of, write_parquet
from megatron_rl.engines.protocol import Engine, complete
from megatron_rl.evaluation.draw import prompt_tokens
from megatron_rl.messages.commands import Commands
from megatron_rl.rewards.grading_pool import Graded, GradePool, check_failures
from megatron_rl.run import input_digests
from megatron_rl.run.checkpoint import read_json, write_json
from megatron_rl.session import generation_progress
from megatron_rl.session.launch_ranks import Place
from megatron_rl.session.open_engines import Direct, open_engines
from megatron_rl.session.run_setup import open_world_for, sampling_of
from megatron_rl.spec.run_spec import GenerateSpec
from megatron_rl.texts.chat_template import ASSISTANT, ChatError, problem_text, tokenizer_of
from megatron_rl.texts.response_forms import read_response, thought_opening
from megatron_rl.texts.text import read_template
from megatron_rl.texts.vocabulary import vocabulary_of
from megatron_rl.types import Outcome

CHUNK = 512  # number of prompts per batch of requests; partial results are saved after each batch
# Columns that are copied from a problem to its output rows, in addition to those in data.fields
FIELDS = (QUESTION, MESSAGES, ANSWER, "data_source", "extra_info")
_RESPONSES = pydantic.TypeAdapter(list[list[tuple[str, bool]]])  # the responses of a chunk, as they are saved
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asked:
    """One problem with its prompt for the teacher model."""

    problem: Problem
    prompt: str  # the text template filled with the question; for a conversation, only the question
    # token ids of the prompt, rendered with the chat template if `chat` is set or the problem is a conversation
    tokens: Sequence[int]


@dataclass(frozen=True)
class Answered:
    """One response of the teacher model to a problem."""

    problem: Problem
    prompt: str
    text: str
    finished: bool  # False if the response was truncated at sampling.max_tokens
    graded: Graded | None = None  # None if the config has no reward


def run(spec: GenerateSpec, place: Place, environment: Mapping[str, str] | None = None) -> int:
    """Implements `megatron-rl generate`: generates the teacher's responses and writes prompt/response pairs. Every rank
    calls it. Returns 0.

    An output row has `prompt`, `response`, and the fields of the problem that the config selects. Prompt and response
    are lists of messages if the problem is a conversation, otherwise strings. Nothing is generated if the output is
    already complete. `environment`: the environment variables of the servers that are started.
    """
    # Ctrl-C ends the process at once; only the responses of the current chunk are lost
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    config, generations = spec.config, list[_Generation]()  # on the driver

    def done() -> bool:
        questions = asked_of(spec, tokenizer_of(config.model), read_problems(config.data))
        output = spec.engine.directory
        begun = (output / generation_progress.MARK).exists() or (output / generation_progress.PARTS).exists()
        record = output / input_digests.FILE
        read = input_digests.tell_changes(record, spec.settings, spec.models, begun=begun, what="answers")
        generations.append(_Generation(config, spec.settings, questions, read))
        if not generation_progress.finished(spec.settings, generations[0].problems):
            return False
        mark = Path(config.output) / generation_progress.MARK
        print(f"{config.output} has all answers of this config already; remove {mark} to ask the teacher again")
        return True

    with open_world_for(spec, place) as world, contextlib.ExitStack() as stack:
        if world.from_leader(done):
            return 0
        [name], tokenizer = spec.engine.opened, tokenizer_of(config.model)
        servers = Direct(environment or {}, place.local_rank)
        commands = Commands(world)
        engines = open_engines(spec.engine, {name: tokenizer}, world, commands, stack, servers=servers).engines

        def work() -> None:
            answers = generations[0].answer(engines[name], tokenizer)
            generations[0].write(generations[0].grade(answers, tokenizer))
            shutil.rmtree(generations[0].parts)

        commands.drive(work)
    return 0


def asked_of(spec: GenerateSpec, tokenizer: Any, problems: Sequence[Problem]) -> list[Asked]:
    """Returns the problems with their prompts, without problems whose prompt is longer than max_prompt_tokens.

    Warns about the problems left out. Raises ConfigError if `template` is null and a problem is not a conversation, or
    if `chat` is set without a chat template. Raises DataError if the share of problems left out is above
    data.max_bad_share, if no problem is left, or if a prompt has a token id outside the model's vocabulary."""
    config = spec.config
    if config.template is None and any("messages" not in problem.values for problem in problems):
        raise ConfigError("template is null, and the problems are no conversations: name a text file with {question}")
    template = "" if config.template is None else read_template(config.template)
    kept, long, most = [], list[BadRow](), config.max_prompt_tokens
    vocabulary = vocabulary_of(config.model, tokenizer)
    for problem in problems:
        values = {name: value for name, value in problem.values.items() if name != ANSWER}
        try:
            tokens = prompt_tokens(tokenizer, template, values, chat=config.chat)
        except ChatError as error:
            raise DataError(f"problem {problem.row}: {error}") from None
        if why := vocabulary.missing(tokens):
            raise DataError(f"problem {problem.row}: its prompt has {why}")
        if most is None or len(tokens) <= most:
            kept.append(Asked(problem, str(problem_text(template, values)), tokens))
        else:
            why = f"its prompt has {len(tokens)} tokens: raise max_prompt_tokens = {most}"
            long.append(BadRow(f"problem {problem.row}", why))
    refuse(long, len(problems), config.data.max_bad_share, config.data.path)
    if not kept:
        raise DataError(f"every prompt is longer than max_prompt_tokens = {most}: raise it")
    return kept


def _row(answered: Answered, fields: Collection[str]) -> dict[str, Any]:
    """Returns an output row: prompt, response, and the problem's values whose names are in `fields`.

    If a conversation ends with an assistant message, the model has continued this message. The message then becomes the
    beginning of the response."""
    values, text = {n: value for n, value in answered.problem.values.items() if n in fields}, answered.text
    prompt = list(values.pop("messages", ()))
    if not prompt:
        return {**values, "prompt": answered.prompt, "response": text}
    if prompt[-1]["role"] == ASSISTANT:
        text = f"{prompt.pop()['content']}{text}"
    return {**values, "prompt": prompt, "response": [{"role": ASSISTANT, "content": text}]}


def _saved(file: Path) -> list[list[tuple[str, bool]]] | None:
    """Returns the responses of a chunk that an earlier start has saved, or None if there is no such file or, with a
    warning, if it is damaged."""
    try:
        return _RESPONSES.validate_python(read_json(file)) if file.exists() else None
    except ValueError as error:
        _log.warning("%s is damaged, and is made again: %s", file, error)
        return None


@dataclass(frozen=True)
class _Generation:
    """The generation of responses to one problem set. Used on the driver (rank 0)."""

    config: GenerateConfig
    settings: Mapping[str, Any]  # the resolved config as plain values
    questions: Sequence[Asked]
    read: Mapping[str, Any]  # digests of the files that are read

    @property
    def parts(self) -> Path:
        """Returns the directory of the partial results, which is deleted when the output is complete."""
        return Path(self.config.output) / generation_progress.PARTS

    @functools.cached_property
    def digest(self) -> str:
        """Returns the digest of everything that determines the responses: settings, model files and prompts."""
        return generation_progress.parts_digest(self.settings, self.read, [a.tokens for a in self.questions], CHUNK)

    @functools.cached_property
    def problems(self) -> str:
        """Returns the digest of the problems and responses. The file that marks the output as complete contains this
        digest."""
        return generation_progress.problems_digest(self.read, [a.problem.values for a in self.questions], self.digest)

    def answer(self, engine: Engine, tokenizer: Any) -> list[Answered]:
        """Generates the responses to all problems, with a progress bar.

        Saves the responses of each finished chunk of CHUNK prompts in the directory `parts`. A restarted command
        continues with the first chunk that is not saved."""
        config, questions, digest, parts = self.config, self.questions, self.digest, self.parts

        def one_chunk(start: int) -> list[list[tuple[str, bool]]]:
            kept = parts / f"{digest}_{start:08d}.json"
            if (rows := _saved(kept)) is not None:
                return rows
            sampling = sampling_of(config.sampling, n=config.n, seed=config.seed + start)
            drawn = complete(engine, [a.tokens for a in questions[start : start + CHUNK]], sampling)
            rows = [
                [(read_response(tokenizer, question.tokens, c.tokens).text, c.stop.finished) for c in group]
                for question, group in zip(questions[start : start + CHUNK], drawn, strict=True)
            ]
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_json(kept, rows)
            return rows

        answers: list[Answered] = []
        for start in track(range(0, len(questions), CHUNK), description="prompts", disable=not sys.stderr.isatty()):
            for question, group in zip(questions[start : start + CHUNK], one_chunk(start), strict=True):
                answers += [Answered(question.problem, question.prompt, *row) for row in group]
            if not sys.stderr.isatty():
                print(f"{min(start + CHUNK, len(questions))} of {len(questions)} prompts", file=sys.stderr, flush=True)
        return answers

    def grade(self, answers: list[Answered], tokenizer: Any) -> list[Answered]:
        """Grades the responses and returns copies with the grades. Returns the responses unchanged if the config has no
        reward. Raises RewardFailure if too many gradings fail."""
        reward = self.config.reward
        if reward is None:
            return answers
        opened = {question.problem.row: thought_opening(tokenizer, question.tokens) for question in self.questions}
        with GradePool(reward) as pool:
            graded = pool.grade([opened[a.problem.row] + a.text for a in answers], [a.problem.values for a in answers])
        check_failures(graded, reward.max_failure_share)
        return [replace(a, graded=grading) for a, grading in zip(answers, graded, strict=True)]

    def write(self, answers: list[Answered]) -> None:
        """Writes the prompt/response pairs to Parquet files, marks the output as complete, and prints the number of
        pairs in each file.

        The validation split holds out whole problems, so that no problem has responses in both splits."""
        config = self.config
        fields = {*FIELDS, *resolve(config.data).fields}
        rows = [_row(a, fields) for a in answers]
        problems = sorted({a.problem.row for a in answers})
        chosen = set(random.Random(config.seed).sample(problems, round(config.validation_share * len(problems))))
        files: dict[str, list[dict[str, Any]]] = {
            name: [] for name in ("train", "validation", "truncated", "wrong", "ungraded")
        }
        for row, a in zip(rows, answers, strict=True):
            if not a.finished and not config.keep_truncated:
                name = "truncated"
            elif a.graded is not None and not a.graded.correct:
                scored = a.graded.outcome is Outcome.SCORE and not a.graded.cut_off
                name = "wrong" if scored else "ungraded"
            else:
                name = "validation" if a.problem.row in chosen else "train"
            files[name].append(row)
        output = Path(config.output)
        # removes the old completion mark before the files are replaced
        (output / generation_progress.MARK).unlink(missing_ok=True)
        for name, part in files.items():
            (output / f"{name}.parquet").unlink(missing_ok=True)
            if part:
                write_parquet(output / f"{name}.parquet", table_of(part))
        generation_progress.mark_finished(
            self.settings, self.problems, [f"{name}.parquet" for name, part in files.items() if part]
        )
        grades = "no answer was graded, so that wrong ones are among the pairs (set reward.target to set them aside)"
        if config.reward is not None:
            grades = (
                f"{len(files['wrong'])} wrong answers stand in wrong.parquet, and {len(files['ungraded'])} that could "
                "not be graded in ungraded.parquet"
            )
        where = "are among them" if config.keep_truncated else "stand in truncated.parquet"
        print(
            f"{len(files['train'])} training and {len(files['validation'])} validation pairs in {output}; "
            f"{sum(not a.finished for a in answers)} answers were truncated at sampling.max_tokens = "
            f"{config.sampling.max_tokens} and {where}; {grades}"
        )
