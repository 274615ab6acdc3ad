"""Paged attention on the CPU through the native kernel of `csrc/attention.cpp`: no gather, no padding, no masks.

The kernel walks the block tables itself, decode rows and chunks alike, and gives a token the same bits whatever batch,
chunk or number of threads computes it. This module only describes the step to it; a decoder that runs as one native
call takes the description and makes the calls itself.
"""

import ctypes

import torch
from torch import Tensor

from engine.attention.interface import AttentionInputs, AttentionShape
from engine.native import DTYPE_CODES, load_native
from kvpool.storage import KVStorage


class NativeAttentionArgs(ctypes.Structure):
    """`AttentionArgs` of `csrc/attention.h`, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "out", "kv", "block_tables", "query_starts", "context_lens")),
        *((name, ctypes.c_int64) for name in ("q_token_stride", "out_token_stride", "block_stride", "value_offset")),
        *((name, ctypes.c_int64) for name in ("token_stride", "head_stride", "table_stride")),
        *((name, ctypes.c_int32) for name in ("num_rows", "num_heads", "num_kv_heads", "head_dim", "block_size")),
        *((name, ctypes.c_int32) for name in ("window", "q_dtype", "kv_dtype")),
        ("scale", ctypes.c_float),
        ("num_threads", ctypes.c_int32),
    )


class NativeStep:
    """One planned step; a `LayerAttention`.

    Attributes:
        args: the step, but for what differs from layer to layer: q, out, kv and window.
        slots: `[T]` int64, where each token's key and value go.
        layer_bytes: from a layer's keys in memory to the next one's.
    """

    def __init__(
        self, kernels: ctypes.CDLL, storage: KVStorage, shape: AttentionShape, pool: bytes, inputs: AttentionInputs
    ) -> None:
        """`pool` is what `pool_args` says of `storage` and `shape`."""
        self._kernels = kernels
        self._storage = storage
        self._shape = shape
        self.slots = inputs.slot_mapping.contiguous()
        self.layer_bytes = storage.data.stride(1) * storage.data.itemsize
        self._token_rows: Tensor | None = None
        # The kernel reads these as long as this object lives: block tables, query starts, context lengths.
        num_rows, width = inputs.block_tables.shape
        starts, lengths = num_rows * width, num_rows * (width + 1) + 1
        self._numbers = torch.empty(lengths + num_rows, dtype=torch.int32)
        numbers = self._numbers.numpy()
        numbers[:starts] = inputs.block_tables.numpy().ravel()
        numbers[starts:lengths] = inputs.query_starts
        numbers[lengths:] = inputs.context_lens
        self.args = args = NativeAttentionArgs.from_buffer_copy(pool)
        args.block_tables, args.table_stride = self._numbers.data_ptr(), width
        args.query_starts, args.context_lens = (args.block_tables + 4 * first for first in (starts, lengths))
        args.num_rows, args.num_threads = num_rows, torch.get_num_threads()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `LayerAttention`."""
        if self._token_rows is None:
            self._token_rows = self._storage.rows_of(self.slots)
        self._storage.write_rows(layer, self._token_rows, k, v)
        if q.stride(2) != 1 or q.stride(1) != q.shape[2]:
            q = q.contiguous()
        out = torch.empty(q.shape, dtype=q.dtype)
        args = self.args
        args.q, args.out, args.kv = q.data_ptr(), out.data_ptr(), self.layer_address(layer)
        args.q_token_stride, args.out_token_stride, args.q_dtype = q.stride(0), out.stride(0), DTYPE_CODES[q.dtype]
        args.window = self._shape.windows[layer] or 0
        if self._kernels.quire_paged_attention(ctypes.byref(args)) != 0:
            raise TypeError(f"no native attention for {q.dtype} queries over a {self._storage.dtype} pool")
        return out

    def layer_address(self, layer: int) -> int:
        """Where the layer's first key lies in memory."""
        return self._storage.data.data_ptr() + layer * self.layer_bytes


def pool_args(storage: KVStorage, shape: AttentionShape) -> bytes:
    """What every step's `NativeAttentionArgs` say alike, as their memory."""
    layout, strides = storage.layout, storage.data.stride()
    return bytes(
        NativeAttentionArgs(
            block_stride=strides[0],
            value_offset=strides[2],
            token_stride=strides[3],
            head_stride=strides[4],
            num_heads=shape.num_heads,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            block_size=layout.block_size,
            kv_dtype=DTYPE_CODES[storage.dtype],
            scale=shape.scale,
        )
    )


class NativeCPUAttention:
    """The native kernel, for float32, bfloat16, float16 and quantized pools on the CPU.

    Raises (at construction):
        NativeUnavailable: the kernels cannot be built or loaded here.
        ValueError: the pool is on another device, or of another type.
    """

    name = "native"

    def __init__(self, storage: KVStorage, shape: AttentionShape) -> None:
        if storage.device.type != "cpu" or storage.dtype not in DTYPE_CODES:
            raise ValueError(f"the native kernel serves a CPU's pools, not {storage.dtype} on {storage.device}")
        self._kernels = load_native()
        self._storage = storage
        self._shape = shape
        self._pool = pool_args(storage, shape)

    def plan(self, inputs: AttentionInputs) -> NativeStep:
        """Narrow the step's index arrays once; the kernel does the rest."""
        return NativeStep(self._kernels, self._storage, self._shape, self._pool, inputs)
