"""Two steps in flight: what is planned before the step before is done, what becomes of rows that turn out void.

That the answers are those of the loop in step is what the rest of this folder says, run both ways.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from engine.batch import PENDING, Batch, StepOutput
from engine.errors import EngineDead, StepError
from scheduler.request import FinishReason
from tests.fakes.engine import reference_tokens
from tests.scheduler.harness import House, house, read, request


@pytest.fixture(autouse=True)
def _once(steps_in_flight: int) -> None:
    if steps_in_flight == 1:
        pytest.skip("about two steps in flight")


def ahead(**settings: Any) -> AbstractAsyncContextManager[House]:
    return house(max_steps_in_flight=2, **settings)


def starts_of(batches: Sequence[Batch]) -> list[list[tuple[int, int]]]:
    """(start, first token) of each row."""
    return [[(row.start, row.token_ids[0]) for row in batch.rows] for batch in batches]


async def hold_two(h: House) -> None:
    """Hold the engine's outputs back from now on, until it has been given two more than it has answered."""
    h.engine.gate = asyncio.Event()
    async with asyncio.timeout(5):
        while h.engine.num_in_flight < 2:  # noqa: ASYNC110  gives the loop under test its turns
            await asyncio.sleep(0)
    await h.turns(100)


def hold_output_of(h: House, step: int) -> asyncio.Event:
    """Hold back what one step gives, until the event is set."""
    let_go, original = asyncio.Event(), h.engine.step

    async def held(batch: Batch) -> StepOutput:
        output = await original(batch)
        if batch.step == step:
            await let_go.wait()
        return output

    h.engine.step = held  # type: ignore[method-assign]
    return let_go


def open_gate(h: House) -> None:
    assert h.engine.gate is not None
    h.engine.gate.set()


async def test_a_step_begins_with_the_token_that_the_one_before_samples() -> None:
    async with ahead() as h:
        [answer] = await h.answer(r := request(10, 4))
        assert answer.token_ids == reference_tokens(r)
        assert starts_of(h.engine.batches) == [[(0, 1)], [(10, PENDING)], [(11, PENDING)], [(12, PENDING)]]
        assert h.engine.most_in_flight == 2


async def test_chunks_of_a_prompt_follow_each_other_without_waiting() -> None:
    async with ahead(max_num_batched_tokens=4) as h:
        r = request(10, 2, prompt_logprobs=0)
        handle = h.scheduler.submit(r)
        [answer] = await read(handle)
        assert answer.token_ids == reference_tokens(r)
        assert [lp.token_id for lp in handle.prompt_logprobs] == list(range(2, 11))
        assert starts_of(h.engine.batches) == [[(0, 1)], [(4, 5)], [(8, 9)], [(10, PENDING)]]


async def test_nothing_is_computed_beyond_the_last_token_allowed() -> None:
    async with ahead() as h:
        await h.answers([request([n], n, seed=n) for n in range(1, 9)])
        last = {row.slot: row.start for batch in h.engine.batches for row in batch.rows}
        assert sum(len(batch.rows) for batch in h.engine.batches) == sum(range(1, 9))
        assert sorted(last.values()) == list(range(8))


async def test_a_stop_makes_the_row_in_flight_void_and_frees_its_blocks_when_that_has_landed() -> None:
    full = reference_tokens(request(7, 12))
    stop = full[2]
    assert full.index(stop) == 2
    async with ahead() as h:
        let_go = hold_output_of(h, 4)
        handle = h.scheduler.submit(request(7, 12, stop_token_ids=frozenset({stop})))
        [answer] = await read(handle)
        assert (answer.token_ids, answer.reason) == (full[:3], FinishReason.STOP)
        assert h.scheduler.stats().num_running == 0
        assert h.pool.stats().num_referenced == 3
        let_go.set()
        await h.turns(3)
        assert h.pool.stats().num_referenced == 0
        assert h.engine.num_steps == 4
        assert [step.num_output_tokens for step in h.watcher.steps] == [1, 1, 1, 0]


async def test_a_slot_of_a_void_row_is_not_given_away_before_it_has_landed() -> None:
    stops = frozenset(range(0, 97, 5))
    async with ahead(max_num_seqs=2) as h:
        in_flight, original = dict[int, Batch](), h.engine.step

        async def watched(batch: Batch) -> StepOutput:
            flying = {row.slot for earlier in in_flight.values() for row in earlier.rows}
            assert not flying & {start.slot for start in batch.starts}
            in_flight[batch.step] = batch
            output = await original(batch)
            del in_flight[batch.step]
            return output

        h.engine.step = watched  # type: ignore[method-assign]
        requests = [request([n, n + 1], 30, seed=n, stop_token_ids=stops) for n in range(12)]
        answers = await h.answers(requests)
        assert [a[0].token_ids for a in answers] == [reference_tokens(r) for r in requests]
        assert h.engine.most_in_flight == 2


@pytest.mark.parametrize("end", ["cancel", "finish", "deadline"])
async def test_an_end_from_outside_waits_for_both_steps(end: str) -> None:
    async with ahead() as h:
        handle = h.scheduler.submit(request(9, 20, deadline_s=h.clock.now() + 100))
        await hold_two(h)
        if end == "deadline":
            h.clock.advance(200)
            h.scheduler._deadline_passed()
        else:
            _ = handle.cancel() if end == "cancel" else handle.finish(0)
        assert handle.is_done
        assert h.pool.stats().num_referenced > 0
        open_gate(h)
        [answer] = await read(handle)
        assert answer.token_ids == reference_tokens(request(9, 20))[: len(answer.token_ids)]
        await h.turns(50)
        assert h.pool.stats().num_referenced == 0
        assert h.engine.num_in_flight == 0


@pytest.mark.parametrize("error", [StepError, ValueError])
async def test_a_lost_step_fails_its_requests_once_and_the_one_behind_it_serves_the_others(
    error: type[Exception],
) -> None:
    def fail(batch: Batch) -> None:
        if batch.step == 3:
            raise error("step 3 broke")

    async with ahead(max_num_seqs=3, max_num_batched_tokens=8, engine={"fail": fail}) as h:
        first = h.scheduler.submit(request(4, 20, num_choices=2))
        await hold_two(h)
        second = h.scheduler.submit(r := request(range(40, 46), 5, seed=3))
        open_gate(h)
        answers = await read(first)
        assert [a.reason for a in answers] == [FinishReason.FAILED] * 2
        assert all("step 3 broke" in (a.error or "") for a in answers)
        [answer] = await read(second)
        assert any(row.token_ids[0] == PENDING for row in h.engine.batches[3].rows), "void, behind the lost step"
        assert answer.reason is FinishReason.FAILED or answer.token_ids == reference_tokens(r)
        assert len(h.watcher.ends) == 2
        [again] = await h.answer(request(4, 20))
        assert again.token_ids == reference_tokens(request(4, 20))


async def test_two_lost_steps_in_a_row_fail_everybody_once() -> None:
    def fail(batch: Batch) -> None:
        if batch.step in (3, 4):
            raise StepError("broke")

    async with ahead(engine={"fail": fail}) as h:
        answers = await h.answers([request([n] * 4, 20, seed=n) for n in range(3)])
        assert [a[0].reason for a in answers] == [FinishReason.FAILED] * 3
        assert len(h.watcher.ends) == 3
        assert h.scheduler.stats().unhealthy is None


async def test_an_engine_that_dies_with_two_steps_in_flight() -> None:
    def fail(batch: Batch) -> None:
        if batch.step >= 3:
            raise EngineDead("lost")

    async with ahead(engine={"fail": fail}) as h:
        answers = await h.answers([request([n] * 4, 20, seed=n) for n in range(3)])
        assert [a[0].reason for a in answers] == [FinishReason.FAILED] * 3
        assert h.engine.num_steps == 4
        assert len(h.watcher.ends) == 3


async def test_a_row_error_makes_only_its_own_next_row_void() -> None:
    def row_error(row: Any, token_ids: list[int]) -> str | None:
        return "no token allowed" if row.slot == 1 and row.start == 8 else None

    async with ahead(engine={"row_error": row_error}) as h:
        requests = [request(range(i, i + 6), 9, seed=i) for i in range(3)]
        answers = await h.answers(requests)
        assert [a[0].reason for a in answers] == [FinishReason.LENGTH, FinishReason.FAILED, FinishReason.LENGTH]
        assert [a[0].token_ids for a in answers[::2]] == [reference_tokens(r) for r in requests[::2]]
        assert answers[1][0].token_ids == reference_tokens(requests[1])[:3]


async def test_nobody_gives_way_while_a_step_is_in_flight() -> None:
    async with ahead(num_blocks=6, forecast_admission=False) as h:
        in_flight: list[int] = []
        h.watcher.on_preemption = lambda *_: in_flight.append(h.engine.num_in_flight)  # type: ignore[method-assign]
        requests = [request(range(10 * i, 10 * i + 6), 12, seed=i) for i in range(2)]
        answers = await h.answers(requests)
        assert [a[0].token_ids for a in answers] == [reference_tokens(r) for r in requests]
        assert in_flight
        assert not any(in_flight)
        assert h.engine.most_in_flight == 2


async def test_drafts_are_verified_before_anything_follows_them() -> None:
    async with ahead(engine={"num_drafts": 3}) as h:
        requests = [request([n] * 5, 15, seed=n) for n in range(4)]
        answers = await h.answers(requests)
        assert [a[0].token_ids for a in answers] == [reference_tokens(r) for r in requests]
        drafting = [n for n, batch in enumerate(h.engine.batches) if any(row.num_drafts for row in batch.rows)]
        assert len(drafting) > 3
        for number in drafting:
            after = h.engine.batches[min(number + 1, len(h.engine.batches) - 1)]
            assert not any(row.token_ids[0] == PENDING for row in after.rows)
        await h.answer(requests[0])


async def test_all_that_run_stay_in_step_with_each_other() -> None:
    async with ahead(max_num_batched_tokens=16) as h:
        handles = []
        for n in range(5):
            handles.append(h.scheduler.submit(request([n] * 4, 40, seed=n)))
            await h.steps(3 * n + 3)
        for handle in handles:
            assert (await read(handle))[0].token_ids == reference_tokens(handle.request)
        crowded = [batch for batch in h.engine.batches if len(batch.rows) == 5]
        assert len(crowded) > 25


@pytest.mark.parametrize("how", ["stop", "cancelled"])
async def test_an_end_of_the_loop_with_two_steps_in_flight(how: str) -> None:
    async with ahead(clean=how == "stop") as h:
        handles = [h.scheduler.submit(request([n] * 5, 50)) for n in range(2)]
        await hold_two(h)
        _ = h.scheduler.stop() if how == "stop" else h.task.cancel()
        if how == "stop":
            await h.turns(20)
            assert not h.task.done(), "two steps are in flight"
            open_gate(h)
        for handle in handles:
            reason = (await read(handle))[0].reason
            assert reason is (FinishReason.CANCELLED if how == "stop" else FinishReason.FAILED)
        await asyncio.wait([h.task], timeout=5)
        assert h.task.done()
        assert h.pool.stats().num_referenced == 0


async def test_stats_tell_how_long_the_older_step_has_been_running() -> None:
    async with ahead(engine={"latency_s": 0.0}) as h:
        handle = h.scheduler.submit(request(5, 6))
        await hold_two(h)
        h.clock.advance(7.0)
        assert h.scheduler.stats().step_running_s == 7.0
        open_gate(h)
        await read(handle)
        await h.turns(30)
        assert h.scheduler.stats().step_running_s is None
