"""Paged attention on the CPU through the native kernel of `csrc/attention.cpp`: no gather, no padding, no masks.

The kernel walks the block tables itself, decode rows and chunks alike, and gives a token the same bits whatever batch,
chunk or number of threads computes it. This module only describes the step to it; a decoder that runs as one native
call takes the description and makes the calls itself.
"""

import ctypes

import numpy as np
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
    """

    def __init__(self, storage: KVStorage, shape: AttentionShape, inputs: AttentionInputs) -> None:
        self._storage = storage
        self._shape = shape
        self._kernel = load_native().quire_paged_attention
        self.slots = inputs.slot_mapping.contiguous()
        self._token_rows: Tensor | None = None
        # The kernel reads these as long as this object lives.
        self._tables = inputs.block_tables.to(torch.int32).contiguous()
        self._starts = np.ascontiguousarray(inputs.query_starts, dtype=np.int32)
        self._lengths = np.ascontiguousarray(inputs.context_lens, dtype=np.int32)
        self.args = self._describe()

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
        if self._kernel(ctypes.byref(args)) != 0:
            raise TypeError(f"no native attention for {q.dtype} queries over a {self._storage.dtype} pool")
        return out

    def layer_address(self, layer: int) -> int:
        """Where the layer's first key lies in memory."""
        data = self._storage.data
        return data.data_ptr() + layer * data.stride(1) * data.itemsize

    def _describe(self) -> NativeAttentionArgs:
        layout, strides = self._storage.layout, self._storage.data.stride()
        return NativeAttentionArgs(
            block_tables=self._tables.data_ptr(),
            table_stride=self._tables.stride(0),
            query_starts=self._starts.ctypes.data,
            context_lens=self._lengths.ctypes.data,
            block_stride=strides[0],
            value_offset=strides[2],
            token_stride=strides[3],
            head_stride=strides[4],
            num_rows=len(self._lengths),
            num_heads=self._shape.num_heads,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            block_size=layout.block_size,
            kv_dtype=DTYPE_CODES[self._storage.dtype],
            scale=self._shape.scale,
            num_threads=torch.get_num_threads(),
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
        load_native()
        self._storage = storage
        self._shape = shape

    def plan(self, inputs: AttentionInputs) -> NativeStep:
        """Narrow the step's index arrays once; the kernel does the rest."""
        return NativeStep(self._storage, self._shape, inputs)
