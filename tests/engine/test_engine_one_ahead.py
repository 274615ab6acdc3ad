"""The real engine with two steps in flight: the tokens are those of one, and nothing waits that need not.

Once as a CPU runs it, one step after the other on its thread, and once with a courier that is late, as a GPU's.
"""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.batch import PENDING, Batch, Row, SlotStart, TokenLogprob
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import EngineDead, StepError
from engine.inputs import StepInputs
from engine.models.decoder import Decoder
from engine.models.load import load_decoder
from engine.sampling.constraint import Bitmask
from engine.sampling.params import SamplingParams
from engine.transit import HostCourier, pack, unpack
from engine.weights.checkpoint import resolve_model
from kvpool.pool import BlockPool
from kvpool.table import blocks_for
from scheduler.config import SchedulerConfig
from scheduler.handle import RequestHandle
from scheduler.loop import Scheduler
from scheduler.request import FinishReason, Request
from tests.fakes.late import LateCourier, a_few_ms
from tests.fakes.tiny_models import make_tiny_model

GREEDY = SamplingParams(temperature=0.0)
CONFIG = EngineConfig(num_kv_blocks=64, max_num_seqs=8, max_num_batched_tokens=64)
PROMPTS = [tuple((n * i * i + i + 3 * n) % 250 for i in range(5 + 7 * n)) for n in range(1, 9)]

MakeEngine = Callable[[LateCourier | HostCourier], Engine]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("llama"))
    return load_decoder(resolve_model(str(folder)), torch.float32, torch.device("cpu"), lambda *_: None)


@pytest.fixture
def make_engine(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeEngine]:
    engines: list[Engine] = []

    def make(courier: LateCourier | HostCourier) -> Engine:
        monkeypatch.setattr("engine.engine.courier_for", lambda device: courier)
        engines.append(Engine.from_decoder(decoder, CONFIG))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


# ------------------------------------------------------------------------------------------- behind the scheduler


class StepsOfThree:
    """Each token must be one more than the one before, modulo three; nine tokens, then nothing more."""

    error: str | None = None

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def start(self) -> "StepsOfThree":
        return StepsOfThree()

    def fill_mask(self, out: Bitmask) -> None:
        if self.is_stopped:
            raise ValueError("asked beyond the end")
        wanted = (self.tokens[-1] + 1) % 3 if self.tokens else 0
        bits = np.zeros(len(out) * 32, dtype=np.uint8)
        bits[wanted:256:3] = 1
        out |= np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token_ids: Sequence[int]) -> bool:
        self.tokens += token_ids
        return all((a + 1 - b) % 3 == 0 for a, b in zip(self.tokens, self.tokens[1:], strict=False))

    @property
    def is_stopped(self) -> bool:
        return len(self.tokens) >= 9


@dataclass
class Told:
    """A choice as its consumer saw it."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: FinishReason | None = None
    error: str | None = None


WARM = SamplingParams(temperature=0.9, seed=5)
PENALISED = replace(WARM, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2)


def requests() -> list[Request]:
    """One of every kind that draws differently, all at once."""
    return [
        Request("greedy", PROMPTS[0], replace(GREEDY, logprobs=2), 25),
        Request("warm", PROMPTS[1], replace(WARM, logprobs=0), 25),
        Request("penalised", PROMPTS[2], replace(PENALISED, top_k=40, top_p=0.9), 25),
        Request("penalised greedy", PROMPTS[3], replace(PENALISED, temperature=0.0), 25),
        Request("three", PROMPTS[4], replace(WARM, top_p=0.8), 18, num_choices=3),
        Request("grammar", PROMPTS[5], WARM, 25, constraint=StepsOfThree()),
        Request("stops", PROMPTS[6], replace(WARM, stop_token_ids=frozenset(range(0, 250, 9)), min_tokens=4), 40),
        Request(
            "bad words",
            PROMPTS[7],
            replace(WARM, top_k=3, bad_words_ids=tuple((i, j) for i in range(40) for j in range(99))),
            25,
        ),
        Request("prompt", PROMPTS[6], replace(GREEDY, prompt_logprobs=3), 3),
        Request("scored", PROMPTS[5], replace(GREEDY, prompt_logprobs=1), 0),
        Request("stop string", PROMPTS[3], WARM, 25),
    ]


async def told(handle: RequestHandle) -> list[Told]:
    """Read to the end. The one with a stop string is finished at its seventh token; later ones are dropped."""
    choices = [Told() for _ in range(handle.request.num_choices)]
    async for events in handle:
        for event in events:
            one = choices[event.choice]
            one.token_ids += event.token_ids
            one.logprobs += event.logprobs
            one.reason, one.error = event.finish_reason, event.error
            if handle.request.request_id == "stop string" and len(one.token_ids) >= 7:
                del one.token_ids[7:]
                handle.finish(event.choice)
    return choices


def answers(engine: Engine, steps_in_flight: int, num_blocks: int = 64) -> list[tuple[list[Told], list[TokenLogprob]]]:
    config = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=512,
        max_steps_in_flight=steps_in_flight,
        forecast_admission=False,
        check_invariants=True,
    )

    async def serve() -> list[tuple[list[Told], list[TokenLogprob]]]:
        pool = BlockPool(num_blocks)
        scheduler = Scheduler(engine, pool, config)
        loop = asyncio.create_task(scheduler.run())
        handles = [scheduler.submit(request) for request in requests()]
        choices = await asyncio.gather(*map(told, handles))
        scheduler.drain()
        await loop
        scheduler.check()
        assert pool.stats().num_referenced == 0
        return [(each, handle.prompt_logprobs) for each, handle in zip(choices, handles, strict=True)]

    return asyncio.run(asyncio.wait_for(serve(), 120))


@pytest.fixture(scope="module")
def expected(decoder: Decoder) -> list[tuple[list[Told], list[TokenLogprob]]]:
    """One step at a time."""
    engine = Engine.from_decoder(decoder, CONFIG)
    try:
        return answers(engine, 1)
    finally:
        engine.close()


def test_what_is_expected_ends_as_it_should(expected: list[tuple[list[Told], list[TokenLogprob]]]) -> None:
    reasons = {r.request_id: [c.reason for c in choices] for r, (choices, _) in zip(requests(), expected, strict=True)}
    assert reasons["grammar"] == reasons["stops"] == reasons["stop string"] == [FinishReason.STOP]
    assert reasons["three"] == [FinishReason.LENGTH] * 3
    assert len(expected[5][0][0].token_ids) == 9
    assert len({tuple(choice.token_ids) for choice in expected[4][0]}) == 3
    assert [len(prompt) for _, prompt in expected[8:10]] == [len(PROMPTS[6]) - 1, len(PROMPTS[5]) - 1]


@pytest.mark.parametrize("num_blocks", [64, 16], ids=["roomy", "preempting"])
@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_the_same_tokens(
    make_engine: MakeEngine,
    expected: list[tuple[list[Told], list[TokenLogprob]]],
    steps_in_flight: int,
    is_late: bool,
    num_blocks: int,
) -> None:
    courier = LateCourier(a_few_ms) if is_late else HostCourier()
    got = answers(make_engine(courier), steps_in_flight, num_blocks)
    for request, (want_choices, want_prompt), (choices, prompt) in zip(requests(), expected, got, strict=True):
        for want, one in zip(want_choices, choices, strict=True):
            assert one.token_ids == want.token_ids, request.request_id
            assert (one.reason, one.error) == (want.reason, want.error), request.request_id
            assert_close(one.logprobs, want.logprobs)
        assert_close(prompt, want_prompt)


def assert_close(got: Sequence[TokenLogprob], want: Sequence[TokenLogprob]) -> None:
    """Values in float32 of batches that are put together differently."""
    assert [(e.token_id, len(e.top_ids)) for e in got] == [(e.token_id, len(e.top_ids)) for e in want]
    values = [[lp for e in entries for lp in (e.logprob, *e.top_logprobs)] for entries in (got, want)]
    assert values[0] == pytest.approx(values[1], abs=1e-4)


# ----------------------------------------------------------------------------------------------- step by step


def start(slot: int, params: SamplingParams = GREEDY, **overrides: object) -> SlotStart:
    return SlotStart(slot, params, 0, PROMPTS[slot], **overrides)


def row(slot: int, step: int, token_id: int = PENDING) -> Row:
    """Step 0 is the slot's prompt; step `n` computes its `n`-th output token."""
    at = len(PROMPTS[slot]) + step - 1 if step else 0
    token_ids = (token_id,) if step else PROMPTS[slot]
    blocks = tuple(range(8 * slot, 8 * slot + blocks_for(at + len(token_ids), 16)))
    return Row(slot, at, token_ids, 0, blocks, sample=True)


def batch(step: int, slots: Sequence[int], starts: Sequence[SlotStart] = ()) -> Batch:
    return Batch(step, tuple(starts), (), tuple(row(slot, step) for slot in slots))


async def turns_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  threads work meanwhile
            await asyncio.sleep(0.001)


def watch_forward(engine: Engine, courier: LateCourier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Note forward passes between what is sent and waited for."""
    forward = engine._runner._forward

    def noted(inputs: StepInputs) -> Tensor:
        courier.log("forward")
        return forward(inputs)

    monkeypatch.setattr(engine._runner, "_forward", noted)


async def test_a_step_is_launched_whole_before_anything_of_the_one_before_is_on_the_host(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(courier := LateCourier())
    watch_forward(engine, courier, monkeypatch)
    courier.arrivals.clear(), courier.events.clear()
    courier.holds, courier.delay_of = True, lambda number: 10.0
    first = asyncio.ensure_future(engine.step(batch(0, [0, 1], [start(0), start(1, WARM)])))
    second = asyncio.ensure_future(engine.step(batch(1, [0, 1])))
    third = asyncio.ensure_future(engine.step(batch(2, [1, 0])))
    await turns_until(lambda: len(courier.arrivals) == 3)
    assert [e for e in courier.events if e != "wait 0"] == [e for n in range(3) for e in ("forward", f"send {n}")]
    assert not first.done()
    for number in (2, 1, 0):
        courier.arrivals[number].released.set()
    outputs = [await each for each in (first, second, third)]
    assert [output.step for output in outputs] == [0, 1, 2]

    courier.holds, courier.delay_of = False, lambda number: 0.0
    tokens = [await step_alone(engine, slot, params) for slot, params in ((0, GREEDY), (1, WARM))]
    assert [[o.rows[0].token_ids[0], o.rows[1].token_ids[0]] for o in outputs[:2]] == [
        [tokens[0][n], tokens[1][n]] for n in range(2)
    ]
    assert [outputs[2].rows[1].token_ids[0], outputs[2].rows[0].token_ids[0]] == [tokens[0][2], tokens[1][2]]


async def step_alone(engine: Engine, slot: int, params: SamplingParams, num_steps: int = 3) -> list[int]:
    """A slot's tokens, each known to the host before the next step."""
    token_ids: list[int] = []
    for step in range(num_steps):
        rows = (row(slot, step, token_ids[-1] if token_ids else PENDING),)
        output = await engine.step(Batch(step, (start(slot, params),) if step == 0 else (), (), rows))
        token_ids += output.rows[0].token_ids
    return token_ids


@pytest.mark.parametrize("kind", ["penalties", "grammar"])
async def test_rows_that_choose_by_earlier_tokens_wait_between_forward_pass_and_sampling(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    params = replace(GREEDY, presence_penalty=2.0) if kind == "penalties" else GREEDY
    constraint = StepsOfThree() if kind == "grammar" else None
    engine = make_engine(courier := LateCourier())
    watch_forward(engine, courier, monkeypatch)
    alone = await step_alone_constrained(engine, params, constraint)
    courier.arrivals.clear(), courier.events.clear()
    courier.holds, courier.delay_of = True, lambda number: 10.0
    first = asyncio.ensure_future(engine.step(batch(0, [0], [start(0, params, constraint=constraint)])))
    second = asyncio.ensure_future(engine.step(batch(1, [0])))
    await turns_until(lambda: courier.events.count("wait 0") == 2)  # the thread that waits, and the second launch
    assert [e for e in courier.events if e != "wait 0"] == ["forward", "send 0", "forward"]
    courier.arrivals[0].released.set()
    await turns_until(lambda: len(courier.arrivals) == 2)
    courier.arrivals[1].released.set()
    outputs = [await first, await second]
    assert [output.rows[0].token_ids[0] for output in outputs] == alone


async def step_alone_constrained(engine: Engine, params: SamplingParams, constraint: StepsOfThree | None) -> list[int]:
    first = await engine.step(Batch(0, (start(0, params, constraint=constraint),), (), (row(0, 0),)))
    token_id = first.rows[0].token_ids[0]
    second = await engine.step(Batch(1, (), (), (row(0, 1, token_id),)))
    return [token_id, second.rows[0].token_ids[0]]


async def test_a_lost_device_kills_every_step_in_flight(make_engine: MakeEngine) -> None:
    engine = make_engine(courier := LateCourier())
    courier.arrivals.clear()
    courier.holds, courier.delay_of = True, lambda number: 10.0
    steps = [asyncio.ensure_future(engine.step(batch(n, [0], [start(0)] if n == 0 else []))) for n in range(2)]
    await turns_until(lambda: len(courier.arrivals) == 2)
    courier.lost = torch.AcceleratorError("unspecified launch failure")
    for arrival in courier.arrivals:
        arrival.released.set()
    results = await asyncio.gather(*steps, return_exceptions=True)
    assert isinstance(results[1], EngineDead)
    with pytest.raises(EngineDead, match="unspecified launch failure"):
        await engine.step(batch(2, [0]))
    courier.lost = None


async def test_a_step_that_fails_leaves_the_one_in_flight_alone(make_engine: MakeEngine) -> None:
    engine = make_engine(courier := LateCourier())
    courier.arrivals.clear()
    courier.holds, courier.delay_of = True, lambda number: 10.0
    first = asyncio.ensure_future(engine.step(batch(0, [0], [start(0)])))
    await turns_until(lambda: len(courier.arrivals) == 1)
    with pytest.raises(StepError, match="2 drafts"):
        await engine.step(Batch(1, (), (), (row(0, 1)._replace(num_drafts=2),)))
    courier.arrivals[0].released.set()
    assert (await first).rows[0].token_ids
    courier.holds, courier.delay_of = False, lambda number: 0.0
    assert (await engine.step(batch(1, [0]))).rows[0].token_ids == tuple((await step_alone(engine, 0, GREEDY))[1:2])


async def test_a_refused_slot_fails_alone_in_every_step_in_flight(make_engine: MakeEngine) -> None:
    engine = make_engine(LateCourier())
    refused = start(1, replace(GREEDY, logit_bias={100_000: 1.0}))
    steps = [engine.step(batch(n, [1, 0], [refused, start(0)] if n == 0 else [])) for n in range(2)]
    outputs = await asyncio.gather(*steps)
    assert all("100000" in (output.rows[0].error or "") for output in outputs)
    assert [output.rows[1].token_ids[0] for output in outputs] == await step_alone(engine, 0, GREEDY, 2)
    [alone] = [await engine.step(batch(2, [1]))]
    assert "100000" in (alone.rows[0].error or "")


def test_what_is_packed_comes_out_again() -> None:
    rng = random.Random(0)
    shapes = [(2, 3), (1,), (4, 5), (0, 7)]
    tensors = [torch.tensor([rng.randrange(99) for _ in range(6)]).reshape(shapes[0]), torch.tensor([7])]
    tensors += [torch.rand(shape) for shape in shapes[2:]]
    out = unpack(pack(tensors), [(tensor.dtype, tensor.shape) for tensor in tensors])
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(tensors, out, strict=True))
