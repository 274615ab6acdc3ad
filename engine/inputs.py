"""From a `Batch` to tensors: vectorised over arrays that live as long as the engine.

Keeps one block-table row per slot, changed only where a step says so. Knows numbers and devices; knows nothing of
models or sampling. Rows are put into the order attention wants: single-query rows first, shortest context first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.interface import AttentionInputs, IntArray
from engine.batch import Batch, Row
from engine.transit import upload
from kvpool.table import blocks_for


@dataclass(frozen=True, slots=True)
class PromptScores:
    """A row's prompt tokens whose probability is wanted: hidden rows `first : first + len(targets)` predict them."""

    row: int
    first: int
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The tensors of one step, its own: the next may be built while the device still works on this one.

    Attributes:
        token_ids, positions: `[T]` int64 on the device, ragged rows one after the other. A `PENDING` token of a slot is
            given as `-1 - slot`.
        sample_rows: indices into `batch.rows` of those that sample, ascending.
        sample_slots: `[N]` their slots, on the host.
        sample_hidden: `[N]` int64 on the device: the hidden row of each; None when these are all hidden rows, in order.
    """

    token_ids: Tensor
    positions: Tensor
    attention: AttentionInputs
    sample_rows: IntArray
    sample_slots: IntArray
    sample_hidden: Tensor | None
    prompt_scores: tuple[PromptScores, ...]
    has_pending: bool = False


class Columns(NamedTuple):
    """A step's rows `[R]` as columns, in the batch's order, and their tokens `[T]`, ragged, in that order as well."""

    slots: tuple[int, ...]
    starts: IntArray
    token_lists: tuple[tuple[int, ...], ...]
    token_ids: IntArray
    block_offsets: tuple[int, ...]
    block_ids: tuple[tuple[int, ...], ...]
    samples: tuple[bool, ...]
    prompt_targets: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Columns":
        """Of at least one row."""
        slots, starts, token_lists, offsets, block_ids, samples, _, targets = zip(*rows, strict=True)
        token_ids = np.fromiter(chain.from_iterable(token_lists), dtype=np.int64)
        return cls(slots, _ints(starts), token_lists, token_ids, offsets, block_ids, samples, targets)

    @property
    def counts(self) -> IntArray:
        """`[R]` tokens of each row."""
        return np.fromiter(map(len, self.token_lists), dtype=np.int64, count=len(self.token_lists))

    @property
    def is_single(self) -> bool:
        """Whether each row is one token."""
        return len(self.token_ids) == len(self.slots)

    @property
    def only_decodes(self) -> bool:
        """Whether each row is one token, after which it samples, and nothing else."""
        return self.is_single and all(self.samples) and not any(self.prompt_targets)


class Layout(NamedTuple):
    """Where a step's rows and tokens go.

    Attributes:
        order: `[R]` the batch's rows, in the order in which they are laid out.
        query_starts: `[R + 1]` where each laid-out row begins.
        last_of: `[R]` where the last token of each of the batch's rows has come to lie.
        sources: `[T]` which of the batch's tokens each laid-out token is.
        owners, positions: `[T]` the slot and the position of each laid-out token.
    """

    order: IntArray
    query_starts: IntArray
    last_of: IntArray
    sources: IntArray
    owners: IntArray
    positions: IntArray


def lay_out(rows: Columns) -> Layout:
    """Rows of any length: single tokens first, the shortest context first."""
    unordered = rows.counts
    order = np.lexsort((rows.starts, unordered > 1))
    counts, num_tokens = unordered[order], len(rows.token_ids)
    query_starts = np.concatenate(([0], np.cumsum(counts)))
    last_of = np.empty_like(order)
    last_of[order] = query_starts[1:] - 1
    first_sources = (np.cumsum(unordered) - unordered)[order]
    count_up = np.arange(num_tokens)
    return Layout(
        order=order,
        query_starts=query_starts,
        last_of=last_of,
        sources=count_up + np.repeat(first_sources - query_starts[:-1], counts),
        owners=np.repeat(_ints(rows.slots)[order], counts),
        positions=count_up + np.repeat(rows.starts[order] - query_starts[:-1], counts),
    )


def lay_out_singles(rows: Columns) -> Layout:
    """The same for rows of one token each, as most steps have them: a row is its token."""
    order = rows.starts.argsort(kind="stable")
    query_starts = np.arange(len(order) + 1)
    last_of = np.empty_like(order)
    last_of[order] = query_starts[:-1]
    return Layout(order, query_starts, last_of, order, _ints(rows.slots)[order], rows.starts[order])


class Course(NamedTuple):
    """A step's layout with what follows from it, made to be taken on where the next step only decodes the same rows.

    Attributes:
        ends: `[R]` tokens of each row including this step's, in the batch's order.
        longest: the most of these.
        tables: as in `AttentionInputs`.
        sample_rows, sample_slots, sample_hidden: as in `StepInputs`.
        can_go_on: whether every row decodes.
    """

    slots: tuple[int, ...]
    layout: Layout
    ends: IntArray
    longest: int
    tables: Tensor
    sample_rows: IntArray
    sample_slots: IntArray
    sample_hidden: Tensor | None
    can_go_on: bool


class InputBuilder:
    """Builds `StepInputs` for steps of at most `max_num_tokens` tokens.

    Memory: block tables of `max_num_seqs * blocks per sequence * 8` bytes, on the host only (4 MB for 32 sequences of
    262,144 tokens in blocks of 16); a step sends the columns it needs.
    """

    def __init__(
        self, max_num_seqs: int, max_num_tokens: int, max_model_len: int, block_size: int, device: torch.device
    ) -> None:
        self._block_size = block_size
        self._device = device
        self._max_num_tokens = max_num_tokens
        self._max_model_len = max_model_len
        self._course: Course | None = None
        self._tables = np.zeros((max_num_seqs, blocks_for(max_model_len, block_size)), dtype=np.int64)

    def build(self, batch: Batch) -> StepInputs:
        """Apply the rows' block-table changes and lay the step out.

        Raises:
            ValueError: a row or the whole batch is larger than the engine was made for; nothing was changed.
        """
        if not batch.rows:
            raise ValueError(f"step {batch.step} has no rows")
        rows = Columns.of(batch.rows)
        course = self._course = self._taken_on(rows) or self._begun(rows, batch)
        layout = course.layout
        tokens, has_pending = self._tokens(rows, layout)
        return StepInputs(
            token_ids=tokens[0],
            positions=tokens[1],
            attention=AttentionInputs(
                query_starts=layout.query_starts,
                context_lens=course.ends[layout.order],
                num_decode_rows=len(rows.slots) if rows.is_single else int((rows.counts == 1).sum()),
                block_tables=course.tables,
                slot_mapping=tokens[2],
            ),
            sample_rows=course.sample_rows,
            sample_slots=course.sample_slots,
            sample_hidden=course.sample_hidden,
            prompt_scores=_prompt_scores(rows, layout),
            has_pending=has_pending,
        )

    def _taken_on(self, rows: Columns) -> Course | None:
        """The course of the step before, one token on, where nothing but that has happened since; else None."""
        last = self._course
        if last is None or not last.can_go_on or last.longest == self._max_model_len or rows.slots != last.slots:
            return None
        if not rows.only_decodes or (rows.starts != last.ends).any():
            return None
        longest, tables = last.longest + 1, last.tables
        if any(rows.block_ids) or longest > tables.shape[1] * self._block_size:
            self._update_tables(rows)
            tables = self._tables_of(last.layout.owners, longest)
        layout = last.layout._replace(positions=last.layout.positions + 1)
        return last._replace(layout=layout, ends=last.ends + 1, longest=longest, tables=tables)

    def _begun(self, rows: Columns, batch: Batch) -> Course:
        """A course from the rows alone. Raises as `build` does."""
        ends = rows.starts + rows.counts
        longest = int(ends.max())
        self._check(rows, longest, batch)
        self._update_tables(rows)
        layout = lay_out_singles(rows) if rows.is_single else lay_out(rows)
        slots, sample_rows = _ints(rows.slots), np.flatnonzero(rows.samples)
        return Course(
            slots=rows.slots,
            layout=layout,
            ends=ends,
            longest=longest,
            tables=self._tables_of(slots[layout.order], longest),
            sample_rows=sample_rows,
            sample_slots=slots[sample_rows],
            sample_hidden=self._selection(layout.last_of[sample_rows], len(rows.token_ids)),
            can_go_on=rows.only_decodes,
        )

    def _update_tables(self, rows: Columns) -> None:
        for slot, offset, block_ids in zip(rows.slots, rows.block_offsets, rows.block_ids, strict=True):
            if block_ids:
                self._tables[slot, offset : offset + len(block_ids)] = block_ids

    def _tables_of(self, slots: IntArray, longest: int) -> Tensor:
        """The block tables of these slots, as wide as the longest context needs, on the device."""
        return self._to_device(self._tables[slots, : blocks_for(longest, self._block_size)])

    def _tokens(self, rows: Columns, layout: Layout) -> tuple[Sequence[Tensor], bool]:
        """Token ids, positions and pool slots of all tokens, `[T]` each on the device; whether any id is pending."""
        owners, positions = layout.owners, layout.positions
        laid_out = np.empty((3, len(positions)), dtype=np.int64)
        token_ids, laid_out[1], pool_slots = laid_out[0], positions, laid_out[2]
        np.take(rows.token_ids, layout.sources, out=token_ids)
        has_pending = bool(token_ids.min() < 0)
        if has_pending:
            np.copyto(token_ids, -1 - owners, where=token_ids < 0)
        index, offset = np.divmod(positions, self._block_size)
        np.multiply(self._tables[owners, index], self._block_size, out=pool_slots)
        pool_slots += offset
        return self._to_device(laid_out).unbind(), has_pending

    def _selection(self, hidden_rows: IntArray, num_tokens: int) -> Tensor | None:
        """See `StepInputs.sample_hidden`."""
        if len(hidden_rows) == num_tokens and (hidden_rows == np.arange(num_tokens)).all():
            return None
        return self._to_device(hidden_rows)

    def _check(self, rows: Columns, longest: int, batch: Batch) -> None:
        num_tokens, num_slots = len(rows.token_ids), len(self._tables)
        if num_tokens > self._max_num_tokens:
            raise ValueError(f"step {batch.step} has {num_tokens} tokens, at most {self._max_num_tokens} fit")
        if min(rows.slots) >= 0 and max(rows.slots) < num_slots and longest <= self._max_model_len:
            return
        row = next(r for r in batch.rows if not self._has_place_for(r))
        raise ValueError(
            f"step {batch.step}: slot {row.slot} at {row.start} + {len(row.token_ids)} tokens is outside "
            f"{num_slots} slots of {self._max_model_len} tokens"
        )

    def _has_place_for(self, row: Row) -> bool:
        return 0 <= row.slot < len(self._tables) and row.start + len(row.token_ids) <= self._max_model_len

    def _to_device(self, host: IntArray) -> Tensor:
        return upload(torch.from_numpy(host), self._device)


def _prompt_scores(rows: Columns, layout: Layout) -> tuple[PromptScores, ...]:
    if not any(rows.prompt_targets):
        return ()
    first_of = layout.last_of - rows.counts + 1
    return tuple(
        PromptScores(index, int(first_of[index]), targets)
        for index, targets in enumerate(rows.prompt_targets)
        if targets
    )


def _ints(values: Sequence[int]) -> IntArray:
    return np.fromiter(values, dtype=np.int64, count=len(values))
