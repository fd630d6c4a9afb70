"""Runs in the sandbox's own processes: builds the sandbox, runs the code in it, and tells how it ended.

`sandbox_process.py` starts it. Its processes, from the outside in: one that enters the namespaces and waits (where
bubblewrap does not do this); one that is the first of its process namespace, whose end the kernel makes the end of all
processes in it; and the one that runs the code, with all that the code starts.
"""

from __future__ import annotations

import io
import marshal
import os
import resource
import select
import signal
import sys
import time

from megatron_rl.rewards import sandbox_calls as calls
from megatron_rl.rewards import sandbox_kernel as kernel

TYPE_CHECKING = False  # typing's own costs several milliseconds of every start
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, NoReturn

FILE = "main.py"  # the code's name in tracebacks
MAX_FRAMES = 50  # of a traceback, its last ones
# Modules that are imported while the process may still read an installation which belongs to root alone. Only the audit
# hook needs this; the other ways show the installation to everybody.
USUAL_MODULES = ("ast", "bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "fractions",
                 "functools", "heapq", "itertools", "json", "math", "operator", "random", "re", "statistics", "string",
                 "traceback", "typing")  # fmt: skip
# Audit events that are refused without walls, by the beginning of their names.
FORBIDDEN = ("socket.", "subprocess.", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system",
             "os.kill", "ctypes.", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink",
             "os.truncate", "os.chmod", "os.chown", "os.putenv", "shutil.", "webbrowser.", "urllib.", "http.",
             "ftplib.", "smtplib.", "pty.", "signal.pthread_kill", "fcntl.")  # fmt: skip


def main() -> None:
    """Reads the order, builds the sandbox, and supervises the code's process.

    Arguments: the numbers of three open files. The order is a marshalled dictionary. The lifeline is a pipe; the
    sandbox ends when its other end is closed. The report is a pipe that gets the line "ready" once the sandbox stands,
    and then how the code ended, with the seconds that it took: "exit STATUS SECONDS" (the status of a signal is
    negative), "late SECONDS" or "stopped SECONDS".
    """
    order_file, lifeline, report = (int(text) for text in sys.argv[1:4])
    with os.fdopen(order_file, "rb") as file:
        order = marshal.load(file)
    if order["way"] == "namespaces":
        _offer_to_be_ended_first()
        if not kernel.enter_namespaces():
            order["processes"] = 0
        kernel.build_root(order["shown"], order["scratch_bytes"])
        first = os.fork()
        if first:
            os.waitpid(first, 0)
            os._exit(0)
    _supervise(order, lifeline, report)


def _offer_to_be_ended_first() -> None:
    """Tells the kernel to end this, and not the trainer, when the machine runs out of memory."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass  # the kernel may forbid even that


def _supervise(order: Mapping[str, Any], lifeline: int, report: int) -> None:
    """Starts the code's process, waits for its end, and ends; with the audit hook, ends that process too."""
    isolated = order["way"] != "audit"
    if os.getsid(0) != os.getpid():
        os.setsid()  # signals to "my process group" must not reach the outside
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the first process of a namespace only gets what it has a handler for
    wake, waker = os.pipe()
    for descriptor in (wake, waker):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    if isolated:
        kernel.become_nobody()
        kernel.drop_rights()
        calls.filter_calls()
    else:
        _give_up_what_goes()
    kernel.set_attachable(False)
    os.write(report, b"ready\n")
    begun = time.monotonic()
    program = os.fork()
    if program == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for descriptor in (wake, waker, lifeline, report):
            os.close(descriptor)
        sys.exit(_run(order))  # goes up through main, so that the interpreter ends as any other does
    end = _wait(program, wake, lifeline, order["timeout_s"])
    os.write(report, f"{end} {time.monotonic() - begun:.4f}\n".encode())
    if not isolated:
        if not end.startswith("exit"):
            os.kill(program, signal.SIGKILL)
        _end_all()
    os._exit(0)


def _give_up_what_goes() -> None:
    """Does without a sandbox what a sandbox would do, as far as this machine allows."""
    for name in (*USUAL_MODULES, "megatron_rl.processes"):
        __import__(name)
    kernel.adopt_orphans()
    kernel.leave_network()
    for give_up in (kernel.become_nobody, kernel.drop_rights, calls.filter_calls):
        try:
            give_up()
        except OSError:
            continue


def _end_all() -> None:
    """Kills what the code's process started, where no namespace does so, and waits for the end of all."""
    from megatron_rl import processes  # takes milliseconds, and is for machines without walls

    processes.end_below(0.0)


def _do_without_walls(shown: Sequence[str]) -> None:
    """Lets this process read the paths `shown`, write nothing and reach nobody, as far as the kernel can do that."""
    for restrict in (lambda: calls.show_only((*shown, *kernel.DEVICES)), calls.filter_without_walls):
        try:
            restrict()
        except OSError:
            continue  # a kernel without Landlock, or without seccomp


def _wait(program: int, wake: int, lifeline: int, timeout_s: float) -> str:
    """Waits for the end of the code's process, and for that of others which have lost their parents."""
    watched = select.poll()
    watched.register(wake, select.POLLIN)
    watched.register(lifeline, select.POLLIN)
    deadline = time.monotonic() + timeout_s
    while True:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == program:
                return f"exit {os.waitstatus_to_exitcode(ended[1])}"
        left = deadline - time.monotonic()
        if left <= 0:
            return "late"
        for descriptor, _ in watched.poll(left * 1000):
            if descriptor == lifeline:
                return "stopped"
            os.read(wake, 4096)


def _run(order: Mapping[str, Any]) -> int:
    """Runs the code in this process. Returns the status that the process shall end with."""
    kernel.set_attachable(True)
    _set_limits(order)
    sys.argv = [FILE, *order["arguments"]]
    sys.path.extend(order["packages"])
    answers = None if order["function"] is None else _take_standard_output()
    if order["way"] == "audit":
        _do_without_walls([path for path, _ in order["shown"]])
        sys.addaudithook(_refuse_forbidden)
    if answers is not None:
        _call_function(order, answers)
    space = _new_module("__main__")
    try:
        if order["show_value"]:
            _run_showing_value(order["code"], space)
        else:
            exec(compile(order["code"], FILE, "exec"), space)
    except SystemExit:
        raise
    except BaseException as error:  # a border: whatever the code raises is told as Python tells it
        _print_traceback(error, order["code"])
        return 1
    return 0


def _set_limits(order: Mapping[str, Any]) -> None:
    for kind, limit in (
        (resource.RLIMIT_AS, order["memory_bytes"]),
        (resource.RLIMIT_CPU, order["cpu_s"]),
        (resource.RLIMIT_FSIZE, order["file_bytes"]),
        (resource.RLIMIT_NOFILE, order["open_files"]),
        (resource.RLIMIT_NPROC, order["processes"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        lowest = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (lowest, lowest))


def _new_module(name: str) -> dict[str, Any]:
    """Returns the names of a new module. It stands in sys.modules, since dataclasses and pickle look there."""
    module = type(sys)(name)
    sys.modules[name] = module
    return module.__dict__


class _CountedFile(io.FileIO):
    """Standard output that counts what has been written to it."""

    written = 0

    def write(self, data: Any) -> int:
        count = super().write(data) or 0
        self.written += count
        return count


def _run_showing_value(code: str, space: dict[str, Any]) -> None:
    """Runs the code. When it prints nothing and ends in an expression, the value of that is printed, unless None."""
    import ast

    file = _CountedFile(1, "w", closefd=False)
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(file), encoding="utf-8", errors="backslashreplace")
    shown = sys.stdout
    tree = ast.parse(code, FILE)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, FILE, "exec"), space)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), FILE, "eval"), space)
        shown.flush()
        if value is not None and not file.written:
            print(repr(value), file=shown)


def _print_traceback(error: BaseException, code: str) -> None:
    """Prints the traceback as Python does, without this file's own frames."""
    try:  # noqa: SIM105 - contextlib takes milliseconds of every start
        sys.stdout.flush()
    except (AttributeError, OSError, ValueError):
        pass  # the code has put another file there
    try:
        import linecache
        import traceback

        linecache.cache[FILE] = (len(code), None, code.splitlines(True), FILE)
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != FILE:
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames, limit=-MAX_FRAMES)
    except (MemoryError, OSError, RecursionError):
        told = str(error)
        os.write(2, f"{type(error).__name__}{': ' * bool(told)}{told}\n".encode("utf-8", "backslashreplace"))


def _take_standard_output() -> int:
    """Returns another number of standard output, which itself, like input and errors, becomes the null device."""
    answers = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    return answers


def _call_function(order: Mapping[str, Any], answers: int) -> NoReturn:
    """Calls one function of the code, writes "=" and the value's repr, or "!" and what it raised, and ends the process.

    The function is a method of the class Solution where the code has it there, as LeetCode does.
    """
    try:
        space = _new_module("__sandbox__")
        exec(compile(order["code"], FILE, "exec"), space)
        holder = space.get("Solution")
        if isinstance(holder, type) and hasattr(holder, order["function"]):
            function = getattr(holder(), order["function"])
        elif order["function"] in space:
            function = space[order["function"]]
        else:
            raise AttributeError(f"the code has no function {order['function']}")
        answer = "=" + repr(function(*order["values"], **order["keywords"]))
    except BaseException as error:  # a border: whatever the code raises, an exit among it, is its answer
        answer = f"!{type(error).__name__}: {str(error)[:200]}"
    data = memoryview(answer.encode("utf-8", "backslashreplace"))
    while data:
        data = data[os.write(answers, data) :]
    os._exit(0)


def _refuse_forbidden(event: str, arguments: tuple[Any, ...]) -> None:
    """Raises PermissionError for forbidden events. It is an audit hook, and no wall: code that wants to can change it.

    What holds where it is used are the filters of _do_without_walls; this one has the clearer messages.
    """
    writes = event == "open" and (isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"))
    creates = event == "open" and isinstance(arguments[2], int) and arguments[2] & calls.WRITING
    if writes or creates or event.startswith(FORBIDDEN):
        raise PermissionError(f"{event} is not for code in the sandbox")
