"""The whole answer as a fold over its chunks, and the rules of which fields are null and which are absent.

Takes exactly the chunks a stream would send, so the two can't drift apart.
"""

from collections.abc import Sequence
from typing import Any

from server.openai.generation import Choice
from server.openai.wire import Chunk


class Fold:
    """Joins chunks to choices; `fields` collects what the chunks carried beside them."""

    def __init__(self, *, has_logprobs: bool) -> None:
        self.fields: dict[str, Any] = {}
        self._has_logprobs = has_logprobs
        self._choices: dict[int, dict[str, Any]] = {}

    def add(self, chunk: Chunk) -> None:
        """Take the next chunk."""
        self.fields.update(chunk.fields)
        for part in chunk.choices:
            whole = self._choices.get(part["index"])
            if whole is None:
                whole = self._choices[part["index"]] = self._empty(part)
            _merge(whole, part)

    def choices(self) -> list[dict[str, Any]]:
        """The finished choices in order."""
        return [_finished(self._choices[index]) for index in sorted(self._choices)]

    def _empty(self, part: dict[str, Any]) -> dict[str, Any]:
        if "text" in part:
            logprobs: dict[str, list[Any]] = {
                name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
            }
            return {"index": part["index"], "text": [], "logprobs": logprobs if self._has_logprobs else None}
        content: dict[str, Any] | None = {"content": [], "refusal": None} if self._has_logprobs else None
        message = {"role": "assistant", "content": [], "reasoning_content": [], "tool_calls": []}
        return {"index": part["index"], "message": message, "logprobs": content}


def _merge(whole: dict[str, Any], part: dict[str, Any]) -> None:
    for name, value in part.items():
        if name == "text":
            whole["text"].append(value)
        elif name == "delta":
            _merge_delta(whole["message"], value)
        elif name == "logprobs":
            for key, entries in (value or {}).items():
                if isinstance(entries, list):
                    whole["logprobs"][key].extend(entries)
        elif name == "token_ids":
            whole.setdefault("token_ids", []).extend(value)
        elif name != "index":
            whole[name] = value


def _merge_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name in ("content", "reasoning_content"):
        if delta.get(name):
            message[name].append(delta[name])
    for call in delta.get("tool_calls", ()):
        calls = message["tool_calls"]
        if call["index"] == len(calls):
            function = {"name": call["function"]["name"], "arguments": []}
            calls.append({"id": call["id"], "type": call["type"], "function": function})
        calls[call["index"]]["function"]["arguments"].append(call["function"]["arguments"])


def _finished(whole: dict[str, Any]) -> dict[str, Any]:
    """Lists of pieces become text. Null though present: content beside calls, refusal, logprobs. Absent when empty:
    reasoning and tool calls."""
    if "text" in whole:
        return {**whole, "text": "".join(whole["text"])}
    parts = whole["message"]
    content, calls = "".join(parts["content"]), parts["tool_calls"]
    message: dict[str, Any] = {"role": parts["role"], "content": content or (None if calls else ""), "refusal": None}
    if parts["reasoning_content"]:
        message["reasoning_content"] = "".join(parts["reasoning_content"])
    if calls:
        message["tool_calls"] = [_finished_call(call) for call in calls]
    return {**whole, "message": message}


def _finished_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {"name": function["name"], "arguments": "".join(function["arguments"])}}


def best_of(
    choices: Sequence[dict[str, Any]], drawn: Sequence[Sequence[Choice]], num_choices: int
) -> list[dict[str, Any]]:
    """Of each prompt's drawn choices the `num_choices` with the highest mean logprob, best first, newly numbered."""
    kept: list[dict[str, Any]] = []
    for group in drawn:
        ranked = sorted(group, key=lambda choice: choice.score, reverse=True)[:num_choices]
        kept += [{**choices[choice.index], "index": len(kept) + rank} for rank, choice in enumerate(ranked)]
    return kept
