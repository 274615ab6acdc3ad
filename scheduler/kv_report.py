"""The KV pool as operators see it: what is in use, what is wasted, how old it is and what is shared. Read-only.

Knows the running set, the pool and the prefix index; changes none of them. Digests only: no tokens leave here.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvpool.journal import PrefixJournal
from kvpool.pool import BlockPool, PoolStats
from scheduler.observer import NullObserver
from scheduler.running import RunningSet
from scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SharedUse:
    """A prefix that several requests began with: how many found it cached so far, how many hold it now."""

    digest: bytes
    num_blocks: int
    num_hits: int
    num_holders: int


@dataclass(frozen=True, slots=True)
class KVReport:
    """A snapshot.

    Attributes:
        num_unused_slots: token positions in referenced blocks that no token has: internal fragmentation.
        num_queried_tokens, num_hit_tokens: prompt tokens looked up in the prefix cache since the start, and found.
        ages_s: seconds since each findable block was filled, oldest first.
        shared: those that saved most tokens, most first.
    """

    pool: PoolStats
    block_size: int
    num_unused_slots: int
    num_queried_tokens: int
    num_hit_tokens: int
    ages_s: tuple[float, ...]
    shared: tuple[SharedUse, ...]

    @property
    def waste(self) -> float:
        """Unused share of the referenced blocks' positions, 0..1."""
        num_slots = self.pool.num_referenced * self.block_size
        return self.num_unused_slots / num_slots if num_slots else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of looked-up prompt tokens that were found, 0..1."""
        return self.num_hit_tokens / self.num_queried_tokens if self.num_queried_tokens else 0.0


class LookupMeter(NullObserver):
    """Counts prompt tokens looked up in the prefix cache, and found."""

    def __init__(self) -> None:
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def on_prefix_lookup(self, num_queried_tokens: int, num_hit_tokens: int) -> None:
        """Count."""
        self.num_queried_tokens += num_queried_tokens
        self.num_hit_tokens += num_hit_tokens


def unused_slots(sequences: Iterable[Sequence]) -> int:
    """Positions in the tables of `sequences` that no token has yet, a shared block's counted once."""
    unused: dict[int, int] = {}
    for sequence in sequences:
        size, num_tokens = sequence.table.block_size, len(sequence.tokens)
        first = num_tokens // size
        for index, block_id in enumerate(sequence.table.block_ids[first:], first):
            num_unused = size - max(0, num_tokens - index * size)
            unused[block_id] = min(num_unused, unused.get(block_id, size))
    return sum(unused.values())


def report(
    running: RunningSet, pool: BlockPool, journal: PrefixJournal, meter: LookupMeter, *, num_shared: int
) -> KVReport:
    """Take the snapshot, with the `num_shared` most useful prefixes. O(blocks)."""
    index = running.prefix_index
    shared = (
        SharedUse(
            prefix.digest,
            prefix.num_blocks,
            prefix.num_hits,
            pool.ref_count(running.block_of(prefix.digest)) if prefix.digest in index else 0,
        )
        for prefix in journal.most_shared(num_shared)
    )
    return KVReport(
        pool=pool.stats(),
        block_size=running.block_size,
        num_unused_slots=unused_slots(running.sequences),
        num_queried_tokens=meter.num_queried_tokens,
        num_hit_tokens=meter.num_hit_tokens,
        ages_s=tuple(journal.ages_s(index.__contains__)),
        shared=tuple(shared),
    )
