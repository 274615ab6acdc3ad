"""What is refused at the door, and what the refusal says."""

import pytest

from scheduler.admission import DrainMeter
from scheduler.config import SchedulerConfig
from scheduler.errors import ContextTooLong, Draining, NeverFits, QueueFull
from scheduler.observer import StepReport
from tests.scheduler.harness import house, read, request


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


async def test_the_work_of_a_burst_that_finds_slots_is_no_reason_to_wait() -> None:
    async with house(max_num_seqs=2, max_num_queued_reqs=1, engine={"latency_s": 1.0}) as h:
        await h.answer(request(10, 1))  # ten tokens a second
        burst = [h.scheduler.submit(request(n, 1)) for n in (200, 200, 50)]
        with pytest.raises(QueueFull) as refusal:
            h.scheduler.submit(request(4, 1))
        assert refusal.value.retry_after_s == pytest.approx((50 + 1) / 10.0)
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


def test_retry_after_follows_the_queue_and_the_drain_rate() -> None:
    meter = DrainMeter()
    assert meter.retry_after_s(0, 0) == 1.0
    assert meter.retry_after_s(10, 2000) == 1.0, "nothing is known yet"
    for _ in range(100):
        meter.on_step(step_report(100, 0.5))
    assert meter.tokens_per_s == pytest.approx(200.0)
    assert meter.retry_after_s(10, 2000) == pytest.approx(10.0)
    assert meter.retry_after_s(10, 10**6) == 60.0


def test_the_drain_rate_forgets() -> None:
    meter = DrainMeter(memory_s=5.0)
    for _ in range(100):
        meter.on_step(step_report(100, 1.0))
    for _ in range(40):
        meter.on_step(step_report(10, 1.0))
    assert meter.tokens_per_s == pytest.approx(10.0, rel=0.01)


async def test_answers_of_mean_length_count_as_work_ahead() -> None:
    async with house(max_num_seqs=1, max_num_queued_reqs=3, engine={"latency_s": 0.5}) as h:
        for _ in range(3):
            await h.answer(request(1, 20))
        running = h.scheduler.submit(request(1, 20))
        await h.steps(h.engine.num_steps + 1)
        waiting = [h.scheduler.submit(request(1, 20)) for _ in range(3)]
        with pytest.raises(QueueFull) as refusal:
            h.scheduler.submit(request(1, 20))
        assert refusal.value.retry_after_s == pytest.approx(3 * 21 * 0.5, rel=0.05)
        for handle in (running, *waiting):
            await read(handle)


async def test_a_draining_scheduler_refuses() -> None:
    async with house() as h:
        h.scheduler.drain()
        with pytest.raises(Draining):
            h.scheduler.submit(request())


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_num_queued_tokens", "block_size"])
def test_settings_out_of_range_are_named(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        SchedulerConfig(**{name: 0})
