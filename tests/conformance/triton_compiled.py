"""The Triton kernels through the real compiler, down to machine code, for GPUs that are not here.

Run by `test_triton.py`, in its own process. A driver that names a GPU stands in for one, and kernels are compiled
instead of launched. It proves that every kernel compiles in the dtypes that the interpreter cannot run, fits the
device's shared memory with the sizes chosen for it, spills no registers, and uses Hopper's matrix products where chunks
are attended; not that the results are right.
"""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from engine.attention import triton_paged
from engine.attention.interface import AttentionInputs, AttentionShape
from engine.attention.triton_paged import Device, TritonAttention, tuning_for
from engine.models.layers import RMSNorm, Rotation
from engine.models.triton_layers import add_rms_norm, silu_multiply
from kvpool.layout import SCALE_BYTES, KVLayout
from kvpool.quant import LARGEST_CODE
from kvpool.storage import KVStorage

GPUS = {86: Device(84, 101_376), 90: Device(132, 232_448)}
"""By compute capability: an RTX A6000, an H100."""

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Model:
    """What of a model decides its kernels."""

    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    window: int | None = None
    normed: bool = False


LLAMA = Model()
ODD = Model(heads=(9, 3), head_dim=80, window=300, normed=True)
WIDE = Model(heads=(8, 4), head_dim=256)


class AbsentGPU:
    """A Triton driver for compiling only."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What is launched in a test is compiled instead, for the capability given as parameter, and collected here."""
    kernels: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        assert all(size > 0 for size in grid)
        kernels.append(run(self, *args, grid=grid, warmup=True, **options))

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(triton_paged, "_check", lambda storage: None)
    triton.runtime.driver.set_active(AbsentGPU(request.param))
    yield kernels
    triton.runtime.driver._active = None


def attend(model: Model, gpu: Device, dtype: torch.dtype, kv_dtype: torch.dtype, block_size: int = 16) -> None:
    """A step of two decode rows and a chunk, with and without the fused rotation."""
    num_heads, num_kv_heads = model.heads
    scale_bytes = SCALE_BYTES if kv_dtype in LARGEST_CODE else 0
    layout = KVLayout(1, num_kv_heads, model.head_dim, block_size, kv_dtype.itemsize, scale_bytes)
    storage = KVStorage(layout, 32, kv_dtype, torch.device("cpu"))
    shape = AttentionShape(num_heads, model.head_dim**-0.5, (model.window,))
    backend = TritonAttention(storage, shape, tuning_for(gpu, kv_dtype, model.head_dim))
    num_tokens = 202
    step = backend.plan(
        AttentionInputs(
            query_starts=np.array([0, 1, 2, num_tokens]),
            context_lens=np.array([100, 200, 300]),
            num_decode_rows=2,
            block_tables=torch.zeros((3, 20), dtype=torch.int64),
            slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
        )
    )
    qkv = torch.zeros((num_tokens, num_heads + 2 * num_kv_heads, model.head_dim), dtype=dtype)
    step(0, *torch.split(qkv, [num_heads, num_kv_heads, num_kv_heads], dim=1))
    turn = torch.zeros((num_tokens, 1, model.head_dim // 2), dtype=dtype)
    norm = RMSNorm(torch.zeros(model.head_dim, dtype=dtype), 1e-6)
    step.rotate_and_attend(0, qkv, Rotation(turn, turn), (norm, norm) if model.normed else None)


def check(kernels: list[Any], gpu: Device, tmp_path: Path) -> str:
    """Every kernel fits and spills nothing; returns the PTX of attention."""
    assert {"store_kernel", "rotate_store_kernel", "attention_kernel", "merge_kernel"} <= {
        kernel.name for kernel in kernels
    }
    code = ""
    for kernel in {kernel.hash: kernel for kernel in kernels}.values():
        assert kernel.metadata.shared <= gpu.shared_bytes, kernel.name
        path = tmp_path / f"{kernel.name}.cubin"
        path.write_bytes(kernel.asm["cubin"])
        used = resources_of(path)
        match = re.search(r"STACK:(\d+).*LOCAL:(\d+)", used)
        assert match is not None
        assert match.groups() == ("0", "0"), f"{kernel.name} spills registers: {used}"
        code += kernel.asm["ptx"] if kernel.name == "attention_kernel" else ""
    return code


def resources_of(cubin: Path) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("compiled", "model", "dtype", "kv_dtype"),
    [
        (90, LLAMA, BF16, BF16),
        (90, LLAMA, BF16, torch.float8_e4m3fn),
        (90, WIDE, BF16, BF16),
        (86, LLAMA, torch.float16, torch.int8),
        (86, ODD, torch.float16, torch.float16),
    ],
    indirect=["compiled"],
    ids=str,
)
def test_attention_compiles(
    compiled: list[Any],
    model: Model,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    capability = request.node.callspec.params["compiled"]
    attend(model, GPUS[capability], dtype, kv_dtype, block_size=24 if model is ODD else 16)
    code = check(compiled, GPUS[capability], tmp_path)
    assert "cp.async" in code, "keys and values are not loaded ahead"
    assert ("wgmma.mma_async" in code) == (capability == 90), "Hopper's matrix products"


@pytest.mark.parametrize("compiled", [90], indirect=True)
def test_layers_compile(compiled: list[Any]) -> None:
    hidden, norm = torch.zeros((3, 4096), dtype=BF16), RMSNorm(torch.zeros(4096, dtype=BF16), 1e-5)
    add_rms_norm(hidden, hidden, norm)
    add_rms_norm(hidden, None, norm)
    silu_multiply(torch.zeros((3, 28_672), dtype=BF16))
    assert len(compiled) == 3
