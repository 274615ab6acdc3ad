"""The small native operators on their own, against torch: every pool type, odd widths, no rows, extreme numbers."""

import ctypes

import pytest
import torch
from torch.nn import functional as F

from engine.models.layers import RMSNorm, Rotation
from engine.native import DTYPE_CODES, find_native, load_native
from kvpool.layout import KVLayout
from kvpool.storage import KVStorage
from tests.engine.test_native_kv_codes import RopeStoreArgs

pytestmark = pytest.mark.skipif(find_native() is None, reason="no native kernels here")

WIDTHS = [1, 2, 7, 8, 9, 63, 64, 65, 576]
FLOAT_POOLS = (torch.float32, torch.bfloat16, torch.float16)


class NormArgs(ctypes.Structure):
    """`NormArgs` of `csrc/elementwise.h`, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "out")),
        *((name, ctypes.c_int64) for name in ("x_stride", "out_stride")),
        *((name, ctypes.c_int32) for name in ("rows", "width")),
        ("epsilon", ctypes.c_float),
    )


class SiluMultiplyArgs(ctypes.Structure):
    """`SiluMultiplyArgs` of `csrc/elementwise.h`, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("gate_up", "out")),
        *((name, ctypes.c_int64) for name in ("gate_up_stride", "out_stride")),
        *((name, ctypes.c_int32) for name in ("rows", "width")),
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    out = torch.empty_like(x)
    pointers = (x.data_ptr(), weight.data_ptr(), out.data_ptr())
    args = NormArgs(*pointers, x.stride(0), out.stride(0), *x.shape, epsilon)
    load_native().quire_rms_norm(ctypes.byref(args))
    return out


def silu_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width)
    args = SiluMultiplyArgs(gate_up.data_ptr(), out.data_ptr(), gate_up.stride(0), out.stride(0), rows, width)
    load_native().quire_silu_multiply(ctypes.byref(args))
    return out


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_rms_norm(width: int, scale: float) -> None:
    x, weight = torch.randn(5, width) * scale, torch.randn(width)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), RMSNorm(weight, 1e-5)(x), atol=1e-6, rtol=2e-6)
    assert rms_norm(x[:0], weight, 1e-5).shape == (0, width)


def test_rms_norm_of_zeros_and_not_a_number() -> None:
    x, weight = torch.zeros(3, 16), torch.ones(16)
    x[1, 4] = torch.nan
    out = rms_norm(x, weight, 1e-5)
    assert torch.equal(out[[0, 2]], torch.zeros(2, 16))
    assert out[1].isnan().all()


@pytest.mark.parametrize("width", WIDTHS)
def test_silu_multiply(width: int) -> None:
    gate_up = torch.randn(4, 2 * width) * 10
    gate, up = gate_up.chunk(2, dim=1)
    torch.testing.assert_close(silu_multiply(gate_up), F.silu(gate) * up, atol=1e-6, rtol=1e-5)
    assert silu_multiply(gate_up[:0]).shape == (0, width)


def test_silu_multiply_far_out() -> None:
    """No overflow on either side; infinity and NaN as torch has them, but that silu(-inf) is the limit, 0."""
    gate = torch.tensor([-1e30, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 1e30, torch.inf, torch.nan])
    out = silu_multiply(torch.cat((gate, torch.ones(10)))[None])[0]
    torch.testing.assert_close(out, F.silu(gate), atol=1e-30, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOAT_POOLS, ids=str)
@pytest.mark.parametrize("head_dim", [2, 10, 64])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_store(dtype: torch.dtype, head_dim: int, normed: bool) -> None:
    """Queries turned in place; keys turned and values as they are in the pool's type, and nothing else touched."""
    heads, kv_heads, rows, block_size = 3, 2, 7, 4
    storages = [
        KVStorage(KVLayout(2, kv_heads, head_dim, block_size, dtype.itemsize), 5, dtype, torch.device("cpu"))
        for _ in range(2)
    ]
    for storage in storages:
        storage.data.fill_(7.0)
    qkv, angles = torch.randn(rows, heads + 2 * kv_heads, head_dim), torch.rand(rows, 1, head_dim // 2) * 6
    rotation = Rotation(angles.cos(), angles.sin())
    norms = [RMSNorm(torch.rand(head_dim) + 0.5, 1e-5) for _ in "qk"] if normed else []
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    if normed:
        q, k = norms[0](q), norms[1](k)
    slots = torch.randperm(20)[:rows]
    storages[1].write(1, slots, rotation(k).to(dtype), v.to(dtype))
    want = rotation(q)
    store(storages[0], slots, qkv, rotation, norms)
    torch.testing.assert_close(qkv[:, :heads], want, atol=1e-5, rtol=1e-5)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(storages[0].data, storages[1].data, atol=tolerance, rtol=tolerance)


def store(storage: KVStorage, slots: torch.Tensor, qkv: torch.Tensor, rotation: Rotation, norms: list[RMSNorm]) -> None:
    """`quire_rope_store` into layer 1."""
    strides, layout = storage.data.stride(), storage.layout
    cosines, sines = rotation.cos.contiguous(), rotation.sin.contiguous()
    args = RopeStoreArgs(
        qkv=qkv.data_ptr(),
        q_norm=norms[0].weight.data_ptr() if norms else None,
        k_norm=norms[1].weight.data_ptr() if norms else None,
        cosines=cosines.data_ptr(),
        sines=sines.data_ptr(),
        pool=storage.keys(1).data_ptr(),
        slots=slots.data_ptr(),
        qkv_stride=qkv.stride(0),
        block_stride=strides[0],
        value_offset=strides[2],
        token_stride=strides[3],
        head_stride=strides[4],
        rows=len(qkv),
        num_heads=qkv.shape[1] - 2 * layout.num_kv_heads,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        kv_dtype=DTYPE_CODES[storage.dtype],
        epsilon=1e-5,
    )
    load_native().quire_rope_store(ctypes.byref(args))
