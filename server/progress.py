"""How a long start shows itself: bars on a terminal, log lines elsewhere, and always the server's `/ready`."""

import logging
import time
from collections.abc import Callable
from typing import Any, TextIO

from tqdm import tqdm

LOG = logging.getLogger("quire.load")


class LoadProgress:
    """A `Progress`: told `(phase, fraction)` as loading goes on, from the loading thread."""

    def __init__(self, tell: Callable[[str, float], None], stream: TextIO) -> None:
        self._tell = tell
        self._stream = stream
        self._bars = stream.isatty()
        self._bar: tqdm[Any] | None = None
        self._phase = ""
        self._began_s = 0.0

    def __call__(self, phase: str, fraction: float) -> None:
        """`phase` is `fraction` (0..1) done."""
        self._tell(phase, fraction)
        if phase != self._phase:
            self._begin(phase)
        if self._bar is not None:
            self._bar.n = min(fraction, 1.0)
            self._bar.refresh()

    def close(self) -> None:
        """Loading is over, well or badly."""
        self._end()

    def _begin(self, phase: str) -> None:
        self._end()
        self._phase, self._began_s = phase, time.monotonic()
        if self._bars:
            layout = "{desc:24} {percentage:3.0f}% |{bar:40}| {elapsed}"
            self._bar = tqdm(total=1.0, desc=phase, file=self._stream, bar_format=layout, leave=True)

    def _end(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        elif self._phase:
            LOG.info("%s: %.2f s", self._phase, time.monotonic() - self._began_s)
        self._phase = ""
