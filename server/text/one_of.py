"""Whether the branches of every `oneOf` in a schema exclude each other, so that "exactly one" means "any".

The grammar engine enforces any-of; exactly-one only where it sees that itself. This looks further: through references,
and at properties by which branches differ, as in tagged unions.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from server.text.json_schema import SchemaError, reachable, resolve

_MAX_LOOKS = 8
"""How many references and properties deep a difference is looked for."""

Facts = Sequence[Mapping[str, Any]]
"""Schemas that all hold for one place: the schema itself and what its `$ref` leads to."""


def one_of_is_any_of(root: Mapping[str, Any]) -> bool:
    """Whether each reachable `oneOf` has only branches that exclude one another; False where there is no `oneOf`."""
    schemas = [node.schema for node in reachable(root) if isinstance(node.schema, dict)]
    unions = [schema["oneOf"] for schema in schemas if "oneOf" in schema]
    return bool(unions) and all(_disjoint(root, a, b, 0) for union in unions for a, b in combinations(union, 2))


def _disjoint(root: Mapping[str, Any], a: Any, b: Any, looks: int) -> bool:
    """Whether surely no value fits both schemas."""
    if not isinstance(a, dict) or not isinstance(b, dict):
        return a is False or b is False
    if looks > _MAX_LOOKS:
        return False
    left, right = _facts(root, a), _facts(root, b)
    values = _values(left), _values(right)
    if values[0] is not None and values[1] is not None:
        return values[0].isdisjoint(values[1])
    types = _types(left), _types(right)
    if types[0].isdisjoint(types[1]):
        return True
    if not types[0] | types[1] <= {"object"}:
        return False
    return any(
        _disjoint(root, one, other, looks + 1)
        for name in _required(left) | _required(right)
        for one in _property(left, name)
        for other in _property(right, name)
    )


def _facts(root: Mapping[str, Any], schema: Mapping[str, Any]) -> Facts:
    facts: list[Mapping[str, Any]] = [schema]
    while "$ref" in facts[-1] and len(facts) <= _MAX_LOOKS:
        try:
            target = resolve(root, facts[-1]["$ref"], ()).schema
        except SchemaError:
            break
        if not isinstance(target, dict):
            break
        facts.append(target)
    return facts


def _values(facts: Facts) -> set[str] | None:
    """The values of a `const` or `enum`, in one spelling each; None where there is neither."""
    for schema in facts:
        if "const" in schema:
            return {_spelling(schema["const"])}
        if "enum" in schema:
            return set(map(_spelling, schema["enum"]))
    return None


def _spelling(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _types(facts: Facts) -> set[str]:
    """The types a value may have; every integer is a number."""
    types = {"null", "boolean", "number", "string", "array", "object"}
    for schema in facts:
        if "type" in schema:
            given = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
            types &= {"number" if name == "integer" else name for name in given}
    return types


def _required(facts: Facts) -> set[str]:
    return {name for schema in facts for name in schema.get("required", ())}


def _property(facts: Facts, name: str) -> list[Any]:
    return [schema["properties"][name] for schema in facts if name in schema.get("properties", {})]
