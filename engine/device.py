"""Which device and number type to compute with, how many threads, and how much memory is free.

Knows torch and the operating system; knows nothing of models. `/proc` and `/sys` are read below a root folder that
tests replace.
"""

import os
import platform
from pathlib import Path

import torch

from engine.errors import LoadError

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_ROOT = Path("/")


def resolve_device(name: str) -> torch.device:
    """`auto` is the first of CUDA, Metal (mps) and CPU that is there; anything else is a torch device by name.

    Raises:
        LoadError: no device of that name.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise LoadError(f"no device {name!r}: it must be auto, cpu, cuda, cuda:N or mps") from error
    if device.type == "cuda":
        return _cuda_device(device)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise LoadError("device mps was asked for, and Metal is not available here")
    if device.type not in ("cpu", "mps"):
        raise LoadError(f"no device {name!r}: it must be auto, cpu, cuda, cuda:N or mps")
    return device


def _cuda_device(device: torch.device) -> torch.device:
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    named = str(device).partition(":")[2]
    index = int(named) if named else 0
    if index >= num_devices:
        raise LoadError(f"device {device} was asked for, and torch sees {num_devices} CUDA devices")
    return torch.device("cuda", index if named else torch.cuda.current_device())


def resolve_dtype(
    name: str, checkpoint_dtype: torch.dtype, device: torch.device, has_kernels: bool = False
) -> torch.dtype:
    """`auto` is the checkpoint's dtype where the device computes it well, else the nearest one it does.

    A CPU with native kernels (`has_kernels`) computes in float32 on weights of any form. Without them torch computes
    bfloat16 well only with instructions for it, and float16 never; there float32 is both exact and faster. GPUs before
    Ampere lack bfloat16 and take float16.

    Raises:
        LoadError: an unknown name.
    """
    if name != "auto":
        if name not in _DTYPES:
            raise LoadError(f"no dtype {name!r}; there are: auto, {', '.join(_DTYPES)}")
        return _DTYPES[name]
    if device.type == "cpu":
        bf16_is_fast = not has_kernels and checkpoint_dtype == torch.bfloat16 and cpu_computes_bf16()
        return torch.bfloat16 if bf16_is_fast else torch.float32
    if checkpoint_dtype == torch.bfloat16 and device.type == "cuda" and not cuda_computes_bf16(device):
        return torch.float16
    return checkpoint_dtype


def cpu_computes_bf16() -> bool:
    """Whether this CPU has bfloat16 instructions that torch uses: AVX512-BF16, AMX, or ARM's.

    oneDNN's own answer alone will not do on x86: it counts CPUs that emulate them.
    """
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return not is_x86 or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def cuda_computes_bf16(device: torch.device) -> bool:
    """Whether the GPU has bfloat16 units (compute capability 8.0 and later)."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def set_threads(threads: int | None) -> int:
    """Let torch's CPU operators use `threads` threads, or one per core this process may use; returns the number.

    Without a number the user's own `OMP_NUM_THREADS` stands (torch has read it), lowered to the container's CPU quota:
    more threads than cores only wait for each other.
    """
    if threads is None:
        threads = max(1, min(torch.get_num_threads(), len(os.sched_getaffinity(0)), _cpu_quota(_ROOT)))
    torch.set_num_threads(threads)
    return threads


def _cpu_quota(root: Path) -> int:
    """Whole cores that the control group grants, rounded up; very many without a limit (cgroup v2 `cpu.max`)."""
    quotas = [_read_words(folder / "cpu.max") for folder in _cgroup_folders(root)]
    cores = [-(-int(words[0]) // int(words[1])) for words in quotas if len(words) == 2 and words[0] != "max"]
    return min(cores, default=1 << 20)


def total_bytes(device: torch.device) -> int:
    """All memory of a GPU, in bytes; for a CPU what is free now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    return free_bytes(device)


def free_bytes(device: torch.device, root: Path = _ROOT) -> int:
    """Memory that this process can still take on the device, in bytes.

    On a CPU: what the kernel calls available, or what the tightest control group has left if that is less.
    """
    if device.type == "cuda":
        unused_by_torch = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused_by_torch
    if device.type == "mps":
        return max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return min([_available_ram(root), *_cgroup_memory_left(root)])


def _available_ram(root: Path) -> int:
    """`MemAvailable` of `/proc/meminfo`; physical memory where there is no such file."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    kib = {name: int(value.split()[0]) for name, value in (line.split(":", 1) for line in lines)}
    return kib["MemAvailable"] * 1024


def _cgroup_memory_left(root: Path) -> list[int]:
    """Bytes left in each control group above this process that limits memory. Reclaimable file cache is not used."""
    left = []
    for folder in _cgroup_folders(root):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _read_words(folder / limit_name), _read_words(folder / used_name)
            if limit and used and limit[0].isdigit():
                cache = _read_stat(folder / "memory.stat").get("inactive_file", 0)
                left.append(max(0, int(limit[0]) - max(0, int(used[0]) - cache)))
    return left


def _cgroup_folders(root: Path) -> list[Path]:
    """The folders of this process's control groups and all their parents, version 2 and version 1's memory."""
    base = root / "sys/fs/cgroup"
    folders: list[Path] = []
    for line in _read_lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        top = base / "memory" if controllers == "memory" else base
        if controllers in ("", "memory"):
            leaf = top / path.lstrip("/")
            folders += [leaf, *(parent for parent in leaf.parents if parent == top or top in parent.parents)]
    return [folder for folder in folders if folder.is_dir()]


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _read_words(path: Path) -> list[str]:
    return " ".join(_read_lines(path)).split()


def _read_stat(path: Path) -> dict[str, int]:
    return {name: int(value) for name, value in (line.split() for line in _read_lines(path))}
