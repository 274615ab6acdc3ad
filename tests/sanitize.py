"""`python -m tests.sanitize` (`make sanitize`): the native kernels' edge tests under address and undefined-behaviour
sanitizers, once without instruction-set flags, once for AVX2, and once for this machine's own level.

The kernels are compiled with the sanitizers; Python itself is not, so their run-time libraries are loaded before it.
The first bad access ends the tests. Where there is no compiler, or one without sanitizers, it says so and succeeds.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from engine.native import NativeUnavailable, find_compiler

ROOT = Path(__file__).parents[1]
TESTS = "tests/engine/test_native_memory.py"
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -O1 -g1"
"""-O1 compiles in a third of the time and checks the same accesses."""
LIBRARIES = ("libasan.so", "libubsan.so")
CAPABILITIES = ("DEFAULT", "AVX2", "AVX512")
"""torch's names of the instruction sets that the kernels are compiled for, the narrowest first."""
RUN = "import sys, pytest; from engine.native import load_native; load_native(); sys.exit(pytest.main(sys.argv[1:]))"
"""Kernels that do not compile are an error here, where the tests alone would be skipped."""


def main() -> int:
    """The first failing exit status, or 0."""
    try:
        libraries = [sanitizer(name) for name in LIBRARIES]
    except NativeUnavailable as error:
        print(f"no sanitizer run: {error}", file=sys.stderr)
        return 0
    for capability in capabilities():
        print(f"{capability}: {TESTS}", flush=True)
        command = [sys.executable, "-c", RUN, "-q", "-x", "--capture=sys", TESTS]  # what sanitizers say is not captured
        status = subprocess.run(command, cwd=ROOT, env=environment(libraries, capability), check=False).returncode
        if status != 0:
            return status if status > 0 else 1
    return 0


def sanitizer(name: str) -> str:
    """Path of one of the compiler's run-time libraries. Raises NativeUnavailable where there is none."""
    asked = subprocess.run([find_compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=False)
    path = asked.stdout.strip()
    if asked.returncode != 0 or not os.path.isabs(path):  # a compiler gives back the name of what it does not have
        raise NativeUnavailable(f"{find_compiler()} has no {name}")
    return path


def capabilities() -> Iterator[str]:
    """The levels that this machine can run."""
    own = torch.backends.cpu.get_cpu_capability()
    yield from CAPABILITIES[: CAPABILITIES.index(own) + 1] if own in CAPABILITIES else (own,)


def environment(libraries: list[str], capability: str) -> dict[str, str]:
    """Of the tests. Two threads, so that kernels share work; Python's own leaks are not looked for."""
    return {
        **os.environ,
        "LD_PRELOAD": ":".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "QUIRE_NATIVE_FLAGS": FLAGS,
        "ATEN_CPU_CAPABILITY": capability.lower(),
        "OMP_NUM_THREADS": "2",
    }


if __name__ == "__main__":
    sys.exit(main())
