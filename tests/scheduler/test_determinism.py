"""The same request gives the same tokens, whatever happens around it. The reference needs no scheduler at all."""

import random

import pytest

from scheduler.request import Request
from tests.fakes.engine import reference_tokens
from tests.scheduler.harness import house, request


def mixed_requests() -> list[Request]:
    """Prompts that share prefixes, of lengths around block borders, some with several choices."""
    rng = random.Random(7)
    stem = [rng.randrange(97) for _ in range(40)]
    lengths = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 40]
    return [
        request(
            stem[:length] + [rng.randrange(97) for _ in range(rng.randrange(3))],
            rng.randrange(1, 20),
            seed=seed,
            num_choices=1 + seed % 3,
            stop_token_ids=frozenset({5, 6}),
            min_tokens=seed % 4,
        )
        for seed, length in enumerate(lengths * 2)
    ]


REQUESTS = mixed_requests()
EXPECTED = [[reference_tokens(r, choice) for choice in range(r.num_choices)] for r in REQUESTS]


@pytest.mark.parametrize("budget", [1, 7, 16, 512])
@pytest.mark.parametrize("num_blocks", [16, 24, 400])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("forecast_admission", [True, False])
async def test_in_a_crowd(budget: int, num_blocks: int, enable_prefix_caching: bool, forecast_admission: bool) -> None:
    settings = {
        "max_num_batched_tokens": budget,
        "enable_prefix_caching": enable_prefix_caching,
        "forecast_admission": forecast_admission,
    }
    async with house(num_blocks=num_blocks, **settings) as h:
        answers = await h.answers(REQUESTS)
        assert [[c.token_ids for c in choices] for choices in answers] == EXPECTED
        if num_blocks == 16 and budget > 1 and not forecast_admission:
            assert h.watcher.preempted, "this pool is meant to be too small"
        if num_blocks == 400:
            assert not h.watcher.preempted


@pytest.mark.parametrize("budget", [1, 7, 16, 512])
async def test_alone_cold_and_then_warm(budget: int) -> None:
    async with house(num_blocks=400, max_num_batched_tokens=budget) as h:
        for _ in range(2):
            for r, expected in zip(REQUESTS, EXPECTED, strict=True):
                assert [c.token_ids for c in await h.answer(r)] == expected


@pytest.mark.parametrize("block_size", [1, 2, 16])
async def test_at_other_block_sizes(block_size: int) -> None:
    async with house(num_blocks=64, block_size=block_size, max_num_batched_tokens=16) as h:
        answers = await h.answers(REQUESTS)
        assert [[c.token_ids for c in choices] for choices in answers] == EXPECTED


@pytest.mark.parametrize("num_drafts", [1, 3])
async def test_with_drafts_in_a_small_pool(num_drafts: int) -> None:
    async with house(num_blocks=17, max_num_batched_tokens=9, engine={"num_drafts": num_drafts}) as h:
        answers = await h.answers(REQUESTS)
        assert [[c.token_ids for c in choices] for choices in answers] == EXPECTED
