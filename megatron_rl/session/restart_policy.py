"""How often a server that dies is started again, and after how long a wait."""

from __future__ import annotations

WAIT_S, LONGEST_WAIT_S = 10.0, 300.0  # before the second new start in a row, and before any
HEALTHY_S = 3600.0  # of answers, after which a death is the first one in a row again
DOUBLINGS = 30  # more of them would change nothing, and overflow at some point


class Restarts:
    """The budget of new starts of one server, as Kubernetes' back-off has it: only deaths in a row count.

    A server that answered for `reset_s` seconds before it died has its whole budget back. The first new start comes at
    once, the second one after `wait_s` seconds, each further one after twice as long, up to LONGEST_WAIT_S.
    """

    def __init__(self, most: int, *, wait_s: float = WAIT_S, reset_s: float = HEALTHY_S) -> None:
        self.deaths = 0  # in a row
        self.most, self.reset_s, self._wait_s = most, reset_s, wait_s

    def died(self, healthy_s: float) -> float | None:
        """Takes note of a death after so many seconds of answers. Returns the seconds to wait before the next start;
        None when there is none any more.
        """
        self.deaths = 1 if healthy_s >= self.reset_s else self.deaths + 1
        if self.deaths > self.most:
            return None
        if self.deaths == 1:
            return 0.0
        return min(LONGEST_WAIT_S, self._wait_s * 2.0 ** min(self.deaths - 2, DOUBLINGS))
