"""Tiers behind the pool: what they keep, what goes first, and which of several is asked."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvpool.disk import disk_tier
from kvpool.tier import BlockTier, HostTier, NoTier, Tiers

BLOCK = 100
FILE = BLOCK + 108
FINGERPRINT = bytes(range(32))


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def data(number: int) -> bytes:
    return number.to_bytes(4, "big") * (BLOCK // 4)


def make_disk(folder: Path, num_blocks: int) -> BlockTier:
    return disk_tier(folder, FINGERPRINT, BLOCK, num_blocks * FILE)


MAKERS: dict[str, Callable[[Path, int], BlockTier]] = {
    "host": lambda folder, num_blocks: HostTier(num_blocks * BLOCK),
    "disk": make_disk,
    "both": lambda folder, num_blocks: Tiers(HostTier(num_blocks * BLOCK), make_disk(folder, num_blocks)),
}


@pytest.fixture(params=sorted(MAKERS))
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], BlockTier]:
    return lambda num_blocks: MAKERS[request.param](tmp_path, num_blocks)


@pytest.fixture(params=["disk", "host"])
def make_one(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], BlockTier]:
    return lambda num_blocks: MAKERS[request.param](tmp_path, num_blocks)


def fill(tier: BlockTier, *numbers: int) -> None:
    for number in numbers:
        tier.store(digest(number), data(number))


def read(tier: BlockTier, *numbers: int) -> list[bytes]:
    return tier.fetch([digest(number) for number in numbers]).result(10)


def test_what_was_stored_is_found_and_read(make: Callable[[int], BlockTier]) -> None:
    tier = make(8)
    fill(tier, 1, 2, 3)
    assert [tier.holds(digest(n)) for n in range(5)] == [False, True, True, True, False]
    assert [tier.wants(digest(n)) for n in range(5)] == [True, False, False, False, True]
    assert read(tier, 1, 2, 3) == [data(1), data(2), data(3)]
    assert read(tier, 2, 9, 3) == [data(2)], "the run ends before what is missing"
    assert read(tier, 9) == []
    tier.close()


def test_the_size_is_bounded_and_the_least_recently_used_go_first(make_one: Callable[[int], BlockTier]) -> None:
    tier = make_one(3)
    fill(tier, 1, 2, 3)
    assert read(tier, 1) == [data(1)]
    fill(tier, 4)
    assert [tier.holds(digest(n)) for n in (1, 2, 3, 4)] == [True, False, True, True]
    fill(tier, 5, 6, 7)
    assert read(tier, 5, 6, 7) == [data(5), data(6), data(7)]
    assert all(stats.num_bytes <= stats.max_bytes for stats in tier.stats())
    tier.close()


def test_of_a_run_its_beginning_is_kept_longest(make_one: Callable[[int], BlockTier]) -> None:
    tier = make_one(3)
    fill(tier, 1, 2, 3)
    read(tier, 1, 2, 3)
    fill(tier, 4)
    assert [tier.holds(digest(n)) for n in (1, 2, 3)] == [True, True, False]
    tier.close()


def test_a_block_larger_than_the_tier_is_not_kept(make: Callable[[int], BlockTier]) -> None:
    tier = make(0)
    fill(tier, 1)
    assert not tier.holds(digest(1))
    tier.close()


def test_counts(make: Callable[[int], BlockTier]) -> None:
    tier = make(8)
    fill(tier, 1, 2, 2)
    read(tier, 1, 2)
    read(tier, 1)
    tier.close()
    fastest, *others = tier.stats()
    assert (fastest.num_stored, fastest.num_loaded, fastest.num_failed) == (2, 3, 0)
    assert all((stats.num_stored, stats.num_loaded) == (2, 0) for stats in others)


def test_no_tier_keeps_nothing() -> None:
    tier = NoTier()
    fill(tier, 1)
    assert not tier.holds(digest(1))
    assert not tier.wants(digest(1))
    assert read(tier, 1) == []
    assert tier.stats() == ()


def test_the_slower_tier_serves_what_the_faster_one_dropped(tmp_path: Path) -> None:
    tier = Tiers(HostTier(2 * BLOCK), make_disk(tmp_path, 8))
    fill(tier, 1, 2, 3, 4)
    assert read(tier, 1, 2) == [data(1), data(2)]
    assert read(tier, 3, 4) == [data(3), data(4)]
    host, disk = tier.stats()
    assert (host.num_loaded, disk.num_loaded) == (2, 2)
    assert tier.is_durable
    tier.close()
