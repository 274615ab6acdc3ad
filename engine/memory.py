"""How large the KV pool becomes: arithmetic over what is asked for, what is needed and what is free. No tensors.

    asked for by number of blocks, or by bytes     exactly that, if it fits
    otherwise on a GPU                             total x gpu_memory_utilization - in use - a step's activations
    otherwise on a CPU                             the smaller of 4 GiB and a quarter of what is free

An unasked-for pool never exceeds what `max_num_seqs` sequences of `max_model_len` tokens can fill.
"""

from dataclasses import dataclass

from engine.config import EngineConfig
from engine.errors import OutOfMemoryAtLoad
from kvpool.layout import KVLayout
from kvpool.table import blocks_for

CPU_POOL_BYTES = 4 << 30
CPU_POOL_SHARE = 4

SMALLEST_USEFUL_TOKENS = 512
"""A pool that nobody sized must hold one sequence of so many tokens (or of `max_model_len`); else loading fails."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a device with the weights loaded, in bytes; `activation_bytes` is what the largest step will take."""

    name: str
    is_cpu: bool
    total_bytes: int
    free_bytes: int
    activation_bytes: int = 0


def check_weights_fit(weight_bytes: int, layout: KVLayout, memory: DeviceMemory) -> None:
    """Before anything is loaded: weights and the smallest pool against what is free.

    Raises:
        OutOfMemoryAtLoad: with both numbers.
    """
    needed = weight_bytes + layout.bytes_per_block
    if needed > memory.free_bytes:
        raise OutOfMemoryAtLoad(
            f"The weights need {gib(weight_bytes)} and a KV block {gib(layout.bytes_per_block)}, but "
            f"{memory.name} has {gib(memory.free_bytes)} free. Free memory, choose a smaller dtype or a smaller model."
        )


def pool_blocks(config: EngineConfig, layout: KVLayout, max_model_len: int, memory: DeviceMemory) -> int:
    """The number of KV blocks.

    Raises:
        OutOfMemoryAtLoad: what was asked for, or the smallest useful pool, does not fit; says what was needed and what
            fits.
    """
    free = memory.free_bytes - memory.activation_bytes
    if config.num_kv_blocks is not None:
        return _checked(config.num_kv_blocks, f"num_kv_blocks={config.num_kv_blocks}", layout, free, memory.name)
    if config.kv_cache_memory_bytes is not None:
        asked = f"kv_cache_memory_bytes={config.kv_cache_memory_bytes}"
        return _checked(layout.num_blocks_in(config.kv_cache_memory_bytes), asked, layout, free, memory.name)
    budget = _default_budget(config, memory)
    fitting = layout.num_blocks_in(min(budget, free))
    smallest = blocks_for(min(max_model_len, SMALLEST_USEFUL_TOKENS), layout.block_size)
    if fitting < smallest:
        raise OutOfMemoryAtLoad(
            f"A KV cache of {smallest * layout.block_size} tokens needs {gib(smallest * layout.bytes_per_block)}, but "
            f"only {gib(max(0, min(budget, free)))} of {memory.name}'s memory ({gib(memory.free_bytes)} free) may be "
            f"used for it, which fits {fitting * layout.block_size} tokens. Raise gpu_memory_utilization or set "
            f"kv_cache_memory_bytes, lower max_num_batched_tokens, or choose a smaller dtype or model."
        )
    return min(fitting, config.max_num_seqs * blocks_for(max_model_len, layout.block_size))


def _default_budget(config: EngineConfig, memory: DeviceMemory) -> int:
    if memory.is_cpu:
        return min(CPU_POOL_BYTES, memory.free_bytes // CPU_POOL_SHARE)
    in_use = memory.total_bytes - memory.free_bytes
    return int(memory.total_bytes * config.gpu_memory_utilization) - in_use - memory.activation_bytes


def _checked(num_blocks: int, asked: str, layout: KVLayout, free: int, device: str) -> int:
    """`num_blocks` if there is at least one and they fit `free` bytes."""
    needed = max(1, num_blocks) * layout.bytes_per_block
    if num_blocks < 1:
        raise OutOfMemoryAtLoad(
            f"{asked} holds no KV block: one block of {layout.block_size} tokens takes {needed} bytes"
        )
    if needed > free:
        fitting = layout.num_blocks_in(max(0, free))
        raise OutOfMemoryAtLoad(
            f"{asked} needs {gib(needed)} for KV blocks, but {device} has {gib(max(0, free))} free, which fits "
            f"{fitting} blocks ({fitting * layout.block_size} tokens)."
        )
    return num_blocks


def gib(num_bytes: int) -> str:
    """Bytes for people: GiB, or MiB below one GiB."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
