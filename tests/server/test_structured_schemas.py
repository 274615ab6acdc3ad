import json
from typing import Any

import jsonschema
import pytest

from server.text.structured import GrammarError, GrammarSpec
from tests.fakes.grammar_walk import accepts, compiled, walk


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


PET = {
    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
    "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}},
}
PETS = {
    "Cat": closed(kind={"const": "cat", "type": "string"}, lives={"type": "integer", "minimum": 1, "maximum": 9}),
    "Dog": closed(kind={"const": "dog", "type": "string"}, good={"type": "boolean"}),
}

ENFORCED: dict[str, dict[str, Any]] = {
    "closed object": closed(a={"type": "integer"}, b={"type": "string", "maxLength": 5}),
    "optional properties": {
        "type": "object",
        "properties": {"a": {"type": "null"}, "b": {"type": "boolean"}, "c": {"enum": [1, "x", None]}},
        "additionalProperties": False,
    },
    "open object": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "enum with non-ASCII": closed(city={"enum": ["Zürich", "東京", "São Paulo"]}),
    "const with quotes": closed(tag={"const": 'naïve "q" \\ 日 🙂'}),
    "const object": {"const": {"a": [1, True, None], "b": {"c": "d"}}},
    "array bounds": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False, "minItems": 2},
    "reference": closed(pair={"type": "array", "items": {"$ref": "#/$defs/c"}, "maxItems": 2})
    | {"$defs": {"c": {"enum": ["a/b", "c~d"]}}},
    "escaped reference": {"$ref": "#/$defs/a~1b%20c"} | {"$defs": {"a/b c": closed(x={"type": "boolean"})}},
    "recursion": {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "v": {"type": "integer"},
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]},
                },
                "required": ["v", "next"],
                "additionalProperties": False,
            }
        },
    },
    "numbers": closed(
        n={"type": "number", "minimum": -1.5, "exclusiveMaximum": 3},
        i={"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    ),
    "pattern": closed(id={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    "unanchored pattern": closed(id={"type": "string", "pattern": "x[0-9]", "maxLength": 12}),
    "formats": closed(day={"type": "string", "format": "date"}, id={"type": "string", "format": "uuid"}),
    "string length": closed(s={"type": "string", "minLength": 3, "maxLength": 6}),
    "anyOf": closed(v={"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "null"}}]}),
    "allOf": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            closed(a={"minimum": 5}),
        ]
    },
    "several types": closed(v={"type": ["integer", "null"]}),
    "oneOf by type": closed(v={"oneOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}]}),
    "tagged union": closed(pet=PET) | {"$defs": PETS},
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^s_": {"type": "string"}, "^i_": {"type": "integer"}},
        "additionalProperties": False,
    },
    "at least one more property": {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1},
    "annotations": closed(a={"type": "integer", "title": "A", "description": "d", "default": 1, "examples": [2]})
    | {"$schema": "https://json-schema.org/draft/2020-12/schema", "$comment": "c", "title": "T", "x-order": 3},
    "draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [{"type": "integer"}, {"type": "boolean"}],
        "additionalItems": False,
        "minItems": 2,
    },
    "anyOf beside properties": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "anyOf": [{"required": ["b"]}, {"properties": {"a": {"minimum": 5}}}],
    },
    "reference with siblings": {
        "$ref": "#/$defs/o",
        "required": ["z"],
        "$defs": {"o": {"type": "object", "properties": {"z": {"type": "boolean"}}}},
    },
    "required but not declared": {
        "type": "object",
        "properties": {"a": {"type": "null"}},
        "required": ["b"],
        "additionalProperties": {"type": "integer"},
    },
    "at most two properties": {"type": "object", "additionalProperties": {"type": "null"}, "maxProperties": 2},
    "odd property names": closed(**{'a"b\\c': {"type": "null"}, "日": {"type": "null"}}),
    "large integers": closed(v={"type": "integer", "minimum": 10**15, "maximum": 10**15 + 5}),
    "anything": {},
}


@pytest.mark.parametrize("name", ENFORCED)
def test_whatever_is_allowed_fits_the_schema(name: str) -> None:
    schema = ENFORCED[name]
    constraint = compiled(GrammarSpec.json_schema(schema))
    walks = [walk(constraint, seed) for seed in range(6)]
    ended = [one.text for one in walks if one.ended]
    assert len(ended) >= 4, f"hardly any answer came to an end: {walks}"
    for text in ended:
        jsonschema.validate(json.loads(text), schema)
        assert "\n" not in text
        assert text == text.strip()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "not": (closed(v={"not": {"type": "string"}}), "properties.v.not"),
    "if": ({"type": "object", "if": {}, "then": {}}, "if"),
    "uniqueItems": (closed(v={"type": "array", "uniqueItems": True}), "properties.v.uniqueItems"),
    "contains": (closed(v={"type": "array", "contains": {}}), "properties.v.contains"),
    "propertyNames": ({"type": "object", "propertyNames": {"maxLength": 2}}, "propertyNames"),
    "dependentRequired": ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    "unevaluatedProperties": ({"unevaluatedProperties": False}, "unevaluatedProperties"),
    "misspelt keyword": (closed(v={"type": "string", "minLenght": 3}), "properties.v.minLenght"),
    "nullable": (closed(v={"type": "string", "nullable": True}), "properties.v.nullable"),
    "options of the engine": ({"type": "object", "x-guidance": {"lenient": True}}, "x-guidance"),
    "unknown format": (closed(v={"type": "string", "format": "iri"}), "properties.v.format"),
    "lookahead": (closed(v={"type": "string", "pattern": "^a(?=b)"}), "properties.v.pattern"),
    "word boundary": (closed(v={"type": "string", "pattern": "a\\bb"}), "properties.v.pattern"),
    "overlapping oneOf": (closed(v={"oneOf": [{"type": "number"}, {"type": "integer"}]}), "properties.v.oneOf"),
    "behind a reference": ({"$ref": "#/$defs/d", "$defs": {"d": {"items": {"not": {}}}}}, "$defs.d.items.not"),
    "in a list": ({"anyOf": [{"type": "null"}, {"not": {}}]}, "anyOf.1.not"),
    "oneOf of open objects": (
        {"oneOf": [{"properties": {"k": {"const": "a"}}}, {"properties": {"k": {"const": "b"}}}]},
        "oneOf",
    ),
    "oneOf of equal numbers": (closed(v={"oneOf": [{"const": 1}, {"const": 1.0}]}), "properties.v.oneOf"),
    "reference to nothing": (closed(v={"$ref": "#/$defs/nowhere"}), "properties.v.$ref"),
    "remote reference": (closed(v={"$ref": "https://example.com/s.json"}), "properties.v.$ref"),
    "reference to no schema": (closed(v={"$ref": "#/required"}), "properties.v.$ref"),
    "unknown type": (closed(v={"type": "stringg"}), "properties.v.type"),
    "broken pattern": (closed(v={"type": "string", "pattern": "(unclosed["}), "properties.v.pattern"),
    "properties is a string": ({"type": "object", "properties": "v"}, "properties"),
    "enum is a string": (closed(v={"enum": "abc"}), "properties.v.enum"),
    "property is a number": ({"properties": {"v": 1}}, "properties.v"),
    "empty enum": (closed(v={"enum": []}), "properties.v"),
    "empty range": (closed(v={"type": "integer", "minimum": 5, "maximum": 1}), "properties.v"),
    "free properties counted": ({"type": "object", "minProperties": 2}, "minProperties"),
    "declared properties counted": ({"properties": {"a": {}, "b": {}}, "minProperties": 1}, "minProperties"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_refused_with_its_place(name: str) -> None:
    schema, path = REFUSED[name]
    with pytest.raises(GrammarError) as caught:
        compiled(GrammarSpec.json_schema(schema, param="response_format"))
    assert caught.value.path == path
    assert path in caught.value.message
    assert caught.value.param == "response_format"


def test_unused_definitions_may_hold_anything() -> None:
    compiled(GrammarSpec.json_schema(closed(a={"type": "null"}) | {"$defs": {"unused": {"not": {}}}}))


def test_property_names_are_no_keywords() -> None:
    schema = closed(**{"not": {"type": "null"}, "$ref": {"type": "null"}, "oneOf": {"type": "null"}})
    assert accepts(compiled(GrammarSpec.json_schema(schema)), '{"not": null, "$ref": null, "oneOf": null}')


@pytest.mark.parametrize("schema", [[1, 2], "object", True, None, 7])
def test_a_schema_is_an_object(schema: Any) -> None:
    with pytest.raises(GrammarError, match="must be an object"):
        compiled(GrammarSpec.json_schema(schema))


def test_deep_schemas_are_refused() -> None:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(3000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(GrammarError):
        compiled(GrammarSpec.json_schema(schema))
    with pytest.raises(GrammarError, match="not JSON"):
        GrammarSpec.json_schema({"const": float("nan")})


def test_a_schema_that_only_refers_to_itself_allows_no_answer() -> None:
    with pytest.raises(GrammarError, match="no answer"):
        compiled(GrammarSpec.json_schema({"$ref": "#"}))


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"a":1,"b":[2]}', True),
        ('{"a": 1, "b": [2]}', True),
        ('{"a": 1,"b":[2]}', True),
        ('{ "a": 1, "b": [2]}', False),
        ('{"a" :1, "b": [2]}', False),
        ('{"a": 1, "b": [ 2 ]}', False),
        ('{"a":  1, "b": [2]}', False),
        ('{"a":1,\n"b":[2]}', False),
        (' {"a":1,"b":[2]}', False),
        ('{"a":1,"b":[2]} ', False),
    ],
)
def test_at_most_one_space_and_only_after_separators(text: str, fits: bool) -> None:
    schema = closed(a={"type": "integer"}, b={"type": "array", "items": {"type": "integer"}})
    assert accepts(compiled(GrammarSpec.json_schema(schema)), text) is fits


def test_properties_keep_the_order_of_the_schema() -> None:
    constraint = compiled(GrammarSpec.json_schema(closed(z={"type": "null"}, a={"type": "null"})))
    assert accepts(constraint, '{"z": null, "a": null}')
    assert not accepts(constraint, '{"a": null, "z": null}')
