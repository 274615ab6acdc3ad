"""How a choice ends: stop tokens, limits, finish, cancel, deadlines. Exactly once, and its blocks come back."""

import asyncio
from typing import Any

import pytest

from engine.batch import Row, RowOutput
from kvpool.pool import BlockPool
from kvpool.table import BlockTable
from scheduler.commit import Verdict, judge
from scheduler.handle import RequestHandle, RequestTimes
from scheduler.request import FinishReason
from scheduler.sequence import Group, Sequence
from tests.fakes.engine import reference_tokens
from tests.scheduler.harness import House, house, read, request


async def test_length_at_max_tokens() -> None:
    async with house() as h:
        [answer] = await h.answer(request(5, 7))
        assert len(answer.token_ids) == 7
        assert answer.reason is FinishReason.LENGTH


async def test_a_stop_token_ends_the_output_and_is_part_of_it() -> None:
    full = reference_tokens(request(5, 12))
    async with house() as h:
        [answer] = await h.answer(request(5, 12, stop_token_ids=frozenset({full[3]})))
        cut = full.index(full[3]) + 1
        assert (answer.token_ids, answer.reason, answer.stop_token_id) == (full[:cut], FinishReason.STOP, full[3])


async def test_a_stop_wins_over_length_at_the_border() -> None:
    full = reference_tokens(request(5, 4))
    assert full.index(full[3]) == 3
    async with house() as h:
        [answer] = await h.answer(request(5, 4, stop_token_ids=frozenset({full[3]})))
        assert (answer.reason, answer.stop_token_id) == (FinishReason.STOP, full[3])


async def test_min_tokens_holds_stops_back() -> None:
    stops = frozenset(range(0, 97, 2))
    async with house() as h:
        [answer] = await h.answer(r := request(5, 40, min_tokens=6, stop_token_ids=stops))
        assert answer.token_ids == reference_tokens(r)
        assert answer.reason is FinishReason.STOP
        assert not stops & set(answer.token_ids[:6])


async def test_a_complete_constraint_stops() -> None:
    def stopped(row: Row, token_ids: list[int]) -> bool:
        return row.start >= 7

    async with house(engine={"row_stopped": stopped}) as h:
        [answer] = await h.answer(request(5, 12))
        assert (len(answer.token_ids), answer.reason, answer.stop_token_id) == (4, FinishReason.STOP, None)


async def test_finish_ends_one_choice_with_stop_and_leaves_the_others() -> None:
    async with house() as h:
        handle = h.scheduler.submit(request(5, 12, num_choices=2))
        seen = 0
        async for events in handle:
            seen += sum(len(e.token_ids) for e in events if e.choice == 0)
            if seen:
                handle.finish(0)
                break
        answers = await read(handle)
        [report] = h.watcher.ends
        assert report.finish_reasons == (FinishReason.STOP, FinishReason.LENGTH)
        assert len(answers[1].token_ids) == 12
        assert report.num_output_tokens == seen + len(answers[0].token_ids) + 12


async def test_finish_and_cancel_are_harmless_when_done() -> None:
    async with house() as h:
        handle = h.scheduler.submit(request(5, 2))
        await read(handle)
        handle.finish(0)
        handle.cancel()
        assert handle.is_done
        assert len(h.watcher.ends) == 1


async def hold_step(h: House) -> None:
    """Keep a step in flight."""
    h.engine.gate = asyncio.Event()
    while not h.engine.in_flight:  # noqa: ASYNC110  gives the loop under test its turns
        await asyncio.sleep(0)


def let_go(h: House) -> None:
    assert h.engine.gate is not None
    h.engine.gate.set()
    h.engine.gate = None


@pytest.mark.parametrize("end", ["cancel", "finish"])
async def test_an_end_during_a_step_is_told_at_once_but_frees_blocks_only_after_it(end: str) -> None:
    async with house() as h:
        handle = h.scheduler.submit(request(9, 20))
        await h.steps(2)
        await hold_step(h)
        _ = handle.cancel() if end == "cancel" else handle.finish(0)
        assert handle.is_done
        assert h.scheduler.stats().num_running == 0
        assert h.pool.stats().num_referenced > 0, "the step in flight still writes there"
        let_go(h)
        [answer] = await read(handle)
        await h.turns()
        assert h.pool.stats().num_referenced == 0
        assert answer.reason is (FinishReason.CANCELLED if end == "cancel" else FinishReason.STOP)
        assert h.watcher.steps[-1].num_output_tokens == 0, "tokens of an ended choice are dropped"


async def test_cancel_in_the_middle_of_a_prompt() -> None:
    async with house(max_num_batched_tokens=4) as h:
        handle = h.scheduler.submit(request(40, 5))
        await h.steps(3)
        handle.cancel()
        [answer] = await read(handle)
        assert (answer.token_ids, answer.reason) == ([], FinishReason.CANCELLED)
        await h.turns()
        assert h.engine.num_steps <= 4


async def test_cancel_while_waiting() -> None:
    async with house(max_num_seqs=1) as h:
        running = h.scheduler.submit(request(5, 30))
        waiting = h.scheduler.submit(request(range(50, 60), 5, num_choices=3))
        await h.steps(2)
        assert h.scheduler.stats().num_waiting == 3
        waiting.cancel()
        assert h.scheduler.stats().num_waiting == 0
        assert [a.reason for a in await read(waiting)] == [FinishReason.CANCELLED] * 3
        assert waiting.times.scheduled_s is None
        running.cancel()


async def test_a_deadline_ends_a_running_request_and_keeps_its_tokens() -> None:
    async with house(engine={"latency_s": 1.0}) as h:
        [answer] = await h.answer(r := request(5, 50, deadline_s=1004.5))
        assert answer.reason is FinishReason.DEADLINE
        assert answer.token_ids == reference_tokens(r)[: len(answer.token_ids)]
        assert len(answer.token_ids) == 5


async def test_deadlines_end_waiting_requests() -> None:
    async with house(max_num_seqs=1, engine={"latency_s": 1.0}) as h:
        busy = h.scheduler.submit(request(5, 20))
        reasons = await h.answers([request(6, 5, deadline_s=1003.0), request(7, 5, queue_deadline_s=1005.0)])
        assert [a[0].reason for a in reasons] == [FinishReason.DEADLINE] * 2
        assert h.clock.now() < 1020.0
        await read(busy)


async def test_a_queue_deadline_is_met_by_beginning() -> None:
    async with house(engine={"latency_s": 1.0}) as h:
        [answer] = await h.answer(request(5, 10, queue_deadline_s=1002.0))
        assert answer.reason is FinishReason.LENGTH


async def test_a_deadline_passes_on_time_during_a_stuck_step() -> None:
    async with house() as h:
        handle = h.scheduler.submit(request(5, 10, deadline_s=h.clock.now() + 0.02))
        await hold_step(h)
        h.clock.advance(0.02)
        [answer] = await read(handle)
        assert answer.reason is FinishReason.DEADLINE
        let_go(h)


async def test_ended_requests_are_no_longer_watched() -> None:
    async with house() as h:
        await h.answer(request(5, 3, deadline_s=h.clock.now() + 1e6, queue_deadline_s=h.clock.now() + 2e6))
        assert h.scheduler._roster.deadlines.next_s is None


@pytest.mark.parametrize(
    ("tokens", "stopped", "fields", "expected"),
    [
        ((1,), False, {}, Verdict(1)),
        ((9,), False, {}, Verdict(1, FinishReason.STOP, 9)),
        ((1, 9, 2), False, {}, Verdict(2, FinishReason.STOP, 9)),
        ((9, 1, 9, 2), False, {"min_tokens": 2}, Verdict(3, FinishReason.STOP, 9)),
        ((9, 9), False, {"min_tokens": 2}, Verdict(2)),
        ((1, 2, 3, 4, 5, 6), False, {}, Verdict(5, FinishReason.LENGTH)),
        ((1, 2, 3, 4, 9), False, {}, Verdict(5, FinishReason.STOP, 9)),
        ((1, 2, 3, 4, 5, 9), False, {}, Verdict(5, FinishReason.LENGTH)),
        ((1, 2), True, {}, Verdict(2, FinishReason.STOP)),
        ((1, 2, 3, 4, 5), True, {}, Verdict(5, FinishReason.STOP)),
        ((1, 2, 3, 4, 5, 6), True, {}, Verdict(5, FinishReason.LENGTH)),
        ((), False, {}, Verdict(0)),
    ],
)
def test_where_a_rows_tokens_are_cut(
    tokens: tuple[int, ...], stopped: bool, fields: dict[str, Any], expected: Verdict
) -> None:
    r = request(3, 5, stop_token_ids=frozenset({9}), **fields)
    group = Group(RequestHandle(r, RequestTimes(0.0), lambda _: None, lambda: None), 0)
    sequence = Sequence(group, r, 0, (0, 0, 0), list(r.prompt_ids), BlockTable(BlockPool(1), 4))
    assert judge(sequence, RowOutput(tokens, stopped=stopped)) == expected


@pytest.mark.parametrize("position", range(1, 9))
async def test_logprobs_stay_aligned_with_the_tokens_kept(position: int) -> None:
    full = reference_tokens(request(5, 12))
    async with house(engine={"num_drafts": 4}) as h:
        [answer] = await h.answer(request(5, 12, logprobs=2, stop_token_ids=frozenset({full[position]})))
        assert [lp.token_id for lp in answer.logprobs] == answer.token_ids == full[: full.index(full[position]) + 1]


async def test_every_accepted_request_is_reported_once_with_what_was_delivered() -> None:
    async with house() as h:
        answers = await h.answers([request(5, n, seed=n, num_choices=1 + n % 3) for n in range(1, 8)])
        assert len(h.watcher.ends) == 7
        delivered = sorted(sum(len(choice.token_ids) for choice in a) for a in answers)
        assert sorted(report.num_output_tokens for report in h.watcher.ends) == delivered
