"""Edits of the raw logits: logit bias, and the repetition, frequency and presence penalties.

Kept sparse: a slot remembers only the token ids that can be affected (those biased; those its sequence holds), so a
step touches those logits alone and a slot without the feature costs nothing. That is about 130 bytes of host memory for
each *different* token of a penalised sequence, 1 MB at worst at 8,192 tokens, and nothing on the device. Dense counts
would take 600 KB of device memory for each slot at a vocabulary of 150,000, and a pass over all of it every step.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from engine.batch import SlotStart
from engine.sampling.state import Floats, Ints, SlotTable, flat_index, floats_on, id_array, ints_on


class LogitBias:
    """Adds each slot's `logit_bias` to its logits."""

    def __init__(self, max_num_seqs: int) -> None:
        self.active = np.zeros(max_num_seqs, dtype=np.bool_)
        self._ids: list[Ints] = [np.empty(0, dtype=np.int64)] * max_num_seqs
        self._values: list[Floats] = [np.empty(0)] * max_num_seqs

    def start(self, slot: int, bias: Mapping[int, float]) -> None:
        """Take over a new sequence's biases (token id -> added to its logit)."""
        self.active[slot] = bool(bias)
        self._ids[slot] = id_array(bias.keys())
        self._values[slot] = np.fromiter(bias.values(), dtype=np.float64)

    def apply(self, x: Tensor, slots: Ints) -> Tensor:
        """Add to logits `x` [n, vocab], contiguous, in place."""
        rows = np.flatnonzero(self.active[slots])
        if not rows.size:
            return x
        flat = flat_index(rows, [self._ids[slot] for slot in slots[rows]], x.shape[-1])
        values = np.concatenate([self._values[slot] for slot in slots[rows]])
        x.view(-1).index_add_(0, ints_on(x.device, flat), floats_on(x.device, values).to(x.dtype))
        return x


class _Seen:
    """The different tokens of one sequence: ids, and how often each is in the output (0: in the prompt only)."""

    __slots__ = ("_counts", "_ids", "_place")

    def __init__(self, prompt_ids: Ints, output_ids: Ints) -> None:
        ids, inverse = np.unique(np.concatenate((prompt_ids, output_ids)), return_inverse=True)
        counts = np.bincount(inverse[len(prompt_ids) :], minlength=len(ids))
        self._place = dict(zip(ids.tolist(), range(len(ids)), strict=True))
        room = max(64, 2 * len(ids))
        self._ids = np.zeros(room, dtype=np.int64)
        self._counts = np.zeros(room, dtype=np.int64)
        self._ids[: len(ids)] = ids
        self._counts[: len(ids)] = counts

    @property
    def ids(self) -> Ints:
        """[num_different]."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> Ints:
        """[num_different], in the order of `ids`."""
        return self._counts[: len(self._place)]

    def add(self, token_id: int) -> None:
        """Count one more output token."""
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[place] = token_id
        self._counts[place] += 1


class Penalties:
    """The three penalties on the raw logits, each slot with its own.

    Repetition (Keskar et al. 2019, "CTRL"), for every token of the prompt or output: a positive logit is divided by it,
    a negative one multiplied. Then, as OpenAI defines them, for every token of the output:
    `logit -= count * frequency_penalty + presence_penalty`.
    """

    def __init__(self, table: SlotTable, max_num_seqs: int) -> None:
        self.active = np.zeros(max_num_seqs, dtype=np.bool_)
        self._table = table
        self._seen: list[_Seen | None] = [None] * max_num_seqs

    def start(self, start: SlotStart) -> None:
        """Take over a new sequence: count its output so far, and its prompt if repetition is penalised."""
        slot, params = start.slot, start.params
        repetition = params.repetition_penalty != 1.0
        self.active[slot] = repetition or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        self._seen[slot] = None
        if self.active[slot]:
            prompt_ids = start.prompt_ids if repetition else ()
            self._seen[slot] = _Seen(id_array(prompt_ids), id_array(start.output_ids))

    def add(self, slot: int, token_id: int) -> None:
        """Count one accepted output token."""
        seen = self._seen[slot]
        if seen is not None:
            seen.add(token_id)

    def apply(self, x: Tensor, slots: Ints) -> Tensor:
        """Penalise logits `x` [n, vocab], contiguous, in place."""
        rows = np.flatnonzero(self.active[slots])
        seen = [entry for slot in slots[rows] if (entry := self._seen[slot]) is not None]
        if not seen:
            return x
        index = ints_on(x.device, flat_index(rows, [entry.ids for entry in seen], x.shape[-1]))
        owners = np.repeat(slots[rows], [len(entry.ids) for entry in seen])
        counts = np.concatenate([entry.counts for entry in seen])
        repetition = floats_on(x.device, self._table.repetition_penalty[owners]).to(x.dtype)
        subtracted = counts * self._table.frequency_penalty[owners]
        subtracted += (counts > 0) * self._table.presence_penalty[owners]
        logits = x.view(-1)[index]
        logits = torch.where(logits > 0, logits / repetition, logits * repetition)
        x.view(-1)[index] = logits - floats_on(x.device, subtracted).to(x.dtype)
        return x
