"""Memory for weights: zeroed, aligned, apart from each other, and gone when nothing looks into it."""

import gc
import os
import re
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from engine.quant.arena import CHUNK_BYTES, WeightArena, on_heap, on_meta

DTYPES = (torch.uint8, torch.float16, torch.float32, torch.bfloat16)


@given(st.lists(st.tuples(st.integers(0, 5000), st.sampled_from(DTYPES)), min_size=1, max_size=30))
@settings(deadline=None, max_examples=50)
def test_tensors_are_zero_aligned_and_apart(wanted: list[tuple[int, torch.dtype]]) -> None:
    arena = WeightArena()
    tensors = [arena.zeros(size, dtype) for size, dtype in wanted]
    for number, tensor in enumerate(tensors):
        assert (tensor.shape, tensor.dtype) == ((wanted[number][0],), wanted[number][1])
        assert not tensor.any()
        assert tensor.data_ptr() % 64 == 0
        tensor.view(torch.uint8).fill_(number + 1)
    for number, tensor in enumerate(tensors):
        assert (tensor.view(torch.uint8) == number + 1).all()


def test_what_is_larger_than_a_chunk_has_one_of_its_own() -> None:
    arena = WeightArena()
    small, large, next_small = (arena.zeros(n, torch.uint8) for n in (100, CHUNK_BYTES + 1, 100))
    large[-1] = 7
    assert not small.any()
    assert not next_small.any()
    assert (len(large), int(large[-1])) == (CHUNK_BYTES + 1, 7)


def test_too_much_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="for weights"):
        WeightArena().zeros(1 << 60, torch.uint8)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_memory_goes_with_its_last_tensor() -> None:
    def mapped_kib() -> int:
        lines = Path(f"/proc/{os.getpid()}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmSize")).split()[1])

    before = mapped_kib()
    tensor = WeightArena().zeros(4 * CHUNK_BYTES, torch.uint8)
    assert mapped_kib() - before >= 4 * CHUNK_BYTES // 1024
    part = tensor[5:6]
    del tensor
    gc.collect()
    assert mapped_kib() - before >= 4 * CHUNK_BYTES // 1024
    assert int(part[0]) == 0
    del part
    gc.collect()
    assert mapped_kib() - before < CHUNK_BYTES // 1024


def test_the_other_sources() -> None:
    assert torch.equal(on_heap(3, torch.float16), torch.zeros(3, dtype=torch.float16))
    assert on_meta(3, torch.uint8).device.type == "meta"


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="needs Linux with huge pages")
def test_huge_pages_are_asked_for() -> None:
    tensor = WeightArena().zeros(1000, torch.uint8)
    address = tensor.data_ptr()
    ranges = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())[1:]
    bounds = [[int(end, 16) for end in text.split(" ", 1)[0].split("-")] for text in ranges]
    own = next(text for text, (low, high) in zip(ranges, bounds, strict=True) if low <= address < high)
    flags = next(line for line in own.splitlines() if line.startswith("VmFlags")).split()
    assert "hg" in flags
    assert "sh" not in flags  # what is shared gets small pages
