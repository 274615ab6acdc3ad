"""Timing on one device, and its memory bandwidth as a large copy shows it."""

import statistics
import time
from collections.abc import Callable

import torch


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_s(work: Callable[[], object], device: torch.device, repeats: int, warm_up: int = 2) -> float:
    """Seconds of one call, the median: between two events on a GPU, so that launches ahead of it do not count."""
    for _ in range(warm_up):
        work()
    synchronize(device)
    if device.type != "cuda":
        return statistics.median(_wall_s(work) for _ in range(repeats))
    events = [[torch.cuda.Event(enable_timing=True) for _ in ("begin", "end")] for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        work()
        end.record()
    synchronize(device)
    return statistics.median(begin.elapsed_time(end) for begin, end in events) / 1e3


def _wall_s(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def copy_bandwidth(device: torch.device, num_bytes: int, repeats: int = 10) -> float:
    """Bytes per second of a device-to-device copy of random numbers, counting those read and those written."""
    source = torch.randn(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_s(lambda: target.copy_(source), device, repeats)


def free_bytes(device: torch.device) -> int:
    """What can still be allocated; on a CPU a size that keeps tiny runs tiny."""
    if device.type != "cuda":
        return 1 << 30
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
