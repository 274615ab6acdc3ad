"""The running set: sequences that own a slot and blocks. All KV accounting of the scheduler happens here.

Knows the pool, tables, the prefix index and slots; knows no budget, clock or engine. A sequence enters with blocks for
all of its tokens, so a prompt never gets stuck half-way for memory of its own; it grows a block at a time from there.
"""

from bisect import bisect_left, insort
from collections import Counter
from operator import attrgetter

from kvpool.pool import BlockPool
from kvpool.prefix import PrefixIndex, extend_chain
from kvpool.table import BlockCopy, BlockTable, blocks_for
from scheduler.config import SchedulerConfig
from scheduler.sequence import Sequence, SequenceState

_order = attrgetter("order")

WATERMARK_SHARE = 50
"""At most one block in this many is kept back from newcomers, for those that already run to grow into."""


class RunningSet:
    """Running sequences, first in policy order first."""

    def __init__(self, pool: BlockPool, config: SchedulerConfig) -> None:
        self.sequences: list[Sequence] = []
        self.prefix_index = PrefixIndex(pool)
        self._pool = pool
        self._block_size = config.block_size
        self._is_caching = config.enable_prefix_caching
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))

    @property
    def has_free_slot(self) -> bool:
        """Whether one more sequence may run."""
        return bool(self._free_slots)

    def new_table(self) -> BlockTable:
        """An empty table over the pool."""
        return BlockTable(self._pool, self._block_size)

    def has_room(self, sequence: Sequence, num_tokens: int, *, num_kept_back: int = 0) -> bool:
        """Whether the KV of the next `num_tokens` tokens can be written, leaving `num_kept_back` blocks alone."""
        needed = sequence.table.needed_for(sequence.computed, sequence.computed + num_tokens)
        return needed == 0 or needed + num_kept_back <= self._pool.num_available

    def try_enter(self, sequence: Sequence) -> list[BlockCopy] | None:
        """Let a waiting sequence in, with the KV it can inherit and blocks for all of its tokens.

        Returns the copies to do before its first row, or None (and changes nothing) when there is no room for it.
        """
        self._inherit(sequence)
        num_tokens = len(sequence.tokens) - sequence.computed
        if not self.has_room(sequence, num_tokens, num_kept_back=self._watermark()):
            sequence.table.release()
            sequence.reset()
            return None
        _, copies = sequence.table.prepare_write(sequence.computed, len(sequence.tokens))
        sequence.slot = self._free_slots.pop()
        sequence.state = SequenceState.RUNNING
        insort(self.sequences, sequence, key=_order)
        return copies

    def leave(self, sequence: Sequence) -> None:
        """Take back a sequence's blocks and slot; its full blocks stay findable until they are evicted."""
        del self.sequences[bisect_left(self.sequences, sequence.order, key=_order)]
        sequence.table.release()
        self._free_slots.append(sequence.slot)
        sequence.reset()

    def publish(self, sequence: Sequence) -> None:
        """Make its newly filled blocks findable. Every token under `computed` is an accepted one."""
        num_full = sequence.computed // self._block_size
        if not self._is_caching or num_full <= sequence.num_published:
            return
        self._extend_digests(sequence)
        for index in range(sequence.num_published, num_full):
            self.prefix_index.publish(sequence.digests[index], sequence.table.block_ids[index])
        sequence.num_published = num_full

    def distrust(self, sequence: Sequence, start: int, end: int) -> None:
        """A step that wrote positions `[start, end)` failed: nobody may find what those blocks hold now."""
        size = self._block_size
        for block_id in sequence.table.block_ids[start // size : -(-end // size)]:
            self.prefix_index.forget(block_id)

    def can_look_up(self, sequence: Sequence) -> bool:
        """Whether the prefix index is asked for a sequence that enters."""
        return self._is_caching and sequence.request.use_prefix_cache and not sequence.is_missing_prompt_logprobs

    def check(self) -> None:
        """Assert that slots, tables, index and pool agree; O(num_blocks)."""
        slots = [s.slot for s in self.sequences]
        assert len({*slots, *self._free_slots}) == len(slots) + len(self._free_slots), "two sequences share a slot"
        assert self.sequences == sorted(self.sequences, key=_order), "the running set is out of order"
        writers: Counter[int] = Counter()
        for sequence in self.sequences:
            assert 0 <= sequence.computed <= len(sequence.tokens), "computed is out of range"
            assert sequence.table.capacity >= sequence.computed, "a table does not cover what was computed"
            num_needed = blocks_for(len(sequence.tokens), self._block_size)
            assert len(sequence.table.block_ids) <= num_needed, "a table holds blocks for no token"
            writers.update(sequence.table.block_ids[sequence.computed // self._block_size :])
        assert all(count == 1 for count in writers.values()), "two sequences write one block"
        references = Counter(block_id for s in self.sequences for block_id in s.table.block_ids)
        for block_id in range(self._pool.num_blocks):
            assert self._pool.ref_count(block_id) == references[block_id], f"block {block_id} is miscounted"
        self._pool.check()
        self.prefix_index.check()

    def _inherit(self, sequence: Sequence) -> None:
        """Give an entering sequence the KV that exists already; its newest token is always computed anew."""
        sibling = sequence.group.forkable()
        if sibling is not None and not sequence.num_output:
            self._fork(sibling, sequence)
        elif self.can_look_up(sequence):
            self._match(sequence)
        sequence.computed = min(sequence.table.capacity, len(sequence.tokens) - 1)

    def _fork(self, sibling: Sequence, sequence: Sequence) -> None:
        sequence.table = sibling.table.fork()
        sequence.table.truncate(sequence.num_prompt)
        sequence.digests = sibling.digests[: sequence.num_prompt // self._block_size]

    def _match(self, sequence: Sequence) -> None:
        self._extend_digests(sequence)
        sequence.table.adopt(self.prefix_index.match(sequence.digests))

    def _extend_digests(self, sequence: Sequence) -> None:
        extend_chain(sequence.request.cache_namespace, sequence.digests, sequence.tokens, self._block_size)

    def _watermark(self) -> int:
        return min(len(self.sequences), max(1, self._pool.num_blocks // WATERMARK_SHARE))
