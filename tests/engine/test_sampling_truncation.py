"""Top-k, top-p, min-p and typical-p: against transformers' own, at ties, and over every way of finding candidates."""

import math

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from engine.sampling import truncation
from engine.sampling.draw import MAX_SMALL_K, NUCLEUS_WIDTHS, Cut, draw, truncate_and_draw

INF = math.inf


def random_logits(num_rows: int, vocab: int, scale: float, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def kept(x: torch.Tensor) -> list[list[int]]:
    return [row.isfinite().nonzero().squeeze(-1).tolist() for row in x]


@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("share", [0.05, 0.31, 0.9, 0.997])
def test_equal_to_transformers(scale: float, share: float) -> None:
    x = random_logits(16, 500, scale)
    shares = torch.full((16,), share, dtype=torch.float64)
    ids = torch.zeros((16, 1), dtype=torch.int64)
    assert torch.equal(truncation.top_p(x, shares), TopPLogitsWarper(share)(ids, x))
    assert torch.equal(truncation.min_p(x, shares), MinPLogitsWarper(share)(ids, x))
    assert torch.equal(truncation.typical_p(x, shares), TypicalLogitsWarper(share)(ids, x))
    k = 1 + int(share * 100)
    assert torch.equal(truncation.top_k(x, torch.full((16,), k)), TopKLogitsWarper(k)(ids, x))


def test_each_row_has_its_own_setting() -> None:
    x = torch.tensor([[3.0, 2.0, 1.0, 0.0]]).repeat(3, 1)
    assert kept(truncation.top_k(x, torch.tensor([1, 2, 4]))) == [[0], [0, 1], [0, 1, 2, 3]]
    assert kept(truncation.top_p(x, torch.tensor([0.5, 0.7, 0.9]).double())) == [[0], [0, 1], [0, 1, 2]]
    assert kept(truncation.min_p(x, torch.tensor([1.0, 0.3, 0.0]).double())) == [[0], [0, 1], [0, 1, 2, 3]]


def test_top_p_keeps_the_token_that_crosses_and_at_least_one() -> None:
    x = torch.tensor([[0.5, 0.3, 0.2]]).log()
    for share, expected in ((1e-9, [0]), (0.49, [0]), (0.51, [0, 1]), (0.79, [0, 1]), (0.81, [0, 1, 2])):
        assert kept(truncation.top_p(x, torch.tensor([share]).double())) == [expected]


def test_ties_go_to_the_lower_id_and_never_beyond_k() -> None:
    x = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 1.0], [0.0] * 6])
    assert kept(truncation.top_k(x, torch.tensor([3, 2]))) == [[0, 1, 3], [0, 1]]
    assert kept(truncation.top_p(x, torch.tensor([0.6, 0.6]).double())) == [[0, 1, 3], [0, 1, 2, 3]]
    values, ids = truncation.narrow(x, 3)
    assert ids.tolist() == [[0, 1, 3], [0, 1, 2]]
    assert values.tolist() == [[1.0, 2.0, 2.0], [0.0, 0.0, 0.0]]


def test_dropped_tokens_stay_dropped_and_count_for_nothing() -> None:
    x = torch.tensor([[-INF, 1.0, -INF, 0.0, -INF]])
    assert kept(truncation.top_k(x, torch.tensor([4]))) == [[1, 3]]
    assert kept(truncation.top_p(x, torch.tensor([0.999]).double())) == [[1, 3]]
    assert kept(truncation.min_p(x, torch.tensor([0.0]).double())) == [[1, 3]]
    assert kept(truncation.typical_p(x, torch.tensor([0.999]).double())) == [[1, 3]]


def cut_of(num_rows: int, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Cut:
    uniform = (np.arange(num_rows) + 0.5) / num_rows
    full = np.full(num_rows, 0.0)
    return Cut(np.full(num_rows, top_k, dtype=np.int64), full + top_p, full + min_p, uniform)


def slowly(x: torch.Tensor, cut: Cut) -> list[int]:
    """The plain steps over the whole vocabulary, drawn from one running sum."""
    if cut.top_k[0]:
        x = truncation.top_k(x, torch.from_numpy(cut.top_k))
    if cut.top_p[0] < 1.0:
        x = truncation.top_p(x, torch.from_numpy(cut.top_p))
    x = truncation.min_p(x, torch.from_numpy(cut.min_p))
    sums = (x - x.amax(-1, keepdim=True)).exp().double().cumsum(-1)
    return (sums <= torch.from_numpy(cut.uniform)[:, None] * sums[:, -1:]).sum(-1).tolist()


VOCAB = NUCLEUS_WIDTHS[-1] + 900
CUTS = [
    {},
    {"min_p": 0.02},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.05},
    {"top_k": MAX_SMALL_K + 1, "top_p": 0.8},
    {"top_p": 0.2},
    {"top_p": 0.9},
    {"top_p": 0.97, "min_p": 0.001},
    {"top_p": 0.9999},
]


@pytest.mark.parametrize("settings", CUTS)
@pytest.mark.parametrize("scale", [0.0, 0.2, 2.0, 8.0])
def test_the_fast_ways_draw_what_the_whole_vocabulary_would(settings: dict[str, float], scale: float) -> None:
    """From a distribution without any shape (no candidate set holds its nucleus) to one of a few tokens."""
    x = random_logits(24, VOCAB, scale)
    cut = cut_of(24, **settings)
    tokens, peaks = truncate_and_draw(x.clone(), cut)
    assert tokens.tolist() == slowly(x, cut)
    assert torch.equal(peaks, x.amax(-1))


def test_rows_of_all_kinds_in_one_batch_draw_as_they_do_alone() -> None:
    parts = [cut_of(4, **settings) for settings in CUTS]
    columns = ("top_k", "top_p", "min_p", "uniform")
    together = Cut(*(np.concatenate([getattr(part, name) for part in parts]) for name in columns))
    x = random_logits(4 * len(CUTS), VOCAB, 1.5)
    tokens, _ = truncate_and_draw(x.clone(), together)
    for row in range(x.shape[0]):
        alone, _ = truncate_and_draw(x[row : row + 1].clone(), together.take(np.array([row])))
        assert alone.item() == tokens[row]


@pytest.mark.parametrize("width", [1, 2, 255, 256, 257, 1000])
def test_draw_inverts_the_cumulative_distribution(width: int) -> None:
    """Equal weights: the column is the uniform number times the width, also at its ends and chunk borders."""
    uniform = torch.tensor([2.0**-53, 0.25, 0.5, 0.75, 1.0 - 2.0**-53], dtype=torch.float64)
    columns, _ = draw(torch.zeros(5, width), uniform)
    assert columns.tolist() == [math.floor(u * width) for u in uniform.tolist()]


def test_a_uniform_that_rounding_brought_to_1_draws_the_last_possible_token() -> None:
    x = torch.tensor([[0.0, 1.0, 0.5, -INF, -INF]])
    assert draw(x, torch.ones(1, dtype=torch.float64))[0].tolist() == [2]
    x = torch.full((1, 700), -INF)
    x[0, [3, 300]] = 0.0
    assert draw(x, torch.ones(1, dtype=torch.float64))[0].tolist() == [300]


def test_draw_skips_what_underflowed() -> None:
    """One possible token between thousands whose probability underflows, at the ends of chunks and of the row."""
    for place in (0, 255, 256, 511, 699):
        x = torch.full((3, 700), -200.0)
        x[:, place] = 0.0
        columns, _ = draw(x, torch.tensor([1e-300, 0.5, 1.0 - 2.0**-53], dtype=torch.float64))
        assert columns.tolist() == [place] * 3
