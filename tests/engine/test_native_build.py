"""Building and finding the kernels: switched off, no compiler, a failing one, the cache, and what the user is told."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine import native
from engine.config import no_progress
from engine.errors import LoadError
from engine.models.load import load_decoder
from engine.native import NativeUnavailable, build_native, find_native, load_native
from engine.weights.checkpoint import resolve_model
from tests.fakes.tiny_models import make_tiny_model

ROOT = Path(__file__).parents[2]

SERVE_A_STEP = """
import logging, sys, torch
logging.basicConfig(level="WARNING", format="%(message)s", stream=sys.stdout)
from engine.batch import Batch, Row, SlotStart
from engine.config import EngineConfig
from engine.engine import Engine
from engine.models.layers import DenseLinear
from engine.sampling.params import SamplingParams
from engine.weights.checkpoint import resolve_model
engine = Engine.load(resolve_model(sys.argv[1]), EngineConfig(num_kv_blocks=8, dtype="float32", device="cpu"))
start = SlotStart(0, SamplingParams(temperature=0.0), 0, (5, 6, 7))
[row] = engine.step_sync(Batch(1, (start,), (), (Row(0, 0, (5, 6, 7), 0, (0,), sample=True),))).rows
print("backend", engine.info.attention_backend, "tokens", len(row.token_ids), "bytes", engine.info.weight_bytes)
engine.close()
"""


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"QUIRE_NATIVE": "0"}, "switched off by QUIRE_NATIVE=0"),
        ({"CXX": "/nonexistent/c++", "PATH": ""}, "no C++ compiler found"),
        ({"CXX": "/bin/false"}, "/bin/false failed"),
    ],
)
def test_without_kernels_torch_serves_and_says_so_once(
    environment: dict[str, str], reason: str, tmp_path: Path
) -> None:
    folder = make_tiny_model("llama", tmp_path / "model")
    everything = {**os.environ, "QUIRE_CACHE_DIR": str(tmp_path / "cache"), **environment}
    command = [sys.executable, "-c", SERVE_A_STEP, str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=everything, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "backend torch tokens 1" in done.stdout
    assert done.stdout.count(reason) == 1
    assert not list(tmp_path.glob("cache/*.so"))


@pytest.mark.parametrize("quantization", ["int8", "int4", "int4_g128"])
def test_rounding_at_load_needs_kernels(quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = resolve_model(str(make_tiny_model("llama", tmp_path / "model")))
    monkeypatch.setenv("QUIRE_NATIVE", "0")
    with pytest.raises(LoadError, match=f"quantization '{quantization}' needs the native CPU kernels"):
        load_decoder(source, torch.float32, torch.device("cpu"), no_progress, None, quantization)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own, with everything that was learnt about others forgotten."""
    if find_native() is None:
        pytest.skip("no native kernels here")
    library = build_native()
    fake = tmp_path / "c++"
    fake.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >> {tmp_path}/calls\n'
        'for last; do :; done\ncase "$*" in\n'
        f'  *-shared*) cp "{library}" "$last";;\n  *) : > "$last";;\nesac\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    for cached in (native._library_path, native._build_problem, native._open):
        monkeypatch.setattr(native, cached.__name__, native.cache(cached.__wrapped__))
    return tmp_path


def test_built_once_and_told_while_it_lasts(empty_cache: Path) -> None:
    told: list[tuple[str, float]] = []
    load_native(lambda phase, done: told.append((phase, done)))
    assert told == [("compiling native kernels", 0.0), ("compiling native kernels", 1.0)]
    calls = (empty_cache / "calls").read_text().splitlines()
    assert len(calls) == 1 + len(list((ROOT / "engine" / "csrc").glob("*.cpp")))
    load_native(lambda phase, done: told.append((phase, done)))
    assert len(told) == 2
    assert len((empty_cache / "calls").read_text().splitlines()) == len(calls)
    assert [path.suffix for path in (empty_cache / "cache").iterdir()] == [".so"]


def test_other_flags_are_another_library(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build_native()
    monkeypatch.setenv("QUIRE_NATIVE_FLAGS", "-DANOTHER=1 -g")
    second = build_native()
    assert first != second
    assert "-DANOTHER=1 -g" in (empty_cache / "calls").read_text()


def test_a_failing_compiler_is_tried_once_and_quoted(empty_cache: Path) -> None:
    (empty_cache / "c++").write_text(f"#!/bin/sh\necho call >> {empty_cache}/calls\necho no such flag >&2\nexit 3\n")
    for _ in range(2):
        with pytest.raises(NativeUnavailable, match="no such flag"):
            load_native()
    calls = (empty_cache / "calls").read_text().count("call")
    assert calls <= len(list((ROOT / "engine" / "csrc").glob("*.cpp")))
    assert not list((empty_cache / "cache").glob("*.so"))


def test_switched_off_wins_over_a_built_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_NATIVE", "0")
    with pytest.raises(NativeUnavailable, match="QUIRE_NATIVE=0"):
        load_native()
    assert find_native() is None
