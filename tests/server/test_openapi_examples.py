"""The examples of the OpenAPI document are requests that a server with default settings answers."""

from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.server.conftest import Bench, running

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
"""What the examples call the model: the name of the one that is served by default."""

NEEDED_WITH = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "logprob_token_ids": {"logprobs": True},
}
"""Fields that mean something only beside another one."""

PROMPTS = {"prompt", "messages", "prompt_tokens"}
"""One of these where a body may hold either."""


def bodies(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Each path that takes a body, with the name of its schema and the schema."""
    for path, operations in document["paths"].items():
        for operation in operations.values():
            if "requestBody" in operation:
                name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                yield path, name, document["components"]["schemas"][name]


def example_requests(name: str, schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The examples of a body, and the first of them with each example of each field in it."""
    yield from schema["examples"]
    whole = schema["examples"][0]
    for field, described in schema["properties"].items():
        for example in described["examples"]:
            rivals = PROMPTS - {field} if field in PROMPTS else set()
            body = {key: value for key, value in whole.items() if key not in rivals}
            yield body | _beside(field, name) | {field: example}


def _beside(field: str, name: str) -> dict[str, Any]:
    needed = NEEDED_WITH.get(field, {})
    return {"logprobs": 1} if "logprobs" in needed and name == "CompletionRequest" else needed


async def document_of(bench: Bench) -> dict[str, Any]:
    document: dict[str, Any] = (await bench.client.get("/openapi.json")).json()
    return document


async def test_every_example_of_a_request_is_answered() -> None:
    async with running(served={"model_names": (DEFAULT_MODEL,)}) as bench:
        posted = 0
        for path, name, schema in bodies(await document_of(bench)):
            for body in example_requests(name, schema):
                answer = await bench.post(path, body)
                assert answer.status_code == 200, (path, body, answer.text)
                assert '"error"' not in answer.text, (path, body)
                posted += 1
        await bench.idle()
    assert posted > 100


async def test_every_example_of_the_document_fits_its_own_schema(bench: Bench) -> None:
    document = await document_of(bench)
    checked = 0
    for schema in document["components"]["schemas"].values():
        for part in (schema, *schema.get("properties", {}).values()):
            for example in part.get("examples", ()):
                Draft202012Validator({**part, "components": document["components"]}).validate(example)
                checked += 1
    assert checked > 100


@pytest.mark.parametrize("trusted", [False, True])
async def test_a_template_of_the_request_is_described_as_what_it_takes(trusted: bool) -> None:
    async with running(trust_request_chat_template=trusted) as bench:
        described = (await document_of(bench))["components"]["schemas"]["ChatRequest"]["properties"]["chat_template"]
        assert "--trust-request-chat-template" in described["description"]
        answer = await bench.chat(chat_template="{{ messages[-1].content }}", max_tokens=1)
        assert answer.status_code == (200 if trusted else 400)
