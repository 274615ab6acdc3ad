"""How a field's row is registered, and what rows share: asking either endpoint and reading its answer."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

from tests.server.conftest import Bench, text_of

Row = Callable[[Bench, str], Awaitable[None]]
ROWS: dict[tuple[str, str], Row] = {}
KINDS = ("chat", "completion")


def row(*fields: str, kinds: tuple[str, ...] = KINDS) -> Callable[[Row], Row]:
    """Registers the proof of a field, for both endpoints unless told otherwise."""

    def register(function: Row) -> Row:
        for kind in kinds:
            for name in fields:
                assert ROWS.setdefault((kind, name), function) is function, f"two rows for {name}"
        return function

    return register


def chat_row(*fields: str) -> Callable[[Row], Row]:
    return row(*fields, kinds=("chat",))


def completion_row(*fields: str) -> Callable[[Row], Row]:
    return row(*fields, kinds=("completion",))


async def ask(bench: Bench, kind: str, text: Any = "SAY:hello|", **fields: Any) -> Any:
    return await (bench.chat if kind == "chat" else bench.complete)(text, **fields)


async def said(bench: Bench, kind: str, text: str = "SAY:hello|", **fields: Any) -> str:
    return text_of(await ask(bench, kind, text, **fields))


async def body(bench: Bench, kind: str, text: Any = "SAY:hello|", **fields: Any) -> dict[str, Any]:
    answer = await ask(bench, kind, text, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def prompt_of(bench: Bench, kind: str, text: Any = "SAY:hello|", **fields: Any) -> str:
    """The prompt as the engine saw it."""
    answer = await body(bench, kind, text, return_token_ids=True, max_tokens=1, **fields)
    ids = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
    return bench.state.served.tokenizer.decode(ids, skip_special_tokens=False)


async def stream(bench: Bench, kind: str, **fields: Any) -> list[Any]:
    path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
    prompt = {"messages": [{"role": "user", "content": "SAY:hello|"}]} if kind == "chat" else {"prompt": "SAY:hello|"}
    return await bench.events(path, {"temperature": 0, **prompt, **fields})


def names(answer: dict[str, Any]) -> set[str]:
    return {warning["param"] for warning in answer.get("warnings", [])}


def counts(answer: dict[str, Any]) -> list[int]:
    return [answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")]


SCHEMA = {
    "type": "object",
    "properties": {"v": {"enum": ["yes", "no"]}},
    "required": ["v"],
    "additionalProperties": False,
}


def fits(text: str) -> bool:
    return json.loads(text) in ({"v": "yes"}, {"v": "no"})


def tool(name: str) -> dict[str, Any]:
    city = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
    parameters = {**city, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


def calls_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return answer["choices"][0]["message"].get("tool_calls", [])
