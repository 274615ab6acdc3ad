"""The running set: sequences that own a slot and blocks. All KV accounting of the scheduler happens here.

Knows the pool, tables, the prefix index and slots; knows no budget, clock or engine. A sequence enters with blocks for
all of its tokens, so a prompt never gets stuck half-way for memory of its own; it grows a block at a time from there,
unless it was preempted too often: then it enters with blocks for all it may ever need.
"""

from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass
from itertools import takewhile
from operator import attrgetter

from engine.batch import BlockLoad
from kvpool.pins import PrefixPins
from kvpool.pool import BlockPool
from kvpool.prefix import PrefixBlock, PrefixIndex, PrefixListener, PrefixListeners, extend_chain
from kvpool.table import BlockCopy, BlockTable, blocks_for
from scheduler.budget import Share
from scheduler.config import SchedulerConfig
from scheduler.forecast import Holding, LengthForecast, peak_tokens
from scheduler.offload import Offload
from scheduler.sequence import Sequence, SequenceState

_order = attrgetter("order")

WATERMARK_SHARE = 50
"""At most one block in this many is kept back from newcomers, for those that already run to grow into."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What the engine must do before the first row of a sequence that entered."""

    loads: tuple[BlockLoad, ...]
    copies: list[BlockCopy]


class RunningSet:
    """Running sequences, first in policy order first."""

    def __init__(
        self,
        pool: BlockPool,
        config: SchedulerConfig,
        offload: Offload,
        forecast: LengthForecast,
        listener: PrefixListener | None = None,
    ) -> None:
        self.sequences: list[Sequence] = []
        self.prefix_index = PrefixIndex(pool, PrefixListeners(offload, listener) if listener else offload)
        self.pins = PrefixPins(int(config.prefix_pin_share * pool.num_blocks))
        pool.set_eviction_policy(self.pins)
        self._pool = pool
        self._config = config
        self._block_size = config.block_size
        self._is_caching = config.enable_prefix_caching
        self._offload = offload
        self._forecast = forecast
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._num_departures = 0
        self._refused: tuple[Sequence, int] | None = None
        self._num_growth: int | None = None

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._block_size

    @property
    def num_free_slots(self) -> int:
        """How many more sequences may run."""
        return len(self._free_slots)

    def new_step(self) -> None:
        """A step is planned: what running sequences should still give is asked anew."""
        self._num_growth = None

    def new_table(self) -> BlockTable:
        """An empty table over the pool."""
        return BlockTable(self._pool, self._block_size)

    def num_own_blocks(self, sequence: Sequence) -> int:
        """Blocks that only this sequence holds: what its end gives back."""
        ref_count = self._pool.ref_count
        return sum(ref_count(block_id) == 1 for block_id in sequence.table.block_ids)

    def num_needed(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that its next `num_tokens` tokens take from the pool; none while it goes on inside a block."""
        start = sequence.computed + sequence.num_flying
        return sequence.table.needed_for(start, start + num_tokens)

    def needs_of(self, grants: list[Share]) -> list[int]:
        """The same for each of these sequences and its tokens, as if the others took none."""
        return [s.table.needed_for(start := s.computed + s.num_flying, start + num_tokens) for s, num_tokens in grants]

    def has_room(self, sequence: Sequence, num_tokens: int, *, num_kept_back: int = 0) -> bool:
        """Whether the KV of the next `num_tokens` tokens can be written, leaving `num_kept_back` blocks alone.

        Pinned prefixes give way to nobody but a sequence that runs alone: it must be able to go on.
        """
        needed = self.num_needed(sequence, num_tokens)
        if needed == 0:
            return True
        num_others = len(self.sequences) - (sequence.state is SequenceState.RUNNING)
        return needed + num_kept_back <= (self._pool.num_spare if num_others else self._pool.num_available)

    def has_spare(self, num_blocks: int) -> bool:
        """Whether that many blocks can be taken from the pool without anybody giving way."""
        return num_blocks <= self._pool.num_spare

    def block_of(self, digest: bytes) -> int:
        """The block that holds a published prefix."""
        return self.prefix_index.match([digest])[0]

    def unknown(self, sequence: Sequence) -> tuple[int, list[bytes]]:
        """For a sequence that could enter: how many of its leading blocks are in the pool, and the others' digests.

        None are named for a sequence that could not enter now, or that has no use for them.
        """
        if not self.can_look_up(sequence) or self._sibling_of(sequence) is not None or not self._settle_in(sequence):
            return 0, []
        num_known = len(sequence.table.block_ids)
        sequence.table.release()
        sequence.reset()
        return num_known, sequence.digests[num_known:]

    def try_enter(self, sequence: Sequence) -> Entry | None:
        """Let a waiting sequence in, with the KV it can inherit and blocks for all of its tokens.

        None (and nothing has changed) when there is no room for it. The answer is the same until somebody leaves.
        """
        if not self._settle_in(sequence):
            return None
        num_known = len(sequence.table.block_ids)
        _, copies = sequence.table.prepare_write(sequence.computed, self._table_end(sequence))
        loads = self._load(sequence, num_known)
        sequence.slot = self._free_slots.pop()
        sequence.state = SequenceState.RUNNING
        insort(self.sequences, sequence, key=_order)
        if self._num_growth is not None:
            self._num_growth += self._forecast.growth(sequence)
        self._pin(sequence)
        return Entry(loads, copies)

    def leave(self, sequence: Sequence) -> None:
        """Take back a sequence's blocks and slot; its full blocks stay findable until they are evicted."""
        del self.sequences[bisect_left(self.sequences, sequence.order, key=_order)]
        sequence.table.release()
        self._free_slots.append(sequence.slot)
        sequence.reset()
        self._num_departures += 1
        self._num_growth = None

    def publish(self, sequence: Sequence) -> None:
        """Make its newly filled blocks findable. Every token under `computed` is an accepted one.

        Where another sequence was first with the same prefix, its block takes the place of the own one: equal prefixes
        are held once, however they came about, and whoever holds a findable block holds those before it.
        """
        num_full, was_published = sequence.computed // self._block_size, sequence.num_published
        if not self._is_caching or num_full <= was_published:
            return
        self._extend_digests(sequence)
        for index in range(was_published, num_full):
            self._publish_block(sequence, index)
        sequence.num_published = num_full
        if was_published * self._block_size < sequence.num_prompt:
            self._pin(sequence)

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
            num_tokens = len(sequence.tokens) + sequence.num_pending
            is_ended = sequence.state is SequenceState.ENDED
            assert not is_ended or sequence.num_flying, "an ended sequence still holds blocks"
            assert 0 <= sequence.computed <= len(sequence.tokens), "computed is out of range"
            assert is_ended or sequence.num_planned <= num_tokens, "a step in flight computes no known token"
            assert sequence.table.capacity >= sequence.num_planned, "a table does not cover what is computed"
            num_needed = blocks_for(max(num_tokens, sequence.num_reserved), self._block_size)
            assert is_ended or len(sequence.table.block_ids) <= num_needed, "a table holds blocks for no token"
            assert sequence.num_synced <= len(sequence.table.block_ids), "the engine knows blocks that are gone"
            writers.update(sequence.table.block_ids[sequence.computed // self._block_size :])
        assert all(count == 1 for count in writers.values()), "two sequences write one block"
        references = Counter(block_id for s in self.sequences for block_id in s.table.block_ids)
        for block_id in range(self._pool.num_blocks):
            assert self._pool.ref_count(block_id) == references[block_id], f"block {block_id} is miscounted"
        self._pool.check()
        self.prefix_index.check()

    def _settle_in(self, sequence: Sequence) -> bool:
        """Give a waiting sequence what it can inherit, if there is room for the rest; else nothing."""
        if self._refused == (sequence, self._num_departures):
            return False
        self._inherit(sequence)
        num_tokens = self._table_end(sequence) - sequence.computed
        has_room = self.has_room(sequence, num_tokens, num_kept_back=self._watermark())
        if has_room and self._fits_later(sequence):
            return True
        sequence.table.release()
        sequence.reset()
        self._refused = (sequence, self._num_departures)
        return False

    def _inherit(self, sequence: Sequence) -> None:
        """Give an entering sequence the KV that exists already; its newest token is always computed anew."""
        sibling = self._sibling_of(sequence)
        if sibling is not None:
            self._fork(sibling, sequence)
        elif self.can_look_up(sequence):
            self._match(sequence)
        sequence.computed = min(sequence.table.capacity, len(sequence.tokens) - 1)
        sequence.num_published = sequence.computed // self._block_size

    def _sibling_of(self, sequence: Sequence) -> Sequence | None:
        """A choice of the same request to fork, for one that has given nothing yet."""
        return None if sequence.num_output else sequence.group.forkable()

    def _fork(self, sibling: Sequence, sequence: Sequence) -> None:
        sequence.table = sibling.table.fork()
        sequence.table.truncate(sequence.num_prompt)
        sequence.digests = sibling.digests[: sequence.num_prompt // self._block_size]

    def _match(self, sequence: Sequence) -> None:
        self._extend_digests(sequence)
        sequence.table.adopt(self.prefix_index.match(sequence.digests))

    def _table_end(self, sequence: Sequence) -> int:
        """How many tokens an entering sequence gets blocks for."""
        if sequence.num_preemptions >= self._config.max_preemptions:
            sequence.num_reserved = sequence.num_longest
        return max(len(sequence.tokens), sequence.num_reserved)

    def _load(self, sequence: Sequence, num_known: int) -> tuple[BlockLoad, ...]:
        """Orders to fill its blocks from number `num_known` on with what a tier gave."""
        data = self._offload.take(sequence, num_known)
        if not data:
            return ()
        block_ids = sequence.table.block_ids[num_known : num_known + len(data)]
        sequence.computed = min((num_known + len(data)) * self._block_size, len(sequence.tokens) - 1)
        return tuple(BlockLoad(block_id, block) for block_id, block in zip(block_ids, data, strict=True))

    def _publish_block(self, sequence: Sequence, index: int) -> None:
        size, digests, own_id = self._block_size, sequence.digests, sequence.table.block_ids[index]
        token_ids = tuple(sequence.tokens[index * size : (index + 1) * size])
        names = (sequence.request.cache_namespace, sequence.request.cache_scope)
        block = PrefixBlock(digests[index], digests[index - 1] if index else None, token_ids, *names)
        known_id = self.prefix_index.publish(block, own_id)
        if known_id is not None and known_id != own_id:
            sequence.table.replace(index, known_id)
            sequence.num_synced = min(sequence.num_synced, index)

    def _pin(self, sequence: Sequence) -> None:
        """Pin what is published of the prompt, if its request has a key."""
        key = sequence.request.pin_key
        if key is None:
            return
        num_blocks = min(sequence.num_published, sequence.num_prompt // self._block_size)
        published = takewhile(self._pool.is_findable, sequence.table.block_ids[:num_blocks])
        self.pins.pin(key, list(published))

    def _extend_digests(self, sequence: Sequence) -> None:
        extend_chain(sequence.request.cache_namespace, sequence.digests, sequence.tokens, self._block_size)

    def _watermark(self) -> int:
        return min(len(self.sequences), max(1, self._pool.num_blocks // WATERMARK_SHARE))

    def _fits_later(self, newcomer: Sequence) -> bool:
        """Whether the pool should hold the newcomer together with what runs, at their peak."""
        if not self._config.forecast_admission or not self.sequences:
            return True
        growth, size = self._forecast.growth, self._block_size
        num_spare = self._pool.num_spare - newcomer.table.needed_for(newcomer.computed, self._table_end(newcomer))
        if self._num_growth is None:
            self._num_growth = sum(growth(s) for s in self.sequences)
        if (self._num_growth + growth(newcomer)) // size + len(self.sequences) + 1 <= num_spare:
            return True  # even if nobody ended
        own = {s: self.num_own_blocks(s) for s in (*self.sequences, newcomer)}
        holdings = [self._holding(s, num_own) for s, num_own in own.items()]
        return peak_tokens(holdings) <= (self._pool.num_spare + sum(own.values())) * size

    def _holding(self, sequence: Sequence, num_own: int) -> Holding:
        """What it holds alone; half of its last block is counted as well, as it will be on average."""
        num_growth = self._forecast.growth(sequence)
        num_shared = (len(sequence.table.block_ids) - num_own) * self._block_size
        num_tokens = max(len(sequence.tokens), sequence.num_reserved - num_growth)
        return Holding(num_tokens - num_shared + self._block_size // 2, num_growth)
