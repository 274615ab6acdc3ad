"""What this machine could do at best, measured now, and how much of it a server reaches.

    decode step >= (weight bytes + KV bytes of the batch) / stream read,  and >= 2 x parameters x sequences / GEMM
    prefill     >= 2 x parameters without the head x tokens / GEMM

`python -m bench.bounds` measures (in a process of its own, so that the load generator stays small) and prints JSON.
The arithmetic knows no torch.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

READ_BYTES = 1 << 28
GEMM_SHAPE = (512, 2048, 4096)
ENOUGH_S = 0.6
"""How long one kernel is repeated; the best repetition counts."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Stream read in bytes per second, and matrix products in operations per second by dtype."""

    read_bytes_per_s: float
    gemm_per_s: Mapping[str, float]

    def gemm(self, dtype: str | None) -> float:
        """Of a dtype, or the fastest floating-point one where it is not known or was not measured.

        Sixteen bits bound nobody below float32: they can be widened, and are where a processor has no units for them.
        """
        if dtype is not None and dtype in self.gemm_per_s:
            return max(self.gemm_per_s[dtype], self.gemm_per_s["float32"])
        return max(rate for name, rate in self.gemm_per_s.items() if name != "int8")


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What a served model makes the machine do.

    Attributes:
        weight_bytes: as held in memory; a decode step reads all of them once.
        kv_bytes_per_token: of one sequence, all layers.
        num_layer_params, num_head_params: in matrix products, without and of the head.
        dtype: of the computation, as torch writes it; None when a server does not tell.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    num_layer_params: int
    num_head_params: int
    dtype: str | None = None


def decode_step_s(cost: ModelCost, bounds: Bounds, num_seqs: int, context: float) -> float:
    """Least time of a step that decodes `num_seqs` sequences of `context` tokens each."""
    read_s = (cost.weight_bytes + num_seqs * context * cost.kv_bytes_per_token) / bounds.read_bytes_per_s
    num_params = cost.num_layer_params + cost.num_head_params
    return max(read_s, 2 * num_params * num_seqs / bounds.gemm(cost.dtype))


def prefill_s(cost: ModelCost, bounds: Bounds, num_tokens: float) -> float:
    """Least time to compute `num_tokens` prompt tokens."""
    return 2 * cost.num_layer_params * num_tokens / bounds.gemm(cost.dtype)


def round_s(cost: ModelCost, bounds: Bounds, num_seqs: int, lengths: tuple[float, float]) -> float:
    """Least time for `num_seqs` requests at once of `lengths` (in, out): prefill, then decode steps of them all.

    The first output token comes with the prefill. Time spent reading weights while a prefill computes is not
    subtracted, so a server that overlaps the two perfectly could come a little below.
    """
    num_in, num_out = lengths
    decode = sum(decode_step_s(cost, bounds, num_seqs, num_in + done) for done in range(1, round(num_out)))
    return prefill_s(cost, bounds, num_seqs * num_in) + decode


# ------------------------------------------------------------------------------------------------------- measuring


def measure_bounds() -> Bounds:
    """Measure in a fresh process, so that it has the machine's threads to itself."""
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-m", "bench.bounds"]
    output = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return Bounds(**json.loads(output.splitlines()[-1]))


def mean_of(first: Bounds, second: Bounds) -> Bounds:
    """What lay between two measurements around a run."""
    gemm = {name: (rate + second.gemm_per_s[name]) / 2 for name, rate in first.gemm_per_s.items()}
    return Bounds((first.read_bytes_per_s + second.read_bytes_per_s) / 2, gemm)


def _measure() -> Bounds:
    import os

    from server.openmp import tame_thread_barriers

    tame_thread_barriers(os.environ)
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    with torch.inference_mode():
        return Bounds(_stream_read(), _gemms())


def _stream_read() -> float:
    import torch

    data = torch.ones(READ_BYTES // 4)
    best_s = min(best_time(data.sum), best_time(data.view(torch.int32).max))
    return READ_BYTES / best_s


def _gemms() -> dict[str, float]:
    import torch

    rows, inner, columns = GEMM_SHAPE
    operations = 2 * rows * inner * columns
    rates = {}
    for dtype in (torch.float32, torch.bfloat16):
        left, right = torch.ones(rows, inner, dtype=dtype), torch.ones(columns, inner, dtype=dtype)
        rates[str(dtype).removeprefix("torch.")] = operations / best_time(partial(torch.mm, left, right.T))
    left, right = torch.ones(rows, inner, dtype=torch.int8), torch.ones(columns, inner, dtype=torch.int8)
    rates["int8"] = operations / best_time(partial(torch._int_mm, left, right.T))
    return rates


def best_time(work: Callable[[], object]) -> float:
    """The shortest of as many calls as fit into `ENOUGH_S`, in seconds; one that takes longer is called once.

    Some machines have no fast product of bfloat16 or int8: there torch takes seconds for one.
    """
    times: list[float] = []
    while sum(times) < ENOUGH_S:
        began_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - began_s)
    return min(times)


if __name__ == "__main__":
    measured = _measure()
    print(json.dumps({"read_bytes_per_s": measured.read_bytes_per_s, "gemm_per_s": dict(measured.gemm_per_s)}))
