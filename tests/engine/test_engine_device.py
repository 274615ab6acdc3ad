"""Choosing device, dtype and threads, and reading how much memory is free from the kernel's files."""

from pathlib import Path

import pytest
import torch

from engine import device as device_module
from engine.device import free_bytes, resolve_device, resolve_dtype, set_threads, total_bytes
from engine.errors import LoadError

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
GIB = 1 << 30


def fake_root(root: Path, *, available: int, cgroup: str = "0::/", files: dict[str, str] | None = None) -> Path:
    """A file system with just what the module reads; `files` lie below `sys/fs/cgroup`."""
    contents = {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {available // 1024} kB\n", "proc/self/cgroup": cgroup}
    contents |= {f"sys/fs/cgroup/{name}": text for name, text in (files or {}).items()}
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def pretend_cuda(monkeypatch: pytest.MonkeyPatch, count: int, current: int = 0) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)


def test_auto_prefers_cuda_then_metal_then_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch, 2, current=1)
    assert resolve_device("auto") == torch.device("cuda", 1)
    pretend_cuda(monkeypatch, 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert resolve_device("auto").type == "mps"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert resolve_device("auto") == CPU


def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch, 2, current=1)
    assert resolve_device("cpu") == CPU
    assert resolve_device("cuda") == torch.device("cuda", 1)
    assert resolve_device("cuda:0") == torch.device("cuda", 0)


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "mps", "meta", "gpu", "cpu:x", ""])
def test_a_device_that_is_not_there_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch, 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(LoadError, match="device"):
        resolve_device(name)


def test_a_cuda_index_beyond_the_last_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch, 2)
    with pytest.raises(LoadError, match=r"cuda:2.*2 CUDA devices"):
        resolve_device("cuda:2")


@pytest.mark.parametrize("bf16_cpu", [True, False])
@pytest.mark.parametrize("checkpoint", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_auto_dtype_on_a_cpu(checkpoint: torch.dtype, bf16_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "cpu_computes_bf16", lambda: bf16_cpu)
    expected = torch.bfloat16 if bf16_cpu and checkpoint == torch.bfloat16 else torch.float32
    assert resolve_dtype("auto", checkpoint, CPU) == expected
    assert resolve_dtype("auto", checkpoint, CPU, has_kernels=True) == torch.float32


@pytest.mark.parametrize("bf16_gpu", [True, False])
@pytest.mark.parametrize("checkpoint", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_auto_dtype_on_a_gpu(checkpoint: torch.dtype, bf16_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "cuda_computes_bf16", lambda device: bf16_gpu)
    expected = torch.float16 if checkpoint == torch.bfloat16 and not bf16_gpu else checkpoint
    assert resolve_dtype("auto", checkpoint, CUDA) == expected


def test_a_named_dtype_is_taken_as_it_is() -> None:
    assert resolve_dtype("bfloat16", torch.float32, CPU) == torch.bfloat16
    assert resolve_dtype("float16", torch.float32, CPU) == torch.float16
    with pytest.raises(LoadError, match=r"'int8'.*bfloat16"):
        resolve_dtype("int8", torch.float32, CPU)


def test_free_memory_is_what_the_kernel_calls_available(tmp_path: Path) -> None:
    assert free_bytes(CPU, fake_root(tmp_path, available=7 * GIB)) == 7 * GIB
    assert 0 < free_bytes(CPU) == pytest.approx(total_bytes(CPU), rel=0.5)


def test_a_version_2_limit_counts_with_reclaimable_cache_given_back(tmp_path: Path) -> None:
    files = {
        "a/b/memory.max": f"{4 * GIB}",
        "a/b/memory.current": f"{3 * GIB}",
        "a/b/memory.stat": f"inactive_file {GIB}",
    }
    assert free_bytes(CPU, fake_root(tmp_path, available=7 * GIB, cgroup="0::/a/b\n", files=files)) == 2 * GIB


def test_a_parents_tighter_limit_counts(tmp_path: Path) -> None:
    files = {"a/b/memory.max": "max", "a/b/memory.current": "5", "a/memory.max": f"{GIB}", "a/memory.current": "0"}
    assert free_bytes(CPU, fake_root(tmp_path, available=7 * GIB, cgroup="0::/a/b\n", files=files)) == GIB


def test_a_limit_seen_from_inside_a_container_counts(tmp_path: Path) -> None:
    """The path names the host's folder, which does not exist here; the limit is at the root of the mount."""
    files = {"memory.max": f"{GIB}", "memory.current": f"{2 * GIB}"}
    assert free_bytes(CPU, fake_root(tmp_path, available=7 * GIB, cgroup="0::/host/x\n", files=files)) == 0


def test_a_version_1_limit_counts(tmp_path: Path) -> None:
    files = {"memory/a/memory.limit_in_bytes": f"{3 * GIB}", "memory/a/memory.usage_in_bytes": f"{GIB}"}
    root = fake_root(tmp_path, available=7 * GIB, cgroup="9:cpu:/a\n4:memory:/a\n0::/\n", files=files)
    assert free_bytes(CPU, root) == 2 * GIB


def test_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        assert set_threads(3) == 3 == torch.get_num_threads()
        root = fake_root(tmp_path, available=GIB, files={"cpu.max": "150000 100000"})
        monkeypatch.setattr(device_module, "_ROOT", root)
        monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
        assert set_threads(None) == 2
        (root / "sys/fs/cgroup/cpu.max").write_text("max 100000")
        assert set_threads(None) == 2  # torch's own number stands
    finally:
        torch.set_num_threads(before)
