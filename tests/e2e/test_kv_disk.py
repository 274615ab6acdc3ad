"""The disk tier over restarts, after a kill too: the first request finds its KV, and a cache only its own kind."""

import json
import logging
import signal
import time
import urllib.request
from pathlib import Path

import pytest

from server.llm import LLM
from tests.e2e.conftest import ServerProcess

PROMPT = "The lighthouse keeper wrote in his journal every evening, beginning with the weather and the ships he saw. "
BODY = {"prompt": PROMPT * 4, "max_tokens": 24, "temperature": 0, "ignore_eos": True}


def complete(server):
    request = urllib.request.Request(f"{server.base_url}/completions", json.dumps(BODY).encode())
    request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request, timeout=120) as response:
        answer = json.load(response)
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_after_kill_9_the_first_request_shows_cached_tokens(tmp_path):
    flags = ("--max-model-len", "512", "--num-kv-blocks", "64", "--max-num-seqs", "2", "--kv-disk-path", str(tmp_path))
    server = ServerProcess(tmp_path / "log", *flags).wait_ready()
    try:
        text, num_cached = complete(server)
        assert num_cached == 0
        num_blocks = (server.metric("quire_prompt_tokens_total") + 23) // 16
        server.until(lambda: len(list(tmp_path.rglob("*.kv"))) == num_blocks, 30, "saving")
        assert server.stop(signal.SIGKILL) == -signal.SIGKILL
    finally:
        server.close()
    server = ServerProcess(tmp_path / "log", *flags).wait_ready()
    try:
        again, num_cached = complete(server)
        assert again == text
        assert num_cached >= 64
        assert server.metric("quire_kv_tier_loaded_blocks_total", tier="disk") >= 4
        assert server.stop() == 0
    finally:
        server.close()


def complete_offline(folder: Path, kv_cache_dtype: str) -> tuple[str, int]:
    """The answer and the cached tokens of a fresh engine, which ends when its blocks are on the disk."""
    settings = {"max_model_len": 512, "num_kv_blocks": 64, "max_num_seqs": 2, "dtype": "float32"}
    with LLM(progress=False, kv_disk_path=str(folder), kv_cache_dtype=kv_cache_dtype, **settings) as llm:
        [answer] = llm.generate(BODY["prompt"], **{name: value for name, value in BODY.items() if name != "prompt"})
        num_blocks = (answer.usage["prompt_tokens"] + BODY["max_tokens"] - 1) // 16
        deadline = time.monotonic() + 30
        while max(len(list(one.glob("*.kv"))) for one in folder.iterdir()) < num_blocks:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return answer.text, answer.usage["prompt_tokens_details"]["cached_tokens"]


def test_each_kind_of_cache_finds_its_own_blocks_and_warns_of_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """int8 and fp8 have blocks of one size: only their names keep them apart."""
    caplog.set_level(logging.WARNING, "kvpool.disk")
    text, num_cached = complete_offline(tmp_path, "int8")
    assert num_cached == 0
    again, num_cached = complete_offline(tmp_path, "int8")
    assert again == text
    assert num_cached >= 64
    assert not caplog.records, "nothing else is there"
    for number, other in enumerate(("fp8", "auto"), 1):
        _, num_cached = complete_offline(tmp_path, other)
        assert num_cached == 0
        assert "of other models or layouts, which are ignored" in caplog.records[-1].getMessage()
        assert len(list(tmp_path.iterdir())) == 1 + number
