"""The Triton kernels, in processes of their own: once interpreted and compared, once compiled for real GPUs.

Triton decides at its first import whether it interprets, so neither suite can share this process.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed (a dev requirement)",
)


def run_suite(module: str, tmp_path: Path, **environment: str) -> None:
    """Run a suite of this folder with pytest; its output is this test's message when it fails."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--no-header", f"tests/conformance/{module}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(tmp_path), **environment}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]


@needs_triton
@pytest.mark.slow
def test_interpreted_kernels_equal_their_plain_twins(tmp_path: Path) -> None:
    run_suite("triton_interpreted.py", tmp_path, TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.slow
def test_kernels_compile_for_real_gpus(tmp_path: Path) -> None:
    run_suite("triton_compiled.py", tmp_path)
