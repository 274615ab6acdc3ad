"""Every attention backend against the naive reference: dtypes, block sizes, head groups, lengths, windows, mixtures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from engine.attention.interface import AttentionBackend, AttentionInputs, AttentionShape
from engine.attention.reference import ReferenceAttention
from engine.attention.select import BACKENDS
from engine.native import find_native
from kvpool.layout import KVLayout
from kvpool.storage import KVStorage
from kvpool.table import blocks_for

MakeBackend = Callable[[KVStorage, AttentionShape], AttentionBackend]

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
UNAVAILABLE = {"native"} if find_native() is None else set()
FAST_BACKENDS = [name for name in BACKENDS if name not in {"reference", *UNAVAILABLE}]


@dataclass(frozen=True)
class Case:
    """Rows as (context before the step, tokens of the step)."""

    rows: Sequence[tuple[int, int]]
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 16
    windows: tuple[int | None, ...] = (None, None)


CASES = {
    "one token, no context": Case([(0, 1)]),
    "decode": Case([(5, 1), (16, 1), (15, 1), (17, 1), (40, 1)]),
    "decode, equal lengths": Case([(20, 1)] * 6),
    "decode, very uneven lengths": Case([(0, 1), (3, 1), (900, 1), (5, 1), (901, 1), (300, 1)]),
    "whole prompts": Case([(0, 7), (0, 16), (0, 33)]),
    "chunks at odd starts": Case([(1, 5), (15, 2), (16, 3), (31, 18), (47, 16)]),
    "decode and chunks": Case([(9, 1), (0, 12), (33, 1), (13, 21), (2, 1)]),
    "a long chunk, in tiles": Case([(57, 300), (3, 1)]),
    "multi-head": Case([(9, 1), (4, 9)], heads=(3, 3)),
    "multi-query": Case([(9, 1), (4, 9)], heads=(6, 1)),
    "nine over three": Case([(9, 1), (4, 9), (30, 1)], heads=(9, 3), head_dim=64),
    "odd head size": Case([(9, 1), (4, 9)], heads=(4, 2), head_dim=10),
    "windows": Case([(9, 1), (50, 1), (3, 1), (0, 40), (37, 20)], windows=(8, 8)),
    "windows on some layers": Case([(9, 1), (50, 1), (37, 150), (0, 1)], windows=(None, 17)),
    "a window of one": Case([(9, 1), (50, 1), (37, 20)], windows=(1, None)),
    "a window longer than all": Case([(9, 1), (50, 1), (37, 20)], windows=(4096, None)),
}


def build_inputs(rows: Sequence[tuple[int, int]], block_size: int, num_blocks: int, seed: int) -> AttentionInputs:
    """Rows over scattered blocks, decode rows first, as the engine orders them."""
    rows = sorted(rows, key=lambda row: (row[1] > 1, sum(row)))
    blocks = np.random.default_rng(seed).permutation(num_blocks)
    tables = np.zeros((len(rows), max(blocks_for(sum(row), block_size) for row in rows)), dtype=np.int64)
    slots: list[int] = []
    taken = 0
    for index, (context, count) in enumerate(rows):
        needed = blocks_for(context + count, block_size)
        tables[index, :needed] = blocks[taken : taken + needed]
        taken += needed
        slots += [
            int(tables[index, p // block_size]) * block_size + p % block_size for p in range(context, context + count)
        ]
    return AttentionInputs(
        query_starts=np.concatenate([[0], np.cumsum([count for _, count in rows])]).astype(np.int64),
        context_lens=np.array([sum(row) for row in rows], dtype=np.int64),
        num_decode_rows=sum(count == 1 for _, count in rows),
        block_tables=torch.from_numpy(tables),
        slot_mapping=torch.tensor(slots),
    )


def filled_storage(case: Case, block_size: int, dtype: torch.dtype, seed: int) -> KVStorage:
    """A pool of random keys and values, with three blocks more than the rows need."""
    num_blocks = 3 + sum(blocks_for(sum(row), block_size) for row in case.rows)
    layout = KVLayout(len(case.windows), case.heads[1], case.head_dim, block_size, dtype.itemsize)
    storage = KVStorage(layout, num_blocks, dtype, torch.device("cpu"))
    storage.data.copy_(torch.randn(storage.data.shape, generator=torch.Generator().manual_seed(seed)))
    return storage


def check_equals_reference(make: MakeBackend, case: Case, block_size: int, dtype: torch.dtype) -> None:
    """On every layer the backend attends as the reference does, and leaves the same pool behind."""
    storages = [filled_storage(case, block_size, dtype, seed=1) for _ in range(2)]
    shape = AttentionShape(case.heads[0], case.head_dim**-0.5, case.windows)
    inputs = build_inputs(case.rows, block_size, storages[0].num_blocks, seed=2)
    backends = make(storages[0], shape), ReferenceAttention(storages[1], shape)
    plans = [backend.plan(inputs) for backend in backends]
    generator = torch.Generator().manual_seed(3)
    for layer in range(len(case.windows)):
        qkv = torch.randn(inputs.num_tokens, case.heads[0] + 2 * case.heads[1], case.head_dim, generator=generator)
        q, k, v = qkv.to(dtype).split([case.heads[0], case.heads[1], case.heads[1]], dim=1)
        got, want = (attend(layer, q, k, v) for attend in plans)
        assert got.dtype == dtype
        torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=0)
    torch.testing.assert_close(storages[0].data, storages[1].data, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", FAST_BACKENDS)
def test_equals_reference(name: str, case: Case, block_size: int, dtype: torch.dtype) -> None:
    check_equals_reference(BACKENDS[name], case, block_size, dtype)
