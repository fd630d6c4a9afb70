"""Decides whether an HTTP request is repeated, and after which pause."""

from __future__ import annotations

from collections.abc import Mapping

BUSY = (408, 425, 429)  # HTTP statuses that report a temporary condition, not a wrong request
TOO_MANY_S = 1.0  # pause in seconds after HTTP status 429 without a Retry-After header
LONGEST_PAUSE_S = 60.0  # maximum seconds between two attempts of a request


def is_wrong_request(status: int) -> bool:
    """Checks whether an HTTP status says that the request itself is wrong, so that a repetition would fail too."""
    return 400 <= status < 500 and status not in BUSY


def asked_pause_s(status: int, headers: Mapping[str, str]) -> float:
    """Returns the seconds that a server asks to wait before the next request: the number in the header Retry-After, or
    TOO_MANY_S after status 429. Returns 0.0 if the server asks for no pause."""
    seconds = headers.get("Retry-After", "")
    return float(seconds) if seconds.isdecimal() and len(seconds) < 7 else TOO_MANY_S * (status == 429)


def pause_s(asked_s: float, default_s: float, failures: int) -> float:
    """Returns the seconds to wait after `failures` failed attempts: those that the server asks for, or `default_s`,
    doubled after each further failure, up to LONGEST_PAUSE_S."""
    return min((asked_s or default_s) * 2.0 ** (failures - 1), LONGEST_PAUSE_S)
