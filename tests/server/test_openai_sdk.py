"""The official client's high-level helpers, synchronous and asynchronous, over real sockets."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.server.live import live_server

CALL = '<tool_call>\n{"name": "GetWeather", "arguments": {"city": "Oslo", "days": 1}}\n</tool_call>'


class GetWeather(BaseModel):
    """Weather of a city."""

    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2]


class Verdict(BaseModel):
    answer: Literal["yes", "no"]
    sure: bool


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    with live_server(scheduler={"max_model_len": 4096}) as server:
        yield f"{server.url}/v1"


def said(content: str) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], "temperature": 0}


TOOLS = [openai.pydantic_function_tool(GetWeather)]


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(base_url: str) -> Any:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="unused", max_retries=0) as client:
        yield client


def check_called(completion: Any) -> None:
    (choice,) = completion.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.parsed_arguments == GetWeather(city="Oslo", days=1)


def check_parsed(completion: Any) -> None:
    (choice,) = completion.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Verdict)


def test_parse(client: openai.OpenAI) -> None:
    check_parsed(client.chat.completions.parse(**said("x"), response_format=Verdict))
    check_called(client.chat.completions.parse(**said(f"SAY:{CALL}|"), tools=TOOLS))
    both = client.chat.completions.parse(**said(f"SAY:{CALL}|"), tools=TOOLS, response_format=Verdict)
    check_called(both)
    check_parsed(
        client.chat.completions.parse(
            **said('SAY:{"answer": "yes", "sure": true}|'), tools=TOOLS, response_format=Verdict
        )
    )


async def test_parse_asynchronously(async_client: openai.AsyncOpenAI) -> None:
    check_parsed(await async_client.chat.completions.parse(**said("x"), response_format=Verdict))
    check_called(await async_client.chat.completions.parse(**said(f"SAY:{CALL}|"), tools=TOOLS))


STREAMS = [
    pytest.param("SAY:hello wörld|", {}, id="text"),
    pytest.param(f"SAY:{CALL}|", {"tools": TOOLS}, id="tools"),
    pytest.param("x", {"response_format": Verdict}, id="format"),
    pytest.param("SAY:hey|", {"logprobs": True, "top_logprobs": 2, "n": 2}, id="logprobs"),
]


class Seen:
    """The events of a stream, joined."""

    def __init__(self) -> None:
        self.kinds: set[str] = set()
        self.content: dict[str, str] = {}
        self.arguments = ""

    def take(self, event: Any) -> None:
        self.kinds.add(event.type)
        if event.type == "content.delta":
            self.content["delta"] = self.content.get("delta", "") + event.delta
            assert event.snapshot.endswith(event.delta)
        if event.type == "tool_calls.function.arguments.delta":
            self.arguments += event.arguments_delta

    def check(self, final: Any, fields: dict[str, Any]) -> None:
        message = final.choices[0].message
        if "tools" in fields:
            check_called(final)
            assert json.loads(self.arguments) == {"city": "Oslo", "days": 1}
            assert "tool_calls.function.arguments.done" in self.kinds
        elif "response_format" in fields:
            check_parsed(final)
            assert self.content["delta"] == message.content
        elif "logprobs" in fields:
            assert all(len(choice.logprobs.content) == 4 for choice in final.choices)
            assert {"logprobs.content.delta", "logprobs.content.done"} <= self.kinds
        else:
            assert self.content["delta"] == message.content == "hello wörld"
            assert "content.done" in self.kinds


@pytest.mark.parametrize(("content", "fields"), STREAMS)
def test_stream(client: openai.OpenAI, content: str, fields: dict[str, Any]) -> None:
    seen = Seen()
    with client.chat.completions.stream(**said(content), **fields) as stream:
        for event in stream:
            seen.take(event)
        seen.check(stream.get_final_completion(), fields)


@pytest.mark.parametrize(("content", "fields"), STREAMS)
async def test_stream_asynchronously(async_client: openai.AsyncOpenAI, content: str, fields: dict[str, Any]) -> None:
    seen = Seen()
    async with async_client.chat.completions.stream(**said(content), **fields) as stream:
        async for event in stream:
            seen.take(event)
        seen.check(await stream.get_final_completion(), fields)


def test_a_cut_answer_is_reported_as_such(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**said("x"), response_format=Verdict, max_tokens=3)


async def test_usage_and_raw_answers(async_client: openai.AsyncOpenAI) -> None:
    stream = await async_client.chat.completions.create(
        **said("SAY:hello|"), stream=True, stream_options={"include_usage": True}
    )
    *_, last = [chunk async for chunk in stream]
    assert last.usage.completion_tokens == 6
    raw = await async_client.chat.completions.with_raw_response.create(**said("SAY:hello|"))
    assert raw.parse().choices[0].message.content == "hello"
    assert raw.headers["x-request-id"] == raw.request_id
