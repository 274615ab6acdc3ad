"""Blocks on their way out of the pool and back: what is saved with the next step, and who waits for blocks to be read.

Knows a tier, digests and waiting sequences; knows no budget, no tables and no engine. Reading goes on beside the steps:
a sequence whose blocks are being read is parked, and comes back to its place in the queue when they are here, or when
that takes too long. What was read is written into its blocks by the step that lets it in.

    evicted, tier wants it   -> saved by the very step that reuses the block
    published, durable tier  -> saved when the engine has nothing else to do, so that a killed process loses little
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice

from kvpool.prefix import NullPrefixListener, PrefixBlock, PrefixListener
from kvpool.tier import BlockTier, NoTier, leading
from scheduler.sequence import Fetched, SequenceState
from scheduler.sequence import Sequence as TokenSequence

MAX_FETCHES = 4
"""Sequences that have blocks being read, or read and not yet written: bounds the memory they take."""

FETCH_TIMEOUT_S = 10.0
"""After so long a sequence goes on without what is being read for it."""

RETRY_S = 0.05
"""How soon an idle loop looks again whether a busy tier takes more."""


@dataclass(frozen=True, slots=True)
class Backing:
    """What stands behind a pool: a tier for blocks that leave it, and who else is told what can be found."""

    tier: BlockTier | None = None
    listener: PrefixListener | None = None

    def close(self) -> None:
        """Finish what they are at, and let them go."""
        if self.tier is not None:
            self.tier.close()
        if self.listener is not None:
            self.listener.close()


@dataclass(frozen=True, slots=True)
class Save:
    """A block to be read out by the next step, and the prefix it holds."""

    digest: bytes
    block_id: int


class Offload(NullPrefixListener):
    """The books of blocks in motion. Lives on the event loop.

    Memory: block data of at most `MAX_FETCHES` sequences, beside what the tier itself has.
    """

    def __init__(self, tier: BlockTier | None = None) -> None:
        self.tier: BlockTier = tier or NoTier()
        self._on_ready: Callable[[TokenSequence], None] = lambda sequence: None
        self._on_idle_work: Callable[[], None] = lambda: None
        self._saves: list[Save] = []
        self._unsaved: dict[bytes, None] = {}
        self._fetching: dict[TokenSequence, asyncio.TimerHandle] = {}
        self._fetched: set[TokenSequence] = set()
        self._queueing: list[TokenSequence] = []
        self._retry: asyncio.TimerHandle | None = None

    def connect(self, on_ready: Callable[[TokenSequence], None], on_idle_work: Callable[[], None]) -> None:
        """Who is told that a parked sequence may go on, and that an idle engine could save blocks."""
        self._on_ready, self._on_idle_work = on_ready, on_idle_work

    # ------------------------------------------------------------------------------------------------------- out

    def on_stored(self, block: PrefixBlock) -> None:
        """Note a block that a killed process would lose."""
        if self.tier.is_durable and not self.tier.holds(block.digest):
            self._unsaved[block.digest] = None

    def on_evicted(self, digest: bytes, block_id: int) -> None:
        """Have the block read out by the step that is being planned: nothing is written into it before."""
        if self.tier.wants(digest):
            self._saves.append(Save(digest, block_id))

    def on_removed(self, digest: bytes) -> None:
        """It is saved already, or never will be."""
        self._unsaved.pop(digest, None)

    def on_cleared(self) -> None:
        """There is nothing left to save."""
        self._unsaved.clear()

    @property
    def is_behind(self) -> bool:
        """Whether a durable tier still lacks blocks that it could have."""
        return bool(self._unsaved)

    def take_saves(self) -> list[Save]:
        """What the next step must read out."""
        saves, self._saves = self._saves, []
        return saves

    def take_idle_saves(self, find: Callable[[bytes], int], max_saves: int) -> list[Save]:
        """Up to `max_saves` published blocks that a durable tier lacks, oldest first; `find` tells a digest's block."""
        if self._unsaved and not self.tier.is_accepting:
            self._look_again()
            return []
        digests = list(islice(self._unsaved, max_saves))
        for digest in digests:
            del self._unsaved[digest]
        return [Save(digest, find(digest)) for digest in digests if self.tier.wants(digest)]

    def keep(self, saves: Sequence[Save], data: Sequence[bytes]) -> None:
        """Give the tier what a step read out."""
        for save, block in zip(saves, data, strict=True):
            self.tier.store(save.digest, block)

    # ------------------------------------------------------------------------------------------------------ back

    @property
    def has_tier(self) -> bool:
        """Whether blocks that left the pool are anywhere at all."""
        return not isinstance(self.tier, NoTier)

    def begin(self, sequence: TokenSequence, known: int, unknown: Sequence[bytes]) -> bool:
        """Whether to park a sequence that could enter: the tier has some of its `unknown` digests.

        These follow the `known` blocks that the pool has already. It comes back with what could be read, and enters
        with that; unless it cannot by then, and blocks before those that were read are evicted meanwhile.
        """
        is_done = sequence.fetched is not None and sequence.fetched.first <= known
        if is_done or not unknown or not self.tier.holds(unknown[0]):
            return False
        if len(self._fetching) >= MAX_FETCHES:
            self._queueing.append(sequence)
            return True
        self._fetched = {s for s in self._fetched if s.state is SequenceState.WAITING}
        if len(self._fetching) + len(self._fetched) >= MAX_FETCHES:
            return False
        self._fetch(sequence, known, leading(unknown, self.tier.holds))
        return True

    def take(self, sequence: TokenSequence, known: int) -> tuple[bytes, ...]:
        """A sequence enters: the data of its blocks from number `known` on, as far as they were read."""
        fetched, sequence.fetched = sequence.fetched, None
        self._fetched.discard(sequence)
        if fetched is None or not fetched.first <= known:
            return ()
        return fetched.data[known - fetched.first :]

    def close(self) -> None:
        """Nobody waits any more."""
        for timer in self._fetching.values():
            timer.cancel()
        self._fetching.clear()
        if self._retry is not None:
            self._retry.cancel()

    def _fetch(self, sequence: TokenSequence, known: int, digests: Sequence[bytes]) -> None:
        loop = asyncio.get_running_loop()
        self._fetching[sequence] = loop.call_later(FETCH_TIMEOUT_S, self._arrived, sequence, Fetched(known, ()))

        def done(future: "Future[list[bytes]]") -> None:  # on the tier's thread
            data = Fetched(known, tuple(future.result()) if future.exception() is None else ())
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._arrived, sequence, data)

        self.tier.fetch(digests).add_done_callback(done)

    def _arrived(self, sequence: TokenSequence, fetched: Fetched) -> None:
        timer = self._fetching.pop(sequence, None)
        if timer is None:
            return  # too late
        timer.cancel()
        waiting, self._queueing = [sequence, *self._queueing], []
        if sequence.state is SequenceState.WAITING:
            sequence.fetched = fetched
            self._fetched.add(sequence)
        for parked in waiting:
            if parked.state is SequenceState.WAITING:
                self._on_ready(parked)

    def _look_again(self) -> None:
        if self._retry is None or self._retry.cancelled() or self._retry.when() < asyncio.get_running_loop().time():
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._on_idle_work)
