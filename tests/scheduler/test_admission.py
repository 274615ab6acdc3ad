"""What is refused at the door, and what the refusal says."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from scheduler.admission import DrainMeter
from scheduler.config import SchedulerConfig
from scheduler.errors import ContextTooLong, Draining, NeverFits, QueueFull
from scheduler.observer import StepReport
from scheduler.request import Request
from tests.scheduler.harness import House, house, read, request


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(30, 3), (32, 1), (33, 0), (40, 1)])
async def test_what_exceeds_the_context_is_refused(num_prompt: int, max_tokens: int) -> None:
    async with house(max_model_len=32) as h:
        with pytest.raises(ContextTooLong, match="maximum context length is 32") as refusal:
            h.scheduler.submit(request(num_prompt, max_tokens))
        assert refusal.value.num_prompt_tokens == num_prompt


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(30, 2), (31, 1), (32, 0), (1, 31)])
async def test_what_fills_the_context_exactly_is_served(num_prompt: int, max_tokens: int) -> None:
    async with house(max_model_len=32) as h:
        [answer] = await h.answer(request(num_prompt, max_tokens))
        assert len(answer.token_ids) == max_tokens


async def test_what_could_never_fit_the_pool_is_refused_though_it_fits_the_context() -> None:
    async with house(num_blocks=5) as h:
        with pytest.raises(NeverFits, match="20 tokens of KV cache") as refusal:
            h.scheduler.submit(request(15, 6))
        assert refusal.value.num_tokens == 21
        await h.answer(request(15, 5))
        await h.answer(request(15, 5, num_choices=7))


async def test_a_full_queue_refuses_and_takes_again_when_it_has_drained() -> None:
    async with house(max_num_seqs=1, max_num_queued_reqs=2) as h:
        running = h.scheduler.submit(request(4, 6))
        await h.steps(1)
        waiting = [h.scheduler.submit(request(4, 2)) for _ in range(2)]
        with pytest.raises(QueueFull) as refusal:
            h.scheduler.submit(request(4, 2))
        assert (refusal.value.reason, refusal.value.queue_depth, refusal.value.limit) == ("requests", 2, 2)
        assert 1.0 <= refusal.value.retry_after_s <= 60.0
        await read(running)
        for handle in waiting:
            await read(handle)
        await h.answer(request(4, 2))


async def test_the_queue_is_bounded_in_prompt_tokens_too() -> None:
    async with house(max_num_seqs=1, max_num_queued_tokens=20) as h:
        running = h.scheduler.submit(request(4, 6))
        await h.steps(1)
        too_long_for_the_bound = h.scheduler.submit(request(30, 1))
        assert h.scheduler.stats().num_waiting_tokens == 30
        with pytest.raises(QueueFull, match="tokens: 30 of 20"):
            h.scheduler.submit(request(1, 1))
        too_long_for_the_bound.cancel()
        fits = h.scheduler.submit(request(12, 1))
        with pytest.raises(QueueFull):
            h.scheduler.submit(request(9, 1))
        also_fits = h.scheduler.submit(request(8, 1))
        for handle in (running, fits, also_fits):
            await read(handle)


@pytest.mark.parametrize(("max_num_seqs", "bound"), [(4, 2), (1, 3), (3, 0)])
async def test_a_burst_fills_the_free_slots_before_it_fills_the_queue(max_num_seqs: int, bound: int) -> None:
    async with house(max_num_seqs=max_num_seqs, max_num_queued_reqs=bound) as h:
        burst = [h.scheduler.submit(request(4, 3, seed=i)) for i in range(max_num_seqs + bound)]
        with pytest.raises(QueueFull) as refusal:
            h.scheduler.submit(request(4, 3))
        assert (refusal.value.queue_depth, refusal.value.limit) == (bound, bound)
        await h.steps(1)
        with pytest.raises(QueueFull):
            h.scheduler.submit(request(4, 3))
        for handle in burst:
            await read(handle)
        await h.answer(request(4, 3))


async def test_tokens_that_find_a_free_slot_do_not_fill_the_queue() -> None:
    async with house(max_num_seqs=2, max_num_queued_tokens=10) as h:
        burst = [h.scheduler.submit(request(20, 2)) for _ in range(2)]
        burst.append(h.scheduler.submit(request(8, 2)))
        with pytest.raises(QueueFull, match="tokens: 8 of 10"):
            h.scheduler.submit(request(3, 2))
        burst.append(h.scheduler.submit(request(2, 2)))
        for handle in burst:
            await read(handle)


async def test_the_work_of_a_burst_that_finds_slots_is_ahead_too() -> None:
    settings = {"max_num_seqs": 2, "max_num_queued_reqs": 1, "max_num_batched_tokens": 102}
    async with house(num_blocks=256, engine={"latency_s": 1.0}, **settings) as h:
        await h.answer(request(10, 1))
        burst = [h.scheduler.submit(request(n, 5)) for n in (200, 200, 50)]
        with pytest.raises(QueueFull) as refusal:
            h.scheduler.submit(request(4, 1))
        assert refusal.value.retry_after_s == pytest.approx(7, abs=1.5), "two steps of prompt, and an answer"
        for handle in burst:
            await read(handle)


async def test_preempted_sequences_and_further_choices_do_not_fill_the_queue() -> None:
    async with house(max_num_seqs=1, max_num_queued_reqs=1) as h:
        handle = h.scheduler.submit(request(4, 6, num_choices=5))
        await h.steps(2)
        assert h.scheduler.stats().num_waiting == 4
        assert h.scheduler.stats().num_waiting_tokens == 0
        await read(h.scheduler.submit(request(4, 2)))
        await read(handle)


def step_report(num_tokens: int, engine_s: float) -> StepReport:
    return StepReport(1, num_tokens, 0, 0, 0.0, engine_s, 0.0, 1, 0)


def test_the_drain_rate_forgets() -> None:
    meter = DrainMeter(memory_s=5.0)
    for _ in range(100):
        meter.on_step(step_report(100, 1.0))
    for _ in range(40):
        meter.on_step(step_report(10, 1.0))
    assert meter.tokens_per_s == pytest.approx(10.0, rel=0.01)


@dataclass(frozen=True)
class Crowd:
    """Many that come at once, to `num_slots` and a queue for `num_queued`; lengths in tokens."""

    prompt: tuple[int, int] = (4, 40)
    answer: tuple[int, int] = (5, 60)
    num_slots: int = 8
    num_queued: int = 24
    num_blocks: int = 400
    engine: dict[str, float] = field(default_factory=lambda: {"latency_s": 0.2})


CROWDS = {
    "a step costs the same": Crowd(),
    "a token costs the same": Crowd(engine={"latency_s": 0.0, "token_latency_s": 0.01}),
    "both cost something": Crowd(engine={"latency_s": 0.1, "token_latency_s": 0.01}),
    "long prompts": Crowd(prompt=(100, 200), answer=(2, 10), engine={"latency_s": 0.01, "token_latency_s": 0.01}),
    "long answers": Crowd(prompt=(2, 4), answer=(100, 200), engine={"latency_s": 0.04}),
    "a small pool": Crowd(num_blocks=40),
    "a queue for few": Crowd(num_queued=2, engine={"latency_s": 1.0}),
    "no queue": Crowd(answer=(30, 40), num_queued=0, engine={"latency_s": 1.0}),
}


@pytest.mark.parametrize("crowd", CROWDS.values(), ids=CROWDS.keys())
@pytest.mark.parametrize("num_steps_later", [0, 10])
async def test_who_comes_back_after_retry_after_finds_the_queue_drained(crowd: Crowd, num_steps_later: int) -> None:
    rng = random.Random(7)

    def someone() -> Request:
        prompt_ids = rng.choices(range(1, 97), k=rng.randint(*crowd.prompt))
        return request(prompt_ids, rng.randint(*crowd.answer), seed=rng.randrange(10**6))

    async with house(
        num_blocks=crowd.num_blocks,
        max_num_seqs=crowd.num_slots,
        max_num_batched_tokens=64,
        max_num_queued_reqs=crowd.num_queued,
        engine=dict(crowd.engine),
    ) as h:
        for _ in range(2):  # what the house knows of answers and steps
            await h.answers([someone() for _ in range(crowd.num_slots)])
        accepted = [h.scheduler.submit(someone()) for _ in range(crowd.num_slots + crowd.num_queued)]
        await h.steps(h.engine.num_steps + num_steps_later)
        told_s = told(h, someone)
        began_s = h.clock.now()
        while is_full(h, crowd):  # noqa: ASYNC110  gives the loop under test its turns
            await asyncio.sleep(0)
        took_s = h.clock.now() - began_s
        for handle in accepted:
            await read(handle)
    assert 1.0 < told_s < 60.0, "else a bound says it, not the estimate"
    assert took_s / 2 <= told_s <= took_s * 2, (told_s, took_s)


def told(h: House, someone: Callable[[], Request]) -> float:
    """What the first hears that is refused."""
    for _ in range(1000):
        try:
            h.scheduler.submit(someone())
        except QueueFull as refusal:
            return refusal.retry_after_s
    raise AssertionError("nobody is refused")


def is_full(h: House, crowd: Crowd) -> bool:
    """Whether somebody still waits, or would have to."""
    stats = h.scheduler.stats()
    return stats.num_waiting > 0 or (not crowd.num_queued and stats.num_running == crowd.num_slots)


async def test_a_draining_scheduler_refuses() -> None:
    async with house() as h:
        h.scheduler.drain()
        with pytest.raises(Draining):
            h.scheduler.submit(request())


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_num_queued_tokens", "block_size"])
def test_settings_out_of_range_are_named(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        SchedulerConfig(**{name: 0})
