"""What the dialects' grammars share: when one is needed, the schemas of the arguments, how many calls.

Knows: tools, choices and the rule names of a structural `GrammarSpec`. Refuses to know: any one dialect's spelling.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from server.text.grammar_spec import EmbeddedSchema, GrammarError, lark_quote, schema_text
from server.text.tools.dialect import MAX_PARALLEL_CALLS, Tool, ToolChoice

_COMPOSITION = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties")


def constrained_tools(
    tools: Sequence[Tool], choice: ToolChoice, parallel: bool, answer: EmbeddedSchema | None = None
) -> tuple[Tool, ...]:
    """The tools an answer's grammar has to know; empty when the answer needs no grammar.

    Needed when a call is forced, when a tool is strict, when only some tools are allowed, to hold the number of calls
    to one, and when what is no call has to look like `answer`.

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
    limited = not parallel or choice.names is not None or answer is not None
    return allowed if choice.forces_call or strict or limited else ()


def start_rule(calls: str, choice: ToolChoice, answer: EmbeddedSchema | None, otherwise: str) -> str:
    """Lark: the whole answer is calls where they are forced, calls or `answer` where that is given, or `otherwise`."""
    if choice.forces_call:
        return f"start: {calls}"
    return f"start: {otherwise}" if answer is None else f"start: {answer.rule} | {calls}"


def with_answer(schemas: tuple[EmbeddedSchema, ...], answer: EmbeddedSchema | None) -> tuple[EmbeddedSchema, ...]:
    """The schemas that a grammar refers to."""
    return schemas if answer is None else (*schemas, answer)


def may_have_property(schema: Mapping[str, Any], name: str) -> bool:
    """Whether JSON of this schema can be an object with that property. Says no only where that is plain to see."""
    kind, properties = schema.get("type"), schema.get("properties", {})
    if isinstance(kind, str) and kind != "object":
        return False
    is_plain = kind == "object" and isinstance(properties, dict) and not any(key in schema for key in _COMPOSITION)
    return not is_plain or schema.get("additionalProperties") is not False or name in properties


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
    if schema["properties"] and not any(key in schema for key in (*_COMPOSITION, "additionalProperties")):
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
    """Lark for `{"name": "f", "arguments": ...}` with that key for the arguments, as `json.dumps` would space it.

    Cut into JSON's own lexemes: where other JSON may stand instead, a longer one would hide its `{` from the lexer.
    """

    def body(i: int, tool: Tool) -> str:
        name = json.dumps(tool.name, ensure_ascii=False)
        head = ("{", '"name"', ": ", name, ", ", f'"{arguments_key}"', ": ")
        return " ".join([*map(lark_quote, head), f"args_{i}", '"}"'])

    return body


def repeated(item: str, separator: str, choice: ToolChoice, parallel: bool) -> str:
    """Lark for one item, or for one to `MAX_PARALLEL_CALLS` of them where several calls are allowed."""
    if not parallel or choice.mode == "named":
        return item
    return f"{item} ({lark_quote(separator)} {item}){{0,{MAX_PARALLEL_CALLS - 1}}}"
