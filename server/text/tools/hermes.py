"""Hermes, Qwen 2.5 and Qwen 3: `<tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>`, several in a row.

The templates know tools. The grammar lets the model write freely until the opening marker, then holds it to a call.
"""

from collections.abc import Sequence

from server.text.grammar_spec import GrammarSpec, Marker
from server.text.pieces import TextRouter
from server.text.tools.dialect import IdSource, Message, Tool, ToolChoice, new_call_id
from server.text.tools.grammar import (
    alternatives,
    constrained_tools,
    embedded_arguments,
    named_object,
    repeated,
)
from server.text.tools.marked import MarkedRouter
from server.text.tools.messages import with_parsed_arguments

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesDialect:
    """Calls as JSON between `<tool_call>` tags."""

    name = "hermes"
    needs_prompt = False
    shows_special_tokens = True

    def render_messages(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """The messages with parsed arguments; the template writes the tools."""
        return with_parsed_arguments(messages)

    def grammar(self, tools: Sequence[Tool], choice: ToolChoice, parallel: bool) -> GrammarSpec | None:
        """One to several tagged calls, or free text with tagged calls in it."""
        used = constrained_tools(tools, choice, parallel)
        if not used:
            return None
        if choice.forces_call:
            start = "start: " + repeated("call", "\n", choice, parallel)
        elif parallel:
            start = "start: (open_lead body)* TEXT"
        else:
            start = "start: TEXT | open_lead body"
        rules = [
            start,
            "call: open body",
            'body: "\\n" object "\\n" close',
            alternatives("object", used, named_object("arguments")),
        ]
        markers = (Marker("open", OPEN), Marker("close", CLOSE))
        return GrammarSpec("structural", "\n".join(rules), embedded_arguments(used, choice), markers)

    def router(self, tools: Sequence[Tool], *, new_id: IdSource = new_call_id) -> TextRouter:
        """Finds tagged calls."""
        return MarkedRouter(tools, new_id, OPEN, CLOSE)
