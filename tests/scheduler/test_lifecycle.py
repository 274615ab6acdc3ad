"""Running, idling, draining, stopping, and an engine that fails: nobody hangs."""

import asyncio

import pytest

from engine.batch import Batch, Row
from engine.errors import EngineDead, StepError
from scheduler.errors import Draining, Unhealthy
from scheduler.request import FinishReason
from tests.fakes.engine import reference_tokens
from tests.scheduler.harness import house, read, request


async def test_an_idle_loop_takes_no_steps_and_wakes_for_the_next_request() -> None:
    async with house() as h:
        await h.answer(request(5, 3))
        steps = h.engine.num_steps
        loop, passes = asyncio.get_running_loop(), 0
        original = h.scheduler._planner.plan

        def counting() -> object:
            nonlocal passes
            passes += 1
            return original()

        h.scheduler._planner.plan = counting  # type: ignore[method-assign,assignment]
        await asyncio.sleep(0.05)
        assert (h.engine.num_steps, passes) == (steps, 0)
        assert not [timer for timer in loop._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]
        await h.answer(request(5, 3))
        assert h.engine.num_steps == steps + 3


async def test_drain_finishes_what_was_accepted_and_returns() -> None:
    async with house(max_num_seqs=1) as h:
        requests = [request(range(i, i + 5), 4, seed=i) for i in range(3)]
        readers = [asyncio.create_task(h.answer(r)) for r in requests]
        await h.steps(1)
        h.scheduler.drain()
        assert h.scheduler.stats().is_draining
        for r, reader in zip(requests, readers, strict=True):
            [answer] = await reader
            assert answer.token_ids == reference_tokens(r)
        await asyncio.wait_for(h.task, 5)


async def test_a_drain_returns_when_the_last_request_expires() -> None:
    async with house() as h:
        handle = h.scheduler.submit(request(5, 50, deadline_s=h.clock.now() + 0.025))
        await h.steps(1)
        h.scheduler.drain()
        await asyncio.wait_for(h.task, 5)
        assert (await read(handle))[0].reason is FinishReason.DEADLINE


async def test_drain_when_idle_returns_at_once() -> None:
    async with house() as h:
        await asyncio.sleep(0)
        h.scheduler.drain()
        await asyncio.wait_for(h.task, 5)


async def test_stop_cancels_everything_and_returns() -> None:
    async with house(max_num_seqs=1) as h:
        handles = [h.scheduler.submit(request(5, 50, num_choices=2)) for _ in range(3)]
        await h.steps(3)
        h.scheduler.stop()
        await asyncio.wait_for(h.task, 5)
        for handle in handles:
            assert [a.reason for a in await read(handle)] == [FinishReason.CANCELLED] * 2
        with pytest.raises(Draining):
            h.scheduler.submit(request())


async def test_a_loop_cancelled_from_outside_leaves_nobody_waiting() -> None:
    async with house(max_num_seqs=1) as h:
        handles = [h.scheduler.submit(request(5, 50)) for _ in range(2)]
        h.engine.gate = asyncio.Event()
        await h.steps(1)
        h.task.cancel()
        for handle in handles:
            [answer] = await read(handle)
            assert answer.reason is FinishReason.FAILED
            assert answer.error
        with pytest.raises(Unhealthy):
            h.scheduler.submit(request())


async def test_a_bug_in_the_planner_leaves_nobody_waiting() -> None:
    async with house() as h:
        handle = h.scheduler.submit(request(5, 50))
        await h.steps(1)

        def broken() -> None:
            raise RuntimeError("broken")

        h.scheduler._planner.plan = broken  # type: ignore[method-assign,assignment]
        h.scheduler._planner.plan_ahead = broken  # type: ignore[method-assign,assignment]
        [answer] = await read(handle)
        assert answer.reason is FinishReason.FAILED
        with pytest.raises(RuntimeError, match="broken"):
            await h.task


def fail_at(*steps: int, error: type[Exception] = StepError):  # type: ignore[no-untyped-def]
    def fail(batch: Batch) -> None:
        if batch.step in steps:
            raise error(f"step {batch.step} broke")

    return fail


@pytest.mark.parametrize("error", [StepError, ValueError])
async def test_a_failed_step_fails_its_requests_and_the_loop_goes_on(error: type[Exception]) -> None:
    async with house(engine={"fail": fail_at(3, error=error)}, max_num_seqs=2) as h:
        requests = [request(range(i, i + 6), 5, seed=i) for i in range(4)]
        answers = await h.answers(requests)
        assert [a[0].reason for a in answers] == [FinishReason.FAILED] * 2 + [FinishReason.LENGTH] * 2
        assert "step 3 broke" in (answers[0][0].error or "")
        assert [a[0].token_ids for a in answers[2:]] == [reference_tokens(r) for r in requests[2:]]
        assert len(h.watcher.ends) == 4
        assert h.scheduler.stats().unhealthy is None


async def test_a_failed_step_fails_all_choices_of_its_requests() -> None:
    async with house(engine={"fail": fail_at(2)}, max_num_batched_tokens=4) as h:
        answers = await h.answer(request(16, 5, num_choices=3))
        assert [a.reason for a in answers] == [FinishReason.FAILED] * 3


async def test_blocks_written_by_a_failed_step_are_not_found_again() -> None:
    async with house(engine={"fail": fail_at(3)}) as h:
        await h.answer(request(8, 2))
        await h.answer(request(8, 2))
        handle = h.scheduler.submit(r := request(8, 2))
        [answer] = await read(handle)
        assert handle.num_cached_tokens == 4, "the block the failed step was writing is no longer trusted"
        assert answer.token_ids == reference_tokens(r)


async def test_failures_in_a_row_turn_unhealthy(steps_in_flight: int) -> None:
    async with house(engine={"fail": fail_at(*range(1, 99))}, max_num_seqs=1, max_engine_failures=3) as h:
        answers = await h.answers([request(5, 5) for _ in range(6)])
        assert all(a[0].reason is FinishReason.FAILED for a in answers)
        assert h.engine.num_steps == 2 + steps_in_flight
        with pytest.raises(Unhealthy, match="3 engine steps in a row"):
            h.scheduler.submit(request())
        assert h.scheduler.stats().unhealthy


async def test_failures_apart_do_not_add_up() -> None:
    async with house(engine={"fail": fail_at(1, 4, 7, 10)}, max_num_seqs=1, max_engine_failures=2) as h:
        await h.answers([request(5, 2) for _ in range(8)])
        assert h.scheduler.stats().unhealthy is None


async def test_a_dead_engine_fails_everybody_at_once(steps_in_flight: int) -> None:
    async with house(engine={"fail": fail_at(2, error=EngineDead)}, max_num_seqs=1) as h:
        answers = await h.answers([request(5, 5) for _ in range(3)])
        assert all(a[0].reason is FinishReason.FAILED and "dead" in (a[0].error or "") for a in answers)
        assert h.engine.num_steps == 1 + steps_in_flight
        with pytest.raises(Unhealthy, match="step 2 broke"):
            h.scheduler.submit(request())
        assert not h.task.done(), "a drain still ends it in order"


async def test_a_row_error_fails_that_sequence_alone() -> None:
    def row_error(row: Row, token_ids: list[int]) -> str | None:
        return "no token allowed" if row.slot == 1 and row.start >= 8 else None

    async with house(engine={"row_error": row_error}) as h:
        requests = [request(range(i, i + 6), 5, seed=i) for i in range(3)]
        answers = await h.answers(requests)
        assert [a[0].reason for a in answers] == [FinishReason.LENGTH, FinishReason.FAILED, FinishReason.LENGTH]
        assert answers[1][0].error == "no token allowed"
        assert answers[2][0].token_ids == reference_tokens(requests[2])


async def test_an_output_that_does_not_match_its_batch_is_an_engine_failure() -> None:
    async with house() as h:
        original = h.engine.step_sync
        h.engine.step_sync = lambda batch: original(Batch(99, batch.starts, batch.copies, batch.rows))  # type: ignore[method-assign]
        [answer] = await h.answer(request(5, 5))
        assert answer.reason is FinishReason.FAILED


async def test_stats_tell_how_long_a_step_has_been_running() -> None:
    async with house() as h:
        assert h.scheduler.stats().step_running_s is None
        handle = h.scheduler.submit(request(5, 3))
        h.engine.gate = asyncio.Event()
        await h.steps(1)
        h.clock.advance(7.0)
        assert h.scheduler.stats().step_running_s == 7.0
        h.engine.gate.set()
        await read(handle)
        assert h.scheduler.stats().drain_tokens_per_s > 0


async def test_events_can_be_taken_without_waiting() -> None:
    async with house() as h:
        handle = h.scheduler.submit(request(4, 3))
        assert handle.take() == []
        await h.turns()
        events = handle.take()
        assert len([token_id for event in events for token_id in event.token_ids]) == 3
        assert [event.finish_reason for event in events] == [None, None, FinishReason.LENGTH]
        assert handle.take() == []
        assert [event async for event in handle] == []
