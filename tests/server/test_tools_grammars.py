import json
from collections.abc import Callable

import jsonschema
import pytest

from server.text.structured import GrammarError, GrammarSpec
from server.text.tools.dialect import MAX_PARALLEL_CALLS, Tool, ToolChoice, ToolDialect
from tests.fakes.grammar_walk import accepts, allows_start, compiled, walk
from tests.fakes.tool_calls import CLOCK, NOTE, TOOLS, dialects, read

REQUIRED = ToolChoice("required")
AUTO = ToolChoice()
OSLO = '{"city": "Oslo", "days": 3}'

each_dialect = pytest.mark.parametrize("dialect", dialects(), ids=lambda dialect: dialect.name)

WRITTEN: dict[str, Callable[..., str]] = {
    "hermes": lambda *calls: "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' for name, arguments in calls
    ),
    "llama3_json": lambda *calls: "; ".join(f'{{"name": "{name}", "parameters": {args}}}' for name, args in calls),
    "mistral": lambda *calls: (
        "[TOOL_CALLS] [" + ", ".join(f'{{"name": "{name}", "arguments": {args}}}' for name, args in calls) + "]"
    ),
    "mistral_args": lambda *calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{args}" for name, args in calls),
    "pythonic": lambda *calls: (
        "["
        + ", ".join(
            f"{name}({', '.join(f'{k}={json.dumps(v)}' for k, v in json.loads(args).items())})" for name, args in calls
        )
        + "]"
    ),
}
WRITTEN["default"] = WRITTEN["hermes"]


def grammar(
    dialect: ToolDialect, choice: ToolChoice, *, parallel: bool = True, tools: tuple[Tool, ...] = TOOLS
) -> GrammarSpec:
    spec = dialect.grammar(tools, choice, parallel)
    assert spec is not None
    return spec


@each_dialect
@pytest.mark.parametrize("seed", range(4))
def test_forced_answers_are_calls_that_fit(dialect: ToolDialect, seed: int) -> None:
    written = walk(compiled(grammar(dialect, REQUIRED)), seed)
    assert written.ended
    answer = read(dialect, [written.text])
    assert answer.content == ""
    assert 1 <= len(answer.calls) <= MAX_PARALLEL_CALLS
    schemas = {tool.name: tool.arguments_schema for tool in TOOLS}
    for name, arguments in answer.named_arguments:
        parsed = json.loads(arguments)
        assert isinstance(parsed, dict)
        jsonschema.validate(parsed, schemas[name])


@each_dialect
def test_required_allows_several_calls_and_no_text(dialect: ToolDialect) -> None:
    write = WRITTEN[dialect.name]
    constraint = compiled(grammar(dialect, REQUIRED))
    assert accepts(constraint, write(("get_weather", OSLO)))
    assert accepts(constraint, write(("get_weather", OSLO), ("get_time", "{}")))
    assert not accepts(constraint, "")
    assert not allows_start(constraint, "Sure")


@each_dialect
def test_calls_that_do_not_fit_are_not_allowed(dialect: ToolDialect) -> None:
    write = WRITTEN[dialect.name]
    constraint = compiled(grammar(dialect, REQUIRED))
    for arguments in (
        '{"city": "Rome", "days": 3}',
        '{"city": "Oslo", "days": 9}',
        '{"city": "Oslo", "days": 3, "x": 1}',
    ):
        assert not allows_start(constraint, write(("get_weather", arguments)))
    assert not allows_start(constraint, write(("nobody", "{}")))


@each_dialect
def test_without_parallel_calls_there_is_exactly_one(dialect: ToolDialect) -> None:
    write = WRITTEN[dialect.name]
    for choice in (REQUIRED, AUTO):
        constraint = compiled(grammar(dialect, choice, parallel=False))
        assert accepts(constraint, write(("get_weather", OSLO)))
        assert not accepts(constraint, write(("get_weather", OSLO), ("get_weather", OSLO)))


@each_dialect
def test_a_named_tool_is_called_once(dialect: ToolDialect) -> None:
    write = WRITTEN[dialect.name]
    constraint = compiled(grammar(dialect, ToolChoice.named("get_weather")))
    assert accepts(constraint, write(("get_weather", OSLO)))
    assert not accepts(constraint, write(("get_weather", OSLO), ("get_weather", OSLO)))
    assert not allows_start(constraint, write(("get_time", "{}")))


@each_dialect
def test_the_number_of_calls_has_an_end(dialect: ToolDialect) -> None:
    write = WRITTEN[dialect.name]
    constraint = compiled(grammar(dialect, REQUIRED))
    assert accepts(constraint, write(*[("get_weather", OSLO)] * MAX_PARALLEL_CALLS))
    assert not accepts(constraint, write(*[("get_weather", OSLO)] * (MAX_PARALLEL_CALLS + 1)))


@each_dialect
def test_strict_tools_leave_text_free_but_calls_not(dialect: ToolDialect) -> None:
    write = WRITTEN[dialect.name]
    constraint = compiled(grammar(dialect, AUTO))
    assert accepts(constraint, "Just text, {with} [brackets] <b>.")
    assert accepts(constraint, "")
    assert accepts(constraint, write(("get_weather", OSLO)))
    assert not allows_start(constraint, write(("get_weather", '{"city": "Rome"}')))


@pytest.mark.parametrize("name", ["hermes", "default", "mistral", "mistral_args"])
def test_text_before_a_strict_call(name: str) -> None:
    dialect = next(dialect for dialect in dialects() if dialect.name == name)
    constraint = compiled(grammar(dialect, AUTO))
    text = "Let me see. " + WRITTEN[name](("get_weather", OSLO))
    assert accepts(constraint, text)
    assert not allows_start(constraint, "Let me see. " + WRITTEN[name](("get_weather", '{"days": 1}')))
    assert read(dialect, [text]).named_arguments == [("get_weather", OSLO)]


@each_dialect
def test_tools_that_are_not_strict_may_have_any_object_in_auto(dialect: ToolDialect) -> None:
    constraint = compiled(grammar(dialect, AUTO, parallel=False, tools=(NOTE,)))
    assert accepts(constraint, WRITTEN[dialect.name](("note", '{"other": [1], "x": "y"}')))
    assert accepts(constraint, WRITTEN[dialect.name](("note", "{}")))


@each_dialect
def test_no_grammar_where_nothing_is_to_be_held(dialect: ToolDialect) -> None:
    assert dialect.grammar((CLOCK, NOTE), AUTO, True) is None
    assert dialect.grammar(TOOLS, ToolChoice("none"), True) is None
    assert dialect.grammar((), AUTO, True) is None


@each_dialect
def test_allowed_tools(dialect: ToolDialect) -> None:
    write = WRITTEN[dialect.name]
    for mode in ("auto", "required"):
        choice = ToolChoice.allowed(mode, ["get_time"])
        constraint = compiled(grammar(dialect, choice))
        assert not allows_start(constraint, write(("get_weather", OSLO)))
        assert accepts(constraint, "text") is (mode == "auto")
    assert choice.callable_tools(TOOLS) == (CLOCK,)


@each_dialect
def test_wrong_choices_are_refused(dialect: ToolDialect) -> None:
    with pytest.raises(GrammarError, match="no_such_tool"):
        dialect.grammar(TOOLS, ToolChoice.named("no_such_tool"), True)
    with pytest.raises(GrammarError, match="no tools"):
        dialect.grammar((), REQUIRED, True)
    with pytest.raises(GrammarError) as caught:
        dialect.grammar((Tool("f", None, {"type": "string"}, path="tools.0.function.parameters"),), REQUIRED, True)
    assert caught.value.param == "tools.0.function.parameters"


@each_dialect
def test_unsupported_keywords_are_named_with_their_tool(dialect: ToolDialect) -> None:
    tool = Tool("f", None, {"type": "object", "properties": {"v": {"not": {}}}}, path="tools.4.function.parameters")
    with pytest.raises(GrammarError) as caught:
        compiled(grammar(dialect, REQUIRED, tools=(tool,)))
    place = f"{caught.value.param}.{caught.value.path}"
    assert place == "tools.4.function.parameters.properties.v.not"


@pytest.mark.parametrize("seed", range(12))
def test_optional_python_arguments(seed: int) -> None:
    dialect = next(dialect for dialect in dialects() if dialect.name == "pythonic")
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "boolean"},
            "b": {"type": "null"},
            "c": {"enum": [1, "x"]},
            "d": {"type": "boolean"},
        },
        "required": ["b"],
    }
    written = walk(compiled(grammar(dialect, REQUIRED, parallel=False, tools=(Tool("f", None, schema),))), seed)
    ((name, arguments),) = read(dialect, [written.text], tools=[Tool("f", None, schema)]).named_arguments
    assert name == "f"
    jsonschema.validate(json.loads(arguments), schema)
