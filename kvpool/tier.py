"""Where evicted blocks may live on: a small protocol, host memory, and several tiers as one.

Knows digests and bytes; knows no block ids, tensors or requests. A digest names a whole prefix under one model and one
layout (see `kvpool.prefix`), so what is found under it is right or it is nothing. One thread owns a tier's books (the
scheduler's loop); reading and writing may go on beside it and comes back as a future.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TierStats:
    """A snapshot of one tier. `num_failed` counts blocks that could not be written, or not be read as written."""

    name: str
    num_blocks: int
    num_bytes: int
    max_bytes: int
    num_stored: int
    num_loaded: int
    num_failed: int


class BlockTier(Protocol):
    """Keeps blocks by digest, least recently used out first, within a size."""

    @property
    def is_durable(self) -> bool:
        """Whether it outlives the process, so that blocks are worth storing before they are evicted."""

    @property
    def is_accepting(self) -> bool:
        """Whether `store` would keep anything now; False while it is busy with what it has."""

    def holds(self, digest: bytes) -> bool:
        """Whether `fetch` would find the block."""

    def wants(self, digest: bytes) -> bool:
        """Whether `store` would keep the block: it does not have it yet."""

    def store(self, digest: bytes, data: bytes) -> None:
        """Keep a block's bytes; never waits, never fails. What cannot be kept is not kept."""

    def fetch(self, digests: Sequence[bytes]) -> "Future[list[bytes]]":
        """Read blocks, in order; the list ends before the first that could not be read. Never fails."""

    def stats(self) -> tuple[TierStats, ...]:
        """A snapshot of each tier in it."""

    def close(self) -> None:
        """Finish what is being written; then nothing more is kept."""


class NoTier:
    """Evicted blocks are gone."""

    is_durable = False
    is_accepting = False

    def holds(self, digest: bytes) -> bool:
        """Nothing."""
        return False

    def wants(self, digest: bytes) -> bool:
        """Nothing."""
        return False

    def store(self, digest: bytes, data: bytes) -> None:
        """Drop it."""

    def fetch(self, digests: Sequence[bytes]) -> "Future[list[bytes]]":
        """Nothing, at once."""
        return completed([])

    def stats(self) -> tuple[TierStats, ...]:
        """There is none."""
        return ()

    def close(self) -> None:
        """Nothing to do."""


class LruBytes:
    """Which digests a tier holds and how many bytes each takes, least recently used first, within `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._sizes: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._sizes

    def add(self, digest: bytes, num_bytes: int) -> list[bytes]:
        """Take a digest in as the one used last; gives those that have to go for it."""
        self._sizes[digest] = num_bytes
        self.num_bytes += num_bytes
        dropped: list[bytes] = []
        while self.num_bytes > self.max_bytes:
            oldest, size = self._sizes.popitem(last=False)
            self.num_bytes -= size
            dropped.append(oldest)
        return dropped

    def touch(self, digests: Sequence[bytes]) -> None:
        """These were used now, the first of them last: beginnings are needed more often than what follows."""
        for digest in reversed(digests):
            self._sizes.move_to_end(digest)

    def remove(self, digest: bytes) -> None:
        """Take a digest out, if it is there."""
        self.num_bytes -= self._sizes.pop(digest, 0)


class HostTier:
    """Blocks in the process's own memory: for pools that live on another device."""

    is_durable = False
    is_accepting = True

    def __init__(self, max_bytes: int) -> None:
        self._books = LruBytes(max_bytes)
        self._data: dict[bytes, bytes] = {}
        self._num_stored = self._num_loaded = 0

    def holds(self, digest: bytes) -> bool:
        """Whether it is here."""
        return digest in self._data

    def wants(self, digest: bytes) -> bool:
        """Whatever is not here."""
        return digest not in self._data

    def store(self, digest: bytes, data: bytes) -> None:
        """Keep it; the least recently used ones go."""
        if digest in self._data:
            return
        self._data[digest] = data
        self._num_stored += 1
        for dropped in self._books.add(digest, len(data)):
            del self._data[dropped]

    def fetch(self, digests: Sequence[bytes]) -> "Future[list[bytes]]":
        """The leading ones that are here, at once."""
        found = leading(digests, self.holds)
        self._books.touch(found)
        self._num_loaded += len(found)
        return completed([self._data[digest] for digest in found])

    def stats(self) -> tuple[TierStats, ...]:
        """A snapshot."""
        books = self._books
        counts = (len(books), books.num_bytes, books.max_bytes, self._num_stored, self._num_loaded, 0)
        return (TierStats("host", *counts),)

    def close(self) -> None:
        """Drop everything."""
        self._data.clear()
        self._books = LruBytes(0)


class Tiers:
    """Several tiers, fastest first: blocks are stored in each, and read from the first that has all of a run."""

    def __init__(self, *tiers: BlockTier) -> None:
        self._tiers = tiers

    @property
    def is_durable(self) -> bool:
        """Whether one of them is."""
        return any(tier.is_durable for tier in self._tiers)

    @property
    def is_accepting(self) -> bool:
        """Whether all of them are."""
        return all(tier.is_accepting for tier in self._tiers)

    def holds(self, digest: bytes) -> bool:
        """Whether one of them does."""
        return any(tier.holds(digest) for tier in self._tiers)

    def wants(self, digest: bytes) -> bool:
        """Whether one of them does."""
        return any(tier.wants(digest) for tier in self._tiers)

    def store(self, digest: bytes, data: bytes) -> None:
        """Store it in each that wants it."""
        for tier in self._tiers:
            if tier.wants(digest):
                tier.store(digest, data)

    def fetch(self, digests: Sequence[bytes]) -> "Future[list[bytes]]":
        """Read from the tier that has the longest leading run, the faster one where several have it."""
        best = max(self._tiers, key=lambda tier: len(leading(digests, tier.holds)))
        return best.fetch(digests)

    def stats(self) -> tuple[TierStats, ...]:
        """All of them, fastest first."""
        return tuple(stats for tier in self._tiers for stats in tier.stats())

    def close(self) -> None:
        """Close each."""
        for tier in self._tiers:
            tier.close()


def leading(digests: Sequence[bytes], holds: Callable[[bytes], bool]) -> list[bytes]:
    """The longest run from the start that `holds`."""
    run: list[bytes] = []
    for digest in digests:
        if not holds(digest):
            break
        run.append(digest)
    return run


def completed(blocks: list[bytes]) -> "Future[list[bytes]]":
    """A future that is done."""
    future: Future[list[bytes]] = Future()
    future.set_result(blocks)
    return future
