"""What a figure was measured on: processor, cores, commit, and whether the machine was quiet."""

import contextlib
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUSY_SHARE = 0.3
"""Of the cores, in the load average before anything of ours runs: above, absolute times mean little."""


def processor() -> str:
    """Its name, the cores this process may use, and the widest vector instructions."""
    name = platform.processor() or platform.machine()
    flags: set[str] = set()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip() == "flags":
                flags = set(value.split())
    known = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
    widest = [flag for flag in known if flag in flags]
    return ", ".join([name, f"{num_cores()} cores", *([" ".join(widest)] if widest else [])])


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def commit() -> str:
    """The commit that is measured, marked when the tree differs from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


def software() -> str:
    """Versions that matter to the figures."""
    found = []
    for name in ("torch", "transformers", "uvicorn"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join([f"Python {platform.python_version()}", *found])


def load_average() -> float:
    """Of the last minute; 0 where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def busy_warning(load: float) -> str | None:
    """A sentence for the report when something else had the machine before the run began."""
    if load <= BUSY_SHARE * num_cores():
        return None
    return (
        f"**The machine was busy** (load average {load:.1f} on {num_cores()} cores before the start): "
        "only ratios inside one table mean anything."
    )
