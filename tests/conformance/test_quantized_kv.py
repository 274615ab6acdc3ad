"""Every attention backend over quantized pools, against the reference over the same codes and scales."""

import pytest
import torch

from engine.attention.interface import AttentionShape
from engine.attention.reference import ReferenceAttention
from engine.attention.select import BACKENDS
from engine.errors import LoadError
from kvpool.layout import KVLayout
from kvpool.quant import CODE_DTYPES
from kvpool.storage import KVStorage
from kvpool.table import blocks_for
from tests.conformance.test_attention_backends import CASES, FAST_BACKENDS, TOLERANCE, Case, build_inputs

CPU = torch.device("cpu")


def filled_pool(case: Case, block_size: int, kv_dtype: torch.dtype, seed: int) -> KVStorage:
    """A pool of random keys and values, written as tokens are, with three blocks more than the rows need."""
    num_blocks = 3 + sum(blocks_for(sum(row), block_size) for row in case.rows)
    layout = KVLayout(len(case.windows), case.heads[1], case.head_dim, block_size, 1, 2)
    storage = KVStorage(layout, num_blocks, kv_dtype, CPU)
    slots = torch.arange(num_blocks * block_size)
    generator = torch.Generator().manual_seed(seed)
    for layer in range(len(case.windows)):
        k, v = torch.randn(2, len(slots), case.heads[1], case.head_dim, generator=generator)
        storage.write(layer, slots, k, v)
    return storage


@pytest.mark.parametrize("kv_dtype", CODE_DTYPES.values(), ids=CODE_DTYPES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", FAST_BACKENDS)
def test_equals_reference(name: str, case: Case, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    storages = [filled_pool(case, block_size, kv_dtype, seed=1) for _ in range(2)]
    shape = AttentionShape(case.heads[0], case.head_dim**-0.5, case.windows)
    inputs = build_inputs(case.rows, block_size, storages[0].num_blocks, seed=2)
    plans = [
        BACKENDS[name](storages[0], shape).plan(inputs),
        ReferenceAttention(storages[1], shape).plan(inputs),
    ]
    generator = torch.Generator().manual_seed(3)
    for layer in range(len(case.windows)):
        qkv = torch.randn(inputs.num_tokens, case.heads[0] + 2 * case.heads[1], case.head_dim, generator=generator)
        q, k, v = qkv.to(dtype).split([case.heads[0], case.heads[1], case.heads[1]], dim=1)
        got, want = (attend(layer, q, k, v) for attend in plans)
        assert got.dtype == dtype
        torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=0)
    assert torch.equal(storages[0].blocks, storages[1].blocks)


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [(torch.int8, 0.03), (torch.float8_e4m3fn, 0.15)], ids=str)
def test_reference_is_near_full_precision(kv_dtype: torch.dtype, tolerance: float) -> None:
    """The oracle itself: what eight bits cost is small, and is there (the pool really is quantized)."""
    case = CASES["decode and chunks"]
    quantized = filled_pool(case, 16, kv_dtype, seed=1)
    layout = KVLayout(len(case.windows), case.heads[1], case.head_dim, 16, 4)
    full = KVStorage(layout, quantized.num_blocks, torch.float32, CPU)
    for layer in range(len(case.windows)):
        slots = torch.arange(full.num_blocks * 16)
        k, v = torch.randn(2, len(slots), *full.data.shape[-2:], generator=torch.Generator().manual_seed(layer))
        for storage in (quantized, full):
            storage.write(layer, slots, k, v)
    shape = AttentionShape(case.heads[0], case.head_dim**-0.5, case.windows)
    inputs = build_inputs(case.rows, 16, full.num_blocks, seed=2)
    plans = [ReferenceAttention(storage, shape).plan(inputs) for storage in (quantized, full)]
    q, k, v = torch.randn(inputs.num_tokens, 8, case.head_dim).split([4, 2, 2], dim=1)
    got, want = (attend(1, q, k, v) for attend in plans)
    error = (got - want).abs().max()
    assert 1e-6 < error < tolerance


def test_every_backend_that_cannot_read_codes_says_so() -> None:
    """Either a backend serves a quantized pool, or it refuses it at construction; it never computes with codes."""
    storage = filled_pool(CASES["decode"], 16, torch.int8, seed=1)
    for backend in BACKENDS.values():
        try:
            backend(storage, AttentionShape(4, 0.25, (None, None)))
        except LoadError:
            assert backend.name not in FAST_BACKENDS
