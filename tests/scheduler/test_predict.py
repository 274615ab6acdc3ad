"""Predictions against what then happens, in virtual time: a step costs 2 ms and 0.1 ms a token, and nothing else."""

import asyncio
import random
from dataclasses import replace

import pytest

from engine.batch import Batch
from scheduler.errors import ContextTooLong, QueueFull
from scheduler.observer import StepReport
from scheduler.predict import Arrivals, Load, Outlook, Prediction, StepClock, StepTimes, predict
from scheduler.request import Request
from tests.scheduler.harness import House, house, read, request

BASE_S, TOKEN_S = 0.002, 0.0001
TIMES = StepTimes(BASE_S, TOKEN_S)


def outlook(*running: Load, waiting: tuple[Load, ...] = (), **fields: object) -> Outlook:
    settings = {"num_slots": 4, "num_step_tokens": 64, "num_pool_tokens": 10_000, "times": TIMES} | fields
    return Outlook(running, waiting, **settings)  # type: ignore[arg-type]  a test's own fields


def steps_s(*sizes: int) -> float:
    return sum(TIMES.of(size) for size in sizes)


def test_alone() -> None:
    got = predict(outlook(), Load(10, 10, 5))
    assert got == Prediction(0.0, pytest.approx(steps_s(10)), pytest.approx(steps_s(10, 1, 1, 1, 1)))


def test_a_prompt_longer_than_a_step() -> None:
    got = predict(outlook(), Load(150, 150, 2))
    assert got == Prediction(0.0, pytest.approx(steps_s(64, 64, 22)), pytest.approx(steps_s(64, 64, 22, 1)))


def test_a_cached_prompt_gives_its_token_with_the_first_step() -> None:
    got = predict(outlook(), Load(10, 1, 3))
    assert got == Prediction(0.0, pytest.approx(steps_s(1)), pytest.approx(steps_s(1, 1, 1)))


def test_beside_others() -> None:
    got = predict(outlook(Load(20, 1, 2), Load(20, 1, 9)), Load(10, 10, 3))
    assert got == Prediction(0.0, pytest.approx(steps_s(12)), pytest.approx(steps_s(12, 3, 2)))


def test_behind_a_full_house() -> None:
    """Four slots, the first free after three steps; the new prompt shares that fourth step with three others."""
    running = [Load(20, 1, left) for left in (3, 50, 50, 50)]
    got = predict(outlook(*running), Load(10, 10, 1))
    wait_s = steps_s(4, 4, 4)
    assert got == Prediction(
        pytest.approx(wait_s), pytest.approx(wait_s + steps_s(13)), pytest.approx(wait_s + steps_s(13))
    )


def test_behind_a_queue_and_a_full_pool() -> None:
    """The pool holds one of them at a time."""
    got = predict(outlook(Load(60, 1, 4), waiting=(Load(60, 60, 3),), num_pool_tokens=70), Load(60, 60, 2))
    wait_s = steps_s(1, 1, 1, 1) + steps_s(60, 1, 1)
    assert got is not None
    assert got.queue_wait_s == pytest.approx(wait_s)
    assert got.finish_s == pytest.approx(wait_s + steps_s(60, 1))


def test_the_step_in_flight_comes_first() -> None:
    got = predict(outlook(step_left_s=0.5), Load(1, 1, 1))
    assert got == Prediction(0.5, pytest.approx(0.5 + steps_s(1)), pytest.approx(0.5 + steps_s(1)))


def test_who_comes_later_shares_the_steps() -> None:
    """One more with a prompt of 30 tokens after 11 ms: it enters with the step that begins then, the sixth."""
    later = Arrivals(0.011, (Load(30, 30, 100),))
    got = predict(outlook(arrivals=later), Load(1, 1, 8))
    assert got is not None
    assert got.finish_s == pytest.approx(steps_s(1, 1, 1, 1, 1, 1, 31, 2))
    assert predict(outlook(arrivals=later), Load(1, 1, 5)) == predict(outlook(), Load(1, 1, 5))


def test_who_comes_later_stands_behind() -> None:
    """All slots are taken: whoever comes meanwhile does not get between."""
    running = [Load(20, 1, left) for left in (9, 50, 50, 50)]
    alone = predict(outlook(*running), Load(10, 10, 1))
    got = predict(outlook(*running, arrivals=Arrivals(0.001, (Load(5, 5, 5),))), Load(10, 10, 1))
    assert alone is not None
    assert got == Prediction(*(pytest.approx(getattr(alone, name)) for name in Prediction.__slots__))


def test_nothing_is_predicted_from_nothing() -> None:
    assert predict(outlook(times=None), Load(1, 1, 1)) is None


def test_many_tokens_are_few_events() -> None:
    """A hundred sequences of a million tokens: events grow with sequences, so this takes no time."""
    running = [Load(10, 1, 1_000_000 + number) for number in range(100)]
    got = predict(outlook(*running, num_slots=200, num_step_tokens=512, num_pool_tokens=10**9), Load(9, 9, 2_000_000))
    assert got is not None
    assert got.finish_s > 1_000_000 * TIMES.of(100)


def test_what_fits_now() -> None:
    assert outlook(Load(20, 1, 5)).fits_now(Load(10, 10, 10))
    assert not outlook(*[Load(20, 1, 5)] * 4).fits_now(Load(10, 10, 10))
    assert not outlook(waiting=(Load(5, 5, 5),)).fits_now(Load(10, 10, 10))
    assert not outlook(Load(20, 1, 5), num_pool_tokens=35).fits_now(Load(10, 10, 10))


def report(num_tokens: int, seconds: float) -> StepReport:
    return StepReport(1, num_tokens, 0, 1, 0.0, seconds, 0.0, 1, 0)


def test_step_times_are_fitted() -> None:
    clock = StepClock()
    assert clock.times is None
    for size in (1, 64, 10, 3, 40):
        clock.on_step(report(size, TIMES.of(size)))
    assert clock.times is not None
    assert (clock.times.base_s, clock.times.token_s) == (pytest.approx(BASE_S), pytest.approx(TOKEN_S))


def test_what_a_token_costs_is_remembered_while_all_steps_are_alike() -> None:
    clock = StepClock(memory=20)
    for size in (1, 64, 10, 3, 40):
        clock.on_step(report(size, TIMES.of(size)))
    assert clock.times is not None
    for _ in range(1000):
        clock.on_step(report(8, TIMES.of(8)))
    assert clock.times.token_s == pytest.approx(TOKEN_S)
    assert clock.times.of(8) == pytest.approx(TIMES.of(8))


def test_larger_steps_never_seem_faster() -> None:
    clock = StepClock()
    for size, seconds in ((1, 1.0), (100, 0.5), (50, 0.7)):
        clock.on_step(report(size, seconds))
    assert clock.times is not None
    assert clock.times.token_s == 0.0


# ------------------------------------------------------------------------------------------------ as it happens


def timed(home: House) -> None:
    """Let the engine's steps take their time."""

    def set_latency(batch: Batch) -> None:
        home.engine.latency_s = TIMES.of(batch.num_tokens)

    home.engine.fail = set_latency


async def warm_up(home: House) -> None:
    """Steps of several sizes, and answers of 30 tokens."""
    timed(home)
    await home.answers([request([n] * (5 + 3 * n), 30) for n in range(10)])


async def foretold(home: House, asked: Request) -> tuple[Prediction, Prediction]:
    """What is predicted for a request, and what then happens to it."""
    question = home.scheduler.foresee(asked)
    predicted = predict(question.outlook, question.load)
    assert predicted is not None
    handle = home.scheduler.submit(asked)
    await read(handle)
    times = handle.times
    assert times.scheduled_s is not None
    assert times.first_token_s is not None
    assert times.finished_s is not None
    moments = (times.scheduled_s, times.first_token_s, times.finished_s)
    return predicted, Prediction(*(moment - times.arrived_s for moment in moments))


def assert_near(predicted: Prediction, happened: Prediction, *, share: float, step_s: float = 0.01) -> None:
    for name in ("queue_wait_s", "ttft_s", "finish_s"):
        got, want = getattr(predicted, name), getattr(happened, name)
        assert abs(got - want) <= share * want + step_s, f"{name}: predicted {got:.4f} s, was {want:.4f} s"


async def test_an_idle_server() -> None:
    async with house(num_blocks=200, max_num_batched_tokens=64, max_steps_in_flight=1) as home:
        await warm_up(home)
        assert_near(*await foretold(home, request(range(1000, 1150), 40)), share=0.01, step_s=1e-6)


async def test_a_prompt_that_is_cached() -> None:
    async with house(num_blocks=200, max_num_batched_tokens=64, max_steps_in_flight=1) as home:
        await warm_up(home)
        prompt = list(range(1000, 1150))
        await home.answer(request(prompt, 1))
        question = home.scheduler.foresee(request(prompt, 40))
        assert question.num_cached_tokens == 148
        assert_near(*await foretold(home, request(prompt, 40)), share=0.01, step_s=1e-6)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "limits", [{"max_num_seqs": 4}, {"num_blocks": 60}, {"max_num_seqs": 8, "num_blocks": 90}], ids=str
)
async def test_a_busy_server(seed: int, limits: dict[str, int]) -> None:
    """Ten others at work or waiting, answers as long as they may be: within a tenth, or a step or two."""
    rng = random.Random(seed)
    async with house(max_num_batched_tokens=64, max_steps_in_flight=1, **{"num_blocks": 400, **limits}) as home:
        await warm_up(home)
        others = [request([100 + n] * rng.randrange(4, 60), 30) for n in range(10)]
        handles = [home.scheduler.submit(other) for other in others]
        await home.steps(home.engine.num_steps + rng.randrange(1, 30))
        results = await asyncio.gather(
            foretold(home, request([7] * rng.randrange(4, 100), rng.randrange(1, 40))), *map(read, handles)
        )
        assert_near(*results[0], share=0.1)


async def test_a_steady_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six users on four slots, who ask again as soon as they are answered: whoever ends, another comes."""
    monkeypatch.setattr("scheduler.forecast.ArrivalMeter.__init__.__defaults__", (2.0,))
    limits = {"num_blocks": 400, "max_num_batched_tokens": 64, "max_num_seqs": 4, "max_steps_in_flight": 1}
    async with house(check_invariants=False, **limits) as home:
        timed(home)
        users = [asyncio.create_task(ask_again(home, random.Random(number))) for number in range(6)]
        await home.steps(1500)
        assert home.clock.now() > 4.0, "both spans are past"
        answering = {"blind": 0.0, "predicted": 0.0, "happened": 0.0}
        for number in range(30):
            await home.steps(home.engine.num_steps + 10 + number)
            asked = request([3 * number] * 20, 40, seed=number)
            question = home.scheduler.foresee(asked)
            blind = predict(replace(question.outlook, arrivals=None), question.load)
            predicted, happened = await foretold(home, asked)
            for name, times in {"blind": blind, "predicted": predicted, "happened": happened}.items():
                assert times is not None
                answering[name] += times.finish_s - times.queue_wait_s
        for task in users:
            task.cancel()
        await asyncio.gather(*users, return_exceptions=True)
        home.scheduler.stop()
    assert answering["predicted"] == pytest.approx(answering["happened"], rel=0.07)
    assert answering["blind"] < 0.9 * answering["happened"], "who counts on nobody else is too early"


async def ask_again(home: House, rng: random.Random) -> None:
    """A user: answers end anywhere up to 60 tokens."""
    while True:
        prompt, stops = [rng.randrange(97) for _ in range(20)], frozenset({0, 1, 2})
        await home.answer(request(prompt, 60, seed=rng.randrange(10**6), stop_token_ids=stops))


async def test_how_many_run_at_once() -> None:
    async with house(num_blocks=20, max_num_seqs=6) as home:
        assert home.scheduler.foresee(request(10, 6)).num_concurrent == 5  # 15 tokens of KV, 4 blocks
        assert home.scheduler.foresee(request(10, 8)).num_concurrent == 4
        assert home.scheduler.foresee(request(2, 2)).num_concurrent == 6


async def test_what_would_be_refused() -> None:
    async with house(num_blocks=20, max_num_seqs=1, max_num_queued_reqs=1, max_model_len=100) as home:
        with pytest.raises(ContextTooLong):
            home.scheduler.foresee(request(90, 20))
        gate = home.engine.gate = asyncio.Event()
        handles = [home.scheduler.submit(request([n] * 4, 4)) for n in (1, 2)]
        await home.steps(1)
        with pytest.raises(QueueFull):
            home.scheduler.foresee(request(4, 4))
        gate.set()
        await asyncio.gather(*map(read, handles))


async def test_asking_changes_nothing() -> None:
    async with house(num_blocks=50) as home:
        await home.answer(request(20, 4))
        before = home.scheduler.stats().pool
        home.scheduler.foresee(request(20, 4))
        home.scheduler.check()
        assert home.scheduler.stats().pool == before
