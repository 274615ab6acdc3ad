"""Where the scheduler's time comes from: monotonic seconds. Tests and simulations pass their own."""

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds since an arbitrary origin."""

    def now(self) -> float:
        """The current time in seconds."""


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Seconds of `time.monotonic`."""
        return time.monotonic()
