"""From wire messages to the rendered text of a prompt.

Knows what templates want (strings, known roles) and what the wire allows. Adds, merges and reorders nothing. Tools and
earlier calls go through the model's dialect.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from server.errors import bad_request
from server.openai.notes import Notes
from server.openai.schema.messages import Message, ToolSpec
from server.state import Served
from server.text.template import ChatTemplate
from server.text.tools.dialect import Tool

RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token"}
)

MESSAGE_CHARACTERS = 40
"""What a message costs besides its content: its role, its markers, a turn of the template's loop."""


class ChatPromptFields(Protocol):
    """The fields that decide a chat prompt; chat and tokenize bodies have them."""

    messages: Any
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None
    documents: list[dict[str, Any]] | None


@dataclass(frozen=True, slots=True)
class Rendering:
    """A template and everything to render it with; `render` may run in any thread.

    `template` is None for one that the request brought: `server.text.own_template` renders its `source`.
    """

    source: str
    template: ChatTemplate | None
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    documents: list[dict[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    variables: Mapping[str, Any]

    @property
    def arguments(self) -> dict[str, Any]:
        """What `ChatTemplate.render` takes."""
        return {
            "messages": self.messages,
            "tools": self.tools,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            "documents": self.documents,
            **self.variables,
        }

    @property
    def num_characters(self) -> int:
        """Roughly how much text this is."""
        return sum(MESSAGE_CHARACTERS + len(str(message.get("content"))) for message in self.messages)

    @property
    def open_content(self) -> str | None:
        """What the last message says, when it is an assistant's."""
        last = self.messages[-1]
        return str(last["content"] or "") if last["role"] == "assistant" else None


def rendering(
    body: ChatPromptFields, served: Served, tools: Sequence[Tool], effort: str | None, notes: Notes
) -> Rendering:
    """What to render for this body, with `tools` shown to the model.

    Raises:
        ApiError: the fields contradict each other, or the model has no template.
    """
    template = None if body.chat_template is not None else _served_template(served)
    source = template.source if template is not None else body.chat_template or ""
    messages = served.tool_dialect.render_messages(wire_messages(body.messages, source), tools)
    shown = None if served.tool_dialect.needs_prompt else [tool.as_openai() for tool in tools] or None
    return Rendering(
        source=source,
        template=template,
        messages=messages,
        tools=shown,
        documents=_documents(body, source, notes),
        add_generation_prompt=_opens_turn(body),
        continue_final_message=bool(body.continue_final_message),
        variables=_variables(body, source, effort, notes),
    )


def _served_template(served: Served) -> ChatTemplate:
    if served.template is None:
        raise bad_request("This model has no chat template; use /v1/completions or serve it with --chat-template.")
    return served.template


def _opens_turn(body: ChatPromptFields) -> bool:
    """Whether the assistant's turn is opened; checks that this and a continued message do not meet."""
    if not body.continue_final_message:
        return body.add_generation_prompt is not False
    if body.add_generation_prompt:
        raise bad_request(
            "continue_final_message and add_generation_prompt cannot both be true.", "add_generation_prompt"
        )
    last = body.messages[-1]
    if last.role != "assistant" or not last.content:
        raise bad_request(
            "continue_final_message needs a last message of the assistant with some content.", "continue_final_message"
        )
    return False


def _documents(body: ChatPromptFields, source: str, notes: Notes) -> list[dict[str, Any]] | None:
    if body.documents and "documents" not in source:
        notes.ignored("documents", body.documents, "the model's chat template takes no documents")
        return None
    return body.documents or None


def _variables(body: ChatPromptFields, source: str, effort: str | None, notes: Notes) -> dict[str, Any]:
    """Extra variables for the template; those it does not read are reported."""
    given = dict(body.chat_template_kwargs or {})
    for name, value in given.items():
        if name in RESERVED:
            raise bad_request(f"chat_template_kwargs.{name} is set by the server.", "chat_template_kwargs")
        if not re.search(rf"\b{re.escape(name)}\b", source):
            notes.ignored(f"chat_template_kwargs.{name}", value, "the model's chat template does not read it")
    if effort is None:
        return given
    switches_off = effort == "none" and "enable_thinking" in source
    if not switches_off and "reasoning_effort" not in source:
        notes.ignored("reasoning_effort", effort, "the model's chat template does not read it")
    return {"reasoning_effort": effort} | ({"enable_thinking": False} if switches_off else {}) | given


def wire_tools(specs: Sequence[ToolSpec]) -> tuple[Tool, ...]:
    """The tools in the dialects' form. Raises ApiError (400) when two share a name."""
    names = [spec.function.name for spec in specs]
    if len(set(names)) < len(names):
        raise bad_request("tools must have distinct names.", "tools")
    return tuple(
        Tool(
            name=spec.function.name,
            description=spec.function.description,
            parameters=spec.function.parameters or {},
            strict=bool(spec.function.strict),
            path=f"tools.{index}.function.parameters",
        )
        for index, spec in enumerate(specs)
    )


def wire_messages(messages: Sequence[Message], source: str) -> list[dict[str, Any]]:
    """The messages as a template of this `source` takes them."""
    return [_message(message, reads_developer="developer" in source) for message in messages]


def _message(message: Message, *, reads_developer: bool) -> dict[str, Any]:
    data = message.model_dump(exclude_none=True)
    data["content"] = _text(data.get("content"))
    if data["role"] == "developer" and not reads_developer:
        data["role"] = "system"
    if not data.get("tool_calls"):
        data.pop("tool_calls", None)
    return data


def _text(content: str | list[dict[str, Any]] | None) -> str | None:
    if isinstance(content, list):
        return "\n".join(part.get("text") or part.get("refusal") or "" for part in content)
    return content
