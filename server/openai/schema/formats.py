"""What an answer may be held to: `response_format` and `structured_outputs`."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Field, model_validator

from server.openai.schema.base import NOT_NULL, Wire, exactly_one, needed, optional


class TextFormat(Wire):
    """Free text."""

    type: Literal["text"] = needed("Kind of format.", "text")


class JsonObjectFormat(Wire):
    """Any JSON object."""

    type: Literal["json_object"] = needed("Kind of format.", "json_object")


class JsonSchemaSpec(Wire):
    """A named JSON Schema."""

    name: str | None = optional("A name for it.", "answer")
    description: str | None = optional("What it is for.", "The answer.")
    schema_: dict[str, Any] = Field(
        alias="schema", description="The JSON Schema.", examples=[{"type": "object", "properties": {}}]
    )
    strict: bool | None = optional("Accepted either way: an answer always fits the schema.", True)


class JsonSchemaFormat(Wire):
    """JSON that fits a schema."""

    type: Literal["json_schema"] = needed("Kind of format.", "json_schema")
    json_schema: JsonSchemaSpec = needed("The schema.", {"name": "answer", "schema": {"type": "object"}})


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Discriminator("type")]


class StructuredOutputs(Wire):
    """Exactly one way to hold the answer to a structure."""

    KINDS: ClassVar[tuple[str, ...]] = ("json", "regex", "choice", "grammar", "json_object")
    model_config = ConfigDict(
        json_schema_extra=exactly_one(**dict.fromkeys(KINDS[:-1], NOT_NULL), json_object={"const": True})
    )
    # `json` and `copy`-like names would hide methods of the base class, hence the alias.
    json_: dict[str, Any] | str | None = Field(
        default=None, alias="json", description="A JSON Schema, as an object or as text.", examples=[{"type": "object"}]
    )
    regex: str | None = optional("A regular expression the whole answer matches.", "[0-9]{4}")
    choice: list[str] | None = optional("Texts, one of which the answer is.", ["yes", "no"], min_length=1)
    grammar: str | None = optional("A grammar in Lark or GBNF form.", 'start: "yes" | "no"')
    json_object: bool | None = optional("Any JSON object.", True)

    @model_validator(mode="after")
    def _exactly_one(self) -> "StructuredOutputs":
        given = [self.json_, self.regex, self.choice, self.grammar, self.json_object or None]
        if sum(value is not None for value in given) != 1:
            raise ValueError(f"exactly one of {', '.join(self.KINDS)} must be given")
        return self


class StreamOptions(Wire):
    """What a stream carries besides the answer."""

    include_usage: bool | None = optional("One more event before [DONE] with the usage.", True)
    continuous_usage_stats: bool | None = optional("The usage so far on every event.", False)
    include_obfuscation: bool | None = optional("Random padding, so that sizes on the wire say little.", False)
