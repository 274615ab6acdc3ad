"""What running sequences will still need: the arithmetic, what is learnt, and what it is good for."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.forecast import MIN_ANSWERS, PRIOR_TOKENS, ArrivalMeter, Holding, LengthForecast, peak_tokens
from scheduler.handle import RequestTimes
from scheduler.observer import RequestReport
from scheduler.request import FinishReason, Request
from tests.fakes.engine import reference_tokens
from tests.scheduler.harness import house, read, request

HOLDINGS = st.lists(st.builds(Holding, st.integers(0, 50), st.integers(0, 30)), max_size=8)


@given(HOLDINGS)
def test_the_peak_is_what_stepping_through_time_finds(holdings: list[Holding]) -> None:
    most = 0
    for step in range(1 + max((h.num_growth for h in holdings), default=0)):
        most = max(most, sum(h.num_tokens + step for h in holdings if h.num_growth >= step))
    assert peak_tokens(holdings) == most


def ended(num_tokens: int, *reasons: FinishReason) -> RequestReport:
    return RequestReport(request(4, 9), reasons, num_tokens, 0, 0, RequestTimes(0.0))


def test_lengths_are_learnt_from_answers_that_ended_by_themselves() -> None:
    forecast = LengthForecast()
    assert forecast.expected(0) == PRIOR_TOKENS, "nothing is known yet"
    for _ in range(MIN_ANSWERS):
        forecast.on_request_end(ended(3, FinishReason.CANCELLED))
    assert forecast.expected(0) == PRIOR_TOKENS, "a cancelled answer says nothing"
    for _ in range(MIN_ANSWERS):
        forecast.on_request_end(ended(20, FinishReason.STOP, FinishReason.LENGTH))
    assert forecast.expected(0) == 10
    assert forecast.expected(4) == 6
    assert forecast.expected(10) == 10, "longer than all before: as much again"


def test_the_longer_an_answer_is_the_longer_those_it_is_compared_with() -> None:
    forecast = LengthForecast()
    for length in (10, 10, 10, 10, 10, 10, 100, 200, 300):
        forecast.observe(length)
    assert [forecast.expected(n) for n in (0, 9, 10, 150)] == [10, 1, 190, 50]


def test_old_answers_are_forgotten() -> None:
    forecast = LengthForecast(window=20)
    for length in [5] * 20 + [50] * 20:
        forecast.observe(length)
    assert forecast.expected(0) == 50


def arrivals(*moments_s: float) -> ArrivalMeter:
    meter = ArrivalMeter(span_s=10.0)
    for moment_s in moments_s:
        meter.on_arrival(moment_s)
    return meter


def test_who_came_steadily_is_expected_to_go_on() -> None:
    meter = arrivals(*(2.0 * number for number in range(1, 11)))
    assert meter.interval_s(20.0) == pytest.approx(2.0)
    assert meter.interval_s(28.5) == pytest.approx(10.0), "one in the last span, five before: only one is expected"
    assert meter.interval_s(31.0) is None, "nobody for a whole span"


def test_a_crowd_is_no_steady_load() -> None:
    assert arrivals(*[1.0] * 50).interval_s(2.0) is None
    assert arrivals(5.0, *[15.0] * 50).interval_s(20.0) == pytest.approx(10.0)


def test_of_very_many_arrivals_only_the_last_are_looked_at() -> None:
    meter = arrivals(*(number / 1000 for number in range(5000)))
    assert meter.interval_s(5.0) == pytest.approx(0.001, rel=0.05)


def test_what_is_left_to_compute_of_a_prompt() -> None:
    meter = arrivals()
    assert meter.num_tokens == 1
    meter.on_prefix_lookup(100, 80)
    meter.on_prefix_lookup(41, 0)
    assert meter.num_tokens == 30


async def load(seed: int, *, forecast_admission: bool) -> tuple[int, int, int]:
    """Answers of random length from a pool far too small for all slots: (preemptions, steps, tokens computed)."""
    rng, requests = random.Random(seed), list[Request]()
    for number in range(120):
        prompt = [rng.randrange(97) for _ in range(rng.randrange(4, 24))]
        requests.append(request(prompt, 200, seed=number, stop_token_ids=frozenset({0, 1})))
    settings = {"max_num_seqs": 32, "max_num_batched_tokens": 256, "forecast_admission": forecast_admission}
    async with house(num_blocks=160, **settings) as h:
        answers = await h.answers(requests)
        assert [a[0].token_ids for a in answers] == [reference_tokens(r) for r in requests]
        return len(h.watcher.preempted), h.engine.num_steps, sum(b.num_tokens for b in h.engine.batches)


async def test_the_forecast_prevents_preemption_storms_at_little_cost() -> None:
    num_preempted, num_steps, num_tokens = await load_over(2, forecast_admission=False)
    num_preempted_now, num_steps_now, num_tokens_now = await load_over(2, forecast_admission=True)
    assert num_preempted > 100, "this load is meant to be a storm"
    assert num_preempted_now * 5 <= num_preempted
    assert num_steps_now <= 1.1 * num_steps
    assert num_tokens_now < 0.95 * num_tokens, "what is not preempted is not computed twice"


async def load_over(num_seeds: int, *, forecast_admission: bool) -> tuple[int, ...]:
    runs = [await load(seed, forecast_admission=forecast_admission) for seed in range(num_seeds)]
    return tuple(map(sum, zip(*runs, strict=True)))


async def test_a_pool_with_room_for_all_admits_all_at_once() -> None:
    async with house(num_blocks=400, max_num_seqs=16) as h:
        await h.answers([request(range(i, i + 8), 60, seed=i) for i in range(16)])
        assert len(h.engine.batches[0].rows) == 16


@pytest.mark.parametrize("max_tokens", [4, 100])
async def test_no_more_is_expected_of_an_answer_than_it_may_give(max_tokens: int) -> None:
    async with house(num_blocks=40, max_num_seqs=16) as h:
        await h.answers([request(range(i, i + 8), max_tokens, seed=i) for i in range(8)])
        assert len(h.engine.batches[0].rows) == (8 if max_tokens == 4 else 3)


async def test_whoever_is_first_is_let_in_whatever_is_forecast() -> None:
    async with house(num_blocks=10) as h:
        for number in range(3):
            [answer] = await h.answer(r := request(8, 32, seed=number))
            assert answer.token_ids == reference_tokens(r)
        handles = [h.scheduler.submit(request(8, 32, seed=number)) for number in range(3)]
        for handle in handles:
            await read(handle)
        assert not h.watcher.preempted
