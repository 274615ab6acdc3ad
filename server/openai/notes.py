"""What of a request was not taken as given: ignored, clamped or decided fields, and how they are reported.

Every such field is told to the client, as `warnings` in the body and (for ignored ones) in a header; a strict server
refuses the request instead. Knows field names and values; refuses to know what they would have done.
"""

import json
from collections.abc import Mapping
from typing import Any

from server.errors import bad_request

MAX_SHOWN = 200  # characters of a value in a warning
MAX_HEADER_NAMES = 50


class Notes:
    """Collects notes on one request.

    With `strict` the first note becomes a 400 that names the field.
    """

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._ignored: list[str] = []
        self.warnings: list[dict[str, Any]] = []

    def ignored(self, param: str, given: Any, why: str) -> None:
        """`param` has no effect."""
        self._ignored.append(param)
        self.changed(param, given, None, why)

    def changed(self, param: str, given: Any, used: Any, why: str) -> None:
        """`used` was used instead of `given`."""
        if self._strict:
            raise bad_request(f"{param}: {why} (this server runs with --strict-params).", param)
        self.warnings.append({"param": param, "given": _shown(given), "used": used, "why": why})

    def unknown(self, fields: Mapping[str, Any]) -> None:
        """Fields that nobody declared, each path with what was given."""
        for name, given in fields.items():
            self.ignored(name, given, "unknown field")

    def headers(self) -> dict[str, str]:
        """`x-ignored-params`, when there is something to say. Names are made safe for a header."""
        names = [name.encode("ascii", "backslashreplace").decode() for name in self._ignored[:MAX_HEADER_NAMES]]
        safe = ["".join(char if char.isprintable() and char != "," else "_" for char in name) for name in names]
        return {"x-ignored-params": ",".join(name[:100] for name in safe)} if safe else {}


def _shown(value: Any) -> Any:
    """The value as it was given, or the beginning of its text or JSON when that is long."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return value if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
