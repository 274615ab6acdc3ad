"""The draw: its noise, its distribution, its independence, its steadiness under noisy logits, and its native twin."""

import math

import numpy as np
import pytest
import torch

from engine.sampling import reference
from engine.sampling.race import Border, Race, log_exponentials
from engine.sampling.rng import race_keys
from tests.fakes.races import RACES

INF = math.inf
VOCAB = 49_152

race_of_each_kind = pytest.mark.parametrize("race", RACES.values(), ids=RACES)
twins = pytest.mark.skipif("native" not in RACES, reason="no native kernels here")


def keys_of(seeds: range, choice: int = 0, index: int = 0) -> np.ndarray:
    seeds_ = np.array(seeds, dtype=np.int64)
    return race_keys(seeds_, np.full_like(seeds_, choice), np.full_like(seeds_, index))


def random_logits(num_rows: int, width: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed)) * scale


def margins(x: torch.Tensor, keys: np.ndarray, ids: torch.Tensor) -> torch.Tensor:
    """By how much the winner of each row wins."""
    best = (x - log_exponentials(ids.int().expand(x.shape), torch.from_numpy(keys))).topk(2, dim=-1).values
    return best[:, 0] - best[:, 1]


# --- the noise


def key_for(token_id: int, wanted: int) -> np.ndarray:
    """A key under which the token's hash, before its last shift, is `wanted`: the steps before undone backwards."""
    first = 0x12345678
    h = token_id * 0x9E3779B9 % 2**32 ^ first
    h = (h ^ h >> 16) * 0x7FEB352D % 2**32
    second = wanted * pow(0x846CA68B, -1, 2**32) % 2**32 ^ h ^ h >> 15
    return np.array([[first, second]], dtype=np.uint32).view(np.int32)


@race_of_each_kind
def test_equals_the_plain_twin(race: Race) -> None:
    """Over many keys and ids, wherever the twin's margin is clear of float32's rounding."""
    x = random_logits(400, 23)
    keys = keys_of(range(400), choice=2, index=9)
    ids = torch.arange(23) * 6_607
    drawn, _ = race.winners(x, keys, ids=ids.repeat(400, 1))
    compared = 0
    for row, key, token_id in zip(x.tolist(), keys.view(np.uint32).tolist(), drawn.tolist(), strict=True):
        scores = [logit + reference.noise(i, tuple(key)) for i, logit in zip(ids.tolist(), row, strict=True)]
        best, second = sorted(scores, reverse=True)[:2]
        if best - second > 1e-5:
            compared += 1
            assert ids[scores.index(best)] == token_id
    assert compared > 390


@race_of_each_kind
@pytest.mark.parametrize("token_id", [0, 1, 49_151, 151_935])
def test_the_fastest_and_the_slowest_noise_are_finite_and_exact(race: Race, token_id: int) -> None:
    """The smallest uniform number is 2**-32; the largest rounds to 1 - 2**-24, not to 1."""
    rival = token_id + 7
    for wanted, noise in ((0, 32 * math.log(2)), (0x7FFFFFFF ^ 0x7FFF, -math.log(24 * math.log(2)))):
        key = key_for(token_id, wanted)
        ids = torch.tensor([[token_id, rival]])
        level = noise - reference.noise(rival, tuple(key[0].view(np.uint32).tolist()))
        for lead, winner in ((1e-4, rival), (-1e-4, token_id)):
            drawn, _ = race.winners(torch.tensor([[0.0, level + lead]]), key, ids=ids)
            assert drawn.item() == winner
        assert race.winners(torch.tensor([[0.0, -INF]]), key, ids=ids)[0].item() == token_id


def noise_grid(seeds: int, choices: int, steps: int, width: int) -> torch.Tensor:
    """Exponential numbers [seeds, choices, steps, width]."""
    parts = np.array([(s, c, i) for s in range(seeds) for c in range(choices) for i in range(steps)], dtype=np.int64).T
    keys = torch.from_numpy(race_keys(*parts))
    ids = torch.arange(width, dtype=torch.int32).expand(len(keys), width)
    return log_exponentials(ids, keys).exp().double().reshape(seeds, choices, steps, width)


def test_noise_is_exponential_in_all_its_parts() -> None:
    """64 equally likely bins: chi-square with 63 degrees of freedom stays below 120. And far down towards 0, where
    winners come from: as many as there should be, to 5 standard deviations."""
    noise = noise_grid(40, 5, 20, 512).ravel()
    assert noise.isfinite().all()
    counts = np.bincount((-torch.expm1(-noise) * 64).long().numpy(), minlength=64)
    expected = len(noise) / 64
    assert ((counts - expected) ** 2 / expected).sum() < 120.0
    for share in (1e-2, 1e-3, 1e-4, 1e-5):
        few = int((noise < share).sum())
        assert abs(few - share * len(noise)) < 5.0 * math.sqrt(share * len(noise))


def test_noise_of_neighbours_is_not_correlated() -> None:
    """Tokens one and several powers of two apart, next steps, choices, seeds: in their values, and in how often both
    are among the fastest thousandth (or one is, and the other among the slowest)."""
    noise = noise_grid(30, 6, 24, 640)
    uniform = -torch.expm1(-noise)
    pairs = [(uniform[..., gap:], uniform[..., :-gap]) for gap in (1, 2, 3, 16, 256, 512)]
    pairs += [(uniform[:, :, 1:], uniform[:, :, :-1]), (uniform[:, 1:], uniform[:, :-1]), (uniform[1:], uniform[:-1])]
    pairs += [(uniform[:, :, 1:, 1:], uniform[:, :, :-1, :-1])]
    for left, right in pairs:
        correlation = ((left - 0.5) * (right - 0.5)).mean().item() * 12.0
        assert abs(correlation) < 5.0 / math.sqrt(left.numel())
        expected = left.numel() * 0.01**2
        for other in (right < 0.01, right > 0.99):
            assert abs(int(((left < 0.01) & other).sum()) - expected) < 5.0 * math.sqrt(expected)


# --- the distribution


def chi_square(drawn: torch.Tensor, probabilities: torch.Tensor) -> float:
    counts = torch.bincount(drawn, minlength=len(probabilities)).double()
    expected = probabilities.double() * len(drawn)
    return float(((counts - expected) ** 2 / expected).sum())


SHAPES = {
    "level": torch.zeros(32),
    "mild": torch.linspace(0.0, 2.0, 32),
    "steep": torch.linspace(0.0, -4.0, 32),
    "one of many": torch.cat((torch.tensor([3.0]), torch.zeros(31))),
    "far from zero": torch.linspace(1000.0, 1003.0, 32),
}


@race_of_each_kind
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("axis", ["seeds", "choices", "steps"])
def test_tokens_come_as_often_as_their_probability_says(race: Race, shape: torch.Tensor, axis: str) -> None:
    """20,000 draws along each part of the key; 31 degrees of freedom stay below 75 (p = 1.7e-5)."""
    many, zeros = np.arange(20_000), np.zeros(20_000, dtype=np.int64)
    keys = race_keys(*(many if part == axis else zeros for part in ("seeds", "choices", "steps")))
    drawn, _ = race.winners(shape.repeat(len(keys), 1), keys)
    assert chi_square(drawn, torch.softmax(shape, dim=-1)) < 75.0


@race_of_each_kind
@pytest.mark.parametrize("ids", [(0, 1), (1, 0), (7, 40_000), (131_072, 0)])
def test_a_chance_of_one_in_ten_thousand(race: Race, ids: tuple[int, int]) -> None:
    """600,000 draws: 60 are expected, 5 standard deviations are 39."""
    x = torch.tensor([math.log(1e-4), math.log1p(-1e-4)]).repeat(600_000, 1)
    drawn, _ = race.winners(x, keys_of(range(600_000)), ids=torch.tensor(ids).repeat(600_000, 1))
    assert set(drawn.tolist()) == set(ids)
    assert abs(int((drawn == ids[0]).sum()) - 60) < 39


@race_of_each_kind
def test_a_whole_vocabulary_of_equals_is_drawn_evenly(race: Race) -> None:
    """By where in the vocabulary, and by the low bits of the id: 63 degrees of freedom stay below 120."""
    num_draws, rows = (20_000, 500) if race is not RACES["torch"] else (2_000, 100)
    x = torch.zeros(rows, VOCAB)
    drawn = torch.cat([race.winners(x, keys_of(range(i, i + rows)))[0] for i in range(0, num_draws, rows)])
    level = torch.full((64,), 1 / 64)
    assert chi_square(drawn // (VOCAB // 64), level) < 120.0
    assert chi_square(drawn % 64, level) < 120.0


def test_successive_draws_are_independent() -> None:
    """Pairs of draws at the next step, choice and seed from 4 equals: 15 degrees of freedom stay below 47."""
    parts = np.array([(s, c, i) for s in range(50) for c in range(10) for i in range(50)], dtype=np.int64).T
    drawn, _ = RACES["torch"].winners(torch.zeros(parts.shape[1], 4), race_keys(*parts))
    drawn = drawn.reshape(50, 10, 50)
    for left, right in ((drawn[..., 1:], drawn[..., :-1]), (drawn[:, 1:], drawn[:, :-1]), (drawn[1:], drawn[:-1])):
        assert chi_square((left * 4 + right).ravel(), torch.full((16,), 1 / 16)) < 47.0


@race_of_each_kind
def test_tokens_of_probability_zero_are_never_drawn(race: Race) -> None:
    """Not among thousands of draws, and not when a single token is possible, wherever it is."""
    x = torch.full((5_000, 9), -INF)
    x[:, [2, 5]] = torch.tensor([0.0, -3.0])
    assert set(race.winners(x, keys_of(range(5_000)))[0].tolist()) == {2, 5}
    for place in (0, 7, 8, 255, 698, 699):
        x = torch.full((200, 700), -INF)
        x[:, place] = -50.0
        drawn, peaks = race.winners(x, keys_of(range(200)))
        assert set(drawn.tolist()) == {place}
        assert set(peaks.tolist()) == {-50.0}


@race_of_each_kind
def test_rows_with_nothing_to_draw_from_say_so(race: Race) -> None:
    x = torch.tensor([[-INF] * 30, [INF] + [0.0] * 29, [0.0] * 30])
    drawn, peaks = race.winners(x, keys_of(range(3)))
    assert peaks.isfinite().tolist() == [False, False, True]
    assert ((drawn >= 0) & (drawn < 30)).all()


@race_of_each_kind
@pytest.mark.parametrize("size", [1e6, 1e20])
def test_equal_logits_share_whatever_their_size(race: Race, size: float) -> None:
    """The noise is not lost in the rounding of large logits."""
    x = torch.tensor([size, -size, size]).repeat(10_000, 1)
    counts = torch.bincount(race.winners(x, keys_of(range(10_000)))[0], minlength=3).tolist()
    assert counts[1] == 0
    assert abs(counts[0] - 5_000) < 250


@race_of_each_kind
def test_an_exact_tie_goes_to_the_lower_id(race: Race) -> None:
    """Among 300,000 ids some have the very same noise."""
    key = keys_of(range(1))
    words = tuple(key[0].view(np.uint32).tolist())
    first_with: dict[float, int] = {}
    ties = []
    for token_id in range(300_000):
        lower = first_with.setdefault(reference.noise(token_id, words), token_id)
        ties += [(lower, token_id)] if lower != token_id else []
    assert ties
    for tie in ties:
        assert race.winners(torch.zeros(1, 2), key, ids=torch.tensor([tie]))[0].item() == tie[0]


# --- what a draw depends on


@race_of_each_kind
def test_noise_in_the_logits_hardly_ever_changes_a_draw(race: Race) -> None:
    """Logits of 49,152 equals, each off by some 1e-5: of 20,000 draws fewer than one in a thousand differ."""
    num_draws, rows = (20_000, 250) if race is not RACES["torch"] else (1_000, 50)
    level = torch.zeros(rows, VOCAB)
    noisy = random_logits(rows, VOCAB, scale=1e-5)
    changed = 0
    for first in range(0, num_draws, rows):
        keys = keys_of(range(first, first + rows))
        changed += int((race.winners(level, keys)[0] != race.winners(noisy, keys)[0]).sum())
    assert changed < num_draws / 1000


@race_of_each_kind
def test_a_common_offset_changes_nothing(race: Race) -> None:
    x = (random_logits(300, 500) * 64).round() / 64  # exact after the shift as well
    keys = keys_of(range(300))
    assert torch.equal(race.winners(x, keys)[0], race.winners(x + 256.0, keys)[0])


@race_of_each_kind
def test_candidates_that_hold_the_winner_draw_it_too(race: Race) -> None:
    """Any subset with the winner in it, whatever else is in it and at whatever column."""
    x, keys = random_logits(200, 1_000, 2.0), keys_of(range(200))
    drawn, _ = race.winners(x, keys)
    shuffle = np.random.default_rng(0)
    for size in (1, 2, 9, 100):
        others = [shuffle.permutation(1_000)[: size - 1] for _ in range(200)]
        subsets = [np.unique(np.append(ids, token)) for ids, token in zip(others, drawn.tolist(), strict=True)]
        for row, ids in enumerate(subsets):
            among = torch.from_numpy(ids)[None]
            again, _ = race.winners(x[row, ids][None], keys[row : row + 1], ids=among)
            assert again.item() == drawn[row]


@race_of_each_kind
@pytest.mark.parametrize("width", [3, 1_000, 20_000, 40_000])
def test_a_row_is_computed_alike_in_any_company(race: Race, width: int) -> None:
    """Bit for bit, also the shares; from several rows in a chunk to a row that torch would share out among threads."""
    x, keys = random_logits(9, width, 2.0), keys_of(range(9))
    drawn, peaks = race.winners(x, keys)
    border = Border.at(x, drawn)
    counts, shares = race.ahead(x, border)
    for rows in (slice(0, 1), slice(3, 5), slice(2, 9)):
        again, again_peaks = race.winners(x[rows], keys[rows])
        assert torch.equal(again, drawn[rows])
        assert torch.equal(again_peaks, peaks[rows])
        again_counts, again_shares = race.ahead(x[rows], border.take(rows))
        assert torch.equal(again_counts, counts[rows])
        assert torch.equal(again_shares, shares[rows])


@race_of_each_kind
def test_rows_need_not_be_contiguous(race: Race) -> None:
    x, keys = random_logits(40, 12), keys_of(range(12))
    drawn, _ = race.winners(x.T, keys)
    assert torch.equal(drawn, race.winners(x.T.contiguous(), keys)[0])


# --- borders


@race_of_each_kind
def test_ahead_counts_and_weighs_what_is_more_likely(race: Race) -> None:
    """Ties are common here, and count when their column is the lower one."""
    x = random_logits(60, 300).mul(2).round() / 2
    columns = torch.randint(300, (60,), generator=torch.Generator().manual_seed(1))
    counts, shares = race.ahead(x, Border.at(x, columns))
    for row, column, count, share in zip(x, columns.tolist(), counts.tolist(), shares.tolist(), strict=True):
        ahead = torch.sort(row, descending=True, stable=True).indices.tolist()
        ahead = ahead[: ahead.index(column)]
        assert count == len(ahead)
        assert share == pytest.approx(torch.softmax(row.double(), dim=-1)[ahead].sum().item(), rel=1e-6)


@race_of_each_kind
def test_ahead_of_the_most_likely_is_nothing(race: Race) -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, -INF], [-INF, -200.0, 0.0, 0.0]])
    counts, shares = race.ahead(x, Border.at(x, x.argmax(-1)))
    assert counts.tolist() == [0, 0]
    assert shares.tolist() == [0.0, 0.0]


@race_of_each_kind
def test_only_what_is_ahead_of_the_border_runs(race: Race) -> None:
    x, keys = random_logits(300, 200).mul(2).round() / 2, keys_of(range(300))
    columns = torch.sort(x, descending=True, stable=True).indices[:, 40].contiguous()
    drawn, peaks = race.winners(x, keys, border=Border.at(x, columns))
    ahead = Border.at(x, columns).ahead(x).bool()
    assert (ahead.sum(-1) == 40).all()
    assert torch.equal(drawn, race.winners(x.masked_fill(~ahead, -INF), keys)[0])
    assert torch.equal(peaks, x.amax(-1))


# --- the twins


def assert_twins_agree(x: torch.Tensor, keys: np.ndarray, ids: torch.Tensor | None = None) -> None:
    torch_drawn, torch_peaks = RACES["torch"].winners(x, keys, ids=ids)
    native_drawn, native_peaks = RACES["native"].winners(x, keys, ids=ids)
    clear = margins(x, keys, torch.arange(x.shape[-1]) if ids is None else ids) > 1e-6
    assert clear.float().mean() > 0.99
    assert torch.equal(torch_drawn[clear], native_drawn[clear])
    assert torch.equal(torch_peaks, native_peaks)


@twins
@pytest.mark.parametrize("width", [1, 2, 7, 8, 9, 63, 500, 4_099, VOCAB])
@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 30.0])
def test_native_draws_what_torch_draws(width: int, scale: float) -> None:
    num_rows = 16 if width == VOCAB else 300
    x = random_logits(num_rows, width, scale, seed=width)
    if width > 1:
        assert_twins_agree(x, keys_of(range(num_rows), index=width))
        sparse = x.masked_fill(random_logits(num_rows, width, seed=1) > 0.5, -INF)
        sparse[:, 0] = x[:, 0]
        assert_twins_agree(sparse, keys_of(range(num_rows)))
        assert_twins_agree(x, keys_of(range(num_rows)), (torch.arange(width) * 3 + 1).repeat(num_rows, 1))
    else:
        assert (RACES["native"].winners(x, keys_of(range(num_rows)))[0] == 0).all()


@twins
def test_native_counts_what_torch_counts() -> None:
    for width in (1, 8, 13, 1_000, VOCAB):
        x = random_logits(20, width, 2.0)
        border = Border.at(x, torch.arange(20) * 977 % width)
        (counts, shares), (torch_counts, torch_shares) = (race.ahead(x, border) for race in RACES.values())
        assert torch.equal(counts, torch_counts)
        assert torch.allclose(shares, torch_shares, rtol=2e-6, atol=1e-12)
