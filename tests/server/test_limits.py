"""API keys: where they come from, what they may use, and what a client is told when that is used up."""

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import ApiError
from server.limits import Account, Bucket, KeyEntry, KeyFileError, KeyRing
from tests.server.conftest import running


class Clock:
    """Seconds, moved by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def account(clock: Clock, **limits: int) -> Account:
    return Account(KeyEntry("k", b"", **limits), clock)


def refusal(work: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        work()
    assert caught.value.status == 429
    assert caught.value.code == "rate_limit_exceeded"
    assert caught.value.busy is not None
    return caught.value


def test_requests_per_minute() -> None:
    clock = Clock()
    key = account(clock, requests_per_minute=2)
    key.admit()
    key.admit()
    error = refusal(key.admit)
    assert error.busy.reason == "requests_per_minute"
    assert error.busy.retry_after_s == pytest.approx(30)
    clock.now_s += 30
    key.admit()
    refusal(key.admit)


def test_tokens_per_minute_count_prompt_and_output() -> None:
    clock = Clock()
    key = account(clock, tokens_per_minute=100)
    lease = key.admit()
    lease.charge_prompt(60)
    lease.close(70)
    assert key.headers()["x-ratelimit-remaining-tokens"] == "0"
    assert refusal(key.admit).busy.retry_after_s == pytest.approx(31 * 0.6)
    clock.now_s += 31 * 0.6 + 0.001
    waiting = key.admit()
    error = refusal(lambda: waiting.charge_prompt(50))
    assert error.busy.reason == "tokens_per_minute"
    assert error.busy.retry_after_s == pytest.approx(49 * 0.6, abs=0.01)


def test_a_prompt_larger_than_the_minute_passes_when_the_minute_is_full() -> None:
    key = account(Clock(), tokens_per_minute=100)
    key.admit().charge_prompt(500)
    refusal(key.admit)


def test_concurrent_requests() -> None:
    key = account(Clock(), max_concurrent_requests=1)
    lease = key.admit()
    error = refusal(key.admit)
    assert (error.busy.reason, error.busy.queue_depth, error.busy.limit) == ("concurrent_requests", 1, 1)
    lease.close()
    lease.close()
    assert key.num_running == 0
    key.admit()


def test_the_wait_for_a_concurrent_place_follows_the_durations() -> None:
    clock = Clock()
    key = account(clock, max_concurrent_requests=4)
    for _ in range(3):
        lease = key.admit()
        clock.now_s += 20
        lease.close()
    for _ in range(4):
        key.admit()
    assert refusal(key.admit).busy.retry_after_s == pytest.approx(20 / 4)


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 50)), max_size=30))
def test_a_bucket_never_gives_more_than_its_rate(steps: list[tuple[float, int]]) -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    taken = 0
    for wait_s, amount in steps:
        clock.now_s += wait_s
        if bucket.wait_s(amount) == 0:
            bucket.take(amount)
            taken += amount
        assert bucket.level <= 60
        assert taken <= 60 + clock.now_s + 1e-6


def test_keys_come_from_flags_and_files(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"sk-hashed").hexdigest()
    entries = [
        {"name": "a", "key": "sk-a", "requests_per_minute": 5},
        {"name": "h", "sha256": digest.upper()},
        "sk-plain",
    ]
    path = tmp_path / "keys.json"
    path.write_text(json.dumps(entries))
    ring = KeyRing.load(["sk-flag"], path)
    assert ring.asks_for_keys
    found = {key: ring.find(key) for key in ("sk-flag", "sk-a", "sk-hashed", "sk-plain", "sk-", "")}
    assert [key for key, entry in found.items() if entry is None] == ["sk-", ""]
    assert found["sk-a"].entry.requests_per_minute == 5
    assert found["sk-hashed"].name == "h"
    assert found["sk-flag"].name == "key-1"


def test_a_plain_file_has_one_key_a_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# our keys\nsk-one\n\nsk-two  # the second\n")
    ring = KeyRing.load([], path)
    assert ring.find("sk-one")
    assert ring.find("sk-two")
    assert not ring.find("#")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        "a: b: c",
        "[{name: x}]",
        "[{key: a, sha256: b}]",
        "[{sha256: zz}]",
        "[{key: a, tokens_per_hour: 3}]",
        "[{key: a, requests_per_minute: 0}]",
        "[{key: a, requests_per_minute: many}]",
        "[{key: ''}]",
        "[{key: a, name: x}, {key: b, name: x}]",
    ],
)
def test_a_bad_key_file_stops_the_start_with_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(content)
    with pytest.raises(KeyFileError) as caught:
        KeyRing.load([], path)
    assert "\n" not in str(caught.value)
    with pytest.raises(KeyFileError):
        KeyRing.load([], tmp_path / "none")


async def test_limits_and_usage_over_http(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(
        "- {name: team, key: sk-t, requests_per_minute: 9, tokens_per_minute: 900, max_concurrent_requests: 1}"
    )
    async with running(keys=KeyRing.load([], path)) as bench:
        headers = {"Authorization": "Bearer sk-t"}
        body = {"prompt": "SAY:hello|", "temperature": 0}
        answer = await bench.client.post("/v1/completions", json=body, headers=headers)
        assert answer.headers["x-ratelimit-limit-requests"] == "9"
        assert answer.headers["x-ratelimit-remaining-requests"] == "8"
        assert answer.headers["x-ratelimit-remaining-tokens"] == "890"
        assert answer.headers["x-ratelimit-reset-requests"].endswith("s")
        later = await bench.client.post("/v1/completions", json=body | {"stream": True}, headers=headers)
        assert int(later.headers["x-ratelimit-remaining-tokens"]) == pytest.approx(900 - 10 - 6 - 10, abs=5)
        bench.engine.gate = asyncio.Event()
        waiting = asyncio.create_task(bench.client.post("/v1/completions", json=body, headers=headers))
        await asyncio.sleep(0.02)
        second = await bench.client.post("/v1/completions", json=body, headers=headers)
        assert second.status_code == 429
        assert second.json()["error"]["reason"] == "concurrent_requests"
        bench.engine.gate.set()
        assert (await waiting).status_code == 200
        content = bench.metrics.render()[0].decode()
        assert 'key="team"' in content
        assert "sk-t" not in content


async def test_a_refused_request_gives_its_place_back(tmp_path: Path) -> None:
    ring = KeyRing([KeyEntry("one", hashlib.sha256(b"k").digest(), max_concurrent_requests=1)])
    async with running(keys=ring) as bench:
        headers = {"X-Api-Key": "k"}
        for body in ({"prompt": -1}, {"prompt": "a", "model": "x"}, {"prompt": "x" * 5000}, {"prompt": "SAY:a|"}):
            answer = await bench.client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
        assert ring.find("k").num_running == 0
