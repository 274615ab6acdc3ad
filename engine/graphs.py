"""Decode steps recorded once and replayed: on a GPU a replay costs one launch instead of ten for every layer.

A step is replayed when each of its rows computes one token. It is copied into fixed buffers, padded to the next size
that was recorded, and its hidden states are read from a fixed buffer. Every other step runs eagerly.

    rows          0 .. R-1: the step's          R .. size-1: padding
    context_lens  their tokens                  0, so they attend over nothing
    slot_mapping  where keys and values go      -1, so they store nothing

Knows buffers and sizes; what a device's graph is, only `CudaRecorder` knows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.attention.interface import CapturableAttention, DecodeTensors
from engine.config import Progress
from engine.inputs import StepInputs
from engine.models.decoder import Decoder
from engine.models.spec import DecoderSpec
from engine.transit import upload

MAX_ROWS = 512
"""Larger steps run eagerly: their launches take less than their work."""

NODES_PER_LAYER = 12
NODE_BYTES = 16 << 10
"""Device memory that the driver takes for one recorded kernel, by rule."""

PARTS_PROGRAMS = 1024
"""Row-times-segment parts of split attention that are alive at once, at most about."""


class Recorder(Protocol):
    """Turns work on a device into something that repeats it."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run once or more, then record; the returned function repeats the work on the same memory."""


class CudaRecorder:
    """CUDA graphs. All share one memory pool, as they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """First as ordinary work: kernels are compiled and loaded there, which a recording must not do."""
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        return graph.replay


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Row counts to record, ascending, up to `max_num_seqs`: padding is at most a third beyond 8 rows."""
    largest = min(max_num_seqs, MAX_ROWS)
    steps = (1, 2, 4, *range(8, 32, 8), *range(32, 128, 16), *range(128, MAX_ROWS + 1, 32))
    return (*(size for size in steps if size < largest), largest)


def reserved_bytes(spec: DecoderSpec, dtype: torch.dtype, max_num_seqs: int, max_blocks: int) -> int:
    """Device memory that recording will take, to be kept free when the KV pool is sized. A rule, a little generous.

    Activations of the largest size (they are reused from layer to layer), parts of split attention, the buffers, and
    the driver's own record of each kernel.
    """
    sizes = graph_sizes(max_num_seqs)
    widths = 6 * spec.hidden_size + 2 * (spec.query_size + spec.kv_size) + 3 * spec.intermediate_size
    parts = PARTS_PROGRAMS * spec.num_heads * (spec.head_dim + 1) * 4
    buffers = sizes[-1] * (4 * max_blocks + 28 + spec.hidden_size * dtype.itemsize)
    records = len(sizes) * spec.num_layers * NODES_PER_LAYER * NODE_BYTES
    return sizes[-1] * widths * dtype.itemsize + parts + buffers + records


@dataclass(frozen=True, slots=True, eq=False)
class _Buffers:
    """What recorded work reads and writes; a size uses the first rows."""

    token_ids: Tensor
    positions: Tensor
    decode: DecodeTensors
    hidden: Tensor

    @classmethod
    def allocate(cls, decoder: Decoder, num_rows: int, max_blocks: int) -> "_Buffers":
        """All rows are padding at first."""
        device = decoder.device
        return cls(
            token_ids=torch.zeros(num_rows, dtype=torch.int64, device=device),
            positions=torch.zeros(num_rows, dtype=torch.int64, device=device),
            decode=DecodeTensors(
                context_lens=torch.zeros(num_rows, dtype=torch.int32, device=device),
                block_tables=torch.zeros((num_rows, max_blocks), dtype=torch.int32, device=device),
                slot_mapping=torch.full((num_rows,), -1, dtype=torch.int64, device=device),
            ),
            hidden=torch.zeros((num_rows, decoder.spec.hidden_size), dtype=decoder.dtype, device=device),
        )


class DecodeGraphs:
    """The recorded sizes of one model over one pool. Used by one thread."""

    def __init__(
        self,
        decoder: Decoder,
        attention: CapturableAttention,
        recorder: Recorder,
        max_num_seqs: int,
        max_blocks: int,
    ) -> None:
        """`max_num_seqs` rows at most are recorded for; `max_blocks` is the width of the longest block table."""
        self._decoder = decoder
        self._attention = attention
        self._recorder = recorder
        self._sizes = graph_sizes(max_num_seqs)
        self._buffers = _Buffers.allocate(decoder, self._sizes[-1], max_blocks)
        self._runs: dict[int, Callable[[], None]] = {}
        self._replays: dict[int, Callable[[], None]] = {}

    @torch.inference_mode()
    def record_all(self, progress: Progress) -> None:
        """Record every size, the largest first, so that the others find its memory to reuse."""
        for done, size in enumerate(reversed(self._sizes)):
            progress("recording CUDA graphs", done / len(self._sizes))
            run = self._work_of(size)
            self._runs[size] = run  # keeps alive what the recording reads
            self._replays[size] = self._recorder.record(run)
        progress("recording CUDA graphs", 1.0)

    def size_for(self, inputs: StepInputs) -> int | None:
        """The recorded size that this step would be padded to; None when it must run eagerly."""
        attention = inputs.attention
        if attention.num_decode_rows < attention.num_rows:
            return None
        return next((size for size in self._sizes if size >= attention.num_rows and size in self._replays), None)

    def forward(self, inputs: StepInputs) -> Tensor | None:
        """Hidden states `[R, hidden]` of a step, valid until the next one; None when it must run eagerly."""
        size = self.size_for(inputs)
        if size is None:
            return None
        self._fill(inputs, size)
        self._replays[size]()
        return self._buffers.hidden[: inputs.attention.num_rows]

    def _work_of(self, size: int) -> Callable[[], None]:
        buffers, decode = self._buffers, self._buffers.decode
        attend = self._attention.plan_decode(
            DecodeTensors(decode.context_lens[:size], decode.block_tables[:size], decode.slot_mapping[:size])
        )

        def run() -> None:
            hidden = self._decoder.forward(buffers.token_ids[:size], buffers.positions[:size], attend)
            buffers.hidden[:size].copy_(hidden)

        return run

    def _fill(self, inputs: StepInputs, size: int) -> None:
        """Copy a step in, and turn the rows after it into padding."""
        buffers, decode, attention = self._buffers, self._buffers.decode, inputs.attention
        num_rows, tables = attention.num_rows, attention.block_tables
        lengths = np.zeros(size, dtype=np.int32)
        lengths[:num_rows] = attention.context_lens
        decode.context_lens[:size].copy_(upload(torch.from_numpy(lengths), decode.context_lens.device))
        decode.block_tables[:num_rows, : tables.shape[1]].copy_(tables)
        decode.slot_mapping[:num_rows].copy_(attention.slot_mapping)
        decode.slot_mapping[num_rows:size].fill_(-1)
        buffers.token_ids[:num_rows].copy_(inputs.token_ids)
        buffers.positions[:num_rows].copy_(inputs.positions)
