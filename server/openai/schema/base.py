"""The base of all wire models: strict types, unknown fields kept apart, nothing coerced."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

INT64 = 2**63
TokenId = Annotated[int, Field(ge=0)]
SomeText = Annotated[str, Field(min_length=1)]


class Wire(BaseModel):
    """A JSON object of a request. Strict: "1" is no number, true is no integer, NaN is nothing at all.

    Unknown fields are kept, so that they can be reported. `passed_on` models are handed over whole (to a chat template,
    to a schema compiler), so nothing in them is unknown.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    passed_on: ClassVar[bool] = False

    def unknown_fields(self, prefix: str = "") -> Iterator[tuple[str, Any]]:
        """The fields that no model declares: the path, such as `stream_options.foo`, and what was given."""
        if self.passed_on:
            return
        for name, given in (self.model_extra or {}).items():
            yield prefix + name, given
        for name in type(self).model_fields:
            yield from _unknown_in(getattr(self, name), f"{prefix}{name}")


def _unknown_in(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Wire):
        yield from value.unknown_fields(f"{path}.")
    elif isinstance(value, list) and value and isinstance(value[0], Wire):
        for index, item in enumerate(value):
            yield from _unknown_in(item, f"{path}.{index}")


def optional(description: str, example: Any, **bounds: Any) -> Any:
    """A field that may be missing or null (the same), with its description, an example and its bounds."""
    return Field(default=None, description=description, examples=[example], **bounds)


def needed(description: str, example: Any, **bounds: Any) -> Any:
    """A field that must be there."""
    return Field(description=description, examples=[example], **bounds)


def exactly_one(**given: Any) -> dict[str, Any]:
    """JSON Schema: exactly one of these fields holds what its schema says."""
    return {"oneOf": [{"required": [name], "properties": {name: schema}} for name, schema in given.items()]}


NOT_NULL: Mapping[str, Any] = {"not": {"type": "null"}}

REFUSED: Mapping[str, tuple[Any, str]] = {
    "functions": (None, "functions are the old form; send tools"),
    "function_call": (None, "function_call is the old form; send tool_choice"),
    "audio": (None, "this server gives text only"),
    "modalities": (["text"], "this server gives text only"),
    "web_search_options": (None, "this server cannot search the web"),
    "use_beam_search": (False, "beam search is not offered; best_of draws several answers and ranks them"),
    "length_penalty": (1.0, "beam search is not offered, and with it no length penalty"),
    "guided_decoding_backend": (None, "there is one backend only"),
    "guided_whitespace_pattern": (None, "white space inside JSON is fixed"),
    "dry_multiplier": (0, "the DRY sampler is not offered"),
    "mirostat": (0, "the mirostat sampler is not offered"),
    "tfs_z": (1.0, "the tail-free sampler is not offered"),
}
"""Fields of other servers that would change the answer's meaning: name -> (a value that asks for nothing, why not)."""
