"""What native attention promises beyond equality with the reference: a token's bits do not depend on its company."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.interface import AttentionInputs, AttentionShape
from engine.attention.native_cpu import NativeCPUAttention
from engine.attention.reference import ReferenceAttention
from engine.native import find_native
from kvpool.layout import KVLayout
from kvpool.quant import CODE_DTYPES
from kvpool.storage import KVStorage
from tests.conformance.test_attention_backends import Case, build_inputs, filled_storage

pytestmark = pytest.mark.skipif(find_native() is None, reason="no native kernels here")

CPU = torch.device("cpu")
POOLS = [torch.float32, torch.bfloat16, *CODE_DTYPES.values()]


def inputs_for(rows: list[tuple[int, int, list[int]]], block_size: int) -> AttentionInputs:
    """Rows as (context with this step, tokens of this step, blocks)."""
    width = max(len(blocks) for _, _, blocks in rows)
    tables = torch.tensor([blocks + [0] * (width - len(blocks)) for _, _, blocks in rows])
    slots = [
        blocks[position // block_size] * block_size + position % block_size
        for length, count, blocks in rows
        for position in range(length - count, length)
    ]
    return AttentionInputs(
        query_starts=np.cumsum([0, *(count for _, count, _ in rows)]).astype(np.int64),
        context_lens=np.array([length for length, _, _ in rows], dtype=np.int64),
        num_decode_rows=sum(count == 1 for _, count, _ in rows),
        block_tables=tables,
        slot_mapping=torch.tensor(slots),
    )


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("dtype", POOLS, ids=str)
def test_bits_do_not_depend_on_chunk_batch_or_threads(dtype: torch.dtype, window: int | None) -> None:
    """One sequence of 300 tokens: whole on one thread, in chunks of several sizes, and beside another sequence."""
    length, heads, kv_heads, dim, block_size = 300, 6, 2, 16, 7
    num_blocks = -(-length // block_size)
    layout = KVLayout(1, kv_heads, dim, block_size, dtype.itemsize, 0 if dtype.itemsize > 1 else 2)
    shape = AttentionShape(heads, 0.25, (window,))
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(length, n, dim, generator=generator) for n in (heads, kv_heads, kv_heads))
    if dtype == torch.bfloat16:
        q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    own, other = list(range(num_blocks)), list(range(num_blocks, 2 * num_blocks))

    def run(chunk: int, threads: int, company: bool) -> torch.Tensor:
        attention = NativeCPUAttention(KVStorage(layout, 2 * num_blocks, dtype, CPU), shape)
        torch.set_num_threads(threads)
        parts = []
        for start in range(0, length, chunk):
            end = min(start + chunk, length)
            rows, tokens = [(end, end - start, own)], [slice(start, end)]
            if company:
                rows, tokens = [(end, end - start, other), *rows], [slice(start, end)] * 2
            picked = [torch.cat([x[t] for t in tokens]) for x in (q, k, v)]
            parts.append(attention.plan(inputs_for(rows, block_size))(0, *picked)[-(end - start) :])
        return torch.cat(parts)

    before = torch.get_num_threads()
    try:
        whole = run(length, 1, company=False)
        for chunk, threads, company in [(300, 3, False), (64, 2, True), (1, 5, False), (23, 1, True), (1, 1, True)]:
            assert torch.equal(run(chunk, threads, company), whole), (chunk, threads, company)
    finally:
        torch.set_num_threads(before)


@settings(deadline=None, max_examples=80)
@given(
    rows=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 90)), max_size=5),
    decode=st.lists(st.integers(0, 300), min_size=1, max_size=8),
    block_size=st.integers(1, 20),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 3), (9, 3), (8, 1), (70, 1)]),
    window=st.none() | st.integers(1, 200),
    threads=st.integers(1, 4),
)
def test_any_step_equals_the_reference(
    rows: list[tuple[int, int]],
    decode: list[int],
    block_size: int,
    heads: tuple[int, int],
    window: int | None,
    threads: int,
) -> None:
    case = Case([*rows, *((context, 1) for context in decode)], heads, 8, (window,))
    storages = [filled_storage(case, block_size, torch.float32, seed=1) for _ in range(2)]
    shape = AttentionShape(heads[0], 8**-0.5, (window,))
    inputs = build_inputs(case.rows, block_size, storages[0].num_blocks, seed=2)
    q, k, v = (torch.randn(inputs.num_tokens, n, 8) for n in (heads[0], heads[1], heads[1]))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = NativeCPUAttention(storages[0], shape).plan(inputs)(0, q, k, v)
    finally:
        torch.set_num_threads(before)
    want = ReferenceAttention(storages[1], shape).plan(inputs)(0, q, k, v)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=0)


def test_rows_without_queries_are_left_alone() -> None:
    storage = filled_storage(Case([(5, 1), (9, 1)], windows=(None,)), 4, torch.float32, seed=1)
    rows = [(6, 1, [0, 1]), (10, 0, [2, 3, 4]), (9, 2, [2, 3, 4])]
    q, kv = torch.randn(3, 4, 16), torch.randn(2, 3, 2, 16)
    shape = AttentionShape(4, 0.25, (None,))
    got = NativeCPUAttention(storage, shape).plan(inputs_for(rows, 4))(0, q, *kv)
    want = NativeCPUAttention(storage, shape).plan(inputs_for([rows[0], rows[2]], 4))(0, q, *kv)
    assert torch.equal(got, want)
    nothing = inputs_for([(6, 0, [0, 1])], 4)
    assert NativeCPUAttention(storage, shape).plan(nothing)(0, q[:0], *kv[:, :0]).shape == (0, 4, 16)


def test_what_strangers_left_in_the_pool_reaches_nobody() -> None:
    """Blocks beyond a row's own context hold infinities and NaN; so does the rest of its last block."""
    case = Case([(5, 1), (0, 3)], windows=(None,))
    storages = [filled_storage(case, 4, torch.float32, seed=1) for _ in range(2)]
    shape = AttentionShape(4, 0.25, (None,))
    inputs = build_inputs(case.rows, 4, storages[0].num_blocks, seed=2)
    used = {int(block) * 4 + offset for block in inputs.block_tables[0, :2] for offset in range(4)}
    clean = [(slot // 4, slot % 4) for slot in sorted(used)]
    for block in range(storages[1].num_blocks):
        for offset in range(4):
            if (block, offset) not in clean[:]:
                storages[1].data[block, :, :, offset] = torch.nan
    q, k, v = (torch.randn(inputs.num_tokens, n, 16) for n in (4, 2, 2))
    row = inputs.context_lens.tolist().index(6)
    out = [NativeCPUAttention(storage, shape).plan(inputs)(0, q, k, v) for storage in storages]
    token = int(inputs.query_starts[row])
    assert torch.equal(out[0][token], out[1][token])
