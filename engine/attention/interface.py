"""What an attention backend is: planned once per step, then called once per layer.

Knows the step as arrays of lengths and block tables; knows nothing of requests, sampling or weights. A backend is made
once, over one pool and one `AttentionShape`; a step goes

    attend = backend.plan(inputs)         # index arithmetic for the whole step
    out = attend(layer, q, k, v)          # per layer: stores k and v in the pool, then attends over it

New kernels enter here and nowhere else; `tests/conformance` holds every backend against `reference`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

IntArray = npt.NDArray[np.int64]

LayerAttention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""`(layer, q [T, heads, head_dim], k [T, kv_heads, head_dim], v [T, kv_heads, head_dim]) -> [T, heads, head_dim]`."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What of a model attention must know beyond the pool's layout.

    Attributes:
        num_heads: query heads; a multiple of the layout's kv heads. Query head `h` reads kv head
            `h // (num_heads // num_kv_heads)`.
        scale: multiplies the scores before the softmax.
        windows: one entry per layer; with window `w` position `p` sees `p - w + 1 .. p`, with None all up to `p`.
    """

    num_heads: int
    scale: float
    windows: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """A step as attention sees it: R rows, T tokens, the tokens of row r at `query_starts[r] : query_starts[r + 1]`.

    Rows with a single query come first, so that a backend finds decode rows and chunks in two slices. The last query of
    a row is its last known token: query i of a row with n queries stands at position `context_lens[r] - n + i`.

    Attributes:
        query_starts: `[R + 1]`, on the host.
        context_lens: `[R]` tokens of each row including this step's, on the host.
        num_decode_rows: how many rows, the first ones, have a single query.
        block_tables: `[R, max blocks of a row]` int64 on the device; entries past a row's context are any valid block.
        slot_mapping: `[T]` int64 on the device: where each token's key and value go, `block * block_size + offset`.
    """

    query_starts: IntArray
    context_lens: IntArray
    num_decode_rows: int
    block_tables: Tensor
    slot_mapping: Tensor

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.context_lens)

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.query_starts[-1])


class AttentionBackend(Protocol):
    """Attention over the paged pool. Used by one thread."""

    name: str

    def plan(self, inputs: AttentionInputs) -> LayerAttention:
        """Prepare a step. The returned function serves that step only, for any layer, in any order of layers."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodeTensors:
    """A step of B rows of one query each that lives on the device alone, lengths included.

    The same memory is filled anew for each step, so whatever reads it may be recorded once and replayed.

    Attributes:
        context_lens: `[B]` int32: tokens of each row including this step's; 0 marks a row of padding, whose attention
            is zeros.
        block_tables: `[B, max blocks of a row]` int32; entries past a row's context are never read.
        slot_mapping: `[B]` int64: as in `AttentionInputs`; -1 (padding) stores nothing.
    """

    context_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor


@runtime_checkable
class CapturableAttention(AttentionBackend, Protocol):
    """A backend whose decode steps can be recorded, because their launches do not depend on lengths."""

    def plan_decode(self, tensors: DecodeTensors) -> LayerAttention:
        """Prepare a step whose numbers are read from `tensors` each time that the returned function's work runs."""
