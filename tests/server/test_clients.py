"""Clients that people really use, over real sockets: LangChain, LiteLLM, Instructor. Each skips where not installed.

The engine is scripted: what a prompt says between `SAY:` and `|` is the answer, grammars and sampling are real.
"""

import asyncio
import json
import os
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.server.live import live_server

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
QUESTION = f"SAY:{CALL}|"


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Rome"]
    degrees: Literal[12, 30]


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    with live_server(scheduler={"max_model_len": 4096}) as server:
        yield f"{server.url}/v1"


# --------------------------------------------------------------------------------------------------------- LangChain


@pytest.fixture
def langchain(base_url: str) -> Any:
    module = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    return module.ChatOpenAI(base_url=base_url, api_key="unused", model="tiny", temperature=0, max_retries=0)


def get_weather(city: str) -> str:
    """Weather of a city.

    Args:
        city: its name.
    """
    return f"fine in {city}"


def test_langchain_answers_and_counts(langchain: Any) -> None:
    answer = langchain.invoke("SAY:hello|")
    assert answer.content == "hello"
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata["output_tokens"] == 6
    assert langchain.bind(logprobs=True, top_logprobs=2).invoke("SAY:a|").response_metadata["logprobs"]["content"]
    assert [message.content for message in langchain.batch(["SAY:a|", "SAY:b|"])] == ["a", "b"]


def test_langchain_streams(langchain: Any) -> None:
    chunks = list(langchain.stream("SAY:hello wörld|", stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == "hello wörld"
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == 13


async def test_langchain_asynchronously(langchain: Any) -> None:  # all in one loop: its HTTP client outlives tests
    chunks = [chunk.content async for chunk in langchain.astream("SAY:hello wörld|")]
    assert "".join(chunks) == "hello wörld"
    assert isinstance(await langchain.with_structured_output(Weather).ainvoke("weather?"), Weather)
    answers = await langchain.abatch([f"SAY:{number}|" for number in range(12)])
    assert [answer.content for answer in answers] == [str(number) for number in range(12)]


def test_langchain_calls_tools_and_hears_their_results(langchain: Any) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    bound = langchain.bind_tools([get_weather])
    call = bound.invoke(QUESTION)
    assert [(made["name"], made["args"]) for made in call.tool_calls] == [("get_weather", {"city": "Oslo"})]
    result = ToolMessage("fine, SAY:it is fine|", tool_call_id=call.tool_calls[0]["id"])
    assert bound.invoke([HumanMessage("weather?"), call, result]).content == "it is fine"
    streamed = sum(bound.stream(QUESTION), start=next(iter(bound.stream("SAY:|"))))
    assert streamed.tool_calls[0]["args"] == {"city": "Oslo"}
    forced = langchain.bind_tools([Weather], tool_choice="any").invoke("SAY:no|")
    assert Weather.model_validate(forced.tool_calls[0]["args"])


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structures(langchain: Any, method: str) -> None:
    structured = langchain.with_structured_output(Weather, method=method)
    assert isinstance(structured.invoke("weather?"), Weather)
    assert isinstance(list(structured.stream("weather?"))[-1], Weather)


def test_langchain_json_mode(langchain: Any) -> None:
    structured = langchain.with_structured_output(Weather, method="json_mode")
    assert structured.invoke('SAY:{"city": "Rome", "degrees": 30}|') == Weather(city="Rome", degrees=30)


def test_langchain_completes_texts(base_url: str) -> None:
    module = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    model = module.OpenAI(base_url=base_url, api_key="unused", model="tiny", temperature=0, max_retries=0, n=1)
    assert model.invoke("SAY:hello|") == "hello"
    assert "".join(model.stream("SAY:hello|")) == "hello"
    assert [one[0].text for one in model.generate(["SAY:a|", "SAY:b|"]).generations] == ["a", "b"]


# ----------------------------------------------------------------------------------------------------------- LiteLLM


@pytest.fixture
def litellm(base_url: str) -> Any:
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the internet for prices
    module = pytest.importorskip("litellm", reason="litellm is not installed")

    options = {"api_base": base_url, "api_key": "unused", "temperature": 0, "num_retries": 0}

    class Client:
        errors = module

        def ask(self, content: str, call: Any = module.completion, model: str = "tiny", **fields: Any) -> Any:
            messages = [{"role": "user", "content": content}]
            return call(model=f"openai/{model}", messages=messages, **{**options, **fields})

        def complete(self, prompt: str) -> Any:
            return module.text_completion(model="text-completion-openai/tiny", prompt=prompt, **options)

    return Client()


WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def test_litellm_answers_and_streams(litellm: Any) -> None:
    answer = litellm.ask("SAY:hello|")
    assert answer.choices[0].message.content == "hello"
    assert answer.usage.completion_tokens == 6
    chunks = list(litellm.ask("SAY:hello|", stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hello"
    assert chunks[-1].usage.completion_tokens == 6
    assert litellm.complete("SAY:hello|").choices[0].text == "hello"
    answer = asyncio.run(litellm.ask("SAY:hello|", litellm.errors.acompletion))
    assert answer.choices[0].message.content == "hello"


def test_litellm_tools(litellm: Any) -> None:
    for fields in ({"tool_choice": "auto"}, {"tool_choice": "required"}):
        message = litellm.ask(QUESTION, tools=[WEATHER_TOOL], **fields).choices[0].message
        assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Oslo"}
    chunks = list(litellm.ask(QUESTION, tools=[WEATHER_TOOL], stream=True))
    parts = [call.function.arguments for c in chunks for call in c.choices[0].delta.tool_calls or []]
    assert json.loads("".join(parts)) == {"city": "Oslo"}


def test_litellm_structures(litellm: Any) -> None:
    content = litellm.ask("weather?", response_format=Weather).choices[0].message.content
    assert Weather.model_validate_json(content)


def test_litellm_knows_our_errors(litellm: Any) -> None:
    with pytest.raises(litellm.errors.ContextWindowExceededError):
        litellm.ask("x" * 5000)
    with pytest.raises(litellm.errors.BadRequestError, match="temperature"):
        litellm.ask("SAY:a|", temperature=9)
    with pytest.raises(litellm.errors.NotFoundError):
        litellm.ask("SAY:a|", model="nobody")


# -------------------------------------------------------------------------------------------------------- Instructor


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_instructor_gives_models(base_url: str, mode: str) -> None:
    instructor = pytest.importorskip("instructor", reason="instructor is not installed")
    options: dict[str, Any] = {
        "model": "tiny",
        "temperature": 0,
        "max_retries": 0,
        "response_model": Weather,
        "messages": [{"role": "user", "content": "weather?"}],
    }
    client = instructor.from_openai(
        openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0), mode=instructor.Mode[mode]
    )
    answer, raw = client.chat.completions.create_with_completion(**options)
    assert isinstance(answer, Weather)
    assert raw.usage.completion_tokens > 0

    async def ask() -> Any:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="unused", max_retries=0) as inner:
            return await instructor.from_openai(inner, mode=instructor.Mode[mode]).chat.completions.create(**options)

    assert isinstance(asyncio.run(ask()), Weather)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor_streams_partial_models(base_url: str, mode: str) -> None:
    instructor = pytest.importorskip("instructor", reason="instructor is not installed")
    inner = openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0)
    client = instructor.from_openai(inner, mode=instructor.Mode[mode])
    stream = client.chat.completions.create_partial(
        model="tiny", response_model=Weather, messages=[{"role": "user", "content": "weather?"}], temperature=0
    )
    assert Weather.model_validate(list(stream)[-1].model_dump())
