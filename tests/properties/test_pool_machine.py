"""A stateful machine that drives pool, tables and prefix index together, over an emulated memory.

The memory holds tokens where KV would be. After each rule every table must still read exactly its own tokens, every
published block must hold the prefix it is published under, and the accounting must add up.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import takewhile

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpool.errors import OutOfBlocks
from kvpool.pins import PrefixPins
from kvpool.pool import BlockPool
from kvpool.prefix import PrefixBlock, PrefixIndex, extend_chain, namespace_root
from kvpool.table import BlockTable

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
ROOTS = [namespace_root("a"), namespace_root("b")]


@dataclass(eq=False)
class Owner:
    """A table and what its blocks must hold."""

    table: BlockTable
    root: bytes
    tokens: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)


class PoolMachine(RuleBasedStateMachine):
    """Binary tokens and few blocks: prefixes collide, blocks run out, everything is shared and evicted."""

    def __init__(self) -> None:
        super().__init__()
        self.owners: list[Owner] = []
        self.memory: dict[int, list[int | None]] = {}
        self.published: dict[bytes, tuple[bytes, list[int]]] = {}
        self.has_forgotten = False
        self.evicted = b""

    def on_stored(self, block: PrefixBlock) -> None:
        pass

    def on_evicted(self, digest: bytes, block_id: int) -> None:
        self.evicted = digest

    def on_removed(self, digest: bytes) -> None:
        """Children go before their parents: none is ever lost because its parent was evicted.

        Owners release whole tables from the tail and hold what they found together with all before it; then plain LRU
        order keeps the promise, pinned or not. A block that is made unfindable by force takes its children with it.
        """
        assert self.has_forgotten or digest == self.evicted

    def on_cleared(self) -> None:
        pass

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 4), pin_budget=st.integers(0, 6))
    def build(self, num_blocks: int, block_size: int, pin_budget: int) -> None:
        self.size = block_size
        self.pool = BlockPool(num_blocks)
        self.pins = PrefixPins(pin_budget)
        self.pool.set_eviction_policy(self.pins)
        self.index = PrefixIndex(self.pool, self)
        self.memory = {block_id: [None] * block_size for block_id in range(num_blocks)}

    @rule(tokens=TOKENS, root=st.sampled_from(ROOTS))
    def enter(self, tokens: list[int], root: bytes) -> None:
        """A new sequence adopts what the index knows of its tokens and writes the rest."""
        owner = Owner(BlockTable(self.pool, self.size), root)
        extend_chain(root, owner.digests, tokens, self.size)
        owner.table.adopt(self.index.match(owner.digests))
        owner.tokens = tokens[: owner.table.capacity]
        if self.write(owner, tokens[len(owner.tokens) :]):
            self.owners.append(owner)
        else:
            owner.table.release()

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), tokens=TOKENS)
    def grow(self, data: st.DataObject, tokens: list[int]) -> None:
        self.write(self.pick(data), tokens)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def rewrite_last(self, data: st.DataObject) -> None:
        """Compute a token again, as a fully cached prompt does: the same token, but never in a shared block."""
        owner = self.pick(data)
        if owner.tokens:
            last = owner.tokens.pop()
            if not self.write(owner, [last]):
                owner.tokens.append(last)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        owner = self.pick(data)
        self.owners.append(Owner(owner.table.fork(), owner.root, list(owner.tokens), list(owner.digests)))

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        """Roll back what was not published, as a rejected draft does."""
        owner = self.pick(data)
        known = sum(self.pool.is_findable(block_id) for block_id in owner.table.block_ids) * self.size
        owner.tokens = owner.tokens[: data.draw(st.integers(min(known, len(owner.tokens)), len(owner.tokens)))]
        owner.table.truncate(len(owner.tokens))
        del owner.digests[len(owner.tokens) // self.size :]

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        owner = self.pick(data)
        extend_chain(owner.root, owner.digests, owner.tokens, self.size)
        for number, digest in enumerate(owner.digests):
            tokens, own_id = owner.tokens[: (number + 1) * self.size], owner.table.block_ids[number]
            parent = owner.digests[number - 1] if number else None
            known_id = self.index.publish(PrefixBlock(digest, parent, tuple(tokens[-self.size :])), own_id)
            if known_id is not None and known_id != own_id:
                owner.table.replace(number, known_id)
            self.published[digest] = (owner.root, tokens)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), key=st.sampled_from("abc"))
    def pin(self, data: st.DataObject, key: str) -> None:
        owner = self.pick(data)
        self.pins.pin(key, list(takewhile(self.pool.is_findable, owner.table.block_ids)))

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        owner = self.pick(data)
        if owner.table.block_ids:
            self.has_forgotten = True
            self.index.forget(data.draw(st.sampled_from(owner.table.block_ids)))

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        owner = self.pick(data)
        self.owners.remove(owner)
        owner.table.release()

    @precondition(lambda self: hasattr(self, "pool"))
    @rule()
    def ask_too_much(self) -> None:
        before = self.pool.stats()
        with pytest.raises(OutOfBlocks):
            self.pool.take(self.pool.num_available + 1)
        assert self.pool.stats() == before

    @invariant()
    def all_is_well(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        self.index.check()
        references = Counter(block_id for owner in self.owners for block_id in owner.table.block_ids)
        for block_id in range(self.pool.num_blocks):
            assert self.pool.ref_count(block_id) == references[block_id]
        for owner in self.owners:
            assert len(owner.tokens) <= owner.table.capacity < len(owner.tokens) + self.size
            assert self.read(owner.table.block_ids, len(owner.tokens)) == owner.tokens
        for root, tokens in self.published.values():
            digests: list[bytes] = []
            extend_chain(root, digests, tokens, self.size)
            found = self.index.match(digests)
            assert self.read(found, len(found) * self.size) == tokens[: len(found) * self.size]

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for owner in self.owners:
                owner.table.release()
            self.owners.clear()
            self.all_is_well()
            assert self.pool.stats().num_referenced == 0

    def pick(self, data: st.DataObject) -> Owner:
        return data.draw(st.sampled_from(self.owners))

    def write(self, owner: Owner, tokens: list[int]) -> bool:
        """Append `tokens` if there is room; the copies come first, then the writes, never into a shared block."""
        start, end = len(owner.tokens), len(owner.tokens) + len(tokens)
        if owner.table.needed_for(start, end) > self.pool.num_available:
            with pytest.raises(OutOfBlocks):
                owner.table.prepare_write(start, end)
            return False
        known_before = list(owner.table.block_ids)
        first_changed, copies = owner.table.prepare_write(start, end)
        assert owner.table.block_ids[:first_changed] == known_before[:first_changed]
        for copy in copies:
            self.memory[copy.target_id] = list(self.memory[copy.source_id])
        for position, token in enumerate(tokens, start):
            block_id = owner.table.block_ids[position // self.size]
            assert self.pool.ref_count(block_id) == 1
            self.memory[block_id][position % self.size] = token
        owner.tokens.extend(tokens)
        return True

    def read(self, block_ids: list[int], num_tokens: int) -> list[int | None]:
        return [token for block_id in block_ids for token in self.memory[block_id]][:num_tokens]


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
