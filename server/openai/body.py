"""From the bytes of a body to a checked model, or to a 400 that names the field.

Knows JSON and its traps: non-finite numbers, lone surrogates, bottomless nesting. Large bodies are read in a thread.
"""

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect, Request

from server.errors import ApiError, bad_request
from server.openai.schema.base import REFUSED, Wire

MAX_DEPTH = 100
"""Nesting levels of a body: far more than any schema needs, far fewer than any recursion here could stand."""

THREAD_BYTES = 1 << 16
"""Bodies above this are decoded off the event loop."""

W = TypeVar("W", bound=Wire)


class ClientGone(Exception):
    """The client left before its body had come."""


async def read_body(request: Request, model: type[W]) -> W:
    """The request's body as a `model`.

    Raises:
        ApiError: 415 for another media type, 413 when too large, 400 for everything wrong with the content.
        ClientGone: the connection ended first.
    """
    _check_media_type(request.headers.get("content-type"), request.headers.get("content-encoding", "identity"))
    try:
        raw = await request.body()
    except ClientDisconnect as error:
        raise ClientGone from error
    if len(raw) > THREAD_BYTES:
        return await asyncio.to_thread(decode, raw, model)
    return decode(raw, model)


def _check_media_type(value: str | None, encoding: str) -> None:
    if encoding.strip().lower() != "identity":
        message = f"The body must not be compressed, and this one's Content-Encoding is {encoding}."
        raise ApiError(415, message, code="unsupported_media_type")
    kind = (value or "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        message = f"The body must be JSON (Content-Type: application/json), not {kind}."
        raise ApiError(415, message, code="unsupported_media_type")


def decode(raw: bytes, model: type[W]) -> W:
    """`raw` as a `model`. Raises ApiError (400)."""
    data = _parse(raw)
    if not isinstance(data, dict):
        raise bad_request(f"The body must be a JSON object, not {_json_type(data)}.")
    _check_tree(data)
    _refuse_known(data, model)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _explain(error, data) from None


def _parse(raw: bytes) -> Any:
    try:
        return json.loads(raw, parse_constant=_refuse_constant)
    except RecursionError:
        raise bad_request(f"The body is nested more than {MAX_DEPTH} levels deep.") from None
    except ValueError as error:  # wrong JSON, wrong UTF-8, numbers of thousands of digits
        raise bad_request(f"The body is not valid JSON: {error}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _check_tree(data: dict[str, Any]) -> None:
    """Refuse what JSON's grammar lets through: deep nesting, 1e999, half a surrogate pair. No recursion."""
    level: list[tuple[str, Any]] = [("", data)]
    for _ in range(MAX_DEPTH):
        level = [child for path, node in level for child in _containers(path, node)]
        if not level:
            return
    raise bad_request(f"The body is nested more than {MAX_DEPTH} levels deep.", level[0][0].split(".")[0])


def _containers(path: str, node: Any) -> Iterator[tuple[str, Any]]:
    """The containers directly inside `node`; its other values are checked here."""
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in items:
        kind = type(value)
        if kind is int or value is None:  # by far the most frequent: token ids
            continue
        where = f"{path}.{key}" if path else str(key)
        if kind is str or kind is float:
            _check_leaf(where, value)
        elif kind is dict or kind is list:
            yield where, value
    if isinstance(node, dict):
        for key in node:
            _check_leaf(path or "body", key)


def _check_leaf(path: str, value: Any) -> None:
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            raise bad_request(f"{path} holds half a surrogate pair, which is no text.", _printable(path))
    elif not math.isfinite(value):
        raise bad_request(f"{path} must be a finite number.", _printable(path))


def _printable(path: str) -> str:
    return path.encode("ascii", "backslashreplace").decode()


def _refuse_known(data: dict[str, Any], model: type[Wire]) -> None:
    for name, (harmless, why) in REFUSED.items():
        if name not in model.model_fields and data.get(name) not in (None, harmless):
            raise bad_request(f"{name} is not supported: {why}.", name)


def _json_type(value: Any) -> str:
    names = {str: "a string", list: "a list", bool: "a boolean", int: "a number", float: "a number", dict: "an object"}
    return names.get(type(value), "null")


def _explain(error: ValidationError, data: dict[str, Any]) -> ApiError:
    """The most telling of pydantic's errors: of a union's branches, the one that got furthest."""
    details = error.errors(include_url=False)
    first_field = details[0]["loc"][:1]
    same_field = [item for item in details if item["loc"][:1] == first_field]
    worst = max(same_field, key=lambda item: len(_path(item, data)))
    path = ".".join(map(str, _path(worst, data)))
    rivals = [item for item in same_field if _path(item, data) == _path(worst, data)]
    return bad_request(f"{path or 'The body'}: {_reason(worst, rivals)}", path or None)


def _path(item: ErrorDetails, data: Any) -> list[str | int]:
    """Where in the body the error is: pydantic's location without the names of union branches."""
    path: list[str | int] = []
    node = data
    for index, key in enumerate(item["loc"]):
        if _has(node, key):
            node = node[key]
        elif not (item["type"] == "missing" and index == len(item["loc"]) - 1):
            continue
        path.append(key)
    return path


def _has(node: Any, key: str | int) -> bool:
    if isinstance(node, list):
        return isinstance(key, int) and 0 <= key < len(node)
    return isinstance(node, dict) and key in node


def _reason(item: ErrorDetails, rivals: list[ErrorDetails]) -> str:
    context = item.get("ctx", {})
    if item["type"] == "union_tag_invalid":
        return f"unknown {context['discriminator']} {context['tag']!r}; expected one of {context['expected_tags']}"
    if item["type"] == "union_tag_not_found":
        return f"{context['discriminator']} is missing or no string"
    if item["type"] == "value_error":
        return str(context["error"])
    messages = dict.fromkeys(rival["msg"] for rival in rivals)
    return ", or ".join(messages)
