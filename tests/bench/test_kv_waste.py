"""The waste of paged memory under the script's own mix of lengths: less than the 4 % that may be, and why."""

import argparse
import asyncio

import pytest

from bench.kv_waste import MIX, report, requests, serve


@pytest.mark.parametrize("seed", [1, 2])
def test_blocks_of_16_waste_less_than_4_percent(seed: int) -> None:
    args = argparse.Namespace(requests=60, seed=seed, pool_tokens=32_768, block_size=16, max_num_seqs=64)
    totals = asyncio.run(serve(args)).totals
    assert 0 < 1 - totals.used / totals.paged < 0.04
    assert 1 - totals.used / totals.whole > 0.6
    assert totals.paged < totals.reserved < totals.whole


def test_larger_blocks_waste_more() -> None:
    def waste(block_size: int) -> float:
        args = argparse.Namespace(requests=40, seed=1, pool_tokens=32_768, block_size=block_size, max_num_seqs=64)
        totals = asyncio.run(serve(args)).totals
        return 1 - totals.used / totals.paged

    assert waste(16) < waste(128)


def test_the_mix_is_what_it_says() -> None:
    assert sum(kind.share for kind in MIX) == pytest.approx(1.0)
    drawn = list(requests(200, 0))
    assert [r.prompt_ids for r, _ in drawn] == [r.prompt_ids for r, _ in requests(200, 0)]
    assert all(1 <= length <= request.max_tokens for request, length in drawn)
    assert len({request.prompt_ids[0] for request, _ in drawn}) == 200


def test_the_report_names_its_numbers() -> None:
    args = argparse.Namespace(requests=5, seed=0, pool_tokens=16_384, block_size=16, max_num_seqs=8)
    text = report(args, asyncio.run(serve(args)))
    assert "5 requests, seed 0" in text
    assert text.count("%") == 3
