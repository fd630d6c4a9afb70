"""Extracts the reason for a server's end from its log: the last lines, and the first error of its processes."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

# Prefix of the line that is written to a log before the output of each start of the server.
START = "megatron-rl: a start at "
READ_BYTES = 1 << 18  # number of bytes at the end of a log that are searched for an error
TAIL_LINES = 15
# Limits of the message of an exception that is reported: maximum number of lines, and of characters per line.
MESSAGE_LINES, MESSAGE_CHARACTERS = 6, 500
# libraries whose stack frames are less informative than the frames of the code that calls them
CALLED = ("/torch/", "/pydantic/")
QUIET = ("DEBUG", "INFO", "WARNING")  # log levels of lines that report no error, even if they contain a traceback
TRACEBACK = "Traceback (most recent call last):"
# Matches a line of vLLM's output: the process, then in log lines the level, time and location, then the text.
LINE = re.compile(
    r"(?P<process>(?:\([^()]* pid=\d+\) )*)"
    r"(?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) \S+ \S+ \[[^\]]*\] ?)?(?P<text>.*)"
)
FRAME = re.compile(r'\s+File "(?P<file>[^"]+)", line (?P<line>\d+)')
# The first line of a crash in compiled code, or of an error about command line arguments.
CRASH = re.compile(r"Fatal Python error: |terminate called |\S+: error: ")
# Prefixes of the lines that follow the message of an exception.
CHAINED = ("During handling of ", "The above exception ", "Exception raised from ", "frame #")


def start_line() -> bytes:
    """Returns the line that is written to a server's log before the output of a new start."""
    return f"{START}{time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode()


def end_of(log: Path) -> str:
    """Returns the last lines of a log, indented, followed by the first error since the server's last start."""
    text = _read(log)
    if text is None:
        return f"there is no log {log}"
    lines = text.splitlines()
    shown = [f"the end of {log}:", *(f"  {line}" for line in lines[-TAIL_LINES:] or ["(it is empty)"])]
    if error := first_error(lines):
        shown += ["the first error there:", *(f"  {line}" for line in error)]
    return "\n".join(shown)


def newest_error(logs: Iterable[Path]) -> str:
    """Returns the first error since the last start of a server, as a clause that can be appended to a sentence.
    Searches the most recently written log that has an error. Returns an empty string if there is no error.
    """
    there = [log for log in logs if log.is_file()]
    for log in sorted(there, key=lambda log: log.stat().st_mtime, reverse=True):
        if error := first_error((_read(log) or "").splitlines()):
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(log.stat().st_mtime))
            return f"; the first error in {log}, last written {when}: {' '.join(error)}"
    return ""


def first_error(lines: Iterable[str]) -> list[str]:
    """Returns the first error in the output of a server's processes: a line with the process and the message, then the
    code location, as far as they are known. The first error is reported because it usually causes the later ones.
    Returns an empty list if there is no error.
    """
    parsed = [match for line in lines if (match := LINE.fullmatch(line))]
    spoken: list[str] = []  # first line of level ERROR or CRITICAL, returned if no process shows an exception
    for number, line in enumerate(parsed):
        process, level, text = line["process"], line["level"], line["text"]
        if level in QUIET or text[:1].isspace():
            continue
        rest = (other["text"] for other in parsed[number + 1 :] if other["process"] == process)
        found: list[str] = []
        if text.endswith(TRACEBACK):
            found = _exception(rest)
        elif CRASH.match(text):
            stack = itertools.dropwhile(lambda part: not part.startswith("Current thread "), rest)
            found = [text, *_place([match for part in stack if (match := FRAME.match(part))])]
        if found:
            return [f"{process}{found[0]}", *found[1:]]
        if level and not spoken and not text.endswith(TRACEBACK):
            spoken = [f"{process}{text}"]
    return spoken


def _exception(lines: Iterator[str]) -> list[str]:
    """Returns the message and the code location of an exception. `lines`: the lines of the traceback after its first
    line.
    """
    frames: list[re.Match[str]] = []
    message: list[str] = []
    for text in lines:
        if not message and (text[:1].isspace() or not text):
            frames += [match] if (match := FRAME.match(text)) else []
            continue
        if not text.strip() or text.endswith(TRACEBACK) or text.startswith(CHAINED) or len(message) == MESSAGE_LINES:
            break
        message.append(text if len(text) <= MESSAGE_CHARACTERS else f"{text[:MESSAGE_CHARACTERS]} ...")
    return [*message, *_place(frames[::-1])] if message else []


def _place(frames: Sequence[re.Match[str]]) -> list[str]:
    """Returns the location of the code that raised an error. `frames`: stack frames, innermost first."""
    callers = (frame for frame in frames if not any(name in frame["file"] for name in CALLED))
    own = next(callers, frames[0] if frames else None)
    return [] if own is None else [f"at {own['file']}:{own['line']}"]


def _read(log: Path) -> str | None:
    """Returns the text of a log since the last start of the server, at most the last READ_BYTES bytes. Returns None if
    there is no log.
    """
    if not log.is_file():
        return None
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - READ_BYTES))
        text = file.read().decode(errors="replace")
    _, start, last = text.rpartition(START)
    return last.partition("\n")[2] if start else last
