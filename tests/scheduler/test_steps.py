"""What a step computes: budget, chunks, order, block-table updates, slots."""

import pytest

from engine.batch import Batch
from scheduler.budget import TokenBudget
from scheduler.config import SchedulingPolicy
from tests.fakes.engine import reference_tokens
from tests.scheduler.harness import house, read, request


def spans(batch: Batch) -> list[tuple[int, int, int]]:
    """(slot, start, number of tokens) of each row."""
    return [(row.slot, row.start, len(row.token_ids)) for row in batch.rows]


def test_a_budget_gives_what_is_left_and_no_more() -> None:
    budget = TokenBudget(5)
    assert [budget.take(3), budget.take(3), budget.take(3)] == [3, 2, 0]


async def test_one_request_prefills_whole_then_decodes_token_by_token() -> None:
    async with house() as h:
        [answer] = await h.answer(r := request(10, 4))
        assert answer.token_ids == reference_tokens(r)
        assert [spans(b) for b in h.engine.batches] == [[(0, 0, 10)], [(0, 10, 1)], [(0, 11, 1)], [(0, 12, 1)]]
        assert all(row.sample for b in h.engine.batches for row in b.rows)


async def test_a_long_prompt_is_cut_to_the_budget_and_samples_only_at_its_end() -> None:
    async with house(max_num_batched_tokens=4) as h:
        await h.answer(request(10, 1))
        assert [spans(b) for b in h.engine.batches] == [[(0, 0, 4)], [(0, 4, 4)], [(0, 8, 2)]]
        assert [row.sample for b in h.engine.batches for row in b.rows] == [False, False, True]


async def test_running_outputs_are_served_before_prompts_within_one_budget() -> None:
    async with house(max_num_batched_tokens=6) as h:
        first = h.scheduler.submit(request(6, 20))
        await h.steps(2)
        second = h.scheduler.submit(request(range(50, 70), 2))
        await h.steps(4)
        for batch in h.engine.batches:
            assert batch.num_tokens <= 6
        late = [b for b in h.engine.batches if len(b.rows) == 2]
        assert [len(row.token_ids) for row in late[0].rows] == [1, 5]
        first.cancel()
        second.cancel()


async def test_a_budget_smaller_than_the_running_set_still_serves_everybody() -> None:
    async with house(max_num_batched_tokens=2, max_num_seqs=8) as h:
        requests = [request(range(i, i + 5), 6, seed=i) for i in range(8)]
        answers = await h.answers(requests)
        assert [a[0].token_ids for a in answers] == [reference_tokens(r) for r in requests]


async def test_waiting_requests_are_let_in_in_order_up_to_the_slots() -> None:
    async with house(max_num_seqs=2) as h:
        await h.answers([request(range(i, i + 4), 3, seed=i) for i in range(5)])
        assert max(len(b.rows) for b in h.engine.batches) == 2
        entered = [start.params.seed for b in h.engine.batches for start in b.starts]
        assert entered == [0, 1, 2, 3, 4]


async def test_rows_tell_the_engine_only_what_changed_in_their_table() -> None:
    async with house() as h:
        await h.answer(request(8, 10))
        first, *others = [row for b in h.engine.batches for row in b.rows]
        assert (first.block_offset, len(first.block_ids)) == (0, 2)
        told = [(row.start, row.block_offset, len(row.block_ids)) for row in others if row.block_ids]
        assert told == [(8, 2, 1), (12, 3, 1), (16, 4, 1)]


async def test_a_slot_is_started_once_and_used_again() -> None:
    async with house(max_num_seqs=1) as h:
        await h.answers([request(5, 3, seed=1), request(6, 3, seed=2)])
        starts = [start for b in h.engine.batches for start in b.starts]
        assert [(s.slot, s.params.seed, len(s.prompt_ids), s.output_ids) for s in starts] == [
            (0, 1, 5, ()),
            (0, 2, 6, ()),
        ]


async def test_step_reports_count_prefill_decode_and_output_tokens() -> None:
    async with house(max_num_batched_tokens=8) as h:
        await h.answer(request(12, 3))
        counts = [(s.num_prefill_tokens, s.num_decode_tokens, s.num_output_tokens) for s in h.watcher.steps]
        assert counts == [(8, 0, 0), (4, 0, 1), (0, 1, 1), (0, 1, 1)]


async def test_times_and_gaps_are_on_the_given_clock() -> None:
    async with house(engine={"latency_s": 0.5}, max_steps_in_flight=1) as h:
        handle = h.scheduler.submit(request(4, 3))
        async for _ in handle:
            pass
        times = handle.times
        assert times.scheduled_s == times.arrived_s == 1000.0
        assert (times.first_token_s, times.last_token_s, times.finished_s) == (1000.5, 1001.5, 1001.5)
        assert h.watcher.ttfts == [0.5]
        assert h.watcher.gaps == [(0.5, 1), (0.5, 1)]


@pytest.mark.parametrize("num_drafts", [1, 2, 5])
async def test_verified_drafts_give_the_same_tokens_in_fewer_steps(num_drafts: int) -> None:
    async with house(engine={"num_drafts": num_drafts}, num_blocks=12) as h:
        requests = [request(range(i, i + 6), 17, seed=i) for i in range(4)]
        answers = await h.answers(requests)
        assert [a[0].token_ids for a in answers] == [reference_tokens(r) for r in requests]
        assert any(row.num_drafts for b in h.engine.batches for row in b.rows)
    async with house(engine={"num_drafts": num_drafts}) as h:
        await h.answer(requests[0])
        assert h.engine.num_steps < 17


async def test_drafts_are_cut_at_stop_tokens_and_limits() -> None:
    full = reference_tokens(request(6, 12))
    stop = next(t for t in full[4:] if full.index(t) >= 4)
    async with house(engine={"num_drafts": 4}) as h:
        [answer] = await h.answer(request(6, 12, stop_token_ids=frozenset({stop})))
        assert answer.token_ids == full[: full.index(stop) + 1]
        seen = h.engine.num_steps
        [answer] = await h.answer(request(6, 5))
        assert answer.token_ids == full[:5]
        ends = [row.start + len(row.token_ids) for b in h.engine.batches[seen:] for row in b.rows]
        assert max(ends) <= 6 + 5 - 1, "the last token's KV is never computed"


async def test_drafts_give_way_before_anybody_else_does() -> None:
    async with house(num_blocks=5, engine={"num_drafts": 2}) as h:
        requests = [request(range(20 * i, 20 * i + 6), 4, seed=i) for i in range(2)]
        answers = await h.answers(requests)
        assert [a[0].token_ids for a in answers] == [reference_tokens(r) for r in requests]
        assert not h.watcher.preempted


async def test_an_urgent_long_prompt_does_not_stall_a_stream() -> None:
    async with house(max_num_batched_tokens=6, policy=SchedulingPolicy.PRIORITY) as h:
        stream = h.scheduler.submit(request(6, 20, priority=1))
        await h.steps(2)
        urgent = h.scheduler.submit(request(range(50, 80), 1, priority=0))
        await read(urgent)
        await read(stream)
        shared = [b for b in h.engine.batches if len(b.rows) == 2]
        assert [sorted(len(row.token_ids) for row in b.rows) for b in shared[:5]] == [[1, 5]] * 5
