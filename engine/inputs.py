"""From a `Batch` to tensors: vectorised over arrays that live as long as the engine.

Keeps one block-table row per slot, changed only where a step says so. Knows numbers and devices; knows nothing of
models or sampling. Rows are put into the order attention wants: single-query rows first, shortest context first.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.interface import AttentionInputs, IntArray
from engine.batch import PENDING, Batch, Row
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
        sample_hidden: `[N]` int64 on the device: the hidden row of each.
    """

    token_ids: Tensor
    positions: Tensor
    attention: AttentionInputs
    sample_rows: IntArray
    sample_hidden: Tensor
    prompt_scores: tuple[PromptScores, ...]
    has_pending: bool = False


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
        self._check(batch)
        for row in batch.rows:
            self._tables[row.slot, row.block_offset : row.block_offset + len(row.block_ids)] = row.block_ids
        counts = _ints((len(row.token_ids) for row in batch.rows), len(batch.rows))
        starts = _ints((row.start for row in batch.rows), len(batch.rows))
        order = np.lexsort((starts, counts > 1))
        query_starts = np.concatenate(([0], np.cumsum(counts[order])))
        first_of = np.empty_like(counts)
        first_of[order] = query_starts[:-1]
        tokens = self._lay_out([batch.rows[i] for i in order], counts[order], query_starts)
        sample_rows = np.flatnonzero(np.fromiter((row.sample for row in batch.rows), dtype=np.bool_))
        return StepInputs(
            token_ids=tokens[0],
            positions=tokens[1],
            attention=AttentionInputs(
                query_starts=query_starts,
                context_lens=(starts + counts)[order],
                num_decode_rows=int((counts == 1).sum()),
                block_tables=self._tables_of(batch, order, int((starts + counts).max())),
                slot_mapping=tokens[2],
            ),
            sample_rows=sample_rows,
            sample_hidden=self._to_device((first_of + counts - 1)[sample_rows]),
            prompt_scores=tuple(
                PromptScores(index, int(first_of[index]), row.prompt_targets)
                for index, row in enumerate(batch.rows)
                if row.prompt_targets
            ),
            has_pending=any(row.token_ids[0] == PENDING for row in batch.rows),
        )

    def _lay_out(self, rows: Sequence[Row], counts: IntArray, query_starts: IntArray) -> Tensor:
        """Token ids, positions and pool slots of all tokens, `[3, T]` on the device."""
        num_tokens = int(query_starts[-1])
        layout = np.empty((3, num_tokens), dtype=np.int64)
        token_ids, positions, slots = layout
        token_ids[:] = np.fromiter(chain.from_iterable(row.token_ids for row in rows), np.int64, num_tokens)
        starts = _ints((row.start for row in rows), len(rows))
        positions[:] = np.arange(num_tokens) + np.repeat(starts - query_starts[:-1], counts)
        owners = np.repeat(_ints((row.slot for row in rows), len(rows)), counts)
        pending = token_ids == PENDING
        token_ids[pending] = -1 - owners[pending]
        index, offset = np.divmod(positions, self._block_size)
        slots[:] = self._tables[owners, index] * self._block_size + offset
        return self._to_device(layout)

    def _tables_of(self, batch: Batch, order: IntArray, max_context: int) -> Tensor:
        """The rows' block tables, `[R, blocks]` on the device, as wide as the longest context needs."""
        slots = _ints((row.slot for row in batch.rows), len(batch.rows))[order]
        return self._to_device(self._tables[slots, : blocks_for(max_context, self._block_size)])

    def _check(self, batch: Batch) -> None:
        if not batch.rows:
            raise ValueError(f"step {batch.step} has no rows")
        if batch.num_tokens > self._max_num_tokens:
            raise ValueError(f"step {batch.step} has {batch.num_tokens} tokens, at most {self._max_num_tokens} fit")
        for row in batch.rows:
            if not 0 <= row.slot < len(self._tables) or row.start + len(row.token_ids) > self._max_model_len:
                raise ValueError(
                    f"step {batch.step}: slot {row.slot} at {row.start} + {len(row.token_ids)} tokens is outside "
                    f"{len(self._tables)} slots of {self._max_model_len} tokens"
                )

    def _to_device(self, host: IntArray) -> Tensor:
        return upload(torch.from_numpy(host), self._device)


def _ints(values: Iterable[int], count: int) -> npt.NDArray[np.int64]:
    return np.fromiter(values, dtype=np.int64, count=count)
