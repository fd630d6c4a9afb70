"""What messages quote of a server's log: its last lines, and the first error of its processes."""

from __future__ import annotations

import os

import pytest
from fake_vllm import CAUSE, ERROR, SAID

from megatron_rl.engines.server_log import end_of, first_error, newest_error, start_line

INFO = ERROR.replace("ERROR", "INFO")
WARNING = f"""{ERROR}Traceback (most recent call last):
{ERROR}  File "/vllm/plugins.py", line 7, in load
{ERROR}ImportError: no module named zen""".replace("ERROR", "WARNING")
PLAIN = """Traceback (most recent call last):
  File "/vllm/api_server.py", line 5, in <module>
    run()
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"""
SCHEMA = """(APIServer pid=3) Traceback (most recent call last):
(APIServer pid=3)   File "/vllm/arg_utils.py", line 11, in create
(APIServer pid=3) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
(APIServer pid=3)   Value error, User-specified max_model_len (8192) is greater [type=value_error]
(APIServer pid=3)     For further information visit https://errors.pydantic.dev
"""
SGLANG = """[2026-11-26 09:54:38] server_args=ServerArgs(dtype='auto')
[2026-11-26 09:54:40 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "/sglang/scheduler.py", line 21, in run_scheduler_process
    scheduler = Scheduler()
RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.

[2026-11-26 09:54:40] Received sigquit from a child process. It usually means the child failed."""
CRASH = """(EngineCore pid=9) INFO 11-26 09:54:38 [core.py:1] loads
Fatal Python error: Illegal instruction

Thread 0x00007f (most recent call first):
  File "/lib/python3.11/threading.py", line 327 in wait

Current thread 0x00007f (most recent call first):
  File "/site-packages/torch/_ops.py", line 1279 in __call__
  File "/vllm/_custom_ops.py", line 3000 in weight_packed_linear_cpu
  File "/vllm/linear.py", line 4 in forward"""
CHAINED = """(Worker_TP1 pid=8) ERROR 11-26 09:54:38 [w.py:1] Traceback (most recent call last):
(Worker_TP0 pid=7) ERROR 11-26 09:54:38 [w.py:1] Traceback (most recent call last):
(Worker_TP1 pid=8) ERROR 11-26 09:54:38 [w.py:1]   File "/vllm/tp1.py", line 1, in load
(Worker_TP0 pid=7) ERROR 11-26 09:54:38 [w.py:1]   File "/vllm/tp0.py", line 2, in load
(Worker_TP0 pid=7) ERROR 11-26 09:54:38 [w.py:1] KeyError: 'zero'
(Worker_TP1 pid=8) ERROR 11-26 09:54:38 [w.py:1] KeyError: 'one'
(Worker_TP1 pid=8) ERROR 11-26 09:54:38 [w.py:1] 
(Worker_TP1 pid=8) ERROR 11-26 09:54:38 [w.py:1] During handling of the above exception, another one occurred:
(Worker_TP1 pid=8) ERROR 11-26 09:54:38 [w.py:1] Traceback (most recent call last):
(Worker_TP1 pid=8) ERROR 11-26 09:54:38 [w.py:1] ValueError: two"""
ARGUMENTS = "usage: api_server.py [-h]\napi_server.py: error: argument --dtype: invalid choice: 'float8'\n"


@pytest.mark.parametrize(
    ("log", "found"),
    [
        (f"{INFO}starts\n{WARNING}\n{CAUSE}\nProcess EngineCore:\n{PLAIN}", [SAID, "at /vllm/amx_mla.py:303"]),
        (PLAIN, [PLAIN.splitlines()[-1], "at /vllm/api_server.py:5"]),
        (
            SCHEMA,
            [
                "(APIServer pid=3) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
                "  Value error, User-specified max_model_len (8192) is greater [type=value_error]",
                "    For further information visit https://errors.pydantic.dev",
                "at /vllm/arg_utils.py:11",
            ],
        ),
        (
            SGLANG,
            [
                "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
                "at /sglang/scheduler.py:21",
            ],
        ),
        (CRASH, ["Fatal Python error: Illegal instruction", "at /vllm/_custom_ops.py:3000"]),
        (CHAINED, ["(Worker_TP1 pid=8) KeyError: 'one'", "at /vllm/tp1.py:1"]),
        (ARGUMENTS, ["api_server.py: error: argument --dtype: invalid choice: 'float8'"]),
        (f"{ERROR}the port is taken\n{INFO}ends", ["(EngineCore pid=22706) the port is taken"]),
        (f"{INFO}all is well\n{WARNING}\nthe end of x:\n  {PLAIN.splitlines()[0]}\n", []),
        ("Traceback (most recent call last):\n", []),
        ("Traceback (most recent call last):\nKeyError: " + "x" * 600, ["KeyError: " + "x" * 490 + " ..."]),
    ],
)
def test_the_first_error_of_a_servers_processes_is_found(log, found):
    assert first_error(log.splitlines()) == found


def test_the_end_of_a_log_is_that_of_its_last_start(tmp_path):
    log = tmp_path / "log"
    assert end_of(log) == f"there is no log {log}"
    log.write_bytes(b"")
    assert end_of(log) == f"the end of {log}:\n  (it is empty)"
    log.write_bytes(b"x" * 1_000_000 + b"\n" + b"\xff bad\n" + b"".join(b"%d\n" % i for i in range(30)))
    assert end_of(log).splitlines() == [f"the end of {log}:", *(f"  {i}" for i in range(15, 30))]
    log.write_bytes(start_line() + CAUSE.encode() + b"\n" + start_line() + b"another\n")
    assert end_of(log) == f"the end of {log}:\n  another"


def test_the_newest_log_with_an_error_is_quoted(tmp_path):
    old, new, well = (tmp_path / name for name in ("old", "new", "well"))
    for time, (log, text) in enumerate(((old, PLAIN), (new, CAUSE), (well, "all is well"))):
        log.write_text(text)
        os.utime(log, (time, time))
    assert newest_error([well]) == newest_error([]) == ""
    assert newest_error([old, new, well]).startswith(f"; the first error in {new}, last written ")
