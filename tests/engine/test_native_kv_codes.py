"""The native kernels write the very bytes that the torch code writes: codes, scales, and every odd number."""

import ctypes

import pytest
import torch

from engine.native import DTYPE_CODES, find_native, load_native
from kvpool.layout import KVLayout
from kvpool.quant import LARGEST_CODE
from kvpool.storage import KVStorage

pytestmark = pytest.mark.skipif(find_native() is None, reason="no native kernels here")

NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE = 4, 2, 3


class RopeStoreArgs(ctypes.Structure):
    """`RopeStoreArgs` of `csrc/elementwise.h`, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "q_norm", "k_norm", "cosines", "sines", "pool", "slots")),
        *((name, ctypes.c_int64) for name in ("qkv_stride", "block_stride", "value_offset", "token_stride")),
        ("head_stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("rows", "num_heads", "num_kv_heads", "head_dim", "block_size")),
        ("kv_dtype", ctypes.c_int32),
        ("epsilon", ctypes.c_float),
    )


def empty_pool(dtype: torch.dtype, head_dim: int) -> KVStorage:
    storage = KVStorage(KVLayout(2, NUM_KV_HEADS, head_dim, BLOCK_SIZE, 1, 2), 40, dtype, torch.device("cpu"))
    storage.blocks.zero_()
    return storage


def store_natively(storage: KVStorage, layer: int, slots: torch.Tensor, qkv: torch.Tensor) -> None:
    """Through `quire_rope_store`, with rotations by nothing."""
    num_rows, _, head_dim = qkv.shape
    cosines, sines = torch.ones(num_rows, head_dim // 2), torch.zeros(num_rows, head_dim // 2)
    strides = storage.data.stride()
    args = RopeStoreArgs(
        qkv=qkv.data_ptr(),
        cosines=cosines.data_ptr(),
        sines=sines.data_ptr(),
        pool=storage.keys(layer).data_ptr(),
        slots=slots.data_ptr(),
        qkv_stride=qkv.stride(0),
        block_stride=strides[0],
        value_offset=strides[2],
        token_stride=strides[3],
        head_stride=strides[4],
        rows=num_rows,
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=head_dim,
        block_size=BLOCK_SIZE,
        kv_dtype=DTYPE_CODES[storage.dtype],
    )
    load_native().quire_rope_store(ctypes.byref(args))


def awkward(num_rows: int, head_dim: int) -> torch.Tensor:
    """`[num_rows, heads + 2 kv_heads, head_dim]`: many sizes, ties between codes, zeros, infinities, NaN."""
    generator = torch.Generator().manual_seed(head_dim)
    shape = (num_rows, NUM_HEADS + 2 * NUM_KV_HEADS, head_dim)
    qkv = torch.randn(shape, generator=generator) * torch.logspace(-9, 5, num_rows)[:, None, None]
    qkv[3] = torch.randint(-254, 255, shape[1:], generator=generator) / 2
    qkv[3, :, 0] = 127.0
    qkv[4] = torch.randint(-900, 900, shape[1:], generator=generator) / 1024
    qkv[4, :, 0] = 448.0
    qkv[5] = 0.0
    qkv[6] = -0.0
    qkv[7, :, 1] = torch.inf
    qkv[8, :, 0] = torch.nan
    qkv[9, :, 0] = -3e38
    return qkv


def rotated_by_nothing(k: torch.Tensor) -> torch.Tensor:
    """Itself, but for what a rotation by nothing does to zeros and infinities."""
    first, second = k.chunk(2, dim=2)
    return torch.cat((first - second * 0.0, second + first * 0.0), dim=2)


@pytest.mark.parametrize("dtype", LARGEST_CODE, ids=str)
@pytest.mark.parametrize("head_dim", [2, 10, 16, 64, 80])
def test_stored_bytes_are_equal(dtype: torch.dtype, head_dim: int) -> None:
    qkv = awkward(100, head_dim)
    slots = torch.randperm(40 * BLOCK_SIZE, generator=torch.Generator().manual_seed(2))[: len(qkv)]
    native, portable = empty_pool(dtype, head_dim), empty_pool(dtype, head_dim)
    store_natively(native, 1, slots, qkv.clone())
    _, k, v = qkv.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
    portable.write(1, slots, rotated_by_nothing(k), v)
    assert native.scales is not None
    assert portable.scales is not None
    assert torch.equal(native.data.view(torch.uint8), portable.data.view(torch.uint8))
    assert torch.equal(native.scales.nan_to_num(-1.0), portable.scales.nan_to_num(-1.0))
