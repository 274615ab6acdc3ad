"""From a `Batch` to tensors: vectorised over arrays that live as long as the engine.

Keeps one block-table row per slot, changed only where a step says so. Knows numbers and devices; knows nothing of
models or sampling. Rows are put into the order attention wants: single-query rows first, shortest context first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
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

    slots: IntArray
    starts: IntArray
    counts: IntArray
    token_ids: IntArray
    samples: npt.NDArray[np.bool_]
    prompt_targets: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Columns":
        """Of at least one row."""
        slots, starts, token_ids, _, _, samples, _, targets = zip(*rows, strict=True)
        counts = _ints(tuple(map(len, token_ids)))
        tokens = np.fromiter(chain.from_iterable(token_ids), dtype=np.int64)
        return cls(_ints(slots), _ints(starts), counts, tokens, np.fromiter(samples, dtype=np.bool_), targets)


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
    order = np.lexsort((rows.starts, rows.counts > 1))
    counts, num_tokens = rows.counts[order], len(rows.token_ids)
    query_starts = np.concatenate(([0], np.cumsum(counts)))
    last_of = np.empty_like(order)
    last_of[order] = query_starts[1:] - 1
    first_sources = (np.cumsum(rows.counts) - rows.counts)[order]
    count_up = np.arange(num_tokens)
    return Layout(
        order=order,
        query_starts=query_starts,
        last_of=last_of,
        sources=count_up + np.repeat(first_sources - query_starts[:-1], counts),
        owners=np.repeat(rows.slots[order], counts),
        positions=count_up + np.repeat(rows.starts[order] - query_starts[:-1], counts),
    )


def lay_out_singles(rows: Columns) -> Layout:
    """The same for rows of one token each, as most steps have them: a row is its token."""
    order = rows.starts.argsort(kind="stable")
    query_starts = np.arange(len(order) + 1)
    last_of = np.empty_like(order)
    last_of[order] = query_starts[:-1]
    return Layout(order, query_starts, last_of, order, rows.slots[order], rows.starts[order])


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
        self._tables = np.zeros((max_num_seqs, blocks_for(max_model_len, block_size)), dtype=np.int64)

    def build(self, batch: Batch) -> StepInputs:
        """Apply the rows' block-table changes and lay the step out.

        Raises:
            ValueError: a row or the whole batch is larger than the engine was made for; nothing was changed.
        """
        if not batch.rows:
            raise ValueError(f"step {batch.step} has no rows")
        rows = Columns.of(batch.rows)
        ends = rows.starts + rows.counts
        longest = int(ends.max())
        if self._is_too_large(rows, longest):
            raise ValueError(self._what_is_too_large(batch))
        self._update_tables(batch.rows)
        is_single = len(rows.token_ids) == len(ends)
        layout = lay_out_singles(rows) if is_single else lay_out(rows)
        tokens, has_pending = self._tokens(rows, layout)
        sample_rows = np.flatnonzero(rows.samples)
        tables = self._tables[rows.slots[layout.order], : blocks_for(longest, self._block_size)]
        return StepInputs(
            token_ids=tokens[0],
            positions=tokens[1],
            attention=AttentionInputs(
                query_starts=layout.query_starts,
                context_lens=ends[layout.order],
                num_decode_rows=len(ends) if is_single else int((rows.counts == 1).sum()),
                block_tables=self._to_device(tables),
                slot_mapping=tokens[2],
            ),
            sample_rows=sample_rows,
            sample_slots=rows.slots[sample_rows],
            sample_hidden=self._selection(layout.last_of[sample_rows], len(rows.token_ids)),
            prompt_scores=_prompt_scores(rows, layout),
            has_pending=has_pending,
        )

    def _update_tables(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if row.block_ids:
                self._tables[row.slot, row.block_offset : row.block_offset + len(row.block_ids)] = row.block_ids

    def _tokens(self, rows: Columns, layout: Layout) -> tuple[Sequence[Tensor], bool]:
        """Token ids, positions and pool slots of all tokens, `[T]` each on the device; whether any id is pending."""
        owners, positions = layout.owners, layout.positions
        token_ids = rows.token_ids[layout.sources]
        pending = token_ids < 0
        has_pending = bool(pending.any())
        if has_pending:
            token_ids[pending] = -1 - owners[pending]
        index, offset = np.divmod(positions, self._block_size)
        pool_slots = self._tables[owners, index] * self._block_size + offset
        return self._to_device(np.stack((token_ids, positions, pool_slots))).unbind(), has_pending

    def _selection(self, hidden_rows: IntArray, num_tokens: int) -> Tensor | None:
        """See `StepInputs.sample_hidden`."""
        if len(hidden_rows) == num_tokens and (hidden_rows == np.arange(num_tokens)).all():
            return None
        return self._to_device(hidden_rows)

    def _is_too_large(self, rows: Columns, longest: int) -> bool:
        has_strange_slot = rows.slots.min() < 0 or rows.slots.max() >= len(self._tables)
        return has_strange_slot or longest > self._max_model_len or len(rows.token_ids) > self._max_num_tokens

    def _what_is_too_large(self, batch: Batch) -> str:
        if batch.num_tokens > self._max_num_tokens:
            return f"step {batch.step} has {batch.num_tokens} tokens, at most {self._max_num_tokens} fit"
        row = next(r for r in batch.rows if not self._has_place_for(r))
        return (
            f"step {batch.step}: slot {row.slot} at {row.start} + {len(row.token_ids)} tokens is outside "
            f"{len(self._tables)} slots of {self._max_model_len} tokens"
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
