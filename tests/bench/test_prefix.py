"""The arithmetic of the prefix benchmark, and small measurements against a server in this process."""

import argparse
import asyncio
import contextlib
import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from bench import noop_server, prefix_cost
from bench.noop import NoOpEngine
from bench.prefix import (
    BLOCK_SIZE,
    Holding,
    Warmth,
    Watched,
    holding_of,
    main,
    measure_users,
    measure_warm,
    users_cells,
    warm_cells,
)
from bench.prefix_cost import Cost, Questions, cells, measure_cost, median_interval
from bench.processes import ServerFailed
from bench.targets import HttpTarget
from bench.workloads import Prose, Question

PROSE = Prose(tuple(b"one two three four five six seven eight nine ten "))


def state(referenced, *prefixes):
    told = [{"blocks": blocks, "holders": holders} for blocks, holders in prefixes]
    return {"blocks": {"referenced": referenced}, "top_prefixes": told}


def target_of(url):
    target = HttpTarget("ours", url, lambda ids: bytes(ids).decode())
    target.learn_dialect(Question(PROSE.token_ids[:32], 8))
    return target


def test_the_bar_is_on_the_medians():
    row = warm_cells(Warmth((5.0, 1.0, 2.0), (0.1, 9.0, 0.4)), 2000)
    assert row == ["2,000 tokens", "3", "2.000", "0.400", "0.200", "0.2 met"]
    assert warm_cells(Warmth((1.0,), (0.201,)), 2000)[-1] == "0.2 missed"


def test_the_cost_is_the_median_of_the_pairs():
    cost = Cost(without_s=(1.0, 2.0, 1.0), with_s=(1.01, 2.5, 1.02), num_tokens=1000)
    assert cost.ratios == pytest.approx([1.01, 1.02, 1.25])
    assert cost.ratio == pytest.approx(1.02)
    assert cost.token_us == pytest.approx(20.0)
    assert cells("m", cost, "1% missed")[4:6] == ["1.0200", "1.010 .. 1.250"]


def test_the_interval_narrows_with_more_pairs():
    assert median_interval([3.0]) == (3.0, 3.0)
    low, high = median_interval(range(1, 101))
    assert (low, high) == (40, 61)  # the exact ranks for a hundred


def test_the_fullest_moment_counts():
    states = [state(900, (64, 3)), state(120, (64, 50), (30, 70)), state(100, (64, 50)), state(5)]
    assert holding_of(states, 64) == Holding(50, 120)
    assert users_cells(Holding(50, 64 + 100), 50, 1024) == [
        *("50", "64 blocks", "50 users", "164", "3300", "one copy: met")
    ]
    assert users_cells(Holding(50, 64 + 101), 50, 1024)[-1] == "one copy: missed"
    assert users_cells(Holding(49, 64 + 98), 50, 1024)[-1] == "one copy: missed"


@pytest.mark.parametrize("states", [[], [state(0)], [state(9, (63, 4))]])
def test_users_that_nobody_saw_are_no_figure(states):
    with pytest.raises(ServerFailed, match="gone before"):
        holding_of(states, 64)


def test_cold_and_warm_go_through_a_server(live_url):
    warmth = measure_warm(target_of(live_url), PROSE, 300, 2)
    assert len(warmth.cold_s) == len(warmth.warm_s) == 2
    assert min(*warmth.cold_s, *warmth.warm_s) > 0


@pytest.mark.parametrize(("found", "message"), [((0, 0), "0 tokens cold and 0 warm"), ((99, 300), "99 tokens cold")])
def test_beginnings_that_are_not_found_as_meant_are_no_figure(found, message):
    told = iter(found)
    target = SimpleNamespace(
        run=lambda arrival, questions, seed: SimpleNamespace(
            records=[SimpleNamespace(error=None, num_cached_tokens=next(told))]
        )
    )
    with pytest.raises(ServerFailed, match=message):
        measure_warm(target, PROSE, 300, 1)


async def test_users_are_watched_while_they_are_answered(monkeypatch):
    watched = Watched("http://here")
    monkeypatch.setattr("bench.prefix.get", lambda url: json.dumps({"url": url}).encode())

    class Asker:
        async def ask(self, request, due_s):
            while len(watched.states) < 3:  # noqa: ASYNC110  until it was looked at
                await asyncio.sleep(0.001)
            return request

    assert await watched.send(Asker(), [b"a", b"b"], None) == [b"a", b"b"]
    assert watched.states[:3] == [{"url": "http://here/v1/kv"}] * 3


def test_users_go_through_a_server(live_url):
    """Whether anybody looks in time is the machine's business."""
    with contextlib.suppress(ServerFailed):
        holding = measure_users(target_of(live_url), PROSE, 6, 20 * BLOCK_SIZE)
        assert 1 <= holding.num_holders <= 6
        assert 20 <= holding.num_blocks <= 20 + 6 * 2


def test_rounds_with_and_without_the_cache(monkeypatch):
    questions = Questions(PROSE, 3, 40, 8)
    engine = NoOpEngine(range(100), questions.num_blocks, 49_152, hops=False)
    loaded = replace(noop_server.load(), engine=engine)
    cost = asyncio.run(measure_cost(loaded, questions, 4, time.perf_counter))
    assert len(cost.ratios) == 4
    assert cost.num_tokens == 3 * 48
    monkeypatch.setattr(Questions, "of_round", lambda self, number: [Question(PROSE.token_ids[:40], 8)] * 3)
    with pytest.raises(ServerFailed, match="was to share nothing"):
        asyncio.run(measure_cost(loaded, questions, 4, time.perf_counter))


def test_a_failure_is_one_line(monkeypatch, capsys):
    def fail(args: argparse.Namespace):
        raise ServerFailed("no server")

    monkeypatch.setattr("bench.prefix.tables", fail)
    assert main(["--only", "warm"]) == 1
    assert capsys.readouterr().err == "bench.prefix: no server\n"
    assert prefix_cost.BAR == 1.01
