"""Tools to call, and a reader that joins what a tool-call router gives, as a client would."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from server.text.pieces import TextPieces
from server.text.tools.dialect import Tool, ToolDialect
from server.text.tools.registry import dialect_names, select_dialect

WEATHER = Tool(
    "get_weather",
    "Weather of a city.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Zürich", "東京", "Oslo"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 7},
            "unit": {"$ref": "#/$defs/unit"},
        },
        "required": ["city", "days"],
        "$defs": {"unit": {"enum": ["celsius", "fahrenheit"]}},
    },
    strict=True,
    path="tools.0.function.parameters",
)
CLOCK = Tool("get_time", None, {}, path="tools.1.function.parameters")
NOTE = Tool(
    "note",
    "Write something down.",
    {"type": "object", "properties": {"my-text": {"type": "string", "maxLength": 4}}, "required": ["my-text"]},
    path="tools.2.function.parameters",
)
TOOLS = (WEATHER, CLOCK, NOTE)


def dialects() -> list[ToolDialect]:
    return [select_dialect(name, None) for name in dialect_names()]


@dataclass
class Answer:
    """What a client has put together."""

    content: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    """(id, name, arguments)"""

    def take(self, pieces: TextPieces) -> None:
        self.content += pieces.content
        for delta in pieces.tool_calls:
            if delta.call_id is not None:
                assert delta.index == len(self.calls), "calls come in order"
                assert delta.name is not None, "a call's first delta names it"
                self.calls.append((delta.call_id, delta.name, delta.arguments))
            else:
                assert delta.index == len(self.calls) - 1, "fragments belong to the latest call"
                assert delta.name is None, "a call is named once"
                call_id, name, arguments = self.calls[-1]
                self.calls[-1] = (call_id, name, arguments + delta.arguments)

    @property
    def named_arguments(self) -> list[tuple[str, str]]:
        return [(name, arguments) for _, name, arguments in self.calls]


def read(dialect: ToolDialect, parts: Iterable[str], tools: Iterable[Tool] = TOOLS) -> Answer:
    numbers = itertools.count()
    router = dialect.router(tuple(tools), new_id=lambda: f"call_{next(numbers)}")
    answer = Answer()
    for part in parts:
        answer.take(router.push(part))
    answer.take(router.flush())
    return answer
