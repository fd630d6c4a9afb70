"""Runs a program, or calls one function of the program, inside the sandbox that sandbox.py has built.

sandbox.py passes the text of this file to `python -c`. The file only imports a few modules of the standard library,
because every sandboxed call waits for these imports.
"""

from __future__ import annotations

import io
import marshal
import os
import resource
import sys

TYPE_CHECKING = False  # importing typing takes several milliseconds
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, NoReturn

NOBODY = 65534  # id of the user and the group that the program runs as
FILE = "main.py"  # the program's name in tracebacks
MAX_FRAMES = 50  # number of frames in a printed traceback, counted from its end


def main() -> None:
    """Drops the privileges of root, reports that the sandbox is ready, and runs the program of the request.

    sys.argv has the numbers of two file descriptors. The first is a pipe, to which this function writes the line
    "ready". The second is a file with the request, a marshalled dictionary (see `sandbox._request`).
    """
    report, request_file = int(sys.argv[1]), int(sys.argv[2])
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)  # this also drops all Linux capabilities
    os.write(report, b"ready\n")
    os.close(report)
    with os.fdopen(request_file, "rb") as file:
        request = marshal.load(file)
    for name, limit in request["limits"].items():
        _, hard = resource.getrlimit(kind := getattr(resource, name))
        lowest = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (lowest, lowest))
    sys.argv = [FILE, *request["arguments"]]
    sys.path.extend(request["packages"])
    if request["function"] is not None:
        _call_function(request)
    sys.exit(_run_program(request["code"], request["show_value"]))


def _run_program(code: str, show_value: bool) -> int:
    """Runs the program and returns the exit status of the process."""
    space = _new_module("__main__")
    try:
        if show_value:
            _run_showing_value(code, space)
        else:
            exec(compile(code, FILE, "exec"), space)
    except SystemExit:
        raise
    except BaseException as error:  # user code: any error is printed as Python prints it
        _print_traceback(error, code)
        return 1
    return 0


def _new_module(name: str) -> dict[str, Any]:
    """Returns the namespace of a new module, which is added to sys.modules because dataclasses and pickle need it."""
    module = type(sys)(name)
    sys.modules[name] = module
    return module.__dict__


def _run_showing_value(code: str, space: dict[str, Any]) -> None:
    """Runs the program. If the program printed nothing, prints the value of its last expression, unless the value is
    None."""
    import ast

    shown = sys.stdout
    assert isinstance(shown, io.TextIOWrapper)
    shown.reconfigure(errors="backslashreplace")
    tree = ast.parse(code, FILE)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, FILE, "exec"), space)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), FILE, "eval"), space)
        shown.flush()
        if value is not None and os.fstat(1).st_size == 0:
            print(repr(value), file=shown)


def _print_traceback(error: BaseException, code: str) -> None:
    """Prints the traceback as Python does, without the frames of this file."""
    try:  # noqa: SIM105 - importing contextlib takes milliseconds
        sys.stdout.flush()
    except (AttributeError, OSError, ValueError):
        pass  # the program has replaced sys.stdout
    try:
        import linecache
        import traceback

        linecache.cache[FILE] = (len(code), None, code.splitlines(True), FILE)
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != FILE:
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames, limit=-MAX_FRAMES)
    except (MemoryError, OSError, RecursionError):
        message = str(error)
        os.write(2, f"{type(error).__name__}{': ' * bool(message)}{message}\n".encode("utf-8", "backslashreplace"))


def _call_function(request: Mapping[str, Any]) -> NoReturn:
    """Calls the function, writes only the function's result to standard output, and ends the process.

    The result is "=" and the repr of the returned value, or "!" and the error that the code raised. Text that the code
    itself prints is discarded. The function may be a method of a class `Solution`, as on LeetCode.
    """
    answers = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    try:
        space = _new_module("__sandbox__")
        exec(compile(request["code"], FILE, "exec"), space)
        holder = space.get("Solution")
        if isinstance(holder, type) and hasattr(holder, request["function"]):
            function = getattr(holder(), request["function"])
        elif request["function"] in space:
            function = space[request["function"]]
        else:
            raise AttributeError(f"the code has no function {request['function']}")
        answer = "=" + repr(function(*request["values"], **request["keywords"]))
    except BaseException as error:  # user code: any error, including SystemExit, is returned as the result
        answer = f"!{type(error).__name__}: {str(error)[:200]}"
    data = memoryview(answer.encode("utf-8", "backslashreplace"))
    while data:
        data = data[os.write(answers, data) :]
    os._exit(0)


if __name__ == "__main__":
    main()
