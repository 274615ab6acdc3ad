"""Which JSON Schemas can be enforced, and where one cannot: the keyword and its path, never silence.

Knows: the JSON Schema vocabulary and which part of it the grammar engine really enforces. Refuses to know: the grammar
engine itself, tokens, HTTP.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError as InvalidSchema
from jsonschema.validators import validator_for

MAX_DEPTH = 64
"""The deepest nesting of subschemas that is looked at."""

_VOCABULARY = {
    "one subschema": "items additionalItems additionalProperties",
    "a list of subschemas": "anyOf oneOf allOf prefixItems",
    "subschemas by name": "properties patternProperties",
    "a plain value": "$ref const enum type minItems maxItems required minProperties maxProperties minLength maxLength "
    "pattern format minimum maximum exclusiveMinimum exclusiveMaximum multipleOf",
    "no constraint": "$schema $id id $comment $defs definitions $anchor title description default examples example "
    "deprecated readOnly writeOnly contentMediaType contentEncoding discriminator",
}
"""Every keyword that is known, by what it holds."""

_FORMATS = ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"]

_KINDS = {keyword: kind for kind, keywords in _VOCABULARY.items() for keyword in keywords.split()}

_HINTS = (
    ("lookaround", "pattern", None),
    ("regex", "pattern", None),
    ("oneof", "oneOf", "unsupported 'oneOf': its branches are not known to exclude each other; 'anyOf' would do"),
    ("maxproperties", "minProperties", None),
    ("maxproperties", "maxProperties", None),
)
"""What a grammar engine's message holds, the keyword it is then about, and a better message."""

Path = tuple[str, ...]


class SchemaError(ValueError):
    """A schema that is invalid or can't be enforced; `path` leads to the place, keyword included, dot-joined."""

    def __init__(self, message: str, path: Path) -> None:
        self.path = ".".join(path)
        super().__init__(f"{message} (at {self.path})" if path else message)


@dataclass(frozen=True, slots=True)
class Node:
    """A subschema and where it stands in the document."""

    path: Path
    schema: Any

    @property
    def depth(self) -> int:
        """How many steps from the root."""
        return len(self.path)


def check_schema(schema: Any) -> None:
    """Check that `schema` is valid JSON Schema and holds only what can be enforced.

    Raises:
        SchemaError: naming the keyword and its path.
    """
    if not isinstance(schema, dict):
        raise SchemaError(f"a JSON Schema must be an object, not {_kind(schema)}", ())
    check_valid(schema)
    for node in reachable(schema):
        _check_node(node)


def check_valid(schema: Mapping[str, Any]) -> None:
    """Check that `schema` is valid JSON Schema, of the draft that it names, whether or not it can be enforced.

    Raises:
        SchemaError: naming the keyword and its path.
    """
    _check_depth(schema)
    try:
        validator_for(schema, default=Draft202012Validator).check_schema(dict(schema))
    except InvalidSchema as error:
        raise SchemaError(f"not a valid JSON Schema: {error.message}", tuple(map(str, error.absolute_path))) from None


def reachable(root: Mapping[str, Any]) -> Iterator[Node]:
    """Every subschema that takes part, root first; targets of `$ref` once each, at their own place in the document.

    Raises:
        SchemaError: for a `$ref` that is remote or leads nowhere.
    """
    waiting = [Node((), root)]
    seen: set[Path] = set()
    while waiting:
        node = waiting.pop()
        if node.path in seen:
            continue
        seen.add(node.path)
        yield node
        waiting.extend(reversed(list(children(node))))
        reference = node.schema.get("$ref") if isinstance(node.schema, dict) else None
        if reference is not None:
            waiting.append(resolve(root, reference, node.path))


def children(node: Node) -> Iterator[Node]:
    """The subschemas directly inside a node (not those under `$defs`, which count only when referred to)."""
    if not isinstance(node.schema, dict):
        return
    for keyword, value in node.schema.items():
        path = (*node.path, keyword)
        kind = "a list of subschemas" if isinstance(value, list) and keyword == "items" else _KINDS.get(keyword)
        if kind == "subschemas by name":
            yield from (Node((*path, name), sub) for name, sub in value.items())
        elif kind == "a list of subschemas":
            yield from (Node((*path, str(i)), sub) for i, sub in enumerate(value))
        elif kind == "one subschema":
            yield Node(path, value)


def blame(schema: Mapping[str, Any], fails: Callable[[Mapping[str, Any]], str | None]) -> SchemaError | None:
    """Find the deepest subschema that alone fails to compile, by asking `fails` (a message or None) of each in turn.

    The slow way to a good message, taken only after the whole schema has failed. None when the whole does not fail.
    """
    shared = {key: schema[key] for key in ("$schema", "$defs", "definitions") if key in schema}
    message = fails(schema)
    if message is None:
        return None
    place = Node((), schema)
    while True:
        for child in children(place):
            found = fails({**shared, **child.schema}) if isinstance(child.schema, dict) else None
            if found is not None:
                place, message = child, found
                break
        else:
            return _told(place, message)


def _told(node: Node, message: str) -> SchemaError:
    """The error for a subschema that does not compile, at the keyword when the message shows which one it is about."""
    for hint, keyword, plain in _HINTS:
        if hint in message.lower() and keyword in node.schema:
            return SchemaError(plain or message, (*node.path, keyword))
    return SchemaError(message, node.path)


def _check_depth(schema: Any) -> None:
    waiting = [(schema, 0)]
    while waiting:
        value, depth = waiting.pop()
        if depth > 2 * MAX_DEPTH:
            raise SchemaError(f"the schema is nested deeper than {MAX_DEPTH} levels", ())
        if isinstance(value, dict):
            waiting.extend((inner, depth + 1) for inner in value.values())
        elif isinstance(value, list):
            waiting.extend((inner, depth + 1) for inner in value)


def _check_node(node: Node) -> None:
    if not isinstance(node.schema, dict):
        return
    for keyword, value in node.schema.items():
        _check_keyword(node, keyword, value)
    least = node.schema.get("minProperties", 0)
    if least > len(set(node.schema.get("required", ()))) + 1:
        # Free keys are not kept distinct, so a repeated key would count twice.
        raise SchemaError(
            "unsupported keyword 'minProperties' above the number of required properties plus one",
            (*node.path, "minProperties"),
        )


def _check_keyword(node: Node, keyword: str, value: Any) -> None:
    path = (*node.path, keyword)
    if keyword in ("$id", "id") and node.path:
        raise SchemaError(f"unsupported keyword '{keyword}' inside a subschema", path)
    is_annotation = keyword.startswith("x-") and keyword != "x-guidance"
    if keyword not in _KINDS and not is_annotation:
        raise SchemaError(f"unsupported keyword '{keyword}'", path)
    if keyword == "format" and value not in _FORMATS:
        raise SchemaError(f"unsupported 'format' {value!r}; known are {', '.join(_FORMATS)}", path)


def resolve(root: Mapping[str, Any], reference: str, path: Path) -> Node:
    """The node that a local `$ref` (`#` or `#/a/b`, RFC 6901), standing at `path`, means. Raises SchemaError."""
    where = (*path, "$ref")
    if reference != "#" and not reference.startswith("#/"):
        raise SchemaError(f"unsupported '$ref' {reference!r}: only references inside the schema, '#/...'", where)
    steps = [unquote(step).replace("~1", "/").replace("~0", "~") for step in reference.split("/")[1:]]
    target: Any = root
    for step in steps:
        if isinstance(target, dict) and step in target:
            target = target[step]
        elif isinstance(target, list) and step.isdecimal() and int(step) < len(target):
            target = target[int(step)]
        else:
            raise SchemaError(f"'$ref' {reference!r} leads nowhere", where)
    if not isinstance(target, (dict, bool)):
        raise SchemaError(f"'$ref' {reference!r} does not lead to a schema", where)
    return Node(tuple(steps), target)


def _kind(value: Any) -> str:
    names = {
        list: "an array",
        str: "a string",
        bool: "a boolean",
        type(None): "null",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), type(value).__name__)
