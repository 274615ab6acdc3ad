"""How many blocks a pool gets, and what is said when too few fit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.errors import OutOfMemoryAtLoad
from engine.memory import CPU_POOL_BYTES, DeviceMemory, check_weights_fit, gib, pool_blocks
from kvpool.layout import KVLayout

GIB = 1 << 30
LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=64, block_size=16, element_bytes=4)
BLOCK = LAYOUT.bytes_per_block
MANY = 1 << 20


def cpu(free: int) -> DeviceMemory:
    return DeviceMemory("cpu", True, free, free)


def gpu(total: int, free: int, activations: int = 0) -> DeviceMemory:
    return DeviceMemory("cuda:0", False, total, free, activations)


def test_asked_for_in_blocks_is_exactly_that() -> None:
    config = EngineConfig(num_kv_blocks=7, kv_cache_memory_bytes=GIB, max_num_seqs=1)
    assert pool_blocks(config, LAYOUT, 16, cpu(GIB)) == 7


def test_asked_for_in_bytes_is_as_many_as_fit_them() -> None:
    config = EngineConfig(kv_cache_memory_bytes=10 * BLOCK - 1)
    assert pool_blocks(config, LAYOUT, MANY, cpu(GIB)) == 9


def test_default_on_a_cpu_is_a_quarter_of_what_is_free_up_to_4_gib() -> None:
    assert pool_blocks(EngineConfig(), LAYOUT, MANY, cpu(4 * GIB)) == GIB // BLOCK
    assert pool_blocks(EngineConfig(), LAYOUT, MANY, cpu(100 * GIB)) == CPU_POOL_BYTES // BLOCK == 4 * GIB // BLOCK


def test_default_on_a_gpu_is_what_utilization_leaves() -> None:
    config = EngineConfig(gpu_memory_utilization=0.5)
    # half of 80 is 40; 20 are in use by weights and others, a step takes 5
    assert pool_blocks(config, LAYOUT, 2 * MANY, gpu(80 * GIB, 60 * GIB, 5 * GIB)) == 15 * GIB // BLOCK


def test_default_is_never_more_than_the_slots_can_fill() -> None:
    config = EngineConfig(max_num_seqs=3)
    assert pool_blocks(config, LAYOUT, 100, cpu(100 * GIB)) == 3 * 7


@given(st.integers(1, 200), st.integers(1, 5000), st.integers(0, 3 * GIB))
def test_what_is_granted_always_fits(max_num_seqs: int, max_model_len: int, free: int) -> None:
    config = EngineConfig(max_num_seqs=max_num_seqs)
    try:
        num_blocks = pool_blocks(config, LAYOUT, max_model_len, cpu(free))
    except OutOfMemoryAtLoad:
        assert free // 4 < 512 * LAYOUT.bytes_per_token
    else:
        assert 1 <= num_blocks * BLOCK <= free
        assert num_blocks * 16 >= min(max_model_len, 512)


@pytest.mark.parametrize(
    ("config", "memory", "words"),
    [
        (EngineConfig(num_kv_blocks=1000), cpu(100 * BLOCK), ["num_kv_blocks=1000", gib(1000 * BLOCK), "100 blocks"]),
        (EngineConfig(kv_cache_memory_bytes=GIB), cpu(GIB // 2), ["kv_cache_memory_bytes=", "1.00 GiB", "512.0 MiB"]),
        (EngineConfig(kv_cache_memory_bytes=BLOCK - 1), cpu(GIB), ["no KV block", str(BLOCK)]),
        (EngineConfig(), cpu(BLOCK), ["512 tokens", gib(32 * BLOCK), "0 tokens"]),
        (EngineConfig(), gpu(80 * GIB, 7 * GIB), ["cuda:0", "7.00 GiB free", "gpu_memory_utilization"]),
    ],
)
def test_what_does_not_fit_is_said_in_numbers(config: EngineConfig, memory: DeviceMemory, words: list[str]) -> None:
    with pytest.raises(OutOfMemoryAtLoad) as caught:
        pool_blocks(config, LAYOUT, MANY, memory)
    for word in words:
        assert word in str(caught.value)


def test_weights_that_do_not_fit_are_refused_before_loading() -> None:
    check_weights_fit(GIB - BLOCK, LAYOUT, cpu(GIB))
    with pytest.raises(OutOfMemoryAtLoad, match=r"2\.00 GiB.*cuda:0 has 1\.00 GiB"):
        check_weights_fit(2 * GIB, LAYOUT, gpu(2 * GIB, GIB))


@pytest.mark.parametrize(
    "bad",
    [
        {"block_size": 0},
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": -1},
        {"num_kv_blocks": 0},
        {"kv_cache_memory_bytes": 0},
        {"max_model_len": 0},
        {"threads": 0},
        {"gpu_memory_utilization": 0.0},
        {"gpu_memory_utilization": 1.5},
        {"dtype": "float8"},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused_by_name(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        EngineConfig(**bad)
