"""Chat messages and tools as they come over the wire. Text only; what a template does with them is not known here."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, model_validator
from pydantic_core import PydanticCustomError

from server.openai.schema.base import Wire, needed, optional

OTHER_PARTS = frozenset({"image_url", "image", "input_audio", "audio_url", "video_url", "file", "input_image"})
"""Kinds of content that other models take."""


class TextPart(Wire):
    """A piece of text inside a message."""

    passed_on: ClassVar[bool] = True
    type: Literal["text"] = needed("Kind of part.", "text")
    text: str = needed("The text.", "Name a river.")


class RefusalPart(Wire):
    """What an assistant refused to do, in its own words."""

    passed_on: ClassVar[bool] = True
    type: Literal["refusal"] = needed("Kind of part.", "refusal")
    refusal: str = needed("The refusal.", "I can't help with that.")


def _text_only(part: Any) -> Any:
    """Say of a part that OpenAI or vLLM knows why it is refused; what else is wrong is for the part's own model."""
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in OTHER_PARTS:
        message = "this model takes text only; content of type '{kind}' is known, but not served"
        raise PydanticCustomError("modality", message, {"kind": kind})
    return part


class FunctionCall(Wire):
    """Which function an assistant called, and how."""

    passed_on: ClassVar[bool] = True
    name: str = needed("The function's name.", "get_weather", min_length=1)
    arguments: str = needed("Its arguments, a JSON object as text.", '{"city": "Oslo"}')


class ToolCall(Wire):
    """One call an assistant made."""

    passed_on: ClassVar[bool] = True
    id: str = needed("The call's id; the tool's answer names it.", "call_1")
    type: Literal["function"] = needed("Kind of tool.", "function")
    function: FunctionCall = needed("The call.", {"name": "get_weather", "arguments": '{"city": "Oslo"}'})


class _Named(Wire):
    passed_on: ClassVar[bool] = True
    name: str | None = optional("A name that tells participants of one role apart.", "anna")


Text = str | list[Annotated[TextPart, BeforeValidator(_text_only)]]
Said = str | list[Annotated[TextPart | RefusalPart, Discriminator("type"), BeforeValidator(_text_only)]]


class SystemMessage(_Named):
    """Instructions for the whole conversation."""

    role: Literal["system"] = needed("Who speaks.", "system")
    content: Text = needed("A string, or text parts.", "Answer in one word.")


class DeveloperMessage(_Named):
    """As `system`, under its newer name."""

    role: Literal["developer"] = needed("Who speaks.", "developer")
    content: Text = needed("A string, or text parts.", "Answer in one word.")


class UserMessage(_Named):
    """What the user says."""

    role: Literal["user"] = needed("Who speaks.", "user")
    content: Text = needed("A string, or text parts.", "Name a river.")


class AssistantMessage(_Named):
    """What the model said before, or (with `continue_final_message`) the beginning of what it shall say."""

    role: Literal["assistant"] = needed("Who speaks.", "assistant")
    content: Said | None = optional("A string or parts; may be null beside tool calls.", "The Rhine.")
    refusal: str | None = optional("What the assistant refused, in its own words.", "I can't help with that.")
    reasoning_content: str | None = optional("How it came to that.", "The user wants a river.")
    tool_calls: list[ToolCall] | None = optional("The calls it made.", [])

    @model_validator(mode="after")
    def _says_something(self) -> "AssistantMessage":
        if self.content is None and not self.tool_calls and self.refusal is None:
            raise ValueError("content may be null only beside tool_calls")
        return self


class ToolMessage(_Named):
    """What a called tool answered."""

    role: Literal["tool"] = needed("Who speaks.", "tool")
    content: Text = needed("A string, or text parts.", "12 degrees")
    tool_call_id: str | None = optional("The id of the call this answers.", "call_1")


Message = Annotated[
    SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage, Discriminator("role")
]


class FunctionSpec(Wire):
    """A function the model may call."""

    name: str = needed("Its name.", "get_weather", min_length=1, max_length=256, pattern=r"^[A-Za-z0-9_.:/-]+$")
    description: str | None = optional("What it does.", "Weather of a city.")
    parameters: dict[str, Any] | None = optional(
        "JSON Schema of its arguments, an object.", {"type": "object", "properties": {"city": {"type": "string"}}}
    )
    strict: bool | None = optional("Hold calls to the schema even when the model decides whether to call.", True)


class ToolSpec(Wire):
    """A tool of the kind `function`, the only one there is."""

    type: Literal["function"] = needed("Kind of tool.", "function")
    function: FunctionSpec = needed("The function.", {"name": "get_weather"})


class FunctionName(Wire):
    """A function by name."""

    name: str = needed("The function's name.", "get_weather")


class NamedTool(Wire):
    """Exactly one call, of this function."""

    type: Literal["function"] = needed("Kind of choice.", "function")
    function: FunctionName = needed("Which one.", {"name": "get_weather"})


class AllowedToolSet(Wire):
    """Some of the tools, by choice or by force."""

    mode: Literal["auto", "required"] = needed("Whether one must be called.", "auto")
    tools: list[NamedTool] = needed(
        "Which ones.", [{"type": "function", "function": {"name": "get_weather"}}], min_length=1
    )


class AllowedTools(Wire):
    """Restricts the model to some of the tools."""

    type: Literal["allowed_tools"] = needed("Kind of choice.", "allowed_tools")
    allowed_tools: AllowedToolSet = needed(
        "The tools and the mode.",
        {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_weather"}}]},
    )


ToolChoiceSpec = Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedTools, Field(discriminator="type")]
