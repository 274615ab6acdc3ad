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
from engine.sampling.draw import MAX_SMALL_K, Cut, truncate_and_draw
from engine.sampling.race import Race
from engine.sampling.rng import race_keys
from tests.fakes.races import RACES

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


def test_typical_p_that_rounding_puts_out_of_reach_drops_nothing() -> None:
    x = random_logits(4, 300, 2.0)
    assert torch.equal(truncation.typical_p(x, torch.full((4,), 1.0 - 1e-16, dtype=torch.float64)), x)


@pytest.mark.parametrize("vocab", [12_288, 12_345])
@pytest.mark.parametrize("width", [1, 3, 40, 600])
@pytest.mark.parametrize("steps_per_unit", [2, 64, 1e6])
def test_narrow_keeps_what_top_k_keeps_with_few_ties_or_many(vocab: int, width: int, steps_per_unit: float) -> None:
    x = (random_logits(12, vocab, 2.0) * steps_per_unit).round() / steps_per_unit
    x[0, 100:] = -INF  # fewer than some widths
    x[1, 1:] = -INF
    values, columns = truncation.narrow(x, width)
    assert (columns.diff(dim=-1) > 0).all()
    assert torch.equal(values, x.gather(-1, columns))
    held = torch.full_like(x, -INF).scatter(-1, columns, values)
    assert torch.equal(held, truncation.top_k(x, torch.full((12,), width)))
    ranked = truncation.highest_ranked(x, width)
    assert torch.equal(torch.full_like(x, -INF).scatter(-1, ranked, x.gather(-1, ranked)), held)


def test_narrow_finds_ties_outside_the_most_promising_groups() -> None:
    """The highest of many groups are equal; the lowest ids of all must be found, wherever the rest of them are."""
    x = torch.zeros(2, 12_800)
    x[0, 63::64] = 1.0
    x[1, 12_000:] = 1.0
    _, columns = truncation.narrow(x, 4)
    assert columns.tolist() == [[63, 127, 191, 255], [12_000, 12_001, 12_002, 12_003]]
    assert torch.equal(truncation.highest_ranked(x, 4).sort(-1).values, columns)


def test_ranks_follow_values_of_either_sign_and_then_columns() -> None:
    x = torch.tensor([[-INF, -2.5, -0.0, 0.0, 1e-40, 3.0, INF, -2.5, 0.0]])
    order = truncation.highest_ranked(x, 9)
    assert order.tolist() == [[6, 5, 4, 2, 3, 8, 1, 7, 0]]


def cut_of(num_rows: int, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 0) -> Cut:
    seeds, zeros = np.arange(seed, seed + num_rows), np.zeros(num_rows, dtype=np.int64)
    full = np.full(num_rows, 0.0)
    keys = race_keys(seeds, zeros, zeros)
    return Cut(np.full(num_rows, top_k, dtype=np.int64), full + top_p, full + min_p, keys)


def slowly(x: torch.Tensor, cut: Cut, race: Race) -> torch.Tensor:
    """The plain steps over the whole vocabulary, then the draw."""
    if cut.top_k[0]:
        x = truncation.top_k(x, torch.from_numpy(cut.top_k))
    if cut.top_p[0] < 1.0:
        x = truncation.top_p(x, torch.from_numpy(cut.top_p))
    return race.winners(truncation.min_p(x, torch.from_numpy(cut.min_p)), cut.keys)[0]


VOCAB = 12_345
CUTS = [
    {},
    {"min_p": 0.02},
    {"min_p": 1.0},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.05},
    {"top_k": MAX_SMALL_K + 1},
    {"top_k": MAX_SMALL_K + 1, "top_p": 0.8, "min_p": 0.001},
    {"top_p": 1e-9},
    {"top_p": 0.2},
    {"top_p": 0.9},
    {"top_p": 0.97, "min_p": 0.001},
    {"top_p": 0.9999},
]

race_of_each_kind = pytest.mark.parametrize("race", RACES.values(), ids=RACES)


@race_of_each_kind
@pytest.mark.parametrize("settings", CUTS)
@pytest.mark.parametrize("scale", [0.0, 0.2, 2.0, 8.0])
def test_the_fast_ways_draw_what_the_whole_vocabulary_would(
    race: Race, settings: dict[str, float], scale: float
) -> None:
    """From a distribution without any shape to one of a few tokens; also where many logits are equal."""
    for x in (random_logits(24, VOCAB, scale), random_logits(24, VOCAB, scale, seed=1).mul(4).round() / 4):
        cut = cut_of(24, **settings, seed=int(10 * scale))
        tokens, peaks = truncate_and_draw(x.clone(), cut, race)
        assert torch.equal(tokens, slowly(x, cut, race))
        assert torch.equal(peaks, x.amax(-1))


@race_of_each_kind
def test_rows_of_all_kinds_in_one_batch_draw_as_they_do_alone(race: Race) -> None:
    parts = [cut_of(4, **settings) for settings in CUTS]
    columns = ("top_k", "top_p", "min_p", "keys")
    together = Cut(*(np.concatenate([getattr(part, name) for part in parts]) for name in columns))
    x = random_logits(4 * len(CUTS), VOCAB, 1.5)
    tokens, _ = truncate_and_draw(x.clone(), together, race)
    for row in range(x.shape[0]):
        alone, _ = truncate_and_draw(x[row : row + 1].clone(), together.take(np.array([row])), race)
        assert alone.item() == tokens[row]


@race_of_each_kind
def test_a_nucleus_is_drawn_from_as_often_as_its_probabilities_say(race: Race) -> None:
    """Where most first winners are outside of it: 0.3 of a mild slope. Chi-square over 20,000 draws, p = 1e-5."""
    slope = torch.linspace(1.0, 0.0, 60)
    tokens, _ = truncate_and_draw(slope.repeat(20_000, 1), cut_of(20_000, top_p=0.3), race)
    inside = truncation.top_p(slope[None], torch.tensor([0.3]).double())[0].isfinite()
    size = int(inside.sum())
    assert inside[:size].all()
    expected = torch.softmax(slope[:size].double(), dim=-1) * 20_000
    counts = torch.bincount(tokens, minlength=60)
    assert counts[size:].sum() == 0
    assert ((counts[:size] - expected) ** 2 / expected).sum() < size + 4.3 * (2 * size) ** 0.5 + 10
