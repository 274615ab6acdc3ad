"""The backends of optional libraries, over stand-ins that check what the libraries demand: the cases of all backends.

What it proves is what this project computes for a library: indexing, lengths, sums and windows. The libraries
themselves need a GPU.
"""

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from engine.attention import optional
from engine.attention.flash_attn_paged import FlashAttnAttention
from engine.attention.flashinfer_paged import FlashInferAttention
from engine.attention.interface import AttentionBackend, AttentionShape, CapturableAttention
from kvpool.quant import CODE_DTYPES
from kvpool.storage import KVStorage
from tests.conformance.test_attention_backends import (
    CASES,
    Case,
    build_inputs,
    check_equals_reference,
    filled_storage,
)
from tests.conformance.test_quantized_kv import filled_pool
from tests.fakes.attention_libraries import HALF_TYPES, fake_flash_attn, fake_flashinfer

FITTING: dict[type[AttentionBackend], tuple[tuple[int, ...], Callable[[int], int]]] = {
    FlashAttnAttention: ((256, 512), lambda head_dim: -(-head_dim // 8) * 8),
    FlashInferAttention: ((1, 3, 16, 256), lambda head_dim: 64 if head_dim < 64 else 128),
}
"""What each serves: block sizes, and the head size next to a case's own."""

EDGES = {
    "contexts around a block of 256": Case([(254, 1), (255, 1), (256, 1), (511, 1), (512, 1), (250, 12), (256, 3)]),
    "windows across blocks": Case([(600, 1), (255, 1), (250, 20), (0, 300)], windows=(256, 7)),
}


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both installed, and a recent GPU where this machine has a CPU."""
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn())
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer())
    monkeypatch.setattr(optional, "capability_of", lambda device: (9, 0))


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("name", [*CASES, *EDGES])
@pytest.mark.parametrize(
    ("backend", "block_size"), [(backend, size) for backend, (sizes, _) in FITTING.items() for size in sizes]
)
def test_equals_reference(backend: type[AttentionBackend], block_size: int, name: str, dtype: torch.dtype) -> None:
    case = {**CASES, **EDGES}[name]
    head_dim = FITTING[backend][1](case.head_dim)
    check_equals_reference(backend, replace(case, head_dim=head_dim), block_size, dtype)


@pytest.mark.parametrize("backend", FITTING)
def test_nothing_outside_a_row_reaches_it(backend: type[AttentionBackend]) -> None:
    """Other blocks, and the unwritten rest of a row's own last block, may hold anything."""
    case = Case([(2, 1), (300, 1), (5, 9), (0, 3)], head_dim=64, windows=(None,))
    clean, dirty = (filled_storage(case, 256, torch.float16, seed=1) for _ in range(2))
    inputs = build_inputs(case.rows, 256, clean.num_blocks, seed=2)
    owned = torch.zeros(clean.num_blocks, 256, dtype=torch.bool)
    for row, length in enumerate(inputs.context_lens.tolist()):
        for position in range(length):
            owned[inputs.block_tables[row, position // 256], position % 256] = True
    dirty.data.permute(0, 3, 1, 2, 4, 5)[~owned] = torch.nan
    q, k, v = (torch.randn(inputs.num_tokens, heads, 64).half() for heads in (4, 2, 2))
    shape = AttentionShape(4, 0.125, case.windows)
    got, want = (backend(storage, shape).plan(inputs)(0, q, k, v) for storage in (dirty, clean))
    assert torch.equal(got, want)


@pytest.mark.parametrize("backend", FITTING)
def test_decode_steps_are_not_recorded(backend: type[AttentionBackend]) -> None:
    storage = filled_storage(Case([(0, 1)], head_dim=64), 256, torch.float16, seed=1)
    assert not isinstance(backend(storage, AttentionShape(4, 1.0, (None, None))), CapturableAttention)


def test_a_plan_of_flashinfer_outlives_the_next_one() -> None:
    """The device may still fetch a step's plan when the host makes the next: they use wrappers in turn."""
    case = Case([(5, 1), (0, 4)], head_dim=64, windows=(None, 3))
    storage = filled_storage(case, 16, torch.float16, seed=1)
    backend = FlashInferAttention(storage, AttentionShape(4, 0.125, case.windows))
    other = build_inputs([(40, 1), (9, 1), (33, 2)], 16, 99, seed=5)
    inputs = build_inputs(case.rows, 16, storage.num_blocks, seed=2)
    q, k, v = (torch.randn(inputs.num_tokens, heads, 64).half() for heads in (4, 2, 2))
    attend = backend.plan(inputs)
    want = [attend(layer, q, k, v) for layer in (0, 1)]
    backend.plan(other)
    assert all(torch.equal(attend(layer, q, k, v), want[layer]) for layer in (0, 1))


REFUSED = {
    "float32": (Case([(0, 1)], head_dim=64), 256, torch.float32, "float16 and bfloat16 KV caches, not one of float32"),
    "a head size between": (Case([(0, 1)], head_dim=68), 256, torch.float16, "head sizes .*, not 68"),
    "a head size above": (Case([(0, 1)], head_dim=512), 256, torch.float16, "head sizes .*, not 512"),
}


@pytest.mark.parametrize("backend", FITTING)
@pytest.mark.parametrize(("case", "block_size", "dtype", "message"), REFUSED.values(), ids=REFUSED)
def test_what_no_kernel_serves_is_refused(
    backend: type[AttentionBackend], case: Case, block_size: int, dtype: torch.dtype, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        backend(filled_storage(case, block_size, dtype, seed=1), AttentionShape(4, 1.0, case.windows))


def small_pool(block_size: int = 256, dtype: torch.dtype = torch.float16) -> tuple[KVStorage, AttentionShape]:
    case = Case([(0, 1)], head_dim=64)
    return filled_storage(case, block_size, dtype, seed=1), AttentionShape(4, 1.0, case.windows)


@pytest.mark.parametrize("backend", FITTING)
@pytest.mark.parametrize("kv_dtype", CODE_DTYPES.values(), ids=CODE_DTYPES)
def test_quantized_pools_are_refused(backend: type[AttentionBackend], kv_dtype: torch.dtype) -> None:
    pool = filled_pool(Case([(0, 1)], head_dim=64), 256, kv_dtype, seed=1)
    with pytest.raises(ValueError, match="float16 and bfloat16 KV caches"):
        backend(pool, AttentionShape(4, 1.0, (None, None)))


def test_flash_attn_needs_large_blocks() -> None:
    with pytest.raises(ValueError, match="block size that is a multiple of 256, got 16"):
        FlashAttnAttention(*small_pool(block_size=16))


@pytest.mark.parametrize(
    ("backend", "dtype", "capability", "message"),
    [
        (FlashAttnAttention, torch.float16, (7, 5), r"capability 8\.0 for float16, this one has 7\.5"),
        (FlashInferAttention, torch.bfloat16, (7, 5), r"capability 8\.0 for bfloat16, this one has 7\.5"),
        (FlashInferAttention, torch.float16, (7, 0), r"capability 7\.5 for float16, this one has 7\.0"),
        (FlashInferAttention, torch.float16, None, "needs a CUDA device, and the KV cache is on cpu"),
    ],
)
def test_old_devices_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    backend: type[AttentionBackend],
    dtype: torch.dtype,
    capability: tuple[int, int] | None,
    message: str,
) -> None:
    monkeypatch.setattr(optional, "capability_of", lambda device: capability)
    with pytest.raises(ValueError, match=message):
        backend(*small_pool(dtype=dtype))


@pytest.mark.parametrize(
    ("backend", "module"), [(FlashAttnAttention, "flash_attn"), (FlashInferAttention, "flashinfer")]
)
def test_a_missing_library_is_said(
    monkeypatch: pytest.MonkeyPatch, backend: type[AttentionBackend], module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=f"{module} cannot be imported"):
        backend(*small_pool())


def test_a_flash_attn_without_paged_prefill_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    library = fake_flash_attn()
    library.flash_attn_varlen_func = lambda q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: q
    monkeypatch.setitem(sys.modules, "flash_attn", library)
    with pytest.raises(ValueError, match=r"version 2\.6"):
        FlashAttnAttention(*small_pool())


@pytest.mark.parametrize("error", [RuntimeError("Ninja build failed"), FileNotFoundError("no nvcc")])
def test_flashinfer_builds_its_kernels_before_anybody_waits(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    library = fake_flashinfer()

    def plan(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(library.BatchPrefillWithPagedKVCacheWrapper, "plan", plan)
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    with pytest.raises(ValueError, match=f"cannot build its kernels here .*{error}"):
        FlashInferAttention(*small_pool())
