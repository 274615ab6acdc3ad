"""What a tool-call dialect is: how tools reach the prompt, how calls are constrained, how they are read back.

Knows: tools and tool choices in the form every dialect shares. Refuses to know: the HTTP wire form and any tokenizer.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from server.text.grammar_spec import EmbeddedSchema, GrammarSpec
from server.text.pieces import TextRouter

Message = dict[str, Any]
"""A chat message as templates take it: `role`, `content` (a string or null), for calls `tool_calls`."""

MAX_PARALLEL_CALLS = 16
"""The most calls a forced answer may hold: enough for any real plan, and an end to a model that would not stop."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One function the model may call. `parameters` is a JSON Schema of an object; `{}` means no arguments stated.

    `path` says where the schema stood in the request (`tools.0.function.parameters`), for error messages.
    """

    name: str
    description: str | None
    parameters: Mapping[str, Any]
    strict: bool = False
    path: str = "tools"

    @property
    def arguments_schema(self) -> dict[str, Any]:
        """The schema of the arguments: the tool's own, made to be an object."""
        return {"type": "object", "properties": {}} | dict(self.parameters)

    def as_openai(self) -> dict[str, Any]:
        """The form chat templates expect: `{type: function, function: {name, description, parameters}}`."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function | {"parameters": self.arguments_schema}}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether and what the model must call.

    none: no call; auto: the model decides; required: at least one call; named: exactly one call of `names[0]`.
    `names` restricts auto and required to some of the tools (the wire's `allowed_tools`); None allows all.
    """

    mode: Literal["none", "auto", "required", "named"] = "auto"
    names: tuple[str, ...] | None = None

    @classmethod
    def named(cls, name: str) -> "ToolChoice":
        """Exactly one call of this tool."""
        return cls("named", (name,))

    @classmethod
    def allowed(cls, mode: Literal["auto", "required"], names: Sequence[str]) -> "ToolChoice":
        """Any of these tools, by choice (auto) or by force (required)."""
        return cls(mode, tuple(names))

    @property
    def forces_call(self) -> bool:
        """Whether the answer has to be a tool call, without content."""
        return self.mode in ("required", "named")

    def callable_tools(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """The tools this choice lets the model call, in the given order."""
        if self.mode == "none":
            return ()
        return tuple(tool for tool in tools if self.names is None or tool.name in self.names)


IdSource = Callable[[], str]
"""Makes the id of the next tool call."""


def new_call_id() -> str:
    """A fresh random call id, `call_` and 24 hexadecimal digits."""
    return "call_" + secrets.token_hex(12)


class ToolDialect(Protocol):
    """One way models write tool calls."""

    @property
    def name(self) -> str:
        """The name the flag takes."""

    @property
    def needs_prompt(self) -> bool:
        """The chat template knows no tools, so `render_messages` must write them into the messages."""

    @property
    def shows_special_tokens(self) -> bool:
        """The call markers are special tokens, so text must be decoded with special tokens kept for the router."""

    @property
    def opening(self) -> str | None:
        """What a call opens with, where text may stand before it; None where calls are the whole answer anyway."""

    def render_messages(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """The messages as the chat template must see them; unchanged copies where the template knows tools."""

    def grammar(
        self, tools: Sequence[Tool], choice: ToolChoice, parallel: bool, answer: EmbeddedSchema | None = None
    ) -> GrammarSpec | None:
        """What the answer must look like under this choice; None where nothing needs constraining.

        With `answer`, an answer without calls has to fit that schema, and there is no text besides calls.

        Raises:
            GrammarError: the tools or the choice can't be held to, or calls and `answer` would look alike.
        """

    def router(self, tools: Sequence[Tool], *, new_id: IdSource = new_call_id) -> TextRouter:
        """A router for one answer that finds calls of `tools` (the callable ones); other text is content."""
