"""A wanted format and tools in one request: the answer is either, and its beginning tells which."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.text.grammar_spec import EmbeddedSchema
from server.text.reasoning import PlainRouter
from server.text.structured import GrammarError, GrammarSpec
from server.text.tools.dialect import Tool, ToolChoice, ToolDialect
from server.text.tools.grammar import may_have_property
from server.text.tools.leading import LeadingRouter
from server.text.tools.registry import select_dialect
from tests.fakes.grammar_walk import accepts, allows_start, compiled, walk
from tests.fakes.tool_calls import TOOLS, dialects, read
from tests.server.conftest import Bench, running
from tests.server.fields.rows import SCHEMA, calls_of, fits, tool
from tests.server.test_errors import invalid
from tests.server.test_openai_chat import THINKING, format_of
from tests.server.test_tools_grammars import OSLO, WRITTEN

AUTO = ToolChoice()
ANSWER = EmbeddedSchema("answer", json.dumps(SCHEMA), "response_format.json_schema.schema")
CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Oslo"}}\n</tool_call>'
FORMAT = format_of(SCHEMA)

each_dialect = pytest.mark.parametrize("dialect", dialects(), ids=lambda dialect: dialect.name)


def grammar(dialect: ToolDialect, answer: EmbeddedSchema = ANSWER, **options: Any) -> GrammarSpec:
    spec = dialect.grammar(options.get("tools", TOOLS), AUTO, options.get("parallel", True), answer)
    assert spec is not None
    return spec


# --------------------------------------------------------------------------------------------------------- grammars


@each_dialect
def test_an_answer_is_calls_or_the_format_and_nothing_else(dialect: ToolDialect) -> None:
    write, constraint = WRITTEN[dialect.name], compiled(grammar(dialect))
    assert accepts(constraint, '{"v": "yes"}')
    assert accepts(constraint, write(("get_weather", OSLO)))
    assert accepts(constraint, write(("get_weather", OSLO), ("get_time", "{}")))
    for wrong in (
        "Sure",
        '{"v": "perhaps"',
        '{"w"',
        write(("nobody", "{}")),
        write(("get_weather", '{"city": "Rome"}')),
    ):
        assert not allows_start(constraint, wrong), wrong
    assert not accepts(constraint, "")
    assert not accepts(constraint, '{"v": "yes"}' + write(("get_time", "{}")))
    one = compiled(grammar(dialect, parallel=False))
    assert not accepts(one, write(("get_weather", OSLO), ("get_time", "{}")))


@each_dialect
@pytest.mark.parametrize("seed", range(5))
def test_what_the_grammar_allows_is_read_as_one_of_the_two(dialect: ToolDialect, seed: int) -> None:
    written = walk(compiled(grammar(dialect)), seed)
    assert written.ended
    answer = read(dialect, [written.text])
    assert fits(written.text) if not answer.calls else answer.content == ""


def test_json_that_looks_like_a_llama_call_is_refused_by_name() -> None:
    dialect = select_dialect("llama3_json", None)
    for schema in ({"type": "object"}, {"type": "object", "properties": {"name": {}}, "additionalProperties": False}):
        with pytest.raises(GrammarError, match="this model writes a tool call as a JSON object") as caught:
            grammar(dialect, EmbeddedSchema("answer", json.dumps(schema), "response_format"))
        assert caught.value.param == "response_format"
    listing = compiled(grammar(dialect, EmbeddedSchema("answer", '{"type": "array", "items": {"type": "boolean"}}')))
    assert accepts(listing, "[true, false]")


@pytest.mark.parametrize(
    ("schema", "may"),
    [
        ({"type": "object"}, True),
        ({}, True),
        ({"type": ["object", "null"], "additionalProperties": False}, True),
        ({"type": "object", "additionalProperties": False}, False),
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": False}, False),
        ({"type": "object", "properties": {"name": {}}, "additionalProperties": False}, True),
        ({"type": "object", "patternProperties": {"n": {}}, "additionalProperties": False}, True),
        ({"type": "object", "$ref": "#/$defs/x", "additionalProperties": False}, True),
        ({"type": "object", "properties": 5, "additionalProperties": False}, True),
        ({"type": 5}, True),
        ({"type": "array"}, False),
    ],
    ids=str,
)
def test_whether_an_object_may_have_a_name(schema: dict[str, Any], may: bool) -> None:
    assert may_have_property(schema, "name") is may


# ---------------------------------------------------------------------------------------------------------- reading


@settings(deadline=None, max_examples=150)
@given(
    text=st.sampled_from(
        ['{"v": "<tool_call>{}"}', CALL, " \n" + CALL, "<tool", "<", "", " ", '"[TOOL_CALLS]f[ARGS]{}"', CALL + CALL]
    ),
    cuts=st.lists(st.integers(0, 70), max_size=6),
)
def test_only_the_beginning_counts_however_it_is_cut(text: str, cuts: list[int]) -> None:
    dialect = select_dialect("hermes", None)
    router = LeadingRouter("<tool_call>", dialect.router([Tool("f", None, {})], new_id=lambda: "id"))
    ends = sorted(min(end, len(text)) for end in cuts)
    pieces = PlainRouter().flush()
    for start, end in zip([0, *ends], [*ends, len(text)], strict=True):
        pieces += router.push(text[start:end])
    pieces += router.flush()
    if text.lstrip().startswith("<tool_call>"):
        assert pieces.content == ""
        assert pieces.tool_calls[0].name == "f"
    else:
        assert (pieces.content, pieces.tool_calls) == (text, ())


# -------------------------------------------------------------------------------------------------------- over HTTP


async def test_the_model_chooses_between_format_and_call(bench: Bench) -> None:
    fields = {"tools": [tool("f")], "response_format": FORMAT, "max_tokens": 200}
    called = (await bench.chat(f"SAY:{CALL}|", **fields)).json()
    assert called["choices"][0]["finish_reason"] == "tool_calls"
    assert called["choices"][0]["message"]["content"] is None
    assert json.loads(calls_of(called)[0]["function"]["arguments"]) == {"city": "Oslo"}
    said = (await bench.chat('SAY:{"v": "yes"}|', **fields)).json()
    assert said["choices"][0]["message"] == {"role": "assistant", "content": '{"v": "yes"}', "refusal": None}
    assert "warnings" not in said
    for seed in range(4):
        wild = (await bench.chat("x", **fields, temperature=2, seed=seed)).json()["choices"][0]
        assert wild["finish_reason"] in ("stop", "tool_calls")
        assert wild["finish_reason"] == "tool_calls" or fits(wild["message"]["content"])


async def test_a_marker_inside_the_json_is_text() -> None:
    text = json.dumps({"v": "[TOOL_CALLS]f[ARGS]{}"})
    async with running(tool_call_parser="mistral_args") as bench:
        answer = (await bench.chat(f"SAY:{text}|", tools=[tool("f")], response_format={"type": "json_object"})).json()
        assert answer["choices"][0]["message"]["content"] == text
        assert calls_of(answer) == []


async def test_a_dialect_that_cannot_tell_says_so() -> None:
    async with running(tool_call_parser="llama3_json") as bench:
        error = invalid(await bench.chat("x", tools=[tool("f")], response_format={"type": "json_object"}))
        assert error["param"] == "response_format"
        assert "tool call" in error["message"]
        fits_in = await bench.chat('SAY:{"v": "yes"}|', tools=[tool("f")], response_format=FORMAT)
        assert fits(fits_in.json()["choices"][0]["message"]["content"])


async def test_a_forced_call_reports_the_format_as_unused(bench: Bench) -> None:
    for fields in ({"response_format": FORMAT}, {"guided_json": SCHEMA}, {"structured_outputs": {"regex": "a"}}):
        (name,) = fields
        answer = await bench.chat("x", tools=[tool("f")], tool_choice="required", max_tokens=200, **fields)
        assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"
        assert [warning["param"] for warning in answer.json()["warnings"]] == [name]
        assert answer.headers["x-ignored-params"] == name
    async with running(strict_params=True) as strict:
        invalid(
            await strict.chat("x", tools=[tool("f")], tool_choice="required", response_format=FORMAT), "response_format"
        )


async def test_a_wrong_schema_beside_tools_is_named(bench: Bench) -> None:
    wrong = format_of({"type": "object", "properties": {"v": {"type": "stringg"}}})
    error = invalid(await bench.chat("x", tools=[tool("f")], response_format=wrong))
    assert error["param"].startswith("response_format")
    assert "stringg" in error["message"]


async def test_a_model_that_thinks_chooses_afterwards() -> None:
    async with running(template=THINKING) as bench:
        fields = {"tools": [tool("f")], "response_format": FORMAT, "max_tokens": 200}
        for text, reason in ((CALL, "tool_calls"), ('{"v": "no"}', "stop")):
            choice = (await bench.chat(f"SAY:hmm</think>\n{text}|", **fields)).json()["choices"][0]
            assert choice["finish_reason"] == reason
            assert choice["message"]["reasoning_content"] == "hmm"
