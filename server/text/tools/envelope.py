"""One call written as a JSON object with a name and arguments, read while it is being written.

Knows: `{"name": "f", "arguments": {...}}` and its variants. Refuses to know: what stands around it.
"""

import json
import re
from collections.abc import Callable, Collection
from typing import Any

from server.text.tools.scan import JsonScanner, Status

_KEY = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
_SURROGATE = re.compile("[\ud800-\udfff]")
_ARGUMENTS = frozenset({"arguments", "parameters"})
_OTHERS = frozenset({"id", "type"})
_SPACE = " \t\n\r"

Begin = Callable[[str], None]
Argue = Callable[[str], None]


class CallEnvelope:
    """Reads one call object and reports it as it becomes certain.

    `begin(name)` is told once, when the name is known to be a declared tool and the arguments are known to start as an
    object; from then on the call stands (`begun`), and `argue(text)` gets the arguments' JSON text exactly as written,
    as long as it can be valid JSON. Before that nothing is told, and a bad call leaves no trace. Arguments given as a
    JSON string that holds an object are unwrapped; null or missing ones are `{}`.
    """

    def __init__(self, names: Collection[str], begin: Begin, argue: Argue) -> None:
        self.status = Status.OPEN
        self.begun = False
        self._names = names
        self._begin = begin
        self._argue = argue
        self._buffer = ""
        self._step: Callable[[], bool] = self._brace
        self._key = ""
        self._name: str | None = None
        self._arguments: str | None = None
        self._scanner = JsonScanner()
        self._value = ""

    def feed(self, text: str) -> int:
        """Take text; give how much of it was used: all of it unless the object ended or went bad inside it."""
        self._buffer += text
        while self.status is Status.OPEN and self._step():
            pass
        if self.status is Status.OPEN:
            return len(text)
        return max(0, len(text) - len(self._buffer))

    def _brace(self) -> bool:
        return self._expect({"{": self._key_or_end})

    def _key_or_end(self) -> bool:
        self._skip_space()
        if self._buffer.startswith("}"):
            return self._expect({"}": self._finish})
        return self._read_key()

    def _read_key(self) -> bool:
        self._skip_space()
        if not self._buffer:
            return False
        match = _KEY.match(self._buffer)
        if match is None:
            whole = any(key.startswith(self._buffer) for key in ('"name"', *(f'"{k}"' for k in _ARGUMENTS | _OTHERS)))
            return False if whole else self._bad()
        self._key = match.group()[1:-1]
        if self._key not in _ARGUMENTS | _OTHERS | {"name"} or (self._key == "name" and self._name is not None):
            return self._bad()
        if self._key in _ARGUMENTS and self._arguments is not None:
            return self._bad()
        self._buffer = self._buffer[match.end() :]
        self._step = self._colon
        return True

    def _colon(self) -> bool:
        return self._expect({":": self._start_value})

    def _start_value(self) -> bool:
        self._skip_space()
        if not self._buffer:
            return False
        self._scanner = JsonScanner()
        self._value = ""
        streams = self._key in _ARGUMENTS and self._name is not None and self._buffer[0] == "{"
        if streams:
            self._commit()
        self._step = self._stream_arguments if streams else self._read_value
        return True

    def _stream_arguments(self) -> bool:
        used = self._scanner.feed(self._buffer)
        if used:
            self._argue(self._buffer[:used])
        self._buffer = self._buffer[used:]
        self._arguments = ""
        return self._after_scan()

    def _read_value(self) -> bool:
        used = self._scanner.feed(self._buffer)
        self._value += self._buffer[:used]
        self._buffer = self._buffer[used:]
        if self._scanner.status is Status.DONE and not self._keep_value():
            return self._bad()
        return self._after_scan()

    def _after_scan(self) -> bool:
        if self._scanner.status is Status.BAD:
            return self._bad()
        if self._scanner.status is Status.DONE:
            self._step = self._comma_or_end
            return True
        return False

    def _keep_value(self) -> bool:
        """Remember the value just read; False when it can't belong to a call."""
        if self._key == "name":
            name = _loads(self._value)
            self._name = name if isinstance(name, str) else None
            return self._name in self._names
        if self._key in _ARGUMENTS:
            self._arguments = object_text(self._value)
            return self._arguments is not None
        return True

    def _comma_or_end(self) -> bool:
        return self._expect({",": self._read_key, "}": self._finish})

    def _finish(self) -> bool:
        if not self.begun:
            if self._name is None:
                return self._bad()
            self._commit()
            self._argue(self._arguments or "{}")
        self.status = Status.DONE
        return False

    def _commit(self) -> None:
        assert self._name is not None, "only a call with a name stands"
        self.begun = True
        self._begin(self._name)

    def _expect(self, chars: dict[str, Callable[[], bool]]) -> bool:
        """Skip space and one of these characters, and go on with its step."""
        self._skip_space()
        if not self._buffer:
            return False
        step = chars.get(self._buffer[0])
        if step is None:
            return self._bad()
        self._buffer = self._buffer[1:]
        self._step = step
        return True

    def _skip_space(self) -> None:
        self._buffer = self._buffer.lstrip(_SPACE)

    def _bad(self) -> bool:
        self.status = Status.BAD
        return False


def object_text(value: str) -> str | None:
    """The JSON object an arguments value means: itself, unwrapped from a string, `{}` for null; else None."""
    parsed = _loads(value)
    if isinstance(parsed, dict):
        return value
    if parsed is None:
        return "{}" if value == "null" else None
    is_object = isinstance(parsed, str) and isinstance(_loads(parsed), dict)
    return parsed if is_object and not _SURROGATE.search(parsed) else None


def _loads(text: str) -> Any:
    """The JSON value, None also for what Python can't hold: too deep, a number of thousands of digits."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
