"""A CPU-only installation needs no triton, flash-attn or FlashInfer, and one that has them loads none: proven in fresh
processes."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.tiny_models import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]

SERVE = """
import asyncio, sys
folder, is_blocked, message = sys.argv[1:]
libraries = ("triton", "flash_attn", "flashinfer")
if is_blocked == "blocked":
    sys.modules.update(dict.fromkeys(libraries))  # what an installation without them looks like to an import
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import LoadError
from engine.sampling.params import SamplingParams
from engine.weights.checkpoint import resolve_model
from kvpool.pool import BlockPool
from scheduler.config import SchedulerConfig
from scheduler.loop import Scheduler
from scheduler.request import Request

async def serve(engine):
    scheduler = Scheduler(engine, BlockPool(64), SchedulerConfig(max_model_len=256))
    loop = asyncio.create_task(scheduler.run())
    handle = scheduler.submit(Request("r", (1, 2, 3), SamplingParams(temperature=0.0), 4))
    token_ids = [token for [event] in [events async for events in handle] for token in event.token_ids]
    scheduler.drain()
    await loop
    return token_ids

source = resolve_model(folder)
engine = Engine.load(source, EngineConfig(device="cpu", num_kv_blocks=64))
assert len(asyncio.run(serve(engine))) == 4
engine.close()
assert engine.info.attention_backend in ("native", "torch")
loaded = [name for name, module in sys.modules.items() if name.split(".")[0] in libraries and module is not None]
assert not loaded, loaded
try:
    Engine.load(source, EngineConfig(device="cpu", num_kv_blocks=64, attention_backend="triton"))
except LoadError as error:
    assert message in str(error), error
else:
    raise AssertionError("the triton backend served on a CPU")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


def check(*arguments: object) -> None:
    command = [sys.executable, "-c", SERVE, *map(str, arguments)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr


def test_a_cpu_serves_without_triton(model: Path) -> None:
    check(model, "blocked", "triton cannot be imported")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_a_cpu_does_not_load_triton_that_is_there(model: Path) -> None:
    check(model, "free", "needs a CUDA device")
