"""Is each Triton kernel right? Against the plain code in float32 on the same device, on fresh random inputs.

Errors are relative: the norm of the difference over the norm of the reference. Memory that torch hands out is filled
with NaN meanwhile, so that a cell nobody wrote is noticed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from bench.gpu.report import Finding, check, skipped
from engine.attention.flash_attn_paged import FlashAttnAttention
from engine.attention.flashinfer_paged import FlashInferAttention
from engine.attention.interface import AttentionBackend, AttentionInputs, AttentionShape, DecodeTensors
from engine.attention.reference import ReferenceAttention
from engine.attention.triton_paged import TritonAttention
from engine.graphs import CudaRecorder
from engine.models.layers import GatedMLP, RMSNorm, Rotation
from engine.models.triton_layers import add_rms_norm, silu_multiply
from kvpool.layout import SCALE_BYTES, KVLayout
from kvpool.quant import LARGEST_CODE, dequantize
from kvpool.storage import KVStorage
from kvpool.table import blocks_for

LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
Rows = Sequence[tuple[int, int]]
MakeBackend = Callable[[KVStorage, AttentionShape], AttentionBackend]
LIBRARIES: Mapping[str, MakeBackend] = {"flashinfer": FlashInferAttention, "flash-attn": FlashAttnAttention}

STEPS: dict[str, Rows] = {
    "decode": [(0, 1), (5, 1), (700, 1), (2100, 1)],
    "chunks": [(0, 70), (33, 129), (500, 17)],
    "mixed": [(40, 1), (1300, 1), (0, 200), (257, 64)],
}
HEADS = {"32/8x128": (32, 8, 128), "9/3x64": (9, 3, 64), "6/1x80": (6, 1, 80)}


def findings(device: torch.device, dtypes: Sequence[torch.dtype], tiny: bool) -> Iterator[Finding]:
    """The first dtype with everything that goes with it, then the others: should time run out, the least is lost."""
    steps = {"mixed": _shortened(STEPS["mixed"])} if tiny else STEPS
    heads = {"6/1x80": HEADS["6/1x80"]} if tiny else HEADS
    with poisoned_memory():
        yield from _of_dtype(device, dtypes[0], steps, heads)
        for kv_dtype in _quantized_types(device)[: 1 if tiny else None]:
            yield from _quantized(device, dtypes[0], kv_dtype, steps["mixed"])
        if device.type == "cuda":
            yield _replay(device, dtypes[0])
        for dtype in dtypes[1:]:
            yield from _of_dtype(device, dtype, steps, heads)
        for name, make in LIBRARIES.items() if device.type == "cuda" else ():
            yield by_library(name, make, device, dtypes[0], steps)


def _of_dtype(
    device: torch.device, dtype: torch.dtype, steps: Mapping[str, Rows], heads: Mapping[str, tuple[int, int, int]]
) -> Iterator[Finding]:
    for name, rows in steps.items():
        yield _attention(device, dtype, f"attention, {name}, {_name(dtype)}", rows, heads)
    yield _rotation(device, dtype, steps["mixed"])
    yield from _layers(device, dtype)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` gives NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def error_of(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def make_step(rows: Rows, block_size: int, num_blocks: int, device: torch.device) -> AttentionInputs:
    """Rows over scattered blocks; single-query rows come first in `rows` already."""
    blocks = np.random.default_rng(7).permutation(num_blocks)
    tables = np.zeros((len(rows), max(blocks_for(sum(row), block_size) for row in rows)), dtype=np.int64)
    slots, taken = [], 0
    for table, (context, count) in zip(tables, rows, strict=True):
        needed = blocks_for(context + count, block_size)
        table[:needed] = blocks[taken : taken + needed]
        taken += needed
        positions = np.arange(context, context + count)
        slots.append(table[positions // block_size] * block_size + positions % block_size)
    counts = np.array([count for _, count in rows])
    return AttentionInputs(
        query_starts=np.concatenate(([0], np.cumsum(counts))),
        context_lens=np.array([sum(row) for row in rows]),
        num_decode_rows=int((counts == 1).sum()),
        block_tables=torch.from_numpy(tables).to(device),
        slot_mapping=torch.from_numpy(np.concatenate(slots)).to(device),
    )


def make_pool(layout: KVLayout, rows: Rows, dtype: torch.dtype, device: torch.device) -> KVStorage:
    """Random keys and values, in a pool with some blocks more than the rows need."""
    num_blocks = 3 + sum(blocks_for(sum(row), layout.block_size) for row in rows)
    storage = KVStorage(layout, num_blocks, dtype, device)
    slots = torch.arange(num_blocks * layout.block_size, device=device)
    for layer in range(layout.num_layers):
        k, v = torch.randn((2, len(slots), layout.num_kv_heads, layout.head_dim), device=device)
        if not layout.is_quantized:
            k, v = k.to(dtype), v.to(dtype)
        storage.write(layer, slots, k, v)
    return storage


def widened(storage: KVStorage) -> KVStorage:
    """The same numbers in a float32 pool."""
    layout = storage.layout
    plain = KVLayout(layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_size, 4)
    wide = KVStorage(plain, storage.num_blocks, torch.float32, storage.device)
    scales = storage.scales
    wide.data.copy_(storage.data if scales is None else dequantize(storage.data, scales))
    return wide


def _shortened(rows: Rows) -> Rows:
    return [(context // 40, 1 if count == 1 else 2 + count // 40) for context, count in rows]


def _attention(
    device: torch.device, dtype: torch.dtype, what: str, rows: Rows, heads: Mapping[str, tuple[int, int, int]]
) -> Finding:
    """The worst over head groups, windows and block sizes."""
    errors = {
        f"{group} window {window} block {block_size}": _attention_error(
            TritonAttention, device, dtype, rows, (*sizes, window, block_size)
        )
        for group, sizes in heads.items()
        for window, block_size in ((None, 16), (100, 24))
    }
    found = check("kernels", what, max(errors.values(), key=_badness), LIMITS[dtype])
    return replace(found, details=errors)


def _badness(error: float) -> tuple[bool, float]:
    """NaN is the worst."""
    return error != error, error


def _attention_error(
    make: MakeBackend, device: torch.device, dtype: torch.dtype, rows: Rows, case: tuple[int, int, int, int | None, int]
) -> float:
    num_heads, num_kv_heads, head_dim, window, block_size = case
    layout = KVLayout(2, num_kv_heads, head_dim, block_size, dtype.itemsize)
    storage = make_pool(layout, rows, dtype, device)
    shape = AttentionShape(num_heads, head_dim**-0.5, (None, window))
    inputs = make_step(rows, block_size, storage.num_blocks, device)
    wide = widened(storage)
    q, k, v = _qkv(inputs.num_tokens, (num_heads, num_kv_heads, head_dim), dtype, device)
    got = make(storage, shape).plan(inputs)(1, q, k, v)
    want = ReferenceAttention(wide, shape).plan(inputs)(1, q.float(), k.float(), v.float())
    stored = float((widened(storage).data - wide.data).abs().max())
    return error_of(got, want) if stored == 0.0 else float("nan")


def by_library(
    name: str, make: MakeBackend, device: torch.device, dtype: torch.dtype, steps: Mapping[str, Rows]
) -> Finding:
    """An optional backend, where its library is installed. (FlashInfer compiles first, perhaps for minutes.)"""
    what = f"attention by {name}, {_name(dtype)}"
    try:
        errors = {
            f"{step} window {window}": _attention_error(make, device, dtype, rows, (32, 8, 128, window, 256))
            for step, rows in steps.items()
            for window in (None, 100)
        }
    except ValueError as error:
        return skipped("kernels", what, str(error)[:100])
    except RuntimeError as error:
        return Finding("kernels", what, str(error)[:100], "FAIL")
    worst = max(errors.values(), key=_badness)
    return replace(check("kernels", what, worst, LIMITS[dtype]), details=errors)


def _qkv(num_tokens: int, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Sequence[Tensor]:
    num_heads, num_kv_heads, head_dim = sizes
    qkv = torch.randn((num_tokens, num_heads + 2 * num_kv_heads, head_dim), device=device).to(dtype)
    return torch.split(qkv, [num_heads, num_kv_heads, num_kv_heads], dim=1)


def _rotation(device: torch.device, dtype: torch.dtype, rows: Rows) -> Finding:
    """QK-norm, rotation and the write into the pool, fused, against the steps one by one in float32."""
    sizes = (12, 4, 64)
    layout = KVLayout(1, 4, 64, 16, dtype.itemsize)
    storage = make_pool(layout, rows, dtype, device)
    shape = AttentionShape(12, 0.125, (None,))
    inputs = make_step(rows, 16, storage.num_blocks, device)
    q, k, v = _qkv(inputs.num_tokens, sizes, dtype, device)
    angles = torch.rand((inputs.num_tokens, 1, 32), device=device) * 6.0
    turn = (angles.cos().to(dtype), angles.sin().to(dtype))
    norms = [RMSNorm(1 + 0.1 * torch.randn(64, device=device).to(dtype), 1e-6) for _ in ("q", "k")]
    wide = widened(storage)
    step = TritonAttention(storage, shape).plan(inputs)
    got = step.rotate_and_attend(0, torch.cat((q, k, v), dim=1), Rotation(*turn), (norms[0], norms[1]))
    rotate = Rotation(turn[0].float(), turn[1].float())
    q, k = (rotate(RMSNorm(norm.weight.float(), norm.eps)(x.float())) for norm, x in zip(norms, (q, k), strict=True))
    want = ReferenceAttention(wide, shape).plan(inputs)(0, q, k, v.float())
    return check("kernels", f"QK-norm, rotation, store, {_name(dtype)}", error_of(got, want), LIMITS[dtype])


def _layers(device: torch.device, dtype: torch.dtype) -> Iterator[Finding]:
    residual, branch = torch.randn((2, 33, 4096), device=device).to(dtype)
    norm = RMSNorm(torch.randn(4096, device=device).to(dtype), 1e-5)
    total, normed = add_rms_norm(residual, branch, norm)
    want = RMSNorm(norm.weight.float(), norm.eps)((residual + branch).float())
    error = max(error_of(total, residual + branch), error_of(normed, want))
    yield check("kernels", f"residual + norm, {_name(dtype)}", error, LIMITS[dtype])
    gate_up = torch.randn((33, 2 * 3000), device=device).to(dtype)
    want = GatedMLP(gate_up=lambda x: x, down=lambda x: x)(gate_up.float())
    yield check("kernels", f"silu * up, {_name(dtype)}", error_of(silu_multiply(gate_up), want), LIMITS[dtype])


def _quantized_types(device: torch.device) -> list[torch.dtype]:
    has_fp8 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)
    return [dtype for dtype in LARGEST_CODE if has_fp8 or dtype != torch.float8_e4m3fn]


def _quantized(device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, rows: Rows) -> Iterator[Finding]:
    """The pool's bytes against the torch code's, and attention over them."""
    sizes = (16, 4, 128)
    layout = KVLayout(1, 4, 128, 16, 1, SCALE_BYTES)
    storage = make_pool(layout, rows, kv_dtype, device)
    inputs = make_step(rows, 16, storage.num_blocks, device)
    q, k, v = _qkv(inputs.num_tokens, sizes, dtype, device)
    expected = KVStorage(layout, storage.num_blocks, kv_dtype, device)
    expected.blocks.copy_(storage.blocks)
    expected.write(0, inputs.slot_mapping, k, v)
    shape = AttentionShape(16, 128**-0.5, (None,))
    got = TritonAttention(storage, shape).plan(inputs)(0, q, k, v)
    num_wrong = int((storage.blocks != expected.blocks).sum())
    name = _name(kv_dtype)
    yield Finding("kernels", f"{name} pool, bytes that differ", str(num_wrong), "FAIL" if num_wrong else "ok")
    reference = ReferenceAttention(widened(expected), shape)
    wide_k, wide_v = (expected.read_rows(expected.rows_of(inputs.slot_mapping) + at) for at in (0, 16))
    want = reference.plan(inputs)(0, q.float(), wide_k, wide_v)
    yield check("kernels", f"attention over {name}, {_name(dtype)}", error_of(got, want), LIMITS[dtype])


def _replay(device: torch.device, dtype: torch.dtype) -> Finding:
    """One recording, replayed for steps of other lengths and fewer rows, against eager steps."""
    sizes, layout = (32, 8, 128), KVLayout(1, 8, 128, 16, dtype.itemsize)
    rows = [(3000, 1), (17, 1), (500, 1), (1, 1)]
    storage = make_pool(layout, rows, dtype, device)
    backend = TritonAttention(storage, AttentionShape(32, 128**-0.5, (None,)))
    tensors = DecodeTensors(
        torch.zeros(4, dtype=torch.int32, device=device),
        torch.zeros((4, 256), dtype=torch.int32, device=device),
        torch.full((4,), -1, dtype=torch.int64, device=device),
    )
    q, k, v = _qkv(4, sizes, dtype, device)
    attend, out = backend.plan_decode(tensors), torch.empty_like(q)
    replay = CudaRecorder().record(lambda: out.copy_(attend(0, q, k, v)))
    errors = []
    for some in (rows, rows[1:3], rows[:1]):
        inputs = make_step(some, 16, storage.num_blocks, device)
        tensors.context_lens.zero_()
        tensors.slot_mapping.fill_(-1)
        tensors.context_lens[: len(some)].copy_(torch.from_numpy(inputs.context_lens))
        tensors.block_tables[: len(some), : inputs.block_tables.shape[1]].copy_(inputs.block_tables)
        tensors.slot_mapping[: len(some)].copy_(inputs.slot_mapping)
        replay()
        want = backend.plan(inputs)(0, *(x[: len(some)] for x in (q, k, v)))
        padding_is_zero = not out[len(some) :].any()
        errors.append(error_of(out[: len(some)], want) if padding_is_zero else float("nan"))
    worst = max(errors, key=_badness)
    return check("kernels", f"replayed decode steps, {_name(dtype)}", worst, LIMITS[dtype])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
