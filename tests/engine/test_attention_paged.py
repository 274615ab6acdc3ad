"""What the torch backend promises beyond equality with the reference: memory bounds, and rows that harm no others."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention import torch_paged
from engine.attention.interface import AttentionInputs, AttentionShape
from engine.attention.reference import ReferenceAttention
from engine.attention.select import BACKENDS
from engine.attention.torch_paged import TorchPagedAttention
from tests.conformance.test_attention_backends import Case, build_inputs, filled_storage

ROWS = [(0, 1), (3, 1), (70, 1), (9, 40), (0, 5), (33, 17)]


def attend_both(case: Case, block_size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """What the torch backend and the reference make of the same random step, layer 0."""
    storages = [filled_storage(case, block_size, torch.float32, seed=1) for _ in range(2)]
    shape = AttentionShape(case.heads[0], case.head_dim**-0.5, case.windows)
    inputs = build_inputs(case.rows, block_size, storages[0].num_blocks, seed=2)
    generator = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(inputs.num_tokens, num_heads, case.head_dim, generator=generator)
        for num_heads in (case.heads[0], case.heads[1], case.heads[1])
    )
    backends = TorchPagedAttention(storages[0], shape), ReferenceAttention(storages[1], shape)
    got, want = (backend.plan(inputs)(0, q, k, v) for backend in backends)
    return got, want


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 30)), min_size=1, max_size=8),
    decode=st.lists(st.integers(0, 90), max_size=8),
    block_size=st.integers(1, 20),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 3), (8, 1)]),
    window=st.none() | st.integers(1, 60),
)
def test_any_step_equals_the_reference(
    rows: list[tuple[int, int]], decode: list[int], block_size: int, heads: tuple[int, int], window: int | None
) -> None:
    case = Case([*rows, *((context, 1) for context in decode)], heads, 8, (window,))
    torch.testing.assert_close(*attend_both(case, block_size), atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["MAX_GATHERED_TOKENS", "MAX_TILE_SCORES", "MAX_TILE_QUERIES", "FREE_PADDING"])
@pytest.mark.parametrize("windows", [(None,), (6,)])
def test_every_bound_may_be_tiny(monkeypatch: pytest.MonkeyPatch, name: str, windows: tuple[int | None]) -> None:
    """More groups and tiles, the same numbers."""
    monkeypatch.setattr(torch_paged, name, 1)
    torch.testing.assert_close(*attend_both(Case(ROWS, windows=windows)), atol=2e-5, rtol=0)


def test_mask_and_scores_of_a_long_chunk_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def spy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: object) -> torch.Tensor:
        seen.append(q.shape[2] * k.shape[2])
        return torch.zeros_like(q)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    attend_long_chunk()
    assert max(seen) <= torch_paged.MAX_TILE_SCORES
    assert len(seen) > 10


def attend_long_chunk() -> None:
    case = Case([(20_000, 2_000)], heads=(8, 1), head_dim=8, windows=(None,))
    storage = filled_storage(case, 16, torch.float32, seed=1)
    inputs = build_inputs(case.rows, 16, storage.num_blocks, seed=2)
    q, kv = torch.zeros(2_000, 8, 8), torch.zeros(2_000, 1, 8)
    TorchPagedAttention(storage, AttentionShape(8, 1.0, (None,))).plan(inputs)(0, q, kv, kv)


def test_scratch_is_reused_and_bounded_by_the_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_paged, "MAX_GATHERED_TOKENS", 256)
    case = Case([(99, 1)] * 40, heads=(2, 2), head_dim=8, windows=(None, None))
    storage = filled_storage(case, 4, torch.float32, seed=1)
    backend = TorchPagedAttention(storage, AttentionShape(2, 1.0, case.windows))
    attend = backend.plan(build_inputs(case.rows, 4, storage.num_blocks, seed=2))
    q = torch.randn(40, 2, 8)
    attend(0, q, q, q)
    before = [scratch.data_ptr() for scratch in backend._gatherer._scratch]
    attend(1, q, q, q)
    assert [scratch.data_ptr() for scratch in backend._gatherer._scratch] == before
    assert all(len(scratch) <= 256 * 2 for scratch in backend._gatherer._scratch)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nothing_outside_a_row_reaches_it(name: str, poison: float) -> None:
    """Other blocks, and the unwritten rest of a row's own last block, may hold anything."""
    case = Case([(2, 1), (40, 1), (5, 9), (0, 3)], windows=(None,))
    clean, dirty = (filled_storage(case, 4, torch.float32, seed=1) for _ in range(2))
    inputs = build_inputs(case.rows, 4, clean.num_blocks, seed=2)
    owned = torch.zeros(clean.num_blocks, 4, dtype=torch.bool)
    for row, length in enumerate(inputs.context_lens.tolist()):
        for position in range(length):
            owned[inputs.block_tables[row, position // 4], position % 4] = True
    dirty.data.permute(0, 3, 1, 2, 4, 5)[~owned] = poison
    shape = AttentionShape(4, 0.25, case.windows)
    q, k, v = (torch.randn(inputs.num_tokens, heads, 16) for heads in (4, 2, 2))
    got, want = (BACKENDS[name](storage, shape).plan(inputs)(0, q, k, v) for storage in (dirty, clean))
    assert torch.equal(got, want)


def test_a_poisoned_row_stays_alone() -> None:
    case = Case([(30, 1), (31, 1), (20, 1)], windows=(None,))
    storage = filled_storage(case, 4, torch.float32, seed=1)
    inputs = build_inputs(case.rows, 4, storage.num_blocks, seed=2)
    q, k, v = (torch.randn(3, heads, 16) for heads in (4, 2, 2))
    v[1] = float("nan")
    out = TorchPagedAttention(storage, AttentionShape(4, 0.25, (None,))).plan(inputs)(0, q, k, v)
    assert out.isnan().flatten(1).any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("name", BACKENDS)
def test_a_step_without_rows(name: str) -> None:
    storage = filled_storage(Case([(0, 1)]), 4, torch.float32, seed=1)
    empty = AttentionInputs(
        query_starts=np.zeros(1, dtype=np.int64),
        context_lens=np.zeros(0, dtype=np.int64),
        num_decode_rows=0,
        block_tables=torch.zeros((0, 0), dtype=torch.int64),
        slot_mapping=torch.zeros(0, dtype=torch.int64),
    )
    attend = BACKENDS[name](storage, AttentionShape(4, 0.25, (None, 3))).plan(empty)
    assert attend(1, torch.zeros(0, 4, 16), torch.zeros(0, 2, 16), torch.zeros(0, 2, 16)).shape == (0, 4, 16)


def test_decode_rows_of_like_length_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = torch.nn.functional.scaled_dot_product_attention

    def spy(q: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        calls.append(len(q))
        return real(q, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    attend_both(Case([(n, 1) for n in (100, 110, 120, 130, 4000, 4010)], windows=(None,)), block_size=16)
    assert calls == [4, 2]


def test_reference_equals_torchs_own_attention() -> None:
    """The oracle against an independent implementation: one whole prompt, causal, with and without a window."""
    for window in (None, 7):
        case = Case([(0, 50)], windows=(window,))
        storage = filled_storage(case, 16, torch.float32, seed=1)
        inputs = build_inputs(case.rows, 16, storage.num_blocks, seed=2)
        q, k, v = (torch.randn(50, heads, 16) for heads in (4, 2, 2))
        got = ReferenceAttention(storage, AttentionShape(4, 0.25, (window,))).plan(inputs)(0, q, k, v)
        distance = np.subtract.outer(np.arange(50), np.arange(50))
        mask = torch.from_numpy((distance >= 0) & (distance < (window or 51)))
        heads_first = (x.transpose(0, 1) for x in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
        want = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=mask, scale=0.25)
        torch.testing.assert_close(got, want.transpose(0, 1), atol=1e-5, rtol=0)
