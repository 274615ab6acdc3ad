"""The Triton kernels against their plain twins, in Triton's interpreter. Run by `test_triton.py`, in its own process.

The interpreter proves indexing, masks, block-table walks, online softmax, merging and quantization; it cannot prove
races, shared memory or speed, and it computes wrong bfloat16 products, so float32 and float16 only.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from bench.gpu import kernels as gpu_check_kernels
from bench.gpu import report
from engine.attention.interface import AttentionInputs, AttentionShape, CapturableAttention, DecodeTensors
from engine.attention.reference import ReferenceAttention
from engine.attention.triton_paged import TritonAttention, Tuning
from engine.models.decoder import Decoder
from engine.models.layers import GatedMLP, RMSNorm, Rotation
from engine.models.load import load_decoder
from engine.models.rope import RotaryEmbedding, rope_frequencies
from engine.models.spec import RopeSpec
from engine.models.triton_layers import FusedDecoder, add_rms_norm, silu_multiply
from engine.weights.checkpoint import resolve_model
from kvpool.layout import SCALE_BYTES, KVLayout
from kvpool.storage import KVStorage
from kvpool.table import blocks_for
from tests.conformance.test_attention_backends import CASES, TOLERANCE, Case, build_inputs, filled_storage
from tests.fakes.tiny_models import make_tiny_model

CPU = torch.device("cpu")
SHORT_CASES = ["decode", "odd head size", "a window of one"]
MIXED = CASES["decode and chunks"]


@pytest.fixture(scope="module", autouse=True)
def language_is_patched_once_a_launch() -> Iterator[None]:
    """The interpreter patches Triton's language for a launch, and again, needlessly, for every function called inside
    it: a third of the time. Once for each kind of module that calls (this project's, Triton's own) will do."""
    patch = interpreter._patch_lang
    patched: dict[tuple[int, ...], Any] = {}

    def patch_unless_patched(fn: Any) -> Any:
        language = tuple(id(value) for value in fn.__globals__.values() if value is tl or value is tl.core)
        if language not in patched:
            is_launch = not patched
            scope = patched[language] = patch(fn)
            if is_launch:
                restore = scope.restore
                scope.restore = lambda: (patched.clear(), restore())
        return patched[language]

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang", patch_unless_patched)
        yield


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def heads_of(case: Case, num_tokens: int, layer: int, dtype: torch.dtype) -> Sequence[Tensor]:
    """Queries, keys and values as views of one random tensor, as a model hands them over."""
    num_heads = [case.heads[0], case.heads[1], case.heads[1]]
    qkv = random(num_tokens, sum(num_heads), case.head_dim, seed=3 + layer, dtype=dtype)
    return torch.split(qkv, num_heads, dim=1)


def shape_of(case: Case) -> AttentionShape:
    return AttentionShape(case.heads[0], case.head_dim**-0.5, case.windows)


def quantized_storage(case: Case, block_size: int, dtype: torch.dtype) -> KVStorage:
    num_blocks = 3 + sum(blocks_for(sum(row), block_size) for row in case.rows)
    layout = KVLayout(len(case.windows), case.heads[1], case.head_dim, block_size, 1, SCALE_BYTES)
    storage = KVStorage(layout, num_blocks, dtype, CPU)
    for layer in range(layout.num_layers):
        k, v = (random(num_blocks * block_size, case.heads[1], case.head_dim, seed=seed) for seed in (layer, 9))
        storage.write(layer, torch.arange(num_blocks * block_size), k, v)
    return storage


def check_equal(case: Case, storages: Sequence[KVStorage], dtype: torch.dtype, tuning: Tuning | None = None) -> None:
    """Both attend alike with every window, on the last layer that has it, and leave the same bytes in the pool."""
    inputs = build_inputs(case.rows, storages[0].layout.block_size, storages[0].num_blocks, seed=2)
    backends = TritonAttention(storages[0], shape_of(case), tuning), ReferenceAttention(storages[1], shape_of(case))
    plans = [backend.plan(inputs) for backend in backends]
    for layer in {window: layer for layer, window in enumerate(case.windows)}.values():
        q, k, v = heads_of(case, inputs.num_tokens, layer, dtype)
        got, want = (attend(layer, q, k, v) for attend in plans)
        assert got.dtype == dtype
        torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=0)
    torch.testing.assert_close(storages[0].blocks, storages[1].blocks, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("name", CASES)
def test_float32_equals_reference(name: str) -> None:
    case = CASES[name]
    check_equal(case, [filled_storage(case, 16, torch.float32, seed=1) for _ in range(2)], torch.float32)


@pytest.mark.parametrize("name", SHORT_CASES)
def test_float16_in_blocks_of_an_odd_size_equals_reference(name: str) -> None:
    case = CASES[name]
    check_equal(case, [filled_storage(case, 24, torch.float16, seed=1) for _ in range(2)], torch.float16)


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("name", ["decode", "odd head size"])
def test_quantized_pools_equal_reference_to_the_bit(name: str, kv_dtype: torch.dtype) -> None:
    case = CASES[name]
    check_equal(case, [quantized_storage(case, 16, kv_dtype) for _ in range(2)], torch.float32)


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantizing_the_strangest_heads(kv_dtype: torch.dtype) -> None:
    """Zeros, values below any scale, ties between codes, infinities, NaN: stored as the torch code stores them."""
    ties = torch.arange(16) * 0.5 - 3.5
    odd = torch.stack([torch.zeros(16), torch.full((16,), 1e-9), ties, ties * 1e-4, ties * 1e6, -ties, ties, ties])
    odd[0, ::2] = -0.0
    odd[3, 1] = -1e-9  # rounds to a zero that keeps its sign
    odd[2, 0], odd[5, 3], odd[6, 4] = 127.0, torch.inf, torch.nan
    case = Case([(0, len(odd))], heads=(1, 1), windows=(None,))
    storages = [quantized_storage(case, 16, kv_dtype) for _ in range(2)]
    inputs = build_inputs(case.rows, 16, storages[0].num_blocks, seed=2)
    k, q = odd[:, None], random(len(odd), 1, 16, seed=1)
    TritonAttention(storages[0], shape_of(case)).plan(inputs)(0, q, k, k.flip(0))
    storages[1].write(0, inputs.slot_mapping, k, k.flip(0))
    torch.testing.assert_close(storages[0].data.view(torch.uint8), storages[1].data.view(torch.uint8), atol=0, rtol=0)
    got, want = (storage.read_rows(storage.rows_of(inputs.slot_mapping)) for storage in storages)
    torch.testing.assert_close(got, want, atol=0, rtol=0, equal_nan=True)
    assert got[6].isnan().all()


@pytest.mark.parametrize(("num_programs", "tile_keys"), [(1, 16), (16, 64)])
def test_any_number_of_segments_and_any_tile(num_programs: int, tile_keys: int) -> None:
    case = Case([(300, 1), (5, 1), (140, 2)], heads=(2, 1), windows=(None, 150))
    tuning = Tuning(num_programs, chunk_lanes=16, tile_keys=tile_keys)
    check_equal(case, [filled_storage(case, 16, torch.float32, seed=1) for _ in range(2)], torch.float32, tuning)


def test_what_others_left_in_the_pool_reaches_nobody() -> None:
    """NaN in every block of others and behind every context: zero times NaN would be NaN."""
    storages = [filled_storage(MIXED, 16, torch.float32, seed=1) for _ in range(2)]
    inputs = build_inputs(MIXED.rows, 16, storages[0].num_blocks, seed=2)
    held = torch.zeros(storages[0].num_blocks, 16, dtype=torch.bool)
    for table, length in zip(inputs.block_tables, inputs.context_lens.tolist(), strict=True):
        for position in range(length):
            held[table[position // 16], position % 16] = True
    for storage in storages:
        storage.data.movedim(3, 1)[~held] = torch.nan
    check_equal(MIXED, storages, torch.float32)
    assert storages[0].data.isnan().any()


class Replayed:
    """A decode step over fixed buffers of `size` rows, filled anew as a graph's replays would be."""

    def __init__(self, backend: CapturableAttention, size: int, max_blocks: int) -> None:
        self.tensors = DecodeTensors(
            torch.zeros(size, dtype=torch.int32),
            torch.zeros((size, max_blocks), dtype=torch.int32),
            torch.full((size,), -1, dtype=torch.int64),
        )
        self.attend = backend.plan_decode(self.tensors)

    def fill(self, inputs: AttentionInputs) -> None:
        for tensor, padding in ((self.tensors.context_lens, 0), (self.tensors.slot_mapping, -1)):
            tensor.fill_(padding)
        num_rows, width = inputs.block_tables.shape
        self.tensors.context_lens[:num_rows] = torch.from_numpy(inputs.context_lens)
        self.tensors.block_tables[:num_rows, :width] = inputs.block_tables
        self.tensors.slot_mapping[:num_rows] = inputs.slot_mapping


def test_one_recorded_step_serves_steps_of_other_lengths_and_sizes() -> None:
    """The plan is made once, before any length is known; rows of padding give zeros and store nothing."""
    case = Case([(140, 1), (3, 1), (20, 1)])
    storages = [filled_storage(case, 16, torch.float32, seed=1) for _ in range(2)]
    backend, reference = TritonAttention(storages[0], shape_of(case)), ReferenceAttention(storages[1], shape_of(case))
    assert isinstance(backend, CapturableAttention)
    replayed = Replayed(backend, size=4, max_blocks=12)
    for rows in (case.rows, case.rows[:1], [(0, 1), (16, 1)]):
        inputs = build_inputs(rows, 16, storages[0].num_blocks, seed=len(rows))
        replayed.fill(inputs)
        q, k, v = heads_of(case, 4, layer=1, dtype=torch.float32)
        got = replayed.attend(1, q, k, v)
        want = reference.plan(inputs)(1, *(tensor[: len(rows)] for tensor in (q, k, v)))
        torch.testing.assert_close(got[: len(rows)], want, atol=2e-5, rtol=0)
        assert not got[len(rows) :].any()
        torch.testing.assert_close(storages[0].data, storages[1].data, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("heads", "head_dim", "normed", "dtype"),
    [
        ((4, 2), 16, False, torch.float32),
        ((6, 2), 64, True, torch.float32),
        ((2, 2), 10, True, torch.float32),
        ((4, 1), 16, True, torch.float16),
    ],
)
def test_fused_rotation_equals_rotating_first(
    heads: tuple[int, int], head_dim: int, normed: bool, dtype: torch.dtype
) -> None:
    case = Case([(3, 1), (14, 4)], heads, head_dim, windows=(None,))
    storages = [filled_storage(case, 16, dtype, seed=1) for _ in range(2)]
    inputs = build_inputs(case.rows, 16, storages[0].num_blocks, seed=2)
    fused, plain = (TritonAttention(storage, shape_of(case)).plan(inputs) for storage in storages)
    q, k, v = heads_of(case, inputs.num_tokens, 0, dtype)
    rotate = rotation(inputs, case.head_dim, dtype)
    norms = tuple(RMSNorm(1 + 0.3 * random(case.head_dim, seed=seed, dtype=dtype), 1e-6) for seed in (1, 2))
    got = fused.rotate_and_attend(0, torch.cat((q, k, v), dim=1), rotate, norms if normed else None)
    if normed:
        q, k = norms[0](q), norms[1](k)
    want = plain(0, rotate(q), rotate(k), v)
    torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=0)
    keys_and_values = [storage.data for storage in storages]
    torch.testing.assert_close(*keys_and_values, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def rotation(inputs: AttentionInputs, head_dim: int, dtype: torch.dtype) -> Rotation:
    starts = np.diff(inputs.query_starts)
    positions = [np.arange(length - n, length) for n, length in zip(starts, inputs.context_lens, strict=True)]
    rope = RotaryEmbedding(rope_frequencies(RopeSpec(), head_dim, 128), 1.0)
    return rope(torch.from_numpy(np.concatenate(positions)), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("size", [8, 100])
def test_residual_and_norm(size: int, dtype: torch.dtype) -> None:
    residual, branch = (random(5, size, seed=seed, dtype=dtype) for seed in (1, 2))
    norm = RMSNorm(random(size, seed=3, dtype=dtype), 1e-5)
    total, normed = add_rms_norm(residual, branch, norm)
    torch.testing.assert_close(total, residual + branch, atol=0, rtol=0)
    torch.testing.assert_close(normed, norm(residual + branch), atol=TOLERANCE[dtype], rtol=0)
    alone, normed = add_rms_norm(residual, None, norm)
    assert alone is residual
    torch.testing.assert_close(normed, norm(residual), atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("size", [6, 1500])
def test_silu_multiply(size: int, dtype: torch.dtype) -> None:
    gate_up = random(3, 2 * size + 4, seed=1, dtype=dtype)[:, : 2 * size]
    mlp = GatedMLP(gate_up=lambda x: x, down=lambda x: x)
    torch.testing.assert_close(silu_multiply(gate_up), mlp(gate_up), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.fixture
def decoder(tmp_path: Path) -> Decoder:
    folder = make_tiny_model("qwen3", tmp_path, num_hidden_layers=2)
    return load_decoder(resolve_model(str(folder)), torch.float32, CPU, lambda *_: None)


def test_the_fused_decoder_equals_the_plain_one(decoder: Decoder) -> None:
    """Through both kinds of attention; and the fused one continues what the plain one cached."""
    spec = decoder.spec
    case = Case([(0, 6), (0, 2)], (spec.num_heads, spec.num_kv_heads), spec.head_dim, spec.sliding_window)
    storages = [filled_storage(case, 16, torch.float32, seed=1) for _ in range(3)]
    fused = FusedDecoder.of(decoder)
    for rows in (case.rows, [(6, 1), (2, 2)]):
        inputs = build_inputs(rows, 16, storages[0].num_blocks, seed=2)
        steps = [TritonAttention(storage, shape_of(case)).plan(inputs) for storage in storages[:2]]
        reference = ReferenceAttention(storages[2], shape_of(case)).plan(inputs)
        tokens = torch.arange(inputs.num_tokens) * 7 % spec.vocab_size
        positions = torch.cat([torch.arange(sum(row) - row[1], sum(row)) for row in sorted(rows, key=lambda r: r[1])])
        want = decoder.forward(tokens, positions, reference)
        torch.testing.assert_close(fused.forward(tokens, positions, steps[0]), want, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(decoder.forward(tokens, positions, steps[1]), want, atol=2e-4, rtol=1e-4)
        storages[0].data.copy_(storages[2].data)
    elsewhere = fused.forward(tokens, positions, lambda layer, q, k, v: q.contiguous())
    assert elsewhere.shape == want.shape


def test_what_it_cannot_serve_is_said() -> None:
    case = replace(MIXED, head_dim=10)
    with pytest.raises(ValueError, match="bfloat16"):
        TritonAttention(filled_storage(case, 16, torch.bfloat16, seed=1), shape_of(case))
    with pytest.raises(ValueError, match="even head size"):
        TritonAttention(filled_storage(replace(case, head_dim=9), 16, torch.float32, seed=1), shape_of(case))


def test_what_a_gpu_is_asked_holds_here_too() -> None:
    """The questions of `bench/gpu_check.py`, in its tiny form: the script itself must not be what is wrong."""
    found = list(gpu_check_kernels.findings(CPU, [torch.float32], tiny=True))
    assert len(found) > 5
    assert {finding.verdict for finding in found} == {"ok"}, report.table(found)
