"""The grammar of one Python call held to a tool's schema.

Knows: how a schema's properties become keyword arguments. Refuses to know: how calls are listed or read back.
"""

import keyword
from collections.abc import Sequence
from typing import Any

from server.text.grammar_spec import EmbeddedSchema, lark_quote, schema_text
from server.text.tools.dialect import Tool, ToolChoice
from server.text.tools.grammar import arguments_schema

_PLAIN = frozenset(
    {
        "type",
        "properties",
        "required",
        "additionalProperties",
        "title",
        "description",
        "$defs",
        "definitions",
        "$schema",
    }
)

_FREE = ['free: NAME "=" any', "NAME: /[A-Za-z_][A-Za-z0-9_]{0,63}/"]
"""Keyword arguments of no particular kind."""


def call_rules(tools: Sequence[Tool], choice: ToolChoice) -> tuple[list[str], tuple[EmbeddedSchema, ...]]:
    """Lark rules `call`, and the schemas of the values in them.

    A plain object schema becomes keyword arguments in the schema's order; any other, and one whose property names are
    no Python names, becomes one unpacked object, `f(**{...})`. Values are spelt as JSON.
    """
    rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    schemas: list[EmbeddedSchema] = []
    for i, tool in enumerate(tools):
        schema = arguments_schema(tool, choice)
        head = lark_quote(f"{tool.name}(")
        if schema == {"type": "object"}:
            rules += [f'call_{i}: {head} (free (", " free)*)? ")"']
        elif _is_plain(schema):
            schemas += _value_schemas(i, schema, tool.path)
            empty = "" if schema.get("required") else f' | {head} ")"'
            some = f' | {head} arguments_{i} ")"' if schema["properties"] else ""
            rules += [f"call_{i}: " + (some + empty).removeprefix(" | "), *_keywords(i, schema)]
        else:
            schemas.append(EmbeddedSchema(f"args_{i}", schema_text(schema, tool.path), tool.path))
            rules.append(f'call_{i}: {lark_quote(tool.name + "(**")} args_{i} ")"')
    return rules + _FREE, (*schemas, EmbeddedSchema("any", "{}"))


def _is_plain(schema: dict[str, Any]) -> bool:
    """Whether the object is nothing more than its properties, each of which can be a Python keyword argument."""
    names = schema.get("properties", {})
    if not isinstance(names, dict) or schema.get("additionalProperties", False) is not False:
        return False
    fits = all(name.isidentifier() and not keyword.iskeyword(name) for name in names)
    values = all(isinstance(value, dict) for value in names.values())
    inward = '"$ref": "#"' in schema_text(names) or '"#/properties' in schema_text(names)
    return (
        schema.keys() <= _PLAIN and fits and values and not inward and set(schema.get("required", ())) <= names.keys()
    )


def _value_schemas(i: int, schema: dict[str, Any], path: str) -> list[EmbeddedSchema]:
    """One schema a property, with the definitions it may refer to."""
    shared = {key: schema[key] for key in ("$schema", "$defs", "definitions") if key in schema}
    return [
        EmbeddedSchema(f"value_{i}_{k}", schema_text(shared | value), f"{path}.properties.{name}")
        for k, (name, value) in enumerate(schema["properties"].items())
    ]


def _keywords(i: int, schema: dict[str, Any]) -> list[str]:
    """Rules for `a=1, b=2` in the schema's order, optional ones left out at will."""
    names = list(schema["properties"])
    required = set(schema.get("required", ()))
    rules = [f"item_{i}_{k}: {lark_quote(name + '=')} value_{i}_{k}" for k, name in enumerate(names)]
    for k, name in enumerate(names):
        more = f" rest_{i}_{k + 1}" if k + 1 < len(names) else ""
        item = f'", " item_{i}_{k}' if name in required else f'(", " item_{i}_{k})?'
        rules.append(f"rest_{i}_{k}: {item}{more}")
    num_first = next((k + 1 for k, name in enumerate(names) if name in required), len(names))
    firsts = [f"item_{i}_{k}" + (f" rest_{i}_{k + 1}" if k + 1 < len(names) else "") for k in range(num_first)]
    return [*rules, f"arguments_{i}: " + " | ".join(firsts)] if firsts else rules
