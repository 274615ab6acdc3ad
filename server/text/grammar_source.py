"""From a `GrammarSpec` to the grammar text llguidance takes: Lark, or its JSON list of grammars.

Knows: both notations, and which tokens are special. Refuses to know: compiling, caching, masks.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from llguidance import LLMatcher, grammar_from

from server.text.grammar_spec import EmbeddedSchema, GrammarSpec, Marker, ReasoningPrefix, lark_quote
from server.text.one_of import one_of_is_any_of

JSON_SPACING = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""White space in JSON: at most one space, after commas and colons. Neither blank lines nor indentation can run away."""


class GrammarTokenizer(Protocol):
    """The part of a tokenizer that grammars need."""

    @property
    def vocab_size(self) -> int:
        """How many token ids it has."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that stand for control tokens, which no text can spell."""

    def token_bytes(self, token_id: int, /) -> bytes:
        """The bytes a token adds to the text."""

    def token_id(self, text: str, /) -> int | None:
        """The id of the token spelt so, or None."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """The ids of a text."""


def json_source(schema: str) -> str:
    """The grammar of a JSON Schema, given as JSON text, with bounded white space. Raises ValueError."""
    source: str = LLMatcher.grammar_from_json_schema(schema, overrides=json_options(json.loads(schema)))
    return source


def grammar_source(spec: GrammarSpec, tokenizer: GrammarTokenizer) -> str:
    """The grammar of a spec. Raises ValueError when it can't be written."""
    source: str
    match spec.kind:
        case "json_object" | "json_schema":
            source = json_source(spec.payload)
        case "regex":
            source = LLMatcher.grammar_from_regex(spec.payload)
        case "choice":
            source = _choice_source(json.loads(spec.payload))
        case "grammar":
            source = grammar_from("ebnf", spec.payload)
        case "structural":
            source = "\n".join([spec.payload, *_definitions(spec.schemas, spec.markers, tokenizer)])
    return source if spec.prefix is None else _prefixed(source, spec.prefix, tokenizer)


def json_options(schema: Mapping[str, Any]) -> dict[str, Any]:
    """How llguidance is to read this schema."""
    return JSON_SPACING | {"coerce_one_of": one_of_is_any_of(schema)}


def _choice_source(choices: list[str]) -> str:
    if not choices:
        raise ValueError("a choice needs at least one text")
    return "start: CHOICE\nCHOICE: " + " | ".join(map(lark_quote, choices))


def _definitions(
    schemas: Sequence[EmbeddedSchema], markers: Sequence[Marker], tokenizer: GrammarTokenizer
) -> list[str]:
    """Lark rules for what a structure refers to: embedded schemas, markers, and `TEXT`, which is anything."""
    lines = ["TEXT: /(.|\\n)*/"]
    for marker in markers:
        token_id = _special_id(marker.text, tokenizer)
        if token_id is None:
            # Lazy: the text ends at the first marker, whatever tokens it is spelt with.
            lines += [f"{marker.rule}: {lark_quote(marker.text)}"]
            lines += [f"{marker.rule}_lead[lazy]: TEXT {lark_quote(marker.text)}"]
        else:
            lines += [f"{marker.rule}: <[{token_id}]>", f"{marker.rule}_lead: TEXT <[{token_id}]>"]
    for embedded in schemas:
        schema = json.loads(embedded.schema)
        lines.append(f"{embedded.rule}: %json {json.dumps(schema | {'x-guidance': json_options(schema)})}")
    return lines


def _special_id(text: str, tokenizer: GrammarTokenizer) -> int | None:
    token_id = tokenizer.token_id(text)
    return token_id if token_id is not None and token_id in tokenizer.special_ids else None


def _prefixed(source: str, prefix: ReasoningPrefix, tokenizer: GrammarTokenizer) -> str:
    """The grammar with a reasoning section before it, as two grammars of which the first refers to the second."""
    head = "start: think? @body" if not prefix.begun else "start: close_lead BREAK @body"
    rules = [head, "think: open close_lead BREAK", "BREAK: /\\n{0,2}/"]
    rules += _definitions((), (Marker("open", prefix.open), Marker("close", prefix.close)), tokenizer)
    if source.startswith('{"grammars"'):
        body = json.loads(source)["grammars"][0] | {"name": "body"}
    else:
        body = {"name": "body", "lark_grammar": source}
    return json.dumps({"grammars": [{"name": "start", "lark_grammar": "\n".join(rules)}, body]})
