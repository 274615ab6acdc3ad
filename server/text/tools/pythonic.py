"""Calls as a Python list, as Llama 3.2 and Llama 4 write them: the whole answer is `[f(a=1), g(b="x")]`.

Arguments become JSON when a call is complete, so they come in one piece. An answer that begins otherwise is content.
"""

from collections.abc import Sequence

from server.text.grammar_spec import EmbeddedSchema, GrammarSpec
from server.text.pieces import TextRouter
from server.text.tools.dialect import IdSource, Message, Tool, ToolChoice, new_call_id
from server.text.tools.grammar import constrained_tools, repeated, start_rule, with_answer
from server.text.tools.messages import with_parsed_arguments
from server.text.tools.python_call import CallScanner, parse_call
from server.text.tools.python_grammar import call_rules
from server.text.tools.router import PhasedRouter
from server.text.tools.scan import Status

START = "<|python_start|>"
END = "<|python_end|>"


class PythonicDialect:
    """Calls in Python's own syntax."""

    name = "pythonic"
    needs_prompt = False
    shows_special_tokens = True
    opening = None

    def render_messages(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """The messages with parsed arguments; the template writes the tools."""
        return with_parsed_arguments(messages)

    def grammar(
        self, tools: Sequence[Tool], choice: ToolChoice, parallel: bool, answer: EmbeddedSchema | None = None
    ) -> GrammarSpec | None:
        """A list of calls, or else text that does not begin like one (JSON never does: no value goes on with a `(`)."""
        used = constrained_tools(tools, choice, parallel, answer)
        if not used:
            return None
        calls = f'"[" {repeated("call", ", ", choice, parallel)} "]"'
        start = start_rule(calls, choice, answer, f"OTHER | {calls}")
        rules, schemas = call_rules(used, choice)
        text = "\n".join([start, "OTHER: /(\\s*[^\\[\\s](.|\\n)*)?/", *rules])
        return GrammarSpec("structural", text, with_answer(schemas, answer))

    def router(self, tools: Sequence[Tool], *, new_id: IdSource = new_call_id) -> TextRouter:
        """Reads calls from the answer's beginning."""
        return PythonicRouter(tools, new_id)


class PythonicRouter(PhasedRouter):
    """Reads a list of calls; the first thing that is none, and everything after it, is content."""

    def __init__(self, tools: Sequence[Tool], new_id: IdSource) -> None:
        super().__init__(tools, new_id)
        self._phase = self._beginning
        self._raw = ""
        self._call = CallScanner()
        self._marked = False

    def _beginning(self) -> bool:
        rest = self._buffer.lstrip()
        if START.startswith(rest) and rest != START and not self._ended:
            return False
        if rest.startswith((START, "[")):
            size = len(self._buffer) - len(rest) + (len(START) if rest.startswith(START) else 1)
            self._eat(size)
            self._phase = self._element if rest[0] == "[" else self._bracket
        else:
            self._phase = self._content
        return True

    def _bracket(self) -> bool:
        rest = self._buffer.lstrip()
        if not rest:
            return False
        self._marked = True
        if rest[0] == "[":
            self._eat(len(self._buffer) - len(rest) + 1)
            self._phase = self._element
        else:
            self._not_a_call()
        return True

    def _element(self) -> bool:
        used = self._call.feed(self._buffer)
        self._raw += self._buffer[:used]
        self._buffer = self._buffer[used:]
        if self._call.status is Status.OPEN:
            return False
        call = parse_call(self._call.text) if self._call.status is Status.DONE else None
        if call is None or call[0] not in self._names:
            self._not_a_call()
            return True
        self._begin_call(call[0])
        self._argue(call[1])
        self._raw = ""
        self._phase = self._after_element
        return True

    def _after_element(self) -> bool:
        rest = self._buffer.lstrip()
        if not rest:
            return False
        self._call = CallScanner()
        if rest[0] == ",":
            self._raw, self._buffer = ",", rest[1:]
            self._phase = self._element
        else:
            self._buffer = rest[1:] if rest[0] == "]" else rest
            self._phase = self._ending
        return True

    def _ending(self) -> bool:
        """Behind the list a closing marker may follow; all else is content."""
        rest = self._buffer.lstrip()
        if self._marked and END.startswith(rest) and rest != END:
            self._buffer = "" if self._ended else self._buffer
            return False
        self._buffer = rest.removeprefix(END) if self._marked else self._buffer
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
        if self._phase in (self._bracket, self._element):
            raw, self._buffer = self._raw + self._buffer, ""
            self._say(raw)
