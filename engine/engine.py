"""The engine: a loaded model with its KV pool, and the one thread on which its steps run.

Knows how to load, size, warm up, step and close, and which errors mean what. What a step does is `runner`'s; how large
the pool becomes is `memory`'s. A step may be given while others run, and goes behind them. On a CPU the thread takes
one after the other. A GPU works on what the thread has launched; a second thread waits for it, and touches nothing.
"""

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.interface import AttentionShape
from engine.attention.select import select_attention
from engine.batch import Batch, Row, SlotStart, StepOutput
from engine.config import EngineConfig, EngineInfo, Progress, no_progress
from engine.device import free_bytes, resolve_device, resolve_dtype, set_threads, total_bytes
from engine.errors import EngineDead, EngineError, LoadError, OutOfMemoryAtLoad, StepError
from engine.gpu import decode_graphs, fused, graph_bytes
from engine.inputs import InputBuilder
from engine.memory import DeviceMemory, check_weights_fit, gib, pool_blocks
from engine.models.decoder import Decoder
from engine.models.load import load_decoder, read_checkpoint_dtype, read_spec, weight_bytes_of
from engine.models.spec import DecoderSpec
from engine.native import find_native
from engine.runner import Launched, Parts, Runner
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import Sampler
from engine.thread import WorkThread
from engine.transit import courier_for
from engine.weights.checkpoint import ModelSource
from kvpool.layout import KVLayout, element_and_scale_bytes
from kvpool.quant import CODE_DTYPES
from kvpool.storage import KVStorage
from kvpool.table import blocks_for

CPU_WARM_UP_TOKENS = 16
"""Prompt tokens of the warm-up on a CPU: enough to touch every operator; a GPU warms up with the largest step."""


class _Begun(NamedTuple):
    """A step that the thread has given to the device: when it began to, and what it has already."""

    batch: Batch
    began_s: float
    saved: tuple[bytes, ...]
    launched: Launched | None


class Engine:
    """A `StepEngine`. Make one with `load`, or with `from_decoder` around a model that is in memory already."""

    def __init__(self, runner: Runner, info: EngineInfo) -> None:
        self.info = info
        self._runner = runner
        self._worker = WorkThread("engine", partial(_use_device, info.device))
        self._waiter = WorkThread("engine-wait", partial(_use_device, info.device))
        self._finished_s = 0.0
        self._dead: str | None = None

    @classmethod
    def load(cls, source: ModelSource, config: EngineConfig, progress: Progress = no_progress) -> "Engine":
        """Load weights, size and allocate the KV pool, run a first prefill and decode. Blocks; call it in a thread.

        Raises:
            LoadError: the model cannot be loaded as asked.
            OutOfMemoryAtLoad: it does not fit; with what was needed and what fits.
        """
        device = resolve_device(config.device)
        has_kernels = device.type == "cpu" and find_native(progress) is not None
        dtype = resolve_dtype(config.dtype, read_checkpoint_dtype(source), device, has_kernels)
        set_threads(config.threads)
        spec = read_spec(source)
        max_model_len = _context_of(config, spec)
        weight_bytes = weight_bytes_of(source, dtype, device, progress, config.quantization)
        check_weights_fit(weight_bytes, _layout_of(spec, dtype, config), _memory_of(device))
        try:
            decoder = load_decoder(source, dtype, device, progress, max_model_len, config.quantization)
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            raise OutOfMemoryAtLoad(f"out of memory while loading weights: {error}") from error
        return cls.from_decoder(decoder, config, progress)

    @classmethod
    def from_decoder(cls, decoder: Decoder, config: EngineConfig, progress: Progress = no_progress) -> "Engine":
        """An engine around a model in memory: everything that `load` does after the weights.

        Raises:
            LoadError, OutOfMemoryAtLoad: as `load`.
        """
        max_model_len = _context_of(config, decoder.spec)
        progress("allocating the KV cache", 0.0)
        storage = _make_pool(decoder, config, max_model_len)
        progress("allocating the KV cache", 1.0)
        shape = AttentionShape(decoder.spec.num_heads, decoder.spec.head_dim**-0.5, decoder.spec.sliding_window)
        selection = select_attention(config.attention_backend, storage, shape)
        decoder = fused(decoder, selection.backend)
        parts = Parts(
            decoder=decoder,
            storage=storage,
            attention=selection.backend,
            sampler=Sampler(config.max_num_seqs, decoder.spec.vocab_size, decoder.device),
            builder=InputBuilder(
                config.max_num_seqs, config.max_num_batched_tokens, max_model_len, config.block_size, decoder.device
            ),
            graphs=decode_graphs(decoder, selection.backend, config, max_model_len),
            courier=courier_for(decoder.device),
        )
        info = EngineInfo(
            num_blocks=storage.num_blocks,
            vocab_size=decoder.spec.vocab_size,
            max_model_len=max_model_len,
            layout=storage.layout,
            dtype=_dtype_name(decoder.dtype),
            device=str(decoder.device),
            weight_bytes=decoder.weight_bytes,
            kv_bytes=storage.allocated_bytes,
            attention_backend=selection.backend.name,
            attention_reason=selection.reason,
            kv_dtype=_dtype_name(storage.dtype),
        )
        engine = cls(Runner(parts, config.max_num_seqs), info)
        engine._warm_up(config, progress)
        return engine

    async def step(self, batch: Batch) -> StepOutput:
        """Run one step on the engine's thread, behind those given before; these need not be done.

        Raises:
            StepError: the batch's rows are lost, the engine lives on.
            EngineDead: the engine was closed, or its device is lost.
        """
        if self._dead is not None:
            raise EngineDead(self._dead)
        if not self._runner.is_late:
            return await self._worker.run(partial(self.step_sync, batch))
        begun = await self._worker.run(partial(self._begin, batch))
        arrived_s = await self._waiter.run(partial(self._wait, begun))
        return await self._worker.run(partial(self._finish, begun, arrived_s))

    def step_sync(self, batch: Batch) -> StepOutput:
        """The same in the caller's thread; never beside another step. Raises as `step` does."""
        begun = self._begin(batch)
        return self._finish(begun, self._wait(begun) if self._runner.is_late else begun.began_s)

    def _begin(self, batch: Batch) -> _Begun:
        if self._dead is not None:
            raise EngineDead(self._dead)
        began_s = time.perf_counter()
        with self._errors_named(batch):
            saved = self._runner.move_blocks(batch) if batch.saves or batch.loads else ()
            launched = None if batch.only_moves_blocks else self._runner.launch(batch)
        return _Begun(batch, began_s, saved, launched)

    def _wait(self, begun: _Begun) -> float:
        """Until what the step gives is on the host; tells when that was."""
        if begun.launched is not None:
            with self._errors_named(begun.batch):
                begun.launched.arrival.wait()
        return time.perf_counter()

    def _finish(self, begun: _Begun, arrived_s: float) -> StepOutput:
        """A step's time counts from when the device had nothing else to do."""
        with self._errors_named(begun.batch):
            rows = () if begun.launched is None else self._runner.finish(begun.launched)
        now_s = arrived_s if self._runner.is_late else time.perf_counter()
        duration_s, self._finished_s = now_s - max(begun.began_s, self._finished_s), now_s
        return StepOutput(begun.batch.step, rows, duration_s, begun.saved)

    def close(self) -> None:
        """Let a running step end, then stop the threads. Later steps raise `EngineDead`. Harmless when repeated."""
        self._dead = self._dead or "the engine is closed"
        self._worker.close()
        self._waiter.close()
        self._runner.close()

    @contextmanager
    def _errors_named(self, batch: Batch) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, MemoryError, ValueError) as error:
            raise self._failure_of(batch, error) from error

    def _failure_of(self, batch: Batch, error: Exception) -> EngineError:
        """Which of the engine's errors an exception of a step means."""
        what = f"step {batch.step} with {len(batch.rows)} rows and {batch.num_tokens} tokens"
        if isinstance(error, torch.OutOfMemoryError):
            traceback.clear_frames(error.__traceback__)  # they hold the step's tensors
            torch.cuda.empty_cache()
            return StepError(f"{what} ran out of device memory: {error}")
        if isinstance(error, torch.AcceleratorError):
            self._dead = f"the device failed in {what}: {error}"
            return EngineDead(self._dead)
        if _is_out_of_memory(error):
            return StepError(f"{what} ran out of memory: {error}")
        return StepError(f"{what} failed: {error}")

    def _warm_up(self, config: EngineConfig, progress: Progress) -> None:
        """A first prefill and a first decode, so that no client waits for lazy initialisation.

        They use slot 0 and the pool's first blocks; whoever gets those later overwrites them before reading.
        """
        limit = config.max_num_batched_tokens
        if self.info.device == "cpu":
            limit = min(limit, CPU_WARM_UP_TOKENS)
        capacity = min(self.info.num_blocks * config.block_size, self.info.max_model_len)
        num_tokens = max(1, min(limit, capacity - 1))
        blocks = tuple(range(blocks_for(min(num_tokens + 1, capacity), config.block_size)))
        start = SlotStart(0, SamplingParams(temperature=0.0), 0, (0,) * num_tokens)
        steps = [Batch(0, (start,), (), (Row(0, 0, start.prompt_ids, 0, blocks, sample=True),))]
        if num_tokens < capacity:
            steps.append(Batch(0, (), (), (Row(0, num_tokens, (0,), 0, blocks, sample=True),)))
        if self.info.device != "cpu" and num_tokens > 1:  # kernels are compiled anew for chunks of odd sizes
            steps.append(Batch(0, (), (), (Row(0, num_tokens - 2, (0, 0), 0, blocks, sample=True),)))
        for done, batch in enumerate(steps):
            progress("warming up", done / len(steps))
            self._worker.call(partial(self.step_sync, batch))
        progress("warming up", 1.0)
        try:
            self._worker.call(partial(self._runner.record, progress))
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryAtLoad(
                f"out of memory while recording CUDA graphs: lower gpu_memory_utilization or enforce_eager ({error})"
            ) from error


def _use_device(name: str) -> None:
    """Let this thread's kernels go to the engine's GPU, whichever number it has."""
    if name.startswith("cuda"):
        torch.cuda.set_device(name)


def _context_of(config: EngineConfig, spec: DecoderSpec) -> int:
    """Tokens of one sequence at most: as configured, or the model's own."""
    if config.max_model_len is None:
        return spec.default_context
    if config.max_model_len > spec.max_context:
        raise LoadError(
            f"max_model_len={config.max_model_len} is beyond the model's context of {spec.max_context} tokens"
        )
    return config.max_model_len


def _layout_of(spec: DecoderSpec, dtype: torch.dtype, config: EngineConfig) -> KVLayout:
    sizes = element_and_scale_bytes(config.kv_cache_dtype, dtype.itemsize)
    return KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, config.block_size, *sizes)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _memory_of(device: torch.device, activation_bytes: int = 0) -> DeviceMemory:
    return DeviceMemory(str(device), device.type == "cpu", total_bytes(device), free_bytes(device), activation_bytes)


def _make_pool(decoder: Decoder, config: EngineConfig, max_model_len: int) -> KVStorage:
    """The KV pool, sized by `engine.memory` from what is free now that the weights are in place."""
    layout = _layout_of(decoder.spec, decoder.dtype, config)
    activation_bytes = _activation_bytes(decoder, config, max_model_len) + graph_bytes(decoder, config, max_model_len)
    memory = _memory_of(decoder.device, activation_bytes)
    num_blocks = pool_blocks(config, layout, max_model_len, memory)
    try:
        return KVStorage(layout, num_blocks, CODE_DTYPES.get(config.kv_cache_dtype, decoder.dtype), decoder.device)
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        raise OutOfMemoryAtLoad(
            f"a KV cache of {num_blocks} blocks ({gib(num_blocks * layout.bytes_per_block)}) could not be allocated "
            f"on {decoder.device}: {error}"
        ) from error


def _is_out_of_memory(error: Exception) -> bool:
    """Whether torch or Python ran out of memory; torch's CPU allocator says so in words only."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


@torch.inference_mode()
def _activation_bytes(decoder: Decoder, config: EngineConfig, max_model_len: int) -> int:
    """What the largest step takes beside weights and pool on CUDA, by trying one without attention; 0 elsewhere.

    Attention's scratch is added by rule: keys and values of one layer for the longest context, twice.
    """
    device, spec = decoder.device, decoder.spec
    if device.type != "cuda":
        return 0

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q.contiguous()

    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    token_ids = torch.zeros(config.max_num_batched_tokens, dtype=torch.int64, device=device)
    hidden = decoder.forward(token_ids, token_ids, attend)
    decoder.logits(hidden[: config.max_num_seqs]).softmax(-1)
    peak = torch.cuda.max_memory_allocated(device) - before
    del hidden
    torch.cuda.empty_cache()
    return peak + 4 * max_model_len * spec.kv_size * decoder.dtype.itemsize
