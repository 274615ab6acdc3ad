"""The GPU backend: one Triton kernel for prefill chunks and decode rows, straight from the paged pool.

    decode rows    a tile is 1 query x the heads of a kv head              keys split over segments, then merged
    chunks         a tile is some queries x the heads of a kv head         segments only when tiles are few

How many tiles and segments are launched depends on how many rows and tokens a step has, never on how long contexts are:
lengths are read on the device. So `plan_decode`, whose inputs all live there, can be captured into a CUDA graph.

Importing this module imports triton; `engine.attention.select` does so only when this backend is to serve. Without a
GPU it runs in Triton's interpreter (`TRITON_INTERPRET=1`, set before triton is imported): slow, for tests.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from engine.attention.interface import AttentionInputs, AttentionShape, DecodeTensors, IntArray
from engine.attention.triton_kernels import attention_kernel, merge_kernel, rotate_store_kernel, store_kernel
from engine.models.layers import RMSNorm, Rotation
from kvpool.quant import LARGEST_CODE
from kvpool.storage import KVStorage

LOG2_E = math.log2(math.e)

LANES = 16
"""Rows of the smallest matrix product: fewer query heads than that are padded."""

MAX_SEGMENTS = 64

MIN_SEGMENT_KEYS = 128
"""A segment walks at least so many keys: short contexts use few segments, and the others end at once."""

STORED_TOKENS = 16
"""Tokens that one program of the store kernel takes."""

PROGRAMS_PER_PROCESSOR = 3
"""Programs that each multiprocessor is meant to hold at once while decoding."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes of the launches on one device.

    Attributes:
        num_programs: how many programs fill the device; fewer tiles are split into segments.
        chunk_lanes: queries times heads in a tile of a chunk; a power of two, at least `LANES`.
        tile_keys: keys walked at a time; a power of two, at least `LANES`.
        decode_stages, chunk_stages: software pipelining.
        decode_warps, chunk_warps: of one program.
    """

    num_programs: int
    chunk_lanes: int
    tile_keys: int
    decode_stages: int = 1
    chunk_stages: int = 1
    decode_warps: int = 4
    chunk_warps: int = 4


@dataclass(frozen=True, slots=True)
class Device:
    """What of a GPU decides the sizes: its multiprocessors, and the shared memory that one program may use."""

    num_processors: int
    shared_bytes: int


def tuning_for(device: Device, dtype: torch.dtype, head_dim: int) -> Tuning:
    """Sizes that fit the device, for a pool of `dtype`, as a start; `bench/gpu_check.py` tries others."""
    if dtype == torch.float32:
        tile_keys, chunk_lanes = 32, 32
    elif dtype in LARGEST_CODE:
        tile_keys, chunk_lanes = 32, 128 if head_dim <= 128 else 64  # numbers multiplied out take registers
    else:
        tile_keys, chunk_lanes = (64, 128) if head_dim <= 128 else (32, 64)
    row_bytes = triton.next_power_of_2(head_dim) * max(2, dtype.itemsize)
    spare = device.shared_bytes - chunk_lanes * row_bytes
    num_tiles = spare // (2 * tile_keys * row_bytes)
    return Tuning(
        num_programs=PROGRAMS_PER_PROCESSOR * device.num_processors,
        chunk_lanes=chunk_lanes,
        tile_keys=tile_keys,
        decode_stages=_stages(num_tiles),
        chunk_stages=_stages(num_tiles - 1),  # asynchronous matrix products hold one more
        chunk_warps=8 if chunk_lanes > 64 else 4,
    )


def _stages(num_tiles: int) -> int:
    """Pipeline stages that keep so many tiles in shared memory: two for each, as a block-table entry comes first."""
    return 1 if num_tiles < 1 else 3 if num_tiles == 1 else 5


@dataclass(frozen=True, slots=True, eq=False)
class _Launch:
    """Tiles attended in one launch: tokens `first_token : end_token` of the step.

    `rows` and `firsts`, both `[tiles]` on the device: each tile's row, and its first query within the row.
    """

    rows: Tensor
    firsts: Tensor
    tile_queries: int
    first_token: int
    end_token: int


@dataclass(frozen=True, slots=True, eq=False)
class _Lengths:
    """What the kernels read about a step's rows, on the device."""

    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor


class TritonAttention:
    """Paged attention for float16, bfloat16, float32 and quantized pools on a CUDA device.

    Raises (at construction):
        ValueError: the pool is on no CUDA device (nor the interpreter on), or of a type that the device cannot read.
    """

    name = "triton"

    def __init__(self, storage: KVStorage, shape: AttentionShape, tuning: Tuning | None = None) -> None:
        _check(storage)
        layout = storage.layout
        self.storage = storage
        self.shape = shape
        self.tuning = tuning or _tuning_of(storage)
        self.group = shape.num_heads // layout.num_kv_heads
        self.chunk_queries = max(1, self.tuning.chunk_lanes // self.group)
        self.largest_code = LARGEST_CODE[storage.dtype] if layout.is_quantized else 0.0
        strides = storage.data.stride()
        self.pool_strides = (strides[0], strides[3], strides[2])

    def plan(self, inputs: AttentionInputs) -> "TritonStep":
        """Tiles of all rows, sent to the device in one piece."""
        num_rows, num_decode = inputs.num_rows, inputs.num_decode_rows
        rows, firsts = self._tiles_of(inputs)
        parts = [inputs.query_starts, inputs.context_lens, rows, firsts]
        packed = torch.from_numpy(np.concatenate(parts).astype(np.int32)).to(self.storage.device, non_blocking=True)
        starts, lens, tile_rows, tile_firsts = torch.split(packed, [len(part) for part in parts])
        launches = []
        if num_decode:
            launches.append(_Launch(tile_rows[:num_decode], tile_firsts[:num_decode], 1, 0, num_decode))
        if num_decode < num_rows:
            chunk = (tile_rows[num_decode:], tile_firsts[num_decode:], self.chunk_queries)
            launches.append(_Launch(*chunk, num_decode, inputs.num_tokens))
        return TritonStep(self, _Lengths(starts, lens, inputs.block_tables, inputs.slot_mapping), tuple(launches))

    def plan_decode(self, tensors: DecodeTensors) -> "TritonStep":
        """A step of B single-query rows that reads nothing from the host, now or when it is called."""
        num_rows = len(tensors.context_lens)
        starts = torch.arange(num_rows + 1, dtype=torch.int32, device=self.storage.device)
        lengths = _Lengths(starts, tensors.context_lens, tensors.block_tables, tensors.slot_mapping)
        return TritonStep(self, lengths, (_Launch(starts[:-1], torch.zeros_like(starts), 1, 0, num_rows),))

    def num_segments(self, num_tiles: int) -> int:
        """Parts that each tile's keys are split into: a power of two that fills the device."""
        num_programs = num_tiles * self.storage.layout.num_kv_heads
        wanted: int = triton.next_power_of_2(math.ceil(self.tuning.num_programs / num_programs))
        return min(MAX_SEGMENTS, wanted)

    def pool_of(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys, and their scales (its keys again where there are none); values lie by `pool_strides`."""
        keys, scales = self.storage.keys(layer), self.storage.scales
        return keys, keys if scales is None else scales[:, layer, 0]

    def _tiles_of(self, inputs: AttentionInputs) -> tuple[IntArray, IntArray]:
        """Row and first query of every tile: one for each decode row, then as many as each chunk needs."""
        counts = np.diff(inputs.query_starts)
        num_tiles = np.where(counts == 1, 1, -(-counts // self.chunk_queries))
        rows = np.repeat(np.arange(inputs.num_rows), num_tiles)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
        return rows, within * self.chunk_queries


class TritonStep:
    """One planned step: a `LayerAttention`, and the same with the rotation fused in (`rotate_and_attend`)."""

    def __init__(self, backend: TritonAttention, lengths: _Lengths, launches: tuple[_Launch, ...]) -> None:
        self._backend = backend
        self._lengths = lengths
        self._launches = launches

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v `[T, kv_heads, head_dim]`, attend with q `[T, heads, head_dim]` -> the same shape."""
        backend, layout = self._backend, self._backend.storage.layout
        q, k, v = (_heads_together(tensor) for tensor in (q, k, v))
        store_kernel[(triton.cdiv(len(k), STORED_TOKENS), layout.num_kv_heads)](
            k,
            v,
            *backend.pool_of(layer),
            self._lengths.slot_mapping,
            len(k),
            k.stride(0),
            v.stride(0),
            *backend.pool_strides,
            HEAD_DIM=layout.head_dim,
            BLOCK_T=STORED_TOKENS,
            BLOCK_HALF=triton.next_power_of_2(layout.head_dim // 2),
            BLOCK_SIZE=layout.block_size,
            LARGEST=backend.largest_code,
        )
        return self._attend(layer, q)

    def rotate_and_attend(
        self, layer: int, qkv: Tensor, rotate: Rotation, norms: tuple[RMSNorm, RMSNorm] | None
    ) -> Tensor:
        """The same from what a layer's matrix product gave: `[T, heads + 2 kv_heads, head_dim]`, not yet rotated.

        `norms` are those of queries and keys, applied before the rotation. Returns `[T, heads, head_dim]`.
        """
        backend, layout = self._backend, self._backend.storage.layout
        qkv = _heads_together(qkv)
        q = qkv.new_empty((len(qkv), backend.shape.num_heads, layout.head_dim))
        q_norm, k_norm = norms or (None, None)
        rotate_store_kernel[(len(qkv), layout.num_kv_heads)](
            qkv,
            q,
            *backend.pool_of(layer),
            self._lengths.slot_mapping,
            rotate.cos,
            rotate.sin,
            qkv if q_norm is None else q_norm.weight,
            qkv if k_norm is None else k_norm.weight,
            qkv.stride(0),
            *backend.pool_strides,
            0.0 if q_norm is None else q_norm.eps,
            NUM_KV_HEADS=layout.num_kv_heads,
            GROUP=backend.group,
            BLOCK_GROUP=triton.next_power_of_2(backend.group),
            HEAD_DIM=layout.head_dim,
            BLOCK_HALF=triton.next_power_of_2(layout.head_dim // 2),
            BLOCK_SIZE=layout.block_size,
            NORMED=norms is not None,
            LARGEST=backend.largest_code,
            num_warps=1,
        )
        return self._attend(layer, q)

    def _attend(self, layer: int, q: Tensor) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for launch in self._launches:
            num_segments = self._backend.num_segments(len(launch.rows))
            if num_segments == 1:
                self._launch(launch, layer, (q, out, out, out), 1)
                continue
            heads = (launch.end_token, q.shape[1], num_segments)
            part_out = torch.empty((*heads, q.shape[2]), dtype=torch.float32, device=q.device)
            part_lse = torch.empty(heads, dtype=torch.float32, device=q.device)
            self._launch(launch, layer, (q, out, part_out, part_lse), num_segments)
            own = slice(launch.first_token, launch.end_token)
            merge_kernel[(launch.end_token - launch.first_token, q.shape[1])](
                part_out[own],
                part_lse[own],
                out[own],
                num_segments,
                NUM_HEADS=q.shape[1],
                HEAD_DIM=q.shape[2],
                BLOCK_D=triton.next_power_of_2(q.shape[2]),
                MAX_SEGMENTS=MAX_SEGMENTS,
            )
        return out

    def _launch(self, launch: _Launch, layer: int, tensors: tuple[Tensor, ...], num_segments: int) -> None:
        """One attention kernel; `tensors` are queries, output, and the segments' parts."""
        backend, lengths, tuning = self._backend, self._lengths, self._backend.tuning
        layout = backend.storage.layout
        is_decode = launch.tile_queries == 1
        attention_kernel[(len(launch.rows), layout.num_kv_heads, num_segments)](
            *tensors,
            *backend.pool_of(layer),
            lengths.block_tables,
            lengths.query_starts,
            lengths.context_lens,
            launch.rows,
            launch.firsts,
            tensors[0].stride(0),
            lengths.block_tables.stride(0),
            *backend.pool_strides,
            backend.shape.scale * LOG2_E,
            num_segments,
            NUM_HEADS=backend.shape.num_heads,
            GROUP=backend.group,
            HEAD_DIM=layout.head_dim,
            BLOCK_D=max(LANES, triton.next_power_of_2(layout.head_dim)),
            BLOCK_SIZE=layout.block_size,
            WINDOW=backend.shape.windows[layer] or 0,
            TILE_QUERIES=launch.tile_queries,
            BLOCK_M=max(LANES, triton.next_power_of_2(launch.tile_queries * backend.group)),
            BLOCK_N=tuning.tile_keys,
            SPLITS=num_segments > 1,
            MIN_SEGMENT_TILES=max(1, MIN_SEGMENT_KEYS // tuning.tile_keys),
            QUANTIZED=layout.is_quantized,
            num_warps=tuning.decode_warps if is_decode else tuning.chunk_warps,
            num_stages=tuning.decode_stages if is_decode else tuning.chunk_stages,
        )


def _heads_together(tensor: Tensor) -> Tensor:
    """The same `[T, heads, head_dim]` with the heads of a token side by side, as the kernels read them."""
    is_packed = tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2]
    return tensor if is_packed else tensor.contiguous()


def _check(storage: KVStorage) -> None:
    device, dtype = storage.device, storage.dtype
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, *LARGEST_CODE):
        raise ValueError(f"the triton attention backend has no kernels for a {dtype} KV cache")
    if storage.layout.head_dim % 2:
        raise ValueError(f"the triton attention backend needs an even head size, got {storage.layout.head_dim}")
    if device.type == "cuda":
        if dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability(device) < (8, 9):
            raise ValueError("this GPU cannot read an fp8 KV cache (it needs compute capability 8.9): use int8")
        return
    if not triton.knobs.runtime.interpret:
        raise ValueError(f"the triton attention backend needs a CUDA device, and the KV cache is on {device}")
    if dtype == torch.bfloat16:
        raise ValueError("Triton's interpreter computes wrong bfloat16 products: use float16 or float32 there")


def _tuning_of(storage: KVStorage) -> Tuning:
    """For the pool's GPU. The interpreter gets few programs, enough that tests see segments."""
    if storage.device.type != "cuda":
        return Tuning(num_programs=4, chunk_lanes=128, tile_keys=64)
    properties = triton.runtime.driver.active.utils.get_device_properties(storage.device.index)
    device = Device(properties["multiprocessor_count"], properties["max_shared_mem"])
    return tuning_for(device, storage.dtype, storage.layout.head_dim)
