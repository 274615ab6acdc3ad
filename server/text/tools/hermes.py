"""Hermes, Qwen 2.5 and Qwen 3: `<tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>`, several in a row.

The templates know tools. The grammar lets the model write freely until the opening marker, then holds it to a call.
"""

from collections.abc import Sequence

from server.text.grammar_spec import EmbeddedSchema, GrammarSpec, Marker
from server.text.pieces import TextRouter
from server.text.tools.dialect import IdSource, Message, Tool, ToolChoice, new_call_id
from server.text.tools.grammar import (
    alternatives,
    constrained_tools,
    embedded_arguments,
    named_object,
    repeated,
    start_rule,
    with_answer,
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
    opening = OPEN

    def render_messages(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """The messages with parsed arguments; the template writes the tools."""
        return with_parsed_arguments(messages)

    def grammar(
        self, tools: Sequence[Tool], choice: ToolChoice, parallel: bool, answer: EmbeddedSchema | None = None
    ) -> GrammarSpec | None:
        """One to several tagged calls, or free text with tagged calls in it, or calls or else `answer`."""
        used = constrained_tools(tools, choice, parallel, answer)
        if not used:
            return None
        calls = repeated("call", "\n", choice, parallel)
        rules = [
            start_rule(calls, choice, answer, "(open_lead body)* TEXT" if parallel else "TEXT | open_lead body"),
            "call: open body",
            'body: "\\n" object "\\n" close',
            alternatives("object", used, named_object("arguments")),
        ]
        markers = (Marker("open", OPEN), Marker("close", CLOSE))
        schemas = with_answer(embedded_arguments(used, choice), answer)
        return GrammarSpec("structural", "\n".join(rules), schemas, markers)

    def router(self, tools: Sequence[Tool], *, new_id: IdSource = new_call_id) -> TextRouter:
        """Finds tagged calls."""
        return MarkedRouter(tools, new_id, OPEN, CLOSE)
