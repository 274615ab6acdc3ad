"""The Triton kernels, in processes of their own: once interpreted and compared, once compiled for real GPUs.

Triton decides at its first import whether it interprets, so neither suite can share this process. Both run at the same
time, on one thread each.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None,
        reason="triton is not installed (a dev requirement)",
    ),
]


class Suite:
    """A file of this folder that pytest runs."""

    def __init__(self, file: str, folder: Path, **environment: str) -> None:
        self._log = folder / "log"
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--no-header", f"tests/conformance/{file}"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(folder / "cache"), **environment}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)

    def check(self) -> None:
        """Wait for it; its output is the message when it fails."""
        status = self._process.wait(timeout=900)
        assert status == 0, self._log.read_text()[-8000:]

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def suites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Suite, Suite]]:
    interpreted = Suite("triton_interpreted.py", tmp_path_factory.mktemp("interpreted"), TRITON_INTERPRET="1")
    compiled = Suite("triton_compiled.py", tmp_path_factory.mktemp("compiled"))
    yield interpreted, compiled
    interpreted.end()
    compiled.end()


def test_interpreted_kernels_equal_their_plain_twins(suites: tuple[Suite, Suite]) -> None:
    suites[0].check()


def test_kernels_compile_for_real_gpus(suites: tuple[Suite, Suite]) -> None:
    suites[1].check()
