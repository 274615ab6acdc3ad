"""Recorded decode steps: padding, buffers, the choice of size, what runs eagerly. A function stands for a graph."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from engine.attention.interface import AttentionShape, CapturableAttention
from engine.attention.torch_paged import TorchPagedAttention
from engine.config import EngineConfig, no_progress
from engine.engine import Engine
from engine.graphs import MAX_ROWS, DecodeGraphs, graph_sizes, reserved_bytes
from engine.inputs import InputBuilder, StepInputs
from engine.models.decoder import Decoder
from engine.models.load import load_decoder
from engine.runner import Parts, Runner
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import Sampler
from engine.weights.checkpoint import resolve_model
from kvpool.storage import KVStorage
from scheduler.request import Request
from tests.conformance.test_attention_backends import Case, build_inputs, filled_storage
from tests.fakes.capturable import CapturableTorchAttention, FakeRecorder
from tests.fakes.serving import MAX_NUM_SEQS as SERVED_SEQS
from tests.fakes.serving import serve
from tests.fakes.tiny_models import make_tiny_model

MAX_NUM_SEQS = 6
MAX_BLOCKS = 8


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("llama"))
    return load_decoder(resolve_model(str(folder)), torch.float32, torch.device("cpu"), lambda *_: None)


class World:
    """Two equal pools: one behind recorded steps, one behind eager ones."""

    def __init__(self, decoder: Decoder) -> None:
        spec = decoder.spec
        self.decoder = decoder
        self.shape = AttentionShape(spec.num_heads, spec.head_dim**-0.5, spec.sliding_window)
        case = Case([(0, 20)] * 10, (spec.num_heads, spec.num_kv_heads), spec.head_dim, spec.sliding_window)
        self.recorded, self.eager = (filled_storage(case, 4, torch.float32, seed=1) for _ in range(2))
        self.recorder = FakeRecorder()
        self.attention = CapturableTorchAttention(self.recorded, self.shape)
        self.graphs = DecodeGraphs(decoder, self.attention, self.recorder, MAX_NUM_SEQS, MAX_BLOCKS)

    def inputs(self, rows: Sequence[tuple[int, int]], seed: int = 2) -> StepInputs:
        attention = build_inputs(rows, 4, self.recorded.num_blocks, seed)
        ordered = sorted(rows, key=lambda row: (row[1] > 1, sum(row)))
        positions = torch.cat([torch.arange(context, context + count) for context, count in ordered])
        return StepInputs(
            token_ids=(positions * 31 + seed) % self.decoder.spec.vocab_size,
            positions=positions,
            attention=attention,
            sample_rows=attention.context_lens,
            sample_slots=attention.context_lens,
            sample_hidden=positions,
            prompt_scores=(),
        )

    def eagerly(self, inputs: StepInputs) -> Tensor:
        attend = TorchPagedAttention(self.eager, self.shape).plan(inputs.attention)
        return self.decoder.forward(inputs.token_ids, inputs.positions, attend)


@pytest.fixture
def world(decoder: Decoder) -> World:
    world = World(decoder)
    world.graphs.record_all(lambda *_: None)
    return world


def test_replayed_steps_equal_eager_ones(world: World) -> None:
    """Of any number of rows, in any order of sizes; padding stores nothing, and nothing of an earlier step is left."""
    for seed, num_rows in enumerate((6, 1, 3, 5, 2, 4, 6, 1)):
        inputs = world.inputs([(3 * row + seed, 1) for row in range(num_rows)], seed)
        got = world.graphs.forward(inputs)
        assert got is not None
        torch.testing.assert_close(got, world.eagerly(inputs), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(world.recorded.data, world.eager.data, atol=1e-6, rtol=1e-5)
    assert [world.attention.planned[index] for index in world.recorder.replayed] == [6, 1, 4, 6, 2, 4, 6, 1]


@pytest.mark.parametrize("rows", [[(0, 5)], [(3, 1), (0, 2)], [(2, 1)] * 7], ids=["a prompt", "mixed", "too many rows"])
def test_other_steps_run_eagerly(world: World, rows: Sequence[tuple[int, int]]) -> None:
    before = world.recorded.data.clone()
    assert world.graphs.forward(world.inputs(rows)) is None
    assert not world.recorder.replayed
    torch.testing.assert_close(world.recorded.data, before, atol=0, rtol=0)


def test_recording_touches_no_pool_and_begins_with_the_largest(decoder: Decoder) -> None:
    world = World(decoder)
    before = world.recorded.data.clone()
    told: list[float] = []
    world.graphs.record_all(lambda phase, fraction: told.append(fraction))
    assert world.attention.planned == [6, 4, 2, 1]
    assert world.recorder.num_recorded == 4
    assert told == sorted(told)
    assert (told[0], told[-1]) == (0.0, 1.0)
    torch.testing.assert_close(world.recorded.data, before, atol=0, rtol=0)


def test_nothing_is_replayed_before_it_is_recorded(decoder: Decoder) -> None:
    world = World(decoder)
    assert world.graphs.forward(world.inputs([(3, 1)])) is None


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 7, 8, 30, 100, 256, 300, 2000])
def test_sizes(max_num_seqs: int) -> None:
    sizes = graph_sizes(max_num_seqs)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == min(max_num_seqs, MAX_ROWS)
    for num_rows in range(9, sizes[-1] + 1):
        size = min(size for size in sizes if size >= num_rows)
        assert size <= num_rows * 4 / 3 + 4, "too much padding"


def test_memory_to_keep_free_grows_with_what_is_recorded(decoder: Decoder) -> None:
    few, many = (reserved_bytes(decoder.spec, torch.float16, rows, 64) for rows in (1, 256))
    longer = reserved_bytes(decoder.spec, torch.float16, 256, 64_000)
    assert 0 < few < many < longer
    assert longer - many == 256 * 4 * (64_000 - 64)


def test_a_backend_that_reads_lengths_on_the_host_is_not_capturable(world: World) -> None:
    assert not isinstance(TorchPagedAttention(world.eager, world.shape), CapturableAttention)
    assert isinstance(CapturableTorchAttention(world.eager, world.shape), CapturableAttention)


def test_served_tokens_are_those_of_eager_steps(decoder: Decoder) -> None:
    """The real scheduler over an engine that replays pure decode steps: the same greedy tokens, and drawn ones."""
    requests = [
        Request(f"r{i}", tuple(range(2, 5 + 9 * i)), SamplingParams(temperature=i / 4, seed=i), 12 + 7 * i)
        for i in range(5)
    ]
    config = EngineConfig(device="cpu", num_kv_blocks=96, max_num_seqs=SERVED_SEQS, max_model_len=128)
    plain = Engine.from_decoder(decoder, config)
    [expected] = serve(plain, requests, max_num_batched_tokens=48)
    plain.close()
    storage = KVStorage(plain.info.layout, 96, torch.float32, torch.device("cpu"))
    shape = AttentionShape(decoder.spec.num_heads, decoder.spec.head_dim**-0.5, decoder.spec.sliding_window)
    attention, recorder = CapturableTorchAttention(storage, shape), FakeRecorder()
    parts = Parts(
        decoder=decoder,
        storage=storage,
        attention=attention,
        sampler=Sampler(SERVED_SEQS, decoder.spec.vocab_size, decoder.device),
        builder=InputBuilder(SERVED_SEQS, 512, 128, config.block_size, decoder.device),
        graphs=DecodeGraphs(decoder, attention, recorder, SERVED_SEQS, 128 // config.block_size),
    )
    engine = Engine(Runner(parts, SERVED_SEQS), plain.info)
    engine._runner.record(no_progress)
    [answers] = serve(engine, requests, max_num_batched_tokens=48)
    engine.close()
    assert [[answer.token_ids for answer in choices] for choices in answers] == [
        [answer.token_ids for answer in choices] for choices in expected
    ]
    assert len(recorder.replayed) > 10
    assert len(set(recorder.replayed)) > 1
