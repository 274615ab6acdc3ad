"""What the dialects' grammars share: when one is needed, the schemas of the arguments, how many calls.

Knows: tools, choices and the rule names of a structural `GrammarSpec`. Refuses to know: any one dialect's spelling.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from server.text.grammar_spec import EmbeddedSchema, GrammarError, lark_quote, schema_text
from server.text.tools.dialect import MAX_PARALLEL_CALLS, Tool, ToolChoice

_COMPOSITION = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties", "additionalProperties")


def constrained_tools(tools: Sequence[Tool], choice: ToolChoice, parallel: bool) -> tuple[Tool, ...]:
    """The tools an answer's grammar has to know; empty when the answer needs no grammar.

    Needed when a call is forced, when a tool is strict, when only some tools are allowed, and to hold the number of
    calls to one.

    Raises:
        GrammarError: a call is forced, or tools are named, and there is no such tool.
    """
    allowed = choice.callable_tools(tools)
    missing = [name for name in choice.names or () if name not in {tool.name for tool in tools}]
    if missing:
        raise GrammarError(f"tool_choice names {missing[0]!r}, which is not among the tools", "tool_choice")
    if choice.forces_call and not allowed:
        raise GrammarError("tool_choice asks for a call, but there are no tools", "tool_choice")
    strict = any(tool.strict for tool in allowed)
    return allowed if choice.forces_call or strict or not parallel or choice.names is not None else ()


def arguments_schema(tool: Tool, choice: ToolChoice) -> dict[str, Any]:
    """The schema the arguments of a call are held to: the tool's own when strict or forced, else just an object.

    Raises:
        GrammarError: the tool's parameters do not describe an object.
    """
    if not (choice.forces_call or tool.strict):
        return {"type": "object"}
    if tool.parameters.get("type", "object") != "object":
        raise GrammarError("the parameters of a tool must have type 'object'", tool.path, "type")
    schema = tool.arguments_schema
    if schema["properties"] and not any(keyword in schema for keyword in _COMPOSITION):
        # An object closed to made-up arguments still fits the schema, and it ends.
        schema["additionalProperties"] = False
    return schema


def embedded_arguments(tools: Sequence[Tool], choice: ToolChoice) -> tuple[EmbeddedSchema, ...]:
    """One schema a tool, as rules `args_0`, `args_1`, ..."""
    return tuple(
        EmbeddedSchema(f"args_{i}", schema_text(arguments_schema(tool, choice), tool.path), tool.path)
        for i, tool in enumerate(tools)
    )


def alternatives(rule: str, tools: Sequence[Tool], body: Callable[[int, Tool], str]) -> str:
    """Lark: `rule` is one of the tools' bodies."""
    return f"{rule}: " + " | ".join(body(i, tool) for i, tool in enumerate(tools))


def named_object(arguments_key: str) -> Callable[[int, Tool], str]:
    """Lark for `{"name": "f", "arguments": ...}` with that key for the arguments, as `json.dumps` would space it."""

    def body(i: int, tool: Tool) -> str:
        head = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{arguments_key}": '
        return f'{lark_quote(head)} args_{i} "}}"'

    return body


def repeated(item: str, separator: str, choice: ToolChoice, parallel: bool) -> str:
    """Lark for one item, or for one to `MAX_PARALLEL_CALLS` of them where several calls are allowed."""
    if not parallel or choice.mode == "named":
        return item
    return f"{item} ({lark_quote(separator)} {item}){{0,{MAX_PARALLEL_CALLS - 1}}}"
