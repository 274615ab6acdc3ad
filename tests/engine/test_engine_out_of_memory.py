"""Out of memory in the middle of a step: its requests are told, all that they held is free, and the others are served.

The real scheduler and engine, and a forward pass that runs out of memory as a GPU's does. (A CPU cannot: Linux grants
what it does not have.)
"""

import asyncio
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from engine.batch import Batch, Row, SlotStart
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import StepError
from engine.models.decoder import AttentionFn, Decoder
from engine.models.load import load_decoder
from engine.sampling.params import SamplingParams
from engine.weights.checkpoint import resolve_model
from kvpool.pool import BlockPool
from scheduler.config import SchedulerConfig
from scheduler.loop import Scheduler
from scheduler.request import FinishReason, Request
from tests.fakes.naive_attention import naive_greedy
from tests.fakes.tiny_models import make_tiny_model

GREEDY = SamplingParams(temperature=0.0)
NUM_TOKENS = 6
TIGHT_TOKENS = 24
"""Tokens of a step that fit the memory of the tests' device."""


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("llama"))
    return load_decoder(resolve_model(str(folder)), torch.float32, torch.device("cpu"), lambda *_: None)


@pytest.fixture
def engine(decoder: Decoder) -> Iterator[Engine]:
    config = EngineConfig(device="cpu", num_kv_blocks=40, max_num_seqs=4, max_model_len=128, attention_backend="torch")
    engine = Engine.from_decoder(decoder, config)
    yield engine
    engine.close()


@dataclass
class Memory:
    """A forward pass that keeps a large activation, and runs out where `is_short` says so of the step's tokens."""

    is_short: Callable[[int], bool]
    num_failures: int = 0
    activations: list[weakref.ref[Tensor]] = field(default_factory=list)

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> "Memory":
        real = Decoder.forward

        def forward(decoder: Decoder, token_ids: Tensor, positions: Tensor, attend: AttentionFn) -> Tensor:
            activation = torch.empty(1 << 16)
            self.activations.append(weakref.ref(activation))
            hidden = real(decoder, token_ids, positions, attend)  # keys and values were written when it happens
            if self.is_short(len(token_ids)):
                self.num_failures += 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")
            return hidden

        monkeypatch.setattr(Decoder, "forward", forward)
        return self


@dataclass(frozen=True)
class Outcome:
    token_ids: list[int]
    finish_reason: FinishReason
    error: str | None


async def serve(engine: Engine, requests: Sequence[Request]) -> list[Outcome]:
    """All at once, then a last look at whether anything is still held."""
    config = SchedulerConfig(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=128,
        block_size=engine.info.layout.block_size,
        check_invariants=True,
    )
    pool = BlockPool(engine.info.num_blocks)
    scheduler = Scheduler(engine, pool, config)
    loop = asyncio.create_task(scheduler.run())
    handles = [scheduler.submit(request) for request in requests]

    async def collect(index: int) -> Outcome:
        tokens: list[int] = []
        async for events in handles[index]:
            for event in events:
                tokens += event.token_ids
                if event.finish_reason is not None:
                    return Outcome(tokens, event.finish_reason, event.error)
        raise AssertionError("no end")

    outcomes = list(await asyncio.gather(*(collect(index) for index in range(len(requests)))))
    assert scheduler.stats().unhealthy is None
    scheduler.drain()
    await loop
    scheduler.check()
    assert pool.stats().num_referenced == 0
    return outcomes


def request(name: str, length: int, seed: int) -> Request:
    return Request(name, tuple(3 + (seed * 31 + 7 * i) % 200 for i in range(length)), GREEDY, NUM_TOKENS)


async def test_its_requests_fail_by_name_and_the_others_are_served(
    engine: Engine, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four slots: the first step is too large, what waited behind it comes next and is right to the last token."""
    memory = Memory(lambda num_tokens: num_tokens > TIGHT_TOKENS).patch(monkeypatch)
    large = [request(f"large{i}", 16, seed=i) for i in range(4)]
    small = [request(f"small{i}", 3 + i, seed=10 + i) for i in range(4)]
    outcomes = await serve(engine, [*large, *small])
    assert memory.num_failures == 1
    for outcome in outcomes[:4]:
        assert (outcome.token_ids, outcome.finish_reason) == ([], FinishReason.FAILED)
        assert outcome.error is not None
        assert "with 4 rows and 64 tokens ran out of device memory: CUDA out of memory" in outcome.error
    for served, outcome in zip(small, outcomes[4:], strict=True):
        assert outcome.finish_reason is FinishReason.LENGTH
        assert outcome.token_ids == naive_greedy(decoder, served.prompt_ids, NUM_TOKENS)


async def test_what_a_lost_step_wrote_serves_nobody_as_a_prefix(
    engine: Engine, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same prompt again, after its first try was lost with whole blocks written."""
    failing = iter([False, True])
    Memory(lambda num_tokens: num_tokens > 20 and next(failing, False)).patch(monkeypatch)
    same = [request(f"r{i}", 40, seed=1) for i in range(3)]
    [first] = await serve(engine, same[:1])
    [lost] = await serve(engine, same[1:2])
    [again] = await serve(engine, same[2:])
    assert lost.finish_reason is FinishReason.FAILED
    assert first.token_ids == again.token_ids == naive_greedy(decoder, same[0].prompt_ids, NUM_TOKENS)


async def test_decode_steps_that_run_out_now_and_then_cost_only_their_rows(
    engine: Engine, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(10_000))
    memory = Memory(lambda num_tokens: next(calls) % 9 == 8).patch(monkeypatch)
    requests = [request(f"r{i}", 4 + i, seed=i) for i in range(20)]
    outcomes = await serve(engine, requests)
    monkeypatch.undo()
    assert memory.num_failures > 1
    assert len({outcome.finish_reason for outcome in outcomes}) == 2
    for served, outcome in zip(requests, outcomes, strict=True):
        expected = naive_greedy(decoder, served.prompt_ids, NUM_TOKENS)
        assert outcome.token_ids == expected[: len(outcome.token_ids)]
        assert (outcome.finish_reason is FinishReason.LENGTH) == (outcome.token_ids == expected)
        assert (outcome.finish_reason is FinishReason.FAILED) == (outcome.error is not None)


def test_the_memory_of_a_lost_step_is_free_while_its_error_still_lives(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error holds its frames, and frames hold tensors: the next step needs that memory."""
    memory = Memory(lambda num_tokens: True).patch(monkeypatch)
    prompt = (5, 6, 7)
    batch = Batch(1, (SlotStart(0, GREEDY, 0, prompt),), (), (Row(0, 0, prompt, 0, (0,), sample=True),))
    with pytest.raises(StepError, match="ran out of device memory") as caught:
        engine.step_sync(batch)
    assert caught.value.__cause__ is not None
    assert [activation() for activation in memory.activations] == [None]
