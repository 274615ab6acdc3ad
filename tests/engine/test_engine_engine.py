"""The engine's promises: what it says of itself, one row failing alone, errors by name, closing, loading."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.batch import Batch, Row, RowOutput, SlotStart
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import EngineDead, LoadError, OutOfMemoryAtLoad, StepError
from engine.inputs import InputBuilder
from engine.models.decoder import Decoder
from engine.models.load import load_decoder
from engine.native import find_native
from engine.sampling.constraint import Bitmask
from engine.sampling.params import SamplingParams
from engine.weights.checkpoint import ModelSource, resolve_model
from kvpool.table import BlockCopy, blocks_for
from tests.fakes.naive_attention import naive_greedy, naive_logits
from tests.fakes.tiny_models import make_tiny_model

GREEDY = SamplingParams(temperature=0.0)
PROMPT = tuple((7 * i * i + i + 3) % 250 for i in range(21))
COMPILING = "compiling native kernels"
CONFIG = EngineConfig(num_kv_blocks=64, max_num_seqs=4, max_num_batched_tokens=64)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return resolve_model(str(make_tiny_model("llama", tmp_path_factory.mktemp("llama"))))


@pytest.fixture(scope="module")
def decoder(source: ModelSource) -> Decoder:
    return load_decoder(source, torch.float32, torch.device("cpu"), lambda *_: None)


@pytest.fixture
def engine(decoder: Decoder) -> Iterator[Engine]:
    engine = Engine.from_decoder(decoder, CONFIG)
    yield engine
    engine.close()


def start(
    slot: int = 0, prompt: tuple[int, ...] = PROMPT, params: SamplingParams = GREEDY, **kwargs: object
) -> SlotStart:
    return SlotStart(slot, params, 0, prompt, **kwargs)


def row(slot: int = 0, prompt: tuple[int, ...] = PROMPT, at: int = 0, **overrides: object) -> Row:
    """`prompt` from position `at` on, in blocks `10 * slot, 10 * slot + 1, ...`."""
    blocks = tuple(range(10 * slot, 10 * slot + blocks_for(at + len(prompt), 16)))
    return Row(slot, at, prompt, 0, blocks, sample=True)._replace(**overrides)


def step(
    engine: Engine, starts: list[SlotStart], rows: list[Row], copies: tuple[BlockCopy, ...] = ()
) -> list[RowOutput]:
    output = engine.step_sync(Batch(5, tuple(starts), copies, tuple(rows)))
    assert output.step == 5
    assert output.duration_s > 0
    return list(output.rows)


def continue_alone(engine: Engine, slot: int, first: int, num_tokens: int) -> list[int]:
    """Greedy tokens of a slot whose prompt is computed, its first output token included."""
    tokens = [first]
    while len(tokens) < num_tokens:
        [output] = step(engine, [], [row(slot, (tokens[-1],), len(PROMPT) + len(tokens) - 1)])
        tokens += output.token_ids
    return tokens


def test_info_tells_what_was_loaded(engine: Engine, decoder: Decoder) -> None:
    info = engine.info
    assert (info.num_blocks, info.vocab_size, info.max_model_len) == (64, decoder.spec.vocab_size, 512)
    assert info.layout.bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert info.kv_bytes == 64 * info.layout.bytes_per_block == 64 * 16 * info.layout.bytes_per_token
    assert (info.dtype, info.device, info.weight_bytes) == ("float32", "cpu", decoder.weight_bytes)
    assert info.attention_backend == ("torch" if find_native() is None else "native")
    assert info.attention_reason


def test_outputs_keep_the_order_of_rows(engine: Engine, decoder: Decoder) -> None:
    """A chunk, a decode row and a whole prompt, given in an order that attention does not run in."""
    other = PROMPT[::-1]
    [first] = step(engine, [start(1)], [row(1)])
    outputs = step(
        engine,
        [start(3, other), start(0)],
        [row(3, other), row(1, first.token_ids, len(PROMPT)), row(0, PROMPT[:9], sample=False)],
    )
    expected = naive_greedy(decoder, PROMPT, 2)
    assert outputs[0].token_ids == tuple(naive_greedy(decoder, other, 1))
    assert (*first.token_ids, *outputs[1].token_ids) == tuple(expected)
    assert outputs[2] == RowOutput()
    [rest] = step(engine, [], [row(0, PROMPT[9:], 9)])
    assert rest.token_ids == (expected[0],)


def test_copies_run_before_writes(engine: Engine, decoder: Decoder) -> None:
    """Slot 1 takes over copies of slot 0's blocks and goes another way, while slot 0 goes on."""
    [first] = step(engine, [start(0)], [row(0)])
    copies = (BlockCopy(0, 10), BlockCopy(1, 11))
    ours, theirs = step(
        engine,
        [start(1, output_ids=(42,))],
        [row(0, first.token_ids, len(PROMPT)), row(1, (42,), len(PROMPT))],
        copies,
    )
    assert ours.token_ids == tuple(naive_greedy(decoder, PROMPT, 2)[1:])
    assert theirs.token_ids == tuple(naive_greedy(decoder, (*PROMPT, 42), 1))


def test_logits_of_a_chunked_prompt_equal_a_whole_one(engine: Engine, decoder: Decoder) -> None:
    """Through prompt logprobs, in chunks of 8: every position, and every alternative asked for."""
    params = SamplingParams(temperature=0.0, prompt_logprobs=5, logprobs=3)
    outputs = []
    for at in range(0, len(PROMPT), 8):
        chunk, targets = PROMPT[at : at + 8], PROMPT[at + 1 : at + 9]
        is_last = at + 8 >= len(PROMPT)
        outputs += step(
            engine,
            [start(params=params)] if at == 0 else [],
            [row(0, chunk, at, sample=is_last, prompt_targets=targets)],
        )
    expected = naive_logits(decoder, PROMPT).log_softmax(-1)
    scores = [entry for output in outputs for entry in output.prompt_logprobs]
    assert [entry.token_id for entry in scores] == list(PROMPT[1:])
    for entry, target, logprobs in zip(scores, PROMPT[1:], expected, strict=False):
        assert entry.logprob == pytest.approx(logprobs[target].item(), abs=1e-4)
        assert entry.top_logprobs == pytest.approx(logprobs.topk(5).values.tolist(), abs=1e-4)
        assert entry.top_ids == tuple(logprobs.topk(5).indices.tolist())
    [sampled] = outputs[-1].logprobs
    assert sampled.logprob == pytest.approx(expected[-1].max().item(), abs=1e-4)
    assert len(sampled.top_ids) == 3


def test_prompt_logits_are_made_in_bounded_pieces(
    engine: Engine, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    real = Decoder.logits

    def spy(self: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return real(self, hidden)

    params = SamplingParams(temperature=0.0, prompt_logprobs=0)
    [whole] = step(engine, [start(params=params)], [row(prompt_targets=PROMPT[1:])])
    monkeypatch.setattr(Decoder, "logits", spy)
    monkeypatch.setattr("engine.runner.MAX_PROMPT_LOGITS", 6 * decoder.spec.vocab_size)
    [pieces] = step(engine, [start(params=params)], [row(prompt_targets=PROMPT[1:])])
    assert rows == [6, 6, 6, 2, 1]
    assert [entry.logprob for entry in pieces.prompt_logprobs] == pytest.approx(
        [entry.logprob for entry in whole.prompt_logprobs], abs=1e-5
    )


def test_only_sampling_rows_meet_the_head(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    real = Decoder.logits
    monkeypatch.setattr(Decoder, "logits", lambda self, hidden: rows.append(len(hidden)) or real(self, hidden))
    step(engine, [start(0), start(1)], [row(0, sample=False), row(1)])
    step(engine, [start(0)], [row(0, sample=False)])
    assert rows == [1]


class Failing:
    """A constraint that fails when asked for its mask."""

    is_stopped = False
    error = None

    def start(self) -> "Failing":
        return self

    def fill_mask(self, out: Bitmask) -> None:
        raise RuntimeError("the grammar broke")

    def accept(self, token_ids: object) -> bool:
        return True


class OnlySeven(Failing):
    """Allows token 7, once."""

    def __init__(self) -> None:
        self.is_stopped = False

    def fill_mask(self, out: Bitmask) -> None:
        out[:] = np.int32(0)
        out[0] = np.int32(1 << 7)

    def accept(self, token_ids: object) -> bool:
        self.is_stopped = True
        return True


def test_a_failing_constraint_fails_its_row_alone(engine: Engine, decoder: Decoder) -> None:
    starts = [start(0), start(1, constraint=Failing()), start(2, constraint=OnlySeven())]
    good, bad, masked = step(engine, starts, [row(0), row(1), row(2)])
    assert good.token_ids == tuple(naive_greedy(decoder, PROMPT, 1))
    assert bad.token_ids == ()
    assert "the grammar broke" in (bad.error or "")
    assert masked == RowOutput(token_ids=(7,), stopped=True)


def test_a_token_outside_the_vocabulary_fails_its_row_alone(engine: Engine, decoder: Decoder) -> None:
    alien = (*PROMPT[:5], 99_999)
    bad, good = step(engine, [start(0, alien), start(1)], [row(0, alien), row(1)])
    assert "99999" in (bad.error or "")
    assert good.token_ids == tuple(naive_greedy(decoder, PROMPT, 1))
    [alone] = step(engine, [start(0, alien)], [row(0, alien)])
    assert alone.error
    [again] = step(engine, [start(0)], [row(0)])
    assert again.token_ids == good.token_ids


def test_nan_logits_fail_their_row_alone(engine: Engine, decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    real, expected = Decoder.logits, tuple(naive_greedy(decoder, PROMPT, 1))

    def poisoned(self: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        logits = real(self, hidden)
        logits[0] = float("nan")
        return logits

    monkeypatch.setattr(Decoder, "logits", poisoned)
    bad, good = step(engine, [start(0), start(1)], [row(0), row(1)])
    assert bad.error
    assert good.token_ids == expected


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "no rows"),
        ([row(0, num_drafts=2)], "2 drafts"),
        ([row(0, PROMPT * 4)], "84 tokens"),
        ([row(9)], "slot 9"),
    ],
)
def test_an_impossible_batch_is_a_step_error_that_changes_nothing(
    engine: Engine, decoder: Decoder, rows: list[Row], words: str
) -> None:
    [first] = step(engine, [start(0)], [row(0)])
    with pytest.raises(StepError, match=words):
        step(engine, [], rows)
    assert continue_alone(engine, 0, first.token_ids[0], 5) == naive_greedy(decoder, PROMPT, 5)


class BreaksOnce:
    """An attention that raises in its first step and works afterwards."""

    def __init__(self, error: Exception) -> None:
        self.error: Exception | None = error
        self.build = InputBuilder.build

    def __call__(self, builder: InputBuilder, batch: Batch) -> object:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return self.build(builder, batch)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("shapes differ"), "1 rows and 21 tokens failed: shapes differ"),
        (torch.OutOfMemoryError("tried to allocate 9 GiB"), "ran out of device memory: tried to allocate 9 GiB"),
        (MemoryError(), "ran out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "ran out of memory"),
    ],
    ids=str,
)
def test_a_step_that_fails_is_a_step_error_and_the_next_one_works(
    engine: Engine, decoder: Decoder, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    breaks = BreaksOnce(error)
    monkeypatch.setattr(InputBuilder, "build", lambda builder, batch: breaks(builder, batch))
    with pytest.raises(StepError, match=words):
        step(engine, [start(0)], [row(0)])
    [first] = step(engine, [start(0)], [row(0)])
    assert continue_alone(engine, 0, first.token_ids[0], 4) == naive_greedy(decoder, PROMPT, 4)


def test_a_lost_device_kills_the_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks = BreaksOnce(torch.AcceleratorError("an illegal memory access was encountered"))
    monkeypatch.setattr(InputBuilder, "build", lambda builder, batch: breaks(builder, batch))
    for _ in range(2):
        with pytest.raises(EngineDead, match="illegal memory access"):
            step(engine, [start(0)], [row(0)])


async def test_steps_run_on_one_thread_and_leave_the_loop_free(engine: Engine, decoder: Decoder) -> None:
    batch = Batch(1, (start(0),), (), (row(0),))
    ticks = 0
    task = asyncio.create_task(engine.step(batch))
    while not task.done():
        ticks += 1
        await asyncio.sleep(0)
    assert ticks > 1
    assert task.result().rows[0].token_ids == tuple(naive_greedy(decoder, PROMPT, 1))


async def test_a_closed_engine_is_dead(decoder: Decoder) -> None:
    engine = Engine.from_decoder(decoder, CONFIG)
    engine.close()
    engine.close()
    batch = Batch(1, (start(0),), (), (row(0),))
    with pytest.raises(EngineDead, match="closed"):
        await engine.step(batch)
    with pytest.raises(EngineDead, match="closed"):
        engine.step_sync(batch)


def test_load_reports_progress_in_order(source: ModelSource) -> None:
    told: list[tuple[str, float]] = []
    engine = Engine.load(source, CONFIG, lambda phase, done: told.append((phase, done)))
    engine.close()
    phases = list(dict.fromkeys(phase for phase, _ in told))
    phases = [phase for phase in phases if phase != COMPILING]
    assert phases == ["loading weights", "allocating the KV cache", "warming up"]
    for phase in phases:
        fractions = [done for name, done in told if name == phase]
        assert fractions == sorted(fractions)
        assert (fractions[0], fractions[-1]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_model_len": 513}, "max_model_len=513.*512"),
        ({"attention_backend": "flash"}, "no attention backend 'flash'"),
        ({"device": "meta"}, "no device 'meta'"),
    ],
)
def test_what_cannot_be_had_is_a_load_error(source: ModelSource, changes: dict[str, object], words: str) -> None:
    with pytest.raises(LoadError, match=words):
        Engine.load(source, replace(CONFIG, **changes))


def test_too_little_memory_is_said_before_weights_are_read(
    source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.engine.free_bytes", lambda device: 1000)
    told: list[str] = []
    with pytest.raises(OutOfMemoryAtLoad, match="free"):
        Engine.load(source, CONFIG, lambda phase, done: told.append(phase))
    assert set(told) <= {COMPILING}


@pytest.mark.parametrize("config", [
    EngineConfig(num_kv_blocks=1, block_size=1, max_num_seqs=1, max_num_batched_tokens=1),
    EngineConfig(num_kv_blocks=3, block_size=2, max_num_seqs=1, max_num_batched_tokens=3, max_model_len=4),
    EngineConfig(num_kv_blocks=2, max_model_len=1),
])  # fmt: skip
def test_the_smallest_engines_warm_up(decoder: Decoder, config: EngineConfig) -> None:
    engine = Engine.from_decoder(decoder, config)
    [output] = step(engine, [start(0, (5,))], [row(0, (5,))])
    assert output.token_ids == tuple(naive_greedy(decoder, (5,), 1))
    engine.close()


@pytest.mark.parametrize("attention_backend", ["auto", "torch"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_serves(source: ModelSource, decoder: Decoder, dtype: str, attention_backend: str) -> None:
    engine = Engine.load(source, replace(CONFIG, dtype=dtype, attention_backend=attention_backend))
    assert (engine.info.dtype, engine.info.kv_dtype) == (dtype, dtype)
    assert engine.info.layout.element_bytes == 2
    params = SamplingParams(temperature=0.0, logprobs=0)
    [output] = step(engine, [start(params=params)], [row()])
    expected = naive_logits(decoder, PROMPT)[-1].log_softmax(-1)
    assert output.logprobs[0].logprob == pytest.approx(expected[output.token_ids[0]].item(), abs=0.3)
    engine.close()


def test_warm_up_leaves_nothing_behind(engine: Engine, decoder: Decoder) -> None:
    [first] = step(engine, [start(0)], [row(0)])
    assert continue_alone(engine, 0, first.token_ids[0], 8) == naive_greedy(decoder, PROMPT, 8)


def test_a_folder_that_holds_no_model_is_a_load_error(tmp_path: Path) -> None:
    with pytest.raises(LoadError):
        Engine.load(ModelSource(tmp_path, "safetensors", "nothing"), CONFIG)
