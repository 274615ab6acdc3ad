"""Constraint states of the slots and their token masks, filled on a side thread while the forward pass runs.

Knows slots, bit masks and the `ConstraintState` protocol; nothing of grammars. A state that fails (ValueError or
RuntimeError) fails its own slot only: `errors` keeps the reason until the slot starts anew. The buffer of masks takes
`max_num_seqs * vocab / 8` bytes (4.8 MB for 256 slots and 150,000 tokens) and exists once a constraint has been used.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from engine.sampling.constraint import Constraint, ConstraintState
from engine.sampling.state import Ints

Words = npt.NDArray[np.int32]


class GrammarMasks:
    """Which tokens each constrained slot's grammar allows next.

    Owners: between `begin` and `join` the side thread alone touches the states and the buffer; at all other times the
    caller's thread does.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self.active = np.zeros(max_num_seqs, dtype=np.bool_)
        self.errors: dict[int, str] = {}
        self._shape = (max_num_seqs, -(-vocab_size // 32))
        # Bits of the last word that are tokens; a grammar's own vocabulary may be padded further than the model's.
        self._last_word = np.uint32(0xFFFFFFFF >> -vocab_size % 32).view(np.int32)
        self._words: Words | None = None
        self._states: dict[int, ConstraintState] = {}
        self._filled: set[int] = set()
        self._pending: Future[None] | None = None
        self._thread: ThreadPoolExecutor | None = None

    def start(self, slot: int, constraint: Constraint | None, output_ids: Sequence[int]) -> None:
        """A new sequence takes the slot; its state is advanced over the tokens it already has."""
        self._wait()
        self._states.pop(slot, None)
        self.errors.pop(slot, None)
        self._filled.discard(slot)
        self.active[slot] = constraint is not None
        if constraint is None:
            return
        try:
            self._states[slot] = constraint.start()
        except (ValueError, RuntimeError) as error:
            self.errors[slot] = f"the constraint failed to start: {error}"
            return
        if output_ids:
            self.accept(slot, output_ids)

    def begin(self, slots: Iterable[int]) -> None:
        """Start filling the masks of those of `slots` that are constrained, all in one task of the side thread."""
        self._wait()
        slots = [slot for slot in slots if self.active[slot] and slot not in self._filled]
        if not slots:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
        self._pending = self._thread.submit(self._fill, slots)

    def join(self, slots: Sequence[int]) -> None:
        """Wait for the masks of `slots`; any that `begin` was not told of are filled now."""
        self._wait()
        missing = [slot for slot in slots if self.active[slot] and slot not in self._filled]
        if missing:
            self._fill(missing)

    def words(self, slots: Ints) -> Words:
        """The masks of constrained, joined slots: a copy [len(slots), ceil(vocab / 32)]."""
        assert self._words is not None, "masks are joined before they are read"
        words = self._words[slots]
        words[:, -1] &= self._last_word
        return words

    def accept(self, slot: int, token_ids: Sequence[int]) -> bool:
        """Advance a slot's state; False when that is impossible: the slot then has an entry in `errors`."""
        if not self.active[slot]:
            return True
        self._filled.discard(slot)
        state = self._states.get(slot)
        if state is None or slot in self.errors:
            return False
        try:
            if not state.accept(token_ids):
                self.errors[slot] = f"the constraint does not allow the tokens {list(token_ids)}: {state.error}"
        except (ValueError, RuntimeError) as error:
            self.errors[slot] = f"the constraint failed: {error}"
        return slot not in self.errors

    def is_stopped(self, slot: int) -> bool:
        """Whether the slot's grammar is complete and nothing may follow."""
        return bool(self.active[slot]) and slot in self._states and self._states[slot].is_stopped

    def close(self) -> None:
        """End the side thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None

    def _fill(self, slots: Sequence[int]) -> None:
        if self._words is None:
            self._words = np.zeros(self._shape, dtype=np.int32)
        for slot in slots:
            out = self._words[slot]
            out.fill(0)
            self._filled.add(slot)
            if slot in self.errors:
                continue
            try:
                self._states[slot].fill_mask(out)
                reason = self._states[slot].error
            except (ValueError, RuntimeError) as error:
                reason = str(error)
            if reason is not None:
                out.fill(0)
                self.errors[slot] = f"the constraint failed: {reason}"

    def _wait(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()
