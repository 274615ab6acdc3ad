"""What an answer must look like, before anything is compiled: `GrammarSpec` and its parts.

Knows: the kinds of constraint there are. Refuses to know: how they are enforced, tokens, HTTP.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "structural"]


class GrammarError(ValueError):
    """A grammar that is wrong, can't be enforced, or is too big; for the client to mend.

    `param` is the request field it came in, `path` the place inside a schema (`properties.v.not`); None if unknown.
    """

    def __init__(self, message: str, param: str | None = None, path: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.path = path


@dataclass(frozen=True, slots=True)
class EmbeddedSchema:
    """A JSON Schema (as JSON text) that the structure calls `rule`; `param` is the request field it came in."""

    rule: str
    schema: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Marker:
    """A fixed text, perhaps one special token. Rule `rule` is the text, `rule_lead` any text and then it."""

    rule: str
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPrefix:
    """Free text up to `close` that comes before what the grammar constrains.

    `begun` says that the prompt already ends inside the section; else the answer may open it with `open` or skip it.
    """

    open: str
    close: str
    begun: bool


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What an answer must look like. Equal specs share one compiled grammar; `param` does not count for equality."""

    kind: Kind
    payload: str
    schemas: tuple[EmbeddedSchema, ...] = ()
    markers: tuple[Marker, ...] = ()
    prefix: ReasoningPrefix | None = None
    param: str | None = field(default=None, compare=False)

    @classmethod
    def json_object(cls, param: str | None = None) -> "GrammarSpec":
        """Any JSON object."""
        return cls("json_object", '{"type": "object"}', param=param)

    @classmethod
    def json_schema(cls, schema: Any, param: str | None = None) -> "GrammarSpec":
        """JSON that fits a schema (draft 2020-12, or the draft its `$schema` names)."""
        return cls("json_schema", schema_text(schema, param), param=param)

    @classmethod
    def regex(cls, pattern: str, param: str | None = None) -> "GrammarSpec":
        """Text that matches a regular expression as a whole (Rust syntax: no lookaround, no back references)."""
        return cls("regex", pattern, param=param)

    @classmethod
    def choice(cls, choices: Sequence[str], param: str | None = None) -> "GrammarSpec":
        """One of these texts, exactly."""
        return cls("choice", json.dumps(list(choices)), param=param)

    @classmethod
    def grammar(cls, text: str, param: str | None = None) -> "GrammarSpec":
        """A Lark grammar (rule `start`) or a GBNF one (rule `root`)."""
        return cls("grammar", text, param=param)

    def after_reasoning(self, prefix: ReasoningPrefix) -> "GrammarSpec":
        """The same answer, but only after a reasoning section."""
        return replace(self, prefix=prefix)

    def as_rule(self, rule: str) -> EmbeddedSchema | None:
        """This spec as a schema for a structure to embed; None where it is no schema."""
        is_schema = self.kind in ("json_object", "json_schema")
        return EmbeddedSchema(rule, self.payload, self.param) if is_schema else None

    @property
    def num_bytes(self) -> int:
        """The size of everything in it, in characters of its text forms."""
        return len(self.payload) + sum(len(schema.schema) for schema in self.schemas)


def schema_text(schema: Any, param: str | None = None) -> str:
    """A JSON Schema as JSON text, key order kept (it is the order of the answer's properties).

    Raises:
        GrammarError: it is not JSON at all (NaN, too deep).
    """
    try:
        return json.dumps(schema, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise GrammarError(f"the schema is not JSON: {error}", param) from None


def lark_quote(text: str) -> str:
    """A Lark string literal for exactly this text."""
    return json.dumps(text, ensure_ascii=False)
