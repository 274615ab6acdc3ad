"""What surrounds every answer: ids, headers, models, tokenizer routes, honesty, CORS, accounting, OpenAPI."""

import json
from collections import Counter
from typing import Any

import pytest
from pydantic import BaseModel

from server.openai.schema.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tests.server.conftest import TEMPLATE, Bench, events_of, running
from tests.server.fields.rows import tool
from tests.server.test_errors import invalid

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


# ------------------------------------------------------------------------------------------------- ids and headers


async def test_every_answer_has_a_request_id(bench: Bench) -> None:
    seen = set()
    for method, path in (("GET", "/v1/models"), ("POST", CHAT), ("GET", "/none"), ("GET", "/health"), ("PUT", CHAT)):
        answer = await bench.client.request(method, path)
        seen.add(answer.headers["x-request-id"])
    assert len(seen) == 5
    for given, kept in (("mine-7", "mine-7"), ("a b\tc", "abc"), ("x" * 500, "x" * 128)):
        answer = await bench.client.get("/v1/models", headers={"x-request-id": given})
        assert answer.headers["x-request-id"] == kept


async def test_server_timing_and_the_effective_settings(bench: Bench) -> None:
    answer = await bench.chat(temperature=0.5, top_k=-1, seed=3, max_tokens=2)
    phases = [part.split(";dur=") for part in answer.headers["server-timing"].split(", ")]
    assert [name for name, _ in phases] == ["queue", "prefill", "decode"]
    assert all(float(value) >= 0 for _, value in phases)
    shown = answer.json()["sampling"]
    assert shown["temperature"] == {"value": 0.5, "source": "request"}
    assert shown["top_k"] == {"value": 0, "source": "request"}
    assert shown["seed"] == {"value": 3, "source": "request"}
    assert shown["top_p"] == {"value": 1.0, "source": "server"}
    assert shown["max_tokens"] == {"value": 2, "source": "request"}
    assert shown["sampler_order"]["value"][0] == "mask"


async def test_defaults_come_from_the_model() -> None:
    async with running(served={"generation_defaults": {"temperature": 0.25, "top_k": 7}}) as bench:
        shown = (await bench.post(CHAT, {"messages": [{"role": "user", "content": "SAY:a|"}], "top_k": 3})).json()
        assert shown["sampling"]["temperature"] == {"value": 0.25, "source": "model"}
        assert shown["sampling"]["top_k"] == {"value": 3, "source": "request"}


async def test_another_sampler_order() -> None:
    order = ("mask", "temperature", "top_k", "top_p", "min_p", "typical_p", "penalties", "logit_bias")
    async with running(sampler_order=order) as bench:
        answer = await bench.chat()
        assert answer.json()["sampling"]["sampler_order"]["value"] == list(order)
        assert bench.engine.starts[-1].params.sampler_order == order


# --------------------------------------------------------------------------------------------------------- honesty


async def test_unknown_fields_are_accepted_and_reported(bench: Bench) -> None:
    body = {"messages": [{"role": "user", "content": "SAY:a|"}], "foo": 1, "stream_options": {"bar": 2}, "stream": True}
    answer = await bench.post(CHAT, body)
    assert answer.headers["x-ignored-params"] == "foo,stream_options.bar"
    warnings = events_of(answer.text)[0]["warnings"]
    assert [warning["param"] for warning in warnings] == ["foo", "stream_options.bar"]
    assert set(warnings[0]) == {"param", "given", "used", "why"}
    assert [warning["given"] for warning in warnings] == [1, 2]
    odd = await bench.complete("SAY:a|", **{"ä\n,b": 1})
    assert odd.status_code == 200
    assert "\n" not in odd.headers["x-ignored-params"]


async def test_a_warning_shows_what_was_given(bench: Bench) -> None:
    given = {"a": "é", "b": [1, None, True]}
    answer = await bench.complete("SAY:a|", foo=given, bar="x" * 500, baz=[list(range(500))])
    shown = {warning["param"]: warning["given"] for warning in answer.json()["warnings"]}
    assert shown["foo"] == given
    assert shown["bar"] == "x" * 200 + "..."
    assert shown["baz"].startswith("[[0, 1, 2")
    assert len(shown["baz"]) == 203


async def test_a_strict_server_refuses_what_it_would_report() -> None:
    async with running(strict_params=True) as bench:
        for fields in ({"foo": 1}, {"user": "me"}, {"max_tokens": 10**6}, {"chat_template_kwargs": {"x": 1}}):
            error = invalid(await bench.chat(**fields))
            assert error["param"].split(".")[0] in fields
        assert (await bench.chat(max_tokens=5)).status_code == 200


async def test_stream_options_without_a_stream(bench: Bench) -> None:
    invalid(await bench.chat(stream_options={"include_usage": True}), "stream_options")


# ----------------------------------------------------------------------------------------------------------- answers


async def test_what_is_null_and_what_is_absent(bench: Bench) -> None:
    chat = (await bench.chat()).json()
    assert set(chat) == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage", "sampling"}
    (choice,) = chat["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "hello", "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert chat["id"].startswith("chatcmpl-")
    assert set(chat["usage"]["completion_tokens_details"]) == {"reasoning_tokens"}
    text = (await bench.complete()).json()
    assert text["id"].startswith("cmpl-")
    assert text["object"] == "text_completion"
    assert text["choices"] == [
        {"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert "completion_tokens_details" not in text["usage"]
    nothing = (await bench.chat("SAY:|")).json()["choices"][0]["message"]
    assert nothing["content"] == ""


async def test_logprobs_line_up_with_the_text(bench: Bench) -> None:
    logprobs = (await bench.complete("SAY:日本 x|", echo=True, logprobs=1)).json()["choices"][0]["logprobs"]
    text = "SAY:日本 x|日本 x"
    raw = text.encode()
    assert len(logprobs["tokens"]) == len(raw) + 1, "a token a byte, and the end token"
    for position, offset in enumerate(logprobs["text_offset"][:-1]):
        assert text[:offset].encode() == raw[: len(text[:offset].encode())]
        assert len(text[:offset].encode()) <= position < len(text[: offset + 1].encode())


@pytest.mark.parametrize(("stop", "want"), [("ell", "h"), ("日", "hello "), ("hello", "")])
async def test_logprobs_after_a_stop_string(bench: Bench, stop: str, want: str) -> None:
    answer = (await bench.complete("SAY:hello 日本|", stop=stop, logprobs=0)).json()
    assert answer["choices"][0]["text"] == want
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == len(want.encode())
    assert answer["usage"]["completion_tokens"] == len((want + stop).encode())


async def test_usage_counts_each_prompt_once(bench: Bench) -> None:
    usage = (await bench.complete(["SAY:ab|", "SAY:cd|"], n=3, max_tokens=2)).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (14, 12, 26)


async def test_prompts_as_ids_that_are_none(bench: Bench) -> None:
    vocab = bench.state.served.vocab_size
    bad: list[Any] = [[-1], [vocab], [2**70], [1.5], [5, "a"], [5, None], [True], [[5], [-1]], [[[5]]], [], [[5], []]]
    for prompt in [*bad, None, 7, {"a": 1}, "", [""], ["a", ""]]:
        invalid(await bench.complete(prompt, max_tokens=2))
    assert (await bench.post(COMPLETIONS, {"max_tokens": 2})).json()["error"]["param"] == "prompt"
    assert (await bench.complete([vocab - 1, 5], max_tokens=2)).status_code == 200


# ------------------------------------------------------------------------------------------------- models and tokens


async def test_models(bench: Bench) -> None:
    listing = (await bench.client.get("/v1/models")).json()
    assert listing["object"] == "list"
    assert [card["id"] for card in listing["data"]] == ["tiny", "org/tiny"]
    for path in ("/v1/models/tiny", "/v1/models/org/tiny", "/v1/models/org%2Ftiny"):
        card = (await bench.client.get(path)).json()
        assert card["object"] == "model"
        assert card["max_model_len"] == 1024
    head = await bench.client.head("/v1/models/tiny")
    assert head.status_code == 200
    assert head.content == b""


async def test_tokenize_and_back(bench: Bench) -> None:
    text = "hé <|call|> x"
    tokens = (await bench.post("/tokenize", {"prompt": text, "return_token_strs": True})).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == 1024
    assert "<|call|>" in tokens["token_strs"]
    assert (await bench.post("/detokenize", {"tokens": tokens["tokens"]})).json() == {"prompt": text}
    messages = [{"role": "user", "content": "SAY:x|"}]
    chat = (await bench.post("/tokenize", {"messages": messages, "tools": [tool("f")]})).json()
    used = (await bench.chat(messages, tools=[tool("f")], max_tokens=1)).json()["usage"]["prompt_tokens"]
    assert chat["count"] == used
    for body in ({}, {"prompt": "a", "messages": messages}, {"prompt": 5}, {"messages": []}):
        invalid(await bench.post("/tokenize", body))
    for body in ({"tokens": [10**9]}, {"tokens": ["a"]}, {}):
        invalid(await bench.post("/detokenize", body))
    assert (await bench.post("/tokenize", {"prompt": "a", "model": "no"})).status_code == 404
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [97]})):
        answer = await bench.post(path, {**body, "zork": 1})
        assert [warning["param"] for warning in answer.json()["warnings"]] == ["zork"]
        assert answer.headers["x-ignored-params"] == "zork"


async def test_tokenizer_info(bench: Bench) -> None:
    info = (await bench.client.get("/tokenizer_info")).json()
    assert info["eos_token"] == "<|eos|>"
    assert info["vocab_size"] == bench.state.served.vocab_size
    assert info["chat_template"] == TEMPLATE
    assert info["special_tokens"][str(info["eos_token_id"])] == "<|eos|>"


# -------------------------------------------------------------------------------------------------------------- CORS


async def test_cors_is_off_by_default(bench: Bench) -> None:
    answer = await bench.client.get("/v1/models", headers={"Origin": "http://a"})
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    ("allowed", "origin", "granted"), [("*", "http://a", "*"), ("http://a", "http://a", "http://a")]
)
async def test_cors(allowed: str, origin: str, granted: str) -> None:
    async with running(allowed_origins=(allowed,)) as bench:
        asked = {
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "x-api-key",
        }
        preflight = await bench.client.options(CHAT, headers=asked)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == granted
        answer = await bench.client.get("/v1/models", headers={"Origin": origin})
        assert answer.headers["access-control-allow-origin"] == granted
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        other = await bench.client.get("/v1/models", headers={"Origin": "http://b"})
        assert (other.headers.get("access-control-allow-origin") == "*") == (allowed == "*")


# -------------------------------------------------------------------------------------------------------- accounting


async def test_every_request_ends_in_one_cell(bench: Bench) -> None:
    await bench.chat()
    await bench.chat(max_tokens=1, n=2)
    await bench.chat(stream=True)
    await bench.complete(temperature=-1)
    await bench.client.get("/made/up/1")
    await bench.client.get("/v1/models/made-up")
    await bench.client.put(CHAT)
    await bench.client.head("/v1/models")
    assert Counter(bench.counted) == Counter(
        [
            (CHAT, 200, "stop", ""),
            (CHAT, 200, "length", ""),
            (CHAT, 200, "stop", ""),
            (COMPLETIONS, 400, "none", ""),
            ("unknown", 404, "none", ""),
            ("/v1/models/{model_id:path}", 404, "none", ""),
            (CHAT, 405, "none", ""),
            ("/v1/models", 200, "none", ""),
        ]
    )


async def test_the_documentation_has_labels_of_its_own_and_nothing_else_has(bench: Bench) -> None:
    for path in ("/docs", "/openapi.json", "/docs/x", "/redoc", "/docs/x/y", "/openapi.json/", "/favicon.ico"):
        await bench.client.get(path)
    assert [endpoint for endpoint, *_ in bench.counted] == [
        "/docs",
        "/openapi.json",
        "/docs/{name}",
        *["unknown"] * 4,
    ]


# ----------------------------------------------------------------------------------------------------------- OpenAPI


async def test_the_document_describes_every_route_and_field(bench: Bench) -> None:
    document = (await bench.client.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    for path, model in (
        (CHAT, ChatRequest),
        (COMPLETIONS, CompletionRequest),
        ("/tokenize", TokenizeRequest),
        ("/detokenize", DetokenizeRequest),
    ):
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": f"#/components/schemas/{model.__name__}"}
        check_fields(schemas[model.__name__], model)
    assert "text/event-stream" in document["paths"][CHAT]["post"]["responses"]["200"]["content"]
    assert "application/json" in document["paths"][CHAT]["post"]["responses"]["200"]["content"]
    assert {"400", "401", "404", "413", "415", "429", "503", "504"} <= set(document["paths"][CHAT]["post"]["responses"])
    names = [op.get("operationId") for path in document["paths"].values() for op in path.values()]
    assert len(names) == len(set(names))
    assert check_refs(document, document) > 50


def check_fields(schema: dict[str, Any], model: type[BaseModel]) -> None:
    fields = {field.alias or name for name, field in model.model_fields.items()}
    assert set(schema["properties"]) == fields
    for name, described in schema["properties"].items():
        assert described["description"], name
        assert described["examples"], name


def check_refs(node: Any, document: dict[str, Any]) -> int:
    """How many references there are; each must lead somewhere."""
    if isinstance(node, list):
        return sum(check_refs(item, document) for item in node)
    if not isinstance(node, dict):
        return 0
    target: Any = document
    if isinstance(node.get("$ref"), str):
        for part in node["$ref"].removeprefix("#/").split("/"):
            target = target[part]
    return ("$ref" in node) + sum(check_refs(value, document) for value in node.values())


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest])
def test_examples_are_accepted(model: type[BaseModel]) -> None:
    examples = model.model_json_schema()["examples"]
    base = examples[0]
    for example in examples:
        model.model_validate(example)
    for name, field in model.model_fields.items():
        (example,) = field.examples
        if name in ("messages", "prompt") and model is TokenizeRequest:
            continue
        model.model_validate(json.loads(json.dumps({**base, field.alias or name: example})))
