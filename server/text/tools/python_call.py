"""One Python call in generated text: where it ends, and its keyword arguments as JSON.

Knows: Python's literals (and JSON's true, false, null, which models mix in). Runs nothing. Refuses to know: tools.
"""

import ast
import json
import math
import re
from typing import Any

from server.text.tools.scan import Status

_HEAD = re.compile(r"\s*[A-Za-z_][A-Za-z0-9_.-]*\s*\(")
_MAYBE_HEAD = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_.-]*\s*)?")
_PAIRS = {")": "(", "]": "[", "}": "{"}
_JSON_WORDS = {"true": True, "false": False, "null": None}


class CallScanner:
    """Follows the text of one call from its name to its closing parenthesis, over strings and brackets."""

    def __init__(self) -> None:
        self.status = Status.OPEN
        self.text = ""
        self._open: list[str] = []
        self._quote = ""
        self._escaped = False

    def feed(self, text: str) -> int:
        """Take text; give how much was used: all of it unless the call ended or went bad inside it."""
        for used, char in enumerate(text):
            self._take(char)
            if self.status is Status.BAD:
                return used
            self.text += char
            if self.status is Status.DONE:
                return used + 1
        return len(text)

    def _take(self, char: str) -> None:
        if self._quote:
            self._in_string(char)
        elif not self._open:
            self._in_head(char)
        elif char in "'\"":
            self._quote = char
        elif char in "([{":
            self._open.append(char)
        elif char in _PAIRS:
            if self._open.pop() != _PAIRS[char]:
                self.status = Status.BAD
            elif not self._open:
                self.status = Status.DONE

    def _in_head(self, char: str) -> None:
        head = self.text + char
        if _HEAD.fullmatch(head):
            self._open.append("(")
        elif _MAYBE_HEAD.fullmatch(head) is None:
            self.status = Status.BAD

    def _in_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == self._quote:
            self._quote = ""


def parse_call(text: str) -> tuple[str, str] | None:
    """The name and the arguments as a JSON object, or None when it is no call with literal keyword arguments."""
    name, _, rest = text.strip().partition("(")
    try:
        tree = ast.parse(f"f({rest}", mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args:
            return None
        arguments: dict[str, Any] = {}
        for keyword in tree.keywords:
            value = _literal(keyword.value)
            arguments |= {keyword.arg: value} if keyword.arg is not None else _mapping(value)
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        written.encode()  # a lone surrogate can't be sent: refused here, as a ValueError
        return name.strip(), written
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("only a mapping can be unpacked")
    return value


def _literal(node: ast.expr) -> Any:
    """The value of a literal expression. ValueError for anything that is not plain data."""
    match node:
        case ast.Constant(value=str() | bool() | int() | None):
            return node.value
        case ast.Constant(value=float() as number) if math.isfinite(number):
            return number
        case ast.Name(id=word) if word in _JSON_WORDS:
            return _JSON_WORDS[word]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_literal(element) for element in elements]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _literal(value) for key, value in zip(keys, values, strict=True)}
    raise ValueError("not plain data")


def _key(node: ast.expr | None) -> str:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        raise ValueError("keys of an object are strings")
    return node.value
