"""Shared KV: the prefix cache, choices that fork one prompt, and prompt logprobs, which forbid sharing."""

import pytest

from kvpool.prefix import namespace_root
from scheduler.request import FinishReason
from tests.fakes.engine import reference_tokens
from tests.scheduler.harness import House, house, request


def num_computed(h: House, since: int = 0) -> int:
    return sum(b.num_tokens for b in h.engine.batches[since:])


async def test_a_second_request_reuses_the_full_blocks_of_the_first() -> None:
    async with house() as h:
        first = h.scheduler.submit(request(10, 3))
        async for _ in first:
            pass
        handle = h.scheduler.submit(r := request((*range(1, 9), 70, 71, 72), 3))
        tokens = [t async for events in handle for e in events for t in e.token_ids]
        assert (first.num_cached_tokens, handle.num_cached_tokens) == (0, 8)
        assert tokens == reference_tokens(r)
        assert h.watcher.lookups == [(10, 0), (11, 8)]


@pytest.mark.parametrize("num_prompt", [8, 9, 11, 12])
async def test_a_fully_cached_prompt_recomputes_little_and_at_least_its_last_token(num_prompt: int) -> None:
    async with house() as h:
        cold = await h.answer(request(num_prompt, 4))
        before = h.engine.num_steps
        handle = h.scheduler.submit(request(num_prompt, 4))
        warm = [t async for events in handle for e in events for t in e.token_ids]
        assert warm == cold[0].token_ids
        assert handle.num_cached_tokens == min(num_prompt // 4 * 4, num_prompt - 1)
        assert len(h.engine.batches[before].rows[0].token_ids) == num_prompt - handle.num_cached_tokens


async def test_a_fully_cached_block_that_runs_elsewhere_is_copied_before_it_is_written() -> None:
    async with house() as h:
        requests = [request(8, 9, seed=0), request(8, 9, seed=1), request(8, 9, seed=2)]
        first = h.scheduler.submit(requests[0])
        await h.steps(2)
        answers = await h.answers(requests[1:])
        assert [a[0].token_ids for a in answers] == [reference_tokens(r) for r in requests[1:]]
        assert sum(len(b.copies) for b in h.engine.batches) == 2
        assert not first.prompt_logprobs


async def test_generated_blocks_are_found_by_the_next_turn() -> None:
    async with house() as h:
        [answer] = await h.answer(request(6, 11))
        turn = request((*range(1, 7), *answer.token_ids, 5, 6, 7), 3)
        handle = h.scheduler.submit(turn)
        tokens = [t async for events in handle for e in events for t in e.token_ids]
        assert handle.num_cached_tokens == 16  # all but the last of 17 tokens have KV
        assert tokens == reference_tokens(turn)


async def test_namespaces_and_switches_keep_caches_apart() -> None:
    async with house() as h:
        await h.answer(request(12, 1, cache_namespace=namespace_root("salt a")))
        await h.answer(request(12, 1, cache_namespace=namespace_root("salt b")))
        await h.answer(request(12, 1, cache_namespace=namespace_root("salt a"), use_prefix_cache=False))
        assert [report.num_cached_tokens for report in h.watcher.ends] == [0, 0, 0]
        await h.answer(request(12, 1, cache_namespace=namespace_root("salt a")))
        assert h.watcher.ends[-1].num_cached_tokens == 11
    async with house(enable_prefix_caching=False) as h:
        await h.answers([request(12, 1), request(12, 1)])
        assert [report.num_cached_tokens for report in h.watcher.ends] == [0, 0]
        assert not h.watcher.lookups
        assert h.pool.stats().num_cached == 0


@pytest.mark.parametrize("num_prompt", [1, 3, 4, 7, 8])
async def test_choices_prefill_once_and_fork(num_prompt: int) -> None:
    async with house(enable_prefix_caching=False) as h:
        answers = await h.answer(r := request(num_prompt, 6, num_choices=4))
        assert [a.token_ids for a in answers] == [reference_tokens(r, choice) for choice in range(4)]
        assert len({tuple(a.token_ids) for a in answers}) == 4
        assert num_computed(h) == num_prompt + 3 + 4 * 5  # the prompt, its last token thrice again, the outputs
        assert len(h.watcher.ends) == 1


async def test_a_lookup_is_told_once_per_request() -> None:
    async with house(num_blocks=6, forecast_admission=False) as h:
        await h.answers([request(range(10 * i, 10 * i + 6), 12, seed=i, num_choices=2) for i in range(2)])
        assert h.watcher.preempted
        assert h.watcher.lookups == [(6, 0), (6, 0)]


async def test_choices_hold_one_copy_of_the_prompt() -> None:
    async with house() as h:
        handle = h.scheduler.submit(request(40, 8, num_choices=5))
        await h.steps(4)
        assert h.pool.stats().num_referenced <= 10 + 2 * 5
        assert h.scheduler.stats().num_running == 5
        handle.cancel()


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("num_prompt", [7, 8])
async def test_choices_of_a_single_token_need_no_living_sibling(num_prompt: int, enable_prefix_caching: bool) -> None:
    async with house(enable_prefix_caching=enable_prefix_caching) as h:
        answers = await h.answer(r := request(num_prompt, 1, num_choices=3))
        assert [a.token_ids for a in answers] == [reference_tokens(r, choice) for choice in range(3)]


async def test_finishing_the_choice_that_prefills_moves_the_next_up() -> None:
    async with house(max_num_batched_tokens=4) as h:
        handle = h.scheduler.submit(r := request(20, 4, num_choices=3))
        await h.steps(2)
        handle.finish(0)
        outputs: dict[int, list[int]] = {0: [], 1: [], 2: []}
        async for events in handle:
            for event in events:
                outputs[event.choice] += event.token_ids
        assert outputs == {0: [], 1: reference_tokens(r, 1), 2: reference_tokens(r, 2)}


async def test_choices_come_before_later_requests() -> None:
    async with house(max_num_seqs=2) as h:
        await h.answers(
            [request(range(50 * i, 50 * i + 6), 4, seed=i, num_choices=3 if i == 0 else 1) for i in range(3)]
        )
        entered = [(s.params.seed, s.choice) for b in h.engine.batches for s in b.starts]
        assert entered == [(0, 0), (1, 0), (0, 1), (0, 2), (2, 0)]


@pytest.mark.parametrize("budget", [1, 3, 4, 64])
async def test_prompt_logprobs_are_complete_before_the_first_event(budget: int) -> None:
    async with house(max_num_batched_tokens=budget) as h:
        await h.answer(request(11, 2))
        handle = h.scheduler.submit(request(11, 2, prompt_logprobs=0))
        async for _ in handle:
            assert [lp.logprob for lp in handle.prompt_logprobs] == [-float(i) for i in range(1, 11)]
        assert [lp.token_id for lp in handle.prompt_logprobs] == list(range(2, 12))
        assert handle.num_cached_tokens == 0


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_scoring_a_prompt_generates_nothing(num_choices: int) -> None:
    async with house(max_num_batched_tokens=4) as h:
        handle = h.scheduler.submit(request(10, 0, prompt_logprobs=1, num_choices=num_choices))
        events = [event async for batch in handle for event in batch]
        assert {e.choice for e in events} == set(range(num_choices))
        assert all(e.finish_reason is FinishReason.LENGTH and not e.token_ids for e in events)
        assert len(handle.prompt_logprobs) == 9
        assert not any(row.sample for b in h.engine.batches for row in b.rows)
        assert num_computed(h) == 10


async def test_prompt_logprobs_of_choices_are_taken_once() -> None:
    async with house() as h:
        handle = h.scheduler.submit(r := request(9, 3, prompt_logprobs=0, num_choices=3))
        outputs: dict[int, list[int]] = {0: [], 1: [], 2: []}
        async for events in handle:
            for event in events:
                outputs[event.choice] += event.token_ids
        assert [lp.token_id for lp in handle.prompt_logprobs] == list(range(2, 10))
        assert outputs == {choice: reference_tokens(r, choice) for choice in range(3)}


@pytest.mark.parametrize("has_been_seen", [True, False])
async def test_fifty_users_with_one_system_prompt_hold_one_copy_of_it(has_been_seen: bool) -> None:
    """Also when all come at one instant and compute it side by side: equal blocks become one as they are filled."""
    system, num_users = list(range(2, 82)), 50
    users = [request([*system, user, user + 1, user + 2], 12, seed=user) for user in range(num_users)]
    settings = {"num_blocks": 1400, "max_num_seqs": 64, "max_num_batched_tokens": 8192}
    async with house(**settings) as h:
        if has_been_seen:
            await h.answer(request(system, 1))
        before = h.engine.num_steps
        handles = [h.scheduler.submit(r) for r in users]
        await h.steps(before + 3)
        assert h.scheduler.stats().num_running == num_users
        assert h.pool.stats().num_referenced == 80 // 4 + num_users * 2
        for r, handle in zip(users, handles, strict=True):
            assert [t async for events in handle for e in events for t in e.token_ids] == reference_tokens(r)


async def test_a_block_that_takes_anothers_place_is_told_to_the_engine(steps_in_flight: int) -> None:
    async with house() as h:
        requests = [request([*range(2, 12), user], 9, seed=user) for user in range(3)]
        answers = await h.answers(requests)
        assert [a[0].token_ids for a in answers] == [reference_tokens(r) for r in requests]
        second = h.engine.batches[steps_in_flight].rows
        assert [row.block_offset for row in second] == [3, 0, 0]
        assert len(second[0].block_ids) == steps_in_flight - 1
        assert second[1].block_ids[:2] == second[2].block_ids[:2]


async def test_a_pinned_prefix_survives_pressure_and_others_do_not() -> None:
    async with house(num_blocks=32, prefix_pin_share=0.25) as h:
        pinned, other = request(range(2, 34), 2, pin_key="k"), request(range(40, 72), 2)
        await h.answers([pinned, other])
        assert h.scheduler.stats().num_pinned_blocks == 8
        for number in range(6):
            await h.answers([request(range(100 + 40 * number + i, 140 + 40 * number + i), 4) for i in range(2)])
        await h.answer(pinned)
        assert h.watcher.ends[-1].num_cached_tokens == 31
        await h.answer(other)
        assert h.watcher.ends[-1].num_cached_tokens == 0


async def test_pins_give_way_to_a_request_that_needs_the_whole_pool() -> None:
    async with house(num_blocks=16, prefix_pin_share=0.5) as h:
        await h.answer(request(range(2, 34), 1, pin_key="k"))
        handle = h.scheduler.submit(r := request(range(40, 50), 54))
        assert [t async for events in handle for e in events for t in e.token_ids] == reference_tokens(r)


async def test_pins_keep_their_blocks_from_a_crowd() -> None:
    async with house(num_blocks=24, prefix_pin_share=0.5, forecast_admission=False) as h:
        await h.answer(pinned := request(range(2, 34), 1, pin_key="k"))
        requests = [request(range(40 + 9 * i, 50 + 9 * i), 12, seed=i) for i in range(8)]
        answers = await h.answers(requests)
        assert [a[0].token_ids for a in answers] == [reference_tokens(r) for r in requests]
        await h.answer(pinned)
        assert h.watcher.ends[-1].num_cached_tokens == 31
