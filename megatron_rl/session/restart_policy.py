"""The restart policy for a server that dies: the maximum number of restarts and the delay before each restart."""

from __future__ import annotations

# Delay before the second consecutive restart of a server, and maximum delay before any restart, in seconds
WAIT_S, LONGEST_WAIT_S = 10.0, 300.0
HEALTHY_S = 3600.0  # the restart count is reset if a server has answered for this many seconds before it dies
DOUBLINGS = 30  # maximum number of times that the delay is doubled; the limit avoids float overflow


class Restarts:
    """The restart budget of one server, with exponential back-off as in Kubernetes. Only consecutive restarts are
    counted.

    `most` is the maximum number of consecutive restarts. If a server was healthy for `reset_s` seconds before it died,
    the count is reset. The first restart is immediate, the second is after `wait_s` seconds, and each further delay is
    twice as long, up to LONGEST_WAIT_S.
    """

    def __init__(self, most: int, *, wait_s: float = WAIT_S, reset_s: float = HEALTHY_S) -> None:
        self.deaths = 0  # number of consecutive deaths
        self.most, self.reset_s, self._wait_s = most, reset_s, wait_s

    def died(self, healthy_s: float) -> float | None:
        """Records a death of the server after `healthy_s` seconds of healthy operation.

        Returns the seconds to wait before the next start, or None if the restart budget is exhausted.
        """
        self.deaths = 1 if healthy_s >= self.reset_s else self.deaths + 1
        if self.deaths > self.most:
            return None
        if self.deaths == 1:
            return 0.0
        return min(LONGEST_WAIT_S, self._wait_s * 2.0 ** min(self.deaths - 2, DOUBLINGS))
