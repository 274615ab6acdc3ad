"""How near decode attention comes to the memory's speed: bytes of keys and values over time, against a copy's.

A step of single-query rows over the shape of Llama 3.1 8B's attention (32 query heads, 8 kv heads of 128), recorded
once over enough layers that the cache of the chip cannot hold them, then replayed.
"""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import torch

from bench.gpu.clock import free_bytes, median_s
from bench.gpu.report import Finding, share, skipped
from engine.attention.interface import (
    AttentionBackend,
    AttentionInputs,
    AttentionShape,
    CapturableAttention,
    DecodeTensors,
)
from engine.attention.select import select_attention
from engine.errors import LoadError
from engine.graphs import CudaRecorder
from kvpool.layout import KVLayout
from kvpool.storage import KVStorage

PART = "decode attention"
BLOCK_SIZE = 16
LARGE_BLOCKS = 256
MIN_BYTES = 512 << 20
"""Keys and values that a replay reads at least: several times any cache."""

SHAPES = [(1, 4096), (1, 32_768), (32, 4096), (32, 32_768)]
"""Batch, context."""


class Setting:
    """One batch and context: a pool, its tables, and the work of one step over all its layers."""

    def __init__(
        self, batch: int, context: int, heads: tuple[int, int, int], device: torch.device, block_size: int = BLOCK_SIZE
    ) -> None:
        num_heads, num_kv_heads, head_dim = heads
        self.batch, self.context, self.device = batch, context, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        layer_bytes = batch * context * 2 * num_kv_heads * head_dim * self.dtype.itemsize
        num_layers = min(64, -(-MIN_BYTES // layer_bytes)) if device.type == "cuda" else 2
        self.layout = KVLayout(num_layers, num_kv_heads, head_dim, block_size, self.dtype.itemsize)
        self.shape = AttentionShape(num_heads, head_dim**-0.5, (None,) * num_layers)
        self.num_blocks = batch * (context // block_size)
        self.read_bytes = num_layers * layer_bytes

    @property
    def needed_bytes(self) -> int:
        return self.num_blocks * self.layout.bytes_per_block

    def storage(self) -> KVStorage:
        storage = KVStorage(self.layout, self.num_blocks, self.dtype, self.device)
        for block in storage.data.split(max(1, (64 << 20) // self.layout.bytes_per_block)):
            block.normal_()
        return storage

    def seconds(self, backend: AttentionBackend, repeats: int) -> float:
        """Of one step over all layers: replayed on a GPU, plainly called elsewhere."""
        tables = np.random.default_rng(1).permutation(self.num_blocks).reshape(self.batch, -1)
        lengths = np.full(self.batch, self.context)
        slots = torch.from_numpy((tables[:, -1] + 1) * self.layout.block_size - 1).to(self.device)
        block_tables = torch.from_numpy(tables).to(self.device)
        if isinstance(backend, CapturableAttention):
            lens = torch.from_numpy(lengths).to(self.device, torch.int32)
            attend = backend.plan_decode(DecodeTensors(lens, block_tables.to(torch.int32), slots))
        else:
            starts = np.arange(self.batch + 1)
            attend = backend.plan(AttentionInputs(starts, lengths, self.batch, block_tables, slots))
        q = torch.randn((self.batch, self.shape.num_heads, self.layout.head_dim), device=self.device).to(self.dtype)
        k = torch.randn((self.batch, self.layout.num_kv_heads, self.layout.head_dim), device=self.device).to(self.dtype)

        def run() -> None:
            for layer in range(self.layout.num_layers):
                attend(layer, q, k, k)

        work: Callable[[], None] = CudaRecorder().record(run) if self.device.type == "cuda" else run
        return median_s(work, self.device, repeats)


def findings(device: torch.device, bandwidth: float, tiny: bool, sweep: bool) -> Iterator[Finding]:
    heads = (4, 2, 16) if tiny else (32, 8, 128)
    for batch, context in [(1, 256), (4, 512)] if tiny else SHAPES:
        setting = Setting(batch, context, heads, device)
        what = f"batch {batch}, context {context}"
        if setting.needed_bytes > 0.8 * free_bytes(device):
            yield skipped(PART, what, f"needs {setting.needed_bytes / 2**30:.1f} GiB")
            continue
        storage = setting.storage()
        backend = select_attention("auto", storage, setting.shape).backend
        yield _measured(what, setting, setting.seconds(backend, repeats=20), bandwidth, backend.name)
        if sweep and backend.name == "triton":
            yield from _sweep(what, setting, storage, bandwidth)
        del storage, backend
    for name in libraries():
        yield from _by_library(name, tiny, heads, device, bandwidth)


def libraries() -> list[str]:
    """Optional backends whose libraries are installed; the kernels part says of the others that they are not."""
    modules = {"flashinfer": "flashinfer", "flash-attn": "flash_attn"}
    return [name for name, module in modules.items() if importlib.util.find_spec(module) is not None]


def _by_library(
    name: str, tiny: bool, heads: tuple[int, int, int], device: torch.device, bandwidth: float
) -> Iterator[Finding]:
    """The same shapes by an optional library, in blocks that each of them takes."""
    for batch, context in [(1, 256), (4, 512)] if tiny else SHAPES:
        setting, what = (
            Setting(batch, context, heads, device, LARGE_BLOCKS),
            f"batch {batch}, context {context}, {name}",
        )
        if setting.needed_bytes > 0.8 * free_bytes(device):
            continue  # as above
        try:
            backend = select_attention(name, setting.storage(), setting.shape).backend
            yield _measured(what, setting, setting.seconds(backend, repeats=20), bandwidth, name)
        except (LoadError, RuntimeError) as error:
            yield skipped(PART, what, str(error)[:100])


def _measured(what: str, setting: Setting, seconds: float, bandwidth: float, how: str) -> Finding:
    rate = setting.read_bytes / seconds
    value = f"{rate / 1e9:.0f} GB/s, {share(rate, bandwidth, 'a copy')}"
    layer_us = seconds / setting.layout.num_layers * 1e6
    return Finding(PART, what, value, details={"bytes_per_s": rate, "layer_us": layer_us, "how": how})


def _sweep(what: str, setting: Setting, storage: KVStorage, bandwidth: float) -> Iterator[Finding]:
    """Other sizes of the launch: all go to the file, the best also to the table."""
    from engine.attention.triton_paged import TritonAttention

    base = TritonAttention(storage, setting.shape).tuning
    tried = []
    for keys, stages, warps, programs in product((32, 64, 128), (3, 5), (2, 4, 8), (0.5, 1, 2)):
        num_programs = int(base.num_programs * programs)
        tuning = replace(base, tile_keys=keys, decode_stages=stages, decode_warps=warps, num_programs=num_programs)
        try:
            seconds = setting.seconds(TritonAttention(storage, setting.shape, tuning), repeats=10)
        except RuntimeError as error:  # too much shared memory for this device
            tried.append({"tuning": str(tuning), "error": str(error)[:200]})
            continue
        tried.append({"tuning": str(tuning), "seconds": seconds})
    best = min((one for one in tried if "seconds" in one), key=lambda one: one["seconds"])
    found = _measured(f"{what}, best of {len(tried)}", setting, best["seconds"], bandwidth, best["tuning"])
    yield replace(found, details={**found.details, "tried": tried})
