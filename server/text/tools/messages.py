"""Rewriting chat messages so that a template can show tool calls and their results.

Knows: the message form of the chat API. Refuses to know: templates, and how any model writes a call.
"""

import json
from collections.abc import Sequence
from typing import Any

from server.text.tools.dialect import Message


def with_parsed_arguments(messages: Sequence[Message]) -> list[Message]:
    """The messages with each call's arguments as an object, which templates serialise themselves.

    Arguments that are no JSON object stay the text they were.
    """
    return [_parsed(message) for message in messages]


def text_of(content: Any) -> str:
    """A content value as text: a string, null, or a list of text parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(part if isinstance(part, str) else part.get("text", "") for part in content)
    return ""


def calls_of(message: Message) -> list[dict[str, Any]]:
    """The `{name, arguments}` of a message's calls."""
    return [call["function"] for call in message.get("tool_calls") or ()]


def arguments_object(arguments: Any) -> Any:
    """Arguments as an object where they are one, given as an object or as JSON text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _parsed(message: Message) -> Message:
    if not message.get("tool_calls"):
        return dict(message)
    calls = []
    for call in message["tool_calls"]:
        function = call["function"] | {"arguments": arguments_object(call["function"].get("arguments"))}
        calls.append(call | {"function": function})
    return message | {"tool_calls": calls}
