"""What of the scheduler's settings depends on the device."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.layout import KVLayout
from scheduler.observer import NullObserver
from server.build import _scheduler
from server.config import ServerConfig


@pytest.mark.parametrize(
    ("device", "asked_for", "expected"),
    [("cpu", None, 1), ("cuda:0", None, 2), ("cuda", None, 2), ("mps", None, 1), ("cpu", 2, 2), ("cuda:0", 1, 1)],
)
def test_a_gpu_is_planned_for_ahead_unless_told_otherwise(device: str, asked_for: int | None, expected: int) -> None:
    info = SimpleNamespace(num_blocks=8, max_model_len=64, layout=KVLayout(2, 1, 8, 16, 1, 2), device=device)
    loaded: Any = SimpleNamespace(
        engine=SimpleNamespace(info=info), engine_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64)
    )
    scheduler = _scheduler(loaded, ServerConfig(max_steps_in_flight=asked_for), NullObserver())
    assert scheduler._config.max_steps_in_flight == expected
