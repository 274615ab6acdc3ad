"""A server killed without warning, and the one after it: the first request finds its KV on the disk."""

import json
import signal
import urllib.request

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
