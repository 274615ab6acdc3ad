"""A tier whose reads end when a test says so."""

from collections.abc import Sequence
from concurrent.futures import Future

from kvpool.tier import HostTier


class SlowTier(HostTier):
    """Host memory, with a reader that waits to be told: `finish` ends the oldest read."""

    def __init__(self, max_bytes: int = 1 << 30, *, is_durable: bool = False, lag: bool = True) -> None:
        super().__init__(max_bytes)
        self.is_durable = is_durable
        self.is_accepting = True
        self.reads: list[tuple[Future[list[bytes]], Future[list[bytes]]]] = []
        self._lags = lag

    def fetch(self, digests: Sequence[bytes]) -> "Future[list[bytes]]":
        done = super().fetch(digests)
        if not self._lags:
            return done
        promised: Future[list[bytes]] = Future()
        self.reads.append((promised, done))
        return promised

    def finish(self, num_blocks: int | None = None) -> None:
        """End the oldest read, after `num_blocks` blocks (None: all)."""
        promised, done = self.reads.pop(0)
        promised.set_result(done.result()[:num_blocks])

    def lose(self, digest: bytes) -> None:
        """Forget a block."""
        del self._data[digest]
        self._books.remove(digest)

    def close(self) -> None:
        """Keep everything: a test may go on with it."""
