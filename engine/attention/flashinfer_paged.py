"""An optional backend: paged attention by FlashInfer (Ye et al. 2025), version 0.2.1 and later, where installed.

Its wrapper for prefill serves every row: `plan` takes a step's lengths on the host and lays out the work, `run` attends
in one layer. (Its wrapper for decoding does the same on tensor cores, and its other kernels know a few head groups
only.) A window is part of a plan, so each distinct one has a wrapper of its own, and decode rows have others than
chunks, whose tiles are larger.

    qo_indptr        [rows + 1]   queries of each row, summed                    on the host
    kv_indptr        [rows + 1]   blocks of each row, summed                     on the host
    last_page_len    [rows]       tokens in each row's last block, 1 or more     on the host
    kv_indices       [blocks]     the rows' blocks, end to end                   on the device

Keys and values are read from views of one layer by the views' strides, which must be alike: nothing is copied. Decode
steps are not recorded: a plan is made on the host.
"""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.attention.interface import AttentionInputs, AttentionShape, LayerAttention
from engine.attention.optional import Demands, load_library
from kvpool.storage import KVStorage

DEMANDS = Demands(
    name="flashinfer",
    head_dims=(64, 128, 256),
    head_dims_in_words="head sizes of 64, 128 and 256",
    block_multiple=1,
    capability=(7, 5),
)

WORKSPACE_BYTES = 384 << 20
"""For the parts of split attention. FlashInfer's documents say 128 MiB; many query heads to a kv head take more."""

STEPS_IN_FLIGHT = 2
"""A plan lies in pinned memory until the device has fetched it, which the host may outrun by a step."""


@dataclass(frozen=True, slots=True, eq=False)
class _Pages:
    """Some rows of a step as FlashInfer takes them, and the step's tokens that are theirs."""

    tokens: slice
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    last_page_len: Tensor

    @classmethod
    def of(cls, inputs: AttentionInputs, rows: slice, block_size: int) -> "_Pages":
        starts = inputs.query_starts[rows.start : rows.stop + 1]
        lengths = inputs.context_lens[rows]
        counts = -(-lengths // block_size)
        kv_indptr = np.concatenate(([0], np.cumsum(counts)))
        owners = np.repeat(np.arange(rows.start, rows.stop), counts)
        columns = np.arange(kv_indptr[-1]) - np.repeat(kv_indptr[:-1], counts)
        tables = inputs.block_tables
        places = torch.from_numpy(np.stack((owners, columns))).to(tables.device, non_blocking=True)
        return cls(
            tokens=slice(int(starts[0]), int(starts[-1])),
            qo_indptr=_int32(starts - starts[0]),
            kv_indptr=_int32(kv_indptr),
            kv_indices=tables[places[0], places[1]].to(torch.int32),
            last_page_len=_int32(lengths - (counts - 1) * block_size),
        )


Wrappers = Mapping[tuple[int | None, bool], Any]
"""By window, and whether for decode rows."""


class FlashInferAttention:
    """Paged attention for float16 and bfloat16 pools on GPUs from Turing on.

    Raises (at construction):
        ValueError: FlashInfer is not installed, cannot build its kernels here, or cannot read this pool.
    """

    name = DEMANDS.name

    def __init__(self, storage: KVStorage, shape: AttentionShape) -> None:
        DEMANDS.check(storage)
        self._library: Any = load_library("flashinfer")
        self._storage = storage
        self._shape = shape
        # One for all: its contents matter only while one layer attends.
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=storage.device)
        self._turns = cycle([self._make_wrappers() for _ in range(STEPS_IN_FLIGHT)])
        self._build_kernels()

    def plan(self, inputs: AttentionInputs) -> LayerAttention:
        """A plan for each distinct window, for decode rows and for chunks."""
        storage, windows = self._storage, self._shape.windows
        token_rows = storage.rows_of(inputs.slot_mapping)
        wrappers = next(self._turns)
        parts = self._parts_of(inputs)
        for is_decode, pages in parts.items():
            for window in set(windows):
                self._plan_part(wrappers[window, is_decode], pages, window)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            storage.write_rows(layer, token_rows, k, v)
            pool = (storage.keys(layer), storage.values(layer))
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
            for is_decode, pages in parts.items():
                wrappers[windows[layer], is_decode].run(q[pages.tokens], pool, out=out[pages.tokens])
            return out

        return attend

    def _parts_of(self, inputs: AttentionInputs) -> dict[bool, _Pages]:
        """Decode rows (True) and chunks (False), where the step has them."""
        num_decode, num_rows = inputs.num_decode_rows, inputs.num_rows
        slices = {True: slice(0, num_decode), False: slice(num_decode, num_rows)}
        block_size = self._storage.layout.block_size
        return {
            is_decode: _Pages.of(inputs, rows, block_size)
            for is_decode, rows in slices.items()
            if rows.start < rows.stop
        }

    def _make_wrappers(self) -> Wrappers:
        """`fa2` is the family of kernels that reads any strides on every GPU."""
        make = self._library.BatchPrefillWithPagedKVCacheWrapper
        keys = [(window, is_decode) for window in set(self._shape.windows) for is_decode in (True, False)]
        return {key: make(self._workspace, "NHD", backend="fa2") for key in keys}

    def _plan_part(self, wrapper: Any, pages: _Pages, window: int | None) -> None:
        """A window of w tokens is, as FlashInfer counts, the w - 1 before a query's own."""
        layout = self._storage.layout
        wrapper.plan(
            pages.qo_indptr,
            pages.kv_indptr,
            pages.kv_indices,
            pages.last_page_len,
            num_qo_heads=self._shape.num_heads,
            num_kv_heads=layout.num_kv_heads,
            head_dim_qk=layout.head_dim,
            page_size=layout.block_size,
            causal=True,
            sm_scale=self._shape.scale,
            window_left=-1 if window is None else window - 1,
            q_data_type=self._storage.dtype,
            kv_data_type=self._storage.dtype,
        )

    def _build_kernels(self) -> None:
        """Plan a step of one token: FlashInfer compiles when it first plans, and may find no compiler."""
        nothing = torch.zeros((1, 1), dtype=torch.int64, device=self._storage.device)
        try:
            self.plan(AttentionInputs(np.array([0, 1]), np.array([1]), 1, nothing, nothing[0]))
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            raise ValueError(f"flashinfer cannot build its kernels here ({error})") from error


def _int32(numbers: np.ndarray[Any, np.dtype[np.int64]]) -> Tensor:
    return torch.from_numpy(numbers.astype(np.int32))
