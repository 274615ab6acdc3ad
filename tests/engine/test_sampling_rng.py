"""The counter-based generator: known answers, evenness, and independence of neighbouring keys."""

import numpy as np
import pytest

from engine.batch import SlotStart
from engine.sampling.params import SamplingParams
from engine.sampling.rng import philox4x32, race_keys
from engine.sampling.state import KEYS_AHEAD, SlotTable

# The known-answer vectors published with Random123 for philox4x32, 10 rounds: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def column(words: tuple[int, ...]) -> np.ndarray:
    return np.array(words, dtype=np.uint64)[:, None]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert philox4x32(column(counter), column(key))[:, 0].tolist() == list(expected)


def test_philox_computes_each_column_by_itself() -> None:
    counters, keys, expected = (np.array(part, dtype=np.uint64).T for part in zip(*KNOWN, strict=True))
    assert (philox4x32(counters, keys) == expected).all()


def test_a_race_key_is_the_first_two_words_of_its_draw() -> None:
    """Seed as the key, low word first; (index, choice) as the counter."""
    seed, choice, index = -2, 3, 2**33 + 7
    words = philox4x32(column((7, 2, 3, 0)), column((0xFFFFFFFE, 0xFFFFFFFF)))[:2, 0]
    found = race_keys(*(np.array([part], dtype=np.int64) for part in (seed, choice, index)))
    assert found.dtype == np.int32
    assert found.view(np.uint32).tolist() == [words.tolist()]


def grid(seeds: range, choices: range, indices: range) -> np.ndarray:
    """Both words of every key, as numbers from 0 to 1: [2, seeds, choices, indices]."""
    keys = np.array([(s, c, i) for s in seeds for c in choices for i in indices], dtype=np.int64).T
    words = race_keys(*keys).view(np.uint32).T / 2.0**32
    return words.reshape(2, len(seeds), len(choices), len(indices))


def test_every_draw_has_a_key_of_its_own() -> None:
    keys = np.array([(s, c, i) for s in range(-20, 20) for c in range(8) for i in range(64)], dtype=np.int64).T
    assert len(np.unique(race_keys(*keys).view(np.int64))) == keys.shape[1]


def test_extreme_seeds_and_indices_are_accepted() -> None:
    seeds = np.array([-(2**63), 2**63 - 1, -1, 0], dtype=np.int64)
    zeros = np.zeros(4, dtype=np.int64)
    assert len(np.unique(race_keys(seeds, zeros, zeros).view(np.int64))) == 4
    assert len(np.unique(race_keys(zeros, zeros, zeros + np.array([0, 1, 2**32, 2**40])).view(np.int64))) == 4


def test_even_in_64_bins_along_each_part_of_the_key() -> None:
    """Chi-square with 63 degrees of freedom stays below 120 (p = 1.7e-5) for both words along every axis."""
    zeros = np.zeros(64_000, dtype=np.int64)
    steps = np.arange(64_000)
    for key in ((steps, zeros, zeros), (zeros, steps, zeros), (zeros, zeros, steps)):
        for word in race_keys(*key).view(np.uint32).T:
            counts = np.bincount(word >> 26, minlength=64)
            assert ((counts - 1000.0) ** 2 / 1000.0).sum() < 120.0


def test_neighbouring_keys_are_not_correlated() -> None:
    values = grid(range(100), range(10), range(100)) - 0.5
    pairs = (
        (values[0], values[1]),
        (values[:, 1:], values[:, :-1]),
        (values[:, :, 1:], values[:, :, :-1]),
        (values[..., 1:], values[..., :-1]),
    )
    for left, right in pairs:
        correlation = (left * right).mean() * 12.0
        assert abs(correlation) < 5.0 / np.sqrt(left.size)


def test_a_slots_keys_are_those_of_its_draws_however_they_were_computed() -> None:
    """Slots at different places, drawn from now and then, and one that is given to another sequence."""
    table = SlotTable(3, 100)
    for slot in range(3):
        table.start(SlotStart(slot, SamplingParams(seed=7 - slot), slot, (1,), (5,) * (10 * slot)))
    for step in range(3 * KEYS_AHEAD):
        slots = np.array([[2, 0], [1, 0, 2], [1]][step % 3])
        expected = race_keys(table.seed[slots], table.choice[slots], table.num_outputs[slots])
        assert table.keys(slots).tolist() == expected.tolist()
        table.num_outputs[slots] += 1
        if step == 20:
            table.start(SlotStart(1, SamplingParams(seed=1 << 40), 4, (1,), (5,) * 3))
