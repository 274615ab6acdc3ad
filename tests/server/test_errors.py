"""A case for each row of the error table, and the one shape that all errors have."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import Batch
from engine.errors import EngineDead, StepError
from server.errors import Busy
from server.limits import KeyEntry, KeyRing
from server.state import Phase, ServerState
from server.text.structured import NUM_THREADS
from tests.server.conftest import Bench, running, text_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def error_of(answer: httpx.Response, status: int, type_: str, code: str | None) -> dict[str, Any]:
    """The error object, checked for its shape."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    body = answer.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert isinstance(error["message"], str)
    assert error["message"]
    assert (error["type"], error["code"]) == (type_, code)
    assert error["param"] is None or isinstance(error["param"], str)
    return error


def invalid(answer: httpx.Response, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    error = error_of(answer, 400, "invalid_request_error", code)
    assert param is None or error["param"] == param, error
    return error


def check_busy(answer: httpx.Response, error: dict[str, Any], reason: str) -> None:
    assert error["reason"] == reason
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert 1000 <= int(answer.headers["retry-after-ms"]) <= 60000
    assert 1 <= error["retry_after_s"] <= 60
    assert isinstance(error["queue_depth"], int)
    assert isinstance(error["limit"], int)


@pytest.mark.parametrize("length", [1024, 1023, 5000, 200_000])
async def test_a_prompt_that_does_not_fit(bench: Bench, length: int) -> None:
    answer = await bench.complete([65] * length, max_tokens=1)
    if length == 1023:
        assert answer.status_code == 200
        return
    error = invalid(answer, "prompt", "context_length_exceeded")
    assert "maximum context length is 1024" in error["message"]
    assert str(length) in error["message"]
    chat = invalid(await bench.chat("x" * length), "messages", "context_length_exceeded")
    assert "maximum context length" in chat["message"]


async def test_the_pool_bounds_the_context_too() -> None:
    async with running(scheduler={"max_model_len": 10_000}) as bench:
        limit = 256 * 16
        error = invalid(await bench.complete([65] * limit), "prompt", "context_length_exceeded")
        assert str(limit) in error["message"]
        answer = await bench.complete([65] * 4000, max_tokens=500, ignore_eos=True)
        assert answer.json()["usage"]["completion_tokens"] == limit - 4000
        assert answer.json()["warnings"][0]["used"] == limit - 4000


async def test_missing_and_wrong_keys() -> None:
    async with running(keys=KeyRing.load(["sk-right"])) as bench:
        for headers in ({}, {"Authorization": "Bearer sk-wrong"}, {"X-Api-Key": "nö".encode()}):
            for method, path in (("GET", "/v1/models"), ("POST", CHAT), ("POST", "/tokenize"), ("GET", "/v1/none")):
                answer = await bench.client.request(method, path, headers=headers)
                error_of(answer, 401, "authentication_error", "invalid_api_key")
                assert answer.headers["www-authenticate"] == "Bearer"
        for headers in (
            {"Authorization": "Bearer sk-right"},
            {"authorization": "bearer sk-right"},
            {"X-Api-Key": "sk-right"},
        ):
            assert (await bench.client.get("/v1/models", headers=headers)).status_code == 200
        for path in ("/health", "/ready", "/metrics", "/version", "/openapi.json"):
            assert (await bench.client.get(path)).status_code == 200


async def test_an_empty_bearer_is_ignored_when_no_key_is_set(bench: Bench) -> None:
    for value in ("Bearer ", "Bearer", "Bearer anything", "Basic x"):
        assert (await bench.client.get("/v1/models", headers={"Authorization": value})).status_code == 200


async def test_unknown_model(bench: Bench) -> None:
    for stream in (False, True):
        for answer in (await bench.chat(model="gpt-none", stream=stream), await bench.complete(model="gpt-none")):
            error = error_of(answer, 404, "invalid_request_error", "model_not_found")
            assert "gpt-none" in error["message"]
    error_of(await bench.client.get("/v1/models/a/b"), 404, "invalid_request_error", "model_not_found")


async def test_unknown_route(bench: Bench) -> None:
    for method in ("GET", "POST", "HEAD"):
        answer = await bench.client.request(method, "/no/such/route")
        assert answer.status_code == 404
    error_of(await bench.post("/no/such/route", {}), 404, "invalid_request_error", "not_found")
    error_of(await bench.client.get("/v1/"), 404, "invalid_request_error", "not_found")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", CHAT, {"POST"}), ("DELETE", COMPLETIONS, {"POST"}), ("PUT", "/v1/models", {"GET", "HEAD"})],
)
async def test_wrong_method(bench: Bench, method: str, path: str, allowed: set[str]) -> None:
    answer = await bench.client.request(method, path)
    error_of(answer, 405, "invalid_request_error", "method_not_allowed")
    assert set(answer.headers["allow"].split(", ")) == allowed


async def test_a_body_above_the_limit_is_refused_while_it_is_read() -> None:
    async with running(max_request_bytes=10_000) as bench:
        sent = 0

        async def pieces() -> Any:
            nonlocal sent
            for _ in range(200):
                sent += 1000
                yield b" " * 1000

        error_of(await bench.client.post(CHAT, content=pieces()), 413, "invalid_request_error", "request_too_large")
        assert sent <= 12_000, "it was read to the end"
        declared = await bench.client.post(CHAT, content=b" " * 10_001)
        error_of(declared, 413, "invalid_request_error", "request_too_large")
        assert declared.headers["connection"] == "close"
        assert (await bench.complete("x" * 900)).status_code == 200


async def test_a_body_that_is_not_json(bench: Bench) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        answer = await bench.client.post(CHAT, content=b"a=b", headers={"content-type": kind})
        error_of(answer, 415, "invalid_request_error", "unsupported_media_type")
    for encoding in ("gzip", "br"):
        answer = await bench.client.post(CHAT, content=b"{}", headers={"content-encoding": encoding})
        assert encoding in error_of(answer, 415, "invalid_request_error", "unsupported_media_type")["message"]
    body = json.dumps({"prompt": "SAY:a|"}).encode()
    for kind in ("application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"):
        assert (await bench.client.post(COMPLETIONS, content=body, headers={"content-type": kind})).status_code == 200
    assert (await bench.client.post(COMPLETIONS, content=body)).status_code == 200, "without a type JSON is assumed"


DEEP = 5000
BAD_BODIES = [
    b"",
    b"{",
    b"[]",
    b'"text"',
    b"null",
    b"7",
    b"{'a': 1}",
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "temperature": Infinity}',
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "a", "\\udfff": 1}',
    b'{"prompt": "a", "user": "\xed\xa0\x80"}',
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    b'{"prompt": "a", "x": ' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}",
    b'{"prompt": "a", "metadata": ' + b'{"a":' * 150 + b"1" + b"}" * 150 + b"}",
]


@pytest.mark.parametrize("raw", BAD_BODIES, ids=lambda raw: str(raw[:40]))
async def test_a_body_that_cannot_be_read(bench: Bench, raw: bytes) -> None:
    for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize"):
        answer = await bench.client.post(path, content=raw, headers={"content-type": "application/json"})
        assert error_of(answer, 400, "invalid_request_error", None)
    assert (await bench.complete("SAY:a|")).status_code == 200


async def test_a_full_queue_says_when_to_come_back() -> None:
    async with running(scheduler={"max_num_seqs": 1, "max_num_queued_reqs": 2}) as bench:
        gate = bench.engine.gate = asyncio.Event()
        accepted = [asyncio.create_task(bench.complete())]
        await asyncio.sleep(0.02)
        accepted += [asyncio.create_task(bench.complete(stream=stream)) for stream in (False, True)]
        await asyncio.sleep(0.02)
        for stream in (False, True):
            answer = await bench.complete(stream=stream)
            error = error_of(answer, 429, "rate_limit_error", "queue_full")
            check_busy(answer, error, "requests")
            assert (error["queue_depth"], error["limit"]) == (2, 2)
        gate.set()
        assert [(await task).status_code for task in accepted] == [200] * 3


async def test_a_grammar_that_waits_for_others_may_come_back(bench: Bench) -> None:
    compiler = bench.state.served.structured
    compiler._timeout_s = 0.02
    for _ in range(NUM_THREADS):
        await compiler._threads.acquire()
    answer = await bench.complete("SAY:a|", structured_outputs={"regex": "a"})
    check_busy(answer, error_of(answer, 429, "rate_limit_error", "queue_full"), "grammars")
    for _ in range(NUM_THREADS):
        compiler._threads.release()
    compiler._timeout_s = 10.0
    assert text_of(await bench.complete("SAY:a|", structured_outputs={"regex": "a"})) == "a"


async def test_a_list_of_prompts_is_queued_whole_or_not_at_all() -> None:
    async with running(scheduler={"max_num_seqs": 1, "max_num_queued_reqs": 3}) as bench:
        gate = bench.engine.gate = asyncio.Event()
        first = asyncio.create_task(bench.complete())
        await asyncio.sleep(0.02)
        second = asyncio.create_task(bench.complete())
        await asyncio.sleep(0.02)
        error_of(await bench.complete(["a", "b", "c"]), 429, "rate_limit_error", "queue_full")
        assert bench.state.served.scheduler.stats().num_waiting == 1
        gate.set()
        assert [(await task).status_code for task in (first, second)] == [200, 200]


async def test_more_prompts_than_the_queue_could_ever_hold() -> None:
    async with running(max_num_queued_reqs=3) as bench:
        invalid(await bench.complete(["a"] * 4), "prompt")


async def test_a_key_over_its_limit() -> None:
    keys = KeyRing([KeyEntry("batch", KeyRing.load(["k"])._accounts[0].entry.digest, requests_per_minute=1)])
    async with running(keys=keys) as bench:
        headers = {"Authorization": "Bearer k"}
        first = await bench.client.post(COMPLETIONS, json={"prompt": "SAY:a|"}, headers=headers)
        assert first.status_code == 200
        assert first.headers["x-ratelimit-remaining-requests"] == "0"
        second = await bench.client.post(COMPLETIONS, json={"prompt": "SAY:a|"}, headers=headers)
        check_busy(second, error_of(second, 429, "rate_limit_error", "rate_limit_exceeded"), "requests_per_minute")
        assert bench.counted[-1] == (COMPLETIONS, 429, "none", "batch")


async def test_loading_draining_and_dead_servers() -> None:
    async with running() as bench:
        loading = ServerState(bench.state.config, bench.metrics, KeyRing())
        bench.client._transport.app.state.quire = loading
        loading.set_loading("loading weights", 0.5)
        for answer in (await bench.complete(), await bench.client.get("/v1/models"), await bench.chat(stream=True)):
            check_busy(answer, error_of(answer, 503, "server_error", "loading"), "loading")
        loading.set_failed("no memory")
        assert "no memory" in error_of(await bench.complete(), 503, "server_error", "engine_dead")["message"]
        bench.client._transport.app.state.quire = bench.state
        bench.state.served.scheduler.drain()
        error_of(await bench.complete(), 503, "server_error", "draining")
        bench.state.set_draining()
        answer = await bench.complete()
        check_busy(answer, error_of(answer, 503, "server_error", "draining"), "draining")
        assert bench.state.phase is Phase.DRAINING


async def test_a_dead_engine() -> None:
    async with running() as bench:

        def die(batch: Batch) -> None:
            raise EngineDead("the device is gone")

        bench.engine.fail = die
        error_of(await bench.complete(), 500, "server_error", "internal_error")
        error_of(await bench.complete(), 503, "server_error", "engine_dead")


async def test_the_requests_own_deadline(bench: Bench) -> None:
    bench.engine.gate = asyncio.Event()
    for stream in (False, True):
        answer = await bench.complete(timeout_ms=20, stream=stream)
        error_of(answer, 504, "timeout_error", "deadline_exceeded")
        assert bench.counted[-1] == (COMPLETIONS, 504, "deadline", "")
    bench.engine.gate.set()


async def test_a_bug_of_ours(bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def bug(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("secret internals")

    monkeypatch.setattr(bench.state.served.tokenizer, "encode_rendered", bug)
    answer = await bench.client.post(COMPLETIONS, json={"prompt": "a"}, headers={"x-request-id": "mine-1"})
    error = error_of(answer, 500, "server_error", "internal_error")
    assert "secret" not in answer.text
    assert "mine-1" in error["message"]
    assert answer.headers["x-request-id"] == "mine-1"
    assert any("mine-1" in record.getMessage() and record.exc_info for record in caplog.records)
    assert bench.counted[-1] == (COMPLETIONS, 500, "none", "")
    monkeypatch.undo()
    assert (await bench.complete()).status_code == 200


async def test_a_bug_of_ours_has_the_headers_of_every_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(allowed_origins=("*",)) as bench:
        monkeypatch.setattr(bench.state.served.tokenizer, "encode_rendered", None)
        headers = {"Origin": "http://a", "x-request-id": "mine-2"}
        answer = await bench.client.post(COMPLETIONS, json={"prompt": "a"}, headers=headers)
        error_of(answer, 500, "server_error", "internal_error")
        assert answer.headers["access-control-allow-origin"] == "*"
        assert answer.headers["x-request-id"] == "mine-2"


async def test_a_bug_while_the_answer_is_written(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def bug(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("secret internals")

    monkeypatch.setattr("server.text.choice.ChoiceText.push", bug)
    for stream in (False, True):
        caplog.clear()
        answer = await bench.complete(stream=stream)
        error_of(answer, 500, "server_error", "internal_error")
        assert "secret" not in answer.text
        assert any(record.exc_info for record in caplog.records)
        assert bench.counted[-1] == (COMPLETIONS, 500, "failed", "")
    await bench.idle()


async def test_an_engine_failure_shows_no_internals(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    def fail(batch: Batch) -> None:
        raise StepError("secret internals")

    bench.engine.fail = fail
    answer = await bench.client.post(COMPLETIONS, json={"prompt": "a"}, headers={"x-request-id": "mine-3"})
    error = error_of(answer, 500, "server_error", "internal_error")
    assert "secret" not in answer.text
    assert "mine-3" in error["message"]
    assert any("mine-3" in record.getMessage() and "secret" in record.getMessage() for record in caplog.records)


async def test_a_request_that_leaves_itself_no_token(bench: Bench) -> None:
    for fields in (
        {"allowed_token_ids": [97], "bad_words": ["a"]},
        {"allowed_token_ids": [97], "structured_outputs": {"regex": "[0-9]+"}},
    ):
        for stream in (False, True):
            error = invalid(await bench.complete("x", stream=stream, **fields))
            assert "no token" in error["message"]
    await bench.idle()


@given(st.floats(-1e9, 1e9))
def test_retry_after_is_always_obeyable(wait_s: float) -> None:
    headers = Busy("x", 1, 1, wait_s).headers()
    assert 1 <= int(headers["Retry-After"]) <= 60
    assert 1000 <= int(headers["retry-after-ms"]) <= 60000
    assert int(headers["Retry-After"]) * 1000 >= int(headers["retry-after-ms"])
