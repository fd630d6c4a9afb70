"""A plugin of pytest that notes which tests reach a place: mutants.py puts calls of it into a copy of the tree.

MUTANTS_HITS names a file for lines of place and test. Beside it .test has the test that runs now, also for processes
that a test starts, and .times has lines of seconds, outcome and test.
"""

import os
import time

_PATH = os.environ.get("MUTANTS_HITS", "")
_seen: set[tuple[int, str]] = set()
_now = {"test": "", "until": 0.0}


def hit(place: int) -> None:
    """Notes that the test that runs now reaches a place."""
    if not _PATH:
        return
    if (now := time.monotonic()) > _now["until"]:
        with open(_PATH + ".test") as file:
            _now.update(until=now + 0.005, test=file.read())
    if (place, _now["test"]) not in _seen:
        _seen.add((place, _now["test"]))
        with open(_PATH, "a") as file:
            file.write(f"{place}\t{_now['test']}\n")


def watch(place: int, made: type, field: str) -> None:
    """Notes who reads a field of a class."""
    read = made.__getattribute__

    def noting(self, name):
        if name == field:
            hit(place)
        return read(self, name)

    made.__getattribute__ = noting


def pytest_runtest_logstart(nodeid, location):
    with open(_PATH + ".new", "w") as file:
        file.write(nodeid)
    os.replace(_PATH + ".new", _PATH + ".test")
    _now["until"] = 0.0


def pytest_runtest_logreport(report):
    with open(_PATH + ".times", "a") as file:
        file.write(f"{report.duration}\t{report.outcome}\t{report.nodeid}\n")
