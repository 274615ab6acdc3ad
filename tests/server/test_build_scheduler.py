"""What of the scheduler's settings depends on the device."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.layout import KVLayout
from scheduler.observer import NullObserver
from server.build import _scheduler
from server.config import ServerConfig
from server.flags import ConfigError


def a_loaded_model(device: str) -> Any:
    info = SimpleNamespace(num_blocks=8, max_model_len=64, layout=KVLayout(2, 1, 8, 16, 1, 2), device=device)
    engine_config = SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64)
    return SimpleNamespace(engine=SimpleNamespace(info=info), engine_config=engine_config)


@pytest.mark.parametrize(
    ("device", "asked_for", "expected"),
    [("cpu", None, 1), ("cuda:0", None, 2), ("cuda", None, 2), ("mps", None, 1), ("cpu", 2, 2), ("cuda:0", 1, 1)],
)
def test_a_gpu_is_planned_for_ahead_unless_told_otherwise(device: str, asked_for: int | None, expected: int) -> None:
    scheduler = _scheduler(a_loaded_model(device), ServerConfig(max_steps_in_flight=asked_for), NullObserver())
    assert scheduler._config.max_steps_in_flight == expected


@pytest.mark.parametrize(
    ("settings", "flag"),
    [({"kv_host_memory": 100}, "--kv-host-memory"), ({"kv_disk_path": "kv", "kv_disk_size": 100}, "--kv-disk-size")],
)
def test_a_tier_without_room_for_one_block_is_an_error(settings: dict[str, Any], flag: str) -> None:
    loaded = a_loaded_model("cpu")
    block_bytes = loaded.engine.info.layout.bytes_per_block
    with pytest.raises(ConfigError, match=f"{flag}: 100 bytes have no room for a KV block, which takes {block_bytes}"):
        _scheduler(loaded, ServerConfig(**settings), NullObserver())
