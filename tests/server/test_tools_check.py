"""Tools that are none: refused by name, keyword and path, whatever the model may do with them."""

from collections.abc import Callable
from typing import Any

import pytest

from server.text.grammar_spec import GrammarError
from server.text.tools import check
from server.text.tools.check import ToolCheck
from server.text.tools.dialect import Tool
from tests.server.conftest import Bench
from tests.server.test_errors import invalid

INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown type": ({"type": "object", "properties": {"city": {"type": "text"}}}, "properties.city.type"),
    "properties as a list": ({"type": "object", "properties": ["city"]}, "properties"),
    "required as a text": ({"type": "object", "required": "city"}, "required"),
    "a negative length": (
        {"type": "object", "properties": {"a": {"anyOf": [{"maxLength": -1}]}}},
        "properties.a.anyOf.0.maxLength",
    ),
    "a pattern that is none": ({"properties": {"a": {"pattern": "("}}}, "properties.a.pattern"),
    "no object": ({"type": "array", "items": {}}, "type"),
}

UNENFORCEABLE = {"type": "object", "properties": {"a": {"not": {"type": "null"}}}}
CHOICES: list[Any] = [None, "auto", "none", "required", {"type": "function", "function": {"name": "good"}}]


def tools(parameters: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    good = {"type": "function", "function": {"name": "good", "parameters": {"type": "object", "properties": {}}}}
    return [good, {"type": "function", "function": {"name": "bad_one", "parameters": parameters, **fields}}]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize(("parameters", "path"), INVALID.values(), ids=INVALID.keys())
async def test_an_invalid_schema_is_named(bench: Bench, parameters: dict[str, Any], path: str, choice: Any) -> None:
    error = invalid(await bench.chat("SAY:ok|", tools=tools(parameters), tool_choice=choice))
    assert error["param"] == "tools.1.function.parameters"
    assert "'bad_one'" in error["message"]
    assert f"(at {path})" in error["message"]


async def test_an_invalid_schema_is_named_where_only_the_prompt_is_made(bench: Bench) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools({"type": "object", "required": "city"})}
    for path in ("/tokenize", "/v1/capacity"):
        error = invalid(await bench.post(path, body | ({"max_tokens": 4} if "capacity" in path else {})))
        assert error["param"] == "tools.1.function.parameters"


async def test_what_cannot_be_enforced_is_refused_only_where_it_would_have_to_be(bench: Bench) -> None:
    for choice in ("auto", "none"):
        assert (await bench.chat("SAY:ok|", tools=tools(UNENFORCEABLE), tool_choice=choice)).status_code == 200
    for fields, choice in (({"strict": True}, "auto"), ({}, "required")):
        error = invalid(await bench.chat("SAY:ok|", tools=tools(UNENFORCEABLE, **fields), tool_choice=choice))
        assert error["param"] == "tools.1.function.parameters"
        assert "'not' (at properties.a.not)" in error["message"]


async def test_tools_without_parameters_are_fine(bench: Bench) -> None:
    for parameters in ({}, {"type": "object"}, {"properties": {"a": {"type": "string"}}}):
        assert (await bench.chat("SAY:ok|", tools=tools(parameters))).status_code == 200
    bare = [{"type": "function", "function": {"name": "f"}}]
    assert (await bench.chat("SAY:ok|", tools=bare)).status_code == 200


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was looked at rather than remembered."""
    seen: list[Any] = []
    real: Callable[[Any], None] = check.check_valid

    def spy(schema: Any) -> None:
        seen.append(schema)
        real(schema)

    monkeypatch.setattr(check, "check_valid", spy)
    return seen


def tool(title: str, **parameters: Any) -> Tool:
    return Tool("f", None, {"type": "object", "title": title, **parameters})


async def test_what_was_found_valid_is_remembered_and_the_rest_is_not(checked: list[Any]) -> None:
    checker = ToolCheck(max_remembered=2)
    await checker.check([tool("a"), tool("b")])
    await checker.check([tool("b"), tool("a")])
    assert [schema["title"] for schema in checked] == ["a", "b"]
    await checker.check([tool("c")])  # in place of b, the one not asked for the longest
    await checker.check([tool("a"), tool("c")])
    assert [schema["title"] for schema in checked] == ["a", "b", "c"]
    await checker.check([tool("b")])
    assert [schema["title"] for schema in checked] == ["a", "b", "c", "b"]
    for _ in range(2):
        with pytest.raises(GrammarError):
            await checker.check([tool("d", required="x")])
    assert len(checked) == 6


async def test_more_schemas_than_can_be_checked_in_time_are_refused(checked: list[Any]) -> None:
    big = "x" * (check.MAX_BYTES // 2)
    with pytest.raises(GrammarError, match="larger than 1048576 bytes"):
        await ToolCheck().check([tool(big), tool(big + "y")])
    assert not checked
