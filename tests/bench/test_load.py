"""Questions and arrivals: lengths, repeatability, distinct beginnings, closed and open loops."""

import asyncio
import math
import random
import statistics
from itertools import pairwise

import pytest

from bench.arrivals import Closed, Poisson
from bench.client import clock
from bench.plan import PRESETS, Plan, distinct_seed
from bench.sse import Exchange
from bench.workloads import CHAT_IN, CHAT_OUT, NUM_OWN, Prose, mix_named

PROSE = Prose(tuple(range(100, 900)))


@pytest.mark.parametrize("name", ["128/64", "2000/64", "sharegpt", "prefix"])
def test_questions_are_the_same_for_the_same_seed_and_have_beginnings_of_their_own_for_another(name):
    mix = mix_named(name)
    first, again, other = (mix.questions(PROSE, 8, seed) for seed in ("a", "a", "b"))
    assert first == again
    beginnings = {question.prompt_ids[:NUM_OWN] for question in first}
    assert not beginnings & {question.prompt_ids[:NUM_OWN] for question in other}
    assert all(len(question.prompt_ids) + question.num_out <= mix.max_tokens for question in first)


def test_fixed_lengths_are_kept_even_beyond_the_text():
    [question] = mix_named("2000/64").questions(PROSE, 1, "a")
    assert (len(question.prompt_ids), question.num_out) == (2000, 64)


def test_a_shared_prefix_is_shared_by_all_and_the_rest_is_not():
    questions = mix_named("prefix").questions(PROSE, 6, "a")
    assert len({question.prompt_ids[:512] for question in questions}) == 1
    assert len({question.prompt_ids[512:] for question in questions}) == 6


def test_conversation_lengths_have_their_means_and_limits():
    rng = random.Random(1)
    for lengths in (CHAT_IN, CHAT_OUT):
        drawn = [lengths.draw(rng) for _ in range(20_000)]
        assert min(drawn) >= 4
        assert max(drawn) <= lengths.most
        assert statistics.mean(drawn) == pytest.approx(lengths.mean, rel=0.2)
        assert statistics.median(drawn) == pytest.approx(lengths.mean * math.exp(-(lengths.sigma**2) / 2), rel=0.1)


@pytest.mark.parametrize("name", ["", "128", "0/4", "a/b", "128/64/2"])
def test_an_unknown_mix_is_refused(name):
    with pytest.raises(ValueError, match="is no mix"):
        mix_named(name)


def test_poisson_gaps_are_exponential_at_the_rate_asked_for():
    moments = Poisson(5.0).moments(20_000, random.Random(3))
    gaps = [after - before for before, after in pairwise(moments)]
    assert moments[0] == 0.0
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.05)


class CountingAsker:
    """Answers after a while, and remembers how many were asked at once."""

    def __init__(self, delay_s):
        self.delay_s = delay_s
        self.num_open = self.most_open = 0
        self.order = []

    async def ask(self, request, due_s):
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        self.order.append(request)
        await asyncio.sleep(self.delay_s)
        self.num_open -= 1
        return Exchange(due_s, [(clock(), request)], clock())


async def test_closed_loop_users_have_one_request_each_under_way():
    asker = CountingAsker(0.001)
    requests = [b"%d" % number for number in range(10)]
    exchanges = await Closed(3).send(asker, requests, random.Random(0))
    assert asker.most_open == 3
    assert asker.order == requests
    assert [exchange.pieces[0][1] for exchange in exchanges] == requests


async def test_open_loop_waits_for_nobody_and_counts_from_when_a_request_was_due():
    asker = CountingAsker(0.5)
    rng = random.Random(7)
    due = Poisson(1000.0).moments(20, random.Random(7))
    exchanges = await Poisson(1000.0).send(asker, [b"x"] * 20, rng)
    assert asker.most_open == 20
    start_s = exchanges[0].due_s
    assert [exchange.due_s - start_s for exchange in exchanges] == pytest.approx(due, abs=1e-6)


def test_a_plan_gives_each_user_whole_rounds_and_open_loops_a_share_of_the_capacity():
    plan = Plan(users=(1, 8, 32), shares=(0.5,), rates=(9.0,), extras=(("prefix", 4),), repeats=3)
    closed = plan.closed_cells()
    assert [(cell.arrival.num_users, cell.num_requests, cell.repeats) for cell in closed] == [
        (1, 4, 3), (8, 16, 3), (32, 32, 3), (4, 8, 1),
    ]  # fmt: skip
    assert [cell.arrival.rate_per_s for cell in plan.open_cells(capacity_per_s=4.0)] == [2.0, 9.0]


def test_repeats_differ_and_servers_do_not():
    [cell, *_] = PRESETS["short"].closed_cells()
    assert distinct_seed(cell, 0) == distinct_seed(cell, 0) != distinct_seed(cell, 1)
