"""The engine's thread: order, answers, errors, cancellation, closing."""

import asyncio
import threading
import weakref

import pytest

from engine.thread import WorkThread


async def test_work_is_done_in_order_on_one_thread_and_answered_here() -> None:
    thread, seen = WorkThread("worker"), list[tuple[int, str]]()

    def work(number: int) -> int:
        seen.append((number, threading.current_thread().name))
        return number * number

    tasks = [asyncio.ensure_future(thread.run(lambda n=n: work(n))) for n in range(20)]
    assert await asyncio.gather(*tasks) == [n * n for n in range(20)]
    assert seen == [(n, "worker") for n in range(20)]
    assert thread.call(lambda: work(3)) == 9
    thread.close()


async def test_what_it_raises_is_raised_where_it_is_awaited_and_the_thread_lives_on() -> None:
    thread = WorkThread("worker")
    for error in (ValueError("no"), KeyboardInterrupt(), SystemExit(3)):

        def work(error: BaseException = error) -> None:
            raise error

        future = asyncio.gather(thread.run(work), return_exceptions=True) if isinstance(error, ValueError) else None
        if future is not None:
            assert await future == [error]
        with pytest.raises(type(error)):
            thread.call(work)
    assert await thread.run(lambda: 1) == 1
    thread.close()


async def test_what_is_cancelled_before_its_turn_is_not_done() -> None:
    thread, gate, done = WorkThread("worker"), threading.Event(), list[str]()
    first = asyncio.ensure_future(thread.run(gate.wait))
    second = asyncio.ensure_future(thread.run(lambda: done.append("second")))
    third = asyncio.ensure_future(thread.run(lambda: done.append("third")))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(first, third)
    assert done == ["third"]
    thread.close()


async def test_an_answer_that_nobody_waits_for_any_more_is_dropped() -> None:
    thread, begun, gate = WorkThread("worker"), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        gate.wait()

    task = asyncio.ensure_future(thread.run(work))
    await asyncio.to_thread(begun.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()
    assert await thread.run(lambda: 2) == 2
    thread.close()


def test_it_outlives_the_event_loop() -> None:
    thread, begun, gate = WorkThread("worker"), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        gate.wait()

    async def leave_early() -> None:
        task = asyncio.ensure_future(thread.run(work))
        await asyncio.to_thread(begun.wait)
        task.cancel()

    asyncio.run(leave_early())
    gate.set()
    assert thread.call(lambda: 3) == 3
    thread.close()


async def test_closing_ends_what_was_given_and_refuses_what_follows() -> None:
    thread, done = WorkThread("worker"), list[int]()
    tasks = [asyncio.ensure_future(thread.run(lambda n=n: done.append(n))) for n in range(3)]
    await asyncio.sleep(0)
    thread.close()
    thread.close()
    assert done == [0, 1, 2]
    await asyncio.gather(*tasks)
    with pytest.raises(RuntimeError, match="worker is closed"):
        await thread.run(lambda: 1)
    never_begun = WorkThread("idle")
    never_begun.close()


def test_it_is_prepared_before_the_first_work_and_keeps_nothing_of_it() -> None:
    prepared: list[str] = []
    thread = WorkThread("worker", lambda: prepared.append(threading.current_thread().name))
    assert prepared == []

    class Held:
        pass

    held = Held()
    gone = weakref.ref(held)
    assert thread.call(lambda held=held: prepared.copy()) == ["worker"]
    del held
    thread.call(lambda: None)
    assert gone() is None
    thread.close()
