"""Too few blocks: who gives way, who comes back, and that everybody is answered."""

from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from scheduler.config import SchedulingPolicy
from scheduler.request import PreemptionReason
from tests.fakes.engine import reference_tokens
from tests.scheduler.harness import House, house, read, request


def tight(**settings: Any) -> AbstractAsyncContextManager[House]:
    """A house that lets in whoever fits now, so that memory runs out later."""
    return house(**{"forecast_admission": False} | settings)


async def test_the_last_in_order_gives_way_and_continues_with_the_same_tokens() -> None:
    async with tight(num_blocks=6) as h:
        requests = [request(range(10 * i, 10 * i + 6), 12, seed=i) for i in range(2)]
        answers = await h.answers(requests)
        assert [a[0].token_ids for a in answers] == [reference_tokens(r) for r in requests]
        assert h.watcher.preempted
        assert set(h.watcher.preempted) == {requests[1].request_id}
        by_id = {report.request.request_id: report for report in h.watcher.ends}
        assert by_id[requests[1].request_id].num_preemptions == len(h.watcher.preempted)
        assert by_id[requests[0].request_id].num_preemptions == 0


async def test_a_returning_sequence_tells_the_engine_its_outputs() -> None:
    async with tight(num_blocks=6, enable_prefix_caching=False) as h:
        requests = [request(range(10 * i, 10 * i + 6), 12, seed=i) for i in range(2)]
        await h.answers(requests)
        again = [s for b in h.engine.batches for s in b.starts if s.output_ids]
        assert again
        expected = reference_tokens(requests[1])
        assert all(list(s.output_ids) == expected[: len(s.output_ids)] for s in again)


async def test_nobody_is_let_in_by_a_step_that_preempts() -> None:
    async with tight(num_blocks=6, policy=SchedulingPolicy.PRIORITY) as h:
        preempted_at: list[int] = []
        h.watcher.on_preemption = lambda *_: preempted_at.append(h.engine.num_steps)  # type: ignore[method-assign]
        running = [h.scheduler.submit(request(range(10 * i, 10 * i + 6), 12, seed=i, priority=i)) for i in range(2)]
        await h.steps(5)
        urgent = h.scheduler.submit(request(range(50, 54), 2, seed=9, priority=-1))
        for handle in (urgent, *running):
            await read(handle)
        entered = [number for number, b in enumerate(h.engine.batches) if any(s.params.seed == 9 for s in b.starts)]
        assert entered[0] == preempted_at[0] + 1


async def test_who_runs_has_room_to_grow_before_others_come_in() -> None:
    async with tight(num_blocks=3) as h:
        await h.answers([request(4, 4, seed=0), request(range(20, 28), 2, seed=1)])
        assert not h.watcher.preempted


async def test_a_step_whose_only_row_gives_way_is_planned_anew() -> None:
    async with tight(
        num_blocks=5, max_num_batched_tokens=3, policy=SchedulingPolicy.PRIORITY, max_steps_in_flight=1
    ) as h:
        late, early = request(2, 18, seed=0, priority=1), request(range(20, 32), 1, seed=1)
        late_handle = h.scheduler.submit(late)
        await h.steps(1)
        early_handle = h.scheduler.submit(early)
        await h.steps(2)
        h.engine.num_drafts = 2  # from now on the decoding sequence takes the whole budget
        [answer] = await read(early_handle)
        assert answer.token_ids == reference_tokens(early)
        [answer] = await read(late_handle)
        assert answer.token_ids == reference_tokens(late)
        assert h.watcher.preempted == [late.request_id]


@pytest.mark.parametrize("max_num_batched_tokens", [1, 2, 5, 64])
async def test_a_pool_that_holds_one_request_serves_all_in_order(max_num_batched_tokens: int) -> None:
    async with tight(num_blocks=4, max_num_batched_tokens=max_num_batched_tokens) as h:
        requests = [request(range(10 * i, 10 * i + 8), 8, seed=i) for i in range(5)]
        answers = await h.answers(requests)
        assert [a[0].token_ids for a in answers] == [reference_tokens(r) for r in requests]
        assert [report.request for report in h.watcher.ends] == requests


@pytest.mark.parametrize("num_blocks", [4, 5, 6, 9])
@pytest.mark.parametrize("num_prompt", [6, 8])
async def test_choices_that_fit_only_one_at_a_time_run_one_after_another(num_blocks: int, num_prompt: int) -> None:
    async with tight(num_blocks=num_blocks) as h:
        requests = [request(range(i, i + num_prompt), 16 - num_prompt, seed=i, num_choices=4) for i in (0, 40)]
        answers = await h.answers(requests)
        for r, choices in zip(requests, answers, strict=True):
            assert [a.token_ids for a in choices] == [reference_tokens(r, choice) for choice in range(4)]


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
async def test_prompt_logprobs_survive_a_preemption_without_duplicates(enable_prefix_caching: bool) -> None:
    async with house(
        forecast_admission=False, num_blocks=7, max_num_batched_tokens=3, enable_prefix_caching=enable_prefix_caching
    ) as h:
        handles = [
            h.scheduler.submit(request(range(30 * i, 30 * i + 13), 12, seed=i, prompt_logprobs=0)) for i in range(2)
        ]
        for handle in handles:
            async for _ in handle:
                assert [lp.logprob for lp in handle.prompt_logprobs] == [-float(i) for i in range(1, 13)]
        assert h.watcher.preempted or handles[1].times.scheduled_s >= handles[0].times.finished_s  # type: ignore[operator]


async def test_prompt_logprobs_continue_when_the_prompt_itself_was_preempted() -> None:
    async with house(
        forecast_admission=False, num_blocks=8, max_num_batched_tokens=3, enable_prefix_caching=False
    ) as h:
        first = h.scheduler.submit(request(4, 20))
        second = h.scheduler.submit(request(range(40, 64), 4, prompt_logprobs=0))
        collected: list[int] = []
        h.watcher.on_preemption = lambda *_: collected.append(len(second.prompt_logprobs))  # type: ignore[method-assign]
        async for _ in second:
            assert [lp.token_id for lp in second.prompt_logprobs] == list(range(41, 64))
        assert 0 < collected[0] < 23
        assert collected[0] % 3, "the chunks after the preemption must fall differently"
        assert first.is_done


async def test_priority_decides_who_is_served_first_and_who_gives_way() -> None:
    async with house(max_num_seqs=1, policy=SchedulingPolicy.PRIORITY) as h:
        urgency = [5, 0, -3, 0]
        await h.answers([request(range(i, i + 4), 3, seed=i, priority=p) for i, p in enumerate(urgency)])
        assert [report.request.sampling.seed for report in h.watcher.ends] == [2, 1, 3, 0]
    async with tight(num_blocks=6, policy=SchedulingPolicy.PRIORITY) as h:
        late, early = request(6, 12, seed=0, priority=1), request(range(20, 26), 12, seed=1)
        await h.answers([late, early])
        assert set(h.watcher.preempted) == {late.request_id}


async def test_fcfs_ignores_priorities() -> None:
    async with house(max_num_seqs=1) as h:
        await h.answers([request(range(i, i + 4), 3, seed=i, priority=-i) for i in range(4)])
        assert [report.request.sampling.seed for report in h.watcher.ends] == [0, 1, 2, 3]


async def test_a_long_request_is_not_overtaken_for_ever_by_short_ones() -> None:
    async with tight(num_blocks=10) as h:
        h.scheduler.submit(request(range(90, 94), 12, seed=99))
        await h.steps(2)
        long = h.scheduler.submit(request(30, 10, seed=1))
        short = [h.scheduler.submit(request(range(50 + i, 54 + i), 4, seed=2)) for i in range(20)]
        async for _ in long:
            pass
        assert not any(handle.is_done for handle in short)
        for handle in short:
            async for _ in handle:
                pass


async def test_only_as_much_as_fits_is_admitted_so_that_little_is_computed_twice() -> None:
    async with tight(num_blocks=40) as h:
        requests = [request(range(20 * i, 20 * i + 16), 8, seed=i) for i in range(30)]
        await h.answers(requests)
        needed = sum(len(r.prompt_ids) + r.max_tokens - 1 for r in requests)
        assert sum(b.num_tokens for b in h.engine.batches) < 1.2 * needed


async def test_of_equals_the_one_that_loses_least_gives_way() -> None:
    """The second has computed much more than the third when the first needs a block."""
    async with tight(num_blocks=16, max_num_seqs=3, max_steps_in_flight=1) as h:
        first = h.scheduler.submit(request(range(10, 22), 20, seed=1))
        second = h.scheduler.submit(request(range(30, 54), 16, seed=2))
        await h.steps(3)
        third = h.scheduler.submit(request(range(60, 68), 8, seed=3))
        for handle in (first, second, third):
            await read(handle)
        assert h.watcher.preempted[0] == third.request.request_id
    async with tight(num_blocks=16, max_num_seqs=3, max_steps_in_flight=1) as h:
        first = h.scheduler.submit(request(range(10, 22), 20, seed=1))
        second = h.scheduler.submit(request(range(60, 68), 16, seed=2))
        await h.steps(3)
        third = h.scheduler.submit(request(range(30, 50), 8, seed=3))
        for handle in (first, second, third):
            await read(handle)
        assert h.watcher.preempted[0] == second.request.request_id


async def test_a_less_urgent_one_gives_way_before_a_cheaper_one() -> None:
    async with tight(num_blocks=16, max_num_seqs=3, policy=SchedulingPolicy.PRIORITY) as h:
        first = h.scheduler.submit(request(range(10, 22), 20, seed=1, priority=0))
        second = h.scheduler.submit(request(range(60, 68), 16, seed=2, priority=0))
        await h.steps(3)
        third = h.scheduler.submit(request(range(30, 50), 8, seed=3, priority=1))
        for handle in (first, second, third):
            await read(handle)
        assert h.watcher.preempted[0] == third.request.request_id


@pytest.mark.parametrize("max_preemptions", [0, 1, 2])
@pytest.mark.parametrize("policy", list(SchedulingPolicy))
@pytest.mark.parametrize("max_num_batched_tokens", [2, 5, 64])
async def test_nobody_is_preempted_more_often_than_allowed(
    max_preemptions: int, policy: SchedulingPolicy, max_num_batched_tokens: int
) -> None:
    settings = {"policy": policy, "max_num_batched_tokens": max_num_batched_tokens, "max_preemptions": max_preemptions}
    async with tight(num_blocks=14, max_num_seqs=8, enable_prefix_caching=False, **settings) as h:
        requests = [
            request(range(5 * i, 5 * i + 3), 30, seed=i, priority=-(i % 4), num_choices=1 + i % 2) for i in range(16)
        ]
        answers = await h.answers(requests)
        for r, choices in zip(requests, answers, strict=True):
            assert [a.token_ids for a in choices] == [reference_tokens(r, choice) for choice in range(r.num_choices)]
        assert all(end.num_preemptions <= max_preemptions * end.request.num_choices for end in h.watcher.ends)
        assert bool(h.watcher.preempted) == (max_preemptions > 0)


async def test_a_sequence_that_keeps_what_it_needs_makes_the_one_ahead_give_way() -> None:
    async with tight(num_blocks=12, max_num_seqs=4, max_preemptions=1, policy=SchedulingPolicy.PRIORITY) as h:
        low = h.scheduler.submit(request(range(10, 14), 30, seed=1, priority=1))
        await h.steps(2)
        high = [h.scheduler.submit(request(range(30 * i, 30 * i + 12), 20, seed=i)) for i in (1, 2)]
        for handle in (*high, low):
            await read(handle)
        assert low.num_preemptions == 1
        assert PreemptionReason.OUTRANKED in h.watcher.preemption_reasons


async def test_reserved_blocks_survive_rejected_drafts() -> None:
    async with tight(num_blocks=14, max_preemptions=1, engine={"num_drafts": 3}) as h:
        requests = [request(range(9 * i, 9 * i + 5), 25, seed=i) for i in range(6)]
        answers = await h.answers(requests)
        assert [a[0].token_ids for a in answers] == [reference_tokens(r) for r in requests]
        assert h.watcher.preempted
