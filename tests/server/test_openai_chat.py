"""Chat beyond single fields: messages, tools, reasoning and structure, as clients really send them."""

import json
from typing import Any

import jsonschema
import pytest

from tests.server.conftest import REASONING_TEMPLATE, TEMPLATE, Bench, running
from tests.server.fields.rows import SCHEMA, calls_of, fits, prompt_of, tool
from tests.server.test_errors import invalid

THINKING = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}<think>\n{# </think> #}"
CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Oslo"}}\n</tool_call>'


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def format_of(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


def holding(part: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"v": part}, "required": ["v"], "additionalProperties": False}


# --------------------------------------------------------------------------------------------------------- messages

BAD_MESSAGES = {
    "image": [user([{"type": "image_url", "image_url": {"url": "data:,"}}])],
    "unknown part": [user([{"type": "hologram", "hologram": "x"}])],
    "part without text": [user([{"type": "text"}])],
    "part that is a string": [user(["hi"])],
    "unknown role": [{"role": "wizard", "content": "hi"}],
    "no role": [{"content": "hi"}],
    "role is a number": [{"role": 7, "content": "hi"}],
    "content is a number": [user(7)],
    "content is an object": [user({"text": "hi"})],
    "content null": [user(None)],
    "content missing": [{"role": "user"}],
    "assistant says nothing": [{"role": "assistant", "content": None}],
    "assistant with no calls": [{"role": "assistant", "tool_calls": []}],
    "tool without content": [{"role": "tool", "tool_call_id": "x"}],
    "arguments are an object": [
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}],
        }
    ],
    "message is a string": ["hi"],
    "message is null": [None],
    "none": [],
    "a string": "hi",
    "null": None,
}


@pytest.mark.parametrize("messages", BAD_MESSAGES.values(), ids=BAD_MESSAGES)
async def test_bad_messages(bench: Bench, messages: Any) -> None:
    for stream in (False, True):
        error = invalid(await bench.post("/v1/chat/completions", {"messages": messages, "stream": stream}))
        assert error["param"].startswith("messages")


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
async def test_a_part_of_another_modality_is_known_and_refused_by_name(bench: Bench, role: str, kind: str) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {"url": "data:,"}}]
    error = invalid(await bench.post("/v1/chat/completions", {"messages": [{"role": role, "content": parts}]}))
    assert error["param"] == "messages.0.content.1"
    assert "takes text only" in error["message"]
    assert f"'{kind}'" in error["message"]


async def test_missing_messages(bench: Bench) -> None:
    assert invalid(await bench.post("/v1/chat/completions", {"model": "tiny"}))["param"] == "messages"


async def test_a_template_that_raises_is_a_400_with_its_message(bench: Bench) -> None:
    assert "no RAISE" in invalid(await bench.chat("please RAISE"), "messages")["message"]


async def test_a_model_without_a_template() -> None:
    async with running(template=None) as bench:
        assert "chat template" in invalid(await bench.chat())["message"]
        assert (await bench.complete()).status_code == 200


async def test_developer_is_kept_where_the_template_knows_it() -> None:
    async with running(template=TEMPLATE + "{# developer #}") as bench:
        messages = [{"role": "developer", "content": "d"}, user("x")]
        assert (await prompt_of(bench, "chat", messages)).startswith("<|developer|>d")


async def test_earlier_calls_and_results_reach_the_prompt(bench: Bench) -> None:
    messages = [
        user("weather?"),
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Oslo"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "12 degrees"},
        {
            "role": "assistant",
            "content": "ok",
            "annotations": [],
            "audio": None,
            "refusal": None,
            "function_call": None,
        },
        user("and?"),
    ]
    for tools in ([tool("f")], None):
        prompt = await prompt_of(bench, "chat", messages, tools=tools)
        assert '"Oslo"' in prompt
        assert "12 degrees" in prompt


async def test_a_long_conversation_is_refused_with_both_numbers(bench: Bench) -> None:
    error = invalid(await bench.chat("hello " * 20_000), "messages", "context_length_exceeded")
    assert "maximum context length is 1024 tokens" in error["message"]


# ------------------------------------------------------------------------------------------------------------ tools

BAD_TOOLS = {
    "named, unknown": {"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}},
    "required without tools": {"tool_choice": "required"},
    "named without tools": {"tool_choice": {"type": "function", "function": {"name": "g"}}},
    "unknown word": {"tools": [tool("f")], "tool_choice": "banana"},
    "no name": {"tools": [tool("f")], "tool_choice": {"type": "function"}},
    "allowed, unknown": {
        "tools": [tool("f")],
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]},
        },
    },
    "no function": {"tools": [{"type": "function"}]},
    "custom": {"tools": [{"type": "custom", "custom": {"name": "x"}}]},
    "twice the same": {"tools": [tool("f"), tool("f")]},
    "empty name": {"tools": [{"type": "function", "function": {"name": ""}}]},
    "parameters are a list": {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
    "with a regex": {"tools": [tool("f")], "structured_outputs": {"regex": "a+"}},
}


@pytest.mark.parametrize("fields", BAD_TOOLS.values(), ids=BAD_TOOLS)
async def test_bad_tools(bench: Bench, fields: dict[str, Any]) -> None:
    error = invalid(await bench.chat("x", **fields))
    assert error["param"].split(".")[0] in {*fields}


async def test_a_schema_that_cannot_be_held_is_named(bench: Bench) -> None:
    bad = tool("f")
    bad["function"]["parameters"] = {"type": "object", "properties": {"a": {"type": "stringg"}}}
    error = invalid(await bench.chat("x", tools=[bad], tool_choice="required"))
    assert "stringg" in error["message"]
    assert error["param"].startswith("tools.0.function.parameters")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "g"}}])
async def test_forced_calls_have_arguments_that_fit(bench: Bench, choice: Any) -> None:
    tools = [tool("f"), tool("g")]
    for seed in range(3):
        answer = (await bench.chat("x", tools=tools, tool_choice=choice, temperature=1, seed=seed, n=2)).json()
        for one in answer["choices"]:
            assert one["finish_reason"] == "tool_calls"
            assert one["message"]["content"] is None
            for call in one["message"]["tool_calls"]:
                assert call["type"] == "function"
                assert call["id"]
                schema = tool("f")["function"]["parameters"]
                jsonschema.validate(json.loads(call["function"]["arguments"]), schema)


async def test_no_call_without_a_choice(bench: Bench) -> None:
    for fields in ({"tools": [tool("f")], "tool_choice": "none"}, {"tool_choice": "none"}):
        answer = (await bench.chat("SAY:hello|", **fields)).json()
        assert "tool_calls" not in answer["choices"][0]["message"]
        assert answer["choices"][0]["message"]["content"] == "hello"
    assert "get_it" not in await prompt_of(bench, "chat", tools=[tool("get_it")], tool_choice="none")


@pytest.mark.parametrize("text", ['<tool_call>{"name": "f", "argu', "<tool_call>nonsense</tool_call>", "<tool_call>"])
async def test_half_a_call_comes_back_as_content(bench: Bench, text: str) -> None:
    answer = (await bench.chat(f"SAY:{text}|", tools=[tool("f")])).json()
    assert calls_of(answer) == []
    assert answer["choices"][0]["message"]["content"] == text
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_a_call_that_was_cut_is_not_to_be_carried_out(bench: Bench) -> None:
    whole = (await bench.chat(f"SAY:{CALL}|", tools=[tool("f")], stop=["</tool_call>"])).json()["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    for text, stop in ((CALL, ["slo"]), (CALL[: CALL.index("slo")], None), (CALL, ["}"])):
        body = {"messages": [user(f"SAY:{text}|")], "temperature": 0, "tools": [tool("f")], "stop": stop}
        answer = (await bench.post("/v1/chat/completions", body)).json()["choices"][0]
        assert answer["message"]["tool_calls"][0]["function"]["name"] == "f"
        assert answer["finish_reason"] == "stop"
        assert answer["stop_reason"] == (stop[0] if stop else None)
        *_, last, _ = await bench.events("/v1/chat/completions", body)
        assert last["choices"][0]["finish_reason"] == "stop"


async def test_content_before_a_call_stays_content(bench: Bench) -> None:
    answer = (await bench.chat(f"SAY:Let me see. {CALL}|", tools=[tool("f")])).json()
    message = answer["choices"][0]["message"]
    assert message["content"].strip() == "Let me see."
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Oslo"}
    assert answer["usage"]["completion_tokens"] == len(f"Let me see. {CALL}") + 1


# -------------------------------------------------------------------------------------------------------- reasoning


async def test_reasoning_is_kept_apart_and_counted() -> None:
    async with running(template=REASONING_TEMPLATE) as bench:
        answer = (await bench.chat("SAY:<think>hmm</think>yes|")).json()
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hmm", "yes")
        assert 3 <= answer["usage"]["completion_tokens_details"]["reasoning_tokens"] < 21
        plain = (await bench.chat("SAY:yes|")).json()
        assert "reasoning_content" not in plain["choices"][0]["message"]
        assert plain["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


async def test_a_prompt_that_opens_the_reasoning() -> None:
    async with running(template=THINKING) as bench:
        message = (await bench.chat("SAY:hmm</think>yes|")).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hmm", "yes")


async def test_a_model_that_reasons_is_held_to_a_format_afterwards() -> None:
    async with running(template=THINKING) as bench:
        answer = await bench.chat("SAY:hmm</think>{|", response_format=format_of(SCHEMA), max_tokens=90)
        message = answer.json()["choices"][0]["message"]
        assert message["reasoning_content"] == "hmm"
        assert fits(message["content"])


# --------------------------------------------------------------------------------------------------------- structure

BAD_FORMATS = {
    "unknown type name": format_of(holding({"type": "stringg"})),
    "$ref to nothing": format_of(holding({"$ref": "#/$defs/nowhere"})),
    "broken pattern": format_of(holding({"type": "string", "pattern": "(unclosed["})),
    "schema is a list": format_of([1, 2]),
    "properties is a string": format_of({"type": "object", "properties": "v"}),
    "enum is a string": format_of(holding({"enum": "abc"})),
    "json_schema missing": {"type": "json_schema"},
    "unknown type": {"type": "yaml_schema"},
}


@pytest.mark.parametrize("wanted", BAD_FORMATS.values(), ids=BAD_FORMATS)
async def test_bad_formats(bench: Bench, wanted: Any) -> None:
    for stream in (False, True):
        error = invalid(await bench.chat("x", response_format=wanted, stream=stream))
        assert error["param"].startswith("response_format")


async def test_an_unsupported_keyword_is_named_with_its_path(bench: Bench) -> None:
    schema = holding({"type": "array", "uniqueItems": True})
    error = invalid(await bench.chat("x", response_format=format_of(schema)))
    assert "uniqueItems" in error["message"]
    assert "v" in error["message"]


async def test_structure_works_together_with_the_rest(bench: Bench) -> None:
    fields = {"response_format": format_of(SCHEMA), "n": 2, "temperature": 1, "seed": 1, "max_tokens": 60}
    answer = (await bench.chat("x", **fields, logprobs=True, top_logprobs=1)).json()
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop"
        assert fits(choice["message"]["content"])
        spelt = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"]).decode()
        assert spelt.removesuffix("<|eos|>") == choice["message"]["content"]
    stopped = (await bench.chat("x", **{**fields, "n": 1}, stop=['"v"'])).json()["choices"][0]
    assert stopped["stop_reason"] == '"v"'
    cut = (await bench.chat("x", **{**fields, "n": 1, "max_tokens": 3})).json()["choices"][0]
    assert cut["finish_reason"] == "length"


GRAMMARS_TOO_FAR = {'start: "a" start': "limit", 'start: "a" <|eos|> "b"': "stop token"}


@pytest.mark.parametrize(("grammar", "why"), GRAMMARS_TOO_FAR.items(), ids=GRAMMARS_TOO_FAR.values())
async def test_a_grammar_that_goes_too_far_is_the_fault_of_the_request(bench: Bench, grammar: str, why: str) -> None:
    wanted = {"structured_outputs": {"grammar": grammar}}
    error = invalid(await bench.chat("SAY:aaaa|", **wanted))
    assert "grammar" in error["message"]
    assert why in error["message"]
    *_, last, done = await bench.events(
        "/v1/chat/completions", {"messages": [user("SAY:aaaa|")], "temperature": 0, **wanted}
    )
    assert last["error"]["type"] == "invalid_request_error"
    assert done == "[DONE]"
    await bench.idle()


async def test_two_formats_at_once_are_refused(bench: Bench) -> None:
    two = {"response_format": {"type": "json_object"}, "guided_regex": "a"}
    error = invalid(await bench.complete("x", **two))
    assert "response_format" in error["message"]
    assert "guided_regex" in error["message"]


# ------------------------------------------------------------------------------------------------ the official client


async def test_the_helpers_of_the_openai_client(bench: Bench) -> None:
    import openai
    from pydantic import BaseModel

    class Answer(BaseModel):
        v: str

    client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="x", http_client=bench.client)
    messages: list[Any] = [user("SAY:hello|")]
    parsed = await client.chat.completions.parse(
        model="tiny", messages=messages, response_format=Answer, temperature=0, max_tokens=60, logit_bias={"34": 3}
    )
    assert parsed.choices[0].finish_reason in ("stop", "length")
    async with client.chat.completions.stream(
        model="tiny", messages=messages, tools=[tool("f")], tool_choice="required", max_tokens=200
    ) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].finish_reason == "tool_calls"
    assert json.loads(final.choices[0].message.tool_calls[0].function.arguments)["city"] in ("Oslo", "Rome")
    raw = await client.chat.completions.with_raw_response.create(model="tiny", messages=messages, temperature=0)
    assert raw.parse().choices[0].message.content == "hello"
    assert raw.headers["x-request-id"]
