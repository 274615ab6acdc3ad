"""Per-slot sampling settings as columns: one numpy array per setting, one row per slot.

A step picks its rows out of the columns (`temperature[slots]`), so its cost does not grow with Python objects. Knows
settings and slots; keeps no tensors. A column set for 256 slots takes 24 KB, and their next noise keys 32 KB.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.batch import SlotStart
from engine.sampling.params import SamplingParams
from engine.sampling.rng import Keys, race_keys
from engine.transit import upload

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Steps = tuple[str, ...]

EDITS: Steps = ("mask", "logit_bias", "penalties")
"""The steps that change which token is the most likely; the only ones a greedy row goes through."""


KEYS_AHEAD = 16
"""Noise keys of a slot that are computed together: 16 cost hardly more than one."""

_NEVER = -(1 << 62)


def accumulator(device: torch.device) -> torch.dtype:
    """The widest float type of the device, for sums of probabilities (Metal has no float64)."""
    return torch.float32 if device.type == "mps" else torch.float64


def floats_on(device: torch.device, values: Floats) -> Tensor:
    """`values` [n] as a tensor of the device's accumulator type."""
    return upload(torch.from_numpy(values).to(accumulator(device)), device)


def ints_on(device: torch.device, values: Ints) -> Tensor:
    """`values` as an int64 tensor on the device."""
    return upload(torch.from_numpy(values), device)


def put(target: Tensor, index: Ints, values: Tensor) -> None:
    """`target[index] = values` on their device; on a CPU without the cost of torch's dispatch."""
    if target.device.type == "cpu":
        target.numpy()[index] = values.numpy()
    else:
        target.index_copy_(0, ints_on(target.device, index), values)


def id_array(token_ids: Iterable[int]) -> Ints:
    """Token ids as an array [n]."""
    return np.fromiter(token_ids, dtype=np.int64)


def flat_index(rows: Ints, id_lists: Sequence[Ints], vocab_size: int) -> Ints:
    """Positions, in a flattened `[n, vocab_size]` tensor, of the ids of each list in its row of `rows`."""
    return np.concatenate(id_lists) + np.repeat(rows * vocab_size, [len(ids) for ids in id_lists])


def on_rows(x: Tensor, slots: Ints, active: Flags, edit: Callable[[Tensor, Ints], Tensor]) -> Tensor:
    """`x` [n, vocab] with its `active` [n] rows replaced by `edit(rows, their slots)`; free when none is active."""
    if not active.any():
        return x
    if active.all():
        return edit(x, slots)
    rows = np.flatnonzero(active)
    index = ints_on(x.device, rows)
    x[index] = edit(x[index], slots[rows])
    return x


class SlotTable:
    """The numeric settings of every slot, and how many output tokens each has.

    `program[slot]` numbers an entry of `programs`: the steps that slot's logits go through. Rows of one program are
    computed together.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.temperature: Floats = np.ones(max_num_seqs)
        self.top_p: Floats = np.ones(max_num_seqs)
        self.min_p: Floats = np.zeros(max_num_seqs)
        self.typical_p: Floats = np.ones(max_num_seqs)
        self.repetition_penalty: Floats = np.ones(max_num_seqs)
        self.frequency_penalty: Floats = np.zeros(max_num_seqs)
        self.presence_penalty: Floats = np.zeros(max_num_seqs)
        self.top_k: Ints = np.zeros(max_num_seqs, dtype=np.int64)
        self.seed: Ints = np.zeros(max_num_seqs, dtype=np.int64)
        self.choice: Ints = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_outputs: Ints = np.zeros(max_num_seqs, dtype=np.int64)
        self.program: Ints = np.zeros(max_num_seqs, dtype=np.int64)
        self.programs: list[Steps] = [EDITS]
        self._keys: Keys = np.zeros((max_num_seqs, KEYS_AHEAD, 2), dtype=np.int32)
        self._keys_from: Ints = np.full(max_num_seqs, _NEVER)

    def start(self, start: SlotStart) -> None:
        """Take over a new sequence's settings."""
        slot, params = start.slot, start.params
        self.temperature[slot] = params.temperature
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.typical_p[slot] = params.typical_p
        self.repetition_penalty[slot] = params.repetition_penalty
        self.frequency_penalty[slot] = params.frequency_penalty
        self.presence_penalty[slot] = params.presence_penalty
        self.top_k[slot] = min(params.top_k, self.vocab_size) % self.vocab_size  # all of the vocabulary is no limit
        self.seed[slot] = params.seed
        self.choice[slot] = start.choice
        self.num_outputs[slot] = len(start.output_ids)
        self.program[slot] = self._program_of(params)
        self._keys_from[slot] = _NEVER

    def keys(self, slots: Ints) -> Keys:
        """The noise key of each slot's next draw: `race_keys` of its seed, choice and number of output tokens."""
        offsets = self.num_outputs[slots] - self._keys_from[slots]
        is_used_up = offsets >= KEYS_AHEAD
        if is_used_up.any():
            self._compute_keys(slots[is_used_up])
            offsets[is_used_up] = 0
        keys: Keys = self._keys[slots, offsets]
        return keys

    def _compute_keys(self, slots: Ints) -> None:
        """Those of the next `KEYS_AHEAD` draws."""
        first = self.num_outputs[slots]
        indices = (first[:, None] + np.arange(KEYS_AHEAD)).ravel()
        seeds, choices = (np.repeat(column[slots], KEYS_AHEAD) for column in (self.seed, self.choice))
        self._keys[slots] = race_keys(seeds, choices, indices).reshape(len(slots), KEYS_AHEAD, 2)
        self._keys_from[slots] = first

    def _program_of(self, params: SamplingParams) -> int:
        """The number of the steps these settings ask for; there are at most 7! + 3! different ones."""
        order = params.sampler_order
        steps = tuple(step for step in order if step in EDITS) if params.is_greedy else order
        if steps not in self.programs:
            self.programs.append(steps)
        return self.programs.index(steps)
