"""How prompts and streams share steps: what is learned, what follows from it, and what streams then feel."""

import pytest

from scheduler.observer import StepReport
from scheduler.pace import Pace, PaceMeter
from scheduler.predict import StepTimes
from tests.fakes.engine import reference_tokens
from tests.scheduler.harness import House, house, request

MODEL = {"latency_s": 0.010, "token_latency_s": 0.001}


def step(num_prompt: int, num_streams: int, seconds: float) -> StepReport:
    return StepReport(
        num_rows=num_streams + bool(num_prompt),
        num_prefill_tokens=num_prompt,
        num_decode_tokens=num_streams,
        num_output_tokens=num_streams,
        plan_s=0.0,
        engine_s=seconds,
        commit_s=0.0,
        num_running=1,
        num_waiting=0,
    )


def streams_of(h: House) -> list[tuple[int, int]]:
    """Of each step: rows of one token, and tokens of all others."""
    counts = [[len(row.token_ids) for row in batch.rows] for batch in h.engine.batches]
    return [(sum(n == 1 for n in some), sum(n for n in some if n > 1)) for some in counts]


def test_a_lone_prompt_gets_its_share_and_a_crowd_more() -> None:
    pace = Pace(1.5, StepTimes(0.008, 0.001), prompt_token_s=0.0005)
    assert pace.num_prompt_tokens(2, 1) == 10  # half of 10 ms at half a millisecond
    assert pace.num_prompt_tokens(2, 2) == 40  # twice their time for one more that waits
    assert pace.num_prompt_tokens(2, 5) == 160  # eight times for four more
    assert Pace(1.5, StepTimes(0.008, 0.001), 0.0005).num_prompt_tokens(16, 2) == 24, "no less than half"
    assert Pace(1.0, StepTimes(0.008, 0.001), 0.0005).num_prompt_tokens(2, 1) == 1, "a prompt is always read on"


def test_a_step_is_left_undisturbed_before_anything_is_known_and_when_streams_have_doubled() -> None:
    meter = PaceMeter(1.5)
    assert meter.num_prompt_tokens(0, 3) is None, "nobody streams"
    assert meter.num_prompt_tokens(2, 0) is None, "nobody reads"
    assert meter.num_prompt_tokens(2, 1) == 0
    meter.on_step(step(0, 2, 0.010))
    assert meter.num_prompt_tokens(2, 1) == 1, "a prompt's token costs what a stream's does until it is measured"
    meter.on_step(step(10, 2, 0.015))
    assert meter.num_prompt_tokens(2, 1) == 10
    assert meter.num_prompt_tokens(4, 1), "not so different"
    assert meter.num_prompt_tokens(5, 1) == 0


def test_what_a_prompt_token_costs_is_followed() -> None:
    meter = PaceMeter(2.0)
    meter.on_step(step(0, 2, 0.010))
    for _ in range(30):
        meter.on_step(step(10, 2, 0.020))
    assert meter.num_prompt_tokens(2, 1) == pytest.approx(10, abs=1)
    for _ in range(30):
        meter.on_step(step(10, 2, 0.060))  # the context has grown
    assert meter.num_prompt_tokens(2, 1) == 2


def test_an_undisturbed_step_is_taken_once_in_a_while() -> None:
    meter = PaceMeter(1.5)
    meter.on_step(step(0, 2, 0.010))
    answers = []
    for _ in range(200):
        answers.append(meter.num_prompt_tokens(2, 1))
        meter.on_step(step(4, 2, 0.012) if answers[-1] else step(0, 2, 0.010))
    assert answers.count(0) == 3


def test_without_a_stretch_nothing_is_limited() -> None:
    meter = PaceMeter(None)
    meter.on_step(step(0, 2, 0.010))
    assert meter.num_prompt_tokens(2, 1) is None


async def test_streams_hardly_feel_a_long_prompt() -> None:
    async with house(num_blocks=512, engine=MODEL, decode_stretch=1.5, max_num_batched_tokens=256) as h:
        streams = [request(range(i, i + 4), 400, seed=i) for i in range(4)]
        handles = [h.scheduler.submit(r) for r in streams]
        await h.steps(30)
        long = request(range(1000, 1600), 2)
        [answer] = await h.answer(long)
        assert answer.token_ids == reference_tokens(long)
        beside = [some for some in streams_of(h) if some[0] == 4 and some[1]]
        assert sum(tokens for _, tokens in beside) >= 590, "it was read beside the streams"
        longest_s = max(0.010 + 0.001 * sum(some) for some in beside)
        assert longest_s <= 1.6 * 0.014
        for handle in handles:
            handle.cancel()


async def test_a_burst_is_not_held_up_by_the_first_of_it() -> None:
    async with house(num_blocks=1024, engine=MODEL, decode_stretch=1.5, max_num_batched_tokens=64) as paced:
        requests = [request(range(100 * i, 100 * i + 60), 20, seed=i) for i in range(16)]
        answers = await paced.answers(requests)
        assert [a[0].token_ids for a in answers] == [reference_tokens(r) for r in requests]
        paced_s = paced.clock.now()
    async with house(num_blocks=1024, engine=MODEL, max_num_batched_tokens=64) as free:
        await free.answers(requests)
    assert paced_s <= 1.25 * free.clock.now()


async def test_a_prompt_is_read_at_full_speed_when_nobody_streams() -> None:
    async with house(engine=MODEL, decode_stretch=1.5, max_num_batched_tokens=64) as h:
        await h.answer(request(100, 1))
        assert [some for _, some in streams_of(h)] == [64, 36]


@pytest.mark.parametrize("stretch", [1.0, 1.2, 4.0])
async def test_pace_changes_no_token(stretch: float) -> None:
    async with house(num_blocks=48, engine=MODEL, decode_stretch=stretch, max_num_batched_tokens=16) as h:
        requests = [request(range(7 * i, 7 * i + 5 + 6 * (i % 5)), 4 + 5 * (i % 3), seed=i) for i in range(24)]
        answers = await h.answers(requests)
        assert [a[0].token_ids for a in answers] == [reference_tokens(r) for r in requests]
