"""Which gaps a long prompt disturbs, and a whole measurement against a server in this process."""

import argparse
from types import SimpleNamespace

import pytest

from bench.figures import Record
from bench.mixture import HEAD, Gaps, Interrupted, cells, gaps_of, measure
from bench.processes import ServerFailed
from bench.targets import HttpTarget
from bench.workloads import Prose

LOCAL = SimpleNamespace(prose=Prose(tuple(b"one two three four five six seven eight nine ten ")))


def args(**changes):
    return argparse.Namespace(**{"streams": 2, "num_in": 300, "num_out": 200, "repeats": 2} | changes)


def test_gaps_are_sorted_by_the_time_that_the_long_prompt_waits():
    stream = Record(0.0, 9.0, first_s=1.0, gaps_s=(1.0, 1.5, 0.25, 2.0), num_output_tokens=5)
    long = Record(due_s=2.5, ended_s=5.0, first_s=3.6)
    gaps = gaps_of([stream, long])
    assert gaps == Gaps((1.0, 2.0), (1.5, 0.25), pytest.approx(1.1))
    assert gaps_of([stream, Record(20.0, 22.0, first_s=21.0)]).disturbed_s == ()


def test_the_bar_is_on_the_p99():
    row = dict(zip(HEAD, cells(Gaps((0.01, 0.01), (0.015, 0.019), 0.5), args()), strict=True))
    assert row["p99 ratio"] == "1.90"
    assert row["bar"] == "2 x met"
    assert row["disturbed p50 / p99 ms"] == "17.0 / 19.0"


async def test_the_last_request_comes_later():
    class Asker:
        asked: list[bytes] = []  # noqa: RUF012  one object, one test

        async def ask(self, request, due_s):
            self.asked.append((request, due_s))
            return request

    exchanges = await Interrupted(0.02).send(Asker(), [b"a", b"b", b"long"], None)
    assert exchanges == [b"a", b"b", b"long"]
    assert Asker.asked[-1][0] == b"long"
    assert Asker.asked[-1][1] - Asker.asked[0][1] >= 0.02


def test_streams_and_a_long_prompt_go_through_a_server(live_url):
    target = HttpTarget("ours", live_url, lambda ids: bytes(ids).decode())
    gaps = measure(target, LOCAL, args())
    # How far the streams are when the long prompt comes is the machine's business.
    assert 0 < len(gaps.idle_s) + len(gaps.disturbed_s) <= 2 * 2 * 199
    assert gaps.long_ttft_s > 0


def test_a_failing_request_is_told(live_url):
    target = HttpTarget("ours", live_url, lambda ids: bytes(ids).decode())
    with pytest.raises(ServerFailed, match="1 requests failed, the first with: status 400"):
        measure(target, LOCAL, args(num_in=3000))
