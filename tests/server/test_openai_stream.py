"""Streams: their shape on the wire, their equality with the whole answer, and what a disconnect leaves behind."""

import asyncio
import importlib
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.batch import Batch
from engine.errors import StepError
from tests.server.conftest import Bench, events_of, running
from tests.server.fields.rows import tool

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def folded(events: list[Any]) -> list[dict[str, Any]]:
    """What a client makes of a stream's choices, written independently of the server's own fold."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for part in event["choices"]:
            whole = choices.setdefault(part["index"], {"text": "", "reasoning": "", "calls": {}, "logprobs": []})
            delta = part.get("delta", {})
            whole["text"] += part.get("text") or delta.get("content") or ""
            whole["reasoning"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", []):
                kept = whole["calls"].setdefault(call["index"], {"id": call.get("id"), "name": "", "arguments": ""})
                kept["name"] += call["function"].get("name") or ""
                kept["arguments"] += call["function"]["arguments"]
            logprobs = part["logprobs"] or {}
            whole["logprobs"] += logprobs.get("content") or [*zip(*_arrays(logprobs), strict=True)]
            if part["finish_reason"]:
                assert "finish" not in whole, "two ends"
                whole["finish"] = (part["finish_reason"], part["stop_reason"])
    return [choices[index] for index in sorted(choices)]


def _arrays(logprobs: dict[str, Any]) -> list[Any]:
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return [[json.dumps(value) for value in logprobs.get(name, [])] for name in names]


def unfolded(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of a whole answer in the form of `folded`."""
    choices = []
    for choice in answer["choices"]:
        message = choice.get("message", {})
        calls = message.get("tool_calls", [])
        logprobs = choice["logprobs"] or {}
        choices.append(
            {
                "text": choice.get("text") or message.get("content") or "",
                "reasoning": message.get("reasoning_content", ""),
                "calls": {i: {"id": c["id"], **c["function"]} for i, c in enumerate(calls)},
                "logprobs": logprobs.get("content") or [*zip(*_arrays(logprobs), strict=True)],
                "finish": (choice["finish_reason"], choice["stop_reason"]),
            }
        )
    return choices


def without_ids(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for choice in choices:
        for call in choice["calls"].values():
            assert call.pop("id")
    return choices


BODIES = st.fixed_dictionaries(
    {"seed": st.integers(0, 99), "temperature": st.sampled_from([0, 0.7, 2])},
    optional={
        "n": st.integers(1, 3),
        "stop": st.lists(st.sampled_from(["l", "lo", "ö", "w", "日本", "o w"]), max_size=3),
        "max_tokens": st.integers(1, 30),
        "include_stop_str_in_output": st.booleans(),
        "min_tokens": st.integers(0, 1),
        "return_token_ids": st.booleans(),
        "skip_special_tokens": st.booleans(),
    },
)
TEXTS = st.sampled_from(["hello wörld", "日本語 😀 text", "", "<tool_call>{", "<think>so</think>yes", "low low low"])


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=BODIES, text=TEXTS, with_logprobs=st.booleans(), as_chat=st.booleans())
def test_joined_deltas_equal_the_whole_answer(
    body: dict[str, Any], text: str, with_logprobs: bool, as_chat: bool
) -> None:
    async def check() -> None:
        async with running() as bench:
            prompt = f"SAY:{text}|"
            if as_chat:
                path, fields = CHAT, {"messages": [{"role": "user", "content": prompt}]}
                fields |= {"logprobs": True, "top_logprobs": 2} if with_logprobs else {}
            else:
                path, fields = COMPLETIONS, {"prompt": [prompt, "SAY:other|"], "echo": True}
                fields |= {"logprobs": 2} if with_logprobs else {}
            whole = (await bench.post(path, {**fields, **body})).json()
            *events, done = await bench.events(path, {**fields, **body})
            assert done == "[DONE]"
            assert folded(events) == unfolded(whole)
            await bench.idle()

    asyncio.run(check())


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_tool_calls_fold_too(bench: Bench, choice: str) -> None:
    call = '<tool_call>{"name": "f", "arguments": {"city": "Oslo"}}</tool_call>'
    body = {
        "messages": [{"role": "user", "content": f"SAY:{call}|"}],
        "tools": [tool("f"), tool("g")],
        "tool_choice": choice,
        "temperature": 0,
        "max_tokens": 200,
    }
    whole = (await bench.post(CHAT, body)).json()
    events = (await bench.events(CHAT, body))[:-1]
    assert without_ids(folded(events)) == without_ids(unfolded(whole))
    deltas = [d for event in events for c in event["choices"] for d in c["delta"].get("tool_calls", [])]
    assert deltas
    assert all(("id" in delta) == ("name" in delta["function"]) for delta in deltas)
    assert [delta["index"] for delta in deltas if "id" in delta] == sorted({delta["index"] for delta in deltas})
    for event in events:
        indices = [call["index"] for c in event["choices"] for call in c["delta"].get("tool_calls", [])]
        assert len(indices) == len(set(indices)), "clients look only at a chunk's first delta of a call"


async def test_the_shape_of_a_chat_stream(bench: Bench) -> None:
    body = {"messages": [{"role": "user", "content": "SAY:hé|"}], "temperature": 0, "n": 2, "stream": True}
    answer = await bench.post(CHAT, body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert "connection" not in answer.headers
    *events, done = events_of(answer.text)
    assert done == "[DONE]"
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    for index in (0, 1):
        chunks = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        assert chunks[0]["delta"] == {"role": "assistant", "content": ""}
        assert [chunk["delta"] for chunk in chunks[1:-1]] == [{"content": "h"}, {"content": "é"}]
        assert chunks[-1]["delta"] == {}
        assert chunks[-1]["finish_reason"] == "stop"
        assert all(chunk["logprobs"] is None for chunk in chunks)


async def test_completion_streams_hold_no_empty_events(bench: Bench) -> None:
    *events, _ = await bench.events(COMPLETIONS, {"prompt": ["SAY:日本|", "SAY:x|"], "temperature": 0})
    for event in events:
        (choice,) = event["choices"]
        assert choice["text"] or choice["finish_reason"]
        assert "\ufffd" not in choice["text"]


async def test_line_ends_inside_a_text_do_not_end_an_event(bench: Bench) -> None:
    text = "a\u2028b\x85c\u2029d\r\ne"
    body = {"messages": [{"role": "user", "content": f"SAY:{text}|"}], "temperature": 0}
    answer = await bench.post(CHAT, {**body, "stream": True})
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line[6:]) for line in lines]
    assert "".join(c["delta"].get("content", "") for event in events for c in event["choices"]) == text


async def test_an_engine_failure_before_the_first_token_is_a_500(bench: Bench) -> None:
    def fail(batch: Batch) -> None:
        raise StepError("lightning struck")

    bench.engine.fail = fail
    for stream in (False, True):
        answer = await bench.complete(stream=stream)
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "internal_error"
    bench.engine.fail = None
    assert (await bench.complete()).status_code == 200


async def test_an_engine_failure_in_a_stream_is_an_event(bench: Bench) -> None:
    def fail(batch: Batch) -> None:
        if batch.rows[0].start > 14:
            raise StepError("lightning struck")

    bench.engine.fail = fail
    events = await bench.events(COMPLETIONS, {"prompt": "SAY:abcdefghij|", "temperature": 0})
    bench.engine.fail = None
    assert events[-1] == "[DONE]"
    assert events[0]["choices"][0]["text"] == "a"
    assert events[-2]["error"]["type"] == "server_error"
    assert set(events[-2]) == {"error"}
    assert bench.counted[-1] == ("/v1/completions", 200, "failed", "")


@pytest.mark.parametrize("where", ["server.text.choice.ChoiceText.push", "server.openai.answer.Envelope.event"])
async def test_a_bug_in_a_begun_stream_is_its_last_event(
    where: str, bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner, _, name = where.rpartition(".")
    module, _, cls = owner.rpartition(".")
    real = getattr(getattr(importlib.import_module(module), cls), name)
    num_calls = 0

    def breaks(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 2:
            raise RuntimeError("secret internals")
        return real(*args, **kwargs)

    monkeypatch.setattr(where, breaks)
    body = {"prompt": "count", "temperature": 0, "max_tokens": 50, "stream": True}
    answer = await bench.client.post(COMPLETIONS, json=body, headers={"x-request-id": "mine-4"})
    *_, before, failure, done = events_of(answer.text)
    assert answer.status_code == 200
    assert before["choices"][0]["text"]
    assert done == "[DONE]"
    assert set(failure) == {"error"}
    assert (failure["error"]["type"], failure["error"]["code"]) == ("server_error", "internal_error")
    assert "mine-4" in failure["error"]["message"]
    assert "secret" not in answer.text
    assert any("mine-4" in record.getMessage() and record.exc_info for record in caplog.records)
    assert bench.counted == [(COMPLETIONS, 200, "failed", "")]
    await bench.idle()


async def test_keep_alive_comments_while_queueing() -> None:
    async with running(sse_keep_alive_interval=0.02) as bench:
        bench.engine.gate = asyncio.Event()
        asking = asyncio.create_task(bench.complete(stream=True, max_tokens=2))
        await asyncio.sleep(0.15)
        bench.engine.gate.set()
        answer = await asking
    first = answer.text.split("\n\n")[0]
    assert first.startswith(":"), first
    assert events_of(answer.text)[-1] == "[DONE]"


async def test_a_deadline_in_a_begun_stream_is_an_event() -> None:
    async with running(sse_keep_alive_interval=0.01) as bench:
        bench.engine.gate = asyncio.Event()
        asking = asyncio.create_task(bench.complete(stream=True, timeout_ms=60))
        answer = await asking
        bench.engine.gate.set()
    error, done = events_of(answer.text)
    assert answer.status_code == 200
    assert done == "[DONE]"
    assert error["error"]["code"] == "deadline_exceeded"
    assert error["error"]["type"] == "timeout_error"


# ------------------------------------------------------------------------------------------------------ disconnects


async def call_and_leave(
    bench: Bench, body: dict[str, Any] | None, leave: asyncio.Event, path: str = COMPLETIONS
) -> list[Any]:
    """An ASGI client that sends a body (None: half of one), collects what comes, and is gone once `leave` is set."""
    raw = json.dumps(body).encode() if body is not None else b"{"
    sent = [{"type": "http.request", "body": raw, "more_body": body is None}]
    messages: list[Any] = []

    async def receive() -> dict[str, Any]:
        if sent:
            return sent.pop()
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        messages.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("test", 80),
    }
    app = bench.client._transport.app
    await asyncio.wait_for(app(scope, receive, send), 10)
    return messages


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_prompts", [1, 3])
async def test_a_disconnect_stops_the_work(stream: bool, num_prompts: int) -> None:
    async with running(engine={"step_s": 0.005}) as bench:
        leave = asyncio.Event()
        body = {"prompt": ["count"] * num_prompts, "max_tokens": 900, "stream": stream, "temperature": 0}
        calling = asyncio.create_task(call_and_leave(bench, body, leave))
        await bench.steps(10)
        assert bench.state.served.scheduler.stats().num_running
        leave.set()
        await calling
        num_steps = len(bench.engine.batches)
        await bench.idle()
        assert len(bench.engine.batches) - num_steps <= 2, "the work went on"
        status = 200 if stream else 499
        assert bench.counted == [("/v1/completions", status, "cancelled", "")]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_while_waiting_leaves_the_queue(stream: bool) -> None:
    async with running(scheduler={"max_num_seqs": 1}) as bench:
        gate = bench.engine.gate = asyncio.Event()
        first = asyncio.create_task(bench.complete())
        leave = asyncio.Event()
        calling = asyncio.create_task(call_and_leave(bench, {"prompt": "count", "stream": stream}, leave))
        await asyncio.sleep(0.02)
        assert bench.state.served.scheduler.stats().num_waiting == 1
        leave.set()
        await calling
        assert bench.state.served.scheduler.stats().num_waiting == 0
        gate.set()
        assert (await first).status_code == 200
        await bench.idle()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize", "/v1/capacity"])
async def test_who_leaves_before_the_body_has_come_is_told_nothing(bench: Bench, path: str) -> None:
    leave = asyncio.Event()
    leave.set()
    messages = await call_and_leave(bench, None, leave, path)
    assert [message.get("status") or message["body"] for message in messages] == [499, b""]
    assert (await bench.complete("count", max_tokens=2)).status_code == 200


async def test_a_stop_string_ends_the_work(bench: Bench) -> None:
    answer = await bench.complete("count", stop=[" 3"], max_tokens=900)
    await bench.idle()
    assert answer.json()["choices"][0]["text"] == "1, 2,"
    assert len(bench.engine.batches) < 15
