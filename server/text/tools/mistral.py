"""Mistral: `[TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]`; later models `[TOOL_CALLS]f[ARGS]{...}`, repeated.

The marker is a special token. Templates want call ids of nine letters and digits, so ids from elsewhere are shortened.
"""

import hashlib
import re
import secrets
from collections.abc import Sequence

from server.text.grammar_spec import EmbeddedSchema, GrammarSpec, Marker, lark_quote
from server.text.pieces import TextRouter
from server.text.tools.dialect import MAX_PARALLEL_CALLS, IdSource, Message, Tool, ToolChoice
from server.text.tools.envelope import CallEnvelope
from server.text.tools.grammar import (
    alternatives,
    constrained_tools,
    embedded_arguments,
    named_object,
    repeated,
    start_rule,
    with_answer,
)
from server.text.tools.messages import with_parsed_arguments
from server.text.tools.router import PhasedRouter
from server.text.tools.scan import JsonScanner, Status, held_suffix

CALLS = "[TOOL_CALLS]"
ARGS = "[ARGS]"
_ID = re.compile(r"[a-zA-Z0-9]{9}")
_NAME = re.compile(r"[A-Za-z0-9_.-]*")


def new_mistral_id() -> str:
    """A fresh call id of the nine letters and digits that the templates ask for."""
    return secrets.token_hex(5)[:9]


class MistralDialect:
    """`compact` models write name and arguments one after the other, the others a JSON array."""

    needs_prompt = False
    shows_special_tokens = True
    opening = CALLS

    def __init__(self, compact: bool = False) -> None:
        self.name = "mistral_args" if compact else "mistral"
        self._compact = compact

    def render_messages(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """The messages with parsed arguments and ids of the template's form."""
        return [_with_short_ids(message) for message in with_parsed_arguments(messages)]

    def grammar(
        self, tools: Sequence[Tool], choice: ToolChoice, parallel: bool, answer: EmbeddedSchema | None = None
    ) -> GrammarSpec | None:
        """The marker and calls, or free text that turns into calls with the marker, or calls or else `answer`."""
        used = constrained_tools(tools, choice, parallel, answer)
        if not used:
            return None
        several = parallel and choice.mode != "named"
        if self._compact:
            calls = "object" + (f" (open object){{0,{MAX_PARALLEL_CALLS - 1}}}" if several else "")
            one = alternatives("object", used, lambda i, tool: f"{lark_quote(tool.name)} args args_{i}")
        else:
            calls = f'" "? "[" {repeated("object", ", ", choice, parallel)} "]"'
            one = alternatives("object", used, named_object("arguments"))
        start = start_rule(f"open {calls}", choice, answer, f"TEXT | open_lead {calls}")
        schemas = with_answer(embedded_arguments(used, choice), answer)
        return GrammarSpec("structural", f"{start}\n{one}", schemas, (Marker("open", CALLS), Marker("args", ARGS)))

    def router(self, tools: Sequence[Tool], *, new_id: IdSource = new_mistral_id) -> TextRouter:
        """Finds the marker, then reads either form."""
        return MistralRouter(tools, new_id)


def _with_short_ids(message: Message) -> Message:
    if message.get("tool_call_id"):
        return message | {"tool_call_id": _short_id(message["tool_call_id"])}
    if message.get("tool_calls"):
        calls = [call | {"id": _short_id(call["id"])} if call.get("id") else call for call in message["tool_calls"]]
        return message | {"tool_calls": calls}
    return message


def _short_id(call_id: str) -> str:
    """The id itself where it has the template's form, else nine digits that stand for it wherever it occurs."""
    return call_id if _ID.fullmatch(call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]


class MistralRouter(PhasedRouter):
    """Content until the marker, then calls; what can't be a call is content again."""

    def __init__(self, tools: Sequence[Tool], new_id: IdSource) -> None:
        super().__init__(tools, new_id)
        self._raw = ""
        self._call = self._envelope()
        self._scanner = JsonScanner()

    def _envelope(self) -> CallEnvelope:
        return CallEnvelope(self._names, self._begin_call, self._argue)

    def _content(self) -> bool:
        before, marker, after = self._buffer.partition(CALLS)
        if marker:
            self._say(before)
            self._raw, self._buffer = marker, after
            self._phase = self._opened
            return True
        decided = len(self._buffer) - (0 if self._ended else held_suffix(self._buffer, (CALLS,)))
        self._say(self._buffer[:decided])
        self._buffer = self._buffer[decided:]
        return False

    def _opened(self) -> bool:
        rest = self._buffer.lstrip()
        if not rest:
            return False
        if rest[0] == "[":
            self._eat(len(self._buffer) - len(rest) + 1)
            self._call = self._envelope()
            self._phase = self._element
        else:
            self._phase = self._name
        return True

    def _element(self) -> bool:
        self._eat(self._call.feed(self._buffer))
        if self._call.status is Status.OPEN:
            return False
        if not self._call.begun:
            self._not_a_call()
        else:
            self._phase = self._after_element if self._call.status is Status.DONE else self._content
        return True

    def _after_element(self) -> bool:
        rest = self._buffer.lstrip()
        if not rest:
            return False
        if rest[0] == ",":
            self._raw, self._buffer = ",", rest[1:]
            self._call = self._envelope()
            self._phase = self._element
        else:
            self._buffer = rest[1:] if rest[0] == "]" else rest
            self._phase = self._content
        return True

    def _name(self) -> bool:
        match = _NAME.match(self._buffer.lstrip())
        assert match is not None, "the pattern matches the empty text too"
        rest = self._buffer.lstrip()[match.end() :]
        behind = rest.removeprefix(ARGS).lstrip()
        if not rest or ARGS.startswith(rest) or (rest.startswith(ARGS) and not behind):
            return False
        if match.group() in self._names and behind.startswith("{") and (rest.startswith(ARGS) or rest[0] == "{"):
            self._buffer = behind
            self._begin_call(match.group())
            self._scanner = JsonScanner()
            self._phase = self._arguments
        else:
            self._not_a_call()
        return True

    def _arguments(self) -> bool:
        used = self._scanner.feed(self._buffer)
        self._argue(self._buffer[:used])
        self._buffer = self._buffer[used:]
        if self._scanner.status is Status.OPEN:
            return False
        self._phase = self._content
        return True

    def _eat(self, size: int) -> None:
        self._raw += self._buffer[:size]
        self._buffer = self._buffer[size:]

    def _not_a_call(self) -> None:
        self._say(self._raw)
        self._raw = ""
        self._phase = self._content

    def _give_up(self) -> None:
        if self._phase in (self._opened, self._name) or (self._phase == self._element and not self._call.begun):
            raw, self._buffer = self._raw + self._buffer, ""
            self._say(raw)
