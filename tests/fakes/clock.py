"""A clock that stands still until a test moves it."""


class VirtualClock:
    """Seconds that pass only when told to."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, "time does not run backwards"
        self._now_s += seconds
