"""Llama 3.1 to 3.3: the whole answer is `{"name": "f", "parameters": {...}}`, several joined by `; `.

A `<|python_tag|>` may stand before. An answer that begins otherwise is content to its end, whatever it holds.
"""

import json
from collections.abc import Sequence

from server.text.grammar_spec import EmbeddedSchema, GrammarError, GrammarSpec, Marker
from server.text.pieces import TextRouter
from server.text.tools.dialect import IdSource, Message, Tool, ToolChoice, new_call_id
from server.text.tools.envelope import CallEnvelope
from server.text.tools.grammar import (
    alternatives,
    constrained_tools,
    embedded_arguments,
    may_have_property,
    named_object,
    repeated,
    start_rule,
    with_answer,
)
from server.text.tools.messages import with_parsed_arguments
from server.text.tools.router import PhasedRouter
from server.text.tools.scan import Status

TAG = "<|python_tag|>"


class Llama3JsonDialect:
    """Bare JSON calls."""

    name = "llama3_json"
    needs_prompt = False
    shows_special_tokens = True
    opening = None

    def render_messages(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """The messages with parsed arguments; the template writes the tools."""
        return with_parsed_arguments(messages)

    def grammar(
        self, tools: Sequence[Tool], choice: ToolChoice, parallel: bool, answer: EmbeddedSchema | None = None
    ) -> GrammarSpec | None:
        """Calls, or else text that does not begin like one, or `answer` where that can't."""
        used = constrained_tools(tools, choice, parallel, answer)
        if not used:
            return None
        if answer is not None and may_have_property(json.loads(answer.schema), "name"):
            raise GrammarError(
                "this model writes a tool call as a JSON object with a name, and the wanted content may be one too; "
                "close its schema (additionalProperties: false) and let it have no property 'name', or send "
                "tool_choice none or required",
                answer.param,
            )
        calls = ("" if choice.forces_call else "tag? ") + repeated("call", "; ", choice, parallel)
        rules = [
            start_rule(calls, choice, answer, f"OTHER | {calls}"),
            "OTHER: /(\\s*[^{\\s](.|\\n)*)?/",
            alternatives("call", used, named_object("parameters")),
        ]
        schemas = with_answer(embedded_arguments(used, choice), answer)
        return GrammarSpec("structural", "\n".join(rules), schemas, (Marker("tag", TAG),))

    def router(self, tools: Sequence[Tool], *, new_id: IdSource = new_call_id) -> TextRouter:
        """Reads calls from the answer's beginning."""
        return Llama3JsonRouter(tools, new_id)


class Llama3JsonRouter(PhasedRouter):
    """Reads calls until something else comes; that and everything after it is content."""

    def __init__(self, tools: Sequence[Tool], new_id: IdSource) -> None:
        super().__init__(tools, new_id)
        self._phase = self._beginning
        self._raw = ""
        self._call = self._envelope()

    def _envelope(self) -> CallEnvelope:
        return CallEnvelope(self._names, self._begin_call, self._argue)

    def _beginning(self) -> bool:
        rest = self._buffer.lstrip()
        if rest.startswith(TAG):
            self._raw, self._buffer = self._buffer[: -len(rest)] + TAG, rest[len(TAG) :]
            self._phase = self._inside
            return True
        if TAG.startswith(rest) and not self._ended:
            return False
        self._phase = self._inside if rest.startswith("{") else self._content
        return True

    def _inside(self) -> bool:
        used = self._call.feed(self._buffer)
        self._raw += self._buffer[:used]
        self._buffer = self._buffer[used:]
        if self._call.status is Status.OPEN:
            return False
        if self._call.status is Status.DONE:
            self._phase = self._between
        else:
            self._not_a_call()
        return True

    def _between(self) -> bool:
        rest = self._buffer.lstrip()
        following = rest[1:].lstrip()
        if rest.startswith(";") and following.startswith("{"):
            self._raw, self._buffer = ";", rest[1:]
            self._call = self._envelope()
            self._phase = self._inside
            return True
        if rest in ("", ";") or (rest.startswith(";") and not following):
            return False
        self._phase = self._content
        return True

    def _not_a_call(self) -> None:
        if not self._call.begun:
            self._say(self._raw)
        self._raw = ""
        self._phase = self._content

    def _give_up(self) -> None:
        if self._phase == self._inside:
            self._not_a_call()
